import numpy as np
import pytest
import scipy.linalg
import torch

from pit_deploy.errors import InputError
from pit_deploy.training.annealing import AnnealBridge, Geodesic
from pit_deploy.training.options import TrainingOptions
from pit_deploy.training.trainer import fit


@pytest.fixture
def spd(rng):
    a = rng.standard_normal((6, 20))
    return a @ a.T


def test_the_path_of_a_tied_models_bridge(spd):
    path = Geodesic(spd)
    assert path.multiplier == pytest.approx(np.linalg.det(spd) ** (1 / 6))
    assert np.allclose(path.at(0.0), spd)
    assert np.allclose(path.at(1.0), path.multiplier * np.eye(6))
    # c^t B^(1-t), by scipy
    expected = path.multiplier**0.3 * scipy.linalg.fractional_matrix_power(spd, 0.7)
    assert np.allclose(path.at(0.3), expected)
    for t in (0.1, 0.5, 0.9):
        assert np.linalg.eigvalsh(path.at(t))[0] > 0
        assert np.linalg.det(path.at(t)) == pytest.approx(np.linalg.det(spd))  # the volume is kept on the way


def test_the_path_of_a_bridge_that_was_trained_off_symmetry(spd, rng):
    skew = rng.standard_normal((6, 6))
    turned = spd @ scipy.linalg.expm(0.3 * (skew - skew.T))
    path = Geodesic(turned)
    assert np.allclose(path.at(0.0), turned)
    assert np.allclose(path.at(1.0), path.multiplier * np.eye(6), atol=1e-10)
    steps = [np.linalg.norm(path.at(t + 0.01) - path.at(t)) for t in np.linspace(0, 0.99, 50)]
    assert max(steps) < 0.1 * np.linalg.norm(turned)  # no jump


def test_bridges_without_a_path_are_refused(spd):
    with pytest.raises(InputError, match="mirrors"):
        Geodesic(spd @ np.diag([-1.0, 1, 1, 1, 1, 1]))
    with pytest.raises(InputError, match="singular"):
        Geodesic(np.diag([1.0, 1, 1, 1, 1, 0]))


def test_annealing_ends_in_a_strict_model_with_one_number(tiny_pit, blocks):
    model = tiny_pit()
    annealing = AnnealBridge(model, 6)
    log = fit(model, blocks[:64], blocks[64:], TrainingOptions(steps=8, eval_every=4), callbacks=[annealing])
    bridge = model.pit.bridge.detach().clone()
    assert np.allclose(bridge.numpy(), annealing.path.multiplier * np.eye(24), rtol=1e-5)
    ids = torch.arange(10)[None]
    before = model(input_ids=ids).logits
    annealing.finish(model)
    assert model.pit.bridge_kind == "scalar" and "pit.bridge" not in model.state_dict()
    assert torch.allclose(model(input_ids=ids).logits, before, atol=1e-4)
    assert [s for s, _ in log.series("eval_loss")] == [0, 4, 8]


def test_a_model_without_a_matrix_is_refused(tiny_pit):
    with pytest.raises(InputError, match="bridge is scalar"):
        AnnealBridge(tiny_pit(bridge="scalar"), 5)
