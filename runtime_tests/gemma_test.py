"""Gemma and Qwen3 through every exporter, against transformers on random small models."""

import json

import numpy as np
import pytest
import torch
import transformers

from pit_deploy.architecture import DecoderConfig, embedding_scale
from pit_deploy.bundle import Bundle
from pit_deploy.checkpoint import open_checkpoint
from pit_deploy.conversion import convert
from pit_deploy.errors import InputError
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


def test_a_soft_cap_holds_on_every_path(make_checkpoint, tmp_path):
    """Logits reach far past the cap: judged by their values and by KL, since the order would survive without it."""
    source = make_checkpoint("gemma2", **GEMMA2, dtype="float32")
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        model.model.norm.weight.mul_(0).add_(40.0)
    model.save_pretrained(source)
    convert(source, tmp_path / "pit")
    reference = open_plain(open_checkpoint(source))
    model.config.final_logit_softcapping = None
    for target in ("onnx", "onnx standard", "coreml"):
        options, _ = TARGETS[target]
        export(tmp_path / "pit", tmp_path / target, context=64, **options)
        bundle, runtime = opened(tmp_path / target)
        ids, known = ids_of(bundle), bundle.manifest.tokenizer_length
        expected = reference.all_logits(ids)[:, :known]
        with torch.no_grad():
            uncapped = model(torch.tensor([ids])).logits[0, :, :known]
        assert uncapped.abs().max() > 100 and np.abs(expected).max() <= 30
        found = [runtime.prefill(ids[:20]), *(runtime.decode(id) for id in ids[20:])]
        np.testing.assert_allclose(np.stack(found)[:, :known], expected[19:], atol=2e-2)
        assert kl(expected[19:], np.stack(found)[:, :known]) < 1e-4
        if bundle.manifest.runtime == "onnx":
            every = runtime.all_logits(ids)[:, :known]
            np.testing.assert_allclose(every, expected, atol=2e-2)


def kl(expected, found):
    p, q = (torch.tensor(x).double().log_softmax(1) for x in (expected, found))
    return float((p.exp() * (p - q)).sum(1).mean())


def test_the_embedding_scale_is_the_number_that_training_used(make_checkpoint, tmp_path):
    """A model trained in bfloat16 has learnt with sqrt(hidden_size) rounded to it; what is exported multiplies once."""
    for size in (40, 64, 640, 1152, 2304, 3072):
        for dtype in ("bfloat16", "float16", "float32"):
            root = torch.tensor(size**0.5, dtype=getattr(torch, dtype)).item()
            config = {"model_type": "gemma3_text", "hidden_size": size, "dtype": dtype}
            assert embedding_scale(config) == root
    source = make_checkpoint("gemma3_text", **GEMMA3, hidden_size=40)
    transformers.AutoModelForCausalLM.from_pretrained(source).to(torch.bfloat16).save_pretrained(source)
    assert json.loads((source / "config.json").read_text())["dtype"] == "bfloat16"
    checkpoint = open_checkpoint(source)
    table = checkpoint.read("model.embed_tokens.weight", np.float32)
    convert(source, tmp_path / "pit")
    export(tmp_path / "pit", tmp_path / "bundle", weights="fp32", context=64)
    bundle, runtime = opened(tmp_path / "bundle")
    ids = ids_of(bundle)
    embedded = runtime.hidden_states(ids)[0][0]
    np.testing.assert_allclose(embedded, 6.3125 * table[ids], rtol=1e-4, atol=1e-5)
    assert np.abs(embedded - 40**0.5 * table[ids]).max() > 1e-3
    np.testing.assert_allclose(
        runtime.all_logits(ids), open_plain(checkpoint).all_logits(ids), atol=1e-3, rtol=1e-4
    )
    folds = bundle.manifest.folds
    assert sorted(set(folds)) == sorted(folds) and "final_norm_gain" in folds


def test_executorch_refuses_a_cap_that_its_attention_would_leave_out(make_checkpoint, tmp_path):
    pytest.importorskip("executorch.exir")
    source = make_checkpoint("gemma2", **GEMMA2)
    with pytest.raises(InputError, match=r"attn_logit_softcapping is 4, .* pass --profile portable"):
        export(source, tmp_path / "bundle", to="executorch", weights="fp32", layout="untied")


def test_a_bidirectional_model_is_refused():
    config = transformers.Gemma3TextConfig(use_bidirectional_attention=True).to_dict()
    with pytest.raises(InputError, match="use_bidirectional_attention is true"):
        DecoderConfig.from_hf(config)
