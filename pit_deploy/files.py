"""Writing that leaves either the whole result or what was there before."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from pit_deploy.errors import InputError, OutputExistsError

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def atomic_output(path: Path | str, *, overwrite: bool = False, directory: bool = True) -> Iterator[Path]:
    """Yield a temporary sibling of `path` to write into, and rename it to `path` when the block ends well.

    When the block fails or is interrupted the sibling is removed and `path` stays as it was. Siblings left by
    a process that was killed are removed by the next call for the same path. Raises `OutputExistsError`
    before the block when `path` exists and `overwrite` is false, and `InputError` when the place cannot be
    written to or the disk is full.
    """
    path = Path(path).absolute()
    _settle_abandoned(path)
    check_output(path, overwrite=overwrite, directory=directory)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    new_parents = [parent for parent in path.parents if not parent.exists()]
    done = False
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if directory:
                partial.mkdir()
        except OSError as error:
            if _disk_full(error):
                raise
            raise InputError(f"{path} cannot be written: {error.strerror}; choose another place.") from error
        yield partial
        _settle(partial)
        _replace(partial, path)
        done = True
    except Exception as error:
        if not _disk_full(error):
            raise
        free = shutil.disk_usage(_existing(path)).free
        raise InputError(
            f"The disk is full: {path} could not be written ({free / 1e6:.0f} MB were free before clean-up); "
            f"free some room or choose another place. Nothing was left behind."
        ) from error
    finally:
        _remove(partial)
        if not done:
            for parent in new_parents:
                with contextlib.suppress(OSError):  # others may have put something there meanwhile
                    parent.rmdir()


def check_output(
    path: Path | str,
    *,
    overwrite: bool = False,
    directory: bool = True,
    source: Path | str | None = None,
    inputs: Iterable[Path | str | None] = (),
) -> None:
    """Refuse an output path that is taken, before any long work. Raises `OutputExistsError`.

    A path that is or holds `source` or one of the other `inputs`, which the result is made from, is refused
    even with `overwrite`; so is a folder where a file is to be written (`directory` false).
    """
    if not str(path):
        raise InputError("The output's name is empty; name a file or folder.")
    path = Path(path)
    try:
        taken = path.is_symlink() or path.exists()
    except OSError as error:  # a folder that may not be entered, a name that is too long
        raise InputError(f"{path} cannot be written: {error.strerror}; choose another place.") from error
    if not taken:
        return
    if not overwrite:
        raise OutputExistsError(path)
    if not directory and path.is_dir():
        raise InputError(f"{path} is a folder and is not replaced by a file; give a file name.")
    real = path.resolve()
    for used in (source, *inputs):
        if used is not None and real in (Path(used).resolve(), *Path(used).resolve().parents):
            raise InputError(f"{path} is or holds the input {used} and is not replaced; name another output.")
    if real in (Path.cwd(), *Path.cwd().parents, Path.home(), *Path.home().parents):
        raise InputError(
            f"{path} holds the current or home directory and is not replaced; name another output."
        )


def check_room(path: Path | str, needed: int) -> None:
    """Raise `InputError` where the file system of `path` has fewer than `needed` bytes free."""
    parent = _existing(Path(path).absolute())
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise InputError(
            f"Writing {path} needs about {needed / 1e6:.0f} MB and {parent} has {free / 1e6:.0f} MB free; "
            f"free some room or choose another place."
        )


def _replace(partial: Path, path: Path) -> None:
    if not path.is_symlink() and not path.exists():
        partial.rename(path)
    elif partial.is_dir() or path.is_dir():
        # A directory replaces nothing but an empty directory: move what is there aside first.
        old = partial.with_name(f"{partial.name}-old")
        _remove(old)
        path.rename(old)
        try:
            partial.rename(path)
        except BaseException:
            old.rename(path)
            raise
        _remove(old)
    else:
        partial.replace(path)


def _settle(partial: Path) -> None:
    """Ask the system to keep the bytes before the name, so that a power cut leaves no empty file behind it.

    Some writers make files that only their owner may read; a result is as open as its folder.
    """
    files = [p for p in partial.rglob("*") if p.is_file()] if partial.is_dir() else [partial]
    mode = partial.stat().st_mode & 0o666 if partial.is_dir() else None
    for file in files:
        if mode is not None and not file.is_symlink():
            file.chmod(mode | file.stat().st_mode)
        with file.open("rb") as stream:
            os.fsync(stream.fileno())


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):  # the folder itself may be missing or closed
            path.unlink(missing_ok=True)


def _settle_abandoned(path: Path) -> None:
    """Remove what a killed process left; give back an output that it had moved aside."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.partial-(\d+)(-old)?")
    try:
        siblings = [(entry, pattern.fullmatch(entry.name)) for entry in path.parent.iterdir()]
    except OSError:
        return
    for sibling, match in siblings:
        if not match or _running(int(match.group(1))):
            continue
        if match.group(2) and not path.exists():
            sibling.rename(path)
        else:
            _remove(sibling)


def _running(pid: int) -> bool:
    if pid == os.getpid():
        return False  # an earlier process with our number, which is common in containers
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _disk_full(error: BaseException) -> bool:
    """Writers in other languages report a full disk by text alone (safetensors: `os error 28`)."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _FULL
    return any(f"os error {number})" in str(error) for number in _FULL)


def _existing(path: Path) -> Path:
    """The nearest parent that is there."""
    return next((parent for parent in (path, *path.parents) if parent.exists()), Path.cwd())
