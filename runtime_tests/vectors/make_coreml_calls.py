"""Write coreml_calls.json: `python runtime_tests/vectors/make_coreml_calls.py`.

How the functions of a Core ML program are called, as pit_deploy/runtimes/coreml_sequence.py does it: which function,
with which ids, position and last token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pit_deploy.manifest import CoreMLFunction, Manifest
from pit_deploy.manifest_reader import parse_manifest
from pit_deploy.runtimes.coreml_sequence import CoreMLSequence

HERE = Path(__file__).resolve().parent
MANIFEST = "manifests/good_coreml.json"


class _Sequence(CoreMLSequence):
    """A sequence whose calls are only counted."""

    name = "none"

    def call(self, function: CoreMLFunction, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        raise NotImplementedError

    def clear(self) -> None:
        raise NotImplementedError


def profiles() -> dict[str, dict[str, Any]]:
    """Manifests by name: with states, a cache longer than the context, caches passed in and out, decode alone."""
    manifest = json.loads((HERE / MANIFEST).read_text(encoding="utf-8"))
    functions = manifest["coreml"]["functions"]
    small = [functions[0] | {"tokens": 8}, functions[1]]
    states = [state | {"output": state["name"] + "_out"} for state in manifest["states"]]
    shape = manifest["states"][0]["shape"]
    short = [state | {"shape": [*shape[:2], 20, shape[3]]} for state in manifest["states"]]
    without_last = [value for value in functions[0]["inputs"] if value["name"] != "last"]
    every = [small[0] | {"inputs": without_last}, functions[1]]
    return {
        "states": _changed(manifest, small, manifest["states"], 128),
        "states, a short cache": _changed(manifest, small, short, 20),
        "states, logits of all positions": _changed(manifest, every, manifest["states"], 128)
        | {"logits": "all"},
        "caches passed": _changed(manifest, small, states, 128),
        "decode alone": _changed(manifest, [functions[1]], manifest["states"], 128),
    }


def _changed(
    manifest: dict[str, Any], functions: list[dict[str, Any]], states: list[dict[str, Any]], context: int
) -> dict[str, Any]:
    program = manifest["coreml"] | {"functions": functions}
    return manifest | {"coreml": program, "states": states, "context_length": context}


def document() -> dict[str, Any]:
    cases = []
    for name, data in profiles().items():
        manifest = parse_manifest(json.dumps(data))
        for position in (0, 1, 5, 11, 13):
            for count in (1, 3, 4, 7, 8, 9, 16, 21):
                if position + count <= manifest.context_length:
                    cases.append(
                        {"profile": name, "position": position, "tokens": count}
                        | _calls(manifest, position, count)
                    )
    return {"format": 1, "manifests": profiles(), "cases": cases}


def _calls(manifest: Manifest, position: int, count: int) -> dict[str, Any]:
    sequence = _Sequence(manifest)
    sequence._position = position
    calls = []
    for call in sequence.calls(range(1, count + 1)):
        inputs = sequence.inputs_of(call)
        calls.append(
            {
                "function": call.function.name,
                "input_ids": inputs["input_ids"][0].tolist(),
                "position": int(inputs["position"][0]),
                "last": int(inputs["last"][0]) if "last" in inputs else None,
                "real": [call.real.start, call.real.stop],
            }
        )
    return {"calls": calls, "position_after": sequence.position}


def documents() -> dict[str, str]:
    """File name to text, as it lies in this folder."""
    made = document()
    dump = lambda value: json.dumps(value, ensure_ascii=False, separators=(",", ":"))  # noqa: E731
    manifests = ",\n".join(f"  {dump(name)}: {dump(value)}" for name, value in made["manifests"].items())
    cases = ",\n".join(f"  {dump(case)}" for case in made["cases"])
    text = f'{{\n "format": 1,\n "manifests": {{\n{manifests}\n }},\n "cases": [\n{cases}\n ]\n}}\n'
    return {"coreml_calls.json": text}


if __name__ == "__main__":
    for file, text in documents().items():
        (HERE / file).write_text(text, encoding="utf-8", newline="\n")
