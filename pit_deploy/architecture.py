"""What a decoder of a supported family is made of: the one place where an architecture's quirks live.

`DecoderConfig.from_hf` reads a Hugging Face config once; exporters and the fold ask it and never the raw
dictionary. Names are those of the Hugging Face configs.
"""

from __future__ import annotations

import contextlib
import copy
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pit_deploy.errors import InputError
from pit_deploy.rope import RopeConfig, check_theta


@dataclass(frozen=True)
class Family:
    """What a `model_type` implies that its config does not say."""

    norm_offset: float = 0.0
    """The gain of a norm is `norm_offset + weight` (Gemma stores the gain less one)."""
    qkv_bias: bool | None = None
    """Whether q, k and v carry biases; None: as `attention_bias` says."""
    o_bias: bool | None = None
    """Whether the attention's output projection carries a bias; None: as `attention_bias` says."""
    qk_norm: bool = False
    """Whether each head's q and k pass through an RMS norm before the rotation."""
    scaled_embedding: bool = False
    """Whether the architecture itself multiplies embeddings by sqrt(hidden_size)."""
    scaled_attention: bool = False
    """Whether scores are scaled by `query_pre_attn_scalar` and not by head_dim, and scores and logits may be capped."""
    sandwich_norms: bool = False
    """Whether attention and MLP each have a norm behind them as well."""
    local_rope: bool = False
    """Whether layers with a sliding window rotate by parameters of their own."""
    activation_field: str = "hidden_act"


FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(qkv_bias=False, o_bias=False),
    "qwen2": Family(qkv_bias=True, o_bias=False),
    "qwen3": Family(qk_norm=True),
    "gemma": Family(norm_offset=1.0, scaled_embedding=True),
    "gemma2": Family(
        norm_offset=1.0,
        scaled_embedding=True,
        scaled_attention=True,
        sandwich_norms=True,
        activation_field="hidden_activation",
    ),
    "gemma3_text": Family(
        norm_offset=1.0,
        scaled_embedding=True,
        scaled_attention=True,
        sandwich_norms=True,
        qk_norm=True,
        local_rope=True,
        activation_field="hidden_activation",
    ),
}

_KNOWN_BUFFERS = re.compile(r"(^|\.)rotary_emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)$")
"""Derived numbers that older checkpoints carry; the rotation's tables are computed anew."""

_FIRST_NUMBER = re.compile(r"^[^0-9]*\.(\d{1,9})\.")

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")


@dataclass(frozen=True)
class DecoderConfig:
    """A pre-norm decoder with grouped-query attention, rotary positions and a gated MLP."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    norm_offset: float
    rope: RopeConfig
    sliding_windows: tuple[int | None, ...]
    """Per layer: how many positions back a token sees, itself included; None: all."""
    attention_scale: float
    """The factor on the scores."""
    local_rope: RopeConfig | None = None
    """The rotation of layers with a sliding window, where they have another."""
    attention_softcap: float | None = None
    """Scores become `softcap * tanh(score / softcap)`."""
    logit_softcap: float | None = None
    """The same for logits."""
    embedding_scale: float | None = None
    """What the architecture multiplies embeddings by, as the number that training used; None: nothing."""
    sandwich_norms: bool = False
    """Whether attention and MLP each have a norm behind them as well."""

    @property
    def ropes(self) -> Mapping[bool, RopeConfig]:
        """The rotations by whether a layer is local (`is_local`)."""
        return {False: self.rope} if self.local_rope is None else {False: self.rope, True: self.local_rope}

    def is_local(self, layer: int) -> bool:
        """Whether a layer rotates by `local_rope`."""
        return self.local_rope is not None and self.sliding_windows[layer] is not None

    @property
    def mlp_norm(self) -> str:
        """The norm before a layer's MLP, by its name in the checkpoint."""
        return "pre_feedforward_layernorm" if self.sandwich_norms else "post_attention_layernorm"

    @property
    def query_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        return self.num_key_value_heads * self.head_dim

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Read a config.json. Raises `InputError` for a family or a setting that the exporters do not build."""
        model_type = config.get("model_type")
        family = FAMILIES.get(str(model_type))
        if family is None:
            raise InputError(unsupported_architecture(model_type))
        full = with_defaults(config)
        heads = _positive(full, "num_attention_heads")
        key_value_heads = _positive(full, "num_key_value_heads", default=heads)
        hidden_size = _positive(full, "hidden_size")
        if heads % key_value_heads:
            raise InputError(
                f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads "
                f"{key_value_heads}; correct one of them."
            )
        if full.get("head_dim") is None and hidden_size % heads:
            raise InputError(
                f"config.json: hidden_size {hidden_size} is not a multiple of num_attention_heads {heads} "
                f"and head_dim is not given; add head_dim."
            )
        head_dim = _positive(full, "head_dim", default=hidden_size // heads)
        if head_dim % 2:
            raise InputError(
                f"config.json: head_dim {head_dim} is odd; rotary positions need an even number."
            )
        activation = full.get(family.activation_field, "silu")
        if activation not in ACTIVATIONS:
            raise InputError(
                f"config.json: {family.activation_field} '{activation}' is not supported; known are "
                f"{', '.join(ACTIVATIONS)}."
            )
        layers = _positive(full, "num_hidden_layers")
        attention_bias = bool(full.get("attention_bias", False))
        return cls(
            model_type=str(model_type),
            vocab_size=_positive(full, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_positive(full, "intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=key_value_heads,
            head_dim=head_dim,
            rms_norm_eps=_epsilon(full),
            hidden_act=activation,
            max_position_embeddings=_positive(full, "max_position_embeddings"),
            tie_word_embeddings=bool(full.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            o_bias=attention_bias if family.o_bias is None else family.o_bias,
            mlp_bias=bool(full.get("mlp_bias", False)),
            qk_norm=family.qk_norm,
            norm_offset=family.norm_offset,
            rope=RopeConfig.from_hf(config, full, head_dim, "full_attention" if family.local_rope else None),
            sliding_windows=_sliding_windows(full, layers),
            embedding_scale=embedding_scale(config),
            **_attention_fields(config, full, family, head_dim),
        )

    def backbone_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every backbone tensor by its Hugging Face name, tables left out, with its shape."""
        d, i, q, kv = self.hidden_size, self.intermediate_size, self.query_size, self.key_value_size
        shapes: dict[str, tuple[int, ...]] = {}
        for n in range(self.num_hidden_layers):
            p = f"model.layers.{n}."
            shapes[p + "input_layernorm.weight"] = (d,)
            for name, rows in (("q", q), ("k", kv), ("v", kv)):
                shapes[f"{p}self_attn.{name}_proj.weight"] = (rows, d)
                if self.qkv_bias:
                    shapes[f"{p}self_attn.{name}_proj.bias"] = (rows,)
                if self.qk_norm and name != "v":
                    shapes[f"{p}self_attn.{name}_norm.weight"] = (self.head_dim,)
            shapes[p + "self_attn.o_proj.weight"] = (d, q)
            if self.o_bias:
                shapes[p + "self_attn.o_proj.bias"] = (d,)
            shapes[p + "post_attention_layernorm.weight"] = (d,)
            if self.sandwich_norms:
                shapes[p + "pre_feedforward_layernorm.weight"] = (d,)
                shapes[p + "post_feedforward_layernorm.weight"] = (d,)
            for name, shape in (("gate", (i, d)), ("up", (i, d)), ("down", (d, i))):
                shapes[f"{p}mlp.{name}_proj.weight"] = shape
                if self.mlp_bias:
                    shapes[f"{p}mlp.{name}_proj.bias"] = shape[:1]
        shapes["model.norm.weight"] = (d,)
        return shapes


def check_tensors(config: DecoderConfig, shapes: Mapping[str, tuple[int, ...]], where: object) -> None:
    """Compare a backbone's tensors, tables left out, with those that `config` makes.

    Raises `InputError`, which begins with `where`, for all that are missing, unknown or of another shape.
    """
    found = {name: shape for name, shape in shapes.items() if not _KNOWN_BUFFERS.search(name)}
    layers = layer_count(found)
    if layers is not None and config.num_hidden_layers > layers:  # named before a table of them all is made
        raise InputError(too_many_layers(where, config.num_hidden_layers, layers))
    refuse_misfits(config.backbone_shapes(), found, f"{where}", config.model_type)


def refuse_misfits(
    expected: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    where: object,
    model_type: str,
) -> None:
    """Raise `InputError` where `found` is not `expected`, with the tensors of each kind of fault by name."""
    wrong = sorted(name for name in found.keys() & expected.keys() if found[name] != expected[name])
    faults = [
        ("missing", sorted(expected.keys() - found.keys())),
        ("not part of this architecture", sorted(found.keys() - expected.keys())),
        ("of another shape", [f"{n} {list(found[n])} instead of {list(expected[n])}" for n in wrong]),
    ]
    named = [f"{len(names)} {kind} ({_listed(names)})" for kind, names in faults if names]
    if named:
        raise InputError(
            f"{where}: the tensors do not fit config.json (model_type {model_type}): {'; '.join(named)}; correct "
            f"config.json or the checkpoint."
        )


def layer_count(names: Iterable[str]) -> int | None:
    """One more than the largest number that is the first in a tensor's name; None where no name has one."""
    numbers = [int(match.group(1)) for match in map(_FIRST_NUMBER.search, names) if match]
    return 1 + max(numbers) if numbers else None


def too_many_layers(where: object, said: int, found: int, field: str = "num_hidden_layers") -> str:
    """The sentence for a config that asks for more layers than there are."""
    return (
        f"{where}: config.json says {field} {said}, and the weights have {found} layers; correct "
        f"config.json or fetch the missing files."
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def check_runnable(full: Mapping[str, Any]) -> None:
    """Raise `InputError` for a rope kind, a base period or an activation that transformers does not have.

    `full` is a config with its defaults, as `PretrainedConfig.to_dict` makes it. The library itself looks these words
    up when it builds the model.
    """
    from pit_deploy.extras import require

    kinds = ("default", *require("transformers.modeling_rope_utils", "onnx").ROPE_INIT_FUNCTIONS)
    rope = full.get("rope_parameters") or {}
    for part in [value for value in rope.values() if isinstance(value, Mapping)] or [rope]:
        kind = part.get("rope_type", part.get("type", "default"))
        if kind not in kinds:
            raise InputError(
                f"config.json: the rope kind {kind!r} is not known; known are {', '.join(kinds)}."
            )
        if part:
            check_theta(part.get("rope_theta", full.get("rope_theta", 10000.0)), kind)
    activations = require("transformers.activations", "onnx").ACT2FN
    for field in ("hidden_act", "hidden_activation", "activation_function"):
        name = full.get(field)
        if name is not None and name not in activations:
            raise InputError(
                f"config.json: {field} {name!r} is not known to transformers; known are "
                f"{', '.join(sorted(activations))}."
            )


def supported_families() -> list[str]:
    """The `model_type` values that the exporters build."""
    return list(FAMILIES)


def unsupported_architecture(model_type: object) -> str:
    """The sentence for a model that cannot be exported."""
    return (
        f"config.json: model_type '{model_type}' cannot be exported; supported are "
        f"{', '.join(supported_families())}."
    )


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with its family's own defaults filled in, as transformers does it."""
    from pit_deploy.extras import require

    mapping = require("transformers.models.auto.configuration_auto", "onnx").CONFIG_MAPPING
    model_type = config.get("model_type")
    if model_type not in mapping:
        raise InputError(f"config.json: transformers does not know the model_type '{model_type}'.")
    try:
        with quiet():  # transformers writes into what it is given
            return dict(mapping[model_type].from_dict(copy.deepcopy(dict(config))).to_dict())
    except Exception as error:  # transformers raises many kinds; each is about the user's config
        reason = " ".join(str(error).split())
        raise InputError(f"config.json: transformers refuses this config: {reason}") from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' own bars and remarks; what matters is reported by pit-deploy."""
    from pit_deploy.extras import require

    logging = require("transformers", "onnx").logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _positive(config: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = config.get(field)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"config.json: {field} is {value!r}; it must be a positive integer.")
    return value


def _epsilon(config: Mapping[str, Any]) -> float:
    value = config.get("rms_norm_eps", 1e-6)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise InputError(f"config.json: rms_norm_eps is {value!r}; it must be a number, 0 or above.")
    return float(value)


def embedding_scale(config: Mapping[str, Any]) -> float | None:
    """What the architecture of a config.json multiplies embeddings by, as training computed it; None: nothing.

    The factor is sqrt(hidden_size) in the precision of the embedding: a model that was trained in bfloat16 (the
    config's `dtype` says so) has learnt with the root rounded to it, which for 640 is 25.25 and not 25.298.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None or not family.scaled_embedding:
        return None
    root = np.float32(_positive(config, "hidden_size") ** 0.5)
    dtype = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    if dtype == "bfloat16":  # to the nearest of 8 bits, ties to even: NumPy has no such type
        bits = int(root.view(np.uint32))
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
        return float(np.uint32(bits).view(np.float32))
    return float(np.float16(root)) if dtype == "float16" else float(root)


def _attention_fields(
    config: Mapping[str, Any], full: Mapping[str, Any], family: Family, head_dim: int
) -> dict[str, Any]:
    """The fields of `DecoderConfig` that only some families read."""
    if full.get("use_bidirectional_attention"):
        raise InputError("config.json: use_bidirectional_attention is true; only causal attention is built.")
    if not family.scaled_attention:
        return {"attention_scale": head_dim**-0.5}
    scalar = full.get("query_pre_attn_scalar", head_dim)
    local = RopeConfig.from_hf(config, full, head_dim, "sliding_attention") if family.local_rope else None
    return {
        "attention_scale": _above_zero(scalar, "query_pre_attn_scalar") ** -0.5,
        "attention_softcap": _softcap(full, "attn_logit_softcapping"),
        "logit_softcap": _softcap(full, "final_logit_softcapping"),
        "sandwich_norms": family.sandwich_norms,
        "local_rope": local,
    }


def _softcap(config: Mapping[str, Any], field: str) -> float | None:
    value = config.get(field)
    return None if value is None else _above_zero(value, field)


def _above_zero(value: Any, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise InputError(f"config.json: {field} is {value!r}; it must be a number above 0.")
    return float(value)


def _sliding_windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    if not config.get("sliding_window"):
        return (None,) * layers
    window = _positive(config, "sliding_window")
    kinds = config.get("layer_types") or (
        ["full_attention" if config.get("use_sliding_window") is False else "sliding_attention"] * layers
    )
    if len(kinds) != layers:
        raise InputError(
            f"config.json: layer_types has {len(kinds)} entries and num_hidden_layers is {layers}; make them agree."
        )
    known = {"full_attention": None, "sliding_attention": window}
    unknown = sorted({k for k in kinds if k not in known})
    if unknown:
        raise InputError(
            f"config.json: layer_types holds {', '.join(map(repr, unknown))}; supported are {', '.join(known)}."
        )
    return tuple(known[kind] for kind in kinds)
