"""A step of `Z` and `T` as one table, against automatic derivatives, scipy and a table without any constraint."""

import numpy as np
import pytest
import scipy.linalg
import torch

from pit_deploy.errors import InputError
from pit_deploy.initialize import orthonormality_error, random_orthonormal
from pit_deploy.training.options import TrainingOptions
from pit_deploy.training.table_step import pull_back_, split_
from pit_deploy.training.trainer import fit


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def factors_of(table):
    """`Z`, `T` of `W = Z T`, differentiable."""
    values, vectors = torch.linalg.eigh(table.T @ table)
    return table @ (vectors * values.rsqrt()) @ vectors.T, (vectors * values.sqrt()) @ vectors.T


def some_loss(memory, transform):
    """Depends on both ends: the head `Z T` and the embedding `Z T⁻¹`."""
    head, embedding = memory @ transform, memory @ torch.linalg.inv(transform)
    return (head * random(*head.shape, seed=5)).sin().sum() + (
        embedding * random(*head.shape, seed=6)
    ).cos().sum()


def test_the_gradient_is_that_of_the_table():
    table = random(40, 5).requires_grad_()
    memory, transform = factors_of(table)
    some_loss(memory, transform).backward()
    own = memory.detach().clone().requires_grad_()
    cholesky = torch.linalg.cholesky(transform.detach()).requires_grad_()
    lower = torch.tril(cholesky)
    some_loss(own, lower @ lower.T).backward()
    found = pull_back_(own.grad, own.detach(), cholesky.detach(), cholesky.grad)
    assert float((found - table.grad).abs().max()) < 1e-12 < float(table.grad.abs().max())


@pytest.mark.parametrize("size", [1e-3, 1.0])
def test_the_split_gives_scipys_polar_factors(size):
    table = random(40, 5)
    memory, transform = factors_of(table)
    step = size * random(40, 5, seed=1)
    unitary, positive = scipy.linalg.polar((table + step).numpy())
    cholesky = split_(step, memory, torch.linalg.cholesky(transform))
    assert np.abs(step.numpy() - unitary).max() < 1e-12
    assert np.abs((cholesky @ cholesky.T).numpy() - positive).max() < 1e-12


def test_a_split_in_float32_stays_orthonormal_where_t_is_badly_conditioned():
    memory = torch.from_numpy(random_orthonormal(5000, 160, seed=0))  # wide enough for a Gram matrix in bands
    scales = torch.logspace(0, 2, 160)
    step = 1e-3 * torch.randn(5000, 160, generator=torch.Generator().manual_seed(0))
    stepped = (memory.double() * scales + step.double()).numpy()
    cholesky = split_(step, memory, torch.diag(scales.sqrt()))
    assert orthonormality_error(step.numpy()) < 2e-6
    table = step.double() @ cholesky @ cholesky.T
    assert np.abs(table.numpy() - stepped).max() < 1e-5


def test_tables_without_full_rank_or_finite_numbers_are_refused():
    memory = torch.eye(6, 3, dtype=torch.float64)
    cholesky = torch.eye(3, dtype=torch.float64)
    gone = torch.zeros(6, 3, dtype=torch.float64)
    gone[2, 2] = -1
    with pytest.raises(ValueError, match="linearly dependent"):
        split_(gone, memory, cholesky)
    for spoilt in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="not finite"):
            split_(gone.fill_(spoilt), memory, cholesky)
        with pytest.raises(ValueError, match="the gradient holds"):
            pull_back_(torch.full((6, 3), spoilt, dtype=torch.float64), memory, cholesky, cholesky)
        with pytest.raises(ValueError, match="L holds"):
            pull_back_(torch.zeros(6, 3, dtype=torch.float64), memory, cholesky * spoilt, cholesky)


def test_training_moves_the_table_as_adamw_moves_one_without_constraint(tiny_pit, tiny, blocks):
    """The same model with a free table `W` whose embedding is written as `W (WᵀW)⁻¹ c`, trained by the same loop."""
    model = tiny_pit(bridge="scalar")
    free = tiny()
    table = free.get_input_embeddings().weight

    def through_the_pseudo_inverse(module, args, rows):
        return rows @ torch.linalg.inv(module.weight.T @ module.weight) * 3.0

    free.get_input_embeddings().register_forward_hook(through_the_pseudo_inverse)
    options = TrainingOptions(steps=5, batch_size=4, learning_rate=1e-3, weight_decay=0.0, max_grad_norm=1e9)
    logs = [fit(m, blocks[:64], blocks[64:], options) for m in (model, free)]
    for (_, one), (_, other) in zip(*(log.series("loss") for log in logs), strict=True):
        assert one == pytest.approx(other, abs=2e-5)
    head = (model.pit.memory @ model.pit.transform()).detach()
    assert float((head - table.detach()).abs().max()) < 1e-4 < float(table.detach().abs().max())
    assert logs[0].series("loss")[-1][1] < logs[0].series("loss")[0][1]


def test_which_step_is_made():
    assert TrainingOptions().steps_table
    assert not TrainingOptions(optimizer="muon").steps_table
    assert not TrainingOptions(interface_step="apart").steps_table
    assert not TrainingOptions(transform_rate=0.1).steps_table
    for options in (dict(optimizer="muon"), dict(memory="frozen"), dict(transform_rate=0.1)):
        with pytest.raises(InputError, match="--interface-step"):
            TrainingOptions(interface_step="table", **options)
