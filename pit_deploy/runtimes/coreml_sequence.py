"""How the functions of a Core ML program are called for one sequence, whoever runs them.

An app does the same (docs/coreml.md): prompts go through the function `prefill` in pieces of fixed size, padded
where they are shorter, single tokens through `decode`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pit_deploy.manifest import BundleError, CoreMLFunction, Manifest
from pit_deploy.runtimes.base import check_room

FEWEST_FOR_PREFILL = 4
"""Fewer tokens go one by one: a padded call costs about as much."""


@dataclass(frozen=True)
class Call:
    """One call of a function: `ids` as padded, `position` of the first of them, and which of them are real."""

    function: CoreMLFunction
    ids: np.ndarray
    position: int
    real: slice


class CoreMLSequence(ABC):
    """One sequence in the cache of a Core ML program; implements the protocol `Runtime`."""

    name: str

    def __init__(self, manifest: Manifest) -> None:
        program = manifest.coreml
        if program is None:
            raise BundleError("bad_value", "The manifest has no field coreml; export the bundle again.")
        self.program = program
        self.context_length, self.vocab_size = manifest.context_length, manifest.vocab_size
        self.functions = {function.name: function for function in program.functions}
        if "decode" not in self.functions:
            raise BundleError(
                "bad_value", "The manifest's coreml has no function decode; export the bundle again."
            )
        self.is_passed = any(state.output is not None for state in manifest.states)
        self.cache_length = int(manifest.states[0].shape[2]) if manifest.states else self.context_length
        self._position = 0

    @property
    def position(self) -> int:
        """Tokens in the cache."""
        return self._position

    @abstractmethod
    def call(self, function: CoreMLFunction, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run a function on its inputs, caches aside, which the implementation keeps."""

    @abstractmethod
    def clear(self) -> None:
        """Make the cache new."""

    def prefill(self, ids: Sequence[int]) -> np.ndarray:
        """Append `ids` and return the logits of the last position, [vocab_size]."""
        check_room(self, ids)
        logits = np.empty(0, np.float32)
        for call in self.calls(ids):
            logits = self._logits(call)
        return logits

    def decode(self, id: int) -> np.ndarray:
        """Append one id and return its logits, [vocab_size]."""
        return self.prefill([id])

    def reset(self) -> None:
        """Empty the cache."""
        self.clear()
        self._position = 0

    def calls(self, ids: Sequence[int]) -> Iterator[Call]:
        """The calls that append `ids`, in order; the position moves on as they are taken."""
        rest = [int(id) for id in ids]
        while rest:
            call = self._next_call(rest)
            yield call
            count = len(range(*call.real.indices(len(call.ids))))
            self._position += count
            rest = rest[count:]

    def inputs_of(self, call: Call) -> dict[str, np.ndarray]:
        """What the function takes, caches aside."""
        inputs = {
            "input_ids": call.ids[None].astype(np.int32),
            "position": np.array([call.position], np.int32),
        }
        if any(value.name == "last" for value in call.function.inputs):
            inputs["last"] = np.array([call.real.stop - 1], np.int32)
        return inputs

    def _logits(self, call: Call) -> np.ndarray:
        logits = self.call(call.function, self.inputs_of(call))["logits"][0]
        row: np.ndarray = logits[call.real.stop - 1 if len(logits) > 1 else 0]
        return row.astype(np.float32, copy=False)

    def _next_call(self, rest: list[int]) -> Call:
        prefill = self.functions.get("prefill")
        if prefill is None or len(rest) < min(FEWEST_FOR_PREFILL, prefill.tokens):
            return self._single(rest)
        size = prefill.tokens
        if self.is_passed:
            # The newest token is the last one, so that padding can only stand before the first token of all.
            if self._position and len(rest) < size:
                return self._single(rest)
            count = size if self._position else (len(rest) - 1) % size + 1
            padded = np.zeros(size, np.int32)
            padded[size - count :] = rest[:count]
            return Call(prefill, padded, self._position - (size - count), slice(size - count, size))
        if self._position + size > self.cache_length:
            return self._single(rest)
        count = min(size, len(rest))
        padded = np.zeros(size, np.int32)
        padded[:count] = rest[:count]  # what is written for the padding lies past the position, and is masked
        return Call(prefill, padded, self._position, slice(0, count))

    def _single(self, rest: list[int]) -> Call:
        return Call(self.functions["decode"], np.array(rest[:1], np.int32), self._position, slice(0, 1))
