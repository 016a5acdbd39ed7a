"""The file of weights beside an ONNX graph: written once, front to back, one tensor in memory at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pit_deploy.errors import PitDeployError
from pit_deploy.extras import require
from pit_deploy.runtimes.onnxruntime import external_tensors

if TYPE_CHECKING:
    import onnx

PAGE = 4096
"""Large tensors start on a page, so that a runtime can map them."""
LINE = 64
"""Others start on a cache line."""
PAGED_FROM = 1 << 16
MAX_GRAPH_BYTES = 64 << 20
"""A graph file above this holds weights that belong into the data file (a browser parses it whole)."""


@dataclass(frozen=True)
class ByteRange:
    """Where a tensor lies in the data file."""

    offset: int
    length: int


class WeightsFile:
    """An external data file that only grows. Close it, or use it as a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stream = path.open("wb")
        self._end = 0

    def append(self, array: np.ndarray) -> ByteRange:
        """Write the bytes of `array` in C order (little-endian) at the next aligned offset."""
        array = np.ascontiguousarray(array)
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        alignment = PAGE if array.nbytes >= PAGED_FROM else LINE
        padding = -self._end % alignment
        self._stream.write(bytes(padding))
        self._stream.write(array.reshape(-1).view(np.uint8).data)
        written = ByteRange(self._end + padding, array.nbytes)
        self._end = written.offset + written.length
        return written

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> WeightsFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def check_model_file(path: Path) -> None:
    """Read a written graph back without its weights and check it.

    The graph passes onnx's checker, every external tensor has the length of its type and shape and lies
    inside its file, and the graph file itself is small. Raises `PitDeployError` with the tensor's name.
    """
    onnx = require("onnx", "onnx")
    size = path.stat().st_size
    if size > MAX_GRAPH_BYTES:
        raise PitDeployError(f"{path.name} has {size} bytes, more than {MAX_GRAPH_BYTES}: weights are in it.")
    model = onnx.load(path, load_external_data=False)
    for tensor in external_tensors(model):
        available = (path.parent / tensor.location).stat().st_size
        if tensor.offset + tensor.length > available or tensor.length != tensor.needed:
            raise PitDeployError(
                f"{path.name}: {tensor.name} was written as {tensor.length} bytes at {tensor.offset} of "
                f"{tensor.location}, which has {available}; its type and shape make {tensor.needed}."
            )
    _check_graph(model)


def _check_graph(model: onnx.ModelProto) -> None:
    """Run onnx's checker over the graph; `model` is changed and must be thrown away."""
    onnx = require("onnx", "onnx")
    for node in model.graph.node:
        # ONNX Runtime keeps this operator of its own in the standard's domain, where the checker misses it.
        if node.op_type == "SimplifiedLayerNormalization":
            node.domain = "com.microsoft"
    # The checker would look for the data file in the working directory; the ranges were checked above.
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            tensor.ClearField("external_data")
            tensor.data_location = onnx.TensorProto.DEFAULT
            tensor.dims[:] = [0]
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError as error:
        reason = " ".join(str(error).split())[:400]
        raise PitDeployError(f"The written graph is not valid ONNX: {reason}") from error
