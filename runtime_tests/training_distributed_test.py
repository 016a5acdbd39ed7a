"""Training on two processes over gloo, against one: the same losses, and the manifold's steps on spread rows."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TEXT = (
    "The quick brown fox jumps over the lazy dog, and nobody knows why it does that again and again.\n" * 60
)
COMMAND = ["train", "--steps", "6", "--block-length", "32", "--learning-rate", "2e-3", "--eval-every", "2"]

MANIFOLD = """
import os, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from pit_deploy.interface import PITInterface
from pit_deploy.training.stiefel import orthogonalized, orthonormality_error, project_to_tangent_, retract_
from pit_deploy.training.table_step import SteppedTable
dist.init_process_group("gloo")
rank, count = dist.get_rank(), dist.get_world_size()
generator = torch.Generator().manual_seed(0)
table, gradient = (torch.randn(101, 7, generator=generator, dtype=torch.float64) for _ in range(2))
whole = retract_(table.clone())
tangent = project_to_tangent_(gradient.clone(), whole)
direction = orthogonalized(gradient)
own = slice(0, 40) if rank == 0 else slice(40, 101)  # unequal parts
group = dist.group.WORLD
part = retract_(table[own].clone(), group)
assert (part - whole[own]).abs().max() < 1e-12
assert (project_to_tangent_(gradient[own].clone(), whole[own], group) - tangent[own]).abs().max() < 1e-12
assert (orthogonalized(gradient[own], group) - direction[own]).abs().max() < 1e-12
assert orthonormality_error(part, group) < 1e-12
cholesky = torch.linalg.cholesky(torch.eye(7, dtype=torch.float64) + 0.1)
ids, states = torch.tensor([[0, 50, 100], [3, 3, 51]]), torch.randn(2, 3, 7, generator=generator, dtype=torch.float64)

def backward(numbers):
    # An interface in table form, with the gradients of some sequences' mean loss.
    interface = PITInterface(whole.clone(), cholesky, memory_kind="stiefel")
    interface.table = SteppedTable(interface)
    embedding, logits = interface.embed(ids[numbers]), interface.logits(states[numbers])
    (((embedding * states[numbers]).sin().sum() + logits.cos().sum()) / len(numbers)).backward()
    return interface

@torch.no_grad()
def step(interface, change):
    norm = interface.table.clip_(0.1)
    interface.table.begin_()
    interface.memory.copy_(change)
    interface.table.end_()
    interface.settle()
    return norm

one, two = backward([0, 1]), backward([rank])
mesh = init_device_mesh("cpu", (2,))
rows = two.memory.grad
dist.all_reduce(rows)
spread = distribute_tensor(two.memory.detach(), mesh, [Shard(0)])
two.memory = torch.nn.Parameter(spread)
two.memory.grad = distribute_tensor(rows / 2, mesh, [Shard(0)])
norms = step(one, 0.1 * table), step(two, distribute_tensor(0.1 * table, mesh, [Shard(0)]))
assert abs(norms[0] - norms[1]) < 1e-12 and norms[0] > 0.1
assert (two.memory.grad.full_tensor() - one.memory.grad).abs().max() < 1e-12
assert (two.memory.full_tensor() - one.memory).abs().max() < 1e-12
assert (two.cholesky - one.cholesky).abs().max() < 1e-12
del group, part, mesh, spread, two, one  # whoever still holds the group keeps its threads alive
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # gloo's threads may want Python's lock while the interpreter shuts down, which aborts a good run
"""


@pytest.fixture(scope="module")
def pit(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    from pit_deploy.conversion import convert

    folder = tmp_path_factory.mktemp("training")
    (folder / "text.txt").write_text(TEXT)
    convert(make_checkpoint(), folder / "pit", check=False)
    return folder / "pit"


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}


def on_two(*arguments: str) -> None:
    """Run a module or a script as two processes of torchrun."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(port),
    ]
    done = subprocess.run(
        [*launcher, *arguments], env=environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def losses(folder: Path) -> list[tuple[int, str, float]]:
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [(r["step"], k, r[k]) for r in records for k in ("loss", "eval_loss") if k in r]


def test_the_manifold_in_two_parts(tmp_path: Path) -> None:
    script = tmp_path / "manifold.py"
    script.write_text(MANIFOLD)
    on_two(str(script))


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_train_as_one(pit: Path, tmp_path: Path, kind: str) -> None:
    from pit_deploy.checkpoint import open_checkpoint
    from pit_deploy.initialize import orthonormality_error
    from pit_deploy.training.run import train

    text = pit.with_name("text.txt")
    # The bridge is annealed on the way: it too is spread over processes under FSDP2.
    options: dict[str, Any] = dict(
        anneal_bridge=4, steps=6, block_length=32, learning_rate=2e-3, eval_every=2, eval_share=0.1
    )
    train(pit, tmp_path / "one", text=[text], batch_size=8, **options)
    arguments = [*COMMAND, str(pit), str(tmp_path / "two"), "--text", str(text), "--batch-size", "4"]
    more = [
        "--eval-share",
        "0.1",
        "--save-every",
        "3",
        "--anneal-bridge",
        "4",
        *(["--fsdp"] if kind == "fsdp" else []),
    ]
    on_two("-m", "pit_deploy.cli", "--debug", *arguments, *more)
    expected, found = losses(tmp_path / "one.run"), losses(tmp_path / "two.run")
    assert [x[:2] for x in found] == [x[:2] for x in expected]
    for (_, _, one), (_, _, two) in zip(expected, found, strict=True):
        assert two == pytest.approx(one, abs=1e-4)
    first, second = (open_checkpoint(tmp_path / name) for name in ("one", "two"))
    assert orthonormality_error(second.read("pit.memory")) < 1e-5
    assert set(first.tensors) == set(second.tensors)
    assert abs(first.read("pit.memory") - second.read("pit.memory")).max() < 1e-4
    assert (tmp_path / "two.run" / "checkpoint-6" / "config.json").is_file()

    # From the checkpoint before: the same once more.
    shutil.rmtree(tmp_path / "two.run" / "checkpoint-6")
    on_two("-m", "pit_deploy.cli", "--debug", *arguments, *more, "--resume")
    assert losses(tmp_path / "two.run") == found


def test_a_killed_run_goes_on_as_if_nothing_had_happened(pit: Path, tmp_path: Path) -> None:
    text = pit.with_name("text.txt")
    base = [
        sys.executable,
        "-m",
        "pit_deploy.cli",
        *COMMAND,
        "--text",
        str(text),
        "--save-every",
        "2",
        str(pit),
    ]
    base[base.index("6")] = "40"
    out, run = tmp_path / "out", tmp_path / "out.run"
    process = subprocess.Popen([*base, str(out)], env=environment(), stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 240
    while not (run / "checkpoint-6").is_dir() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.returncode == -signal.SIGKILL, "the run ended before it was killed"
    assert not out.exists()
    for command in ([*base, str(out), "--resume"], [*base, str(tmp_path / "whole")]):
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
    assert losses(run) == losses(tmp_path / "whole.run")
    weights = [(folder / "model.safetensors").read_bytes() for folder in (out, tmp_path / "whole")]
    assert weights[0] == weights[1]
