"""The evaluator as a runtime: a Core ML bundle on any machine, op by op (`mil_program`).

It is slow and exact in its own way: every op in float32, rounded to the type that the program declares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pit_deploy.bundle import Bundle
from pit_deploy.manifest import BundleError, CoreMLFunction
from pit_deploy.runtimes.base import check_room
from pit_deploy.runtimes.coreml_sequence import CoreMLSequence
from pit_deploy.runtimes.mil_program import MilFunction, MilProgram, State

_DTYPES = {"fp16": "float16", "fp32": "float32", "int32": "int32"}


class MilRuntime(CoreMLSequence):
    """One sequence in the evaluator; implements `FullRuntime`.

    `rounding` False runs the same program without rounding to fp16. Raises `BundleError` where the packages are not
    what the manifest says, and `InputError` for an op that the evaluator does not know.
    """

    name = "mil"

    def __init__(self, bundle: Bundle, *, rounding: bool = True) -> None:
        super().__init__(bundle.manifest)
        self.bundle = bundle
        packages = dict.fromkeys(function.package for function in self.program.functions)
        self.programs = {p: MilProgram.open(bundle.file(p), rounding=rounding) for p in packages}
        for function in self.program.functions:
            self._check(function)
        self._hidden_states = list(bundle.manifest.hidden_states)
        self._state: State = {}
        self.clear()

    def call(
        self, function: CoreMLFunction, inputs: Mapping[str, np.ndarray], also: Sequence[str] = ()
    ) -> dict[str, np.ndarray]:
        passed = {name: self._state[name] for name in self._passed}
        program = self.programs[function.package]
        found = program.run({**inputs, **passed}, self._state, function=function.function, also=also)
        self._state.update({name: found[output] for name, output in self._passed.items()})
        return found

    def clear(self) -> None:
        manifest = self.bundle.manifest
        self._passed = {s.name: s.output for s in manifest.states if s.output is not None}
        self._state = {s.name: np.zeros([int(n) for n in s.shape], np.float32) for s in manifest.states}

    def all_logits(self, ids: Sequence[int]) -> np.ndarray:
        """Logits of every position of `ids` from an empty cache, [tokens, vocab_size]; leaves it empty."""
        return self._run_all(ids, [])[1]

    def hidden_states(self, ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """From an empty cache, which stays empty: the residual stream after the embedding and after each layer,
        [num_hidden_layers + 1, tokens, hidden_size], and the logits [tokens, vocab_size]."""
        return self._run_all(ids, self._hidden_states)

    def _run_all(self, ids: Sequence[int], names: list[str]) -> tuple[np.ndarray, np.ndarray]:
        self.reset()
        check_room(self, ids)
        states: list[np.ndarray] = []
        logits: list[np.ndarray] = []
        for call in self.calls(ids):
            inputs = self.inputs_of(call)
            if "last" in inputs:  # the evaluator is not bound to one token here, as Core ML is
                inputs["last"] = np.arange(call.real.start, call.real.stop, dtype=np.int32)
            found = self.call(call.function, inputs, names)
            rows = found["logits"][0]
            logits.append(rows if "last" in inputs else rows[call.real])
            if names:
                states.append(np.stack([_rows(found[name])[call.real] for name in names]))
        self.reset()
        return np.concatenate(states, 1) if states else np.empty(0), np.concatenate(logits)

    def _check(self, function: CoreMLFunction) -> None:
        """The manifest's words against the package."""
        program = self.programs[function.package]
        where = f"{program.path}: function {function.function}"
        if function.function not in program.functions:
            raise BundleError(
                "bad_value", f"{where} is in the manifest and not there; export the bundle again."
            )
        if program.specification_version != self.program.specification_version:
            raise BundleError(
                "bad_value",
                f"{program.path} has specification version {program.specification_version}, and the manifest says "
                f"{self.program.specification_version}; export the bundle again.",
            )
        found = program.functions[function.function]
        manifest = self.bundle.manifest
        caches = [(s.name, s.dtype, list(s.shape)) for s in manifest.states if s.output is None]
        for what, said, there in (
            (
                "inputs",
                [(v.name, v.dtype, list(v.shape)) for v in function.inputs],
                _described(found, "inputs"),
            ),
            (
                "outputs",
                [(v.name, v.dtype, list(v.shape)) for v in function.outputs],
                _described(found, "outputs"),
            ),
            ("states", caches, _described(found, "states")),
        ):
            if said != there:
                raise BundleError(
                    "bad_value",
                    f"{where} has the {what} {there}, and the manifest says {said}; export the bundle again.",
                )


def _described(function: MilFunction, what: str) -> list[tuple[str, str, list[int]]]:
    values = getattr(function, what)
    return [(name, _DTYPES.get(kind.dtype, kind.dtype), list(kind.shape)) for name, kind in values.items()]


def _rows(value: np.ndarray) -> np.ndarray:
    """[tokens, features] of a hidden state in either form: [1, tokens, features] or [1, features, 1, tokens]."""
    return value[0, :, 0].T if value.ndim == 4 else value[0]
