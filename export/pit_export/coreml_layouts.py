"""The two forms of a hidden state, with the ops that each profile uses on it.

`TokenMajor` [1, tokens, features] with matrix products, for CPU and GPU; `ChannelMajor` [1, features, 1, tokens] with
1x1 convolutions, the form that the Neural Engine is built for. Heads are [1, heads, tokens, head_dim] in both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from coremltools.converters.mil.mil import Builder as mb

from pit_export.coreml_graph import GraphBuilder, Value

SCALED_FLOOR = 1e-3
"""Least magnitude that a row is scaled by, where the norm's epsilon is 0."""


class StateLayout(ABC):
    """Ops on hidden states; `graph` gives constants their type."""

    feature_axis: int
    token_axis: int

    def __init__(self, graph: GraphBuilder) -> None:
        self.graph = graph

    @abstractmethod
    def weight_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """The shape in which a matrix [rows, columns] is stored."""

    @abstractmethod
    def from_rows(self, rows: Value, name: str) -> Value:
        """A hidden state from embedding rows [1, tokens, features]."""

    @abstractmethod
    def linear(self, x: Value, weight: Value, bias: Value | None, name: str) -> Value:
        """`x weightᵀ + bias` over the features."""

    @abstractmethod
    def split_heads(self, x: Value, heads: int, head_dim: int) -> Value:
        """[1, heads, tokens, head_dim] of a state with heads * head_dim features."""

    @abstractmethod
    def merge_heads(self, heads: Value) -> Value:
        """The state of [1, heads, tokens, head_dim]."""

    @abstractmethod
    def to_rows(self, x: Value, name: str) -> Value:
        """[1, tokens, features]."""

    def tokens(self, x: Value, indices: Value, name: str) -> Value:
        """The tokens at `indices` alone."""
        return mb.gather(x=x, indices=indices, axis=self.token_axis, validate_indices=False, name=name)

    def norm(self, x: Value, gain: Value, eps: float, name: str) -> Value:
        """The RMS norm over the features, times `gain`."""
        return rms_norm(self.graph, x, gain, eps, self.feature_axis, name)


class TokenMajor(StateLayout):
    feature_axis, token_axis = -1, 1

    def weight_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return (rows, columns)

    def from_rows(self, rows: Value, name: str) -> Value:
        return mb.identity(x=rows, name=name)

    def linear(self, x: Value, weight: Value, bias: Value | None, name: str) -> Value:
        if bias is None:
            return mb.linear(x=x, weight=weight, name=name)
        return mb.linear(x=x, weight=weight, bias=bias, name=name)

    def split_heads(self, x: Value, heads: int, head_dim: int) -> Value:
        split = mb.reshape(x=x, shape=[1, x.shape[1], heads, head_dim])
        return mb.transpose(x=split, perm=[0, 2, 1, 3])

    def merge_heads(self, heads: Value) -> Value:
        _, count, tokens, dim = heads.shape
        return mb.reshape(x=mb.transpose(x=heads, perm=[0, 2, 1, 3]), shape=[1, tokens, count * dim])

    def to_rows(self, x: Value, name: str) -> Value:
        return mb.identity(x=x, name=name)


class ChannelMajor(StateLayout):
    feature_axis, token_axis = 1, 3

    def weight_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return (rows, columns, 1, 1)

    def from_rows(self, rows: Value, name: str) -> Value:
        return mb.expand_dims(x=mb.transpose(x=rows, perm=[0, 2, 1]), axes=[2], name=name)

    def linear(self, x: Value, weight: Value, bias: Value | None, name: str) -> Value:
        if bias is None:
            return mb.conv(x=x, weight=weight, pad_type="valid", name=name)
        return mb.conv(x=x, weight=weight, bias=bias, pad_type="valid", name=name)

    def split_heads(self, x: Value, heads: int, head_dim: int) -> Value:
        split = mb.reshape(x=x, shape=[1, heads, head_dim, x.shape[3]])
        return mb.transpose(x=split, perm=[0, 1, 3, 2])

    def merge_heads(self, heads: Value) -> Value:
        _, count, tokens, dim = heads.shape
        return mb.reshape(x=mb.transpose(x=heads, perm=[0, 1, 3, 2]), shape=[1, count * dim, 1, tokens])

    def to_rows(self, x: Value, name: str) -> Value:
        return mb.transpose(x=mb.squeeze(x=x, axes=[2]), perm=[0, 2, 1], name=name)


def rms_norm(graph: GraphBuilder, x: Value, gain: Value, eps: float, axis: int, name: str) -> Value:
    """`x / sqrt(mean(x²) + eps) * gain` over `axis`, without squaring what float16 cannot square.

    In float16 each row is first divided by its own largest magnitude m, and eps by m²: a square past 65504 would be
    inf, a constant prescale would lose small rows, and a larger eps would change them.
    """
    if graph.dtype == "fp32":
        mean = mb.reduce_mean(x=mb.mul(x=x, y=x), axes=[axis], keep_dims=True)
        scale = mb.rsqrt(x=mb.add(x=mean, y=graph.number(eps)), epsilon=graph.number(0))
        return mb.mul(x=mb.mul(x=x, y=scale), y=gain, name=name)
    root = float(np.sqrt(eps)) or SCALED_FLOOR
    largest = mb.reduce_max(x=mb.abs(x=x), axes=[axis], keep_dims=True)
    # Below sqrt(eps) the epsilon outweighs the row anyway; so eps / m² stays at most 1.
    largest = mb.maximum(x=largest, y=graph.number(root))
    scaled = mb.real_div(x=x, y=largest)
    mean = mb.reduce_mean(x=mb.mul(x=scaled, y=scaled), axes=[axis], keep_dims=True)
    if eps:
        relative = mb.real_div(x=graph.number(root), y=largest)
        mean = mb.add(x=mean, y=mb.mul(x=relative, y=relative))
    scale = mb.rsqrt(x=mean, epsilon=graph.number(0 if eps else 6e-8))
    return mb.mul(x=mb.mul(x=scaled, y=scale), y=gain, name=name)
