"""Run a .pte in ExecuTorch's torch-free runtime; needs NumPy and executorch-numpy-runtime alone.

    python executorch_numpy.py MODEL.pte IN.npz OUT.npz

IN has `ids` [tokens] and `lengths`: how many of them go into each pass. OUT has `logits`, the last row of each pass.
"""

import sys

import executorch_numpy_runtime
import numpy as np


def main(model: str, source: str, out: str) -> None:
    program = executorch_numpy_runtime.Runtime.get().load_program(model)
    method = program.load_method("forward")
    given = np.load(source)
    rows, start = [], 0
    for length in given["lengths"]:
        tokens = given["ids"][None, start : start + length].astype(np.int64)
        rows.append(np.asarray(method([tokens, np.array([start], np.int64)])[0])[0, -1])
        start += length
    np.savez(out, logits=np.stack(rows))


if __name__ == "__main__":
    main(*sys.argv[1:4])
