"""Write bench.json: `python runtime_tests/vectors/make_bench.py`. Plain arithmetic with the statistics module."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def documents() -> dict[str, str]:
    """File name to text, as it lies in this folder."""
    rng = random.Random(6)
    lists = [[1.0], [2.0, 1.0], [3.0, 1.0, 2.0], [4.0, 1.0, 3.0, 2.0], [0.0, 0.0, 5.0], [7.5] * 4]
    lists += [[round(rng.uniform(0.001, 90), 6) for _ in range(n)] for n in (5, 6, 9)]
    runs = [_run([1, 64], [0], 8, 1, rng), _run([16, 128, 512], [0, 512], 32, 5, rng)]
    document = {"format": 1, "statistics": [_samples_case(x) for x in lists], "runs": runs}
    return {"bench.json": json.dumps(document, indent=1) + "\n"}


def _samples_case(samples: list[float]) -> dict[str, Any]:
    return {"samples": samples, "expected": _samples(samples)}


def _samples(samples: list[float]) -> dict[str, Any]:
    median = statistics.median(samples)
    return {"median": median, "min": min(samples), "max": max(samples), "samples": samples}


def _run(prompts: list[int], depths: list[int], new: int, repeats: int, rng: random.Random) -> dict[str, Any]:
    def draw(size: int) -> list[float]:
        return [round(0.01 + size * rng.uniform(0.001, 0.002), 6) for _ in range(repeats)]

    prefill, decode = {size: draw(size) for size in prompts}, {depth: draw(new) for depth in depths}
    return {
        "new_tokens": new,
        "seconds": {
            "prefill": [{"tokens": size, "samples": seconds} for size, seconds in prefill.items()],
            "decode": [{"depth": depth, "samples": seconds} for depth, seconds in decode.items()],
        },
        "expected": {
            "prefill": [
                {
                    "tokens": size,
                    "tokens_per_second": _samples([size / s for s in seconds]),
                    "time_to_first_token_seconds": _samples(seconds),
                }
                for size, seconds in prefill.items()
            ],
            "decode": [
                {
                    "depth": depth,
                    "tokens": new,
                    "tokens_per_second": _samples([new / s for s in seconds]),
                    "bandwidth_share": None,
                }
                for depth, seconds in decode.items()
            ],
        },
    }


if __name__ == "__main__":
    for name, text in documents().items():
        (HERE / name).write_text(text, encoding="utf-8", newline="\n")
