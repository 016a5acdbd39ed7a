"""Matrices in Core ML's forms: our codes as they are, palettes where the Neural Engine wants them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import types

from pit_deploy.errors import InputError
from pit_deploy.quantize.plan import QuantizationPlan, check_prepared, to_float16
from pit_deploy.quantize.tensor import QuantizedTensor
from pit_export.coreml_graph import Constant

PALETTE_ROWS = 32
"""Rows of a matrix that share a palette."""
_BITS = {"int8": 8, "int4": 4}
_ROUNDS = 20
PALETTE_BITS = (4, 6, 8)
"""Palettes that a search chooses from; Core ML has others, of 3 bits and fewer."""


@dataclass(frozen=True)
class Palette:
    """A matrix [rows, columns] as indices into palettes, each shared by as many rows, and a scale a row.

    indices   uint8 [rows, columns]
    palettes  float16 [groups, 2**bits], from -1 to 1
    scales    float16 [rows, 1]
    """

    indices: np.ndarray
    palettes: np.ndarray
    scales: np.ndarray

    @property
    def bits(self) -> int:
        return int(self.palettes.shape[1]).bit_length() - 1

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.indices.shape
        return rows, columns

    @property
    def nbytes(self) -> int:
        """Bytes of packed indices, palettes and scales together."""
        return -(-self.indices.size * self.bits // 8) + self.palettes.nbytes + self.scales.nbytes

    def rows(self, part: slice) -> Palette:
        """These rows alone; `part` must begin and end between groups."""
        size = len(self.indices) // len(self.palettes)
        start, stop = (part.start or 0), len(self.indices) if part.stop is None else part.stop
        if len(self.palettes) == 1:
            return Palette(self.indices[part], self.palettes, self.scales[part])
        assert start % size == 0 and stop % size == 0, f"rows {start} to {stop} cut a palette of {size} rows"
        return Palette(self.indices[part], self.palettes[start // size : stop // size], self.scales[part])

    def dequantize(self) -> np.ndarray:
        """The float32 matrix that it stands for, rounded to float16 as the program has it."""
        size = len(self.indices) // len(self.palettes)
        numbers = self.palettes[np.arange(len(self.indices))[:, None] // size, self.indices]
        values: np.ndarray = (numbers * self.scales).astype(np.float32)
        return values


Encoded = np.ndarray | QuantizedTensor | Palette


class Form(ABC):
    """How a profile stores matrices. `encode` is called once a tensor and keeps the plan's record of errors."""

    def __init__(self, plan: QuantizationPlan, dtype: type) -> None:
        self.plan, self.dtype = plan, dtype

    @abstractmethod
    def encode(self, name: str, weight: np.ndarray, role: str) -> Encoded:
        """A matrix [rows, columns] in the precision of its role or of its own."""

    @abstractmethod
    def quantized(self, encoded: Any, shape: tuple[int, ...]) -> Constant:
        """The op that makes a quantised matrix, stored with `shape`."""

    def constant(self, encoded: Encoded, shape: tuple[int, ...]) -> Constant:
        """The op that makes a matrix, stored with `shape`: [rows, columns] or that with ones behind."""
        if isinstance(encoded, np.ndarray):
            return Constant("const", {"val": encoded.astype(self.dtype).reshape(shape)})
        return self.quantized(encoded, shape)

    def rows(self, encoded: Encoded, part: slice) -> Encoded:
        """Some rows of an encoded matrix."""
        return encoded[part] if isinstance(encoded, np.ndarray) else encoded.rows(part)

    def _checked(self, name: str, encoded: Encoded) -> Encoded:
        """Floats as the program can hold them; raises `InputError` where float16 cannot."""
        if isinstance(encoded, np.ndarray) and self.dtype is np.float16:
            return to_float16(name, encoded)
        return encoded


class BlockForm(Form):
    """`constexpr_blockwise_shift_scale` (iOS 18): the quantiser's codes with a scale a block of columns.

    Symmetric codes are stored signed and without an offset, others unsigned with theirs.
    """

    def encode(self, name: str, weight: np.ndarray, role: str) -> Encoded:
        encoded = self._checked(name, self.plan.encode(name, weight, role))
        if isinstance(encoded, QuantizedTensor) and encoded.columns % encoded.block_size:
            raise InputError(
                f"{name} has {encoded.columns} columns, which are no whole blocks of {encoded.block_size} as Core ML "
                f"needs them; choose a --block-size that divides them, or --weights fp16."
            )
        return encoded

    def quantized(self, encoded: QuantizedTensor, shape: tuple[int, ...]) -> Constant:
        rank = (1,) * (len(shape) - 2)
        scales: np.ndarray = encoded.scales.reshape(*encoded.scales.shape, *rank).astype(self.dtype)
        codes, points = encoded.codes, encoded.zero_points
        if points is None:
            signed = codes.astype(np.int16) - encoded.default_zero_point
            data = signed.astype(_integers(encoded.bits, signed=True)).reshape(shape)
            return Constant("constexpr_blockwise_shift_scale", {"data": data, "scale": scales})
        unsigned = _integers(encoded.bits, signed=False)
        data, offset = codes.astype(unsigned).reshape(shape), points.astype(unsigned).reshape(scales.shape)
        return Constant("constexpr_blockwise_shift_scale", {"data": data, "scale": scales, "offset": offset})


class ChannelForm(Form):
    """`constexpr_affine_dequantize` (iOS 16): 8-bit codes with one scale a row, as the exporter's `grids` ask."""

    def encode(self, name: str, weight: np.ndarray, role: str) -> Encoded:
        encoded = self._checked(name, self.plan.encode(name, weight, role))
        if isinstance(encoded, QuantizedTensor):
            self.plan.errors[-1]["block_size"] = None
        return encoded

    def quantized(self, encoded: QuantizedTensor, shape: tuple[int, ...]) -> Constant:
        signed = (encoded.codes.astype(np.int16) - encoded.default_zero_point).astype(np.int8)
        arrays: dict[str, Any] = {
            "quantized_data": signed.reshape(shape),
            "scale": encoded.scales[:, 0].astype(self.dtype),
            "zero_point": np.int8(0),
            "axis": np.int32(0),
        }
        return Constant("constexpr_affine_dequantize", arrays)


class PaletteForm(Form):
    """`constexpr_lut_to_dense` (iOS 18), the Neural Engine's own form: a palette for every `PALETTE_ROWS` rows, each of
    which is divided by its largest magnitude first; `constexpr_blockwise_shift_scale` multiplies by that.

    Palettes come from some rounds of Lloyd's algorithm with a good start: errors within a hundredth of coremltools'
    exact k-means, which takes seventeen times as long at 4 bits and a minute for a million weights at 8.
    """

    def encode(self, name: str, weight: np.ndarray, role: str) -> Encoded:
        palette = self.plan.prepared.get(name)
        if palette is None:
            bits = self.plan.bits.get(name, _BITS.get(self.plan.precision(role), 0))
            if bits not in PALETTE_BITS:
                return to_float16(name, weight)
            palette = encode_palette(name, weight, bits)
        check_prepared(name, palette, weight)
        assert isinstance(palette, Palette), f"{name} was prepared for another profile"
        self.plan.errors.append(_record(name, weight, palette))
        return palette

    def quantized(self, encoded: Palette, shape: tuple[int, ...]) -> Constant:
        indices = encoded.indices.astype(_integers(encoded.bits, signed=False)).reshape(shape)
        rank = (1,) * (len(shape) - 1)
        lut = encoded.palettes.reshape(len(encoded.palettes), *rank, -1, 1)
        numbers = Constant("constexpr_lut_to_dense", {"indices": indices, "lut": lut})
        scales = encoded.scales.reshape(len(encoded.scales), *rank)
        return Constant("constexpr_blockwise_shift_scale", {"data": numbers, "scale": scales})


def encode_palette(name: str, weight: np.ndarray, bits: int) -> Palette:
    """A matrix [rows, columns] as palettes; raises `InputError` where float16 cannot hold it."""
    return palettized(to_float16(name, weight), bits)


def palettized(matrix: np.ndarray, bits: int) -> Palette:
    """A float16 matrix with a palette of `2**bits` numbers for every `PALETTE_ROWS` rows, or one for all of them."""
    rows = PALETTE_ROWS if len(matrix) % PALETTE_ROWS == 0 else len(matrix)
    scales = np.abs(matrix).max(axis=1, keepdims=True)
    scales[scales == 0] = 1
    matrix = (matrix.astype(np.float32) / scales.astype(np.float32)).astype(np.float16)
    values = matrix.astype(np.float32).reshape(len(matrix) // rows, -1)
    palettes = np.stack([_fitted_palette(group, 1 << bits) for group in values]).astype(np.float16)
    pairs = zip(values, palettes.astype(np.float32), strict=True)
    indices = np.stack([np.searchsorted(_between(palette), group) for group, palette in pairs])
    return Palette(indices.astype(np.uint8).reshape(matrix.shape), palettes, scales)


def _fitted_palette(values: np.ndarray, count: int) -> np.ndarray:
    """`count` numbers, ascending, that are near the best for `values`: each is the mean of those nearest to it."""
    ordered = np.sort(values)
    sums = np.concatenate([[0.0], np.cumsum(ordered, dtype=np.float64)])
    # Where values are dense by the density's cube root: the best levels in the limit of many.
    numbers, edges = np.histogram(ordered, bins=1024)
    share = np.concatenate([[0.0], np.cumsum(np.cbrt(numbers))])
    palette = np.interp((np.arange(count) + 0.5) / count * share[-1], share, edges)
    for _ in range(_ROUNDS):
        bounds = np.searchsorted(ordered, _between(palette))
        first, last = np.concatenate([[0], bounds]), np.concatenate([bounds, [len(ordered)]])
        means = (sums[last] - sums[first]) / np.maximum(last - first, 1)
        palette = np.where(last > first, means, palette)
    return palette


def _between(palette: np.ndarray) -> np.ndarray:
    """Where the nearest number changes."""
    middle: np.ndarray = (palette[1:] + palette[:-1]) / 2
    return middle


def _record(name: str, weight: np.ndarray, palette: Palette) -> dict[str, Any]:
    """What the manifest says of a palettised tensor."""
    difference = palette.dequantize() - weight
    norm = float(np.linalg.norm(weight.astype(np.float64)))
    return {
        "name": name,
        "bits": palette.bits,
        "block_size": None,
        "symmetric": False,
        "relative_rms": float(np.linalg.norm(difference.astype(np.float64))) / norm if norm else 0.0,
        "max_abs": float(np.abs(difference).max()),
    }


def _integers(bits: int, *, signed: bool) -> Any:
    """coremltools' NumPy type of integers of so many bits, which lie packed in the file."""
    return types.nptype_from_builtin(types.get_nbits_int_builtin_type(bits, signed))
