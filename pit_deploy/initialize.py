"""Where a PIT interface starts: polar factors of a trained table, a random memory, or a PIT checkpoint.

Host arithmetic in float64 (NumPy). Source: arXiv 2602.04556, section on initialisation; limits measured here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pit_deploy.errors import InputError

if TYPE_CHECKING:
    from pit_deploy.checkpoint import Checkpoint

MAX_CONDITION = 1e6
"""Tables with a larger condition number are refused: float32 solves with such a T keep a digit at most."""

MAX_DRIFT = 1e-2
"""A memory further from orthonormal columns than this (largest entry of |ZᵀZ - I|) is no PIT memory."""

_REORTHONORMALIZE = 1e-5
"""Drift (a save in bf16, a long training) that is put right on reading; float32 rounding stays far below."""

_GRAM_LIMIT = 1e3
"""Up to this condition the Gram matrix is accurate enough (its error is eps * cond²); past it QR is used."""

_CHUNK = 8192


@dataclass(frozen=True)
class Interface:
    """The arrays of a PIT interface: float32 `memory` [V, d], float64 `cholesky` [d, d], a bridge or None."""

    memory: np.ndarray
    cholesky: np.ndarray
    bridge: np.ndarray | float | None

    @property
    def bridge_kind(self) -> str:
        if self.bridge is None:
            return "none"
        return "matrix" if isinstance(self.bridge, np.ndarray) else "scalar"

    @property
    def transform(self) -> np.ndarray:
        """`T = L Lᵀ`, float64 [d, d]."""
        return self.cholesky @ self.cholesky.T


def read_interface(checkpoint: Checkpoint) -> Interface:
    """The interface of a PIT checkpoint: what the training-time model runs on and what the fold starts from.

    A memory that has drifted from orthonormal columns is re-orthonormalised, with a note. Raises `InputError`
    for one that is no PIT memory, an `L` that is no Cholesky factor, and values that are not finite.
    """
    place = f"{checkpoint.label}: pit."
    memory = check_memory(checkpoint, "pit.memory", _REORTHONORMALIZE)
    cholesky = check_cholesky(checkpoint.read("pit.cholesky", np.float64), f"{place}cholesky")
    bridge: np.ndarray | float | None = None
    if "pit.bridge" in checkpoint.tensors:
        bridge = checkpoint.read("pit.bridge", np.float64)
        check_finite(bridge, f"{place}bridge")
    elif "pit.embedding_multiplier" in checkpoint.tensors:
        bridge = float(checkpoint.read("pit.embedding_multiplier", np.float64))
        if not (np.isfinite(bridge) and bridge):
            raise InputError(f"{place}embedding_multiplier is {bridge}; a finite number but 0 is due.")
    return Interface(memory, cholesky, bridge)


def check_memory(checkpoint: Checkpoint, key: str, limit: float) -> np.ndarray:
    """The memory under `key`, float32 [V, d], re-orthonormalised with a note where it is past `limit`."""
    memory = checkpoint.read(key)
    check_finite(memory, f"{checkpoint.label}: {key}")
    error = orthonormality_error(memory)
    if error > MAX_DRIFT:
        raise InputError(
            f"{checkpoint.label}: the columns of {key} are {error:.3g} away from orthonormal (limit {MAX_DRIFT}); "
            f"this is not a PIT memory."
        )
    if error > limit:
        memory = reorthonormalize(memory)
        checkpoint.note(
            f"{key} was {error:.2g} away from orthonormal columns and was re-orthonormalised to "
            f"{orthonormality_error(memory):.2g}"
        )
    return memory


def check_cholesky(cholesky: np.ndarray, name: str) -> np.ndarray:
    """`cholesky` itself; raises `InputError` where it is not lower triangular with a positive diagonal."""
    check_finite(cholesky, name)
    if not (np.diagonal(cholesky) > 0).all() or np.triu(cholesky, 1).any():
        raise InputError(
            f"{name} must be lower triangular with a positive diagonal (smallest diagonal entry "
            f"{np.diagonal(cholesky).min():.3g})."
        )
    return cholesky


@dataclass(frozen=True)
class PolarFactors:
    """`table = memory @ transform` with orthonormal `memory` [V, d] and SPD `transform` [d, d] (float64)."""

    memory: np.ndarray
    transform: np.ndarray
    singular_values: np.ndarray
    """Of the table, ascending, [d]."""

    @property
    def condition(self) -> float:
        return float(self.singular_values[-1] / self.singular_values[0])


def polar(
    table: np.ndarray,
    *,
    name: str = "the token table",
    dtype: Any = np.float32,
    max_condition: float = MAX_CONDITION,
) -> PolarFactors:
    """Thin polar decomposition of `table` [V, d]; `memory` is rounded to `dtype` last.

    Raises `InputError` for a table that is not finite, has fewer rows than columns, is rank deficient or has
    a condition number above `max_condition`.
    """
    rows, columns = table.shape
    if rows < columns:
        raise InputError(
            f"{name} has {rows} rows and {columns} columns; PIT needs at least as many rows (vocab_size) as "
            f"columns (hidden_size)."
        )
    check_finite(table, name)
    eigenvalues, vectors = np.linalg.eigh(_gram(table))
    if not eigenvalues[-1] > 0:
        raise InputError(f"{name} is zero everywhere; there is nothing to decompose.")
    if eigenvalues[0] > eigenvalues[-1] / _GRAM_LIMIT**2:
        singular = np.sqrt(eigenvalues)
    else:
        _, descending, right = np.linalg.svd(_triangular_factor(table))
        singular, vectors = descending[::-1], right[::-1].T
    _check_condition(singular, name, rows, columns, max_condition)
    to_memory = (vectors / singular) @ vectors.T
    if np.dtype(dtype) == np.float64:
        # One Newton step towards orthonormal columns; in float32 what it removes is below the rounding.
        to_memory = to_memory @ (1.5 * np.eye(columns) - 0.5 * _gram(table, to_memory))
    transform = (vectors * singular) @ vectors.T
    return PolarFactors(multiply(table, to_memory, dtype), (transform + transform.T) / 2, singular)


def random_orthonormal(rows: int, columns: int, *, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    """A uniformly random point of the Stiefel manifold, [rows, columns]: the polar factor of a Gaussian."""
    generator = np.random.default_rng(seed)
    gaussian = generator.standard_normal((rows, columns), dtype=np.float32)
    return polar(gaussian, name="the random token table", dtype=dtype).memory


def orthonormality_error(memory: np.ndarray) -> float:
    """The largest entry of `|ZᵀZ - I|`, accumulated in float64."""
    return float(np.abs(_gram(memory) - np.eye(memory.shape[1])).max())


def reorthonormalize(memory: np.ndarray, *, dtype: Any = np.float32) -> np.ndarray:
    """The nearest orthonormal table to `memory` [V, d] (its polar factor)."""
    return polar(memory, name="pit.memory", dtype=dtype).memory


def scratch_scale(rows: int, columns: int) -> tuple[float, float]:
    """From-scratch defaults: the scale of `T = sqrt(V/d)/2 I` and the embedding multiplier `c = 2 V/d`.

    They give embedding rows of norm about 4 and head rows of norm 1/2 (docs/pit.md has the figures).
    """
    return float(np.sqrt(rows / columns)) / 2, 2 * rows / columns


def check_finite(table: np.ndarray, name: str) -> None:
    """Raise `InputError` with the count and the first place of values that are not finite."""
    for start in range(0, len(table), _CHUNK):
        bad = ~np.isfinite(table[start : start + _CHUNK])
        if bad.any():
            place = [int(i) for i in np.argwhere(bad)[0]]
            place[0] += start
            count = sum(
                int((~np.isfinite(table[i : i + _CHUNK])).sum()) for i in range(0, len(table), _CHUNK)
            )
            raise InputError(
                f"{name} holds {count} values that are not finite, the first at {place}; repair the "
                f"checkpoint."
            )


def multiply(table: np.ndarray, matrix: np.ndarray, dtype: Any = np.float32) -> np.ndarray:
    """`table @ matrix` in float64, rounded to `dtype`; in chunks, so that no second float64 table is held."""
    out = np.empty((len(table), matrix.shape[1]), dtype)
    for start in range(0, len(table), _CHUNK):
        out[start : start + _CHUNK] = table[start : start + _CHUNK].astype(np.float64) @ matrix
    return out


def inner_product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """`leftᵀ right` of two tables, accumulated in float64."""
    total = np.zeros((left.shape[1], right.shape[1]))
    for start in range(0, len(left), _CHUNK):
        span = slice(start, start + _CHUNK)
        total += left[span].astype(np.float64).T @ right[span].astype(np.float64)
    return total


def _gram(table: np.ndarray, matrix: np.ndarray | None = None) -> np.ndarray:
    """`YᵀY` of `Y = table` or `Y = table @ matrix`, in float64."""
    total = np.zeros((table.shape[1],) * 2)
    for start in range(0, len(table), _CHUNK):
        part = table[start : start + _CHUNK].astype(np.float64)
        part = part if matrix is None else part @ matrix
        total += part.T @ part  # one array on both sides: BLAS computes half of the symmetric product
    return total


def _triangular_factor(table: np.ndarray) -> np.ndarray:
    """`R` of `table = Q R`, chunk by chunk: the same singular values, accurate at any condition number."""
    triangular: np.ndarray = np.empty((0, table.shape[1]))
    for start in range(0, len(table), _CHUNK):
        part = table[start : start + _CHUNK].astype(np.float64)
        triangular = np.asarray(np.linalg.qr(np.concatenate([triangular, part]), mode="r"))
    return triangular


def _check_condition(singular: np.ndarray, name: str, rows: int, columns: int, limit: float) -> None:
    smallest, largest = float(singular[0]), float(singular[-1])
    rank = int((singular > largest * np.finfo(np.float32).eps).sum())
    if rank < columns:
        raise InputError(
            f"{name} [{rows}, {columns}] is rank deficient (rank {rank}, singular values {smallest:.3g} to "
            f"{largest:.3g}); PIT needs full column rank."
        )
    if largest / smallest > limit:
        raise InputError(
            f"{name} has condition number {largest / smallest:.3g}, above the limit {limit:.3g} (singular "
            f"values {smallest:.3g} to {largest:.3g}); solves with it would lose the embedding."
        )
