"""The golden record: what the training-time model gives, small enough to travel in every bundle.

Kept per position: the 256 largest logits with their ids, the logits of 256 fixed random ids, logsumexp; per
layer: a fixed random projection of the hidden state to 32 numbers, and its norm. docs/golden.md has the format.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pit_deploy.errors import InputError
from pit_deploy.manifest import BundleError
from pit_deploy.progress import Progress, silent
from pit_deploy.runtimes.base import FullRuntime

GOLDEN_VERSION = 1
TOP = 256
SAMPLED = 256
PROJECTED = 32
MIN_POSITIONS = 256
GREEDY_TOKENS = 64
STEPS = 48
_SEED = 2602

# Besides English prose: what a model and its tokenizer meet. Positions of these count like any other.
TEXTS = (
    "def mean(values: list[float]) -> float:\n    total = 0.0\n    for value in values:\n"
    "        total += value\n    return total / len(values)\n",
    "La tarde caía sobre el puerto. 東京は今日も雨です。 Солнце встало рано. 🙂 3.14159 × 2 = 6.28318",
)
QUESTION = "Explain in two sentences why the sky is blue."


@dataclass(frozen=True)
class Prompt:
    """A text and its ids; `ids` is what is run."""

    text: str
    ids: list[int]


@dataclass
class GoldenRecord:
    """Arrays over all positions of all prompts, one after another (P positions, L layers)."""

    prompts: list[Prompt]
    top_ids: np.ndarray
    """int32 [P, TOP]"""
    top_logits: np.ndarray
    """float32 [P, TOP], descending"""
    sampled_ids: np.ndarray
    """int32 [SAMPLED], the same at every position"""
    sampled_logits: np.ndarray
    """float32 [P, SAMPLED]"""
    logsumexp: np.ndarray
    """float64 [P]"""
    projection: np.ndarray
    """float32 [hidden_size, PROJECTED]"""
    hidden_projection: np.ndarray
    """float32 [L + 1, P, PROJECTED]"""
    hidden_norm: np.ndarray
    """float32 [L + 1, P]"""
    greedy_prompt: int
    greedy_ids: list[int]
    greedy_margins: list[float]
    """Of each greedy step: the largest logit less the second."""
    vocab_size: int
    tokenizer_length: int
    how: dict[str, Any] = field(default_factory=dict)
    """How the reference was run, and how far its own variants lie apart."""

    @property
    def positions(self) -> int:
        return len(self.logsumexp)

    @property
    def starts(self) -> list[int]:
        """Position at which each prompt starts."""
        return [0, *np.cumsum([len(p.ids) for p in self.prompts])[:-1].tolist()]

    def check_end_ids(self, end_ids: Sequence[int], context_length: int, name: str) -> None:
        """Raise `BundleError` where the greedy text ends, or goes on, otherwise than these end ids say."""
        ids, room = self.greedy_ids, context_length - len(self.prompts[self.greedy_prompt].ids)
        passed = next((n for n, id in enumerate(ids[:-1]) if id in end_ids), None)
        if passed is not None:
            what = f"goes on after token {passed}, id {ids[passed]}, which is an end id"
        elif len(ids) < min(GREEDY_TOKENS, room) and ids[-1] not in end_ids:
            what = f"ends with id {ids[-1]} after {len(ids)} tokens, which is no end id"
        else:
            return
        raise BundleError(
            "bad_end_id",
            f"{name}: the recorded greedy text {what} of the manifest ({', '.join(map(str, end_ids))}); export the "
            f"bundle again.",
        )

    def save(self, directory: Path) -> None:
        """Write golden.json and golden.safetensors."""
        from safetensors.numpy import save_file

        names = [n for n, v in vars(self).items() if isinstance(v, np.ndarray)]
        save_file(
            {n: np.ascontiguousarray(getattr(self, n)) for n in names}, directory / "golden.safetensors"
        )
        rest = {
            "golden_version": GOLDEN_VERSION,
            "prompts": [asdict(p) for p in self.prompts],
            **{k: v for k, v in vars(self).items() if k not in (*names, "prompts")},
        }
        (directory / "golden.json").write_text(
            json.dumps(rest, ensure_ascii=False, indent=1) + "\n", encoding="utf-8"
        )

    @classmethod
    def load(cls, directory: Path) -> GoldenRecord:
        """Read a record; raises `InputError` where it is damaged or of a newer version."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        from pit_deploy.json_files import read_json

        rest = read_json(directory / "golden.json")
        version = rest.pop("golden_version", None)
        if version != GOLDEN_VERSION:
            raise InputError(
                f"{directory / 'golden.json'} has version {version}; this pit-deploy reads {GOLDEN_VERSION}."
            )
        try:
            arrays: dict[str, Any] = dict(load_file(directory / "golden.safetensors"))
            prompts = [Prompt(str(p["text"]), [int(i) for i in p["ids"]]) for p in rest.pop("prompts")]
            record = cls(prompts=prompts, **arrays, **rest)
            record._check()
        except (SafetensorError, OSError, TypeError, KeyError, ValueError) as error:
            raise InputError(
                f"{directory}: the golden record cannot be read: {error}; export the bundle again."
            ) from error
        return record

    def _check(self) -> None:
        """Raise ValueError where a part does not fit the others."""
        if not self.prompts or not all(p.ids for p in self.prompts):
            raise ValueError("a prompt is empty")
        positions = sum(len(p.ids) for p in self.prompts)
        states = self.hidden_norm.shape[:1]  # one more than there are layers
        columns = self.projection.shape[:1]
        shapes = {
            "top_ids": (positions, *self.top_ids.shape[1:2]),
            "top_logits": (positions, *self.top_ids.shape[1:2]),
            "sampled_ids": self.sampled_ids.shape[:1],
            "sampled_logits": (positions, *self.sampled_ids.shape[:1]),
            "logsumexp": (positions,),
            "projection": (*columns, PROJECTED),
            "hidden_projection": (*states, positions, PROJECTED),
            "hidden_norm": (*states, positions),
        }
        for name, shape in shapes.items():
            value = getattr(self, name)
            if value.shape != shape:
                raise ValueError(
                    f"{name} has shape {list(value.shape)}, and {positions} positions ask for {list(shape)}"
                )
            if not np.isfinite(value).all():
                raise ValueError(f"{name} holds values that are not finite")
        ids = [*(i for p in self.prompts for i in p.ids), *self.greedy_ids]
        ids += [int(a.min()) for a in (self.top_ids, self.sampled_ids)]
        ids += [int(a.max()) for a in (self.top_ids, self.sampled_ids)]
        if not all(0 <= i < self.vocab_size for i in ids):
            raise ValueError(f"an id is outside the vocabulary of {self.vocab_size} rows")
        if not 0 <= self.greedy_prompt < len(self.prompts) or len(self.greedy_ids) != len(
            self.greedy_margins
        ):
            raise ValueError("the greedy continuation does not fit the prompts")


def record(
    runtime: FullRuntime,
    prompts: Sequence[Prompt],
    *,
    tokenizer_length: int,
    greedy_prompt: int = 0,
    end_ids: Sequence[int] = (),
    progress: Progress = silent,
) -> GoldenRecord:
    """Record `runtime` on `prompts`, each at most its context: one pass each, then steps, then greedy decoding."""
    if not prompts or not all(prompt.ids for prompt in prompts):
        raise InputError("a golden record needs prompts of at least one token.")
    rng = np.random.default_rng(_SEED)
    count = min(tokenizer_length, TOP)
    sampled = np.sort(rng.choice(tokenizer_length, min(SAMPLED, tokenizer_length), replace=False)).astype(
        np.int32
    )
    parts: dict[str, list[np.ndarray]] = {
        k: [] for k in ("ids", "top", "sampled", "lse", "projected", "norm")
    }
    step_difference = 0.0
    for number, prompt in enumerate(prompts):
        progress("golden", number, len(prompts) + 1)
        states, logits = runtime.hidden_states(prompt.ids)
        if not (np.isfinite(logits).all() and np.isfinite(states).all()):
            raise InputError(f"the reference gives values that are not finite on {prompt.text[:40]!r}.")
        if number == 0:
            gaussian = rng.standard_normal((states.shape[-1], PROJECTED))
            projection = (gaussian / np.sqrt(PROJECTED)).astype(np.float32)
        largest = np.stack([_largest(row, count) for row in logits])
        parts["ids"].append(largest)
        parts["top"].append(np.take_along_axis(logits, largest, axis=1))
        parts["sampled"].append(logits[:, sampled])
        parts["lse"].append(logsumexp(logits))
        parts["projected"].append(project(states, projection))
        parts["norm"].append(np.linalg.norm(states, axis=-1).astype(np.float32))
        if number == greedy_prompt:
            step_difference = _step_difference(runtime, prompt.ids, logits)
    progress("golden", len(prompts), len(prompts) + 1)
    greedy, margins = greedy_continuation(runtime, prompts[greedy_prompt].ids, GREEDY_TOKENS, end_ids)
    progress("golden", len(prompts) + 1, len(prompts) + 1)
    return GoldenRecord(
        prompts=list(prompts),
        top_ids=np.concatenate(parts["ids"]),
        top_logits=np.concatenate(parts["top"]),
        sampled_ids=sampled,
        sampled_logits=np.concatenate(parts["sampled"]),
        logsumexp=np.concatenate(parts["lse"]),
        projection=projection,
        hidden_projection=np.concatenate(parts["projected"], axis=1),
        hidden_norm=np.concatenate(parts["norm"], axis=1),
        greedy_prompt=greedy_prompt,
        greedy_ids=greedy,
        greedy_margins=margins,
        vocab_size=runtime.vocab_size,
        tokenizer_length=tokenizer_length,
        how={
            "runtime": runtime.name,
            "dtype": "float32",
            "machine": platform.machine(),
            "one_pass_against_steps_max_abs": step_difference,
            **versions(),
        },
    )


def golden_prompts(
    tokenizer: Any, context_length: int, *, chat_text: str | None, vocab_size: int
) -> tuple[list[Prompt], int]:
    """The prompts of a record, none longer than the context, with at least `MIN_POSITIONS` positions in all.

    Returns them with the number of the one that greedy decoding continues (room is left for it where it can be).
    """
    from pit_deploy.quantize.calibration import evaluation_text

    def encode(text: str, limit: int, add_special_tokens: bool = True) -> Prompt:
        encoded = tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        ids = [i for i in encoded if i < vocab_size]
        kept = ids[:limit]
        return Prompt(
            text if len(kept) == len(ids) else tokenizer.decode(kept, skip_special_tokens=False), kept
        )

    first = max(
        1, min(64, context_length - GREEDY_TOKENS if context_length > GREEDY_TOKENS else context_length // 2)
    )
    if chat_text is None:
        prompts = [encode("The history of the printing press began", first)]
    else:
        prompts = [encode(chat_text, first, add_special_tokens=False)]
    prompts += [encode(text, context_length) for text in TEXTS]
    prose = encode(evaluation_text(), 10**9).ids
    longest = min(context_length, 224)
    start = 0
    while sum(len(p.ids) for p in prompts) < MIN_POSITIONS and start < len(prose):
        ids = prose[start : start + longest]
        prompts.append(Prompt(tokenizer.decode(ids, skip_special_tokens=False), ids))
        start += longest
    return [p for p in prompts if p.ids], 0


def greedy_continuation(
    runtime: FullRuntime, ids: Sequence[int], count: int, end_ids: Sequence[int]
) -> tuple[list[int], list[float]]:
    """Up to `count` greedy ids after `ids` (an end id is kept and ends it), and each step's margin."""
    runtime.reset()
    logits = runtime.prefill(ids)
    found: list[int] = []
    margins: list[float] = []
    room = runtime.context_length - len(ids) + 1
    for _ in range(min(count, room)):
        best, second = _largest(logits, 2)
        found.append(int(best))
        margins.append(float(logits[best] - logits[second]))
        if found[-1] in end_ids or runtime.position >= runtime.context_length:
            break
        logits = runtime.decode(found[-1])
    runtime.reset()
    return found, margins


def project(states: np.ndarray, projection: np.ndarray) -> np.ndarray:
    """Hidden states [..., hidden_size] to [..., PROJECTED], computed in float64."""
    return (states.astype(np.float64) @ projection.astype(np.float64)).astype(np.float32)


def logsumexp(logits: np.ndarray) -> np.ndarray:
    """Over the last axis, float64."""
    if logits.ndim > 1:  # row by row: a float64 copy of all logits of a large vocabulary is not held
        return np.array([logsumexp(row) for row in logits])
    largest = np.float64(logits.max())
    return np.asarray(largest + np.log(np.exp(logits - largest, dtype=np.float64).sum()))


def versions() -> dict[str, str]:
    """Versions of what computes, where it is installed."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for package in ("pit-deploy", "torch", "transformers", "numpy", "onnx", "onnx-ir", "onnxruntime"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _largest(row: np.ndarray, count: int) -> np.ndarray:
    """Ids of the `count` largest values, descending; of equal ones the lowest id first. int32."""
    ids = np.sort(np.argpartition(-row, min(count, len(row) - 1))[:count])
    least = row[ids].min()
    # At the edge argpartition takes any of several equal values: take those with the lowest ids.
    sure = ids[row[ids] > least]
    ids = np.sort(np.concatenate([sure, np.flatnonzero(row == least)[: count - len(sure)]]))
    return ids[np.argsort(-row[ids], kind="stable")].astype(np.int32)


def _step_difference(runtime: FullRuntime, ids: Sequence[int], logits: np.ndarray) -> float:
    """How far token-by-token decoding lies from one pass in the reference itself."""
    runtime.reset()
    worst = 0.0
    for number, id in enumerate(ids[:STEPS]):
        worst = max(worst, float(np.abs(runtime.decode(id) - logits[number]).max()))
    runtime.reset()
    return worst
