"""pit_deploy against the shared vectors, and the vectors against the script that writes them."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pit_deploy.errors import ContextFullError, InputError
from pit_deploy.generate import generate
from pit_deploy.generation_config import end_ids
from pit_deploy.sampling import SamplingOptions, philox4x32, probabilities, sample, uniform

FOLDER = Path(__file__).parent / "vectors"


def load(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    assert document["format"] == 1
    return document


def options_of(case: dict[str, Any]) -> SamplingOptions:
    return SamplingOptions(**{**case["options"], "seed": int(case["options"]["seed"])})


def logits_of(case: dict[str, Any]) -> np.ndarray:
    values = [float(value) for value in case["logits"]]
    logits = np.array(values, dtype=np.float32)
    np.testing.assert_array_equal(logits.astype(np.float64), values)  # README: exact as float32
    return logits


def test_philox() -> None:
    document = load("philox.json")
    for case in document["philox"]:
        assert list(philox4x32(tuple(case["counter"]), tuple(case["key"]))) == case["expected"]
    for case in document["uniform"]:
        assert uniform(int(case["seed"]), int(case["step"])) == case["expected"]


def test_sampling() -> None:
    document = load("sampling.json")
    assert len(document["cases"]) >= 60
    for case in document["cases"]:
        options, logits, want = options_of(case), logits_of(case), case["expected"]
        ids, probs = probabilities(logits, options, case["previous_ids"])
        assert ids.tolist() == want["ids"], case["name"]
        np.testing.assert_allclose(probs, want["probabilities"], rtol=0, atol=1e-12, err_msg=case["name"])
        assert sample(logits, options, int(case["step"]), case["previous_ids"]) == want["drawn"], case["name"]
    for case in document["errors"]:
        for temperature in (0.0, 1.0):
            with pytest.raises(InputError):
                sample(logits_of(case), SamplingOptions(temperature=temperature), 0)


def test_end_ids() -> None:
    for case in load("stop.json")["end_ids"]:
        places = case["generation_config"], case["config"], case["tokenizer_config"], case["vocabulary"].get
        if case["expected"] is None:
            with pytest.raises(InputError):
                end_ids(*places)
        else:
            assert end_ids(*places) == case["expected"], case["name"]


class Scripted:
    """A runtime whose greedy draws are given."""

    name, vocab_size = "scripted", 32

    def __init__(self, case: dict[str, Any]) -> None:
        self.context_length: int = case["context_length"]
        self.position: int = case["position"]
        self.draws: list[int] = case["draws"]
        self.runs = 0

    def prefill(self, ids: list[int]) -> np.ndarray:
        self.position += len(ids)
        assert self.position <= self.context_length
        self.runs += 1
        return np.eye(self.vocab_size, dtype=np.float32)[self.draws[self.runs - 1]]

    def decode(self, id: int) -> np.ndarray:
        assert id == self.draws[self.runs - 1]
        return self.prefill([id])

    def reset(self) -> None:
        raise AssertionError("a generation never empties the cache")


def test_loops() -> None:
    for case in load("stop.json")["loops"]:
        runtime, want = Scripted(case), case["expected"]
        given: list[int] = []

        def on_token(id: int, case: dict[str, Any] = case, given: list[int] = given) -> bool:
            given.append(id)
            return len(given) != case["cancel_after"]

        def run(case: dict[str, Any] = case, runtime: Any = runtime, on_token: Any = on_token) -> Any:
            return generate(
                runtime,
                [3] * case["prompt_tokens"],
                max_new_tokens=case["max_new_tokens"],
                options=SamplingOptions(),
                stop_ids=case["stop_ids"],
                on_token=on_token,
            )

        if "error" in want:
            with pytest.raises(ContextFullError if want["error"] == "context_full" else InputError):
                run()
            assert runtime.runs == 0, case["name"]
            continue
        got = run()
        assert list(got.ids) == given == want["ids"], case["name"]
        assert (got.finish_reason, got.stop_id) == (want["finish_reason"], want["stop_id"]), case["name"]
        assert (runtime.runs, runtime.position) == (want["runs"], want["position"]), case["name"]
        assert list(got.pending_ids) == want["pending_ids"], case["name"]


def test_files_are_what_the_script_writes() -> None:
    made = runpy.run_path(str(FOLDER / "make.py"))["documents"]()
    assert sorted(made) == ["philox.json", "sampling.json", "stop.json"]
    for name, text in made.items():
        same(json.loads(text), load(name), name)


def same(made: Any, stored: Any, where: str) -> None:
    """Equal, with room in the last digits of floats: the C libraries of two systems differ in exp."""
    assert type(made) is type(stored), where
    if isinstance(made, dict):
        assert list(made) == list(stored), where
        for key in made:
            same(made[key], stored[key], f"{where}/{key}")
    elif isinstance(made, list):
        assert len(made) == len(stored), where
        for index, (a, b) in enumerate(zip(made, stored, strict=True)):
            same(a, b, f"{where}/{index}")
    elif isinstance(made, float):
        assert made == pytest.approx(stored, rel=0, abs=1e-12), where
    else:
        assert made == stored, where
