"""Make ONNX Runtime's Android classes run on a Linux JVM, so that the app's backend can be tested without a phone.

    python tools/onnxruntime_jvm.py AAR_OR_JNI_LIBRARY OUT

npm, apt and PyPI have no ONNX Runtime for the JVM. But the AAR's x86-64 JNI library only translates calls to ONNX
Runtime's C interface, and the Python package has that library for Linux. The JNI library asks for Android's C library,
by other names: OUT gets a copy of it without symbol versions, small libraries with the names that it asks for, and the
Python package's ONNX Runtime. Start Java with -Donnxruntime.native.path=OUT and LD_LIBRARY_PATH=OUT. Needs gcc.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import onnxruntime

MEMBER = "jni/x86_64/libonnxruntime4j_jni.so"
_VERSION_TAGS = {0x6FFFFFF0, 0x6FFFFFFE, 0x6FFFFFFF}  # DT_VERSYM, DT_VERNEED, DT_VERNEEDNUM
_IGNORED_TAG = 0x15  # DT_DEBUG, which means nothing in a library
# Android's build has one function that others lack; it is called only by who asks for NNAPI.
_MISSING = (
    "void *OrtSessionOptionsAppendExecutionProvider_Nnapi(void *options, unsigned flags) { return 0; }\n"
)


def without_versions(library: bytes) -> bytes:
    """A copy of a 64-bit ELF library whose symbols are looked up by name alone."""
    if library[:6] != b"\x7fELF\x02\x01":
        raise SystemExit("the JNI library is no 64-bit little-endian ELF file.")
    data = bytearray(library)
    headers, size, count = (
        struct.unpack_from("<Q", data, 32)[0],
        *struct.unpack_from("<HH", data, 54),
    )
    for i in range(count):
        kind, _, offset, _, _, length = struct.unpack_from("<IIQQQQ", data, headers + i * size)
        if kind != 2:  # PT_DYNAMIC
            continue
        for at in range(offset, offset + length, 16):
            if struct.unpack_from("<Q", data, at)[0] in _VERSION_TAGS:
                struct.pack_into("<QQ", data, at, _IGNORED_TAG, 0)
    return bytes(data)


def build(source: Path, out: Path) -> None:
    """Fill `out`."""
    out.mkdir(parents=True, exist_ok=True)
    if zipfile.is_zipfile(source):
        with zipfile.ZipFile(source) as archive:
            library = archive.read(MEMBER)
    else:
        library = source.read_bytes()
    (out / "libonnxruntime4j_jni.so").write_bytes(without_versions(library))
    package = Path(onnxruntime.__file__).parent / "capi"
    (real,) = package.glob("libonnxruntime.so.*")
    shutil.copyfile(real, out / "libonnxruntime.so.1")  # its own name (SONAME)
    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder) / "missing.c"
        code.write_text(_MISSING)
        for name, needed in (("libc.so", "-lc"), ("libm.so", "-lm"), ("libdl.so", "-ldl")):
            _link(out / name, name, ["-Wl,--no-as-needed", needed])
        _link(
            out / "libonnxruntime.so",
            "libonnxruntime.so",
            [str(code), str(out / "libonnxruntime.so.1"), "-Wl,-rpath,$ORIGIN"],
        )


def _link(out: Path, soname: str, arguments: list[str]) -> None:
    command = [
        "gcc",
        "-shared",
        "-fPIC",
        f"-Wl,-soname,{soname}",
        "-Wl,--no-as-needed",
        "-o",
        str(out),
        *arguments,
    ]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    build(Path(sys.argv[1]), Path(sys.argv[2]))
