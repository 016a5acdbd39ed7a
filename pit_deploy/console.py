"""What commands print for a person: short tables and the next command."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from pit_deploy.conversion import ConversionReport
    from pit_deploy.demo import DemoResult
    from pit_deploy.exporting import ExportReport
    from pit_deploy.generate import Generation
    from pit_deploy.parity import ParityReport
    from pit_deploy.running import Answer
    from pit_deploy.text_parity import TextReport
    from pit_deploy.training.run import TrainingReport

out = Console(highlight=False, soft_wrap=True)


def done(sentence: str, following: str | None = None) -> None:
    """A closing sentence, and the command that a user would run next."""
    out.print(escape(sentence))
    if following:
        out.print(f"[dim]Next:[/] {escape(following)}")


def notes(items: list[str]) -> None:
    for item in items:
        out.print(f"[yellow]Note:[/] {escape(item)}.")


def megabytes(count: int | None) -> str:
    if count is None:
        return "-"
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count / 1e3:,.1f} kB"


def print_conversion(report: ConversionReport) -> None:
    table = _table("what", "source", "PIT")
    table.add_row(
        "interface error (delta_TI)", _number(report.interface_error_source), _number(report.interface_error)
    )
    table.add_row("loss, nats a token", _number(report.loss_source, ".4f"), _number(report.loss, ".4f"))
    table.add_row("condition of T", "", _number(report.condition, ".4g"))
    table.add_row("largest difference of a logit", "", _number(report.max_logit_difference))
    out.print(table)
    notes(report.notes)
    if report.bridge == "none" and report.init == "polar":
        out.print(
            "[yellow]Note:[/] without a bridge the embedding is new to the backbone; train before you export."
        )
    done(
        f"The PIT checkpoint is in {report.out} (bridge: {report.bridge}).",
        f"pit-deploy export {report.out} bundle",
    )


def print_training(report: TrainingReport) -> None:
    table = _table("what", "value")
    table.add_row("steps", f"{report.steps:,}")
    table.add_row("tokens", f"{report.tokens:,}")
    table.add_row("held-out loss before", _number(report.loss_before, ".4f"))
    table.add_row("held-out loss after", _number(report.loss, ".4f"))
    table.add_row("interface error (delta_TI)", _number(report.interface_error))
    table.add_row("largest entry of |ZᵀZ - I|", _number(report.orthonormality_error))
    table.add_row("condition of T", _number(report.condition, ".4g"))
    table.add_row("loss spikes", f"{report.spikes}")
    out.print(table)
    notes(report.notes)
    done(
        f"The trained checkpoint is in {report.out} (bridge: {report.bridge}), the log in {report.run_folder}.",
        f"pit-deploy export {report.out} bundle",
    )


def print_export(report: ExportReport) -> None:
    table = _table("file", "size")
    for name, size in sorted(report.parts.items(), key=lambda item: -item[1]):
        table.add_row(escape(name), megabytes(size))
    table.add_row("[bold]in all[/]", f"[bold]{megabytes(report.total_bytes)}[/]")
    out.print(table)
    if report.quantization:
        q = report.quantization
        out.print(
            f"Rounding error (relative RMS): mean {q['mean_relative_rms']:.2e}, worst {q['worst_relative_rms']:.2e} "
            f"in {escape(q['worst'])}."
        )
    if report.choice:
        c = report.choice
        counts = Counter(group["bits"] for group in c["groups"])
        chosen = ", ".join(f"{bits} bits for {counts[bits]}" for bits in sorted(counts, reverse=True))
        out.print(
            f"The search chose {chosen} of {len(c['groups'])} groups: KL {c['kl']:.3g} on calibration text, "
            f"{megabytes(c['nbytes'])}."
        )
    notes(report.notes)
    what = f"weights {report.weights}, tables {report.tables}, layout {report.layout}"
    following = None if report.to == "hf" else f"pit-deploy verify {report.out}"
    done(f"Written to {report.out}: {what}.", following)


def print_parity(report: ParityReport) -> None:
    gate = report.gate
    table = _table("figure", "value", "limit")
    table.add_row(
        "max abs logit error", f"{report.worst_abs:.3g}", "-" if gate.max_abs is None else f"{gate.max_abs:g}"
    )
    table.add_row("mean KL", f"{report.mean_kl:.3g}", f"{gate.mean_kl:g}")
    table.add_row("top-1 agreement", f"{report.top1_rate:.2%}", f"{gate.top1:.1%}")
    limit = f"{report.greedy_tokens}" if gate.greedy else "-"
    table.add_row("greedy tokens equal", f"{report.greedy_equal} of {report.greedy_tokens}", limit)
    table.add_row("one pass against steps", f"{report.prefill_max_abs:.3g}", "-")
    table.add_row("size on disk", megabytes(report.total_bytes), "-")
    table.add_row("memory taken at load", megabytes(report.load_rss_bytes), "-")
    out.print(table)
    if report.layers:
        print_layers(report)
    notes(report.notes)
    verdict = "[green]passed[/]" if report.passed else "[red]out of tolerance[/]"
    out.print(
        f"{escape(report.bundle)} in {report.runtime}, {report.precision}: {verdict} on {len(report.kl)} positions "
        f"against the {escape(report.reference)}."
    )


def print_text_parity(report: TextReport) -> None:
    out.print(f"prompt     {escape(report.prompt)}")
    out.print(f"expected   {escape(report.expected)}")
    out.print(f"generated  {escape(report.found)}")
    verdict = "[green]passed[/]" if report.passed else "[red]out of tolerance[/]"
    same = "equal to" if report.equal else "different from"
    whose = "training time's" if report.required else f"that of {report.reference}"
    out.print(
        f"{escape(report.bundle)} in {report.runtime}, {report.precision}: {verdict}; the greedy text of "
        f"{report.tokens} tokens is {same} {whose}."
    )


def print_layers(report: ParityReport) -> None:
    table = _table("hidden state after", "relative error, median", "largest")
    first = report.first_diverging_layer
    for error in report.layers:
        name = "embedding" if error.layer == 0 else f"layer {error.layer - 1}"
        style = "bold red" if error.layer == first else None
        table.add_row(name, f"{error.median:.2e}", f"{error.largest:.2e}", style=style)
    out.print(table)


def print_inspection(found: dict[str, Any]) -> None:
    table = _table("what", "value")
    for key, value in found.items():
        if key in ("notes", "lens") or value is None:
            continue
        table.add_row(key.replace("_", " "), escape(_plain(key, value)))
    out.print(table)
    if "lens" in found:
        table = _table("head after layer", "KL to the end", "top-1 as the end", "entropy")
        for row in found["lens"]:
            table.add_row(
                f"{row['layer']}", f"{row['kl']:.3g}", f"{row['top1']:.1%}", f"{row['entropy']:.3g}"
            )
        out.print(table)
    notes(found.get("notes", []))


def print_generation(answer: Answer) -> None:
    generation = answer.generation
    out.print()
    prompt, new = f"{generation.prompt_tokens} prompt tokens", f"{len(generation.ids)} tokens"
    if answer.timed:
        prompt += f" in {generation.prefill_seconds:.2f} s"
        new += f" at {generation.tokens_per_second:.1f} a second"
    Console(stderr=True, highlight=False).print(
        f"[dim]{prompt}, {new}, ended by {generation.finish_reason}{_speculation(generation)}[/]"
    )


def _speculation(generation: Generation) -> str:
    counts = generation.speculation
    if counts is None:
        return ""
    return f"; {counts.accepted} of {counts.drafted} drafted tokens were right, in {counts.passes} passes"


def print_demo(result: DemoResult) -> None:
    table = _table("bundle", "size", "max abs error", "mean KL", "top-1", "greedy", "verdict")
    for report in result.parities:
        verdict = "[green]passed[/]" if report.passed else "[red]failed[/]"
        table.add_row(
            f"onnx-{report.precision}",
            megabytes(report.total_bytes),
            f"{report.worst_abs:.2e}",
            f"{report.mean_kl:.2e}",
            f"{report.top1_rate:.2%}",
            f"{report.greedy_equal} of {report.greedy_tokens}",
            verdict,
        )
    out.print(table)
    conversion = result.conversion
    if result.training is not None:
        t = result.training
        out.print(
            f"Trained for {t.steps} steps: held-out loss {_number(t.loss_before, '.4f')} to {_number(t.loss, '.4f')}, "
            f"delta_TI {_number(t.interface_error)}."
        )
    out.print(
        f"Interface error delta_TI: {_number(conversion.interface_error_source)} in the tied source, "
        f"{_number(conversion.interface_error)} with PIT; logits changed by at most "
        f"{_number(conversion.max_logit_difference)}."
    )
    out.print(f"[bold]Q:[/] {escape(result.question)}\n[bold]A:[/] {escape(result.answer.strip())}")
    done(
        f"{sum(result.seconds.values()):.0f} s in all; the report is {result.out / 'report.html'}.",
        f'pit-deploy run {result.out / "onnx-int8"} --chat --prompt "..."',
    )


def _plain(key: str, value: Any) -> str:
    if key == "parts":
        return "\n".join(f"{name}  {megabytes(size)}" for name, size in value.items())
    if key.endswith("_bytes"):
        return megabytes(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        shown = ((k, f"{v:.3g}" if isinstance(v, float) else v) for k, v in value.items() if v is not None)
        return ", ".join(f"{k} {v}" for k, v in shown)
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def _number(value: float | None, form: str = ".3g") -> str:
    return "-" if value is None else format(value, form)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    return table
