"""Prompt lookup on the real sample model: the same ids as plain decoding, sooner. Some minutes; `make test-slow`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import numpy as np
import pytest

from pit_deploy.bundle import Bundle
from pit_deploy.conversion import convert
from pit_deploy.exporting import export
from pit_deploy.generate import generate
from pit_deploy.running import encode_prompt
from pit_deploy.runtimes import Runtime, open_runtime
from pit_deploy.runtimes.onnx_verification import VerifyingOnnxRuntime
from pit_deploy.sample import write_sample
from pit_deploy.sampling import SamplingOptions

pytestmark = pytest.mark.slow

PASSAGE = (
    "The harbour town of Ellsworth has kept its clock tower for more than two hundred years. It was built in 1809 "
    "by a shipowner named Thomas Averill, who wanted the captains of his fleet to know the hour before they "
    "sailed. The tower is thirty-one metres tall and is made of grey granite that was brought by barge from a "
    "quarry upriver. In 1874 lightning struck the roof and destroyed the bells, and for eleven years the clock "
    "told the time in silence. The people of the town collected money for new bells, which were cast in 1885 and "
    "are still rung on Sundays. During a storm in 1938 the lower rooms were flooded, and the machine that drives "
    "the hands had to be taken apart and cleaned piece by piece. Today the tower houses a small museum of "
    "navigation, with charts, compasses and a model of Averill's first ship. About nine thousand visitors climb "
    "its one hundred and forty-two steps every year."
)
SUMMARISE = f"Summarise this text in a few sentences.\n\n{PASSAGE}"
PROMPTS = [
    SUMMARISE,
    f"Rewrite this text so that it is easier to read, and keep every fact:\n\n{PASSAGE}",
    f"Repeat this text word for word:\n\n{PASSAGE}",
    f"Correct the spelling of this text:\n\n{PASSAGE.replace('ea', 'ae')}",
    f"Which events does this text mention? Give each with its year.\n\n{PASSAGE}",
    f"Turn this text into a list of bullet points:\n\n{PASSAGE}",
    f"Make this text shorter:\n\n{PASSAGE}",
    f"Who was Thomas Averill? Answer with sentences of the text.\n\n{PASSAGE}",
    "Why is the sky blue?",
    "Write a short story about a fox who learns to swim.",
    "Explain how a refrigerator works.",
    "Give me a recipe for pancakes.",
    "Write a Python function that returns the n-th Fibonacci number, and a test for it.",
    "List ten animals that live in the sea.",
    "What is the difference between weather and climate?",
    "Write a polite letter to a landlord about a broken heater.",
    "Translate into French: The book is on the table. The pen is on the table. The lamp is on the table.",
    "Count from 1 to 60.",
    'Complete this JSON with five more people: [{"name": "Ann", "age": 31}, {"name": "Bob", "age": 28},',
    "Write a poem of four verses about the sea, each ending with the same line.",
]
OPTIONS = {
    "int8": {},
    "mixed": {"weights": "int4", "tables": "int8", "quantizer": "rtn"},
    "fp32": {"weights": "fp32", "tables": "fp32"},
}


@pytest.fixture(scope="module", params=OPTIONS)
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    room = tmp_path_factory.mktemp(request.param)
    write_sample(room / "sample")
    convert(room / "sample", room / "pit", check=False)
    export(room / "pit", room / "bundle", **OPTIONS[request.param])
    return Bundle.open(room / "bundle")


@pytest.fixture(scope="module", params=[1, 2])
def runtimes(
    request: pytest.FixtureRequest, bundle: Bundle
) -> Iterator[tuple[Runtime, VerifyingOnnxRuntime]]:
    fast = open_runtime(bundle, threads=request.param, speculate=True)
    assert isinstance(fast, VerifyingOnnxRuntime)
    yield open_runtime(bundle, threads=request.param), fast


def test_twenty_prompts_give_the_same_ids(
    bundle: Bundle, runtimes: tuple[Runtime, VerifyingOnnxRuntime]
) -> None:
    accepted = 0
    for prompt in PROMPTS:
        ids = encode_prompt(bundle, prompt, chat=True)
        results = []
        for runtime in runtimes:
            runtime.reset()
            got = generate(
                runtime,
                ids,
                max_new_tokens=96,
                options=SamplingOptions(),
                stop_ids=bundle.manifest.end_ids,
                speculate=runtime is runtimes[1],
            )
            results.append((got.ids, got.finish_reason, got.pending_ids, runtime.position))
        assert results[0] == results[1], prompt
        assert got.speculation is not None
        accepted += got.speculation.accepted
    assert accepted > 200


def test_logits_and_cache_have_the_same_bits(
    bundle: Bundle, runtimes: tuple[Runtime, VerifyingOnnxRuntime]
) -> None:
    plain, fast = runtimes
    ids = bundle.tokenizer.encode(" ".join(PROMPTS[:3])).ids
    sizes = np.random.default_rng(1).integers(1, 14, 100).tolist()
    for runtime in runtimes:
        runtime.reset()
    start = 40
    assert np.array_equal(plain.prefill(ids[:start]), fast.prefill(ids[:start]))
    for size in sizes:
        part = ids[start : start + size]
        if not part:
            break
        alone = np.stack([plain.decode(id) for id in part])
        assert np.array_equal(fast.last_logits(part), alone), (start, size)
        start += size
    assert start > 600


def test_a_summary_is_sooner(bundle: Bundle, runtimes: tuple[Runtime, VerifyingOnnxRuntime]) -> None:
    if bundle.manifest.precision.weights != "int8":
        pytest.skip("the answers of the others repeat less of the text")
    ids, ratios = encode_prompt(bundle, SUMMARISE, chat=True), []
    for _ in range(5):
        speeds = []
        for runtime in runtimes:
            runtime.reset()
            got = generate(
                runtime,
                ids,
                max_new_tokens=200,
                options=SamplingOptions(),
                stop_ids=bundle.manifest.end_ids,
                speculate=runtime is runtimes[1],
            )
            speeds.append(got.tokens_per_second)
        ratios.append(speeds[1] / speeds[0])
    assert statistics.median(ratios) >= 1.3, (
        ratios
    )  # 1.5 and more on a machine of its own: docs/speculation.md
