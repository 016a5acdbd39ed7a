"""One quantised matrix, made once by a quantiser and written by each exporter in its runtime's own form."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pit_deploy.errors import InputError
from pit_deploy.quantize.options import MIN_BLOCK_SIZE, SUPPORTED_BITS, is_block_size

CHUNK_ELEMENTS = 1 << 18  # 1 MiB of float32: a chunk and its temporaries stay in the second-level cache


@dataclass(frozen=True)
class QuantizationError:
    """How far a quantised matrix is from the float one.

    `relative_rms` is `||W - Wq||_F / ||W||_F`, `max_abs` the largest absolute difference. The row figures are
    the same ratio by row (`worst_row` is an index); rows that are all zero in `W` are left out of them, and
    the relative figures are 0 where all of `W` is zero.
    """

    relative_rms: float
    max_abs: float
    mean_row_relative_rms: float
    worst_row_relative_rms: float
    worst_row: int

    def to_dict(self) -> dict[str, float | int]:
        """The fields by name, all finite, ready for JSON."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A matrix [rows, columns] as integer codes with one scale a block of columns.

    value = (code - zero point) * scale.

    codes        uint8 [rows, blocks * block_size], one code an element, 0 to 2**bits - 1
    scales       float32 [rows, blocks], finite, of either sign
    zero_points  uint8 [rows, blocks], or None: `2**(bits - 1)` everywhere (symmetric)
    bits         4 or 8
    block_size   a power of two from 16 on, or `columns` itself (one block a row, per channel)
    columns      the true number; the last block is padded with codes equal to its zero point

    Arrays are kept, not copied: don't write to them. Raises `InputError` where fields do not fit together.
    """

    codes: np.ndarray
    scales: np.ndarray
    zero_points: np.ndarray | None
    bits: int
    block_size: int
    columns: int

    def __post_init__(self) -> None:
        self._check_granularity()
        self._check_arrays()
        self._check_values()

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns), without the padding."""
        return self.codes.shape[0], self.columns

    @property
    def blocks(self) -> int:
        """Blocks in a row."""
        return -(-self.columns // self.block_size)

    @property
    def default_zero_point(self) -> int:
        """The zero point of a symmetric tensor."""
        return 1 << (self.bits - 1)

    @property
    def nbytes(self) -> int:
        """Bytes of packed codes, float32 scales and packed zero points together."""
        rows = self.codes.shape[0]
        size = rows * self.blocks * _packed_length(self.block_size, self.bits) + self.scales.nbytes
        return size if self.zero_points is None else size + rows * _packed_length(self.blocks, self.bits)

    def rows(self, rows: slice) -> QuantizedTensor:
        """The tensor of these rows alone; a view, nothing is copied."""
        zero_points = None if self.zero_points is None else self.zero_points[rows]
        return dataclasses.replace(
            self, codes=self.codes[rows], scales=self.scales[rows], zero_points=zero_points
        )

    def column_block(self, start: int, stop: int) -> QuantizedTensor:
        """The tensor of the columns from `start` to before `stop`, which are whole blocks (the last may be padded).

        Raises `InputError` for a border inside a block.
        """
        size = self.block_size
        if not 0 <= start < stop <= self.columns or start % size or (stop % size and stop != self.columns):
            raise InputError(
                f"columns {start} to {stop} cannot be cut out of {self.columns} in blocks of {size}; borders must lie "
                f"between blocks."
            )
        blocks = slice(start // size, -(-stop // size))
        columns = slice(start, blocks.stop * size)
        points = None if self.zero_points is None else np.ascontiguousarray(self.zero_points[:, blocks])
        return QuantizedTensor(
            np.ascontiguousarray(self.codes[:, columns]),
            np.ascontiguousarray(self.scales[:, blocks]),
            points,
            self.bits,
            size,
            stop - start,
        )

    def dequantize(self, dtype: Any = np.float32) -> np.ndarray:
        """The float matrix [rows, columns], computed in float32 and cast to `dtype`."""
        out = np.empty(self.shape, dtype=dtype)
        for rows in self._row_chunks():
            self._dequantize_into(out, rows)
        return out

    def packed_codes(self) -> np.ndarray:
        """Codes as stored by ONNX Runtime's MatMulNBits: uint8 [rows, blocks, block_size * bits / 8].

        Four-bit codes lie two in a byte, the earlier column in the low nibble. A whole-row block of odd
        length gets one zero nibble at its end.
        """
        codes = self.codes.reshape(self.codes.shape[0], self.blocks, self.block_size)
        return _pack_nibbles(codes) if self.bits == 4 else codes

    def packed_zero_points(self) -> np.ndarray | None:
        """Zero points as stored by ONNX Runtime, or None for a symmetric tensor.

        uint8 [rows, ceil(blocks * bits / 8)]: four-bit ones lie two in a byte along the blocks, low nibble
        first, with one zero nibble after an odd number of them.
        """
        if self.zero_points is None or self.bits == 8:
            return self.zero_points
        return _pack_nibbles(self.zero_points)

    def error_against(self, weight: np.ndarray) -> QuantizationError:
        """Compare with the float matrix `weight` [rows, columns]; sums in float64, by chunks of rows.

        Raises `InputError` for another shape, or where the tensor has no rows.
        """
        weight = np.asarray(weight)
        if weight.shape != self.shape:
            raise InputError(f"weight is {list(weight.shape)}, but the tensor is {list(self.shape)}.")
        if weight.size == 0:
            raise InputError("A tensor without rows has no error.")
        squares = np.empty(self.shape[0])
        norms = np.empty(self.shape[0])
        max_abs = 0.0
        for rows in self._row_chunks():
            exact = weight[rows].astype(np.float64)
            norms[rows] = np.einsum("rc,rc->r", exact, exact)
            exact -= self.rows(rows).dequantize()
            squares[rows] = np.einsum("rc,rc->r", exact, exact)
            max_abs = max(max_abs, float(np.abs(exact).max()))
        total = norms.sum()
        ratios = np.sqrt(np.divide(squares, norms, out=np.zeros_like(norms), where=norms > 0))
        used = int(np.count_nonzero(norms))
        return QuantizationError(
            relative_rms=float(np.sqrt(squares.sum() / total)) if total > 0 else 0.0,
            max_abs=max_abs,
            mean_row_relative_rms=float(ratios.sum() / used) if used else 0.0,
            worst_row_relative_rms=float(ratios.max()),
            worst_row=int(ratios.argmax()),
        )

    def _row_chunks(self) -> Iterator[slice]:
        return row_chunks(self.codes.shape[0], self.codes.shape[1])

    def _dequantize_into(self, out: np.ndarray, rows: slice) -> None:
        scales = self.scales[rows]
        values = self.codes[rows].reshape(*scales.shape, self.block_size).astype(np.float32)
        if self.zero_points is None:
            values -= np.float32(self.default_zero_point)
        else:
            values -= self.zero_points[rows][..., None].astype(np.float32)
        values *= scales[..., None]
        out[rows] = values.reshape(len(scales), -1)[:, : self.columns]

    def _check_granularity(self) -> None:
        if self.bits not in SUPPORTED_BITS:
            raise InputError(f"bits is {self.bits}; quantisation supports 4 and 8.")
        if self.columns < 1:
            raise InputError(f"columns is {self.columns}; a quantised matrix has at least one.")
        if self.block_size != self.columns and not is_block_size(self.block_size):
            raise InputError(
                f"block_size {self.block_size} does not go with columns {self.columns}: it must be a power "
                f"of two of at least {MIN_BLOCK_SIZE}, or equal to columns."
            )

    def _check_arrays(self) -> None:
        if self.codes.dtype != np.uint8 or self.codes.ndim != 2:
            raise InputError(f"codes is {_describe(self.codes)}; it must be uint8 [rows, padded columns].")
        rows, padded = self.codes.shape
        if padded != self.blocks * self.block_size:
            raise InputError(
                f"codes has {padded} columns, but columns {self.columns} and block_size {self.block_size} "
                f"make {self.blocks * self.block_size} with the padding."
            )
        expected = (rows, self.blocks)
        if self.scales.dtype != np.float32 or self.scales.shape != expected:
            raise InputError(f"scales is {_describe(self.scales)}; codes needs float32 {list(expected)}.")
        points = self.zero_points
        if points is not None and (points.dtype != np.uint8 or points.shape != expected):
            raise InputError(f"zero_points is {_describe(points)}; codes needs uint8 {list(expected)}.")

    def _check_values(self) -> None:
        require_finite(self.scales, "scales")
        if self.codes.size == 0:
            return
        largest = (1 << self.bits) - 1
        for name, array in (("codes", self.codes), ("zero_points", self.zero_points)):
            if array is not None and int(array.max()) > largest:
                raise InputError(f"{name} holds {int(array.max())}, but bits {self.bits} ends at {largest}.")
        padding = self.codes[:, self.columns :]
        last = self.default_zero_point if self.zero_points is None else self.zero_points[:, -1:]
        if padding.size and np.any(padding != last):
            raise InputError(
                f"codes past columns {self.columns} must equal the zero point of the last block, so that the "
                f"padding stands for 0."
            )


def row_chunks(rows: int, columns: int) -> Iterator[slice]:
    """Cut `rows` into slices of about `CHUNK_ELEMENTS` numbers, at least one row each."""
    step = max(1, CHUNK_ELEMENTS // max(1, columns))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def require_finite(array: np.ndarray, name: str) -> None:
    """Raise `InputError` with the count and the first position of what is not finite in `array`."""
    wrong = ~np.isfinite(array)
    count = int(np.count_nonzero(wrong))
    if count == 0:
        return
    position = [int(index) for index in np.unravel_index(int(wrong.argmax()), wrong.shape)]
    raise InputError(
        f"{name} holds {count} numbers that are not finite, the first at {position}; nothing was quantised."
    )


def _packed_length(count: int, bits: int) -> int:
    return -(-count * bits // 8)


def _pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """Pack pairs along the last axis, the first of a pair in the low nibble; an odd end is padded with 0."""
    packed = codes[..., 0::2].copy()
    packed[..., : codes.shape[-1] // 2] |= codes[..., 1::2] << 4
    return packed


def _describe(array: np.ndarray) -> str:
    return f"{array.dtype} {list(array.shape)}"
