"""From the bridge of a converted model to one number, along a geodesic, while the model trains.

`B(t) = c^t P^(1-t) Q^(1-t)` for `B = P Q`, P symmetric positive definite, Q a rotation (I for the bridge of a
tied source), and `c` the geometric mean of P's eigenvalues. At t = 1 only `c` is left, an embedding multiplier,
and the interface is the paper's. Most of the loss comes near the end of the path, so the pace falls on the way:
`t = 1 - (1 - s)²` for the share s of the steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from pit_deploy.errors import InputError
from pit_deploy.training.optimizers import interface_of, whole

_TURN = 1e-6
"""A rotation nearer to I than this is rounding."""


class Geodesic:
    """The path from `bridge` [d, d] to `multiplier` times I.

    Raises `InputError` where no path leads there: a singular bridge, or one that mirrors a direction.
    """

    def __init__(self, bridge: np.ndarray) -> None:
        left, singular, right = np.linalg.svd(bridge.astype(np.float64))
        if not singular[-1] > 1e-12 * singular[0]:
            raise InputError(
                f"the bridge is singular (singular values {singular[-1]:.3g} to {singular[0]:.3g}) and cannot be "
                f"annealed; train with the bridge kept."
            )
        self._vectors, self._logs = left, np.log(singular)
        self.multiplier = float(np.exp(self._logs.mean()))
        self._rotation = left @ right
        self._turns = np.abs(self._rotation - np.eye(len(bridge))).max() > _TURN
        if self._turns:
            phases, self._axes = np.linalg.eig(self._rotation)
            self._angles = np.angle(phases)
            if np.abs(self._angles).max() > np.pi - 1e-3:
                raise InputError(
                    "the bridge mirrors a direction, so no path of rotations leads from it to a multiple of I; "
                    "train with the bridge kept, or convert with --strict."
                )
            self._inverse_axes = np.linalg.inv(self._axes)

    def at(self, t: float) -> np.ndarray:
        """`B(t)` [d, d], float64, t from 0 to 1."""
        logs = t * np.log(self.multiplier) + (1 - t) * self._logs
        matrix = (self._vectors * np.exp(logs)) @ self._vectors.T
        if not self._turns:
            return np.asarray((matrix + matrix.T) / 2)
        turn = (self._axes * np.exp(1j * (1 - t) * self._angles)) @ self._inverse_axes
        return np.asarray(matrix @ turn.real)


class AnnealBridge(TrainerCallback):
    """Sets the bridge before every step; from step `steps` on it is a multiple of I."""

    def __init__(self, model: Any, steps: int) -> None:
        interface = interface_of(model)
        if interface is None or interface.bridge is None:
            kind = "none" if interface is None else interface.bridge_kind
            raise InputError(
                f"--anneal-bridge needs a matrix bridge and the checkpoint's bridge is {kind}; leave the option out."
            )
        interface.bridge.requires_grad_(False)
        self.steps = steps
        self.path = Geodesic(interface.bridge.detach().double().cpu().numpy())

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.set_bridge(model, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.set_bridge(model, state.global_step)  # what is evaluated or saved now is the bridge of this step

    @torch.no_grad()
    def set_bridge(self, model: Any, step: int) -> None:
        bridge = interface_of(model).bridge
        if bridge is None:
            return
        left = 1 - min(1.0, step / self.steps)
        value = torch.from_numpy(self.path.at(1 - left**2)).to(bridge.dtype)
        copy_(bridge, value)

    def finish(self, model: Any) -> None:
        """Put the number in the matrix's place. Call it when training is over and annealing is complete."""
        interface = interface_of(model)
        interface.bridge = None
        interface.embedding_multiplier = torch.tensor(
            self.path.multiplier, dtype=interface.memory.dtype, device=interface.memory.device
        )


@torch.no_grad()
def copy_(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a whole tensor into `target`, of which each process may hold a part."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    value = value.to(target.device)
    if isinstance(target, DTensor):
        target.copy_(distribute_tensor(value, target.device_mesh, target.placements))
    else:
        target.copy_(value)


__all__ = ["AnnealBridge", "Geodesic", "copy_", "whole"]
