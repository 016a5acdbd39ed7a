"""What a training step costs with PIT and without: `python -m pit_deploy.training.study.overhead PLAIN PIT`.

Each model is trained for a few steps in a process of its own; compared are CPU seconds a step (medians, so that other
programs on the machine count little) and the largest resident memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from transformers import TrainerCallback


class CpuSeconds(TrainerCallback):
    """CPU seconds of each step, between its begin and its end."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._start = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds.append(time.process_time() - self._start)


def measure(path: str, tokens: int, block: int, steps: int, accumulate: int) -> dict[str, Any]:
    """Train the checkpoint at `path`, plain or PIT, on random tokens; `accumulate` micro-batches make a step."""
    import torch

    from pit_deploy.checkpoint import open_checkpoint
    from pit_deploy.model import PITForCausalLM
    from pit_deploy.training.options import TrainingOptions
    from pit_deploy.training.trainer import fit

    checkpoint = open_checkpoint(path)
    model: Any
    if checkpoint.kind == "pit":
        model = PITForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    else:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    blocks = np.random.default_rng(0).integers(0, checkpoint.table_rows, (steps * tokens // block, block))
    clock = CpuSeconds()
    options = TrainingOptions(
        steps=steps, batch_size=tokens // block // accumulate, accumulate=accumulate, learning_rate=1e-5
    )
    fit(model, blocks.astype(np.int32), blocks[:0], options, callbacks=[clock])
    return {
        "kind": checkpoint.kind,
        "cpu_seconds_per_step": statistics.median(clock.seconds[1:]),
        "all": clock.seconds,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoints", nargs="+", type=Path, help="a plain checkpoint and its PIT form")
    parser.add_argument("--tokens", type=int, default=1024, help="of one step")
    parser.add_argument("--block", type=int, default=256)
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of one step")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        sizes = (arguments.tokens, arguments.block, arguments.steps, arguments.accumulate)
        print(json.dumps(measure(str(arguments.checkpoints[0]), *sizes)))
        return
    rows = []
    for path in arguments.checkpoints:
        given = [f"--{k}={getattr(arguments, k)}" for k in ("tokens", "block", "steps", "accumulate")]
        command = [sys.executable, "-m", __spec__.name, str(path), *given, "--child"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    first, last = rows[0], rows[-1]
    ratio = last["cpu_seconds_per_step"] / first["cpu_seconds_per_step"]
    print(
        json.dumps(
            {"rows": rows, "time_ratio": ratio, "memory_ratio": last["peak_bytes"] / first["peak_bytes"]}
        )
    )


if __name__ == "__main__":
    main()
