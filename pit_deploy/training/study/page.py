"""The page of the study: tables with intervals, and plots, from the results alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pit_deploy.training.diagnostics import confidence

Rows = dict[str, list[dict[str, Any]]]

_HEAD = """# Figures of the study

Made by `make study` from [results.json](results.json). Losses are nats a token of held-out text; ± is half a 95 %
interval (Student's t over seeds).
"""


def write_page(results: dict[str, Any], out: Path) -> None:
    """Write `tables.md` and the plots of `results` into `out/study`; docs/study.md says what they mean."""
    parts = [_HEAD]
    for stage, rows in results.items():
        parts += [f"## {stage[0].upper()}{stage[1:]}", ""]
        if stage.startswith("search"):
            parts += _search(rows)
        elif stage == "quantised":
            parts += _quantised(rows)
        elif stage == "adaptation":
            parts += _adaptation(rows)
        else:
            parts += _losses(rows)
            if stage.startswith("scratch") and {"tied", "pit"} <= set(rows):
                parts += _difference(rows)
            if stage.startswith("continued"):
                parts += _curves(rows)
            name = stage.replace(", ", "-").replace(" ", "-")
            _plot(rows, out / "study" / f"{name}.svg", stage)
            parts += [f"![held-out loss by step]({name}.svg)", ""]
    (out / "study" / "tables.md").write_text("\n".join(parts).rstrip() + "\n", encoding="utf-8")


def shown(values: Sequence[float], digits: int = 3) -> str:
    """Mean and interval; the bare value where there is one seed."""
    mean, half = confidence(values)
    return f"{mean:.{digits}f}" if half != half else f"{mean:.{digits}f} ± {half:.{digits}f}"


def _search(rows: Rows) -> list[str]:
    lines = []
    for side, runs in rows.items():
        best = min(r["final"] for r in runs)
        lines += [
            f"**{side}**: {len(runs)} settings, seed {runs[0]['run']['seed']}.",
            "",
            "| setting | loss |",
            "| --- | --- |",
        ]
        for r in runs:
            name = ", ".join(f"{k} {r['run'][k]:g}" for k in _knobs(side))
            loss = f"**{r['final']:.3f}**" if r["final"] == best else f"{r['final']:.3f}"
            lines.append(f"| {name} | {loss} |")
        lines.append("")
    return lines


def _knobs(side: str) -> tuple[str, ...]:
    own = ("std",) if side == "tied" else ("scale", "decay")
    return ("learning_rate", "rate", *own, "multiplier")


def _losses(rows: Rows) -> list[str]:
    lines = _header(
        "model", "held-out loss", "seeds", "largest delta_TI", "largest entry of ZᵀZ - I", "condition of T"
    )
    for name, runs in rows.items():
        figures = []
        for key in ("interface_error", "orthonormality_error", "condition"):
            values = [r[key] for r in runs if r.get(key) is not None]
            figures.append(f"{max(values):.2g}" if values else "-")
        lines.append(
            f"| {name} | {shown([r['final'] for r in runs])} | {len(runs)} | {' | '.join(figures)} |"
        )
    return [*lines, ""]


def _difference(rows: Rows) -> list[str]:
    pairs = [b["final"] - a["final"] for a, b in zip(rows["tied"], rows["pit"], strict=False)]
    listed = ", ".join(f"{d:+.3f}" for d in pairs)
    return [f"PIT minus tied, seed by seed: {shown(pairs)} nats ({listed}).", ""]


def _curves(rows: Rows) -> list[str]:
    steps = [int(s) for s, _ in next(iter(rows.values()))[0]["eval"]]
    lines = _header("", *map(str, steps))
    means = {
        name: [confidence([r["eval"][i][1] for r in runs])[0] for i in range(len(steps))]
        for name, runs in rows.items()
    }
    lines += [f"| {name} | {' | '.join(f'{v:.3f}' for v in values)} |" for name, values in means.items()]
    tied = means.get("stays tied")
    if tied is not None:
        lines += ["", "Largest excess over the tied curve at any evaluation (means over seeds):", ""]
        lines += [
            f"- {name}: {max(v - t for v, t in zip(values, tied, strict=True)):+.3f} nats"
            for name, values in means.items()
            if name != "stays tied"
        ]
    return [*lines, ""]


def _adaptation(rows: Rows) -> list[str]:
    lines = _header(
        "model, method",
        "loss on the new text",
        "KL on the old text",
        "its loss before",
        "change",
        "top-1 kept",
    )
    for name, runs in rows.items():
        effects = {k: [r["side_effects"][k] for r in runs] for k in runs[0]["side_effects"]}
        cells = [shown(effects[k]) for k in ("kl", "loss_before", "loss_change", "top1_kept")]
        lines.append(f"| {name} | {shown([r['final'] for r in runs])} | {' | '.join(cells)} |")
    return [*lines, ""]


def _quantised(rows: Rows) -> list[str]:
    lines = ["| model | tables | KL |", "| --- | --- | --- |"]
    for name, runs in rows.items():
        for key in runs[0]["kl"]:
            values = [1e3 * r["kl"][key] for r in runs]
            lines.append(f"| {name} | {key} | {shown(values, 4)} e-3 |")
    return [*lines, ""]


def _header(*names: str) -> list[str]:
    return [f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}"]


def _plot(rows: Rows, file: Path, stage: str) -> None:
    """Mean held-out loss by step, one line a model, with the interval as a band."""
    from pit_deploy import report_figures as figures
    from pit_deploy.training.pages import draw_series

    series, bands = {}, {}
    for name, runs in rows.items():
        steps = [int(s) for s, _ in runs[0]["eval"]]
        points = [confidence([r["eval"][i][1] for r in runs]) for i in range(len(steps))]
        first = (
            1 if stage.startswith(("scratch", "over", "var")) else 0
        )  # untrained losses would flatten the rest
        series[name] = [(s, mean) for s, (mean, _) in zip(steps, points, strict=True)][first:]
        bands[name] = [half for _, half in points][first:]
    text = figures.standalone_svg(draw_series(series, "nats per token", bands=bands), name=file.stem)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
