"""`bench --device`: the figures of `suite`, measured by the native runner on Android devices over adb.

Timing is in the runner, on the device. Rounds and their order are here: before each the device cools down, and a
round that a lost connection cut short goes on with the samples that are missing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pit_deploy.benchmark.measure import Figures, Starts, questions, text_ids
from pit_deploy.benchmark.peers import Candidate, bundle_candidates
from pit_deploy.benchmark.report import BenchReport, Machine, Samples, Settings, Thermal
from pit_deploy.benchmark.suite import (
    DEFAULT_THREADS,
    FEWEST_REPEATS,
    check_context,
    disturbed,
    make_report,
    make_settings,
    versions,
)
from pit_deploy.bundle import Bundle
from pit_deploy.errors import InputError, PitDeployError
from pit_deploy.progress import Progress, silent
from pit_deploy.quantize.calibration import evaluation_text
from pit_deploy.runtimes.adb import Adb, choose_devices, lost_or_dead
from pit_deploy.runtimes.adb_files import Installed, install, start_runner
from pit_deploy.runtimes.adb_runtime import is_emulator, runtime_on
from pit_deploy.runtimes.adb_thermal import COOL_SECONDS, cool_down, governor, temperature
from pit_deploy.runtimes.native.process import RunnerProcess
from pit_deploy.runtimes.native.runtime import SESSION

EMULATED = "the device is an emulator, whose speed and memory say nothing of a phone's: not measured"


@dataclass(frozen=True)
class DeviceResult:
    """What came of one device: a report, or why there is none."""

    serial: str
    report: BenchReport | None
    error: str | None

    def to_dict(self) -> dict[str, Any]:
        """The object in `devices` of `bench --device all --json` (docs/devices.md)."""
        report = None if self.report is None else self.report.to_dict()
        return {"serial": self.serial, "report": report, "error": self.error}


def bench_devices(
    bundles: Sequence[Path | str],
    device: str,
    *,
    threads: Sequence[int] | None = None,
    prompt_tokens: Sequence[int] = (128, 512),
    new_tokens: int = 32,
    depths: Sequence[int] = (0, 512),
    repeats: int = FEWEST_REPEATS,
    cool_seconds: float = COOL_SECONDS,
    progress: Progress = silent,
) -> list[DeviceResult]:
    """Measure ONNX bundles on a device (`all`: on every usable one, at the same time).

    `cool_seconds` is the longest wait for a warm device before a round. A device that fails has the reason in place
    of a report. Raises `InputError` before anything runs where options, bundles or the device cannot be used.
    """
    settings = make_settings(threads or DEFAULT_THREADS, prompt_tokens, depths, new_tokens, repeats, ())
    candidates = bundle_candidates(bundles, evaluation_text())
    check_context(
        candidates, settings, max(max(settings.prompt_tokens), max(settings.depths) + settings.new_tokens)
    )
    for candidate in candidates:
        runtime = Bundle.open(candidate.path, check_hashes=True).manifest.runtime
        if runtime != "onnx":
            raise InputError(
                f"{candidate.path} is for {runtime}, and the runner on devices opens onnx bundles."
            )
    serials = choose_devices(device)

    def measure(serial: str, told: Progress) -> BenchReport:
        return _DeviceBench(serial, candidates, settings, cool_seconds, told).run()

    return on_devices(serials, measure, progress)


def on_devices(
    serials: Sequence[str], measure: Callable[[str, Progress], BenchReport], progress: Progress
) -> list[DeviceResult]:
    """What `measure` makes of each device, all at the same time."""
    told = _locked(progress)

    def result(serial: str) -> DeviceResult:
        try:
            return DeviceResult(serial, measure(serial, told), None)
        except PitDeployError as error:
            return DeviceResult(serial, None, str(error))

    with ThreadPoolExecutor(len(serials)) as pool:
        return list(pool.map(result, serials))


@dataclass
class _Warmth:
    """Temperatures of one candidate's rounds."""

    zone: str | None = None
    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)


class _DeviceBench:
    """One device's benchmark."""

    def __init__(
        self,
        serial: str,
        candidates: Sequence[Candidate],
        settings: Settings,
        cool_seconds: float,
        progress: Progress,
    ) -> None:
        self._adb, self._candidates, self._settings = Adb(serial), candidates, settings
        self._cool_seconds, self._progress = cool_seconds, progress
        self._installed: dict[str, Installed] = {}
        self._figures: dict[tuple[str, int], Figures] = {}
        self._warmth: dict[tuple[str, int], _Warmth] = {}
        self._bandwidth: dict[int, list[float]] = {}
        self._done: set[tuple[Any, ...]] = set()
        self._machine: Machine | None = None
        self._version = "not opened"

    def run(self) -> BenchReport:
        """Push, measure, and put the report together."""
        adb, settings = self._adb, self._settings
        emulator = adb.insist(lambda: is_emulator(adb))
        for candidate in self._candidates:
            bundle = Bundle.open(candidate.path)
            self._installed[candidate.name] = install(adb, bundle, progress=self._progress)
        adb.insist(self._read_machine)
        governed = adb.insist(lambda: governor(adb))
        keys = [(candidate, count) for count in settings.threads for candidate in self._candidates]
        for candidate, count in keys:
            self._figures[candidate.name, count] = Figures(runtime=self._version)
            self._warmth[candidate.name, count] = _Warmth()
        for number, (candidate, count) in enumerate(keys):
            figures = self._figures[candidate.name, count]
            try:
                if count == settings.threads[0]:
                    figures.quality = self._quality(candidate, number, len(keys))
                if emulator:
                    figures.error = EMULATED
                else:
                    self._measure(candidate, count)
            except PitDeployError as error:
                figures.error = str(error)
        return self._report(governed)

    def _measure(self, candidate: Candidate, count: int) -> None:
        adb, repeats = self._adb, self._settings.repeats
        warmth = self._warmth[candidate.name, count]
        stage = f"{adb.serial}: {candidate.name}, {count} threads"
        for number in range(repeats):
            self._progress(stage, number, repeats)
            before = adb.insist(lambda: cool_down(adb, seconds=self._cool_seconds))
            adb.insist(lambda n=number: self._starts(candidate, count, n))  # type: ignore[misc]
            adb.insist(lambda n=number: self._round(candidate, count, n))  # type: ignore[misc]
            after = adb.insist(lambda: temperature(adb))
            if before is not None and after is not None:
                warmth.zone = before.zone
                warmth.before.append(before.degrees)
                warmth.after.append(after.degrees)
        self._progress(stage, repeats, repeats)

    def _starts(self, candidate: Candidate, count: int, number: int) -> None:
        """A cold and a warm start, each in a process of its own."""
        figures, settings = self._figures[candidate.name, count], self._settings
        ids = text_ids(candidate, settings)
        shortest, context = min(settings.prompt_tokens), len(ids) - settings.new_tokens
        for starts, prepare in ((figures.cold, "drop"), (figures.warm, "read")):
            if not self._missing(candidate.name, count, number, prepare):
                continue
            with self._runner(candidate) as runner:
                answer, _ = runner.request(prepare)
                if prepare == "drop" and not answer["dropped"]:
                    continue
                share = runner.request("share")[0]["share"]
                opened, _ = runner.request("open", threads=count, config=SESSION)
                first = runner.request("first", ids=ids[:shortest])[0]["seconds"]
                if prepare == "read":
                    runner.request("decode", context=ids[:context], ids=ids[context:])
                    runner.request("prefill", ids=ids[: max(settings.prompt_tokens)])
                    self._keep_memory(figures, opened, runner.request("memory")[0])
            self._keep_start(starts, opened["seconds"], first, share)
            self._done.add((candidate.name, count, number, prepare))

    def _round(self, candidate: Candidate, count: int, number: int) -> None:
        """One sample of each speed that this round lacks, in one process."""
        figures, settings = self._figures[candidate.name, count], self._settings
        ids = text_ids(candidate, settings)
        with self._runner(candidate) as runner:
            runner.request("open", threads=count, config=SESSION)
            runner.request("prefill", ids=ids)
            for what, size in questions(settings):
                if not self._missing(candidate.name, count, number, what, size):
                    continue
                if what == "prefill":
                    answer, _ = runner.request("prefill", ids=ids[:size])
                else:
                    answer, _ = runner.request(
                        "decode", context=ids[:size], ids=ids[size : size + settings.new_tokens]
                    )
                figures.add(what, size, answer)
                self._done.add((candidate.name, count, number, what, size))
            if self._missing(count, number, "bandwidth"):
                found = runner.request("bandwidth", threads=count)[0]["bytes_per_second"]
                self._bandwidth.setdefault(count, []).append(found)
                self._done.add((count, number, "bandwidth"))

    def _quality(self, candidate: Candidate, number: int, total: int) -> dict[str, Any] | None:
        """KL and top-1 of the bundle's own record on the device; None where it carries none."""
        from pit_deploy.gates import coarsest, gate_of
        from pit_deploy.golden import GoldenRecord
        from pit_deploy.parity import compare_with_golden

        bundle = Bundle.open(candidate.path)
        manifest = bundle.manifest
        if manifest.golden is None:
            return None
        weights, tables = manifest.precision.weights, manifest.precision.tables
        runtime = runtime_on(self._adb, bundle, self._installed[candidate.name], threads=1)
        try:
            report = compare_with_golden(
                runtime,
                GoldenRecord.load(bundle.path),
                gate_of(manifest),
                bundle=str(bundle.path),
                precision=coarsest(weights, tables),
                end_ids=manifest.end_ids,
                progress=self._progress,
            )
        finally:
            runtime.close()
        return {"positions": len(report.kl), "mean_kl": report.mean_kl, "top1": report.top1_rate}

    def _missing(self, *sample: Any) -> bool:
        return sample not in self._done

    @contextmanager
    def _runner(self, candidate: Candidate) -> Iterator[RunnerProcess]:
        """A runner on the device; its end becomes the loss of the device where that is why."""
        with lost_or_dead(self._adb), start_runner(self._adb, self._installed[candidate.name]) as runner:
            yield runner

    def _keep_memory(self, figures: Figures, opened: dict[str, Any], last: dict[str, Any]) -> None:
        found = {
            "before": opened["before"]["resident"],
            "after": opened["after"]["resident"],
            "private": opened["after"]["private"],
            "peak": last["peak"],
        }
        for key, value in found.items():
            figures.memory.setdefault(key, []).append(value)

    def _keep_start(self, starts: Starts, seconds: float, first: float, share: float | None) -> None:
        starts.seconds.append(seconds)
        starts.first_token.append(seconds + first)
        starts.share.append(share)

    def _read_machine(self) -> None:
        adb = self._adb
        with self._runner(self._candidates[0]) as runner:
            hello, _ = runner.request("hello")
        self._version = f"onnxruntime {hello['onnxruntime']} (native runner {hello['runner']})"
        release = adb.property("ro.build.version.release")
        names = (adb.property(f"ro.{key}") for key in ("product.manufacturer", "product.model", "soc.model"))
        found = hello["machine"]
        self._machine = Machine(
            system=f"Android {release}, {found['system']}" if release else found["system"],
            architecture=found["architecture"],
            processor=" ".join(filter(None, names)) or None,
            cores=found["cores"],
            memory_bytes=found["memory_bytes"],
            load_average=found["load_average"],
        )

    def _report(self, governed: str | None) -> BenchReport:
        assert self._machine is not None
        reference = Bundle.open(self._candidates[0].path)
        notes = [f"measured on the device {self._adb.serial} over adb"]
        if self._settings.repeats < FEWEST_REPEATS:
            notes.append(
                f"medians of {self._settings.repeats} samples are weak; use at least {FEWEST_REPEATS}"
            )
        notes += disturbed([figures.other_cores for figures in self._figures.values()])
        report = make_report(
            self._candidates,
            self._figures,
            self._bandwidth,
            self._settings,
            self._machine,
            notes,
            reference,
        )
        subjects = [
            subject.model_copy(
                update={
                    "runs": tuple(
                        run.model_copy(
                            update={"thermal": _thermal(self._warmth[subject.name, run.threads], governed)}
                        )
                        for run in subject.runs
                    )
                }
            )
            for subject in report.subjects
        ]
        return report.model_copy(update={"subjects": tuple(subjects), "created_by": versions()})


def _thermal(warmth: _Warmth, governed: str | None) -> Thermal:
    return Thermal(
        governor=governed,
        zone=warmth.zone,
        degrees_before=_samples(warmth.before),
        degrees_after=_samples(warmth.after),
    )


def _samples(values: Iterable[float]) -> Samples | None:
    kept = list(values)
    return Samples.of(kept) if kept else None


def _locked(progress: Progress) -> Progress:
    """The same, one call at a time: devices are measured side by side."""
    lock = threading.Lock()

    def told(stage: str, done: int, total: int) -> None:
        with lock:
            progress(stage, done, total)

    return told
