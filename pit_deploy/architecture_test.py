import pytest
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from pit_deploy.architecture import DecoderConfig
from pit_deploy.errors import InputError
from pit_deploy.rope_test import BASE

SIZES = {k: v for k, v in BASE.items() if k != "model_type"}


@pytest.mark.parametrize(
    ("config", "model"),
    [
        (LlamaConfig(**SIZES), LlamaForCausalLM),
        (LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, head_dim=24), LlamaForCausalLM),
        (MistralConfig(**SIZES, head_dim=16), MistralForCausalLM),
        (Qwen2Config(**SIZES), Qwen2ForCausalLM),
        (Qwen3Config(**SIZES, head_dim=32), Qwen3ForCausalLM),
    ],
)
def test_backbone_shapes_are_those_of_transformers(config, model):
    theirs = {k: tuple(v.shape) for k, v in model(config).state_dict().items()}
    tables = {"model.embed_tokens.weight", "lm_head.weight"}
    mine = DecoderConfig.from_hf({**config.to_dict(), "model_type": config.model_type}).backbone_shapes()
    assert mine == {k: v for k, v in theirs.items() if k not in tables}


def test_unsupported_architecture_lists_the_supported():
    with pytest.raises(
        InputError, match="'gpt2' cannot be exported; supported are llama, mistral, qwen2, qwen3"
    ):
        DecoderConfig.from_hf({"model_type": "gpt2"})


def test_windows_follow_the_layer_types():
    full = {
        **BASE,
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    }
    assert DecoderConfig.from_hf(full).sliding_windows == (None, 8)
    assert DecoderConfig.from_hf({**full, "use_sliding_window": False}).sliding_windows == (None, None)
    assert DecoderConfig.from_hf({**BASE, "model_type": "mistral", "sliding_window": 4}).sliding_windows == (
        4,
        4,
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"hidden_size": 66}, "66"),
        ({"hidden_act": "mish"}, "hidden_act 'mish' is not supported"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"head_dim": 15}, "15"),
    ],
)
def test_bad_sizes_are_named(fields, message):
    with pytest.raises(InputError, match=message):
        DecoderConfig.from_hf({**BASE, **fields})
