"""Gradients through the softplus diagonal, the Cholesky products and both solves, against finite differences."""

import numpy as np
import pytest
import torch

from pit_deploy.initialize import random_orthonormal
from pit_deploy.interface import PITInterface


@pytest.fixture
def interface() -> PITInterface:
    generator = torch.Generator().manual_seed(4)
    a = torch.randn(5, 12, generator=generator, dtype=torch.float64)
    cholesky = torch.linalg.cholesky(a @ a.T / 12 + 0.3 * torch.eye(5, dtype=torch.float64))
    bridge = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    memory = torch.from_numpy(random_orthonormal(17, 5, seed=0, dtype=np.float64))
    return PITInterface(memory, cholesky, bridge, memory_kind="stiefel")


class Call(torch.nn.Module):
    """One end of an interface as a function of its parameters."""

    def __init__(self, interface, end):
        super().__init__()
        self.interface, self.end = interface, end

    def forward(self, x):
        return getattr(self.interface, self.end)(x)


@pytest.mark.parametrize("end", ["embed", "logits"])
def test_the_gradient_of_every_parameter(interface, end):
    x = torch.tensor([[0, 3, 16], [3, 3, 1]]) if end == "embed" else torch.randn(2, 3, 5, dtype=torch.float64)
    call = Call(interface, end)
    names = [n for n, _ in call.named_parameters() if end == "embed" or "bridge" not in n]

    def function(*values):
        # Moving the diagonal off its anchor, so that the quotient of softplus is not taken at its start only.
        given = dict(zip(names, values, strict=True))
        return torch.func.functional_call(call, given, (x,))

    values = [dict(call.named_parameters())[n].detach().clone() for n in names]
    values[names.index("interface.raw_cholesky")].diagonal().add_(0.7)
    assert torch.autograd.gradcheck(function, [v.requires_grad_() for v in values], eps=1e-6, atol=1e-7)


def test_the_gradient_of_the_states(interface):
    states = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(interface.logits, (states,), eps=1e-6, atol=1e-8)


def test_the_solves_agree_with_a_dense_inverse_and_so_do_their_gradients(interface):
    ids = torch.arange(17)
    dense = interface.memory @ torch.linalg.inv(interface.transform()) @ interface.bridge
    weight = torch.randn(17, 5, dtype=torch.float64)
    parameters = (interface.memory, interface.raw_cholesky, interface.bridge)
    by_solves = torch.autograd.grad((interface.embed(ids) * weight).sum(), parameters)
    by_inverse = torch.autograd.grad((dense * weight).sum(), parameters)
    assert torch.allclose(interface.embed(ids), dense, atol=1e-12)
    for one, other in zip(by_solves, by_inverse, strict=True):
        assert torch.allclose(one, other, atol=1e-9)


def test_the_pseudo_inverse_of_the_head_is_the_embedding(interface):
    head = (interface.memory @ interface.transform()).detach().numpy()
    embedding = (interface.memory @ torch.linalg.inv(interface.transform())).detach().numpy()
    assert np.abs(np.linalg.pinv(head) - embedding.T).max() < 1e-12
