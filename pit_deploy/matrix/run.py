"""The order of the work: rows by columns, cells as they are done, the table, parity.json and parity.html."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Sequence
from pathlib import Path

from pit_deploy.errors import InputError
from pit_deploy.files import atomic_output
from pit_deploy.golden import versions
from pit_deploy.matrix.artifacts import Subject
from pit_deploy.matrix.checks import empty_cell, follow_references
from pit_deploy.matrix.columns import choose_columns
from pit_deploy.matrix.table import Cell, Column, Matrix, Row
from pit_deploy.matrix.worker import SECONDS, Job, run_here, run_in_processes

Skip = Callable[[Row, Column], str | None]
"""Why a cell is left out; None where it is not."""

OnCell = Callable[[Cell, int, int], None]
"""Called with each cell as it is done, how many are, and how many there will be."""


def run_matrix(
    subjects: Sequence[Subject],
    *,
    store: Path | str,
    runtimes: Sequence[str] | None = None,
    processes: int = 1,
    seconds: float = SECONDS,
    skip: Skip | None = None,
    on_cell: OnCell = lambda cell, done, total: None,
) -> Matrix:
    """Check every row of `subjects` in every runtime (or in those called `runtimes`) and return the table.

    Artifacts and cells are kept in the folder `store`: a second call checks again only what has changed, and an
    interrupted one goes on. With `processes` 0 all happens in this process, where a runtime that crashes ends it;
    otherwise a crash is a failed cell. Raises `InputError` for names that are not known.
    """
    store = Path(store)
    if not subjects:
        raise InputError("there is nothing to check; give a checkpoint or a bundle.")
    columns = choose_columns(runtimes)
    rows = [(subject, row) for subject in subjects for row in _rows(subject)]
    left_out: list[Cell] = []
    jobs: list[Job] = []
    for subject, row in rows:
        kept = []
        for column in columns:
            reason = None if skip is None else skip(row, column)
            if reason is None:
                kept.append(column)
            else:
                left_out.append(empty_cell(row, column, "not_run", reason))
        if kept:
            jobs.append(Job(subject, row, tuple(kept)))
    total = len(rows) * len(columns)
    cells = left_out
    found = run_here(jobs, store) if processes == 0 else run_in_processes(jobs, store, processes, seconds)
    for cell in found:
        cells.append(cell)
        on_cell(cell, len(cells), total)
    places = {(cell.row, cell.runtime): cell for cell in follow_references(cells)}
    ordered = [places[row, column.name] for _, row in rows for column in columns]
    return Matrix(
        created_by=versions(),
        machine=f"{platform.machine()}, {platform.system()}",
        columns=columns,
        rows=tuple(row for _, row in rows),
        cells=tuple(ordered),
    )


def write_matrix(matrix: Matrix, directory: Path | str, *, processes: int = 1) -> tuple[Path, Path]:
    """Write parity.json and parity.html into `directory`, which is made; existing ones are replaced."""
    from pit_deploy.matrix.page import write_matrix_page

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    with atomic_output(directory / "parity.json", overwrite=True, directory=False) as partial:
        text = json.dumps(matrix.to_dict(), ensure_ascii=False, separators=(",", ":"))
        partial.write_text(text + "\n", encoding="utf-8")
    write_matrix_page(matrix, directory / "parity.html", processes=processes)
    return directory / "parity.json", directory / "parity.html"


def _rows(subject: Subject) -> list[Row]:
    rows = subject.rows()
    if subject.bundles and subject.source is not None:  # the fold needs no bundle of its own
        for layout in ("shared", "untied"):
            row = Row.model_validate({"checkpoint": subject.name, "layout": layout, "precision": "fp32"})
            rows = rows if row in rows else [row, *rows]
    return rows
