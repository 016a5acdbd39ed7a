"""A saved .mlpackage, read from disk and run op by op: what the file says, on a machine without Core ML.

Every op is computed in float32 and its result rounded to the type that the program declares, as a unit with
wide accumulators does it. Apple's units may add and round in another order, so this proves what the package means and
not what a phone's hardware makes of it (docs/coreml.md).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from pit_deploy.errors import InputError, PitDeployError
from pit_deploy.extras import require
from pit_deploy.manifest import BundleError
from pit_deploy.runtimes.mil_operators import MOVES, OPERATORS, VIEWS, infer, knows

EXTRA = "coreml"
STATE_OPS = ("read_state", "write_state")
_FLOATS = ("fp16", "fp32")

State = dict[str, np.ndarray]
"""By name; fp16 numbers in float32 arrays."""


@dataclass(frozen=True)
class TensorType:
    """Element type (`fp16`, `fp32`, `int32`, `bool`, ...) and shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """One op of a function: where its inputs come from and what becomes of its results."""

    op_type: str
    name: str
    run: Callable[..., Any]
    inputs: Mapping[str, str | tuple[str, ...]]
    """By parameter: the name of a value, or of several."""
    outputs: tuple[str, ...]
    types: tuple[TensorType, ...]
    released: tuple[str, ...] = ()
    """Values that nobody reads after this step."""
    in_place: bool = False
    """Whether it may work on its input's own array: of `slice_update`, and of `write_state` for the result of one."""
    state: str | None = None
    """Of `read_state` and `write_state`."""


@dataclass
class MilFunction:
    """One function of a program."""

    name: str
    inputs: dict[str, TensorType]
    states: dict[str, TensorType]
    outputs: dict[str, TensorType]
    constants: dict[str, Any]
    steps: list[Step]

    def written_states(self) -> set[str]:
        """States that some op writes."""
        return {str(step.state) for step in self.steps if step.op_type == "write_state"}

    def op_types(self) -> set[str]:
        return {step.op_type for step in self.steps}


@dataclass
class MilProgram:
    """All functions of a package, its weights decompressed once and shared between them.

    `rounding` False keeps every float in float32: the same program without the loss of fp16.
    """

    path: Path
    specification_version: int
    default_function: str
    functions: dict[str, MilFunction]
    constant_ops: set[str] = field(default_factory=set)
    """Types of the ops that only make constants."""
    rounding: bool = True

    @classmethod
    def open(cls, path: Path | str, *, rounding: bool = True) -> MilProgram:
        """Read a package. Raises `BundleError` where it cannot be read, and `InputError` that names every op which
        the evaluator does not know."""
        path = Path(path)
        spec = load_spec(path)
        if spec.WhichOneof("Type") != "mlProgram":
            raise InputError(f"{path} is not an ML Program; export it again with --to coreml.")
        reader = _Reader(path)
        functions = {}
        for name, proto in spec.mlProgram.functions.items():
            functions[name] = _read_function(name, proto, reader)
        default = spec.description.defaultFunctionName or "main"
        return cls(path, spec.specificationVersion, default, functions, reader.constant_ops, rounding)

    def new_state(self, function: str | None = None) -> State:
        """States of a function (they are shared by name between functions), all zero."""
        return {
            name: np.zeros(kind.shape, np.float32 if kind.dtype in _FLOATS else np.int32)
            for name, kind in self._function(function).states.items()
        }

    def run(
        self,
        inputs: Mapping[str, np.ndarray],
        state: State | None = None,
        *,
        function: str | None = None,
        also: Sequence[str] = (),
        rounding: bool | None = None,
        given: Mapping[str, np.ndarray] | None = None,
        watch: Callable[[Step, dict[str, Any], list[np.ndarray]], None] | None = None,
    ) -> dict[str, np.ndarray]:
        """Run a function on `inputs` and return its outputs by name; `state` is changed in place.

        `also` names further values to return (those of the residual stream, say); `given` has values to put in
        place of computed ones; `rounding` False keeps every float in float32 (None: as the program was opened);
        `watch` sees every step with its inputs and results. Raises `PitDeployError` where an op fails.
        """
        chosen = self._function(function)
        self._check_inputs(chosen, inputs, state)
        rounded = self.rounding if rounding is None else rounding
        values: dict[str, Any] = {name: _held(value) for name, value in inputs.items()}
        kept = {*chosen.outputs, *also}
        found: dict[str, np.ndarray] = {n: values[n] for n in kept if n in values}
        for step in chosen.steps:
            operands = {p: _values_of(names, values, chosen.constants) for p, names in step.inputs.items()}
            results = self._step(step, operands, {} if state is None else state, rounded)
            if given:
                pairs = zip(step.outputs, results, strict=True)
                results = [_held(given[name]) if name in given else result for name, result in pairs]
            if watch is not None:
                watch(step, operands, results)
            values.update(zip(step.outputs, results, strict=True))
            found.update((name, values[name]) for name in step.outputs if name in kept)
            for name in step.released:
                values.pop(name, None)
        found.update((n, chosen.constants[n]) for n in kept - found.keys() if n in chosen.constants)
        missing = sorted(kept - found.keys())
        if missing:
            raise PitDeployError(
                f"{self.path}: function {chosen.name} has no value named {', '.join(missing)}."
            )
        return found

    def _function(self, name: str | None) -> MilFunction:
        name = name or self.default_function
        if name not in self.functions:
            raise InputError(
                f"{self.path} has no function {name!r}; it has {', '.join(sorted(self.functions))}."
            )
        return self.functions[name]

    def _check_inputs(
        self, function: MilFunction, inputs: Mapping[str, np.ndarray], state: State | None
    ) -> None:
        wrong = sorted(function.inputs.keys() ^ inputs.keys())
        if wrong:
            raise InputError(
                f"{self.path}: function {function.name} takes the inputs {', '.join(function.inputs)}; "
                f"{', '.join(wrong)} is missing or too many."
            )
        if function.states and (state is None or function.states.keys() - state.keys()):
            raise InputError(
                f"{self.path}: function {function.name} has the states {', '.join(function.states)}; make them "
                f"with new_state."
            )

    def _step(self, step: Step, given: dict[str, Any], state: State, rounded: bool) -> list[np.ndarray]:
        if step.op_type == "read_state":
            return [state[str(step.state)]]
        if step.op_type == "write_state":
            state[str(step.state)] = given["data"] if step.in_place else given["data"].copy()
            return []
        extra = {"in_place": True} if step.in_place else {}
        try:
            results = step.run(**given, **extra)
        except PitDeployError as error:
            raise PitDeployError(f"{self.path}: the op {step.name}: {error}") from error
        except Exception as error:  # NumPy's own, about shapes
            reason = " ".join(str(error).split())
            raise PitDeployError(
                f"{self.path}: the op {step.name} ({step.op_type}) failed: {reason}; export it again."
            ) from error
        found = results if isinstance(results, list) else [results]
        if step.op_type in MOVES:
            return found
        return [_typed(value, kind, rounded) for value, kind in zip(found, step.types, strict=True)]


def _typed(value: Any, kind: TensorType, rounded: bool) -> np.ndarray:
    """A result in its declared type; fp16 stays float32, rounded or not."""
    value = np.asarray(value)
    if kind.dtype == "fp16" and rounded:
        with np.errstate(over="ignore"):  # what overflows becomes inf, as on the device
            return value.astype(np.float16).astype(np.float32)
    if kind.dtype in _FLOATS:
        return value.astype(np.float32, copy=False)
    return value.astype(np.bool_ if kind.dtype == "bool" else np.int32, copy=False)


def _values_of(names: str | tuple[str, ...], values: Mapping[str, Any], constants: Mapping[str, Any]) -> Any:
    """The value of a name, or the list of those of several."""
    if isinstance(names, tuple):
        return [values[n] if n in values else constants[n] for n in names]
    return values[names] if names in values else constants[names]


def quiet_coremltools() -> Any:
    """coremltools, imported without its remarks, and other libraries', about what this machine lacks."""
    loggers = [logging.getLogger(name) for name in ("coremltools", "torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        return require("coremltools", EXTRA)
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def load_spec(path: Path) -> Any:
    """The protobuf of a package. Raises `BundleError` where it is none."""
    coremltools = quiet_coremltools()
    try:
        return coremltools.utils.load_spec(str(path))
    except Exception as error:  # protobuf's classes and coremltools' own, about files and their content
        reason = " ".join(str(error).split())[:200]
        raise BundleError(
            "unreadable_file",
            f"{path} cannot be read as a Core ML package ({reason}); export the bundle again.",
        ) from error


def weights_file(path: Path) -> Path:
    """Where a package has its weights."""
    return path / "Data" / "com.apple.CoreML" / "weights" / "weight.bin"


class _Reader:
    """Constants of a package; a range of the weight file is read and decompressed once for all functions."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._load = require("coremltools.converters.mil.frontend.milproto.load", EXTRA)
        self._context = self._load.TranscriptionContext(str(weights_file(path).parent))
        self._floats: dict[Any, Any] = {}
        self.constant_ops: set[str] = set()

    def constant(self, value: Any) -> Any:
        """The value of a `const`, floats in float32."""
        key = blob_key(value)
        if key is not None and key in self._floats:
            return self._floats[key]
        held = _held(self.raw(value))
        if key is not None:
            self._floats[key] = held
        return held

    def raw(self, value: Any) -> Any:
        """The value as it is stored."""
        try:
            return self._load._load_value(self._context, value)
        except Exception as error:  # the blob reader's, about offsets and sizes
            reason = " ".join(str(error).split())[:200]
            raise BundleError(
                "unreadable_file",
                f"{self.path}: a constant cannot be read ({reason}); export the bundle again.",
            ) from error

    def constexpr(self, proto: Any, made: Mapping[str, Any]) -> Any:
        """What a compressed constant stands for, in float32, by coremltools' own decompression."""
        bound: dict[str, Any] = {n: v for n, v in proto.attributes.items() if n != "name"}
        names: dict[str, str] = {}
        for parameter, argument in proto.inputs.items():
            binding = argument.arguments[0]
            if binding.WhichOneof("binding") == "name":
                names[parameter] = binding.name
            else:
                bound[parameter] = binding.value
        keys = [(n, blob_key(v) or v.SerializeToString()) for n, v in sorted(bound.items())]
        key = (proto.type, *keys, *((n, id(made[v])) for n, v in sorted(names.items())))
        if key in self._floats:
            return self._floats[key]
        inputs = {n: self.raw(v) for n, v in bound.items()} | {n: made[v] for n, v in names.items()}
        held = _held(decompressed(proto.type, inputs))
        self._floats[key] = held
        return held


def decompressed(op_type: str, inputs: Mapping[str, Any]) -> np.ndarray:
    """The value of a `constexpr_` op, in its declared type."""
    if op_type == "constexpr_lut_to_dense" and inputs.get("lut", np.empty(0)).shape[-1:] == (1,):
        return looked_up(inputs["indices"], inputs["lut"])
    mil = require("coremltools.converters.mil.mil", EXTRA)
    old = "quantized_data" in inputs or "source_val" in inputs
    target = getattr(require("coremltools", EXTRA).target, "iOS16" if old else "iOS18")
    with mil.Function({}, opset_version=target):
        made = getattr(mil.Builder, op_type)(**inputs)
        return np.asarray(made.op.materialized_val_inference())


def looked_up(indices: np.ndarray, lut: np.ndarray) -> np.ndarray:
    """Palettes applied: `lut` [groups along each axis of `indices`, numbers, 1].

    coremltools' own decompression repeats the palettes for every weight: 14 GB for a table of 49,152 x 576.
    """
    groups = [
        np.arange(size) // (size // count) for size, count in zip(indices.shape, lut.shape, strict=False)
    ]
    result = np.empty(indices.shape, lut.dtype)
    for start in range(0, len(indices), 1024):
        rows = slice(start, start + 1024)
        result[rows] = lut[..., 0][(*np.ix_(groups[0][rows], *groups[1:]), indices[rows])]
    return result


def blob_key(value: Any) -> tuple[str, int] | None:
    """Place in the weight file of a constant's value; None where it is in the program itself."""
    if value.WhichOneof("value") != "blobFileValue":
        return None
    return value.blobFileValue.fileName, value.blobFileValue.offset


def _read_function(name: str, proto: Any, reader: _Reader) -> MilFunction:
    block = proto.block_specializations[proto.opset]
    inputs, states = {}, {}
    for value in proto.inputs:
        if value.type.WhichOneof("type") == "stateType":
            states[value.name] = _tensor_type(value.type.stateType.wrappedType)
        else:
            inputs[value.name] = _tensor_type(value.type)
    unknown = sorted(
        {
            op.type
            for op in block.operations
            if op.type not in ("const", *STATE_OPS)
            and not op.type.startswith("constexpr_")
            and (op.blocks or not knows(op.type))
        }
    )
    if unknown:
        raise InputError(
            f"{reader.path}: function {name} has ops that the evaluator does not know: {', '.join(unknown)}; check "
            f"this package on a Mac instead (docs/coreml.md)."
        )
    constants: dict[str, Any] = {}
    steps: list[Step] = []
    types: dict[str, TensorType] = dict(inputs)
    for op in block.operations:
        if op.type == "const":
            reader.constant_ops.add(op.type)
            constants[op.outputs[0].name] = reader.constant(op.attributes["val"])
        elif op.type.startswith("constexpr_"):
            reader.constant_ops.add(op.type)
            constants[op.outputs[0].name] = reader.constexpr(op, constants)
        else:
            steps.append(_read_step(op, reader, constants))
        types.update((value.name, _tensor_type(value.type)) for value in op.outputs)
    outputs = {value: types[value] for value in block.outputs}
    used = {name for step in steps for name in _names(step)} | outputs.keys()
    constants = {name: value for name, value in constants.items() if name in used}
    return MilFunction(name, inputs, states, outputs, constants, list(_with_lifetimes(steps, set(outputs))))


def _read_step(op: Any, reader: _Reader, constants: dict[str, Any]) -> Step:
    name = reader.raw(op.attributes["name"]) if "name" in op.attributes else op.type
    inputs: dict[str, str | tuple[str, ...]] = {}
    state = None
    for parameter, argument in op.inputs.items():
        names = []
        for number, binding in enumerate(argument.arguments):
            if binding.WhichOneof("binding") == "name":
                names.append(binding.name)
            else:  # a literal becomes a constant of its own
                literal = f"{name}.{parameter}.{number}"
                constants[literal] = reader.constant(binding.value)
                names.append(literal)
        if op.type in STATE_OPS and parameter == "input":
            state = names[0]
        else:
            inputs[parameter] = names[0] if len(names) == 1 and parameter != "values" else tuple(names)
    run = OPERATORS.get(op.type) or _inferring(op.type)
    outputs = tuple(value.name for value in op.outputs)
    types = tuple(_tensor_type(value.type) for value in op.outputs)
    return Step(op.type, str(name), run, inputs, outputs, types, state=state)


def _inferring(op_type: str) -> Callable[..., Any]:
    def run(**inputs: Any) -> Any:
        return infer(op_type, **inputs)

    return run


def _with_lifetimes(steps: list[Step], outputs: set[str]) -> Iterator[Step]:
    """The steps with what each may forget after it, and which of them may write where they read."""
    users: dict[str, list[int]] = {}
    for number, step in enumerate(steps):
        for name in _names(step):
            users.setdefault(name, []).append(number)
    made = {name for step in steps for name in step.outputs}
    updated = {step.outputs[0] for step in steps if step.op_type == "slice_update"}
    for number, step in enumerate(steps):
        names = {*_names(step), *step.outputs}
        released = tuple(n for n in names if n in made - outputs and users.get(n, [-1])[-1] <= number)
        if step.op_type == "write_state":
            in_place = step.inputs["data"] in updated
        else:
            in_place = step.op_type == "slice_update" and _may_write(steps, number, users)
        yield replace(step, released=released, in_place=in_place)


def _may_write(steps: list[Step], number: int, users: Mapping[str, list[int]]) -> bool:
    """Whether the `slice_update` at `number` may change the state's own array instead of a copy.

    So it is where what it updates was read from a state, the result is written to the same state before that is
    read again, and no other value of the state, which may be the same array, is still to be read.
    """
    step = steps[number]
    origin = next((s for s in steps[:number] if step.inputs["x"] in s.outputs), None)
    if origin is None or origin.op_type != "read_state":
        return False
    following = [n for n in users.get(step.outputs[0], []) if steps[n].op_type == "write_state"]
    if not following or steps[following[0]].state != origin.state:
        return False
    if any(s.state == origin.state for s in steps[number : following[0]]):
        return False
    of_state = [s for s in steps if s.state == origin.state]
    aliases = {s.outputs[0] if s.op_type == "read_state" else str(s.inputs["data"]) for s in of_state}
    readers = [n for alias in aliases for n in users.get(alias, [])]
    if any(steps[n].op_type in VIEWS for n in readers):
        return False
    earlier = {s.outputs[0] for s in steps[:number] if s.op_type == "read_state" and s.state == origin.state}
    earlier |= {str(s.inputs["data"]) for s in steps[:number] if s in of_state and s.op_type == "write_state"}
    return all(n <= number for alias in earlier for n in users.get(alias, []))


def _names(step: Step) -> Iterator[str]:
    for names in step.inputs.values():
        if isinstance(names, tuple):
            yield from names
        else:
            yield names


def _held(value: Any) -> Any:
    """fp16 in float32; 64-bit integers as the 32-bit ones of Core ML."""
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype == np.float16:
            return value.astype(np.float32)
        if value.dtype == np.int64:
            return value.astype(np.int32)
    return value


def _tensor_type(proto: Any) -> TensorType:
    types = require("coremltools.converters.mil.frontend.milproto.helper", EXTRA).proto_to_types(proto)
    mil_types = require("coremltools.converters.mil.mil", EXTRA).types
    if not mil_types.is_tensor(types):
        return TensorType(mil_types.builtin_to_string(types), ())
    primitive = mil_types.builtin_to_string(types.get_primitive())
    return TensorType(primitive, tuple(int(n) if str(n).isdigit() else -1 for n in types.get_shape()))
