"""A child process that runs a model for us, so that a crash of it is a result and not our end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pit_deploy.errors import PitDeployError, RuntimeDiedError
from pit_deploy.runtimes.messages import receive, send


class ChildProcess:
    """Starts `command` and exchanges messages with it over its standard input and output.

    `label` says in errors what it runs ("Core ML"), `subject` on what, and `advice` what to do next. `environment` is
    added to this process's own.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        label: str,
        subject: str,
        advice: str,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._label, self._subject, self._advice = label, subject, advice
        self._errors: Any = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
        self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=None if environment is None else {**os.environ, **environment},
        )

    @property
    def pid(self) -> int | None:
        """The process's id; None once it has ended or was closed."""
        return None if self._process is None else self._process.pid

    def ask(
        self,
        message: Mapping[str, Any],
        arrays: Mapping[str, np.ndarray] | None = None,
        *,
        what: str,
        seconds: float,
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Send a message and return the answer, its head and arrays. `what` says in errors what is being done.

        Raises `RuntimeDiedError` where the process ends or does not answer within `seconds`, and `PitDeployError`
        where it answers with an error.
        """
        process = self._process
        if process is None:
            raise PitDeployError(f"The process that runs {self._label} for {self._subject} has ended.")
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
        except (EOFError, OSError, ValueError) as error:
            how = f"did not answer within {seconds:g} s" if late.is_set() else ""
            raise self._died(process, what, how) from error
        finally:
            timer.cancel()
        if not head["ok"]:
            raise self._failure(head, what)
        return head, found

    def _failure(self, head: Mapping[str, Any], what: str) -> PitDeployError:
        """The error for an answer that says what failed."""
        return PitDeployError(
            f"{self._label} failed while {what} of {self._subject}: "
            f"{' '.join(head['error'].split()).rstrip('.')[:300]}; {self._advice}."
        )

    def close(self) -> None:
        """End the process."""
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

    def _died(self, process: subprocess.Popen[bytes], what: str, how: str) -> RuntimeDiedError:
        process.kill()
        status = process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        printed = f"; its last words: {lines[-1][:200]}" if lines else ""
        self.close()
        return RuntimeDiedError(
            f"The process that runs {self._label} {how or _ending(status)} while {what} of "
            f"{self._subject}{printed}; {self._advice}.",
            status,
        )


def _ending(status: int) -> str:
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by the signal {signal.Signals(-status).name}"
    return f"ended with status {status}"
