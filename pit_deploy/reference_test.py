from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, processors

pytest.importorskip("torch")

from pit_deploy import reference
from pit_deploy.bundle import load_tokenizer
from pit_deploy.checkpoint import open_checkpoint
from pit_deploy.quantize.calibration import calibration_text, evaluation_text, other_text
from pit_deploy.reference import WINDOW, calibrate
from pit_deploy.runtimes.torch import TorchRuntime, open_plain

TEMPLATE = """{% set day = date_string if date_string is defined else strftime_now('%d %b %Y') -%}
{% for m in messages %}[{{ day }} calibration]<{{ m.role }}>{{ m.content | trim }}<|end|>{% endfor %}"""


def with_beginning(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with an id before each text and one after it."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|end|> $A <|end|>", special_tokens=[("<|end|>", 256)]
    )
    return tokenizer


def test_windows_are_whole_and_begin_as_the_tokenizer_begins(tiny_checkpoint: Callable[..., Path]) -> None:
    tokenizer = load_tokenizer(tiny_checkpoint() / "tokenizer.json")
    text = "abcd" * 200
    plain = reference._windows(tokenizer, text, 263)
    assert [len(window) for window in plain] == [WINDOW] * 3
    windows = reference._windows(with_beginning(tokenizer), text, 263)
    assert [len(window) for window in windows] == [WINDOW] * 3
    assert all(window[0] == 256 and 256 not in window[1:] for window in windows)
    assert [i for window in windows for i in window[1:]] == [i for w in plain for i in w][: 3 * (WINDOW - 1)]
    assert [len(window) for window in reference._windows(tokenizer, "short", 263)] == [1 + len("short")]


def test_sources_lie_in_turn() -> None:
    sources = [[[1]] * 6, [[2]] * 3, [[3]] * 2, []]
    found = reference._in_turn(sources)
    assert sorted(found) == [1] * 6 + [2] * 3 + [3] * 2
    assert all({1, 2} <= set(found[start : start + 5]) for start in range(len(found) - 4))


def test_drawn_windows_begin_as_a_users_turn(tiny_checkpoint: Callable[..., Path]) -> None:
    path = tiny_checkpoint()
    (path / "chat_template.jinja").write_text(TEMPLATE)
    checkpoint = open_checkpoint(path)
    opened, tokenizer = open_plain(checkpoint), load_tokenizer(path / "tokenizer.json")
    windows = reference._drawn(opened, checkpoint, tokenizer, 3, lambda *_: None)
    expected = tokenizer.encode("[01 Jan 2024 calibration]<user>", add_special_tokens=False).ids
    assert len(windows) == 3 and all(len(w) == 64 and w[: len(expected)] == expected for w in windows)
    assert all(i < 257 for w in windows for i in w)  # rows without a token are never drawn
    short = TorchRuntime(opened.model, name="short", context_length=8)
    assert reference._drawn(short, checkpoint, tokenizer, 3, lambda *_: None) == windows


def test_without_a_template_any_token_is_a_beginning(tiny_checkpoint: Callable[..., Path]) -> None:
    path = tiny_checkpoint()
    checkpoint = open_checkpoint(path)
    opened, tokenizer = open_plain(checkpoint), load_tokenizer(path / "tokenizer.json")
    windows = reference._drawn(opened, checkpoint, tokenizer, 5, lambda *_: None)
    assert len({w[0] for w in windows}) > 1 and all(w[0] < 256 for w in windows)
    windows = reference._drawn(opened, checkpoint, with_beginning(tokenizer), 5, lambda *_: None)
    assert {w[0] for w in windows} == {256} and len({w[1] for w in windows}) > 1


def test_a_text_of_the_users_replaces_all_others(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was asked to write")

    monkeypatch.setattr("pit_deploy.quantize.sampled_text.sampled_windows", never)
    checkpoint = open_checkpoint(tiny_checkpoint())
    text = tmp_path / "own.txt"
    text.write_text("xy" * 400)
    learned = calibrate(checkpoint, 64, text=text, drawn_windows=4)
    assert set(learned.ids) == set(load_tokenizer(checkpoint.path / "tokenizer.json").encode("xy").ids)


def test_statistics_are_those_of_whole_windows(tiny_checkpoint: Callable[..., Path]) -> None:
    opened = open_plain(open_checkpoint(tiny_checkpoint()))
    ids = [(7 * n * n) % 256 for n in range(64 * 3)]
    moment, probabilities = reference._statistics(opened, ids, 263, lambda *_: None)
    states, logits = zip(*(opened.final_states(ids[k : k + 64]) for k in (0, 64, 128)), strict=True)
    rows = np.concatenate(states)
    np.testing.assert_allclose(moment, rows.T @ rows / len(rows), rtol=1e-6)
    scores = np.concatenate(logits).astype(np.float64)
    expected = np.exp(scores - scores.max(1, keepdims=True))
    np.testing.assert_allclose(
        probabilities, (expected / expected.sum(1, keepdims=True)).mean(0), rtol=1e-5, atol=1e-12
    )


def test_other_text_has_scripts_and_code_and_nothing_of_the_evaluation() -> None:
    text = other_text()
    for sample in ("Сегодня", "今天", "昨日は", "어제는", "आज", "ذهبت", "mercado", "def "):
        assert sample in text
    assert not set(text.splitlines()) & set(evaluation_text().splitlines()) - {""}
    assert calibration_text() not in text
