"""`Z` and `T` stepped together, as the one table that they stand for.

Every table `W` [V, d] of full rank is `Z T` in one way only: its polar factors. So a model with a PIT interface has
the degrees of freedom of a head without any constraint, and may be trained like one: the gradients of `Z` and `T`
are pulled back to one gradient of `W`, the optimiser makes a step `D` of `W`, and `Z T + D` is split again. What a
retraction of `Z` by itself would throw away, the part of a step along `Z`, goes into `T`.

As in `stiefel`, rows may be spread over processes, and what crosses between them is one d x d matrix for the gradient
and one for the split.
"""

from __future__ import annotations

from typing import Any

import torch

from pit_deploy.training.stiefel import gram_of, inner_product, multiply_


@torch.no_grad()
def pull_back_(
    gradient: torch.Tensor,
    memory: torch.Tensor,
    cholesky: torch.Tensor,
    cholesky_gradient: torch.Tensor,
    group: Any = None,
) -> torch.Tensor:
    """The gradient by `W` [V, d], in place of that by `Z` in `gradient` [V, d].

    `cholesky` is `L` [d, d], `cholesky_gradient` the gradient by its entries. The gradient by `W` is
    `G T⁻¹ + Z (2 T X)`, X the symmetric solution of `T X + X T = G_T - sym(Zᵀ G T⁻¹)`: the derivative of the polar
    factors. Raises ValueError where `L` or the gradient is not finite.
    """
    lower = cholesky.double()
    if not bool(torch.isfinite(lower).all()):
        raise ValueError("L holds values that are not finite; lower the learning rate")
    values, vectors = torch.linalg.eigh(lower @ lower.T)
    inverse = (vectors / values) @ vectors.T
    inner = inner_product(memory, gradient, group) @ inverse
    right = _transform_gradient(lower, cholesky_gradient.double()) - (inner + inner.T) / 2
    if not bool(torch.isfinite(right).all()):
        raise ValueError("the gradient holds values that are not finite; lower the learning rate")
    weights = 2 * values[:, None] / (values[:, None] + values[None, :])
    along = vectors @ (weights * (vectors.T @ right @ vectors)) @ vectors.T
    return multiply_(gradient, inverse).addmm_(memory, along.to(memory.dtype))


@torch.no_grad()
def split_(
    step: torch.Tensor, memory: torch.Tensor, cholesky: torch.Tensor, group: Any = None
) -> torch.Tensor:
    """The polar factors of `Z T + D`: the new `Z`, in place of `D` in `step` [V, d], and the new `L`, float64.

    Works through `Y = Z + D T⁻¹`, whose Gram matrix is near I: that of the table would lose digits with the square
    of `T`'s condition. Raises ValueError where the table is not of full rank or not finite.
    """
    transform = cholesky.double() @ cholesky.double().T
    stepped = multiply_(step, torch.linalg.inv(transform)).add_(memory)
    square = transform @ gram_of(stepped, group) @ transform
    if not bool(torch.isfinite(square).all()):
        raise ValueError("the memory holds values that are not finite; lower the interface's learning rate")
    values, vectors = torch.linalg.eigh((square + square.T) / 2)
    if not float(values[0]) > 1e-14 * float(values[-1]):
        raise ValueError(
            f"the table's columns are linearly dependent (singular values {max(float(values[0]), 0.0) ** 0.5:.3g} to "
            f"{float(values[-1]) ** 0.5:.3g}); lower the interface's learning rate"
        )
    multiply_(stepped, transform @ (vectors * values.rsqrt()) @ vectors.T)
    return torch.linalg.cholesky((vectors * values.sqrt()) @ vectors.T)


def _transform_gradient(cholesky: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The symmetric gradient by `T = L Lᵀ` [d, d] from that by the lower triangle of `L`."""
    inner = torch.tril(cholesky.T @ gradient)
    inner = inner - torch.diag(torch.diagonal(inner)) / 2
    half = torch.linalg.solve_triangular(cholesky.T, inner, upper=True)
    both = torch.linalg.solve_triangular(cholesky, half, upper=False, left=False)
    return (both + both.T) / 2
