"""An ML Program while it is written: functions, and constants that they share.

The program is built op by op and no pass of coremltools runs over it: what is written here is what the package says.
Names are those of the checkpoint, with `_` for what MIL does not allow in a name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import coremltools
import numpy as np
from coremltools.converters.mil.converter import mil_convert
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Function, Placeholder, Program, types
from coremltools.converters.mil.mil.program import StateTensorPlaceholder

Value = Any
"""A value of a program that is being built (coremltools' Var)."""

IOS = {"iOS17": coremltools.target.iOS17, "iOS18": coremltools.target.iOS18}
SPECIFICATION = {name: int(target) for name, target in IOS.items()}
"""Version of the model format by minimum system."""
FLOATS = {"fp16": np.float16, "fp32": np.float32}


@dataclass(frozen=True)
class Constant:
    """A tensor in the form of the file: the op that makes it and the arrays, or further constants, that this op takes.

    `op` is `const` (one array, `val`) or one of the `constexpr_` ops, which decompress.
    """

    op: str
    arrays: Mapping[str, np.ndarray | Constant]

    @property
    def nbytes(self) -> int:
        """Bytes in the file, without padding: codes below 8 bits lie packed."""
        return sum(
            part.nbytes if isinstance(part, Constant) else -(-part.size * _bits(part) // 8)
            for part in self.arrays.values()
        )


@dataclass(frozen=True)
class Input:
    """An input of a function, or a state."""

    dtype: str
    shape: tuple[int, ...]
    is_state: bool = False


class GraphBuilder:
    """One program for the system `target` ("iOS17" or "iOS18"), its floats of type `dtype` ("fp16" or "fp32")."""

    def __init__(self, target: str, dtype: str) -> None:
        self.target, self.dtype = target, dtype
        self.program = Program()
        self.stored: dict[str, Constant] = {}
        """Every constant of a name, as stored; the functions share them."""
        self._placed: dict[str, Value] = {}

    @property
    def float_type(self) -> type:
        return FLOATS[self.dtype]

    def function(
        self, name: str, inputs: Mapping[str, Input], build: Callable[[Mapping[str, Value]], Sequence[Value]]
    ) -> None:
        """Add a function; `build` gets the inputs by name and returns the outputs, named as they are."""
        self._placed = {}
        placeholders = {key: _placeholder(value) for key, value in inputs.items()}
        with Function(placeholders, opset_version=IOS[self.target]) as function:
            function.set_outputs(list(build(function.inputs)))
        self.program.add_function(name, function)

    def begin_program(self) -> None:
        """Start another program of the same constants, for a package of its own."""
        self.program = Program()

    def constant(self, name: str, make: Callable[[], Constant | np.ndarray]) -> Value:
        """The constant of a name. `make` is called the first time in the whole program; floats that it returns
        get the program's type."""
        if name in self._placed:
            return self._placed[name]
        if name not in self.stored:
            made = make()
            self.stored[name] = (
                made if isinstance(made, Constant) else Constant("const", {"val": self.cast(made)})
            )
        self._placed[name] = _placed(self.stored[name], identifier(name))
        return self._placed[name]

    def cast(self, array: np.ndarray) -> np.ndarray:
        """The array in the program's float type where it is one of floats."""
        array = np.asarray(array)
        return array.astype(self.float_type) if np.issubdtype(array.dtype, np.floating) else array

    def number(self, value: float) -> np.generic:
        """A scalar of the program's float type."""
        number: np.generic = self.float_type(value)
        return number

    def save(self, path: Path, default_function: str) -> None:
        """Write the program as an .mlpackage folder, which must not exist yet."""
        self.program.default_function_name = default_function
        self.program.export_as_multifunction = default_function != "main"
        self.program.skip_all_passes = True
        mil_convert(
            self.program,
            convert_from="milinternal",
            convert_to="mlprogram",
            specification_version=SPECIFICATION[self.target],
            compute_units=coremltools.ComputeUnit.CPU_ONLY,
            skip_model_load=True,
            main_pipeline=coremltools.PassPipeline.EMPTY,
            package_dir=str(path),
        )


def identifier(name: str) -> str:
    """A name that MIL takes: letters, digits and `_`."""
    return re.sub(r"[^A-Za-z0-9_]", "_", name)


def _placed(constant: np.ndarray | Constant, name: str) -> Value:
    """The ops that make a constant."""
    if not isinstance(constant, Constant):
        return _const(constant, name)
    if constant.op == "const":
        return _placed(constant.arrays["val"], name)
    parts = {key: _placed(part, f"{name}_{key}") for key, part in constant.arrays.items()}
    return getattr(mb, constant.op)(**parts, name=name)


def _const(array: np.ndarray, name: str) -> Value:
    value = mb.const(val=array, name=name)
    value.op.weight_id = name  # constants of one id lie in the file once, whatever the function
    return value


def _placeholder(value: Input) -> Any:
    dtype = {"fp16": types.fp16, "fp32": types.fp32, "int32": types.int32}[value.dtype]
    return (
        StateTensorPlaceholder(value.shape, dtype)
        if value.is_state
        else Placeholder(value.shape, dtype=dtype)
    )


def _bits(array: np.ndarray) -> int:
    """Bits of an element in the file; coremltools marks codes below a byte in the NumPy type."""
    marked = types.numpy_type_to_builtin_type(array.dtype)
    return int(marked.get_bitwidth())
