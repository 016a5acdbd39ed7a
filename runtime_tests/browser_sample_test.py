"""The real sample model in WebAssembly: what docs/browser.md claims, measured. Minutes; `make test-slow`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pit_deploy import run
from pit_deploy.bundle import Bundle
from pit_deploy.errors import InputError
from pit_deploy.runtimes import browser_tools, open_text_runtime

pytestmark = pytest.mark.slow


def missing() -> str | None:
    """Why the browser runtimes cannot run here; None where they can."""
    try:
        browser_tools.node()
        browser_tools.installed_modules()
        browser_tools.chromium()
    except InputError as error:
        return str(error)
    return None


if (reason := missing()) is not None:
    pytest.skip(reason, allow_module_level=True)


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run pit-deploy in a process of its own."""
    line = [sys.executable, "-m", "pit_deploy.cli", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def int8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of the default settings."""
    room = tmp_path_factory.mktemp("sample")
    for line in (
        ("sample", room / "sample"),
        ("convert", room / "sample", room / "pit", "--no-check"),
        ("export", room / "pit", room / "int8"),
    ):
        done = command(*line)
        assert done.returncode == 0, done.stderr
    return room / "int8"


@pytest.mark.parametrize("runtime", ["onnxruntime-web", "chromium"])
def test_int8_passes_its_gates(int8: Path, runtime: str) -> None:
    done = command("verify", int8, "--runtime", runtime, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["runtime"] == runtime and report["positions"] >= 256
    # Activations are not rounded in WebAssembly, so it is nearer to the trained model than the native runtime.
    assert report["mean_kl"] < 4e-3 and report["top1"] > 0.955


def test_transformers_js_gives_the_text_of_pit_deploy(int8: Path) -> None:
    bundle = Bundle.open(int8)
    runner = open_text_runtime(bundle, "transformers.js")
    prompt = "The three states of water are"
    text = runner.generate(prompt, 48)
    mine = run(int8, prompt, max_new_tokens=48, temperature=0, runtime="chromium")
    assert runner.ids[: len(mine.generation.ids)] == list(mine.generation.ids)
    assert text == mine.text and len(text.split()) > 10
