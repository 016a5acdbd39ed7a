"""The profile `standard`: operators of the ONNX standard alone (opset 23), for other runtimes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from pit_deploy.quantize import QuantizedTensor
from pit_export.onnx_graph import GraphBuilder
from pit_export.onnx_operators import BlockLayout, Operators, Table, table_product

MASKED = -3e4
"""Added to a masked score: finite, so that a row without any allowed key stays finite, also in float16."""


class StandardOperators(Operators):
    """Attention, RMSNormalization, RotaryEmbedding, DequantizeLinear; the cache grows by concatenation."""

    opset = 23

    def prepare(self, ids: ir.Value, mask: ir.Value) -> None:
        graph = self.graph
        self.position_ids = self.positions(ids, mask)
        total = graph.op("Shape", [mask], "mask.total", start=1, end=2)
        new = graph.op("Shape", [ids], "mask.new", start=1, end=2)
        squeeze = [graph.op("Squeeze", [v], f"{v.name}.scalar") for v in (total, new)]
        zero, one = graph.scalar(0, np.int64), graph.scalar(1, np.int64)
        keys = graph.op("Range", [zero, squeeze[0], one], "mask.keys")
        first = graph.op("Sub", squeeze, "mask.first")
        queries = graph.op("Range", [first, squeeze[0], one], "mask.queries")
        columns = graph.op("Unsqueeze", [queries, graph.integers(1)], "mask.queries.column")
        distance = graph.op("Sub", [columns, keys], "mask.distance")  # [sequence, total]
        causal = graph.op("GreaterOrEqual", [distance, zero], "mask.causal")
        real = graph.op("Cast", [mask], "mask.real", to=ir.DataType.BOOL.value)
        real = graph.op("Unsqueeze", [real, graph.integers(1, 2)], "mask.real.row")  # [batch, 1, 1, total]
        allowed = graph.op("And", [causal, real], "mask.allowed")
        self._masks: dict[int | None, ir.Value] = {}
        for window in dict.fromkeys(self.config.sliding_windows):
            seen, name = allowed, "mask.full" if window is None else f"mask.window_{window}"
            if window is not None:
                near = graph.op("Less", [distance, graph.scalar(window, np.int64)], f"{name}.near")
                seen = graph.op("And", [allowed, near], f"{name}.allowed")
            bias = [graph.scalar(0.0), graph.scalar(MASKED)]
            self._masks[window] = graph.op("Where", [seen, *bias], name)  # [batch, 1, sequence, total]

    def norm(self, x: ir.Value, gain: np.ndarray, name: str) -> ir.Value:
        stored = self.graph.weight(f"{name}.gain", gain)
        return self.graph.op("RMSNormalization", [x, stored], name, epsilon=self.config.rms_norm_eps, axis=-1)

    def add_norm(
        self, x: ir.Value, residual: ir.Value, gain: np.ndarray, name: str, total: str
    ) -> tuple[ir.Value, ir.Value]:
        added = self.graph.op("Add", [x, residual], f"{name}.sum", output=total)
        return self.norm(added, gain, name), added

    def quantized_linear(self, x: ir.Value, weight: QuantizedTensor, name: str, output: str) -> ir.Value:
        # Stored as [columns, rows], so that no node transposes it (ONNX Runtime then fuses the pair).
        graph, shape = self.graph, weight.codes.shape[::-1]
        codes = graph.store(code_bytes(weight, transposed=True))
        stored = [
            graph.initializer(f"{name}.codes", codes, code_type(weight), shape),
            graph.weight(f"{name}.scales", weight.scales.T),
        ]
        if weight.zero_points is not None:
            stored.append(self._zero_points(weight.zero_points.T, weight.bits, f"{name}.zero_points"))
        matrix = graph.op(
            "DequantizeLinear", stored, f"{name}.dequantized", axis=0, block_size=weight.block_size
        )
        if weight.codes.shape[1] != weight.columns:
            matrix = graph.cut(matrix, weight.columns, 0, f"{name}.unpadded")
        return graph.op("MatMul", [x, matrix], name, output=output)

    def _zero_points(self, points: np.ndarray, bits: int, name: str) -> ir.Value:
        if bits == 8:
            return self.graph.weight(name, points)
        return self.graph.initializer(
            name, self.graph.store(pack_flat(points)), ir.DataType.UINT4, points.shape
        )

    def quantized_table(self, table: QuantizedTensor, name: str) -> Table:
        return _QuantizedTable(self.graph, table, name)

    def attention(
        self, layer: int, projections: Sequence[ir.Value], past: Sequence[ir.Value]
    ) -> list[ir.Value]:
        config, name = self.config, f"model.layers.{layer}.self_attn"
        q, k, v = projections
        rotation = self.rotations[config.is_local(layer)]
        q = self._rotate(q, rotation, config.num_attention_heads, f"{name}.q_rotated")
        k = self._rotate(k, rotation, config.num_key_value_heads, f"{name}.k_rotated")
        return self.graph.op_outputs(
            "Attention",
            [q, k, v, self._masks[config.sliding_windows[layer]], *past],
            name,
            [name, f"present.{layer}.key", f"present.{layer}.value"],
            q_num_heads=config.num_attention_heads,
            kv_num_heads=config.num_key_value_heads,
            scale=config.attention_scale,
            softcap=config.attention_softcap or 0.0,
        )

    def _rotate(self, x: ir.Value, rotation: Sequence[ir.Value], heads: int, name: str) -> ir.Value:
        return self.graph.op("RotaryEmbedding", [x, *rotation, self.position_ids], name, num_heads=heads)


class _QuantizedTable(Table):
    """Codes are stored once: the head dequantises all of them, the embedding the rows that it gathers."""

    def __init__(self, graph: GraphBuilder, table: QuantizedTensor, name: str) -> None:
        self._graph, self._name, self._layout = graph, name, BlockLayout.of(table)
        self._code_type = code_type(table)
        self._codes = graph.store(code_bytes(table))
        self._scales = graph.weight(f"{name}.scales", table.scales)
        # Gathered as bytes, but read by DequantizeLinear in the type of the codes.
        self._points = (
            None if table.zero_points is None else graph.weight(f"{name}.zero_points", table.zero_points)
        )

    def rows(self, ids: ir.Value, output: str) -> ir.Value:
        graph, layout, name = self._graph, self._layout, self._name
        codes = graph.op("Gather", [self._gatherable(), ids], f"{name}.gather", axis=0)
        if layout.bits == 4:
            codes = self._nibbles(codes)
        shape = graph.integers(0, 0, layout.blocks, layout.block_size)
        values = self._floats(graph.op("Reshape", [codes, shape], f"{name}.blocks"))
        if self._points is not None:
            points = self._floats(self._gather_column(self._points, ids))
            values = graph.op("Sub", [values, points], f"{name}.centered")
        elif layout.bits == 4:
            values = graph.op("Sub", [values, graph.scalar(8.0)], f"{name}.centered")
        values = graph.op("Mul", [values, self._gather_column(self._scales, ids)], f"{name}.scaled")
        padded = layout.padded_columns != layout.columns
        joined = graph.op(
            "Reshape",
            [values, graph.integers(0, 0, layout.padded_columns)],
            f"{name}.rows",
            output=None if padded else output,
        )
        return graph.cut(joined, layout.columns, 2, output) if padded else joined

    def product(self, x: ir.Value, output: str) -> ir.Value:
        graph, layout, name = self._graph, self._layout, self._name
        stored = [self._typed_codes(), self._scales]
        if self._points is not None:
            points = self._points
            if layout.bits == 4:
                points = graph.op("Cast", [points], f"{name}.zero_points.uint4", to=ir.DataType.UINT4.value)
            stored.append(points)
        matrix = graph.op(
            "DequantizeLinear", stored, f"{name}.dequantized", axis=1, block_size=layout.block_size
        )
        if layout.padded_columns != layout.columns:
            matrix = graph.cut(matrix, layout.columns, 1, f"{name}.dequantized.unpadded")
        return table_product(graph, matrix, x, name, output)

    def _typed_codes(self) -> ir.Value:
        name, layout = f"{self._name}.codes", self._layout
        shape = [layout.rows, layout.padded_columns]
        return self._graph.find(name) or self._graph.initializer(name, self._codes, self._code_type, shape)

    def _gatherable(self) -> ir.Value:
        """The codes as something that Gather takes: 8-bit ones as they are, 4-bit ones as bytes of two."""
        if self._layout.bits == 8:
            return self._typed_codes()
        shape = [self._layout.rows, self._layout.padded_columns // 2]
        return self._graph.initializer(f"{self._name}.code_rows", self._codes, ir.DataType.UINT8, shape)

    def _nibbles(self, packed: ir.Value) -> ir.Value:
        """Bytes [batch, sequence, bytes] to codes [batch, sequence, bytes, 2], signed ones offset by 8."""
        graph, name = self._graph, self._name
        low = graph.op("BitwiseAnd", [packed, graph.scalar(15, np.uint8)], f"{name}.low")
        high = graph.op("BitShift", [packed, graph.scalar(4, np.uint8)], f"{name}.high", direction="RIGHT")
        pair = [graph.op("Unsqueeze", [v, graph.integers(3)], f"{v.name}.column") for v in (low, high)]
        codes = graph.op("Concat", pair, f"{name}.nibbles", axis=3)
        if not self._layout.symmetric:
            return codes
        # Two's complement to offset binary: -8..7 becomes 0..15.
        return graph.op("BitwiseXor", [codes, graph.scalar(8, np.uint8)], f"{name}.nibbles.offset")

    def _gather_column(self, per_block: ir.Value, ids: ir.Value) -> ir.Value:
        """Rows of a parameter [vocab_size, blocks], as [batch, sequence, blocks, 1]."""
        rows = self._graph.op("Gather", [per_block, ids], f"{per_block.name}.gather", axis=0)
        return self._graph.op("Unsqueeze", [rows, self._graph.integers(3)], f"{per_block.name}.column")

    def _floats(self, x: ir.Value) -> ir.Value:
        return self._graph.op("Cast", [x], f"{x.name}.float32", to=ir.DataType.FLOAT.value)


def code_type(tensor: QuantizedTensor) -> ir.DataType:
    """Symmetric codes are stored signed, so that DequantizeLinear needs no zero points; others unsigned."""
    signed = tensor.zero_points is None
    if tensor.bits == 4:
        return ir.DataType.INT4 if signed else ir.DataType.UINT4
    return ir.DataType.INT8 if signed else ir.DataType.UINT8


def code_bytes(tensor: QuantizedTensor, *, transposed: bool = False) -> np.ndarray:
    """The codes [rows, padded columns] (or turned over) as ONNX lays out `code_type`."""
    codes = tensor.codes.T if transposed else tensor.codes
    if tensor.zero_points is None:
        codes = codes ^ np.uint8(tensor.default_zero_point)
    return pack_flat(codes) if tensor.bits == 4 else np.ascontiguousarray(codes)


def pack_flat(codes: np.ndarray) -> np.ndarray:
    """4-bit codes two in a byte over the whole array in C order, as ONNX stores them; an odd end gets a 0."""
    flat = codes.reshape(-1)
    packed = flat[0::2] & np.uint8(15)
    packed[: flat.size // 2] |= flat[1::2] << 4
    return packed
