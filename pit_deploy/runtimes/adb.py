"""Android devices over adb: which there are, commands, files, and what goes wrong in one sentence."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pit_deploy.errors import InputError, PitDeployError, RuntimeDiedError

T = TypeVar("T")

WORK = "/data/local/tmp/pit-deploy"
"""Where everything of ours lies on a device; `adb shell rm -r` of it leaves nothing behind."""
RECONNECT_SECONDS = 120.0
"""How long a device that went away is waited for."""
RECONNECTS = 5
"""How often one piece of work is taken up again."""
_CRASHED = (126, 127)
"""The shell's words for a program that cannot be run; a signal is above 128, and 255 is adb's own."""
_SHORT_SECONDS = 60.0
_PUSH_SECONDS = 1800.0
_LOST = re.compile(
    r"device '?[^']*'? not found|device offline|no devices|error: closed|protocol fault|connection reset|"
    r"device still (connecting|authorizing)|transport|failed to get feature set",
    re.IGNORECASE,
)
_NO_SPACE = re.compile(r"no space left|not enough space", re.IGNORECASE)


class DeviceLostError(PitDeployError):
    """The connection to a device was lost."""

    def __init__(self, serial: str, reason: str) -> None:
        super().__init__(
            f"The device {serial} was lost ({reason}); check the cable, and run the command again: it goes on where "
            f"it was."
        )
        self.serial = serial


@dataclass(frozen=True)
class Device:
    """A line of `adb devices`."""

    serial: str
    state: str


def adb_program() -> str:
    """`PIT_DEPLOY_ADB`, or adb on the PATH. Raises `InputError` where there is none."""
    given = os.environ.get("PIT_DEPLOY_ADB")
    found = shutil.which(given or "adb")
    if found is None:
        what = f"PIT_DEPLOY_ADB names {given!r}, which is no program" if given else "adb is not on the PATH"
        raise InputError(f"{what}; install Android's platform tools (apt-get install adb).")
    return found


def list_devices() -> list[Device]:
    """Every device that adb knows, usable or not."""
    try:
        found = subprocess.run(
            [adb_program(), "devices"], capture_output=True, text=True, timeout=_SHORT_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise PitDeployError("adb did not list its devices within a minute; run: adb kill-server") from None
    if found.returncode:
        raise PitDeployError(f"adb could not list its devices: {_line(found.stderr)}.")
    rows = [line.split(None, 1) for line in found.stdout.splitlines()[1:] if line.strip()]
    return [Device(row[0], row[1].strip()) for row in rows if len(row) == 2]


def choose_devices(serial: str | None) -> list[str]:
    """Serial numbers for `serial`: itself, all usable devices for `all`, the only one for None.

    Raises `InputError` that says why a device cannot be used, or which there are.
    """
    devices = list_devices()
    usable = [device.serial for device in devices if device.state == "device"]
    if serial == "all":
        if not usable:
            raise InputError(_nothing_usable(devices))
        return usable
    if serial is None:
        if len(usable) == 1:
            return usable
        if not usable:
            raise InputError(_nothing_usable(devices))
        raise InputError(f"There are several devices ({', '.join(usable)}); name one.")
    device = next((device for device in devices if device.serial == serial), None)
    if device is None:
        known = ", ".join(device.serial for device in devices) or "none"
        raise InputError(f"There is no device {serial!r}; adb knows {known}.")
    if device.state != "device":
        raise InputError(_unusable(device))
    return [serial]


def _unusable(device: Device) -> str:
    advice = {
        "unauthorized": "allow this computer in the dialog on its screen",
        "offline": "plug it in again, or run: adb reconnect",
        "recovery": "start it normally",
        "bootloader": "start it normally",
    }
    word = device.state.split()[0] if device.state else "unknown"
    what = advice.get(
        word, "give the user access to the USB device" if word == "no" else "run: adb reconnect"
    )
    state = "not accessible (no permissions)" if word == "no" else word
    return f"The device {device.serial} is {state}; {what}."


def _nothing_usable(devices: Sequence[Device]) -> str:
    if devices:
        return _unusable(devices[0])
    return "adb knows no device; connect one, and turn on USB debugging in its developer options."


class Adb:
    """One device. Commands raise `DeviceLostError` where it went away, and `PitDeployError` where they fail."""

    def __init__(self, serial: str) -> None:
        self.serial, self._program = serial, adb_program()

    def command(self, *arguments: str) -> list[str]:
        """The command line of adb for this device."""
        return [self._program, "-s", self.serial, *arguments]

    def shell(self, script: str, *, seconds: float = _SHORT_SECONDS) -> str:
        """What a script of the device's shell prints."""
        return self._run(["shell", script], f"running {script.split()[0]}", seconds)

    def property(self, name: str) -> str:
        """A system property; empty where it is not set."""
        return self.shell(f"getprop {name}").strip()

    def read(self, path: str) -> str | None:
        """The text of a small file, such as one of /sys; None where it cannot be read."""
        text = self.shell(f"cat {shlex.quote(path)} 2>/dev/null || true").strip()
        return text or None

    def push(self, source: Path, target: str) -> None:
        """Copy a file into a folder that is there. Where it is cut short a part of the file may be left."""
        self._run(["push", str(source), target], f"copying {source.name}", _PUSH_SECONDS)

    def pull(self, source: str, target: Path) -> None:
        """Copy a file from the device."""
        self._run(["pull", source, str(target)], f"fetching {Path(source).name}", _PUSH_SECONDS)

    def free_bytes(self, folder: str) -> int | None:
        """Room in the file system of a folder; None where df says nothing."""
        lines = self.shell(f"df -k {shlex.quote(folder)} 2>/dev/null || true").strip().splitlines()
        columns = lines[-1].split() if len(lines) > 1 else []
        number = columns[3] if len(columns) > 3 else ""
        return int(number) * 1024 if number.isdigit() else None

    def is_here(self) -> bool:
        """Whether the device answers now."""
        try:
            found = subprocess.run(
                self.command("get-state"), capture_output=True, text=True, timeout=_SHORT_SECONDS
            )
        except subprocess.TimeoutExpired:
            return False
        return found.returncode == 0 and found.stdout.strip() == "device"

    def wait(self, seconds: float = RECONNECT_SECONDS) -> bool:
        """Wait until the device answers; False where it does not come back in time."""
        end = time.monotonic() + seconds
        while not self.is_here():
            if time.monotonic() >= end:
                return False
            time.sleep(0.5)
        return True

    def insist(self, work: Callable[[], T], *, seconds: float = RECONNECT_SECONDS) -> T:
        """What `work` gives, started again where the device was lost and came back."""
        for _ in range(RECONNECTS):
            try:
                return work()
            except DeviceLostError:
                if not self.wait(seconds):
                    raise
        return work()

    def _run(self, arguments: Sequence[str], what: str, seconds: float) -> str:
        try:
            found = subprocess.run(
                self.command(*arguments), capture_output=True, text=True, errors="replace", timeout=seconds
            )
        except subprocess.TimeoutExpired:
            raise DeviceLostError(self.serial, f"no answer for {seconds:.0f} s while {what}") from None
        if found.returncode == 0:
            return found.stdout
        said = _line(found.stderr) or _line(found.stdout) or f"status {found.returncode}"
        if _NO_SPACE.search(said):
            raise PitDeployError(
                f"The device {self.serial} has no space left at {WORK} ({what}); free some room on it and run the "
                f"command again: it goes on where it was."
            )
        if "unauthorized" in said.lower():
            raise InputError(_unusable(Device(self.serial, "unauthorized")))
        if _LOST.search(said) or not self.is_here():
            raise DeviceLostError(self.serial, said)
        raise PitDeployError(f"The device {self.serial} failed while {what}: {said}.")


def is_lost(adb: Adb, error: RuntimeDiedError) -> bool:
    """Whether a runner ended because its device went away, and not by itself."""
    status = error.status
    crashed = status in _CRASHED or 128 < status < 255 or status < 0
    return not crashed or not adb.is_here()


@contextlib.contextmanager
def lost_or_dead(adb: Adb) -> Iterator[None]:
    """Turn the end of a runner into `DeviceLostError` where its device went away."""
    try:
        yield
    except RuntimeDiedError as error:
        if is_lost(adb, error):
            raise DeviceLostError(adb.serial, "its runner ended") from error
        raise


def _line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300].rstrip(".") if lines else ""
