"""The backbone's tensors on their way into an artifact: all there, none unknown, each used once."""

from __future__ import annotations

import re

import numpy as np

from pit_deploy.architecture import DecoderConfig
from pit_deploy.errors import InputError
from pit_deploy.folding import FoldedModel
from pit_deploy.progress import Progress, silent

_KNOWN_BUFFERS = re.compile(r"(^|\.)rotary_emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)$")
"""Derived numbers that older checkpoints carry; the rotation's tables are computed anew."""


def check_backbone(model: FoldedModel, config: DecoderConfig) -> None:
    """Compare the backbone with the config by the headers alone, before any work.

    Raises `InputError` that lists every tensor that is missing, unknown or of another shape.
    """
    expected = config.backbone_shapes()
    found = {name for name in model.tensor_names() if not _KNOWN_BUFFERS.search(name)} | set(model.overrides)
    shapes = {name: _shape(model, name) for name in found & set(expected)}
    wrong = sorted(name for name, shape in shapes.items() if shape != expected[name])
    faults = [
        ("missing", sorted(set(expected) - found)),
        ("not part of this architecture", sorted(found - set(expected))),
        ("of another shape", [f"{n} {list(shapes[n])} instead of {list(expected[n])}" for n in wrong]),
    ]
    named = [f"{len(names)} {kind} ({', '.join(names)})" for kind, names in faults if names]
    if named:
        raise InputError(
            f"{model.source.path}: the tensors do not fit config.json (model_type {config.model_type}): "
            f"{'; '.join(named)}; correct config.json or the checkpoint."
        )


class Backbone:
    """Reads each tensor of the backbone once, as float32; `progress` counts them."""

    def __init__(self, model: FoldedModel, config: DecoderConfig, progress: Progress = silent) -> None:
        self._model, self._progress = model, progress
        self._expected = config.backbone_shapes()
        self._remaining = dict(self._expected)

    def read(self, name: str) -> np.ndarray:
        """The tensor. Raises `InputError` where it is missing, of another shape or not finite."""
        shape = self._remaining.pop(name, None)
        assert shape is not None, f"{name} is used twice, or is no tensor of this architecture"
        value = self._model.read(name)
        if value.shape != shape:
            raise InputError(
                f"{self._model.source.path}: {name} is {list(value.shape)}, expected {list(shape)}."
            )
        total = len(self._expected)
        self._progress("export", total - len(self._remaining), total)
        return value

    def check_all_used(self) -> None:
        """Assert that every tensor went into the artifact."""
        assert not self._remaining, f"tensors that no part of the graph uses: {sorted(self._remaining)}"


def _shape(model: FoldedModel, name: str) -> tuple[int, ...]:
    return model.overrides[name].shape if name in model.overrides else model.source.tensors[name].shape
