"""A manifest against the graph that it describes: an app makes room by the first, and the second is what runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pit_deploy.extras import require
from pit_deploy.manifest import BundleError, Manifest, State, Value

if TYPE_CHECKING:
    import onnx

PAST, PRESENT = "past_key_values.", "present."
ROTARY_TABLE = "rotary.cos"
"""[context_length, head_dim / 2]: its rows are the positions that the graph knows."""
ATTENTION = {"default": "GroupQueryAttention", "standard": "Attention"}
"""The attention operator of each profile of the ONNX exporter."""
_QUERY_HEADS = ("num_heads", "q_num_heads")

Described = tuple[str, str, list[int | str]]
"""Name, element type and shape."""


def check_manifest(model_path: Path, manifest: Manifest) -> None:
    """Raise `BundleError` for the first thing that `manifest` says and the graph of `model_path` does not.

    Compared are the profile, the context, the sizes, and names, types and shapes of all inputs and outputs. Weights
    are not read.
    """
    graph = load_model(model_path).graph
    operators = {node.op_type for node in graph.node}
    if manifest.profile not in ATTENTION:
        _refuse(model_path, "profile", repr(manifest.profile), f"known are {', '.join(ATTENTION)}")
    found = [profile for profile, operator in ATTENTION.items() if operator in operators]
    _compare(model_path, "profile", manifest.profile, found)
    _check_sizes(graph, manifest, model_path)
    inputs, outputs = [_describe(v) for v in graph.input], [_describe(v) for v in graph.output]
    for field, said, values in (
        ("inputs", _said(manifest.inputs), _without(inputs, PAST)),
        ("states", _said(manifest.states), [v for v in inputs if v[0].startswith(PAST)]),
        ("outputs", _said(manifest.outputs), _without(outputs, PRESENT)),
    ):
        _compare_values(model_path, field, said, values)
    next_states = [v[0] for v in outputs if v[0].startswith(PRESENT)]
    _compare(model_path, "states", [state.output for state in manifest.states], [next_states])
    made = {name for node in graph.node for name in node.output}
    for name in manifest.hidden_states:
        if name not in made:
            _refuse(model_path, "hidden_states", repr(name), "the graph has no value of that name")


def load_model(model_path: Path) -> onnx.ModelProto:
    """The model without its weights. Raises `BundleError` where the file is none."""
    try:
        model: onnx.ModelProto = require("onnx", "onnx").load(model_path, load_external_data=False)
    except Exception as error:  # protobuf's own classes, which say no more than that it is not a model
        raise unreadable(model_path, error) from error
    return model


def unreadable(model_path: Path, error: Exception) -> BundleError:
    """The error for a file that is no ONNX model, or a malformed one."""
    reason = " ".join(str(error).split())[:200]
    message = f"{model_path} cannot be read as an ONNX model ({reason}); export the bundle again."
    return BundleError("unreadable_file", message)


def _check_sizes(graph: onnx.GraphProto, manifest: Manifest, model_path: Path) -> None:
    sizes = manifest.architecture
    states = [_describe(v)[2] for v in graph.input if v.name.startswith(PAST)]
    positions, half = next(
        (list(t.dims) for t in graph.initializer if t.name == ROTARY_TABLE and len(t.dims) == 2), (0, 0)
    )
    logits = [_describe(v)[2] for v in graph.output if v.name == "logits"]
    attention = [node for node in graph.node if node.op_type == ATTENTION[manifest.profile]]
    heads = [a.i for node in attention for a in node.attribute if a.name in _QUERY_HEADS]
    key_value_heads = [shape[1] if len(shape) == 4 else "another" for shape in states]
    for field, said, found in (
        ("context_length", manifest.context_length, [positions]),
        ("vocab_size", manifest.vocab_size, [shape[-1] for shape in logits if shape]),
        ("logits", manifest.logits, ["last" if shape[1:2] == [1] else "all" for shape in logits]),
        ("architecture.num_hidden_layers", sizes.num_hidden_layers, [len(states) / 2]),
        ("architecture.num_attention_heads", sizes.num_attention_heads, heads),
        ("architecture.num_key_value_heads", sizes.num_key_value_heads, key_value_heads),
        ("architecture.head_dim", sizes.head_dim, [2 * half, *(shape[-1] for shape in states if shape)]),
    ):
        _compare(model_path, field, said, found)


def _compare_values(model_path: Path, field: str, said: list[Described], found: list[Described]) -> None:
    for number, (mine, theirs) in enumerate(zip(said, found, strict=False)):
        _compare(model_path, f"{field}.{number}", mine, [theirs])
    _compare(model_path, f"the number of {field}", len(said), [len(found)])


def _compare(model_path: Path, field: str, said: object, found: Sequence[object]) -> None:
    """Nothing where `found`, what the graph has of `field` here and there, is `said` each time."""
    other = next((value for value in found if value != said), None)
    if other is not None or not found:
        _refuse(model_path, field, _show(said), f"the graph has {_show(other) if found else 'none'}")


def _refuse(model_path: Path, field: str, said: str, found: str) -> NoReturn:
    raise BundleError(
        "bad_value",
        f"{model_path}: the manifest says {field} {said}, and {found}; export the bundle again, or fetch it again "
        f"from where it came.",
    )


def _show(value: object) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= 160 else text[:157] + "..."


def _said(values: Sequence[Value | State]) -> list[Described]:
    return [(v.name, v.dtype, list(v.shape)) for v in values]


def _without(values: list[Described], prefix: str) -> list[Described]:
    return [v for v in values if not v[0].startswith(prefix)]


def _describe(value: Any) -> Described:
    """As the exporter describes it: a string for a free dimension."""
    tensor = value.type.tensor_type
    dtype = require("onnx", "onnx").helper.tensor_dtype_to_np_dtype(tensor.elem_type).name
    shape = [d.dim_value if d.HasField("dim_value") else d.dim_param for d in tensor.shape.dim]
    return value.name, dtype, shape
