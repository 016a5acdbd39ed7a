"""Reports that a person reads: one HTML file each, with its plots and styles inside and nothing to fetch.

Reports work from what the verbs return (`ParityReport`, `ExportReport`, `ConversionReport`); the pages are
templates/*.html.j2, where every text is escaped.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from pit_deploy import report_figures as figures
from pit_deploy.errors import InputError
from pit_deploy.extras import require
from pit_deploy.files import atomic_output
from pit_deploy.gates import TIE, Gate
from pit_deploy.manifest import Manifest
from pit_deploy.manifest_reader import parse_manifest

if TYPE_CHECKING:
    from pit_deploy.conversion import ConversionReport
    from pit_deploy.exporting import ExportReport
    from pit_deploy.parity import LayerError, ParityReport

WANTED_POSITIONS = 256
_TOKENIZER_FILES = {
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
}
_BITS = {"fp32": 32, "fp16": 16, "int8": 8, "int4": 4}


class ChatAnswer(TypedDict):
    """The question of the demo and what the exported model said."""

    prompt: str
    answer: str
    tokens_per_second: float


@dataclass(frozen=True)
class GatedFigure:
    """A row of the table of figures: `met` is None where no gate decides."""

    name: str
    measured: str
    gate: str
    met: bool | None


@dataclass(frozen=True)
class Plot:
    """An `<svg>` element with its heading and the sentence below it."""

    title: str
    svg: str
    caption: str


@dataclass(frozen=True)
class BundleRow:
    """A bundle of the demo with the check that it went through, if any."""

    export: ExportReport
    parity: ParityReport | None

    @property
    def name(self) -> str:
        same = self.export.weights == self.export.tables
        precision = self.export.weights if same else f"{self.export.weights}/{self.export.tables}"
        return f"{precision} {self.export.layout}"


def require_report_packages() -> None:
    """Raise `MissingExtraError` where what reports are made with is not installed; call it before long work."""
    require("jinja2", "bench")
    require("matplotlib", "bench")


def write_parity_report(report: ParityReport, path: str | Path, *, title: str | None = None) -> None:
    """Write what `verify` found as one HTML file; an existing one is replaced.

    Raises `MissingExtraError` before anything is written, and leaves the old file where writing fails.
    """
    require_report_packages()
    plots = [_positions(report, "max_abs"), _positions(report, "kl"), _histogram(report)]
    if report.layers:
        plots.append(_layers(report))
    write_page(
        "parity.html.j2",
        path,
        title=title or f"Parity of {Path(report.bundle).name or report.bundle}",
        report=report,
        figures=gated_figures(report),
        plots=plots,
    )


def write_demo_report(
    path: str | Path,
    *,
    conversion: ConversionReport,
    exports: Sequence[ExportReport],
    parities: Sequence[ParityReport],
    chat: ChatAnswer,
    timings: Mapping[str, float],
) -> None:
    """Write the chain that `demo` ran as one HTML file; an existing one is replaced.

    A parity report belongs to the export with the same path. `timings` are seconds by step. Raises as
    `write_parity_report` does, and `InputError` where there is no export.
    """
    require_report_packages()
    if not exports:
        raise InputError("a demo report needs at least one exported bundle.")
    by_path = {Path(p.bundle).absolute(): p for p in parities}
    rows = [BundleRow(e, by_path.get(Path(e.out).absolute())) for e in exports]
    parts = [sizes_by_part(e) for e in exports]
    write_page(
        "demo.html.j2",
        path,
        title="pit-deploy demo",
        conversion=conversion,
        rows=rows,
        parts=parts,
        failed=[r for r in rows if r.parity is not None and not r.parity.passed],
        unchecked=[r for r in rows if r.parity is None],
        folds=list(dict.fromkeys(fold for e in exports for fold in e.folds)),
        sizes=_sizes(rows, parts),
        plots=_side_by_side([r for r in rows if r.parity is not None]),
        chat=chat,
        timings=timings,
        commands=_commands(conversion, exports),
    )


def gated_figures(report: ParityReport) -> list[GatedFigure]:
    """Every figure of a comparison against its gate."""
    gate, count = report.gate, len(report.kl)
    finite = int((np.isfinite(report.kl) & np.isfinite(report.max_abs)).sum())
    agree = int(report.top1.sum())
    rows = [
        GatedFigure("Positions with finite logits", f"{finite:,} of {count:,}", "all", finite == count),
        _at_most("Largest logit error", report.worst_abs, gate.max_abs),
        _at_most("Mean KL", report.mean_kl, gate.mean_kl),
        GatedFigure("Largest KL", number(float(report.kl.max())), "no gate", None),
        GatedFigure(
            "Top-1 agreement",
            f"{report.top1_rate:.2%} ({agree:,} of {count:,})",
            f"at least {100 * gate.top1:g}%",
            report.top1_rate >= gate.top1,
        ),
        GatedFigure(
            "Greedy tokens that agree",
            f"{report.greedy_equal} of {report.greedy_tokens}",
            "all" if gate.greedy else "no gate",
            report.greedy_equal >= report.greedy_tokens if gate.greedy else None,
        ),
        GatedFigure("One pass against step by step", number(report.prefill_max_abs), "no gate", None),
    ]
    if report.layers:
        rows.append(_worst_layer(report.layers, gate))
    return rows


def sizes_by_part(export: ExportReport) -> dict[str, int]:
    """Bytes by part: `tables`, `weights`, `tokenizer`, `golden`, `other` (configuration, licence, manifest).

    Runtimes keep tables and weights in one file: there the tables are computed from the manifest's shapes, and
    what is left counts as weights. Where the manifest cannot be read all of it does.
    """
    found = dict.fromkeys(("tables", "weights", "tokenizer", "golden", "other"), 0)
    for name, size in export.parts.items():
        file = name.rsplit("/", 1)[-1]
        if file in _TOKENIZER_FILES:
            part = "tokenizer"
        elif file.startswith("golden."):
            part = "golden"
        elif name.startswith(("model", "prefill.mlpackage")):
            part = "weights"
        else:
            part = "other"
        found[part] += size
    try:
        manifest = parse_manifest((Path(export.out) / "manifest.json").read_bytes())
    except (OSError, InputError):
        return found
    found["tables"] = min(table_bytes(manifest), found["weights"])
    found["weights"] -= found["tables"]
    return found


def table_bytes(manifest: Manifest) -> int:
    """Bytes of the embedding and head tables: codes, scales (Core ML's in float16), and zero points if any."""
    bits, width = _BITS[manifest.precision.tables], manifest.architecture.hidden_size
    row = math.ceil(width * bits / 8)
    if bits < 16:
        blocks = math.ceil(width / (manifest.precision.block_size or width))
        scale = 2 if manifest.runtime == "coreml" else 4
        row += scale * blocks + (0 if manifest.precision.symmetric else math.ceil(blocks * bits / 8))
    return row * manifest.vocab_size * (1 if manifest.layout == "shared" else 2)


def number(value: float | None) -> str:
    """A figure for people: four digits, and words for what is no number."""
    if value is None:
        return "not measured"
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "infinite"
    return f"{value:.4g}"


def _at_most(name: str, value: float, limit: float | None) -> GatedFigure:
    if limit is None:
        return GatedFigure(name, number(value), "no gate", None)
    return GatedFigure(name, number(value), f"at most {limit:g}", value <= limit)


def _worst_layer(layers: Sequence[LayerError], gate: Gate) -> GatedFigure:
    """The layer with the largest median; it says where an error starts and decides nothing by itself."""
    worst = max(layers, key=lambda e: e.median if math.isfinite(e.median) else math.inf)
    name = f"Median relative error after {layer_name(worst.layer)}, the worst"
    return GatedFigure(name, number(worst.median), f"at most {gate.layer:g}", worst.median <= gate.layer)


def layer_name(layer: int) -> str:
    """Of a hidden state: 0 is the embedding, n the output of layer n - 1."""
    return "the embedding" if layer == 0 else f"layer {layer - 1}"


def _positions(
    report: ParityReport,
    what: str,
    *,
    name: str = "",
    of: str = "",
    limits: tuple[float, float] | None = None,
) -> Plot:
    """The plot of `max_abs` or `kl` by position; `of` names the bundle where there are several."""
    values = getattr(report, what)
    title, label, gate_label = "Logit error by position", "max abs logit error", "gate"
    gate = report.gate.max_abs
    if what == "kl":
        title, label, gate_label, gate = (
            "KL by position",
            "KL in nats",
            "gate of the mean",
            report.gate.mean_kl,
        )
    caption = _spread(values, report.prompt_lengths)
    if len(report.prompt_lengths) > 1:
        caption += " Bands and numbers separate the prompts."
    if (values == 0).any():
        caption += " Zeros are drawn at the lower edge."
    if len(values) > figures.MAX_POINTS:
        run = math.ceil(len(values) / figures.MAX_POINTS)
        caption += f" Of every {run} positions at most, the worst is drawn."
    draw = partial(figures.draw_positions, values=values, prompt_lengths=report.prompt_lengths, label=label)
    draw = partial(draw, gate=gate, gate_label=gate_label, agrees=report.top1, limits=limits)
    return _plot(title + of, caption, name or what, draw)


def _histogram(report: ParityReport) -> Plot:
    finite = report.max_abs[np.isfinite(report.max_abs)]
    left_out = len(report.max_abs) - len(finite)
    caption = "No logits are finite." if not len(finite) else ""
    if len(finite):
        low, middle, high = map(number, np.percentile(finite, [5, 50, 95]))
        caption = f"Nine positions of ten lie between {low} and {high}, half below {middle}."
    if left_out:
        caption += f" {left_out:,} positions that are not finite are left out."
    draw = partial(figures.draw_histogram, values=report.max_abs, label="max abs logit error")
    return _plot(
        "How often which logit error occurs", caption, "histogram", partial(draw, gate=report.gate.max_abs)
    )


def _layers(
    report: ParityReport, *, name: str = "layers", of: str = "", limits: tuple[float, float] | None = None
) -> Plot:
    first = report.first_diverging_layer
    caption = "Every layer's median is within its gate."
    if first is not None:
        caption = f"The first median past its gate is that after {layer_name(first)}."
    draw = partial(figures.draw_layers, layers=report.layers, gate=report.gate.layer, limits=limits)
    return _plot(f"Error by layer{of}", caption, name, draw)


def _plot(title: str, caption: str, name: str, draw: Any, height: float = figures.HEIGHT) -> Plot:
    svg = figures.inline_svg(draw, name=name, label=f"{title}. {caption}", height=height)
    return Plot(title, svg, caption)


def _spread(values: np.ndarray, prompt_lengths: Sequence[int]) -> str:
    """Median, and the largest with its place."""
    bad = ~np.isfinite(values)
    place = int(np.where(bad, -np.inf, values).argmax())
    prompt, offset = 1, place
    for length in prompt_lengths[:-1]:
        if offset < length:
            break
        prompt, offset = prompt + 1, offset - length
    if bad.all():
        return "No value is finite."
    middle, largest = float(np.median(values[~bad])), float(values[place])
    found = f"Median {number(middle)}, largest {number(largest)} at position {place}"
    found += f" (prompt {prompt}, token {offset})." if len(prompt_lengths) > 1 else "."
    return found + (f" {int(bad.sum()):,} values are not finite." if bad.any() else "")


def _side_by_side(rows: Sequence[BundleRow]) -> list[Plot]:
    """Error by position of each bundle, then by layer, on the same scales."""
    checked = [(row, row.parity) for row in rows if row.parity is not None]
    errors = [(p.max_abs, p.gate.max_abs) for _, p in checked]
    limits = figures.log_limits(*(v for pair in errors for v in pair))
    plots = [
        _positions(parity, "max_abs", name=f"error-{i}", of=f", {row.name}", limits=limits)
        for i, (row, parity) in enumerate(checked)
    ]
    layered = [(row, p) for row, p in checked if p.layers]
    medians = [np.array([[e.median, e.largest] for e in p.layers]) for _, p in layered]
    limits = figures.log_limits(*medians, *(p.gate.layer for _, p in layered))
    return plots + [
        _layers(parity, name=f"layers-{i}", of=f", {row.name}", limits=limits)
        for i, (row, parity) in enumerate(layered)
    ]


def _sizes(rows: Sequence[BundleRow], parts: Sequence[Mapping[str, int]]) -> Plot:
    title = "Size by part"
    totals = [f"{row.name} {_megabytes(sum(p.values()))}" for row, p in zip(rows, parts, strict=True)]
    caption = f"{', '.join(totals)}."
    if any(p["tables"] for p in parts):
        caption += " The tables are computed from the manifest; what is left of the model is weights."
    else:
        caption += " The tables are counted as weights, because no manifest could be read."
    draw = partial(figures.draw_sizes, names=[r.name for r in rows], parts=parts)
    return _plot(title, caption, "sizes", draw, height=1.4 + 0.35 * len(rows))


def _commands(conversion: ConversionReport, exports: Sequence[ExportReport]) -> list[tuple[str, str]]:
    smallest = shlex.quote(min(exports, key=lambda e: e.total_bytes).out)
    pit = shlex.quote(conversion.out)
    return [
        ("Ask something else.", f'pit-deploy run {smallest} --chat --prompt "..."'),
        ("Measure speed and memory here.", f"pit-deploy bench {smallest}"),
        (
            "Compare with the checkpoint itself.",
            f"pit-deploy verify {smallest} --source {pit} --html parity.html",
        ),
    ]


def _megabytes(size: float | None) -> str:
    return "not measured" if size is None else f"{size / 1e6:,.1f} MB"


def _percent(value: float) -> str:
    return f"{value:.2%}" if math.isfinite(value) else number(value)


def write_page(template: str, path: str | Path, **context: Any) -> None:
    """Fill a template and write it as one HTML file; an existing one is replaced."""
    jinja2 = require("jinja2", "bench")
    # Not select_autoescape: it goes by the file's ending, and these end in .j2.
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(number=number, megabytes=_megabytes, percent=_percent)
    try:
        context["version"] = version("pit-deploy")
    except PackageNotFoundError:
        context["version"] = ""
    text = environment.get_template(template).render(**context, wanted_positions=WANTED_POSITIONS, tie=TIE)
    with atomic_output(path, overwrite=True, directory=False) as partial_path:
        # A file name that is not UTF-8 reaches us as half surrogate pairs, which no page can hold.
        partial_path.write_bytes(text.encode("utf-8", "replace"))
