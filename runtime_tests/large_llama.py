"""Write a random Llama of 1.3 billion parameters, tensor by tensor.

    python -m runtime_tests.large_llama OUT [LAYERS]

With fewer than its 26 layers it is a smaller one, from which time and memory can be told in advance.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from pit_deploy.architecture import DecoderConfig
from pit_deploy.weight_files import write_safetensors
from runtime_tests.conftest import write_tokenizer

SIZES = dict(
    vocab_size=32000,
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=26,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=512,
)


def write(out: Path, layers: int = SIZES["num_hidden_layers"]) -> None:
    out.mkdir()
    tokens = write_tokenizer(out)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "tie_word_embeddings": False,
        "eos_token_id": tokens - 2,
        "bos_token_id": tokens - 1,
        **SIZES,
        "num_hidden_layers": layers,
    }
    (out / "config.json").write_text(json.dumps(config))
    shapes = DecoderConfig.from_hf(config).backbone_shapes()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        shapes[name] = (SIZES["vocab_size"], SIZES["hidden_size"])
    generator = torch.Generator().manual_seed(0)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in shapes.items():
            value = torch.ones(shape)
            yield name, (value if len(shape) == 1 else value.normal_(0, 0.02, generator=generator)).bfloat16()

    write_safetensors(out, tensors())


if __name__ == "__main__":
    write(Path(sys.argv[1]), *map(int, sys.argv[2:3]))
