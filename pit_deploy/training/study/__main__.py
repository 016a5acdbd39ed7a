"""Run the study: `python -m pit_deploy.training.study`. What the cache has is not run again."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from pit_deploy.training.study import plan
from pit_deploy.training.study.runs import Run, execute

STAGES = ("search", "scratch", "large", "continued", "variants", "overfitting", "adaptation", "quantised")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--cache", type=Path, default=Path("build/study"), help="where finished runs are kept"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("docs"), help="where study.md and study/ are written"
    )
    parser.add_argument("--workers", type=int, default=2, help="runs at the same time, one thread each")
    parser.add_argument("--stage", action="append", choices=STAGES, help="only these stages; all by default")
    parser.add_argument("--seeds", type=int, default=5, help="seeds of the headline rows")
    parser.add_argument("--few", type=int, default=3, help="seeds of the other rows")
    arguments = parser.parse_args()
    results = run_stages(
        arguments.cache, arguments.workers, set(arguments.stage or STAGES), arguments.seeds, arguments.few
    )
    from pit_deploy.training.study.page import write_page

    folder = arguments.out / "study"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    write_page(results, arguments.out)


def run_stages(cache: Path, workers: int, stages: set[str], seeds: int, few: int) -> dict[str, Any]:
    """The results of the stages asked for, rows by stage and name."""
    results: dict[str, Any] = {}
    with ProcessPoolExecutor(workers, initializer=_one_thread) as pool:

        def do(stage: str, rows: dict[str, list[Run]]) -> dict[str, list[dict[str, Any]]]:
            # Sources first: two workers must not train the same one.
            sources = {
                r.source.name: r.source for runs in rows.values() for r in runs if r.source is not None
            }
            _all(pool, sources.values(), cache)
            done = {name: _all(pool, runs, cache) for name, runs in rows.items()}
            results[stage] = done
            return done

        tried = plan.search("small")
        do("search", tried)
        best = plan.choose(tried, lambda run: float(execute(run, cache)["final"]))
        many, some = plan.SEEDS[:seeds], plan.SEEDS[:few]
        if "scratch" in stages:
            do("scratch", plan.scratch(best, many))
        if "continued" in stages:
            do("continued", plan.continued(best, some))
        if "large" in stages:
            larger = plan.search_large(best)
            do("search, large", larger)
            do(
                "scratch, large",
                plan.scratch(plan.choose(larger, lambda run: float(execute(run, cache)["final"])), many),
            )
        if "overfitting" in stages:
            do("overfitting", plan.overfitting(best, some))
        if "variants" in stages:
            do("variants", plan.variants(best, some))
        if "adaptation" in stages:
            do("adaptation", plan.adaptation(best, some))
        if "quantised" in stages:
            from pit_deploy.training.study.quantised import measure

            sources = plan.scratch(best, some)
            _all(pool, [run for runs in sources.values() for run in runs], cache)
            results["quantised"] = {
                name: [measure(run, cache) for run in runs] for name, runs in sources.items()
            }
    return results


def _all(pool: ProcessPoolExecutor, runs: Iterable[Run], cache: Path) -> list[dict[str, Any]]:
    runs = list(runs)
    found = []
    for run, result in zip(runs, pool.map(_execute, [(run, cache) for run in runs]), strict=True):
        found.append(result)
        print(
            f"{time.strftime('%H:%M:%S')} {result['final']:.4f} {result['seconds']:6.1f} CPU s  {run.name}",
            flush=True,
        )
    return found


def _execute(job: tuple[Run, Path]) -> dict[str, Any]:
    return execute(*job)


def _one_thread() -> None:
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    import torch

    torch.set_num_threads(1)


if __name__ == "__main__":
    main()
