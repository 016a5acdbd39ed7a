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

from pit_deploy.architecture import (
    FAMILIES,
    DecoderConfig,
    check_tensors,
    layer_count,
    too_many_layers,
    with_defaults,
)
from pit_deploy.errors import InputError
from pit_deploy.extras import require
from pit_deploy.initialize import check_finite
from pit_deploy.json_files import read_json, read_json_if_there
from pit_deploy.own_records import OWN_VERSION as OWN_VERSION
from pit_deploy.own_records import check_own_record, check_own_tensors
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


@dataclass
class Checkpoint:
    """An opened checkpoint directory. `kind` is `plain`, `pit`, or `folded` (by pit-deploy).

    `label` is what messages call it: what the user named, where `path` is a temporary directory.
    """

    path: Path
    name: str
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    notes: list[str] = field(default_factory=list)
    label: str = ""
    _resources: ExitStack = field(default_factory=ExitStack, repr=False)

    def __post_init__(self) -> None:
        self.label = self.label or str(self.path)

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
            raise InputError(f"{self.label}: the tensor {name} is missing.")
        import safetensors

        require("torch", "onnx")
        try:
            with safetensors.safe_open(info.file, framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(name)
        except (safetensors.SafetensorError, OSError) as error:
            raise InputError(f"{info.file}: {name} cannot be read: {error}; fetch the file again.") from error
        return tensor

    def read_finite(self, name: str) -> torch.Tensor:
        """As `read_torch`; raises `InputError` too for values that are not finite, with their count and place."""
        tensor = self.read_torch(name)
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            check_finite(np.atleast_1d(tensor.double().numpy()), f"{self.label}: {name}")
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
                f"{self.label}: the tokenizer knows {tokens} ids but the token table has fewer rows "
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
        self.check_width()
        shape = self.tensors[self.embedding_key].shape
        if len(shape) != 2:
            raise InputError(
                f"{self.label}: {self.embedding_key} has shape {list(shape)}; 2 dimensions are due."
            )
        heads = [key for key in HEAD_KEYS if key in self.tensors]
        if not self.tied and not heads:
            raise InputError(
                f"{self.label}: config.json says tie_word_embeddings false, but {HEAD_KEYS[0]} is in none of "
                f"{', '.join(sorted({i.file.name for i in self.tensors.values()}))}; add the tensor, or set "
                f"tie_word_embeddings to true if the head is the embedding."
            )
        if self.tied and heads:
            self._check_redundant_head(heads[0])
        if not self.tied:
            shapes = [self.tensors[key].shape for key in (self.embedding_key, self.head_key)]
            if shapes[0] != shapes[1]:
                raise InputError(
                    f"{self.label}: {self.embedding_key} has shape {list(shapes[0])} and {self.head_key} "
                    f"{list(shapes[1])}; they must be equal."
                )

    def check_width(self) -> None:
        """Raise `InputError` where the config's `hidden_size` is not the width of the token tables."""
        tables = [key for key in ("pit.memory", "pit.table", *EMBEDDING_KEYS) if key in self.tensors]
        for name in ("hidden_size", "n_embd"):
            said = self.config.get(name)
            for key in tables if said is not None else ():
                shape = self.tensors[key].shape
                if len(shape) != 2 or shape[1] != said:
                    raise InputError(
                        f"{self.label}: {key} has shape {list(shape)}, config.json asks for [vocab_size, {said}] "
                        f"({name}); correct config.json or the checkpoint."
                    )

    def check_companions(self) -> None:
        """Raise `InputError` where a JSON file that is carried along is none, before a later command meets it."""
        for name in ("tokenizer_config.json", "generation_config.json"):
            read_json_if_there(self.path / name)

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
                f"{self.label}: config.json says tie_word_embeddings true, but {key} {list(head.shape)} and "
                f"{self.embedding_key} {list(embedding.shape)} differ in shape; correct one of them."
            )
        pairs = zip(embedding.split(8192), head.split(8192), strict=True)
        difference = max(float((a.float() - b.float()).abs().max()) for a, b in pairs)
        if not difference == 0:  # NaN differs too
            raise InputError(
                f"{self.label}: config.json says tie_word_embeddings true, but {key} differs from "
                f"{self.embedding_key} by up to {difference:.3g}; set tie_word_embeddings to false to keep "
                f"both, or delete {key}."
            )
        self.note(f"{key} repeats the tied embedding and is ignored")

    def _first(self, keys: Iterable[str]) -> str:
        for key in keys:
            if key in self.tensors:
                return key
        raise InputError(f"{self.label}: no token table is there; looked for {', '.join(keys)}.")


def open_checkpoint(
    source: str | Path, *, weights: bool = True, label: str | Path | None = None
) -> Checkpoint:
    """Open a Hugging Face directory, a .gguf file or a hub id ("owner/name").

    Weights are not read; with `weights` false a directory may also hold none. `label` is what messages call it
    (None: `source`). Raises `InputError` for anything that is not a usable checkpoint.
    """
    path = Path(source)
    try:
        if path.is_dir():
            return _open_directory(path, path.resolve().name, weights=weights, label=label)
        if path.is_file():
            return _open_file(path)
    except PermissionError as error:
        raise InputError(f"{error.filename or path} may not be read by this user.") from error
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(source)):
        return _open_directory(download(str(source)), str(source), weights=weights, label=label or source)
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


def check_backbone_tensors(checkpoint: Checkpoint, config: DecoderConfig) -> None:
    """Compare the headers with the config before any work: the backbone's tensors, and the width of the tables.

    `config` is that of `checkpoint.backbone_config`. Raises `InputError` that lists what is missing, unknown or of
    another shape.
    """
    checkpoint.check_width()
    check_tensors(config, backbone_shapes(checkpoint), checkpoint.label)


def backbone_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Every tensor but the token tables and PIT's own, with its shape as its file's header says."""
    return {name: checkpoint.tensors[name].shape for name in iterate_backbone(checkpoint)}


def _open_directory(
    path: Path, name: str, *, weights: bool = True, label: str | Path | None = None
) -> Checkpoint:
    _refuse_bundle(path)
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
    check_own_record(path, config)
    tensors = read_index(path) if weights or _has_weights(path) else {}
    checkpoint = Checkpoint(path, name, config, tensors, label=str(label or ""))
    _check_layer_count(checkpoint)
    check_own_tensors(config, {name: info.shape for name, info in tensors.items()}, checkpoint.label)
    if checkpoint.kind == "pit" or checkpoint.layout == "shared":
        checkpoint.check_width()
    if "auto_map" in config and checkpoint.model_type not in FAMILIES:
        checkpoint.note("the checkpoint asks for its own Python code (auto_map), which is never run")
    return checkpoint


def _has_weights(path: Path) -> bool:
    return any(path.glob("*.safetensors*")) or any(path.glob("*.bin"))


def _refuse_bundle(path: Path) -> None:
    """A bundle has a config.json and safetensors too, but no weights that could be converted or folded."""
    from pit_deploy.manifest import FORMAT

    try:
        found = read_json_if_there(path / "manifest.json").get("format")
    except InputError:  # someone else's manifest.json
        return
    if found == FORMAT:
        raise InputError(
            f"{path} is a bundle, which pit-deploy export wrote, and no checkpoint; give the checkpoint that it was "
            f"made from."
        )


def _check_layer_count(checkpoint: Checkpoint) -> None:
    """A config that asks for more layers than there are: building them starts with room for them all."""
    layers = layer_count(backbone_shapes(checkpoint))
    for field_name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
        said = checkpoint.config.get(field_name)
        if layers is not None and isinstance(said, int) and said > layers:
            raise InputError(too_many_layers(checkpoint.label, said, layers, field_name))


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
        checkpoint = _open_directory(directory, file.stem, label=file)
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
