"""What is measured: bundles of ours, and the artifacts of llama.cpp and onnxruntime-genai beside them."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from pit_deploy.benchmark.bytes import gguf_bytes_per_token, onnx_bytes_per_token
from pit_deploy.benchmark.process import artifact_files
from pit_deploy.bundle import Bundle, sha256
from pit_deploy.errors import InputError, PitDeployError
from pit_deploy.extras import require
from pit_deploy.files import atomic_output
from pit_deploy.progress import Progress, silent
from pit_deploy.sample import cache_folder, sample_gguf

PEERS = ("llama.cpp", "genai")
VARIANTS = ("Q4_0", "Q8_0")
_TABLES = ("token_embd.weight", "output.weight")


@dataclass(frozen=True)
class Candidate:
    """An artifact to be measured; `kind` says which runtime the worker opens."""

    name: str
    kind: Literal["bundle", "llama.cpp", "genai"]
    path: Path
    precision: str
    model_bytes: int
    total_bytes: int
    weight_bytes_per_token: int | None
    context_length: int
    ids: Sequence[int]
    """Token ids of the text that it is fed."""
    notes: tuple[str, ...] = ()


def bundle_candidates(paths: Sequence[Path | str], text: str) -> list[Candidate]:
    """One candidate a bundle, called by its folder's name, or by its path where two share a name."""
    bundles = [Bundle.open(path) for path in paths]
    if not bundles:
        raise InputError("There is nothing to measure; give at least one bundle.")
    names = [bundle.path.resolve().name for bundle in bundles]
    if len({bundle.path.resolve() for bundle in bundles}) < len(bundles):
        raise InputError("A bundle is given twice; name each once.")
    return [
        _bundle_candidate(b, n if names.count(n) == 1 else str(b.path), text)
        for b, n in zip(bundles, names, strict=True)
    ]


def _bundle_candidate(bundle: Bundle, name: str, text: str) -> Candidate:
    manifest = bundle.manifest
    precision = manifest.precision
    model = bundle.model_path
    # ONNX keeps the weights beside the graph, under a name that starts with the graph's.
    sizes = [entry.size for entry in manifest.files if entry.path.startswith(manifest.model_file)]
    ids = [id for id in bundle.tokenizer.encode(text).ids if id < manifest.vocab_size]
    return Candidate(
        name=name,
        kind="bundle",
        path=bundle.path,
        precision=f"{precision.weights}, tables {precision.tables}, {manifest.layout}",
        model_bytes=sum(sizes),
        total_bytes=bundle.total_bytes,
        weight_bytes_per_token=onnx_bytes_per_token(model) if manifest.runtime == "onnx" else None,
        context_length=manifest.context_length,
        ids=ids,
    )


def llama_cpp_candidates(
    bundle: Bundle, ids: Sequence[int], gguf: Path | None = None, *, progress: Progress = silent
) -> list[Candidate]:
    """`gguf` (None: the sample's own) and its variants with Q4_0 and Q8_0 matrices, for the model of `bundle`.

    Raises `InputError` where the file holds a model of other sizes, `MissingExtraError` without the wheel.
    """
    from pit_deploy.benchmark.llama_cpp import library

    library()
    given = gguf is not None
    path = Path(gguf) if gguf is not None else sample_gguf(progress=progress)
    context = _check_gguf(path, bundle, given)
    variants = []
    for number, kind in enumerate(VARIANTS):
        progress("make GGUF variants", number, len(VARIANTS))
        variants.append(requantized_gguf(path, kind))
    progress("make GGUF variants", len(VARIANTS), len(VARIANTS))
    common = _build_note()
    made = f"made from {path.name} by the gguf package, so its rounding comes on top of that file's"
    found: list[Candidate] = []
    for file, notes in [(path, common), *((file, (made, *common)) for file in variants)]:
        precision = gguf_precision(file)
        name = f"llama.cpp {precision.split(',')[0]}"
        if name in (candidate.name for candidate in found):
            continue  # the file itself has this format
        size = file.stat().st_size
        found.append(
            Candidate(name, "llama.cpp", file, precision, size, size, gguf_bytes_per_token(file), context, ids, notes)
        )  # fmt: skip
    return found


def _build_note() -> tuple[str, ...]:
    """A prebuilt llama.cpp may leave instructions unused that the processor has and other runtimes use."""
    from pit_deploy.benchmark.llama_cpp import llama_cpp_version

    try:
        has = "avx512f" in Path("/proc/cpuinfo").read_text().split()
    except OSError:
        has = False
    if not has or "AVX512" in llama_cpp_version():
        return ()
    return ("the wheel's llama.cpp is compiled for AVX2 and does not use this processor's AVX-512",)


def gguf_precision(path: Path) -> str:
    """The commonest format of the matrices and that of the tables, as in `Q4_1, tables Q8_0`."""
    tensors = require("gguf", "onnx").GGUFReader(path).tensors
    counts: dict[str, int] = {}
    for tensor in tensors:
        if len(tensor.shape) > 1 and tensor.name not in _TABLES:
            counts[tensor.tensor_type.name] = counts.get(tensor.tensor_type.name, 0) + 1
    tables = sorted({tensor.tensor_type.name for tensor in tensors if tensor.name in _TABLES})
    return f"{max(counts, key=lambda name: counts[name])}, tables {' and '.join(tables)}"


def _check_gguf(path: Path, bundle: Bundle, given: bool) -> int:
    """The context that the model was trained for; `InputError` where its sizes are not the bundle's."""
    gguf = require("gguf", "onnx")
    if not path.is_file():
        raise InputError(f"{path} is not a file; give a .gguf file of the same model.")
    try:
        reader = gguf.GGUFReader(path)
        family = reader.fields["general.architecture"].contents()
        width, layers, context = (
            int(reader.fields[f"{family}.{key}"].contents())
            for key in ("embedding_length", "block_count", "context_length")
        )
    except (ValueError, KeyError, IndexError, OSError) as error:
        raise InputError(f"{path} cannot be read as a GGUF model: {error}.") from error
    rows = next((int(t.shape[-1]) for t in reader.tensors if t.name == _TABLES[0]), 0)
    sizes = bundle.manifest.architecture
    expected = (sizes.hidden_size, sizes.num_hidden_layers, bundle.manifest.vocab_size)
    if (width, layers, rows) != expected:
        advice = "give a GGUF file of the same model" + ("" if given else " with --gguf")
        raise InputError(
            f"{path.name} holds another model than {bundle.path} (width, layers and vocabulary {width}, {layers}, "
            f"{rows} against {', '.join(map(str, expected))}); {advice}."
        )
    return context


def requantized_gguf(path: Path, kind: str) -> Path:
    """`path` with its matrices in the format `kind` and its tables in Q8_0, in the cache folder; made once.

    The wheel has no `llama_model_quantize`; the gguf package rounds in the same way.
    """
    gguf = require("gguf", "onnx")
    out = cache_folder() / f"gguf-{sha256(path)[:16]}" / f"{path.stem}-{kind}.gguf"
    if out.is_file():
        return out
    reader = gguf.GGUFReader(path)
    with atomic_output(out, directory=False) as partial:
        writer = gguf.GGUFWriter(partial, reader.fields["general.architecture"].contents())
        for name, value in reader.fields.items():
            if name.startswith("GGUF.") or name == "general.architecture":
                continue
            contents = value.contents()
            if name == "general.file_type":
                contents = int(gguf.LlamaFileType[f"MOSTLY_{kind}"])
            sub_type = value.types[-1] if value.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, contents, value.types[0], sub_type=sub_type)
        for tensor in reader.tensors:
            data, raw_type = tensor.data, tensor.tensor_type
            if len(tensor.shape) > 1:
                raw_type = gguf.GGMLQuantizationType["Q8_0" if tensor.name in _TABLES else kind]
                if raw_type != tensor.tensor_type:
                    data = gguf.quantize(gguf.dequantize(tensor.data, tensor.tensor_type), raw_type)
            writer.add_tensor(tensor.name, data, raw_dtype=raw_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return out


def llama_cpp_logits(gguf: Path | str, ids: Sequence[int], *, threads: int = 2) -> Any:
    """llama.cpp's logits of every position of `ids`, float32 [tokens, vocab_size], in this process."""
    from pit_deploy.benchmark.llama_cpp import LlamaCpp

    runtime = LlamaCpp(gguf, len(ids), threads)
    try:
        return runtime.all_logits(ids)
    finally:
        runtime.close()


def genai_candidate(
    bundle: Bundle, ids: Sequence[int], source: Path | None = None, *, progress: Progress = silent
) -> Candidate:
    """What onnxruntime-genai's builder makes in int4, with its defaults, of the untied fold of `source`.

    Without `source` the checkpoint is looked for beside the bundle, under the name in its manifest. The result
    is kept in the cache folder. Raises `InputError` where there is no source, it is another, or the builder fails.
    """
    require("onnxruntime_genai", "bench")
    source = _find_source(bundle) if source is None else Path(source)
    files = [source / "config.json", *sorted(source.glob("*.safetensors"))]
    if not all(file.is_file() for file in files) or len(files) < 2:
        raise InputError(f"{source} is not a checkpoint with config.json and safetensors.")
    installed = version("onnxruntime-genai")
    key = hashlib.sha256("\n".join([installed, *map(sha256, files)]).encode()).hexdigest()[:16]
    out = cache_folder() / f"genai-int4-{key}"
    if not out.is_dir():
        progress("build for genai", 0, 1)
        _build_genai(source, out)
        progress("build for genai", 1, 1)
    sizes = {file.name: file.stat().st_size for file in artifact_files(out)}
    return Candidate(
        name="genai int4",
        kind="genai",
        path=out,
        precision="int4, embedding fp32, untied",
        model_bytes=sum(size for name, size in sizes.items() if name.startswith("model.onnx")),
        total_bytes=sum(sizes.values()),
        weight_bytes_per_token=onnx_bytes_per_token(out / "model.onnx"),
        context_length=bundle.manifest.context_length,
        ids=ids,
    )


def _find_source(bundle: Bundle) -> Path:
    recorded = bundle.manifest.source
    found = bundle.path.resolve().parent / recorded.name
    for entry in recorded.files:
        file = found / entry.name
        if not file.is_file() or file.stat().st_size != entry.size:
            raise InputError(
                f"onnxruntime-genai builds from the checkpoint, and {found} is not the one that {bundle.path} was "
                f"exported from; name it with --source."
            )
    return found


def _build_genai(source: Path, out: Path) -> None:
    from pit_deploy.checkpoint import open_checkpoint
    from pit_deploy.folding import fold

    checkpoint = open_checkpoint(source)
    if checkpoint.kind == "folded" and checkpoint.layout == "shared":
        raise InputError(f"{source} is folded into a shared table, which the builder does not know.")
    with tempfile.TemporaryDirectory() as room, atomic_output(out) as partial:
        plain = source
        if checkpoint.kind == "pit":
            plain = Path(room) / "untied"
            fold(source, plain, layout="untied")
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(plain)]
        command += ["-o", str(partial), "-p", "int4", "-e", "cpu", "-c", str(Path(room) / "cache")]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode or not (partial / "model.onnx").is_file():
            lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
            reason = lines[-1][:300] if lines else f"exit status {done.returncode}"
            raise PitDeployError(f"onnxruntime-genai's builder failed on {source}: {reason}")
