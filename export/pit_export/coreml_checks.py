"""What must hold of a package before it is a bundle's: each check reads the file from disk and runs it.

The trouble with Core ML is what it accepts in silence: a cache whose write was dropped while tracing, a norm whose
square overflows float16, an op that the older system has not. Every one of them gives a package that loads.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from coremltools.converters.mil.mil.ops.registry import SSAOpRegistry

from pit_deploy.errors import ParityError
from pit_deploy.runtimes.mil_program import MilFunction, MilProgram, State

MASSIVE = 24_000.0
"""An activation as large as those of real models (SmolLM2-135M: 23,800), whose square float16 cannot hold."""
ROUNDING_LIMIT, MASSIVE_LIMIT = 0.1, 0.1
"""How far float16 may take the logits: RMS of the difference over their standard deviation."""
LAYOUT_LIMIT = 0.05
"""How far the caches after one call and after single tokens may be apart, over the largest number in them."""
_STALE = 40.0
_AGREEING_TOKENS = 4
"""Tokens of the prompt that all functions must cache alike."""


@dataclass(frozen=True)
class Place:
    """Where a function is."""

    name: str
    """`prefill` or `decode`."""
    file: str
    """Package, relative to the bundle."""
    function: str
    """Its name inside the package."""
    tokens: int


def check_packages(
    directory: Path, places: Sequence[Place], hidden_states: Sequence[str], tokenizer_length: int
) -> dict[str, MilFunction]:
    """Open the packages, one at a time, and make every check; returns what their functions take and give, by the name
    of their place, without constants and steps.

    Raises `ParityError` for the first check that fails, with the function and the state or op.
    """
    functions: dict[str, MilFunction] = {}
    caches: dict[str, State] = {}
    count = min(_AGREEING_TOKENS, max(place.tokens for place in places))
    for file in dict.fromkeys(place.file for place in places):
        inside = [place for place in places if place.file == file]
        for runs in _checked(directory / file, inside, hidden_states, tokenizer_length):
            functions[runs.place.name] = replace(runs.function, constants={}, steps=[])
            if len(places) > 1:
                caches[runs.place.name] = runs.first_tokens(count)
        del runs  # and with it the package: the two of a stateless bundle have a copy of the weights each
    check_same_states(directory, functions)
    _check_agreement(directory, caches)
    return {place.name: functions[place.name] for place in places}


def _checked(
    path: Path, places: Sequence[Place], hidden_states: Sequence[str], tokenizer_length: int
) -> Iterator[_Runs]:
    """The functions of one package, each after its checks."""
    program = MilProgram.open(path)
    for place in places:
        runs = _Runs(program, place, tokenizer_length)
        check_operations(program, runs.function)
        check_states_written(program, runs.function)
        runs.check(hidden_states)
        yield runs


def check_operations(program: MilProgram, function: MilFunction) -> None:
    """Every op must be one of the system that the package is made for."""
    version = program.specification_version
    for op in sorted(function.op_types() - {"write_state"} | program.constant_ops - {"const"}):
        versions = [int(target) for target in SSAOpRegistry.core_ops.get(op, {})]
        if not versions or min(versions) > version:
            since = f"it is there from version {min(versions)} on" if versions else "no version of MIL has it"
            raise ParityError(
                f"{program.path}: function {function.name} has the op {op}, which specification version {version} does "
                f"not know ({since}); the package would not load."
            )


def check_states_written(program: MilProgram, function: MilFunction) -> None:
    """Every state must be written: tracing drops a write in silence where it does not understand it."""
    for name in sorted(function.states.keys() - function.written_states()):
        raise ParityError(
            f"{program.path}: function {function.name} never writes its state {name} (there is no coreml_update_state "
            f"for it), so that its cache stays empty; write the cache by slices with integer bounds."
        )


def check_same_states(directory: Path, functions: Mapping[str, MilFunction]) -> None:
    """All functions must agree on the names, types and shapes of their states."""
    first, *others = functions.items()
    for name, function in others:
        if function.states != first[1].states:
            raise ParityError(
                f"{directory}: the functions {first[0]} and {name} do not agree on their states: {first[1].states} and "
                f"{function.states}."
            )


class _Runs:
    """Calls of one function, and what must hold of their results."""

    def __init__(self, program: MilProgram, place: Place, tokenizer_length: int) -> None:
        self.program, self.place, self.tokens = program, place, tokenizer_length
        self.function = program.functions[place.function]
        self.ids = self._prompt(place.tokens)
        self.caches = {n: k for n, k in self.function.inputs.items() if n.endswith("_cache")}

    def check(self, hidden_states: Sequence[str]) -> None:
        """Outputs finite, states changed, empty slots unseen, large activations survived."""
        state = self.empty()
        before = {name: value.copy() for name, value in state.items()}
        logits = self.call(self.ids, 0, state)
        self._check_finite(logits, "on ordinary tokens")
        exact = self.call(self.ids, 0, self.empty(), rounding=False)
        self._check_close(logits, exact, ROUNDING_LIMIT, "float16 changes the logits")
        for name, value in state.items():
            if np.array_equal(value, before[name]):
                raise ParityError(
                    f"{self._where}: the state {name} did not change in a run; it is not written."
                )
        self._check_masked(logits)
        self._check_massive(hidden_states[0])

    def call(
        self,
        ids: np.ndarray,
        position: int,
        state: State,
        *,
        rounding: bool | None = None,
        given: Mapping[str, np.ndarray] | None = None,
    ) -> np.ndarray:
        """Logits of the last token, ids without a token aside; `state`, passed or not, is brought up to date."""
        inputs = {"input_ids": ids[None], "position": np.array([position], np.int32)}
        if "last" in self.function.inputs:
            inputs["last"] = np.array([len(ids) - 1], np.int32)
        inputs |= {name: state[name] for name in self.caches}
        outputs = self.program.run(
            inputs, state, function=self.place.function, rounding=rounding, given=given
        )
        state.update({name: outputs[f"{name}_out"] for name in self.caches})
        logits: np.ndarray = outputs["logits"][0, -1]
        return logits[: self.tokens]

    def first_tokens(self, count: int) -> State:
        """What the caches hold of the first `count` tokens: of one call where it takes as many, else of one each."""
        state = self.empty()
        if self.place.tokens < count:
            for position, token in enumerate(self._prompt(count)):
                self.call(np.array([token]), position, state)
        elif self.caches:  # passed caches are padded on the left
            before = self.place.tokens - count
            self.call(np.concatenate([np.zeros(before, np.int32), self.ids[:count]]), -before, state)
        else:
            self.call(self.ids, 0, state)
        tokens = slice(-count, None) if self.caches else slice(0, count)
        return {name: value[:, :, tokens].copy() for name, value in state.items()}

    def empty(self, value: float = 0.0) -> State:
        """Caches full of `value`."""
        kinds = {**self.function.states, **self.caches}
        return {name: np.full(kind.shape, value, np.float32) for name, kind in kinds.items()}

    def _check_masked(self, logits: np.ndarray) -> None:
        """What lies in the cache past the tokens must not count, and rows that see nothing must stay finite."""
        stale = self.call(self.ids, 0, self.empty(_STALE))
        self._check_finite(stale, "with old numbers in the cache")
        if not np.array_equal(stale, logits):
            difference = float(np.abs(stale - logits).max())
            raise ParityError(
                f"{self._where}: what the cache holds past the tokens changes the logits by {difference:.3g}; the mask "
                f"does not hide it."
            )
        if self.caches and self.place.tokens > 1:  # the first tokens of a prompt are padded on the left
            padded = self.empty()
            self._check_finite(self.call(self.ids, 1 - self.place.tokens, padded), "on a padded prompt")
            for name, value in padded.items():
                self._check_finite(value, f"in {name} after a padded prompt")

    def _check_massive(self, embedding: str) -> None:
        """A residual stream with one channel at 24,000 must come out as it does without float16."""
        found = self.program.run(
            self._inputs(), self.empty(), function=self.place.function, also=[embedding]
        )[embedding]
        planted = found.copy()
        axis = 1 if planted.ndim == 4 else -1  # [1, features, 1, tokens] or [1, tokens, features]
        np.moveaxis(planted, axis, 0)[planted.shape[axis] // 2] = MASSIVE
        given = {embedding: planted}
        logits = self.call(self.ids, 0, self.empty(), given=given)
        self._check_finite(logits, f"with an activation of {MASSIVE:g}")
        exact = self.call(self.ids, 0, self.empty(), rounding=False, given=given)
        self._check_close(
            logits, exact, MASSIVE_LIMIT, f"float16 changes the logits after an activation of {MASSIVE:g}"
        )

    def _inputs(self) -> dict[str, np.ndarray]:
        inputs = {"input_ids": self.ids[None], "position": np.array([0], np.int32)}
        if "last" in self.function.inputs:
            inputs["last"] = np.array([0], np.int32)
        return inputs | {name: np.zeros(kind.shape, np.float32) for name, kind in self.caches.items()}

    def _prompt(self, count: int) -> np.ndarray:
        return ((7 + 13 * np.arange(count)) % self.tokens).astype(np.int32)

    def _check_finite(self, value: np.ndarray, when: str) -> None:
        if not np.isfinite(value).all():
            count = int((~np.isfinite(value)).sum())
            raise ParityError(f"{self._where}: {count} of {value.size} numbers are not finite {when}.")

    def _check_close(self, found: np.ndarray, exact: np.ndarray, limit: float, what: str) -> None:
        spread = float(exact.std()) or 1.0
        error = float(np.sqrt(np.mean((found - exact) ** 2))) / spread
        if not error <= limit:
            raise ParityError(f"{self._where}: {what} by {error:.2g} of their spread, more than {limit:g}.")

    @property
    def _where(self) -> str:
        return f"{self.program.path}: function {self.place.function}"


def _check_agreement(directory: Path, caches: Mapping[str, State]) -> None:
    """A prompt in one call and token by token must leave the same caches: first tokens by function and state."""
    for (name, state), (other, stepped) in itertools.pairwise(caches.items()):
        for cache, value in stepped.items():
            difference = np.abs(value - state[cache]).max()
            if not difference <= LAYOUT_LIMIT * np.abs(value).max():
                raise ParityError(
                    f"{directory}: the functions {name} and {other} do not write the state {cache} alike: the same "
                    f"tokens differ by {difference:.3g}."
                )
