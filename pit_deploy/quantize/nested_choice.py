"""The choice of a nested head: how many columns shortlist, and how many ids.

Columns of the shared table that `quantization_basis` sorts by importance carry most of every logit in the first few.
A head that reads those alone estimates all logits; it then finishes only the best of them. Both numbers are chosen on
states that the basis was not made from (docs/nested.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from pit_deploy.folding import SharedTable
from pit_deploy.progress import Progress, silent
from pit_deploy.quantize.basis import importance, noise_factor
from pit_deploy.quantize.nested import FEW_BLOCKS, MISS_RATE, NestedHead

SHORTLISTS = (256, 384, 512, 768, 1024, 1536, 2048)
WORTH = 0.75
"""A nested head is taken where its estimated time is at most this share of the full head's."""
KL_EVERY = 8
"""One in so many positions is compared by KL, too: it needs the order of all estimates."""

_PRODUCT = {8: 0.036, 4: 0.021}
_GATHER = {8: 0.9, 4: 1.2}
_GATHER_FEW = 0.6
_SELECT, _SELECT_BEST = 1.0, 80.0
"""Nanoseconds in ONNX Runtime on one core, by bits of the table: a number of the table in the product, one that is
gathered and finished (of int8 in `FEW_BLOCKS` apart), an id among which the best are looked for, and one of the best.
Only their ratios matter."""


@dataclass(frozen=True)
class Estimates:
    """How well each (columns, shortlist) does on held-out states."""

    columns: tuple[int, ...]
    shortlists: tuple[int, ...]
    miss_rates: np.ndarray
    """[columns, shortlists]"""
    kl: np.ndarray
    """[columns, shortlists], nats"""
    positions: int


def choose_nested_head(
    tables: SharedTable,
    state_second_moment: np.ndarray,
    held_out: np.ndarray,
    *,
    bits: int,
    block: int,
    miss_rate: float = MISS_RATE,
    known: int | None = None,
    progress: Progress = silent,
) -> tuple[NestedHead | None, str]:
    """The fastest nested head that keeps `miss_rate` on the `held_out` states, and a sentence on the choice.

    None where there is none: the text is too short to show such a rate, no part of the table is good enough, or the
    full head is about as fast. `held_out` [positions, hidden_size] are normalised states as `head_map` takes them.
    """
    rows, size = tables.table.shape
    needed = int(np.ceil(2 / miss_rate))
    if len(held_out) < needed:
        return None, (
            f"the full head is kept: {len(held_out)} positions of calibration text are held out, and a miss rate of "
            f"{miss_rate:g} needs {needed}"
        )
    columns = tuple(range(block, size * 2 // 3 + 1, block)) if size % block == 0 else ()
    shortlists = tuple(k for k in SHORTLISTS if k <= rows // 8)
    times = {(r, k): head_time(rows, size, r, k, bits, block) for r in columns for k in shortlists}
    worth = {pair for pair, time in times.items() if time <= WORTH * full_time(rows, size, bits)}
    if not worth:
        return None, f"the full head is kept: a nested one is not faster at {rows} ids and {size} columns"
    columns = tuple(r for r in columns if any((r, k) in worth for k in shortlists))
    found = measure(
        tables,
        state_second_moment,
        held_out,
        columns,
        shortlists,
        known=known,
        progress=progress,
    )
    worth_measured = [
        (times[r, k], r, k, float(found.miss_rates[i, j]), float(found.kl[i, j]))
        for i, r in enumerate(columns)
        for j, k in enumerate(shortlists)
        if (r, k) in worth
    ]
    fit = [candidate for candidate in worth_measured if candidate[3] <= miss_rate]
    if not fit:
        least = min(rate for _, _, _, rate, _ in worth_measured)
        return None, (
            f"the full head is kept: on {found.positions} held-out positions the nested heads that would be faster "
            f"miss at least {least:.2%} of the best tokens, and {miss_rate:.2%} is allowed"
        )
    _, r, k, rate, kl = min(fit)
    head = NestedHead(r, k, rate, kl, found.positions)
    return head, _sentence(head, rows, size)


def measured(
    head: NestedHead,
    tables: SharedTable,
    state_second_moment: np.ndarray,
    held_out: np.ndarray,
    *,
    known: int | None = None,
    progress: Progress = silent,
) -> tuple[NestedHead, str]:
    """A head that was given by hand, with what it does on the `held_out` states (nothing where there are none)."""
    if len(held_out):
        found = measure(
            tables,
            state_second_moment,
            held_out,
            (head.columns,),
            (head.shortlist,),
            known=known,
            progress=progress,
        )
        rate, kl = float(found.miss_rates[0, 0]), float(found.kl[0, 0])
        head = replace(head, miss_rate=rate, kl=kl, positions=found.positions)
    return head, _sentence(head, *tables.table.shape)


def _sentence(head: NestedHead, rows: int, columns: int) -> str:
    made = f"nested head: {head.columns} of {columns} columns shortlist {head.shortlist} of {rows} ids"
    if head.miss_rate is None:
        return made
    return (
        f"{made}; on {head.positions} held-out positions it misses {head.miss_rate:.2%} of the best tokens, KL "
        f"{head.kl:.1e}"
    )


def measure(
    tables: SharedTable,
    state_second_moment: np.ndarray,
    states: np.ndarray,
    columns: tuple[int, ...],
    shortlists: tuple[int, ...],
    *,
    known: int | None = None,
    progress: Progress = silent,
) -> Estimates:
    """Miss rates and KL of nested heads on `states`, for each of `columns` (rising) and `shortlists` (rising).

    The table is not rounded. Ids from `known` on have no token and are left out.
    """
    assert tables.head_map is not None
    head_map = tables.head_map.astype(np.float64)
    vectors = importance(noise_factor(head_map, state_second_moment))
    table = tables.table[:known] @ vectors.astype(np.float32)
    queries = (states @ (head_map.T @ vectors)).astype(np.float32)
    misses = np.zeros((len(columns), len(shortlists)))
    divergence, compared = np.zeros_like(misses), 0
    borders = (0, *columns, table.shape[1])
    step = max(1, (1 << 24) // len(table) // len(borders))
    for start in range(0, len(queries), step):
        progress("shortlist", start, len(queries))
        part = queries[start : start + step]
        logits = np.zeros((len(part), len(table)), np.float32)
        estimates = []
        for low, high in pairwise(borders):
            logits = logits + part[:, low:high] @ table[:, low:high].T
            estimates.append(logits)
        best = logits.argmax(axis=1)[:, None]
        chosen = [n for n in range(len(part)) if (start + n) % KL_EVERY == 0]
        compared += len(chosen)
        for i, estimate in enumerate(estimates[:-1]):
            ranks = (estimate > np.take_along_axis(estimate, best, axis=1)).sum(axis=1)
            misses[i] += [(ranks >= shortlist).sum() for shortlist in shortlists]
            for n in chosen:
                divergence[i] += list(_divergences(logits[n], estimate[n], shortlists))
    progress("shortlist", len(queries), len(queries))
    return Estimates(columns, shortlists, misses / len(queries), divergence / max(compared, 1), len(queries))


def head_time(rows: int, columns: int, leading: int, shortlist: int, bits: int, block: int) -> float:
    """The nested head's time in about nanoseconds."""
    few = bits == 8 and columns - leading <= FEW_BLOCKS * block
    product = _PRODUCT[bits] * rows * leading
    select = _SELECT * rows + _SELECT_BEST * shortlist
    return product + select + (_GATHER_FEW if few else _GATHER[bits]) * shortlist * (columns - leading)


def full_time(rows: int, columns: int, bits: int) -> float:
    """The full head's time, in the same unit."""
    return _PRODUCT[bits] * rows * columns


def _divergences(logits: np.ndarray, estimate: np.ndarray, shortlists: tuple[int, ...]) -> Iterator[float]:
    """KL(full || nested) of one position, for each shortlist."""
    order = np.argpartition(-estimate, [k - 1 for k in shortlists])
    full = logits[order].astype(np.float64)
    mixed = estimate[order].astype(np.float64)
    log_p = full - _logsumexp(full)
    p = np.exp(log_p)
    for shortlist in shortlists:
        q = np.concatenate([full[:shortlist], mixed[shortlist:]])
        yield float(max(0.0, (p * (log_p - q)).sum() + _logsumexp(q)))


def _logsumexp(x: np.ndarray) -> float:
    top = x.max()
    return float(top + np.log(np.exp(x - top).sum()))
