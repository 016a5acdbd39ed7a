"""Prompt lookup: drafts from earlier text, run several tokens at a time without changing what is generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from pit_deploy.runtimes.base import VerifyingRuntime

LONGEST_DRAFT = 12
"""Ids in a draft. A pass of so many takes four to five times one of a single token, so more gain nothing."""
_LONGEST_MATCH = 10
_SHORTEST_MATCH = 2
_ID_COST = 0.33
"""What each id of a draft costs beside the pass of one token that it takes the place of, in such passes (int4 and
int8 on a processor)."""
_LEAST_GAIN = 1.03
"""Tokens per cost that a draft must promise over decoding alone; what is below is noise of the estimate."""
_MEMORY = 24.0
"""Weight of the past in an estimate, in tokens: older ones fade."""


@dataclass(frozen=True)
class SpeculationCounts:
    """What drafts did for one generation: passes that ran a draft, ids in them, and ids that were drawn as well."""

    passes: int
    drafted: int
    accepted: int

    @property
    def accepted_per_pass(self) -> float:
        """Ids that one pass with a draft brought besides the one that it would have brought without."""
        return self.accepted / self.passes if self.passes else 0.0

    def to_dict(self) -> dict[str, float]:
        """The object in the JSON of `run` (docs/cli.md)."""
        return {**asdict(self), "accepted_per_pass": self.accepted_per_pass}


class PromptLookup:
    """Drafts the continuation of the longest recent match of the last ids; the cost of an id is constant.

    The most recent place of each run of 2 to 10 ids is kept in a table. How long a draft is follows from how often
    ids after a match of that length came true, drafted or not: each `append` is compared with what the last
    `draft` saw, also where that was too doubtful to be given out.
    """

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._places: dict[tuple[int, ...], int] = {}
        self._rates = {n: _Rate(n) for n in range(_SHORTEST_MATCH, _LONGEST_MATCH + 1)}
        self._expected: list[int] = []
        self._match = 0

    def append(self, id: int) -> None:
        """The next id of the text."""
        if self._expected:
            hit = self._expected.pop() == id
            self._rates[self._match].observe(hit)
            if not hit:
                self._expected = []
        # A run's place is entered one id late, so that what follows it is known and it cannot match itself.
        end = len(self._ids)
        for n in range(_SHORTEST_MATCH, min(_LONGEST_MATCH, end) + 1):
            self._places[tuple(self._ids[end - n :])] = end
        self._ids.append(id)

    def draft(self, limit: int) -> list[int]:
        """At most `limit` ids that may come next; none where trying them would cost more than it brings."""
        self._expected = []
        end = len(self._ids)
        for n in range(min(_LONGEST_MATCH, end), _SHORTEST_MATCH - 1, -1):
            place = self._places.get(tuple(self._ids[end - n :]))
            if place is not None:
                break
        else:
            return []
        length = min(self._rates[n].best_length(), limit)
        found = self._ids[place : place + max(length, 1)]
        while len(found) < length:  # the match reaches to the end: what repeats goes on repeating
            found.append(found[place - end])
        self._match, self._expected = n, found[::-1]
        return found[:length]


class _Rate:
    """How often the id after a match came true, with a first guess that fades."""

    def __init__(self, match: int) -> None:
        self._hits, self._tries = 4 * match / (match + 3), 4.0

    def observe(self, hit: bool) -> None:
        fade = 1 - 1 / _MEMORY
        self._hits, self._tries = self._hits * fade + hit, self._tries * fade + 1

    def best_length(self) -> int:
        """The draft length that promises the most tokens per cost, 0 for none."""
        rate = self._hits / self._tries
        best, best_gain, tokens, chance = 0, _LEAST_GAIN, 1.0, 1.0
        for length in range(1, LONGEST_DRAFT + 1):
            chance *= rate
            tokens += chance
            gain = tokens / (1 + _ID_COST * length)
            if gain > best_gain:
                best, best_gain = length, gain
        return best


class Speculation:
    """The logits of a growing text, one id at a time, from passes that run drafts ahead.

    What `logits` returns is what `runtime.decode` returns, bit for bit, since that is what `last_logits` promises;
    a row is used only where the ids before it are those of the text. In between, the runtime's cache may hold
    more than the text: `settle` removes that.
    """

    def __init__(self, runtime: VerifyingRuntime, ids: Sequence[int]) -> None:
        self._runtime, self._lookup = runtime, PromptLookup()
        for id in ids:
            self._lookup.append(id)
        self._draft: list[int] = []
        self._rows = np.empty([0, 0], np.float32)
        self._used = 0
        self._passes = self._drafted = self._accepted = 0

    @property
    def position(self) -> int:
        """Tokens of the text in the cache."""
        return self._runtime.position - (len(self._rows) - self._used)

    @property
    def counts(self) -> SpeculationCounts:
        return SpeculationCounts(self._passes, self._drafted, self._accepted)

    def logits(self, id: int, wanted: int) -> np.ndarray:
        """Append `id` and return its logits, [vocab_size]; `wanted`: logits that may be asked for, these included."""
        self._lookup.append(id)
        if self._used < len(self._rows) and self._draft[self._used - 1] == id:
            self._accepted += 1
        else:
            self.settle()
            room = self._runtime.context_length - self._runtime.position
            self._draft = self._lookup.draft(min(wanted, room) - 1)
            if not self._draft:
                return self._runtime.decode(id)
            self._rows = self._runtime.last_logits([id, *self._draft])
            self._passes += 1
            self._drafted += len(self._draft)
        self._used += 1
        logits: np.ndarray = self._rows[self._used - 1]
        return logits

    def settle(self) -> None:
        """Remove from the cache what is not of the text."""
        if self._used < len(self._rows):
            self._runtime.rewind(self.position)
        self._rows, self._used = self._rows[:0], 0
