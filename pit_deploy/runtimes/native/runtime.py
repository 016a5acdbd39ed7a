"""A bundle in a native runner, wherever it runs: on an emulated processor here, or on a device."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pit_deploy.bundle import Bundle
from pit_deploy.errors import InputError, RuntimeDiedError
from pit_deploy.few_passes import is_large
from pit_deploy.runtimes.base import check_room
from pit_deploy.runtimes.native.process import RunnerError, RunnerProcess
from pit_deploy.runtimes.onnx_manifest import check_manifest
from pit_deploy.runtimes.onnxruntime import check_external_data, probe_model

# ONNX Runtime would otherwise round activations where it fuses DequantizeLinear with MatMul.
SESSION = {"session.qdq_matmulnbits_accuracy_level": "0"}
_REFUSED = ("onnxruntime", "context_full", "bad_request")
"""Kinds that are about a call; all others are about the bundle."""


class NativeRuntime:
    """One sequence in a runner; implements `FullRuntime`.

    `connect` starts a runner on the bundle. Where the runner's process ends, `recover` is asked whether another
    try is worth it (None: never); then a new one is fed what was in the cache, call by call. A runtime that raised
    `RuntimeDiedError` starts anew at the next `reset`. `place` puts the bytes of a graph where the runner can read
    them and returns the path (a temporary file by default).
    """

    def __init__(
        self,
        bundle: Bundle,
        connect: Callable[[], RunnerProcess],
        *,
        name: str,
        threads: int | None = None,
        config: Mapping[str, str] | None = None,
        emulated: bool = False,
        recover: Callable[[RuntimeDiedError], bool] | None = None,
        place: Callable[[bytes], str] | None = None,
    ) -> None:
        manifest = bundle.manifest
        check_manifest(bundle.model_path, manifest)
        check_external_data(bundle)
        self.name, self.emulated = name, emulated
        self.few_passes = emulated and is_large(bundle)
        self.context_length, self.vocab_size = manifest.context_length, manifest.vocab_size
        self._bundle, self._connect, self._recover = bundle, connect, recover
        self._open = {"threads": threads or 0, "config": {**SESSION, **(config or {})}}
        self._place = place or self._temporary
        self._kept: Any = None
        self._graph: str | None = None
        self._runner: RunnerProcess | None = None
        self._calls: list[list[int]] = []
        self._start()

    @property
    def position(self) -> int:
        """Tokens in the cache."""
        return sum(map(len, self._calls))

    def prefill(self, ids: Sequence[int]) -> np.ndarray:
        """Append `ids` in one pass and return the logits of the last position, [vocab_size]."""
        check_room(self, ids)
        given = [int(id) for id in ids]
        _, arrays = self._ask("append", ids=given)
        self._calls.append(given)
        return arrays["logits"][0]

    def decode(self, id: int) -> np.ndarray:
        """Append one id and return its logits, [vocab_size]."""
        return self.prefill([id])

    def reset(self) -> None:
        """Empty the cache."""
        self._calls = []
        if self._runner is None:
            self._start()
        else:
            self._ask("reset")

    def all_logits(self, ids: Sequence[int]) -> np.ndarray:
        """Logits of every position of `ids` from an empty cache, [tokens, vocab_size]; leaves it empty."""
        return self._probe(ids, ["logits"])["logits"]

    def hidden_states(self, ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """From an empty cache, which stays empty: the residual stream after the embedding and after each
        layer, [num_hidden_layers + 1, tokens, hidden_size], and the logits [tokens, vocab_size]."""
        names = list(self._bundle.manifest.hidden_states)
        if not names:
            raise InputError(f"{self._bundle.path} has no names for its hidden states; export it again.")
        found = self._probe(ids, [*names, "logits"])
        return np.stack([found[name] for name in names]), found["logits"]

    def close(self) -> None:
        """End the runner."""
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()
        if self._kept is not None:
            self._kept.cleanup()
            self._kept = None

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def _probe(self, ids: Sequence[int], outputs: list[str]) -> dict[str, np.ndarray]:
        self.reset()
        check_room(self, ids)
        if self._graph is None:
            manifest = self._bundle.manifest
            self._graph = self._place(probe_model(self._bundle.model_path, manifest.hidden_states))
        return self._ask("probe", graph=self._graph, outputs=outputs, ids=[int(id) for id in ids])[1]

    def _start(self) -> None:
        self._runner = self._connect()
        try:
            self._answer(self._runner, "open", self._open)
            for ids in self._calls:
                self._answer(self._runner, "append", {"ids": ids})
        except RuntimeDiedError:
            self._runner = None
            raise

    def _ask(self, do: str, **values: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        while True:
            try:
                if self._runner is None:
                    self._start()
                assert self._runner is not None
                return self._answer(self._runner, do, values)
            except RuntimeDiedError as error:
                self._runner = None
                if self._recover is None or not self._recover(error):
                    raise

    def _answer(
        self, runner: RunnerProcess, do: str, values: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        try:
            return runner.request(do, **values)
        except RunnerError as error:
            if error.kind in _REFUSED:
                raise
            raise InputError(
                f"{error} Export the bundle again, or fetch it again from where it came."
            ) from error

    def _temporary(self, graph: bytes) -> str:
        self._kept = tempfile.TemporaryDirectory()
        path = Path(self._kept.name) / "probe.onnx"
        path.write_bytes(graph)
        return str(path)
