"""The PIT interface: one orthonormal token memory `Z` and one SPD transform `T = L Lᵀ` for both ends of a model.

    embedding   x = z T⁻¹ B         two triangular solves on the gathered rows only
    head        logits = (h T) Zᵀ

`B` is the bridge of a converted model (docs/pit.md): a matrix, a scalar, or absent in the paper's strict form.
Source: arXiv 2602.04556. No pseudo-inverse is computed, and nothing of the vocabulary's size is kept but `Z`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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

    cholesky_anchor: torch.Tensor
    embedding_multiplier: torch.Tensor | None

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
        square = (memory.shape[1], memory.shape[1])
        if cholesky.shape != square:
            raise ValueError(f"cholesky is {tuple(cholesky.shape)}, expected {square}")
        self.memory_kind = memory_kind
        self.memory = nn.Parameter(memory, requires_grad=memory_kind == "stiefel")
        raw, anchor = cholesky_to_raw(cholesky)
        self.raw_cholesky = nn.Parameter(raw)
        self.register_buffer("cholesky_anchor", anchor)
        self.bridge: nn.Parameter | None = None
        multiplier = None
        if isinstance(bridge, torch.Tensor) and bridge.ndim:
            if bridge.shape != square:
                raise ValueError(f"bridge is {tuple(bridge.shape)}, expected {square} or a number")
            self.bridge = nn.Parameter(bridge)
        elif bridge is not None:
            multiplier = torch.as_tensor(bridge, dtype=memory.dtype, device=memory.device)
        self.register_buffer("embedding_multiplier", multiplier)
        self._precise = False
        self.table: Any = (
            None  # while Z and T are trained as one: the training.table_step.SteppedTable of them
        )
        self.register_state_dict_pre_hook(_settle_first)

    @property
    def bridge_kind(self) -> str:
        if self.bridge is not None:
            return "matrix"
        return "none" if self.embedding_multiplier is None else "scalar"

    @property
    def cholesky(self) -> torch.Tensor:
        """`L` [d, d], differentiable in the raw parameter."""
        return raw_to_cholesky(self.raw_cholesky, self.cholesky_anchor)

    def transform(self) -> torch.Tensor:
        """`T = L Lᵀ` [d, d]."""
        cholesky = self.cholesky
        return cholesky @ cholesky.T

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embedding rows, [..., d], for ids [...]."""
        with _no_autocast(self.memory):
            if self.table is not None and not self._precise:
                x = self.table.embed(input_ids.reshape(-1))
            else:
                rows = self._exact(F.embedding(input_ids, self.memory)).reshape(-1, self.memory.shape[1])
                x = _solve(self._exact(self.cholesky), rows)
            if self.bridge is not None:
                x = x @ self._exact(self.bridge)
            elif self.embedding_multiplier is not None:
                x = x * self._exact(self.embedding_multiplier)
            return x.to(self.memory.dtype).reshape(*input_ids.shape, -1)

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] of states [..., d] after the final norm, in the memory's dtype."""
        with _no_autocast(self.memory):
            if self.table is not None and not self._precise:
                logits: torch.Tensor = self.table.logits(hidden_states.to(self.memory.dtype))
                return logits
            cholesky = self._exact(self.cholesky)
            states = self._exact(hidden_states) @ cholesky @ cholesky.T
            return F.linear(states.to(self.memory.dtype), self.memory)

    @contextlib.contextmanager
    def precise(self) -> Iterator[None]:
        """Inside, everything of size d x d runs in float64. Float32 solves lose up to eps * cond(T)."""
        self.settle()
        before, self._precise = self._precise, True
        try:
            yield
        finally:
            self._precise = before

    def settle(self) -> None:
        """Make `memory` and `cholesky` say what is computed, where a table stands for them."""
        if self.table is not None:
            self.table.settle_()

    @torch.no_grad()
    def interface_error(self, *, chunk: int = 8192) -> float:
        """delta_TI = ||Wᵀ E - I||_F / sqrt(d) of `W = Z T` and `E = Z T⁻¹`, no bridge.

        Both are computed in the parameters' dtype, as in training, and multiplied in float64.
        """
        self.settle()
        cholesky = self.cholesky
        total = torch.zeros(cholesky.shape, dtype=torch.float64, device=cholesky.device)
        for z in self.memory.split(chunk):
            total += (z @ cholesky @ cholesky.T).double().T @ _solve(cholesky, z).double()
        return interface_error_of(total)

    def _exact(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(torch.float64 if self._precise else self.memory.dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> PITInterface:
        """Follow moves between devices, and casts only between float32 and wider."""

        def keep_precision(tensor: torch.Tensor) -> torch.Tensor:
            moved: torch.Tensor = fn(tensor)
            if moved.is_floating_point() and torch.finfo(moved.dtype).bits < 32:
                return tensor.to(moved.device, torch.float32)
            return moved

        super()._apply(keep_precision, recurse)
        return self


def interface_error_of(product: torch.Tensor) -> float:
    """||P - I||_F / sqrt(d) for `P = Wᵀ E` [d, d]."""
    hidden_size = product.shape[0]
    identity = torch.eye(hidden_size, dtype=product.dtype, device=product.device)
    return float(torch.linalg.matrix_norm(product - identity) / hidden_size**0.5)


def raw_to_cholesky(raw: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    """`L` from an unconstrained [d, d] matrix: its strict lower part, and a positive diagonal.

    The diagonal is softplus of the raw one counted from where softplus is the anchor [d], written as a
    quotient that is exactly 1 at 0: what was loaded is what is saved, to the last bit.
    """
    start = anchor + torch.log(-torch.expm1(-anchor))  # softplus(start) is the anchor, up to rounding
    growth = F.softplus(start + torch.diagonal(raw)) / F.softplus(start)
    return torch.tril(raw, -1) + torch.diag(anchor * growth)


def cholesky_to_raw(cholesky: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The raw matrix and the anchor for which `raw_to_cholesky` gives `cholesky`.

    Raises ValueError where that is not lower triangular with a positive diagonal.
    """
    anchor = torch.diagonal(cholesky).detach().clone()
    if not bool((anchor > 0).all()):
        raise ValueError(
            f"the diagonal of L must be positive; its smallest entry is {anchor.min().item():.3g}"
        )
    if bool(torch.triu(cholesky, 1).any()):
        raise ValueError("L must be lower triangular, and has entries above the diagonal")
    return torch.tril(cholesky, -1).detach().clone(), anchor


def _solve(cholesky: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`rows (L Lᵀ)⁻¹` for rows [n, d]: first with `Lᵀ`, then with `L`."""
    half = torch.linalg.solve_triangular(cholesky.T, rows, upper=True, left=False)
    return torch.linalg.solve_triangular(cholesky, half, upper=False, left=False)


def _settle_first(interface: PITInterface, *args: Any) -> None:
    interface.settle()


def _no_autocast(tensor: torch.Tensor) -> torch.autocast:
    return torch.autocast(tensor.device.type, enabled=False)
