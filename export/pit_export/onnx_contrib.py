"""The profile `default`: ONNX Runtime's own operators, the fastest on phones, in browsers and in genai."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from pit_deploy.architecture import DecoderConfig
from pit_deploy.quantize import QuantizedTensor
from pit_deploy.quantize.nested import FEW_BLOCKS
from pit_export.onnx_graph import CONTRIB, GraphBuilder
from pit_export.onnx_operators import BlockLayout, Operators, Table


class ContribOperators(Operators):
    """GroupQueryAttention, MatMulNBits, GatherBlockQuantized and the fused norms."""

    opset = 21

    def __init__(
        self, graph: GraphBuilder, config: DecoderConfig, context_length: int, accuracy_level: int
    ) -> None:
        super().__init__(graph, config, context_length)
        self.accuracy_level = accuracy_level

    def prepare(self, ids: ir.Value, mask: ir.Value) -> None:
        graph = self.graph
        count = graph.op("ReduceSum", [mask, graph.integers(1)], "lengths.count", keepdims=0)
        last = graph.op("Sub", [count, graph.scalar(1, np.int64)], "lengths.last")
        self.last = graph.op("Cast", [last], "seqlens_k", to=ir.DataType.INT32.value)
        shape = graph.op("Shape", [mask], "lengths.shape")
        total = graph.op("Gather", [shape, graph.scalar(1, np.int64)], "lengths.total", axis=0)
        self.total = graph.op("Cast", [total], "total_sequence_length_scalar", to=ir.DataType.INT32.value)
        if not self._rotates_inside():
            self.position_ids = self.positions(ids, mask)

    def norm(self, x: ir.Value, gain: np.ndarray, name: str) -> ir.Value:
        return self.graph.op(
            "SimplifiedLayerNormalization",
            [x, self.graph.weight(f"{name}.gain", gain)],
            name,
            epsilon=self.config.rms_norm_eps,
            axis=-1,
        )

    def add_norm(
        self, x: ir.Value, residual: ir.Value, gain: np.ndarray, name: str, total: str
    ) -> tuple[ir.Value, ir.Value]:
        outputs = self.graph.op_outputs(
            "SkipSimplifiedLayerNormalization",
            [x, residual, self.graph.weight(f"{name}.gain", gain)],
            name,
            [name, "", "", total],
            domain=CONTRIB,
            epsilon=self.config.rms_norm_eps,
        )
        return outputs[0], outputs[3]

    def quantized_linear(self, x: ir.Value, weight: QuantizedTensor, name: str, output: str) -> ir.Value:
        codes = self.graph.weight(f"{name}.codes", weight.packed_codes())
        stored = [codes, *store_scales(self.graph, weight, name)]
        return self.matmul_nbits(x, BlockLayout.of(weight), stored, name, output)

    def quantized_table(self, table: QuantizedTensor, name: str) -> Table:
        return _QuantizedTable(self, table, name)

    def matmul_nbits(
        self, x: ir.Value, layout: BlockLayout, stored: Sequence[ir.Value], name: str, output: str
    ) -> ir.Value:
        """`x weightᵀ`; `stored` are the weight's codes [rows, blocks, bytes], scales and zero points."""
        return self.graph.op(
            "MatMulNBits",
            [x, *stored],
            name,
            output=output,
            domain=CONTRIB,
            K=layout.columns,
            N=layout.rows,
            bits=layout.bits,
            block_size=layout.block_size,
            accuracy_level=self.accuracy_level,
        )

    def packs_projections(self) -> bool:
        return self._rotates_inside() and not self.config.qk_norm

    def attention(
        self, layer: int, projections: Sequence[ir.Value], past: Sequence[ir.Value]
    ) -> list[ir.Value]:
        config, name = self.config, f"model.layers.{layer}.self_attn"
        inside, rotation = self._rotates_inside(), self.rotations[config.is_local(layer)]
        if len(projections) == 1:
            queries: list[ir.Value | None] = [projections[0], None, None]
        elif inside:
            queries = list(projections)
        else:
            q, k, v = projections
            q, k = (self._rotate(x, rotation, f"{name}.{kind}_rotated") for x, kind in ((q, "q"), (k, "k")))
            queries = [q, k, v]
        return self.graph.op_outputs(
            "GroupQueryAttention",
            [*queries, *past, self.last, self.total, *(rotation if inside else [])],
            name,
            [name, f"present.{layer}.key", f"present.{layer}.value"],
            domain=CONTRIB,
            num_heads=config.num_attention_heads,
            kv_num_heads=config.num_key_value_heads,
            scale=config.attention_scale,
            softcap=config.attention_softcap or 0.0,
            do_rotary=int(inside),
            rotary_interleaved=0,
            local_window_size=config.sliding_windows[layer] or -1,
        )

    def _rotates_inside(self) -> bool:
        """GroupQueryAttention rotates heads whose width is a multiple of 16; others are rotated before it."""
        return self.config.head_dim % 16 == 0

    def _rotate(self, x: ir.Value, rotation: Sequence[ir.Value], name: str) -> ir.Value:
        return self.graph.op("RotaryEmbedding", [x, self.position_ids, *rotation], name, domain=CONTRIB)


class _QuantizedTable(Table):
    """Codes are stored once; the gather and the product each name them in the shape that they need."""

    def __init__(self, operators: ContribOperators, table: QuantizedTensor, name: str) -> None:
        self._operators, self._graph, self._name = operators, operators.graph, name
        self._layout = BlockLayout.of(table)
        self._block_bytes = table.packed_codes().shape[2]
        self._codes = self._graph.store(table.packed_codes())
        self._scales = store_scales(self._graph, table, name)

    def rows(self, ids: ir.Value, output: str) -> ir.Value:
        layout = self._layout
        padded = layout.padded_columns != layout.columns
        gathered = self._graph.op(
            "GatherBlockQuantized",
            [
                self._code_view("code_rows", layout.rows, layout.blocks * self._block_bytes),
                ids,
                *self._scales,
            ],
            f"{output}.gather",
            output=None if padded else output,
            domain=CONTRIB,
            bits=layout.bits,
            block_size=layout.block_size,
            gather_axis=0,
            quantize_axis=1,
        )
        return self._graph.cut(gathered, layout.columns, 2, output) if padded else gathered

    def products(self, graph: GraphBuilder, ids: ir.Value, x: ir.Value, output: str) -> ir.Value:
        """A few blocks of bytes without zero points are gathered as they are, and scaled once a block: the scale of
        every number, which GatherBlockQuantized looks up, takes a shortlist of the sample half as long again. The
        product has a column for every block, so that with many of them it is the slower one."""
        layout = self._layout
        fits = layout.symmetric and layout.padded_columns == layout.columns and layout.blocks <= FEW_BLOCKS
        if layout.bits != 8 or not fits:
            return super().products(graph, ids, x, output)
        view = self._code_view("code_rows", layout.rows, layout.columns)
        codes = graph.op("Gather", [view, ids], f"{output}.codes", axis=0)
        one, middle = graph.scalar(1, np.float32), graph.scalar(128, np.uint8)
        numbers = graph.op("DequantizeLinear", [codes, one, middle], f"{output}.numbers")
        blocks = np.repeat(np.eye(layout.blocks, dtype=np.float32), layout.block_size, axis=0)
        column = graph.op("Unsqueeze", [x, graph.integers(-1)], f"{output}.column")
        columns = graph.op("Mul", [column, graph.weight(f"{output}.blocks", blocks)], f"{output}.columns")
        by_block = graph.op("MatMul", [numbers, columns], f"{output}.by_block")
        scales = graph.op("Gather", [self._scales[0], ids], f"{output}.scales", axis=0)
        scaled = graph.op("Mul", [by_block, scales], f"{output}.scaled")
        return graph.op("ReduceSum", [scaled, graph.integers(-1)], output, keepdims=0)

    def product(self, x: ir.Value, output: str) -> ir.Value:
        layout = self._layout
        codes = self._code_view("codes", layout.rows, layout.blocks, self._block_bytes)
        name = f"{self._name}.product"
        return self._operators.matmul_nbits(x, layout, [codes, *self._scales], name, output)

    def _code_view(self, name: str, *shape: int) -> ir.Value:
        name = f"{self._name}.{name}"
        made = self._graph.find(name)
        return made or self._graph.initializer(name, self._codes, ir.DataType.UINT8, shape)


def store_scales(graph: GraphBuilder, weight: QuantizedTensor, name: str) -> list[ir.Value]:
    """Scales [rows, blocks] and, where there are any, packed zero points, in the order of the operators."""
    stored = [graph.weight(f"{name}.scales", weight.scales)]
    points = weight.packed_zero_points()
    return stored if points is None else [*stored, graph.weight(f"{name}.zero_points", points)]
