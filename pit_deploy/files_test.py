from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pit_deploy.errors import InputError, OutputExistsError
from pit_deploy.files import atomic_output, check_output, check_room


def _write(path: Path, text: str, **options: bool) -> None:
    with atomic_output(path, **options) as partial:
        (partial / "a.txt").write_text(text)


def test_writes_a_directory_or_a_file(tmp_path: Path) -> None:
    _write(tmp_path / "deep" / "out", "one")
    assert (tmp_path / "deep" / "out" / "a.txt").read_text() == "one"
    with atomic_output(tmp_path / "file", directory=False) as partial:
        partial.write_text("two")
    assert (tmp_path / "file").read_text() == "two"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["deep", "file"]


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt(), SystemExit(3)])
@pytest.mark.parametrize("exists", [False, True])
def test_a_failure_leaves_what_was_there(tmp_path: Path, error: BaseException, exists: bool) -> None:
    out = tmp_path / "new" / "out"
    if exists:
        _write(out, "old")
    with pytest.raises(type(error)), atomic_output(out, overwrite=exists) as partial:
        (partial / "a.txt").write_text("new")
        raise error
    assert [p.name for p in tmp_path.iterdir()] == (["new"] if exists else [])
    if exists:
        assert [p.name for p in out.parent.iterdir()] == ["out"]
        assert (out / "a.txt").read_text() == "old"


def test_an_existing_output_is_refused_before_the_block(tmp_path: Path) -> None:
    _write(tmp_path / "out", "old")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("out", "dangling"):
        with pytest.raises(OutputExistsError, match="--overwrite"), atomic_output(tmp_path / name):
            raise AssertionError("the block ran")


@pytest.mark.parametrize("kind", ["directory", "file", "link"])
def test_overwrite_replaces_what_is_there(tmp_path: Path, kind: str) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    other.mkdir()
    (other / "kept").touch()
    if kind == "directory":
        _write(out, "old")
    elif kind == "file":
        out.write_text("old")
    else:
        out.symlink_to(other)
    _write(out, "new", overwrite=True)
    assert (out / "a.txt").read_text() == "new"
    assert not out.is_symlink()
    assert (other / "kept").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other", "out"]


def test_a_failing_rename_gives_the_old_output_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    _write(out, "old")
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self.name.endswith(f"partial-{os.getpid()}"):
            raise PermissionError(errno.EACCES, "refused")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(PermissionError):
        _write(out, "new", overwrite=True)
    assert (out / "a.txt").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_kill_in_mid_write_is_cleaned_up_by_the_next_run(tmp_path: Path) -> None:
    out = tmp_path / "out[1]"  # with signs that a glob would take for its own
    _write(out, "old")
    code = (
        "import sys, time\nfrom pit_deploy.files import atomic_output\n"
        "with atomic_output(sys.argv[1], overwrite=True) as partial:\n"
        "    (partial / 'a.txt').write_text('half'); print('ready', flush=True); time.sleep(60)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(out)], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"ready\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert (out / "a.txt").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 2
    _write(out, "new", overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["out[1]"]
    assert (out / "a.txt").read_text() == "new"


def test_a_kill_between_the_two_renames_gives_the_old_output_back(tmp_path: Path) -> None:
    dead = _dead_process()
    aside = tmp_path / f".out.partial-{dead}-old"
    aside.mkdir()
    (aside / "a.txt").write_text("old")
    (tmp_path / f".out.partial-{dead}").mkdir()
    unrelated = tmp_path / f".out.b.partial-{dead}"
    unrelated.mkdir()
    with pytest.raises(OutputExistsError):
        _write(tmp_path / "out", "new")
    assert (tmp_path / "out" / "a.txt").read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == [unrelated.name, "out"]


def test_a_running_process_keeps_its_partial_output(tmp_path: Path) -> None:
    living = tmp_path / f".out.partial-{os.getppid()}"
    living.mkdir()
    _write(tmp_path / "out", "new")
    assert living.exists()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_one_sentence(tmp_path: Path, error: Exception) -> None:
    _write(tmp_path / "out", "old")
    sentence = r"The disk is full: .*out.* MB were free"
    with (
        pytest.raises(InputError, match=sentence),
        atomic_output(tmp_path / "out", overwrite=True) as partial,
    ):
        (partial / "a.txt").write_text("half")
        raise error
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "a.txt").read_text() == "old"


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file" / "out", tmp_path / ("x" * 300)):
        with pytest.raises(InputError, match="cannot be written"), atomic_output(place):
            raise AssertionError("the block ran")


def test_the_source_and_the_home_are_not_replaced(tmp_path: Path) -> None:
    source = tmp_path / "models" / "source"
    source.mkdir(parents=True)
    for out in (source, tmp_path / "models", Path.cwd(), Path.home(), Path("/")):
        with pytest.raises(InputError, match="not replaced"):
            check_output(out, overwrite=True, source=source)
    check_output(source / "inside", overwrite=True, source=source)


def test_room(tmp_path: Path) -> None:
    check_room(tmp_path / "not" / "there", 1)
    with pytest.raises(InputError, match=r"needs about 1000000000000 MB and .* MB free"):
        check_room(tmp_path / "not" / "there", 10**18)


def test_files_are_as_open_as_their_folder(tmp_path: Path) -> None:
    with atomic_output(tmp_path / "out") as partial:
        (partial / "private").touch(mode=0o600)
    assert (tmp_path / "out" / "private").stat().st_mode & 0o777 == (tmp_path / "out").stat().st_mode & 0o666


def _dead_process() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    time.sleep(0)
    return child.pid
