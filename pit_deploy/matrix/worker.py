"""A child process that checks cells one after the other: a runtime that crashes takes one cell with it, no more."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

from pit_deploy.errors import PitDeployError
from pit_deploy.matrix.artifacts import Subject, prepare
from pit_deploy.matrix.checks import check, empty_cell
from pit_deploy.matrix.store import CellStore, cell_key
from pit_deploy.matrix.table import Cell, Column, Row

SECONDS = 1800.0
"""A cell that takes longer has hung."""


@dataclass(frozen=True)
class Job:
    """The cells of one artifact."""

    subject: Subject
    row: Row
    columns: tuple[Column, ...]


def checked(job: Job, folder: Path) -> Iterator[Cell]:
    """The cells of a job, from the store where nothing that matters has changed."""
    store = CellStore(folder)
    for column in job.columns:
        key = _key(job, column, folder)
        cell = store.load(key) if key is not None else None
        if cell is None:
            cell = check(job.subject, job.row, column, folder)
            if key is not None:
                store.save(key, cell)
        yield cell


def _key(job: Job, column: Column, folder: Path) -> str | None:
    """None where there is no artifact to speak of; `check` says why."""
    try:
        artifact = prepare(job.subject, job.row, column.target, folder)
        return cell_key(job.subject, job.row, column, artifact)
    except (PitDeployError, OSError):
        return None


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
                cell = worker.receive(hung=worker.pipe not in ready)
                if cell is not None:
                    yield cell
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
        self.pipe.send(job)
        self._since = _now()

    def left(self, seconds: float) -> float:
        """Seconds until its present cell counts as hung."""
        return max(self._since + seconds - _now(), 0.0)

    def receive(self, *, hung: bool) -> Cell | None:
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
        self._since = _now()
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
    while True:
        try:
            job: Job = pipe.recv()
        except (EOFError, OSError):
            return
        for cell in checked(job, folder):
            pipe.send(cell)


def _now() -> float:
    import time

    return time.monotonic()


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
