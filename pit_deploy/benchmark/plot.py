"""The plot of a benchmark: decode against depth, prefill, and ratios, a row for each number of threads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pit_deploy.benchmark.report import BenchReport, Samples
from pit_deploy.errors import InputError
from pit_deploy.extras import require
from pit_deploy.files import atomic_output

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FORMATS = {".svg": "svg", ".png": "png"}
_COLOURS = ("#0b62c4", "#0f8a7e", "#a85400", "#8250c8", "#c21f3a", "#7b8794", "#6b7f00", "#c0399f")
_STYLE: dict[str, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#d5dbe1",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "pit-deploy bench",
    "text.parse_math": False,
}


def check_plot(path: str | Path) -> None:
    """Raise where `plot` could not write `path`: another ending than .svg or .png, or no matplotlib."""
    if Path(path).suffix.lower() not in _FORMATS:
        raise InputError(f"{path} is no .svg and no .png file; name one for the plot.")
    require("matplotlib", "bench")


def plot(report: BenchReport, path: str | Path) -> None:
    """Draw `report` into an SVG or PNG file by its ending; an existing one is replaced.

    Dots and bars are medians, whiskers reach from the smallest to the largest sample. Raises `InputError` for
    another ending and `MissingExtraError` without matplotlib, and leaves the old file then.
    """
    check_plot(path)
    import matplotlib.style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    form = _FORMATS[Path(path).suffix.lower()]
    threads = report.settings.threads
    columns = 3 if report.ratios else 2
    most = max((sum(r.threads == n for r in report.ratios) for n in threads), default=0)
    height = max(3.2, 0.16 * most + 0.9)
    with matplotlib.style.context(["default", _STYLE]):
        figure = Figure(figsize=(4.4 * columns, height * len(threads) + 0.6), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(len(threads), columns, squeeze=False)
        for row, count in zip(grid, threads, strict=True):
            _decode(row[0], report, count)
            _prefill(row[1], report, count)
            if columns == 3:
                _ratios(row[2], report, count)
        handles, labels = grid[0][0].get_legend_handles_labels()
        if labels:
            figure.legend(handles, labels, loc="outside upper left", ncols=4)
        metadata = {"Date": None} if form == "svg" else None
        with atomic_output(path, overwrite=True, directory=False) as partial:
            figure.savefig(partial, format=form, dpi=140, metadata=metadata)


def _decode(axes: Axes, report: BenchReport, threads: int) -> None:
    for number, subject in enumerate(report.subjects):
        found = [d for run in subject.runs if run.threads == threads for d in run.decode]
        found.sort(key=lambda d: d.depth)
        speeds = [d.tokens_per_second for d in found]
        axes.errorbar(
            [d.depth for d in found],
            [s.median for s in speeds],
            yerr=_whiskers(speeds),
            marker="o",
            markersize=4,
            capsize=2,
            color=_COLOURS[number % len(_COLOURS)],
            linestyle="-" if subject.kind == "bundle" else "--",
            label=subject.name,
        )
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens in the cache")
    axes.set_ylabel("decode, tokens a second")
    axes.set_title(_title(threads), loc="left")


def _prefill(axes: Axes, report: BenchReport, threads: int) -> None:
    lengths = sorted(report.settings.prompt_tokens)
    width = 0.8 / len(report.subjects)
    for number, subject in enumerate(report.subjects):
        found = {p.tokens: p for run in subject.runs if run.threads == threads for p in run.prefill}
        places = [i + (number + 0.5) * width - 0.4 for i, n in enumerate(lengths) if n in found]
        speeds = [found[n].tokens_per_second for n in lengths if n in found]
        axes.bar(
            places,
            [s.median for s in speeds],
            width=0.9 * width,
            yerr=_whiskers(speeds),
            capsize=2,
            color=_COLOURS[number % len(_COLOURS)],
            alpha=1.0 if subject.kind == "bundle" else 0.55,
        )
    axes.set_xticks(range(len(lengths)), [str(n) for n in lengths])
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel("prefill, tokens a second")
    axes.set_title(_title(threads), loc="left")
    axes.grid(False, axis="x")


def _ratios(axes: Axes, report: BenchReport, threads: int) -> None:
    found = [r for r in report.ratios if r.threads == threads]
    names = {subject.name: n for n, subject in enumerate(report.subjects)}
    rows = list(range(len(found)))
    for row, ratio in zip(rows, found, strict=True):
        axes.errorbar(
            [ratio.ratio.median],
            [row],
            xerr=_whiskers([ratio.ratio]),
            marker="o",
            markersize=4,
            capsize=2,
            color=_COLOURS[names[ratio.subject] % len(_COLOURS)],
        )
    axes.axvline(1, color="#1b2128", linewidth=1)
    axes.set_yticks(rows, [f"{r.subject} / {r.against}, {r.what} {r.at}" for r in found], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("times as fast")
    axes.set_title(_title(threads), loc="left")


def _whiskers(samples: list[Samples]) -> list[list[float]]:
    return [[s.median - s.min for s in samples], [s.max - s.median for s in samples]]


def _title(threads: int) -> str:
    return f"{threads} thread{'s' if threads > 1 else ''}"
