"""Which parameter moves how fast, and the two optimisers: AdamW, and Muon with AdamW for what is no matrix.

The rates of the interface are stated in terms of the table that it stands for, `W = Z T`.

Where `Z` and `T` are stepped together, as that table (`table_step`), the rate is the table's. Stepped apart, they need
rates of their own. Steps of AdamW have the size of the learning rate, whatever they change, and entries of the memory
are small (about `1/√V`), those of a token table are not: one number for both would move the memory many times too
fast. So

- `Z` gets `rate / σ`, σ the root mean square eigenvalue of `T`: then `W` moves as a table of its own would under
  AdamW with `rate`;
- `L` moves along its momentum by a fixed length, not entry by entry: few directions of `T` have to grow far, and
  equal steps of all `d²/2` entries would drown them. The length is a tenth of what `rate` is to the entries of
  `W` (root mean square), relative to one direction of `L`.

A matrix bridge `B` gets the backbone's rate times `c / √d`, c the geometric mean of its singular values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from pit_deploy.training.stiefel import local_rows, orthogonalized

OPTIMIZERS = ("adamw", "muon")
_MOMENTUM = 0.95
_TRANSFORM = 0.1
"""Length of a step of `L`, relative to what the interface's rate is to a table (see above). Measured in the study."""

_MATCH = 0.2
"""RMS of a usual AdamW step over its learning rate; Muon's steps are scaled to it (Moonlight, arXiv 2502.16982)."""

_QUINTIC = (3.4445, -4.7750, 2.0315)
"""Muon's Newton-Schulz coefficients: five rounds bring singular values into about 0.7 to 1.2."""


class PITOptimizer(torch.optim.AdamW):
    """AdamW for groups whose `method` is `adamw`, and methods with momentum for the others.

    `direction` steps along the momentum by the length `lr`. `muon` orthogonalises it, for matrices of the backbone;
    `stiefel` does so for the memory, whose gradient must be tangent already and which must be retracted after the
    step.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float) -> None:
        super().__init__(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, foreach=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        everything = self.param_groups
        self.param_groups = [group for group in everything if group["method"] == "adamw"]
        try:
            result = super().step(closure)
        finally:
            self.param_groups = everything
        for group in everything:
            if group["method"] == "adamw":
                continue
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._momentum_step(parameter, group)
        return result

    def _momentum_step(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        state["step"] = state.get("step", torch.zeros(())) + 1  # AdamW asks every state that it loads for it
        momentum = state.setdefault("momentum", torch.zeros_like(parameter))
        gradient = cast(torch.Tensor, parameter.grad)
        momentum.mul_(_MOMENTUM).add_(gradient)
        update = gradient + _MOMENTUM * momentum
        if group["method"] == "direction":
            length = torch.linalg.vector_norm(update)
            length = length.full_tensor() if isinstance(length, DTensor) else length
            parameter.add_(update / length.clamp(min=1e-30), alpha=-group["lr"])
            return
        if group["method"] == "stiefel":
            rows, _ = local_rows(parameter)
            local, process_group = local_rows(update)
            rows.add_(orthogonalized(local, process_group), alpha=-group["lr"])
            return
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        scale = _MATCH * max(parameter.shape) ** 0.5
        parameter.add_(_newton_schulz(update), alpha=-group["lr"] * scale)


def _newton_schulz(update: torch.Tensor) -> torch.Tensor:
    wide = update.shape[0] <= update.shape[1]
    x = update if wide else update.T
    x = x / (torch.linalg.matrix_norm(x) + 1e-7)
    a, b, c = _QUINTIC
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.T


def interface_of(model: nn.Module) -> Any:
    """The `PITInterface` inside `model`, also within an adapter or a distributed wrapper; None for a plain model."""
    from pit_deploy.interface import PITInterface

    return next((m for m in model.modules() if isinstance(m, PITInterface)), None)


def parameter_groups(
    model: nn.Module,
    *,
    learning_rate: float,
    interface_rate: float,
    weight_decay: float,
    transform_rate: float | None = None,
    optimizer: str = "adamw",
    as_table: bool = False,
) -> list[dict[str, Any]]:
    """Groups of everything that is trained, each with `name`, `lr`, `weight_decay` and `method`.

    `interface_rate` is in terms of a token table (see above); for a plain model it is the rate of its table.
    `transform_rate` is the length of a step of `L` relative to one direction of it (None: derived, see above). With
    `as_table` the memory's group is the table's, and `L` is in none: the split of the stepped table sets it.
    Weight decay is for matrices of the backbone, and for the table of a plain model.
    """
    interface = interface_of(model)
    table = None if interface is not None else cast(Any, model).get_input_embeddings().weight
    own = {} if interface is None else {id(p): name for name, p in interface.named_parameters()}
    parts: dict[str, list[nn.Parameter]] = {
        n: [] for n in ("matrices", "vectors", "table", "memory", "transform", "bridge")
    }
    names = {"memory": "memory", "raw_cholesky": "transform", "bridge": "bridge"}
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in own:
            parts[names[own[id(parameter)]]].append(parameter)
        elif parameter is table:
            parts["table"].append(parameter)
        else:
            parts["matrices" if parameter.ndim >= 2 else "vectors"].append(parameter)
    rates = dict.fromkeys(parts, learning_rate)
    rates["table"] = interface_rate
    if interface is not None:
        rates |= _interface_rates(interface, learning_rate, interface_rate, transform_rate, optimizer)
    methods = {**dict.fromkeys(parts, "adamw"), "transform": "direction"}
    if optimizer == "muon":
        methods |= {"matrices": "muon", "memory": "stiefel"}
    if as_table:
        parts["transform"] = []
        rates["memory"] = interface_rate
    decayed = ("matrices", "table")
    return [
        {
            "params": members,
            "name": name,
            "lr": rates[name],
            "weight_decay": weight_decay if name in decayed else 0.0,
            "method": methods[name],
        }
        for name, members in parts.items()
        if members
    ]


@torch.no_grad()
def _interface_rates(
    interface: Any, learning_rate: float, interface_rate: float, transform_rate: float | None, optimizer: str
) -> dict[str, float]:
    cholesky = whole_cholesky(interface).double()
    rows, size = interface.memory.shape
    scale = float(torch.linalg.matrix_norm(cholesky @ cholesky.T)) / size**0.5
    memory_rate = interface_rate / scale
    if optimizer == "muon":
        # A step of AdamW has entries of about 0.2 of its rate; an orthonormal table has entries of 1/√V.
        memory_rate *= _MATCH * rows**0.5
    entry = scale / rows**0.5  # root mean square of W
    relative = _TRANSFORM * interface_rate / entry if transform_rate is None else transform_rate
    direction = float(torch.linalg.matrix_norm(cholesky)) / size**0.5
    rates = {"memory": memory_rate, "transform": relative * direction}
    if interface.bridge is not None:
        mean = float(torch.linalg.svdvals(whole(interface.bridge).double()).log().mean().exp())
        rates["bridge"] = learning_rate * mean / size**0.5
    return rates


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, gathered where it is spread over processes."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def whole_cholesky(interface: Any) -> torch.Tensor:
    """`L` [d, d] of an interface whose parameters may be spread over processes."""
    from pit_deploy.interface import raw_to_cholesky

    return raw_to_cholesky(whole(interface.raw_cholesky.detach()), interface.cholesky_anchor)


@torch.no_grad()
def set_cholesky_(interface: Any, cholesky: torch.Tensor) -> None:
    """Make `cholesky` [d, d] the `L` of the interface; its raw form counts from it."""
    from pit_deploy.interface import cholesky_to_raw
    from pit_deploy.training.annealing import copy_

    raw, anchor = cholesky_to_raw(cholesky.to(interface.cholesky_anchor.dtype))
    copy_(interface.raw_cholesky, raw)
    interface.cholesky_anchor.copy_(anchor)
