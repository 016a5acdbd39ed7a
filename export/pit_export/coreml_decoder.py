"""The decoder as functions of an ML Program, the same for every profile: embedding, layers, last token, head.

It computes what `pit_deploy.decoder` computes; the profile decides the form of the hidden state (`coreml_layouts`),
where the cache is kept (`coreml_cache`) and how matrices are stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from coremltools.converters.mil.mil import Builder as mb

from pit_deploy.architecture import DecoderConfig
from pit_deploy.decoder import MASKED_SCORE
from pit_deploy.folding import SharedTable, Tables
from pit_export.backbone import Backbone
from pit_export.coreml_cache import Cache
from pit_export.coreml_graph import Constant, GraphBuilder, Input, Value, identifier
from pit_export.coreml_layouts import StateLayout, rms_norm
from pit_export.coreml_weights import Encoded, Form

EMBEDDING, HEAD, SHARED = "model.embed_tokens.weight", "lm_head.weight", "pit.table"
MASKED_LOGIT = -6e4
"""Added to the logits of ids without a token: a float16 with room for the logit itself."""


@dataclass(frozen=True)
class DecoderSpec:
    """What is built."""

    config: DecoderConfig
    tokenizer_length: int
    last_only: bool
    head_rows: int
    """Rows of the head in one product; more are several products, joined afterwards."""
    fused_attention: bool
    """Whether `scaled_dot_product_attention` is one op (iOS 18)."""


class DecoderGraph:
    """Writes functions of one decoder into `graph`. Each tensor is read and encoded once, by the first of them."""

    def __init__(
        self,
        graph: GraphBuilder,
        layout: StateLayout,
        cache: Cache,
        spec: DecoderSpec,
        backbone: Backbone,
        form: Form,
        tables: Tables,
    ) -> None:
        self.graph, self.layout, self.cache, self.spec = graph, layout, cache, spec
        self.config = spec.config
        self._backbone, self._form, self._tables = backbone, form, tables
        self._whole: dict[str, Encoded] = {}

    @property
    def hidden_states(self) -> list[str]:
        """Names of the residual stream: the embedding's output, then the output of each layer."""
        return [f"hidden_states_{n}" for n in range(self.config.num_hidden_layers + 1)]

    def add_function(self, name: str, tokens: int) -> None:
        """A function of `tokens` new tokens."""
        inputs = {"input_ids": Input("int32", (1, tokens)), "position": Input("int32", (1,))}
        if self.picks_token(tokens):
            inputs["last"] = Input("int32", (1,))
        self.graph.function(name, inputs | self.cache.inputs(), lambda given: self._build(given, tokens))

    def picks_token(self, tokens: int) -> bool:
        """Whether a function of so many tokens has an input that says which one's logits are wanted."""
        return self.spec.last_only and tokens > 1

    def _build(self, given: Mapping[str, Value], tokens: int) -> list[Value]:
        names = self.hidden_states
        positions = _positions(given["position"], tokens)
        step = self._step(given, positions, tokens)
        x = self._embed(given["input_ids"], names[0])
        for layer in range(self.config.num_hidden_layers):
            prefix = f"model.layers.{layer}"
            mixed = self._attention(layer, self._norm(x, f"{prefix}.input_layernorm"), step)
            if self.config.sandwich_norms:
                mixed = self._norm(mixed, f"{prefix}.post_attention_layernorm")
            x = mb.add(x=x, y=mixed)
            mlp = self._mlp(f"{prefix}.mlp", self._norm(x, f"{prefix}.{self.config.mlp_norm}"))
            if self.config.sandwich_norms:
                mlp = self._norm(mlp, f"{prefix}.post_feedforward_layernorm")
            x = mb.add(x=x, y=mlp, name=names[layer + 1])
        if self.picks_token(tokens):
            x = self.layout.tokens(x, given["last"], "last_token")
        return [self._logits(self._norm(x, "model.norm")), *self.cache.outputs()]

    def _step(self, given: Mapping[str, Value], positions: Value, tokens: int) -> _Step:
        keys = self.cache.begin(given, tokens)
        rows = self.cache.table_rows(positions)
        rotary = {}
        for local, rope in self.config.ropes.items():
            cos, sin = rope.tables(self.cache.length)
            prefix = "rotary.local" if local else "rotary"
            tables = {"cos": np.concatenate([cos, cos], 1), "sin": np.concatenate([-sin, sin], 1)}
            rotary[local] = [self._rows(f"{prefix}.{kind}", values, rows) for kind, values in tables.items()]
        masks = {w: self._mask(keys, positions, w) for w in dict.fromkeys(self.config.sliding_windows)}
        return _Step(rotary, masks)

    def _rows(self, name: str, values: np.ndarray, rows: Value) -> Value:
        table = self.graph.constant(name, partial(np.asarray, values))
        return mb.gather(
            x=table, indices=rows, axis=0, validate_indices=False, name=identifier(f"{name}_rows")
        )

    def _mask(self, keys: Value, positions: Value, window: int | None) -> Value:
        """What is added to the scores, [groups * tokens, keys]: 0, or a large finite negative number."""
        rows = mb.expand_dims(x=positions, axes=[1])
        hidden = mb.greater(x=keys, y=rows)
        if self.cache.has_empty_slots:
            hidden = mb.logical_or(x=hidden, y=mb.less(x=keys, y=np.int32(0)))
        if window is not None:
            first = mb.sub(x=rows, y=np.int32(window - 1))
            hidden = mb.logical_or(x=hidden, y=mb.less(x=keys, y=first))
        mask = mb.mul(x=mb.cast(x=hidden, dtype=self.graph.dtype), y=self.graph.number(MASKED_SCORE))
        groups = self.config.num_attention_heads // self.config.num_key_value_heads
        return mb.concat(values=[mask] * groups, axis=0) if groups > 1 else mask

    def _attention(self, layer: int, n: Value, step: _Step) -> Value:
        config, name = self.config, f"model.layers.{layer}.self_attn"
        heads = {
            "q": config.num_attention_heads,
            "k": config.num_key_value_heads,
            "v": config.num_key_value_heads,
        }
        parts: dict[str, Value] = {}
        for kind, count in heads.items():
            y = self._linear(
                n,
                f"{name}.{kind}_proj",
                config.query_size if kind == "q" else config.key_value_size,
                config.hidden_size,
                config.qkv_bias,
            )
            y = self.layout.split_heads(y, count, config.head_dim)
            if config.qk_norm and kind != "v":
                gain = self._gain(f"{name}.{kind}_norm", (config.head_dim,))
                y = rms_norm(self.graph, y, gain, config.rms_norm_eps, -1, identifier(f"{name}.{kind}_norm"))
            parts[kind] = y if kind == "v" else self._rotated(y, step.rotary[config.is_local(layer)])
        key, value = self.cache.append(layer, parts["k"], parts["v"])
        mixed = self._attend(parts["q"], key, value, step.masks[config.sliding_windows[layer]])
        return self._linear(
            self.layout.merge_heads(mixed),
            f"{name}.o_proj",
            config.hidden_size,
            config.query_size,
            config.o_bias,
        )

    def _rotated(self, x: Value, rotary: Sequence[Value]) -> Value:
        """Pairs `(i, i + head_dim / 2)` turned by the angles of their positions."""
        _, heads, tokens, dim = x.shape
        halves = [
            mb.slice_by_index(x=x, begin=[0, 0, 0, start], end=[1, heads, tokens, start + dim // 2])
            for start in (0, dim // 2)
        ]
        swapped = mb.concat(values=halves[::-1], axis=3)
        cos, sin = rotary
        return mb.add(x=mb.mul(x=x, y=cos), y=mb.mul(x=swapped, y=sin))

    def _attend(self, q: Value, key: Value, value: Value, mask: Value) -> Value:
        """Softmax attention, [1, heads, tokens, head_dim].

        Query heads that share a key head are taken as further tokens of it, so that no key is repeated.
        """
        config = self.config
        _, heads, tokens, dim = q.shape
        groups = heads // config.num_key_value_heads
        q = mb.reshape(x=q, shape=[1, config.num_key_value_heads, groups * tokens, dim])
        if self.spec.fused_attention and config.attention_softcap is None:
            if config.attention_scale != dim**-0.5:  # the operator itself divides by the root of dim
                q = mb.mul(x=q, y=self.graph.number(config.attention_scale * dim**0.5))
            mixed = mb.scaled_dot_product_attention(query=q, key=key, value=value, attn_mask=mask)
        else:
            q = mb.mul(x=q, y=self.graph.number(config.attention_scale))
            scores = self._capped(mb.matmul(x=q, y=key, transpose_y=True), config.attention_softcap)
            scores = mb.add(x=scores, y=mask)
            mixed = mb.matmul(x=mb.softmax(x=scores, axis=-1), y=value)
        return mb.reshape(x=mixed, shape=[1, heads, tokens, dim])

    def _capped(self, x: Value, softcap: float | None) -> Value:
        if softcap is None:
            return x
        divided = mb.mul(x=x, y=self.graph.number(1 / softcap))
        return mb.mul(x=mb.tanh(x=divided), y=self.graph.number(softcap))

    def _mlp(self, name: str, n: Value) -> Value:
        inner, outer, bias = self.config.intermediate_size, self.config.hidden_size, self.config.mlp_bias
        gate = _activation(self.config.hidden_act, self._linear(n, f"{name}.gate_proj", inner, outer, bias))
        up = self._linear(n, f"{name}.up_proj", inner, outer, bias)
        return self._linear(mb.mul(x=gate, y=up), f"{name}.down_proj", outer, inner, bias)

    def _embed(self, ids: Value, name: str) -> Value:
        shared = isinstance(self._tables, SharedTable)
        stored = self._table_name() if shared else EMBEDDING
        table = self.graph.constant(stored, lambda: self._encoded_table(stored, "embedding"))
        rows = mb.gather(x=table, indices=ids, axis=0, validate_indices=False)
        matrix = self._tables.embedding_map if isinstance(self._tables, SharedTable) else None
        if matrix is not None:
            rows = mb.linear(x=rows, weight=self.graph.constant("pit.embedding_map", lambda: matrix.T))
        if self.config.embedding_scale is not None:
            rows = mb.mul(x=rows, y=self.graph.number(self.config.embedding_scale))
        return self.layout.from_rows(rows, name)

    def _logits(self, n: Value) -> Value:
        tables, rows = self._tables, self.config.vocab_size
        stored = self._table_name() if isinstance(tables, SharedTable) else HEAD
        if isinstance(tables, SharedTable) and tables.head_map is not None:
            matrix = tables.head_map
            n = self.layout.linear(
                n, self.graph.constant("pit.head_map", lambda: matrix), None, "pit_head_map_product"
            )
        parts = []
        for start in range(0, rows, self.spec.head_rows):
            end = min(rows, start + self.spec.head_rows)
            whole = (start, end) == (0, rows)
            name = stored if whole else f"{stored}.{start}"
            weight = self.graph.constant(name, partial(self._encoded_table, stored, "head", start, end))
            parts.append(self.layout.linear(n, weight, None, "head" if whole else f"head_{start}"))
        joined = parts[0] if len(parts) == 1 else mb.concat(values=parts, axis=self.layout.feature_axis)
        joined = self._capped(joined, self.config.logit_softcap)
        if self.spec.tokenizer_length == rows:
            return self.layout.to_rows(joined, "logits")
        bias = np.zeros(rows)
        bias[self.spec.tokenizer_length :] = MASKED_LOGIT
        unmasked = self.layout.to_rows(joined, "logits_unmasked")
        return mb.add(x=unmasked, y=self.graph.constant("logits.mask", lambda: bias), name="logits")

    def _table_name(self) -> str:
        tables = self._tables
        assert isinstance(tables, SharedTable)
        return EMBEDDING if tables.embedding_map is None and tables.head_map is None else SHARED

    def _encoded_table(self, name: str, use: str, start: int = 0, end: int | None = None) -> Constant:
        """Rows of a token table; it is encoded whole, and kept until its last rows were asked for."""
        tables = self._tables
        table = tables.table if isinstance(tables, SharedTable) else getattr(tables, use)
        part = slice(start, len(table) if end is None else end)
        if name not in self._whole:
            self._whole[name] = self._form.encode(name, table, "tables")
        rows = self._form.rows(self._whole[name], part)
        if part.stop == len(table):
            del self._whole[name]
        size = (part.stop - part.start, table.shape[1])
        return self._form.constant(rows, size if use == "embedding" else self.layout.weight_shape(*size))

    def _linear(self, x: Value, name: str, rows: int, columns: int, has_bias: bool) -> Value:
        weight = self.graph.constant(f"{name}.weight", lambda: self._matrix(f"{name}.weight", rows, columns))
        bias = (
            self.graph.constant(f"{name}.bias", lambda: self._backbone.read(f"{name}.bias"))
            if has_bias
            else None
        )
        return self.layout.linear(x, weight, bias, identifier(name))

    def _matrix(self, name: str, rows: int, columns: int) -> Constant:
        encoded = self._form.encode(name, self._backbone.read(name), "weights")
        return self._form.constant(encoded, self.layout.weight_shape(rows, columns))

    def _norm(self, x: Value, name: str) -> Value:
        shape = [1] * len(x.shape)
        shape[self.layout.feature_axis] = self.config.hidden_size
        return self.layout.norm(x, self._gain(name, tuple(shape)), self.config.rms_norm_eps, identifier(name))

    def _gain(self, name: str, shape: tuple[int, ...]) -> Value:
        offset = np.float32(self.config.norm_offset)
        return self.graph.constant(
            f"{name}.weight", lambda: (self._backbone.read(f"{name}.weight") + offset).reshape(shape)
        )


@dataclass(frozen=True)
class _Step:
    """What all layers share of the new tokens: rotary rows [tokens, head_dim], masks by sliding window."""

    rotary: Mapping[bool, Sequence[Value]]
    """cos and sin by whether a layer is local."""
    masks: Mapping[int | None, Value]


def _positions(position: Value, tokens: int) -> Value:
    """Positions of the new tokens, int32 [tokens]."""
    if tokens == 1:
        return position
    return mb.add(x=position, y=np.arange(tokens, dtype=np.int32))


def _activation(name: str, x: Value) -> Value:
    if name == "silu":
        return mb.silu(x=x)
    if name == "relu":
        return mb.relu(x=x)
    return mb.gelu(x=x, mode="EXACT" if name == "gelu" else "TANH_APPROXIMATION")
