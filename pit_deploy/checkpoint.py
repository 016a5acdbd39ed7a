"""An opened checkpoint: Hugging Face directory, GGUF file or hub id, with everything checked that can be.

Tensors are read one at a time, with their stored dtype (torch) or as float arrays (NumPy), and never through
pickle. `open_checkpoint` checks everything that can be checked without reading weights.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pit_deploy.architecture import FAMILIES, with_defaults
from pit_deploy.errors import InputError
from pit_deploy.extras import require
from pit_deploy.json_files import read_json
from pit_deploy.sources import download, write_gguf_as_hf
from pit_deploy.weight_files import TensorInfo, read_index

if TYPE_CHECKING:
    import torch

EMBEDDING_KEYS = (
    "model.embed_tokens.weight",
    "transformer.wte.weight",
    "gpt_neox.embed_in.weight",
    "model.decoder.embed_tokens.weight",
)
HEAD_KEYS = ("lm_head.weight", "embed_out.weight")
OWN_VERSION = 1
"""The newest `pit` and `pit_fold` record that is read, and the one that is written."""


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
        if self.config.get("pit") is not None:
            return "pit"
        return "folded" if self.config.get("pit_fold") is not None else "plain"

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
        # auto_map names Python files of the source, which are never run and never carried along.
        own = ("pit", "pit_fold", "architectures", "auto_map")
        config = {k: v for k, v in self.config.items() if k not in own}
        config["model_type"] = self.model_type
        return config

    @property
    def tied(self) -> bool:
        """Whether the embedding is the head: as the config says, or by its family's default where it is silent."""
        said = self.config.get("tie_word_embeddings")
        return bool(with_defaults(self.backbone_config)["tie_word_embeddings"] if said is None else said)

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
        torch = require("torch", "onnx")
        target = {np.dtype(np.float64): torch.float64, np.dtype(np.float32): torch.float32}[np.dtype(dtype)]
        return self.read_torch(name).to(target).numpy()

    def read_torch(self, name: str) -> torch.Tensor:
        """The tensor as stored. Raises `InputError` where it is missing or its file cannot be read."""
        info = self.tensors.get(name)
        if info is None:
            raise InputError(f"{self.path}: the tensor {name} is missing.")
        import safetensors

        require("torch", "onnx")
        try:
            with safetensors.safe_open(info.file, framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(name)
        except (safetensors.SafetensorError, OSError) as error:
            raise InputError(f"{info.file}: {name} cannot be read: {error}; fetch the file again.") from error
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
                f"{self.path}: the tokenizer knows {tokens} ids but the token table has fewer rows "
                f"({numbers}); resize the table to the tokenizer before exporting."
            )
        if said != rows:
            self.note(f"config.json and the token table disagree ({numbers}); the table's rows are used")
        elif tokens < rows:
            self.note(f"{rows - tokens} rows of the table have no token and are masked ({numbers})")
        return tokens

    def check_tables(self) -> None:
        """Raise `InputError` where a plain checkpoint's tables contradict its config.

        Weights are read only where a tied checkpoint carries a head all the same.
        """
        if self.kind == "pit" or self.layout == "shared":
            return
        shape = self.tensors[self.embedding_key].shape
        hidden_size = self.config.get("hidden_size")
        if len(shape) != 2 or hidden_size not in (None, shape[1]):
            raise InputError(
                f"{self.path}: {self.embedding_key} has shape {list(shape)}, config.json asks for "
                f"[vocab_size, {hidden_size}]."
            )
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
        embedding, head = self.read_torch(self.embedding_key), self.read_torch(key)
        if embedding.shape != head.shape:
            raise InputError(
                f"{self.path}: config.json says tie_word_embeddings true, but {key} {list(head.shape)} and "
                f"{self.embedding_key} {list(embedding.shape)} differ in shape; correct one of them."
            )
        pairs = zip(embedding.split(8192), head.split(8192), strict=True)
        difference = max(float((a.float() - b.float()).abs().max()) for a, b in pairs)
        if not difference == 0:  # NaN differs too
            raise InputError(
                f"{self.path}: config.json says tie_word_embeddings true, but {key} differs from "
                f"{self.embedding_key} by up to {difference:.3g}; set tie_word_embeddings to false to keep "
                f"both, or delete {key}."
            )
        self.note(f"{key} repeats the tied embedding and is ignored")

    def _first(self, keys: Iterable[str]) -> str:
        for key in keys:
            if key in self.tensors:
                return key
        raise InputError(f"{self.path}: no token table is there; looked for {', '.join(keys)}.")


def open_checkpoint(source: str | Path, *, weights: bool = True) -> Checkpoint:
    """Open a Hugging Face directory, a .gguf file or a hub id ("owner/name").

    Weights are not read; with `weights` false a directory may also hold none. Raises `InputError` for
    anything that is not a usable checkpoint.
    """
    path = Path(source)
    try:
        if path.is_dir():
            return _open_directory(path, path.resolve().name, weights=weights)
        if path.is_file():
            return _open_file(path)
    except PermissionError as error:
        raise InputError(f"{error.filename or path} may not be read by this user.") from error
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(source)):
        return _open_directory(download(str(source)), str(source), weights=weights)
    raise InputError(
        f"{source} does not exist; give a checkpoint directory, a GGUF file or a hub id owner/name."
    )


def table_keys(names: Iterable[str]) -> tuple[str, str]:
    """The keys of embedding and head in a plain checkpoint whose other tensors have these `names`."""
    names = list(names)
    for key in EMBEDDING_KEYS[1:]:
        prefix = key.rsplit(".", 2)[0] + "."
        if any(name.startswith(prefix) for name in names):
            return key, HEAD_KEYS[key.startswith("gpt_neox.")]
    return EMBEDDING_KEYS[0], HEAD_KEYS[0]


def _open_directory(path: Path, name: str, *, weights: bool = True) -> Checkpoint:
    if not (path / "config.json").is_file():
        found = ", ".join(sorted(p.name for p in path.iterdir())[:5]) or "an empty folder"
        raise InputError(f"{path} is not a checkpoint: config.json is missing (found {found}).")
    config = read_json(path / "config.json")
    if not isinstance(config.get("model_type"), str):
        raise InputError(f'{path / "config.json"}: model_type is missing; add it, for example "llama".')
    quantized = config.get("quantization_config")
    if quantized:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else None
        raise InputError(
            f"{path / 'config.json'}: the weights are quantised already ({method or 'method not named'}); give "
            f"the float checkpoint they were made from."
        )
    _check_own_record(path, config)
    checkpoint = Checkpoint(path, name, config, read_index(path) if weights or _has_weights(path) else {})
    if checkpoint.kind == "pit":
        _check_pit_tensors(checkpoint)
    if checkpoint.layout == "shared":
        _check_shapes(checkpoint, "pit.table", ("pit.head_map", "pit.embedding_map"))
    if "auto_map" in config and checkpoint.model_type not in FAMILIES:
        checkpoint.note("the checkpoint asks for its own Python code (auto_map), which is never run")
    return checkpoint


def _has_weights(path: Path) -> bool:
    return any(path.glob("*.safetensors*")) or any(path.glob("*.bin"))


def _check_own_record(path: Path, config: dict[str, Any]) -> None:
    """The fields `pit` and `pit_fold` of config.json: known version, known words."""
    file = path / "config.json"
    words: dict[str, dict[str, tuple[str, ...]]] = {
        "pit": {"memory": ("frozen", "stiefel"), "bridge": ("none", "scalar", "matrix")},
        "pit_fold": {"layout": ("untied", "shared")},
    }
    for key, allowed in words.items():
        own = config.get(key)
        if own is None:
            continue
        version = own.get("version") if isinstance(own, dict) else None
        if not isinstance(version, int):
            raise InputError(f"{file}: the field {key} must be an object with a version number.")
        if version > OWN_VERSION:
            raise InputError(
                f"{file}: {key}.version is {version} and this pit-deploy reads up to {OWN_VERSION}; update "
                f"pit-deploy."
            )
        for name, values in allowed.items():
            if own.get(name) not in values:
                raise InputError(
                    f"{file}: {key}.{name} is {own.get(name)!r}; it must be {' or '.join(values)}."
                )


def _check_pit_tensors(checkpoint: Checkpoint) -> None:
    """The interface's tensors are there, have fitting shapes, and are those that config.json announces."""
    bridge = checkpoint.config["pit"]["bridge"]
    _check_shapes(
        checkpoint, "pit.memory", ("pit.cholesky", "pit.bridge") if bridge == "matrix" else ("pit.cholesky",)
    )
    announced = {"matrix": {"pit.bridge"}, "scalar": {"pit.embedding_multiplier"}}.get(bridge, set())
    found = {"pit.bridge", "pit.embedding_multiplier"} & set(checkpoint.tensors)
    if found != announced:
        raise InputError(
            f"{checkpoint.path}: config.json says pit.bridge {bridge}, which goes with "
            f"{', '.join(announced) or 'no tensor'}, and the checkpoint has {', '.join(sorted(found)) or 'none'}."
        )
    if bridge == "scalar" and checkpoint.tensors["pit.embedding_multiplier"].shape != ():
        raise InputError(f"{checkpoint.path}: pit.embedding_multiplier must be a single number of shape [].")


def _check_shapes(checkpoint: Checkpoint, table: str, maps: Iterable[str]) -> None:
    missing = [name for name in (table, *maps) if name not in checkpoint.tensors]
    if missing:
        raise InputError(f"{checkpoint.path}: the tensors {', '.join(missing)} are missing.")
    shape = checkpoint.tensors[table].shape
    if len(shape) != 2:
        raise InputError(
            f"{checkpoint.path}: {table} has shape {list(shape)}; [vocab_size, hidden_size] is due."
        )
    for name in maps:
        if checkpoint.tensors[name].shape != (shape[1], shape[1]):
            raise InputError(
                f"{checkpoint.path}: {table} is {list(shape)} and {name} {list(checkpoint.tensors[name].shape)}; "
                f"the second must be {[shape[1], shape[1]]}."
            )


def _open_file(file: Path) -> Checkpoint:
    with file.open("rb") as stream:
        start = stream.read(4)
    if start == b"GGUF":
        return _open_gguf(file)
    if file.suffix.lower() == ".gguf":
        raise InputError(
            f"{file} is not a GGUF file: it starts with {start!r} ({file.stat().st_size} bytes); fetch it again."
        )
    raise InputError(f"{file} is a file; a checkpoint is a directory with config.json, or a GGUF file.")


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


def outlier_rows(table: np.ndarray, *, chunk: int = 16384) -> np.ndarray:
    """Ids of rows whose norm is far from the others' (8 robust deviations of the log norm): untrained rows.

    `table` is [vocab_size, hidden_size]. Rows that were added and never trained stand out this way.
    """
    norms = np.concatenate(
        [np.linalg.norm(table[i : i + chunk], axis=1) for i in range(0, len(table), chunk)]
    )
    logs = np.log(np.maximum(norms, np.finfo(norms.dtype).tiny))
    center = np.median(logs)
    spread = 1.4826 * np.median(np.abs(logs - center))
    return np.flatnonzero(np.abs(logs - center) > 8 * max(spread, 1e-3))


def iterate_backbone(checkpoint: Checkpoint) -> Iterator[str]:
    """Names of all tensors but the token tables and PIT's own, sorted."""
    tables = {*EMBEDDING_KEYS, *HEAD_KEYS}
    return iter(sorted(k for k in checkpoint.tensors if k not in tables and not k.startswith("pit.")))
