"""ONNX Runtime on the CPU, over the files that `export --to onnx` writes."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from pit_deploy.bundle import Bundle
from pit_deploy.errors import InputError, PitDeployError
from pit_deploy.extras import require
from pit_deploy.manifest import BundleError, Manifest
from pit_deploy.runtimes.base import check_room
from pit_deploy.runtimes.huge_pages import join_pages
from pit_deploy.runtimes.onnx_manifest import check_manifest, load_model, unreadable

if TYPE_CHECKING:
    import onnx

LAST_POSITION = "last_position"
"""The node of an exported graph that keeps the last position; without it the logits are those of all."""
SHORTLIST = "shortlist"
"""The node of a nested head that chooses the ids whose logits are finished; other graphs have none."""
_SHORTLISTED_TOKENS = 32
"""Positions of one pass where all logits of a nested head are asked for: each gathers rows of the table."""
_EXTERNAL_FOLDER = "session.model_external_initializers_file_folder_path"


class OnnxRuntime:
    """One session and one sequence; implements `FullRuntime`.

    With the profile `default` the cache is one buffer a layer that the session updates in place; with
    `standard` it grows. `threads` None leaves their number to ONNX Runtime. `load_rss_bytes` is what opening
    the session added to the process's resident memory, None where the system does not tell. Raises
    `InputError` where ONNX Runtime cannot open the model.
    """

    name = "onnxruntime"

    def __init__(
        self,
        model_path: Path | str,
        context_length: int,
        hidden_states: Sequence[str] = (),
        threads: int | None = None,
        profile: str = "default",
    ) -> None:
        self.model_path, self.context_length = Path(model_path), context_length
        self._hidden_states, self._threads = list(hidden_states), threads
        before = resident_bytes()
        self._session = self._open(self._model())
        after = resident_bytes()
        self.load_rss_bytes = None if before is None or after is None else after - before
        self.vocab_size = int(self._session.get_outputs()[0].shape[-1])
        try:
            self._cache = self._make_cache(profile)
        except MemoryError as error:
            raise InputError(
                f"{self.model_path}: a cache of {context_length} tokens does not fit into memory; export with a "
                f"smaller --context."
            ) from error
        self._position = 0
        self._joined_pages = False
        self._probe: Any = None

    @classmethod
    def open(cls, directory: Path | str, manifest: Manifest, threads: int | None = None) -> OnnxRuntime:
        """Open the model of a bundle as its manifest describes it.

        Raises `BundleError` where the two disagree, before any room is made for what the manifest says.
        """
        model = Path(directory) / manifest.model_file
        check_manifest(model, manifest)
        return cls(model, manifest.context_length, manifest.hidden_states, threads, manifest.profile)

    @property
    def position(self) -> int:
        """Tokens in the cache."""
        return self._position

    def prefill(self, ids: Sequence[int]) -> np.ndarray:
        """Append `ids` in one pass and return the logits of the last position, [vocab_size]."""
        check_room(self, ids)
        tokens = np.array([ids], np.int64)
        logits: np.ndarray = self._guarded(lambda: self._cache.run(tokens, self._position))
        self._position += len(ids)
        return logits

    def decode(self, id: int) -> np.ndarray:
        """Append one id and return its logits, [vocab_size]."""
        self._join_pages()
        return self.prefill([id])

    def reset(self) -> None:
        """Empty the cache."""
        self._cache.clear()
        self._position = 0

    def all_logits(self, ids: Sequence[int]) -> np.ndarray:
        """Logits of every position of `ids` from an empty cache, [tokens, vocab_size]; leaves it empty."""
        return self._run_probe(ids, ["logits"])[0]

    def hidden_states(self, ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """From an empty cache, which stays empty: the residual stream after the embedding and after each
        layer, [num_hidden_layers + 1, tokens, hidden_size], and the logits [tokens, vocab_size]."""
        if not self._hidden_states:
            raise InputError(f"{self.model_path} has no names for its hidden states; export it again.")
        *states, logits = self._run_probe(ids, [*self._hidden_states, "logits"])
        return np.stack(states), logits

    def _model(self) -> str | bytes:
        """What the session is opened on: a file, or a graph in memory."""
        return str(self.model_path)

    def _make_cache(self, profile: str) -> _Cache:
        make = SharedCache if profile == "default" else _GrowingCache
        return make(self._session, self.context_length, self.vocab_size)

    def _join_pages(self) -> None:
        """Once, and not when opened: a short answer need not wait for it."""
        if not self._joined_pages:
            join_pages()
            self._joined_pages = True

    def _run_probe(self, ids: Sequence[int], outputs: list[str]) -> list[np.ndarray]:
        self.reset()
        check_room(self, ids)
        if self._probe is None:
            self._probe = self._open(probe_model(self.model_path, self._hidden_states))
            nodes = load_model(self.model_path).graph.node
            self._shortlists = any(node.name == SHORTLIST for node in nodes)
        states = _states(self._probe)
        past = {name: _empty(shape) for name, _, shape in states}
        names = [*outputs, *(present for _, present, _ in states)] if self._shortlists else outputs
        step = _SHORTLISTED_TOKENS if self._shortlists else len(ids)
        parts: list[list[np.ndarray]] = []
        for start in range(0, len(ids), step):
            tokens = np.array([ids[start : start + step]], np.int64)
            mask = np.ones([1, start + tokens.shape[1]], np.int64)
            feeds = {"input_ids": tokens, "attention_mask": mask, **past}
            values: list[np.ndarray] = self._guarded(partial(self._probe.run, names, feeds))
            parts.append([value[0] for value in values[: len(outputs)]])
            past = dict(zip(past, values[len(outputs) :], strict=False))
        return [np.concatenate(values) for values in zip(*parts, strict=True)]

    def _guarded(self, run: Callable[[], Any]) -> Any:
        """What `run` gives; raises `PitDeployError` where ONNX Runtime fails in it."""
        try:
            return run()
        except Exception as error:  # ONNX Runtime's classes have only Exception above them
            raise PitDeployError(
                f"ONNX Runtime failed while running {self.model_path}: {_reason(error)}; check the bundle with "
                f"pit-deploy verify, or export it again."
            ) from error

    def _open(self, model: str | bytes) -> Any:
        """A CPU session. The graph may be in memory; its weights lie beside the file in either case."""
        onnxruntime = require("onnxruntime", "onnx")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # what goes wrong is raised, and need not be printed as well
        if self._threads is not None:
            options.intra_op_num_threads = self._threads
        # ONNX Runtime fuses DequantizeLinear with MatMul and would then round activations to int8 by default.
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")
        if isinstance(model, bytes):
            options.add_session_config_entry(_EXTERNAL_FOLDER, str(self.model_path.parent.resolve()))
        try:
            return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        except (
            Exception
        ) as error:  # ONNX Runtime raises a class for each status, with only Exception above them
            reason = _reason(error)
            raise InputError(
                f"ONNX Runtime {onnxruntime.__version__} cannot open {self.model_path}: {reason}; if its "
                f"files are whole (pit-deploy verify), a newer ONNX Runtime may be needed."
            ) from error


def _reason(error: Exception) -> str:
    """What ONNX Runtime says, without its status codes and the place in its source."""
    text = " ".join(str(error).split())
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : (Load model from \S+ failed:)?", "", text)
    text = re.sub(r"/onnxruntime_src/\S+:\d+ .*?\) (?=[A-Z])", "", text)
    return text[:300].rstrip(". ")


def probe_model(model_path: Path, hidden_states: Sequence[str]) -> bytes:
    """The graph of `model_path` with the logits of all positions, and `hidden_states` as further outputs.

    Nothing is written, and weights are not read: the result refers to the same data file.
    """
    onnx = require("onnx", "onnx")
    model = onnx.load(model_path, load_external_data=False)
    graph = model.graph
    last = next((node for node in graph.node if node.name == LAST_POSITION), None)
    if last is not None:
        for node in graph.node:
            node.input[:] = [last.input[0] if name == last.output[0] else name for name in node.input]
        graph.node.remove(last)
        logits = next(value for value in graph.output if value.name == "logits")
        logits.type.tensor_type.shape.dim[1].dim_param = "sequence_length"
    for name in hidden_states:
        graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    serialized: bytes = model.SerializeToString()
    return serialized


@dataclass(frozen=True)
class ExternalTensor:
    """A tensor of a graph whose bytes lie in another file."""

    name: str
    location: str
    offset: int
    length: int
    needed: int
    """Bytes that its type and shape make."""


def external_tensors(model: onnx.ModelProto) -> list[ExternalTensor]:
    """Every tensor of a model that lies outside it. Raises `ValueError` where a reference is malformed."""
    onnx = require("onnx", "onnx")
    found = []
    for tensor in _tensors(model):
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if "location" not in entries or "length" not in entries:
            raise ValueError(f"{tensor.name} lies in another file without a location or a length")
        if any(dimension < 0 for dimension in tensor.dims):
            raise ValueError(f"{tensor.name} has the shape {list(tensor.dims)}")
        offset, length = int(entries.get("offset", 0)), int(entries["length"])
        found.append(ExternalTensor(tensor.name, entries["location"], offset, length, _needed_bytes(tensor)))
    return found


def check_external_data(bundle: Bundle) -> None:
    """Raise `BundleError` where the graph of an ONNX bundle names bytes that the manifest does not vouch for.

    A model may name any file of the machine as its weights: every name must be one of the bundle's files, and
    every range must lie inside it. Weights are not read.
    """
    path = bundle.model_path
    sizes = {entry.path: entry.size for entry in bundle.manifest.files}
    folder = Path(bundle.manifest.model_file).parent
    model = load_model(path)
    try:
        tensors = external_tensors(model)
    except Exception as error:  # types and references that no exporter writes
        raise unreadable(path, error) from error
    for tensor in tensors:
        place = (folder / tensor.location).as_posix()
        if ".." in Path(place).parts or Path(tensor.location).is_absolute():
            message = f"{path}: the tensor {tensor.name} lies at {tensor.location!r}, outside the bundle."
            raise BundleError("path_escape", message)
        if place not in sizes:
            message = (
                f"{path}: the tensor {tensor.name} lies in {tensor.location!r}, which the manifest lacks."
            )
            raise BundleError("unlisted_file", message)
        if (
            tensor.offset < 0
            or tensor.offset + tensor.length > sizes[place]
            or tensor.length != tensor.needed
        ):
            message = (
                f"{path}: the tensor {tensor.name} is said to be {tensor.length} bytes at {tensor.offset} of "
                f"{tensor.location!r}, which has {sizes[place]}; its type and shape make {tensor.needed}."
            )
            raise BundleError("wrong_size", message)


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Initializers and constants, also those of inner graphs and functions."""
    graphs = [model.graph]
    nodes = [node for function in model.functions for node in function.node]
    while graphs or nodes:
        if graphs:
            graph = graphs.pop()
            yield from graph.initializer
            for sparse in graph.sparse_initializer:
                yield from (sparse.values, sparse.indices)
            nodes += graph.node
            continue
        for attribute in nodes.pop().attribute:
            yield from (attribute.t, *attribute.tensors)
            for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
                yield from (sparse.values, sparse.indices)
            graphs += [attribute.g, *attribute.graphs]


def _needed_bytes(tensor: onnx.TensorProto) -> int:
    """Bytes of a tensor by its type and shape; 4-bit elements lie two in a byte."""
    onnx = require("onnx", "onnx")
    count = math.prod(tensor.dims)
    if tensor.data_type in (onnx.TensorProto.INT4, onnx.TensorProto.UINT4):
        return -(-count // 2)
    return count * int(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)


def resident_bytes() -> int | None:
    """Resident memory of this process; None where there is no /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


class _Cache(Protocol):
    """A session with its keys and values."""

    def run(self, ids: np.ndarray, position: int) -> np.ndarray:
        """Append `ids` int64 [1, tokens] after `position` others; the last position's logits [vocab_size]."""
        ...

    def clear(self) -> None: ...


class SharedCache:
    """Buffers [1, heads, context_length, head_dim] that are past and present at once, bound when made."""

    def __init__(self, session: Any, context_length: int, vocab_size: int) -> None:
        self._session, self._binding = session, session.io_binding()
        self._buffers = []
        for past, present, shape in _states(session):
            buffer = np.zeros([1, shape[1], context_length, shape[3]], np.float32)
            self._bind_input(past, buffer)
            self._bind_output(present, buffer)
            self._buffers.append(buffer)
        self._mask = np.ones([1, context_length], np.int64)
        self._last_only = session.get_outputs()[0].shape[1] == 1
        self._logits = np.empty([1, 1, vocab_size], np.float32)
        self._bind_output("logits", self._logits)

    def run(self, ids: np.ndarray, position: int) -> np.ndarray:
        tokens = ids.shape[1]
        if not self._last_only and self._logits.shape[1] != tokens:
            self._logits = np.empty([1, tokens, self._logits.shape[2]], np.float32)
            self._bind_output("logits", self._logits)
        self._run(ids, position)
        return self._logits[0, -1].copy()

    def _run(self, ids: np.ndarray, position: int) -> None:
        self._bind_input("input_ids", ids)
        self._bind_input("attention_mask", self._mask[:, : position + ids.shape[1]])
        self._session.run_with_iobinding(self._binding)

    def clear(self) -> None:
        """Nothing to do: what lies past the mask is never read."""

    def _bind_input(self, name: str, array: np.ndarray) -> None:
        # By address: nothing is copied. A prefix of a one-row array is contiguous.
        self._binding.bind_input(name, "cpu", 0, array.dtype, list(array.shape), array.ctypes.data)

    def _bind_output(self, name: str, array: np.ndarray) -> None:
        self._binding.bind_output(name, "cpu", 0, array.dtype, list(array.shape), array.ctypes.data)


class _GrowingCache:
    """Keys and values as each run returns them, one longer a token."""

    def __init__(self, session: Any, context_length: int, vocab_size: int) -> None:
        self._session, self._names = session, [output.name for output in session.get_outputs()]
        self._past: dict[str, np.ndarray] = {}
        self.clear()

    def run(self, ids: np.ndarray, position: int) -> np.ndarray:
        mask = np.ones([1, position + ids.shape[1]], np.int64)
        values = self._session.run(self._names, {"input_ids": ids, "attention_mask": mask, **self._past})
        results = dict(zip(self._names, values, strict=True))
        self._past = {past: results[present] for past, present, _ in _states(self._session)}
        logits: np.ndarray = results["logits"][0, -1]
        return logits

    def clear(self) -> None:
        self._past = {past: _empty(shape) for past, _, shape in _states(self._session)}


def _states(session: Any) -> list[tuple[str, str, list[Any]]]:
    """Input, output and shape of each state."""
    prefix = "past_key_values."
    return [
        (value.name, "present." + value.name.removeprefix(prefix), value.shape)
        for value in session.get_inputs()
        if value.name.startswith(prefix)
    ]


def _empty(shape: Sequence[Any]) -> np.ndarray:
    return np.zeros([1, shape[1], 0, shape[3]], np.float32)
