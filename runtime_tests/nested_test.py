"""The nested head from the command line's options to the bundle; on the sample, what it changes."""

import json

import numpy as np
import pytest

from pit_deploy.bundle import Bundle
from pit_deploy.conversion import convert
from pit_deploy.errors import InputError
from pit_deploy.exporting import export
from pit_deploy.parity import verify
from pit_deploy.runtimes import open_runtime
from pit_deploy.sample import write_sample
from runtime_tests.nested_quality import BothHeads, chat_prompts, greedy, quality

BY_HAND = dict(head_columns=32, shortlist=40)


@pytest.fixture(scope="module")
def pit(make_checkpoint, tmp_path_factory):
    """Rows past the tokenizer's ids, as in a padded table."""
    directory = tmp_path_factory.mktemp("nested") / "pit"
    convert(make_checkpoint("llama", vocab_size=320), directory)
    return directory


@pytest.fixture(scope="module")
def nested(pit, tmp_path_factory):
    out = tmp_path_factory.mktemp("nested") / "bundle"
    report = export(pit, out, context=128, **BY_HAND)
    return Bundle.open(out), report


def test_the_manifest_and_the_notes_say_what_was_built(nested, pit, tmp_path):
    bundle, report = nested
    head = bundle.manifest.nested_head
    assert (head.columns, head.shortlist) == (32, 40) and head.positions > 0
    assert any(
        note.startswith("nested head: 32 of 64 columns shortlist 40 of 320 ids") for note in report.notes
    )
    export(pit, tmp_path / "exact", context=128, nested_head=False)
    assert "nested_head" not in json.loads((tmp_path / "exact" / "manifest.json").read_text())


def test_logits_are_the_full_heads_in_the_shortlist_and_the_measured_miss_rate_is_true(nested):
    bundle, _ = nested
    known, ids = bundle.manifest.tokenizer_length, list(range(3, 120, 2))
    heads = [np.concatenate(parts) for parts in zip(*BothHeads(bundle)(ids), strict=True)]
    found, full = (logits[:, :known] for logits in heads)
    same = np.isclose(
        found, full, atol=0.02 * full.std()
    )  # activations of the rest are rounded in one of them
    assert (same.sum(axis=1) >= 40).all() and not same.all()
    misses = (full.argmax(1) != found.argmax(1)).mean()
    assert misses <= bundle.manifest.nested_head.miss_rate + 0.1


def test_prefill_decode_and_all_positions_agree(nested):
    bundle, _ = nested
    runtime = open_runtime(bundle, threads=1)
    ids = list(range(3, 120, 2))
    every = runtime.all_logits(ids)  # two passes of 32
    tolerance = 0.05 * every[:, : bundle.manifest.tokenizer_length].std()
    np.testing.assert_allclose(runtime.prefill(ids[:-1]), every[-2], atol=tolerance)
    np.testing.assert_allclose(runtime.decode(ids[-1]), every[-1], atol=tolerance)


def test_a_checkpoint_that_cannot_keep_the_rate_keeps_the_full_head_and_says_so(pit, tmp_path):
    report = export(pit, tmp_path / "bundle", context=128, nested_head=True)
    assert any(note.startswith("the full head is kept: ") for note in report.notes)
    bundle = Bundle.open(tmp_path / "bundle")
    assert bundle.manifest.nested_head is None
    graph = (tmp_path / "bundle" / "model.onnx").read_bytes()
    assert b"TopK" not in graph


def test_a_choice_by_calibration_reaches_the_graph(pit, tmp_path, monkeypatch):
    """So small a table is never worth it by time, and its logits do not concentrate: both limits are lifted."""
    monkeypatch.setattr("pit_deploy.quantize.nested_choice.WORTH", 1e9)
    monkeypatch.setattr("pit_deploy.quantize.nested_choice.SHORTLISTS", (20, 40))
    report = export(pit, tmp_path / "bundle", context=128, nested_head=True, miss_rate=0.9)
    head = Bundle.open(tmp_path / "bundle").manifest.nested_head
    assert head.columns == 32 and head.shortlist in (20, 40) and 0 <= head.miss_rate <= 0.9
    assert head.positions > 1000 and head.kl > 0
    assert any(f"shortlist {head.shortlist} of 320 ids" in note for note in report.notes)
    export(pit, tmp_path / "exact", context=128)
    worse, better = (verify(tmp_path / name).mean_kl for name in ("bundle", "exact"))
    assert worse > better  # verify sees the whole vocabulary, and with it what the shortlist leaves out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(head_columns=32), "belong together"),
        (dict(nested_head=False, **BY_HAND), "--exact-head and --head-columns exclude each other"),
        (dict(nested_head=True, miss_rate=0), "--miss-rate 0 is no share"),
        (dict(nested_head=True, to="coreml"), "not built for --to coreml"),
        (dict(nested_head=True, profile="standard"), "profile standard"),
        (dict(nested_head=True, logits="all"), "leave out --logits all"),
        (dict(nested_head=True, tables="fp16"), "needs one integer table"),
        (dict(nested_head=True, layout="untied"), "needs one integer table"),
        (
            dict(head_columns=40, shortlist=40),
            "--head-columns 40 cannot split a table of 64 columns in blocks of 32",
        ),
        (dict(head_columns=32, shortlist=320), "--shortlist 320 is no part of 320 ids"),
        (dict(miss_rate=0.01), "--miss-rate is for a nested head"),
        (dict(miss_rate=0.01, **BY_HAND), "--miss-rate and --head-columns exclude each other"),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(pit, tmp_path, monkeypatch, options, message):
    monkeypatch.setattr("pit_deploy.exporting.calibrate", lambda *_, **__: pytest.fail("work was begun"))
    with pytest.raises(InputError, match=message):
        export(pit, tmp_path / "bundle", context=128, **options)
    assert not (tmp_path / "bundle").exists()


@pytest.mark.slow
def test_the_sample_keeps_its_best_tokens_and_its_greedy_text(tmp_path):
    """5,000 positions of prose, code, fourteen languages and chat; twenty greedy answers of 64 tokens."""
    write_sample(tmp_path / "sample")
    convert(tmp_path / "sample", tmp_path / "pit")
    export(tmp_path / "pit", tmp_path / "nested", nested_head=True)
    bundle = Bundle.open(tmp_path / "nested")
    assert bundle.manifest.nested_head.miss_rate <= 5e-4
    figures = quality(bundle)
    assert figures["all"]["positions"] >= 5000 and figures["all"]["same_top1"] >= 0.999
    assert verify(tmp_path / "nested").passed
    runtime, heads = open_runtime(bundle, threads=1), BothHeads(bundle)
    for prompt in chat_prompts(bundle):
        text = prompt + greedy(runtime, prompt, 64)
        found, full = (np.concatenate(parts) for parts in zip(*heads(text), strict=True))
        answer = slice(len(prompt) - 1, None)
        np.testing.assert_array_equal(found[answer].argmax(1), full[answer].argmax(1))
