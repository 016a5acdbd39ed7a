from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pit_deploy.checkpoint import open_checkpoint
from pit_deploy.conversion import convert
from pit_deploy.errors import ContextFullError, InputError
from pit_deploy.folding import fold_checkpoint
from pit_deploy.runtimes.base import FullRuntime, VerifyingRuntime
from pit_deploy.runtimes.torch import TorchRuntime, open_folded, open_plain, open_training

Make = Callable[..., Any]
IDS = [5, 200, 31, 7, 7, 120, 64, 99, 2, 45, 256, 18]


@pytest.fixture(params=["training", "folded", "plain"])
def runtime(request: pytest.FixtureRequest, tiny_checkpoint: Make, tmp_path: Path) -> TorchRuntime:
    source = tiny_checkpoint("qwen3")
    if request.param == "plain":
        return open_plain(open_checkpoint(source), context_length=14)
    convert(source, tmp_path / "pit", check=False)
    checkpoint = open_checkpoint(tmp_path / "pit")
    if request.param == "training":
        return open_training(checkpoint, context_length=14)
    return open_folded(fold_checkpoint(checkpoint, "shared"), context_length=14, tokenizer_length=257)


def test_the_protocol(runtime: TorchRuntime, tiny: Make) -> None:
    assert isinstance(runtime, FullRuntime)
    with torch.no_grad():
        expected = tiny("qwen3")(input_ids=torch.tensor([IDS])).logits[0].numpy()
    found = runtime.all_logits(IDS)
    assert found.dtype == np.float32 and found.shape == (12, 263)
    assert np.abs(found[:, :257] - expected[:, :257]).max() < 1e-4
    assert runtime.position == 0
    assert np.abs(runtime.prefill(IDS[:5]) - found[4]).max() < 1e-4
    assert np.abs(runtime.prefill(IDS[5:8]) - found[7]).max() < 1e-4, "prefill appends"
    assert np.abs(runtime.decode(IDS[8]) - found[8]).max() < 1e-4
    assert runtime.position == 9
    runtime.reset()
    assert runtime.position == 0
    assert np.abs(runtime.decode(IDS[0]) - found[0]).max() < 1e-4


def test_rows_without_a_token_are_masked(runtime: TorchRuntime) -> None:
    logits = runtime.all_logits(IDS)
    assert (logits[:, 257:] < -1e37).all() and np.isfinite(logits).all()
    assert (logits[:, :257] > -1e3).all()


def test_hidden_states(runtime: TorchRuntime, tiny: Make) -> None:
    states, logits = runtime.hidden_states(IDS)
    assert states.shape == (3, 12, 24) and states.dtype == np.float32
    with torch.no_grad():
        expected = tiny("qwen3")(input_ids=torch.tensor([IDS]), output_hidden_states=True).hidden_states
    for layer in (0, 1):
        assert np.abs(states[layer] - expected[layer][0].numpy()).max() < 1e-4
    normalised, again = runtime.final_states(IDS)
    assert np.array_equal(again, logits)
    last = states[2].astype(np.float64)
    assert np.allclose(normalised, last / np.sqrt((last**2).mean(-1, keepdims=True) + 1e-6), atol=1e-9)
    assert np.allclose(
        normalised * tiny("qwen3").model.norm.weight.detach().numpy(), expected[2][0].numpy(), atol=1e-4
    )


def test_errors_before_anything_runs(runtime: TorchRuntime) -> None:
    with pytest.raises(InputError, match="no tokens"):
        runtime.prefill([])
    for wrong in (-1, 263):
        with pytest.raises(InputError, match=f"Token id {wrong} is outside the vocabulary of 263 rows"):
            runtime.prefill([1, wrong])
    with pytest.raises(ContextFullError):
        runtime.all_logits([1] * 15)
    runtime.prefill([1] * 13)
    with pytest.raises(ContextFullError) as full:
        runtime.prefill([1, 2])
    assert (full.value.used, full.value.needed, full.value.context_length) == (13, 2, 14)
    assert runtime.position == 13
    runtime.decode(1)
    with pytest.raises(ContextFullError):
        runtime.decode(1)


def test_the_reference_solves_in_float64(tiny_checkpoint: Make, tmp_path: Path) -> None:
    convert(tiny_checkpoint("llama"), tmp_path / "pit", check=False)
    checkpoint = open_checkpoint(tmp_path / "pit")
    folded = open_folded(fold_checkpoint(checkpoint, "shared"), tokenizer_length=257).all_logits(IDS)
    precise = open_training(checkpoint).all_logits(IDS)
    rounded = open_training(checkpoint, precise=False).all_logits(IDS)
    assert 0 < np.abs(rounded - precise).max() < 1e-4
    assert np.abs(folded - precise).max() < 1e-5


def test_the_familys_scale_and_soft_cap_are_applied_once(
    tiny_checkpoint: Make, tiny: Make, tmp_path: Path
) -> None:
    """Embeddings times sqrt(hidden_size), norms of gain 1 + g, logits within the cap: in every runtime."""
    plain = tiny_checkpoint("gemma2")
    convert(plain, tmp_path / "pit", check=False)
    checkpoint = open_checkpoint(tmp_path / "pit")
    with torch.no_grad():
        expected = tiny("gemma2")(input_ids=torch.tensor([IDS]), output_hidden_states=True)
    scaled = tiny("gemma2").get_input_embeddings().weight.detach().numpy()[IDS] * 24**0.5
    for opened in (
        open_plain(open_checkpoint(plain)),
        open_training(checkpoint),
        open_folded(fold_checkpoint(checkpoint, "shared"), tokenizer_length=257),
        open_folded(fold_checkpoint(checkpoint, "untied"), tokenizer_length=257),
    ):
        states, logits = opened.hidden_states(IDS)
        assert np.allclose(states[0], scaled, atol=1e-4)
        assert np.abs(logits[:, :257] - expected.logits[0, :, :257].numpy()).max() < 1e-4
        assert np.abs(logits[:, :257]).max() <= 5
        steps = np.stack([opened.decode(i) for i in IDS])
        assert np.abs(steps - logits)[:, :257].max() < 1e-4
        assert np.abs(steps[:, :257]).max() <= 5


def test_several_tokens_are_those_of_single_ones_and_can_be_taken_back(runtime: TorchRuntime) -> None:
    assert isinstance(runtime, VerifyingRuntime)
    runtime.prefill(IDS[:3])
    alone = np.stack([runtime.decode(id) for id in IDS[3:8]])
    runtime.rewind(3)
    runtime.last_logits([9, 9])
    runtime.rewind(3)
    assert np.array_equal(runtime.last_logits(IDS[3:8]), alone)
    assert runtime.position == 8
    with pytest.raises(ContextFullError):
        runtime.last_logits([1] * 7)
    with pytest.raises(ValueError, match="8 tokens back to 9"):
        runtime.rewind(9)
    runtime.rewind(8)
    runtime.rewind(0)
    assert runtime.position == 0
    assert np.abs(runtime.prefill(IDS[:4]) - alone[0]).max() < 1e-4


def test_a_sliding_window_cannot_be_taken_back(tiny_checkpoint: Make) -> None:
    runtime = open_plain(open_checkpoint(tiny_checkpoint("mistral", sliding_window=6)), context_length=14)
    runtime.prefill(IDS[:5])
    runtime.rewind(4)
    runtime.prefill(IDS[4:9])
    with pytest.raises(InputError, match=r"cannot take back tokens: the text of 9 is longer than .* of 6"):
        runtime.rewind(8)
