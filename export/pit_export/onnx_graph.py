"""A graph under construction: nodes and initializers over onnx_ir, each with a name that says where it is from."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from pit_export.onnx_weights import ByteRange, WeightsFile

CONTRIB = "com.microsoft"
"""The domain of ONNX Runtime's own operators."""
INLINE_BELOW = 1024
"""Tensors of fewer bytes stay in the graph file."""
_IR_VERSIONS = {21: 10, 23: 11}


class GraphBuilder:
    """Nodes in the order of their making, and initializers in `weights` or, where they are small, inline."""

    def __init__(self, opset: int, weights: WeightsFile, *, inline_below: int = INLINE_BELOW) -> None:
        self.opset, self._weights, self._inline_below = opset, weights, inline_below
        self._inputs: list[ir.Value] = []
        self._outputs: list[ir.Value] = []
        self._nodes: list[ir.Node] = []
        self._initializers: dict[str, ir.Value] = {}
        self._ranges: dict[str, ByteRange] = {}

    def input(self, name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
        """An input of the graph; a string in `shape` names a free dimension."""
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self._inputs.append(value)
        return value

    def output(self, value: ir.Value, dtype: ir.DataType, shape: Sequence[int | str]) -> None:
        """Make a named value an output of the graph."""
        value.type, value.shape = ir.TensorType(dtype), ir.Shape(shape)
        self._outputs.append(value)

    def op(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        name: str,
        *,
        domain: str = "",
        output: str | None = None,
        **attributes: Any,
    ) -> ir.Value:
        """Add a node with one output, named `output` or else like the node."""
        return self.op_outputs(op_type, inputs, name, [output or name], domain=domain, **attributes)[0]

    def op_outputs(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        name: str,
        outputs: Sequence[str],
        *,
        domain: str = "",
        **attributes: Any,
    ) -> list[ir.Value]:
        """Add a node with several named outputs; an empty name leaves an optional one out."""
        values = [ir.Value(name=output) for output in outputs]
        self._nodes.append(ir.node(op_type, inputs, attributes, domain=domain, outputs=values, name=name))
        return values

    def weight(
        self, name: str, array: np.ndarray, *, dtype: ir.DataType | None = None, shape: Sequence[int] | None = None
    ) -> ir.Value:
        """An initializer, written now; `array` may be dropped after it.

        `dtype` and `shape` say what the bytes of `array` mean where that is not the array's own: 4-bit
        elements lie two in a byte of a uint8 array, the first in the low half.
        """
        array = np.ascontiguousarray(array)
        dtype = dtype or ir.DataType.from_numpy(array.dtype)
        shape = array.shape if shape is None else shape
        if array.nbytes < self._inline_below:
            return self._add(name, _inline(name, array, dtype, shape))
        self._ranges[name] = self._weights.append(array)
        return self._add(name, self._external(name, self._ranges[name], dtype, shape))

    def view(
        self, name: str, of: ir.Value, shape: Sequence[int], dtype: ir.DataType | None = None
    ) -> ir.Value:
        """A second initializer over the same bytes of the data file, with another shape or type.

        A Reshape node would do for the arithmetic, but runtimes fold it into a second copy at load.
        """
        assert of.name is not None and of.const_value is not None
        dtype = dtype or of.const_value.dtype
        if of.name in self._ranges:
            return self._add(name, self._external(name, self._ranges[of.name], dtype, shape))
        raw = np.frombuffer(of.const_value.tobytes(), np.uint8)
        if dtype.bitwidth >= 8:
            raw = raw.view(dtype.numpy()).reshape(shape)
        return self._add(name, _inline(name, raw, dtype, shape))

    def constant(self, name: str, array: np.ndarray) -> ir.Value:
        """A small initializer that several nodes share: made at the first call, found again by its name."""
        return self._initializers.get(name) or self.weight(name, array)

    def integers(self, *values: int) -> ir.Value:
        """A shared int64 vector of these values (shapes, axes, indices)."""
        return self.constant("integers." + "_".join(map(str, values)), np.array(values, np.int64))

    def scalar(self, value: float, dtype: Any = np.float32) -> ir.Value:
        """A shared scalar."""
        return self.constant(f"scalar.{np.dtype(dtype).name}.{value}", np.array(value, dtype))

    def model(self, name: str) -> ir.Model:
        """The finished model."""
        graph = ir.Graph(
            self._inputs,
            self._outputs,
            nodes=self._nodes,
            initializers=list(self._initializers.values()),
            opset_imports={"": self.opset} | self._contrib_import(),
            name=name,
        )
        return ir.Model(
            graph,
            ir_version=_IR_VERSIONS[self.opset],
            producer_name="pit-deploy",
            producer_version=version("pit-deploy"),
        )

    def _contrib_import(self) -> dict[str, int]:
        return {CONTRIB: 1} if any(node.domain == CONTRIB for node in self._nodes) else {}

    def _external(self, name: str, place: ByteRange, dtype: ir.DataType, shape: Sequence[int]) -> ir.ExternalTensor:
        path: Path = self._weights.path
        return ir.ExternalTensor(
            path.name, place.offset, place.length, dtype, shape=ir.Shape(shape), name=name, base_dir=path.parent
        )

    def _add(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        assert name not in self._initializers, f"the initializer {name} is made twice"
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
        self._initializers[name] = value
        return value


def _inline(name: str, array: np.ndarray, dtype: ir.DataType, shape: Sequence[int]) -> ir.TensorProtocol:
    if dtype.bitwidth < 8:
        return ir.PackedTensor(array.reshape(-1), dtype, shape=ir.Shape(shape), name=name)
    return ir.Tensor(array.reshape(shape), dtype, name=name)
