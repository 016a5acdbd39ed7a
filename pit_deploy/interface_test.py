from __future__ import annotations

import numpy as np
import pytest
import torch

from pit_deploy.initialize import random_orthonormal
from pit_deploy.interface import PITInterface, cholesky_to_raw, interface_error_of, raw_to_cholesky


def _cholesky(columns: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    square = torch.randn(columns, columns, generator=generator, dtype=torch.float64)
    return torch.linalg.cholesky(square @ square.T / columns + 0.3 * torch.eye(columns, dtype=torch.float64))


def _interface(
    rows: int = 41, columns: int = 7, bridge: str = "none", dtype: torch.dtype = torch.float64
) -> PITInterface:
    memory = torch.from_numpy(random_orthonormal(rows, columns, dtype=np.float64)).to(dtype)
    generator = torch.Generator().manual_seed(5)
    square = torch.randn(columns, columns, generator=generator, dtype=torch.float64)
    bridges = {"none": None, "scalar": 3.5, "matrix": square.to(dtype)}
    return PITInterface(memory, _cholesky(columns).to(dtype), bridges[bridge], memory_kind="stiefel")


def _tables(interface: PITInterface) -> tuple[np.ndarray, np.ndarray]:
    """`W = Z T` and `E = Z T⁻¹` from a dense inverse."""
    memory, cholesky = interface.memory.detach().numpy(), interface.cholesky.detach().numpy()
    transform = cholesky @ cholesky.T
    return memory @ transform, memory @ np.linalg.inv(transform)


@pytest.mark.parametrize(("rows", "columns"), [(41, 7), (7, 7), (263, 24)])
def test_the_invariant(rows: int, columns: int) -> None:
    interface = _interface(rows, columns)
    ids, states = torch.arange(rows), torch.eye(columns, dtype=torch.float64)
    embedding = interface.embed(ids).detach().numpy()
    head = interface.logits(states).detach().numpy().T
    dense_head, dense_embedding = _tables(interface)
    assert np.allclose(head, dense_head, atol=1e-12)
    assert np.allclose(embedding, dense_embedding, atol=1e-12)
    assert np.allclose(interface.memory.detach().T @ interface.memory.detach(), np.eye(columns), atol=1e-12)
    assert np.allclose(head.T @ embedding, np.eye(columns), atol=1e-11)
    assert np.allclose(np.linalg.pinv(head), embedding.T, atol=1e-11)
    assert interface.interface_error() < 1e-12


def test_the_order_of_the_solves_matters() -> None:
    interface = _interface()
    rows, cholesky = interface.memory.detach(), interface.cholesky.detach()
    half = torch.linalg.solve_triangular(cholesky, rows, upper=False, left=False)
    wrong = torch.linalg.solve_triangular(cholesky.T, half, upper=True, left=False)
    right = torch.cholesky_solve(rows.T, cholesky).T
    assert torch.allclose(interface.embed(torch.arange(41)), right, atol=1e-12)
    assert (wrong - right).abs().max() > 1e-2


@pytest.mark.parametrize("bridge", ["none", "scalar", "matrix"])
def test_bridges(bridge: str) -> None:
    interface = _interface(bridge=bridge)
    _, embedding = _tables(interface)
    expected = {
        "none": lambda: embedding,
        "scalar": lambda: 3.5 * embedding,
        "matrix": lambda: embedding @ interface.bridge.detach().numpy(),  # type: ignore[union-attr]
    }[bridge]()
    ids = torch.tensor([[3, 40, 0], [3, 3, 11]])
    found = interface.embed(ids)
    assert found.shape == (2, 3, 7)
    assert np.allclose(found.detach().numpy(), expected[ids.numpy()], atol=1e-12)
    assert interface.bridge_kind == bridge
    assert interface.interface_error() < 1e-12, "the figure is of Z and T alone"


def test_gradients() -> None:
    """Finite differences through embedding, logits and the parametrisation of L, in float64."""
    interface = _interface(11, 4, "matrix")
    ids, states = torch.tensor([2, 9, 2]), torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    anchor = interface.cholesky_anchor

    def outputs(
        memory: torch.Tensor, raw: torch.Tensor, bridge: torch.Tensor, states: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        parameters = {"memory": memory, "raw_cholesky": raw, "bridge": bridge, "cholesky_anchor": anchor}
        call = torch.func.functional_call
        embedded = call(_Embed(interface), {f"interface.{k}": v for k, v in parameters.items()}, (ids,))
        logits = call(_Logits(interface), {f"interface.{k}": v for k, v in parameters.items()}, (states,))
        return embedded, logits

    raw = interface.raw_cholesky.detach() + 0.1
    inputs = [interface.memory.detach(), raw, interface.bridge.detach(), states]  # type: ignore[union-attr]
    assert torch.autograd.gradcheck(outputs, [t.clone().requires_grad_() for t in inputs])


class _Embed(torch.nn.Module):
    def __init__(self, interface: PITInterface) -> None:
        super().__init__()
        self.interface = interface

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.interface.embed(ids)


class _Logits(_Embed):
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.interface.logits(states)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_parametrisation_gives_back_what_was_loaded(dtype: torch.dtype) -> None:
    cholesky = _cholesky(37).to(dtype)
    cholesky[0, 0], cholesky[5, 5] = 1e-6, 3e4
    raw, anchor = cholesky_to_raw(cholesky)
    assert torch.equal(raw_to_cholesky(raw, anchor), cholesky)


@pytest.mark.parametrize("step", [-50.0, -5.0, -0.01, 0.01, 5.0, 50.0])
def test_the_diagonal_is_a_softplus(step: float) -> None:
    anchor = torch.tensor([1e-3, 1.0, 50.0], dtype=torch.float64)
    diagonal = torch.diagonal(raw_to_cholesky(step * torch.eye(3, dtype=torch.float64), anchor)).numpy()
    expected = np.log1p(np.exp(np.log(np.expm1(anchor.numpy())) + step))
    assert np.allclose(diagonal, expected, rtol=1e-10)
    assert (diagonal > 0).all()


def test_illegal_parts_are_refused() -> None:
    memory, cholesky = torch.eye(5, 3), torch.eye(3)
    for broken, message in (
        (cholesky * 0, "positive"),
        (torch.ones(3, 3), "lower triangular"),
        (torch.eye(4), "expected"),
    ):
        with pytest.raises(ValueError, match=message):
            PITInterface(memory, broken)
    for bridge in (torch.eye(4), torch.ones(3)):
        with pytest.raises(ValueError, match="bridge is"):
            PITInterface(memory, cholesky, bridge)
    with pytest.raises(ValueError, match="frozen"):
        PITInterface(memory, cholesky, memory_kind="thawed")


def test_float32_interface_error_is_rounding_only() -> None:
    assert _interface(999, 48, dtype=torch.float32).interface_error() < 1e-5
    tied = torch.full((4, 4), 3.0)
    assert interface_error_of(tied.T @ tied) == pytest.approx(
        np.linalg.norm(np.full((4, 4), 36.0) - np.eye(4)) / 2
    )


def test_precise_mode_halves_nothing_but_the_rounding() -> None:
    exact = _interface(200, 24)
    rounded = _interface(200, 24, dtype=torch.float32)
    reference = PITInterface(rounded.memory.double(), rounded.cholesky.detach().double())
    ids = torch.arange(200)
    with rounded.precise():
        precise = rounded.embed(ids)
    assert precise.dtype == torch.float32
    error = (precise - reference.embed(ids)).abs().max()
    assert error < 1e-6 < (rounded.embed(ids) - exact.embed(ids)).abs().max() + 1e-6
    assert torch.equal(rounded.embed(ids), rounded.embed(ids)), "the mode ends with the block"


def test_it_stays_float32_under_casts_and_autocast() -> None:
    interface = _interface(dtype=torch.float32, bridge="scalar")
    before = interface.embed(torch.arange(9))
    interface.to(torch.bfloat16)
    interface.half()
    assert {t.dtype for t in interface.state_dict().values()} == {torch.float32}
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(interface.embed(torch.arange(9)), before)
        assert interface.logits(before).dtype == torch.float32
    assert {t.dtype for t in interface.double().state_dict().values()} == {torch.float64}
    assert {t.dtype for t in interface.float().state_dict().values()} == {torch.float32}
    assert torch.equal(interface.embed(torch.arange(9)), before)


def test_a_step_moves_the_memory_only_if_it_is_trained() -> None:
    for kind in ("frozen", "stiefel"):
        interface = PITInterface(torch.from_numpy(random_orthonormal(30, 5)), torch.eye(5), memory_kind=kind)
        before = {k: v.clone() for k, v in interface.state_dict().items()}
        optimizer = torch.optim.SGD([p for p in interface.parameters() if p.requires_grad], 0.1)
        embedded = interface.embed(torch.tensor([1, 2]))
        (interface.logits(torch.ones(5)).square().sum() + embedded.square().sum()).backward()
        optimizer.step()
        moved = {k for k, v in interface.state_dict().items() if not torch.equal(v, before[k])}
        assert moved == ({"raw_cholesky"} if kind == "frozen" else {"raw_cholesky", "memory"})
