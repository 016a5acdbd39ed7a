"""What the manifest says of Core ML packages: functions, sizes by part, and the unit that each part suits."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pit_deploy.architecture import DecoderConfig
from pit_deploy.runtimes.mil_program import MilFunction, TensorType
from pit_export.coreml_cache import KEYS, VALUES, next_name
from pit_export.coreml_checks import Place
from pit_export.coreml_graph import SPECIFICATION, Constant
from pit_export.coreml_profiles import HEAD_ROWS, Profile

_DTYPES = {"fp16": "float16", "fp32": "float32", "int32": "int32"}
_CACHES = (KEYS, VALUES)


@dataclass(frozen=True)
class Description:
    """The manifest's `inputs`, `outputs`, `states` and `coreml`."""

    inputs: list[dict[str, Any]]
    outputs: list[dict[str, Any]]
    states: list[dict[str, Any]]
    coreml: dict[str, Any]


def describe(
    places: Sequence[Place],
    functions: Mapping[str, MilFunction],
    profile: Profile,
    config: DecoderConfig,
    sizes: Mapping[str, int],
    dtype: str,
) -> Description:
    """Put together what the packages themselves say; `sizes` are bytes by part (`part_sizes`)."""
    widest = max(places, key=lambda place: place.tokens)
    inputs = _values(functions[widest.name].inputs, widest.tokens)
    outputs = _values(functions[widest.name].outputs, widest.tokens)
    return Description(
        inputs=[value for value in inputs if value["name"] not in _CACHES],
        outputs=[value for value in outputs if value["name"] == "logits"],
        states=_states(functions[widest.name]),
        coreml={
            "specification_version": SPECIFICATION[profile.target],
            "minimum_system": profile.target,
            "compute_units": profile.units,
            "functions": [
                {
                    "name": place.name,
                    "package": place.file,
                    "function": place.function,
                    "tokens": place.tokens,
                    "inputs": _values(functions[place.name].inputs),
                    "outputs": _values(functions[place.name].outputs),
                }
                for place in places
            ],
            "parts": [
                {"name": name, "bytes": size, **_advice(name, profile, config, dtype)}
                for name, size in sizes.items()
            ],
        },
    )


def part_sizes(stored: Mapping[str, Constant]) -> dict[str, int]:
    """Bytes of the constants by part: `embedding`, `layers.N`, `head`, `other`, in the order of the model."""
    sizes: dict[str, int] = {}
    for name, constant in stored.items():
        sizes[_part(name)] = sizes.get(_part(name), 0) + constant.nbytes
    numbers = sorted(int(name.removeprefix("layers.")) for name in sizes if name.startswith("layers."))
    order = ["embedding", *(f"layers.{n}" for n in numbers), "head", "other"]
    return {name: sizes[name] for name in order if name in sizes}


def _part(name: str) -> str:
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if layer:
        return f"layers.{layer.group(1)}"
    if name.startswith(("model.embed_tokens", "pit.table", "pit.embedding_map")):
        return "embedding"
    return "head" if name.startswith(("lm_head", "pit.head_map", "model.norm")) else "other"


def _advice(name: str, profile: Profile, config: DecoderConfig, dtype: str) -> dict[str, Any]:
    """The compute unit that a part suits, by what is known of the units' limits; a Mac shows what Core ML chooses."""
    if dtype == "fp32":
        return {"unit": "gpu", "reason": "the Neural Engine has no float32"}
    if profile.forms == "blocks":
        return {"unit": "gpu", "reason": "scales by block are made for the GPU"}
    if name == "embedding":
        return {"unit": "cpu", "reason": "a lookup by integer ids, which the Neural Engine does not take"}
    if name == "other":
        return {"unit": "cpu", "reason": "positions and masks are made of integers, once a call"}
    widest = max(config.hidden_size, config.intermediate_size, config.query_size)
    if name != "head" and widest > HEAD_ROWS:
        reason = f"{widest} channels are more than the {HEAD_ROWS} that the Neural Engine takes"
        return {"unit": "gpu", "reason": reason}
    if not profile.channel_major:
        if name == "head" and config.vocab_size > HEAD_ROWS:
            return {"unit": "gpu", "reason": f"{config.vocab_size} rows in one product are past {HEAD_ROWS}"}
        return {
            "unit": "gpu",
            "reason": "the cache passes through memory, and products are not 1x1 convolutions",
        }
    reason = "1x1 convolutions of static shape" + (f", {HEAD_ROWS} rows at most" if name == "head" else "")
    return {"unit": "neural_engine", "reason": reason}


def _values(values: Mapping[str, TensorType], tokens: int | None = None) -> list[dict[str, Any]]:
    """In the manifest's terms. `tokens` names the dimension that is the number of new tokens, where it differs by
    function: the second one of ids and logits."""
    described = []
    for name, kind in values.items():
        shape: list[int | str] = list(kind.shape)
        if (
            tokens is not None
            and tokens > 1
            and len(shape) > 1
            and shape[1] == tokens
            and name not in _CACHES
        ):
            shape[1] = "tokens"
        described.append({"name": name, "dtype": _DTYPES[kind.dtype], "shape": shape})
    return described


def _states(function: MilFunction) -> list[dict[str, Any]]:
    if function.states:
        return [{**value, "output": None} for value in _values(function.states)]
    passed = {name: kind for name, kind in function.inputs.items() if name in _CACHES}
    return [{**value, "output": next_name(value["name"])} for value in _values(passed)]
