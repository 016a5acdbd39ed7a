import json
import shutil

import numpy as np
import pytest
import torch

from pit_deploy.checkpoint import open_checkpoint
from pit_deploy.conversion import convert
from pit_deploy.errors import InputError, OutputExistsError
from pit_deploy.folding import fold
from pit_deploy.model import PITForCausalLM
from pit_deploy.training.options import TrainingOptions
from pit_deploy.training.run import train

TEXT = (
    "The quick brown fox jumps over the lazy dog, and nobody knows why it does that again and again.\n" * 40
)


@pytest.fixture
def pit(tiny_checkpoint, tmp_path):
    out = tmp_path / "pit"
    convert(tiny_checkpoint(), out, check=False)
    return out


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


SHORT = dict(steps=4, block_length=32, learning_rate=1e-3, batch_size=4)


def test_the_result_is_a_checkpoint_that_folds(pit, text, tmp_path):
    report = train(pit, tmp_path / "out", text=[text], **SHORT, save_every=2)
    assert report.loss < report.loss_before and report.steps == 4 and report.tokens == 4 * 4 * 32
    assert report.interface_error < 1e-4 and report.orthonormality_error < 1e-5
    out = open_checkpoint(tmp_path / "out")
    assert out.kind == "pit" and out.is_tokenized()
    model = PITForCausalLM.from_pretrained(out)
    fold(tmp_path / "out", tmp_path / "folded")
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "folded")
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.allclose(model(input_ids=ids).logits, plain(input_ids=ids).logits, atol=2e-4)
    names = {p.name for p in (tmp_path / "out.run").iterdir()}
    assert {"checkpoint-4", "log.jsonl", "run.json", "report.json"} <= names
    records = [json.loads(line) for line in (tmp_path / "out.run" / "log.jsonl").read_text().splitlines()]
    assert {"loss", "grad_norm", "eval_loss", "interface_error", "head_drift", "condition"} <= {
        k for r in records for k in r
    }


def test_an_unfinished_run_is_continued_and_only_by_its_own_settings(pit, text, tmp_path, monkeypatch):
    from pit_deploy.training import trainer

    whole = train(pit, tmp_path / "whole", text=[text], **SHORT, save_every=2)
    fails = trainer.publish

    def interrupted(staged, target):
        if target.name == "checkpoint-4":
            raise KeyboardInterrupt
        fails(staged, target)

    monkeypatch.setattr(trainer, "publish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(pit, tmp_path / "out", text=[text], **SHORT, save_every=2)
    monkeypatch.undo()
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match="pass --resume to go on"):
        train(pit, tmp_path / "out", text=[text], **SHORT, save_every=2)
    with pytest.raises(InputError, match=r"other settings \(learning_rate\)"):
        train(pit, tmp_path / "out", text=[text], **{**SHORT, "learning_rate": 2e-3}, resume=True)
    resumed = train(pit, tmp_path / "out", text=[text], **SHORT, save_every=2, resume=True)
    assert resumed.resumed_from == 2 and resumed.evaluations == whole.evaluations
    a, b = (open_checkpoint(tmp_path / n) for n in ("whole", "out"))
    assert all(torch.equal(a.read_torch(n), b.read_torch(n)) for n in a.tensors)
    drift = [
        json.loads((tmp_path / f"{n}.run" / "log.jsonl").read_text().splitlines()[-2])
        for n in ("whole", "out")
    ]
    assert drift[0] == drift[1] and "head_drift" in drift[0]

    # Killed when all steps were done and only the result was missing.
    shutil.rmtree(tmp_path / "out")
    again = train(pit, tmp_path / "out", text=[text], **SHORT, save_every=2, resume=True)
    assert again.resumed_from == again.steps == 4 and again.evaluations == whole.evaluations
    b = open_checkpoint(tmp_path / "out")
    assert all(torch.equal(a.read_torch(n), b.read_torch(n)) for n in a.tensors)


def test_the_log_is_written_for_tensorboard_too(pit, text, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(pit, tmp_path / "out", text=[text], **SHORT, tensorboard=True)
    run = tmp_path / "out.run"
    records = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    for name in ("loss", "eval_loss", "interface_error", "head_drift"):
        expected = [(r["step"], r[name]) for r in records if name in r]
        found = [(e.step, e.value) for e in events.Scalars(name)]
        assert [step for step, _ in found] == [step for step, _ in expected] and expected
        assert np.allclose([v for _, v in found], [v for _, v in expected], rtol=1e-6)


def test_annealing_ends_strict(pit, text, tmp_path):
    report = train(pit, tmp_path / "out", text=[text], **SHORT, anneal_bridge=3)
    assert report.bridge == "scalar"
    assert open_checkpoint(tmp_path / "out").config["pit"]["bridge"] == "scalar"
    assert PITForCausalLM.from_pretrained(tmp_path / "out").pit.embedding_multiplier > 0


def test_adapters_are_merged_or_carried(pit, text, tmp_path):
    peft = pytest.importorskip("peft")
    train(pit, tmp_path / "merged", text=[text], **SHORT, lora=2)
    train(pit, tmp_path / "apart", text=[text], **SHORT, lora=2, adapter=True)
    merged = PITForCausalLM.from_pretrained(tmp_path / "merged")
    base = PITForCausalLM.from_pretrained(pit)
    assert torch.equal(merged.pit.memory, base.pit.memory)  # the interface is not an adapter's to move
    carried = peft.PeftModel.from_pretrained(base, tmp_path / "apart")
    ids = torch.arange(15)[None]
    with torch.no_grad():
        one, other = merged(input_ids=ids).logits, carried(input_ids=ids).logits
        with carried.disable_adapter():
            before = carried(input_ids=ids).logits
    assert torch.allclose(one, other, atol=1e-4) and not torch.allclose(one, before, atol=1e-3)
    assert not (tmp_path / "apart" / "model.safetensors").exists()


def test_an_adapters_run_is_continued_too(pit, text, tmp_path):
    pytest.importorskip("peft")
    options = dict(**SHORT, lora=2, save_every=2)
    whole = train(pit, tmp_path / "out", text=[text], **options)
    expected = (tmp_path / "out" / "model.safetensors").read_bytes()
    shutil.rmtree(tmp_path / "out.run" / "checkpoint-4")
    resumed = train(pit, tmp_path / "out", text=[text], **options, resume=True)
    assert resumed.resumed_from == 2 and resumed.evaluations == whole.evaluations
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == expected


def test_a_model_from_scratch_starts_where_it_is_told(tiny_checkpoint, text, tmp_path):
    convert(tiny_checkpoint(), tmp_path / "random", init="random", check=False)
    report = train(tmp_path / "random", tmp_path / "out", text=[text], **SHORT, scale=2.0, multiplier=5.0)
    assert any("T = 2 I" in note for note in report.notes)
    model = PITForCausalLM.from_pretrained(tmp_path / "out")
    assert float(model.pit.embedding_multiplier) == 5.0
    assert float(torch.linalg.eigvalsh(model.pit.transform()).mean().detach()) == pytest.approx(2.0, rel=0.05)


def test_frozen_memory_by_option(pit, text, tmp_path):
    train(pit, tmp_path / "out", text=[text], **SHORT, memory="frozen")
    before, after = (open_checkpoint(p) for p in (pit, tmp_path / "out"))
    assert np.array_equal(before.read("pit.memory"), after.read("pit.memory"))
    assert after.config["pit"]["memory"] == "frozen"


def test_what_cannot_be_used_is_refused_before_work(pit, text, tmp_path, tiny_checkpoint):
    plain = tiny_checkpoint(name="other")
    out = tmp_path / "out"
    with pytest.raises(InputError, match="run pit-deploy convert first"):
        train(plain, out, text=[text], **SHORT)
    with pytest.raises(InputError, match="is no file"):
        train(pit, out, text=[tmp_path / "none"], **SHORT, overwrite=True)
    with pytest.raises(InputError, match="positions up to 64"):
        train(pit, out, text=[text], steps=1, block_length=65, overwrite=True)
    with pytest.raises(InputError, match="one step takes 500"):
        train(pit, out, text=[text], steps=1, batch_size=500, block_length=32, overwrite=True)
    with pytest.raises(InputError, match="no multiple of I"):
        train(pit, out, text=[text], **SHORT, scale=2.0, overwrite=True)
    with pytest.raises(InputError, match="holds no run"):
        train(pit, tmp_path / "fresh", text=[text], **SHORT, resume=True)
    with pytest.raises(OutputExistsError):
        train(pit, pit, text=[text], **SHORT)
    with pytest.raises(InputError, match="is or holds the input"):
        train(pit, pit, text=[text], **SHORT, overwrite=True)
    assert not out.exists()


def test_a_refused_text_leaves_no_run_and_an_old_one_as_it_was(pit, text, tmp_path):
    out, run = tmp_path / "out", tmp_path / "out.run"
    with pytest.raises(InputError, match="is no file"):
        train(pit, out, text=[tmp_path / "none"], **SHORT)
    assert not run.exists()
    train(pit, out, text=[text], **SHORT)  # the same output, as if nothing had been tried
    before = {p.name: p.read_bytes() for p in run.iterdir() if p.is_file()}
    with pytest.raises(InputError, match="is no file"):
        train(pit, out, text=[tmp_path / "none"], **SHORT, overwrite=True)
    assert {p.name: p.read_bytes() for p in run.iterdir() if p.is_file()} == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(steps=0), "--steps is 0"),
        (dict(block_length=1), "--block-length is 1"),
        (dict(learning_rate=0.0), "--learning-rate is 0"),
        (dict(learning_rate=float("nan")), "positive number"),
        (dict(warmup=1.0), "--warmup"),
        (dict(optimizer="sgd"), "--optimizer sgd is not known"),
        (dict(memory="free"), "--memory free"),
        (dict(precision="fp16"), "--precision fp16"),
        (dict(adapter=True), "--lora RANK"),
        (dict(lora=4, anneal_bridge=2), "--anneal-bridge"),
        (dict(steps=4, anneal_bridge=5), "longer than --steps 4"),
        (dict(optimizer="muon", fsdp=True), "--fsdp"),
    ],
)
def test_options_that_cannot_be_meant(options, said):
    with pytest.raises(InputError, match=said):
        TrainingOptions(**options)
