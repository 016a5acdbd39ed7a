"""What a profile of the ONNX exporter must be able to write, and what all profiles write alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from pit_deploy.architecture import DecoderConfig
from pit_deploy.quantize import QuantizedTensor
from pit_export.onnx_graph import GraphBuilder

Encoded = np.ndarray | QuantizedTensor
"""A matrix [rows, columns] in its precision: float32, float16 or quantised along the columns."""


@dataclass(frozen=True)
class BlockLayout:
    """The form of a `QuantizedTensor` once its codes are in the file."""

    rows: int
    columns: int
    blocks: int
    block_size: int
    bits: int
    symmetric: bool

    @classmethod
    def of(cls, tensor: QuantizedTensor) -> BlockLayout:
        symmetric = tensor.zero_points is None
        return cls(*tensor.shape, tensor.blocks, tensor.block_size, tensor.bits, symmetric)

    @property
    def padded_columns(self) -> int:
        return self.blocks * self.block_size


class Table(ABC):
    """A token table [vocab_size, hidden_size], stored once, used as embedding, as head, or as both."""

    @abstractmethod
    def rows(self, ids: ir.Value, output: str) -> ir.Value:
        """The rows of `ids` [batch, sequence], float32 [batch, sequence, hidden_size]."""

    @abstractmethod
    def product(self, x: ir.Value, output: str) -> ir.Value:
        """`x tableᵀ`: [batch, sequence, hidden_size] to [batch, sequence, vocab_size]."""

    def products(self, graph: GraphBuilder, ids: ir.Value, x: ir.Value, output: str) -> ir.Value:
        """`x` [batch, sequence, hidden_size] by the rows of `ids` [batch, sequence, count], shaped like `ids`."""
        rows = self.rows(ids, f"{output}.rows")
        column = graph.op("Unsqueeze", [x, graph.integers(-1)], f"{output}.column")
        product = graph.op("MatMul", [rows, column], f"{output}.product")
        return graph.op("Squeeze", [product, graph.integers(-1)], output)

    def logits(self, graph: GraphBuilder, x: ir.Value, mask: ir.Value | None, output: str) -> ir.Value:
        """The product, plus `mask` [vocab_size] where there is one."""
        return masked(graph, lambda name: self.product(x, name), mask, output)


def masked(
    graph: GraphBuilder, product: Callable[[str], ir.Value], mask: ir.Value | None, output: str
) -> ir.Value:
    """Logits named `output`: those of `product`, which takes their name, plus `mask` where there is one."""
    if mask is None:
        return product(output)
    return graph.op("Add", [product(f"{output}.all"), mask], output)


class Operators(ABC):
    """Writes the parts of a decoder into a graph, in the operators of one profile.

    Activations are float32 [batch, sequence, features].
    """

    opset: ClassVar[int]

    def __init__(self, graph: GraphBuilder, config: DecoderConfig, context_length: int) -> None:
        self.graph, self.config = graph, config
        self.rotations = {
            local: [
                graph.weight(f"{'rotary.local' if local else 'rotary'}.{kind}", table)
                for kind, table in tables
            ]
            for local, tables in (
                (local, zip(("cos", "sin"), rope.tables(context_length), strict=True))
                for local, rope in config.ropes.items()
            )
        }
        """cos and sin [context_length, head_dim / 2], by whether a layer is local."""

    @abstractmethod
    def prepare(self, ids: ir.Value, mask: ir.Value) -> None:
        """Write what all layers share: lengths, positions, masks."""

    @abstractmethod
    def norm(self, x: ir.Value, gain: np.ndarray, name: str) -> ir.Value:
        """The RMS norm over the last axis times `gain`."""

    @abstractmethod
    def add_norm(
        self, x: ir.Value, residual: ir.Value, gain: np.ndarray, name: str, total: str
    ) -> tuple[ir.Value, ir.Value]:
        """The norm of `x + residual`, and the sum itself, which is named `total`."""

    @abstractmethod
    def quantized_linear(self, x: ir.Value, weight: QuantizedTensor, name: str, output: str) -> ir.Value:
        """`x weightᵀ`."""

    @abstractmethod
    def quantized_table(self, table: QuantizedTensor, name: str) -> Table:
        """Store a token table."""

    @abstractmethod
    def attention(
        self, layer: int, projections: Sequence[ir.Value], past: Sequence[ir.Value]
    ) -> list[ir.Value]:
        """Rotate, append to the cache and attend: the mixed heads, `present.N.key` and `present.N.value`.

        `projections` are q, k, v, or one value that holds all three side by side where `packs_projections`.
        """

    def packs_projections(self) -> bool:
        """Whether `attention` takes q, k and v as one value."""
        return False

    def linear(
        self,
        x: ir.Value,
        weight: Encoded,
        name: str,
        bias: np.ndarray | None = None,
        *,
        output: str | None = None,
    ) -> ir.Value:
        """`x weightᵀ + bias`. A float16 weight is widened: activations are float32 everywhere."""
        output = output or name
        product = output if bias is None else f"{name}.product"
        if isinstance(weight, QuantizedTensor):
            y = self.quantized_linear(x, weight, name, product)
        else:
            # Stored as [columns, rows]: a product with a transposed weight would be transposed at each load.
            stored = as_float32(self.graph, self.graph.weight(f"{name}.weight", weight.T))
            y = self.graph.op("MatMul", [x, stored], name, output=product)
        if bias is None:
            return y
        return self.graph.op(
            "Add", [y, self.graph.weight(f"{name}.bias", bias)], f"{name}.add", output=output
        )

    def table(self, table: Encoded, name: str) -> Table:
        """Store a token table."""
        return (
            self.quantized_table(table, name)
            if isinstance(table, QuantizedTensor)
            else FloatTable(self.graph, table, name)
        )

    def activation(self, x: ir.Value, name: str) -> ir.Value:
        """The gate's activation, `hidden_act` of the config."""
        graph = self.graph
        match self.config.hidden_act:
            case "silu":
                return graph.op("Mul", [x, graph.op("Sigmoid", [x], f"{name}.sigmoid")], name)
            case "gelu":
                return graph.op("Gelu", [x], name, approximate="none")
            case "gelu_pytorch_tanh":
                return graph.op("Gelu", [x], name, approximate="tanh")
            case "relu":
                return graph.op("Relu", [x], name)
            case other:
                raise AssertionError(f"hidden_act {other} is missing here")

    def head_norm(self, x: ir.Value, heads: int, gain: np.ndarray, name: str) -> ir.Value:
        """The RMS norm of each head of `x` [batch, sequence, heads * head_dim]."""
        graph = self.graph
        split = graph.op("Reshape", [x, graph.integers(0, 0, heads, self.config.head_dim)], f"{name}.split")
        normed = self.norm(split, gain, name)
        return graph.op(
            "Reshape", [normed, graph.integers(0, 0, heads * self.config.head_dim)], f"{name}.joined"
        )

    def positions(self, ids: ir.Value, mask: ir.Value) -> ir.Value:
        """The position of each new token among the unmasked ones, int64 [batch, sequence]."""
        graph = self.graph
        counted = graph.op("CumSum", [mask, graph.scalar(1, np.int64)], "positions.counted")
        ends = graph.op("Sub", [counted, graph.integers(1)], "positions.all")
        length = graph.op("Shape", [ids], "positions.length", start=1, end=2)
        start = graph.op("Neg", [length], "positions.start")
        new = graph.op("Slice", [ends, start, graph.integers(2**62), graph.integers(1)], "positions.new")
        return graph.op("Max", [new, graph.scalar(0, np.int64)], "positions")


class FloatTable(Table):
    """A float32 or float16 table [vocab_size, hidden_size]."""

    def __init__(self, graph: GraphBuilder, table: np.ndarray, name: str) -> None:
        self._graph, self._name = graph, name
        self._value = graph.weight(name, table)

    def rows(self, ids: ir.Value, output: str) -> ir.Value:
        if self._value.dtype == ir.DataType.FLOAT:
            return self._graph.op("Gather", [self._value, ids], f"{self._name}.gather", output=output, axis=0)
        rows = self._graph.op("Gather", [self._value, ids], f"{self._name}.gather", axis=0)
        return as_float32(self._graph, rows, output)

    def product(self, x: ir.Value, output: str) -> ir.Value:
        return table_product(self._graph, as_float32(self._graph, self._value), x, self._name, output)


def table_product(graph: GraphBuilder, table: ir.Value, x: ir.Value, name: str, output: str) -> ir.Value:
    """`x tableᵀ` for a float32 `table` [rows, columns].

    The table is the left factor: ONNX Runtime packs a constant right factor into a second copy in memory
    (faster by 5 ms a token for 49152 x 576, one thread, and larger by the table's 113 MB).
    """
    columns = graph.op("Transpose", [x], f"{name}.columns", perm=[0, 2, 1])
    y = graph.op("MatMul", [table, columns], f"{name}.product")
    return graph.op("Transpose", [y], f"{name}.logits", output=output, perm=[0, 2, 1])


def as_float32(graph: GraphBuilder, value: ir.Value, output: str | None = None) -> ir.Value:
    """Widen a float16 value; a float32 one is returned as it is."""
    if value.dtype == ir.DataType.FLOAT:
        return value
    return graph.op("Cast", [value], f"{value.name}.float32", output=output, to=ir.DataType.FLOAT.value)


def stack_rows(parts: Sequence[Encoded]) -> Encoded | None:
    """The matrices one above the other, or None where their precisions differ."""
    quantized = [part for part in parts if isinstance(part, QuantizedTensor)]
    if not quantized:
        arrays = [part for part in parts if isinstance(part, np.ndarray)]
        return np.concatenate(arrays) if len({array.dtype for array in arrays}) == 1 else None
    kinds = {(part.bits, part.block_size, part.zero_points is None) for part in quantized}
    if len(quantized) < len(parts) or len(kinds) > 1:
        return None
    points = [part.zero_points for part in quantized if part.zero_points is not None]
    return replace(
        quantized[0],
        codes=np.concatenate([part.codes for part in quantized]),
        scales=np.concatenate([part.scales for part in quantized]),
        zero_points=np.concatenate(points) if points else None,
    )
