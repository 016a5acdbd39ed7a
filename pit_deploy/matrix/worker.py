"""A child process that checks cells one after the other: a runtime that crashes takes one cell with it, no more."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

from pit_deploy.errors import MissingExtraError, PitDeployError
from pit_deploy.matrix.artifacts import NoArtifact, Subject, prepare
from pit_deploy.matrix.checks import check, empty_cell, label
from pit_deploy.matrix.columns import absence
from pit_deploy.matrix.store import CellStore, cell_key
from pit_deploy.matrix.table import Cell, Column, Row

SECONDS = 3600.0
"""A cell that takes longer has hung."""


@dataclass(frozen=True)
class Job:
    """The cells of one row: no two processes make the same artifact."""

    subject: Subject
    row: Row
    columns: tuple[Column, ...]


def checked(job: Job, folder: Path) -> Iterator[Cell]:
    """The cells of a job, from the store where nothing that matters has changed."""
    for column in job.columns:
        yield _cell(job.subject, job.row, column, folder)


def _cell(subject: Subject, row: Row, column: Column, folder: Path) -> Cell:
    absent = absence(column)
    if absent is not None:
        return empty_cell(row, column, "not_run", absent)
    try:
        artifact = prepare(subject, row, column.target, folder)
        key = cell_key(subject, row, column, artifact)
    except (NoArtifact, MissingExtraError) as error:
        return empty_cell(row, column, "not_run", str(error))
    except (PitDeployError, OSError) as error:
        return empty_cell(row, column, "failed", str(error))
    store = CellStore(folder)
    cell = store.load(key)
    if cell is None:
        cell = check(subject, row, column, artifact, folder)
        store.save(key, cell)
    elif cell.artifact is not None:  # the same bytes may lie elsewhere by now
        cell = cell.model_copy(update={"artifact": label(artifact)})
    return cell


def run_here(jobs: list[Job], folder: Path) -> Iterator[Cell]:
    """All cells, in this process."""
    for job in jobs:
        yield from checked(job, folder)


def run_in_processes(
    jobs: list[Job], folder: Path, processes: int, seconds: float = SECONDS
) -> Iterator[Cell]:
    """All cells as they are done, by `processes` child processes.

    Where one dies, or takes longer than `seconds` for a cell, its cell is `failed` with the exit status, and a new
    process goes on with the next one.
    """
    waiting = list(reversed(jobs))
    workers: list[_Worker] = []
    try:
        while waiting or any(worker.job is not None for worker in workers):
            for worker in workers:
                if worker.job is None and waiting:
                    worker.give(waiting.pop())
            while waiting and len(workers) < processes:
                workers.append(_Worker(folder))
                workers[-1].give(waiting.pop())
            busy = [worker for worker in workers if worker.job is not None]
            ready = wait([worker.pipe for worker in busy], timeout=min(w.left(seconds) for w in busy))
            for worker in busy:
                if worker.pipe not in ready and worker.left(seconds) > 0:
                    continue
                yield worker.receive(hung=worker.pipe not in ready)
                if worker.dead:
                    workers.remove(worker)
                    rest = worker.rest()
                    if rest is not None:
                        waiting.append(rest)
    finally:
        for worker in workers:
            worker.close()


class _Worker:
    """One child process and the job that it has."""

    def __init__(self, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        # Not a daemon: runtimes start processes of their own.
        self._process = context.Process(target=_serve, args=(theirs, folder))
        self._process.start()
        theirs.close()
        self.job: Job | None = None
        self.dead = False
        self._done = 0
        self._since = 0.0

    def give(self, job: Job) -> None:
        self.job, self._done = job, 0
        with contextlib.suppress(OSError):  # a process that died while it waited: `receive` says so
            self.pipe.send(job)
        self._since = time.monotonic()

    def left(self, seconds: float) -> float:
        """Seconds until its present cell counts as hung."""
        return max(self._since + seconds - time.monotonic(), 0.0)

    def receive(self, *, hung: bool) -> Cell:
        """The next cell of the job; a cell that says so where the process died or hangs."""
        assert self.job is not None
        column = self.job.columns[self._done]
        try:
            if hung:
                raise EOFError
            cell: Cell = self.pipe.recv()
        except (EOFError, OSError):
            self.dead = True
            how = "did not end in time and was stopped" if hung else None
            self.close()
            reason = f"the process of the check {how or _ending(self._process.exitcode or 0)}"
            cell = empty_cell(self.job.row, column, "failed", reason)
        self._done += 1
        self._since = time.monotonic()
        if not self.dead and self._done == len(self.job.columns):
            self.job = None
        return cell

    def rest(self) -> Job | None:
        """What is left of the job of a process that died."""
        assert self.job is not None
        columns = self.job.columns[self._done :]
        return Job(self.job.subject, self.job.row, columns) if columns else None

    def close(self) -> None:
        self.pipe.close()
        self._process.join(1)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(pipe: Connection, folder: Path) -> None:
    """What a child process does until the parent closes the pipe."""
    # A person's interrupt reaches all processes; the parent says what there is to say.
    with contextlib.suppress(EOFError, ConnectionError, KeyboardInterrupt):
        while True:
            for cell in checked(pipe.recv(), folder):
                pipe.send(cell)


def _ending(status: int) -> str:
    if status < 0:
        try:
            return f"was ended by the signal {signal.Signals(-status).name}"
        except ValueError:
            pass
    return f"ended with status {status}"


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
