"""How a tensor is quantised; every quantiser takes the same options."""

from __future__ import annotations

from dataclasses import dataclass

from pit_deploy.errors import InputError

SUPPORTED_BITS = (4, 8)
MIN_BLOCK_SIZE = 16


@dataclass(frozen=True)
class QuantizationOptions:
    """Bits of a code and the granularity of its scales, along the last axis.

    `block_size` columns share a scale: a power of two from 16 on, or None for the whole row (per channel).
    `symmetric` fixes the zero point at `2**(bits - 1)`; otherwise each block stores its own.
    `positive_scales` forbids the negative scales that symmetric rounding uses by default: XNNPACK refuses
    them. It costs some accuracy at 4 bits (docs/quantization.md). Asymmetric scales are always positive, so
    the two exclude each other. Raises `InputError` for illegal values.
    """

    bits: int
    block_size: int | None = 32
    symmetric: bool = True
    positive_scales: bool = False

    def __post_init__(self) -> None:
        if self.bits not in SUPPORTED_BITS:
            raise InputError(f"bits is {self.bits}; quantisation supports 4 and 8.")
        if self.block_size is not None and not is_block_size(self.block_size):
            raise InputError(
                f"block_size is {self.block_size}; it must be a power of two of at least {MIN_BLOCK_SIZE}, "
                f"or None for one scale a row."
            )
        if self.positive_scales and not self.symmetric:
            raise InputError(
                "positive_scales=True does not go with symmetric=False: asymmetric scales are positive "
                "anyway; drop positive_scales."
            )

    def block_size_for(self, columns: int) -> int:
        """The block size of a row of `columns` numbers."""
        return columns if self.block_size is None else self.block_size


def is_block_size(size: int) -> bool:
    """Whether `size` is a power of two of at least 16."""
    return size >= MIN_BLOCK_SIZE and size & (size - 1) == 0
