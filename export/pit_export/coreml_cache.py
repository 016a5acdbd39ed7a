"""Keys and values between calls: in states that Core ML keeps (iOS 18), or passed in and out (iOS 17).

Both are [layers, key-value heads, length, head_dim], one for keys and one for values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np
from coremltools.converters.mil.mil import Builder as mb

from pit_deploy.architecture import DecoderConfig
from pit_export.coreml_graph import GraphBuilder, Input, Value

KEYS, VALUES = "k_cache", "v_cache"


class Cache(ABC):
    """A cache of `length` tokens. `begin` starts a function; `append` is called once a layer, in order."""

    is_state: bool

    def __init__(self, graph: GraphBuilder, config: DecoderConfig, length: int) -> None:
        self.graph, self.config, self.length = graph, config, length
        self._given: Mapping[str, Value] = {}
        self._tokens = 0

    @property
    def shape(self) -> tuple[int, int, int, int]:
        config = self.config
        return config.num_hidden_layers, config.num_key_value_heads, self.length, config.head_dim

    def inputs(self) -> dict[str, Input]:
        """What a function takes besides the tokens."""
        return {name: Input(self.graph.dtype, self.shape, self.is_state) for name in (KEYS, VALUES)}

    @abstractmethod
    def begin(self, given: Mapping[str, Value], tokens: int) -> Value:
        """Start a function of `tokens` new tokens; returns the position that each key has, int32 [1, keys]."""

    @abstractmethod
    def table_rows(self, positions: Value) -> Value:
        """Rows of the rotary tables for int32 `positions`."""

    @abstractmethod
    def append(self, layer: int, key: Value, value: Value) -> tuple[Value, Value]:
        """Add [1, heads, tokens, head_dim] of a layer; all its keys and values, [1, heads, keys, head_dim]."""

    @abstractmethod
    def outputs(self) -> list[Value]:
        """What a function returns besides the logits."""

    @property
    @abstractmethod
    def has_empty_slots(self) -> bool:
        """Whether keys may have negative positions: slots without a token, which nobody may see."""


class StateCache(Cache):
    """Two states of a package, written in place at `position`; float16 is all that Core ML's states can hold."""

    is_state = True
    has_empty_slots = False

    def begin(self, given: Mapping[str, Value], tokens: int) -> Value:
        self._given, self._tokens = given, tokens
        position = given["position"]
        self._end = mb.add(x=position, y=np.array([tokens], np.int32))
        self._caches = {name: mb.read_state(input=given[name]) for name in (KEYS, VALUES)}
        return self.graph.constant("key_positions", lambda: np.arange(self.length, dtype=np.int32)[None])

    def table_rows(self, positions: Value) -> Value:
        return positions

    def append(self, layer: int, key: Value, value: Value) -> tuple[Value, Value]:
        keys, values = (self._write(name, layer, new) for name, new in ((KEYS, key), (VALUES, value)))
        return keys, values

    def _write(self, name: str, layer: int, new: Value) -> Value:
        heads, dim = self.config.num_key_value_heads, self.config.head_dim
        begin = mb.concat(
            values=[np.array([layer, 0], np.int32), self._given["position"], np.array([0], np.int32)], axis=0
        )
        end = mb.concat(
            values=[np.array([layer + 1, heads], np.int32), self._end, np.array([dim], np.int32)], axis=0
        )
        updated = mb.slice_update(x=self._caches[name], update=new, begin=begin, end=end)
        self._caches[name] = mb.coreml_update_state(state=self._given[name], value=updated)
        whole = [layer + 1, heads, self.length, dim]
        return mb.slice_by_index(x=self._caches[name], begin=[layer, 0, 0, 0], end=whole)

    def outputs(self) -> list[Value]:
        return []


class PassedCache(Cache):
    """Two inputs, and two outputs with their next values. The newest token is the last one: tokens move to the left.

    Slots that no token fills yet, and padding at the start of the first tokens, have negative positions.
    """

    is_state = False
    has_empty_slots = True

    def begin(self, given: Mapping[str, Value], tokens: int) -> Value:
        self._given, self._tokens = given, tokens
        self._next: dict[str, list[Value]] = {KEYS: [], VALUES: []}
        total = self.length + tokens
        offsets = self.graph.constant(
            f"key_offsets_{tokens}", lambda: np.arange(total, dtype=np.int32)[None] - self.length
        )
        return mb.add(x=offsets, y=given["position"])

    def table_rows(self, positions: Value) -> Value:
        return mb.maximum(x=positions, y=np.int32(0))

    def append(self, layer: int, key: Value, value: Value) -> tuple[Value, Value]:
        keys, values = (self._shift(name, layer, new) for name, new in ((KEYS, key), (VALUES, value)))
        return keys, values

    def _shift(self, name: str, layer: int, new: Value) -> Value:
        heads, dim, total = self.config.num_key_value_heads, self.config.head_dim, self.length + self._tokens
        past = mb.slice_by_index(
            x=self._given[name], begin=[layer, 0, 0, 0], end=[layer + 1, heads, self.length, dim]
        )
        joined = mb.concat(values=[past, new], axis=2)
        kept = mb.slice_by_index(x=joined, begin=[0, 0, self._tokens, 0], end=[1, heads, total, dim])
        self._next[name].append(kept)
        return joined

    def outputs(self) -> list[Value]:
        return [mb.concat(values=parts, axis=0, name=next_name(name)) for name, parts in self._next.items()]


def next_name(name: str) -> str:
    """The output that has the next value of a cache that is passed in."""
    return f"{name}_out"
