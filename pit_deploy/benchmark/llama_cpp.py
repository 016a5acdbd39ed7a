"""llama.cpp behind the runtime protocol, through the C functions that the wheel `xllamacpp` exports.

The wheel's Python classes wrap llama.cpp's server: slots, a prompt cache and a sampler stand between a caller
and the model there. The C functions have none of them: one call runs the tokens given, and nothing is kept but
the cache of keys and values. Structures are passed as they come from llama.cpp, so only the fields set here
have to lie where they are expected; `_check_layout` refuses a release where they do not.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from pit_deploy.errors import InputError, PitDeployError
from pit_deploy.extras import require
from pit_deploy.runtimes.base import check_room

_FUNCTIONS = [
    "llama_backend_init",
    "llama_log_set",
    "llama_model_default_params",
    "llama_context_default_params",
    "llama_model_load_from_file",
    "llama_init_from_model",
    "llama_model_get_vocab",
    "llama_vocab_n_tokens",
    "llama_set_n_threads",
    "llama_batch_get_one",
    "llama_batch_init",
    "llama_batch_free",
    "llama_decode",
    "llama_get_logits",
    "llama_get_logits_ith",
    "llama_get_memory",
    "llama_memory_clear",
    "llama_free",
    "llama_model_free",
    "llama_n_ctx",
    "llama_print_system_info",
]
_BATCH = 512
"""Tokens of one call where the logits of all are wanted; also llama.cpp's own physical batch."""
_MOST = 2048
"""Tokens of one call, llama.cpp's default."""


class _Opaque(ctypes.Structure):
    """A structure of llama.cpp: larger than any of them, which no calling convention minds."""

    _fields_ = (("bytes", ctypes.c_uint8 * 1024),)


class LlamaCpp:
    """One model and one sequence in llama.cpp on the CPU, with its defaults. Implements `Runtime`.

    `threads` holds for prompts and single tokens. Raises `InputError` for a file that llama.cpp cannot load,
    and `MissingExtraError` without the wheel.
    """

    name = "llama.cpp"

    def __init__(self, gguf: Path | str, context_length: int, threads: int) -> None:
        self._library = library()
        self._position = 0
        self._model = self._library.llama_model_load_from_file(
            str(gguf).encode(), self._library.llama_model_default_params()
        )
        if not self._model:
            raise InputError(f"llama.cpp cannot load {gguf}.")
        params = self._library.llama_context_default_params()
        struct.pack_into("<I", params.bytes, 0, context_length)  # n_ctx; the batch sizes stay 2048 and 512
        self._context = self._library.llama_init_from_model(self._model, params)
        if not self._context:
            raise InputError(f"llama.cpp cannot make a context of {context_length} tokens for {gguf}.")
        self._library.llama_set_n_threads(self._context, threads, threads)
        self._memory = self._library.llama_get_memory(self._context)
        self.context_length = int(self._library.llama_n_ctx(self._context))
        vocab = self._library.llama_model_get_vocab(self._model)
        self.vocab_size = int(self._library.llama_vocab_n_tokens(vocab))

    @property
    def position(self) -> int:
        """Tokens in the cache."""
        return self._position

    def prefill(self, ids: Sequence[int]) -> np.ndarray:
        """Append `ids` and return the logits of the last position, [vocab_size]."""
        check_room(self, ids)
        tokens = (ctypes.c_int32 * len(ids))(*ids)
        for start in range(0, len(ids), _MOST):
            count = min(_MOST, len(ids) - start)
            part = ctypes.cast(ctypes.byref(tokens, 4 * start), ctypes.POINTER(ctypes.c_int32))
            self._run(self._library.llama_batch_get_one(part, count), count)
        return self._row(self._library.llama_get_logits_ith(self._context, -1), 1)[0]

    def decode(self, id: int) -> np.ndarray:
        """Append one id and return its logits, [vocab_size]."""
        return self.prefill([id])

    def reset(self) -> None:
        """Empty the cache."""
        self._library.llama_memory_clear(self._memory, True)
        self._position = 0

    def all_logits(self, ids: Sequence[int]) -> np.ndarray:
        """Logits of every position of `ids` from an empty cache, [tokens, vocab_size]; leaves it empty."""
        self.reset()
        check_room(self, ids)
        logits = np.empty((len(ids), self.vocab_size), np.float32)
        batch = self._library.llama_batch_init(_BATCH, 0, 1)
        try:
            for start in range(0, len(ids), _BATCH):
                part = ids[start : start + _BATCH]
                _fill(batch, part, start)
                self._run(batch, len(part))
                rows = self._row(self._library.llama_get_logits(self._context), len(part))
                logits[start : start + len(part)] = rows
        finally:
            self._library.llama_batch_free(batch)
            self.reset()
        return logits

    def close(self) -> None:
        """Free what llama.cpp holds; the object is of no use afterwards."""
        self._library.llama_free(self._context)
        self._library.llama_model_free(self._model)

    def _run(self, batch: _Opaque, count: int) -> None:
        status = self._library.llama_decode(self._context, batch)
        if status:
            raise PitDeployError(f"llama.cpp failed on {count} tokens (llama_decode returned {status}).")
        self._position += count

    def _row(self, address: int, rows: int) -> np.ndarray:
        if not address:
            raise PitDeployError("llama.cpp gave no logits.")
        pointer = ctypes.cast(address, ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(pointer, (rows, self.vocab_size)).copy()


def llama_cpp_version() -> str:
    """The wheel's version, and the instruction sets that its build uses."""
    info = library().llama_print_system_info().decode(errors="replace")
    used = [item.split("=")[0].strip() for item in info.split("|") if item.strip().endswith("= 1")]
    return f"xllamacpp {version('xllamacpp')} ({', '.join(name.split(':')[-1].strip() for name in used)})"


@cache
def library() -> Any:
    """llama.cpp's C functions with their types, logging turned off.

    Raises `PitDeployError` where this build of the wheel does not export them, or has other structures.
    """
    module = require("xllamacpp.xllamacpp", "bench")
    loaded = ctypes.CDLL(module.__file__)
    missing = [name for name in _FUNCTIONS if not hasattr(loaded, name)]
    if missing:
        raise PitDeployError(
            f"The wheel xllamacpp {version('xllamacpp')} does not export llama.cpp's function {missing[0]} on this "
            f"system; its Python classes alone cannot be measured without their server."
        )
    pointer, integer = ctypes.c_void_p, ctypes.c_int32
    tokens = ctypes.POINTER(ctypes.c_int32)
    for name, result, arguments in (
        ("llama_backend_init", None, []),
        ("llama_log_set", None, [pointer, pointer]),
        ("llama_model_default_params", _Opaque, []),
        ("llama_context_default_params", _Opaque, []),
        ("llama_model_load_from_file", pointer, [ctypes.c_char_p, _Opaque]),
        ("llama_init_from_model", pointer, [pointer, _Opaque]),
        ("llama_model_get_vocab", pointer, [pointer]),
        ("llama_vocab_n_tokens", integer, [pointer]),
        ("llama_set_n_threads", None, [pointer, integer, integer]),
        ("llama_batch_get_one", _Opaque, [tokens, integer]),
        ("llama_batch_init", _Opaque, [integer, integer, integer]),
        ("llama_batch_free", None, [_Opaque]),
        ("llama_decode", integer, [pointer, _Opaque]),
        ("llama_get_logits", pointer, [pointer]),
        ("llama_get_logits_ith", pointer, [pointer, integer]),
        ("llama_get_memory", pointer, [pointer]),
        ("llama_memory_clear", None, [pointer, ctypes.c_bool]),
        ("llama_free", None, [pointer]),
        ("llama_model_free", None, [pointer]),
        ("llama_n_ctx", ctypes.c_uint32, [pointer]),
        ("llama_print_system_info", ctypes.c_char_p, []),
    ):
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    _check_layout(loaded)
    loaded.llama_log_set(ctypes.cast(_silence, pointer), None)
    loaded.llama_backend_init()
    return loaded


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _silence(level: int, text: bytes, user: int) -> None:
    """llama.cpp's log goes nowhere."""


def _check_layout(loaded: Any) -> None:
    """The fields used here are where they were when this was written, seen by their default values."""
    context = struct.unpack_from("<3I", bytes(loaded.llama_context_default_params().bytes))
    tokens = (ctypes.c_int32 * 2)(1, 2)
    one = bytes(loaded.llama_batch_get_one(tokens, 2).bytes)
    made = loaded.llama_batch_init(4, 0, 1)
    count, token, embedding, *rest = struct.unpack_from("<i4xQQQQQQ", bytes(made.bytes))
    loaded.llama_batch_free(made)
    if (
        context != (512, _MOST, _BATCH)
        or struct.unpack_from("<i4xQ", one) != (2, ctypes.addressof(tokens))
        or (count, embedding) != (0, 0)
        or not all([token, *rest])
    ):
        raise PitDeployError(
            f"xllamacpp {version('xllamacpp')} holds a llama.cpp whose structures are not those expected; "
            f"install the version that pit-deploy[bench] names."
        )


def _fill(batch: _Opaque, ids: Sequence[int], position: int) -> None:
    """Put `ids` into a batch of `llama_batch_init`, one sequence from `position`, logits wanted of each."""
    struct.pack_into("<i", batch.bytes, 0, len(ids))
    token, _, place, sequences, sequence, wanted = struct.unpack_from("<6Q", bytes(batch.bytes), 8)
    (ctypes.c_int32 * len(ids)).from_address(token)[:] = list(ids)
    (ctypes.c_int32 * len(ids)).from_address(place)[:] = list(range(position, position + len(ids)))
    (ctypes.c_int32 * len(ids)).from_address(sequences)[:] = [1] * len(ids)
    for address in (ctypes.c_uint64 * len(ids)).from_address(sequence):
        ctypes.c_int32.from_address(address).value = 0
    (ctypes.c_int8 * len(ids)).from_address(wanted)[:] = [1] * len(ids)
