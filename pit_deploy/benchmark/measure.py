"""The two passes of a benchmark: starts, a process each, and speed, in processes that are alive together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pit_deploy.benchmark.peers import Candidate
from pit_deploy.benchmark.process import (
    WorkerError,
    WorkerProcess,
    artifact_files,
    drop_pages,
    read_pages,
    resident_share,
)
from pit_deploy.benchmark.report import Settings
from pit_deploy.benchmark.worker import WorkerSpec
from pit_deploy.errors import InputError
from pit_deploy.progress import Progress


@dataclass
class Starts:
    """Figures of processes that start, run once and end."""

    seconds: list[float] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)
    share: list[float | None] = field(default_factory=list)


@dataclass
class Figures:
    """What was measured of one candidate at one number of threads."""

    cold: Starts = field(default_factory=Starts)
    warm: Starts = field(default_factory=Starts)
    memory: dict[str, list[int | None]] = field(default_factory=dict)
    prefill: dict[int, list[float]] = field(default_factory=dict)
    decode: dict[int, list[float]] = field(default_factory=dict)
    others: list[tuple[float, float]] = field(default_factory=list)
    """Of each timed sample: processor seconds of other processes, and seconds."""
    quality: dict[str, Any] | None = None
    runtime: str | None = None
    error: str | None = None

    def add(self, what: str, size: int, answer: Mapping[str, Any]) -> None:
        """Keep a sample of `prefill` or `decode`."""
        getattr(self, what).setdefault(size, []).append(answer["seconds"])
        if answer.get("others") is not None:
            self.others.append((answer["others"], answer["seconds"]))

    @property
    def other_cores(self) -> float | None:
        """Mean number of cores that other processes kept busy during the samples."""
        seconds = sum(s for _, s in self.others)
        return sum(o for o, _ in self.others) / seconds if seconds else None


def text_ids(candidate: Candidate, settings: Settings) -> list[int]:
    """Ids of the text, repeated where it is shorter than what is asked for."""
    needed = max(max(settings.prompt_tokens), max(settings.depths) + settings.new_tokens)
    ids = list(candidate.ids)
    if not ids:
        raise InputError(f"{candidate.path}: its tokenizer gives no ids of the text.")
    return (ids * -(-needed // len(ids)))[:needed]


def measure_starts(
    candidates: Sequence[Candidate],
    specs: Mapping[str, WorkerSpec],
    runs: Mapping[str, Figures],
    settings: Settings,
    progress: Progress,
) -> None:
    """Loads, first tokens and memory, a process each; nothing else of the benchmark is alive meanwhile."""
    stage, total = f"start, {_threads(specs)}", settings.repeats * len(candidates)
    for done, candidate in enumerate(_in_turn(candidates, settings.repeats)):
        progress(stage, done, total)
        figures, files = runs[candidate.name], artifact_files(candidate.path)
        if figures.error is not None:
            continue
        ids = text_ids(candidate, settings)
        try:
            if drop_pages(files):
                _start(specs[candidate.name], figures, figures.cold, files, ids, settings, with_memory=False)
            read_pages(files)
            _start(specs[candidate.name], figures, figures.warm, files, ids, settings, with_memory=True)
        except WorkerError as error:
            figures.error = str(error)
    progress(stage, total, total)


def _start(
    spec: WorkerSpec,
    figures: Figures,
    starts: Starts,
    files: Sequence[Path],
    ids: Sequence[int],
    settings: Settings,
    *,
    with_memory: bool,
) -> None:
    share = resident_share(files)
    with WorkerProcess(spec) as worker:
        opened = worker.ask("open")
        first = worker.ask("first", ids=ids[: min(settings.prompt_tokens)])["seconds"]
        starts.seconds.append(opened["seconds"])
        starts.first_token.append(opened["seconds"] + first)
        starts.share.append(share)
        figures.runtime = opened["runtime"]
        if with_memory:
            # One pass with all the room that any figure takes; the prompt is the longest where it fits as well.
            context, longest = len(ids) - settings.new_tokens, max(settings.prompt_tokens)
            worker.ask("decode", context=ids[:context], ids=ids[context:])
            if longest > context:
                worker.ask("prefill", ids=ids[:longest])
            peak = worker.ask("memory")["peak"]
            before, after = opened["before"]["resident"], opened["after"]["resident"]
            found = {"before": before, "after": after, "private": opened["after"]["private"], "peak": peak}
            for key, value in found.items():
                figures.memory.setdefault(key, []).append(value)


def measure_speed(
    candidates: Sequence[Candidate],
    specs: Mapping[str, WorkerSpec],
    runs: Mapping[str, Figures],
    settings: Settings,
    golden: Path | None,
    progress: Progress,
) -> tuple[list[float], str | None]:
    """Prefill and decode: each round in new processes, all alive at once and asked in turn; bandwidth among them.

    Where a process's pages happen to lie makes identical runs up to 20 % faster or slower, for as long as it
    lives. So each sample of a figure comes from another process.
    """
    bandwidth: list[float] = []
    failed: str | None = None
    stage, done = f"speed, {_threads(specs)}", 0
    figures_asked = list(questions(settings))
    total = settings.repeats * len(figures_asked)
    for round_number in range(settings.repeats):
        workers: dict[str, WorkerProcess] = {}
        with ExitStack() as stack:
            reader = stack.enter_context(WorkerProcess(_reader_spec(specs)))
            for candidate in candidates:
                if runs[candidate.name].error is None:
                    workers[candidate.name] = stack.enter_context(WorkerProcess(specs[candidate.name]))
            asked = _Asked(candidates, workers, runs, settings)
            asked.each("open", lambda worker, figures, ids: worker.ask("open"))
            asked.each("warm up", lambda worker, figures, ids: worker.ask("prefill", ids=ids))
            for what, size in figures_asked:
                progress(stage, done, total)
                asked.each(what, _question(what, size, settings.new_tokens))
                if failed is None:
                    try:
                        bandwidth.append(reader.ask("bandwidth")["bytes_per_second"])
                    except WorkerError as error:
                        failed = str(error)
                done += 1
            if golden is not None and round_number == 0:
                asked.each("quality", lambda worker, figures, ids: _ask_quality(worker, figures, golden))
    progress(stage, total, total)
    return bandwidth, failed


@dataclass
class _Asked:
    """The workers of a round, to be asked in turn."""

    candidates: Sequence[Candidate]
    workers: Mapping[str, WorkerProcess]
    runs: Mapping[str, Figures]
    settings: Settings

    def each(self, what: str, ask: Callable[[WorkerProcess, Figures, list[int]], Any]) -> None:
        """Call `ask` for every candidate that has not failed; one that fails keeps the reason."""
        for candidate in self.candidates:
            figures = self.runs[candidate.name]
            if figures.error is None:
                try:
                    ask(self.workers[candidate.name], figures, text_ids(candidate, self.settings))
                except WorkerError as error:
                    figures.error = f"{what}: {error}"


def questions(settings: Settings) -> Iterator[tuple[str, int]]:
    yield from (("prefill", tokens) for tokens in settings.prompt_tokens)
    yield from (("decode", depth) for depth in settings.depths)


def _question(what: str, size: int, new: int) -> Callable[[WorkerProcess, Figures, list[int]], None]:
    def prefill(worker: WorkerProcess, figures: Figures, ids: list[int]) -> None:
        figures.add("prefill", size, worker.ask("prefill", ids=ids[:size]))

    def decode(worker: WorkerProcess, figures: Figures, ids: list[int]) -> None:
        figures.add("decode", size, worker.ask("decode", context=ids[:size], ids=ids[size : size + new]))

    return prefill if what == "prefill" else decode


def _ask_quality(worker: WorkerProcess, figures: Figures, golden: Path) -> None:
    """A record that cannot be compared, as of another vocabulary, leaves the figures as they are."""
    try:
        figures.quality = worker.ask("quality", directory=str(golden))
    except WorkerError as error:
        if error.died:
            raise


def _in_turn(candidates: Sequence[Candidate], repeats: int) -> Iterator[Candidate]:
    for _ in range(repeats):
        yield from candidates


def _reader_spec(specs: Mapping[str, WorkerSpec]) -> WorkerSpec:
    any_spec = next(iter(specs.values()))
    return WorkerSpec("bandwidth", "", any_spec.threads, any_spec.context_length)


def _threads(specs: Mapping[str, WorkerSpec]) -> str:
    count = next(iter(specs.values())).threads
    return f"{count} thread{'s' if count > 1 else ''}"
