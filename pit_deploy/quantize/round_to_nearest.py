"""Round to nearest: each block gets its scale from its own extremes, each weight the nearest code."""

from __future__ import annotations

import numpy as np

from pit_deploy.errors import InputError
from pit_deploy.quantize.options import QuantizationOptions
from pit_deploy.quantize.tensor import QuantizedTensor, require_finite, row_chunks

_SMALLEST_SCALE = np.finfo(np.float32).tiny


def round_to_nearest(weight: np.ndarray, options: QuantizationOptions) -> QuantizedTensor:
    """Quantise a float matrix [rows, columns]; deterministic, halves go to the even code.

    Works in float32 on one chunk of rows at a time (a few MB besides input and output). A block whose scale
    would be below the smallest normal float32 (all zeros, in practice) stands for zeros, with scale 1.
    Raises `InputError` for another rank or type, no columns, or weights that are not finite in float32: the
    message has their count and the position of the first.
    """
    weight = np.asarray(weight)
    if weight.ndim != 2 or weight.shape[1] == 0:
        raise InputError(f"weight is {list(weight.shape)}; quantisation needs [rows, columns] with columns.")
    if not np.issubdtype(weight.dtype, np.floating):
        raise InputError(f"weight is {weight.dtype}; quantisation needs floating point numbers.")
    rows, columns = weight.shape
    block = options.block_size_for(columns)
    blocks = -(-columns // block)
    codes = np.empty((rows, blocks * block), np.uint8)
    scales = np.empty((rows, blocks), np.float32)
    zero_points = None if options.symmetric else np.empty((rows, blocks), np.uint8)
    values: np.ndarray | None = None
    for chunk in row_chunks(rows, blocks * block):
        count = chunk.stop - chunk.start
        if values is None:  # the first chunk is the largest; the padding is written here, once
            values = np.zeros((count, blocks * block), np.float32)
        part = values[:count]
        with np.errstate(over="ignore"):  # what overflows is reported by _raise_not_finite
            part[:, :columns] = weight[chunk]
        blocked = part.reshape(count, blocks, block)
        low, high = blocked.min(axis=-1), blocked.max(axis=-1)
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            _raise_not_finite(weight)
        if zero_points is None:
            scales[chunk] = _symmetric_scales(low, high, options)
            offsets: np.ndarray | float = float(1 << (options.bits - 1))
        else:
            scales[chunk], zero_points[chunk] = _asymmetric_grid(low, high, options.bits)
            offsets = zero_points[chunk][..., None].astype(np.float32)
        np.divide(blocked, scales[chunk][..., None], out=blocked)
        np.rint(blocked, out=blocked)
        blocked += offsets
        np.clip(blocked, 0, (1 << options.bits) - 1, out=blocked)
        codes[chunk] = part
        part[:, columns:] = 0
    return QuantizedTensor(codes, scales, zero_points, options.bits, block, columns)


def _symmetric_scales(low: np.ndarray, high: np.ndarray, options: QuantizationOptions) -> np.ndarray:
    """Scales [rows, blocks] of a grid from -half to half - 1, with half = 2**(bits - 1).

    The default gives the block's largest magnitude the code 0 (-half), whatever its sign, so that the range
    is used in full and the extreme itself is exact: the scale has the sign opposite to the extreme's.
    Positive scales are the smallest that clip nothing on either side.
    """
    # Measured on SmolLM2-135M pushed off its grid, all matrices, block 32, relative RMS error: signed extreme
    # 0.0911, smallest positive scale 0.0975, absmax / (half - 1) 0.1038 at 4 bits; 0.00567, 0.00569, 0.00571
    # at 8 bits. So the signed extreme serves both.
    half = np.float32(1 << (options.bits - 1))
    if options.positive_scales:
        scales = np.maximum(high / (half - 1), low / -half)
    else:
        scales = np.where(high > -low, high, low) / -half
    scales[np.abs(scales) < _SMALLEST_SCALE] = 1
    return scales


def _asymmetric_grid(low: np.ndarray, high: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Scales and zero points [rows, blocks] for blocks that reach from `low` to `high`.

    The range is widened to hold 0, so that the zero point is a code and 0 is exact.
    """
    largest = np.float32((1 << bits) - 1)
    low, high = np.minimum(low, 0), np.maximum(high, 0)
    scales = high / largest - low / largest  # two quotients: the difference itself may overflow
    scales[scales < _SMALLEST_SCALE] = 1
    return scales, np.clip(np.rint(-low / scales), 0, largest).astype(np.uint8)


def _raise_not_finite(weight: np.ndarray) -> None:
    with np.errstate(over="ignore"):
        require_finite(weight.astype(np.float32, copy=False), "weight")
