"""What happens to the interface while a model trains, and what a model's layers already know (the logit lens)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from transformers import TrainerCallback

from pit_deploy.training.callbacks import Log
from pit_deploy.training.optimizers import interface_of, whole, whole_cholesky

ROWS = 2048
"""Rows of the tables that the drift is measured on, spread evenly over the vocabulary."""

SPIKE = 6.0
"""A step is a spike where its loss is this many robust deviations above the median of the steps before it."""

_WINDOW = 20
_FINAL_NORMS = ("norm", "ln_f", "final_layernorm", "final_layer_norm")


class Diagnostics(TrainerCallback):
    """Adds the interface's figures to the log at the start of a run and after each evaluation.

    interface_error        delta_TI = ‖WᵀE - I‖_F / √d
    orthonormality_error   largest entry of |ZᵀZ - I|
    condition              of T
    embedding_drift        ‖E - E₀‖ / ‖E₀‖ on a sample of rows, the bridge included; E₀ at the first `measure`
    head_drift             the same of W
    """

    def __init__(self, log: Log) -> None:
        self.log = log
        self.start: tuple[torch.Tensor, torch.Tensor] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if not state.global_step:
            self._add(model, state)

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step:
            self._add(model, state)

    def _add(self, model: Any, state: Any) -> None:
        interface = interface_of(model)
        if interface is not None:
            self.log.add(state.global_step, self.measure(interface), state.is_world_process_zero)

    @torch.no_grad()
    def measure(self, interface: Any) -> dict[str, float]:
        """The figures now. The first call sets the start of the drift. All processes of a run must call it."""
        interface.settle()
        memory, cholesky = whole(interface.memory.detach()), whole_cholesky(interface)
        rows = torch.linspace(0, len(memory) - 1, min(ROWS, len(memory))).long().to(memory.device)
        tables = _tables(interface, memory[rows], cholesky)
        self.start = self.start or tables
        drifts = [
            float(torch.linalg.norm(now - then) / torch.linalg.norm(then))
            for now, then in zip(tables, self.start, strict=True)
        ]
        singular = torch.linalg.svdvals(cholesky.double())
        return {
            "interface_error": _interface_error(memory, cholesky),
            "orthonormality_error": _orthonormality(memory),
            "condition": float((singular[0] / singular[-1]) ** 2),
            "embedding_drift": drifts[0],
            "head_drift": drifts[1],
        }


def spikes(losses: Sequence[tuple[int, float]]) -> list[int]:
    """Steps whose loss stands out above the `_WINDOW` steps before them (at least ten)."""
    found = []
    values = [value for _, value in losses]
    for number in range(10, len(values)):
        before = values[max(0, number - _WINDOW) : number]
        middle = statistics.median(before)
        spread = 1.4826 * statistics.median([abs(v - middle) for v in before])
        if values[number] > middle + SPIKE * max(spread, 1e-3 * abs(middle)):
            found.append(losses[number][0])
    return found


def _tables(interface: Any, z: torch.Tensor, cholesky: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the embedding, bridge included, and of the head, float64."""
    z, cholesky = z.double(), cholesky.double()
    embedding = torch.cholesky_solve(z.T, cholesky).T
    if interface.bridge is not None:
        embedding = embedding @ whole(interface.bridge.detach()).double()
    elif interface.embedding_multiplier is not None:
        embedding = embedding * interface.embedding_multiplier.double()
    return embedding, z @ cholesky @ cholesky.T


def _interface_error(memory: torch.Tensor, cholesky: torch.Tensor) -> float:
    from pit_deploy.interface import PITInterface

    return PITInterface(memory, torch.tril(cholesky)).interface_error()


def _orthonormality(memory: torch.Tensor) -> float:
    from pit_deploy.training.stiefel import orthonormality_error

    return orthonormality_error(memory)


@torch.no_grad()
def logit_lens(path: str | Path, *, text: str | None = None, tokens: int = 512) -> dict[str, Any]:
    """What the head says of each layer's state: `layers`, from the embedding (0) to the last.

    For each: mean KL(final || layer) in nats, top-1 agreement with the final distribution, and entropy in nats, over
    `tokens` tokens of English text (None: the evaluation text that comes with Python). PIT and plain checkpoints.
    """
    from pit_deploy.bundle import load_tokenizer
    from pit_deploy.checkpoint import open_checkpoint
    from pit_deploy.errors import InputError
    from pit_deploy.model import PITForCausalLM
    from pit_deploy.quantize.calibration import evaluation_text

    checkpoint = open_checkpoint(path)
    try:
        if checkpoint.kind == "folded":
            raise InputError(f"{path} is folded; give --lens the PIT checkpoint that it was made from.")
        if not checkpoint.is_tokenized():
            raise InputError(f"{path} has no tokenizer.json, which the text is read with; add it.")
        limit = checkpoint.config.get("max_position_embeddings") or tokens
        ids = load_tokenizer(checkpoint.path / "tokenizer.json").encode(text or evaluation_text()).ids
        ids = ids[: min(tokens, int(limit))]
        if len(ids) < 2:
            raise InputError("the text makes fewer than two tokens; give more.")
        if checkpoint.kind == "pit":
            model: Any = PITForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        else:
            from pit_deploy.runtimes.torch import open_plain

            model = open_plain(checkpoint).model
        return {"path": str(path), "kind": checkpoint.kind, "tokens": len(ids), "layers": lens_of(model, ids)}
    finally:
        checkpoint.close()


@torch.no_grad()
def lens_of(model: Any, ids: Sequence[int]) -> list[dict[str, float]]:
    """The logit lens of a model in evaluation mode, layer by layer; the last entry is the model itself."""
    decoder = model.decoder if hasattr(model, "decoder") else getattr(model, model.base_model_prefix)
    output = model(input_ids=torch.tensor([list(ids)]), output_hidden_states=True, use_cache=False)
    norm = next(m for name, m in decoder.named_children() if name in _FINAL_NORMS)
    head = model.get_output_embeddings()
    final = F.log_softmax(output.logits[0].double(), -1)
    states = output.hidden_states
    found = []
    for number, state in enumerate(states):
        last = number == len(states) - 1  # transformers hands out the last state with the norm applied
        logits = output.logits[0] if last else head(norm(state[0]))
        log_p = F.log_softmax(logits.double(), -1)
        found.append(
            {
                "layer": number,
                "kl": float((final.exp() * (final - log_p)).sum(-1).mean()),
                "top1": float((log_p.argmax(-1) == final.argmax(-1)).double().mean()),
                "entropy": float(-(log_p.exp() * log_p).sum(-1).mean()),
            }
        )
    return found


def confidence(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half the width of its 95 % interval by Student's t; the width is nan for one value."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, float("nan")
    # Quantiles 0.975 of Student's t for 1 to 10 degrees of freedom.
    table = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
    factor = table[len(values) - 2] if len(values) <= 11 else 1.96
    return mean, float(factor * np.std(values, ddof=1) / len(values) ** 0.5)
