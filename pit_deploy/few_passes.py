"""A comparison for runtimes that take seconds for a token, such as those on an emulated processor.

Most positions come from passes over several tokens, and a few are decoded one by one as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from pit_deploy.bundle import Bundle
from pit_deploy.golden import GoldenRecord, Prompt
from pit_deploy.runtimes.base import FullRuntime, Runtime

STEPS = 4
"""Tokens of a prompt that are decoded one by one."""
PIECE = 8
"""Tokens of a pass where a runtime gives the logits of the last one only."""
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


def wants_few_passes(runtime: Runtime) -> bool:
    """Whether a runtime says of itself that it is too slow to decode every position."""
    return bool(getattr(runtime, "few_passes", False))


def rows_of_prompt(
    runtime: Runtime, ids: Sequence[int], compare: Callable[[int, np.ndarray], Row], tokens: int
) -> tuple[list[Row], float]:
    """The rows of a prompt's positions that could be compared, and how far one pass and steps differ.

    `compare` gives the row of a position and its logits. Of a position met in two ways the worse counts. The
    difference is over the first `tokens` logits.
    """
    runtime.reset()
    passes = _passes(runtime, ids)
    runtime.reset()
    rows = {offset: compare(offset, logits) for offset, logits in passes.items()}
    difference = 0.0
    last = runtime.prefill(ids)
    rows[len(ids) - 1] = worse(rows[len(ids) - 1], compare(len(ids) - 1, last))
    difference = max(difference, _apart(last, passes[len(ids) - 1], tokens))
    runtime.reset()
    for offset, id in enumerate(ids[:STEPS]):
        logits = runtime.decode(id)
        row = compare(offset, logits)
        rows[offset] = worse(rows[offset], row) if offset in rows else row
        if offset in passes:
            difference = max(difference, _apart(logits, passes[offset], tokens))
    return [row for _, row in sorted(rows.items())], difference


def worse(a: Row, b: Row) -> Row:
    """The row of a miss, or else of the larger KL."""
    return max(a, b, key=lambda row: (not row[2], row[0], row[1]))


def note(positions: int, greedy: int) -> str:
    """What a report says of a comparison in few passes."""
    return (
        f"an emulated processor is slow: the {positions} positions come from passes over several tokens, and the first "
        f"{STEPS} of each prompt were decoded one by one too; greedy decoding was cut to {greedy} tokens"
    )


def _passes(runtime: Runtime, ids: Sequence[int]) -> dict[int, np.ndarray]:
    """Logits by offset: of all, or after every `PIECE` tokens and at the end where the runtime gives the last alone."""
    if isinstance(runtime, FullRuntime):
        return dict(enumerate(runtime.all_logits(ids)))
    found = {}
    for start in range(0, len(ids), PIECE):
        piece = ids[start : start + PIECE]
        found[start + len(piece) - 1] = runtime.prefill(piece)
    return found


def _apart(a: np.ndarray, b: np.ndarray, tokens: int) -> float:
    return float(np.abs(a[:tokens] - b[:tokens]).max())
