"""A runner and a bundle on a device: pushed once, checked by size and hash, found again by content."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pit_deploy.bundle import MANIFEST, Bundle, sha256
from pit_deploy.errors import InputError, PitDeployError
from pit_deploy.progress import Progress, silent
from pit_deploy.runtimes.adb import WORK, Adb, lost_or_dead
from pit_deploy.runtimes.native.build import ANDROID, RUNNER, runner_folder
from pit_deploy.runtimes.native.process import RunnerError, RunnerProcess

ABI = "arm64-v8a"
_FILE_KINDS = ("missing_file", "wrong_size", "wrong_hash", "not_a_bundle", "bad_json", "unreadable_file")


@dataclass(frozen=True)
class Installed:
    """Paths on a device."""

    runner: str
    bundle: str

    @property
    def command(self) -> str:
        """The shell's command that runs the runner on the bundle."""
        return f"exec {shlex.quote(self.runner)} {shlex.quote(self.bundle)}"


def local_runner() -> Path:
    """The folder with the runner for devices: `PIT_DEPLOY_RUNNER`, or where the build puts it.

    Raises `InputError` with the command that builds it.
    """
    given = os.environ.get("PIT_DEPLOY_RUNNER")
    folder = Path(given) if given else runner_folder(ANDROID)
    libraries = list(folder.glob("libonnxruntime.so*")) if folder.is_dir() else []
    if not (folder / RUNNER).is_file() or not libraries:
        raise InputError(
            f"{folder} has no {RUNNER} with libonnxruntime.so beside it; build it with: python -m "
            f"pit_deploy.runtimes.native.build --ndk DIR"
        )
    return folder


def install(adb: Adb, bundle: Bundle, *, progress: Progress = silent) -> Installed:
    """Put runner and bundle on the device, and have the device check every byte of the bundle.

    What is there already with its size is not pushed again; a file with other bytes is pushed once more. A lost
    device is waited for. Raises `InputError` for another processor than ARM64, `PitDeployError` for missing room.
    """
    abi = adb.insist(lambda: adb.property("ro.product.cpu.abi"))
    if abi != ABI:
        raise InputError(
            f"The device {adb.serial} has the processor {abi or 'unknown'}, and the runner is for {ABI}."
        )
    local = local_runner()
    programs = [local / RUNNER, *sorted(local.glob("libonnxruntime.so*"))]
    marks = "".join(sha256(file)[:6] for file in programs)
    runner = f"{WORK}/runner-{marks}"
    folder = f"{WORK}/bundle-{sha256(bundle.path / MANIFEST)[:16]}"
    installed = Installed(f"{runner}/{RUNNER}", folder)
    files = [(file, f"{runner}/{file.name}") for file in programs]
    files += bundle_files(bundle, folder)
    push_missing(adb, files, progress)
    adb.insist(lambda: adb.shell(f"chmod 755 {shlex.quote(installed.runner)}"))
    for _ in range(2):
        try:
            adb.insist(lambda: _check(adb, installed))
            return installed
        except RunnerError as error:
            if error.kind not in _FILE_KINDS:
                raise
            adb.insist(lambda: adb.shell(f"rm -rf {shlex.quote(folder)}"))
            push_missing(adb, files, progress)
            failed = error
    raise PitDeployError(f"The bundle was changed twice on its way to {adb.serial}: {failed}")


def bundle_files(bundle: Bundle, folder: str) -> list[tuple[Path, str]]:
    """The files of a bundle with their places in a folder of a device.

    The manifest is the last: a folder without it is no bundle yet.
    """
    names = [*(entry.path for entry in bundle.manifest.files), MANIFEST]
    return [(bundle.path / name, f"{folder}/{name}") for name in names]


def start_runner(adb: Adb, installed: Installed) -> RunnerProcess:
    """The runner on the device, with its standard streams here."""
    return RunnerProcess(
        # No terminal, which would change bytes.
        adb.command("shell", "-T", installed.command),
        where=f"ONNX Runtime on {adb.serial}",
        subject=installed.bundle,
    )


def _check(adb: Adb, installed: Installed) -> None:
    with lost_or_dead(adb), start_runner(adb, installed) as runner:
        runner.request("check", hashes=True)


def push_missing(adb: Adb, files: Sequence[tuple[Path, str]], progress: Progress) -> None:
    """Push what is not there with its size. Raises `PitDeployError` before anything is pushed where room is missing."""
    total = sum(source.stat().st_size for source, _ in files)
    done = 0
    present = adb.insist(lambda: _sizes(adb, [target for _, target in files]))
    missing = [(s, t) for s, t in files if present.get(t) != s.stat().st_size]
    _check_room(adb, missing)
    if missing:
        folders = sorted({shlex.quote(str(PurePosixPath(target).parent)) for _, target in missing})
        adb.insist(lambda: adb.shell(f"mkdir -p {' '.join(folders)}"))
    for source, target in files:
        if (source, target) in missing:
            progress(f"push to {adb.serial}", done, total)
            adb.insist(lambda source=source, target=target: adb.push(source, target))  # type: ignore[misc]
        done += source.stat().st_size
    progress(f"push to {adb.serial}", total, total)


def _sizes(adb: Adb, paths: Sequence[str]) -> dict[str, int]:
    """Sizes of the files that are there."""
    names = " ".join(shlex.quote(path) for path in paths)
    lines = adb.shell(f"stat -c '%s %n' {names} 2>/dev/null || true").splitlines()
    found = {}
    for line in lines:
        size, _, name = line.strip().partition(" ")
        if size.isdigit():
            found[name] = int(size)
    return found


def _check_room(adb: Adb, missing: Sequence[tuple[Path, str]]) -> None:
    needed = sum(source.stat().st_size for source, _ in missing)
    free = adb.insist(lambda: adb.free_bytes(str(PurePosixPath(WORK).parent)))
    if free is not None and needed > free:
        raise PitDeployError(
            f"The device {adb.serial} has {free / 1e6:.0f} MB free at {PurePosixPath(WORK).parent}, and "
            f"{needed / 1e6:.0f} MB are to be copied there; free some room on it, or remove earlier bundles: "
            f"adb shell rm -r {WORK}"
        )
