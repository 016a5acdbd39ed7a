"""A native runner as a child process: requests and answers of `cpp/main.cpp`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pit_deploy.errors import PitDeployError
from pit_deploy.runtimes.child_process import ChildProcess

CALL_SECONDS = 900.0
"""A phone answers in seconds; an emulated processor may take minutes for a prompt."""
_DOING = {
    "check": "checking the files",
    "open": "opening the model",
    "append": "running a token",
    "reset": "emptying the cache",
    "probe": "running all layers",
}


class RunnerError(PitDeployError):
    """The runner answered that a request failed; `kind` is its word for why (docs/bundle.md, docs/devices.md)."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class RunnerProcess(ChildProcess):
    """A runner that was started by `command`. `where` says in errors what runs it, `subject` on what.

    `here` is the runtime that opens the bundle on this machine.

    `request` raises `RunnerError` for what the runner refuses, and `RuntimeDiedError` where it ends or does not
    answer.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        where: str,
        subject: str,
        here: str = "onnxruntime",
        environment: Mapping[str, str] | None = None,
        seconds: float = CALL_SECONDS,
    ) -> None:
        super().__init__(
            command,
            label=where,
            subject=subject,
            advice=f"check the bundle with pit-deploy verify --runtime {here}",
            environment=environment,
        )
        self._seconds = seconds

    def request(self, do: str, **values: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """The answer to a request, and its arrays."""
        what = _DOING.get(do, f"answering to '{do}'")
        return self.ask({"do": do, **values}, what=what, seconds=self._seconds)

    def __enter__(self) -> RunnerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _failure(self, head: Mapping[str, Any], what: str) -> PitDeployError:
        return RunnerError(str(super()._failure(head, what)), str(head.get("kind")))
