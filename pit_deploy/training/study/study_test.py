"""The study's runs on random text in a tiny vocabulary, and its page."""

from dataclasses import replace

import numpy as np
import pytest

from pit_deploy.training.study import corpus, plan, runs
from pit_deploy.training.study.page import shown, write_page
from pit_deploy.training.study.quantised import measure
from pit_deploy.training.study.runs import Run, execute


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "SIZES", {"small": (300, 64), "large": (300, 64)})
    blocks = np.random.default_rng(0).integers(0, 300, (64, 128)).astype(np.int32)
    monkeypatch.setattr(corpus, "load", lambda *_: corpus.Corpus(blocks[:48], blocks[48:], "0"))
    return tmp_path


def test_runs_have_names_of_their_own_and_both_sides_as_many_settings():
    tried = plan.search("small")
    best = plan.choose(tried, lambda run: abs(run.rate - 2e-2))
    for settings in (tried, plan.search_large(best)):
        assert len(settings["tied"]) == len(settings["pit"])
        assert all(len({run.name for run in runs}) == len(runs) for runs in settings.values())
    everything = [
        *(run for side in tried.values() for run in side),
        *(run for rows in (plan.scratch(best), plan.variants(best), plan.overfitting(best), plan.adaptation(best))
          for side in rows.values() for run in side),
        *(run for side in plan.continued(best).values() for run in side),
        *(run for side in plan.search_large(best).values() for run in side),
    ]  # fmt: skip
    names: dict[str, Run] = {}
    for run in everything:
        assert replace(names.setdefault(run.name, run), keep=run.keep) == run
    assert {run.seed for run in tried["tied"]} == {plan.SEARCH_SEED}
    assert plan.SEARCH_SEED not in plan.SEEDS


def test_every_kind_of_run(cache):
    tied = Run(steps=2, keep=True)
    pit = replace(tied, ends="pit")
    start = dict(steps=2, rate=1e-3, learning_rate=1e-3)
    results = {
        name: execute(run, cache)
        for name, run in {
            "tied": tied,
            "pit": pit,
            "frozen": replace(pit, memory="frozen", multiplier=0.0),
            "stays tied": Run(source=tied, mode="tied", **start),
            "bridge": Run(source=tied, mode="bridge", ends="pit", **start),
            "strict": Run(source=tied, mode="strict", ends="pit", **start),
            "annealed": Run(source=tied, mode="bridge", ends="pit", anneal=2, **start),
            "tuned": Run(source=pit, mode="tune", ends="pit", corpus="prose", **start),
            "adapter": Run(source=tied, mode="lora", corpus="prose", **start),
        }.items()
    }
    # The bridge starts where the source ended; without it the embedding is new to the model.
    ended = results["tied"]["final"]
    assert results["stays tied"]["eval"][0][1] == pytest.approx(ended, abs=2e-3)
    assert results["bridge"]["eval"][0][1] == pytest.approx(ended, abs=2e-3)
    assert abs(results["strict"]["eval"][0][1] - ended) > 0.05
    assert results["tuned"]["side_effects"]["kl"] > 0 and results["adapter"]["side_effects"]["kl"] > 0
    assert results["pit"]["interface_error"] < 1e-5
    again = execute(tied, cache)
    assert {k: v for k, v in again.items()} == _as_json(results["tied"])  # from its file, not run again
    kl = measure(pit, cache)["kl"]
    assert kl["int8, two tables"] < kl["int4, two tables"] and kl["int8, one shared table"] < 1e-3
    assert measure(tied, cache)["kl"]["int8, one table"] < 1e-3


def _as_json(value):
    import json

    return json.loads(json.dumps(value))


def test_the_page_says_what_the_results_say(tmp_path):
    def result(final, **more):
        run = dict(seed=0, learning_rate=3e-3, rate=2e-2, std=0.1, scale=1.0, multiplier=1.0, decay=1.0)
        return {
            "run": run,
            "name": "x",
            "final": final,
            "eval": [[0, 9.0], [10, final]],
            "seconds": 1.0,
            **more,
        }

    effects = {"kl": 0.1, "loss_before": 4.0, "loss_after": 4.2, "loss_change": 0.2, "top1_kept": 0.9}
    results = {
        "search": {"tied": [result(4.9), result(4.7)], "pit": [result(4.8)]},
        "scratch": {
            "tied": [result(4.6), result(4.8)],
            "pit": [result(4.5, interface_error=1e-7), result(4.8)],
        },
        "continued": {"stays tied": [result(4.0)], "bridge kept": [result(4.1)]},
        "adaptation": {"tied, LoRA": [result(3.0, side_effects=effects)]},
        "quantised": {"tied": [{"kl": {"int8, one table": 1e-4}}]},
    }
    write_page(results, tmp_path)
    text = (tmp_path / "study" / "tables.md").read_text()
    assert "PIT minus tied, seed by seed: -0.050" in text and "| **4.700** |" in text
    assert "bridge kept: +0.100 nats" in text and "0.1000 e-3" in text
    drawn = {p.name for p in (tmp_path / "study").glob("*.svg")}
    assert drawn == {"scratch.svg", "continued.svg"}
    assert shown([1.0]) == "1.000" and shown([1.0, 1.0]) == "1.000 ± 0.000"
