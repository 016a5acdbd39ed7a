"""parity.html: the table, and behind each cell its figures and plots. One file, nothing to fetch, no script."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from pit_deploy.matrix.figures import cell_plots
from pit_deploy.matrix.table import Cell, Logits, Matrix, Row
from pit_deploy.report import GatedFigure, Plot, number, require_report_packages, write_page

WORDS = {
    "passed": "passed",
    "out_of_tolerance": "out of tolerance",
    "failed": "failed",
    "not_run": "not run",
}
SIGNS = {"passed": "✓", "out_of_tolerance": "✗", "failed": "✗", "not_run": "–"}
_MANY = 24
"""Cells beyond which drawing is worth other processes."""


@dataclass(frozen=True)
class _Panel:
    """What a cell opens to."""

    cell: Cell
    figures: list[GatedFigure]
    plots: list[Plot]


def write_matrix_page(matrix: Matrix, path: Path | str, *, processes: int = 1) -> None:
    """Write the matrix as one HTML file; an existing one is replaced. `processes` draw the plots.

    Raises `MissingExtraError` before anything is written.
    """
    require_report_packages()
    drawn = _draw(matrix.cells, processes)
    panels = [
        _Panel(cell, [] if cell.logits is None else _figures(cell.logits), plots)
        for cell, plots in zip(matrix.cells, drawn, strict=True)
    ]
    write_page(
        "matrix.html.j2",
        path,
        title="Parity",
        matrix=matrix,
        groups=_groups(matrix),
        panels=panels,
        counts={status: matrix.count(status) for status in WORDS},  # type: ignore[arg-type]
        red=[cell for cell in matrix.cells if cell.red],
        words=WORDS,
        signs=SIGNS,
        short=_short,
    )


def _draw(cells: Sequence[Cell], processes: int) -> list[list[Plot]]:
    if processes < 2 or sum(cell.logits is not None for cell in cells) < _MANY:
        return [cell_plots(cell) for cell in cells]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        return list(pool.map(cell_plots, cells, chunksize=8))


def _groups(matrix: Matrix) -> list[tuple[str, list[tuple[Row, list[Cell]]]]]:
    """Rows by checkpoint."""
    return [(name, list(rows)) for name, rows in groupby(matrix.table(), key=lambda pair: pair[0].checkpoint)]


def _short(cell: Cell) -> str:
    """The figure that a cell shows in the table."""
    if cell.logits is not None and cell.logits.mean_kl is not None:
        return f"KL {cell.logits.mean_kl:.0e}".replace("e-0", "e-") if cell.logits.mean_kl else "KL 0"
    if cell.text is not None:
        return f"{cell.text.tokens} tokens"
    return WORDS[cell.status]


def _figures(found: Logits) -> list[GatedFigure]:
    gate = found.gate

    def at_most(name: str, value: float | None, limit: float | None) -> GatedFigure:
        text = "not finite" if value is None else number(value)
        if limit is None:
            return GatedFigure(name, text, "no gate", None)
        return GatedFigure(name, text, f"at most {limit:g}", value is not None and value <= limit)

    return [
        at_most("Mean KL", found.mean_kl, gate.mean_kl),
        GatedFigure(
            "Top-1 agreement", f"{found.top1:.2%}", f"at least {100 * gate.top1:g}%", found.top1 >= gate.top1
        ),
        at_most("Largest logit error", found.max_abs_logit_error, gate.max_abs),
        at_most("One pass against step by step", found.one_pass_against_steps_max_abs, gate.max_abs),
        GatedFigure(
            "Greedy tokens that agree",
            f"{found.greedy_equal} of {found.greedy_tokens}",
            "all" if gate.greedy else "no gate",
            found.greedy_equal >= found.greedy_tokens if gate.greedy else None,
        ),
        at_most("Largest KL", found.worst_kl, None),
    ]
