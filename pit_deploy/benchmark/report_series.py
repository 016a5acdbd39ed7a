"""Several bench reports as one: subjects that stay apart, machine by machine, and the points of their plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pit_deploy.benchmark.report import (
    BenchReport,
    Decode,
    Machine,
    Ratio,
    Run,
    Samples,
    Subject,
    read_report,
)
from pit_deploy.errors import InputError
from pit_deploy.json_files import read_json


@dataclass(frozen=True)
class Entry:
    """A subject of one of the reports."""

    label: str
    """Unique on its machine."""
    subject: Subject
    report: BenchReport

    def run(self, threads: int) -> Run | None:
        """Its run with a number of threads; None where there is none, or one without figures."""
        found = (r for r in self.subject.runs if r.threads == threads and r.error is None)
        return next(found, None)


@dataclass
class Group:
    """What was measured on one machine."""

    machine: Machine
    entries: list[Entry] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ratios: list[Ratio] = field(default_factory=list)

    @property
    def name(self) -> str:
        """What people call it."""
        parts = [self.machine.processor or self.machine.architecture, self.machine.system]
        if self.machine.cores is not None:
            parts.append(f"{self.machine.cores} cores" if self.machine.cores > 1 else "1 core")
        return ", ".join(parts)

    @property
    def threads(self) -> list[int]:
        """Numbers of threads that something was measured with."""
        return sorted({run.threads for entry in self.entries for run in entry.subject.runs})


@dataclass(frozen=True)
class Point:
    """One place of a line: `low` and `high` are the smallest and the largest sample."""

    x: float
    y: float
    low: float
    high: float


def read_reports(paths: Sequence[Path | str]) -> list[tuple[str, BenchReport]]:
    """Reports with the names of their files; one of several devices gives theirs, named by the serial.

    Raises `InputError` for a file that is none.
    """
    if not paths:
        raise InputError("There is nothing to show; give files that pit-deploy bench --json wrote.")
    found = []
    for path in map(Path, paths):
        try:
            found += [(name, read_report(value)) for name, value in _reports(path)]
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise InputError(
                f"{path} is no bench report: {place or 'the object'}: {first['msg']}; give a file that "
                f"pit-deploy bench --json wrote."
            ) from error
    return found


def _reports(path: Path) -> list[tuple[str, Any]]:
    """What is to be read of a file: itself, or the devices that `bench --device all` measured."""
    value = read_json(path)
    devices = value.get("devices") if isinstance(value, dict) else None
    if not isinstance(devices, list):
        return [(path.stem, value)]
    measured = [d for d in devices if isinstance(d, dict) and d.get("report") is not None]
    if not measured:
        raise InputError(f"{path} has {len(devices)} devices and no report of any; measure again.")
    return [(f"{path.stem} {d.get('serial')}", d["report"]) for d in measured]


def merge(reports: Sequence[tuple[str, BenchReport]]) -> list[Group]:
    """Subjects by machine, in the order given; one whose name is taken gets the name of its file too."""
    groups: dict[tuple[object, ...], Group] = {}
    for name, report in reports:
        machine = report.machine
        key = (machine.system, machine.architecture, machine.processor, machine.cores, machine.memory_bytes)
        group = groups.setdefault(key, Group(machine))
        labels = {}
        for subject in report.subjects:
            labels[subject.name] = _free(subject.name, name, [entry.label for entry in group.entries])
            group.entries.append(Entry(labels[subject.name], subject, report))
        group.ratios += [
            ratio.model_copy(update={"subject": labels[ratio.subject], "against": labels[ratio.against]})
            for ratio in report.ratios
        ]
        group.notes += [note for note in report.notes if note not in group.notes]
    return list(groups.values())


def _free(name: str, file: str, taken: list[str]) -> str:
    wanted = [name, f"{name} ({file})", *(f"{name} ({file}, {n})" for n in range(2, len(taken) + 3))]
    return next(label for label in wanted if label not in taken)


def latency_by_depth(entry: Entry, threads: int) -> list[Point]:
    """Milliseconds a token by tokens in the cache."""
    run = entry.run(threads)
    return [] if run is None else [_inverted(d.depth, d.tokens_per_second) for d in _by_depth(run)]


def decode_by_threads(entry: Entry) -> list[Point]:
    """Tokens a second at the smallest depth, by threads."""
    points = []
    for run in sorted(entry.subject.runs, key=lambda run: run.threads):
        decoded = _by_depth(run)
        if run.error is None and decoded:
            points.append(_point(run.threads, decoded[0].tokens_per_second))
    return points


def bytes_and_kl(entry: Entry) -> Point | None:
    """MB of the model on disk, and mean KL; None where outputs were not compared."""
    quality = entry.subject.quality
    if quality is None:
        return None
    return Point(entry.subject.model_bytes / 1e6, quality.mean_kl, quality.mean_kl, quality.mean_kl)


def bandwidth_shares(entry: Entry) -> dict[int, float]:
    """Share of the memory's bandwidth that decoding at the smallest depth used, by threads."""
    found = {}
    for run in entry.subject.runs:
        decoded = _by_depth(run)
        if run.error is None and decoded and decoded[0].bandwidth_share is not None:
            found[run.threads] = decoded[0].bandwidth_share
    return found


def _by_depth(run: Run) -> list[Decode]:
    return sorted(run.decode, key=lambda decoded: decoded.depth)


def _point(x: float, samples: Samples) -> Point:
    return Point(x, samples.median, samples.min, samples.max)


def _inverted(x: float, speed: Samples) -> Point:
    """Milliseconds a token of tokens a second; a speed of 0 has none and is drawn as no time at all."""

    def ms(tokens_per_second: float) -> float:
        return 1000 / tokens_per_second if tokens_per_second else 0.0

    return Point(x, ms(speed.median), ms(speed.max), ms(speed.min))
