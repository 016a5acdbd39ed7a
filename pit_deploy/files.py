"""Writing that leaves either the whole result or what was there before."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from pit_deploy.errors import InputError, OutputExistsError

_PARTIAL = re.compile(r"\.partial-(\d+)$")


@contextlib.contextmanager
def atomic_output(path: Path | str, *, overwrite: bool = False, directory: bool = True) -> Iterator[Path]:
    """Yield a temporary sibling of `path` to write into, and rename it to `path` when the block ends well.

    When the block fails or is interrupted the sibling is removed and `path` stays as it was. Siblings left by
    a process that was killed are removed by the next call for the same path. Raises `OutputExistsError`
    before the block when `path` exists and `overwrite` is false, and `InputError` when the disk is full.
    """
    path = Path(path).absolute()
    _remove_abandoned(path)
    check_output(path, overwrite=overwrite)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    _remove(partial)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if directory:
            partial.mkdir()
        yield partial
        _sync(partial)
        _replace(partial, path)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = shutil.disk_usage(path.parent).free
        raise InputError(
            f"The disk is full: {path} could not be written ({free / 1e6:.0f} MB were free before clean-up); "
            f"free some room or choose another place. Nothing was left behind."
        ) from error
    finally:
        _remove(partial)


def check_output(path: Path | str, *, overwrite: bool = False) -> None:
    """Refuse an output path that is taken, before any long work. Raises `OutputExistsError`."""
    path = Path(path)
    if path.is_symlink() or path.exists():
        if not overwrite:
            raise OutputExistsError(path)
        if path.absolute() in (Path.cwd(), *Path.cwd().parents, Path.home()):
            raise InputError(
                f"{path} holds the current or home directory and is not replaced; name another output."
            )


def check_room(path: Path | str, needed: int) -> None:
    """Raise `InputError` where the file system of `path` has fewer than `needed` bytes free."""
    parent = next(p for p in (Path(path).absolute(), *Path(path).absolute().parents) if p.exists())
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise InputError(
            f"Writing {path} needs about {needed / 1e6:.0f} MB and {parent} has {free / 1e6:.0f} MB free; "
            f"free some room or choose another place."
        )


def _replace(partial: Path, path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        # A directory cannot be renamed over another that is not empty: move the old one aside first.
        old = path.with_name(f".{path.name}.old.partial-{os.getpid()}")
        _remove(old)
        path.rename(old)
        try:
            partial.rename(path)
        except OSError:
            old.rename(path)
            raise
        _remove(old)
    else:
        partial.replace(path)


def _sync(partial: Path) -> None:
    """Ask the system to keep the bytes before the name, so that a power cut leaves no empty file behind it."""
    files = [p for p in partial.rglob("*") if p.is_file()] if partial.is_dir() else [partial]
    for file in files:
        with file.open("rb") as stream:
            os.fsync(stream.fileno())


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _remove_abandoned(path: Path) -> None:
    if not path.parent.is_dir():
        return
    for sibling in path.parent.glob(f".{path.name}.*partial-*"):
        match = _PARTIAL.search(sibling.name)
        if not match or _alive(int(match.group(1))):
            continue
        if ".old.partial-" in sibling.name and not path.exists():
            sibling.rename(
                path
            )  # killed between the two renames of `_replace`: this is the user's old output
        else:
            _remove(sibling)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
