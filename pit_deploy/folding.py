"""PIT to static tables. Everything is computed in float64 on the host and rounded last.

`FoldedModel` is what exporters read: backbone tensors by their Hugging Face names, and the token tables in one
of two layouts. For row vectors, `n` the state after the final norm and `m` a row of the table:

- `untied`: `x = embedding[id]`, `logits = n headᵀ`.
- `shared`: `x = table[id] embedding_map`, `logits = (n head_mapᵀ) tableᵀ`, where a map may be None (identity).

Source of the algebra: docs/pit.md, section Folding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from pit_deploy.architecture import FAMILIES
from pit_deploy.checkpoint import Checkpoint, iterate_backbone, open_checkpoint, write_json, write_safetensors
from pit_deploy.errors import InputError
from pit_deploy.files import atomic_output, check_output, check_room
from pit_deploy.initialize import check_finite
from pit_deploy.progress import Progress, silent

FOLD_VERSION = 1
LAYOUTS = ("untied", "shared")
FINAL_NORM = "model.norm.weight"
_CHUNK = 8192


@dataclass(frozen=True)
class UntiedTables:
    """Two tables, float32 [vocab_size, hidden_size] each."""

    embedding: np.ndarray
    head: np.ndarray
    layout: str = "untied"


@dataclass(frozen=True)
class SharedTable:
    """One table, float32 [vocab_size, hidden_size], and two float64 maps [hidden_size, hidden_size] or None."""

    table: np.ndarray
    head_map: np.ndarray | None = None
    embedding_map: np.ndarray | None = None
    layout: str = "shared"


Tables = UntiedTables | SharedTable


@dataclass
class FoldedModel:
    """A model without PIT parameters, ready to be written in a runtime's form.

    `config` is the backbone's config.json, `folds` what was folded so far, in order. Backbone tensors stay on
    disk until they are read.
    """

    source: Checkpoint
    config: dict[str, Any]
    tables: Tables
    folds: list[str]
    overrides: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def layout(self) -> str:
        return self.tables.layout

    @property
    def vocab_size(self) -> int:
        """Rows of the token tables."""
        return len(self.tables.table if isinstance(self.tables, SharedTable) else self.tables.embedding)

    def tensor_names(self) -> list[str]:
        """Names of the backbone's tensors, sorted, tables left out."""
        return list(iterate_backbone(self.source))

    def read(self, name: str, dtype: Any = np.float32) -> np.ndarray:
        """One backbone tensor; raises `InputError` where it is missing or not finite."""
        if name in self.overrides:
            return self.overrides[name].astype(dtype)
        value = self.source.read(name, dtype)
        check_finite(np.atleast_1d(value), f"{self.source.path}: {name}")
        return value


def fold(
    source: str | Path,
    out: str | Path,
    *,
    layout: str = "untied",
    dtype: str = "float32",
    overwrite: bool = False,
    progress: Progress = silent,
) -> Path:
    """Fold a PIT checkpoint and write it to `out`.

    `untied` is a plain Hugging Face directory that transformers loads; `shared` keeps one table and two maps.
    Raises `InputError` for a source that is not a PIT checkpoint, folded ones included. Returns `out`.
    """
    check_output(out, overwrite=overwrite)
    checkpoint = open_checkpoint(source)
    if checkpoint.kind == "folded":
        done = ", ".join(checkpoint.config["pit_fold"].get("folds", []))
        raise InputError(
            f"{source} is folded already ({checkpoint.layout}; {done}); fold its PIT checkpoint instead."
        )
    if checkpoint.kind == "plain":
        raise InputError(
            f"{source} is not a PIT checkpoint (config.json has no field pit); run pit-deploy convert first."
        )
    write_folded(
        fold_checkpoint(checkpoint, layout, progress=progress),
        out,
        dtype=dtype,
        overwrite=overwrite,
        progress=progress,
    )
    return Path(out)


def load_folded(
    checkpoint: Checkpoint, layout: str | None = None, *, progress: Progress = silent
) -> FoldedModel:
    """Any checkpoint as a `FoldedModel`: PIT is folded, folded is read, plain is taken as it is.

    `layout` None means `shared` where the source has one table and `untied` where it has two. Raises
    `InputError` where a plain or folded source with two tables is asked for one.
    """
    check_layout(layout)
    if checkpoint.kind == "pit":
        return fold_checkpoint(checkpoint, layout or "shared", progress=progress)
    checkpoint.check_tables()
    config = checkpoint.backbone_config
    folds = list(checkpoint.config.get("pit_fold", {}).get("folds", []))
    if checkpoint.layout == "shared":
        tables: Tables = SharedTable(*(checkpoint.read(f"pit.{k}", t) for k, t in _SHARED_KEYS.items()))
        if layout == "untied":
            tables = separate(tables)
        return FoldedModel(checkpoint, _untied_config(config, checkpoint), tables, folds)
    if not checkpoint.tied and layout == "shared":
        raise InputError(
            f"{checkpoint.path}: config.json says tie_word_embeddings false and the checkpoint has two different "
            f"tables, so --layout shared cannot be written; pass --layout untied, or convert the model to PIT."
        )
    embedding = checkpoint.read(checkpoint.embedding_key)
    check_finite(embedding, checkpoint.embedding_key)
    if checkpoint.tied and layout != "untied":
        return FoldedModel(checkpoint, config, SharedTable(embedding), folds)
    head = embedding if checkpoint.tied else checkpoint.read(checkpoint.head_key)
    check_finite(head, checkpoint.head_key)
    return FoldedModel(checkpoint, _untied_config(config, checkpoint), UntiedTables(embedding, head), folds)


_SHARED_KEYS = {"table": np.float32, "head_map": np.float64, "embedding_map": np.float64}


def fold_checkpoint(checkpoint: Checkpoint, layout: str, *, progress: Progress = silent) -> FoldedModel:
    """Fold an opened PIT checkpoint in memory. `A` is the identity: the table is `Z` where it is shared."""
    check_layout(layout)
    progress("fold", 0, 3)
    memory = checkpoint.read("pit.memory")
    cholesky = checkpoint.read("pit.cholesky", np.float64)
    _check_interface(checkpoint, memory, cholesky)
    transform = cholesky @ cholesky.T
    folds = ["transform"]
    embedding_map = np.linalg.inv(transform)
    if "pit.bridge" in checkpoint.tensors:
        embedding_map = np.linalg.solve(transform, checkpoint.read("pit.bridge", np.float64))
        folds.append("bridge")
    if "pit.embedding_multiplier" in checkpoint.tensors:
        embedding_map = embedding_map * float(checkpoint.read("pit.embedding_multiplier", np.float64))
        folds.append("embedding_multiplier")
    progress("fold", 1, 3)
    head_map, overrides = transform, {}
    family = FAMILIES.get(checkpoint.model_type)
    if family is not None and FINAL_NORM in checkpoint.tensors:
        stored = checkpoint.read(FINAL_NORM, np.float64)
        head_map = transform * (family.norm_offset + stored)[None, :]
        overrides[FINAL_NORM] = np.full_like(stored, 1.0 - family.norm_offset)
        folds.append("final_norm_gain")
    tables: Tables = SharedTable(memory, head_map, embedding_map)
    if layout == "untied":
        tables = separate(tables)
    progress("fold", 3, 3)
    return FoldedModel(
        checkpoint, _untied_config(checkpoint.backbone_config, checkpoint), tables, folds, overrides
    )


def separate(tables: SharedTable) -> UntiedTables:
    """The two tables that a shared one stands for."""
    return UntiedTables(_times(tables.table, tables.embedding_map), _times(tables.table, tables.head_map))


def write_folded(
    model: FoldedModel,
    out: str | Path,
    *,
    dtype: str = "float32",
    overwrite: bool = False,
    progress: Progress = silent,
) -> None:
    """Write a folded checkpoint to a new directory; see `write_folded_into`."""
    check_room(out, model.source.total_bytes + 4 * model.vocab_size * model.config["hidden_size"])
    with atomic_output(out, overwrite=overwrite) as partial:
        write_folded_into(model, partial, dtype=dtype, progress=progress)


def write_folded_into(
    model: FoldedModel, directory: Path, *, dtype: str = "float32", progress: Progress = silent
) -> None:
    """Write weights, config and companions; `dtype` is that of every tensor but a shared table's maps (float32).

    Raises `InputError` where float16 cannot hold a value.
    """
    import torch

    if dtype not in ("float32", "float16", "bfloat16"):
        raise InputError(f"--dtype {dtype} is not known; choose float32, float16 or bfloat16.")
    target: torch.dtype = getattr(torch, dtype)
    tables, names = model.tables, model.tensor_names()

    def cast(name: str, tensor: torch.Tensor) -> torch.Tensor:
        result = tensor.to(target)
        if not bool(torch.isfinite(result).all()):
            largest = float(tensor.abs().max())
            raise InputError(f"{name} reaches {largest:.4g}, which is not a finite {dtype}; choose float32.")
        return result

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for done, name in enumerate(names):
            progress("write", done, len(names) + 2)
            stored = model.overrides.get(name)
            yield (
                name,
                cast(name, model.source.read_torch(name) if stored is None else torch.from_numpy(stored)),
            )
        if isinstance(tables, UntiedTables):
            yield "model.embed_tokens.weight", cast("the embedding", torch.from_numpy(tables.embedding))
            yield "lm_head.weight", cast("the head", torch.from_numpy(tables.head))
        else:
            yield "pit.table", cast("the table", torch.from_numpy(tables.table))
            identity = np.eye(tables.table.shape[1])
            for key, value in (("head_map", tables.head_map), ("embedding_map", tables.embedding_map)):
                yield f"pit.{key}", torch.from_numpy(identity if value is None else value).to(torch.float32)

    write_safetensors(directory, tensors())
    write_json(directory / "config.json", _folded_config(model, dtype))
    copy_companions(model.source.path, directory)
    progress("write", len(names) + 2, len(names) + 2)


def copy_companions(source: Path, target: Path) -> None:
    """Carry tokenizer, chat template, generation config, licence and model card unchanged, where they are there."""
    from pit_deploy.bundle import carry_files

    if (source / "tokenizer.json").is_file():
        carry_files(source, target)
    elif (source / "generation_config.json").is_file():
        (target / "generation_config.json").write_bytes((source / "generation_config.json").read_bytes())
    for card in ("README.md",):
        if (source / card).is_file() and not (target / card).exists():
            (target / card).write_bytes((source / card).read_bytes())


def check_layout(layout: str | None) -> None:
    if layout is not None and layout not in LAYOUTS:
        raise InputError(f"--layout {layout} is not known; choose {' or '.join(LAYOUTS)}.")


def with_tables(model: FoldedModel, tables: Tables, fold_name: str) -> FoldedModel:
    """The same model with other tables that compute the same function, and the change recorded."""
    return replace(model, tables=tables, folds=[*model.folds, fold_name])


def _times(table: np.ndarray, matrix: np.ndarray | None) -> np.ndarray:
    """float32 `table @ matrix` computed in float64, chunk by chunk."""
    if matrix is None:
        return table
    out = np.empty((len(table), matrix.shape[1]), np.float32)
    for start in range(0, len(table), _CHUNK):
        out[start : start + _CHUNK] = table[start : start + _CHUNK].astype(np.float64) @ matrix
    return out


def _untied_config(config: dict[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    """A loader that found `true` here would overwrite one table with the other in silence."""
    return {**config, "tie_word_embeddings": False, "vocab_size": checkpoint.table_rows}


def _folded_config(model: FoldedModel, dtype: str) -> dict[str, Any]:
    record = {
        "version": FOLD_VERSION,
        "layout": model.layout,
        "folds": model.folds,
        "source": model.source.name,
    }
    config = {**model.config, "dtype": dtype}
    if model.layout == "shared":
        # A model_type of its own, so that a plain loader refuses instead of making up tables.
        record["backbone_model_type"] = model.config["model_type"]
        config["model_type"] = "pit_folded"
    else:
        named = model.source.config.get("pit", {}).get("backbone_architectures") or model.source.config.get(
            "architectures"
        )
        if named:
            config["architectures"] = named
    return {**config, "pit_fold": record}


def _check_interface(checkpoint: Checkpoint, memory: np.ndarray, cholesky: np.ndarray) -> None:
    rows, columns = memory.shape
    if cholesky.shape != (columns, columns):
        raise InputError(
            f"{checkpoint.path}: pit.memory is {[rows, columns]} and pit.cholesky {list(cholesky.shape)}; the "
            f"second must be {[columns, columns]}."
        )
    check_finite(memory, f"{checkpoint.path}: pit.memory")
    check_finite(cholesky, f"{checkpoint.path}: pit.cholesky")
    if not (np.diagonal(cholesky) > 0).all() or np.triu(cholesky, 1).any():
        raise InputError(
            f"{checkpoint.path}: pit.cholesky must be lower triangular with a positive diagonal (smallest "
            f"diagonal entry {np.diagonal(cholesky).min():.3g})."
        )
