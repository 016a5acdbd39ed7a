"""Quality of quantised exports of the sample, on its source grid and off it. Some 20 minutes; `make test-slow`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pit_deploy.bundle import Bundle
from pit_deploy.sample import sample_gguf
from runtime_tests.off_grid import write_off_grid

pytestmark = pytest.mark.slow

MB = 1e6
GGUF_SHARE = 1.05


def command(*arguments: str | Path) -> dict[str, Any]:
    """The JSON that a pit-deploy command prints; `status`, `seconds` and `peak` (bytes) are put beside."""
    line = [sys.executable, "-m", "pit_deploy.cli", *map(str, arguments), "--json", "-"]
    start = time.perf_counter()
    child = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    printed = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    child.stdout.close()
    more = {
        "status": child.returncode,
        "seconds": time.perf_counter() - start,
        "peak": usage.ru_maxrss * 1024,
    }
    return (json.loads(printed) if printed.strip() else {}) | more


def held_out(bundle: Path, source: Path) -> dict[str, Any]:
    """Every logit of 1,024 tokens that calibration did not see."""
    return command("verify", bundle, "--source", source, "--tokens", "1024")


@pytest.fixture(scope="module")
def pit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    room = tmp_path_factory.mktemp("on-grid")
    assert command("sample", room / "plain")["status"] == 0
    assert command("convert", room / "plain", room / "pit")["status"] == 0
    return room / "pit"


@pytest.fixture(scope="module")
def off_grid(tmp_path_factory: pytest.TempPathFactory, pit: Path) -> Path:
    room = tmp_path_factory.mktemp("off-grid")
    write_off_grid(pit.parent / "plain", room / "plain", seed=0)
    assert command("convert", room / "plain", room / "pit")["status"] == 0
    return room / "pit"


@pytest.fixture(scope="module")
def all_int8(pit: Path) -> Path:
    out = pit.parent / "int8"
    done = command("export", pit, out, "--quantizer", "feedback")
    print(f"\nint8, error feedback: {done['seconds']:.0f} s, peak {done['peak'] / MB:.0f} MB")
    assert done["status"] == 0
    assert done["peak"] <= 3000 * MB
    assert done["seconds"] <= 240
    return out


def test_int8_with_error_feedback(all_int8: Path, pit: Path) -> None:
    report = held_out(all_int8, pit)
    print(f"\nint8, error feedback: KL {report['mean_kl']:.2e}, top-1 {report['top1']:.2%}")
    assert report["mean_kl"] <= 3e-3
    assert report["top1"] >= 0.965
    record = command("verify", all_int8)
    assert record["status"] == 0
    assert record["mean_kl"] <= 3e-3
    assert record["top1"] >= 0.965


def test_best_artifact_of_the_ggufs_size(pit: Path) -> None:
    limit = int(GGUF_SHARE * sample_gguf().stat().st_size)
    done = command("export", pit, pit.parent / "small", "--max-bytes", limit)
    assert done["status"] == 0
    bundle = Bundle.open(pit.parent / "small")
    size = sum(e.size for e in bundle.manifest.files if e.path.startswith(bundle.manifest.model_file))
    report = held_out(bundle.path, pit)
    print(
        f"\n{size / MB:.1f} MB: KL {report['mean_kl']:.3f}, top-1 {report['top1']:.2%}; {done['seconds']:.0f} s"
    )
    assert size <= limit
    assert report["mean_kl"] <= 0.05
    rows = {
        row["name"]: row["bits"]
        for row in json.loads((bundle.path / "manifest.json").read_text())["quantization"]
    }
    assert set(rows.values()) == {4, 8}  # the table of choices is in the manifest


def test_smallest_artifact_inside_a_gate_off_the_grid(off_grid: Path, all_int8: Path) -> None:
    out = off_grid.parent / "gated"
    done = command("export", off_grid, out, "--max-kl", "0.05")
    assert done["status"] == 0
    report = held_out(out, off_grid)
    total = Bundle.open(out).total_bytes
    print(f"\noff the grid: KL {report['mean_kl']:.3f}, top-1 {report['top1']:.2%}, {total / MB:.1f} MB")
    assert report["mean_kl"] <= 0.05
    assert total < 0.8 * Bundle.open(all_int8).total_bytes


def test_a_gate_belongs_to_the_checkpoint_that_was_exported(off_grid: Path, pit: Path) -> None:
    """A changed model is judged against itself: against the one it came from it would miss its gate."""
    out = off_grid.parent / "fp32"
    assert command("export", off_grid, out, "--weights", "fp32")["status"] == 0
    assert command("verify", out)["status"] == 0
    other = subprocess.run(
        [sys.executable, "-m", "pit_deploy.cli", "verify", str(out), "--source", str(pit)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert other.returncode == 2
    assert str(pit) in other.stderr
