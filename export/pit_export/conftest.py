"""Tiny random models of transformers, and their exports, each made once in a test run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import PreTrainedModel

from pit_deploy.architecture import DecoderConfig
from pit_deploy.checkpoint import open_checkpoint
from pit_deploy.export_options import Artifact, ExportOptions
from pit_deploy.folding import FoldedModel, load_folded
from pit_deploy.progress import silent
from pit_deploy.quantize.plan import QuantizationPlan
from pit_deploy.runtimes.onnxruntime import OnnxRuntime
from pit_export.onnx import OnnxExporter

CONTEXT = 96
TINY: dict[str, Any] = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=131,
    max_position_embeddings=CONTEXT,
)


@dataclass
class Tiny:
    """A model in transformers and the same model on disk."""

    model: PreTrainedModel
    path: Path
    ids: list[int] = field(default_factory=list)

    def folded(self, layout: str | None = None) -> FoldedModel:
        return load_folded(open_checkpoint(self.path), layout)

    def config(self) -> DecoderConfig:
        return DecoderConfig.from_hf(open_checkpoint(self.path).backbone_config)

    @torch.no_grad()
    def reference(self, ids: list[int] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Hidden states before each layer [layers, tokens, hidden] and logits [tokens, V], by transformers."""
        out = self.model(torch.tensor([ids or self.ids]), output_hidden_states=True)
        states = [h[0].numpy() for h in out.hidden_states[:-1]]  # its last one is past the final norm
        return np.stack(states), out.logits[0].numpy()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A function `(model_type, **config fields) -> Tiny`. Models are shared between tests: don't change them."""
    made: dict[Any, Tiny] = {}

    def make(model_type: str = "llama", **fields: Any) -> Tiny:
        key = (model_type, repr(sorted(fields.items())))
        if key not in made:
            torch.manual_seed(0)
            config = transformers.AutoConfig.for_model(model_type, **{**TINY, **fields})
            model = transformers.AutoModelForCausalLM.from_config(config).eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() > 1:
                        parameter.normal_(0, 0.15)
                    else:  # gains and biases: none may be 1 or 0, or a lost one would not show
                        parameter.add_(0.1 * torch.randn_like(parameter))
            path = tmp_path_factory.mktemp(model_type)
            model.save_pretrained(path)
            ids = np.random.default_rng(1).integers(0, config.vocab_size, 40).tolist()
            made[key] = Tiny(model, path, ids)
        return made[key]

    return make


@dataclass
class Export:
    """An export of a tiny model."""

    directory: Path
    artifact: Artifact
    config: DecoderConfig

    def runtime(self, **kwargs: Any) -> OnnxRuntime:
        model, names = self.directory / self.artifact.model_file, self.artifact.hidden_states
        return OnnxRuntime(model, CONTEXT, names, 1, self.artifact.profile, **kwargs)


@pytest.fixture
def export(tmp_path_factory):
    """A function that exports a `Tiny` or a `FoldedModel` with a `Tiny`'s config."""

    def make(
        tiny: Tiny,
        model: FoldedModel | None = None,
        *,
        plan: QuantizationPlan | None = None,
        tokenizer_length: int | None = None,
        exporter: OnnxExporter | None = None,
        **options: Any,
    ) -> Export:
        directory, config = tmp_path_factory.mktemp("export"), tiny.config()
        artifact = (exporter or OnnxExporter()).write(
            model or tiny.folded(),
            config,
            ExportOptions(context=CONTEXT, **options),
            plan or QuantizationPlan("fp32", "fp32"),
            tokenizer_length or config.vocab_size,
            directory,
            silent,
        )
        return Export(directory, artifact, config)

    return make
