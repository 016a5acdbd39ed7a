"""The search for the bits of each group of matrices: the smallest artifact inside a gate on KL, or the best in a size.

Groups, each measured alone (`sensitivity`), go down in the order of KL per byte saved. Effects don't add exactly, so
the cut is found by measuring joint choices (bisection), and what is returned has been measured as a whole. A token
table is too large a step for that line: each of its states gets a line of its own, and the best of them is taken.

A joint choice costs a pass over all windows. So none is measured whose outcome the others leave no doubt about, and
a line is left as soon as it holds nothing smaller than another has given.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from pit_deploy.errors import InputError
from pit_deploy.progress import Progress, silent

LARGE = 0.05  # share of all that can be saved, from which on a group is tried in each of its states
MAX_LARGE = 2
_LEAST_DOUBT = 0.02


@dataclass(frozen=True)
class Group:
    """Tensors that change precision together. `nbytes` and `kl` go by bits: the size, and the KL against the
    float model where this group alone has these bits."""

    name: str
    tensors: tuple[str, ...]
    nbytes: Mapping[int, int]
    kl: Mapping[int, float]


@dataclass(frozen=True)
class GroupChoice:
    """A row of the table of choices. `kl` is of the group alone in `bits`."""

    group: str
    bits: int
    nbytes: int
    kl: float


@dataclass(frozen=True)
class PrecisionChoice:
    """Bits of each tensor by name (32 stands for float), and what the choice costs as a whole.

    `kl` was measured with all of them in place; `nbytes` counts the groups' tensors and `fixed_bytes`.
    """

    bits: dict[str, int]
    groups: tuple[GroupChoice, ...]
    kl: float
    nbytes: int
    max_kl: float | None = None
    max_bytes: int | None = None
    trials: tuple[tuple[int, float], ...] = field(default=())
    """Bytes and KL of each joint choice that was measured."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, for manifest and report."""
        return {
            **asdict(self),
            "groups": [asdict(g) for g in self.groups],
            "trials": [list(t) for t in self.trials],
        }


def choose_precision(
    groups: Sequence[Group],
    measure: Callable[[Mapping[str, int]], float],
    *,
    max_kl: float | None = None,
    max_bytes: int | None = None,
    fixed_bytes: int = 0,
    progress: Progress = silent,
) -> PrecisionChoice:
    """The smallest choice with `measure(bits by group) <= max_kl`, or the best one of at most `max_bytes`.

    All groups start in their finest precision. Raises `InputError` where even that is above `max_kl` (with
    the KL it has) or the coarsest is above `max_bytes` (with its size), or where not exactly one is given.
    """
    if (max_kl is None) == (max_bytes is None):
        raise InputError(
            "give one of --max-kl and --max-bytes: the search keeps the one and minimises the other."
        )
    large, small = _by_size(groups)
    best: PrecisionChoice | None = None
    trials: list[tuple[int, float]] = []
    finest: float | None = None
    moves, ratios = _moves(small), dict[int, float]()
    for combination in itertools.product(*(sorted(group.nbytes, reverse=True) for group in large)):
        fixed = {group.name: bits for group, bits in zip(large, combination, strict=True)}
        search = _Search(groups, fixed, moves, measure, fixed_bytes, trials, ratios, progress)
        if max_kl is None:
            count = search.largest_within(max_bytes)
        else:
            count = search.smallest_within(max_kl, math.inf if best is None else best.nbytes)
        finest = search.known.get(0) if finest is None else finest
        if count is None:
            continue
        found = search.choice(count, max_kl, max_bytes)
        if best is None or (found.kl < best.kl if max_kl is None else found.nbytes < best.nbytes):
            best = found
    if best is not None:
        return replace(best, trials=tuple(trials))
    if max_bytes is not None:
        least = fixed_bytes + sum(min(group.nbytes.values()) for group in groups)
        raise InputError(f"--max-bytes {max_bytes} cannot be met: the smallest choice has {least} bytes.")
    raise InputError(
        f"--max-kl {max_kl:g} cannot be met: the best reached is {finest:.3g}, with "
        f"{max(max(group.nbytes) for group in groups)}-bit tensors throughout."
    )


@dataclass(frozen=True)
class _Move:
    """A step of a group to fewer bits, and the KL that it adds alone."""

    group: str
    bits: int
    kl: float


class _Search:
    """Choices along one line: the large groups `fixed`, the others going down move by move."""

    def __init__(
        self,
        groups: Sequence[Group],
        fixed: Mapping[str, int],
        moves: Sequence[_Move],
        measure: Callable[[Mapping[str, int]], float],
        fixed_bytes: int,
        trials: list[tuple[int, float]],
        ratios: dict[int, float],
        progress: Progress,
    ) -> None:
        self.groups, self.fixed, self.moves = groups, fixed, moves
        self.measure, self.fixed_bytes = measure, fixed_bytes
        self.trials, self.progress = trials, progress
        self.sums = [0.0, *itertools.accumulate(move.kl for move in moves)]
        """By count: what the moves would add to the KL if effects added exactly."""
        self.ratios = ratios
        """By count: what the moves did add over what they would, measured on this line or another."""
        self.known: dict[int, float] = {}

    def bits(self, count: int) -> dict[str, int]:
        bits = {group.name: max(group.nbytes) for group in self.groups} | dict(self.fixed)
        bits.update((move.group, move.bits) for move in self.moves[:count])  # later ones go further down
        return bits

    def nbytes(self, count: int) -> int:
        bits = self.bits(count)
        return self.fixed_bytes + sum(group.nbytes[bits[group.name]] for group in self.groups)

    def kl(self, count: int) -> float:
        if count not in self.known:
            self.known[count] = self.measure(self.bits(count))
            self.trials.append((self.nbytes(count), self.known[count]))
            self.progress("search", len(self.trials), len(self.trials) + 1)
            if self.sums[count] > 0 and 0 in self.known:
                self.ratios[count] = (self.known[count] - self.known[0]) / self.sums[count]
        return self.known[count]

    def largest_within(self, max_bytes: int | None) -> int | None:
        """The fewest moves that fit into `max_bytes`."""
        assert max_bytes is not None
        return next((n for n in range(len(self.moves) + 1) if self.nbytes(n) <= max_bytes), None)

    def smallest_within(self, max_kl: float, below: float = math.inf) -> int | None:
        """The most moves inside the gate, by bisection: what is returned has been measured.

        None where there are none, or none whose size is less than `below`.
        """
        if not self.kl(0) <= max_kl:
            return None
        low, high = 0, len(self.moves) + 1  # low is inside the gate; high is outside, or past the end
        while True:
            while high - low > 1:
                if self.nbytes(high - 1) >= below:
                    return None
                middle = (low + high) // 2
                low, high = (middle, high) if self.is_within(middle, max_kl) else (low, middle)
            if self.nbytes(low) >= below:
                return None
            end = len(self.moves) + 1
            if not self.kl(low) <= max_kl:  # what was foreseen did not come true, here or below
                low, high = 0, low
            elif high < end and self.kl(high) <= max_kl:
                low, high = high, end
            else:
                return low

    def is_within(self, count: int, max_kl: float) -> bool:
        """Whether so many moves are inside the gate: measured, unless what is known leaves no doubt.

        The KL of a choice is foreseen from the nearest that were measured, with fewer moves and with more. From one
        of them alone it may be off by the root of the factor between their sums, from both by much less.
        """
        total = self.sums[count]
        known = sorted(n for n, ratio in self.ratios.items() if ratio > 0)
        if count not in self.known and known and total > 0:
            around = [*[n for n in known if n <= count][-1:], *[n for n in known if n > count][:1]]
            places = [math.log(self.sums[n] / total) for n in around]
            ratio = float(np.interp(0.0, places, [self.ratios[n] for n in around]))
            foreseen = self.known[0] + ratio * total
            far = min(map(abs, places)) / (2 if len(around) == 1 else 8)
            doubt = math.exp(far + _LEAST_DOUBT)
            if not max_kl / doubt <= foreseen <= max_kl * doubt:
                return foreseen < max_kl
        return self.kl(count) <= max_kl

    def choice(self, count: int, max_kl: float | None, max_bytes: int | None) -> PrecisionChoice:
        chosen = self.bits(count)
        rows = [(group, chosen[group.name]) for group in self.groups]
        return PrecisionChoice(
            bits={name: bits for group, bits in rows for name in group.tensors},
            groups=tuple(
                GroupChoice(g.name, bits, g.nbytes[bits], float(g.kl.get(bits, 0.0))) for g, bits in rows
            ),
            kl=self.kl(count),
            nbytes=self.nbytes(count),
            max_kl=max_kl,
            max_bytes=max_bytes,
        )


def _by_size(groups: Sequence[Group]) -> tuple[list[Group], list[Group]]:
    """Groups so large that one step overshoots any target, of which all states are tried; and the others."""
    spans = [max(group.nbytes.values()) - min(group.nbytes.values()) for group in groups]
    limit = LARGE * sum(spans)
    large = sorted((s, n) for n, s in enumerate(spans) if s > limit)[-MAX_LARGE:] if len(groups) > 8 else []
    chosen = {n for _, n in large}
    return (
        [group for n, group in enumerate(groups) if n in chosen],
        [group for n, group in enumerate(groups) if n not in chosen],
    )


def _moves(groups: Sequence[Group]) -> list[_Move]:
    """Steps to fewer bits, the cheapest in KL per byte first; a group's steps stay in their order.

    Where a later step is cheaper than the one before it, both are taken as one.
    """
    found: list[tuple[float, int, _Move]] = []
    for number, group in enumerate(groups):
        ladder = sorted(group.nbytes, reverse=True)
        steps: list[tuple[float, float, int]] = []  # KL, bytes, bits reached
        for finer, coarser in itertools.pairwise(ladder):
            cost: float = max(group.kl.get(coarser, 0.0) - group.kl.get(finer, 0.0), 0.0)
            saved: float = group.nbytes[finer] - group.nbytes[coarser]
            while steps and cost * steps[-1][1] < steps[-1][0] * saved:
                cost, saved = cost + steps[-1][0], saved + steps.pop()[1]
            steps.append((cost, saved, coarser))
        found += [
            (cost / max(saved, 1), number, _Move(group.name, bits, cost)) for cost, saved, bits in steps
        ]
    return [move for *_, move in sorted(found, key=lambda found: (found[0], found[1], -found[2].bits))]
