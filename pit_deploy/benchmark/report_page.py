"""report.html: bench reports as a page that is readable on a phone. One file, nothing to fetch, no script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pit_deploy import report_figures as figures
from pit_deploy.benchmark import report_series as series
from pit_deploy.benchmark.report_series import Entry, Group, Point
from pit_deploy.report import Plot, number, require_report_packages, write_page

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("data", "weights", "tokenizer", "golden", "bad", "other", "soft")
_MARKERS = (("o", "●"), ("s", "■"), ("^", "▲"), ("D", "◆"), ("v", "▼"), ("P", "✚"), ("X", "✖"))
"""matplotlib's marker, and the character that looks like it in the legend."""


@dataclass(frozen=True)
class Key:
    """A line of the legend."""

    label: str
    colour: str
    sign: str


@dataclass(frozen=True)
class SummaryRow:
    """A subject in the table of a machine; figures at the number of threads that decodes fastest."""

    entry: Entry
    threads: int | None
    decode: str
    prefill: str
    memory: str
    quality: str


@dataclass(frozen=True)
class _Section:
    group: Group
    keys: list[Key]
    rows: list[SummaryRow]
    plots: list[Plot]
    errors: list[str]
    notes: list[str]


def write_bench_report(
    paths: Sequence[Path | str], out: Path | str = "report.html", *, title: str = "Benchmarks"
) -> None:
    """Merge the JSON files of `bench` into one HTML file at `out`; an existing one is replaced.

    Machines have sections of their own. Raises `InputError` for a file that is no bench report, and
    `MissingExtraError`, before anything is written.
    """
    require_report_packages()
    groups = series.merge(series.read_reports(paths))
    write_page(
        "bench.html.j2",
        out,
        title=title,
        sections=[_section(group, number) for number, group in enumerate(groups)],
        files=[Path(path).name for path in paths],
    )


def _section(group: Group, number: int) -> _Section:
    keys = [Key(entry.label, _colour(n), _marker(n)[1]) for n, entry in enumerate(group.entries)]
    errors = [
        f"{e.label}, {_threads(run.threads)}: {run.error}"
        for e in group.entries
        for run in e.subject.runs
        if run.error is not None
    ]
    notes = [f"{e.label}: {note}" for e in group.entries for note in e.subject.notes]
    rows = [_summary(entry) for entry in group.entries]
    return _Section(group, keys, rows, _plots(group, number), errors, [*group.notes, *notes])


def _summary(entry: Entry) -> SummaryRow:
    speeds = series.decode_by_threads(entry)
    best = max(speeds, key=lambda point: point.y, default=None)
    run = None if best is None else entry.run(int(best.x))
    prefill = "-" if run is None or not run.prefill else number(run.prefill[0].tokens_per_second.median)
    memory = "-" if run is None or run.memory is None else f"{run.memory.peak_bytes.median / 1e6:,.0f} MB"
    quality = entry.subject.quality
    return SummaryRow(
        entry,
        None if best is None else int(best.x),
        "-" if best is None else number(best.y),
        prefill,
        memory,
        "not compared" if quality is None else f"{number(quality.mean_kl)}, {quality.top1:.1%}",
    )


def _plots(group: Group, section: int) -> list[Plot]:
    """The plots for which there are figures."""
    plots: list[Plot] = []

    def add(title: str, caption: str, name: str, draw: Callable[[Axes], None], height: float = 3.0) -> None:
        svg = figures.inline_svg(
            draw, name=f"bench-{section}-{name}", label=f"{title}. {caption}", height=height
        )
        plots.append(Plot(title, svg, caption))

    for threads in group.threads:
        lines = [series.latency_by_depth(entry, threads) for entry in group.entries]
        if any(lines):
            draw = partial(_draw_lines, lines=lines, x="tokens in the cache", y="ms a token")
            add(
                f"Latency against context depth, {_threads(threads)}",
                "Lower is better. Whiskers reach from the fastest to the slowest sample.",
                f"depth-{threads}",
                draw,
            )
    lines = [series.decode_by_threads(entry) for entry in group.entries]
    if len(group.threads) > 1 and any(lines):
        depth = min(d.depth for e in group.entries for r in e.subject.runs for d in r.decode)
        add(
            "Decoding against threads",
            f"Higher is better; {depth} tokens in the cache before.",
            "threads",
            partial(_draw_lines, lines=lines, x="threads", y="tokens a second", ticks=group.threads),
        )
    points = [series.bytes_and_kl(entry) for entry in group.entries]
    if any(points):
        add(
            "Bytes against KL",
            "Nearer to the lower left is better: a smaller file, closer to the training-time model.",
            "kl",
            partial(_draw_points, points=points),
        )
    shares = [series.bandwidth_shares(entry) for entry in group.entries]
    labels = [entry.label for entry in group.entries]
    if any(shares):
        add(
            "Share of the bandwidth limit",
            "Of what reading the weights once a token could reach, by what the memory gives. Near 1, only fewer bytes "
            "can make decoding faster; weights that fit the processor's caches can go beyond.",
            "bandwidth",
            partial(
                _draw_shares,
                shares=shares,
                labels=labels,
                threads=group.threads,
            ),
            height=1.3 + 0.3 * len(shares) * max(1, len(group.threads)),
        )
    return plots


def _draw_lines(
    axes: Axes, lines: Sequence[Sequence[Point]], *, x: str, y: str, ticks: Sequence[int] | None = None
) -> None:
    for index, points in enumerate(lines):
        if not points:
            continue
        values = [p.y for p in points]
        whiskers = [[p.y - p.low for p in points], [p.high - p.y for p in points]]
        axes.errorbar([p.x for p in points], values, yerr=whiskers, **_look(index), linewidth=1.3, capsize=2)
    axes.set_ylim(bottom=0)
    axes.margins(x=0.08)
    if ticks is not None:
        axes.set_xticks(list(ticks))
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def _draw_points(axes: Axes, points: Sequence[Point | None]) -> None:
    found = [(n, p) for n, p in enumerate(points) if p is not None]
    # A KL of 0 lies on no log scale: it is drawn on the lower edge.
    low, high = figures.log_limits(*(p.y for _, p in found))
    for index, point in found:
        axes.plot([point.x], [max(point.y, low)], linestyle="none", **_look(index), clip_on=False)
    largest = max(p.x for _, p in found)
    axes.set_xlim(0, 1.1 * largest or 1)
    figures.log_axis(axes.yaxis, low, high)
    axes.set_xlabel("MB of the model on disk")
    axes.set_ylabel("mean KL in nats")


def _draw_shares(
    axes: Axes, shares: Sequence[dict[int, float]], *, labels: Sequence[str], threads: Sequence[int]
) -> None:
    rows: list[tuple[str, float, str]] = []
    for index, (label, found) in enumerate(zip(labels, shares, strict=True)):
        name = label if len(label) <= 22 else f"{label[:21]}…"
        rows += [(f"{name}, {n}", found[n], _colour(index)) for n in threads if n in found]
    places = range(len(rows))
    axes.barh(
        list(places), [share for _, share, _ in rows], 0.65, color=[figures.COLOURS[c] for *_, c in rows]
    )
    for place, (_, share, _) in zip(places, rows, strict=True):
        axes.text(share, place, f" {share:.2f}", va="center", fontsize=9)
    axes.axvline(1, color=figures.COLOURS["gate"], linestyle="--", linewidth=1.2)
    axes.set_yticks(list(places), [name for name, *_ in rows])
    axes.invert_yaxis()
    axes.grid(False)
    axes.set_xlim(0, max(1.1, 1.2 * max(share for _, share, _ in rows)))
    axes.set_xlabel("share of the limit; after the name: threads")


def _look(index: int) -> dict[str, Any]:
    """Colour and marker of the subject with this number."""
    return {
        "color": figures.COLOURS[_colour(index)],
        "marker": _marker(index)[0],
        "markersize": 6,
        "markeredgewidth": 0,
    }


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _marker(index: int) -> tuple[str, str]:
    """Another one with each turn of the colours, so that 49 subjects look different."""
    return _MARKERS[(index + index // len(COLOURS)) % len(_MARKERS)]
