from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.special
import torch

from pit_deploy.bundle import load_tokenizer
from pit_deploy.errors import InputError
from pit_deploy.golden import (
    MIN_POSITIONS,
    PROJECTED,
    TOP,
    GoldenRecord,
    Prompt,
    golden_prompts,
    greedy_continuation,
    logsumexp,
    record,
)
from pit_deploy.runtimes.torch import TorchRuntime

Make = Callable[..., Any]
PROMPTS = [Prompt("a", [5, 200, 31, 7, 7, 120]), Prompt("b", [64]), Prompt("c", list(range(40)))]


class Scripted:
    """A runtime whose logits are given: `logits[i]` after i tokens."""

    name, context_length = "scripted", 10

    def __init__(self, logits: np.ndarray) -> None:
        self.logits, self.position, self.vocab_size = logits.astype(np.float32), 0, logits.shape[1]

    def prefill(self, ids: Sequence[int]) -> np.ndarray:
        self.position += len(ids)
        return self.logits[self.position - 1]

    def decode(self, id: int) -> np.ndarray:
        return self.prefill([id])

    def reset(self) -> None:
        self.position = 0

    def all_logits(self, ids: Sequence[int]) -> np.ndarray:
        return self.logits[: len(ids)]

    def hidden_states(self, ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        return np.ones((3, len(ids), 8), np.float32), self.all_logits(ids)


@pytest.fixture
def runtime(tiny: Make) -> TorchRuntime:
    return TorchRuntime(tiny("llama"), name="tiny", tokenizer_length=257)


@pytest.fixture
def golden(runtime: TorchRuntime) -> GoldenRecord:
    return record(runtime, PROMPTS, tokenizer_length=257, end_ids=[256])


@torch.no_grad()
def test_what_is_recorded(golden: GoldenRecord, tiny: Make) -> None:
    model = tiny("llama")
    assert golden.positions == 47 and golden.starts == [0, 6, 7]
    assert golden.top_ids.shape == (47, TOP) and golden.sampled_ids.shape == (256,)
    for start, prompt in zip(golden.starts, golden.prompts, strict=True):
        out = model(input_ids=torch.tensor([prompt.ids]), output_hidden_states=True)
        logits = out.logits[0, :, :257].double().numpy()
        for offset, row in enumerate(logits):
            ids = golden.top_ids[start + offset]
            assert set(ids) == set(np.argsort(-row)[:TOP])
            assert np.allclose(golden.top_logits[start + offset], np.sort(row)[::-1][:TOP], atol=1e-4)
            assert np.allclose(golden.sampled_logits[start + offset], row[golden.sampled_ids], atol=1e-4)
            assert golden.logsumexp[start + offset] == pytest.approx(scipy.special.logsumexp(row), abs=1e-5)
        span = slice(start, start + len(prompt.ids))
        for layer, states in enumerate(
            out.hidden_states[:2]
        ):  # the last of transformers is past the final norm
            assert np.allclose(
                golden.hidden_projection[layer, span], states[0].numpy() @ golden.projection, atol=1e-4
            )
            assert np.allclose(golden.hidden_norm[layer, span], states[0].norm(dim=-1).numpy(), atol=1e-4)
    masked = dict(suppress_tokens=list(range(257, 263)), do_sample=False, eos_token_id=256)
    greedy = model.generate(torch.tensor([PROMPTS[0].ids]), max_new_tokens=59, **masked)
    assert golden.greedy_ids == greedy[0, 6:].tolist()
    assert golden.greedy_margins[0] == pytest.approx(golden.top_logits[5, 0] - golden.top_logits[5, 1])
    assert golden.how["one_pass_against_steps_max_abs"] < 1e-4
    assert {"torch", "transformers", "machine", "dtype", "runtime"} <= set(golden.how)


def test_saved_and_loaded(golden: GoldenRecord, tmp_path: Path) -> None:
    golden.save(tmp_path)
    again = GoldenRecord.load(tmp_path)
    for name, value in vars(golden).items():
        if isinstance(value, np.ndarray):
            assert np.array_equal(getattr(again, name), value) and getattr(again, name).dtype == value.dtype
        else:
            assert getattr(again, name) == value


def test_the_size_on_disk(tmp_path: Path) -> None:
    """30 layers of 576, 368 positions: below 8 MB."""
    rng, positions, layers, hidden = np.random.default_rng(0), 368, 30, 576
    GoldenRecord(
        prompts=[Prompt("x" * 1000, rng.integers(0, 49152, positions).tolist())],
        top_ids=rng.integers(0, 49152, (positions, TOP)).astype(np.int32),
        top_logits=rng.random((positions, TOP)).astype(np.float32),
        sampled_ids=np.arange(256, dtype=np.int32),
        sampled_logits=rng.random((positions, 256)).astype(np.float32),
        logsumexp=rng.random(positions),
        projection=rng.random((hidden, PROJECTED)).astype(np.float32),
        hidden_projection=rng.random((layers + 1, positions, PROJECTED)).astype(np.float32),
        hidden_norm=rng.random((layers + 1, positions)).astype(np.float32),
        greedy_prompt=0,
        greedy_ids=[1] * 64,
        greedy_margins=[0.123456789] * 64,
        vocab_size=49152,
        tokenizer_length=49152,
    ).save(tmp_path)
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) < 3e6
    assert GoldenRecord.load(tmp_path).positions == positions


def _rewrite(directory: Path, **changes: Any) -> None:
    value = {**json.loads((directory / "golden.json").read_text()), **changes}
    (directory / "golden.json").write_text(json.dumps({k: v for k, v in value.items() if v is not ...}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"golden_version": 2}, "golden.json has version 2; this pit-deploy reads 1"),
        ({"golden_version": ...}, "has version None"),
        ({"prompts": ...}, "the golden record cannot be read: 'prompts'"),
        ({"prompts": None}, "cannot be read"),
        ({"prompts": [{"text": "a"}]}, "cannot be read: 'ids'"),
        ({"prompts": [{"text": "a", "ids": [1, 2]}]}, "has shape .*, and 2 positions ask for"),
        ({"prompts": [{"text": "a", "ids": []}]}, "a prompt is empty"),
        ({"prompts": []}, "a prompt is empty"),
        ({"vocab_size": 9}, "outside the vocabulary of 9 rows"),
        ({"greedy_prompt": 7}, "greedy continuation does not fit"),
        ({"greedy_ids": [1]}, "greedy continuation does not fit"),
        ({"surplus": 1}, "unexpected keyword argument 'surplus'"),
        ({"how": ..., "tokenizer_length": ...}, "missing 1 required positional argument: 'tokenizer_length'"),
    ],
)
def test_damaged_json(golden: GoldenRecord, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    golden.save(tmp_path)
    _rewrite(tmp_path, **changes)
    with pytest.raises(InputError, match=message) as raised:
        GoldenRecord.load(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["hidden_norm", "top_ids", "logsumexp", "projection", "sampled_logits"])
def test_damaged_arrays(golden: GoldenRecord, tmp_path: Path, name: str) -> None:
    value = getattr(golden, name)
    for broken in (value[..., :-1], value[..., None]):
        setattr(golden, name, broken)
        golden.save(tmp_path)
        with pytest.raises(
            InputError, match=r"the golden record cannot be read: .*; export the bundle again"
        ):
            GoldenRecord.load(tmp_path)


def test_damaged_files(golden: GoldenRecord, tmp_path: Path) -> None:
    golden.save(tmp_path)
    weights = (tmp_path / "golden.safetensors").read_bytes()
    for content in (b"", weights[:-1], weights[:100]):
        (tmp_path / "golden.safetensors").write_bytes(content)
        with pytest.raises(InputError, match="cannot be read"):
            GoldenRecord.load(tmp_path)
    golden.logsumexp[3] = np.nan
    golden.save(tmp_path)
    with pytest.raises(InputError, match="logsumexp holds values that are not finite"):
        GoldenRecord.load(tmp_path)
    for name in ("golden.safetensors", "golden.json"):
        (tmp_path / name).unlink()
        with pytest.raises(InputError, match="golden"):
            GoldenRecord.load(tmp_path)


def test_of_equal_logits_the_lowest_id_comes_first() -> None:
    row = np.zeros((10, 400))
    row[:, [9, 300, 17]] = 5.0
    found = record(Scripted(row), [Prompt("a", [1, 2])], tokenizer_length=400)  # type: ignore[arg-type]
    assert found.top_ids[0, :3].tolist() == [9, 17, 300]
    assert found.top_ids[0, 3:].tolist() == [i for i in range(260) if i not in (9, 17)][: TOP - 3]
    assert found.greedy_ids[0] == 9 and found.greedy_margins[0] == 0


def test_what_cannot_be_recorded() -> None:
    logits = np.zeros((4, 9))
    for prompts in ([], [Prompt("a", [])]):
        with pytest.raises(InputError, match="needs prompts of at least one token"):
            record(Scripted(logits), prompts, tokenizer_length=9)  # type: ignore[arg-type]
    logits[1, 3] = np.nan
    with pytest.raises(InputError, match="the reference gives values that are not finite on 'a'"):
        record(Scripted(logits), [Prompt("a", [1, 2])], tokenizer_length=9)  # type: ignore[arg-type]


def test_greedy_ends_at_an_end_id_the_count_or_the_context() -> None:
    best = [4, 4, 1, 2, 3, 1, 1, 1, 1, 1]  # after 1, 2, 3, ... tokens
    logits = np.eye(5)[best]

    def run(prompt: int, count: int, ends: list[int]) -> list[int]:
        return greedy_continuation(Scripted(logits), [0] * prompt, count, ends)[0]  # type: ignore[arg-type]

    assert run(2, 3, []) == [4, 1, 2]
    assert run(2, 9, [2, 3]) == [4, 1, 2]
    assert run(8, 9, []) == [1, 1, 1], "the last may be drawn from a full context"
    assert run(10, 9, []) == [1]
    assert run(2, 0, []) == []


@pytest.mark.parametrize("context", [16, 64, 2048])
def test_prompts_fit_the_context(tmp_path: Path, context: int) -> None:
    from pit_deploy.conftest import write_tokenizer

    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    for chat in (None, "<|end|>user: why?" + " and why" * 30):
        prompts, greedy = golden_prompts(tokenizer, context, chat_text=chat, vocab_size=263)
        assert greedy == 0 and all(0 < len(p.ids) <= context for p in prompts)
        assert MIN_POSITIONS <= sum(len(p.ids) for p in prompts) < 1500
        first = prompts[0]
        assert len(first.ids) <= max(64, context // 2)
        assert tokenizer.encode(first.text, add_special_tokens=False).ids == first.ids, (
            "the text is what was run"
        )


def test_logsumexp_equals_scipy(rng: np.random.Generator) -> None:
    logits = (30 * rng.standard_normal((5, 77))).astype(np.float32)
    logits[2, 70:] = np.finfo(np.float32).min / 2
    assert np.allclose(
        logsumexp(logits), scipy.special.logsumexp(logits.astype(np.float64), axis=1), rtol=1e-13
    )
    assert logsumexp(logits).dtype == np.float64
