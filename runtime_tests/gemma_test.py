"""Gemma and Qwen3 through every exporter, against transformers on random small models."""

import dataclasses
import json

import numpy as np
import pytest
import torch
import transformers

from pit_deploy.architecture import DecoderConfig, embedding_scale
from pit_deploy.bundle import Bundle
from pit_deploy.checkpoint import open_checkpoint
from pit_deploy.conversion import convert
from pit_deploy.exporting import export
from pit_deploy.runtimes import open_runtime
from pit_deploy.runtimes.torch import open_plain

GEMMA3 = dict(
    head_dim=32,
    num_hidden_layers=3,
    sliding_window=7,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    query_pre_attn_scalar=24,
)
GEMMA2 = dict(
    head_dim=32,
    sliding_window=7,
    query_pre_attn_scalar=24,
    attn_logit_softcapping=4.0,
    final_logit_softcapping=30.0,
)
FAMILIES = {"gemma3_text": GEMMA3, "qwen3": dict(head_dim=32)}
TARGETS = {
    "onnx": (dict(to="onnx", weights="fp32"), 3e-4),
    "onnx standard": (dict(to="onnx", weights="fp32", profile="standard"), 3e-4),
    "executorch": (dict(to="executorch", weights="fp32"), 1e-3),
    "coreml": (dict(to="coreml", weights="fp32", profile="stateless"), 1e-3),
}


def ids_of(bundle, count=40):
    return np.random.default_rng(0).integers(0, bundle.manifest.tokenizer_length, count).tolist()


def opened(directory):
    bundle = Bundle.open(directory)
    return bundle, open_runtime(bundle, threads=1)


@pytest.mark.parametrize("target", list(TARGETS))
@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_converted_model_equals_transformers(family, target, make_checkpoint, tmp_path):
    options, tolerance = TARGETS[target]
    source = make_checkpoint(family, **FAMILIES[family])
    convert(source, tmp_path / "pit")
    export(tmp_path / "pit", tmp_path / "bundle", context=64, **options)
    bundle, runtime = opened(tmp_path / "bundle")
    ids = ids_of(bundle)
    expected = open_plain(open_checkpoint(source)).all_logits(ids)
    known = slice(0, bundle.manifest.tokenizer_length)
    scale = np.abs(expected[:, known]).max()
    found = [runtime.prefill(ids[:20]), *(runtime.decode(id) for id in ids[20:])]
    np.testing.assert_allclose(
        np.stack(found)[:, known], expected[19:, known], atol=tolerance * max(1.0, scale)
    )
