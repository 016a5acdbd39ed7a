"""The decoder's graph, the same for every profile: embedding, layers, final norm, last position, head."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from pit_deploy.architecture import DecoderConfig
from pit_deploy.folding import SharedTable, Tables
from pit_deploy.quantize import QuantizedTensor
from pit_deploy.quantize.plan import QuantizationPlan
from pit_deploy.runtimes.onnxruntime import LAST_POSITION
from pit_export.backbone import Backbone
from pit_export.onnx_graph import GraphBuilder
from pit_export.onnx_nested import NestedTable
from pit_export.onnx_operators import Encoded, Operators, Table, masked, stack_rows

EMBEDDING = "model.embed_tokens.weight"
MASKED_LOGIT = -1e9
"""Added to the logits of ids without a token; finite, and below what any temperature brings back."""


class DecoderGraph:
    """One decoder, written into `graph` by `operators`; `plan` encodes the tensors of `backbone`."""

    def __init__(
        self,
        graph: GraphBuilder,
        operators: Operators,
        config: DecoderConfig,
        backbone: Backbone,
        plan: QuantizationPlan,
    ) -> None:
        self.graph, self.operators, self.config = graph, operators, config
        self._backbone, self._plan = backbone, plan

    @property
    def hidden_states(self) -> list[str]:
        """Names of the residual stream: the embedding's output, then the output of each layer."""
        return [f"hidden_states.{n}" for n in range(self.config.num_hidden_layers + 1)]

    def build(self, tables: Tables, tokenizer_length: int, *, last_only: bool) -> None:
        """Write the whole decoder, each tensor as it comes by."""
        graph, layers, names = self.graph, self.config.num_hidden_layers, self.hidden_states
        ids = graph.input("input_ids", ir.DataType.INT64, ["batch_size", "sequence_length"])
        mask = graph.input("attention_mask", ir.DataType.INT64, ["batch_size", "total_sequence_length"])
        pasts = [self._past(layer) for layer in range(layers)]
        self.operators.prepare(ids, mask)
        embedding, head = self._tables(tables)
        x = self._embedded(embedding, ids, names[0])
        presents: list[ir.Value] = []
        first = "model.layers.0.input_layernorm"
        n = self._norm(x, first)
        for layer in range(layers):
            prefix = f"model.layers.{layer}"
            y, key, value = self._attention(layer, n, pasts[layer])
            presents += [key, value]
            if self.config.sandwich_norms:
                y = self._norm(y, f"{prefix}.post_attention_layernorm")
            n, x = self._add_norm(y, x, f"{prefix}.{self.config.mlp_norm}", f"{prefix}.attention_residual")
            y = self._mlp(f"{prefix}.mlp", n)
            if self.config.sandwich_norms:
                y = self._norm(y, f"{prefix}.post_feedforward_layernorm")
            following = f"model.layers.{layer + 1}.input_layernorm" if layer + 1 < layers else "model.norm"
            n, x = self._add_norm(y, x, following, names[layer + 1])
        if last_only:
            n = graph.op("Gather", [n, graph.integers(-1)], LAST_POSITION, axis=1)
        self._logits(n, head, tokenizer_length, last_only=last_only)
        for present in presents:
            graph.output(present, ir.DataType.FLOAT, self.cache_shape("total_sequence_length"))

    def _embedded(self, embedding: _Embedding, ids: ir.Value, output: str) -> ir.Value:
        scale = self.config.embedding_scale
        if scale is None:
            return embedding(ids, output)
        rows = embedding(ids, "embedding.unscaled")
        return self.graph.op("Mul", [rows, self.graph.scalar(scale)], output)

    def _past(self, layer: int) -> list[ir.Value]:
        names = (f"past_key_values.{layer}.{kind}" for kind in ("key", "value"))
        shape = self.cache_shape("past_sequence_length")
        return [self.graph.input(name, ir.DataType.FLOAT, shape) for name in names]

    def cache_shape(self, length: str) -> list[int | str]:
        """Shape of keys or values: [batch, heads, `length`, head_dim]."""
        return ["batch_size", self.config.num_key_value_heads, length, self.config.head_dim]

    def _tables(self, tables: Tables) -> tuple[_Embedding, _Head]:
        """Store the token tables; the embedding is a function of ids, the head one of the final state."""
        graph, operators = self.graph, self.operators
        if not isinstance(tables, SharedTable):
            embedding = operators.table(self._table(tables.embedding, EMBEDDING), EMBEDDING)
            return embedding.rows, self._own_head(tables.head)
        plain = tables.head_map is None and tables.embedding_map is None
        name = EMBEDDING if plain else "pit.table"
        encoded, nested = self._table(tables.table, name), self._plan.nested
        if nested is not None and isinstance(encoded, QuantizedTensor):
            table: Table = NestedTable(operators, encoded, nested, name)
        else:
            table = operators.table(encoded, name)
        embed = _mapped_rows(graph, table, tables.embedding_map)
        return embed, _mapped_product(graph, table, tables.head_map)

    def _own_head(self, table: np.ndarray) -> _Head:
        def head(n: ir.Value, output: str, mask: ir.Value | None) -> ir.Value:
            encoded = self._table(table, "lm_head.weight")
            return masked(
                self.graph,
                lambda name: self.operators.linear(n, encoded, "lm_head", output=name),
                mask,
                output,
            )

        return head

    def _table(self, table: np.ndarray, name: str) -> Encoded:
        return self._plan.encode(name, table, "tables")

    def _attention(self, layer: int, n: ir.Value, past: Sequence[ir.Value]) -> list[ir.Value]:
        config, name = self.config, f"model.layers.{layer}.self_attn"
        parts = [self._matrix(f"{name}.{kind}_proj") for kind in "qkv"]
        biases = [self._bias(f"{name}.{kind}_proj", config.qkv_bias) for kind in "qkv"]
        packed = stack_rows(parts) if self.operators.packs_projections() else None
        if packed is not None:
            bias = np.concatenate([b for b in biases if b is not None]) if config.qkv_bias else None
            projections = [self.operators.linear(n, packed, f"{name}.qkv_proj", bias)]
        else:
            projections = [
                self.operators.linear(n, part, f"{name}.{kind}_proj", bias)
                for kind, part, bias in zip("qkv", parts, biases, strict=True)
            ]
        if config.qk_norm:
            for i, (kind, heads) in enumerate(
                (("q", config.num_attention_heads), ("k", config.num_key_value_heads))
            ):
                gain = self._gain(f"{name}.{kind}_norm")
                projections[i] = self.operators.head_norm(projections[i], heads, gain, f"{name}.{kind}_norm")
        mixed, *present = self.operators.attention(layer, projections, past)
        return [self._linear(mixed, f"{name}.o_proj", config.o_bias), *present]

    def _mlp(self, name: str, n: ir.Value) -> ir.Value:
        bias = self.config.mlp_bias
        gate = self.operators.activation(self._linear(n, f"{name}.gate_proj", bias), f"{name}.activation")
        up = self._linear(n, f"{name}.up_proj", bias)
        return self._linear(self.graph.op("Mul", [gate, up], f"{name}.gated"), f"{name}.down_proj", bias)

    def _logits(self, n: ir.Value, head: _Head, tokenizer_length: int, *, last_only: bool) -> None:
        rows, mask = self.config.vocab_size, None
        if tokenizer_length < rows:
            bias = np.zeros(rows, np.float32)
            bias[tokenizer_length:] = MASKED_LOGIT
            mask = self.graph.weight("logits.mask", bias)
        softcap = self.config.logit_softcap
        logits = head(n, "logits", mask) if softcap is None else self._capped(n, head, mask, softcap)
        length: int | str = 1 if last_only else "sequence_length"
        self.graph.output(logits, ir.DataType.FLOAT, ["batch_size", length, rows])

    def _capped(self, n: ir.Value, head: _Head, mask: ir.Value | None, softcap: float) -> ir.Value:
        graph, cap = self.graph, self.graph.scalar(softcap)
        # The mask is added on both sides of the cap: a shortlist is chosen before it, and it undoes the mask.
        divided = graph.op("Div", [head(n, "logits.uncapped", mask), cap], "logits.divided")
        capped = graph.op("Tanh", [divided], "logits.tanh")
        if mask is None:
            return graph.op("Mul", [capped, cap], "logits")
        return graph.op("Add", [graph.op("Mul", [capped, cap], "logits.unmasked"), mask], "logits")

    def _linear(self, x: ir.Value, name: str, has_bias: bool) -> ir.Value:
        return self.operators.linear(x, self._matrix(name), name, self._bias(name, has_bias))

    def _norm(self, x: ir.Value, name: str) -> ir.Value:
        return self.operators.norm(x, self._gain(name), name)

    def _add_norm(self, y: ir.Value, x: ir.Value, name: str, total: str) -> tuple[ir.Value, ir.Value]:
        return self.operators.add_norm(y, x, self._gain(name), name, total)

    def _matrix(self, name: str) -> Encoded:
        return self._plan.encode(f"{name}.weight", self._backbone.read(f"{name}.weight"), "weights")

    def _bias(self, name: str, there: bool) -> np.ndarray | None:
        return self._backbone.read(f"{name}.bias") if there else None

    def _gain(self, name: str) -> np.ndarray:
        return self._backbone.read(f"{name}.weight") + np.float32(self.config.norm_offset)


_Embedding = Callable[[ir.Value, str], ir.Value]
_Head = Callable[[ir.Value, str, ir.Value | None], ir.Value]
"""Of the final state, the name of the logits, and the mask of ids without a token where there are such."""


def _mapped_rows(graph: GraphBuilder, table: Table, embedding_map: np.ndarray | None) -> _Embedding:
    if embedding_map is None:
        return table.rows
    stored = graph.weight("pit.embedding_map", embedding_map.astype(np.float32))

    def embed(ids: ir.Value, output: str) -> ir.Value:
        rows = table.rows(ids, "pit.embedding_map.input")
        return graph.op("MatMul", [rows, stored], "pit.embedding_map.product", output=output)

    return embed


def _mapped_product(graph: GraphBuilder, table: Table, head_map: np.ndarray | None) -> _Head:
    stored = None if head_map is None else graph.weight("pit.head_map", head_map.T.astype(np.float32))

    def head(n: ir.Value, output: str, mask: ir.Value | None) -> ir.Value:
        x = n if stored is None else graph.op("MatMul", [n, stored], "pit.head_map.product")
        return table.logits(graph, x, mask, output)

    return head
