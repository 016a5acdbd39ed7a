import numpy as np
import pytest
import scipy.linalg
import torch

from pit_deploy.initialize import random_orthonormal
from pit_deploy.training.stiefel import (
    inverse_root,
    orthogonalized,
    orthonormality_error,
    project_to_tangent_,
    retract_,
)


@pytest.fixture
def memory() -> torch.Tensor:
    return torch.from_numpy(random_orthonormal(300, 12, seed=1, dtype=np.float64))


def noise(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_projection_is_tangent_and_leaves_tangent_vectors_alone(memory):
    gradient = noise(memory.shape)
    tangent = project_to_tangent_(gradient.clone(), memory)
    inner = memory.T @ tangent
    assert torch.allclose(inner, -inner.T, atol=1e-12)  # the tangent space: Zᵀ X is skew
    assert torch.allclose(project_to_tangent_(tangent.clone(), memory), tangent, atol=1e-12)
    # What was taken away is orthogonal to everything tangent.
    assert abs(float(((gradient - tangent) * tangent).sum())) < 1e-9


@pytest.mark.parametrize("size", [1e-3, 0.3, 10.0])
def test_the_retraction_is_scipys_polar_factor(memory, size):
    stepped = memory + size * noise(memory.shape, 1) / 300**0.5
    expected = scipy.linalg.polar(stepped.numpy())[0]
    assert np.abs(retract_(stepped.clone()).numpy() - expected).max() < 1e-11


def test_a_retracted_float32_table_has_orthonormal_columns():
    table = torch.from_numpy(random_orthonormal(20_000, 32, seed=2))
    table += 0.1 * torch.randn(table.shape, generator=torch.Generator().manual_seed(0)) / 20_000**0.5
    assert orthonormality_error(table) > 1e-3
    assert orthonormality_error(retract_(table)) < 1e-6


def test_the_inverse_root_by_both_routes():
    near = torch.eye(9, dtype=torch.float64) + 0.02 * (lambda a: a + a.T)(noise((9, 9)))
    far = (lambda a: a @ a.T)(noise((9, 30)))
    for gram in (near, far):
        root = inverse_root(gram)
        assert torch.allclose(root @ gram @ root, torch.eye(9, dtype=torch.float64), atol=1e-9)
        assert torch.equal(root, root.T) or torch.allclose(root, root.T, atol=1e-12)


def test_a_table_that_lost_its_rank_or_its_numbers_is_refused(memory):
    with pytest.raises(ValueError, match="linearly dependent"):
        retract_(torch.ones(20, 3, dtype=torch.float64))
    memory[3, 2] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        retract_(memory)


def test_orthogonalised_updates_keep_their_directions(memory):
    update = noise((300, 12)) * torch.logspace(0, -3, 12, dtype=torch.float64)
    assert np.abs(orthogonalized(update).numpy() - scipy.linalg.polar(update.numpy())[0]).max() < 1e-8
    # A direction that is not there stays away, rather than being made of rounding.
    update[:, 5] = update[:, 4]
    assert torch.linalg.matrix_rank(orthogonalized(update), atol=1e-3) == 11
    assert not orthogonalized(torch.zeros(30, 4)).any()


def test_a_step_downhill_on_the_manifold_goes_downhill(memory):
    target = noise(memory.shape, 5)

    def loss(z):
        return ((z - target) ** 2).sum()

    z = memory.clone().requires_grad_()
    before = loss(z)
    before.backward()
    with torch.no_grad():
        z -= 1e-3 * project_to_tangent_(z.grad, z.detach())
        retract_(z.data)
    assert loss(z) < before and orthonormality_error(z.detach()) < 1e-12
