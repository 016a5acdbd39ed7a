"""What a nested head is: a shortlist from the leading columns of a sorted table, finished with the others."""

from __future__ import annotations

from dataclasses import dataclass

from pit_deploy.errors import InputError

FEW_BLOCKS = 16
"""Up to so many blocks of a row's rest are gathered as bytes and scaled by block. Measured in ONNX Runtime on one
core, a gathered number of int8 takes 0.7 to 0.9 of GatherBlockQuantized's time with 9 to 16 blocks, 1.04 with 24,
1.3 with 32 and 2 with 64."""
MISS_RATE = 5e-4
"""The default share of positions whose best token the shortlist may miss."""


@dataclass(frozen=True)
class NestedHead:
    """`columns` leading columns of a sorted table estimate all logits; the best `shortlist` are finished.

    `miss_rate` is the share of `positions` of held-out text whose best token is not in the shortlist, `kl` the mean
    KL there of the whole next-token distribution against the full head's, both before rounding. They are None where
    columns and shortlist were given by hand and there was no text to measure them on.
    """

    columns: int
    shortlist: int
    miss_rate: float | None = None
    kl: float | None = None
    positions: int | None = None

    def check(self, rows: int, columns: int, block: int) -> None:
        """Raise `InputError` where a table [rows, columns] in blocks of `block` has no such head."""
        if columns % block or self.columns % block or not 0 < self.columns < columns:
            raise InputError(
                f"--head-columns {self.columns} cannot split a table of {columns} columns in blocks of {block}; give a "
                f"multiple of {block} below {columns}, or another --block-size."
            )
        if not 0 < self.shortlist < rows:
            raise InputError(
                f"--shortlist {self.shortlist} is no part of {rows} ids; give at least 1 and fewer than all."
            )
