"""Scales of blocks by search: the grid with the least weighted error, not the one that reaches the extremes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pit_deploy.errors import InputError
from pit_deploy.quantize.options import QuantizationOptions
from pit_deploy.quantize.tensor import QuantizedTensor, require_finite

if TYPE_CHECKING:
    import torch

SMALLEST_SCALE = float(np.finfo(np.float32).tiny)
_ROWS = 4096  # rows searched at once: a block of them and its temporaries stay in the caches


def round_with_search(
    weight: np.ndarray, importance: np.ndarray | None, options: QuantizationOptions
) -> QuantizedTensor:
    """Round to nearest, each block on the grid that search finds best.

    `importance` [columns] weighs the squared error of each column: the diagonal of the second moment of the
    inputs, that is. None counts all alike. Deterministic. Raises `InputError` as `round_to_nearest` does.
    """
    import torch

    weight = check_weight(weight)
    rows, columns = weight.shape
    block = options.block_size_for(columns)
    blocks = -(-columns // block)
    weights = torch.ones(blocks * block)
    if importance is not None:
        if importance.shape != (columns,) or not (importance >= 0).all():
            raise InputError(
                f"importance is {list(importance.shape)}; it must be [{columns}] and nowhere negative."
            )
        weights[:columns] = torch.from_numpy(importance / max(importance.mean(), 1e-30) + 1e-6).float()
    codes = np.empty((rows, blocks * block), np.uint8)
    scales = np.empty((rows, blocks), np.float32)
    points = np.empty((rows, blocks), np.uint8)
    for start in range(0, rows, _ROWS):
        part = torch.zeros(min(_ROWS, rows - start), blocks * block)
        part[:, :columns] = torch.from_numpy(weight[start : start + _ROWS])
        transposed = part.T.contiguous()
        for b in range(blocks):
            span = slice(b * block, (b + 1) * block)
            scale, point = search_grid(transposed[span], weights[span], options)
            found = round_on_grid(transposed[span], scale, point, options.bits)
            codes[start : start + _ROWS, span] = found.T.numpy()
            scales[start : start + _ROWS, b] = scale.numpy()
            points[start : start + _ROWS, b] = point.numpy()
    return QuantizedTensor(codes, scales, None if options.symmetric else points, options.bits, block, columns)


def search_grid(
    values: torch.Tensor, importance: torch.Tensor, options: QuantizationOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero point [rows] of one block `values` [block, rows], by the error weighted with `importance` [block].

    Each candidate range gives codes; the codes give the scale that fits them best (least squares). Kept is the
    candidate whose codes can come nearest. Zero points are whole numbers, in float.
    """
    import torch

    levels = float((1 << options.bits) - 1)
    half = float(1 << (options.bits - 1))
    low, high = values.amin(0).clamp(max=0), values.amax(0).clamp(min=0)
    weighted = values * importance[:, None]
    best = torch.full_like(low, -1.0)
    best_scale, best_point = torch.ones_like(low), torch.full_like(low, half)
    codes, product = torch.empty_like(values), torch.empty_like(values)
    for scale, point in _candidates(low, high, options):
        scale = torch.where(scale.abs() < SMALLEST_SCALE, 1.0, scale)
        torch.mul(values, 1 / scale, out=codes)
        codes.round_()
        torch.maximum(codes, -point, out=codes)
        torch.minimum(codes, levels - point, out=codes)
        fit = torch.mul(weighted, codes, out=product).sum(0)
        codes.square_()
        norm = (importance @ codes).clamp_(min=1e-30)
        # With the best scale, fit / norm, the error is the weighted norm of the values less fit² / norm.
        score = fit.square() / norm
        better = score > best
        fitted = fit / norm
        usable = fitted.abs() >= SMALLEST_SCALE
        if not options.symmetric or options.positive_scales:
            usable &= fitted > 0
        better &= usable
        best = torch.where(better, score, best)
        best_scale = torch.where(better, fitted, best_scale)
        best_point = torch.where(better, point, best_point)
    return best_scale, best_point


def round_on_grid(values: torch.Tensor, scale: torch.Tensor, point: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [block, rows], as float, of `values` on the grid of each row."""
    return ((values / scale).round_() + point).clamp_(0, (1 << bits) - 1)


def check_weight(weight: np.ndarray) -> np.ndarray:
    """`weight` as a float32 matrix; raises `InputError` for anything else."""
    weight = np.asarray(weight)
    if weight.ndim != 2 or weight.shape[1] == 0:
        raise InputError(f"weight is {list(weight.shape)}; quantisation needs [rows, columns] with columns.")
    if not np.issubdtype(weight.dtype, np.floating):
        raise InputError(f"weight is {weight.dtype}; quantisation needs floating point numbers.")
    with np.errstate(over="ignore"):
        weight = weight.astype(np.float32, copy=False)
    require_finite(weight, "weight")
    return weight


def _candidates(
    low: torch.Tensor, high: torch.Tensor, options: QuantizationOptions
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Scales and zero points to try, the plain rule's among them."""
    import torch

    half, levels = float(1 << (options.bits - 1)), float((1 << options.bits) - 1)
    fine = options.bits == 8
    found = []
    if options.symmetric:
        point = torch.full_like(low, half)
        if options.positive_scales:
            signed = torch.maximum(high / (half - 1), low / -half)
        else:
            signed = torch.where(high > -low, high, low) / -half
        for factor in [1.0, 0.995, 0.99, 0.98] if fine else [1.04 - 0.04 * k for k in range(14)]:
            found.append((signed * factor, point))
            if not options.positive_scales and not fine and factor <= 1:
                found.append((-signed * factor * (half / (half - 1)), point))
        return found
    span = (high - low) / levels
    for factor in [1.0, 0.995, 0.99] if fine else [1.04 - 0.05 * k for k in range(10)]:
        scale = torch.where(span < SMALLEST_SCALE, 1.0, span * factor)
        # What a shorter range cuts off is shared between both ends, or all on one.
        exact = -low / scale - (levels * (1 / factor - 1)) / 2
        for shift in (0,) if fine else (-1, 0, 1):
            found.append((scale, (exact + shift).round_().clamp_(0, levels)))
    return found
