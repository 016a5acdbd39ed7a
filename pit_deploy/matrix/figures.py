"""The plots of a cell: errors by position, how often which error occurs, and errors by layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from pit_deploy import report_figures as figures
from pit_deploy.matrix.table import Cell, Logits
from pit_deploy.parity import LayerError
from pit_deploy.report import Plot, layer_name, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEIGHT = 2.6


@dataclass(frozen=True)
class _Errors:
    """Arrays of a cell; what is not finite is nan."""

    max_abs: np.ndarray
    kl: np.ndarray
    top1: np.ndarray
    prompt_lengths: tuple[int, ...]


def cell_plots(cell: Cell) -> list[Plot]:
    """The plots of a cell; none where no logits were compared."""
    found = cell.logits
    if found is None:
        return []
    errors = _errors(found)
    plots = [_positions(cell.name, errors), _histogram(cell.name, errors, found)]
    if found.layers:
        plots.append(_layers(cell.name, found))
    return plots


def _errors(found: Logits) -> _Errors:
    per = found.per_position

    def array(values: tuple[float | None, ...]) -> np.ndarray:
        return np.array([np.nan if v is None else v for v in values])

    return _Errors(array(per.max_abs), array(per.kl), np.array(per.top1, bool), per.prompt_lengths)


def _positions(name: str, errors: _Errors) -> Plot:
    bad = int((~np.isfinite(errors.max_abs) | ~np.isfinite(errors.kl)).sum())
    differs = int((~errors.top1).sum())
    caption = "Bands separate the prompts." if len(errors.prompt_lengths) > 1 else ""
    if differs:
        caption += f" Triangles: {differs} positions at which another token is largest."
    if bad:
        caption += f" {bad} positions are not finite and left out."
    caption = caption.strip() or "Every position of the prompt."
    svg = figures.inline_svg(
        partial(_draw_positions, errors=errors),
        name=f"{name}-positions",
        label=f"Errors by position. {caption}",
        height=HEIGHT,
    )
    return Plot("Errors by position", svg, caption)


def _draw_positions(axes: Axes, errors: _Errors) -> None:
    low, high = figures.log_limits(errors.max_abs, errors.kl)
    figures.shade_prompts(axes, errors.prompt_lengths, len(errors.kl))
    place = np.arange(len(errors.kl))
    series = (
        (errors.max_abs, "data", "-", "max abs logit error"),
        (errors.kl, "weights", "--", "KL in nats"),
    )
    for values, colour, style, label in series:
        axes.plot(
            place,
            values.clip(low, high),
            linewidth=0.9,
            linestyle=style,
            color=figures.COLOURS[colour],
            label=label,
        )
    differs = ~errors.top1 & np.isfinite(errors.max_abs)
    figures.dots(
        axes, place, errors.max_abs.clip(low, high), differs, "^", 5, "bad", "another token is largest"
    )
    axes.set_xlim(-0.5, max(len(place) - 0.5, 0.5))
    axes.set_xlabel("position")
    figures.log_axis(axes.yaxis, low, high)
    figures.legend(axes)


def _histogram(name: str, errors: _Errors, found: Logits) -> Plot:
    finite = errors.max_abs[np.isfinite(errors.max_abs)]
    caption = "No logits are finite."
    if len(finite):
        middle, high = np.percentile(finite, [50, 95])
        caption = f"Half of the positions are below {number(middle)}, 19 of 20 below {number(high)}."
    draw = partial(
        figures.draw_histogram, values=errors.max_abs, label="max abs logit error", gate=found.gate.max_abs
    )
    label = f"How often which logit error occurs. {caption}"
    svg = figures.inline_svg(draw, name=f"{name}-histogram", label=label, height=HEIGHT)
    return Plot("How often which logit error occurs", svg, caption)


def _layers(name: str, found: Logits) -> Plot:
    layers = [
        LayerError(
            e.layer, np.nan if e.median is None else e.median, np.nan if e.largest is None else e.largest
        )
        for e in found.layers
    ]
    first = found.first_diverging_layer
    caption = "Every layer's median is within its limit."
    if first is not None:
        caption = f"The first median past its limit is that after {layer_name(first)}."
    draw = partial(figures.draw_layers, layers=layers, gate=found.gate.layer)
    svg = figures.inline_svg(draw, name=f"{name}-layers", label=f"Error by layer. {caption}", height=HEIGHT)
    return Plot("Error by layer", svg, caption)
