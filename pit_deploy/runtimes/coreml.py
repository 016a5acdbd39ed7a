"""Core ML itself, on macOS: predictions run in a child process, so that a crash of it is a result and not our end."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pit_deploy.bundle import Bundle
from pit_deploy.errors import InputError, PitDeployError, RuntimeDiedError
from pit_deploy.manifest import CoreMLFunction
from pit_deploy.runtimes.coreml_sequence import CoreMLSequence
from pit_deploy.runtimes.coreml_worker import receive, send

LOAD_SECONDS, CALL_SECONDS = 900.0, 300.0
"""Core ML compiles a program for the machine when it is loaded, the Neural Engine's part slowly."""
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
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: Any = None
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
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
        if self._errors is not None:
            self._errors.close()
            self._errors = None

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def _start(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
        self._process = subprocess.Popen(
            self._worker, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors
        )
        self._ask(self._request, {}, "loading the program", LOAD_SECONDS)

    def _ask(
        self, message: Mapping[str, Any], arrays: Mapping[str, np.ndarray], what: str, seconds: float
    ) -> dict[str, np.ndarray]:
        process = self._process
        if process is None:
            raise PitDeployError(
                f"Core ML's process for {self.bundle.path} has ended; reset starts another one."
            )
        assert process.stdin is not None and process.stdout is not None
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(seconds, end)
        timer.start()
        try:
            send(process.stdin, message, arrays)
            head, found = receive(process.stdout)
        except (EOFError, BrokenPipeError, ValueError) as error:
            raise self._died(
                process, what, f"did not answer within {seconds:g} s" if late.is_set() else ""
            ) from error
        finally:
            timer.cancel()
        if not head["ok"]:
            raise PitDeployError(
                f"Core ML failed while {what} of {self.bundle.path}: {' '.join(head['error'].split())[:300]}; check "
                f"the bundle with pit-deploy verify --runtime mil."
            )
        return found

    def _died(self, process: subprocess.Popen[bytes], what: str, how: str) -> RuntimeDiedError:
        process.kill()
        status = process.wait()
        printed = ""
        if self._errors is not None:
            self._errors.seek(0)
            lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
            printed = f"; its last words: {lines[-1][:200]}" if lines else ""
        self.close()
        return RuntimeDiedError(
            f"The process that runs Core ML {how or _ending(status)} while {what} of {self.bundle.path}{printed}; "
            f"try --profile cpu_gpu, or verify with --runtime mil.",
            status,
        )


def check_system() -> None:
    """Raise `InputError` where there is no Core ML."""
    if sys.platform != "darwin":
        raise InputError(
            f"Core ML is part of macOS and this is {sys.platform}; use --runtime mil, which evaluates the program here."
        )


def _ending(status: int) -> str:
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by the signal {signal.Signals(-status).name}"
    return f"ended with status {status}"
