from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from pit_deploy.errors import InputError
from pit_deploy.generate import Generation, generate, stream
from pit_deploy.runtimes.base import VerifyingRuntime, check_room
from pit_deploy.sampling import SamplingOptions
from pit_deploy.speculation import LONGEST_DRAFT, PromptLookup, Speculation

GREEDY = SamplingOptions()


class Fake:
    """A model whose logits follow from the whole cache by `law`; `cache` is every id that ran, `passes` their sizes."""

    name, vocab_size = "fake", 12

    def __init__(self, law: Callable[[Sequence[int]], np.ndarray], context_length: int = 200) -> None:
        self.law, self.context_length = law, context_length
        self.cache: list[int] = []
        self.passes: list[int] = []

    @property
    def position(self) -> int:
        return len(self.cache)

    def prefill(self, ids: Sequence[int]) -> np.ndarray:
        check_room(self, ids)
        self.cache += ids
        self.passes.append(len(ids))
        return self.law(self.cache)

    def decode(self, id: int) -> np.ndarray:
        return self.prefill([id])

    def reset(self) -> None:
        self.cache = []


class Verifying(Fake):
    def last_logits(self, ids: Sequence[int]) -> np.ndarray:
        check_room(self, ids)
        rows = []
        for id in ids:
            self.cache.append(id)
            rows.append(self.law(self.cache))
        self.passes.append(len(ids))
        return np.stack(rows)

    def rewind(self, position: int) -> None:
        assert 0 <= position <= len(self.cache)
        del self.cache[position:]


def noise(cache: Sequence[int]) -> np.ndarray:
    """Unlike for every cache: no draft is right but by chance."""
    return np.random.default_rng([len(cache), *cache]).normal(size=12).astype(np.float32)


def ties(cache: Sequence[int]) -> np.ndarray:
    """Few different values, so that the largest is often shared; the last two ids decide, so that texts repeat."""
    return np.random.default_rng(list(cache[-2:])).integers(0, 3, 12).astype(np.float32)


def counting(cache: Sequence[int]) -> np.ndarray:
    """Wants id + 1, round and round."""
    return np.eye(12, dtype=np.float32)[(cache[-1] + 1) % 12]


def trap(cache: Sequence[int]) -> np.ndarray:
    """Counts round, but leaves the round at every seventh position: a draft that was right for long fails."""
    return np.eye(12, dtype=np.float32)[(cache[-1] + (5 if len(cache) % 7 == 0 else 1)) % 12]


LAWS = {law.__name__: law for law in (noise, ties, counting, trap)}
OPTIONS = {
    "greedy": GREEDY,
    "penalty": SamplingOptions(repetition_penalty=1.3),
    "sampling": SamplingOptions(temperature=0.8, top_k=4, top_p=0.9, repetition_penalty=1.1, seed=3),
}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("new", "context", "stop"), [(60, 200, []), (60, 200, [7, 9]), (60, 40, []), (1, 40, []), (0, 40, [])]
)
def test_everything_is_as_without(law: str, options: str, new: int, context: int, stop: list[int]) -> None:
    prompt = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    plain, fast = Fake(LAWS[law], context), Verifying(LAWS[law], context)
    for turn in range(2):
        given: dict[str, list[int]] = {"plain": [], "fast": []}
        results, history = [], plain.cache[:] if turn else []
        for runtime, name in ((plain, "plain"), (fast, "fast")):
            results.append(
                generate(
                    runtime,
                    prompt,
                    max_new_tokens=new,
                    options=OPTIONS[options],
                    stop_ids=stop,
                    on_token=given[name].append,
                    history=history,
                    speculate=name == "fast",
                )
            )
        assert_same(*results)
        assert given["plain"] == given["fast"] == list(results[0].ids)
        assert fast.cache == plain.cache, "what was refused is gone, and nothing else"
        if results[0].finish_reason == "context_full" or context - plain.position < 4:
            break
        prompt = [*results[0].pending_ids, 8, 9, 10]


def assert_same(plain: Generation, fast: Generation) -> None:
    for field in ("ids", "finish_reason", "stop_id", "prompt_tokens", "pending_ids"):
        assert getattr(plain, field) == getattr(fast, field), field
    assert plain.speculation is None and fast.speculation is not None


def test_repeating_text_takes_few_passes() -> None:
    fast = Verifying(counting)
    got = generate(fast, [0], max_new_tokens=120, options=GREEDY, stop_ids=[], speculate=True)
    assert got.ids == tuple(i % 12 for i in range(1, 121))
    counts = got.speculation
    assert counts is not None and counts.accepted == counts.drafted > 90
    assert len(fast.passes) < 45 and counts.passes == sum(n > 1 for n in fast.passes[1:])
    assert counts.accepted_per_pass == counts.accepted / counts.passes > 4
    assert counts.to_dict()["accepted_per_pass"] == counts.accepted_per_pass


def test_text_that_does_not_repeat_is_left_alone() -> None:
    fast = Verifying(noise)
    got = generate(fast, [1, 2, 3] * 5, max_new_tokens=150, options=GREEDY, stop_ids=[], speculate=True)
    assert got.speculation is not None
    assert got.speculation.drafted < 15, "after some failures, drafts are only compared and not run"


@pytest.mark.parametrize("taken", range(1, 30, 4))
def test_ending_early_leaves_the_cache_of_plain_decoding(taken: int) -> None:
    plain, fast = Fake(counting), Verifying(counting)
    streams = []
    for runtime in (plain, fast):
        tokens = stream(
            runtime,
            [0, 1, 2, 3, 4] * 3,
            max_new_tokens=99,
            options=GREEDY,
            stop_ids=[],
            speculate=runtime is fast,
        )
        list(itertools.islice(tokens, taken))
        tokens.cancel()
        streams.append(tokens.generation)
    assert_same(*streams)
    assert streams[0].finish_reason == "cancelled" and len(streams[0].ids) == taken
    assert fast.cache == plain.cache


@pytest.mark.parametrize("at", range(1, 12))
def test_a_callback_that_raises_leaves_no_drafts_behind(at: int) -> None:
    caches = []
    for speculate in (False, True):
        runtime, count = Verifying(counting), 0

        def stop(id: int) -> None:
            nonlocal count
            count += 1
            if count == at:
                raise KeyError(id)

        with pytest.raises(KeyError):
            generate(
                runtime,
                [*range(12), *range(12)],
                max_new_tokens=20,
                options=GREEDY,
                stop_ids=(),
                on_token=stop,
                speculate=speculate,
            )
        caches.append(list(runtime.cache))
    assert caches[0] == caches[1]


@pytest.mark.parametrize("period", [[7], [1, 2, 3]])
def test_a_draft_of_repeating_text_goes_on_repeating(period: list[int]) -> None:
    lookup, text = PromptLookup(), period * 20
    for id in text:
        lookup.append(id)
        draft = lookup.draft(LONGEST_DRAFT)
    assert draft == (period * 20)[: len(draft)]
    assert len(draft) > len(period)


def test_an_error_while_drawing_comes_at_its_token_and_settles() -> None:
    def broken(cache: Sequence[int]) -> np.ndarray:
        return np.full(12, np.nan, np.float32) if len(cache) == 25 else counting(cache)

    caches, ids = [], []
    for runtime in (Fake(broken), Verifying(broken)):
        tokens = stream(
            runtime,
            [0],
            max_new_tokens=99,
            options=GREEDY,
            stop_ids=[],
            speculate=isinstance(runtime, Verifying),
        )
        got = []
        with pytest.raises(InputError, match="not finite"):
            for id in tokens:
                got.append(id)
        ids.append(got)
        caches.append(runtime.cache)
    assert ids[0] == ids[1] and len(ids[0]) == 24
    assert caches[0] == caches[1]


def test_a_runtime_that_cannot_verify_is_refused() -> None:
    assert isinstance(Verifying(counting), VerifyingRuntime)
    with pytest.raises(
        InputError, match=r"fake was not opened for speculation; use open_runtime\(\.\.\., speculate=True"
    ):
        generate(Fake(counting), [1], max_new_tokens=1, options=GREEDY, stop_ids=[], speculate=True)


def test_position_is_that_of_the_text() -> None:
    fast = Verifying(counting)
    fast.prefill([0, 1, 2, 3] * 3)
    speculation = Speculation(fast, fast.cache)
    id, ahead = 4, []
    for i in range(20):
        logits = speculation.logits(id, 99)
        assert speculation.position == 13 + i
        ahead.append(fast.position - speculation.position)
        id = int(logits.argmax())
    assert max(ahead) >= 2 and min(ahead) == 0
    while fast.position == speculation.position:
        id = int(speculation.logits(id, 99).argmax())
    position = speculation.position
    speculation.settle()
    assert fast.position == speculation.position == position


def fed(ids: Sequence[int]) -> PromptLookup:
    lookup = PromptLookup()
    for id in ids:
        lookup.append(id)
    return lookup


def test_the_longest_match_wins_and_of_equals_the_last() -> None:
    #           a long match here           a short one later
    assert fed([1, 2, 3, 4, 5, 60, 61, 62, 4, 5, 70, 71, 72, 1, 2, 3, 4, 5]).draft(3)[0] == 60
    lookup = fed([1, 2, 3, 4, 5, 60, 61, 1, 2, 3, 4, 5, 70, 71, 72, 1, 2, 3, 4, 5])
    assert lookup.draft(3)[0] == 70
    assert lookup.draft(1) == [70] and lookup.draft(0) == []
    assert fed([1, 2, 3]).draft(5) == [] and fed([]).draft(5) == []


def test_drafts_grow_with_success_and_shrink_with_failure() -> None:
    period = list(range(100, 150))
    lookup, lengths = fed(period * 2), []
    for id in period * 4:
        lengths.append(len(lookup.draft(99)))
        lookup.append(id)
    assert lengths[0] < lengths[-1] == LONGEST_DRAFT and lengths == sorted(lengths)
    for i in range(40):  # the same ten ids, each time followed by another
        for id in [*period[:10], 200 + i]:
            last = len(lookup.draft(99))
            lookup.append(id)
    assert last == 0
    for id in period * 4:
        last = len(lookup.draft(99))
        lookup.append(id)
    assert last == LONGEST_DRAFT, "drafts that are not run are still compared, and come back"


def test_the_cost_of_an_id_does_not_grow() -> None:
    class Counted(dict):  # type: ignore[type-arg]
        reads = 0

        def get(self, key: object, default: object = None) -> object:
            Counted.reads += 1
            return super().get(key, default)

    lookup = PromptLookup()
    lookup._places = Counted()
    for i in range(5000):  # nothing but matches
        lookup.append(i % 3)
        lookup.draft(4)
    assert Counted.reads <= 9 * 5000
