import copy

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pit_deploy.architecture import DecoderConfig
from pit_deploy.errors import InputError

BASE = dict(
    model_type="llama",
    vocab_size=32,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"rope_theta": 500000.0},
        {"rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 5000.0},
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "head_dim": 32},
        {"rope_scaling": {"type": "llama3", **LLAMA3}, "rope_theta": 500000.0, "head_dim": 128},
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "beta_slow": 2}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.9}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": False}},
    ],
)
def test_tables_equal_transformers_past_the_original_length(fields):
    config = {**BASE, **fields}
    rope = DecoderConfig.from_hf(config).rope
    theirs = LlamaRotaryEmbedding(LlamaConfig.from_dict(dict(config)))
    cos, sin = theirs(torch.zeros(1, dtype=torch.float32), torch.arange(256)[None])
    mine = rope.tables(256)
    half = rope.dim // 2
    np.testing.assert_allclose(mine[0], cos[0, :, :half].numpy(), atol=3e-5)
    np.testing.assert_allclose(mine[1], sin[0, :, :half].numpy(), atol=3e-5)


def test_unknown_kind_lists_the_known_ones():
    for key in ("type", "rope_type"):
        with pytest.raises(
            InputError, match="'dynamic' is not known; known are default, linear, llama3, yarn"
        ):
            DecoderConfig.from_hf({**BASE, "rope_scaling": {key: "dynamic", "factor": 2.0}})


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"type": "linear"}, "factor"),
        ({"type": "llama3", **LLAMA3, "low_freq_factor": 5.0}, "low_freq_factor 5.0 must be below"),
        ({"type": "linear", "rope_type": "yarn", "factor": 2.0}, "differ; keep one"),
        ({"type": "linear", "factor": -1.0}, "found -1.0"),
    ],
)
def test_bad_numbers_are_named(scaling, message):
    with pytest.raises(InputError, match=message):
        DecoderConfig.from_hf({**BASE, "rope_scaling": scaling})


LINEAR, DEFAULT = {"rope_type": "linear", "factor": 2.0}, {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("scaling", "parameters", "message"),
    [
        (
            LINEAR,
            DEFAULT,
            r"rope_scaling \(linear, factor 2.0, .*\) and rope_parameters \(default, .* differently",
        ),
        (
            DEFAULT,
            LINEAR,
            r"rope_scaling \(default, .*\) and rope_parameters \(linear, factor 2.0, .* differently",
        ),
        (LINEAR, {**LINEAR, "rope_theta": 500.0}, "rope_theta 10000.* and .*rope_theta 500"),
        (LINEAR, {"rope_type": "banana"}, "'banana' is not known; known are default, linear"),
        ({"type": "su"}, LINEAR, "'su' is not known"),
        (DEFAULT, {"rope_theta": 1e4, "full_attention": {"rope_type": "banana"}}, "differ by layer type"),
    ],
)
def test_two_fields_that_differ_are_refused(scaling, parameters, message):
    with pytest.raises(InputError, match=message):
        DecoderConfig.from_hf({**BASE, "rope_scaling": scaling, "rope_parameters": parameters})


def test_two_fields_that_agree_are_read_and_left_alone():
    config = {**BASE, "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {**LINEAR}}
    before = copy.deepcopy(config)
    rope = DecoderConfig.from_hf(config).rope
    assert config == before, "transformers writes into what it is given"
    assert (rope.kind, rope.theta) == ("linear", 10000.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_theta": "abc"}, "rope_theta is 'abc'; it must be a number above 0"),
        ({"rope_theta": None}, "rope_theta is None"),
        ({"rope_theta": -5}, "rope_theta is -5"),
        ({"rope_theta": True}, "rope_theta is True"),
        ({"rope_theta": 10**400}, "rope_theta is 10000"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
        ({"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 2.0}}, "is 1; .* above 1 for .*'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": float("inf")}}, "factor, found inf"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": "x", "mscale_all_dim": 1}},
            "mscale, found 'x'",
        ),
    ],
)
def test_numbers_without_a_rotation_are_refused(fields, message, recwarn):
    with pytest.raises(InputError, match=message):
        DecoderConfig.from_hf({**BASE, **fields})
    assert not recwarn.list
