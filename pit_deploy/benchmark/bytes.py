"""How many bytes of weights one decoded token has to read, from the artifact alone."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pit_deploy.extras import require

if TYPE_CHECKING:
    import onnx

_ROWS_ONLY = {
    ("Gather", 0),
    ("GatherBlockQuantized", 0),
    ("GatherBlockQuantized", 2),
    ("GatherBlockQuantized", 3),
    ("GroupQueryAttention", 7),
    ("GroupQueryAttention", 8),
    ("RotaryEmbedding", 1),
    ("RotaryEmbedding", 2),
    ("RotaryEmbedding", 3),
}
"""Operators and inputs that read one row a token: embeddings and the rotation's tables."""
_UNCHANGED = {"Cast", "Reshape", "Transpose", "Identity"}
"""Operators on a weight that a runtime carries out once, at load."""


def onnx_bytes_per_token(model_path: Path | str) -> int:
    """Bytes of the initializers that one token reads, each range of the data file once.

    What is only gathered from counts one row. float16 weights that are widened at load count as float32, which
    is how they lie in memory. A product's other operands, activations and cache are not in it.
    """
    onnx = require("onnx", "onnx")
    graph = onnx.load(model_path, load_external_data=False).graph
    users: dict[str, list[tuple[Any, int]]] = defaultdict(list)
    for node in graph.node:
        for index, name in enumerate(node.input):
            users[name].append((node, index))
    ranges: dict[Any, int] = {}
    for tensor in graph.initializer:
        external = {entry.key: entry.value for entry in tensor.external_data}
        place = (external["location"], external.get("offset", "0")) if external else tensor.name
        ranges[place] = max(ranges.get(place, 0), _read(onnx, tensor, users))
    return sum(ranges.values())


def gguf_bytes_per_token(path: Path | str) -> int:
    """Bytes of the tensors that one token reads: all, but one row of an embedding that is not the head too."""
    reader = require("gguf", "onnx").GGUFReader(path)
    sizes = {tensor.name: (int(tensor.n_bytes), int(tensor.shape[-1])) for tensor in reader.tensors}
    if "output.weight" in sizes:
        size, rows = sizes["token_embd.weight"]
        sizes["token_embd.weight"] = (size // rows, 1)
    return sum(size for size, _ in sizes.values())


def _read(onnx: Any, tensor: onnx.TensorProto, users: Any) -> int:
    """Bytes of one initializer that a token reads: all, a row, or none."""
    widened = False
    uses: list[tuple[str, int]] = []
    names = [tensor.name]
    while names:
        for node, index in users[names.pop()]:
            if node.op_type in _UNCHANGED and index == 0:
                names += node.output
                widened |= node.op_type == "Cast" and tensor.data_type == onnx.TensorProto.FLOAT16
            else:
                uses.append((node.op_type, index))
    if not uses:
        return 0
    bits = 4 if tensor.data_type in (onnx.TensorProto.INT4, onnx.TensorProto.UINT4) else 0
    bits = bits or 8 * int(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)
    size = math.ceil(math.prod(tensor.dims) * bits / 8) * (2 if widened else 1)
    if tensor.dims and all(use in _ROWS_ONLY for use in uses):
        return size // max(tensor.dims[0], 1)
    return size
