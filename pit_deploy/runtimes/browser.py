"""onnxruntime-web over a bundle, in Node or in a page of headless Chromium; both are child processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pit_deploy.bundle import Bundle
from pit_deploy.errors import InputError, PitDeployError, RuntimeDiedError
from pit_deploy.runtimes.base import check_room
from pit_deploy.runtimes.browser_tools import SCRIPTS, chromium, installed_modules, node
from pit_deploy.runtimes.child_process import ChildProcess
from pit_deploy.runtimes.onnx_manifest import check_manifest, load_model
from pit_deploy.runtimes.onnxruntime import check_external_data, external_tensors, probe_model

OPEN_SECONDS, CALL_SECONDS = 900.0, 900.0
"""A page fetches and hashes all weights when it opens; one call may be a long prompt on one thread."""
LARGEST_BUNDLE = 2**31
"""Bytes. WebAssembly has 4 GiB of memory, and a JavaScript array of a file at most 2 GiB."""
_ADVICE = "check the bundle with pit-deploy verify --runtime onnxruntime"


class BrowserRuntime:
    """One session and one sequence in WebAssembly; implements `FullRuntime`.

    `where` is `onnxruntime-web` (Node, one thread) or `chromium` (a page). Keys and values go back and forth
    between WebAssembly and JavaScript with every token. Raises `InputError` where Node, the packages or the browser
    are missing, and `RuntimeDiedError` where the process ends; the next `reset` starts another one.
    """

    def __init__(self, bundle: Bundle, where: str, threads: int | None = None) -> None:
        if where == "onnxruntime-web" and threads not in (None, 1):
            raise InputError(
                f"--threads {threads}: onnxruntime-web has one thread in Node; use --runtime chromium."
            )
        check_size(bundle)
        manifest = bundle.manifest
        check_manifest(bundle.model_path, manifest)
        check_external_data(bundle)
        self.name, self.bundle = where, bundle
        self.context_length, self.vocab_size = manifest.context_length, manifest.vocab_size
        self._weights = sorted({t.location for t in external_tensors(load_model(bundle.model_path))})
        self._worker = Worker(bundle.path, where, threads, bundle, self._weights)
        self._position, self._has_probe = 0, False

    @property
    def position(self) -> int:
        """Tokens in the cache."""
        return self._position

    @property
    def facts(self) -> dict[str, Any]:
        """Threads, the version of onnxruntime-web, and that of the browser."""
        return self._worker.facts

    def prefill(self, ids: Sequence[int]) -> np.ndarray:
        """Append `ids` in one pass and return the logits of the last position, [vocab_size]."""
        check_room(self, ids)
        logits = self._worker.ask({"do": "prefill", "ids": [int(i) for i in ids]}, what="running a prompt")[
            "logits"
        ]
        self._position += len(ids)
        return logits

    def decode(self, id: int) -> np.ndarray:
        """Append one id and return its logits, [vocab_size]."""
        return self.prefill([id])

    def reset(self) -> None:
        """Empty the cache; start anew where the process has died."""
        self._has_probe &= self._worker.is_alive
        self._worker.ask({"do": "reset"}, what="emptying the cache")
        self._position = 0

    def all_logits(self, ids: Sequence[int]) -> np.ndarray:
        """Logits of every position of `ids` from an empty cache, [tokens, vocab_size]; leaves it empty."""
        return self._inspect(ids, ["logits"])[0]

    def hidden_states(self, ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """From an empty cache, which stays empty: the residual stream after the embedding and after each layer,
        [num_hidden_layers + 1, tokens, hidden_size], and the logits [tokens, vocab_size]."""
        names = list(self.bundle.manifest.hidden_states)
        if not names:
            raise InputError(f"{self.bundle.path} has no names for its hidden states; export it again.")
        *states, logits = self._inspect(ids, [*names, "logits"])
        return np.stack(states), logits

    def close(self) -> None:
        """End the process."""
        self._worker.close()

    def _inspect(self, ids: Sequence[int], outputs: list[str]) -> list[np.ndarray]:
        self.reset()
        check_room(self, ids)
        arrays = {}
        if not self._has_probe:
            graph = probe_model(self.bundle.model_path, self.bundle.manifest.hidden_states)
            arrays["graph"] = np.frombuffer(graph, np.uint8)
        message = {"do": "inspect", "ids": [int(i) for i in ids], "outputs": outputs}
        found = self._worker.ask(message, arrays, what="reading the hidden states")
        self._has_probe = True
        return [found[name] for name in outputs]


def check_size(bundle: Bundle) -> None:
    """Raise `InputError` for a bundle that cannot be opened in WebAssembly."""
    if bundle.total_bytes > LARGEST_BUNDLE:
        raise InputError(
            f"{bundle.path} has {bundle.total_bytes} bytes, and WebAssembly takes {LARGEST_BUNDLE} at most; "
            f"export with --weights int8 or int4."
        )


class Worker:
    """The Node process of a browser runtime on `folder`; it is started again after it died.

    `facts` is what it said when it opened, `answer` the last answer without its arrays.
    """

    def __init__(
        self, folder: Path, where: str, threads: int | None, bundle: Bundle, weights: Sequence[str] = ()
    ) -> None:
        self._command = [node(), str(SCRIPTS / "worker.mjs")]
        self._label = {
            "onnxruntime-web": "onnxruntime-web in Node",
            "chromium": "onnxruntime-web in Chromium",
        }.get(where, where)
        self._subject = str(bundle.path)
        self._request: dict[str, Any] = {
            "runtime": where,
            "modules": str(installed_modules().resolve()),
            "bundle": str(folder.resolve()),
            "threads": threads or 1,
            "weights": list(weights),
            "manifest": json.loads((bundle.path / "manifest.json").read_text(encoding="utf-8")),
        }
        if where != "onnxruntime-web":
            self._request["chromium"] = chromium()
        self._process: ChildProcess | None = None
        self.facts: dict[str, Any] = {}
        self.answer: dict[str, Any] = {}
        self._start()

    @property
    def is_alive(self) -> bool:
        return self._process is not None

    def ask(
        self, message: dict[str, Any], arrays: dict[str, np.ndarray] | None = None, *, what: str
    ) -> dict[str, np.ndarray]:
        """The arrays of the answer. Raises `RuntimeDiedError`, and `PitDeployError` where the library fails."""
        if self._process is None:
            if message["do"] != "reset":
                raise PitDeployError(
                    f"{self._label}: its process for {self._subject} has ended; reset starts another."
                )
            self._start()
        assert self._process is not None
        try:
            self.answer, found = self._process.ask(message, arrays, what=what, seconds=CALL_SECONDS)
        except RuntimeDiedError:
            self._process = None
            raise
        return found

    def close(self) -> None:
        """End the process, and the browser with it."""
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def _start(self) -> None:
        process = ChildProcess(self._command, label=self._label, subject=self._subject, advice=_ADVICE)
        try:
            self.facts, _ = process.ask(self._request, what="opening the model", seconds=OPEN_SECONDS)
        except PitDeployError:
            process.close()
            raise
        self._process = process
