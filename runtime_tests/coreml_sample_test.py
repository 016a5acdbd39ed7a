"""Core ML packages of the real sample in the evaluator; many minutes, `make test-slow`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pit_deploy.bundle import Bundle
from pit_deploy.runtimes.mil_program import weights_file

pytestmark = pytest.mark.slow

MB = 1e6
LIMIT_SECONDS, LIMIT_BYTES = 300, 3000 * MB
FEEDBACK_SECONDS = 2 * LIMIT_SECONDS
"""Of CPU, on two cores, where a search among blocks rounds every matrix twice with error feedback first."""


def command(*arguments: str | Path) -> tuple[int, float, float]:
    """Exit status, seconds of CPU and peak RSS in bytes of a pit-deploy command."""
    line = [sys.executable, "-m", "pit_deploy.cli", *map(str, arguments)]
    child = os.posix_spawn(sys.executable, line, os.environ)
    _, status, usage = os.wait4(child, 0)
    return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024.0


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("coreml-sample")


@pytest.fixture(scope="module")
def pit(room: Path) -> Path:
    assert command("sample", room / "sample")[0] == 0
    assert command("convert", room / "sample", room / "pit", "--no-check")[0] == 0
    return room / "pit"


@pytest.fixture(scope="module")
def checked(room: Path, pit: Path) -> Callable[..., tuple[Path, dict[str, Any]]]:
    """`checked(name, *options)`: export, held to time and memory, and verify; the bundle and the report."""

    def run(name: str, *options: str) -> tuple[Path, dict[str, Any]]:
        bundle, report = room / name, room / f"{name}.json"
        start = time.perf_counter()
        status, seconds, peak = command("export", pit, bundle, "--to", "coreml", *options)
        wall = time.perf_counter() - start
        print(f"\n{name}: export {seconds:.0f} s of CPU, {wall:.0f} s, peak {peak / MB:.0f} MB")
        assert status == 0
        feeds_back = "--max-kl" in options and "neural_engine" not in options
        assert seconds <= (FEEDBACK_SECONDS if feeds_back else LIMIT_SECONDS)
        assert peak <= LIMIT_BYTES
        status, seconds, peak = command("verify", bundle, "--json", report)
        found: dict[str, Any] = json.loads(report.read_text())
        print(
            f"{name}: verify {seconds:.0f} s of CPU, peak {peak / MB:.0f} MB, KL {found['mean_kl']:.2g}, "
            f"top-1 {found['top1']:.2%}, max abs {found['max_abs_logit_error']:.2g}"
        )
        assert status == 0, found["failures"]
        assert found["positions"] >= 256
        return bundle, found

    return run


@pytest.mark.parametrize("profile", ["cpu_gpu", "neural_engine"])
def test_fp16(checked, profile: str) -> None:
    bundle, report = checked(f"{profile}-fp16", "--profile", profile, "--weights", "fp16")
    assert report["mean_kl"] <= 1e-3 and report["top1"] >= 0.99
    manifest = Bundle.open(bundle).manifest
    assert manifest.coreml is not None
    stated = sum(part.bytes for part in manifest.coreml.parts)
    assert (
        weights_file(bundle / "model.mlpackage").stat().st_size <= 1.02 * stated
    )  # two functions, one set of weights


def test_stateless_fp32(checked) -> None:
    _, report = checked("stateless-fp32", "--profile", "stateless", "--weights", "fp32")
    assert report["max_abs_logit_error"] <= 1e-3 and report["top1"] == 1.0
    assert report["greedy_equal"] == report["greedy_tokens"] == 64


@pytest.mark.parametrize("profile", ["cpu_gpu", "neural_engine", "stateless"])
def test_int8(checked, profile: str) -> None:
    bundle, report = checked(f"{profile}-int8", "--profile", profile)
    assert report["mean_kl"] <= 7e-3 and report["top1"] >= 0.945
    manifest = Bundle.open(bundle).manifest
    assert manifest.coreml is not None
    stated = sum(part.bytes for part in manifest.coreml.parts)
    for package in {function.package for function in manifest.coreml.functions}:
        assert weights_file(bundle / package).stat().st_size <= 1.02 * stated


@pytest.mark.parametrize(("profile", "limit"), [("cpu_gpu", "0.01"), ("neural_engine", "0.02")])
def test_mixed(checked, profile: str, limit: str) -> None:
    bundle, report = checked(f"{profile}-mixed", "--profile", profile, "--max-kl", limit)
    assert report["precision"] == "int4"
    assert report["mean_kl"] <= 5e-2 and report["top1"] >= 0.90
    bits = {entry.bits for entry in Bundle.open(bundle).manifest.quantization}
    assert bits <= {4, 6, 8} and len(bits) > 1


def test_one_table_for_both_ends(checked) -> None:
    bundle, report = checked("shared", "--layout", "shared")
    assert report["mean_kl"] <= 7e-3
    assert weights_file(bundle / "model.mlpackage").stat().st_size < 150 * MB
