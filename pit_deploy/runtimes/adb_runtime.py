"""A bundle on a device over adb: the native runner there, the runtime protocol here."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

from pit_deploy.bundle import Bundle
from pit_deploy.errors import InputError, RuntimeDiedError
from pit_deploy.progress import Progress, silent
from pit_deploy.runtimes.adb import RECONNECTS, Adb, choose_devices, is_lost
from pit_deploy.runtimes.adb_files import Installed, install, start_runner
from pit_deploy.runtimes.native.process import RunnerProcess
from pit_deploy.runtimes.native.runtime import NativeRuntime


def open_device(
    bundle: Bundle, serial: str | None = None, *, threads: int | None = None, progress: Progress = silent
) -> NativeRuntime:
    """Open a bundle on a device (None: the only one), which is pushed there as far as it is not there yet.

    Where the device goes away and comes back, the runner is started again and fed what it had. Raises `InputError`
    for a device that cannot be used.
    """
    if serial == "all":
        raise InputError("One device at a time is opened; name it in place of all.")
    adb = Adb(choose_devices(serial)[0])
    return runtime_on(adb, bundle, install(adb, bundle, progress=progress), threads=threads)


def runtime_on(
    adb: Adb, bundle: Bundle, installed: Installed, *, threads: int | None = None
) -> NativeRuntime:
    """The runtime over what was installed."""
    left = RECONNECTS

    def connect() -> RunnerProcess:
        return start_runner(adb, installed)

    def recover(error: RuntimeDiedError) -> bool:
        nonlocal left
        left -= 1
        return left >= 0 and is_lost(adb, error) and adb.wait()

    def place(graph: bytes) -> str:
        name = f"../probe-{hashlib.sha256(graph).hexdigest()[:12]}.onnx"  # as seen from the bundle
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "probe.onnx"
            file.write_bytes(graph)
            adb.insist(lambda: adb.push(file, f"{installed.bundle}/{name}"))
        return name

    return NativeRuntime(
        bundle,
        connect,
        name=f"adb:{adb.serial}",
        threads=threads,
        emulated=adb.insist(lambda: is_emulator(adb)),
        recover=recover,
        place=place,
    )


def is_emulator(adb: Adb) -> bool:
    """Whether a device says that it is an emulator, whose speed means nothing."""
    return "1" in (adb.property("ro.boot.qemu"), adb.property("ro.kernel.qemu"))
