"""PIT to static tables. Everything is computed in float64 on the host and rounded last.

`FoldedModel` is what exporters read: backbone tensors by their Hugging Face names, and the token tables in
one of two layouts. For row vectors, with `n` the state after the final norm:

- `untied`: `x = embedding[id]`, `logits = n headᵀ`.
- `shared`: `x = table[id] embedding_map`, `logits = (n head_mapᵀ) tableᵀ`; a map may be None (identity).

Source of the algebra: docs/pit.md, section Folding.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from pit_deploy.architecture import FAMILIES
from pit_deploy.checkpoint import OWN_VERSION, Checkpoint, iterate_backbone, open_checkpoint, table_keys
from pit_deploy.errors import InputError
from pit_deploy.extras import require
from pit_deploy.files import atomic_output, check_output, check_room
from pit_deploy.initialize import check_finite, multiply, read_interface
from pit_deploy.json_files import write_json
from pit_deploy.progress import Progress, silent
from pit_deploy.weight_files import cast, check_dtype, write_safetensors

LAYOUTS = ("untied", "shared")
FINAL_NORM = "model.norm.weight"


@dataclass(frozen=True)
class UntiedTables:
    """Two tables, float32 [vocab_size, hidden_size] each."""

    embedding: np.ndarray
    head: np.ndarray
    layout: str = "untied"


@dataclass(frozen=True)
class SharedTable:
    """One table, float32 [vocab_size, hidden_size], and two maps, float64 [hidden_size, hidden_size] or None."""

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
        check_finite(np.atleast_1d(value), f"{self.source.label}: {name}")
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
    require("torch", "onnx")
    check_output(out, overwrite=overwrite, source=source)
    check_layout(layout)
    check_dtype(dtype)
    checkpoint = open_checkpoint(source)
    try:
        if checkpoint.kind == "folded":
            done = ", ".join(checkpoint.config["pit_fold"].get("folds", []))
            raise InputError(
                f"{source} is folded already ({checkpoint.layout}; {done}); fold its PIT checkpoint instead."
            )
        if checkpoint.kind == "plain":
            raise InputError(
                f"{source} is not a PIT checkpoint (config.json has no field pit); run pit-deploy convert first."
            )
        model = fold_checkpoint(checkpoint, layout, progress=progress)
        write_folded(model, out, dtype=dtype, overwrite=overwrite, progress=progress)
    finally:
        checkpoint.close()
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
    config = {**checkpoint.backbone_config, "vocab_size": checkpoint.table_rows}
    folds = list(checkpoint.config.get("pit_fold", {}).get("folds", []))
    if checkpoint.layout == "shared":
        shared = SharedTable(
            checkpoint.read("pit.table"),
            checkpoint.read("pit.head_map", np.float64),
            checkpoint.read("pit.embedding_map", np.float64),
        )
        for name in ("table", "head_map", "embedding_map"):
            check_finite(getattr(shared, name), f"{checkpoint.label}: pit.{name}")
        tables: Tables = separate(shared) if layout == "untied" else shared
        return FoldedModel(checkpoint, _untied_config(config, checkpoint), tables, folds)
    check_shareable(checkpoint, layout)
    embedding = checkpoint.read(checkpoint.embedding_key)
    check_finite(embedding, checkpoint.embedding_key)
    if checkpoint.tied and layout != "untied":
        return FoldedModel(checkpoint, config, SharedTable(embedding), folds)
    head = embedding if checkpoint.tied else checkpoint.read(checkpoint.head_key)
    check_finite(head, checkpoint.head_key)
    return FoldedModel(checkpoint, _untied_config(config, checkpoint), UntiedTables(embedding, head), folds)


def fold_checkpoint(checkpoint: Checkpoint, layout: str, *, progress: Progress = silent) -> FoldedModel:
    """Fold an opened PIT checkpoint in memory. `A` is the identity: the table is `Z` where it is shared."""
    check_layout(layout)
    progress("fold", 0, 3)
    interface = read_interface(checkpoint)
    transform, bridge = interface.transform, interface.bridge
    folds = ["transform"]
    if interface.bridge_kind == "matrix":
        embedding_map = np.linalg.solve(transform, np.asarray(bridge))
        folds.append("bridge")
    else:
        embedding_map = np.linalg.inv(transform)
    if interface.bridge_kind == "scalar":
        embedding_map = embedding_map * bridge
        folds.append("embedding_multiplier")
    progress("fold", 1, 3)
    head_map, overrides = transform, dict[str, np.ndarray]()
    family = FAMILIES.get(checkpoint.model_type)
    if family is not None and FINAL_NORM in checkpoint.tensors:
        stored = checkpoint.read(FINAL_NORM, np.float64)
        check_finite(stored, f"{checkpoint.label}: {FINAL_NORM}")
        head_map = transform * (family.norm_offset + stored)[None, :]
        overrides[FINAL_NORM] = np.full_like(stored, 1.0 - family.norm_offset)
        folds.append("final_norm_gain")
    shared = SharedTable(interface.memory, head_map, embedding_map)
    progress("fold", 2, 3)
    tables: Tables = separate(shared) if layout == "untied" else shared
    progress("fold", 3, 3)
    return FoldedModel(
        checkpoint, _untied_config(checkpoint.backbone_config, checkpoint), tables, folds, overrides
    )


def separate(tables: SharedTable) -> UntiedTables:
    """The two tables that a shared one stands for."""
    embedding, head = (
        tables.table if matrix is None else multiply(tables.table, matrix)
        for matrix in (tables.embedding_map, tables.head_map)
    )
    return UntiedTables(embedding, head)


def write_folded(
    model: FoldedModel,
    out: str | Path,
    *,
    dtype: str = "float32",
    overwrite: bool = False,
    progress: Progress = silent,
) -> None:
    """Write a folded checkpoint to a new directory; see `write_folded_into`."""
    check_dtype(dtype)
    tables = model.tables
    entries = (
        tables.table.size if isinstance(tables, SharedTable) else tables.embedding.size + tables.head.size
    )
    backbone = sum(math.prod(model.source.tensors[name].shape) for name in model.tensor_names())
    itemsize = 4 if dtype == "float32" else 2
    check_room(out, itemsize * (backbone + entries))
    with atomic_output(out, overwrite=overwrite) as partial:
        write_folded_into(model, partial, dtype=dtype, progress=progress)


def write_folded_into(
    model: FoldedModel, directory: Path, *, dtype: str = "float32", progress: Progress = silent
) -> None:
    """Write weights, config and companions.

    `dtype` is that of every tensor but a shared table's maps, which stay float32. Raises `InputError` where
    float16 cannot hold a value.
    """
    import torch

    check_dtype(dtype)
    tables, names = model.tables, model.tensor_names()

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for done, name in enumerate(names):
            progress("write", done, len(names) + 2)
            stored = model.overrides.get(name)
            tensor = model.source.read_finite(name) if stored is None else torch.from_numpy(stored)
            yield name, cast(name, tensor, dtype)
        if isinstance(tables, UntiedTables):
            for key, table in zip(table_keys(names), (tables.embedding, tables.head), strict=True):
                yield key, cast(key, torch.from_numpy(table), dtype)
        else:
            yield "pit.table", cast("pit.table", torch.from_numpy(tables.table), dtype)
            identity = np.eye(tables.table.shape[1])
            for key, value in (("head_map", tables.head_map), ("embedding_map", tables.embedding_map)):
                yield f"pit.{key}", torch.from_numpy(identity if value is None else value).to(torch.float32)

    write_safetensors(directory, tensors())
    write_json(directory / "config.json", _folded_config(model, dtype))
    copy_companions(model.source.path, directory)
    progress("write", len(names) + 2, len(names) + 2)


def copy_companions(source: Path, target: Path) -> None:
    """Carry tokenizer, chat template, generation config, licence and model card, byte for byte where they are."""
    from pit_deploy.bundle import CARRIED, carry_files

    names = ["README.md"]
    if (source / "tokenizer.json").is_file():
        carry_files(source, target)
    else:  # no bundle can be made from it, and yet nothing that it has is lost
        legal = [p.name for p in source.iterdir() if p.name.upper().startswith(("LICEN", "NOTICE"))]
        names += [*CARRIED, *legal]
    for name in names:
        if (source / name).is_file() and not (target / name).exists():
            shutil.copyfile(source / name, target / name)


def check_shareable(checkpoint: Checkpoint, layout: str | None) -> None:
    """Raise `InputError` where one table is asked of a source that has two and is not PIT."""
    one_table = checkpoint.kind == "pit" or checkpoint.layout == "shared" or checkpoint.tied
    if layout == "shared" and not one_table:
        raise InputError(
            f"{checkpoint.label}: config.json says tie_word_embeddings false and the checkpoint has two different "
            f"tables, so --layout shared cannot be written; pass --layout untied, or convert the model to PIT."
        )


def check_layout(layout: str | None) -> None:
    if layout is not None and layout not in LAYOUTS:
        raise InputError(f"--layout {layout} is not known; choose {' or '.join(LAYOUTS)}.")


def with_tables(model: FoldedModel, tables: Tables, fold_name: str) -> FoldedModel:
    """The same model with other tables that compute the same function, and the change recorded."""
    return replace(model, tables=tables, folds=[*model.folds, fold_name])


def _untied_config(config: dict[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    """A loader that found `true` here would overwrite one table with the other in silence."""
    return {**config, "tie_word_embeddings": False, "vocab_size": checkpoint.table_rows}


def _folded_config(model: FoldedModel, dtype: str) -> dict[str, Any]:
    record = {
        "version": OWN_VERSION,
        "layout": model.layout,
        "folds": model.folds,
        "source": model.source.name,
    }
    config = {**model.config, "dtype": dtype}
    config.pop("torch_dtype", None)  # the older name of the same field
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
