"""`Z` and `T` stepped together, as the one table that they stand for.

Every table `W` [V, d] of full rank is `Z T` in one way only: its polar factors. So a model with a PIT interface has
the degrees of freedom of a head without any constraint, and may be trained like one. What a retraction of `Z` by
itself would throw away, the part of a step along `Z`, goes into `T`.

While a run lasts the interface holds `W = Y A`: `Y` [V, d] in the place of the memory, its columns nearly orthonormal,
and `A` [d, d], which stays. With `S = WᵀW = T²` the head is `W` and the embedding `W S⁻¹`, which is `Z T⁻¹`: strictly
PIT at every step. `Y` and `A` become `Z` and `T` where somebody reads them, in an evaluation, a checkpoint or the
result, and where `Y` has moved too far. To make the polar factors at each step, and the gradient by `W` from that by
`Z`, would take twice the arithmetic. So, of products as large as `V d²`, a step has

- none for most of the gradient by `W`, which comes out of the backward pass: at the head, where a product with
  `dlogits` makes it anyway, and at the embedding on the gathered rows. What is missing lies along `W`: one product;
- one for the optimiser's step `D`, which becomes `Y + D A⁻¹`, and a Gram matrix of that, from which the new `S` comes.
  It is near the identity: that of the table itself would lose digits with the square of `T`'s condition;
- a Gram matrix of the gradient where it is clipped by its norm.

As in `stiefel`, rows may be spread over processes, and what crosses between them are d x d matrices.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn import functional as F

from pit_deploy.errors import PitDeployError
from pit_deploy.training.optimizers import set_cholesky_, whole, whole_cholesky
from pit_deploy.training.stiefel import gram_of, local_rows, multiply_, multiply_add_

_FAR = 2.0
"""`Y` becomes `Z` where an eigenvalue of `YᵀY` leaves 1/2 to 2: up to there its Gram matrix loses no digit."""

_RANK = 1e-14
"""Least eigenvalue of `S` relative to the largest."""


class SteppedTable:
    """The table of an interface while it is trained, `W = Y A`; made of `Z` and `T` as they are.

    The interface calls `embed` and `logits` in place of its own arithmetic. A step is `clip_` (where asked), `begin_`,
    the optimiser's, `end_`. `settle_` gives the interface its `Z` and `T`. Raises ValueError where `T` is not finite.
    """

    def __init__(self, interface: Any) -> None:
        self.interface = interface
        self._before: torch.Tensor | None = None
        self._start()

    def _start(self) -> None:
        lower = whole_cholesky(self.interface).double()
        if not bool(torch.isfinite(lower).all()):
            raise ValueError("L holds values that are not finite; lower the learning rate")
        self.factor = lower @ lower.T  # A
        self.inverse_factor = torch.cholesky_inverse(lower)
        self._settled = True
        self._set_square(self.factor @ self.factor)

    def _set_square(self, square: torch.Tensor) -> None:
        """Take `S` [d, d], and what a forward and a backward pass need of it."""
        if not bool(torch.isfinite(square).all()):
            raise ValueError(
                "the memory holds values that are not finite; lower the interface's learning rate"
            )
        values, vectors = torch.linalg.eigh((square + square.T) / 2)
        if not float(values[0]) > _RANK * float(values[-1]):
            low, high = (max(float(v), 0.0) ** 0.5 for v in (values[0], values[-1]))
            raise ValueError(
                f"the table's columns are linearly dependent (singular values {low:.3g} to {high:.3g}); lower the "
                f"interface's learning rate"
            )
        self._values, self._vectors = values, vectors
        self.square, self.inverse_square = square, (vectors / values) @ vectors.T
        dtype = self.interface.memory.dtype
        self.head_map = self.factor.T.to(dtype).requires_grad_()
        self.embedding_map = (self.factor @ self.inverse_square).to(dtype).requires_grad_()
        self._inverse_square = self.inverse_square.to(dtype)
        self._gradients: tuple[torch.Tensor, torch.Tensor] | None = None

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of `W S⁻¹` [n, d] for ids [n]."""
        rows: torch.Tensor = _Embedding.apply(
            ids, self.interface.memory, self.embedding_map, self._inverse_square
        )
        return rows

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """`states Wᵀ` [..., V] of states [..., d]."""
        logits: torch.Tensor = _Head.apply(states, self.interface.memory, self.head_map)
        return logits

    @torch.no_grad()
    def clip_(self, limit: float) -> torch.Tensor:
        """Scale the gradients of the interface to a norm of `limit` at most; the norm before.

        It is that of the gradients by `Z`, by `L` in the form in which it is trained, and by the bridge.
        """
        gradient, group = local_rows(self.interface.memory.grad)
        total = (gram_of(gradient, group) * self.square).sum()  # ‖G T‖², G the gradient by W for a given WᵀW
        total += self._raw_gradient().square().sum()
        bridge = None if self.interface.bridge is None else self.interface.bridge.grad
        if bridge is not None:
            total += whole(bridge).double().square().sum()
        norm = total.clamp(min=0).sqrt()
        scale = (limit / (norm + 1e-6)).clamp(max=1)
        for part in (gradient, *self._collected(), *([] if bridge is None else [bridge])):
            part.mul_(scale.to(part.dtype))
        return norm

    @torch.no_grad()
    def begin_(self) -> None:
        """Make the memory's gradient that by `W`, and the memory zero: the optimiser then leaves its step there.

        Raises ValueError where a gradient is not finite.
        """
        rows, _ = local_rows(self.interface.memory.detach())
        gradient, _ = local_rows(self.interface.memory.grad)
        by_embedding = self._collected()[1]
        if not bool(torch.isfinite(by_embedding).all()):
            raise ValueError("the gradient holds values that are not finite; lower the learning rate")
        # What the backward passes held: dS⁻¹ = -S⁻¹ (dWᵀ W + Wᵀ dW) S⁻¹, in the embedding's map A S⁻¹.
        half = self.inverse_square @ by_embedding.T @ self.factor @ self.inverse_square
        gradient.addmm_(rows, (self.factor @ (half + half.T)).to(rows.dtype), alpha=-1)
        self._before = rows.clone()
        rows.zero_()

    @torch.no_grad()
    def end_(self) -> None:
        """Put `W + D` in the place of the optimiser's step `D`, which the memory holds.

        Raises ValueError where the table is then not of full rank or not finite.
        """
        if self._before is None:
            return
        rows, group = local_rows(self.interface.memory.detach())
        self._settled = False
        multiply_add_(rows, self.inverse_factor, self._before)
        gram = gram_of(rows, group)
        self._set_square(self.factor.T @ gram @ self.factor)
        self._before = None  # from here on the step holds; before, `abandon_` takes it back
        values = torch.linalg.eigvalsh(gram)
        if float(values[0]) < 1 / _FAR or float(values[-1]) > _FAR:
            self.settle_()
            # So far from the identity the Gram matrix lost digits, and with it S: once more from a near one.
            gram = gram_of(rows, group)
            self._settled = False
            self._set_square(self.factor.T @ gram @ self.factor)
            self.settle_()

    @torch.no_grad()
    def abandon_(self) -> None:
        """Give up a step that has begun."""
        if self._before is not None:
            rows, _ = local_rows(self.interface.memory.detach())
            rows.copy_(self._before)
        self._before = self._gradients = self.head_map.grad = self.embedding_map.grad = None

    @torch.no_grad()
    def settle_(self) -> None:
        """Give the interface its `Z` and `T`. Every process of a run must call it.

        Raises PitDeployError within a step, whose gradients are of the table as it was.
        """
        if self._settled:
            return
        if self._before is not None or self.head_map.grad is not None:
            raise PitDeployError("the model is within a training step; read or save it between steps.")
        rows, _ = local_rows(self.interface.memory.detach())
        multiply_(rows, self.factor @ (self._vectors * self._values.rsqrt()) @ self._vectors.T)
        set_cholesky_(self.interface, self._cholesky())
        self._start()

    def _cholesky(self) -> torch.Tensor:
        """`L` of `T = L Lᵀ`, the root of `S`."""
        return torch.linalg.cholesky((self._vectors * self._values.sqrt()) @ self._vectors.T)

    def _collected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients by the two maps, float64, the mean over processes."""
        if self._gradients is None:
            maps = (self.head_map, self.embedding_map)
            both = torch.stack([cast(torch.Tensor, m.grad).double() for m in maps])
            if dist.is_available() and dist.is_initialized():
                dist.all_reduce(both)
                both /= dist.get_world_size()
            self._gradients = both[0], both[1]
        return self._gradients

    def _raw_gradient(self) -> torch.Tensor:
        """The gradient by the raw form of `L` [d, d] that counts from `L` itself, `Z` held."""
        lower = self._cholesky()
        by_head, by_embedding = self._collected()
        inverse = torch.cholesky_inverse(lower)
        turn = self.factor @ inverse  # Z = Y times this
        both = by_head @ turn - inverse @ turn.T @ by_embedding @ inverse
        by_lower = torch.tril((both + both.T) @ lower)
        slope = -torch.expm1(-torch.diagonal(lower))  # of softplus, where it has the diagonal's value
        return torch.tril(by_lower, -1) + torch.diag(torch.diagonal(by_lower) * slope)


class _Head(torch.autograd.Function):
    """`states K Yᵀ`, K [d, d] the head's map. The gradient for `Y` is that by `W = Y Kᵀ`."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, memory: torch.Tensor, head_map: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(states, memory, head_map)
        return F.linear(states @ head_map, memory)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        states, memory, head_map = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        flat = states.reshape(-1, states.shape[-1])
        inner = rows @ memory
        return (inner @ head_map.T).reshape(states.shape), rows.T @ flat, flat.T @ inner


class _Embedding(torch.autograd.Function):
    """Rows of `Y N`, N [d, d] the embedding's map. The gradient for `Y` is that by `W` in `W S⁻¹`, S held."""

    @staticmethod
    def forward(
        ctx: Any, ids: torch.Tensor, memory: torch.Tensor, embedding_map: torch.Tensor, inverse: torch.Tensor
    ) -> torch.Tensor:
        rows = F.embedding(ids, memory)
        ctx.save_for_backward(ids, rows, inverse)
        ctx.rows = memory.shape[0]
        return rows @ embedding_map

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor, torch.Tensor, None]:
        ids, rows, inverse = ctx.saved_tensors
        by_table = torch.sparse_coo_tensor(
            ids[None], gradient @ inverse, (ctx.rows, rows.shape[1]), check_invariants=False
        )
        return None, by_table, rows.T @ gradient, None
