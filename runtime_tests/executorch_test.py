"""ExecuTorch bundles from the command line's point of view: export, verify, run, bench, and what must be refused."""

import hashlib
import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

pytest.importorskip("executorch.exir")
from pit_deploy import export, run, verify
from pit_deploy.bundle import Bundle
from pit_deploy.errors import ContextFullError, InputError
from pit_deploy.manifest import BundleError
from pit_deploy.runtimes import open_runtime
from pit_deploy.runtimes.executorch_text import tokenizer_problem


@pytest.fixture(scope="module")
def bundle(make_checkpoint, tmp_path_factory):
    """An fp32 bundle with all logits, of a model with unequal head counts."""
    out = tmp_path_factory.mktemp("executorch") / "bundle"
    export(
        make_checkpoint(num_hidden_layers=2),
        out,
        to="executorch",
        weights="fp32",
        logits="all",
        context=288,
    )
    return out


def test_verify_passes_with_every_layer(bundle):
    report = verify(bundle, threads=1, layers=True)
    assert report.failures == [] and report.runtime == "executorch"
    assert report.greedy_equal == report.greedy_tokens
    assert len(report.layers) == 3 and max(e.largest for e in report.layers) < 1e-3


def test_end_ids_are_the_union_in_order_and_in_the_program(bundle):
    from pit_deploy.runtimes.executorch import program_metadata

    manifest = json.loads((bundle / "manifest.json").read_text())
    assert manifest["end_ids"] == program_metadata(bundle / "model.pte")["get_eos_ids"]
    assert 7 in manifest["end_ids"] and len(manifest["end_ids"]) == 2


def test_a_prompt_past_the_context_is_refused_before_running(bundle):
    with pytest.raises(ContextFullError):
        run(bundle, "x" * 300, threads=1)
    runtime = open_runtime(Bundle.open(bundle), threads=1)
    runtime.prefill([1] * 280)
    with pytest.raises(ContextFullError):
        runtime.prefill([1] * 9)
    assert runtime.position == 280


def test_decode_after_prefill_is_right(bundle):
    """A cache that is not kept between calls decodes wrongly in silence."""
    runtime = open_runtime(Bundle.open(bundle), threads=1)
    ids = list(np.random.default_rng(0).integers(0, 250, 60))
    expected = runtime.all_logits(ids)
    for split in (1, 30, 59):
        runtime.reset()
        runtime.prefill(ids[:split])
        found = [runtime.decode(id) for id in ids[split:]]
        np.testing.assert_allclose(found, expected[split:], atol=1e-4)


def test_one_altered_layer_is_named(bundle, make_checkpoint, tmp_path):
    """A weight of the last layer off by 1e-2: the record is the right model's, and the table names that layer."""
    source = make_checkpoint(num_hidden_layers=2)
    altered = tmp_path / "altered"
    shutil.copytree(source, altered)
    tensors = load_file(altered / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"] += 1e-2
    save_file(tensors, altered / "model.safetensors", metadata={"format": "pt"})
    export(altered, tmp_path / "bundle", to="executorch", weights="fp32", logits="all", context=288)
    for name in ("golden.json", "golden.safetensors"):
        shutil.copy(bundle / name, tmp_path / "bundle" / name)
    rewrite_manifest(tmp_path / "bundle")
    report = verify(tmp_path / "bundle", threads=1)
    assert not report.passed and report.first_diverging_layer == 2
    assert any("that of layer 1" in failure for failure in report.failures)


def rewrite_manifest(directory):
    """Sizes and hashes of changed files."""
    path = directory / "manifest.json"
    manifest = json.loads(path.read_text())
    for entry in manifest["files"]:
        content = (directory / entry["path"]).read_bytes()
        entry["size"], entry["sha256"] = len(content), hashlib.sha256(content).hexdigest()
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize("field", ["context_length", "end_ids", "vocab_size"])
def test_a_manifest_that_the_program_denies_is_refused(bundle, tmp_path, field):
    copied = tmp_path / "bundle"
    shutil.copytree(bundle, copied)
    path = copied / "manifest.json"
    manifest = json.loads(path.read_text())
    if field == "end_ids":
        manifest["end_ids"] = manifest["end_ids"][:1]
    elif field == "context_length":
        manifest["context_length"] = 300
    else:
        manifest["tokenizer_length"] = manifest["vocab_size"] = manifest["vocab_size"] - 1
    path.write_text(json.dumps(manifest))
    with pytest.raises(BundleError):
        open_runtime(Bundle.open(copied), threads=1)


def test_a_cut_program_is_refused(bundle, tmp_path):
    copied = tmp_path / "bundle"
    shutil.copytree(bundle, copied)
    content = (copied / "model.pte").read_bytes()
    (copied / "model.pte").write_bytes(content[: len(content) // 2])
    rewrite_manifest(copied)
    with pytest.raises(InputError, match=r"ExecuTorch .* cannot open"):
        open_runtime(Bundle.open(copied), threads=1)


def test_a_tokenizer_that_the_stock_runner_reads_otherwise_is_named(tmp_path):
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate("abc ")}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"(?<=a)b(?!c)"), "isolated")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    # A lookahead is run or refused, never misread: whatever the build has, no wrong ids pass.
    problem = tokenizer_problem(tmp_path, ["abcab", "ab"])
    assert problem is None or "ExecuTorch's tokenizer" in problem
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "cannot read tokenizer.json" in tokenizer_problem(tmp_path, ["ab"])
