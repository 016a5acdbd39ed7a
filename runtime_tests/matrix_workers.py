"""Child processes of the matrix that go wrong, for its tests; a module, so that they can be started by name."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

from pit_deploy.matrix.worker import Job, checked


def dying(pipe: Connection, folder: Path) -> None:
    """Like the worker, but onnxruntime ends the process."""
    job: Job = pipe.recv()
    for column in job.columns:
        if column.name == "onnxruntime":
            os.kill(os.getpid(), signal.SIGKILL)
        for cell in checked(Job(job.subject, job.row, (column,)), folder):
            pipe.send(cell)
    pipe.recv()


def hanging(pipe: Connection, folder: Path) -> None:
    """Never answers."""
    pipe.recv()
    time.sleep(600)
