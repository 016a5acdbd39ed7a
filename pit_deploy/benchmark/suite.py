"""`bench`: how fast an artifact runs, how much memory it takes, and how it stands beside others.

Every artifact is measured in child processes (`worker`). Starts and memory come from processes that hold one
artifact and end. Speed comes from processes that are alive together and asked in turn, so that what changes on
the machine meanwhile meets all of them; each round has new ones. docs/benchmarks.md says how each figure is
measured.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from pit_deploy.benchmark.measure import Figures, Starts, measure_speed, measure_starts
from pit_deploy.benchmark.peers import (
    PEERS,
    Candidate,
    bundle_candidates,
    genai_candidate,
    llama_cpp_candidates,
)
from pit_deploy.benchmark.report import (
    Bandwidth,
    BenchReport,
    Decode,
    Load,
    LoadTimes,
    Machine,
    Memory,
    Prefill,
    Quality,
    Ratio,
    Run,
    Samples,
    Settings,
    Subject,
)
from pit_deploy.benchmark.worker import WorkerSpec
from pit_deploy.bundle import Bundle
from pit_deploy.errors import InputError, PitDeployError
from pit_deploy.progress import Progress, silent
from pit_deploy.quantize.calibration import evaluation_text
from pit_deploy.runtimes import check_threads

DEFAULT_THREADS = (1, 2)
FEWEST_REPEATS = 5
MOST_OTHER_CORES = 0.15
"""Of other processes; more is said in the report's notes."""


def bench(
    bundles: Sequence[Path | str],
    *,
    threads: Sequence[int] | None = None,
    prompt_tokens: Sequence[int] = (128, 512),
    new_tokens: int = 32,
    depths: Sequence[int] = (0, 512),
    repeats: int = FEWEST_REPEATS,
    against: Sequence[str] = (),
    gguf: Path | str | None = None,
    source: Path | str | None = None,
    progress: Progress = silent,
) -> BenchReport:
    """Measure `bundles` and, with `against`, what `llama.cpp` and `genai` make of the first one's model.

    `threads` is 1 and 2 by default. `gguf` is the file for llama.cpp (the sample's own by default), `source`
    the checkpoint for genai (looked for beside the bundle by default). A subject whose process fails keeps the
    figures made so far and the reason; a peer that cannot be made at all is named in `notes`. Raises
    `InputError` before anything runs where the options cannot hold.
    """
    settings = make_settings(threads or DEFAULT_THREADS, prompt_tokens, depths, new_tokens, repeats, against)
    text = evaluation_text()
    candidates = bundle_candidates(bundles, text)
    needed = max(max(settings.prompt_tokens), max(settings.depths) + settings.new_tokens)
    check_context(candidates, settings, needed)
    machine = _machine()
    notes = _notes(settings, machine)
    reference = Bundle.open(candidates[0].path)
    makers = {
        "llama.cpp": lambda: llama_cpp_candidates(
            reference, candidates[0].ids, None if gguf is None else Path(gguf), progress=progress
        ),
        "genai": lambda: [
            genai_candidate(
                reference, candidates[0].ids, None if source is None else Path(source), progress=progress
            )
        ],
    }
    for peer in dict.fromkeys(against):
        made, reason = _made(makers[peer])
        candidates += made
        notes += [f"{peer} was not measured: {reason}"] if reason else []
    check_context(candidates, settings, needed)
    room = candidates[0].context_length
    measured: dict[tuple[str, int], Figures] = {}
    bandwidth: dict[int, list[float]] = {}
    for count in settings.threads:
        runs = {c.name: Figures() for c in candidates}
        measured |= {(name, count): figures for name, figures in runs.items()}
        specs = {c.name: WorkerSpec(c.kind, str(c.path), count, room) for c in candidates}
        measure_starts(candidates, specs, runs, settings, progress)
        golden = reference.path if reference.manifest.golden and count == settings.threads[0] else None
        bandwidth[count], failed = measure_speed(candidates, specs, runs, settings, golden, progress)
        notes += [f"bandwidth with {count} threads was not measured: {failed}"] if failed else []
    notes += disturbed([figures.other_cores for figures in measured.values()])
    return make_report(candidates, measured, bandwidth, settings, machine, notes, reference)


def _made(make: Callable[[], list[Candidate]]) -> tuple[list[Candidate], str | None]:
    """The candidates of a peer, or why there are none. What the user has to change is raised."""
    try:
        return make(), None
    except InputError:
        raise
    except PitDeployError as error:
        return [], str(error)


def make_settings(
    threads: Sequence[int],
    prompt_tokens: Sequence[int],
    depths: Sequence[int],
    new_tokens: int,
    repeats: int,
    against: Sequence[str],
) -> Settings:
    unknown = [name for name in against if name not in PEERS]
    if unknown:
        raise InputError(f"--against {unknown[0]} is not known; choose among {', '.join(PEERS)}.")
    for option, values, least in (
        ("--threads", threads, 1),
        ("--prompt-tokens", prompt_tokens, 1),
        ("--depth", depths, 0),
        ("--new-tokens", [new_tokens], 1),
        ("--repeats", [repeats], 1),
    ):
        low = [value for value in values if value < least]
        if low or not values:
            raise InputError(
                f"{option} {low[0] if low else '(none)'} is not possible; give at least {least}."
            )
    for count in threads:
        check_threads(count)
    return Settings(
        threads=tuple(dict.fromkeys(threads)),
        prompt_tokens=tuple(dict.fromkeys(prompt_tokens)),
        depths=tuple(dict.fromkeys(depths)),
        new_tokens=new_tokens,
        repeats=repeats,
        text="pit_deploy.quantize.calibration.evaluation_text",
    )


def check_context(candidates: Sequence[Candidate], settings: Settings, needed: int) -> None:
    for candidate in candidates:
        if candidate.context_length < needed:
            longest, deepest = max(settings.prompt_tokens), max(settings.depths)
            raise InputError(
                f"{candidate.path} holds {candidate.context_length} tokens, and {needed} are asked for (a prompt of "
                f"{longest}; {settings.new_tokens} new tokens after {deepest}); ask for fewer, or export with a "
                f"larger --context."
            )


def _notes(settings: Settings, machine: Machine) -> list[str]:
    notes = []
    if settings.repeats < FEWEST_REPEATS:
        notes.append(f"medians of {settings.repeats} samples are weak; use at least {FEWEST_REPEATS} repeats")
    if machine.cores and max(settings.threads) > machine.cores:
        notes.append(f"{max(settings.threads)} threads share {machine.cores} cores")
    if machine.cores and machine.load_average and machine.load_average > 0.5 * machine.cores:
        load, cores = machine.load_average, machine.cores
        notes.append(f"the machine was busy before the start (load average {load:.1f} on {cores} cores)")
    return notes


def disturbed(other_cores: Sequence[float | None]) -> list[str]:
    worst = max((cores for cores in other_cores if cores is not None), default=0.0)
    if worst <= MOST_OTHER_CORES:
        return []
    return [
        f"other processes kept up to {worst:.1f} cores busy during a subject's samples: repeat it on a quiet machine"
    ]


def make_report(
    candidates: Sequence[Candidate],
    measured: Mapping[tuple[str, int], Figures],
    bandwidth: Mapping[int, list[float]],
    settings: Settings,
    machine: Machine,
    notes: Sequence[str],
    reference: Bundle,
) -> BenchReport:
    subjects = []
    for c in candidates:
        all_figures = [measured[c.name, count] for count in settings.threads]
        quality = next((f.quality for f in all_figures if f.quality), None)
        runtime = next((f.runtime for f in all_figures if f.runtime), None)
        subjects.append(
            Subject(
                name=c.name,
                kind=c.kind,
                runtime=runtime or "not opened",
                path=str(c.path),
                precision=c.precision,
                model_bytes=c.model_bytes,
                total_bytes=c.total_bytes,
                weight_bytes_per_token=c.weight_bytes_per_token,
                quality=None if quality is None else Quality(reference=str(reference.path), **quality),
                runs=tuple(
                    _run(c, measured[c.name, count], count, bandwidth.get(count, []), settings.new_tokens)
                    for count in settings.threads
                ),
                notes=c.notes,
            )
        )
    return BenchReport(
        created_by=versions(),
        machine=machine,
        settings=settings,
        bandwidth=tuple(
            Bandwidth(threads=n, bytes_per_second=Samples.of(v)) for n, v in bandwidth.items() if v
        ),
        subjects=tuple(subjects),
        ratios=tuple(_ratios(candidates, measured, settings)),
        notes=tuple(notes),
    )


def _run(
    candidate: Candidate, figures: Figures, threads: int, bandwidth: Sequence[float], new_tokens: int
) -> Run:
    decode = []
    for depth, seconds in figures.decode.items():
        speed = Samples.of(new_tokens / s for s in seconds)
        share = None
        if bandwidth and candidate.weight_bytes_per_token is not None:
            share = candidate.weight_bytes_per_token * speed.median / max(bandwidth)
        decode.append(Decode(depth=depth, tokens=new_tokens, tokens_per_second=speed, bandwidth_share=share))
    prefill = [
        Prefill(
            tokens=tokens,
            tokens_per_second=Samples.of(tokens / s for s in seconds),
            time_to_first_token_seconds=Samples.of(seconds),
        )
        for tokens, seconds in figures.prefill.items()
    ]
    return Run(
        threads=threads,
        error=figures.error,
        other_cores=figures.other_cores,
        load=_load(figures),
        memory=_memory(figures.memory),
        prefill=tuple(prefill),
        decode=tuple(decode),
    )


def _load(figures: Figures) -> Load | None:
    cold, warm = _load_times(figures.cold), _load_times(figures.warm)
    return None if cold is None and warm is None else Load(cold=cold, warm=warm)


def _load_times(starts: Starts) -> LoadTimes | None:
    if not starts.seconds:
        return None
    shares = [share for share in starts.share if share is not None]
    return LoadTimes(
        seconds=Samples.of(starts.seconds),
        first_token_seconds=Samples.of(starts.first_token),
        resident_share=max(shares) if shares else None,
    )


def _memory(found: Mapping[str, list[int | None]]) -> Memory | None:
    if not found:
        return None
    values = {key: [v for v in samples if v is not None] for key, samples in found.items()}
    return Memory(
        before_load_bytes=Samples.of(values["before"]),
        after_load_bytes=Samples.of(values["after"]),
        private_after_load_bytes=Samples.of(values["private"]) if values["private"] else None,
        peak_bytes=Samples.of(values["peak"]),
    )


def _ratios(
    candidates: Sequence[Candidate], measured: Mapping[tuple[str, int], Figures], settings: Settings
) -> Iterator[Ratio]:
    """Quotients sample by sample: the nth of one was measured right beside the nth of the other."""
    kinds: tuple[Literal["prefill", "decode"], ...] = ("prefill", "decode")
    for count in settings.threads:
        for ours in (c for c in candidates if c.kind == "bundle"):
            for theirs in (c for c in candidates if c.kind != "bundle"):
                for what in kinds:
                    mine = getattr(measured[ours.name, count], what)
                    other = getattr(measured[theirs.name, count], what)
                    for size in (size for size in mine if size in other):
                        pairs = zip(mine[size], other[size], strict=False)
                        ratio = Samples.of(slow / fast for fast, slow in pairs)
                        yield Ratio(
                            subject=ours.name,
                            against=theirs.name,
                            threads=count,
                            what=what,
                            at=size,
                            ratio=ratio,
                        )


def _machine() -> Machine:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        memory: int | None = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        memory = None
    try:
        load: float | None = os.getloadavg()[0]
    except (OSError, AttributeError):
        load = None
    return Machine(
        system=f"{platform.system()} {platform.release()}",
        architecture=platform.machine() or "unknown",
        processor=_processor(),
        cores=cores,
        memory_bytes=memory,
        load_average=load,
    )


def _processor() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith(("model name", "Hardware"))]
    return names[0] if names and names[0] else None


def versions() -> dict[str, str]:
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in ("pit-deploy", "numpy", "onnxruntime", "onnxruntime-genai", "xllamacpp"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
