"""The memory's manifold: tables with orthonormal columns, and steps that stay on it.

A table may be spread over processes by rows. Each process then passes its own rows and the group, and what
crosses between them is one d x d matrix a call: `Zᵀ G` for the tangent space, `YᵀY` for the retraction.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

_CHUNK = 8192
_BAND = 144
"""Least width of a band of a Gram matrix; narrow products are slow and round badly."""

_NEWTON_LIMIT = 0.5
"""Up to this distance of the Gram matrix from I (Frobenius) the Newton iteration converges in a few steps."""

_FLOOR = 1e-7
"""Directions of an update weaker than this, relative to the strongest, are left out when it is orthogonalised."""


def local_rows(table: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """The rows of `table` [V, d] that this process holds, and the group that holds the others (None: all here)."""
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(table, DTensor):
        return table, None
    if table.device_mesh.ndim != 1 or not all(isinstance(p, Shard) and p.dim == 0 for p in table.placements):
        raise ValueError(
            f"the memory must be sharded by rows over one mesh dimension, not {table.placements}"
        )
    return table.to_local(), table.device_mesh.get_group()


@torch.no_grad()
def project_to_tangent_(gradient: torch.Tensor, memory: torch.Tensor, group: Any = None) -> torch.Tensor:
    """`G - Z sym(Zᵀ G)` in place: the part of `gradient` [V, d] along the manifold at `memory` [V, d]."""
    inner = inner_product(memory, gradient, group)
    return gradient.addmm_(memory, ((inner + inner.T) / 2).to(memory.dtype), alpha=-1)


@torch.no_grad()
def retract_(memory: torch.Tensor, group: Any = None) -> torch.Tensor:
    """`Y (YᵀY)^(-1/2)` in place: the nearest table with orthonormal columns to `memory` [V, d].

    Raises ValueError where the columns of `memory` are linearly dependent or not finite.
    """
    return multiply_(memory, inverse_root(gram_of(memory, group)))


@torch.no_grad()
def orthogonalized(update: torch.Tensor, group: Any = None) -> torch.Tensor:
    """The polar factor of `update` [V, d]: the same directions, each of length 1. Missing ones stay missing."""
    values, vectors = torch.linalg.eigh(gram_of(update, group))
    largest = values[-1].clamp(min=torch.finfo(values.dtype).tiny)
    scale = torch.where(values > _FLOOR**2 * largest, values.clamp(min=1e-300).rsqrt(), 0.0)
    return multiply_(update.clone(), (vectors * scale) @ vectors.T)


@torch.no_grad()
def orthonormality_error(memory: torch.Tensor, group: Any = None) -> float:
    """The largest entry of `|ZᵀZ - I|`."""
    gram = gram_of(memory, group)
    return float((gram - torch.eye(len(gram), dtype=gram.dtype, device=gram.device)).abs().max())


def inverse_root(gram: torch.Tensor) -> torch.Tensor:
    """`G^(-1/2)` of a symmetric positive definite `gram` [d, d], float64.

    Near the identity by the coupled Newton iteration, which needs products only; elsewhere by `eigh`. Raises
    ValueError where `gram` is singular or not finite.
    """
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    distance = float(torch.linalg.matrix_norm(gram - identity))
    if distance < _NEWTON_LIMIT:
        root, inverse = gram, identity
        for _ in range(12):
            correction = (3 * identity - inverse @ root) / 2
            root, inverse = root @ correction, correction @ inverse
            if float(torch.linalg.matrix_norm(correction - identity)) < 1e-12:
                break
        return (inverse + inverse.T) / 2
    if distance != distance or distance == float("inf"):
        raise ValueError("the memory holds values that are not finite; lower the interface's learning rate")
    values, vectors = torch.linalg.eigh(gram)
    if not float(values[0]) > 1e-12 * float(values[-1]):
        raise ValueError(
            f"the memory's columns are linearly dependent (Gram eigenvalues {float(values[0]):.3g} to "
            f"{float(values[-1]):.3g}); lower the interface's learning rate"
        )
    return (vectors * values.rsqrt()) @ vectors.T


def inner_product(left: torch.Tensor, right: torch.Tensor, group: Any) -> torch.Tensor:
    """`leftᵀ right` [d, d], summed over chunks of rows and over processes in float64."""
    total = torch.zeros(left.shape[1], right.shape[1], dtype=torch.float64, device=left.device)
    for a, b in zip(left.split(_CHUNK), right.split(_CHUNK), strict=True):
        total += a.T @ b
    if group is not None:
        dist.all_reduce(total, group=group)
    return total


def gram_of(table: torch.Tensor, group: Any) -> torch.Tensor:
    """`tableᵀ table` [d, d] as `inner_product`; blocks above the diagonal are mirrored, a third less work."""
    size = table.shape[1]
    bands = min(4, max(1, size // _BAND))
    bounds = [(size * k // bands, size * (k + 1) // bands) for k in range(bands)]
    total = torch.zeros(size, size, dtype=torch.float64, device=table.device)
    for rows in table.split(_CHUNK):
        for low, high in bounds:
            total[low:high, :high] += rows[:, low:high].T @ rows[:, :high]
    if group is not None:
        dist.all_reduce(total, group=group)
    return torch.tril(total) + torch.tril(total, -1).T


def multiply_(table: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """`table @ matrix` in place, by chunks of rows: no second table is held."""
    matrix = matrix.to(table.dtype)
    for rows in table.split(_CHUNK):
        rows.copy_(rows @ matrix)
    return table


def multiply_add_(table: torch.Tensor, matrix: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`table @ matrix + other` in place, as `multiply_`; `other` is a table too."""
    matrix = matrix.to(table.dtype)
    for rows, added in zip(table.split(_CHUNK), other.split(_CHUNK), strict=True):
        rows.copy_(torch.addmm(added, rows, matrix))
    return table
