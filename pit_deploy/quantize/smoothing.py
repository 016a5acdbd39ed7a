"""The same model in a form that rounds better: outliers spread within blocks, scales shared out between neighbours.

Three changes that leave the function as it is, all folded into weights:

- Rotation of the residual stream. RMSNorm without a gain commutes with any rotation, so with the gains folded
  into the matrices that read the stream, `x R` may take the place of `x` throughout. R mixes only within blocks
  of 32 channels (a Hadamard matrix with random signs): that flattens the outliers inside a quantisation block
  and leaves quiet blocks quiet, where a rotation over all channels would carry the outliers everywhere.
- The same for the values of each attention head, between v_proj and o_proj.
- Scales between up_proj's rows and down_proj's columns. (A norm's gain could share its out with the columns
  behind it as well; after the rotation there is little left to level.)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pit_deploy.architecture import DecoderConfig
from pit_deploy.errors import InputError
from pit_deploy.folding import FINAL_NORM, FoldedModel, Tables, UntiedTables
from pit_deploy.progress import Progress, silent
from pit_deploy.quantize.plan import ROTATION_BLOCK

if TYPE_CHECKING:
    from pit_deploy.runtimes.torch import TorchRuntime

MOST = 100.0  # no channel is scaled by more, relative to the geometric mean

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)$")
_READERS = {
    "self_attn.q_proj": "input_layernorm",
    "self_attn.k_proj": "input_layernorm",
    "self_attn.v_proj": "input_layernorm",
    "mlp.gate_proj": "post_attention_layernorm",
    "mlp.up_proj": "post_attention_layernorm",
}
"""Matrices that read the residual stream, and the norm they read it through."""

_WRITERS = ("self_attn.o_proj", "mlp.down_proj")


@dataclass(frozen=True)
class Rotation:
    """An orthogonal matrix `diag(signs) blockdiag(block, ...)` of `len(signs)` channels."""

    signs: np.ndarray
    block: np.ndarray

    def columns(self, matrix: np.ndarray) -> np.ndarray:
        """`matrix @ R`, float64."""
        size = len(self.block)
        signed = matrix.astype(np.float64) * self.signs
        mixed = signed.reshape(-1, size) @ self.block  # one product: numpy would do stacks one by one
        return mixed.reshape(matrix.shape)

    def rows(self, matrix: np.ndarray) -> np.ndarray:
        """`Rᵀ @ matrix`, float64."""
        return self.columns(matrix.T).T


def block_rotation(size: int, block: int = ROTATION_BLOCK, seed: int = 0) -> Rotation:
    """Hadamard within blocks of `block` (a power of two that divides `size`), signs from a seeded generator."""
    if block < 1 or block & (block - 1) or size % block:
        raise InputError(f"a rotation in blocks of {block} does not fit {size} channels.")
    hadamard = np.ones((1, 1))
    while len(hadamard) < block:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    signs = np.random.Generator(np.random.PCG64(seed)).integers(0, 2, size) * 2.0 - 1
    return Rotation(signs, hadamard / np.sqrt(block))


def random_rotation(size: int, seed: int = 0) -> Rotation:
    """Over all channels: uniform over the orthogonal group, from a seeded generator."""
    normal = np.random.Generator(np.random.PCG64(seed)).standard_normal((size, size))
    q, r = np.linalg.qr(normal)
    return Rotation(np.ones(size), q * np.sign(r.diagonal()))


@dataclass
class SmoothedModel(FoldedModel):
    """A `FoldedModel` that changes its backbone's tensors as they are read; nothing is kept.

    `stream` rotates the residual stream, `heads` the values of each head. `column_scales` has, by the name of
    a norm (`model.layers.N.input_layernorm.weight`) or of an up_proj, what the columns behind it are
    multiplied by; its own gain or rows are divided.
    """

    architecture: DecoderConfig | None = None
    stream: Rotation | None = None
    heads: Rotation | None = None
    column_scales: Mapping[str, np.ndarray] = field(default_factory=dict)

    def read(self, name: str, dtype: Any = np.float32) -> np.ndarray:
        match = _LAYER.match(name)
        if match is None:
            return super().read(name, dtype)
        value = super().read(name, np.float64)
        return self._changed(name, f"model.layers.{match[1]}.", match[2], match[3], value).astype(dtype)

    def _changed(self, name: str, prefix: str, module: str, kind: str, value: np.ndarray) -> np.ndarray:
        assert self.architecture is not None
        offset = self.architecture.norm_offset
        if module in _READERS:
            norm = f"{prefix}{_READERS[module]}.weight"
            if kind == "weight":
                if self.stream is not None:
                    value = self.stream.columns(value * (super().read(norm, np.float64) + offset))
                value = self._scaled(value, norm)
            if module == "mlp.up_proj" and f"{prefix}{module}.weight" in self.column_scales:
                scales = self.column_scales[f"{prefix}{module}.weight"]
                value = value / (scales[:, None] if kind == "weight" else scales)
            if module == "self_attn.v_proj" and self.heads is not None:
                value = self._per_head(value)
            return value
        if module in _WRITERS:
            if kind == "weight":
                if module == "mlp.down_proj":
                    value = self._scaled(value, f"{prefix}mlp.up_proj.weight")
                elif self.heads is not None:
                    value = self._per_head(value.T).T
            if self.stream is not None:
                value = self.stream.rows(value) if kind == "weight" else self.stream.columns(value)
            return value
        if module in _READERS.values():
            gain = np.ones_like(value) if self.stream is not None else value + offset
            return gain / self.column_scales.get(name, 1.0) - offset
        return value

    def _scaled(self, value: np.ndarray, name: str) -> np.ndarray:
        return value * self.column_scales[name] if name in self.column_scales else value

    def _per_head(self, value: np.ndarray) -> np.ndarray:
        """Rotate the first axis, head by head."""
        assert self.heads is not None
        size = len(self.heads.signs)
        turned = self.heads.columns(np.moveaxis(value.reshape(-1, size, *value.shape[1:]), 1, -1))
        return np.moveaxis(turned, -1, 1).reshape(value.shape)


def rotated(model: FoldedModel, *, block: int | None = ROTATION_BLOCK, seed: int = 0) -> FoldedModel:
    """The same model with outliers spread within blocks of `block` channels; None: over all of them.

    None suits a runtime that rounds a whole row of activations with one scale: an outlier then costs every channel.

    The stream is turned where the tables can take it up: two tables, or one with its maps. Sizes that the
    block doesn't divide are left as they are. Apply it after the choice of a quantisation basis, which it
    doesn't change.
    """
    config = DecoderConfig.from_hf(model.config)
    tables = model.tables
    mapped = isinstance(tables, UntiedTables) or (
        tables.head_map is not None and tables.embedding_map is not None
    )
    stream = heads = None
    if (
        mapped and not config.sandwich_norms
    ):  # a norm with a gain before a sum doesn't commute with a rotation
        stream = _rotation(config.hidden_size, block, seed)
    heads = _rotation(config.head_dim, block, seed + 1)
    if stream is None and heads is None:
        return model
    kept = _parts(model)
    if stream is not None:
        gain = model.read(FINAL_NORM, np.float64) + config.norm_offset
        kept["tables"] = _turned(tables, stream, gain)
        neutral = np.full(config.hidden_size, 1.0 - config.norm_offset)
        kept["overrides"] = {**model.overrides, FINAL_NORM: neutral}
    kept["folds"] = [*model.folds, "rotation" if block is None else "block_rotation"]
    return SmoothedModel(**kept, architecture=config, stream=stream, heads=heads)


def _rotation(size: int, block: int | None, seed: int) -> Rotation | None:
    """None where the block does not divide the channels."""
    if block is None:
        return random_rotation(size, seed)
    return block_rotation(size, block, seed) if size % block == 0 else None


def balanced(
    model: FoldedModel, runtime: TorchRuntime, windows: Sequence[Sequence[int]], progress: Progress = silent
) -> FoldedModel:
    """The same model with the channels between up_proj and down_proj levelled; `runtime` runs `model`.

    A block's rounding noise follows its largest activation and its largest weight, and what either noise costs
    follows the other's size. Both are least together where each channel's activation and its column of down_proj
    have the same relative size: so the scale is the root of their ratio, both as root mean squares.
    """
    from pit_deploy.quantize.hessians import LayerStack, input_moments

    stack = LayerStack(runtime, windows)
    states, scales = stack.states, {}
    tokens = sum(len(window) for window in windows)
    for number in range(len(stack.layers)):
        progress("balance", number, len(stack.layers))
        (moment,) = input_moments(stack, number, [("mlp.down_proj",)], states)
        inputs = np.sqrt(moment.diagonal() / tokens)
        weight = stack.layers[number].mlp.down_proj.weight.detach().double().numpy()
        columns = np.sqrt((weight**2).mean(axis=0))
        used = (inputs > 0) & (columns > 0)
        ratio = np.ones_like(inputs)
        ratio[used] = np.sqrt(inputs[used] / columns[used])
        ratio[used] /= np.exp(np.log(ratio[used]).mean()) if used.any() else 1.0
        scales[f"model.layers.{number}.mlp.up_proj.weight"] = np.clip(ratio, 1 / MOST, MOST)
        if number + 1 < len(stack.layers):
            states = list(stack.run(number, states))
    progress("balance", len(stack.layers), len(stack.layers))
    folds = [*model.folds, "balanced_mlp"]
    if isinstance(model, SmoothedModel):
        return replace(model, folds=folds, column_scales={**model.column_scales, **scales})
    kept = {**_parts(model), "folds": folds}
    return SmoothedModel(**kept, architecture=DecoderConfig.from_hf(model.config), column_scales=scales)


def turned_projection(model: FoldedModel, projection: np.ndarray) -> np.ndarray:
    """For a golden record: what makes of `model`'s hidden states what `projection` [hidden_size, n] made of the
    original's. The record then fits the hidden states of the artifact, whose stream is rotated."""
    stream = model.stream if isinstance(model, SmoothedModel) else None
    return projection if stream is None else stream.rows(projection).astype(projection.dtype)


def _parts(model: FoldedModel) -> dict[str, Any]:
    return {f.name: getattr(model, f.name) for f in fields(FoldedModel)}


def _turned(tables: Tables, stream: Rotation, gain: np.ndarray) -> Tables:
    if isinstance(tables, UntiedTables):
        return UntiedTables(
            stream.columns(tables.embedding).astype(np.float32),
            stream.columns(tables.head * gain).astype(np.float32),
        )
    assert tables.head_map is not None and tables.embedding_map is not None
    return replace(
        tables,
        head_map=stream.columns(tables.head_map * gain),
        embedding_map=stream.columns(tables.embedding_map),
    )
