"""Light adaptation: LoRA through peft, and what adapting on one text does to the predictions on another."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from pit_deploy.errors import InputError
from pit_deploy.extras import require


def add_lora(model: Any, rank: int, *, alpha: float | None = None) -> Any:
    """`model` within a peft adapter of `rank` on every linear layer of its backbone; nothing else is trained.

    The interface stays as it is: its two ends would have to move together, and an adapter moves one matrix.
    """
    peft = require("peft", "train")
    names = sorted(
        {
            name.rsplit(".", 1)[-1]
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and not name.endswith("lm_head")
        }
    )
    if not names:
        raise InputError(
            "the backbone has no linear layer that an adapter could sit on; train without --lora."
        )
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,
        target_modules=names,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(model, config)


def compare_logits(before: torch.Tensor, after: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """Logits [blocks, tokens, V] of a text before and after training on another; `labels` [blocks, tokens] its ids.

    `kl` is the mean KL(before || after) of the next-token distributions in nats, `top1_kept` the share of positions
    whose most likely token stayed, `loss_change` the change of the mean loss in nats.
    """
    old, new = F.log_softmax(before.double(), -1), F.log_softmax(after.double(), -1)
    divergence = (old.exp() * (old - new)).sum(-1)
    targets = labels[:, 1:, None]
    losses = [-float(x[:, :-1].gather(-1, targets).mean()) for x in (old, new)]
    return {
        "kl": float(divergence.mean()),
        "top1_kept": float((old.argmax(-1) == new.argmax(-1)).double().mean()),
        "loss_before": losses[0],
        "loss_after": losses[1],
        "loss_change": losses[1] - losses[0],
    }
