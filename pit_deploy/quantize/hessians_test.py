from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pit_deploy.errors import InputError
from pit_deploy.quantize import QuantizationOptions, QuantizedTensor

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from pit_deploy.quantize.hessians import (  # noqa: E402
    LayerStack,
    calibration_windows,
    held_out_windows,
    input_moments,
    quantize_layers,
)
from pit_deploy.runtimes.torch import TorchRuntime  # noqa: E402

WINDOWS = calibration_windows([(7 * i * i + 3 * i) % 250 for i in range(64)], tokens=48, window=16)
OPTIONS = QuantizationOptions(4, 16, False)


def runtime(tiny: Callable[..., Any], family: str = "llama") -> TorchRuntime:
    return TorchRuntime(tiny(family), name="tiny")


def same(a: dict[str, tuple[QuantizedTensor, ...]], b: dict[str, tuple[QuantizedTensor, ...]]) -> bool:
    return list(a) == list(b) and all(
        x.codes.tobytes() == y.codes.tobytes() and x.scales.tobytes() == y.scales.tobytes()
        for name in a
        for x, y in zip(a[name], b[name], strict=True)
    )


def test_windows_are_spread_over_the_text() -> None:
    assert calibration_windows(range(10), tokens=6, window=3) == [[0, 1, 2], [6, 7, 8]]
    assert calibration_windows(range(10), tokens=100, window=3) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert calibration_windows([5, 6], tokens=100, window=8) == [[5, 6]]
    with pytest.raises(InputError, match="no tokens"):
        calibration_windows([])


def test_windows_held_out_are_not_among_the_others() -> None:
    kept, held = held_out_windows(range(40), every=4, window=5)
    assert held == [*range(15, 20), *range(35, 40)] and sorted(kept + held) == list(range(40))
    assert held_out_windows(range(8), every=4, window=5) == ([0, 1, 2, 3, 4, 5], [6, 7])


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_moments_are_those_of_the_inputs(tiny: Callable[..., Any], family: str) -> None:
    opened = runtime(tiny, family)
    names = ("self_attn.q_proj", "mlp.down_proj")
    seen: dict[str, list[np.ndarray]] = {name: [] for name in names}
    handles = [
        opened.decoder.layers[1]
        .get_submodule(name)
        .register_forward_pre_hook(lambda _, args, name=name: seen[name].append(args[0][0].double().numpy()))
        for name in names
    ]
    for window in WINDOWS:
        opened.all_logits(window)
    for handle in handles:
        handle.remove()
    stack = LayerStack(opened, WINDOWS)
    states = list(stack.run(0, stack.states))
    for name, moment in zip(names, input_moments(stack, 1, [(n,) for n in names], states), strict=True):
        rows = np.concatenate(seen[name])
        np.testing.assert_allclose(moment, rows.T @ rows, rtol=1e-4, atol=1e-4)


def test_model_goes_on_with_the_first_setting(tiny: Callable[..., Any]) -> None:
    opened = runtime(tiny)
    eight = QuantizationOptions(8, 16)
    chosen = {"q_proj": (), "o_proj": (OPTIONS,)}
    found = quantize_layers(
        opened, WINDOWS, lambda name: next((v for k, v in chosen.items() if k in name), (eight, OPTIONS))
    )
    assert len(found) == 14
    name = "model.layers.1.mlp.down_proj.weight"
    assert [tensor.bits for tensor in found[name]] == [8, 4]
    weights = opened.model.state_dict()
    np.testing.assert_array_equal(weights[name].numpy(), found[name][0].dequantize())
    kept = "model.layers.0.self_attn.q_proj.weight"
    assert found[kept] == ()
    np.testing.assert_array_equal(weights[kept].numpy(), tiny().state_dict()[kept].numpy())


def test_resumes_with_the_same_bytes(tiny: Callable[..., Any], tmp_path: Path) -> None:
    whole = quantize_layers(runtime(tiny), WINDOWS, lambda name: [OPTIONS], threads=2)

    def interrupt(stage: str, done: int, total: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_layers(runtime(tiny), WINDOWS, lambda name: [OPTIONS], work=tmp_path, progress=interrupt)
    assert [file.name for file in tmp_path.iterdir()] == ["layer-000.safetensors"]
    before = (tmp_path / "layer-000.safetensors").stat().st_mtime_ns
    resumed = quantize_layers(runtime(tiny), WINDOWS, lambda name: [OPTIONS], work=tmp_path, threads=1)
    assert (tmp_path / "layer-000.safetensors").stat().st_mtime_ns == before
    assert same(whole, resumed)


def test_what_was_kept_for_something_else_is_made_anew(tiny: Callable[..., Any], tmp_path: Path) -> None:
    def run(seed: int = 0, options: QuantizationOptions = OPTIONS) -> dict[str, tuple[QuantizedTensor, ...]]:
        opened = TorchRuntime(tiny(seed=seed), name="tiny")
        return quantize_layers(opened, WINDOWS, lambda name: [options], work=tmp_path)

    first = run()
    assert not same(first, run(seed=1))
    assert not same(first, run(options=QuantizationOptions(8, 16)))
    run()
    (tmp_path / "layer-001.safetensors").write_bytes(b"damaged")
    assert same(first, run())


def test_other_architectures_are_refused(tiny: Callable[..., Any]) -> None:
    opened = TorchRuntime(tiny("gpt2"), name="tiny")
    with pytest.raises((InputError, AttributeError)):
        quantize_layers(opened, WINDOWS, lambda name: [OPTIONS])
