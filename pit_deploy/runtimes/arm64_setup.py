"""Set up ARM64 under emulation, in one folder and without touching the machine's packages.

`python -m pit_deploy.runtimes.arm64_setup` fetches Debian's ARM64 libraries and builds the native runner;
`--executorch` adds Python for ARM64 with ExecuTorch (840 MB). Needs apt-get, dpkg-deb and npm, and the packages
qemu-user-static, g++-aarch64-linux-gnu, nlohmann-json3-dev and cmake.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from pit_deploy.errors import PitDeployError
from pit_deploy.runtimes.arm64 import PROCESSORS, QEMU, Emulator, emulator_folder
from pit_deploy.runtimes.native.build import Say, build_linux, call, download_wheels, need

MIRROR = "http://deb.debian.org/debian"
SUITE = "trixie"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
LIBRARIES = ("libc6", "libstdc++6", "libgomp1")
PYTHON = ("python3.13-minimal", "libpython3.13-stdlib")
WHEELS = (
    "numpy==2.3.5",
    "executorch-numpy-runtime==1.4.0",
    # The newest pair whose torch is a CPU build on ARM64.
    "torch==2.10.0",
    "executorch==1.1.0",
    "typing-extensions",
    "sympy",
    "mpmath==1.3.0",
    "networkx",
    "filelock",
    "fsspec",
    "jinja2",
    "markupsafe",
    "pyyaml",
    "flatbuffers",
    "packaging",
)
LINKS = ("usr", "etc", "bin", "lib", "lib64", "sbin")


def set_up(folder: Path, *, executorch: bool = False, say: Say = lambda text: None) -> Emulator:
    """Make or complete the folder; what is there already is kept.

    Raises `InputError` for a tool that is not installed, `PitDeployError` where a download or the compiler fails.
    """
    need({QEMU: "qemu-user-static", "apt-get": "apt", "dpkg-deb": "dpkg"})
    folder.mkdir(parents=True, exist_ok=True)
    emulator = Emulator(folder)
    packages = (*LIBRARIES, *(PYTHON if executorch else ()))
    if not (folder / "root" / _mark(packages)).is_file():
        say(f"fetching {', '.join(packages)} for ARM64")
        _make_root(folder, packages)
    for processor in PROCESSORS:
        _make_view(folder, emulator.root(processor), processor)
    if not emulator.runner.is_file():
        build_linux(emulator.runner.parent, say=say)
    if executorch and not (emulator.packages / "executorch").is_dir():
        say("fetching ExecuTorch for ARM64")
        _make_site(folder, emulator.packages)
    say("running the runner under emulation")
    for processor in PROCESSORS:
        say(call(emulator.command(processor, emulator.runner, "--version")).strip() + f", {processor}")
    return emulator


def _mark(packages: Sequence[str]) -> str:
    return ".complete-" + ("python" if set(PYTHON) <= set(packages) else "libraries")


def _make_root(folder: Path, packages: Sequence[str]) -> None:
    """Unpack Debian packages for ARM64, with what they depend on, by an apt that knows nothing of this machine."""
    apt, root = folder / "apt", folder / "root"
    for place in (apt / "lists" / "partial", apt / "cache" / "archives" / "partial", root):
        place.mkdir(parents=True, exist_ok=True)
    (apt / "status").touch()
    signed = f" signed-by={KEYRING}" if Path(KEYRING).is_file() else ""
    (apt / "sources.list").write_text(f"deb [arch=arm64{signed}] {MIRROR} {SUITE} main\n")
    (apt / "apt.conf").write_text(
        f'APT::Architecture "arm64"; APT::Architectures {{ "arm64"; }}; APT::Install-Recommends "0";\n'
        f'Dir::State "{apt}"; Dir::State::status "{apt}/status"; Dir::Cache "{apt}/cache";\n'
        f'Dir::Etc::SourceList "{apt}/sources.list"; Dir::Etc::SourceParts "-";\n'
    )
    config = ["-c", str(apt / "apt.conf"), "-qq"]
    call(["apt-get", *config, "update"])
    call(["apt-get", *config, "--yes", "--download-only", "install", *packages])
    for package in sorted((apt / "cache" / "archives").glob("*.deb")):
        call(["dpkg-deb", "-x", package, root])
    for name in ("bin", "lib", "lib64", "sbin"):  # Debian's packages have them below usr
        if not (root / name).exists():
            (root / name).symlink_to(f"usr/{name}")
    shutil.rmtree(apt)
    for kind in (LIBRARIES, packages):
        (root / _mark(kind)).touch()


def _make_view(folder: Path, view: Path, processor: str) -> None:
    """The same root with /proc/cpuinfo of one processor."""
    (view / "proc").mkdir(parents=True, exist_ok=True)
    for name in LINKS:
        link = view / name
        if not link.is_symlink():
            link.symlink_to(f"../root/{name}")
    known = PROCESSORS[processor]
    entry = (
        "processor\t: {number}\nBogoMIPS\t: 48.00\n"
        f"Features\t: {known.features}\nCPU implementer\t: 0x41\nCPU architecture: 8\n"
        f"CPU variant\t: 0x3\nCPU part\t: {known.part}\nCPU revision\t: 0\n\n"
    )
    count = os.cpu_count() or 1
    (view / "proc" / "cpuinfo").write_text("".join(entry.format(number=n) for n in range(count)))


def _make_site(folder: Path, site: Path) -> None:
    wheels, partial = folder / "wheels", folder / "site.partial"
    shutil.rmtree(partial, ignore_errors=True)
    for wheel in download_wheels(wheels, "3.13", WHEELS):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(partial)
    shutil.rmtree(wheels)
    partial.rename(site)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pit_deploy.runtimes.arm64_setup", description=__doc__)
    parser.add_argument(
        "folder", type=Path, nargs="?", default=emulator_folder(), help="default: %(default)s"
    )
    parser.add_argument("--executorch", action="store_true", help="ExecuTorch too")
    given = parser.parse_args(arguments)
    try:
        set_up(given.folder.absolute(), executorch=given.executorch, say=print)
    except PitDeployError as error:
        print(f"Error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"ARM64 programs can be run; everything is in {given.folder}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
