"""Where a PIT interface starts: the polar factors of a trained table, or a random orthonormal memory.

Host arithmetic in float64 (NumPy). Source: arXiv 2602.04556, section on initialisation; limits measured here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pit_deploy.errors import InputError

MAX_CONDITION = 1e6
"""Tables with a larger condition number are refused: float32 solves with such a T keep fewer than two digits."""

_GRAM_LIMIT = 1e3
"""Up to this condition the Gram matrix is accurate enough (its error is eps * cond²); past it QR is used."""

_CHUNK = 8192


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
    gram = _gram(table)
    eigenvalues, vectors = np.linalg.eigh(gram)
    largest = float(eigenvalues[-1])
    if not largest > 0:
        raise InputError(f"{name} is zero everywhere; there is nothing to decompose.")
    if eigenvalues[0] > largest / _GRAM_LIMIT**2:
        singular = np.sqrt(eigenvalues)
        to_memory = (vectors / singular) @ vectors.T
        memory_of = _Product(table, to_memory)
    else:
        orthonormal, triangular = np.linalg.qr(table.astype(np.float64))
        left, descending, right = np.linalg.svd(triangular)
        singular, vectors = descending[::-1], right[::-1].T
        memory_of = _Product(orthonormal, left @ right)
    _check_condition(singular, name, rows, columns, max_condition)
    transform = (vectors * singular) @ vectors.T
    # One Newton step towards orthonormal columns removes what eigh and the product left over.
    memory_of.matrix = memory_of.matrix @ (1.5 * np.eye(columns) - 0.5 * memory_of.gram())
    return PolarFactors(memory_of.result(dtype), (transform + transform.T) / 2, singular)


def random_orthonormal(rows: int, columns: int, *, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    """A uniformly random point of the Stiefel manifold, [rows, columns]: the polar factor of a Gaussian."""
    gaussian = np.random.default_rng(seed).standard_normal((rows, columns))
    return polar(gaussian, name="a random table", dtype=dtype).memory


def orthonormality_error(memory: np.ndarray) -> float:
    """The largest entry of `|ZᵀZ - I|`, accumulated in float64."""
    return float(np.abs(_gram(memory) - np.eye(memory.shape[1])).max())


def reorthonormalize(memory: np.ndarray, *, dtype: Any = np.float32) -> np.ndarray:
    """The nearest orthonormal table to `memory` [V, d] (its polar factor)."""
    return polar(memory, name="pit.memory", dtype=dtype).memory


def scratch_scale(rows: int, columns: int) -> tuple[float, float]:
    """From-scratch defaults: the scale of `T = sqrt(V/d) I` and the embedding multiplier `c = V/d`.

    They give embedding rows of norm about 1 and logits of the usual size (docs/pit.md has the figures).
    """
    return float(np.sqrt(rows / columns)), rows / columns


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
                f"{name} holds {count} values that are not finite, the first at {place}; repair the checkpoint."
            )


class _Product:
    """`table @ matrix`, made in chunks of rows so that no second float64 table is held."""

    def __init__(self, table: np.ndarray, matrix: np.ndarray) -> None:
        self.table, self.matrix = table, matrix

    def gram(self) -> np.ndarray:
        total = np.zeros((self.matrix.shape[1],) * 2)
        for start in range(0, len(self.table), _CHUNK):
            part = self.table[start : start + _CHUNK].astype(np.float64) @ self.matrix
            total += part.T @ part
        return total

    def result(self, dtype: Any) -> np.ndarray:
        out = np.empty((len(self.table), self.matrix.shape[1]), dtype)
        for start in range(0, len(self.table), _CHUNK):
            out[start : start + _CHUNK] = self.table[start : start + _CHUNK].astype(np.float64) @ self.matrix
        return out


def _gram(table: np.ndarray) -> np.ndarray:
    total = np.zeros((table.shape[1],) * 2)
    for start in range(0, len(table), _CHUNK):
        part = table[start : start + _CHUNK].astype(np.float64)
        total += part.T @ part
    return total


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
            f"{name} has condition number {largest / smallest:.3g}, above the limit {limit:.3g} (singular values "
            f"{smallest:.3g} to {largest:.3g}); solves with it would lose the embedding."
        )
