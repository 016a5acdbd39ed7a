"""The backbone's tensors on their way into an artifact: all there, none unknown, each used once."""

from __future__ import annotations

import numpy as np

from pit_deploy.architecture import DecoderConfig, check_tensors
from pit_deploy.errors import InputError
from pit_deploy.folding import FoldedModel
from pit_deploy.progress import Progress, silent


def check_backbone(model: FoldedModel, config: DecoderConfig) -> None:
    """Compare the backbone with the config by the headers alone.

    Raises `InputError` for tensors that are missing, unknown or of another shape. `export` makes the same check of
    the checkpoint before any work; this one also sees what folding put in place of tensors.
    """
    shapes = {name: _shape(model, name) for name in {*model.tensor_names(), *model.overrides}}
    check_tensors(config, shapes, model.source.label)


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
                f"{self._model.source.label}: {name} is {list(value.shape)}, expected {list(shape)}."
            )
        total = len(self._expected)
        self._progress("export", total - len(self._remaining), total)
        return value

    def check_all_used(self) -> None:
        """Assert that every tensor went into the artifact."""
        assert not self._remaining, f"tensors that no part of the graph uses: {sorted(self._remaining)}"


def _shape(model: FoldedModel, name: str) -> tuple[int, ...]:
    return model.overrides[name].shape if name in model.overrides else model.source.tensors[name].shape
