"""Which runs the study consists of, stage by stage. A later stage may depend on what an earlier one found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from pit_deploy.training.study.runs import Run

SEARCH_SEED = 100
"""Settings are chosen with a seed that no reported row uses."""

SEEDS = (0, 1, 2, 3, 4)
FEW = (0, 1, 2)

Final = Callable[[Run], float]
"""The last held-out loss of a run that is done."""


def search(size: str) -> dict[str, list[Run]]:
    """The settings tried for each side: as many for one as for the other."""
    tied, pit = Run(size=size, seed=SEARCH_SEED), Run(size=size, ends="pit", seed=SEARCH_SEED)
    return {
        "tied": [
            *(replace(tied, std=0.05, rate=rate) for rate in (1e-2, 2e-2, 3e-2, 4e-2)),
            replace(tied, std=0.02),
            replace(tied, std=0.1, rate=1e-2),
            replace(tied, std=0.05, multiplier=3.0),
            replace(tied, std=0.05, learning_rate=6e-3),
        ],
        "pit": [
            *(replace(pit, rate=rate) for rate in (1e-2, 2e-2, 3e-2, 4e-2)),
            replace(pit, scale=0.5),
            replace(pit, scale=0.5, rate=3e-2, multiplier=2.0),
            replace(pit, multiplier=3.0),
            replace(pit, learning_rate=6e-3),
        ],
    }


def search_large(best: dict[str, Run]) -> dict[str, list[Run]]:
    """At the larger size: the small one's choice, and around it lower rates, a larger start, another multiplier."""
    found = {}
    for side, run in best.items():
        half = replace(run, size="large", rate=run.rate / 2)
        tied = side == "tied"
        larger = (
            replace(half, std=round(1.6 * run.std, 3))
            if tied
            else replace(half, scale=round(1.6 * run.scale, 3))
        )
        found[side] = [
            replace(half, rate=run.rate),
            half,
            larger,
            replace(half, multiplier=3 * run.multiplier if tied else run.multiplier / 2),
            slower := replace(half, learning_rate=run.learning_rate / 2),
            replace(slower, rate=run.rate),
            replace(slower, rate=run.rate / 4),
            replace(half, learning_rate=run.learning_rate / 4),
        ]
    return found


def choose(candidates: dict[str, list[Run]], final: Final) -> dict[str, Run]:
    return {side: min(runs, key=final) for side, runs in candidates.items()}


def scratch(best: dict[str, Run], seeds: Sequence[int] = SEEDS) -> dict[str, list[Run]]:
    """The headline: both sides at their chosen settings, under one epoch."""
    keep = best["tied"].size == "small"
    return {side: [replace(run, seed=seed, keep=keep) for seed in seeds] for side, run in best.items()}


def variants(best: dict[str, Run], seeds: Sequence[int] = FEW) -> dict[str, list[Run]]:
    """What each default of PIT is worth, small size: one changed at a time."""
    pit = best["pit"]
    unit = (128 / 4096) ** 0.5  # what makes T = I
    changed = {
        "Z frozen": replace(pit, memory="frozen"),
        "Z and T stepped apart": replace(pit, step="apart", rate=2 * pit.rate),
        "T = I, no multiplier": replace(pit, scale=unit, multiplier=0.0),
        "T = I, no multiplier, Z frozen": replace(
            pit, scale=unit, multiplier=0.0, memory="frozen", rate=pit.rate / 4
        ),
        "Muon": replace(pit, optimizer="muon", step="apart", rate=2 * pit.rate),
        "Muon, tied": replace(best["tied"], optimizer="muon"),
    }
    return {name: [replace(run, seed=seed) for seed in seeds] for name, run in changed.items()}


def overfitting(best: dict[str, Run], seeds: Sequence[int] = FEW) -> dict[str, list[Run]]:
    """Several passes over a small text."""
    pit = best["pit"]
    rows = {"tied": best["tied"], "pit": pit}
    return {
        name: [replace(run, seed=seed, corpus="prose", keep=False) for seed in seeds]
        for name, run in rows.items()
    }


def continued(best: dict[str, Run], seeds: Sequence[int] = FEW) -> dict[str, list[Run]]:
    """From a trained tied model: as it is, and in each form of PIT."""
    rows: dict[str, list[Run]] = {}
    for seed in seeds:
        source = replace(best["tied"], seed=seed, keep=True)
        start = Run(seed=10 + seed, source=source, rate=1e-3, learning_rate=1e-3, steps=200)
        for name, run in {
            "stays tied": replace(start, mode="tied"),
            "strict": replace(start, mode="strict", ends="pit"),
            "bridge kept": replace(start, mode="bridge", ends="pit"),
            "bridge annealed": replace(start, mode="bridge", ends="pit", anneal=150),
        }.items():
            rows.setdefault(name, []).append(run)
    return rows


def adaptation(best: dict[str, Run], seeds: Sequence[int] = FEW) -> dict[str, list[Run]]:
    """Models of the headline, adapted to prose: all weights, or an adapter."""
    rows: dict[str, list[Run]] = {}
    for seed in seeds:
        for side in ("tied", "pit"):
            source = replace(best[side], seed=seed, keep=True)
            for mode in ("tune", "lora"):
                run = Run(
                    ends=side, seed=seed, source=source, mode=mode, corpus="prose", steps=60, rate=1e-3,
                    learning_rate=1e-3 if mode == "tune" else 3e-3,
                )  # fmt: skip
                rows.setdefault(f"{side}, {'all weights' if mode == 'tune' else 'LoRA'}", []).append(run)
    return rows
