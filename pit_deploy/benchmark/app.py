"""`bench --device --app`: the demo app measures a bundle on a device, started by an intent; its file is fetched."""

from __future__ import annotations

import json
import shlex
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import ValidationError

from pit_deploy.benchmark.devices import DeviceResult, on_devices
from pit_deploy.benchmark.report import BenchReport, read_report
from pit_deploy.bundle import Bundle
from pit_deploy.errors import InputError, PitDeployError
from pit_deploy.progress import Progress, silent
from pit_deploy.runtimes.adb import Adb, DeviceLostError, choose_devices
from pit_deploy.runtimes.adb_files import bundle_files, push_missing
from pit_deploy.runtimes.adb_thermal import COOL_SECONDS, cool_down

PACKAGE = "org.pitdeploy.demo"
ACTIVITY = f"{PACKAGE}/.MainActivity"
FILES = f"/sdcard/Android/data/{PACKAGE}/files"
RESULT, ERROR = "benchmark_results.json", "error.json"
RUN_SECONDS = 3600.0
"""The longest wait for the app's figures."""
START_SECONDS = 60.0
POLL_SECONDS = 2.0


def bench_app(
    bundle: Path | str,
    device: str,
    *,
    cool_seconds: float = COOL_SECONDS,
    seconds: float = RUN_SECONDS,
    progress: Progress = silent,
    sleep: Callable[[float], None] = time.sleep,
) -> list[DeviceResult]:
    """Have the installed app measure a bundle on a device (`all`: on every usable one, at the same time).

    The bundle is copied into the app's folder as far as it is not there. A device that fails has the reason in place
    of a report. Raises `InputError` before anything runs where the bundle or the device cannot be used.
    """
    opened = Bundle.open(bundle, check_hashes=True)
    if opened.manifest.runtime != "onnx":
        raise InputError(f"{bundle} is for {opened.manifest.runtime}, and the app opens onnx bundles.")
    serials = choose_devices(device)

    def measure(serial: str, told: Progress) -> BenchReport:
        return _measure(Adb(serial), opened, cool_seconds, seconds, told, sleep)

    return on_devices(serials, measure, progress)


def _measure(
    adb: Adb,
    bundle: Bundle,
    cool_seconds: float,
    seconds: float,
    progress: Progress,
    sleep: Callable[[float], None],
) -> BenchReport:
    if not adb.insist(lambda: adb.shell(f"pm path {PACKAGE} 2>/dev/null || true")).strip():
        raise InputError(
            f"The device {adb.serial} does not have the app {PACKAGE}; install it (android_demo/README.md)."
        )
    # The app makes its folder when it is started.
    adb.insist(lambda: adb.shell(f"am start -n {ACTIVITY}"))
    _wait(adb, [FILES], START_SECONDS, sleep)
    name = bundle.path.resolve().name
    push_missing(adb, bundle_files(bundle, f"{FILES}/bundles/{name}"), progress)
    adb.insist(lambda: adb.shell(f"rm -f {FILES}/{RESULT} {FILES}/{ERROR}"))
    adb.insist(lambda: cool_down(adb, seconds=cool_seconds))
    adb.insist(lambda: adb.shell(f"am start -n {ACTIVITY} --es bundle {shlex.quote(name)} --ez bench true"))
    progress(f"{adb.serial}: the app measures", 0, 1)
    found = _wait(adb, [f"{FILES}/{RESULT}", f"{FILES}/{ERROR}"], seconds, sleep)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / RESULT
        adb.insist(lambda: adb.pull(found, file))
        text = file.read_text(encoding="utf-8", errors="replace")
    progress(f"{adb.serial}: the app measures", 1, 1)
    return _report(adb.serial, found, text)


def _wait(adb: Adb, paths: Sequence[str], seconds: float, sleep: Callable[[float], None]) -> str:
    """The first of `paths` that is there; the app goes on while a device is away."""
    test = " || ".join(f"{{ [ -e {path} ] && echo {path}; }}" for path in paths)
    waited = 0.0
    while waited <= seconds:
        try:
            found = adb.shell(f"{{ {test}; }} || true").strip()
        except DeviceLostError:
            if not adb.wait():
                raise
            continue
        if found:
            return found.splitlines()[0]
        sleep(POLL_SECONDS)
        waited += POLL_SECONDS
    raise PitDeployError(
        f"The app on {adb.serial} wrote no {Path(paths[0]).name} within {seconds:.0f} s; look at its screen."
    )


def _report(serial: str, path: str, text: str) -> BenchReport:
    try:
        value = json.loads(text)
        if path.endswith(ERROR):
            raise PitDeployError(f"The app on {serial} failed: {str(value.get('error')).rstrip('.')}.")
        return read_report(value)
    except (ValueError, ValidationError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise PitDeployError(
            f"The app on {serial} wrote a {Path(path).name} that is no bench object: {reason}."
        ) from error
