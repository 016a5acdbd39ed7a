"""What rounding the token tables costs a trained model, tied or PIT (the backbone stays in float32)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from pit_deploy.quantize.basis import apply_basis, quantization_basis, token_second_moment
from pit_deploy.quantize.options import QuantizationOptions
from pit_deploy.quantize.round_to_nearest import round_to_nearest
from pit_deploy.training.optimizers import interface_of
from pit_deploy.training.study import corpus
from pit_deploy.training.study.runs import SIZES, Run, build, load_

BLOCK = 32
CALIBRATION = 8
"""Blocks that the basis is chosen on; the figures come from others."""


class Ends:
    """A model's two ends as arrays: `embed` rows and `head` columns, to be rounded and put back."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.interface = interface_of(model)

    @torch.no_grad()
    def states(self, blocks: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """States before the head [tokens, d] and the next-token distribution's logits [tokens, V]."""
        found: list[torch.Tensor] = []
        hook = self.model.get_output_embeddings().register_forward_pre_hook(
            lambda m, args: found.append(args[0])
        )
        logits = self.model(input_ids=torch.from_numpy(blocks.astype(np.int64))).logits
        hook.remove()
        return found[0].reshape(-1, found[0].shape[-1]), logits.reshape(-1, logits.shape[-1])

    def tables(self) -> tuple[np.ndarray, np.ndarray]:
        """Embedding and head [V, d] as the model uses them."""
        if self.interface is None:
            table = self.model.get_input_embeddings().weight.detach().numpy()
            return table, table
        z, t = self.interface.memory.detach().double(), self.interface.transform().detach().double()
        factor = self.interface.embedding_multiplier
        embedding = z @ torch.linalg.inv(t) * (1.0 if factor is None else float(factor))
        return embedding.float().numpy(), (z @ t).float().numpy()

    @torch.no_grad()
    def logits_with(self, embedding: np.ndarray, head: np.ndarray, blocks: np.ndarray) -> torch.Tensor:
        """Logits [tokens, V] of the model with these tables at its ends."""
        rows = torch.from_numpy(embedding)[torch.from_numpy(blocks.astype(np.int64))]
        found: list[torch.Tensor] = []
        hook = self.model.get_output_embeddings().register_forward_pre_hook(
            lambda m, args: found.append(args[0])
        )
        self.model(inputs_embeds=rows)
        hook.remove()
        return found[0].reshape(-1, found[0].shape[-1]) @ torch.from_numpy(head).T


def measure(run: Run, cache: Path) -> dict[str, Any]:
    """Mean KL in nats, on held-out blocks, of each rounding of the tables of a kept run."""
    text = corpus.load("code", SIZES[run.size][0], cache)
    model: nn.Module = build(run, cache)
    load_(model, run.weights(cache))
    ends = Ends(model.eval())
    calibration, blocks = text.train[:CALIBRATION], text.held_out[:16]
    embedding, head = ends.tables()
    if run.multiplier != 1 and run.ends == "tied":
        embedding = embedding * np.float32(run.multiplier)
    reference = torch.log_softmax(ends.states(blocks)[1].double(), -1)
    figures: dict[str, float] = {}
    for bits in (8, 4):
        rounded = _rounded(embedding, bits), _rounded(head, bits)
        name = "one table" if run.ends == "tied" else "two tables"
        figures[f"int{bits}, {name}"] = _kl(reference, ends.logits_with(*rounded, blocks))
        if run.ends == "pit":
            shared = _shared(ends, calibration, bits)
            figures[f"int{bits}, one shared table"] = _kl(reference, ends.logits_with(*shared, blocks))
    return {"name": run.name, "seed": run.seed, "kl": figures, "final": 0.0, "seconds": 0.0}


def _shared(ends: Ends, calibration: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """The table `Z A` rounded once in the quantisation basis, and both ends made from it."""
    assert ends.interface is not None
    z = ends.interface.memory.detach().numpy()
    t = ends.interface.transform().detach().double().numpy()
    factor = ends.interface.embedding_multiplier
    into = np.linalg.inv(t) * (1.0 if factor is None else float(factor))
    states, logits = ends.states(calibration)
    moment = (states.double().T @ states.double() / len(states)).numpy()
    weights = torch.softmax(logits.double(), -1).mean(0).numpy()
    basis = quantization_basis(t, into, moment, row_second_moment=token_second_moment(z, weights))
    table, head_map, embedding_map = apply_basis(z, t, into, basis)
    rounded = _rounded(table, bits)
    return rounded @ embedding_map, rounded @ head_map


def _rounded(table: np.ndarray, bits: int) -> np.ndarray:
    return round_to_nearest(table, QuantizationOptions(bits, BLOCK)).dequantize()


def _kl(reference: torch.Tensor, logits: torch.Tensor) -> float:
    found = torch.log_softmax(logits.double(), -1)
    return float((reference.exp() * (reference - found)).sum(-1).mean())
