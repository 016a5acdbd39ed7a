"""Training on several processes: whole copies (DDP, which the trainer sets up), or weights spread by FSDP2.

Under FSDP2 each process keeps its rows of `Z` and their optimiser state; the whole of `Z` exists only while a step
runs forward and backward. Retraction and projection work on the rows (see `stiefel`).
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from pit_deploy.errors import InputError


def shard_(model: Any) -> Any:
    """Spread the weights of a `PITForCausalLM` over all processes by rows, in place, layer by layer.

    Raises `InputError` where no distributed launch is under way.
    """
    from accelerate import PartialState
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    on_gpu = torch.cuda.is_available()
    state = PartialState(**({} if on_gpu else {"cpu": True, "backend": "gloo"}))
    if not dist.is_initialized() or state.num_processes < 2:
        raise InputError(
            "--fsdp spreads a model over processes; start it with torchrun --nproc-per-node N -m pit_deploy.cli train."
        )
    mesh = init_device_mesh(state.device.type, (state.num_processes,))
    model.to(state.device)
    for layer in model.decoder.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def leave() -> None:
    """End this process's part in a distributed launch, after all others have come this far; else do nothing.

    What is left to the interpreter's end may abort there: gloo's threads then ask for a lock that is gone.
    """
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
        gc.collect()  # models and optimisers that nobody holds any more keep process groups alive
        dist.destroy_process_group()


def is_sharded(model: Any) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model, FSDPModule)


class Reshard(TrainerCallback):
    """An evaluation leaves whole weights behind; what comes next works on each process's own rows."""

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def save_optimizer_part(optimizer: Any, directory: Path) -> None:
    """Write the part of the optimiser's state that belongs to this process's rows."""
    state = optimizer.state_dict()
    parts = {
        number: {k: v.to_local() if isinstance(v, DTensor) else v for k, v in own.items()}
        for number, own in state["state"].items()
    }
    directory.mkdir(parents=True, exist_ok=True)
    torch.save({**state, "state": parts}, directory / _part_name())


def load_optimizer_part(optimizer: Any, directory: Path) -> None:
    """Read back what `save_optimizer_part` wrote. Raises `InputError` for a run on another number of processes."""
    file = directory / _part_name()
    if not file.is_file():
        raise InputError(f"{file} is missing; resume on as many processes as the run began on.")
    state = torch.load(file, map_location="cpu", weights_only=True)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, own in state["state"].items():
        parameter = parameters[number]
        for key, value in own.items():
            if isinstance(parameter, DTensor) and value.shape == parameter.to_local().shape and value.ndim:
                own[key] = DTensor.from_local(
                    value.to(parameter.device),
                    parameter.device_mesh,
                    parameter.placements,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
    optimizer.load_state_dict(state)


def _part_name() -> str:
    return f"optimizer-{dist.get_rank()}-of-{dist.get_world_size()}.pt"
