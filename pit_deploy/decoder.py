"""The decoder in plain PyTorch: static, short, and made of pieces that an exporter may replace.

The ExecuTorch exporter traces this module; for exporters that write a graph themselves (ONNX, Core ML) it is an
independent check.
Shapes: tokens int64 [1, S], hidden states [1, S, hidden_size], queries, keys and values [1, S, heads, head_dim].

    decoder = build_decoder(config, context_length)
    load_weights(decoder, config, read, tables)
    logits = decoder(tokens, torch.tensor([position]))

Parameters have the names of the Hugging Face checkpoint without the leading `model.`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pit_deploy.architecture import DecoderConfig
from pit_deploy.folding import SharedTable, Tables

MASKED_SCORE = -3e4
"""Added to the score of a key that may not be seen; finite, also in float16."""
MASKED_LOGIT = -1e9
"""Added to the logits of ids without a token."""

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    # Written out: a delegate that knows GELU by name alone computes the exact one.
    "gelu_pytorch_tanh": lambda x: (
        0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    ),
    "relu": F.relu,
}


class Step(NamedTuple):
    """What every layer needs to know of the new tokens; made once a forward pass.

    Only the pieces for rotation and attention read it: an exporter that replaces both may put into it what it
    likes.
    """

    cos: Tensor
    """[S, 1, head_dim / 2]"""
    sin: Tensor
    position: Any
    """Tokens in the cache before this step: int64 [1] as `PlainAttention` takes it."""
    masks: Mapping[int | None, Tensor]
    """By sliding window: what is added to the scores, [S, context_length]."""
    local_cos: Tensor | None = None
    local_sin: Tensor | None = None
    """Like `cos` and `sin`, for layers that rotate by `local_rope`."""


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x²) + eps) * weight`; `weight` is the whole gain (`norm_offset` is added when it is loaded)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, device="meta"), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps) * self.weight


class Rotation(nn.Module):
    """Rotates pairs `(i, i + head_dim / 2)` of each head by the angles of its position."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """`x` [1, S, heads, head_dim]"""
        half = x.shape[-1] // 2
        first, second, cos, sin = x[..., :half], x[..., half:], step.cos, step.sin
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class PlainAttention(nn.Module):
    """Grouped-query attention over a cache of fixed length, [context_length, heads, head_dim] each.

    Every step reads the whole cache; what is not written yet or not to be seen is masked.
    """

    key_cache: Tensor
    value_cache: Tensor

    def __init__(self, config: DecoderConfig, layer: int, context_length: int) -> None:
        super().__init__()
        shape = (context_length, config.num_key_value_heads, config.head_dim)
        self.register_buffer("key_cache", torch.zeros(shape))
        self.register_buffer("value_cache", torch.zeros(shape))
        self.window, self.scale = config.sliding_windows[layer], config.attention_scale
        self.softcap = config.attention_softcap

    def forward(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """Append `k` and `v` to the cache and attend; returns [1, S, heads, head_dim]."""
        positions = step.position + torch.arange(q.shape[1])
        self.key_cache.index_copy_(0, positions, k.squeeze(0))
        self.value_cache.index_copy_(0, positions, v.squeeze(0))
        mask = step.masks[self.window]
        return attend(q, self.key_cache, self.value_cache, mask, self.scale, self.softcap)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None = None
) -> Tensor:
    """Softmax attention; `k` and `v` [T, key-value heads, head_dim], `mask` [S, T] is added to the scores."""
    length, kv, dim = k.shape
    groups = q.shape[2] // kv
    # Query heads that share a key head are rows of one product, so that no key is repeated. No tensor has more than
    # four dimensions: delegates take no more.
    q = q.view(-1, kv, groups, dim).permute(1, 2, 0, 3).reshape(kv, -1, dim)  # [kv, groups * S, dim]
    scores = torch.bmm(q, k.permute(1, 2, 0)).view(kv, groups, -1, length) * scale
    scores = capped(scores, softcap) + mask
    mixed = torch.bmm(scores.softmax(-1).view(kv, -1, length), v.transpose(0, 1))
    return mixed.view(kv, groups, -1, dim).permute(2, 0, 1, 3).reshape(1, -1, kv * groups, dim)


def capped(x: Tensor, softcap: float | None) -> Tensor:
    """`softcap * tanh(x / softcap)`, or `x` itself for None."""
    return x if softcap is None else torch.tanh(x / softcap) * softcap


def empty_linear(inputs: int, outputs: int, bias: bool) -> nn.Module:
    """A linear layer whose parameters have no memory until they are loaded."""
    return nn.Linear(inputs, outputs, bias=bias, device="meta")


def empty_embedding(rows: int, size: int) -> nn.Module:
    """An embedding whose table has no memory until it is loaded."""
    return nn.Embedding(rows, size, device="meta")


@dataclass(frozen=True)
class Pieces:
    """What an exporter may replace. Each makes a module that is called as the one named here."""

    linear: Callable[[int, int, bool], nn.Module] = empty_linear
    embedding: Callable[[int, int], nn.Module] = empty_embedding
    norm: Callable[[int, float], nn.Module] = RMSNorm
    attention: Callable[[DecoderConfig, int, int], nn.Module] = PlainAttention
    """`(config, layer, context_length)`; called with q, k (both rotated), v and the `Step`."""
    rotation: Callable[[DecoderConfig], nn.Module] = Rotation
    """Called with q or k and the `Step`."""


class Attention(nn.Module):
    """Projections around the attention piece."""

    def __init__(self, config: DecoderConfig, layer: int, context_length: int, pieces: Pieces) -> None:
        super().__init__()
        d, q, kv = config.hidden_size, config.query_size, config.key_value_size
        self.q_proj = pieces.linear(d, q, config.qkv_bias)
        self.k_proj = pieces.linear(d, kv, config.qkv_bias)
        self.v_proj = pieces.linear(d, kv, config.qkv_bias)
        self.o_proj = pieces.linear(q, d, config.o_bias)
        if config.qk_norm:
            self.q_norm = pieces.norm(config.head_dim, config.rms_norm_eps)
            self.k_norm = pieces.norm(config.head_dim, config.rms_norm_eps)
        self.attend = pieces.attention(config, layer, context_length)
        self.rotate = pieces.rotation(config)
        self.qk_norm, self.head_dim = config.qk_norm, config.head_dim
        self.is_local = config.is_local(layer)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        q, k, v = (self._split(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        turn = step
        if self.is_local:
            assert step.local_cos is not None and step.local_sin is not None
            turn = step._replace(cos=step.local_cos, sin=step.local_sin)
        mixed = self.attend(self.rotate(q, turn), self.rotate(k, turn), v, step)
        return self.o_proj(mixed.reshape(x.shape[0], -1, mixed.shape[2] * self.head_dim))

    def _split(self, x: Tensor) -> Tensor:
        # The free length is the one that is inferred: delegates take a reshape with whole numbers only.
        return x.view(x.shape[0], -1, x.shape[2] // self.head_dim, self.head_dim)


class MLP(nn.Module):
    """The gated feed-forward part."""

    def __init__(self, config: DecoderConfig, pieces: Pieces) -> None:
        super().__init__()
        d, i, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = pieces.linear(d, i, bias)
        self.up_proj = pieces.linear(d, i, bias)
        self.down_proj = pieces.linear(i, d, bias)
        self.activation = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm (or between two) and added to its input."""

    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module
    pre_feedforward_layernorm: nn.Module
    post_feedforward_layernorm: nn.Module

    def __init__(self, config: DecoderConfig, layer: int, context_length: int, pieces: Pieces) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer, context_length, pieces)
        self.mlp = MLP(config, pieces)
        names = ["input_layernorm", "post_attention_layernorm"]
        if config.sandwich_norms:
            names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        for name in names:
            setattr(self, name, pieces.norm(config.hidden_size, config.rms_norm_eps))
        self.sandwich_norms = config.sandwich_norms

    def forward(self, x: Tensor, step: Step) -> Tensor:
        mixed = self.self_attn(self.input_layernorm(x), step)
        if not self.sandwich_norms:
            x = x + mixed
            return x + self.mlp(self.post_attention_layernorm(x))
        x = x + self.post_attention_layernorm(mixed)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Decoder(nn.Module):
    """The whole model; make it with `build_decoder`."""

    cos: Tensor
    sin: Tensor
    local_cos: Tensor | None
    local_sin: Tensor | None
    logit_mask: Tensor | None

    def __init__(
        self,
        config: DecoderConfig,
        context_length: int,
        pieces: Pieces,
        *,
        tables: Tables | None,
        tokenizer_length: int,
        last_only: bool,
        masked_logit: float,
    ) -> None:
        super().__init__()
        d, rows = config.hidden_size, config.vocab_size
        self.embed_tokens = pieces.embedding(rows, d)
        self.layers = nn.ModuleList(
            Layer(config, n, context_length, pieces) for n in range(config.num_hidden_layers)
        )
        self.norm = pieces.norm(d, config.rms_norm_eps)
        self.lm_head = pieces.linear(d, rows, False)
        maps = (tables.embedding_map, tables.head_map) if isinstance(tables, SharedTable) else (None, None)
        self.embedding_map, self.head_map = (None if m is None else empty_linear(d, d, False) for m in maps)
        self.context_length, self.last_only = context_length, last_only
        self.windows = tuple(dict.fromkeys(config.sliding_windows))
        for prefix, rope in (("", config.rope), ("local_", config.local_rope)):
            for name, values in zip(
                ("cos", "sin"), rope.tables(context_length) if rope else (None, None), strict=True
            ):
                table = None if values is None else torch.from_numpy(values).unsqueeze(1)
                self.register_buffer(prefix + name, table)
        self.embedding_scale, self.logit_softcap = config.embedding_scale, config.logit_softcap
        bias = torch.zeros(rows)
        bias[tokenizer_length:] = masked_logit
        self.register_buffer("logit_mask", bias if tokenizer_length < rows else None)

    def forward(self, tokens: Tensor, position: Tensor) -> Tensor:
        """Append `tokens` [1, S] at `position` int64 [1]; logits [1, S or 1, vocab_size]."""
        return self.logits(self.hidden(tokens, self.step(position, tokens.shape[1])))

    def step(self, position: Tensor, new: int) -> Step:
        """The `Step` that `PlainAttention` takes."""
        positions = position + torch.arange(new)
        behind = positions[:, None] - torch.arange(self.context_length)  # [S, context_length]
        masks = {}
        for window in self.windows:
            hidden = behind < 0 if window is None else (behind < 0) | (behind >= window)
            masks[window] = hidden * MASKED_SCORE
        local = (None if t is None else t[positions] for t in (self.local_cos, self.local_sin))
        return Step(self.cos[positions], self.sin[positions], position, masks, *local)

    def hidden(self, tokens: Tensor, step: Step) -> Tensor:
        """The residual stream after the last layer, of the last token alone where only its logits are asked for."""
        x = self.hidden_states(tokens, step)[-1]
        return x[:, -1:] if self.last_only else x

    def hidden_states(self, tokens: Tensor, step: Step) -> list[Tensor]:
        """The residual stream after the embedding and after each layer."""
        states = [self.embed(tokens)]
        for layer in self.layers:
            states.append(layer(states[-1], step))
        return states

    def embed(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        if self.embedding_map is not None:
            x = self.embedding_map(x)
        return x if self.embedding_scale is None else x * self.embedding_scale

    def logits(self, x: Tensor) -> Tensor:
        """Final norm and head."""
        x = self.norm(x)
        x = capped(self.lm_head(x if self.head_map is None else self.head_map(x)), self.logit_softcap)
        return x if self.logit_mask is None else x + self.logit_mask


def build_decoder(
    config: DecoderConfig,
    context_length: int,
    pieces: Pieces | None = None,
    *,
    tables: Tables | None = None,
    tokenizer_length: int | None = None,
    last_only: bool = False,
    masked_logit: float = MASKED_LOGIT,
) -> Decoder:
    """A decoder with an empty cache and without weights (its parameters are on the meta device).

    `config.vocab_size` must be the rows of the tables. `tables` decides whether there are maps beside the table
    (layout `shared`). Ids from `tokenizer_length` on are masked by adding `masked_logit`.
    """
    decoder = Decoder(
        config,
        context_length,
        pieces or Pieces(),
        tables=tables,
        tokenizer_length=config.vocab_size if tokenizer_length is None else tokenizer_length,
        last_only=last_only,
        masked_logit=masked_logit,
    )
    return decoder.eval().requires_grad_(False)


Store = Callable[[nn.Module, str, str, np.ndarray], None]
"""`(module, parameter, name, value)`: put a tensor into a module; `name` is its Hugging Face name."""


def store_float(module: nn.Module, parameter: str, name: str, value: np.ndarray) -> None:
    """Put a float32 tensor where it belongs, without a copy."""
    tensor = torch.from_numpy(np.ascontiguousarray(value, np.float32))
    expected = getattr(module, parameter).shape
    assert tensor.shape == expected, f"{name} is {list(tensor.shape)}, the module takes {list(expected)}"
    setattr(module, parameter, nn.Parameter(tensor, requires_grad=False))


def load_weights(
    decoder: Decoder,
    config: DecoderConfig,
    read: Callable[[str], np.ndarray],
    tables: Tables,
    store: Store = store_float,
) -> None:
    """Fill `decoder`, one tensor at a time: `read` gives the backbone's by their Hugging Face names.

    Gains arrive in `store` with `norm_offset` added. A shared table is stored twice, as the same array under the same
    name, for the embedding and for the head; its maps are float. What `read` and `store` raise leaves the decoder
    half filled.
    """
    for name in config.backbone_shapes():
        path, parameter = name.removeprefix("model.").rsplit(".", 1)
        value = read(name)
        if path.endswith("norm"):
            value = value + np.float32(config.norm_offset)
        store(decoder.get_submodule(path), parameter, name, value)
    if not isinstance(tables, SharedTable):
        store(decoder.embed_tokens, "weight", "model.embed_tokens.weight", tables.embedding)
        store(decoder.lm_head, "weight", "lm_head.weight", tables.head)
        return
    for module in (decoder.embed_tokens, decoder.lm_head):
        store(module, "weight", "pit.table", tables.table)
    # For rows x: x = row @ embedding_map, n @ head_map.T; a linear layer multiplies by its weight's transpose.
    if decoder.embedding_map is not None and tables.embedding_map is not None:
        store_float(decoder.embedding_map, "weight", "pit.embedding_map", tables.embedding_map.T)
    if decoder.head_map is not None and tables.head_map is not None:
        store_float(decoder.head_map, "weight", "pit.head_map", tables.head_map)


def clear_cache(decoder: Decoder) -> None:
    """Zero the cache. Needed by nothing (what lies past the position is masked), but it makes runs repeatable."""
    for name, buffer in decoder.named_buffers():
        if name.endswith("_cache"):
            buffer.zero_()
