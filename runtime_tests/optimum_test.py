"""`optimum-cli export pit`, called as a user calls it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("optimum.commands.base")
PROGRAM = Path(sys.executable).with_name("optimum-cli")


def call(*arguments):
    return subprocess.run(
        [str(PROGRAM), "export", "pit", *map(str, arguments)], capture_output=True, text=True, timeout=600
    )


@pytest.mark.skipif(not PROGRAM.is_file(), reason="optimum-cli is not installed beside this Python")
def test_exports_and_refuses_like_pit_deploy(make_checkpoint, tmp_path):
    source, bundle = make_checkpoint(), tmp_path / "bundle"
    done = call(source, bundle, "--to", "onnx", "--weights", "fp32", "--context", 64)
    assert done.returncode == 0, done.stderr
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert (manifest["runtime"], manifest["context_length"]) == ("onnx", 64)
    refused = call(source, bundle, "--to", "onnx")
    assert refused.returncode == 2 and "exists already" in refused.stderr and not refused.stdout
    shutil.rmtree(bundle)
    refused = call(source, bundle, "--to", "executorch", "--layout", "shared")
    assert refused.returncode == 2 and "--layout shared cannot be written for executorch" in refused.stderr
    assert not bundle.exists()
