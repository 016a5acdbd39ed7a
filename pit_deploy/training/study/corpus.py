"""Two texts that every Python carries: the standard library's source, and the prose of `help()`.

Both differ a little between Python versions; their hashes are part of the results.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

LENGTH = 128
"""Tokens of a block."""

CHARACTERS = 3_900_000
_LEFT_OUT = ("site-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "encodings", "__pycache__")


@dataclass(frozen=True)
class Corpus:
    """Blocks [count, LENGTH] of one text in one vocabulary, in a fixed random order."""

    train: np.ndarray
    held_out: np.ndarray
    sha256: str


def code() -> str:
    """Source files of the standard library in the order of their paths, about 3.9 million characters."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts, size = [], 0
    for file in sorted(root.rglob("*.py")):
        if any(part in _LEFT_OUT for part in file.relative_to(root).parts):
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        parts.append(text)
        size += len(text)
        if size > CHARACTERS:
            break
    return "\n".join(parts)


def prose() -> str:
    """All help topics of Python, about 700,000 characters of English with some code."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def load(name: str, vocab_size: int, cache: Path) -> Corpus:
    """The corpus `code` or `prose` in the byte-level BPE vocabulary of `vocab_size` tokens learned from `code`."""
    text = {"code": code, "prose": prose}[name]()
    digest = hashlib.sha256(text.encode()).hexdigest()
    file = cache / f"{name}-{vocab_size}-{digest[:12]}.npy"
    if not file.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        ids = np.asarray(tokenizer(vocab_size, cache).encode(text, add_special_tokens=False).ids, np.int32)
        partial = file.with_suffix(".partial.npy")
        np.save(partial, ids)
        partial.replace(file)
    ids = np.load(file)
    blocks = ids[: len(ids) // LENGTH * LENGTH].reshape(-1, LENGTH)
    blocks = blocks[np.random.default_rng(0).permutation(len(blocks))]
    held = min(64, len(blocks) // 10)
    return Corpus(blocks[: len(blocks) - len(blocks) // 10], blocks[-held:], digest)


def tokenizer(vocab_size: int, cache: Path) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    file = cache / f"tokenizer-{vocab_size}.json"
    if not file.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
        made.train_from_iterator([code()], trainer)
        partial = file.with_suffix(".partial.json")
        made.save(str(partial))
        partial.replace(file)
    return Tokenizer.from_file(str(file))
