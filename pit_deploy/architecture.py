"""What a decoder of a supported family is made of: the one place where an architecture's quirks live.

`DecoderConfig.from_hf` reads a Hugging Face config once; exporters and the fold ask it and never the raw
dictionary. Names are those of the Hugging Face configs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pit_deploy.errors import InputError
from pit_deploy.rope import RopeConfig


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
    exportable: bool = True
    """Whether the static graph exporters build it; convert, train and fold do not need that."""


FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(qkv_bias=False, o_bias=False),
    "qwen2": Family(qkv_bias=True, o_bias=False),
    "qwen3": Family(qk_norm=True),
    "gemma": Family(norm_offset=1.0, scaled_embedding=True, exportable=False),
    "gemma2": Family(norm_offset=1.0, scaled_embedding=True, exportable=False),
    "gemma3_text": Family(norm_offset=1.0, scaled_embedding=True, qk_norm=True, exportable=False),
}

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
        if family is None or not family.exportable:
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
        if not full.get("head_dim") and hidden_size % heads:
            raise InputError(
                f"config.json: hidden_size {hidden_size} is not a multiple of num_attention_heads {heads} "
                f"and head_dim is not given; add head_dim."
            )
        head_dim = int(full.get("head_dim") or hidden_size // heads)
        if head_dim % 2:
            raise InputError(
                f"config.json: head_dim {head_dim} is odd; rotary positions need an even number."
            )
        activation = full.get("hidden_act", "silu")
        if activation not in ACTIVATIONS:
            raise InputError(
                f"config.json: hidden_act '{activation}' is not supported; known are {', '.join(ACTIVATIONS)}."
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
            rms_norm_eps=float(full.get("rms_norm_eps", 1e-6)),
            hidden_act=activation,
            max_position_embeddings=_positive(full, "max_position_embeddings"),
            tie_word_embeddings=bool(full.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            o_bias=attention_bias if family.o_bias is None else family.o_bias,
            mlp_bias=bool(full.get("mlp_bias", False)),
            qk_norm=family.qk_norm,
            norm_offset=family.norm_offset,
            rope=RopeConfig.from_hf(config, full, head_dim),
            sliding_windows=_sliding_windows(full, layers),
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
            for name, shape in (("gate", (i, d)), ("up", (i, d)), ("down", (d, i))):
                shapes[f"{p}mlp.{name}_proj.weight"] = shape
                if self.mlp_bias:
                    shapes[f"{p}mlp.{name}_proj.bias"] = shape[:1]
        shapes["model.norm.weight"] = (d,)
        return shapes


def supported_families() -> list[str]:
    """The `model_type` values that the exporters build."""
    return [name for name, family in FAMILIES.items() if family.exportable]


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
        return dict(mapping[model_type].from_dict(dict(config)).to_dict())
    except Exception as error:  # transformers raises many kinds; each is about the user's config
        reason = " ".join(str(error).split())
        raise InputError(f"config.json: transformers refuses this config: {reason}") from error


def _positive(config: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = config.get(field)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"config.json: {field} is {value!r}; it must be a positive integer.")
    return value


def _sliding_windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if not window:
        return (None,) * layers
    kinds = config.get("layer_types") or (
        ["full_attention" if config.get("use_sliding_window") is False else "sliding_attention"] * layers
    )
    if len(kinds) != layers:
        raise InputError(
            f"config.json: layer_types has {len(kinds)} entries and num_hidden_layers is {layers}; make them agree."
        )
    known = {"full_attention": None, "sliding_attention": int(window)}
    unknown = sorted({k for k in kinds if k not in known})
    if unknown:
        raise InputError(
            f"config.json: layer_types holds {', '.join(map(repr, unknown))}; supported are {', '.join(known)}."
        )
    return tuple(known[kind] for kind in kinds)
