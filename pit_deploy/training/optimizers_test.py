import copy

import pytest
import torch

from pit_deploy.training.optimizers import PITOptimizer, parameter_groups
from pit_deploy.training.stiefel import orthonormality_error, retract_


def groups_of(model, **changes):
    settings = dict(learning_rate=1e-3, interface_rate=2e-3, weight_decay=0.1, optimizer="adamw")
    return {g["name"]: g for g in parameter_groups(model, **{**settings, **changes})}


def test_every_trained_parameter_is_in_one_group(tiny_pit):
    model = tiny_pit()
    groups = groups_of(model)
    assert set(groups) == {"matrices", "vectors", "memory", "transform", "bridge"}
    members = [id(p) for g in groups.values() for p in g["params"]]
    assert sorted(members) == sorted(id(p) for p in model.parameters())
    assert {n for n, g in groups.items() if g["weight_decay"]} == {"matrices"}
    assert "memory" not in groups_of(tiny_pit(memory="frozen"))


def test_a_plain_model_has_its_table_at_the_interface_rate(tiny):
    groups = groups_of(tiny())
    assert set(groups) == {"matrices", "vectors", "table"}
    assert groups["table"]["lr"] == 2e-3 and len(groups["table"]["params"]) == 1


def test_a_step_of_the_memory_moves_the_head_as_a_table_would_move(tiny_pit):
    model = tiny_pit()
    rate = groups_of(model)["memory"]["lr"]
    # A step of AdamW at its start has the size of its rate in every entry, with the gradient's sign.
    signs = torch.randn(model.pit.memory.shape, generator=torch.Generator().manual_seed(0)).sign()
    moved = rate * signs @ model.pit.transform().detach()
    assert float(moved.square().mean().sqrt()) == pytest.approx(2e-3, rel=0.15)


def test_adamw_groups_move_as_torchs_adamw(tiny_pit):
    model, twin = tiny_pit(), tiny_pit()
    model.pit.raw_cholesky.requires_grad_(False)  # moved by its direction, see below
    twin.pit.raw_cholesky.requires_grad_(False)
    ours = PITOptimizer(list(groups_of(model).values()), lr=1e-3)
    own = [
        {k: v for k, v in g.items() if k in ("params", "lr", "weight_decay")}
        for g in groups_of(twin).values()
    ]
    theirs = torch.optim.AdamW(own, betas=(0.9, 0.95))
    ids = torch.arange(12)[None]
    for _ in range(3):
        for m, optimizer in ((model, ours), (twin, theirs)):
            optimizer.zero_grad()
            m(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_transform_moves_along_its_gradient_by_a_fixed_length(tiny_pit):
    model = tiny_pit()
    group = groups_of(model, transform_rate=0.03)["transform"]
    optimizer = PITOptimizer([group], lr=1e-3)
    before = model.pit.raw_cholesky.detach().clone()
    size = float(torch.linalg.matrix_norm(model.pit.cholesky.detach())) / 24**0.5
    ids = torch.arange(12)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    step = model.pit.raw_cholesky.detach() - before
    assert float(step.norm()) == pytest.approx(0.03 * size, rel=1e-4)
    gradient = model.pit.raw_cholesky.grad
    assert torch.allclose(step / step.norm(), -gradient / gradient.norm(), atol=1e-6)
    # By itself the length follows from the interface's rate, the table's entries and L.
    entry = float(torch.linalg.matrix_norm(model.pit.transform().detach())) / (24 * 263) ** 0.5
    derived = groups_of(tiny_pit())["transform"]["lr"]
    assert derived == pytest.approx(0.1 * 2e-3 / entry * size, rel=1e-2)


def test_muon_steps_are_orthogonal_and_the_memory_stays_on_its_manifold(tiny_pit):
    model = tiny_pit()
    optimizer = PITOptimizer(list(groups_of(model, optimizer="muon", weight_decay=0.0).values()), lr=1e-3)
    before = copy.deepcopy(model)
    ids = torch.arange(12)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    name = "backbone.model.layers.0.mlp.up_proj.weight"
    step = (model.get_parameter(name) - before.get_parameter(name)).detach()
    singular = torch.linalg.svdvals(step) / (1e-3 * 0.2 * 40**0.5)
    # The gradient of twelve tokens has twelve directions at most, of very unequal size; the strong ones come out equal.
    assert float(singular.max()) < 1.3 and int((singular > 0.5).sum()) >= 8
    moved = (model.pit.memory - before.pit.memory).detach()
    assert float(moved.norm()) > 0
    retract_(model.pit.memory.data)
    assert orthonormality_error(model.pit.memory.detach()) < 1e-6


def test_the_state_survives_saving(tiny_pit):
    model = tiny_pit()
    ids = torch.arange(12)[None]

    def step(m, optimizer):
        optimizer.zero_grad()
        m(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    first = PITOptimizer(list(groups_of(model, optimizer="muon").values()), lr=1e-3)
    step(model, first)
    twin = copy.deepcopy(model)
    second = PITOptimizer(list(groups_of(twin, optimizer="muon").values()), lr=1e-3)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    step(model, first)
    step(twin, second)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)
