"""A step of `Z` and `T` as one table, against automatic derivatives, scipy and a table without any constraint."""

import contextlib

import numpy as np
import pytest
import scipy.linalg
import torch
from torch.nn import functional as F
from transformers import TrainerCallback
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from pit_deploy.errors import InputError, PitDeployError
from pit_deploy.initialize import orthonormality_error, random_orthonormal
from pit_deploy.interface import PITInterface, cholesky_to_raw, raw_to_cholesky
from pit_deploy.training import trainer as trainer_module
from pit_deploy.training.diagnostics import Diagnostics
from pit_deploy.training.options import TrainingOptions
from pit_deploy.training.table_step import SteppedTable
from pit_deploy.training.trainer import fit


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def factors_of(table):
    """`Z`, `T` of `W = Z T`, differentiable."""
    values, vectors = torch.linalg.eigh(table.T @ table)
    return table @ (vectors * values.rsqrt()) @ vectors.T, (vectors * values.sqrt()) @ vectors.T


def interface_of_table(table, bridge=None):
    """The interface of `table` [V, d] in its precision, and in table form."""
    memory, transform = factors_of(table)
    interface = PITInterface(memory, torch.linalg.cholesky(transform), bridge, memory_kind="stiefel")
    interface.table = SteppedTable(interface)
    return interface


IDS = torch.tensor([[0, 3, 39], [3, 3, 1]])


def some_loss(embedding, logits):
    """Of rows [2, 3, d] and logits [2, 3, V]."""
    return (embedding * random(*embedding.shape, seed=6)).cos().sum() + (
        logits * random(*logits.shape, seed=5)
    ).sin().sum()


def loss_of(table, states):
    """`some_loss` of a head `W` and the embedding `W (WᵀW)⁻¹`, by automatic derivatives."""
    return some_loss((table @ torch.linalg.inv(table.T @ table))[IDS], states @ table.T)


def step_(interface, step):
    """What an optimiser's step `D` [V, d] does."""
    interface.table.begin_()
    with torch.no_grad():
        interface.memory.copy_(step)
    interface.table.end_()


def test_the_gradient_is_that_of_the_table():
    table, states = random(40, 5), random(2, 3, 5, seed=3)
    interface = interface_of_table(table)
    move = 0.1 * random(40, 5, seed=4)
    for _ in range(2):  # as it was made, and where Y is no longer orthonormal
        free, own, other = table.clone().requires_grad_(), states.clone(), states.clone()
        expected = loss_of(free, own.requires_grad_())
        expected.backward()
        found = some_loss(interface.embed(IDS), interface.logits(other.requires_grad_()))
        interface.memory.grad = None
        found.backward()
        assert float(found.detach()) == pytest.approx(float(expected.detach()), abs=1e-11)
        assert float((own.grad - other.grad).abs().max()) < 1e-11
        step_(interface, move)
        assert float((interface.memory.grad - free.grad).abs().max()) < 1e-11 < float(free.grad.abs().max())
        table = table + move
    error = interface.memory.T @ interface.memory - torch.eye(5)
    assert float(error.detach().abs().max()) > 1e-3  # so the second round was of such a Y


@pytest.mark.parametrize("size", [1e-3, 1.0])
def test_settling_gives_scipys_polar_factors(size):
    table = random(40, 5)
    interface = interface_of_table(table)
    for number in range(3):
        step = size * random(40, 5, seed=number)
        table = table + step
        some_loss(interface.embed(IDS), interface.logits(random(2, 3, 5))).backward()
        step_(interface, step)
    interface.settle()
    unitary, positive = scipy.linalg.polar(table.numpy())
    assert np.abs(interface.memory.detach().numpy() - unitary).max() < 1e-12
    assert np.abs(interface.transform().detach().numpy() - positive).max() < 1e-12


def test_a_step_in_float32_stays_orthonormal_where_t_is_badly_conditioned():
    memory = torch.from_numpy(random_orthonormal(5000, 160, seed=0))  # wide enough for a Gram matrix in bands
    scales = torch.logspace(0, 2, 160)
    interface = PITInterface(memory.clone(), torch.diag(scales.sqrt()), memory_kind="stiefel")
    interface.table = SteppedTable(interface)
    stepped = memory.double() * scales
    for number in range(3):
        step = 1e-3 * torch.randn(5000, 160, generator=torch.Generator().manual_seed(number))
        stepped += step.double()
        interface.logits(interface.embed(torch.arange(4))).sum().backward()
        step_(interface, step)
    interface.settle()
    found = interface.memory.detach()
    assert orthonormality_error(found.numpy()) < 2e-6
    table = found.double() @ interface.transform().detach().double()
    assert float((table - stepped).abs().max()) < 1e-5
    assert interface.interface_error() < 1e-5


def test_a_step_far_past_small_directions_of_the_table_is_settled_twice():
    """The step is a hundred times the least singular value, so the first Gram matrix is of little use in float32."""
    memory = torch.from_numpy(random_orthonormal(2000, 32, seed=0))
    scales = torch.logspace(-4, 0, 32) * 4
    interface = PITInterface(memory.clone(), torch.diag(scales.sqrt()), memory_kind="stiefel")
    interface.table = SteppedTable(interface)
    interface.logits(interface.embed(torch.arange(4))).sum().backward()
    step_(interface, 1e-2 * torch.randn(2000, 32, generator=torch.Generator().manual_seed(0)).sign())
    interface.settle()
    assert orthonormality_error(interface.memory.detach().numpy()) < 2e-6
    assert interface.interface_error() < 1e-5


@pytest.mark.parametrize("broken", ["nan", "rank", "interrupt"])
def test_a_step_that_fails_can_be_taken_back(monkeypatch, broken):
    interface = interface_of_table(torch.eye(40, 5, dtype=torch.float64))
    before = interface.logits(torch.eye(5, dtype=torch.float64)).detach().clone()
    some_loss(interface.embed(IDS), interface.logits(random(2, 3, 5))).backward()
    step = torch.zeros(40, 5, dtype=torch.float64)
    step[2, 2] = float("nan") if broken == "nan" else -1

    def interrupted(*_):
        raise KeyboardInterrupt

    if broken == "interrupt":
        monkeypatch.setattr("pit_deploy.training.table_step.gram_of", interrupted)
    with pytest.raises((ValueError, KeyboardInterrupt)):
        step_(interface, step)
    monkeypatch.undo()
    interface.table.abandon_()
    interface.settle()
    after = interface.logits(torch.eye(5, dtype=torch.float64)).detach()
    assert float((after - before).abs().max()) < 1e-12 and interface.interface_error() < 1e-12


def test_the_norm_that_clips_is_of_the_gradients_by_z_and_l_and_the_bridge():
    table, states, bridge = random(40, 5), random(2, 3, 5, seed=3), random(5, 5, seed=8)
    interface = interface_of_table(table, bridge)
    some_loss(interface.embed(IDS), interface.logits(states)).backward()
    step_(interface, 0.1 * random(40, 5, seed=4))
    interface.bridge.grad = interface.memory.grad = None
    some_loss(interface.embed(IDS), interface.logits(states)).backward()
    memory, transform = factors_of(table + 0.1 * random(40, 5, seed=4))
    apart = PITInterface(memory, torch.linalg.cholesky(transform), bridge, memory_kind="stiefel")
    some_loss(apart.embed(IDS), apart.logits(states)).backward()
    expected = torch.nn.utils.clip_grad_norm_(apart.parameters(), 1e-2)
    assert float(interface.table.clip_(1e-2)) == pytest.approx(float(expected), rel=1e-12)
    assert float((interface.bridge.grad - apart.bridge.grad).abs().max()) < 1e-15
    assert float(interface.table.clip_(1.0)) == pytest.approx(1e-2, rel=1e-3)


def test_tables_without_full_rank_or_finite_numbers_are_refused():
    def stepped_by(step):
        interface = interface_of_table(torch.eye(40, 5, dtype=torch.float64))
        some_loss(interface.embed(IDS), interface.logits(random(2, 3, 5))).backward()
        step_(interface, step)

    gone = torch.zeros(40, 5, dtype=torch.float64)
    gone[2, 2] = -1
    with pytest.raises(ValueError, match="linearly dependent"):
        stepped_by(gone)
    for spoilt in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="memory holds values that are not finite"):
            stepped_by(gone * spoilt)
        interface = interface_of_table(random(40, 5))
        (interface.logits(interface.embed(IDS)) * spoilt).sum().backward()
        with pytest.raises(ValueError, match="the gradient holds"):
            interface.table.begin_()
        with torch.no_grad():
            interface.raw_cholesky.fill_(spoilt)
        with pytest.raises(ValueError, match="L holds"):
            SteppedTable(interface)


def test_what_reads_an_interface_in_training_finds_z_and_t():
    interface = interface_of_table(random(40, 5))
    step = 0.1 * random(40, 5, seed=4)
    some_loss(interface.embed(IDS), interface.logits(random(2, 3, 5))).backward()
    step_(interface, step)
    unitary, positive = scipy.linalg.polar((random(40, 5) + step).numpy())
    expected = np.linalg.inv(positive)
    state = interface.state_dict()
    assert np.abs(state["memory"].numpy() - unitary).max() < 1e-12
    step_of_rows = interface.embed(torch.arange(40)).detach().numpy()
    assert np.abs(step_of_rows - unitary @ expected).max() < 1e-12
    interface.memory.grad = None
    some_loss(interface.embed(IDS), interface.logits(random(2, 3, 5))).backward()
    step_(interface, -step)
    some_loss(interface.embed(IDS), interface.logits(random(2, 3, 5))).backward()
    with pytest.raises(PitDeployError, match="within a training step"):
        interface.state_dict()
    interface.table.begin_()
    interface.table.abandon_()
    with interface.precise():
        assert float((interface.logits(torch.eye(5)).detach().T - random(40, 5)).abs().max()) < 1e-12
    assert interface.interface_error() < 1e-12


def test_diagnostics_are_of_z_and_t_in_mid_training():
    interface = interface_of_table(random(40, 5))
    diagnostics = Diagnostics(None)  # type: ignore[arg-type]
    diagnostics.measure(interface)
    some_loss(interface.embed(IDS), interface.logits(random(2, 3, 5))).backward()
    step_(interface, 0.1 * random(40, 5, seed=4))
    figures = diagnostics.measure(interface)
    singular = np.linalg.svd((random(40, 5) + 0.1 * random(40, 5, seed=4)).numpy(), compute_uv=False)
    assert figures["orthonormality_error"] < 1e-12
    assert figures["condition"] == pytest.approx(singular[0] / singular[-1], rel=1e-9)


class StepByAutograd(TrainerCallback):
    """The same step written another way: derivatives of the polar factors by autograd, the factors by scipy."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        interface = model.pit
        self.table = (interface.memory @ interface.transform()).detach()
        by_raw = interface.raw_cholesky.grad
        slope = torch.autograd.functional.jacobian(
            lambda raw: raw_to_cholesky(torch.diag(raw), interface.cholesky_anchor).diagonal(),
            interface.raw_cholesky.detach().diagonal(),
        ).diagonal()
        by_lower = torch.tril(by_raw, -1) + torch.diag(by_raw.diagonal() / slope)
        table = self.table.clone().requires_grad_()
        memory, transform = factors_of(table)
        factors = (memory, torch.linalg.cholesky(transform))
        (interface.memory.grad,) = torch.autograd.grad(factors, table, (interface.memory.grad, by_lower))
        interface.memory.detach().zero_()

    def on_optimizer_step(self, args, state, control, model=None, **kwargs):
        unitary, positive = scipy.linalg.polar((self.table + model.pit.memory.detach()).numpy())
        with torch.no_grad():
            model.pit.memory.copy_(torch.from_numpy(unitary))
            raw, anchor = cholesky_to_raw(torch.linalg.cholesky(torch.from_numpy(positive)))
            model.pit.raw_cholesky.copy_(raw)
            model.pit.cholesky_anchor.copy_(anchor)


def in_float64(model, monkeypatch):
    """`model` without the casts to float32 that transformers makes in its norms and its loss."""
    monkeypatch.setattr(
        LlamaRMSNorm,
        "forward",
        lambda self, x: F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon),
    )

    def loss(logits, labels, vocab_size, num_items_in_batch=None, **kwargs):
        losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
        return losses.mean() if num_items_in_batch is None else losses.sum() / num_items_in_batch

    model.double().backbone.loss_function = loss
    unitary, _ = scipy.linalg.polar(model.pit.memory.detach().numpy())
    model.pit.memory.detach().copy_(torch.from_numpy(unitary))  # orthonormal in float64 too
    return model


@pytest.mark.parametrize("bridge", ["matrix", "scalar"])
def test_steps_are_those_of_derivatives_through_the_polar_factors(tiny_pit, blocks, monkeypatch, bridge):
    """Accumulated batches, and clipping that takes hold."""
    options = TrainingOptions(steps=5, batch_size=2, accumulate=2, learning_rate=5e-3, max_grad_norm=0.2)
    models = [in_float64(tiny_pit(bridge=bridge), monkeypatch) for _ in range(2)]
    start = models[0].pit.memory.detach().clone()
    fit(models[0], blocks[:64], blocks[64:], options)
    monkeypatch.setattr(trainer_module, "StepTable", StepByAutograd)
    monkeypatch.setattr(trainer_module, "trained_as_table", lambda interface: contextlib.nullcontext())
    fit(models[1], blocks[:64], blocks[64:], options)
    for (name, one), (_, other) in zip(*(m.state_dict().items() for m in models), strict=True):
        if "raw_cholesky" not in name:
            assert float((one - other).abs().max()) < 1e-10, name
    transforms = [m.pit.transform().detach() for m in models]
    assert float((transforms[0] - transforms[1]).abs().max()) < 1e-10
    assert float((models[0].pit.memory.detach() - start).abs().max()) > 1e-3


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
