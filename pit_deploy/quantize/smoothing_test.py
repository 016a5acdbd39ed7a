from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pit_deploy.checkpoint import open_checkpoint
from pit_deploy.errors import InputError
from pit_deploy.folding import FoldedModel, SharedTable, load_folded

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from pit_deploy.quantize.smoothing import (  # noqa: E402
    SmoothedModel,
    balanced,
    block_rotation,
    random_rotation,
    rotated,
    turned_projection,
)
from pit_deploy.runtimes.torch import open_folded  # noqa: E402

IDS = [3, 7, 200, 41, 5, 5, 90, 17]


def float64_logits(model: FoldedModel) -> np.ndarray:
    """The model in float64 throughout."""
    runtime = open_folded(model)
    names = set(runtime.model.state_dict())
    exact = {n: torch.from_numpy(model.read(n, np.float64)) for n in names}
    runtime.model.double().load_state_dict(exact, assign=True)
    for module in (runtime.model.get_input_embeddings(), runtime.model.get_output_embeddings()):
        module.weight = module.weight.double()
        module.forward = _forward(module)
    for module in runtime.model.modules():
        if hasattr(module, "variance_epsilon"):  # transformers' own forward rounds to float32
            module.forward = _norm(module)
    with torch.no_grad():
        return runtime.model(input_ids=torch.tensor([IDS]), use_cache=False).logits[0].numpy()


def _forward(module):  # the folded modules round to float32 between map and backbone
    def run(x):
        if x.dtype == torch.int64:
            rows = module.weight[x]
            return rows if module.matrix is None else rows @ module.matrix
        x = x if module.matrix is None else x @ module.matrix.T
        return x @ module.weight.T

    return run


def _norm(module):
    return lambda x: (
        module.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
    )


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("layout", ["maps", "untied", "shared"])
@pytest.mark.parametrize("block", [8, None])
def test_the_function_stays(
    tiny_checkpoint: Callable[..., Path], family: str, layout: str, block: int | None
) -> None:
    changes = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    checkpoint = open_checkpoint(tiny_checkpoint(family, tied=layout != "untied", **changes))
    model = load_folded(checkpoint)
    if layout == "maps":
        maps = np.random.default_rng(0).standard_normal((2, 24, 24)) / 5
        assert isinstance(model.tables, SharedTable)
        model.tables = SharedTable(model.tables.table, *maps)
    turned = rotated(model, block=block)
    assert isinstance(turned, SmoothedModel)
    assert (turned.stream is None) == (layout == "shared")  # a table without maps cannot take the rotation up
    rng = np.random.default_rng(1)
    turned.column_scales = {
        name: np.exp(rng.standard_normal(model.read(name).shape[0]))
        for n in range(2)
        for name in (
            f"model.layers.{n}.input_layernorm.weight",
            f"model.layers.{n}.post_attention_layernorm.weight",
            f"model.layers.{n}.mlp.up_proj.weight",
        )
    }
    name = "model.layers.0.mlp.down_proj.weight"
    assert np.abs(turned.read(name) - model.read(name)).max() > 0.1
    # A table stored in float32 is turned and rounded again where there are two; maps stay float64.
    tolerance = 1e-4 if layout == "untied" else 1e-9
    np.testing.assert_allclose(float64_logits(turned), float64_logits(model), rtol=tolerance, atol=tolerance)


def test_balance_levels_activations_against_weights(tiny_checkpoint: Callable[..., Path]) -> None:
    model = load_folded(open_checkpoint(tiny_checkpoint("llama")))
    windows = [IDS, IDS[::-1]]
    level = balanced(model, open_folded(model), windows)
    assert isinstance(level, SmoothedModel) and level.folds[-1] == "balanced_mlp"
    np.testing.assert_allclose(float64_logits(level), float64_logits(model), rtol=1e-9, atol=1e-9)
    seen: list[np.ndarray] = []
    runtime = open_folded(level)
    down = runtime.decoder.layers[1].mlp.down_proj
    down.register_forward_pre_hook(lambda _, args: seen.append(args[0][0].double().numpy()))
    for window in windows:
        runtime.all_logits(window)
    inputs = np.sqrt((np.concatenate(seen) ** 2).mean(axis=0))
    columns = np.sqrt((down.weight.detach().double().numpy() ** 2).mean(axis=0))
    ratio = inputs / columns
    np.testing.assert_allclose(ratio, ratio.mean(), rtol=1e-3)


def test_projections_of_hidden_states_stay(tiny_checkpoint: Callable[..., Path]) -> None:
    model = load_folded(open_checkpoint(tiny_checkpoint("llama", tied=False)))
    turned = rotated(model, block=8)
    states, other = (open_folded(m).hidden_states(IDS)[0] for m in (model, turned))
    projection = np.random.default_rng(0).standard_normal((24, 5)).astype(np.float32)
    assert np.abs(states - other).max() > 0.1
    np.testing.assert_allclose(
        other @ turned_projection(turned, projection), states @ projection, rtol=1e-3, atol=1e-3
    )
    assert turned_projection(model, projection) is projection


def test_a_random_rotation_is_orthogonal_and_mixes_all_channels() -> None:
    matrix = random_rotation(24, seed=3).columns(np.eye(24))
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(24), atol=1e-12)
    assert np.abs(matrix).max() < 0.9 and np.count_nonzero(matrix) == matrix.size
    np.testing.assert_array_equal(matrix, random_rotation(24, seed=3).columns(np.eye(24)))


def test_rotation_by_hand() -> None:
    rotation = block_rotation(8, 4, seed=0)
    matrix = rotation.columns(np.eye(8))
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(8), atol=1e-15)
    assert not matrix[:4, 4:].any() and not matrix[4:, :4].any()
    np.testing.assert_allclose(np.abs(matrix[:4, :4]), 0.5)
    np.testing.assert_allclose(rotation.rows(np.eye(8)), matrix.T, atol=1e-15)
    with pytest.raises(InputError, match="blocks of 3"):
        block_rotation(9, 3)
    with pytest.raises(InputError, match="10 channels"):
        block_rotation(10, 4)


def test_sizes_that_do_not_fit_stay(tiny_checkpoint: Callable[..., Path]) -> None:
    model = load_folded(open_checkpoint(tiny_checkpoint("llama")))
    assert rotated(model, block=64) is model
