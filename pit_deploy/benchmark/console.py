"""What `bench` prints for a person: medians with their spread, subjects below each other."""

from __future__ import annotations

from collections.abc import Iterable

from rich.markup import escape
from rich.table import Table

from pit_deploy.benchmark.report import BenchReport, Run, Samples, Subject
from pit_deploy.console import notes, out


def print_bench(report: BenchReport) -> None:
    """Sizes and memory, then speeds and ratios for each number of threads, then notes."""
    machine, settings = report.machine, report.settings
    where = ", ".join(filter(None, [machine.processor, f"{machine.cores} cores", machine.system]))
    out.print(escape(f"{where}; medians of {settings.repeats}, smallest and largest below."))
    out.print(escape("; ".join(dict.fromkeys(subject.runtime for subject in report.subjects)) + "."))
    out.print(_sizes(report))
    for threads in settings.threads:
        runs = [(subject, run) for subject, run in report.runs() if run.threads == threads]
        found = [b.bytes_per_second.max for b in report.bandwidth if b.threads == threads]
        limit = f"; memory gives {found[0] / 1e9:.1f} GB/s" if found else ""
        out.print(f"\n[bold]{threads} thread{'s' if threads > 1 else ''}[/]{limit}")
        out.print(_speeds(report, runs))
        out.print(_times(report, runs))
        out.print(_memories(runs))
        ratios = _ratios(report, threads)
        if ratios is not None:
            out.print(ratios)
        for subject, run in runs:
            if run.error is not None:
                out.print(f"[red]{escape(subject.name)}:[/] {escape(run.error)}.")
    notes([*report.notes, *_subject_notes(report.subjects)])


def spread(samples: Samples | None, form: str = ".1f", scale: float = 1.0) -> str:
    """The median, and below it the smallest and the largest."""
    if samples is None:
        return "-"
    low, high = format(samples.min * scale, form), format(samples.max * scale, form)
    return f"{format(samples.median * scale, form)}\n[dim]{low}-{high}[/]"


def _sizes(report: BenchReport) -> Table:
    table = _table("subject", "format", "model\nMB", "all files\nMB", "read a token\nMB", "KL", "top-1")
    for s in report.subjects:
        quality = s.quality
        table.add_row(
            escape(s.name),
            escape(s.precision),
            _megabytes(s.model_bytes),
            _megabytes(s.total_bytes),
            _megabytes(s.weight_bytes_per_token),
            "-" if quality is None else f"{quality.mean_kl:.2g}",
            "-" if quality is None else f"{quality.top1:.1%}",
        )
    return table


def _speeds(report: BenchReport, runs: Iterable[tuple[Subject, Run]]) -> Table:
    prompts, depths = report.settings.prompt_tokens, report.settings.depths
    heads = [f"prefill {n}\ntok/s" for n in prompts]
    for depth in depths:
        heads += [f"decode {depth}\ntok/s", "of\nmemory"]
    table = _table("subject", *heads)
    for subject, run in runs:
        prefill = {p.tokens: p.tokens_per_second for p in run.prefill}
        decode = {d.depth: d for d in run.decode}
        row = [spread(prefill.get(n), ".0f") for n in prompts]
        for depth in depths:
            found = decode.get(depth)
            share = None if found is None else found.bandwidth_share
            row.append(spread(None if found is None else found.tokens_per_second))
            row.append("-" if share is None else f"{share:.0%}")
        table.add_row(escape(subject.name), *row)
    return table


def _times(report: BenchReport, runs: Iterable[tuple[Subject, Run]]) -> Table:
    prompts = report.settings.prompt_tokens
    shortest = min(prompts)
    heads = [f"first of\n{n}, ms" for n in prompts]
    for state in ("cold", "warm"):
        heads += [f"{state}\nload, s", f"first of\n{shortest}, s"]
    table = _table("subject", *heads)
    for subject, run in runs:
        first = {p.tokens: p.time_to_first_token_seconds for p in run.prefill}
        row = [spread(first.get(n), ".0f", 1e3) for n in prompts]
        for times in (run.load.cold, run.load.warm) if run.load is not None else (None, None):
            row.append(spread(times.seconds if times else None, ".2f"))
            row.append(spread(times.first_token_seconds if times else None, ".2f"))
        table.add_row(escape(subject.name), *row)
    return table


def _memories(runs: Iterable[tuple[Subject, Run]]) -> Table:
    table = _table("resident, MB", "before load", "after load", "of it private", "peak")
    for subject, run in runs:
        memory, cells = run.memory, ["-"] * 4
        if memory is not None:
            private = memory.private_after_load_bytes
            kept = (memory.before_load_bytes, memory.after_load_bytes, private, memory.peak_bytes)
            cells = [spread(samples, ".0f", 1e-6) for samples in kept]
        table.add_row(escape(subject.name), *cells)
    return table


def _ratios(report: BenchReport, threads: int) -> Table | None:
    found = [r for r in report.ratios if r.threads == threads]
    if not found:
        return None
    columns = list(dict.fromkeys((r.what, r.at) for r in found))
    table = _table("times as fast as", *(f"{what}\n{at}" for what, at in columns))
    for pair in dict.fromkeys((r.subject, r.against) for r in found):
        cells = {(r.what, r.at): spread(r.ratio, ".2f") for r in found if (r.subject, r.against) == pair}
        table.add_row(escape(f"{pair[0]} / {pair[1]}"), *(cells.get(column, "-") for column in columns))
    return table


def _subject_notes(subjects: Iterable[Subject]) -> list[str]:
    """Each note once, with the subjects that it is about."""
    about: dict[str, list[str]] = {}
    for subject in subjects:
        for note in subject.notes:
            about.setdefault(note, []).append(subject.name)
    return [f"{', '.join(names)}: {note}" for note, names in about.items()]


def _megabytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e6:,.1f}"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for number, column in enumerate(columns):
        # Only words may break: a spread cut in two cannot be read.
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=column != "format")
    return table
