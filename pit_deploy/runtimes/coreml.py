"""Core ML itself, on macOS: predictions run in a child process, so that a crash of it is a result and not our end."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pit_deploy.bundle import Bundle
from pit_deploy.errors import InputError, PitDeployError, RuntimeDiedError
from pit_deploy.manifest import CoreMLFunction
from pit_deploy.runtimes.child_process import ChildProcess
from pit_deploy.runtimes.coreml_sequence import CoreMLSequence

LOAD_SECONDS, CALL_SECONDS = 900.0, 300.0
"""Core ML compiles a program for the machine when it is loaded, the Neural Engine's part slowly."""
_ADVICE = "try --profile cpu_gpu, or verify with --runtime mil"
WORKER = (sys.executable, "-m", "pit_deploy.runtimes.coreml_worker")


class CoreMLRuntime(CoreMLSequence):
    """One sequence in Core ML; implements `Runtime`.

    Raises `InputError` on other systems than macOS, `PitDeployError` where Core ML refuses the packages, and
    `RuntimeDiedError` where the child process ends or does not answer; the next `reset` starts another one.
    `worker` and `model` are for tests.
    """

    name = "coreml"

    def __init__(
        self,
        bundle: Bundle,
        *,
        worker: Sequence[str] = WORKER,
        model: str = "coreml",
        seconds: float = CALL_SECONDS,
    ) -> None:
        if model == "coreml":
            check_system()
        super().__init__(bundle.manifest)
        self.bundle, self._worker, self._seconds = bundle, list(worker), seconds
        self._request = {
            "model": model,
            "compute_units": self.program.compute_units,
            "stateful": not self.is_passed and bool(bundle.manifest.states),
            "functions": {f.name: [str(bundle.file(f.package)), f.function] for f in self.program.functions},
        }
        self._passed = {s.name: s for s in bundle.manifest.states if s.output is not None}
        self._caches: dict[str, np.ndarray] = {}
        self._process: ChildProcess | None = None
        self.clear()

    def call(self, function: CoreMLFunction, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        message = {"do": "predict", "function": function.name}
        found = self._ask(message, {**inputs, **self._caches}, f"calling {function.name}", self._seconds)
        self._caches = {name: found[str(state.output)] for name, state in self._passed.items()}
        return found

    def clear(self) -> None:
        self._caches = {s.name: np.zeros([int(n) for n in s.shape], s.dtype) for s in self._passed.values()}
        if self._process is None:
            self._start()
        else:
            self._ask({"do": "clear"}, {}, "emptying the cache", self._seconds)

    def close(self) -> None:
        """End the child process."""
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def _start(self) -> None:
        self._process = ChildProcess(
            self._worker, label="Core ML", subject=str(self.bundle.path), advice=_ADVICE
        )
        self._ask(self._request, {}, "loading the program", LOAD_SECONDS)

    def _ask(
        self, message: Mapping[str, Any], arrays: Mapping[str, np.ndarray], what: str, seconds: float
    ) -> dict[str, np.ndarray]:
        if self._process is None:
            raise PitDeployError(
                f"Core ML's process for {self.bundle.path} has ended; reset starts another one."
            )
        try:
            return self._process.ask(message, arrays, what=what, seconds=seconds)[1]
        except RuntimeDiedError:
            self._process = None
            raise


def check_system() -> None:
    """Raise `InputError` where there is no Core ML."""
    if sys.platform != "darwin":
        raise InputError(
            f"Core ML is part of macOS and this is {sys.platform}; use --runtime mil, which evaluates the program here."
        )
