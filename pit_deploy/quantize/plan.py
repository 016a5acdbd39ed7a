"""Which precision each tensor of an export gets, and the record of what that cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from pit_deploy.errors import InputError
from pit_deploy.quantize.nested import NestedHead
from pit_deploy.quantize.options import QuantizationOptions
from pit_deploy.quantize.round_to_nearest import round_to_nearest
from pit_deploy.quantize.tensor import QuantizedTensor

PRECISIONS = ("fp32", "fp16", "int8", "int4")
ROTATION_BLOCK = 32
_BITS = {"int8": 8, "int4": 4}
_PRECISION_OF = {4: "int4", 8: "int8", 32: "fp32"}


class Rounded(Protocol):
    """A matrix [rows, columns] in few bits, in whatever form a runtime stores it."""

    @property
    def bits(self) -> int: ...

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        ...

    def dequantize(self) -> np.ndarray:
        """The float32 matrix that it stands for."""
        ...


@dataclass(frozen=True)
class Encoder:
    """A runtime's own form of a matrix in few bits: `encode(name, weight [rows, columns], bits)`.

    `bits` are what a search may choose from.
    """

    bits: tuple[int, ...]
    encode: Callable[[str, np.ndarray, int], Rounded]


@dataclass
class QuantizationPlan:
    """Precision by role: `weights` for the backbone's matrices, `tables` for the embedding and the head.

    An exporter calls `encode` once for each tensor that it stores; the plan quantises it and keeps the error.
    `prepared` has tensors that were rounded before, by name (with error feedback, say), `bits` the bits of single
    tensors (4, 8, or 32 for float32; others where prepared) where they differ from their role's; both come before
    the role.
    `grids` has, by bits, the granularity that a runtime insists on; the others follow `block_size` and `symmetric`.
    """

    weights: str
    tables: str
    block_size: int = 32
    symmetric: bool = True
    errors: list[dict[str, Any]] = field(default_factory=list)
    prepared: Mapping[str, Rounded] = field(default_factory=dict)
    bits: Mapping[str, int] = field(default_factory=dict)
    grids: Mapping[int, QuantizationOptions] = field(default_factory=dict)
    nested: NestedHead | None = None
    """How the head shortlists, where it does: the shared table is then sorted."""
    notes: list[str] = field(default_factory=list)
    """What the user should know of the choices made."""

    def __post_init__(self) -> None:
        for name in (self.weights, self.tables):
            if name not in PRECISIONS:
                raise InputError(f"the precision {name} is not known; choose one of {', '.join(PRECISIONS)}.")
        for name, count in self.bits.items():
            if count not in _PRECISION_OF and name not in self.prepared:
                raise InputError(f"bits of {name} is {count}; choose 4, 8 or 32 (float).")

    def precision(self, role: str) -> str:
        """`fp32`, `fp16`, `int8` or `int4` for the role `weights` or `tables`; single tensors may differ."""
        return {"weights": self.weights, "tables": self.tables}[role]

    def options(self, bits: int) -> QuantizationOptions:
        """How matrices of so many bits are rounded."""
        return self.grids.get(bits) or QuantizationOptions(bits, self.block_size, self.symmetric)

    @property
    def rotation_block(self) -> int | None:
        """Channels that a rotation may mix: all (None) where the runtime rounds rows of activations whole."""
        by_row = any(grid.block_size is None for grid in self.grids.values())
        return None if by_row else ROTATION_BLOCK

    def encode(self, name: str, weight: np.ndarray, role: str) -> np.ndarray | QuantizedTensor:
        """`weight` [rows, columns] in its precision: float32, float16 or quantised along the columns.

        Raises `InputError` where float16 cannot hold a value, or a prepared tensor is of another shape.
        """
        prepared = self.prepared.get(name)
        if prepared is None:
            precision = _PRECISION_OF[self.bits[name]] if name in self.bits else self.precision(role)
            if precision == "fp32":
                return np.ascontiguousarray(weight, np.float32)
            if precision == "fp16":
                return to_float16(name, weight)
            quantized = round_to_nearest(weight, self.options(_BITS[precision]))
        else:
            check_prepared(name, prepared, weight)
            assert isinstance(prepared, QuantizedTensor), f"{name} was prepared for another runtime"
            quantized = prepared
        error = quantized.error_against(weight)
        self.errors.append(
            {
                "name": name,
                "bits": quantized.bits,
                "block_size": quantized.block_size,
                "symmetric": quantized.zero_points is None,
                "relative_rms": error.relative_rms,
                "max_abs": error.max_abs,
            }
        )
        return quantized


def check_prepared(name: str, prepared: Rounded, weight: np.ndarray) -> None:
    """Raise `InputError` where a tensor was prepared with another shape than it is stored with."""
    if prepared.shape != weight.shape:
        raise InputError(
            f"{name} was quantised as {list(prepared.shape)} and is stored as {list(weight.shape)}."
        )


def to_float16(name: str, weight: np.ndarray) -> np.ndarray:
    """float16 of a tensor; raises `InputError` where a value is past the range of float16 (65504)."""
    largest = float(np.abs(weight).max(initial=0.0))
    if largest > np.finfo(np.float16).max:
        raise InputError(
            f"{name} reaches {largest:.4g}, past float16's 65504; export it with --weights fp32."
        )
    return weight.astype(np.float16)
