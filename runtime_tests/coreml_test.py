"""Core ML bundles as a user meets them: the command line, the evaluator, and a child process that may die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pit_deploy.runtimes.coreml as coreml_runtime
from pit_deploy import cli, export
from pit_deploy.bundle import Bundle
from pit_deploy.errors import InputError, PitDeployError, RuntimeDiedError
from pit_deploy.manifest import BundleError
from pit_deploy.parity import verify
from pit_deploy.runtimes import FullRuntime, Runtime, open_runtime
from pit_deploy.runtimes.coreml import CoreMLRuntime
from pit_deploy.runtimes.mil import MilRuntime

PROMPT = list(range(40, 70))


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory, make_checkpoint) -> dict[str, Path]:
    """One bundle of each profile, of one PIT checkpoint."""
    from pit_deploy import convert
    from pit_deploy.checkpoint import open_checkpoint
    from pit_deploy.reference import calibrate

    room = tmp_path_factory.mktemp("coreml")
    # Quieter than the other tests' model: logits of +-100 leave float16 no room for a KL of 1e-3.
    source = make_checkpoint("llama", initializer_range=0.008)
    convert(source, room / "pit", check=False)
    learned = calibrate(open_checkpoint(room / "pit"), 320)
    made = {"pit": room / "pit"}
    for profile, weights in (("cpu_gpu", "int8"), ("neural_engine", "fp16"), ("stateless", "fp32")):
        made[profile] = room / profile
        export(room / "pit", room / profile, to="coreml", profile=profile, weights=weights, golden=learned)
    return made


@pytest.mark.parametrize("profile", ["cpu_gpu", "neural_engine", "stateless"])
def test_bundles_pass_their_gates(bundles: dict[str, Path], profile: str) -> None:
    report = verify(bundles[profile])
    assert report.failures == []
    assert report.runtime == "mil" and len(report.kl) >= 256


def test_a_search_among_palettes(bundles: dict[str, Path], tmp_path: Path) -> None:
    made = export(bundles["pit"], tmp_path / "b", to="coreml", profile="neural_engine", max_kl=2e-4)
    assert made.choice is not None and 0 < made.choice["kl"] <= 2e-4
    chosen = {group["group"]: group["bits"] for group in made.choice["groups"]}
    assert set(chosen.values()) <= {4, 6, 8} and len(set(chosen.values())) > 1
    manifest = Bundle.open(tmp_path / "b").manifest
    assert {e.name: e.bits for e in manifest.quantization} == made.choice["bits"]
    assert verify(tmp_path / "b").mean_kl <= 1e-3
    with pytest.raises(InputError, match=r"--max-kl 1e-12 cannot be met: the best reached is .*8-bit"):
        export(bundles["pit"], tmp_path / "c", to="coreml", profile="neural_engine", max_kl=1e-12)


def test_a_bundle_lists_every_file_of_its_package(bundles: dict[str, Path]) -> None:
    manifest = Bundle.open(bundles["neural_engine"], check_hashes=True).manifest
    inside = sorted(e.path for e in manifest.files if e.path.startswith("model.mlpackage/"))
    there = sorted(
        p.relative_to(bundles["neural_engine"]).as_posix()
        for p in (bundles["neural_engine"] / "model.mlpackage").rglob("*")
        if p.is_file()
    )
    assert inside == there and len(inside) == 3
    assert manifest.layout == "untied" and manifest.profile == "neural_engine"
    assert manifest.coreml is not None and manifest.coreml.minimum_system == "iOS18"
    names = [e.path.split("/")[0] for e in Bundle.open(bundles["stateless"]).manifest.files]
    assert {"model.mlpackage", "prefill.mlpackage"} <= set(names)


def run_command(monkeypatch, capsys, *arguments: object) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["pit-deploy", *map(str, arguments)])
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGPIPE)}
    with pytest.raises(SystemExit) as ended:
        cli.main()
    for number, handler in before.items():
        signal.signal(number, handler)
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def test_verify_and_run(bundles, monkeypatch, capsys, tmp_path: Path) -> None:
    bundle = bundles["stateless"]
    status, out, err = run_command(
        monkeypatch, capsys, "verify", bundle, "--runtime", "mil", "--json", "--html", tmp_path / "r.html"
    )
    report = json.loads(out)
    assert status == 0, err
    assert report["runtime"] == "mil" and report["precision"] == "fp32"
    assert len(report["layers"]) == 3 and report["first_diverging_layer"] is None
    assert (tmp_path / "r.html").is_file()
    status, out, _ = run_command(
        monkeypatch, capsys, "run", bundle, "--prompt", "hello", "--max-new-tokens", "4", "--json"
    )
    assert status == 0 and len(json.loads(out)["ids"]) <= 4
    status, _, err = run_command(monkeypatch, capsys, "verify", bundle, "--runtime", "onnxruntime")
    assert status == 2 and "use mil or coreml" in err


def test_a_package_that_changed_does_not_verify(bundles, monkeypatch, capsys, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(bundles["cpu_gpu"], tmp_path / "b")
    file = tmp_path / "b/model.mlpackage/Data/com.apple.CoreML/weights/weight.bin"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(BundleError, match=r"weight.bin has changed"):
        verify(tmp_path / "b")


def test_a_manifest_that_says_otherwise_is_refused(bundles, tmp_path: Path) -> None:
    import shutil

    for field, before, after in (
        ("states", '"shape": [2, 2, 320, 16]', '"shape": [2, 2, 352, 16]'),
        ("specification version 9", '"specification_version": 9', '"specification_version": 8'),
        ("function decoder", '"function": "decode"', '"function": "decoder"'),
    ):
        shutil.copytree(bundles["cpu_gpu"], tmp_path / "b")
        file = tmp_path / "b/manifest.json"
        text = file.read_text()
        assert before in text
        file.write_text(text.replace(before, after))
        with pytest.raises(BundleError, match=field):
            open_runtime(Bundle.open(tmp_path / "b"), "mil")
        shutil.rmtree(tmp_path / "b")


def test_the_evaluator_is_a_full_runtime(bundles: dict[str, Path]) -> None:
    runtime = open_runtime(Bundle.open(bundles["cpu_gpu"]))
    assert isinstance(runtime, MilRuntime) and isinstance(runtime, FullRuntime)
    with pytest.raises(InputError, match="no tokens"):
        runtime.prefill([])
    with pytest.raises(InputError, match="speculation is built for onnxruntime"):
        open_runtime(Bundle.open(bundles["cpu_gpu"]), speculate=True)


# The child process: on this machine the evaluator stands behind it in place of Core ML.


@pytest.mark.parametrize("profile", ["cpu_gpu", "stateless"])
def test_a_child_process_answers_like_the_evaluator(bundles: dict[str, Path], profile: str) -> None:
    bundle = Bundle.open(bundles[profile])
    child, here = CoreMLRuntime(bundle, model="evaluator"), MilRuntime(bundle)
    try:
        assert isinstance(child, Runtime)
        for runtime in (child, here):
            runtime.prefill([1, 2, 3])
            runtime.reset()
        np.testing.assert_array_equal(child.prefill(PROMPT), here.prefill(PROMPT))
        np.testing.assert_array_equal(child.decode(7), here.decode(7))
        assert child.position == here.position == len(PROMPT) + 1
    finally:
        child.close()


DIES = """
import os, sys
from pit_deploy.runtimes import coreml_worker
class Model:
    def __init__(self, request): pass
    def clear(self): pass
    def predict(self, key, inputs):
        print("E5RT: something is wrong", file=sys.stderr, flush=True)
        {how}
coreml_worker.MODELS = {{"coreml": Model, "evaluator": Model}}
coreml_worker.main()
"""


def dying(how: str) -> list[str]:
    return [sys.executable, "-c", DIES.format(how=how)]


@pytest.mark.parametrize(
    ("how", "message", "status"),
    [
        ("os.abort()", r"was ended by the signal SIGABRT while calling prefill", -signal.SIGABRT),
        ("os._exit(7)", r"ended with status 7 while calling prefill", 7),
    ],
)
def test_a_process_that_dies_is_reported(bundles, how: str, message: str, status: int) -> None:
    runtime = CoreMLRuntime(Bundle.open(bundles["cpu_gpu"]), worker=dying(how), model="evaluator")
    with pytest.raises(RuntimeDiedError, match=message) as died:
        runtime.prefill(PROMPT)
    assert died.value.status == status
    assert "its last words: E5RT: something is wrong" in str(died.value)
    with pytest.raises(PitDeployError, match="has ended; reset starts another one"):
        runtime.prefill(PROMPT)
    runtime.reset()
    with pytest.raises(RuntimeDiedError):
        runtime.decode(1)


def test_a_process_that_hangs_is_ended(bundles) -> None:
    hangs = dying("import time; time.sleep(600)")
    runtime = CoreMLRuntime(Bundle.open(bundles["cpu_gpu"]), worker=hangs, model="evaluator", seconds=1)
    with pytest.raises(RuntimeDiedError, match=r"did not answer within 1 s while calling prefill"):
        runtime.prefill(PROMPT)


def test_an_error_of_the_runtime_leaves_the_process_alive(bundles) -> None:
    raises = dying("raise ValueError('no such input')")
    runtime = CoreMLRuntime(Bundle.open(bundles["cpu_gpu"]), worker=raises, model="evaluator")
    for _ in range(2):
        with pytest.raises(PitDeployError, match=r"failed while calling decode .*ValueError: no such input"):
            runtime.decode(1)
    runtime.close()


def test_what_is_no_message_is_an_error(bundles) -> None:
    talks = [sys.executable, "-c", "print('hello')"]
    with pytest.raises(RuntimeDiedError, match="while loading the program"):
        CoreMLRuntime(Bundle.open(bundles["cpu_gpu"]), worker=talks, model="evaluator")


def test_the_rest_of_the_report_is_written(bundles, monkeypatch, capsys, tmp_path: Path) -> None:
    """As on a Mac whose Core ML dies at the first prediction."""
    monkeypatch.setattr(coreml_runtime, "check_system", lambda: None)
    monkeypatch.setattr(
        CoreMLRuntime.__init__,
        "__kwdefaults__",
        {"worker": dying("os.abort()"), "model": "coreml", "seconds": 60.0},
    )
    status, out, err = run_command(
        monkeypatch,
        capsys,
        "verify",
        bundles["cpu_gpu"],
        "--runtime",
        "coreml",
        "--json",
        "--html",
        tmp_path / "r.html",
    )
    report = json.loads(out)
    assert status == 1 and "SIGABRT" in err
    assert not report["passed"] and "SIGABRT" in report["failures"][0]
    assert report["mean_kl"] is None and report["max_abs_logit_error"] is None and report["top1"] == 0
    assert report["total_bytes"] > 0 and report["notes"]
    assert "SIGABRT" in (tmp_path / "r.html").read_text()


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has Core ML")
def test_other_systems_are_told_what_to_use(bundles) -> None:
    with pytest.raises(InputError, match=r"Core ML is part of macOS.*use --runtime mil"):
        open_runtime(Bundle.open(bundles["cpu_gpu"]), "coreml")


@pytest.mark.macos
@pytest.mark.skipif(sys.platform != "darwin", reason="Core ML is part of macOS")
@pytest.mark.parametrize("profile", ["cpu_gpu", "neural_engine", "stateless"])
def test_core_ml_itself(bundles, profile: str) -> None:
    """`pytest -m macos`: the bundles pass their gates in Core ML, and answer as the evaluator says."""
    report = verify(bundles[profile], runtime="coreml")
    assert report.failures == []
    bundle = Bundle.open(bundles[profile])
    child, here = CoreMLRuntime(bundle), MilRuntime(bundle)
    difference = child.prefill(PROMPT) - here.prefill(PROMPT)
    assert np.abs(difference).max() < 0.1


def test_importing_the_package_stays_cheap() -> None:
    code = "import sys, pit_deploy, pit_deploy.cli; sys.exit('coremltools' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, env=os.environ).returncode == 0
