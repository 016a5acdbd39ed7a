import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pit_deploy.checkpoint import open_checkpoint
from pit_deploy.errors import InputError
from pit_deploy.folding import load_folded
from pit_deploy.quantize.plan import QuantizationPlan
from pit_deploy.quantize.sensitivity import Group, choose_precision

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from pit_deploy.quantize.calibrated import quantize_model  # noqa: E402
from pit_deploy.quantize.sensitivity import WHOLE_ROW, Trial, group_tensors, round_activations  # noqa: E402
from pit_deploy.runtimes.torch import open_folded  # noqa: E402

IDS = [(11 * i * i + 5 * i) % 250 for i in range(400)]


def group(name: str, kl: float, size: int = 100, float_kl: bool = False) -> Group:
    sizes = {8: 2 * size, 4: size}
    return Group(name, (name,), {**sizes, 32: 8 * size} if float_kl else sizes, {8: kl / 100, 4: kl})


def joint(kl: Mapping[str, float]) -> Callable[[Mapping[str, int]], float]:
    """A KL that isn't additive: half as much again."""
    return lambda bits: 1.5 * sum(kl[n] * {4: 1, 8: 0.01, 32: 0}[b] for n, b in bits.items())


def test_smallest_choice_inside_the_gate() -> None:
    kl = {"a": 0.02, "b": 0.001, "c": 0.005, "d": 0.1}
    groups = [group(n, v) for n, v in kl.items()]
    choice = choose_precision(groups, joint(kl), max_kl=0.02, fixed_bytes=7)
    assert choice.bits == {"a": 8, "b": 4, "c": 4, "d": 8}
    assert choice.nbytes == 7 + 200 + 100 + 100 + 200
    assert choice.kl == pytest.approx(joint(kl)(choice.bits)) and choice.kl <= 0.02
    assert json.loads(json.dumps(choice.to_dict()))["groups"][1]["bits"] == 4


def test_a_wider_gate_never_gives_a_larger_artifact() -> None:
    rng = np.random.default_rng(0)
    kl = {f"g{i}": float(v) for i, v in enumerate(rng.exponential(0.01, 20))}
    groups = [group(n, v, int(rng.integers(50, 200)), float_kl=True) for n, v in kl.items()]
    sizes = []
    for gate in (1e-5, 1e-3, 1e-2, 0.05, 0.1, 1.0):
        choice = choose_precision(groups, joint(kl), max_kl=gate)
        assert choice.kl <= gate
        sizes.append(choice.nbytes)
        again = choose_precision(groups, joint(kl), max_bytes=choice.nbytes)
        assert again.bits == choice.bits
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == sum(g.nbytes[4] for g in groups)
    assert 32 in choose_precision(groups, joint(kl), max_kl=1e-5).bits.values()


def test_gates_that_cannot_be_met() -> None:
    kl = {"a": 0.02, "b": 0.001}
    groups = [group(n, v) for n, v in kl.items()]
    with pytest.raises(InputError, match=r"--max-kl 1e-06 .* best reached is 0.000315, with 8-bit"):
        choose_precision(groups, joint(kl), max_kl=1e-6)
    with pytest.raises(InputError, match="smallest choice has 205 bytes"):
        choose_precision(groups, joint(kl), max_bytes=204, fixed_bytes=5)
    with pytest.raises(InputError, match="give one of"):
        choose_precision(groups, joint(kl))


def test_groups_go_by_layer_and_input() -> None:
    names = ["pit.table"] + [
        f"model.layers.3.{n}.weight" for n in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
    ]
    assert group_tensors(names) == {
        "table": (names[0],),
        "layers.3.qkv": (names[1], names[2]),
        "layers.3.down": (names[3],),
    }


def test_rounded_activations_by_hand() -> None:
    x = torch.tensor([[127.0, 0.4, -0.6, 0.0, 254.0, 1.1]])
    assert round_activations(x, 4).tolist() == [[127.0, 0.0, -1.0, 0.0, 254.0, 2.0]]
    assert round_activations(x, WHOLE_ROW).tolist() == [[128.0, 0.0, 0.0, 0.0, 254.0, 2.0]]


@pytest.fixture
def model(tiny_checkpoint: Callable[..., Path]) -> Any:
    return load_folded(open_checkpoint(tiny_checkpoint()))


def plan() -> QuantizationPlan:
    return QuantizationPlan("int4", "int8", block_size=16, symmetric=False)


def test_search_on_a_tiny_model_stays_inside_the_gate(model: Any) -> None:
    every = quantize_model(model, plan(), IDS, max_bytes=10**9, tokens=128).choice
    least = quantize_model(model, plan(), IDS, max_kl=1e9, tokens=128).choice
    assert every is not None and least is not None
    assert set(every.bits.values()) == {8} and set(least.bits.values()) == {4}
    gate = (every.kl * least.kl) ** 0.5
    found = quantize_model(model, plan(), IDS, max_kl=gate, tokens=128)
    choice = found.choice
    assert choice is not None and choice.kl <= gate
    assert least.nbytes < choice.nbytes < every.nbytes
    assert len(choice.groups) == 2 * 4 + 1
    assert {len({choice.bits[f"model.layers.0.self_attn.{k}_proj.weight"] for k in "qkv"})} == {1}
    total = 0
    for name, bits in choice.bits.items():
        role = "weights" if "layers" in name else "tables"
        weight = found.model.read(name) if role == "weights" else found.model.tables.table
        tensor = found.plan.encode(name, weight, role)
        assert tensor.bits == bits
        total += tensor.nbytes
    assert total == choice.nbytes
    with pytest.raises(InputError, match="cannot be met: the best reached is"):
        quantize_model(model, plan(), IDS, max_kl=every.kl / 2, tokens=128)
    floats = quantize_model(model, plan(), IDS, max_kl=every.kl / 2, tokens=128, keep_float=True).choice
    assert floats is not None and floats.kl <= every.kl / 2 and 32 in floats.bits.values()


def test_trial_equals_a_model_with_those_weights_and_leaves_none_behind(model: Any) -> None:
    found = quantize_model(model, plan(), IDS, tokens=128)
    tensors = {name: {t.bits: t} for name, t in found.plan.prepared.items()}
    trial = Trial(open_folded(found.model), [IDS[:32], IDS[40:72]], tensors)
    before = trial.runtime.all_logits(IDS[:32])
    name = "model.layers.1.mlp.down_proj.weight"
    kl, top1 = trial.kl({name: 4})
    np.testing.assert_array_equal(trial.runtime.all_logits(IDS[:32]), before)
    other = open_folded(found.model)
    other.decoder.layers[1].mlp.down_proj.weight.data = torch.from_numpy(tensors[name][4].dequantize())
    expected, same = [], []
    for window in (IDS[:32], IDS[40:72]):
        p, q = (
            torch.log_softmax(torch.from_numpy(r.all_logits(window)), -1).double()
            for r in (trial.runtime, other)
        )
        expected.append((p.exp() * (p - q)).sum(-1))
        same.append(p.argmax(-1) == q.argmax(-1))
    assert kl == pytest.approx(float(torch.cat(expected).mean()), rel=1e-3)
    assert top1 == float(torch.cat(same).double().mean())
    noisy = Trial(open_folded(found.model), [IDS[:32]], tensors, activations=16)
    assert noisy.kl({})[0] > 0 and trial.kl({})[0] == 0


def test_error_feedback_helps_the_model(model: Any) -> None:
    from pit_deploy.quantize.round_to_nearest import round_to_nearest

    found = quantize_model(model, plan(), IDS, tokens=256, smooth=False)
    windows = [IDS[i : i + 32] for i in range(0, 320, 32)]
    tensors = {n: {4: t} for n, t in found.plan.prepared.items() if t.bits == 4}
    good = Trial(open_folded(model), windows, tensors).kl(dict.fromkeys(tensors, 4))[0]
    options = found.plan.prepared[next(iter(tensors))]
    assert options.block_size == 16
    from pit_deploy.quantize import QuantizationOptions

    plain = {n: {4: round_to_nearest(model.read(n), QuantizationOptions(4, 16, False))} for n in tensors}
    assert good < 0.7 * Trial(open_folded(model), windows, plain).kl(dict.fromkeys(tensors, 4))[0]
