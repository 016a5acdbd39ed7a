"""ONNX Runtime on the CPU, over the files that `export --to onnx` writes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pit_deploy.errors import InputError
from pit_deploy.extras import require
from pit_deploy.manifest import Manifest
from pit_deploy.runtimes.base import check_room

LAST_POSITION = "last_position"
"""The node of an exported graph that keeps the last position alone."""


class OnnxRuntime:
    """One session and one sequence. Implements `FullRuntime`.

    With the profile `default` the cache is one buffer per layer that the session updates in place; with
    `standard` it grows. `threads` None leaves the number to ONNX Runtime. `load_rss_bytes` is what opening the
    session added to the resident memory of the process, None where the system does not tell. Raises
    `InputError` where ONNX Runtime cannot open the model.
    """

    name = "onnxruntime"

    def __init__(
        self,
        model_path: Path | str,
        context_length: int,
        hidden_states: Sequence[str],
        threads: int | None = None,
        profile: str = "default",
    ) -> None:
        self.model_path, self.context_length, self._threads = Path(model_path), context_length, threads
        self._hidden_states = list(hidden_states)
        before = resident_bytes()
        self._session = self._open(str(self.model_path))
        after = resident_bytes()
        self.load_rss_bytes = after - before if before is not None and after is not None else None
        self.vocab_size = int(self._session.get_outputs()[0].shape[-1])
        self._caches: Cache = _SharedCache(self._session, context_length) if profile == "default" else _GrowingCache(self._session)
        self._position = 0
        self._probe: Any = None

    @classmethod
    def open(cls, directory: Path | str, manifest: Manifest, threads: int | None = None) -> OnnxRuntime:
        """Open the model of a bundle, as its manifest describes it."""
        model = Path(directory) / manifest.model_file
        return cls(model, manifest.context_length, manifest.hidden_states, threads, manifest.profile)
