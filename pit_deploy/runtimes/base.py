"""The protocol that every runtime implements; parity, generation and benchmarks are written once against it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from pit_deploy.errors import ContextFullError, InputError


@runtime_checkable
class Runtime(Protocol):
    """One loaded model with one sequence in its cache.

    Logits are float32 [vocab_size], or [tokens, vocab_size] where said. `prefill` and `decode` append to the
    cache and raise `ContextFullError` before running where the tokens would not fit.
    """

    name: str
    context_length: int
    vocab_size: int

    @property
    def position(self) -> int:
        """Tokens in the cache."""
        ...

    def prefill(self, ids: Sequence[int]) -> np.ndarray:
        """Append `ids` (at least one) and return the logits of the last position."""
        ...

    def decode(self, id: int) -> np.ndarray:
        """Append one id and return its logits."""
        ...

    def reset(self) -> None:
        """Empty the cache."""
        ...


@runtime_checkable
class FullRuntime(Runtime, Protocol):
    """A runtime that can also give every position's logits and the hidden states between layers."""

    def all_logits(self, ids: Sequence[int]) -> np.ndarray:
        """Logits of every position of `ids` from an empty cache, [tokens, vocab_size]; leaves it empty."""
        ...

    def hidden_states(self, ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """From an empty cache: the residual stream after the embedding and after each layer, float32
        [num_hidden_layers + 1, tokens, hidden_size], and the logits [tokens, vocab_size]."""
        ...


@runtime_checkable
class TextRuntime(Protocol):
    """A stock runner: text in, greedy text out, with a tokenizer of its own."""

    name: str

    def generate(
        self, prompt: str, max_new_tokens: int, *, on_text: Callable[[str], None] = lambda text: None
    ) -> str:
        """The greedy continuation of `prompt`, without it. Raises `ContextFullError` before anything runs."""
        ...


@runtime_checkable
class VerifyingRuntime(Runtime, Protocol):
    """A runtime that runs several tokens in one pass as it would one by one, and can take tokens back."""

    def last_logits(self, ids: Sequence[int]) -> np.ndarray:
        """Append `ids` (at least one) and return the logits of each, [tokens, vocab_size].

        Logits and cache are those of `decode` called for one after the other, bit for bit. The array may be
        overwritten by the next call.
        """
        ...

    def rewind(self, position: int) -> None:
        """Take back the tokens from `position` on; `position` is 0 to the present one."""
        ...


def check_room(runtime: Runtime, ids: Sequence[int]) -> None:
    """Raise where `ids` is empty, does not fit into the rest of the context, or holds an unknown id."""
    if len(ids) == 0:
        raise InputError("The prompt has no tokens; give at least one.")
    if runtime.position + len(ids) > runtime.context_length:
        raise ContextFullError(runtime.position, len(ids), runtime.context_length)
    wrong = next((i for i in ids if not 0 <= i < runtime.vocab_size), None)
    if wrong is not None:
        raise InputError(f"Token id {wrong} is outside the vocabulary of {runtime.vocab_size} rows.")
