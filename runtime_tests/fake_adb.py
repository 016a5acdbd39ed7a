#!/usr/bin/env python3
"""A stand-in for adb: several devices whose files lie in folders, and whose programs run here.

`FAKE_ADB_ROOT` has a folder for each device, named by its serial number, with `device.json` and the device's files.
ARM64 programs run under qemu-user, with the libraries in `FAKE_ADB_SYSROOT`; scripts run as they are. Every call is
logged to `adb.log`. In device.json:

    state               "device", "unauthorized", "offline"
    properties          what getprop knows
    free_bytes          room for pushed files
    drop_after          answers of the runner after which the connection is lost, once
    away_seconds        how long the device is gone then (0.5)
    corrupt             pushed files that arrive with one byte changed, once each

`am start -n PACKAGE/ACTIVITY` runs the script `app` in the device's folder, where it is installed, with the
intent's extras as --NAME VALUE.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(os.environ["FAKE_ADB_ROOT"])
DEVICE_FOLDERS = ("/data/", "/sdcard/", "/sys/", "/proc/")
QEMU = "qemu-aarch64-static"
AARCH64 = 183


def main(arguments: list[str]) -> int:
    with (ROOT / "adb.log").open("a") as log:
        log.write(json.dumps(arguments) + "\n")
    if arguments[:1] == ["devices"]:
        return list_devices()
    if arguments[:1] != ["-s"]:
        fail("fake adb: name a device with -s")
    device = FakeDevice(arguments[1])
    device.check()
    verb, rest = arguments[2], arguments[3:]
    if verb == "get-state":
        print("device")
        return 0
    if verb == "push":
        return device.push(Path(rest[0]), rest[1])
    if verb == "pull":
        return device.pull(rest[0], Path(rest[1]))
    if verb == "shell":
        return device.shell(" ".join(part for part in rest if part != "-T"))
    fail(f"fake adb: {verb} is not supported")


def list_devices() -> int:
    print("List of devices attached")
    for folder in sorted(ROOT.iterdir()):
        if (folder / "device.json").is_file():
            device = FakeDevice(folder.name)
            print(f"{folder.name}\t{'offline' if device.is_away else device.settings['state']}")
    return 0


class FakeDevice:
    def __init__(self, serial: str) -> None:
        self.serial, self.folder = serial, ROOT / serial
        file = self.folder / "device.json"
        if not file.is_file():
            fail(f"adb: device '{serial}' not found")
        self.settings: dict[str, Any] = {"state": "device", "properties": {}, **json.loads(file.read_text())}

    @property
    def is_away(self) -> bool:
        mark = self.folder / "away_until"
        return mark.is_file() and time.time() < float(mark.read_text())

    def check(self) -> None:
        state = self.settings["state"]
        if state == "unauthorized":
            fail("adb: device unauthorized.\nThis adb server's $ADB_VENDOR_KEYS is not set")
        if state != "device":
            fail(f"adb: device {state}")
        if self.is_away:
            fail(f"adb: device '{self.serial}' not found")

    def leave(self) -> None:
        """Be gone for a while."""
        until = time.time() + float(self.settings.get("away_seconds", 0.5))
        (self.folder / "away_until").write_text(str(until))

    def path(self, name: str) -> Path:
        return self.folder / name.lstrip("/")

    def once(self, what: str) -> bool:
        """Whether something that happens once has not happened yet; it has afterwards."""
        mark = self.folder / f"did-{what}"
        if mark.exists():
            return False
        mark.touch()
        return True

    def push(self, source: Path, target: str) -> int:
        free = self.settings.get("free_bytes")
        if free is not None and source.stat().st_size > free - self.used():
            fail(
                f"adb: error: failed to copy '{source}' to '{target}': remote couldn't create file: No space left on "
                "device"
            )
        place = self.path(target)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, place)
        if source.name in self.settings.get("corrupt", []) and self.once(f"corrupt-{source.name}"):
            data = bytearray(place.read_bytes())
            data[len(data) // 2] ^= 1
            place.write_bytes(data)
        print(f"{source}: 1 file pushed.")
        return 0

    def pull(self, source: str, target: Path) -> int:
        if not self.path(source).exists():
            fail(f"adb: error: failed to stat remote object '{source}': No such file or directory")
        shutil.copy(self.path(source), target)
        return 0

    def used(self) -> int:
        data = self.folder / "data"
        return sum(file.stat().st_size for file in data.rglob("*") if file.is_file())

    def shell(self, script: str) -> int:
        here = script
        for folder in DEVICE_FOLDERS:
            here = re.sub(rf"(?<![\w.]){folder}", f"{self.folder}{folder}", here)
        command = ["bash", "-c", self.prelude() + here]
        if "pit-runner" in script and "exec" in script:
            return self.run_program(here)
        found = subprocess.run(command, capture_output=True, text=True)
        sys.stdout.write(found.stdout.replace(str(self.folder), ""))
        sys.stderr.write(found.stderr.replace(str(self.folder), ""))
        return found.returncode

    def prelude(self) -> str:
        """What the device's shell has and this machine's has not."""
        properties = {"ro.product.cpu.abi": "arm64-v8a", **self.settings["properties"]}
        cases = "".join(f"{name}) echo '{value}';; " for name, value in properties.items())
        free = self.settings.get("free_bytes")
        size = 1 << 40 if free is None else max(free - self.used(), 0)
        df = f'echo "Filesystem 1K-blocks Used Available"; echo "/dev/data {size // 1024} 0 {size // 1024} 0% /data"'
        app = self.folder / "app"
        start = (
            f'if [ -x {app} ]; then echo Starting; FAKE_DEVICE={self.folder} {app} "$@" >/dev/null 2>&1 & else '
            "echo 'Error: Activity class does not exist.' >&2; return 1; fi"
        )
        return (
            f"getprop() {{ case $1 in {cases} *) echo;; esac; }}\n"
            f"df() {{ {df}; }}\n"
            'dumpsys() { echo "  temperature: 301"; }\n'
            f"pm() {{ [ -x {app} ] && echo package:/data/app/$2.apk; }}\n"
            f"am() {{ shift; {start}; }}\n"
        )

    def run_program(self, script: str) -> int:
        """Run the runner with this process's streams, and lose the connection where the settings say so."""
        words = script.split()
        program, arguments = words[1], words[2:]
        command = [program, *arguments]
        if Path(program).read_bytes()[:4] == b"\x7fELF":
            if int.from_bytes(Path(program).read_bytes()[18:20], "little") != AARCH64:
                fail(f"{program}: not executable: 64-bit ELF file", 126)
            cpu = os.environ.get("FAKE_ADB_CPU", "cortex-a76")
            command = [QEMU, "-cpu", cpu, "-L", os.environ["FAKE_ADB_SYSROOT"], *command]
        limit = self.settings.get("drop_after")
        if limit is None or not self.once("drop"):
            status = subprocess.run(command).returncode
            return 128 - status if status < 0 else status
        child = subprocess.Popen(command, stdin=subprocess.PIPE)
        assert child.stdin is not None
        threading.Thread(target=child.wait, daemon=True).start()
        for _ in range(limit):
            line = sys.stdin.buffer.readline()
            if not line:
                child.stdin.close()
                return child.wait()
            child.stdin.write(line)
            child.stdin.flush()
        sys.stdin.buffer.readline()  # this request is not answered any more
        child.kill()
        self.leave()
        return 255


def fail(message: str, status: int = 1) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
