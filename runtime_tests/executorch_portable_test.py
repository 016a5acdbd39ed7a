"""The portable profile where ExecuTorch's own package is absent: NumPy, a small runtime, no torch, no LLM extension."""

import subprocess
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("executorch.exir")
from pit_deploy import export
from pit_deploy.bundle import Bundle
from pit_deploy.runtimes import open_runtime

ROOT = Path(__file__).parent.parent
SETUP = "runtime_tests/setup_executorch_numpy.sh build/executorch-numpy"
PYTHON = ROOT / "build/executorch-numpy/python"
needs_runtime = pytest.mark.skipif(
    not PYTHON.is_file(), reason=f"executorch-numpy-runtime is not set up; run: {SETUP}"
)


def torch_free(bundle, ids, lengths, room):
    """The logits after each pass, and proof that nothing of torch was there."""
    np.savez(room / "in.npz", ids=np.array(ids), lengths=np.array(lengths))
    script = ROOT / "runtime_tests/executorch_numpy.py"
    line = [PYTHON, script, bundle / "model.pte", room / "in.npz", room / "out.npz"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return np.load(room / "out.npz")["logits"]


@needs_runtime
@pytest.mark.parametrize(("weights", "tables"), [("fp32", "fp32"), ("int8", "int8"), ("int4", "int8")])
def test_the_torch_free_runtime_computes_the_same(make_checkpoint, tmp_path, weights, tables):
    options = dict(weights=weights, tables=tables, quantizer="rtn", profile="portable", context=64)
    export(make_checkpoint(), tmp_path / "bundle", to="executorch", **options)
    runtime = open_runtime(Bundle.open(tmp_path / "bundle"), threads=1)
    ids = [int(i) for i in np.random.default_rng(0).integers(0, 250, 40)]
    lengths = [33, *[1] * 7]
    found = torch_free(tmp_path / "bundle", ids, lengths, tmp_path)
    expected, start = [], 0
    for length in lengths:
        expected.append(runtime.prefill(ids[start : start + length]))
        start += length
    # Rounding of activations turns the last bits of a sum into steps; float has none.
    limit = 1e-4 if weights == "fp32" else 2e-2
    assert np.abs(found - expected).max() <= limit * np.abs(expected).max()
    assert (found.argmax(-1) == np.argmax(expected, -1)).all()
