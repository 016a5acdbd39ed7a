"""pit_deploy against the vectors that the apps read, and those that are not records against their scripts."""

from __future__ import annotations

import base64
import importlib
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from pit_deploy.chat import render_chat
from pit_deploy.errors import InputError
from pit_deploy.gates import GATES_BY_RUNTIME, NESTED_HEAD_MOST, NESTED_HEAD_ROOM, gate_for
from pit_deploy.generate import TextStream, generate
from pit_deploy.golden import GoldenRecord, greedy_continuation
from pit_deploy.parity import compare_with_record
from pit_deploy.runtimes.base import check_room
from pit_deploy.sampling import SamplingOptions

FOLDER = Path(__file__).parent / "vectors"
ANDROID = Path(__file__).parents[1] / "android_demo"


def load(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    assert document["format"] == 1
    return document


def decode(logits: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(logits), "<f4")


class Recorded:
    """A runtime that answers with recorded logits."""

    name = "recorded"

    def __init__(self, runs: list[dict[str, Any]], context_length: int, vocab_size: int) -> None:
        self.context_length, self.vocab_size = context_length, vocab_size
        self._answers = {(tuple(run["cached"]), tuple(run["new"])): run["logits"] for run in runs}
        self.cached: tuple[int, ...] = ()

    @property
    def position(self) -> int:
        return len(self.cached)

    def prefill(self, ids: Sequence[int]) -> np.ndarray:
        check_room(self, ids)
        logits = decode(self._answers[self.cached, tuple(ids)])
        self.cached += tuple(ids)
        assert logits.shape == (self.vocab_size,)
        return logits

    def decode(self, id: int) -> np.ndarray:
        return self.prefill([id])

    def reset(self) -> None:
        self.cached = ()


@pytest.fixture(scope="module")
def makers() -> Any:
    """The scripts of the folder, which import each other by name."""
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module
    sys.path.remove(str(FOLDER))


@pytest.mark.parametrize("name", ["make_tokens", "make_templates", "make_bench"])
def test_files_are_what_the_scripts_write(makers: Any, name: str) -> None:
    for file, text in makers(name).documents().items():
        assert json.loads(text) == json.loads((FOLDER / file).read_text(encoding="utf-8")), file


def test_tokens() -> None:
    document = load("tokens.json")
    assert len(document["tokenizers"]) >= 8
    for entry in document["tokenizers"]:
        tokenizer = Tokenizer.from_file(str(FOLDER / entry["file"]))
        for text, ids in zip(document["texts"], entry["ids"], strict=True):
            assert tokenizer.encode(text, add_special_tokens=False).ids == ids
        for case in entry["streams"]:
            stream = TextStream(tokenizer)
            assert [*(stream.push(i) for i in case["ids"]), stream.finish()] == case["pieces"]
    for half in document["surrogates"]:
        data = b"".join(unit.to_bytes(2, "little") for unit in half["units"])
        kept = data.decode("utf-16-le", "surrogatepass")
        assert len(kept) == len(half["text"]) and "\ufffd" not in kept


def test_templates() -> None:
    document = load("templates.json")
    used = set()
    for case in document["cases"]:
        used.add(case["template"])
        arguments = {"add_generation_prompt": case["add_generation_prompt"], **case["variables"]}
        template = document["templates"][case["template"]]
        if "error" in case["expected"]:
            with pytest.raises(InputError):
                render_chat(template, case["messages"], **arguments)
        else:
            assert render_chat(template, case["messages"], **arguments) == case["expected"]["text"]
    assert used == set(document["templates"])


def test_generations() -> None:
    document = load("generation.json")
    tokenizer = Tokenizer.from_file(str(FOLDER / document["tokenizer"]))
    template = load("templates.json")["templates"][document["template"]]
    assert {c["options"]["temperature"] > 0 for c in document["cases"]} == {True, False}
    for case in document["cases"]:
        runtime = Recorded(case["runs"], case["context_length"], case["vocab_size"])
        options = SamplingOptions(**{**case["options"], "seed": int(case["options"]["seed"])})
        history: list[int] = []
        pending: list[int] = []
        for turn in case["turns"]:
            if case["messages"] is not None:
                assert render_chat(template, case["messages"]) == turn["text"]
            ids = [*pending, *tokenizer.encode(turn["text"], add_special_tokens=False).ids]
            assert ids == turn["prompt_ids"]
            stream, pieces = TextStream(tokenizer), []

            def on_token(id: int, stream: TextStream = stream, pieces: list[str] = pieces) -> None:
                pieces.append(stream.push(id))

            made = generate(
                runtime,
                ids,
                max_new_tokens=case["max_new_tokens"],
                options=options,
                stop_ids=case["stop_ids"],
                on_token=on_token,
                history=history,
            )
            expected = turn["expected"]
            assert list(made.ids) == expected["ids"], case["name"]
            assert (made.finish_reason, made.stop_id) == (expected["finish_reason"], expected["stop_id"])
            assert list(made.pending_ids) == expected["pending_ids"]
            assert runtime.position == expected["position"]
            assert [*pieces, stream.finish()] == expected["pieces"]
            history += [*ids, *made.ids]
            pending = list(made.pending_ids)


def test_parity() -> None:
    document = load("parity.json")
    golden = GoldenRecord.load(FOLDER / document["golden"])
    for case in document["positions"]:
        kl, error, agrees = compare_with_record(golden, case["position"], decode(case["logits"]))
        expected = case["expected"]
        np.testing.assert_allclose(kl, float(expected["kl"]), rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(error, float(expected["max_abs"]), rtol=1e-6, atol=1e-9)
        assert agrees == expected["top1"], case["name"]
    for case in document["reports"]:
        runtime = Recorded(
            document["artifacts"][case["artifact"]], document["context_length"], golden.vocab_size
        )
        rows = []
        for start, prompt in zip(golden.starts, golden.prompts, strict=True):
            runtime.reset()
            last = runtime.prefill(prompt.ids)
            runtime.reset()
            rows += [
                compare_with_record(golden, start + i, runtime.decode(id)) for i, id in enumerate(prompt.ids)
            ]
            one_pass = compare_with_record(golden, start + len(prompt.ids) - 1, last)
            rows[-1] = max(rows[-1], one_pass, key=lambda row: (not row[2], row[0], row[1]))
        kl, error, agrees = zip(*rows, strict=True)
        expected = case["expected"]
        assert np.mean(kl) == pytest.approx(expected["mean_kl"], rel=1e-6, abs=1e-12)
        assert max(error) == pytest.approx(expected["max_abs_logit_error"], rel=1e-6)
        assert np.mean(agrees) == pytest.approx(expected["top1"])
        count = len(golden.greedy_ids)
        prompt_ids = golden.prompts[golden.greedy_prompt].ids
        ids, _ = greedy_continuation(runtime, prompt_ids, count, document["end_ids"])  # type: ignore[arg-type]
        assert (ids == golden.greedy_ids) == (expected["greedy_equal"] == expected["greedy_tokens"])
        gate = gate_for(case["runtime"], case["weights"], case["tables"])
        assert expected["passed"] == (expected["failures"] == 0)
        assert expected["passed"] == (
            expected["mean_kl"] <= gate.mean_kl
            and expected["top1"] >= gate.top1
            and (gate.max_abs is None or expected["max_abs_logit_error"] <= gate.max_abs)
        )
    assert {case["expected"]["passed"] for case in document["reports"]} == {True, False}


def test_gates() -> None:
    document = load("parity.json")
    found = {
        (g["runtime"], g["precision"]): {k: v for k, v in g.items() if k not in ("runtime", "precision")}
        for g in document["gates"]
    }
    expected = {
        (runtime, precision): vars(gate)
        for runtime, gates in GATES_BY_RUNTIME.items()
        for precision, gate in gates.items()
    }
    assert found == expected, (
        "python runtime_tests/vectors/make_recorded.py --gates; then Gates.kt and Gates.swift"
    )
    # Only bundles for ONNX Runtime have nested heads, which the iOS app does not run.
    assert document["nested_head_room"] == [NESTED_HEAD_ROOM, NESTED_HEAD_MOST], "as above; then Gates.kt"


def test_load_errors_cover_every_kind() -> None:
    kinds = {case["kind"] for case in load("onnx_load_errors.json")["cases"]}
    assert kinds == {"unsupported_version", "unsupported_operators", "damaged_model", "out_of_memory"}


def test_android_uses_the_runtimes_that_are_pinned() -> None:
    import tomllib

    pins = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    versions = tomllib.loads((ANDROID / "gradle/libs.versions.toml").read_text())["versions"]
    assert f"onnxruntime=={versions['onnxruntime']}" in pins
    assert f"executorch=={versions['executorch']}" in pins


def test_the_android_manifest_asks_for_no_permission() -> None:
    from xml.etree import ElementTree

    root = ElementTree.parse(ANDROID / "app/src/main/AndroidManifest.xml").getroot()
    tools = "{http://schemas.android.com/tools}node"
    asked = [element for element in root if element.tag.startswith("uses-permission")]
    assert asked and all(element.get(tools) == "remove" for element in asked)


@pytest.mark.slow
def test_android() -> None:
    """`make test-android`: the app's Kotlin, compiled and run on the JVM."""
    import subprocess

    missing = [tool for tool in ("java", "javac", "npm", "gcc") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not found: apt-get install default-jdk-headless npm gcc")
    done = subprocess.run(["make", "test-android"], cwd=ANDROID.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
