"""The decoder's pieces in the forms that ExecuTorch's backends take, and quantised weights as torchao's tensors.

XNNPACK takes a whole layer as one delegate only where every operator between the projections is one of its own. So
the mean of a norm is a product with a constant row, and the rotation one with a constant matrix of 0, 1 and -1: both
exact up to the order of a sum, and neither is felt beside the projections.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pit_deploy.architecture import DecoderConfig
from pit_deploy.decoder import MASKED_SCORE, Decoder, Pieces, Step, store_float
from pit_deploy.quantize.plan import QuantizationPlan
from pit_deploy.quantize.tensor import QuantizedTensor


class LinearNorm(nn.Module):
    """RMSNorm whose mean is a linear layer."""

    mean: Tensor

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, device="meta"), requires_grad=False)
        self.register_buffer("mean", torch.full((1, size), 1.0 / size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(F.linear(x * x, self.mean) + self.eps) * self.weight


class LinearRotation(nn.Module):
    """The rotation `x * cos + (x turned by 90 degrees) * sin`, with the turn as a linear layer."""

    turn: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        half = torch.arange(config.head_dim // 2)
        turn = torch.zeros(config.head_dim, config.head_dim)
        turn[half, half + len(half)] = -1
        turn[half + len(half), half] = 1
        self.register_buffer("turn", turn)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        return x * step.cos + F.linear(x, self.turn) * step.sin


class CustomAttention(nn.Module):
    """Attention and cache update by ExecuTorch's operators for language models.

    `step.position` is a whole number. The cache is [1, context_length, heads, head_dim]; only what is written is read.
    """

    key_cache: Tensor
    value_cache: Tensor

    def __init__(self, config: DecoderConfig, layer: int, context_length: int) -> None:
        super().__init__()
        shape = (1, context_length, config.num_key_value_heads, config.head_dim)
        self.register_buffer("key_cache", torch.zeros(shape))
        self.register_buffer("value_cache", torch.zeros(shape))
        self.window, self.scale = config.sliding_windows[layer], config.attention_scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        operators = torch.ops.llama
        operators.update_cache(k, self.key_cache, step.position)
        operators.update_cache(v, self.value_cache, step.position)
        mask = None if self.window is None else step.masks[self.window]
        mixed: Tensor = operators.custom_sdpa(
            q, self.key_cache, self.value_cache, step.position, mask, 0.0, mask is None, self.scale
        )
        return mixed


class Forward(nn.Module):
    """What a program's method computes: logits, and with all of them the hidden states too."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens: Tensor, input_pos: Tensor) -> tuple[Tensor, ...]:
        """Append `tokens` [1, S] at `input_pos` int64 [1].

        Logits [1, 1, vocab_size] of the last position, or [1, S, vocab_size] of all and the residual stream
        [num_hidden_layers + 1, S, hidden_size].
        """
        states = self.decoder.hidden_states(tokens, self.step(input_pos, tokens.shape[1]))
        if self.decoder.last_only:
            return (self.decoder.logits(states[-1][:, -1:]),)
        return self.decoder.logits(states[-1]), torch.cat(states)

    def step(self, input_pos: Tensor, new: int) -> Step:
        return self.decoder.step(input_pos, new)


class LinearForward(Forward):
    """The same with rotation tables over all of a head, which a rotation by matrix reads."""

    cos: Tensor
    sin: Tensor
    local_cos: Tensor | None
    local_sin: Tensor | None

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder)
        for name in ("cos", "sin", "local_cos", "local_sin"):
            table = getattr(decoder, name)
            self.register_buffer(name, None if table is None else torch.cat([table] * 2, -1))

    def step(self, input_pos: Tensor, new: int) -> Step:
        positions = input_pos + torch.arange(new)
        step = super().step(input_pos, new)._replace(cos=self.cos[positions], sin=self.sin[positions])
        if self.local_cos is None or self.local_sin is None:
            return step
        return step._replace(local_cos=self.local_cos[positions], local_sin=self.local_sin[positions])


class CustomForward(LinearForward):
    """The same with the position as a whole number, as ExecuTorch's operators want it: once a pass."""

    def step(self, input_pos: Tensor, new: int) -> Step:
        start: Any = input_pos[0].item()
        torch._check(start >= 0)
        torch._check(start + new <= self.decoder.context_length)
        cos, sin = self.cos.narrow(0, start, new), self.sin.narrow(0, start, new)
        local = (None if t is None else t.narrow(0, start, new) for t in (self.local_cos, self.local_sin))
        return Step(cos, sin, start, self._masks(start, new), *local)

    def _masks(self, start: Any, new: int) -> dict[int | None, Tensor]:
        """For layers that see a window only; the others need none."""
        windows = [window for window in self.decoder.windows if window is not None]
        if not windows:
            return {}
        behind = (start + torch.arange(new))[:, None] - torch.arange(self.decoder.context_length)
        return {w: ((behind < 0) | (behind >= w)).to(torch.float32) * MASKED_SCORE for w in windows}


LINEAR = Pieces(norm=LinearNorm, rotation=LinearRotation)
CUSTOM = replace(LINEAR, attention=CustomAttention)


class QuantizedStore:
    """Puts a decoder's tensors where they belong, quantised as `plan` says.

    XNNPACK rounds activations to int8 as they come, a token at a time; an embedding's rows are only scaled.
    """

    def __init__(self, plan: QuantizationPlan) -> None:
        self._plan = plan

    def __call__(self, module: nn.Module, parameter: str, name: str, value: np.ndarray) -> None:
        if value.ndim != 2:
            store_float(module, parameter, name, value)
            return
        is_embedding = isinstance(module, nn.Embedding)
        role = "tables" if is_embedding or name == "lm_head.weight" else "weights"
        encoded = self._plan.encode(name, value, role)
        if not isinstance(encoded, QuantizedTensor):
            store_float(module, parameter, name, encoded)
            return
        tensor = intx_tensor(encoded, dynamic_activations=not is_embedding)
        setattr(module, parameter, nn.Parameter(tensor, requires_grad=False))


def intx_tensor(tensor: QuantizedTensor, *, dynamic_activations: bool) -> Tensor:
    """The same codes and scales as torchao's tensor: nothing is rounded again.

    torchao's codes are signed: ours less the zero point of a symmetric tensor, which is 0 there. Raises
    `AssertionError` for what XNNPACK cannot hold: padding, zero points, and for products scales that are not positive.
    """
    from torchao.quantization import IntxUnpackedToInt8Tensor

    assert tensor.zero_points is None, "XNNPACK takes symmetric codes only"
    assert tensor.codes.shape[1] == tensor.columns, "XNNPACK takes whole blocks only"
    assert not dynamic_activations or (tensor.scales > 0).all(), "XNNPACK takes positive scales only"
    codes = (tensor.codes.astype(np.int16) - tensor.default_zero_point).astype(np.int8)
    scales = torch.from_numpy(tensor.scales)
    return IntxUnpackedToInt8Tensor(
        torch.from_numpy(codes),
        scales,
        torch.zeros(scales.shape, dtype=torch.int8),
        getattr(torch, f"int{tensor.bits}"),
        (1, tensor.block_size),
        torch.float32,
        "int8_asym_per_token" if dynamic_activations else None,
    )
