"""ARM64 on another machine: real ARM64 builds of the runtimes under qemu's user emulation.

`python -m pit_deploy.runtimes.arm64_setup` makes the folder that is used here. What is proven is what ARM64 kernels
compute; how fast they do it is not measured, since an emulator's time says nothing about a phone's.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pit_deploy.bundle import Bundle
from pit_deploy.errors import InputError
from pit_deploy.runtimes.base import Runtime
from pit_deploy.runtimes.native.process import RunnerProcess
from pit_deploy.runtimes.native.runtime import NativeRuntime
from pit_deploy.sample import cache_folder

SETUP = "python -m pit_deploy.runtimes.arm64_setup"
QEMU = "qemu-aarch64-static"
NAMES = {"arm64-onnxruntime": "onnx", "arm64-executorch": "executorch"}
"""The runtimes, and the kind of bundle that each opens."""
NO_KLEIDIAI = "no-kleidiai"
CALL_SECONDS = 3600.0
"""A prompt through a real model takes minutes, and longer on a busy machine."""
KLEIDIAI_OFF = {"mlas.disable_kleidiai": "1"}


@dataclass(frozen=True)
class Processor:
    """A processor that is emulated: its part number and the features that Linux tells of it.

    Libraries that detect the processor trust /proc/cpuinfo, which has to agree with what qemu executes.
    """

    part: str
    features: str


PROCESSORS = {
    # with dot products, as phones since 2018 have; and without
    "cortex-a76": Processor(
        "0xd0b",
        "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp",
    ),
    "cortex-a72": Processor("0xd08", "fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid"),
}


@dataclass(frozen=True)
class Choice:
    """What a runtime's name asks for: `arm64-onnxruntime`, `arm64-onnxruntime:cortex-a72:no-kleidiai`."""

    name: str
    processor: str = "cortex-a76"
    kleidiai: bool = True

    @property
    def label(self) -> str:
        """The name with its processor, and what is turned off."""
        return f"{self.name}:{self.processor}" + ("" if self.kleidiai else f":{NO_KLEIDIAI}")


def choice_of(name: str) -> Choice:
    """Read a runtime's name; raises `InputError` for a part that is not known."""
    base, *parts = name.split(":")
    chosen: dict[str, str | bool] = {}
    for part in parts:
        if part in PROCESSORS:
            chosen["processor"] = part
        elif part == NO_KLEIDIAI and base == "arm64-onnxruntime":
            chosen["kleidiai"] = False
        else:
            known = [*PROCESSORS, *([NO_KLEIDIAI] if base == "arm64-onnxruntime" else [])]
            raise InputError(f"the runtime {name!r} has the part {part!r}; known are {', '.join(known)}.")
    return Choice(base, **chosen)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Emulator:
    """The folder that the set-up made."""

    folder: Path

    @property
    def runner(self) -> Path:
        """The native runner, with ONNX Runtime beside it."""
        return self.folder / "native" / "pit-runner"

    @property
    def python(self) -> str:
        """Python, as the emulated program sees it."""
        return "/usr/bin/python3.13"

    @property
    def packages(self) -> Path:
        """Python packages for ARM64."""
        return self.folder / "site"

    def root(self, processor: str) -> Path:
        """What an emulated program takes for the system's root folder, where it has the file."""
        return self.folder / f"root-{processor}"

    def command(self, processor: str, program: Path | str, *arguments: str) -> list[str]:
        """The command that runs an ARM64 program."""
        return [QEMU, "-cpu", processor, "-L", str(self.root(processor)), str(program), *arguments]


def emulator_folder() -> Path:
    """`PIT_DEPLOY_ARM64`, or a folder in pit-deploy's cache."""
    given = os.environ.get("PIT_DEPLOY_ARM64")
    return Path(given) if given else cache_folder() / "arm64"


def missing(kind: str = "onnx") -> str | None:
    """Why nothing can be emulated for a kind of bundle: one sentence with the command that helps; None where it can."""
    emulator = Emulator(emulator_folder())
    if shutil.which(QEMU) is None:
        return f"{QEMU} is not installed; run: apt-get install qemu-user-static, then {SETUP}"
    if kind == "onnx" and not emulator.runner.is_file():
        return f"{emulator.folder} has no ARM64 runner; run: {SETUP}"
    if kind == "executorch" and not (emulator.packages / "executorch").is_dir():
        return f"{emulator.folder} has no ExecuTorch for ARM64; run: {SETUP} --executorch"
    return None


def find_emulator(kind: str = "onnx") -> Emulator:
    """The emulator for a kind of bundle; raises `InputError` with the command that sets it up."""
    reason = missing(kind)
    if reason is not None:
        raise InputError(f"ARM64 programs cannot be run here: {reason}")
    return Emulator(emulator_folder())


def open_arm64(bundle: Bundle, name: str, *, threads: int | None = None) -> Runtime:
    """Open a bundle in an ARM64 runtime. Raises `InputError` where the emulator is not set up."""
    choice = choice_of(name)
    emulator = find_emulator(NAMES[choice.name])
    if choice.name == "arm64-executorch":
        from pit_deploy.runtimes.arm64_executorch import Arm64Executorch

        return Arm64Executorch(bundle, emulator, choice, threads=threads)
    config: Mapping[str, str] = {} if choice.kleidiai else KLEIDIAI_OFF

    def connect() -> RunnerProcess:
        command = emulator.command(choice.processor, emulator.runner, str(bundle.path.resolve()))
        where = f"ONNX Runtime on an emulated {choice.processor}"
        return RunnerProcess(command, where=where, subject=str(bundle.path), seconds=CALL_SECONDS)

    return NativeRuntime(
        bundle, connect, name=choice.label, threads=threads or 1, config=config, emulated=True
    )
