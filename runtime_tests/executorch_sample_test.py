"""ExecuTorch on the real sample model: what docs/executorch.md claims, measured. Many minutes; `make test-slow`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from pit_deploy.bundle import Bundle
from pit_deploy.golden import GoldenRecord
from pit_deploy.runtimes import open_runtime

pytestmark = pytest.mark.slow
pytest.importorskip("executorch.exir")

MB = 1e6


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run pit-deploy in a process of its own."""
    line = [sys.executable, "-m", "pit_deploy.cli", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def measured(*arguments: str | Path) -> tuple[float, float, float]:
    """Wall seconds, processor seconds and peak RSS in bytes of a pit-deploy command that succeeds."""
    start = time.perf_counter()
    line = [sys.executable, "-m", "pit_deploy.cli", *map(str, arguments)]
    child = os.posix_spawn(sys.executable, line, os.environ)
    _, status, usage = os.wait4(child, 0)
    assert status == 0
    return time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024.0


@pytest.fixture(scope="module")
def pit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    room = tmp_path_factory.mktemp("sample")
    assert command("sample", room / "sample").returncode == 0
    done = command("convert", room / "sample", room / "pit", "--no-check")
    assert done.returncode == 0, done.stderr
    return room / "pit"


@pytest.fixture(scope="module")
def fp32(pit: Path) -> Path:
    out = pit.with_name("executorch-fp32")
    _, _, peak = measured("export", pit, out, "--to", "executorch", "--weights", "fp32")
    assert peak <= 3000 * MB
    return out


@pytest.fixture(scope="module")
def int8(pit: Path) -> Path:
    out = pit.with_name("executorch-int8")
    wall, processor, peak = measured("export", pit, out, "--to", "executorch")
    print(f"\nexport int8: {wall:.0f} s, {processor:.0f} s of processor time, peak {peak / MB:.0f} MB")
    assert processor <= 240  # of one core; the wall clock says the same on a quiet machine
    assert peak <= 3000 * MB
    return out


def test_fp32_is_what_was_trained(fp32: Path):
    done = command("verify", fp32, "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0 and done.stderr == ""
    assert report["positions"] >= 256 and report["max_abs_logit_error"] <= 1e-3
    assert report["mean_kl"] <= 1e-6 and report["top1"] == 1.0
    assert report["greedy_equal"] == report["greedy_tokens"] == 64


def test_chunks_and_steps_agree_with_one_pass(fp32: Path):
    bundle = Bundle.open(fp32)
    runtime = open_runtime(bundle, threads=1)
    golden = GoldenRecord.load(fp32)
    ids = max(golden.prompts, key=lambda prompt: len(prompt.ids)).ids
    expected = runtime.prefill(ids)
    for parts in ([7, 1, 20, len(ids) - 28], [len(ids) - 5, 1, 1, 1, 1, 1]):
        runtime.reset()
        start, found = 0, expected
        for part in parts:
            found = runtime.prefill(ids[start : start + part])
            start += part
        np.testing.assert_allclose(found, expected, atol=1e-3)


def test_the_stock_runner_writes_the_training_time_text(fp32: Path):
    done = command("verify", fp32, "--runtime", "executorch-runner", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0 and done.stderr == ""
    assert report["equal"] and report["required"] and report["tokens"] == 64
    answer = command(
        "run", fp32, "--runtime", "executorch-runner", "--prompt", report["prompt"], "--max-new-tokens", "64"
    )
    assert answer.returncode == 0 and report["expected"] in answer.stdout


def test_int8_is_within_its_gate_and_its_size(int8: Path):
    done = command("verify", int8, "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0 and done.stderr == ""
    assert report["mean_kl"] <= 2.5e-2 and report["top1"] >= 0.92
    assert (int8 / "model.pte").stat().st_size <= 175 * MB
    print(
        f"\nint8: KL {report['mean_kl']:.2e}, top-1 {report['top1']:.1%}, load {report['load_rss_bytes'] / MB:.0f} MB"
    )


def test_a_large_model_exports_in_bounded_memory(tmp_path: Path):
    """1.3 billion random parameters in the shape of a Llama: under 20 GB."""
    source = tmp_path / "large"
    line = [sys.executable, "-m", "runtime_tests.large_llama", str(source)]
    subprocess.run(line, check=True, cwd=Path(__file__).parent.parent)
    wall, processor, peak = measured(
        "export", source, tmp_path / "bundle", "--to", "executorch", "--context", "256"
    )
    print(f"\nexport 1.3B: {wall:.0f} s, {processor:.0f} s of processor time, peak {peak / MB:.0f} MB")
    assert peak <= 20_000 * MB
