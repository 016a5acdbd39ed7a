"""The sample model, trained for a few steps on English: it gets no worse, and what it became is what is exported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pit_deploy.checkpoint import open_checkpoint
from pit_deploy.initialize import orthonormality_error
from pit_deploy.training.data import english_text

pytestmark = pytest.mark.slow


def command(*arguments: str | Path) -> None:
    line = [sys.executable, "-m", "pit_deploy.cli", *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_trained_sample_is_folded_exported_and_verified(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(english_text(), encoding="utf-8")
    command("sample", tmp_path / "sample")
    command("convert", tmp_path / "sample", tmp_path / "pit", "--no-check")
    sizes = [
        "--steps",
        "8",
        "--batch-size",
        "1",
        "--block-length",
        "128",
        "--eval-share",
        "0.02",
        "--eval-every",
        "4",
    ]
    rates = ["--learning-rate", "2e-5"]
    report = tmp_path / "train.json"
    command(
        "train",
        tmp_path / "pit",
        tmp_path / "out",
        "--text",
        tmp_path / "text.txt",
        *sizes,
        *rates,
        "--json",
        report,
    )
    found = json.loads(report.read_text())
    assert found["loss"] < found["loss_before"]
    assert found["interface_error"] < 1e-4 and found["orthonormality_error"] < 1e-5
    before, after = (open_checkpoint(tmp_path / name) for name in ("pit", "out"))
    assert orthonormality_error(after.read("pit.memory")) < 1e-5
    assert abs(before.read("pit.memory") - after.read("pit.memory")).max() > 0
    command("fold", tmp_path / "out", tmp_path / "folded")
    command(
        "export",
        tmp_path / "out",
        tmp_path / "bundle",
        "--weights",
        "fp32",
        "--tables",
        "fp32",
        "--context",
        "256",
    )
    command("verify", tmp_path / "bundle")
