"""Messages between a runtime and its child process: one line of JSON, and the bytes of the arrays that it describes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import IO, Any

import numpy as np

MAX_BYTES = 1 << 34
"""No message of ours is larger; a longer one is refused instead of making room for it."""


def send(stream: IO[bytes], head: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> None:
    """Write one message."""
    values = {name: np.ascontiguousarray(value) for name, value in (arrays or {}).items()}
    described = {name: [value.dtype.str, list(value.shape)] for name, value in values.items()}
    stream.write(json.dumps({**head, "arrays": described}).encode() + b"\n")
    for value in values.values():
        stream.write(value.tobytes())
    stream.flush()


def receive(stream: IO[bytes]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Read one message. Raises `EOFError` where the other side is gone, in the middle of one too."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    head: dict[str, Any] = json.loads(line)
    arrays = {}
    for name, (dtype, shape) in head.pop("arrays").items():
        size = int(np.dtype(dtype).itemsize * np.prod(shape, dtype=np.int64))
        if not 0 <= size <= MAX_BYTES:
            raise ValueError(f"an array of {size} bytes was announced")
        data = stream.read(size)
        if len(data) != size:
            raise EOFError
        arrays[name] = np.frombuffer(data, dtype).reshape(shape).copy()
    return head, arrays
