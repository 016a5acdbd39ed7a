from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from pit_deploy.errors import InputError  # noqa: E402
from pit_deploy.quantize.sampled_text import sampled_windows  # noqa: E402
from pit_deploy.runtimes.torch import TorchRuntime  # noqa: E402


@pytest.fixture
def opened(tiny: Callable[..., Any]) -> TorchRuntime:
    return TorchRuntime(tiny("llama"), name="tiny")


def test_windows_begin_as_asked_and_are_the_same_each_time(opened: TorchRuntime) -> None:
    starts = [[1, 2, 3], [5], [1, 2, 3], [7]]
    windows = sampled_windows(opened, starts, tokens=12)
    assert [window[: len(start)] for window, start in zip(windows, starts, strict=True)] == starts
    assert all(len(window) == 12 for window in windows)
    assert windows == sampled_windows(opened, starts, tokens=12)
    assert windows[0] != windows[2]  # two draws, not one twice
    assert windows != sampled_windows(opened, starts, tokens=12, seed=1)


def test_ids_are_drawn_from_the_models_distribution(opened: TorchRuntime) -> None:
    start = [3, 1, 4]
    drawn = [window[-1] for window in sampled_windows(opened, [start] * 4000, tokens=4)]
    logits = opened.all_logits(start)[-1].astype(np.float64)
    expected = np.exp(logits - logits.max())
    expected /= expected.sum()
    counted = np.bincount(drawn, minlength=len(expected)) / len(drawn)
    assert 0.5 * np.abs(counted - expected).sum() < 0.5 * np.sqrt(len(expected) / len(drawn))


def test_later_ids_follow_those_before_them_and_banned_ids_never_come(opened: TorchRuntime) -> None:
    start, (a, b) = [9, 2, 6], (11, 30)
    banned = [i for i in range(opened.vocab_size) if i not in (a, b)]
    windows = sampled_windows(opened, [start] * 3000, tokens=6, banned=banned)
    assert {i for window in windows for i in window[3:]} == {a, b}
    for first in (a, b):
        chosen = [window[4] == a for window in windows if window[3] == first]
        logits = opened.all_logits([*start, first])[-1].astype(np.float64)
        expected = 1 / (1 + np.exp(logits[b] - logits[a]))
        assert abs(np.mean(chosen) - expected) < 4 * np.sqrt(0.25 / len(chosen))


def test_impossible_windows_are_refused(opened: TorchRuntime) -> None:
    with pytest.raises(InputError, match="a start of 0 tokens"):
        sampled_windows(opened, [[1], []], tokens=8)
    with pytest.raises(InputError, match="a start of 8 tokens"):
        sampled_windows(opened, [[1] * 8], tokens=8)
    with pytest.raises(InputError, match="positions"):
        sampled_windows(opened, [[1]], tokens=opened.context_length + 1)
