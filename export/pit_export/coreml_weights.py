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
_ROUNDS, _BINS = 20, 1024
_GROUPS_AT_ONCE, _ROWS_AT_ONCE = 16, 1024
PALETTE_BITS = (4, 6, 8)
"""Palettes that a search chooses from; Core ML has others, of 3 bits and fewer."""
_POSITIVE = np.arange(np.float16(1).view(np.uint16) + 1, dtype=np.uint16).view(np.float16).astype(np.float64)
LEVELS = np.concatenate([-_POSITIVE[::-1], _POSITIVE])
"""The numbers from -1 to 1 that float16 has, ascending, zero twice: scaled weights are all of them, so that they are
counted and not sorted."""


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
        import torch

        size = len(self.indices) // len(self.palettes)
        numbers = self.palettes.astype(np.float32).repeat(size, axis=0) * self.scales.astype(np.float32)
        scaled = torch.from_numpy(numbers).half().float()  # of each row; the products are exact before
        values = np.empty(self.indices.shape, np.float32)
        for start in range(0, len(values), _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            indices = torch.from_numpy(self.indices[rows]).long()
            torch.gather(scaled[rows], 1, indices, out=torch.from_numpy(values[rows]))
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
    parts = [
        _fitted(matrix[start : start + rows * _GROUPS_AT_ONCE], rows, 1 << bits)
        for start in range(0, len(matrix), rows * _GROUPS_AT_ONCE)
    ]
    indices, palettes, scales = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return Palette(indices, palettes, scales)


def _fitted(matrix: np.ndarray, rows: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Indices, palettes and scales of some groups of `rows` rows: see `Palette`."""
    values = matrix.astype(np.float32)
    scales = np.abs(values).max(axis=1, keepdims=True)
    scales[scales == 0] = 1
    values /= scales
    groups, levels = len(matrix) // rows, len(LEVELS)
    places = _places(values.astype(np.float16)).reshape(groups, -1) + levels * np.arange(groups)[:, None]
    numbers = np.bincount(places.ravel(), minlength=groups * levels).reshape(groups, levels)
    palettes = _fitted_palettes(numbers, count).astype(np.float16)
    steps = np.zeros((groups, levels + 1), np.uint8)
    bounds = np.searchsorted(LEVELS, _between(palettes.astype(np.float32)), side="right")
    np.add.at(steps, (np.arange(groups)[:, None], bounds), 1)
    nearest = np.cumsum(steps[:, :-1], axis=1, dtype=np.uint8)  # of each level
    return nearest.ravel()[places].reshape(matrix.shape), palettes, scales.astype(np.float16)


def _places(values: np.ndarray) -> np.ndarray:
    """Where float16 numbers from -1 to 1 are in `LEVELS`."""
    bits = values.view(np.int16)
    return np.where(bits < 0, -1 - (bits & 0x7FFF), bits).astype(np.int64) + len(LEVELS) // 2


def _fitted_palettes(numbers: np.ndarray, count: int) -> np.ndarray:
    """`count` numbers a group, ascending, that are near the best for its weights: each is the mean of those nearest to
    it. `numbers` [groups, levels] says how many weights are of each of the `LEVELS`."""
    groups, levels = numbers.shape
    below = np.zeros((groups, levels + 1), np.int64)
    sums = np.zeros((groups, levels + 1))
    np.cumsum(numbers, axis=1, out=below[:, 1:])
    np.cumsum(numbers * LEVELS, axis=1, out=sums[:, 1:])
    # Where values are dense by the density's cube root: the best levels in the limit of many.
    used = numbers > 0
    ends = LEVELS[used.argmax(axis=1)], LEVELS[levels - 1 - used[:, ::-1].argmax(axis=1)]
    edges = np.linspace(*ends, _BINS + 1, axis=1)
    places = np.searchsorted(LEVELS, edges)
    places[:, -1] = levels
    density = np.cbrt(np.diff(np.take_along_axis(below, places, axis=1), axis=1))
    share = np.pad(np.cumsum(density, axis=1), ((0, 0), (1, 0)))
    middles = (np.arange(count) + 0.5) / count
    palettes = np.stack([np.interp(middles * s[-1], s, e) for s, e in zip(share, edges, strict=True)])
    for _ in range(_ROUNDS):
        inner = np.searchsorted(LEVELS, _between(palettes), side="right")
        bounds = np.pad(inner, ((0, 0), (1, 1)), constant_values=((0, 0), (0, levels)))
        members = np.diff(np.take_along_axis(below, bounds, axis=1), axis=1)
        means = np.diff(np.take_along_axis(sums, bounds, axis=1), axis=1) / np.maximum(members, 1)
        palettes = np.where(members > 0, means, palettes)
    return palettes


def _between(palettes: np.ndarray) -> np.ndarray:
    """Where the nearest number changes."""
    middle: np.ndarray = (palettes[:, 1:] + palettes[:, :-1]) / 2
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
