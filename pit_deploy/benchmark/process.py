"""The parent's side of a worker: start it, ask it, and say how it ended where it did not answer."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pit_deploy.benchmark.worker import WorkerSpec
from pit_deploy.errors import PitDeployError

TIMEOUT = 900.0
"""Seconds after which a worker that does not answer is ended."""


class WorkerError(PitDeployError):
    """A worker failed (and said why), or it died; the message says how."""

    def __init__(self, message: str, *, died: bool) -> None:
        super().__init__(message)
        self.died = died


class WorkerProcess:
    """A child process that holds one artifact. Use it as a context; leaving it ends the child.

    Every request is a keyword call of `ask`. After a `WorkerError` the child is gone and `ask` raises it again.
    """

    def __init__(self, spec: WorkerSpec, *, module: str = "pit_deploy.benchmark.worker") -> None:
        self.spec = spec
        self._error: WorkerError | None = None
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 -- closed by `close`
        # Only the runtime's own threads shall compute; numpy's would spin beside them.
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        environment.pop(
            "OMP_WAIT_POLICY", None
        )  # our command line sets it for PyTorch; a peer may lose by it
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, spec.to_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=environment,
            text=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, do: str, **values: Any) -> dict[str, Any]:
        """The worker's answer to a request; raises `WorkerError` where it fails, ends, or says nothing."""
        if self._error is not None:
            raise self._error
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it ended: its exit status says more than a broken pipe
            self._process.stdin.write(json.dumps({"do": do, **values}) + "\n")
            self._process.stdin.flush()
        try:
            line = self._lines.get(timeout=TIMEOUT)
        except queue.Empty:
            raise self._fail(
                f"gave no answer to '{do}' for {TIMEOUT:.0f} seconds and was ended", True
            ) from None
        if not line:
            raise self._fail(f"ended during '{do}' with {self._status()}{self._said()}", True)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise self._fail(f"failed during '{do}': {answer['error']}", False)
        return answer

    def close(self) -> None:
        """End the child."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(timeout=10)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._stderr.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _fail(self, what: str, died: bool) -> WorkerError:
        self._error = WorkerError(f"the worker process {what}", died=died)
        self._process.kill()
        return self._error

    def _status(self) -> str:
        code = self._process.wait(timeout=60)
        if code >= 0:
            return f"exit status {code}"
        try:
            return f"exit status {code} ({signal.Signals(-code).name})"
        except ValueError:
            return f"exit status {code}"

    def _said(self) -> str:
        self._stderr.seek(0)
        lines = [line.strip() for line in self._stderr.read().splitlines() if line.strip()]
        return f": {lines[-1][:300]}" if lines else ""


def artifact_files(path: Path) -> list[Path]:
    """The files of an artifact that is a file or a folder."""
    return [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())


def drop_pages(files: Sequence[Path]) -> bool:
    """Ask the system to forget the files' pages; False where it has no such call.

    Pages that another process has mapped stay, and so do files in memory (tmpfs): `resident_share` tells.
    """
    if not hasattr(os, "posix_fadvise"):
        return False
    for file in files:
        with file.open("rb") as stream:
            with contextlib.suppress(OSError):  # a read-only file system has nothing to write
                os.fsync(stream.fileno())  # pages not yet written cannot be dropped
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def read_pages(files: Sequence[Path]) -> None:
    """Read the files, so that their pages are in the file cache."""
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.read(1 << 22):
                pass


def resident_share(files: Sequence[Path]) -> float | None:
    """Share of the files' pages in the file cache, from 0 to 1; None where the system does not tell."""
    import ctypes

    try:
        mincore = ctypes.CDLL(None, use_errno=True).mincore
    except (OSError, AttributeError, TypeError):
        return None
    pages = resident = 0
    for file in files:
        size = file.stat().st_size
        if not size:
            continue
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            view = np.frombuffer(mapped, np.uint8)
            found = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
            status = mincore(
                ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(size), ctypes.c_void_p(found.ctypes.data)
            )
            del view  # the map cannot be closed while something looks into it
        if status:
            return None
        pages, resident = pages + len(found), resident + int((found & 1).sum())
    return resident / pages if pages else None
