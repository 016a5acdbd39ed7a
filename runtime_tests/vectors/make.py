"""Write philox.json, sampling.json and stop.json: `python runtime_tests/vectors/make.py`.

`expected` below is a second implementation of docs/sampling.md: plain Python, whole sorts, no numpy. The
vectors come from it, and vectors_test.py compares pit_deploy with them. It also measures how far each case
is from a border where the last bit of exp would decide, and refuses a case that is too near.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pit_deploy.sampling import SamplingOptions, philox4x32, uniform

HERE = Path(__file__).resolve().parent
MARGIN = 1e-6
OFF = -math.inf


def philox() -> dict[str, Any]:
    # The three known answers are those of Random123's kat_vectors file.
    known = [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ]
    cases = [
        {"counter": list(c), "key": list(k), "expected": [int(w, 16) for w in out.split()]}
        for c, k, out in known
    ]
    for counter, key in (((1, 0, 0, 0), (7, 0)), ((0, 1, 0, 0), (7, 0)), ((5, 0, 0, 0), (0xFFFFFFFF, 1))):
        cases.append({"counter": list(counter), "key": list(key), "expected": list(philox4x32(counter, key))})
    pairs = [(0, 0), (0, 1), (1, 0), (42, 17), (2**32, 2**32), (2**64 - 1, 2**64 - 1), (2**53 + 1, 2**53 + 1)]
    uniforms = [
        {"seed": str(seed), "step": str(step), "expected": uniform(seed, step)} for seed, step in pairs
    ]
    return {"format": 1, "philox": cases, "uniform": uniforms}


def expected(
    logits: Sequence[float], o: SamplingOptions, step: int, previous: Sequence[int]
) -> dict[str, Any]:
    """The candidates, their probabilities and the drawn id, each line a line of docs/sampling.md."""
    x = list(logits)
    for i in set(previous):
        x[i] = x[i] * o.repetition_penalty if x[i] < 0 else x[i] / o.repetition_penalty
    largest = max(x)
    if o.temperature == 0:
        best = x.index(largest)
        return {"ids": [best], "probabilities": [1.0], "drawn": best}
    ids = [i for i in range(len(x)) if x[i] > OFF]
    s = {i: (x[i] - largest) / o.temperature for i in ids}
    if 0 < o.top_k < len(ids):
        border = sorted(s.values(), reverse=True)[o.top_k - 1]
        ids = [i for i in ids if s[i] >= border]
    if o.top_p < 1:
        ids = _top_p(ids, s, o.top_p)
    if o.min_p > 0:
        for i in ids:
            _clear(math.exp(s[i]), o.min_p, exact=s[i] == 0)
        ids = [i for i in ids if math.exp(s[i]) >= o.min_p]
    ids.sort(key=lambda i: (-s[i], i))
    cumulative, total = [], 0.0
    for i in ids:
        total += math.exp(s[i])
        cumulative.append(total)
    target = uniform(o.seed, step) * total
    for border in cumulative:
        _clear(border / total, target / total)
    drawn = next(i for i, border in zip(ids, cumulative, strict=True) if border > target)
    return {"ids": ids, "probabilities": [math.exp(s[i]) / total for i in ids], "drawn": drawn}


def _top_p(ids: list[int], s: dict[int, float], top_p: float) -> list[int]:
    backwards = sorted(ids, key=lambda i: (s[i], -i))
    whole = sum(math.exp(s[i]) for i in backwards)
    removed, kept = 0.0, []
    for i in backwards:
        removed += math.exp(s[i]) / whole
        if i == backwards[-1]:
            kept.append(i)
            continue
        # Shares that are powers of two are exact in every language: only those may touch the border.
        _clear(removed, 1 - top_p, exact=len(set(s.values())) == 1 and len(ids) in (2, 4, 8, 16))
        if removed > 1 - top_p:
            kept.append(i)
    return kept


def _clear(value: float, border: float, *, exact: bool = False) -> None:
    if not exact and abs(value - border) < MARGIN:
        raise AssertionError(f"{value} is too near to the border {border}; choose other numbers.")


def sampling() -> dict[str, Any]:
    rng = random.Random(20)

    def logits(size: int, spread: float = 6.0) -> list[float]:
        # Multiples of 1/256 are exact as float32, which is what runtimes give.
        return [round((2 * rng.random() - 1) * spread * 256) / 256 for _ in range(size)]

    cases: list[dict[str, Any]] = []

    def add(name: str, x: list[float], previous: Sequence[int] = (), step: int = 0, **options: Any) -> None:
        o = SamplingOptions(**options)
        cases.append(
            {
                "name": name,
                "logits": [_number(v) for v in x],
                "options": _options(o),
                "step": str(step),
                "previous_ids": list(previous),
                "expected": expected(x, o, step, previous),
            }
        )

    for size in (5, 17, 40):
        add(f"greedy, {size} ids", logits(size))
    add("greedy, a tie goes to the lowest id", [1.0, 3.0, 2.0, 3.0, 3.0])
    add("greedy, all equal", [0.5] * 6)
    add("greedy, -inf aside", [OFF, -7.0, OFF, -3.5, OFF])
    add("greedy, the penalty makes a tie", [4.0, 2.0, 1.0, 2.0, 0.0], previous=[0], repetition_penalty=2.0)
    add(
        "greedy, the penalty moves the best",
        [4.0, 3.75, 1.0, 0.0, -1.0],
        previous=[0],
        repetition_penalty=1.1,
    )
    add(
        "greedy, negative logits and the penalty",
        [-1.0, -1.5, -2.0],
        previous=[0, 0],
        repetition_penalty=1.75,
    )
    add("greedy ignores the filters", logits(9), top_k=2, top_p=0.1, min_p=0.9, seed=3)

    for t in (0.001, 0.2, 0.7, 1.0, 1.5, 100.0):
        add(f"temperature {t}", logits(12), step=1, temperature=t, seed=11)
    add("all equal, no filter", [2.0] * 8, step=2, temperature=1.0, seed=1)
    add("one id is left by -inf", [OFF, OFF, 1.0, OFF], step=3, temperature=1.0, seed=1)
    add("zero and minus zero are equal", [0.0, -0.0, 1.0, 0.0], step=4, temperature=1.0, top_k=3, seed=2)

    for k in (1, 3, 11, 12, 500):
        add(f"top_k {k} of 12", logits(12), step=k, temperature=0.9, top_k=k, seed=12)
    tied = [3.0, 1.0, 2.0, 2.0, 0.5, 2.0, -1.0]
    for k in (1, 2, 3, 4, 5):
        add(f"top_k {k}, three equal at places 2 to 4", tied, step=10 + k, temperature=1.0, top_k=k, seed=13)
    add("top_k 1, all equal", [1.0] * 5, step=16, temperature=1.0, top_k=1, seed=13)
    add("top_k 4, two finite", [OFF, 1.0, OFF, 0.5, OFF], step=17, temperature=1.0, top_k=4, seed=13)

    for p in (0.0, 0.1, 0.5, 0.9, 0.99):
        add(f"top_p {p}", logits(15, 3.0), step=20, temperature=1.0, top_p=p, seed=14)
    for p in (0.25, 0.5, 0.6, 0.75):
        add(
            f"top_p {p}, four equal: the lower ids stay",
            [1.5] * 4,
            step=21,
            temperature=1.0,
            top_p=p,
            seed=14,
        )
    add("top_p 0, two equal and largest", [2.0, 1.0, 2.0], step=22, temperature=1.0, top_p=0.0, seed=14)
    add(
        "top_p 0.7, equal at the border",
        [2.0, 1.0, 1.0, 1.0, 0.0],
        step=23,
        temperature=1.0,
        top_p=0.7,
        seed=14,
    )

    for m in (0.02, 0.3, 0.9):
        add(f"min_p {m}", logits(15, 3.0), step=30, temperature=1.0, min_p=m, seed=15)
    add(
        "min_p 1 keeps all that equal the largest",
        [2.0, 1.0, 2.0, 1.5],
        step=31,
        temperature=1.0,
        min_p=1.0,
        seed=15,
    )

    for r in (0.75, 1.1, 1.5):
        add(
            f"penalty {r}",
            logits(12),
            previous=[0, 3, 3, 7, 11],
            step=40,
            temperature=1.0,
            repetition_penalty=r,
            seed=16,
        )
    add(
        "penalty on every id",
        logits(6),
        previous=range(6),
        step=41,
        temperature=0.8,
        repetition_penalty=1.2,
        seed=16,
    )
    add(
        "penalty on 0, -inf and a negative",
        [0.0, OFF, -2.0, 1.0],
        previous=[0, 1, 2],
        step=42,
        temperature=1.0,
        repetition_penalty=1.3,
        seed=16,
    )

    pairs: list[dict[str, Any]] = [
        {"top_k": 6, "top_p": 0.8},
        {"top_k": 8, "min_p": 0.05},
        {"top_p": 0.95, "min_p": 0.1},
        {"top_k": 5, "repetition_penalty": 1.2},
        {"top_p": 0.9, "repetition_penalty": 1.1},
        {"min_p": 0.05, "repetition_penalty": 1.3},
    ]
    for pair in pairs:
        name = " and ".join(f"{key} {value}" for key, value in pair.items())
        add(name, logits(20, 4.0), previous=[1, 4, 9, 16], step=50, temperature=0.8, seed=17, **pair)
    for step, size in enumerate((5, 10, 20, 30, 40, 40)):
        x = logits(size, 4.0)
        x[size // 2] = OFF
        add(
            f"all together, {size} ids",
            x,
            previous=[rng.randrange(size) for _ in range(size // 3)],
            step=60 + step,
            temperature=0.5 + 0.25 * step,
            top_k=size // 2,
            top_p=0.92,
            min_p=0.03,
            repetition_penalty=1.15,
            seed=18,
        )
    x = logits(16, 2.0)
    for seed, step in ((0, 0), (0, 1), (1, 0), (2**64 - 1, 3), (5, 2**32 + 5), (2**40 + 9, 2**40)):
        add(f"seed {seed}, step {step}", x, step=step, temperature=1.0, seed=seed)

    errors = [
        {"name": name, "logits": [_number(v) for v in x]}
        for name, x in (
            ("NaN", [1.0, math.nan, 2.0]),
            ("plus infinity", [1.0, math.inf, 2.0]),
            ("all minus infinity", [OFF, OFF]),
            ("empty", []),
        )
    ]
    return {"format": 1, "cases": cases, "errors": errors}


def _options(o: SamplingOptions) -> dict[str, Any]:
    return {
        "temperature": o.temperature,
        "top_k": o.top_k,
        "top_p": o.top_p,
        "min_p": o.min_p,
        "repetition_penalty": o.repetition_penalty,
        "seed": str(o.seed),
    }


def _number(value: float) -> float | str:
    """JSON has no infinities and no NaN: they are written as the strings that most languages parse."""
    if math.isnan(value):
        return "NaN"
    return value if math.isfinite(value) else "Infinity" if value > 0 else "-Infinity"


def stop() -> dict[str, Any]:
    vocabulary = {"</s>": 2, "<end>": 7, "<s>": 1}

    def ids(
        name: str,
        want: list[int] | None,
        generation_config: Mapping[str, Any] | None,
        config: Mapping[str, Any],
        tokenizer_config: Mapping[str, Any],
    ) -> dict[str, Any]:
        return {
            "name": name,
            "generation_config": generation_config,
            "config": config,
            "tokenizer_config": tokenizer_config,
            "vocabulary": vocabulary,
            "expected": want,
        }

    def loop(
        name: str,
        draws: list[int],
        want: dict[str, Any],
        *,
        context_length: int = 16,
        position: int = 0,
        prompt_tokens: int = 3,
        max_new_tokens: int = 8,
        stop_ids: Sequence[int] = (2,),
        cancel_after: int | None = None,
    ) -> dict[str, Any]:
        return {
            "name": name,
            "context_length": context_length,
            "position": position,
            "prompt_tokens": prompt_tokens,
            "max_new_tokens": max_new_tokens,
            "stop_ids": list(stop_ids),
            "cancel_after": cancel_after,
            "draws": draws,
            "expected": want,
        }

    def result(
        ids: list[int], reason: str, runs: int, position: int, pending: list[int], stop_id: int | None = None
    ) -> dict[str, Any]:
        return {
            "ids": ids,
            "finish_reason": reason,
            "stop_id": stop_id,
            "runs": runs,
            "position": position,
            "pending_ids": pending,
        }

    many = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
    end_ids = [
        ids(
            "a list and the tokenizer's", [1, 106, 7], {"eos_token_id": [1, 106]}, {}, {"eos_token": "<end>"}
        ),
        ids("the same id three times", [2], {"eos_token_id": 2}, {"eos_token_id": 2}, {"eos_token": "</s>"}),
        ids("order of the three", [9, 8, 2], {"eos_token_id": 9}, {"eos_token_id": 8}, {"eos_token": "</s>"}),
        ids("config alone", [5], None, {"eos_token_id": 5}, {}),
        ids(
            "tokenizer alone, as an object", [7], {}, {}, {"eos_token": {"content": "<end>", "special": True}}
        ),
        ids("nulls", [2], {"eos_token_id": None}, {"eos_token_id": None}, {"eos_token": "</s>"}),
        ids("repeats inside lists", [3, 4, 2], {"eos_token_id": [3, 4, 3]}, {"eos_token_id": [4, 2]}, {}),
        ids("the tokenizer's is unknown", [5], {}, {"eos_token_id": 5}, {"eos_token": "<gone>"}),
        ids("id 0 is an id", [0], {"eos_token_id": 0}, {}, {}),
        ids("none at all is an error", None, {}, {}, {}),
        ids("only an unknown token is an error", None, None, {}, {"eos_token": "<gone>"}),
        ids("a negative id is an error", None, {"eos_token_id": -1}, {}, {"eos_token": "</s>"}),
        ids("text is an error", None, {"eos_token_id": "2"}, {}, {}),
    ]
    loops = [
        loop("a stop id", [11, 12, 2, 13], result([11, 12], "stop", 3, 5, [2], 2)),
        loop("the second of two", [11, 7, 2], result([11], "stop", 2, 4, [7], 7), stop_ids=[2, 7]),
        loop("a stop id at once", [2], result([], "stop", 1, 3, [2], 2)),
        loop("no stop ids", [2, 2, 2], result([2, 2], "length", 2, 4, [2]), stop_ids=[], max_new_tokens=2),
        loop("length", many, result([11, 12, 13], "length", 3, 5, [13]), max_new_tokens=3),
        loop("no new tokens: the model does not run", many, result([], "length", 0, 0, []), max_new_tokens=0),
        loop("the context fills", many, result([11, 12, 13], "context_full", 3, 5, [13]), context_length=5),
        loop("the prompt fills it: one id", many, result([11], "context_full", 1, 3, [11]), context_length=3),
        loop(
            "length before context",
            many,
            result([11, 12], "length", 2, 4, [12]),
            context_length=4,
            max_new_tokens=2,
        ),
        loop(
            "a second turn appends", many, result([11], "length", 1, 13, [11]), position=10, max_new_tokens=1
        ),
        loop("cancelled", many, result([11, 12], "cancelled", 2, 4, [12]), cancel_after=2),
        loop("prompt of 20, context 16", many, {"error": "context_full"}, prompt_tokens=20),
        loop("second turn past the limit", many, {"error": "context_full"}, position=14),
        loop(
            "too long, and no new tokens asked for",
            many,
            {"error": "context_full"},
            prompt_tokens=17,
            max_new_tokens=0,
        ),
        loop("an empty prompt", many, {"error": "input"}, prompt_tokens=0),
    ]
    return {"format": 1, "end_ids": end_ids, "loops": loops}


def documents() -> dict[str, str]:
    """File name to text, as it lies in this folder: one case a line, floats as the shortest exact decimal."""
    return {f"{make.__name__}.json": _dump(make()) for make in (philox, sampling, stop)}


def _dump(document: dict[str, Any]) -> str:
    parts = []
    for key, value in document.items():
        if isinstance(value, list):
            lines = ",\n".join("  " + json.dumps(item, allow_nan=False, ensure_ascii=False) for item in value)
            parts.append(f" {json.dumps(key)}: [\n{lines}\n ]")
        else:
            parts.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    for name, text in documents().items():
        (HERE / name).write_text(text, encoding="utf-8", newline="\n")
