"""A tiny random model with a tokenizer of its own, as a user would bring it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def write_tokenizer(directory: Path, *, special: tuple[str, ...] = ("<|end|>", "<|start|>")) -> int:
    """A byte-level tokenizer without merges; returns its length."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: id for id, token in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "bos_token": "<|start|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return int(tokenizer.get_vocab_size())


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`make_checkpoint(model_type, **config)`: a random checkpoint of two layers, tied unless said otherwise."""

    def make(model_type: str = "llama", **fields: Any) -> Path:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        directory = tmp_path_factory.mktemp(model_type)
        tokens = write_tokenizer(directory)
        sizes = dict(
            vocab_size=tokens,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=320,
            tie_word_embeddings=True,
            bos_token_id=tokens - 1,
            eos_token_id=tokens - 2,
            pad_token_id=None,
        )
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**sizes, **fields}))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4.0) if parameter.ndim == 2 else parameter.add_(
                    0.2 * torch.randn_like(parameter)
                )
        model.save_pretrained(directory)
        generation = {
            "eos_token_id": [tokens - 2, 7],
            "temperature": 0.6,
            "do_sample": False,
            "my_own_field": [1, {"a": None}],
        }
        (directory / "generation_config.json").write_text(json.dumps(generation, indent=3))
        (directory / "README.md").write_text("---\nlicense: mit\n---\nA tiny model.\n")
        (directory / "LICENSE").write_text("MIT\n")
        return directory

    return make


@pytest.fixture(scope="session")
def checkpoint(make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint()
