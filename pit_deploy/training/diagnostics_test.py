import math

import numpy as np
import pytest
import scipy.stats
import torch
from torch.nn import functional as F

from pit_deploy.conversion import convert
from pit_deploy.errors import InputError
from pit_deploy.folding import fold
from pit_deploy.training.adaptation import compare_logits
from pit_deploy.training.callbacks import Log
from pit_deploy.training.diagnostics import Diagnostics, confidence, lens_of, logit_lens, spikes
from pit_deploy.training.pages import write_lens_page, write_training_page


def test_the_figures_of_an_interface(tiny_pit):
    model = tiny_pit()
    diagnostics = Diagnostics(Log())
    start = diagnostics.measure(model.pit)
    assert start["embedding_drift"] == start["head_drift"] == 0
    assert start["interface_error"] < 1e-5 and start["orthonormality_error"] < 1e-5
    assert start["condition"] == pytest.approx(
        float(torch.linalg.cond(model.pit.transform().detach().double())), rel=1e-3
    )
    with torch.no_grad():
        model.pit.bridge.mul_(1.5)
    later = diagnostics.measure(model.pit)
    assert later["embedding_drift"] == pytest.approx(0.5, rel=1e-4) and later["head_drift"] == 0


def test_spikes_stand_out_above_what_came_before():
    generator = np.random.default_rng(0)
    losses = [(step, 3 - 0.01 * step + 0.02 * generator.standard_normal()) for step in range(100)]
    assert spikes(losses) == []
    losses[60] = (60, 3.5)
    assert spikes(losses) == [60]
    assert spikes(losses[:5]) == []


def test_the_lens_of_a_model_against_its_own_pieces(tiny):
    model = tiny()
    ids = list(range(20))
    rows = lens_of(model, ids)
    assert len(rows) == 3 and rows[-1]["kl"] == 0 and rows[-1]["top1"] == 1
    with torch.no_grad():
        output = model(input_ids=torch.tensor([ids]), output_hidden_states=True)
        logits = model.lm_head(model.model.norm(output.hidden_states[1]))[0]
        p, q = F.log_softmax(output.logits[0], -1), F.log_softmax(logits, -1)
    assert rows[1]["kl"] == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-4)
    assert rows[1]["entropy"] == pytest.approx(
        float(torch.distributions.Categorical(logits=q).entropy().mean()), rel=1e-4
    )
    assert rows[1]["top1"] == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).float().mean()))


def test_a_converted_model_has_the_lens_of_its_source(tiny_checkpoint, tmp_path):
    plain = tiny_checkpoint()
    convert(plain, tmp_path / "pit", check=False)
    one, other = logit_lens(plain, tokens=40), logit_lens(tmp_path / "pit", tokens=40)
    assert one["kind"] == "plain" and other["kind"] == "pit"
    for a, b in zip(one["layers"], other["layers"], strict=True):
        assert a["kl"] == pytest.approx(b["kl"], abs=1e-3) and a["entropy"] == pytest.approx(
            b["entropy"], abs=1e-3
        )
    write_lens_page([one, other], tmp_path / "lens.html")
    page = (tmp_path / "lens.html").read_text()
    assert page.count("<svg") == 3 and "src=" not in page and "<script" not in page
    fold(tmp_path / "pit", tmp_path / "folded", layout="shared")
    with pytest.raises(InputError, match="is folded; give --lens the PIT checkpoint"):
        logit_lens(tmp_path / "folded")


def test_a_page_of_a_run(tmp_path):
    log = Log()
    for step in range(1, 31):
        log.add(step, {"loss": 3 - 0.01 * step, "grad_norm": 1.0, "learning_rate": 1e-3})
    log.add(30, {"eval_loss": 2.5, "interface_error": 1e-7, "orthonormality_error": 0.0})
    write_training_page(log, tmp_path / "run.html", {"steps": 30, "loss": 2.5, "notes": ["a <note>"]})
    page = (tmp_path / "run.html").read_text()
    assert page.count("<svg") == 6 and "a &lt;note&gt;" in page


def test_the_interval_is_students():
    values = [3.1, 2.9, 3.4, 3.0, 3.2]
    mean, half = confidence(values)
    low, high = scipy.stats.t.interval(0.95, 4, np.mean(values), scipy.stats.sem(values))
    assert (mean - half, mean + half) == (pytest.approx(low, abs=1e-3), pytest.approx(high, abs=1e-3))
    assert math.isnan(confidence([1.0])[1])


def test_what_adapting_changed_elsewhere():
    before = torch.zeros(1, 3, 4)
    after = before.clone()
    after[0, 1, 2] = math.log(5.0)  # the second distribution becomes 1/8, 1/8, 5/8, 1/8
    found = compare_logits(before, after, torch.tensor([[0, 1, 2]]))
    assert found["kl"] == pytest.approx((3 / 4 * math.log(2) + 1 / 4 * math.log(2 / 5)) / 3)
    assert found["top1_kept"] == pytest.approx(2 / 3)
    assert found["loss_change"] == pytest.approx(-math.log(5 / 8 / (1 / 4)) / 2)
