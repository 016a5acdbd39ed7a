"""What a path is: a checkpoint, a folded checkpoint or a bundle, with the numbers that matter of each."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from pit_deploy.bundle import Bundle
from pit_deploy.checkpoint import Checkpoint, open_checkpoint


def inspect(path: str | Path) -> dict[str, Any]:
    """Describe `path` as one JSON-ready object; its `kind` is `plain`, `pit`, `folded` or `bundle`.

    Reads the token tables (for condition and interface error), and nothing else of the weights.
    """
    if (Path(path) / "manifest.json").is_file():
        return _bundle(Bundle.open(path))
    checkpoint = open_checkpoint(path)
    try:
        return _checkpoint(checkpoint)
    finally:
        checkpoint.close()


def _bundle(bundle: Bundle) -> dict[str, Any]:
    manifest = bundle.manifest
    summary = manifest.quantization_summary
    return {
        "kind": "bundle",
        "path": str(bundle.path),
        "source": manifest.source.name,
        "model_type": manifest.architecture.model_type,
        "runtime": manifest.runtime,
        "profile": manifest.profile,
        "layout": manifest.layout,
        "precision": manifest.precision.model_dump(),
        "folds": list(manifest.folds),
        "vocab_size": manifest.vocab_size,
        "tokenizer_length": manifest.tokenizer_length,
        "context_length": manifest.context_length,
        "end_ids": list(manifest.end_ids),
        "total_bytes": bundle.total_bytes,
        "parts": {f.path: f.size for f in manifest.files},
        "quantization": summary.model_dump() if summary else None,
        "unlisted": list(bundle.unlisted),
    }


def _checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    found: dict[str, Any] = {
        "kind": checkpoint.kind,
        "path": str(checkpoint.path),
        "model_type": checkpoint.model_type,
        "layout": checkpoint.layout,
        "tied": checkpoint.tied if checkpoint.kind == "plain" else None,
        "parameters": sum(prod(t.shape) for t in checkpoint.tensors.values()),
        "dtypes": sorted({t.dtype for t in checkpoint.tensors.values()}),
        "weight_bytes": checkpoint.total_bytes,
        "tensors": len(checkpoint.tensors),
        "vocab_size": checkpoint.table_rows,
        "hidden_size": checkpoint.config.get("hidden_size"),
        "tokenizer_length": checkpoint.tokenizer_length() if checkpoint.is_tokenized() else None,
        "folds": checkpoint.config.get("pit_fold", {}).get("folds", []),
    }
    if checkpoint.kind == "pit":
        found |= _pit_numbers(checkpoint)
    elif checkpoint.kind == "plain":
        found |= _table_numbers(checkpoint)
    if checkpoint.is_tokenized():
        checkpoint.check_vocabulary()
    return {**found, "notes": checkpoint.notes}


def _pit_numbers(checkpoint: Checkpoint) -> dict[str, Any]:
    from pit_deploy.initialize import orthonormality_error
    from pit_deploy.model import load_interface

    error = orthonormality_error(checkpoint.read("pit.memory"))
    interface = load_interface(checkpoint)
    singular = np.linalg.svd(interface.cholesky.detach().double().numpy(), compute_uv=False)
    return {
        "memory": interface.memory_kind,
        "bridge": interface.bridge_kind,
        "interface_error": interface.interface_error(),
        "orthonormality_error": error,
        "condition": float((singular[0] / singular[-1]) ** 2),
    }


def _table_numbers(checkpoint: Checkpoint) -> dict[str, Any]:
    """delta_TI = ||Wᵀ E - I||_F / sqrt(d) of the tables as they are, and the head's condition number."""
    head = checkpoint.read(checkpoint.head_key, np.float64)
    embedding = head if checkpoint.tied else checkpoint.read(checkpoint.embedding_key, np.float64)
    columns = head.shape[1]
    error = np.linalg.norm(head.T @ embedding - np.eye(columns)) / np.sqrt(columns)
    eigenvalues = np.linalg.eigvalsh(head.T @ head)
    condition = float(np.sqrt(eigenvalues[-1] / eigenvalues[0])) if eigenvalues[0] > 0 else None
    return {"interface_error": float(error), "condition": condition}
