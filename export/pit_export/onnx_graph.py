"""A graph under construction: nodes and initializers over onnx_ir, named after the tensors they come from."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import onnx_ir as ir

from pit_export.onnx_weights import ByteRange, WeightsFile

CONTRIB = "com.microsoft"
"""The domain of ONNX Runtime's own operators."""
_IR_VERSIONS = {21: 10, 23: 11}

Stored = ByteRange | np.ndarray
"""Bytes of a tensor: a range of the data file, or a small array that goes into the graph file."""


class GraphBuilder:
    """Nodes in the order of their making, and initializers in `weights` or, where they are small, inline."""

    def __init__(self, weights: WeightsFile, *, inline_below: int) -> None:
        self._weights, self._inline_below = weights, inline_below
        self._inputs: list[ir.Value] = []
        self._outputs: list[ir.Value] = []
        self._nodes: list[ir.Node] = []
        self._initializers: dict[str, ir.Value] = {}
        self._names: set[str] = set()

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
        taken = self._names & set(outputs)
        assert not taken, f"the node {name} would give {sorted(taken)} a second meaning"
        self._names.update(output for output in outputs if output)
        values = [ir.Value(name=output) for output in outputs]
        self._nodes.append(ir.node(op_type, inputs, attributes, domain=domain, outputs=values, name=name))
        return values

    def store(self, array: np.ndarray) -> Stored:
        """Write the bytes of `array` now, or keep a small one for the graph file; `array` may be dropped."""
        array = np.ascontiguousarray(array)
        return array if array.nbytes < self._inline_below else self._weights.append(array)

    def initializer(self, name: str, stored: Stored, dtype: ir.DataType, shape: Sequence[int]) -> ir.Value:
        """A name, type and shape for stored bytes, which may get several.

        4-bit elements lie two in a byte, the first in the low half. (Two initializers over the same bytes
        cost nothing; a Reshape node would be folded by the runtime into a second copy.)
        """
        assert name not in self._initializers, f"the initializer {name} is made twice"
        if isinstance(stored, ByteRange):
            path = self._weights.path
            tensor: ir.TensorProtocol = ir.ExternalTensor(
                path.name,
                stored.offset,
                stored.length,
                dtype,
                shape=ir.Shape(shape),
                name=name,
                base_dir=path.parent,
            )
        elif dtype.bitwidth < 8:
            tensor = ir.PackedTensor(stored.reshape(-1), dtype, shape=ir.Shape(shape), name=name)
        else:
            tensor = ir.Tensor(stored.reshape(-1).view(dtype.numpy()).reshape(shape), dtype, name=name)
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape), const_value=tensor)
        self._initializers[name] = value
        return value

    def weight(self, name: str, array: np.ndarray) -> ir.Value:
        """An initializer with the type and shape of `array`."""
        return self.initializer(name, self.store(array), ir.DataType.from_numpy(array.dtype), array.shape)

    def cut(self, x: ir.Value, end: int, axis: int, output: str) -> ir.Value:
        """The first `end` elements of an axis (what is left of padded columns), named `output`."""
        bounds = [self.integers(0), self.integers(end), self.integers(axis)]
        return self.op("Slice", [x, *bounds], output)

    def constant(self, name: str, array: np.ndarray) -> ir.Value:
        """An initializer that several nodes share: made at the first call, found again by its name.

        Always inline: shapes are inferred from some of these, and inference doesn't read the data file.
        """
        return self.find(name) or self.initializer(
            name, array, ir.DataType.from_numpy(array.dtype), array.shape
        )

    def find(self, name: str) -> ir.Value | None:
        """The initializer of this name, where it was made."""
        return self._initializers.get(name)

    def integers(self, *values: int) -> ir.Value:
        """A shared int64 vector of these values (shapes, axes, indices)."""
        return self.constant("integers." + "_".join(map(str, values)), np.array(values, np.int64))

    def scalar(self, value: float, dtype: Any = np.float32) -> ir.Value:
        """A shared scalar."""
        return self.constant(f"scalar.{np.dtype(dtype).name}.{value}", np.array(value, dtype))

    def model(self, name: str, opset: int) -> ir.Model:
        """The finished model, in a version of the standard's operators."""
        graph = ir.Graph(
            self._inputs,
            self._outputs,
            nodes=self._nodes,
            initializers=list(self._initializers.values()),
            opset_imports={"": opset} | self._contrib_import(),
            name=name,
        )
        return ir.Model(
            graph,
            ir_version=_IR_VERSIONS[opset],
            producer_name="pit-deploy",
            producer_version=version("pit-deploy"),
        )

    def _contrib_import(self) -> dict[str, int]:
        return {CONTRIB: 1} if any(node.domain == CONTRIB for node in self._nodes) else {}
