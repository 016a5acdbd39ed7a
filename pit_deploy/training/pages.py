"""Pages with plots of a training run and of the logit lens: one HTML file each, nothing to fetch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pit_deploy import report
from pit_deploy import report_figures as figures
from pit_deploy.training.diagnostics import spikes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from pit_deploy.training.callbacks import Log

Series = Mapping[str, Sequence[tuple[float, float]]]
_COLOURS = ("data", "gate", "weights", "golden", "bad", "soft", "other")


def write_training_page(log: Log, path: str | Path, summary: Mapping[str, Any]) -> None:
    """The diagnostics of a run as a page; an existing file is replaced.

    Raises `MissingExtraError` where matplotlib or jinja2 is not installed.
    """
    report.require_report_packages()
    losses = log.series("loss")
    marks = spikes(losses)
    plots = [
        _plot(
            "Loss",
            {"training": losses, "held out": log.series("eval_loss")},
            "nats per token",
            f"{len(marks)} spikes" + (f", at steps {', '.join(map(str, marks[:10]))}." if marks else "."),
            marks=marks,
        ),
        _plot(
            "Gradient norm",
            {"all parameters": log.series("grad_norm")},
            "norm",
            "Before clipping.",
            log_y=True,
        ),
        _plot(
            "Interface error",
            {"delta_TI": log.series("interface_error"), "|ZᵀZ - I|": log.series("orthonormality_error")},
            "error",
            "delta_TI = ‖WᵀE - I‖ / √d without the bridge; the largest entry of ZᵀZ - I.",
            log_y=True,
        ),
        _plot(
            "Drift",
            {"embedding": log.series("embedding_drift"), "head": log.series("head_drift")},
            "relative change",
            "‖E - E₀‖ / ‖E₀‖ and the same of W, on a sample of rows.",
        ),
        _plot("Condition of T", {"condition": log.series("condition")}, "condition", "", log_y=True),
        _plot("Learning rate", {"backbone": log.series("learning_rate")}, "rate", "Peak and schedule."),
    ]
    rows = [
        (name.replace("_", " "), _shown(value))
        for name, value in summary.items()
        if not isinstance(value, list)
    ]
    report.write_page(
        "training.html.j2", path, title="Training run", rows=rows, plots=plots, notes=summary.get("notes", [])
    )


def write_lens_page(lenses: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """The logit lens of one or more models as a page; an existing file is replaced."""
    report.require_report_packages()
    names = [Path(lens["path"]).name[:24] or f"model {number}" for number, lens in enumerate(lenses)]

    def curves(figure: str) -> Series:
        return {
            name: [(layer["layer"], layer[figure]) for layer in lens["layers"]]
            for name, lens in zip(names, lenses, strict=True)
        }

    x = "layers run (0: the embedding)"
    plots = [
        _plot("KL to the final distribution", curves("kl"), "nats", "Mean over the text.", x=x),
        _plot("Top-1 agreement", curves("top1"), "share", "With the final most likely token.", x=x),
        _plot("Entropy", curves("entropy"), "nats", "Of the layer's distribution.", x=x),
    ]
    rows = [
        (name, f"{lens['kind']}, {lens['tokens']} tokens") for name, lens in zip(names, lenses, strict=True)
    ]
    report.write_page("training.html.j2", path, title="Logit lens", rows=rows, plots=plots, notes=[])


def draw_series(
    series: Series,
    y: str,
    *,
    x: str = "step",
    log_y: bool = False,
    marks: Sequence[int] = (),
    bands: Mapping[str, Sequence[float]] | None = None,
) -> Callable[[Axes], None]:
    """A function that draws the lines of `series`; `bands` are half widths around some of them."""

    def draw(axes: Axes) -> None:
        for (name, points), colour in zip(series.items(), _COLOURS * 2, strict=False):
            if not points:
                continue
            values = np.asarray(points, float)
            finite = values[np.isfinite(values[:, 1])]
            if log_y:
                finite = finite[finite[:, 1] > 0]
            few = len(finite) <= 30
            axes.plot(
                finite[:, 0],
                finite[:, 1],
                linewidth=1.3,
                marker="o" if few else None,
                markersize=3,
                color=figures.COLOURS[colour],
                label=name,
            )
            if bands is not None and name in bands:
                half = np.nan_to_num(np.asarray(bands[name]))
                axes.fill_between(
                    values[:, 0],
                    values[:, 1] - half,
                    values[:, 1] + half,
                    color=figures.COLOURS[colour],
                    alpha=0.15,
                )
        for mark in marks:
            axes.axvline(mark, color=figures.COLOURS["bad"], linewidth=0.6)
        if log_y:
            axes.set_yscale("log")
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        if len(series) > 1 and any(series.values()):
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2, handlelength=1.5)

    return draw


def _plot(
    title: str,
    series: Series,
    y: str,
    caption: str,
    *,
    x: str = "step",
    log_y: bool = False,
    marks: Sequence[int] = (),
) -> report.Plot:
    name = title.lower().replace(" ", "-")
    svg = figures.inline_svg(draw_series(series, y, x=x, log_y=log_y, marks=marks), name=name, label=title)
    return report.Plot(title, svg, caption)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
