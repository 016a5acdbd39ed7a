"""Quantisation with error feedback: what rounding one column costs is made up for in the columns after it.

For inputs with second moment H, the output error of a row is `(w - q) H (w - q)ᵀ`. Columns are rounded one
after another; the error of each is spread over those still open so that this form stays least (GPTQ: Frantar
et al. 2022, arXiv 2210.17323). Scales are searched when a block's turn comes, on what its weights are by
then. Afterwards the codes are revised one column at a time against all others, and the scales are fitted to
the codes, all of a row together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pit_deploy.errors import InputError
from pit_deploy.quantize.options import QuantizationOptions
from pit_deploy.quantize.scale_search import SMALLEST_SCALE, check_weight, round_on_grid, search_grid
from pit_deploy.quantize.tensor import QuantizedTensor, require_finite

if TYPE_CHECKING:
    import torch

DAMPING = 0.01
"""Added to the diagonal of the second moment, relative to its mean."""

_CHUNK = 64  # columns whose errors are spread over the rest in one product, where a block is the whole row


@dataclass(frozen=True)
class FeedbackOptions:
    """How hard to try. The defaults are what exports use.

    `damping` is added to the Hessian's diagonal, relative to its mean. `ordering` takes the blocks with the
    strongest inputs first, and so within each block: the storage layout stays as it is. `revisions` counts
    passes of revising codes and fitting scales afterwards.
    """

    damping: float = DAMPING
    ordering: bool = True
    revisions: int = 2

    def __post_init__(self) -> None:
        if not 0 < self.damping < 10:
            raise InputError(f"damping is {self.damping}; it must be above 0 and below 10.")
        if self.revisions < 0:
            raise InputError(f"revisions is {self.revisions}; it cannot be negative.")


def quantize_with_feedback(
    weight: np.ndarray,
    hessian: np.ndarray,
    options: QuantizationOptions,
    feedback: FeedbackOptions | None = None,
) -> QuantizedTensor:
    """Quantise `weight` [rows, columns] for inputs of second moment `hessian` [columns, columns].

    Any multiple of the moment gives the same result. Deterministic on one machine with one number of threads.
    Columns that the inputs never use are rounded to nearest. Raises `InputError` for shapes that do not fit
    and numbers that are not finite.
    """
    import torch

    feedback = feedback or FeedbackOptions()
    weight = check_weight(weight)
    rows, columns = weight.shape
    block = options.block_size_for(columns)
    padded = -(-columns // block) * block
    moment = _damped(hessian, columns, padded, feedback.damping)
    values = torch.zeros(padded, rows)  # a column of the matrix is a row here: contiguous
    values[:columns] = torch.from_numpy(weight).T
    order = _order(moment, block) if feedback.ordering else torch.arange(padded)
    state = _Grid(padded, rows, block, options)
    with torch.no_grad():
        _feed_back(values.clone(), _factor(moment, order), order, state)
        single = moment.float()
        for _ in range(feedback.revisions):
            state.fit_scales(values, single)
            state.revise(values, single, order)
        if feedback.revisions:
            state.fit_scales(values, single)
    return state.tensor(columns)


class _Grid:
    """Codes [padded, rows] (less their zero points, as float), scales and zero points [blocks, rows]."""

    def __init__(self, padded: int, rows: int, block: int, options: QuantizationOptions) -> None:
        import torch

        self.options, self.block = options, block
        self.blocks = padded // block
        self.codes = torch.empty(padded, rows)
        self.scales = torch.ones(self.blocks, rows)
        self.points = torch.full((self.blocks, rows), float(1 << (options.bits - 1)))

    def round(self, values: torch.Tensor, b: int) -> torch.Tensor:
        """Codes less zero point of `values` [..., rows] on the grid of block `b`."""
        return round_on_grid(values, self.scales[b], self.points[b], self.options.bits).sub_(self.points[b])

    def restored(self) -> torch.Tensor:
        """The matrix that the codes stand for, [padded, rows]."""
        blocked = self.codes.view(self.blocks, self.block, -1) * self.scales[:, None]
        return blocked.reshape(self.codes.shape)

    def fit_scales(self, values: torch.Tensor, moment: torch.Tensor) -> None:
        """All scales of a row at once, the least error for the codes as they are.

        Scales stay where the fit would change their sign or size beyond reason.
        """
        import torch

        rows = self.codes.shape[1]
        step = max(64, (1 << 22) // (self.blocks * self.block))
        target = moment @ values
        for start in range(0, rows, step):
            part = slice(start, min(rows, start + step))
            codes = self.codes[:, part].contiguous()
            count = codes.shape[1]
            blocked = codes.view(self.blocks, self.block, count)
            normal = torch.empty(self.blocks, self.blocks, count)
            for b in range(self.blocks):
                span = slice(b * self.block, (b + 1) * self.block)
                reached = moment[:, span] @ codes[span]
                normal[b] = (reached.view(self.blocks, self.block, count) * blocked).sum(1)
            right = (target[:, part].reshape(self.blocks, self.block, count) * blocked).sum(1)
            matrix = normal.permute(2, 0, 1).double()
            diagonal = matrix.diagonal(dim1=1, dim2=2)
            old = self.scales[:, part].T.double()
            # A ridge towards the scales there are: blocks without codes, and nearly equal ones, keep theirs.
            ridge = 1e-4 * diagonal + 1e-12 * diagonal.mean(1, keepdim=True) + 1e-30
            shifted = matrix + torch.diag_embed(ridge)
            new = torch.linalg.solve(shifted, right.T.double() + ridge * old).float()
            old = old.float()
            sound = torch.isfinite(new) & (new * old > 0) & (new.abs() >= SMALLEST_SCALE)
            sound &= (new / old > 0.5) & (new / old < 2)
            sound = sound.all(1, keepdim=True)
            self.scales[:, part] = torch.where(sound, new, old).T

    def revise(self, values: torch.Tensor, moment: torch.Tensor, order: torch.Tensor) -> None:
        """Choose the code of each column anew, given all others (coordinate descent, once around)."""
        import torch

        pull = moment @ (values - self.restored())
        positions = order.tolist()
        diagonal = moment.diagonal().tolist()
        for start in range(0, len(positions), _CHUNK):
            chosen = positions[start : start + _CHUNK]
            index = order[start : start + _CHUNK]
            local, coupling = pull[index], moment[index][:, index]
            changes = torch.zeros_like(local)
            for k, j in enumerate(chosen):
                b = j // self.block
                scale, codes = self.scales[b], self.codes[j]
                new = self.round(codes * scale + local[k] / diagonal[j], b)
                change = torch.mul(new - codes, scale, out=changes[k])
                self.codes[j] = new
                if k + 1 < len(chosen):
                    local[k + 1 :].addr_(coupling[k + 1 :, k], change, alpha=-1)
            pull.addmm_(moment[:, index], changes, alpha=-1)

    def tensor(self, columns: int) -> QuantizedTensor:
        blocked = self.codes.view(self.blocks, self.block, -1) + self.points[:, None]
        codes = blocked.reshape(self.codes.shape).T.contiguous().numpy().astype(np.uint8)
        points = self.points.T.contiguous().numpy().astype(np.uint8)
        return QuantizedTensor(
            codes,
            self.scales.T.contiguous().numpy(),
            None if self.options.symmetric else points,
            self.options.bits,
            self.block,
            columns,
        )


def _feed_back(values: torch.Tensor, factor: torch.Tensor, order: torch.Tensor, state: _Grid) -> None:
    """Round `values` [padded, rows] into `state` in the given order; `values` is used up.

    `factor` is the upper Cholesky factor of the inverse moment, in that order.
    """
    import torch

    positions = order.tolist()
    steps = factor.diagonal().tolist()
    size = state.block if state.block <= 128 else _CHUNK
    importance = factor.diagonal().square().reciprocal()
    values = values[order]
    if state.block > size:
        restored = torch.empty_like(importance)
        restored[order] = importance
        original = torch.empty_like(values)
        original[order] = values
        for b in range(state.blocks):
            span = slice(b * state.block, (b + 1) * state.block)
            state.scales[b], state.points[b] = search_grid(original[span], restored[span], state.options)
        del original
    for start in range(0, len(positions), size):
        stop = min(start + size, len(positions))
        local = values[start:stop]
        b = positions[start] // state.block
        if state.block <= size:
            state.scales[b], state.points[b] = search_grid(local, importance[start:stop], state.options)
        errors = torch.empty_like(local)
        for k in range(stop - start):
            b = positions[start + k] // state.block
            codes = state.round(local[k], b)
            state.codes[positions[start + k]] = codes
            error = torch.div(local[k] - codes * state.scales[b], steps[start + k], out=errors[k])
            if k + 1 < stop - start:
                local[k + 1 :].addr_(factor[start + k, start + k + 1 : stop], error, alpha=-1)
        if stop < len(positions):
            values[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)


def _damped(hessian: np.ndarray, columns: int, padded: int, damping: float) -> torch.Tensor:
    """The moment, scaled to a mean diagonal of 1, damped, with ones for columns never used; float64."""
    import torch

    hessian = np.asarray(hessian, dtype=np.float64)
    if hessian.shape != (columns, columns):
        raise InputError(f"hessian is {list(hessian.shape)}; the weight needs [{columns}, {columns}].")
    require_finite(hessian, "hessian")
    diagonal = hessian.diagonal()
    if diagonal.min() < 0:
        raise InputError(
            f"hessian has {diagonal.min():.3g} on its diagonal; a second moment has no negative."
        )
    used = diagonal > 0
    mean = float(diagonal[used].mean()) if used.any() else 1.0
    moment = torch.eye(padded, dtype=torch.float64)
    moment[:columns, :columns] = torch.from_numpy((hessian + hessian.T) / (2 * mean))
    free = np.concatenate([~used, np.ones(padded - columns, bool)])
    moment.diagonal()[torch.from_numpy(free)] = 1.0
    moment.diagonal().add_(damping)
    return moment


def _order(moment: torch.Tensor, block: int) -> torch.Tensor:
    """Columns by falling diagonal, whole blocks by their sum first: each block stays together."""
    import torch

    diagonal = moment.diagonal().view(-1, block)
    by_block = torch.argsort(diagonal.sum(1), descending=True, stable=True)
    within = torch.argsort(diagonal, dim=1, descending=True, stable=True)
    return (within[by_block] + by_block[:, None] * block).reshape(-1)


def _factor(moment: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Upper Cholesky factor of the inverse of the moment, columns in `order`; float32."""
    import torch

    lower = torch.linalg.cholesky(moment[order][:, order])
    return torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True).float().contiguous()
