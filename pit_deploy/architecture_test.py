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

from pit_deploy.architecture import DecoderConfig, check_runnable, check_tensors, layer_count
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
        ({"head_dim": -8}, "head_dim is -8"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"model_type": "mistral", "sliding_window": -1}, "sliding_window is -1"),
    ],
)
def test_bad_sizes_are_named(fields, message):
    with pytest.raises(InputError, match=message):
        DecoderConfig.from_hf({**BASE, **fields})


def test_a_config_of_many_layers_is_refused_without_a_list_of_them():
    config = DecoderConfig.from_hf({**BASE, "num_hidden_layers": 50_000_000})
    shapes = DecoderConfig.from_hf(BASE).backbone_shapes()
    with pytest.raises(InputError, match="num_hidden_layers 50000000, and the weights have 2 layers"):
        check_tensors(config, shapes, "here")


def test_long_lists_of_tensors_are_cut():
    shapes = DecoderConfig.from_hf(BASE).backbone_shapes()
    with pytest.raises(InputError, match=r"^here: .* 18 not part of this architecture \(.* and 10 more\)"):
        check_tensors(
            DecoderConfig.from_hf({**BASE, "num_hidden_layers": 2}), shapes | extra_layers(shapes), "here"
        )


def extra_layers(shapes):
    return {
        k.replace("layers.1.", f"layers.{n}."): v
        for k, v in shapes.items()
        if "layers.1." in k
        for n in (2, 3)
    }


def test_layers_are_counted_by_names():
    names = ["model.layers.3.mlp.experts.77.up.weight", "model.layers.0.x", "model.norm.weight"]
    assert layer_count(names) == 4
    assert layer_count(["transformer.h.11.attn.weight"]) == 12
    assert layer_count(["model.norm.weight"]) is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"rope_parameters": {"rope_type": "banana"}},
            "'banana' is not known; known are default, linear, dynamic",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "banana"}}}, "'banana' is not known"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1}}, "rope_theta is 1"),
        ({"hidden_act": "swiglu"}, "hidden_act 'swiglu' is not known to transformers; known are gelu"),
        ({"activation_function": "swiglu"}, "activation_function 'swiglu'"),
    ],
)
def test_words_that_transformers_does_not_have(fields, message):
    with pytest.raises(InputError, match=message):
        check_runnable(fields)
