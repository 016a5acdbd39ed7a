"""ExecuTorch's ARM64 kernels under emulation: a program of a bundle in `arm64_worker`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pit_deploy.bundle import Bundle
from pit_deploy.errors import InputError, PitDeployError, RuntimeDiedError
from pit_deploy.few_passes import is_large
from pit_deploy.runtimes.arm64 import CALL_SECONDS, Choice, Emulator
from pit_deploy.runtimes.base import check_room
from pit_deploy.runtimes.native.process import RunnerError, RunnerProcess

WORKER = Path(__file__).with_name("arm64_worker.py")


class Arm64Executorch:
    """One program and one sequence; implements `Runtime`.

    Raises `InputError` where ExecuTorch cannot open the program, and `RuntimeDiedError` where its process ends; the
    next `reset` starts another one.
    """

    emulated = True

    def __init__(
        self, bundle: Bundle, emulator: Emulator, choice: Choice, *, threads: int | None = None
    ) -> None:
        manifest = bundle.manifest
        self.name, self.few_passes = choice.label, is_large(bundle)
        self.context_length, self.vocab_size = manifest.context_length, manifest.vocab_size
        self._bundle, self._emulator, self._choice = bundle, emulator, choice
        self._open = {
            "model": str(bundle.model_path.resolve()),
            "custom_operators": manifest.profile == "xnnpack",
            "threads": threads or 1,
        }
        self._process: RunnerProcess | None = None
        self._position = 0
        self._start()

    @property
    def position(self) -> int:
        """Tokens in the cache."""
        return self._position

    def prefill(self, ids: Sequence[int]) -> np.ndarray:
        """Append `ids` in one pass and return the logits of the last position, [vocab_size]."""
        check_room(self, ids)
        logits = self._ask("append", ids=[int(id) for id in ids])["logits"][-1]
        self._position += len(ids)
        return logits

    def decode(self, id: int) -> np.ndarray:
        """Append one id and return its logits, [vocab_size]."""
        return self.prefill([id])

    def reset(self) -> None:
        """Empty the cache: what lies past the position is never read."""
        self._position = 0
        if self._process is None:
            self._start()
        else:
            self._ask("reset")

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def _start(self) -> None:
        emulator, processor = self._emulator, self._choice.processor
        program = f"{emulator.root(processor)}{emulator.python}"
        # -P: the worker's folder has modules called torch and executorch too.
        command = emulator.command(processor, program, "-P", str(WORKER))
        self._process = RunnerProcess(
            command,
            where=f"ExecuTorch on an emulated {processor}",
            subject=str(self._bundle.path),
            here="executorch",
            seconds=CALL_SECONDS,
            environment={"PYTHONPATH": str(emulator.packages), "PYTHONDONTWRITEBYTECODE": "1"},
        )
        try:
            self._ask("open", **self._open)
        except RunnerError as error:
            raise InputError(str(error)) from error

    def _ask(self, do: str, **values: Any) -> dict[str, np.ndarray]:
        if self._process is None:
            raise PitDeployError(
                f"ExecuTorch's process for {self._bundle.path} has ended; reset starts another."
            )
        try:
            return self._process.request(do, **values)[1]
        except RuntimeDiedError:
            self._process = None
            raise
