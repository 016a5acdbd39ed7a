"""Write a copy of a plain checkpoint whose matrices are pushed off their 4-bit source grid.

    python -m runtime_tests.off_grid SRC OUT [SEED]

The sample's weights come from a 4-bit file, so they lie on a grid that a quantiser may meet by luck. Quality is
judged off it as well: each matrix gets Gaussian noise of 0.2 times the 4-bit step, (max - min) / 15, of its
block of 32 columns.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from pit_deploy.checkpoint import open_checkpoint
from pit_deploy.files import atomic_output
from pit_deploy.folding import copy_companions
from pit_deploy.json_files import write_json
from pit_deploy.weight_files import write_safetensors

SHARE = 0.2
BLOCK = 32


def push_off_grid(weight: np.ndarray, generator: np.random.Generator, *, share: float = SHARE) -> np.ndarray:
    """`weight` [rows, columns] with the noise, float32; `columns` a multiple of 32, or one block a row."""
    rows, columns = weight.shape
    block = BLOCK if columns % BLOCK == 0 else columns
    blocked = weight.reshape(rows, -1, block)
    step = (blocked.max(-1, keepdims=True) - blocked.min(-1, keepdims=True)) / 15
    noise = generator.standard_normal(blocked.shape, dtype=np.float32)
    return (blocked + share * step * noise).reshape(rows, columns).astype(np.float32)


def write_off_grid(source: Path | str, out: Path | str, *, seed: int = 0) -> Path:
    """Write the checkpoint `out` in float32: the noise goes to every matrix, in the order of the names."""
    checkpoint = open_checkpoint(source)
    generator = np.random.Generator(np.random.PCG64(seed))

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name in sorted(checkpoint.tensors):
            value = checkpoint.read(name)
            yield name, torch.from_numpy(push_off_grid(value, generator) if value.ndim == 2 else value)

    try:
        with atomic_output(Path(out)) as partial:
            write_safetensors(partial, tensors())
            write_json(partial / "config.json", {**checkpoint.config, "dtype": "float32"})
            copy_companions(checkpoint.path, partial)
    finally:
        checkpoint.close()
    return Path(out)


if __name__ == "__main__":
    write_off_grid(sys.argv[1], sys.argv[2], seed=int(sys.argv[3]) if len(sys.argv) > 3 else 0)
