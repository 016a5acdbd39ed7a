"""The plots of the reports, drawn by matplotlib and turned into SVG that lies inside a page.

The page's CSS colours them: each colour of `COLOURS` becomes a variable, so that one drawing is readable in
light and dark. Nothing here depends on the time, the machine's fonts or a user's matplotlibrc.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pit_deploy.parity import LayerError

MAX_POINTS = 2000
"""Up to so many positions each is drawn; beyond, the worst of every few."""
FLOOR, CEILING = 1e-16, 1e12
"""What lies outside is drawn at the edge: below is rounding of float64, above is no logit."""
WIDTH = 4.8
HEIGHT = 3.0
"""Inches; at this size 10-point text is about 10 pixels high on a phone."""

# Drawn in these (the light theme); in the page each is var(--name), so no two may be equal.
COLOURS = {
    "ink": "#1b2128",
    "grid": "#d5dbe1",
    "band": "#eef2f6",
    "data": "#0b62c4",
    "soft": "#6f8fb3",
    "gate": "#a85400",
    "bad": "#c21f3a",
    "tables": "#0c62c5",
    "weights": "#0f8a7e",
    "tokenizer": "#a95501",
    "golden": "#8250c8",
    "other": "#7b8794",
}
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_RC: dict[str, Any] = {
    "font.size": 10,
    "font.family": "sans-serif",
    "text.parse_math": False,
    "text.color": COLOURS["ink"],
    "axes.edgecolor": COLOURS["ink"],
    "axes.labelcolor": COLOURS["ink"],
    "xtick.color": COLOURS["ink"],
    "ytick.color": COLOURS["ink"],
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": COLOURS["grid"],
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "path.simplify": False,
    "svg.fonttype": "none",
}


def draw_positions(
    axes: Axes,
    values: np.ndarray,
    prompt_lengths: Sequence[int],
    *,
    label: str,
    gate: float | None = None,
    gate_label: str = "gate",
    agrees: np.ndarray | None = None,
    limits: tuple[float, float] | None = None,
) -> None:
    """A dot for each position on a log scale; every second prompt has a band behind it.

    Positions whose largest logit differs (`agrees` false) are triangles, values that are not finite crosses at
    the upper edge.
    """
    low, high = limits or log_limits(values, gate)
    shade_prompts(axes, prompt_lengths, len(values))
    shown = _worst_of_each(values)
    x, y = shown, values[shown]
    differs = np.zeros(len(x), bool) if agrees is None else ~np.asarray(agrees, bool)[shown]
    finite = np.isfinite(y)
    dots(axes, x, y.clip(low, high), finite & ~differs, "o", 2.6, "data", None)
    dots(axes, x, y.clip(low, high), finite & differs, "^", 5.5, "bad", "another token is largest")
    dots(axes, x, np.full(len(x), high), ~finite, "X", 6, "bad", "not finite")
    _gate_line(axes, gate, gate_label, low, high)
    axes.set_xlim(-0.01 * len(values) - 0.5, 1.01 * len(values) - 0.5)
    axes.xaxis.set_major_locator(_ticker().MaxNLocator(6, integer=True))
    axes.set_xlabel("position")
    log_axis(axes.yaxis, low, high)
    axes.set_ylabel(label)
    legend(axes)


def draw_histogram(axes: Axes, values: np.ndarray, *, label: str, gate: float | None = None) -> None:
    """How many positions have which error, in eighths of a decade; zeros stand in the lowest."""
    low, high = log_limits(values, gate)
    edges = np.geomspace(low, high, 8 * round(np.log10(high / low)) + 1)
    finite = values[np.isfinite(values)]
    axes.hist(finite.clip(edges[0], edges[-1]), bins=edges.tolist(), color=COLOURS["data"])
    if gate is not None:
        axes.axvline(gate, color=COLOURS["gate"], linestyle="--", linewidth=1.2, label="gate")
    log_axis(axes.xaxis, low, high)
    axes.yaxis.set_major_locator(_ticker().MaxNLocator(5, integer=True))
    axes.set_xlabel(label)
    axes.set_ylabel("positions")
    legend(axes)


def draw_layers(
    axes: Axes, layers: Sequence[LayerError], *, gate: float, limits: tuple[float, float] | None = None
) -> None:
    """Median and largest relative error after each layer on a log scale, with the gate of the median."""
    number = np.array([e.layer for e in layers])
    median, largest = (np.array([getattr(e, k) for e in layers], float) for k in ("median", "largest"))
    low, high = limits or log_limits(median, largest, gate)
    for values, name, colour, marker in ((largest, "largest", "soft", "s"), (median, "median", "data", "o")):
        finite = np.isfinite(values)
        drawn = np.where(finite, values.clip(low, high), np.nan)
        axes.plot(
            number, drawn, marker=marker, markersize=3.5, linewidth=1.2, color=COLOURS[colour], label=name
        )
        bad = None if name == "largest" and not np.isfinite(median).all() else "not finite"
        dots(axes, number, np.full(len(number), high), ~finite, "X", 6, "bad", bad)
    _gate_line(axes, gate, "gate of the median", low, high)
    axes.xaxis.set_major_locator(_ticker().MaxNLocator(8, integer=True))
    axes.set_xlabel("layers run (0: the embedding)")
    log_axis(axes.yaxis, low, high)
    axes.set_ylabel("relative error")
    legend(axes)


def draw_sizes(axes: Axes, names: Sequence[str], parts: Sequence[Mapping[str, int]]) -> None:
    """A bar for each bundle, the first on top, made of its parts in megabytes (keys are names of `COLOURS`)."""
    rows = np.arange(len(names))
    left = np.zeros(len(names))
    for part in ("tables", "weights", "tokenizer", "golden", "other"):
        sizes = np.array([p.get(part, 0) for p in parts]) / 1e6
        if sizes.any():
            axes.barh(rows, sizes, left=left, height=0.6, color=COLOURS[part], label=part)
        left += sizes
    for row, total in enumerate(left.tolist()):
        axes.text(total, row, f" {total:.1f}", va="center", fontsize=9)
    axes.set_yticks(rows, [n if len(n) <= 24 else f"{n[:23]}…" for n in names])
    axes.invert_yaxis()
    axes.set_xlim(0, max(1.18 * left.max(initial=0), 1e-6))
    axes.grid(False)
    axes.xaxis.set_major_locator(_ticker().MaxNLocator(5))
    axes.set_xlabel("MB")
    legend(axes)


def log_limits(*values: np.ndarray | float | None) -> tuple[float, float]:
    """Whole decades that hold every finite value within `FLOOR` and `CEILING`; zeros get one of their own."""
    given = np.concatenate([[], *(np.ravel(np.asarray(v, float)) for v in values if v is not None)])
    given = given[np.isfinite(given)]
    positive = given[given > 0].clip(FLOOR, CEILING)
    if not len(positive):
        return 1e-9, 1e-6
    low, high = np.floor(np.log10(positive.min())), np.ceil(np.log10(positive.max()))
    if (given <= 0).any():
        low -= 1
    return float(10.0**low), float(10.0 ** max(high, low + 1))


def inline_svg(draw: Callable[[Axes], None], *, name: str, label: str, height: float = HEIGHT) -> str:
    """What `draw` draws, as an `<svg>` element for a page: `name` is unique there, `label` is read aloud."""
    with _style(name):
        text = _saved(make_figure(draw, height=height), "svg").decode("utf-8")
    text = text[text.index("<svg") :]
    # The style element would hold for the whole page, and ids for groups would be there twice.
    text = re.sub(r"<(style|metadata)\b.*?</\1>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    # A marker's path may carry the style that each of its uses repeats; where it carries none, the uses must.
    styled = set(re.findall(r'<path id="([^"]+)"[^>]*style=', text))
    text = re.sub(
        r'(<use xlink:href="#([^"]+)"[^>]*?) style="[^"]*"',
        lambda use: use.group(1) if use.group(2) in styled else use.group(0),
        text,
    )
    text = re.sub(r"font-family: [^;\"]*(; )?", "", text)
    text = re.sub(r"(\d\.\d\d)\d+", r"\1", text)
    text = re.sub(r"\n\s*", "\n", text)
    for colour, value in COLOURS.items():
        text = text.replace(value, f"var(--{colour})")
    view = re.search(r'viewBox="[^"]*"', text)
    assert view is not None, "matplotlib writes a viewBox"
    head = f'<svg role="img" aria-label="{escape(label)}" {view.group()}>'
    return head + text[text.index(">") + 1 :].rstrip()


def standalone_svg(draw: Callable[[Axes], None], *, name: str, height: float = HEIGHT) -> str:
    """What `draw` draws, as an SVG file on a white ground, for a page that has no styles of ours."""
    with _style(name):
        figure = make_figure(draw, height=height)
        figure.patch.set_facecolor("white")
        buffer = io.BytesIO()
        without = {"Date": None, "Creator": None, "Format": None, "Type": None}
        figure.savefig(buffer, format="svg", metadata=without)
    return "\n".join(line.rstrip() for line in buffer.getvalue().decode("utf-8").splitlines()) + "\n"


def make_figure(draw: Callable[[Axes], None], *, height: float = HEIGHT) -> Figure:
    """A figure with one plot. Call it within a style of your own to have it in another look."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasSVG(figure)
    draw(figure.add_subplot())
    return figure


@contextmanager
def _style(salt: str) -> Iterator[None]:
    import matplotlib.style

    with matplotlib.style.context(["default", {**_RC, "svg.hashsalt": f"pit-deploy {salt}"}]):
        yield


def _saved(figure: Figure, form: str) -> bytes:
    buffer = io.BytesIO()
    without = {"Date": None, "Creator": None, "Format": None, "Type": None}
    figure.savefig(buffer, format=form, transparent=True, metadata=without)
    return buffer.getvalue()


def _ticker() -> Any:
    import matplotlib.ticker

    return matplotlib.ticker


def _worst_of_each(values: np.ndarray) -> np.ndarray:
    """Indices to draw: all, or the worst of each of `MAX_POINTS` runs."""
    if len(values) <= MAX_POINTS:
        return np.arange(len(values))
    badness = np.where(np.isfinite(values), values, np.inf)
    runs = np.array_split(np.arange(len(values)), MAX_POINTS)
    return np.array([run[badness[run].argmax()] for run in runs])


def shade_prompts(axes: Axes, prompt_lengths: Sequence[int], positions: int) -> None:
    start = 0
    for number, length in enumerate(prompt_lengths, 1):
        if number % 2 == 0:
            axes.axvspan(start - 0.5, start + length - 0.5, color=COLOURS["band"], linewidth=0, zorder=0)
        if len(prompt_lengths) > 1 and length >= 0.05 * positions:
            place = axes.get_xaxis_transform()
            axes.text(
                start + length / 2, 0.995, str(number), transform=place, ha="center", va="top", fontsize=8
            )
        start += length


def dots(
    axes: Axes,
    x: np.ndarray,
    y: np.ndarray,
    chosen: np.ndarray,
    marker: str,
    size: float,
    colour: str,
    label: str | None,
) -> None:
    if chosen.any():
        axes.plot(
            x[chosen],
            y[chosen],
            linestyle="none",
            marker=marker,
            markersize=size,
            markeredgewidth=0,
            color=COLOURS[colour],
            label=label,
            clip_on=False,
            zorder=3,
        )


def _gate_line(axes: Axes, gate: float | None, label: str, low: float, high: float) -> None:
    if gate is not None and low <= gate <= high:
        axes.axhline(gate, color=COLOURS["gate"], linestyle="--", linewidth=1.2, label=label)


def log_axis(axis: Any, low: float, high: float) -> None:
    axis.axes.set(**{f"{axis.axis_name}scale": "log", f"{axis.axis_name}lim": (low, high)})
    axis.set_major_locator(_ticker().LogLocator(numticks=7))
    axis.set_minor_locator(_ticker().NullLocator())
    axis.set_major_formatter(_ticker().FuncFormatter(_power))


def _power(value: float, _: int) -> str:
    return "10" + str(round(np.log10(value))).translate(_SUPERSCRIPT)


def legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[1]:
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(0, 1),
            ncols=3,
            borderaxespad=0.2,
            columnspacing=1.2,
            handlelength=1.5,
        )
