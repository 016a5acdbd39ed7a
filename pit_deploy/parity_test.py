from __future__ import annotations

import copy
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.special
import torch

from pit_deploy import parity
from pit_deploy.errors import ParityError
from pit_deploy.gates import GATES, TIE, coarsest, gate_for, gate_of
from pit_deploy.golden import GoldenRecord, Prompt, record
from pit_deploy.parity import LayerError, ParityReport, compare_in_full, compare_with_record, layer_errors
from pit_deploy.runtimes.torch import TorchRuntime

Make = Callable[..., Any]
PROMPTS = [Prompt("a", [5, 200, 31, 7, 7, 120]), Prompt("b", list(range(40, 80)))]
ROWS = 1009


@pytest.fixture(scope="module")
def model() -> Any:
    from pit_deploy.conftest import build_tiny

    return build_tiny("qwen3", num_hidden_layers=5, vocab_size=ROWS, seed=6)


@pytest.fixture(scope="module")
def golden(model: Any) -> GoldenRecord:
    return record(TorchRuntime(model, name="reference"), PROMPTS, tokenizer_length=ROWS)


def _runtime(model: Any, dtype: torch.dtype = torch.float32) -> TorchRuntime:
    return TorchRuntime(copy.deepcopy(model).to(dtype), name="other")


def test_the_record_judges_as_the_full_comparison_does(model: Any, golden: GoldenRecord) -> None:
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[2].mlp.up_proj.weight.mul_(1.1)
    runtime = _runtime(other)
    for start, prompt in zip(golden.starts, golden.prompts, strict=True):
        reference = TorchRuntime(model, name="reference").all_logits(prompt.ids)
        logits = runtime.all_logits(prompt.ids)
        kl, error, top1 = compare_in_full(reference, logits)
        log_p, log_q = (scipy.special.log_softmax(x.astype(np.float64), axis=1) for x in (reference, logits))
        assert np.allclose(kl, scipy.special.rel_entr(np.exp(log_p), np.exp(log_q)).sum(axis=1), atol=1e-12)
        assert np.allclose(error, np.abs(reference - logits).max(axis=1))
        for offset in range(len(prompt.ids)):
            found = compare_with_record(golden, start + offset, logits[offset])
            assert found[2] == top1[offset]
            assert 0.5 * kl[offset] <= found[0] <= kl[offset] + 1e-12, "a lower bound, and not a loose one"
            recorded = {*golden.top_ids[start + offset].tolist(), *golden.sampled_ids.tolist()}
            exact = max(abs(float(reference[offset, i]) - float(logits[offset, i])) for i in recorded)
            assert found[1] == pytest.approx(exact, abs=1e-5)
            assert found[1] <= error[offset] + 1e-5


def test_equal_outputs(model: Any, golden: GoldenRecord) -> None:
    logits = TorchRuntime(model, name="reference").all_logits(PROMPTS[0].ids)
    for position, row in enumerate(logits):
        kl, error, top1 = compare_with_record(golden, position, row)
        assert kl < 1e-12 and error < 1e-6 and top1
    kl, error, agrees = compare_in_full(logits, logits.copy())
    assert kl.max() == 0 and error.max() == 0 and agrees.all()


@pytest.mark.parametrize(("gap", "agrees"), [(0.0, True), (0.5 * TIE, True), (2 * TIE, False)])
def test_ties(model: Any, golden: GoldenRecord, gap: float, agrees: bool) -> None:
    """The other of two near-equal logits may win; one further below may not."""
    best, second = golden.top_ids[0, :2]
    changed = copy.deepcopy(golden)
    changed.top_logits[0, 1] = changed.top_logits[0, 0] - np.float32(gap)
    reference = TorchRuntime(model, name="reference").all_logits(PROMPTS[0].ids)[:1]
    reference[0, second] = reference[0, best] - np.float32(gap)
    logits = reference.copy()
    logits[0, second] = logits[0, best] + np.float32(1e-5)
    assert compare_with_record(changed, 0, logits[0])[2] is agrees
    assert compare_in_full(reference, logits)[2][0] == agrees


def test_a_winner_outside_the_record_disagrees(golden: GoldenRecord, model: Any) -> None:
    logits = TorchRuntime(model, name="reference").all_logits(PROMPTS[0].ids)[0]
    outside = next(i for i in range(ROWS) if i not in golden.top_ids[0])
    logits[outside] = 1e3
    kl, _, agrees = compare_with_record(golden, 0, logits)
    assert kl > 100 and not agrees


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_never_pass(golden: GoldenRecord, model: Any, value: float) -> None:
    logits = TorchRuntime(model, name="reference").all_logits(PROMPTS[0].ids)
    outside = next(i for i in range(ROWS) if i not in golden.top_ids[0] and i not in golden.sampled_ids)
    logits[0, outside] = value
    with np.errstate(invalid="ignore"):
        kl, error, agrees = compare_with_record(golden, 0, logits[0])
        report = _report(np.array([kl]), np.array([error]), np.array([agrees]))
        assert any("not finite" in failure for failure in parity._failures(report))
        assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["mean_kl"] is None


@pytest.mark.parametrize("layer", [0, 2, 4])
@pytest.mark.parametrize("part", ["self_attn.v_proj", "mlp.down_proj", "input_layernorm"])
def test_a_changed_layer_is_named(model: Any, golden: GoldenRecord, layer: int, part: str) -> None:
    other = copy.deepcopy(model)
    with torch.no_grad():
        weight = other.model.layers[layer].get_submodule(part).weight
        weight.add_(1e-2 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    errors = layer_errors(_runtime(other), golden)
    assert [e.layer for e in errors] == list(range(6))
    assert all(e.largest < 1e-6 for e in errors[: layer + 1]), "0 is the embedding, n + 1 is after layer n"
    report = _report(layers=errors)
    assert report.first_diverging_layer == layer + 1
    assert errors[layer + 1].median > GATES["fp32"].layer


def test_layer_errors_are_relative_errors(model: Any, golden: GoldenRecord) -> None:
    """The projection estimates what the whole states give, within its own noise (32 numbers: about 20 %)."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[1].mlp.down_proj.weight.mul_(1.05)
    found = layer_errors(_runtime(other), golden)
    exact = []
    for prompt in PROMPTS:
        a, b = (TorchRuntime(m, name="x").hidden_states(prompt.ids)[0] for m in (model, other))
        exact.append(np.linalg.norm(a - b, axis=-1) / np.linalg.norm(a, axis=-1))
    medians = np.median(np.concatenate(exact, axis=1), axis=1)
    for error, median in zip(found, medians, strict=True):
        assert error.median == pytest.approx(median, rel=0.25, abs=1e-7)


@pytest.mark.parametrize(
    ("dtype", "most", "least"), [(torch.float32, 1e-4, 0.0), (torch.bfloat16, 0.5, 1e-4)]
)
def test_one_pass_against_token_by_token(model: Any, dtype: torch.dtype, most: float, least: float) -> None:
    """Both are right, and differ by rounding: how much depends on the dtype, so the record says what it was."""
    runtime = _runtime(model, dtype)
    ids = PROMPTS[1].ids
    one_pass = runtime.all_logits(ids)
    steps = np.stack([runtime.decode(i) for i in ids])
    runtime.reset()
    difference = float(np.abs(one_pass - steps).max())
    assert least <= difference < most
    assert np.allclose(runtime.prefill(ids), one_pass[-1], atol=most)
    found = record(runtime, PROMPTS[1:], tokenizer_length=ROWS)
    assert found.how["one_pass_against_steps_max_abs"] == pytest.approx(difference, rel=1e-3, abs=1e-6)


def _report(
    kl: np.ndarray | None = None,
    error: np.ndarray | None = None,
    top1: np.ndarray | None = None,
    **changes: Any,
) -> ParityReport:
    rows = 300
    values: dict[str, Any] = dict(
        bundle="b",
        runtime="r",
        precision="fp32",
        gate=GATES["fp32"],
        reference="g",
        kl=np.zeros(rows) if kl is None else kl,
        max_abs=np.zeros(rows) if error is None else error,
        top1=np.ones(rows, bool) if top1 is None else top1,
        prompt_lengths=[rows],
        prefill_max_abs=0.0,
        greedy_tokens=64,
        greedy_equal=64,
    )
    return ParityReport(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"error": np.array([0, 2e-3])}, "max abs logit error 0.002 is above 0.001"),
        ({"kl": np.array([0, 1e-5])}, "mean KL 5e-06 is above 1e-06"),
        ({"top1": np.array([True, False])}, "top-1 agreement 50.00% is below 100.0%"),
        ({"greedy_equal": 63}, "greedy decoding differs at token 63 of 64"),
        ({"prefill_max_abs": 0.5}, "one pass and step by step differ by 0.5, above 0.001"),
        ({"prefill_max_abs": np.nan}, "one pass and step by step"),
        ({"gate": GATES["int8"], "error": np.array([9.0]), "greedy_equal": 3, "prefill_max_abs": 1.0}, None),
        ({"gate": GATES["int8"], "kl": np.array([8e-3])}, "mean KL 0.008 is above 0.005"),
    ],
)
def test_failures(changes: dict[str, Any], message: str | None) -> None:
    report = _report(**changes)
    report.failures = parity._failures(report)
    assert report.passed is (message is None)
    if message is None:
        report.raise_if_failed()
    else:
        assert [f for f in report.failures if message in f]
        with pytest.raises(ParityError, match="b is out of tolerance in r: ") as raised:
            report.raise_if_failed()
        assert raised.value.exit_code == 1


def test_a_layer_that_is_not_a_number_diverges() -> None:
    layers = [LayerError(0, 0.0, 0.0), LayerError(1, float("nan"), float("nan")), LayerError(2, 1.0, 1.0)]
    report = _report(layers=layers)
    assert report.first_diverging_layer == 1
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["layers"][1]["median"] is None
    assert _report(layers=layers[:1]).first_diverging_layer is None


@pytest.mark.parametrize(
    ("ids", "margins", "equal"),
    [([7, 8, 9], [1, 1, 1], 3), ([7, 5, 9], [1, 1, 1], 1), ([7, 5, 4], [1, 1e-4, 1], 3), ([7], [1, 1, 1], 1)],
)
def test_greedy(monkeypatch: pytest.MonkeyPatch, ids: list[int], margins: list[float], equal: int) -> None:
    golden = SimpleNamespace(prompts=PROMPTS, greedy_prompt=0, greedy_ids=[7, 8, 9], greedy_margins=margins)
    monkeypatch.setattr(parity, "greedy_continuation", lambda *a: (ids, []))
    assert parity._greedy_equal(None, golden, ()) == equal  # type: ignore[arg-type]


def test_gates() -> None:
    assert coarsest("fp32", "int8") == "int8" and coarsest("int4", "fp16") == "int4"
    assert gate_for("onnx", "fp16", "fp32") is GATES["fp16"]
    for finer, coarser in (("fp32", "fp16"), ("fp16", "int8"), ("int8", "int4")):
        assert GATES[finer].mean_kl < GATES[coarser].mean_kl and GATES[finer].top1 > GATES[coarser].top1


def test_the_kl_stated_of_a_nested_head_widens_the_gate() -> None:
    def manifest(head: object) -> Any:
        precision = SimpleNamespace(weights="int4", tables="int8")
        return SimpleNamespace(runtime="onnx", precision=precision, nested_head=head)

    whole = gate_of(manifest(None))
    assert whole is GATES["int4"] and gate_of(manifest(SimpleNamespace(kl=None))) is whole
    nested = gate_of(manifest(SimpleNamespace(kl=0.03)))
    assert nested.mean_kl == pytest.approx(0.05 + 2 * 0.03) and (nested.top1, nested.layer) == (0.90, 0.5)
    assert gate_of(manifest(SimpleNamespace(kl=100.0))).mean_kl == pytest.approx(0.05 + 0.1)
