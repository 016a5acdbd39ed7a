"""The whole path on the real sample model: what the README claims, measured. Some minutes; `make test-slow`."""

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
from pit_deploy.checkpoint import open_checkpoint
from pit_deploy.demo import QUESTION
from pit_deploy.golden import GoldenRecord

pytestmark = pytest.mark.slow

MB = 1e6


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run pit-deploy in a process of its own."""
    line = [sys.executable, "-m", "pit_deploy.cli", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def measured(*arguments: str | Path) -> tuple[float, float]:
    """Wall seconds and peak RSS in bytes of a pit-deploy command that succeeds."""
    start = time.perf_counter()
    line = [sys.executable, "-m", "pit_deploy.cli", *map(str, arguments)]
    child = os.posix_spawn(sys.executable, line, os.environ)
    _, status, usage = os.wait4(child, 0)
    assert status == 0
    return time.perf_counter() - start, usage.ru_maxrss * 1024.0


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sample")


@pytest.fixture(scope="module")
def sample(room: Path) -> Path:
    assert command("sample", room / "sample").returncode == 0
    return room / "sample"


@pytest.fixture(scope="module")
def pit(room: Path, sample: Path) -> Path:
    done = command("convert", sample, room / "pit", "--json", room / "convert.json")
    assert done.returncode == 0, done.stderr
    return room / "pit"


@pytest.fixture(scope="module")
def fp32(room: Path, pit: Path) -> Path:
    done = command("export", pit, room / "fp32", "--weights", "fp32", "--tables", "fp32")
    assert done.returncode == 0, done.stderr
    return room / "fp32"


@pytest.fixture(scope="module")
def int8(room: Path, pit: Path) -> Path:
    seconds, peak = measured("export", pit, room / "int8")
    print(f"\nexport int8: {seconds:.1f} s, peak {peak / MB:.0f} MB")
    assert seconds <= 60
    assert peak <= 2200 * MB
    return room / "int8"


def test_conversion_keeps_the_function(room: Path, pit: Path):
    report = json.loads((room / "convert.json").read_text())
    assert report["max_logit_difference"] <= 1e-3
    assert report["interface_error"] <= 1e-5
    assert 5e3 < report["interface_error_source"] < 2e4
    assert not report["lossy"]


def test_strict_conversion_keeps_the_head(room: Path, sample: Path):
    done = command("convert", sample, room / "strict", "--strict", "--json", room / "strict.json")
    assert done.returncode == 0, done.stderr
    report = json.loads((room / "strict.json").read_text())
    assert report["loss"] > report["loss_source"] + 1  # the embedding is new to the backbone
    checkpoint, source = open_checkpoint(room / "strict"), open_checkpoint(sample)
    cholesky = checkpoint.read("pit.cholesky", np.float64)
    head = checkpoint.read("pit.memory", np.float64) @ cholesky @ cholesky.T
    original = source.read("model.embed_tokens.weight", np.float64)
    assert np.abs(head - original).max() <= 1e-5 * np.abs(original).max()


def test_fp32_bundle_equals_training(fp32: Path, pit: Path):
    done = command("verify", fp32, "--json", "-")
    report = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert report["max_abs_logit_error"] <= 1e-3
    assert report["top1"] == 1.0
    assert report["greedy_equal"] == report["greedy_tokens"] == 64
    full = command("verify", fp32, "--source", pit, "--json", "-")
    assert full.returncode == 0, full.stderr
    assert json.loads(full.stdout)["positions"] >= 1000


def test_int8_bundle_on_text_that_was_not_calibrated_on(int8: Path, pit: Path):
    done = command("verify", int8, "--source", pit, "--tokens", "1024", "--json", "-")
    report = json.loads(done.stdout)
    print(f"\nint8: KL {report['mean_kl']:.2e}, top-1 {report['top1']:.2%}")
    assert done.returncode == 0, done.stderr
    assert report["positions"] >= 1000
    assert report["mean_kl"] <= 3e-3
    assert report["top1"] >= 0.965
    assert command("verify", int8).returncode == 0


def test_int8_bundle_is_small_with_one_table(int8: Path):
    import onnx

    bundle = Bundle.open(int8, check_hashes=True)
    assert bundle.total_bytes + (int8 / "manifest.json").stat().st_size <= 172 * MB
    assert sum((int8 / f"golden.{end}").stat().st_size for end in ("json", "safetensors")) <= 8 * MB
    model = onnx.load(bundle.model_path, load_external_data=False)
    elements = bundle.manifest.vocab_size * bundle.manifest.architecture.hidden_size
    tables = [t for t in model.graph.initializer if np.prod(t.dims) >= elements]
    places = {
        tuple((e.key, e.value) for e in t.external_data if e.key in ("location", "offset", "length"))
        for t in tables
    }
    assert len(places) == 1


def test_onnxruntime_genai_generates_the_same_tokens(int8: Path):
    import onnxruntime_genai as og

    from pit_deploy.golden import greedy_continuation
    from pit_deploy.runtimes import FullRuntime, open_runtime

    golden = GoldenRecord.load(int8)
    prompt = golden.prompts[golden.greedy_prompt].ids
    runtime = open_runtime(Bundle.open(int8))
    assert isinstance(runtime, FullRuntime)
    ours, _ = greedy_continuation(runtime, prompt, 32, ())
    parameters = og.GeneratorParams(model := og.Model(str(int8)))
    parameters.set_search_options(max_length=len(prompt) + 32, do_sample=False)
    generator = og.Generator(model, parameters)
    generator.append_tokens(np.array(prompt, np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    theirs = list(generator.get_sequence(0))[len(prompt) :]
    assert theirs == ours[: len(theirs)]
    assert len(theirs) > 5


def test_untied_fold_opens_in_plain_transformers(room: Path, pit: Path, sample: Path, fp32: Path):
    import torch
    from transformers import AutoModelForCausalLM

    assert command("fold", pit, room / "untied").returncode == 0
    ids = torch.tensor([GoldenRecord.load(fp32).prompts[-1].ids])
    with torch.no_grad():
        logits = [
            AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32)(ids).logits
            for p in (room / "untied", sample)
        ]
    assert float((logits[0] - logits[1]).abs().max()) <= 1e-3


def test_chat_answers(int8: Path):
    done = command("run", int8, "--chat", "--prompt", QUESTION, "--json", "-")
    assert done.returncode == 0, done.stderr
    assert "Paris" in json.loads(done.stdout)["text"]


def test_demo_takes_at_most_five_minutes(room: Path):
    seconds, _ = measured("demo", room / "demo")
    print(f"\ndemo: {seconds:.0f} s")
    assert seconds <= 300
    assert (room / "demo" / "report.html").stat().st_size > 10_000


def test_installs_without_frameworks(room: Path):
    """`pip install .` in a clean environment: no torch, quick help, errors that name the extra."""
    import venv

    venv.create(room / "venv", with_pip=True)
    python = room / "venv" / "bin" / "python"
    checkout = Path(__file__).parent.parent
    subprocess.run([python, "-m", "pip", "install", "--quiet", str(checkout)], check=True)
    tool = room / "venv" / "bin" / "pit-deploy"
    start = time.perf_counter()
    assert subprocess.run([tool, "--help"], capture_output=True, check=False).returncode == 0
    assert time.perf_counter() - start < 1
    listed = subprocess.run([python, "-m", "pip", "list"], capture_output=True, text=True, check=True).stdout
    assert "torch" not in listed
    done = subprocess.run([tool, "convert", "a", "b"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pit-deploy[onnx]" in done.stderr
