"""Text to packed blocks of token ids.

A source is a UTF-8 text file (one document), a `.jsonl` file (one document a line, in its field `text`), or
`datasets:NAME` or `datasets:NAME:SPLIT` (the column `text`). Documents are joined by the model's end id and cut
into blocks of equal length, without padding; what is left over at the end is dropped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pit_deploy.errors import InputError
from pit_deploy.extras import require

FIELD = "text"
_BATCH = 256


class Blocks(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Blocks [count, length] of token ids as a dataset of a language model: labels are the ids themselves."""

    def __init__(self, ids: np.ndarray) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        block = torch.from_numpy(self.ids[index].astype(np.int64))
        return {"input_ids": block, "labels": block}


def read_tokens(sources: Sequence[str | Path], tokenizer: Any, end_id: int | None) -> np.ndarray:
    """Token ids of all sources in order, int32 [tokens], `end_id` (if any) after each document.

    All of them are held in memory, 4 bytes each. Raises `InputError` for sources that cannot be read or hold no
    text.
    """
    parts: list[np.ndarray] = []
    for source in sources:
        found = 0
        for batch in _batched(_documents(str(source)), _BATCH):
            for encoding in tokenizer.encode_batch(batch, add_special_tokens=False):
                ids = encoding.ids if end_id is None else [*encoding.ids, end_id]
                found += len(encoding.ids)
                parts.append(np.asarray(ids, np.int32))
        if not found:
            raise InputError(f"{source} holds no text; give a file with some.")
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def pack(tokens: np.ndarray, length: int) -> np.ndarray:
    """`tokens` cut into blocks, [count, length]; the rest is dropped."""
    count = len(tokens) // length
    return tokens[: count * length].reshape(count, length)


def split_held_out(blocks: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Blocks to train on and the last `share` of them, at least one, to evaluate on.

    Raises `InputError` where that leaves nothing to train on.
    """
    held = max(1, round(share * len(blocks))) if share > 0 else 0
    if len(blocks) - held < 1:
        raise InputError(
            f"The text makes {len(blocks)} blocks of {blocks.shape[1]} tokens, too few to train on and to hold "
            f"{held} back; give more text or a shorter --block-length."
        )
    return blocks[: len(blocks) - held], blocks[len(blocks) - held :]


def english_text() -> str:
    """Prose of Python's help topics that neither the calibration nor the evaluation text shares, for short trainings.

    Raises `InputError` on a Python without `pydoc_data`.
    """
    from pit_deploy.quantize.calibration import calibration_text, evaluation_text, help_topics, paragraphs

    kept_apart = {p for text in (calibration_text(), evaluation_text()) for p in text.strip().split("\n\n")}
    topics = help_topics()
    found = dict.fromkeys(p for name in sorted(topics) for p, prose in paragraphs(topics[name]) if prose)
    return "\n\n".join(p for p in found if p not in kept_apart) + "\n"


def _documents(source: str) -> Iterator[str]:
    if source.startswith("datasets:"):
        return _dataset(source)
    path = Path(source)
    if not path.is_file():
        raise InputError(
            f"{source} is no file; give a text file, a .jsonl file, or datasets:NAME for a data set of that name."
        )
    return _json_lines(path) if path.suffix == ".jsonl" else iter([_text(path)])


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start}); give plain text.") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from error


def _json_lines(path: Path) -> Iterator[str]:
    for number, line in enumerate(_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{path} line {number} is not valid JSON: {error.msg}.") from error
        if not isinstance(value, dict) or not isinstance(value.get(FIELD), str):
            raise InputError(
                f'{path} line {number} has no string under "{FIELD}"; each line is {{"text": ...}}.'
            )
        yield value[FIELD]


def _dataset(source: str) -> Iterator[str]:
    datasets = require("datasets", "train")
    _, name, *split = source.split(":", 2)
    try:
        rows = datasets.load_dataset(name, split=split[0] if split else "train")
    except Exception as error:  # the library raises many kinds; each is about the user's name or the network
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"{source} cannot be loaded: {reason[:300]}") from error
    if FIELD not in rows.column_names:
        raise InputError(
            f"{source} has the columns {', '.join(rows.column_names)}; one named {FIELD} is needed."
        )
    return (str(row[FIELD]) for row in rows)


def _batched(documents: Iterable[str], size: int) -> Iterator[list[str]]:
    batch: list[str] = []
    for document in documents:
        batch.append(document)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
