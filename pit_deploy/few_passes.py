"""A comparison for runtimes that take seconds for a token, such as those on an emulated processor.

Where a runtime gives the logits of all positions, most come from one pass over a prompt, and a few are decoded one by
one as well. A runtime that gives the last position's alone decodes them all: in pieces of several tokens it would take
as long, since an emulated processor is slow by the multiplication, and fewer would be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeGuard

import numpy as np

from pit_deploy.bundle import Bundle
from pit_deploy.golden import GoldenRecord, Prompt
from pit_deploy.runtimes.base import FullRuntime, Runtime

STEPS = 4
"""Tokens of a prompt that are decoded one by one."""
GREEDY_TOKENS = 8
LARGE_BYTES = 32 << 20
"""A model below it takes no more than moments on an emulated processor."""

Row = tuple[float, float, bool]
"""KL, largest absolute error, top-1 of a position."""


def first_positions(golden: GoldenRecord, positions: int) -> GoldenRecord:
    """The record cut after its first positions (at least one); a prompt that is cut has the logits that it had.

    The greedy continuation stays where its prompt is whole.
    """
    prompts: list[Prompt] = []
    left = min(positions, golden.positions)
    for prompt in golden.prompts:
        if left > 0:
            prompts.append(Prompt(prompt.text, prompt.ids[:left]))
            left -= len(prompts[-1].ids)
    kept = sum(len(prompt.ids) for prompt in prompts)
    number = golden.greedy_prompt
    whole = number < len(prompts) and prompts[number].ids == golden.prompts[number].ids
    return replace(
        golden,
        prompts=prompts,
        top_ids=golden.top_ids[:kept],
        top_logits=golden.top_logits[:kept],
        sampled_logits=golden.sampled_logits[:kept],
        logsumexp=golden.logsumexp[:kept],
        hidden_projection=golden.hidden_projection[:, :kept],
        hidden_norm=golden.hidden_norm[:, :kept],
        greedy_prompt=number if whole else 0,
        greedy_ids=golden.greedy_ids if whole else [],
        greedy_margins=golden.greedy_margins if whole else [],
    )


def is_large(bundle: Bundle) -> bool:
    """Whether a bundle's model is too large to decode every position on an emulated processor."""
    manifest = bundle.manifest
    sizes = [entry.size for entry in manifest.files if entry.path.startswith(manifest.model_file)]
    return sum(sizes) > LARGE_BYTES


def is_slow(runtime: Runtime) -> bool:
    """Whether a runtime says of itself that it takes seconds for a token."""
    return bool(getattr(runtime, "few_passes", False))


def wants_few_passes(runtime: Runtime) -> TypeGuard[FullRuntime]:
    """Whether a slow runtime can be compared in few passes: it gives the logits of all positions."""
    return is_slow(runtime) and isinstance(runtime, FullRuntime)


def rows_of_prompt(
    runtime: FullRuntime, ids: Sequence[int], compare: Callable[[int, np.ndarray], Row], tokens: int
) -> tuple[list[Row], float]:
    """The rows of a prompt's positions, and how far one pass and steps differ.

    `compare` gives the row of a position and its logits. Of a position met in two ways the worse counts. The
    difference is over the first `tokens` logits.
    """
    runtime.reset()
    passes = runtime.all_logits(ids)
    runtime.reset()
    rows = [compare(offset, logits) for offset, logits in enumerate(passes)]
    difference = 0.0
    last = runtime.prefill(ids)
    rows[-1] = worse(rows[-1], compare(len(ids) - 1, last))
    difference = max(difference, _apart(last, passes[-1], tokens))
    runtime.reset()
    for offset, id in enumerate(ids[:STEPS]):
        logits = runtime.decode(id)
        rows[offset] = worse(rows[offset], compare(offset, logits))
        difference = max(difference, _apart(logits, passes[offset], tokens))
    return rows, difference


def worse(a: Row, b: Row) -> Row:
    """The row of a miss, or else of the larger KL."""
    return max(a, b, key=lambda row: (not row[2], row[0], row[1]))


def notes(runtime: Runtime, positions: int, greedy: int) -> list[str]:
    """What a report says of a comparison that was cut because the runtime is slow."""
    if not is_slow(runtime):
        return []
    cut = f"greedy decoding was cut to {greedy} tokens"
    if not wants_few_passes(runtime):
        return [f"an emulated processor is slow: {cut}"]
    return [
        f"an emulated processor is slow: the {positions} positions come from passes over several tokens, and the first "
        f"{STEPS} of each prompt were decoded one by one too; {cut}"
    ]


def _apart(a: np.ndarray, b: np.ndarray, tokens: int) -> float:
    return float(np.abs(a[:tokens] - b[:tokens]).max())
