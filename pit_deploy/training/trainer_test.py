import json
import math

import pytest
import torch
from transformers import TrainerCallback

from pit_deploy.checkpoint import open_checkpoint
from pit_deploy.errors import InputError
from pit_deploy.initialize import orthonormality_error
from pit_deploy.model import PITForCausalLM
from pit_deploy.training import trainer as trainer_module
from pit_deploy.training.callbacks import Log
from pit_deploy.training.options import TrainingOptions
from pit_deploy.training.trainer import fit, total_steps

OPTIONS = dict(steps=12, learning_rate=2e-3, batch_size=4, eval_every=4, save_every=4)


class StopAt(TrainerCallback):
    """Ends a run as a kill does: between two steps, without a word."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


def losses(log):
    return [(r["step"], r["loss"]) for r in log.records if "loss" in r]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_run_is_the_same_to_the_last_bit(tiny_pit, blocks, tmp_path, optimizer):
    options = TrainingOptions(**OPTIONS, optimizer=optimizer, accumulate=2)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    straight = tiny_pit()
    expected = fit(
        straight, blocks[:70], blocks[70:], options, directory=whole, log=Log(whole.with_suffix(".jsonl"))
    )
    file = tmp_path / "cut.jsonl"
    with pytest.raises(KeyboardInterrupt):
        fit(
            tiny_pit(), blocks[:70], blocks[70:], options, directory=cut, log=Log(file), callbacks=[StopAt(7)]
        )
    assert [p.name for p in cut.iterdir()] == ["checkpoint-4"]
    resumed = tiny_pit()
    found = fit(resumed, blocks[:70], blocks[70:], options, directory=cut, resume=True, log=Log(file))
    assert losses(found) == losses(expected) and len(losses(found)) == 12
    assert found.series("eval_loss") == expected.series("eval_loss")
    for one, other in zip(straight.state_dict().values(), resumed.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    written = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(r["step"], r["loss"]) for r in written if "loss" in r] == losses(expected)


def test_a_run_that_breaks_off_leaves_a_model_that_computes_the_same_and_can_be_trained(tiny_pit, blocks):
    model, ids = tiny_pit(), torch.arange(9)[None]
    options = TrainingOptions(steps=6, learning_rate=1e-2, batch_size=4)
    with pytest.raises(KeyboardInterrupt):
        fit(model, blocks[:70], blocks[:0], options, callbacks=[StopAt(3)])
    with torch.no_grad():
        before = model.eval()(input_ids=ids).logits
        state = model.state_dict()
        after = model(input_ids=ids).logits
    assert orthonormality_error(state["pit.memory"].numpy()) < 1e-5
    assert torch.allclose(before, after, atol=1e-4) and model.pit.raw_cholesky.requires_grad
    log = fit(model, blocks[:70], blocks[70:], TrainingOptions(steps=12, learning_rate=2e-3))
    evaluated = [value for _, value in log.series("eval_loss")]
    assert evaluated[-1] < evaluated[0]
    assert model.pit.interface_error() < 1e-4


def test_a_checkpoint_of_a_run_is_a_pit_checkpoint(tiny_pit, blocks, tmp_path):
    model = tiny_pit()
    fit(model, blocks[:70], blocks[70:], TrainingOptions(**OPTIONS), directory=tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-12", "checkpoint-8"]
    opened = open_checkpoint(tmp_path / "checkpoint-12")
    assert orthonormality_error(opened.read("pit.memory")) < 1e-5
    loaded = PITForCausalLM.from_pretrained(opened)
    assert not opened.notes  # nothing had to be put right
    ids = torch.arange(9)[None]
    assert torch.equal(loaded(input_ids=ids).logits, model.eval()(input_ids=ids).logits)


def test_an_interrupted_save_leaves_the_one_before(tiny_pit, blocks, tmp_path, monkeypatch):
    options = TrainingOptions(**OPTIONS)
    save = trainer_module.PITTrainer._save_optimizer_and_scheduler

    def fails_late(self, directory):
        if self.state.global_step == 8:
            raise OSError("no more")
        save(self, directory)

    monkeypatch.setattr(trainer_module.PITTrainer, "_save_optimizer_and_scheduler", fails_late)
    with pytest.raises(OSError, match="no more"):
        fit(tiny_pit(), blocks[:70], blocks[70:], options, directory=tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-4"]
    monkeypatch.undo()
    log = fit(tiny_pit(), blocks[:70], blocks[70:], options, directory=tmp_path, resume=True)
    assert losses(log)[0][0] == 5 and losses(log)[-1][0] == 12


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_the_invariant_after_a_thousand_steps(tiny_pit, blocks, precision):
    model = tiny_pit()
    options = TrainingOptions(
        steps=1000,
        batch_size=2,
        learning_rate=3e-3,
        interface_rate=2e-2,
        eval_share=0.0,
        log_every=100,
        precision=precision,
    )
    log = fit(model, blocks, blocks[:0], options)
    # float32 and bf16 alike: the interface stays in float32 under autocast.
    assert model.pit.interface_error() < 1e-4
    assert orthonormality_error(model.pit.memory.detach().numpy()) < 1e-5
    assert log.series("loss")[-1][1] < 2.5 < log.series("loss")[0][1]


def test_a_frozen_memory_stays_to_the_last_bit(tiny_pit, blocks):
    model = tiny_pit(memory="frozen")
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    fit(model, blocks[:70], blocks[70:], TrainingOptions(steps=3, learning_rate=1e-2))
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert "pit.memory" not in changed and {"pit.raw_cholesky", "pit.bridge"} <= changed


def test_accumulated_batches_are_one_batch(tiny_pit, blocks):
    runs = [
        fit(tiny_pit(), blocks[:64], blocks[64:], TrainingOptions(steps=4, learning_rate=1e-3, **sizes))
        for sizes in (dict(batch_size=8), dict(batch_size=2, accumulate=4))
    ]
    for (_, one), (_, other) in zip(*(losses(r) for r in runs), strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_the_schedule_is_a_cosine_down_to_a_tenth(tiny_pit, blocks):
    log = fit(
        tiny_pit(),
        blocks[:70],
        blocks[70:],
        TrainingOptions(steps=20, learning_rate=1e-3, warmup=0.1, batch_size=2),
    )
    rates = [value for _, value in log.series("learning_rate")]
    assert rates[0] == 0 or rates[0] <= 5e-4
    assert max(rates) == pytest.approx(1e-3, rel=0.01)
    # Halfway between warm-up's end (2) and the end (20) the cosine is at the middle of 1 and 0.1.
    assert rates[11] == pytest.approx(0.55e-3, rel=0.01)
    assert rates[-1] < 0.12e-3


def test_a_loss_that_is_no_number_ends_the_run(tiny_pit, blocks):
    model = tiny_pit()
    with torch.no_grad():
        model.pit.raw_cholesky.fill_(1e30)
    with pytest.raises(InputError, match=r"The loss is (nan|inf) at step 1|not finite"):
        fit(model, blocks[:70], blocks[:0], TrainingOptions(steps=2))


def test_a_plain_model_is_trained_by_the_same_code(tiny, blocks):
    log = fit(tiny(), blocks[:70], blocks[70:], TrainingOptions(steps=6, learning_rate=1e-2))
    values = [v for _, v in log.series("eval_loss")]
    assert values[-1] < values[0] and all(math.isfinite(v) for v in values)


def test_one_pass_is_the_default_length():
    assert total_steps(100, TrainingOptions(batch_size=4, accumulate=5)) == 5
    assert total_steps(100, TrainingOptions(batch_size=4, accumulate=5), processes=2) == 2
    assert total_steps(100, TrainingOptions(steps=7)) == 7


def test_the_memorys_rate_falls_faster(tiny_pit, blocks):
    class Rates(TrainerCallback):
        def __init__(self):
            self.seen = []

        def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
            self.seen.append({g["name"]: g["lr"] for g in optimizer.param_groups})

    rates = Rates()
    options = TrainingOptions(steps=10, learning_rate=1e-3, memory_decay=3.0, batch_size=2)
    fit(tiny_pit(), blocks[:70], blocks[70:], options, callbacks=[rates])
    first, late = rates.seen[1], rates.seen[7]
    share = late["matrices"] / first["matrices"]
    assert share < 0.9
    assert late["memory"] / first["memory"] == pytest.approx(share**3, rel=1e-3)
