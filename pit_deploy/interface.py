"""The PIT interface: one orthonormal token memory `Z` and one SPD transform `T = L Lᵀ`, for both ends of a model.

    embedding   x = z T⁻¹ B         two triangular solves on the gathered rows only
    head        logits = (h T) Zᵀ

`B` is the bridge of a converted model (docs/pit.md): a matrix, a scalar, or absent in the paper's strict form.
Source: arXiv 2602.04556. No pseudo-inverse is computed and nothing of the vocabulary's size is kept beside `Z`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

BRIDGES = ("none", "scalar", "matrix")
MEMORIES = ("frozen", "stiefel")


class PITInterface(nn.Module):
    """Embedding and head over a shared memory.

    Args:
        memory: `Z` [V, d], orthonormal columns.
        cholesky: `L` [d, d], lower triangular with a positive diagonal.
        bridge: `B` [d, d], a number, or None.
        memory_kind: `frozen` keeps `Z`; `stiefel` makes it a parameter, to be trained on the manifold.

    Parameters are float32 and stay so when the model around is cast; autocast is off inside.
    """

    def __init__(
        self,
        memory: torch.Tensor,
        cholesky: torch.Tensor,
        bridge: torch.Tensor | float | None = None,
        *,
        memory_kind: str = "frozen",
    ) -> None:
        super().__init__()
        if memory_kind not in MEMORIES:
            raise ValueError(f"memory_kind is {memory_kind!r}; choose one of {MEMORIES}")
        hidden_size = memory.shape[1]
        if cholesky.shape != (hidden_size, hidden_size):
            raise ValueError(f"cholesky is {tuple(cholesky.shape)}, expected {(hidden_size, hidden_size)}")
        self.memory_kind = memory_kind
        self.memory = nn.Parameter(memory, requires_grad=memory_kind == "stiefel")
        self.raw_cholesky = nn.Parameter(cholesky_to_raw(cholesky))
        self.bridge: nn.Parameter | None = None
        self.embedding_multiplier: torch.Tensor | None
        if isinstance(bridge, torch.Tensor) and bridge.ndim == 2:
            self.bridge = nn.Parameter(bridge)
        multiplier = (
            None if bridge is None or self.bridge is not None else torch.as_tensor(bridge, dtype=memory.dtype)
        )
        self.register_buffer("embedding_multiplier", multiplier)
        self._precise = False

    @property
    def bridge_kind(self) -> str:
        if self.bridge is not None:
            return "matrix"
        return "none" if self.embedding_multiplier is None else "scalar"

    @property
    def cholesky(self) -> torch.Tensor:
        """`L` [d, d], differentiable in the raw parameter."""
        return raw_to_cholesky(self.raw_cholesky)

    def transform(self) -> torch.Tensor:
        """`T = L Lᵀ` [d, d]."""
        cholesky = self.cholesky
        return cholesky @ cholesky.T

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embedding rows, [..., d], for ids [...]."""
        with _no_autocast(self.memory):
            rows = self._exact(F.embedding(input_ids, self.memory)).reshape(-1, self.memory.shape[1])
            cholesky = self._exact(self.raw_cholesky, raw_to_cholesky)
            half = torch.linalg.solve_triangular(cholesky.T, rows, upper=True, left=False)
            x = torch.linalg.solve_triangular(cholesky, half, upper=False, left=False)
            if self.bridge is not None:
                x = x @ self._exact(self.bridge)
            elif self.embedding_multiplier is not None:
                x = x * self._exact(self.embedding_multiplier)
            return x.to(self.memory.dtype).reshape(*input_ids.shape, -1)

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] of states [..., d] after the final norm, in the memory's dtype."""
        with _no_autocast(self.memory):
            cholesky = self._exact(self.raw_cholesky, raw_to_cholesky)
            states = self._exact(hidden_states) @ cholesky @ cholesky.T
            return F.linear(states.to(self.memory.dtype), self.memory)

    @contextlib.contextmanager
    def precise(self) -> Iterator[None]:
        """Inside, everything of size d x d runs in float64. Float32 solves lose up to eps * cond(T)."""
        before, self._precise = self._precise, True
        try:
            yield
        finally:
            self._precise = before

    @torch.no_grad()
    def interface_error(self, *, chunk: int = 8192) -> float:
        """delta_TI = ||Wᵀ E - I||_F / sqrt(d) of `W = Z T` and `E = Z T⁻¹` as this dtype computes them, no bridge."""
        hidden_size = self.memory.shape[1]
        cholesky = self.cholesky
        total = torch.zeros(hidden_size, hidden_size, dtype=torch.float64, device=cholesky.device)
        for z in self.memory.split(chunk):
            half = torch.linalg.solve_triangular(cholesky.T, z, upper=True, left=False)
            embedding = torch.linalg.solve_triangular(cholesky, half, upper=False, left=False)
            total += (z @ cholesky @ cholesky.T).double().T @ embedding.double()
        return interface_error_of(total)

    def _exact(
        self, tensor: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> torch.Tensor:
        tensor = tensor.to(torch.float64 if self._precise else self.memory.dtype)
        return tensor if function is None else function(tensor)

    def _apply(self, fn: Any, recurse: bool = True) -> PITInterface:
        """Follow moves between devices and casts to float64, but never a cast below float32."""

        def keep_precision(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            if moved.is_floating_point() and torch.finfo(moved.dtype).bits < torch.finfo(tensor.dtype).bits:
                return tensor.to(moved.device)
            return moved

        super()._apply(keep_precision, recurse)
        return self


def interface_error_of(product: torch.Tensor) -> float:
    """||P - I||_F / sqrt(d) for `P = Wᵀ E` [d, d]."""
    hidden_size = product.shape[0]
    identity = torch.eye(hidden_size, dtype=product.dtype, device=product.device)
    return float(torch.linalg.matrix_norm(product - identity) / hidden_size**0.5)


def raw_to_cholesky(raw: torch.Tensor) -> torch.Tensor:
    """`L` from an unconstrained [d, d] matrix: its strict lower part, and softplus of its diagonal."""
    return torch.tril(raw, -1) + torch.diag(F.softplus(torch.diagonal(raw)))


def cholesky_to_raw(cholesky: torch.Tensor) -> torch.Tensor:
    """The inverse of `raw_to_cholesky`; raises ValueError where the diagonal is not positive."""
    diagonal = torch.diagonal(cholesky).double()
    if not bool((diagonal > 0).all()):
        raise ValueError(
            f"the diagonal of L must be positive; its smallest entry is {diagonal.min().item():.3g}"
        )
    raw = diagonal + torch.log(-torch.expm1(-diagonal))
    return torch.tril(cholesky, -1) + torch.diag(raw.to(cholesky.dtype))


def _no_autocast(tensor: torch.Tensor) -> torch.autocast:
    return torch.autocast(tensor.device.type, enabled=False)
