"""Programs of tiny models in ExecuTorch's own runtime, against transformers and against the codes they were given."""

from __future__ import annotations

import copy
import json
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pit_deploy.checkpoint import open_checkpoint
from pit_deploy.errors import ContextFullError, InputError, MissingExtraError, PitDeployError
from pit_deploy.export_options import ExportOptions
from pit_deploy.folding import load_folded
from pit_deploy.quantize.plan import QuantizationPlan
from pit_deploy.quantize.round_to_nearest import round_to_nearest
from pit_deploy.runtimes import executorch_package
from pit_deploy.runtimes.executorch import ExecutorchRuntime, FullExecutorchRuntime, program_metadata
from pit_deploy.runtimes.executorch_package import check_pairing
from pit_export.executorch import ExecutorchExporter
from pit_export.executorch_lowering import PROFILES

pytest.importorskip("executorch.exir")
CONTEXT = 96


END = 3


def with_tokenizer(tiny, directory):
    """The checkpoint again with a tokenizer of bytes, and `END` as the end of a text."""
    shutil.copytree(tiny.path, directory, dirs_exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: tiny.model.config.vocab_size]
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [END, 5], "bos_token_id": 2})
    )
    return load_folded(open_checkpoint(directory), "untied")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """A function that exports a `Tiny` and opens the program in one thread."""
    return lambda tiny, **options: export_tiny(tmp_path_factory.mktemp("executorch"), tiny, **options)


def export_tiny(
    directory,
    tiny,
    *,
    weights="fp32",
    tables="fp32",
    tokenizer_length=None,
    shared=True,
    bits=None,
    **options,
):
    exporter = ExecutorchExporter(shared=shared)
    chosen = ExportOptions(to="executorch", context=CONTEXT, weights=weights, tables=tables, **options)
    plan = QuantizationPlan(weights, tables, chosen.block_size, grids=exporter.grids(chosen), bits=bits or {})
    config, model = tiny.config(), with_tokenizer(tiny, directory / "source")
    length = tokenizer_length or config.vocab_size
    artifact = exporter.write(model, config, chosen, plan, length, directory)
    make = FullExecutorchRuntime if artifact.hidden_states else ExecutorchRuntime
    runtime = make(directory / artifact.model_file, CONTEXT, config.vocab_size, 1)
    runtime.artifact, runtime.plan, runtime.exporter = artifact, plan, exporter
    return runtime


def steps(runtime, ids, *lengths):
    """The logits after each of the parts of `ids`."""
    runtime.reset()
    ends = np.cumsum(lengths)
    return [runtime.prefill(ids[e - n : e]) for e, n in zip(ends, lengths, strict=True)], ends - 1


INT8 = dict(weights="int8", tables="int8", tokenizer_length=120)
# One case goes through two layers and a window in one of them; the others differ within a layer.
CASES = {
    "biases": (
        "llama",
        dict(
            attention_bias=True,
            mlp_bias=True,
            head_dim=24,
            hidden_act="gelu_pytorch_tanh",
            num_hidden_layers=1,
        ),
    ),
    "windows in one layer": (
        "qwen2",
        dict(use_sliding_window=True, sliding_window=7, max_window_layers=1),
    ),
    "qwen3": (
        "qwen3",
        dict(head_dim=32, num_hidden_layers=1, rope_scaling=dict(rope_type="linear", factor=4.0)),
    ),
}


@pytest.mark.parametrize("name", list(CASES))
def test_equals_transformers_in_one_pass_in_chunks_and_token_by_token(name, tiny, program):
    family, fields = CASES[name]
    model = tiny(family, **fields)
    states, expected = model.reference()
    runtime = program(model, logits="all")
    for lengths in ((40,), (7, 1, 22, 10), (1,) * 40):
        found, places = steps(runtime, model.ids, *lengths)
        np.testing.assert_allclose(found, expected[places], atol=2e-4)
    assert runtime.position == 40
    found_states, found = runtime.hidden_states(model.ids)
    np.testing.assert_allclose(found, expected, atol=2e-4)
    np.testing.assert_allclose(found_states[:-1], states, atol=2e-4)


def test_a_norm_bears_an_activation_whose_square_overflows_float16(tiny, program, tmp_path):
    """One channel of the stream holds it from the embedding on; a prefill and five steps, and every layer."""
    plain, outlier = tiny("llama", num_hidden_layers=1), 23_800.0  # the sample's largest
    model = copy.deepcopy(plain.model)
    gain = outlier / 8  # of the others, so that they count as without the outlier
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 5] = outlier
        for norm in (model.model.norm, model.model.layers[0].input_layernorm):
            norm.weight.fill_(gain)[5] = 0.1
        model.model.layers[0].post_attention_layernorm.weight.fill_(gain)[5] = 0.1
    model.save_pretrained(tmp_path)
    held = replace(plain, model=model, path=tmp_path)
    states, expected = held.reference()
    assert np.abs(states[-1]).max() >= outlier and expected.std() > 0.2
    runtime = program(held, logits="all")
    found, places = steps(runtime, held.ids, 35, *[1] * 5)
    np.testing.assert_allclose(found, expected[places], atol=1e-3)
    found_states, _ = runtime.hidden_states(held.ids)
    others = np.arange(64) != 5
    np.testing.assert_allclose(found_states[0][:, others], states[0][:, others], atol=1e-6)


def test_a_program_of_a_fixed_length_is_given_one_token_at_a_time(tiny, program, monkeypatch):
    """Metal's delegate takes no free length; here the same program in XNNPACK."""
    fixed = replace(PROFILES["xnnpack"], free_length=False)
    monkeypatch.setattr("pit_export.executorch_lowering.PROFILES", {**PROFILES, "xnnpack": fixed})
    model = tiny("llama", num_hidden_layers=1)
    states, expected = model.reference()
    runtime = program(model, logits="all")
    assert runtime.artifact.inputs[0]["shape"] == [1, 1]
    assert not program_metadata(runtime.model_path)["enable_dynamic_shape"]
    found, places = steps(runtime, model.ids, 33, *[1] * 7)
    np.testing.assert_allclose(found, expected[places], atol=2e-4)
    found_states, found = runtime.hidden_states(model.ids)
    np.testing.assert_allclose(found, expected, atol=2e-4)
    np.testing.assert_allclose(found_states[:-1], states, atol=2e-4)


def test_portable_profile_equals_transformers(tiny, program):
    model = tiny("llama", num_hidden_layers=1)
    _, expected = model.reference()
    runtime = program(model, profile="portable")
    for lengths in ((40,), (33, *[1] * 7)):
        found, places = steps(runtime, model.ids, *lengths)
        np.testing.assert_allclose(found, expected[places], atol=2e-4)


@pytest.fixture(scope="module")
def int8(tiny, program):
    """An int8 program of four layers."""
    return program(tiny("llama", num_hidden_layers=4), **INT8)


@pytest.mark.slow
def test_shared_passes_change_no_byte(tiny, program):
    fast, slow = (program(tiny("llama", num_hidden_layers=3), **INT8, shared=s) for s in (True, False))
    assert fast.model_path.read_bytes() == slow.model_path.read_bytes()


def test_the_codes_in_the_program_are_those_of_the_plan(int8, tiny):
    """The file holds, byte for byte, the codes and scales that the plan's quantiser made: nothing is rounded again."""
    content = int8.model_path.read_bytes()
    model = tiny("llama", num_hidden_layers=4).folded("untied")
    names = [n for n in model.tensor_names() if n.endswith("proj.weight")]
    assert len(names) == 4 * 7
    options = ExecutorchExporter().grids(ExportOptions(to="executorch"))[8]
    for name in names:
        made = round_to_nearest(model.read(name), options)
        assert made.scales.shape[1] == 1 and (made.scales > 0).all()
        assert (made.codes ^ 0x80).tobytes() in content, name  # the sign bit turned: code - 128 as int8
        assert made.scales.tobytes() in content, name
    for table in (model.tables.embedding, model.tables.head):
        assert (round_to_nearest(table, options).codes ^ 0x80).tobytes() in content
    recorded = {error["name"] for error in int8.plan.errors}
    assert recorded == {*names, "model.embed_tokens.weight", "lm_head.weight"}


def test_int8_computes_with_those_codes(int8, tiny):
    """Against transformers with the dequantised weights: what is left is the rounding of activations."""
    model = copy.deepcopy(tiny("llama", num_hidden_layers=4).model)
    options = ExecutorchExporter().grids(ExportOptions(to="executorch"))[8]
    with torch.no_grad():
        for value in model.parameters():
            if value.ndim == 2:
                value.copy_(torch.from_numpy(round_to_nearest(value.numpy(), options).dequantize()))
        ids = tiny("llama", num_hidden_layers=4).ids
        expected = model(torch.tensor([ids])).logits[0].numpy()
    found, places = steps(int8, ids, 33, *[1] * 7)
    difference = np.array(found)[:, :120] - expected[places][:, :120]
    assert np.linalg.norm(difference) < 0.05 * np.linalg.norm(expected[places][:, :120])


def test_int8_gives_the_same_in_one_pass_and_token_by_token(int8, tiny):
    """Up to the steps of rounded activations, which the order of a sum may tip: float32's tolerance is 2e-4."""
    ids = tiny("llama", num_hidden_layers=4).ids
    whole = [int8_logits(int8, ids[:n]) for n in (1, 20, 40)]
    found, _ = steps(int8, ids, *[1] * 40)
    scale = np.abs(whole[-1]).max()
    np.testing.assert_allclose([found[n - 1][:120] for n in (1, 20, 40)], whole, atol=2e-2 * scale)
    int8.reset()


def int8_logits(runtime, ids):
    runtime.reset()
    return runtime.prefill(ids)[:120]


def test_ids_without_a_token_are_masked(int8):
    logits = int8.prefill([1, 2, 3])
    assert (logits[120:] < -1e8).all() and (np.abs(logits[:120]) < 1e4).all()
    int8.reset()


def test_a_full_context_is_refused_before_anything_runs(int8):
    runtime = int8
    runtime.reset()
    runtime.prefill([1] * 90)
    with pytest.raises(ContextFullError) as error:
        runtime.prefill([1] * 7)
    assert (error.value.used, error.value.needed, error.value.context_length) == (90, 7, CONTEXT)
    assert runtime.position == 90
    runtime.prefill([1] * 6)
    with pytest.raises(ContextFullError):
        runtime.decode(1)
    runtime.reset()


def test_the_program_tells_runners_what_the_checkpoint_says(int8):
    assert program_metadata(int8.model_path) == {
        "get_max_seq_len": CONTEXT,
        "get_max_context_len": CONTEXT,
        "get_vocab_size": 131,
        "get_eos_ids": [END, 5, 2],  # what generation_config.json says, then config.json
        "get_bos_id": 2,
        "get_n_layers": 4,
        "use_kv_cache": True,
        "use_sdpa_with_kv_cache": True,
        "enable_dynamic_shape": True,
    }


def test_int4_weights_in_blocks_with_int8_tables_and_two_finer_matrices(tiny, program):
    """XNNPACK takes both granularities in one delegate, as a search may choose them."""
    model = tiny("llama", num_hidden_layers=1)
    finer = {f"model.layers.0.{name}_proj.weight": 8 for name in ("mlp.down", "self_attn.v")}
    runtime = program(model, weights="int4", tables="int8", bits=finer)
    options = runtime.exporter.grids(ExportOptions(to="executorch"))
    made = {error["name"]: error["bits"] for error in runtime.plan.errors}
    assert {name for name, bits in made.items() if bits == 4} == {n for n in made if "proj" in n} - {*finer}
    other = copy.deepcopy(model.model)
    with torch.no_grad():
        for name, value in other.named_parameters():
            if value.ndim == 2:
                bits = made[name]
                value.copy_(torch.from_numpy(round_to_nearest(value.numpy(), options[bits]).dequantize()))
        expected = other(torch.tensor([model.ids])).logits[0].numpy()
    found, places = steps(runtime, model.ids, 33, *[1] * 7)
    assert np.linalg.norm(np.array(found) - expected[places]) < 0.05 * np.linalg.norm(expected[places])


def refused(tiny, text, **options):
    with pytest.raises(InputError, match=text):
        ExecutorchExporter().check(tiny("llama").config(), ExportOptions(to="executorch", **options))


def test_refusals(tiny):
    refused(tiny, "--layout shared cannot be written for executorch", layout="shared")
    refused(tiny, "--weights fp16 is not built for executorch", weights="fp16", tables="fp16")
    refused(tiny, "--zero-points cannot be written", symmetric=False)
    refused(tiny, "--block-size 16 is not a multiple of 32", weights="int4", block_size=16)
    refused(tiny, "intermediate_size 96 is not a multiple of --block-size 64", weights="int4", block_size=64)
    refused(tiny, "--profile vulkan is built for float weights", profile="vulkan", weights="int8")
    refused(tiny, "--profile metal is not known", profile="metal")
    refused(tiny, "--context 97 is more than the model's max_position_embeddings 96", context=97)


def test_versions_that_do_not_go_together_are_named():
    check_pairing("1.4.1", "2.13.0+cpu")
    with pytest.raises(
        PitDeployError, match=r"executorch 1\.4\.1 was built for torch 2\.13, and torch 2\.12\.1"
    ):
        check_pairing("1.4.1", "2.12.1")
    with pytest.raises(PitDeployError, match=r"executorch 1\.0\.0 is not a version"):
        check_pairing("1.0.0", "2.13.0")


@pytest.mark.parametrize("package", ["executorch", "torchao", "pytorch_tokenizers"])
def test_a_missing_package_names_the_extra(tiny, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"'{package}'.*pip install 'pit-deploy\[executorch\]'"):
        ExecutorchExporter().check(tiny("llama").config(), ExportOptions(to="executorch"))


def test_another_torch_is_refused_on_import_before_it_fails_in_its_own_way(tiny, monkeypatch):
    real = executorch_package.version
    monkeypatch.setattr(
        executorch_package, "version", lambda name: {"torch": "2.12.1"}.get(name) or real(name)
    )
    with pytest.raises(PitDeployError, match=r"was built for torch 2\.13, and torch 2\.12\.1 is installed"):
        ExecutorchExporter().check(tiny("llama").config(), ExportOptions(to="executorch"))
