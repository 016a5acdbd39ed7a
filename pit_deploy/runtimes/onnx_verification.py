"""Several tokens in one pass of an ONNX graph, each with the bits that it would have alone.

Products, norms and elementwise operators of ONNX Runtime compute a row of several as they compute one row.
GroupQueryAttention does not: over several tokens it sums in another order. So the graph is changed at load: where
the logits of several tokens are asked for, their keys and values are appended at once, and each token then attends
by itself, to the cache as long as it would be there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pit_deploy.errors import InputError
from pit_deploy.extras import require
from pit_deploy.runtimes.base import check_room
from pit_deploy.runtimes.onnxruntime import LAST_POSITION, OnnxRuntime, SharedCache

if TYPE_CHECKING:
    import onnx

KEPT = "num_logits_to_keep"
"""The further input of a changed graph, int64 [1]: how many last positions have logits. With more than 1 they must
be all that are run, and each attends by itself."""
_CHECK_PROMPT = 5
_CHECK_DEPTH = 1000
"""Tokens in the cache at the second place that is compared, where the context has so many."""
_CHECKED_TOKENS = (2, 3, 4, 13)
"""Passes that opening compares: kernels take rows by 2, 3 or 4, and what is left over alone."""


class VerifyingOnnxRuntime(OnnxRuntime):
    """An `OnnxRuntime` that also implements `VerifyingRuntime`, over the profile `default`.

    One session serves all: `prefill` and `decode` compute what they compute without. Opening runs some tokens both
    ways and raises `InputError` where this machine's kernels give a token among several other bits than alone.
    """

    def __init__(
        self,
        model_path: Path | str,
        context_length: int,
        hidden_states: Sequence[str] = (),
        threads: int | None = None,
        profile: str = "default",
    ) -> None:
        if profile != "default":
            raise InputError(
                f"{model_path} cannot speculate: it has the profile {profile}, whose attention gives a token among "
                f"several other bits than alone; run it without --speculate, or export it with --profile default."
            )
        self._checked = False
        super().__init__(model_path, context_length, hidden_states, threads, profile)
        self._check_passes()
        self._checked = True

    def last_logits(self, ids: Sequence[int]) -> np.ndarray:
        """Append `ids` in one pass and return the logits of each, [tokens, vocab_size], until the next call."""
        check_room(self, ids)
        if self._position and self._checked:
            self._join_pages()
        tokens = np.array([ids], np.int64)
        logits: np.ndarray = self._guarded(lambda: self._rows.run_rows(tokens, self._position))
        self._position += len(ids)
        return logits

    def rewind(self, position: int) -> None:
        """Take back the tokens from `position` on."""
        if not 0 <= position <= self._position:
            raise ValueError(f"there is no way from {self._position} tokens back to {position}")
        self._position = position

    def _model(self) -> bytes:
        onnx = require("onnx", "onnx")
        model = onnx.load(self.model_path, load_external_data=False)
        try:
            verifying_graph_(model.graph)
        except ValueError as error:
            raise InputError(
                f"{self.model_path} cannot speculate: {error}; run it without --speculate."
            ) from error
        serialized: bytes = model.SerializeToString()
        return serialized

    def _make_cache(self, profile: str) -> SharedCache:
        self._rows = _VerifyingCache(self._session, self.context_length, self.vocab_size)
        return self._rows

    def _check_passes(self) -> None:
        """Compare passes of several tokens with single ones, after few tokens and after many; empties the cache."""
        longest = min(max(_CHECKED_TOKENS), self.context_length - _CHECK_PROMPT)
        if longest < min(_CHECKED_TOKENS):
            return  # no room for a pass of several tokens after a prompt
        ids = np.random.default_rng(0).integers(0, self.vocab_size, _CHECK_PROMPT + longest).tolist()
        self.prefill(ids[:_CHECK_PROMPT])
        self._compare_passes(ids[_CHECK_PROMPT:])
        deep = min(_CHECK_DEPTH, self.context_length - longest)
        if deep > self._position:
            self._rows.fill(deep)
            self._position = deep
            self._compare_passes(ids[_CHECK_PROMPT:])
        self.reset()

    def _compare_passes(self, ids: Sequence[int]) -> None:
        """Run `ids` one by one and several at a time; raises `InputError` where logits or cache differ in a bit."""
        start = self._position
        alone = np.stack([self.prefill([id]) for id in ids])
        states = self._rows.states(start, self._position)
        for tokens in (n for n in _CHECKED_TOKENS if n <= len(ids)):
            self.rewind(start)
            together = self.last_logits(ids[:tokens])
            same = np.array_equal(alone[:tokens], together) and all(
                np.array_equal(one[:, :, :tokens], other)
                for one, other in zip(states, self._rows.states(start, self._position), strict=True)
            )
            if not same:
                difference = np.abs(alone[:tokens] - together).max()
                raise InputError(
                    f"{self.model_path} cannot speculate here: after {start} tokens ONNX Runtime computes {tokens} in "
                    f"one pass otherwise than one by one (logits differ by up to {difference:.1e}), which could change "
                    f"the text; run it without --speculate, or export 4-bit weights with --block-size 32."
                )


class _VerifyingCache(SharedCache):
    def __init__(self, session: Any, context_length: int, vocab_size: int) -> None:
        super().__init__(session, context_length, vocab_size)
        self._kept = np.ones(1, np.int64)
        self._bind_input(KEPT, self._kept)
        self._room = np.empty([0, vocab_size], np.float32)

    def run_rows(self, ids: np.ndarray, position: int) -> np.ndarray:
        """As `run`, but the logits of every token, [tokens, vocab_size]; overwritten by the next call."""
        tokens, vocab_size = ids.shape[1], self._room.shape[1]
        if len(self._room) < tokens:
            self._room = np.empty([tokens, vocab_size], np.float32)
        logits = self._room[:tokens]
        self._kept[0] = tokens
        self._bind_output(
            "logits", logits.reshape([tokens, 1, vocab_size] if self._last_only else [1, tokens, vocab_size])
        )
        try:
            self._run(ids, position)
        finally:
            self._kept[0] = 1
            self._bind_output("logits", self._logits)
        return logits

    def fill(self, tokens: int) -> None:
        """Numbers of the size of keys and values as the first `tokens` positions of every buffer."""
        random = np.random.default_rng(0)
        for buffer in self._buffers:
            buffer[:, :, :tokens] = random.standard_normal(buffer[:, :, :tokens].shape, np.float32)

    def states(self, start: int, end: int) -> list[np.ndarray]:
        """A copy of the keys and values of positions `start` to `end`."""
        return [buffer[:, :, start:end].copy() for buffer in self._buffers]


def verifying_graph_(graph: onnx.GraphProto) -> None:
    """Add the input `KEPT`: with 1 all is as before; with more, each of the tokens run attends by itself.

    `last_position` then keeps that many positions, and moves them to the batch: [kept, 1, hidden_size], so that
    also a head whose table is the left factor multiplies each alone. A graph without it gives all logits anyway.
    Raises `ValueError` for attention that the default exporter does not write.
    """
    onnx = require("onnx", "onnx")
    build = _Builder(graph)
    graph.input.append(onnx.helper.make_tensor_value_info(KEPT, onnx.TensorProto.INT64, [1]))
    attentions = [node for node in graph.node if node.op_type == "GroupQueryAttention"]
    if not attentions:
        raise ValueError("its graph has no GroupQueryAttention")
    nodes = list(graph.node)
    del graph.node[:]
    prepared = False
    for node in nodes:
        if node.op_type == "GroupQueryAttention":
            if not prepared:
                build.prepare(total=node.input[6])
                prepared = True
            build.attend(node)
        elif node.name == LAST_POSITION:
            build.keep_last(node)
        else:
            graph.node.append(node)
    logits = next(value for value in graph.output if value.name == "logits")
    logits.type.tensor_type.shape.dim[0].dim_param = "batch_size_or_kept"


class _Builder:
    """Appends nodes to a graph; all new names begin with `verification.`."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._onnx = require("onnx", "onnx")
        self._graph = graph
        self._inputs = {value.name: value for value in graph.input}
        self._shapes = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
        self._constants: set[str] = set()
        self._placed: set[int] = set()

    def prepare(self, total: str) -> None:
        """For each token that attends by itself: its tokens in the cache, and those less one, which is its place."""
        one, axis = self._constant("one", np.array(1, np.int32)), self._constant("axis", np.array([1]))
        place_axes = self._constant("place_axes", np.array([0, 1, 3]))
        for operator, inputs, output, attributes in (
            ("Squeeze", [KEPT], "kept.long", {}),
            ("Cast", ["verification.kept.long"], "kept", {"to": self._onnx.TensorProto.INT32}),
            ("Greater", ["verification.kept", one], "several", {}),
            ("Sub", [total, "verification.kept"], "first", {}),
            ("Range", ["verification.first", total, one], "lasts", {}),
            ("Add", ["verification.lasts", one], "totals", {}),
            ("Unsqueeze", ["verification.lasts", axis], "seqlens_k", {}),
            ("Cast", ["verification.lasts"], "lasts.long", {"to": self._onnx.TensorProto.INT64}),
            ("Unsqueeze", ["verification.lasts.long", place_axes], "places", {}),
            (
                "Unsqueeze",
                ["verification.first", self._constant("batch_axis", np.array([0]))],
                "first.row",
                {},
            ),
            ("Cast", ["verification.first.row"], "offset", {"to": self._onnx.TensorProto.INT64}),
            ("Neg", [KEPT], "start", {}),
        ):
            self._graph.node.append(self._node(operator, inputs, f"verification.{output}", **attributes))

    def attend(self, node: onnx.NodeProto) -> None:
        """Put `node` into a choice: as it is, or token by token."""
        helper = self._onnx.helper
        query, key, value, past_key = node.input[:4]
        extra = [name for name in node.input[9:] if name]
        if extra or not past_key or len(node.output) != 3:
            raise ValueError(f"its attention {node.name} has the further inputs {extra}, or no cache")
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        heads, kv_heads = attributes["num_heads"], attributes["kv_num_heads"]
        width = self._inputs[past_key].type.tensor_type.shape.dim[3].dim_value

        def together() -> onnx.GraphProto:
            names = ["together", "together.key", "together.value"]
            same = helper.make_node(
                "GroupQueryAttention", node.input, names, domain=node.domain, **attributes
            )
            return self._branch([same], names)

        def alone() -> onnx.GraphProto:
            nodes = []
            q, k, v = query, key, value
            if not key:  # one tensor holds all three
                ends = [0, heads * width, (heads + kv_heads) * width, (heads + 2 * kv_heads) * width]
                for part, start, end in zip("qkv", ends, ends[1:], strict=False):
                    nodes.append(self._slice_last(query, part, start, end))
                q, k, v = "q", "k", "v"
            nodes += self._append(node, k, v, kv_heads, width)
            nothing = self._constant(
                f"nothing{kv_heads * width}", np.zeros([1, 0, kv_heads * width], np.float32)
            )
            inputs = [
                "row",
                nothing,
                nothing,
                "alone.key",
                "alone.value",
                "seqlens_k",
                "total",
                *node.input[7:],
            ]
            row = helper.make_node(
                "GroupQueryAttention", inputs, ["attended"], domain=node.domain, **attributes
            )
            int32, float32 = self._onnx.TensorProto.INT32, self._onnx.TensorProto.FLOAT
            body = helper.make_graph(
                [row],
                "row",
                [
                    helper.make_tensor_value_info("row", float32, [1, 1, heads * width]),
                    helper.make_tensor_value_info("seqlens_k", int32, [1]),
                    helper.make_tensor_value_info("total", int32, []),
                ],
                [helper.make_tensor_value_info("attended", float32, [1, 1, heads * width])],
            )
            scan = helper.make_node(
                "Scan",
                ["rows", "verification.seqlens_k", "verification.totals"],
                ["rows.attended"],
                num_scan_inputs=3,
                body=body,
            )
            rows = self._constant(f"rows{heads * width}", np.array([-1, 1, 1, heads * width]))
            whole = self._constant(f"whole{heads * width}", np.array([1, -1, heads * width]))
            nodes += [
                helper.make_node("Reshape", [q, rows], ["rows"]),
                scan,
                helper.make_node("Reshape", ["rows.attended", whole], ["alone"]),
            ]
            return self._branch(nodes, ["alone", "alone.key", "alone.value"])

        choice = helper.make_node(
            "If",
            ["verification.several"],
            list(node.output),
            name=node.name,
            then_branch=alone(),
            else_branch=together(),
        )
        self._graph.node.append(choice)

    def _append(
        self, node: onnx.NodeProto, key: str, value: str, heads: int, width: int
    ) -> list[onnx.NodeProto]:
        """Nodes that write `key`, turned, and `value`, [1, tokens, heads * width], into the buffers in place."""
        nodes = []
        attributes = {a.name: self._onnx.helper.get_attribute_value(a) for a in node.attribute}
        if attributes.get("do_rotary"):
            turning = {
                "num_heads": heads,
                "interleaved": attributes.get("rotary_interleaved", 0),
                "domain": node.domain,
            }
            turned_width = 2 * self._shapes[node.input[7]][1]
            if turned_width != width:
                turning["rotary_embedding_dim"] = turned_width
            inputs = [key, "verification.offset", *node.input[7:9]]
            nodes.append(self._node("RotaryEmbedding", inputs, "turned", **turning))
            key = "turned"
        shape = self._constant(f"heads{heads}.{width}", np.array([1, -1, heads, width]))
        places = self._places(heads)
        for name, part, past in (("key", key, node.input[3]), ("value", value, node.input[4])):
            nodes += [
                self._node("Reshape", [part, shape], f"{name}.tokens"),
                self._node("Transpose", [f"{name}.tokens"], f"{name}.heads", perm=[0, 2, 1, 3]),
                self._node("ScatterND", [past, places, f"{name}.heads"], f"alone.{name}"),
            ]
        return nodes

    def _places(self, heads: int) -> str:
        """Where the tokens lie in a buffer: [1, heads, tokens, 3], each a batch, a head and a position."""
        names = {part: f"verification.{part}{heads}" for part in ("position", "batch", "head", "places")}
        if heads not in self._placed:
            self._placed.add(heads)
            zero = self._constant(f"zero{heads}", np.zeros([1, heads, 1, 1], np.int64))
            number = self._constant(f"number{heads}", np.arange(heads).reshape(1, heads, 1, 1))
            self._graph.node.extend(
                [
                    self._node("Add", ["verification.places", zero], names["position"]),
                    self._node("Sub", [names["position"], names["position"]], names["batch"]),
                    self._node("Add", [names["batch"], number], names["head"]),
                    self._node(
                        "Concat", [names["batch"], names["head"], names["position"]], names["places"], axis=-1
                    ),
                ]
            )
        return names["places"]

    def keep_last(self, node: onnx.NodeProto) -> None:
        """Replace `last_position`."""
        end, axis = self._constant("end", np.array([2**63 - 1])), self._constant("axis", np.array([1]))
        kept, rows = "verification.kept_positions", "verification.kept_rows"
        # Not a Transpose: ONNX Runtime would merge it with those of the head, and so change the head.
        self._graph.node.extend(
            [
                self._node("Slice", [node.input[0], "verification.start", end, axis], kept),
                self._node("Squeeze", [kept, self._constant("batch_axis", np.array([0]))], rows),
                self._node("Unsqueeze", [rows, axis], node.output[0], name=node.name),
            ]
        )

    def _node(self, operator: str, inputs: list[str], output: str, **attributes: Any) -> onnx.NodeProto:
        return self._onnx.helper.make_node(operator, inputs, [output], **attributes)

    def _slice_last(self, name: str, output: str, start: int, end: int) -> onnx.NodeProto:
        bounds = [self._constant(f"columns{number}", np.array([number])) for number in (start, end)]
        return self._node("Slice", [name, *bounds, self._constant("last_axis", np.array([2]))], output)

    def _branch(self, nodes: list[onnx.NodeProto], outputs: list[str]) -> onnx.GraphProto:
        helper, float32 = self._onnx.helper, self._onnx.TensorProto.FLOAT
        values = [helper.make_tensor_value_info(name, float32, None) for name in outputs]
        return helper.make_graph(nodes, outputs[0], [], values)

    def _constant(self, name: str, value: np.ndarray) -> str:
        name = f"verification.{name}"
        if name not in self._constants:
            self._constants.add(name)
            self._graph.initializer.append(self._onnx.numpy_helper.from_array(value, name))
        return name
