"""Run the reference model once: the golden record, and the statistics that quantisation is calibrated with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pit_deploy.bundle import load_tokenizer
from pit_deploy.chat import has_chat_template, render_directory
from pit_deploy.checkpoint import Checkpoint, iterate_backbone, open_checkpoint
from pit_deploy.errors import InputError
from pit_deploy.folding import FINAL_NORM, fold_checkpoint, load_folded
from pit_deploy.generation_config import checkpoint_end_ids
from pit_deploy.golden import QUESTION, GoldenRecord, golden_prompts, logsumexp, record
from pit_deploy.progress import Progress, silent

if TYPE_CHECKING:
    from pit_deploy.runtimes.torch import TorchRuntime

CALIBRATION_TOKENS = 4096
HELD_OUT_TOKENS = 8192
WINDOW = 256
DRAWN_WINDOWS = 16
_MARK = "calibration mark 7f3a"


@dataclass
class Calibration:
    """What an export learns from running the reference model once.

    `state_second_moment` is E[nᵀ n] [d, d] over the calibration text, `probabilities` [V] the mean next-token
    distribution there.
    """

    golden: GoldenRecord
    state_second_moment: np.ndarray
    probabilities: np.ndarray
    ids: list[int]
    """The calibration text."""
    held_out: np.ndarray | None = None
    """Normalised states [positions, d], float32, of text that the statistics above did not see; None: not recorded."""


def calibrate(
    checkpoint: Checkpoint,
    context_length: int,
    *,
    text: str | Path | None = None,
    reference: str | Path | None = None,
    drawn_windows: int = 0,
    held_out_tokens: int = 0,
    progress: Progress = silent,
) -> Calibration:
    """Run the reference model: record the golden record, and the statistics for the quantisation basis.

    Without a `text` of the user's, calibration sees English prose, other languages and code in turn, and
    `drawn_windows` windows that the model writes itself, in its chat form where it has one. `held_out_tokens` are run
    besides, of the text that is left.

    The reference is the training-time forward of a PIT checkpoint (`reference` names it where `checkpoint` is
    folded), or transformers' forward of a plain one.
    """
    from pit_deploy.quantize.calibration import calibration_text, other_text, read_calibration
    from pit_deploy.runtimes.torch import open_plain, open_training

    recorded = checkpoint
    if reference is not None:
        recorded = open_checkpoint(reference)
        if recorded.kind != "pit":
            raise InputError(
                f"--golden {reference} is a {recorded.kind} checkpoint; name the PIT checkpoint it was folded from."
            )
        if recorded.table_rows != checkpoint.table_rows:
            raise InputError(
                f"--golden {reference} has {recorded.table_rows} table rows, the source {checkpoint.table_rows}."
            )
        _check_same_model(checkpoint, recorded, reference)
    elif checkpoint.kind == "folded":
        raise InputError(
            f"{checkpoint.label} is folded already, so the training-time outputs cannot be recorded from it; pass "
            f"--golden with the PIT checkpoint it was folded from."
        )
    read_calibration(text)  # a file that cannot be read is told before any work
    tokenizer = load_tokenizer(checkpoint.path / "tokenizer.json")
    tokens = checkpoint.tokenizer_length()
    prompts, greedy = golden_prompts(
        tokenizer, context_length, chat_text=_chat_text(checkpoint), vocab_size=checkpoint.table_rows
    )
    opened = (
        open_training(recorded, context_length=context_length)
        if recorded.kind == "pit"
        else open_plain(recorded, context_length=context_length)
    )
    golden = record(
        opened,
        prompts,
        tokenizer_length=tokens,
        greedy_prompt=greedy,
        end_ids=checkpoint_end_ids(checkpoint),
        progress=progress,
    )
    if recorded.kind == "pit":
        golden.how["float32_interface_max_abs"] = _float32_difference(opened, golden)
    rows = checkpoint.table_rows
    if text is not None:
        ids = _in_turn([_windows(tokenizer, read_calibration(text), rows)])
    else:
        drawn = _drawn(opened, checkpoint, tokenizer, drawn_windows, progress) if drawn_windows else []
        others = [_windows(tokenizer, t, rows) for t in (calibration_text(), other_text())]
        ids = _in_turn([*others, drawn])
    moment, probabilities = _statistics(opened, ids, checkpoint.table_rows, progress)
    held_out = _held_out(opened, ids, held_out_tokens, progress) if held_out_tokens else None
    return Calibration(golden, moment, probabilities, ids, held_out)


def _windows(tokenizer: Any, text: str, rows: int) -> list[list[int]]:
    """A text's ids in windows, each with the ids that the tokenizer puts before a text. A short rest is dropped."""
    prefix = _prefix(tokenizer, rows)
    ids = [id for id in tokenizer.encode(text, add_special_tokens=False).ids if id < rows]
    size = WINDOW - len(prefix)
    cut = [ids[start : start + size] for start in range(0, len(ids), size)]
    if len(cut) > 1 and len(cut[-1]) < size:
        cut.pop()
    return [prefix + window for window in cut]


def _prefix(tokenizer: Any, rows: int) -> list[int]:
    """The ids before a text, as a beginning-of-text id; what a tokenizer puts after one is not among them."""
    probe = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a").ids
    start = next((n for n in range(len(whole)) if whole[n : n + len(probe)] == probe), 0)
    return [id for id in whole[:start] if id < rows]


def _in_turn(sources: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    """The windows of all sources, so that each source is spread evenly over the whole."""
    places = [((n + 0.5) / len(source), k, n) for k, source in enumerate(sources) for n in range(len(source))]
    return [id for _, k, n in sorted(places) for id in sources[k][n]]


def _drawn(
    opened: TorchRuntime, checkpoint: Checkpoint, tokenizer: Any, count: int, progress: Progress
) -> list[list[int]]:
    """Windows that the model writes: what follows the beginning of a user's turn, or any one token."""
    from pit_deploy.quantize.sampled_text import sampled_windows

    rows, known = checkpoint.table_rows, checkpoint.tokenizer_length()
    tokens = min(WINDOW, int(opened.model.config.max_position_embeddings))
    if tokens < 2:
        return []
    start: list[int] = []
    if has_chat_template(checkpoint.path):
        rendered = render_directory(
            checkpoint.path,
            [{"role": "user", "content": _MARK}],
            date_string="01 Jan 2024",  # templates with a date read it: the same text on any day
        )
        before = rendered.rpartition(_MARK)[0]
        start = [i for i in tokenizer.encode(before, add_special_tokens=False).ids if i < rows]
    starts = [start] * count
    if not 0 < len(start) < tokens:
        ordinary = sorted(set(range(min(known, rows))) - set(tokenizer.get_added_tokens_decoder()))
        drawn = np.random.default_rng(0).choice(ordinary, count)
        starts = [[*_prefix(tokenizer, rows), int(i)][-(tokens - 1) :] for i in drawn]
    return sampled_windows(
        opened, starts, tokens=tokens, banned=range(min(known, rows), rows), progress=progress
    )


def _check_same_model(folded: Checkpoint, recorded: Checkpoint, reference: str | Path) -> None:
    """Raise `InputError` where a folded checkpoint is not the fold of the PIT checkpoint named for it.

    Its tables are compared with the fold made anew, rounding to 16 bits aside, and its backbone by sample.
    """
    layout = folded.layout or "untied"
    mine, anew = load_folded(folded, layout).tables, fold_checkpoint(recorded, layout).tables
    pairs = [(name, getattr(mine, name), getattr(anew, name)) for name in vars(anew) if name != "layout"]
    names = sorted(set(iterate_backbone(folded)) - {FINAL_NORM})
    for name in names[:: max(1, len(names) // 16)]:
        if name not in recorded.tensors:
            raise InputError(f"--golden {reference} has no tensor {name}; it is another model.")
        pairs.append((name, folded.read(name), recorded.read(name)))
    for name, left, right in pairs:
        if left.shape != right.shape or not np.allclose(
            left, right, rtol=2e-2, atol=2e-2 * np.abs(right).mean()
        ):
            raise InputError(
                f"--golden {reference} is not the PIT checkpoint that {folded.label} was folded from: {name} differs."
            )


def _statistics(
    runtime: TorchRuntime, ids: list[int], rows: int, progress: Progress
) -> tuple[np.ndarray, np.ndarray]:
    """E[nᵀ n] and the mean next-token distribution, over windows spread evenly through the text."""
    from pit_deploy.quantize.hessians import calibration_windows

    windows = calibration_windows(ids, tokens=CALIBRATION_TOKENS, window=min(WINDOW, runtime.context_length))
    moment, probabilities = np.zeros(()), np.zeros(rows)
    for number, window in enumerate(windows):
        progress("calibrate", number, len(windows))
        states, logits = runtime.final_states(window)
        moment = moment + states.T @ states
        for row in logits:
            probabilities += np.exp(row - logsumexp(row))
    progress("calibrate", len(windows), len(windows))
    count = sum(map(len, windows))
    return moment / count, probabilities / count


def _held_out(runtime: TorchRuntime, ids: list[int], tokens: int, progress: Progress) -> np.ndarray:
    """The states of windows that `_statistics` leaves out, spread evenly over the text."""
    from pit_deploy.quantize.hessians import calibration_windows, other_windows

    size = min(WINDOW, runtime.context_length)
    left = [id for window in other_windows(ids, tokens=CALIBRATION_TOKENS, window=size) for id in window]
    windows = calibration_windows(left, tokens=tokens, window=size) if left else []
    states = []
    for number, window in enumerate(windows):
        progress("hold out", number, len(windows))
        states.append(runtime.final_states(window)[0].astype(np.float32))
    progress("hold out", len(windows), len(windows))
    return np.concatenate(states) if states else np.zeros((0, runtime.model.config.hidden_size), np.float32)


def _float32_difference(runtime: TorchRuntime, golden: GoldenRecord) -> float:
    """What the reference's logits would differ by if its solves ran in float32."""
    prompt = max(golden.prompts, key=lambda p: len(p.ids))
    start = golden.starts[golden.prompts.index(prompt)]
    runtime.precise = False
    try:
        logits = runtime.all_logits(prompt.ids)
    finally:
        runtime.precise = True
    span = slice(start, start + len(prompt.ids))
    return float(
        np.abs(np.take_along_axis(logits, golden.top_ids[span], axis=1) - golden.top_logits[span]).max()
    )


def _chat_text(checkpoint: Checkpoint) -> str | None:
    """A question in the model's own chat form; None where it has no template."""
    if not has_chat_template(checkpoint.path):
        return None
    return render_directory(checkpoint.path, [{"role": "user", "content": QUESTION}])
