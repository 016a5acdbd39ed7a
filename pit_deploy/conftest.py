"""Tiny models for the tests: two layers, unequal head counts, odd vocabularies, seeds; made in milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

VOCABULARY = 263
"""Rows of the tiny token tables: 256 bytes, one special token, and six rows without a token."""


def build_tiny(family: str = "llama", *, seed: int = 0, tied: bool = True, **changes: Any) -> Any:
    """A random model of transformers with weights large enough for distinct logits."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
        "bos_token_id": 256,
        "eos_token_id": 256,
        "pad_token_id": None,
    }
    own: dict[str, dict[str, Any]] = {
        "gemma2": {"final_logit_softcapping": 5.0, "sliding_window": 8, "query_pre_attn_scalar": 8},
        "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 8},
        "gpt2": {"n_embd": 24, "n_head": 4, "n_layer": 2, "n_positions": 64},
    }
    if family == "gpt2":
        common = {
            k: v
            for k, v in common.items()
            if k.endswith("token_id") or k in ("vocab_size", "tie_word_embeddings")
        }
    config = CONFIG_MAPPING[family].from_dict({**common, **own.get(family, {}), **changes})
    config._attn_implementation = "eager" if family == "gemma2" else "sdpa"
    model = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(0.1 * noise)
            else:
                parameter.copy_((0.5 if "embed" in name or "head" in name or "wte" in name else 0.6) * noise)
        table = model.get_input_embeddings().weight
        table.mul_(torch.logspace(0, -1, table.shape[1])).add_(0.1)
    model.generation_config.pad_token_id = 0
    return model


def write_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer: ids 0 to 255 are bytes, 256 is the end of a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}\n')


@pytest.fixture
def tiny() -> Callable[..., Any]:
    """`build_tiny`."""
    return build_tiny


@pytest.fixture
def tiny_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Write a tiny model as a plain checkpoint with a tokenizer, and return its directory."""

    def write(family: str = "llama", *, name: str = "plain", dtype: str = "float32", **changes: Any) -> Path:
        import torch

        directory = tmp_path / name
        build_tiny(family, **changes).to(getattr(torch, dtype)).save_pretrained(directory)
        write_tokenizer(directory)
        return directory

    return write


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)
