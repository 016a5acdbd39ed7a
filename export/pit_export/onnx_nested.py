"""The nested head: a shortlist from the leading columns of a sorted table, finished with the others.

The table lies in the file as two blocks of columns, each once. The product with the leading block estimates all
logits; the best `shortlist` of them get the rest of their sum, and the others keep the estimate.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from pit_deploy.quantize import QuantizedTensor
from pit_deploy.quantize.nested import NestedHead
from pit_deploy.runtimes.onnxruntime import SHORTLIST
from pit_export.onnx_graph import GraphBuilder
from pit_export.onnx_operators import Operators, Table

LEADING, REST = "leading", "rest"
"""What follows the table's name in the names of its two blocks."""


class NestedTable(Table):
    """A table [vocab_size, hidden_size] whose basis is sorted by importance (`quantization_basis`, `leading`)."""

    def __init__(self, operators: Operators, table: QuantizedTensor, nested: NestedHead, name: str) -> None:
        nested.check(*table.shape, table.block_size)
        self._graph, self._name, self._nested = operators.graph, name, nested
        self._widths = (nested.columns, table.columns - nested.columns)
        blocks = (table.column_block(0, nested.columns), table.column_block(nested.columns, table.columns))
        self._leading, self._rest = (
            operators.quantized_table(block, f"{name}.{part}")
            for block, part in zip(blocks, (LEADING, REST), strict=True)
        )

    def rows(self, ids: ir.Value, output: str) -> ir.Value:
        parts = [
            table.rows(ids, f"{self._name}.{part}.rows")
            for table, part in ((self._leading, LEADING), (self._rest, REST))
        ]
        return self._graph.op("Concat", parts, f"{self._name}.rows", output=output, axis=-1)

    def product(self, x: ir.Value, output: str) -> ir.Value:
        return self.logits(self._graph, x, None, output)

    def logits(self, graph: GraphBuilder, x: ir.Value, mask: ir.Value | None, output: str) -> ir.Value:
        """Logits of `x`, estimates outside the shortlist, which is chosen among the ids that `mask` leaves."""
        name, shortlist = f"{self._name}.head", self._nested.shortlist
        leading, rest = self._split(x)
        estimate = self._leading.product(leading, f"{name}.estimate")
        if mask is not None:
            estimate = graph.op("Add", [estimate, mask], f"{name}.masked")
        best, ids = graph.op_outputs(
            "TopK",
            [estimate, graph.integers(shortlist)],
            SHORTLIST,
            [f"{name}.shortlist.logits", f"{name}.shortlist.ids"],
            axis=-1,
            largest=1,
            sorted=0,
        )
        added = self._rest.products(graph, ids, rest, f"{name}.rest")
        finished = graph.op("Add", [best, added], f"{name}.finished")
        return graph.op(
            "ScatterElements", [estimate, ids, finished], f"{name}.logits", output=output, axis=-1
        )

    def _split(self, x: ir.Value) -> Sequence[ir.Value]:
        names = [f"{self._name}.state.{part}" for part in (LEADING, REST)]
        sizes = self._graph.integers(*self._widths)
        return self._graph.op_outputs("Split", [x, sizes], f"{self._name}.state", names, axis=-1)
