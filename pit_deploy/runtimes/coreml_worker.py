"""The child process of `coreml`: it loads the packages and answers calls over standard input and output.

`python -m pit_deploy.runtimes.coreml_worker` is not for people.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from pit_deploy.runtimes.messages import receive, send


class Model(Protocol):
    """What answers calls: Core ML itself, or in tests the evaluator."""

    def predict(self, key: str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]: ...

    def clear(self) -> None: ...


class CoreMLModel:
    """The functions of the packages in Core ML. All of them share one state, made by the first that has any."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        import coremltools

        units = {
            "all": coremltools.ComputeUnit.ALL,
            "cpuAndGPU": coremltools.ComputeUnit.CPU_AND_GPU,
            "cpuAndNeuralEngine": coremltools.ComputeUnit.CPU_AND_NE,
            "cpuOnly": coremltools.ComputeUnit.CPU_ONLY,
        }[request["compute_units"]]
        self._models = {}
        for key, (package, function) in request["functions"].items():
            chosen = {} if function == "main" else {"function_name": function}
            self._models[key] = coremltools.models.MLModel(package, compute_units=units, **chosen)
        self._stateful = bool(request["stateful"])
        self._state: Any = None
        self.clear()

    def predict(self, key: str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        given = {"state": self._state} if self._stateful else {}
        found = self._models[key].predict(dict(inputs), **given)
        return {name: np.asarray(value) for name, value in found.items()}

    def clear(self) -> None:
        if self._stateful:
            self._state = next(iter(self._models.values())).make_state()


class EvaluatorModel:
    """The same by the evaluator, on any machine: what tests run in place of Core ML."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        from pathlib import Path

        from pit_deploy.runtimes.mil_program import MilProgram

        self._places = request["functions"]
        self._programs = {
            p: MilProgram.open(Path(p)) for p in {package for package, _ in self._places.values()}
        }
        self._state: dict[str, np.ndarray] = {}
        self.clear()

    def predict(self, key: str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        package, function = self._places[key]
        return self._programs[package].run(inputs, self._state, function=function)

    def clear(self) -> None:
        package, function = next(iter(self._places.values()))
        self._state = self._programs[package].new_state(function)


MODELS: dict[str, Callable[[Mapping[str, Any]], Model]] = {"coreml": CoreMLModel, "evaluator": EvaluatorModel}


def main() -> None:
    """Answer until the parent closes the pipe."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not get between the messages
    request, _ = receive(sys.stdin.buffer)
    try:
        model: Model = MODELS[request["model"]](request)
        send(answers, {"ok": True})
    except Exception as error:  # whatever Core ML raises is the parent's to report
        send(answers, {"ok": False, "error": f"{type(error).__name__}: {error}"})
        return
    while True:
        try:
            head, inputs = receive(sys.stdin.buffer)
        except EOFError:
            return
        try:
            if head["do"] == "clear":
                model.clear()
                send(answers, {"ok": True})
            else:
                send(answers, {"ok": True}, model.predict(head["function"], inputs))
        except Exception as error:  # likewise
            send(answers, {"ok": False, "error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
