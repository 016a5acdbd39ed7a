from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from pit_deploy.errors import InputError
from pit_deploy.sampling import SamplingOptions, philox4x32, probabilities, sample, uniform


def test_philox_known_answers() -> None:
    # Random123, kat_vectors: philox4x32 with 10 rounds.
    ones, pi = 0xFFFFFFFF, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox4x32((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox4x32((ones,) * 4, (ones,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    assert philox4x32(pi, (0xA4093822, 0x299F31D0)) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


def test_uniform_is_uniform() -> None:
    draws = np.array([uniform(7, step) for step in range(4000)])
    assert draws.min() >= 0 and draws.max() < 1
    counts, _ = np.histogram(draws, bins=20, range=(0, 1))
    assert ((counts - 200) ** 2 / 200).sum() < 43.8  # chi-square, 19 degrees, p = 0.001


def test_uniform_uses_53_bits_of_the_first_two_words() -> None:
    w0, w1, _, _ = philox4x32((5, 1, 0, 0), (9, 2))
    assert uniform(9 + 2 * 2**32, 5 + 2**32) == ((w0 >> 5) * 67108864.0 + (w1 >> 6)) / 9007199254740992.0
    assert uniform(1, 0) != uniform(0, 1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_k", True),
        ("top_p", 1.5),
        ("top_p", -0.1),
        ("min_p", 2),
        ("min_p", None),
        ("repetition_penalty", 0),
        ("repetition_penalty", float("inf")),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 1.0),
    ],
)
def test_options_name_the_field_and_the_value(field: str, value: Any) -> None:
    with pytest.raises(InputError) as caught:
        SamplingOptions(**{field: value})
    message = str(caught.value)
    assert message.startswith(f"{field} must be") and repr(value) in message and message.endswith(".")


def test_from_generation_config() -> None:
    config = {"do_sample": True, "temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1, "top_k": None}
    want = SamplingOptions(temperature=0.2, top_p=0.9, repetition_penalty=1.1, seed=4)
    assert SamplingOptions.from_generation_config(config, seed=4) == want
    greedy = SamplingOptions.from_generation_config({"do_sample": False, "temperature": 0.7, "top_k": 50})
    assert greedy == SamplingOptions(top_k=50)
    assert SamplingOptions.from_generation_config({"temperature": 0.7}).temperature == 0
    assert SamplingOptions.from_generation_config({"do_sample": True}).temperature == 1
    assert SamplingOptions.from_generation_config({}) == SamplingOptions()
    with pytest.raises(InputError, match="top_p must be"):
        SamplingOptions.from_generation_config({"top_p": 7})


def test_greedy_takes_the_lowest_of_equals_after_the_penalty() -> None:
    logits = np.array([4.0, 2.0, 1.0, 2.0])
    assert sample(logits, SamplingOptions(), 0) == 0
    assert sample(logits, SamplingOptions(repetition_penalty=2.5), 0, [0]) == 1
    assert sample(logits, SamplingOptions(repetition_penalty=2.0), 0, [0]) == 0
    ids, probs = probabilities(logits, SamplingOptions(top_k=3))
    assert ids.tolist() == [0] and probs.tolist() == [1.0]


@pytest.mark.parametrize("options", [SamplingOptions(), SamplingOptions(temperature=1.0, top_p=0.9)])
def test_logits_that_cannot_be_drawn_from(options: SamplingOptions) -> None:
    with pytest.raises(InputError, match=r"1 of 3 logits are not finite, first at token id 1 \(nan\)"):
        sample(np.array([1.0, np.nan, 2.0]), options, 0)
    with pytest.raises(InputError, match=r"first at token id 0 \(inf\)"):
        sample(np.array([np.inf, 1.0]), options, 0)
    with pytest.raises(InputError, match="All 2 logits are -inf"):
        sample(np.array([-np.inf, -np.inf]), options, 0)
    with pytest.raises(InputError, match=r"shape \(1, 3\)"):
        sample(np.zeros((1, 3)), options, 0)
    with pytest.raises(InputError, match="shape"):
        sample(np.zeros(0), options, 0)
    assert sample(np.array([-np.inf, -9.0, -np.inf]), options, 0) == 1


def test_previous_ids_outside_the_vocabulary() -> None:
    for wrong in (-1, 3):
        with pytest.raises(InputError, match=f"previous id {wrong} is outside the vocabulary of 3 rows"):
            sample(np.zeros(3), SamplingOptions(repetition_penalty=1.1), 0, [1, wrong])


def test_extreme_temperatures_stay_finite() -> None:
    logits = np.array([1.0, 5.0, -np.inf, 3.0], dtype=np.float32)
    ids, probs = probabilities(logits, SamplingOptions(temperature=1e-310))
    assert ids[0] == 1 and probs[0] == 1.0 and np.isfinite(probs).all()
    assert all(sample(logits, SamplingOptions(temperature=1e-310), step) == 1 for step in range(20))
    _, probs = probabilities(logits, SamplingOptions(temperature=1e300))
    np.testing.assert_allclose(probs, 1 / 3)


def test_the_input_is_left_as_it_was() -> None:
    logits = np.array([1.0, 2.0])
    probabilities(logits, SamplingOptions(temperature=1.0, repetition_penalty=2.0), [0, 1])
    assert logits.tolist() == [1.0, 2.0]


def theirs(
    logits: np.ndarray, options: SamplingOptions, previous: list[int], penalty_last: bool = False
) -> np.ndarray:
    """Dense probabilities from transformers' own processors, in float64, in the order its `generate` uses."""
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers.generation.logits_process")
    chain: list[Any] = [process.TemperatureLogitsWarper(float(options.temperature))]
    if options.top_k:
        chain.append(process.TopKLogitsWarper(options.top_k))
    if options.top_p < 1:
        chain.append(process.TopPLogitsWarper(options.top_p))
    if options.min_p:
        chain.append(process.MinPLogitsWarper(options.min_p))
    if options.repetition_penalty != 1 and previous:
        chain.insert(
            len(chain) if penalty_last else 0,
            process.RepetitionPenaltyLogitsProcessor(float(options.repetition_penalty)),
        )
    scores, ids = torch.tensor(logits, dtype=torch.float64)[None], torch.tensor([previous], dtype=torch.long)
    for processor in chain:
        scores = processor(ids, scores)
    result: np.ndarray = scores.softmax(-1)[0].numpy()
    return result


def ours(logits: np.ndarray, options: SamplingOptions, previous: list[int]) -> np.ndarray:
    dense = np.zeros(logits.size)
    ids, probs = probabilities(logits, options, previous)
    dense[ids] = probs
    return dense


@pytest.mark.parametrize("tied", [False, True])
def test_equal_to_transformers(tied: bool) -> None:
    rng = np.random.default_rng(int(tied))
    for case in range(600):
        size = int(rng.integers(2, 41))
        # Whole numbers make ties at nearly every border; the others none.
        logits = rng.integers(-4, 5, size).astype(float) if tied else rng.normal(0, 3, size)
        if case % 3 == 0:
            logits[rng.integers(0, size, size // 3)] = -np.inf
            logits[0] = 1.0
        on = rng.random(4) < 0.6
        options = SamplingOptions(
            temperature=float(rng.choice([0.2, 0.7, 1.0, 1.6])),
            top_k=int(rng.integers(1, size + 3)) if on[0] else 0,
            top_p=float(rng.choice([0.05, 0.3, 0.5, 0.75, 0.9, 0.99])) if on[1] else 1.0,
            min_p=float(rng.choice([0.01, 0.1, 0.5, 1.0])) if on[2] else 0.0,
            repetition_penalty=float(rng.choice([0.8, 1.1, 1.5])) if on[3] else 1.0,
        )
        previous = rng.integers(0, size, int(rng.integers(1, 12))).tolist()
        got, want = ours(logits, options, previous), theirs(logits, options, previous)
        if tied:  # which of equal ids torch.sort puts first differs from machine to machine
            got, want = np.sort(got), np.sort(want)
        np.testing.assert_allclose(
            got,
            want,
            rtol=0,
            atol=1e-12,
            err_msg=f"{logits.tolist()} {options} {previous}",
        )


def test_top_p_at_its_border_equals_transformers() -> None:
    for size in (2, 3, 4, 5, 8, 10):
        for top_p in np.linspace(0, 1, 21):
            options = SamplingOptions(temperature=1.0, top_p=float(top_p))
            logits = np.full(size, 1.5)
            got, want = ours(logits, options, []), theirs(logits, options, [])
            np.testing.assert_allclose(np.sort(got), np.sort(want), atol=1e-12)
            count = np.count_nonzero(got)
            assert np.flatnonzero(got).tolist() == list(range(count))  # the lower ids stay


def test_penalty_first_is_what_models_settings_assume() -> None:
    """The figures of docs/sampling.md: total variation distance to transformers for the two orders."""
    rng = np.random.default_rng(0)
    options = SamplingOptions(temperature=0.2, top_p=0.9, repetition_penalty=1.1)
    first, last = [], []
    for _ in range(200):
        logits = rng.normal(0, 3, 1000)
        weights = np.exp(logits)
        previous = rng.choice(1000, 16, p=weights / weights.sum()).tolist()  # text repeats what is likely
        reference = theirs(logits, options, previous)
        first.append(0.5 * np.abs(ours(logits, options, previous) - reference).sum())
        last.append(0.5 * np.abs(theirs(logits, options, previous, penalty_last=True) - reference).sum())
    print(f"penalty first: max {max(first):.1e}; penalty last: mean {np.mean(last):.3f}, max {max(last):.3f}")
    assert max(first) < 1e-12
    assert np.mean(last) > 0.05


def test_seeds_give_the_distribution() -> None:
    logits = np.array([2.0, 1.0, -np.inf, 1.0, 0.0, -1.0])
    for options in (
        SamplingOptions(temperature=1.0, seed=1),
        SamplingOptions(temperature=0.7, top_k=4, top_p=0.97, repetition_penalty=1.2, seed=2),
    ):
        ids, probs = probabilities(logits, options, [0, 1])
        draws = [sample(logits, options, step, [0, 1]) for step in range(5000)]
        counts = np.array([draws.count(int(i)) for i in ids])
        assert counts.sum() == 5000
        # 16.3 is p = 0.001 for 3 degrees of freedom, 18.5 for 4.
        assert ((counts - 5000 * probs) ** 2 / (5000 * probs)).sum() < (16.3 if len(ids) == 4 else 18.5)
    draws = [sample(logits, dataclasses.replace(options, seed=seed), 0) for seed in range(300)]
    assert len(set(draws)) >= 4  # one step, many seeds
    assert sample(logits, options, 3) == sample(logits, options, 3)


@pytest.mark.parametrize("spread", [0.05, 3.0])
@pytest.mark.parametrize("fields", [{}, {"top_p": 0.9}, {"top_p": 0.5, "min_p": 0.01}, {"top_k": 7000}])
def test_a_large_vocabulary_means_the_same(spread: float, fields: dict[str, Any]) -> None:
    """Large sets sort their head only. The same draws come from sorting all of it."""
    rng = np.random.default_rng(5)
    logits = np.round(rng.normal(0, spread, 9000), 2)  # many ties
    options = SamplingOptions(temperature=1.0, seed=8, **fields)
    ids, probs = probabilities(logits, options)
    got, want = np.sort(ours(logits, options, [])), np.sort(theirs(logits, options, []))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)
    cumulative = np.cumsum(probs)
    for step in range(20):
        drawn = ids[np.searchsorted(cumulative, uniform(8, step) * cumulative[-1], side="right")]
        assert sample(logits, options, step) == drawn


@pytest.mark.parametrize("size", [4, 8192])
def test_a_draw_on_a_border_takes_the_next_id(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """The running sum must exceed u * total; equal weights of a power of two make the borders exact."""
    options = SamplingOptions(temperature=1.0)
    for u, want in ((0.0, 0), (0.25, size // 4), (0.5, size // 2), (1 - 2**-53, size - 1)):
        monkeypatch.setattr("pit_deploy.sampling.uniform", lambda seed, step, u=u: u)
        assert sample(np.zeros(size), options, 0) == want
