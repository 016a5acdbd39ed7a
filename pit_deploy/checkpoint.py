"""Reading and writing checkpoints: Hugging Face directories, GGUF files, hub ids. Every input error is here.

Tensors are read one at a time, with their stored dtype (torch) or as float arrays (NumPy), and never through
pickle. `open_checkpoint` checks everything that can be checked without reading weights.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pit_deploy.architecture import FAMILIES
from pit_deploy.errors import InputError
from pit_deploy.extras import require

if TYPE_CHECKING:
    import torch

EMBEDDING_KEYS = (
    "model.embed_tokens.weight",
    "transformer.wte.weight",
    "gpt_neox.embed_in.weight",
    "model.decoder.embed_tokens.weight",
)
HEAD_KEYS = ("lm_head.weight", "embed_out.weight")
SHARD_BYTES = 4_000_000_000
_TIED_BY_DEFAULT = ("gemma", "gemma2", "gemma3_text", "gpt2", "opt")


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies and what it is, known from the header alone."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


@dataclass
class Checkpoint:
    """An opened checkpoint directory. `kind` is `plain`, `pit`, or `folded` (by pit-deploy)."""

    path: Path
    name: str
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    notes: list[str] = field(default_factory=list)
    _resources: ExitStack = field(default_factory=ExitStack, repr=False)

    @property
    def kind(self) -> str:
        if "pit" in self.config:
            return "pit"
        return "folded" if "pit_fold" in self.config else "plain"

    @property
    def layout(self) -> str | None:
        """`untied` or `shared` for a folded checkpoint, else None."""
        return self.config["pit_fold"]["layout"] if self.kind == "folded" else None

    @property
    def model_type(self) -> str:
        """The backbone's model_type, also for a PIT or folded checkpoint."""
        own = self.config.get("pit") or self.config.get("pit_fold") or {}
        return str(own.get("backbone_model_type") or self.config.get("model_type"))

    @property
    def backbone_config(self) -> dict[str, Any]:
        """config.json as the backbone alone would have it."""
        config = {k: v for k, v in self.config.items() if k not in ("pit", "pit_fold", "architectures")}
        config["model_type"] = self.model_type
        return config

    @property
    def tied(self) -> bool:
        """Whether the config says that the embedding is the head (the family's default where it is silent)."""
        said = self.config.get("tie_word_embeddings")
        return self.model_type in _TIED_BY_DEFAULT if said is None else bool(said)

    @property
    def embedding_key(self) -> str:
        return self._first(EMBEDDING_KEYS)

    @property
    def head_key(self) -> str:
        """The key of the head's table: the embedding's own where they are tied."""
        return self.embedding_key if self.tied else self._first(HEAD_KEYS)

    @property
    def table_rows(self) -> int:
        """Rows of the token table: the truth about the vocabulary."""
        for key in ("pit.memory", "pit.table"):
            if key in self.tensors:
                return self.tensors[key].shape[0]
        return self.tensors[self.embedding_key].shape[0]

    @property
    def total_bytes(self) -> int:
        """Bytes of all weight files."""
        return sum(file.stat().st_size for file in {info.file for info in self.tensors.values()})

    def read(self, name: str, dtype: Any = np.float32) -> np.ndarray:
        """The tensor as a NumPy array of `dtype`. bf16 and fp16 are widened exactly."""
        import torch

        target = {np.dtype(np.float64): torch.float64, np.dtype(np.float32): torch.float32}[np.dtype(dtype)]
        return self.read_torch(name).to(target).numpy()

    def read_torch(self, name: str) -> torch.Tensor:
        """The tensor as stored. Raises `InputError` where it is missing or its file cannot be read."""
        info = self.tensors.get(name)
        if info is None:
            raise InputError(f"{self.path}: the tensor {name} is missing.")
        safetensors = require("safetensors", "onnx")
        require("torch", "onnx")
        with safetensors.safe_open(info.file, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor

    def is_tokenized(self) -> bool:
        return (self.path / "tokenizer.json").is_file()

    def tokenizer_length(self) -> int:
        """One more than the largest id of tokenizer.json. Raises `InputError` where the file is missing."""
        from pit_deploy.bundle import tokenizer_length

        return tokenizer_length(self.path)

    def check_vocabulary(self) -> int:
        """The tokenizer's length, once it, the table's rows and `vocab_size` have been seen to fit together.

        The table's rows are the truth: a larger `vocab_size` is noted and corrected by whoever writes, spare
        rows are masked at export, and a token without a row is an error.
        """
        rows, said, tokens = self.table_rows, self.config.get("vocab_size"), self.tokenizer_length()
        numbers = f"vocab_size {said}, table rows {rows}, tokenizer length {tokens}"
        if tokens > rows:
            raise InputError(
                f"{self.path}: the tokenizer knows {tokens} ids but the token table has fewer rows ({numbers}); "
                f"resize the table to the tokenizer before exporting."
            )
        if said != rows:
            self.note(f"config.json and the token table disagree ({numbers}); the table's rows are used")
        elif tokens < rows:
            self.note(f"{rows - tokens} rows of the table have no token and are masked ({numbers})")
        return tokens

    def check_tables(self) -> None:
        """Raise `InputError` where a plain checkpoint's tables contradict its config (reads them if it must)."""
        if self.kind == "pit" or self.layout == "shared":
            return
        heads = [key for key in HEAD_KEYS if key in self.tensors]
        if not self.tied and not heads:
            raise InputError(
                f"{self.path}: config.json says tie_word_embeddings false, but {HEAD_KEYS[0]} is in none of "
                f"{', '.join(sorted({i.file.name for i in self.tensors.values()}))}; add the tensor, or set "
                f"tie_word_embeddings to true if the head is the embedding."
            )
        if self.tied and heads:
            self._check_redundant_head(heads[0])
        if not self.tied:
            shapes = [self.tensors[key].shape for key in (self.embedding_key, self.head_key)]
            if shapes[0] != shapes[1]:
                raise InputError(
                    f"{self.path}: {self.embedding_key} has shape {list(shapes[0])} and {self.head_key} "
                    f"{list(shapes[1])}; they must be equal."
                )

    def note(self, text: str) -> None:
        """Keep a remark for the user, once."""
        if text not in self.notes:
            self.notes.append(text)

    def close(self) -> None:
        """Remove what was unpacked for reading."""
        self._resources.close()

    def _check_redundant_head(self, key: str) -> None:
        embedding, head = self.read(self.embedding_key), self.read(key)
        if embedding.shape != head.shape:
            raise InputError(
                f"{self.path}: config.json says tie_word_embeddings true, but {key} {list(head.shape)} and "
                f"{self.embedding_key} {list(embedding.shape)} differ in shape; correct one of them."
            )
        difference = float(np.abs(embedding - head).max()) if not np.array_equal(embedding, head) else 0.0
        if difference:
            raise InputError(
                f"{self.path}: config.json says tie_word_embeddings true, but {key} differs from "
                f"{self.embedding_key} by up to {difference:.3g}; set tie_word_embeddings to false to keep both, "
                f"or delete {key}."
            )
        self.note(f"{key} repeats the tied embedding and is ignored")

    def _first(self, keys: Iterable[str]) -> str:
        for key in keys:
            if key in self.tensors:
                return key
        raise InputError(f"{self.path}: no token table is there; looked for {', '.join(keys)}.")


def open_checkpoint(source: str | Path, *, weights: bool = True) -> Checkpoint:
    """Open a Hugging Face directory, a .gguf file or a hub id ("owner/name").

    Weights are not read; with `weights` false a directory may also hold none. Raises `InputError` for anything
    that is not a usable checkpoint.
    """
    path = Path(source)
    if path.is_file() and path.suffix == ".gguf":
        return _open_gguf(path)
    if path.is_file():
        raise InputError(f"{path} is a file; a checkpoint is a directory with config.json, or a .gguf file.")
    if path.is_dir():
        return _open_directory(path, path.resolve().name, weights=weights)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(source)) and not str(source).startswith("."):
        return _open_directory(_download(str(source)), str(source))
    raise InputError(
        f"{source} does not exist; give a checkpoint directory, a .gguf file or a hub id owner/name."
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises `InputError` with the place of the fault."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} is missing.") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start}).") from error
    except json.JSONDecodeError as error:
        raise InputError(
            f"{path} is not valid JSON: {error.msg} at line {error.lineno} column {error.colno}."
        ) from error
    except RecursionError:
        raise InputError(f"{path} is nested too deeply to be a config.") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} holds a JSON {type(value).__name__}; an object is expected.")
    return value


def read_json_if_there(path: Path) -> dict[str, Any]:
    """As `read_json`, with an empty object for a missing file."""
    return read_json(path) if path.exists() else {}


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_safetensors(
    directory: Path, tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int = SHARD_BYTES
) -> int:
    """Write tensors to model.safetensors, or to shards with an index where they exceed `shard_bytes`.

    At most one shard is held in memory. Returns the bytes of the tensors.
    """
    from safetensors.torch import save_file

    shards: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}
    size = total = 0

    def flush() -> None:
        nonlocal pending, size
        save_file(pending, directory / f"shard-{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(pending))
        pending, size = {}, 0

    for name, tensor in tensors:
        tensor = tensor.contiguous()
        if pending and size + tensor.nbytes > shard_bytes:
            flush()
        pending[name] = tensor
        size, total = size + tensor.nbytes, total + tensor.nbytes
    flush()
    if len(shards) == 1:
        (directory / "shard-0.safetensors").rename(directory / "model.safetensors")
        return total
    places: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"shard-{number}.safetensors").rename(directory / file)
        places.update(dict.fromkeys(names, file))
    write_json(
        directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places}
    )
    return total


def _open_directory(path: Path, name: str, *, weights: bool = True) -> Checkpoint:
    if not (path / "config.json").is_file():
        found = sorted(p.name for p in path.iterdir())[:5]
        raise InputError(
            f"{path} is not a checkpoint: config.json is missing (found {', '.join(found) or 'an empty folder'})."
        )
    config = read_json(path / "config.json")
    if not isinstance(config.get("model_type"), str):
        raise InputError(f'{path / "config.json"}: model_type is missing; add it, for example "llama".')
    _check_own_version(path, config)
    checkpoint = Checkpoint(path, name, config, _index(path) if weights or _has_weights(path) else {})
    if "auto_map" in config and checkpoint.model_type not in FAMILIES:
        checkpoint.note("the checkpoint asks for its own Python code (auto_map), which is never run")
    return checkpoint


def _has_weights(path: Path) -> bool:
    return any(path.glob("*.safetensors*")) or any(path.glob("*.bin"))


def _check_own_version(path: Path, config: dict[str, Any]) -> None:
    for key in ("pit", "pit_fold"):
        own = config.get(key)
        if own is None:
            continue
        if not isinstance(own, dict) or not isinstance(own.get("version"), int):
            raise InputError(
                f"{path / 'config.json'}: the field {key} must be an object with a version number."
            )
        if own["version"] > 1:
            raise InputError(
                f"{path / 'config.json'}: {key}.version is {own['version']} and this pit-deploy reads up to 1; "
                f"update pit-deploy."
            )


def _index(path: Path) -> dict[str, TensorInfo]:
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    if index.is_file():
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(v, str) for v in places.values()):
            raise InputError(f"{index}: weight_map is missing or not an object of file names.")
        files = sorted(set(places.values()))
        escaped = [f for f in files if Path(f).name != f]
        if escaped:
            raise InputError(f"{index}: the shard '{escaped[0]}' is not a file of the same folder.")
        missing = [f for f in files if not (path / f).is_file()]
        if missing:
            raise InputError(
                f"{index} names {len(missing)} shard(s) that are not there: {', '.join(missing)}."
            )
        tensors = {k: v for f in files for k, v in _header(path / f).items()}
        absent = sorted(set(places) - set(tensors))
        if absent:
            raise InputError(
                f"{index} names tensors that no shard holds: {', '.join(absent[:5])} ({len(absent)})."
            )
        return tensors
    if single.is_file():
        return _header(single)
    pickles = sorted(p.name for p in [*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")])
    if pickles:
        raise InputError(
            f"{path} holds its weights only as pickle ({', '.join(pickles[:3])}), which can run code when opened; "
            f'convert it where you trust it: python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{path}').save_pretrained('{path}-safetensors')\""
        )
    raise InputError(f"{path} has no weights: model.safetensors or model.safetensors.index.json is expected.")


def _header(file: Path) -> dict[str, TensorInfo]:
    import safetensors

    try:
        with safetensors.safe_open(file, framework="np") as opened:
            slices = ((name, opened.get_slice(name)) for name in opened.keys())  # noqa: SIM118 (not a dict)
            return {
                name: TensorInfo(file, part.get_dtype(), tuple(part.get_shape())) for name, part in slices
            }
    except (safetensors.SafetensorError, OSError) as error:
        raise InputError(
            f"{file} cannot be read as safetensors ({file.stat().st_size} bytes): {error}; it is damaged or was "
            f"not downloaded whole, so fetch it again."
        ) from error


def _download(repo: str) -> Path:
    hub = require("huggingface_hub", "onnx")
    try:
        return Path(
            hub.snapshot_download(
                repo,
                allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "LICENSE*", "README.md"],
            )
        )
    except Exception as error:  # the hub client raises many kinds: no network, no such repository, no right
        reason = " ".join(str(error).split())[:300]
        raise InputError(
            f"{repo} is not a local path and could not be fetched from the hub: {reason}"
        ) from error


def _open_gguf(file: Path) -> Checkpoint:
    resources = ExitStack()
    directory = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="pit-deploy-gguf-")))
    try:
        write_gguf_as_hf(file, directory)
        checkpoint = _open_directory(directory, file.stem)
    except BaseException:
        resources.close()
        raise
    checkpoint._resources = resources
    return checkpoint


def write_gguf_as_hf(file: Path, directory: Path) -> None:
    """Write a GGUF file as a plain Hugging Face directory (dequantised), through transformers."""
    transformers, torch = require("transformers", "onnx"), require("torch", "onnx")
    require("gguf", "onnx")
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    except Exception as error:  # a damaged file fails in many ways inside the reader
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"{file} cannot be read as GGUF: {reason}") from error
    # transformers refuses to save a model that it takes for quantised; these weights are plain floats now.
    for holder in (model.config, model):
        if hasattr(holder, "quantization_config"):
            del holder.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def outlier_rows(table: np.ndarray, *, chunk: int = 16384) -> np.ndarray:
    """Ids of rows whose norm is far from the others' (10 robust deviations of the log norm): untrained rows.

    `table` is [vocab_size, hidden_size]. Rows that were added and never trained stand out this way.
    """
    norms = np.concatenate(
        [np.linalg.norm(table[i : i + chunk], axis=1) for i in range(0, len(table), chunk)]
    )
    logs = np.log(np.maximum(norms, np.finfo(np.float64).tiny))
    center = np.median(logs)
    spread = 1.4826 * np.median(np.abs(logs - center))
    return np.flatnonzero(np.abs(logs - center) > 10 * max(spread, 1e-3))


def iterate_backbone(checkpoint: Checkpoint) -> Iterator[str]:
    """Names of all tensors but the token tables and PIT's own, sorted."""
    tables = {*EMBEDDING_KEYS, *HEAD_KEYS}
    return iter(sorted(k for k in checkpoint.tensors if k not in tables and not k.startswith("pit.")))
