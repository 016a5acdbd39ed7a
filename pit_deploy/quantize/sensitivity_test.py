from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pit_deploy.checkpoint import open_checkpoint
from pit_deploy.errors import InputError
from pit_deploy.folding import load_folded
from pit_deploy.quantize.options import QuantizationOptions
from pit_deploy.quantize.plan import QuantizationPlan

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from pit_deploy.quantize.calibrated import quantize_model  # noqa: E402
from pit_deploy.quantize.sensitivity import WHOLE_ROW, Trial, group_tensors, round_activations  # noqa: E402
from pit_deploy.runtimes.torch import open_folded  # noqa: E402

IDS = [(11 * i * i + 5 * i) % 250 for i in range(400)]


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
    with pytest.raises(InputError, match=r"has 7 tokens of this model .* at least 8"):
        quantize_model(model, plan(), IDS[:7], max_kl=1.0)
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


def test_a_search_keeps_in_place_what_it_measures_next(model: Any) -> None:
    from pit_deploy.quantize.round_to_nearest import round_to_nearest

    names = [n for n in model.tensor_names() if n.endswith("_proj.weight")]
    options = {bits: QuantizationOptions(bits, 16) for bits in (4, 8)}
    tensors = {n: {b: round_to_nearest(model.read(n), o) for b, o in options.items()} for n in names}
    windows = [IDS[:32], IDS[40:72]]
    trial = Trial(open_folded(model), windows, tensors)
    groups = trial.groups((4, 8))
    measure = trial.of_groups(groups)
    rng = np.random.default_rng(0)
    for _ in range(3):
        bits = {g.name: int(rng.choice([4, 8])) for g in groups}
        fresh = Trial(open_folded(model), windows, tensors).kl(
            {t: bits[g.name] for g in groups for t in g.tensors}
        )
        assert measure(bits) == fresh[0] > 0
    floats = Trial(open_folded(model), windows, tensors)
    measure = floats.of_groups(floats.groups((4, 8, 32)))
    assert measure({g.name: 4 for g in groups}) > 0
    assert measure({g.name: 32 for g in groups}) == 0


def test_groups_of_a_layer_share_its_measurement_by_its_output(model: Any) -> None:
    from pit_deploy.quantize.round_to_nearest import round_to_nearest

    names = [n for n in model.tensor_names() if n.endswith("_proj.weight")]
    tensors = {n: {4: round_to_nearest(model.read(n), QuantizationOptions(4, 16))} for n in names}
    tensors["lm_head.weight" if model.layout == "untied" else "pit.table"] = {
        4: round_to_nearest(model.tables.table, QuantizationOptions(4, 16))
    }
    windows = [IDS[:32], IDS[40:72]]
    trial = Trial(open_folded(model), windows, tensors)
    found = {g.name: g.kl[4] for g in trial.groups((4, 32), by_layer=True)}
    alone = {g.name: g.kl[4] for g in Trial(open_folded(model), windows, tensors).groups((4, 32))}
    assert list(found) == list(alone) and found["table"] == alone["table"]
    exact = [open_folded(model).hidden_states(window)[0] for window in windows]
    for layer in range(2):
        members = [name for name in found if name.startswith(f"layers.{layer}.")]
        assert len(members) == 4
        every = {t: 4 for t in tensors if t.startswith(f"model.layers.{layer}.")}
        assert sum(found[name] for name in members) == pytest.approx(trial.kl(every)[0], rel=1e-6)
        changes = {}
        for name in members:
            other = open_folded(model)
            for tensor in group_tensors(list(every))[name]:
                module = other.decoder.get_submodule(tensor.removeprefix("model.").removesuffix(".weight"))
                module.weight.data = torch.from_numpy(tensors[tensor][4].dequantize())
            changes[name] = 0.0
            for window, states in zip(windows, exact, strict=True):
                change = other.hidden_states(window)[0][layer + 1] - states[layer + 1]
                changes[name] += float(((change**2).sum(-1) / (states[layer + 1] ** 2).sum(-1)).sum())
        for name in members:
            share = found[name] / sum(found[n] for n in members)
            assert share == pytest.approx(changes[name] / sum(changes.values()), rel=1e-3)
            assert 0.2 < found[name] / alone[name] < 5


def test_error_feedback_helps_the_model(model: Any) -> None:
    from pit_deploy.quantize.round_to_nearest import round_to_nearest

    found = quantize_model(model, plan(), IDS, tokens=256, smooth=False)
    windows = [IDS[i : i + 32] for i in range(0, 320, 32)]
    tensors = {n: {4: t} for n, t in found.plan.prepared.items() if t.bits == 4}
    good = Trial(open_folded(model), windows, tensors).kl(dict.fromkeys(tensors, 4))[0]
    options = found.plan.prepared[next(iter(tensors))]
    assert options.block_size == 16
    plain = {n: {4: round_to_nearest(model.read(n), QuantizationOptions(4, 16, False))} for n in tensors}
    assert good < 0.7 * Trial(open_folded(model), windows, plain).kl(dict.fromkeys(tensors, 4))[0]
