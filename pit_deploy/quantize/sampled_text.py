"""Calibration text that the model writes itself: what it says is what it will be asked to say again.

A text from one source teaches error feedback that source alone. Texts drawn from the model cover its chat
form, its languages and its code, need no corpus, and are the same on every machine up to rounding
(Liu et al. 2023, arXiv 2305.17888, calibrate so).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pit_deploy.errors import InputError
from pit_deploy.progress import Progress, silent

if TYPE_CHECKING:
    from pit_deploy.runtimes.torch import TorchRuntime

BATCH = 16


def sampled_windows(
    runtime: TorchRuntime,
    starts: Sequence[Sequence[int]],
    *,
    tokens: int,
    banned: Sequence[int] = (),
    seed: int = 0,
    progress: Progress = silent,
) -> list[list[int]]:
    """One window of `tokens` ids for each of `starts`: the start, then ids drawn at temperature 1.

    Starts of one length are drawn together, `BATCH` at a time. `banned` ids are never drawn (ids without a token,
    say). An end id is a token like others: the model goes on after it. Raises `InputError` where a start is empty
    or not shorter than `tokens`, and where `tokens` is more than the model's context.
    """
    wrong = next((len(start) for start in starts if not 0 < len(start) < tokens), None)
    if wrong is not None:
        raise InputError(
            f"a start of {wrong} tokens gives no window of {tokens}; it needs 1 to {tokens - 1}."
        )
    limit = int(runtime.model.config.max_position_embeddings)
    if tokens > limit:
        raise InputError(f"windows of {tokens} tokens are longer than the model's {limit} positions.")
    by_length: dict[int, list[int]] = {}
    for number, start in enumerate(starts):
        by_length.setdefault(len(start), []).append(number)
    found: list[list[int]] = [[] for _ in starts]
    done = 0
    for numbers in by_length.values():
        for first in range(0, len(numbers), BATCH):
            chosen = numbers[first : first + BATCH]

            def report(share: float, done: int = done, count: int = len(chosen)) -> None:
                progress("write calibration text", int((done + share * count) * tokens), len(starts) * tokens)

            drawn = _draw(runtime, [starts[n] for n in chosen], tokens, banned, seed + chosen[0], report)
            for number, ids in zip(chosen, drawn, strict=True):
                found[number] = ids
            done += len(chosen)
    progress("write calibration text", len(starts) * tokens, len(starts) * tokens)
    return found


def _draw(
    runtime: TorchRuntime,
    starts: Sequence[Sequence[int]],
    tokens: int,
    banned: Sequence[int],
    seed: int,
    report: Callable[[float], None],
) -> list[list[int]]:
    import torch
    from transformers import DynamicCache

    generator = torch.Generator().manual_seed(seed)
    ids = torch.tensor([list(start) for start in starts])
    cache = DynamicCache(config=runtime.model.config)
    fresh = ids
    with torch.no_grad():
        while ids.shape[1] < tokens:
            report(ids.shape[1] / tokens)
            out = runtime.model(input_ids=fresh, cache=cache, use_cache=True, logits_to_keep=1)
            logits = out.logits[:, -1].float()
            if len(banned):
                logits[:, list(banned)] = -torch.inf
            fresh = torch.multinomial(torch.softmax(logits, -1), 1, generator=generator)
            ids = torch.cat([ids, fresh], 1)
    return [[int(i) for i in row] for row in ids]
