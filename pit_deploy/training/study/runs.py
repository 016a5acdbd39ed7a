"""One run of the study: what is asked, what comes out, and the file that keeps it.

Every model of a size starts from the same backbone for a seed, sees the same blocks in the same order, and is
evaluated on the same held-out blocks; only the two ends of the model differ.
"""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import nn

from pit_deploy.training.study import corpus

SIZES: dict[str, tuple[int, int]] = {"small": (4096, 128), "large": (8192, 256)}
"""Vocabulary and hidden size. The large model has four times the parameters."""

LAYERS = 2
STEPS = 200
BATCHES = {"small": 8, "large": 4}
"""Blocks of a step."""


@dataclass(frozen=True)
class Run:
    """A model, its ends, and how it is trained. Names of files and rows follow from the fields.

    `scale` is that of `T` relative to `√(V/d)`, `multiplier` that of embeddings relative to `V/d` (PIT; 0: none) or
    to 1 (tied), `std` that of the tied table. `step` says how Z and T are stepped: as one `table`, or `apart`.
    `source` is a trained run to go on from, and `mode` how: tied, strict, bridge; `tune`: as it is, on other text;
    `lora`: the same by an adapter.
    """

    size: str = "small"
    ends: str = "tied"
    seed: int = 0
    corpus: str = "code"
    steps: int = STEPS
    learning_rate: float = 3e-3
    rate: float = 2e-2
    transform: float | None = None
    decay: float = 1.0
    std: float = 0.1
    scale: float = 1.0
    multiplier: float = 1.0
    memory: str = "stiefel"
    optimizer: str = "adamw"
    step: str = "table"
    source: Run | None = None
    mode: str = ""
    anneal: int | None = None
    keep: bool = False

    @property
    def name(self) -> str:
        own = [f"{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self)
               if f.name not in ("source", "keep") and getattr(self, f.name) != f.default]  # fmt: skip
        name = ",".join(own) or "default"
        return name if self.source is None else f"{name},from({self.source.name})"

    def file(self, cache: Path) -> Path:
        return cache / "runs" / f"{self.name}.json"

    def weights(self, cache: Path) -> Path:
        return cache / "weights" / f"{self.name}.safetensors"


def execute(run: Run, cache: Path) -> dict[str, Any]:
    """The result of `run`: from its file, or by training (which writes it). Its `seconds` are of the processor."""
    file = run.file(cache)
    if file.is_file() and (not run.keep or run.weights(cache).is_file()):
        found: dict[str, Any] = json.loads(file.read_text())
        return found
    result = _train(run, cache)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(result))
    partial.replace(file)
    return result


def build(run: Run, cache: Path) -> nn.Module:
    """The model of `run` before its first step."""
    from pit_deploy.initialize import random_orthonormal
    from pit_deploy.interface import PITInterface
    from pit_deploy.model import PITForCausalLM

    if run.source is not None:
        return _continued(run, cache)
    vocab_size, hidden = SIZES[run.size]
    torch.manual_seed(run.seed)
    backbone = _backbone(vocab_size, hidden)
    if run.ends == "tied":
        with torch.no_grad():
            backbone.get_input_embeddings().weight.normal_(0, run.std)
        if run.multiplier != 1:
            scale_embedding_(backbone, run.multiplier)
        return backbone
    scale, multiplier = (vocab_size / hidden) ** 0.5, vocab_size / hidden
    return PITForCausalLM(
        backbone,
        PITInterface(
            torch.from_numpy(random_orthonormal(vocab_size, hidden, seed=run.seed)),
            torch.eye(hidden) * (run.scale * scale) ** 0.5,
            torch.tensor(run.multiplier * multiplier) if run.multiplier else None,
            memory_kind=run.memory,
        ),
    )


def scale_embedding_(model: Any, factor: float) -> None:
    """Let a plain model multiply its embeddings, as some families do."""
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: output * factor)


def _backbone(vocab_size: int, hidden: int, tied: bool = True) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=hidden,
            intermediate_size=hidden * 11 // 4,
            num_hidden_layers=LAYERS,
            num_attention_heads=hidden // 32,
            num_key_value_heads=hidden // 64,
            max_position_embeddings=256,
            tie_word_embeddings=tied,
            pad_token_id=None,
        )
    )


def _continued(run: Run, cache: Path) -> nn.Module:
    """The trained model of `run.source`, as it is or converted."""
    from pit_deploy.initialize import polar
    from pit_deploy.interface import PITInterface
    from pit_deploy.model import PITForCausalLM

    assert run.source is not None
    execute(run.source, cache)
    source = build(run.source, cache)
    load_(source, run.source.weights(cache))
    if run.mode in ("tied", "tune", "lora"):
        return _with_adapter(source, run.seed) if run.mode == "lora" else source
    table = source.get_input_embeddings().weight.detach().double().numpy()  # type: ignore[operator]
    factors = polar(table)
    transform = torch.from_numpy(factors.transform)
    bridge = None if run.mode == "strict" else (transform @ transform).float()
    backbone = _backbone(*SIZES[run.size], tied=False)
    kept = {k: v for k, v in source.state_dict().items() if "embed_tokens" not in k and "lm_head" not in k}
    model = PITForCausalLM(
        backbone,
        PITInterface(
            torch.from_numpy(factors.memory),
            torch.linalg.cholesky(transform).float(),
            bridge,
            memory_kind=run.memory,
        ),
    )
    backbone.load_state_dict(kept)
    return model


def _with_adapter(model: nn.Module, seed: int) -> nn.Module:
    from pit_deploy.training.adaptation import add_lora

    torch.manual_seed(seed)
    adapted: nn.Module = add_lora(model, 8)
    return adapted


def load_(model: nn.Module, file: Path) -> None:
    """Load the weights of a kept run. A tied head is in the file once."""
    state = safetensors.torch.load_file(file)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)


def _train(run: Run, cache: Path) -> dict[str, Any]:
    from pit_deploy.training.annealing import AnnealBridge
    from pit_deploy.training.optimizers import interface_of
    from pit_deploy.training.options import TrainingOptions
    from pit_deploy.training.stiefel import orthonormality_error
    from pit_deploy.training.trainer import fit

    text = corpus.load(run.corpus, SIZES[run.size][0], cache)
    start = time.process_time()
    model = build(run, cache)
    unrelated = None
    if run.mode in ("tune", "lora"):
        other = corpus.load("code" if run.corpus == "prose" else "prose", SIZES[run.size][0], cache).held_out
        unrelated = (other, next_token_logits(model, other))
    options = TrainingOptions(
        steps=run.steps,
        batch_size=BATCHES[run.size],
        learning_rate=run.learning_rate,
        interface_rate=run.rate,
        transform_rate=run.transform,
        memory_decay=run.decay,
        warmup=0.1,
        optimizer=run.optimizer,
        interface_step="apart" if run.step == "apart" else None,
        eval_every=max(1, run.steps // 5) if run.source is None else 20,
        log_every=10,
        seed=run.seed,
    )
    annealing = [AnnealBridge(model, run.anneal)] if run.anneal else []
    log = fit(model, text.train, text.held_out, options, callbacks=annealing)
    result: dict[str, Any] = {
        "run": {k: v for k, v in dataclasses.asdict(run).items() if k != "source"},
        "name": run.name,
        "tokens": run.steps * BATCHES[run.size] * corpus.LENGTH,
        "train_tokens_available": int(text.train.size),
        "corpus_sha256": text.sha256,
        "eval": [(s, round(v, 5)) for s, v in log.series("eval_loss")],
        "train": [(s, round(v, 5)) for s, v in log.series("loss")],
        "grad_norm": [(s, round(v, 4)) for s, v in log.series("grad_norm")],
        "seconds": round(time.process_time() - start, 1),
    }
    result["final"] = result["eval"][-1][1]
    interface = interface_of(model)
    if interface is not None:
        result["interface_error"] = interface.interface_error()
        result["orthonormality_error"] = orthonormality_error(interface.memory.detach())
        result["condition"] = float(torch.linalg.cond(interface.transform().detach().double()))
    if unrelated is not None:
        result["side_effects"] = _side_effects(model, *unrelated)
    if run.keep:
        file = run.weights(cache)
        file.parent.mkdir(parents=True, exist_ok=True)
        state = {
            k: v.contiguous()
            for k, v in model.state_dict().items()
            if run.ends == "pit" or k != "lm_head.weight"
        }
        safetensors.torch.save_file(state, file)
    return result


@torch.no_grad()
def next_token_logits(model: nn.Module, blocks: np.ndarray, count: int = 16) -> torch.Tensor:
    """Logits [count, LENGTH, V] of the first blocks."""
    model.eval()
    logits: torch.Tensor = model(input_ids=torch.from_numpy(blocks[:count].astype(np.int64))).logits
    return logits


def _side_effects(model: nn.Module, blocks: np.ndarray, before: torch.Tensor) -> dict[str, float]:
    """What training on one text did to the predictions on another."""
    from pit_deploy.training.adaptation import compare_logits

    after = next_token_logits(model, blocks)
    labels = torch.from_numpy(blocks[: len(after)].astype(np.int64))
    return compare_logits(before, after, labels)
