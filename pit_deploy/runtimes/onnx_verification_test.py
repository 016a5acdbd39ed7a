"""Passes of several tokens on exported tiny models, bit for bit against passes of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from pit_deploy.bundle import Bundle
from pit_deploy.errors import ContextFullError, InputError
from pit_deploy.exporting import export
from pit_deploy.generate import generate
from pit_deploy.runtimes import VerifyingRuntime, open_runtime
from pit_deploy.runtimes.onnx_verification import VerifyingOnnxRuntime, verifying_graph_
from pit_deploy.sampling import SamplingOptions

IDS = np.random.default_rng(5).integers(0, 256, 40).tolist()
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "int8": ("llama", SIZES, {}),
    "int4": ("llama", SIZES, {"weights": "int4", "tables": "int4", "quantizer": "rtn"}),
    "fp32": ("llama", SIZES, {"weights": "fp32", "tables": "fp32"}),
    "untied": ("llama", SIZES, {"layout": "untied"}),
    "window": ("mistral", {**SIZES, "sliding_window": 6}, {}),
    "heads of 8, rotated outside": ("llama", {**SIZES, "head_dim": 8}, {}),
    "norms of q and k": ("qwen3", SIZES, {}),
    "biases": ("qwen2", SIZES, {}),
    "all logits": ("llama", SIZES, {"logits": "all"}),
}


@pytest.fixture
def make(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., Bundle]:
    def bundle(family: str, changes: dict[str, Any], options: dict[str, Any]) -> Bundle:
        source = tiny_checkpoint(family, **changes)
        export(source, tmp_path / "bundle", **{"weights": "int8", "tables": "int8", **options})
        return Bundle.open(tmp_path / "bundle")

    return bundle


@pytest.mark.parametrize("case", CASES)
def test_each_token_has_the_bits_that_it_has_alone(make: Callable[..., Bundle], case: str) -> None:
    bundle = make(*CASES[case])
    runtime = open_runtime(bundle, threads=1, speculate=True)
    plain = open_runtime(bundle, threads=1)
    assert isinstance(runtime, VerifyingRuntime) and not isinstance(plain, VerifyingRuntime)
    assert runtime.position == 0
    assert np.array_equal(runtime.prefill(IDS[:9]), plain.prefill(IDS[:9]))
    alone = [plain.decode(id) for id in IDS[9:]]
    start = 9
    for tokens in (2, 1, 5, 13, 3):
        assert isinstance(runtime, VerifyingOnnxRuntime)
        wrong = [(id + 1) % 256 for id in IDS[start + 1 : start + 4]]
        runtime.last_logits([IDS[start], *wrong])  # refused: nothing of them may stay
        runtime.rewind(start)
        rows = runtime.last_logits(IDS[start : start + tokens])
        assert rows.shape == (tokens, bundle.manifest.vocab_size) and rows.dtype == np.float32
        assert np.array_equal(rows, alone[start - 9 : start - 9 + tokens])
        start += tokens
        assert runtime.position == start
        assert np.array_equal(runtime.decode(IDS[start]), alone[start - 9])
        start += 1


@pytest.mark.parametrize(
    "options", [SamplingOptions(), SamplingOptions(temperature=1.0, repetition_penalty=1.2, seed=4)]
)
def test_what_is_generated_is_the_same(make: Callable[..., Bundle], options: SamplingOptions) -> None:
    bundle = make(*CASES["int8"])
    results = []
    for speculate in (False, True):
        runtime = open_runtime(bundle, threads=1, speculate=speculate)
        first = generate(
            runtime, IDS[:6] * 2, max_new_tokens=20, options=options, stop_ids=[], speculate=speculate
        )
        second = generate(
            runtime,
            [*first.pending_ids, 3],
            max_new_tokens=99,
            options=options,
            stop_ids=[],
            speculate=speculate,
        )
        results.append((first.ids, second.ids, second.finish_reason, runtime.position))
    assert results[0] == results[1]
    assert results[0][2:] == ("context_full", bundle.manifest.context_length)


def test_room_and_rewinding_are_checked(make: Callable[..., Bundle]) -> None:
    runtime = open_runtime(make(*CASES["int8"]), threads=1, speculate=True)
    assert isinstance(runtime, VerifyingOnnxRuntime)
    runtime.prefill([1] * 60)
    with pytest.raises(ContextFullError):
        runtime.last_logits([1] * 5)
    with pytest.raises(InputError, match="outside the vocabulary"):
        runtime.last_logits([100000])
    for position in (-1, 61):
        with pytest.raises(ValueError, match=f"60 tokens back to {position}"):
            runtime.rewind(position)
    assert runtime.position == 60


def test_the_profile_standard_is_refused(make: Callable[..., Bundle]) -> None:
    bundle = make("llama", SIZES, {"profile": "standard"})
    with pytest.raises(InputError, match="cannot speculate: it has the profile standard"):
        open_runtime(bundle, speculate=True)
    model = onnx.load(bundle.model_path, load_external_data=False)
    with pytest.raises(ValueError, match="no GroupQueryAttention"):
        verifying_graph_(model.graph)


def test_a_machine_whose_passes_differ_is_refused(
    make: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = make(*CASES["int8"])
    rows = VerifyingOnnxRuntime.last_logits
    monkeypatch.setattr(
        VerifyingOnnxRuntime,
        "last_logits",
        lambda self, ids: np.nextafter(rows(self, ids), np.float32(np.inf)),
    )
    with pytest.raises(
        InputError, match=r"cannot speculate here: after 5 tokens ONNX Runtime computes 2 in one pass"
    ):
        open_runtime(bundle, threads=1, speculate=True)


def test_attention_with_further_inputs_is_refused(make: Callable[..., Bundle]) -> None:
    model = onnx.load(make(*CASES["int8"]).model_path, load_external_data=False)
    node = next(node for node in model.graph.node if node.op_type == "GroupQueryAttention")
    node.input.extend(["positions"])
    with pytest.raises(ValueError, match=r"further inputs \['positions'\]"):
        verifying_graph_(model.graph)
