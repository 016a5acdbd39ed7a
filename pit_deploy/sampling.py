"""Sampling as Python, Kotlin, Swift and JavaScript share it; docs/sampling.md is the whole definition.

A seed gives the same tokens in every language for the same logits, because the random numbers come from a
counter-based generator (Philox 4x32-10) and everything after the logits is float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from pit_deploy.errors import InputError

_U32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_HEAD = 1024  # how many of the largest scores are sorted first; a choice of speed, not of meaning

U4 = tuple[int, int, int, int]


def philox4x32(counter: U4, key: tuple[int, int]) -> U4:
    """Four random 32-bit words for a counter of four words and a key of two: Philox 4x32 with 10 rounds."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a = _MULTIPLIERS[0] * c0
        b = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & _U32, (a >> 32) ^ c3 ^ k1, a & _U32
        k0, k1 = (k0 + _WEYL[0]) & _U32, (k1 + _WEYL[1]) & _U32
    return c0, c1, c2, c3


def uniform(seed: int, step: int) -> float:
    """A number in [0, 1) of 53 random bits, given by `seed` and `step` alone (each 0 to 2**64 - 1)."""
    _check_u64("seed", seed)
    _check_u64("step", step)
    w0, w1, _, _ = philox4x32((step & _U32, step >> 32, 0, 0), (seed & _U32, seed >> 32))
    return ((w0 >> 5) * 2**26 + (w1 >> 6)) / 2**53


@dataclass(frozen=True)
class SamplingOptions:
    """How a token is drawn. The default is greedy; `top_k` 0, `top_p` 1, `min_p` 0 and penalty 1 are off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        _check_real("temperature", self.temperature, lambda value: value >= 0, "of 0 (greedy) or more")
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            raise InputError(f"top_k must be a whole number of 0 (off) or more, but is {self.top_k!r}.")
        _check_real("top_p", self.top_p, lambda value: 0 <= value <= 1, "from 0 to 1 (off)")
        _check_real("min_p", self.min_p, lambda value: 0 <= value <= 1, "from 0 (off) to 1")
        _check_real("repetition_penalty", self.repetition_penalty, lambda value: value > 0, "above 0")
        _check_u64("seed", self.seed)

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any], *, seed: int = 0) -> SamplingOptions:
        """Take the fields of a Hugging Face generation_config.

        `do_sample` false or absent means greedy. A field that is absent or null is off; transformers itself
        would fill such a `top_k` with 50.
        """

        def value(name: str, default: float) -> Any:
            given = config.get(name)
            return default if given is None else given

        return cls(
            temperature=value("temperature", 1.0) if config.get("do_sample") else 0.0,
            top_k=value("top_k", 0),
            top_p=value("top_p", 1.0),
            min_p=value("min_p", 0.0),
            repetition_penalty=value("repetition_penalty", 1.0),
            seed=seed,
        )


def sample(
    logits: np.ndarray, options: SamplingOptions, step: int, previous_ids: Collection[int] = ()
) -> int:
    """Draw one token id from `logits` [vocab_size].

    `step` is the counter of the generator: the position in the sequence that the drawn token will take.
    `previous_ids` are the ids of the prompt and of what was generated so far, for the repetition penalty.
    Raises `InputError` where a logit is NaN or +inf, or all are -inf.
    """
    ids, scores = _filtered(logits, options, previous_ids)
    if ids.size == 1:
        return int(ids[0])
    u = uniform(options.seed, step)
    if ids.size > 4 * _HEAD:
        # Sorting a whole vocabulary costs as much as a small model's decode step; nearly every draw falls
        # among the largest few.
        head = scores >= _nth_largest(scores, _HEAD)
        head_ids, weights = _ordered(ids[head], scores[head])
        cumulative, target = np.cumsum(weights), u * np.exp(scores).sum()
        if target < cumulative[-1]:
            return int(head_ids[np.searchsorted(cumulative, target, side="right")])
    ids, weights = _ordered(ids, scores)
    cumulative = np.cumsum(weights)
    return int(ids[np.searchsorted(cumulative, u * cumulative[-1], side="right")])


def probabilities(
    logits: np.ndarray, options: SamplingOptions, previous_ids: Collection[int] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """The ids that may be drawn, int64, most probable first (equal ones by id), and their probabilities."""
    ids, weights = _ordered(*_filtered(logits, options, previous_ids))
    return ids, weights / np.cumsum(weights)[-1]


def _filtered(
    logits: np.ndarray, options: SamplingOptions, previous_ids: Collection[int]
) -> tuple[np.ndarray, np.ndarray]:
    """The ids that may be drawn, ascending, and their scores less the largest score (greedy: one id, 0.0)."""
    scores = np.array(logits, dtype=np.float64)
    if scores.ndim != 1 or scores.size == 0:
        raise InputError(
            f"Sampling takes the logits of one position, [vocab_size], but got shape {scores.shape}."
        )
    _penalise_(scores, options.repetition_penalty, previous_ids)
    best = scores.max()
    if not math.isfinite(best):
        raise _not_finite(scores)
    if options.temperature == 0:
        return np.array([scores.argmax()]), np.zeros(1)

    ids = np.flatnonzero(scores > -np.inf)
    with np.errstate(over="ignore"):  # a tiny temperature sends the others to -inf, which is what it asks for
        scores = (scores[ids] - best) / options.temperature
    for keep in (_top_k, _top_p, _min_p):
        kept = keep(scores, options)
        if kept is not None:
            ids, scores = ids[kept], scores[kept]
    return ids, scores


def _ordered(ids: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ids in the order of drawing (largest score first, equal ones by id), and exp(score) for each."""
    order = np.argsort(-scores, kind="stable")  # ids ascend, so equal scores stay in the order of their ids
    return ids[order], np.exp(scores[order])


def _penalise_(scores: np.ndarray, penalty: float, previous_ids: Collection[int]) -> None:
    if penalty == 1.0 or len(previous_ids) == 0:
        return
    seen = np.unique(np.fromiter(previous_ids, dtype=np.int64, count=len(previous_ids)))
    if seen[0] < 0 or seen[-1] >= scores.size:
        wrong = seen[0] if seen[0] < 0 else seen[-1]
        raise InputError(f"The previous id {wrong} is outside the vocabulary of {scores.size} rows.")
    values = scores[seen]
    with np.errstate(over="ignore"):
        scores[seen] = np.where(values < 0, values * penalty, values / penalty)


def _top_k(scores: np.ndarray, options: SamplingOptions) -> np.ndarray | None:
    if not 0 < options.top_k < scores.size:
        return None
    kept: np.ndarray = scores >= _nth_largest(scores, options.top_k)
    return kept


def _top_p(scores: np.ndarray, options: SamplingOptions) -> np.ndarray | None:
    """Remove from the end of the order of drawing while the sum of what is removed is at most 1 - top_p.

    transformers removes as many; which of equal ids its sort removes differs from machine to machine.
    """
    if options.top_p >= 1:
        return None
    share = np.exp(scores)
    share /= share.sum()
    kept = np.zeros(scores.size, dtype=bool)
    considered, removed = np.arange(scores.size), 0.0
    if scores.size > 4 * _HEAD:
        # As in `sample`: where everything below the largest few surely goes, only those few need an order.
        head = scores >= _nth_largest(scores, _HEAD)
        below = float(share[~head].sum())
        if below < 1 - options.top_p - 1e-9:
            considered, removed = np.flatnonzero(head), below
    backwards = considered[np.argsort(-scores[considered], kind="stable")[::-1]]
    kept[backwards] = removed + np.cumsum(share[backwards]) > 1 - options.top_p
    kept[backwards[-1]] = True
    return kept


def _min_p(scores: np.ndarray, options: SamplingOptions) -> np.ndarray | None:
    if options.min_p == 0:
        return None
    kept: np.ndarray = np.exp(scores) >= options.min_p  # the largest score is 0, so this is the ratio to it
    return kept


def _nth_largest(scores: np.ndarray, n: int) -> float:
    return float(np.partition(scores, scores.size - n)[scores.size - n])


def _not_finite(scores: np.ndarray) -> InputError:
    wrong = np.flatnonzero(np.isnan(scores) | (scores == np.inf))
    if wrong.size == 0:
        return InputError(f"All {scores.size} logits are -inf, so there is no token to draw.")
    return InputError(
        f"{wrong.size} of {scores.size} logits are not finite, first at token id {wrong[0]} "
        f"({scores[wrong[0]]}), so no token can be drawn; run 'pit-deploy verify' on the artifact."
    )


def _check_real(name: str, value: Any, allowed: Callable[[float], bool], range_text: str) -> None:
    number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not allowed(value):
        raise InputError(f"{name} must be a finite number {range_text}, but is {value!r}.")


def _check_u64(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**64:
        raise InputError(f"{name} must be a whole number from 0 to 2**64 - 1, but is {value!r}.")
