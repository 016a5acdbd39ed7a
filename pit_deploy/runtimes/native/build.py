"""Build the native runner: for Linux on ARM64 with a cross compiler, for Android with the NDK.

`python -m pit_deploy.runtimes.native.build --ndk DIR` builds the one for phones and puts it, with ONNX Runtime beside
it, where `--device` looks for it. ONNX Runtime's headers, and its library for Android, come from an npm package that
carries them; its library for Linux comes from the wheel.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from pit_deploy.errors import InputError, PitDeployError
from pit_deploy.files import atomic_output
from pit_deploy.sample import cache_folder

SOURCES = Path(__file__).with_name("cpp")
RUNNER = "pit-runner"
ANDROID = "android-arm64-v8a"
LINUX = "linux-arm64"
ORT_NPM = "com.github.asus4.onnxruntime@0.4.9"
"""Has onnxruntime.aar of ONNX Runtime 1.29: headers, and the library for Android."""
ORT_WHEEL = "onnxruntime==1.32.0"
ANDROID_PLATFORM = "android-24"
SHOWN_LINES = 5

Say = Callable[[str], None]


def runner_folder(target: str) -> Path:
    """Where the runner of `target` is kept, with libonnxruntime.so* beside it."""
    return cache_folder() / "native" / target


def build_linux(out: Path, *, say: Say = lambda text: None) -> None:
    """Build for Linux on ARM64 into the folder `out`. Raises `InputError` for a tool that is not installed."""
    need({"cmake": "cmake", "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu", "npm": "npm"})
    with tempfile.TemporaryDirectory() as work, atomic_output(out, overwrite=True) as partial:
        folder = Path(work)
        say("fetching ONNX Runtime")
        include = _archive(folder) / "headers"
        library = _wheel_library(folder)
        say("compiling the runner")
        _compile(folder, include, library, [f"-DCMAKE_TOOLCHAIN_FILE={SOURCES / 'aarch64-linux-gnu.cmake'}"])
        _collect(folder, library, "libonnxruntime.so.1", partial)


def build_android(out: Path, ndk: Path, *, say: Say = lambda text: None) -> None:
    """Build for Android (arm64-v8a) into the folder `out`. Raises `InputError` where `ndk` is no NDK."""
    toolchain = ndk / "build" / "cmake" / "android.toolchain.cmake"
    if not toolchain.is_file():
        raise InputError(
            f"{ndk} is not an Android NDK: it has no build/cmake/android.toolchain.cmake; give its folder."
        )
    need({"cmake": "cmake", "npm": "npm"})
    with tempfile.TemporaryDirectory() as work, atomic_output(out, overwrite=True) as partial:
        folder = Path(work)
        say("fetching ONNX Runtime")
        archive = _archive(folder)
        library = archive / "jni" / "arm64-v8a" / "libonnxruntime.so"
        say("compiling the runner")
        flags = [
            f"-DCMAKE_TOOLCHAIN_FILE={toolchain}",
            "-DANDROID_ABI=arm64-v8a",
            f"-DANDROID_PLATFORM={ANDROID_PLATFORM}",
            "-DANDROID_STL=c++_static",
        ]
        _compile(folder, archive / "headers", library, flags)
        _collect(folder, library, "libonnxruntime.so", partial)


def need(programs: dict[str, str]) -> None:
    """Raise `InputError` with the packages of the programs that are not installed."""
    absent = [package for program, package in programs.items() if shutil.which(program) is None]
    if absent:
        raise InputError(
            f"Some tools are not installed; run: apt-get install {' '.join(sorted(set(absent)))}"
        )


def call(command: Sequence[str | Path], *, folder: Path | None = None) -> str:
    """What a command prints; raises `PitDeployError` with its last words where it fails."""
    found = subprocess.run([str(part) for part in command], cwd=folder, capture_output=True, text=True)
    if found.returncode:
        lines = (found.stderr.strip() or found.stdout.strip()).splitlines()[-SHOWN_LINES:]
        raise PitDeployError(
            f"{' '.join(str(part) for part in command[:3])} ended with status {found.returncode}: "
            f"{' '.join(' '.join(lines).split())[:600]}"
        )
    return found.stdout


def download_wheels(folder: Path, python: str, requirements: Iterable[str]) -> list[Path]:
    """Fetch wheels for Linux on ARM64 and Python `python` (3.13, say), without what they require."""
    platforms = [f"--platform=manylinux_{tag}_aarch64" for tag in ("2_28", "2_27", "2_17")]
    call(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
         "--implementation=cp", f"--python-version={python}", *platforms, "--dest", folder, *requirements]
    )  # fmt: skip
    return sorted(folder.glob("*.whl"))


def _archive(folder: Path) -> Path:
    """ONNX Runtime's Android archive, unpacked."""
    packed = call(["npm", "pack", "--silent", ORT_NPM], folder=folder).split()[-1]
    with tarfile.open(folder / packed) as tar:
        member = tar.extractfile("package/Plugins/Android/onnxruntime.aar")
        assert member is not None
        (folder / "onnxruntime.aar").write_bytes(member.read())
    with zipfile.ZipFile(folder / "onnxruntime.aar") as archive:
        wanted = [n for n in archive.namelist() if n.startswith(("headers/", "jni/arm64-v8a/"))]
        archive.extractall(folder / "aar", wanted)
    return folder / "aar"


def _wheel_library(folder: Path) -> Path:
    wheel = download_wheels(folder / "wheels", "3.13", [ORT_WHEEL])[0]
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.startswith("onnxruntime/capi/libonnxruntime.so."))
        archive.extract(name, folder)
    # The linker notes the name that the library gives itself, and the loader looks for that.
    return (folder / name).rename(folder / "libonnxruntime.so.1")


def _compile(folder: Path, include: Path, library: Path, flags: Sequence[str]) -> None:
    build, json = folder / "build", folder / "json"
    # A copy: the other headers of its folder are this machine's, and not the target's.
    shutil.copytree(_json_include() / "nlohmann", json / "nlohmann")
    call(["cmake", "-S", SOURCES, "-B", build, f"-DORT_INCLUDE={include}", f"-DORT_LIBRARY={library}",
          f"-DJSON_INCLUDE={json}", *flags])  # fmt: skip
    call(["cmake", "--build", build])


def _json_include() -> Path:
    """nlohmann/json, which is headers alone, as a system package has it."""
    for folder in (Path("/usr/include"), Path("/usr/local/include"), Path("/opt/homebrew/include")):
        if (folder / "nlohmann" / "json.hpp").is_file():
            return folder
    raise InputError(
        "nlohmann/json is not installed; run: apt-get install nlohmann-json3-dev (brew install nlohmann-json)"
    )


def _collect(folder: Path, library: Path, name: str, out: Path) -> None:
    shutil.copy(folder / "build" / RUNNER, out / RUNNER)
    shutil.copy(library, out / name)
    (out / RUNNER).chmod(0o755)
    (out / name).chmod(0o755)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pit_deploy.runtimes.native.build", description=__doc__)
    parser.add_argument("--ndk", type=Path, help="folder of the Android NDK; without it, build for Linux")
    parser.add_argument("--out", type=Path, help="folder to write; by default where --device looks")
    given = parser.parse_args(arguments)
    out = given.out or runner_folder(LINUX if given.ndk is None else ANDROID)
    try:
        if given.ndk is None:
            build_linux(out, say=print)
        else:
            build_android(out, given.ndk, say=print)
    except PitDeployError as error:
        print(f"Error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"The runner is in {out}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
