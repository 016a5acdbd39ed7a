"""ExecuTorch in an ARM64 Python: opens one program and answers requests as the native runner does.

`arm64_executorch` starts it by its path, under the emulator. It imports nothing of pit-deploy, whose packages are not
there. A program without the operators of ExecuTorch's LLM extension runs in `executorch-numpy-runtime`, which needs no
torch; others need torch, and a minute to import it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

CUSTOM_OPERATORS = (
    "extension/llm/custom_ops/libcustom_ops_aot_lib.so",
    "kernels/quantized/libquantized_ops_aot_lib.so",
)
"""Kernels of the LLM extension and of quantised embeddings."""
Run = Callable[[Sequence[int], int], list[np.ndarray]]
"""Ids and the position of the first; the outputs of the program's `forward`."""


def numpy_program(path: str) -> Run:
    """A program in executorch-numpy-runtime."""
    from executorch_numpy_runtime import Runtime

    forward = Runtime.get().load_program(path).load_method("forward")

    def run(ids: Sequence[int], position: int) -> list[np.ndarray]:
        return list(forward([np.array([ids], np.int64), np.array([position], np.int64)]))

    return run


def torch_program(path: str, threads: int) -> Run:
    """A program in ExecuTorch's own Python runtime, with the operators of the LLM extension."""
    import torch
    from executorch.extension.pybindings import (
        _portable_lib as portable,
    )  # the package around it imports far more

    package = Path(portable.__file__).parents[2]
    for library in CUSTOM_OPERATORS:
        torch.ops.load_library(package / library)
    portable._unsafe_reset_threadpool(threads)
    module = portable._load_for_executorch(path)

    def run(ids: Sequence[int], position: int) -> list[np.ndarray]:
        outputs = module.run_method("forward", (torch.tensor([list(ids)]), torch.tensor([position])))
        return [output.numpy() for output in outputs]

    return run


class Worker:
    """Answers requests; each returns its own fields and arrays."""

    def __init__(self) -> None:
        self._run: Run | None = None
        self._position = 0

    def open(self, model: str, custom_operators: bool, threads: int) -> dict[str, np.ndarray]:
        self._run = torch_program(model, threads) if custom_operators else numpy_program(model)
        return {}

    def append(self, ids: list[int]) -> dict[str, np.ndarray]:
        """The logits of the last position, [1, vocab_size]."""
        logits = self._outputs(ids)[0][0, -1:]
        self._position += len(ids)
        return {"logits": logits}

    def reset(self) -> dict[str, np.ndarray]:
        self._position = 0
        return {}

    def states(self, ids: list[int]) -> dict[str, np.ndarray]:
        """From an empty cache: all logits and the residual stream of a program that gives them."""
        self._position = 0
        logits, states = self._outputs(ids)
        return {"logits": logits[0], "states": states}

    def _outputs(self, ids: list[int]) -> list[np.ndarray]:
        if self._run is None:
            raise ValueError("no program is open")
        return [np.asarray(output, np.float32) for output in self._run(ids, self._position)]


def serve(requests: Any, answers: Any) -> None:
    """Answer every line of `requests`, until they end."""
    worker = Worker()
    for line in requests:
        request = json.loads(line)
        name = request.pop("do")
        del request["arrays"]  # a message may carry some; none of ours does
        try:
            arrays = getattr(worker, name)(**request)
            head: dict[str, Any] = {"ok": True}
        except Exception as error:  # one line reaches the host
            arrays = {}
            head = {
                "ok": False,
                "kind": "executorch",
                "error": " ".join(f"{type(error).__name__}: {error}".split()),
            }
        values = {key: np.ascontiguousarray(value, np.float32) for key, value in arrays.items()}
        described = {key: ["<f4", list(value.shape)] for key, value in values.items()}
        answers.write(json.dumps({**head, "arrays": described}).encode() + b"\n")
        for value in values.values():
            answers.write(value.tobytes())
        answers.flush()


if __name__ == "__main__":
    stream = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries print where they like; answers have a stream of their own
    serve(sys.stdin, stream)
