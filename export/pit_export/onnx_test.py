"""Exports of tiny models against transformers, which computes the same in code of its own."""

import copy
import json
import shutil

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file, save_file

from pit_deploy.errors import InputError, PitDeployError
from pit_deploy.export_options import ExportOptions
from pit_deploy.folding import SharedTable, separate, with_tables
from pit_deploy.quantize import QuantizedTensor
from pit_deploy.quantize.plan import QuantizationPlan
from pit_deploy.runtimes.onnxruntime import external_tensors
from pit_export.backbone import check_backbone
from pit_export.onnx import OnnxExporter
from pit_export.onnx_weights import check_model_file

PROFILES = ["default", "standard"]
ROPE = dict(max_position_embeddings=96, tie_word_embeddings=True)
CASES = {
    "tied": ("llama", dict(tie_word_embeddings=True)),
    "untied": ("llama", dict(tie_word_embeddings=False, vocab_size=1000, hidden_act="gelu")),
    "biases": (
        "llama",
        dict(attention_bias=True, mlp_bias=True, head_dim=24, hidden_act="gelu_pytorch_tanh"),
    ),
    "wide heads": ("llama", dict(head_dim=32, num_attention_heads=8, hidden_act="relu")),
    "window": ("mistral", dict(sliding_window=5)),
    "qwen2": ("qwen2", dict(tie_word_embeddings=True)),
    "qwen2 windows in one layer": (
        "qwen2",
        dict(use_sliding_window=True, sliding_window=7, max_window_layers=1),
    ),
    "qwen3": ("qwen3", dict(head_dim=32)),
    "gemma": ("gemma", dict(head_dim=32, num_key_value_heads=1)),
    "gemma2": (
        "gemma2",
        dict(
            head_dim=32,
            sliding_window=7,
            query_pre_attn_scalar=24,
            attn_logit_softcapping=4.0,
            final_logit_softcapping=5.0,
        ),
    ),
    "gemma3": (
        "gemma3_text",
        dict(
            head_dim=32,
            sliding_window=7,
            query_pre_attn_scalar=24,
            layer_types=["sliding_attention", "full_attention"],
        ),
    ),
    "linear": ("llama", dict(**ROPE, rope_scaling=dict(rope_type="linear", factor=4.0))),
    "llama3": (
        "llama",
        dict(
            **ROPE,
            rope_scaling=dict(
                rope_type="llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=24,
            ),
        ),
    ),
    "yarn": (
        "llama",
        dict(**ROPE, rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=24)),
    ),
}


@pytest.fixture(params=list(CASES))
def case(request, tiny):
    model_type, fields = CASES[request.param]
    return tiny(model_type, **fields)


@pytest.mark.parametrize("profile", PROFILES)
def test_equals_transformers_in_one_pass_in_chunks_and_token_by_token(case, export, profile):
    states, logits = case.reference()
    runtime = export(case, profile=profile).runtime()
    found_states, found = runtime.hidden_states(case.ids)
    np.testing.assert_allclose(found, logits, atol=1e-4)
    np.testing.assert_allclose(found_states[:-1], states, atol=1e-4)
    np.testing.assert_allclose(runtime.prefill(case.ids), logits[-1], atol=1e-4)
    runtime.reset()
    for start, end in ((0, 7), (7, 8), (8, 30), (30, 40)):
        np.testing.assert_allclose(runtime.prefill(case.ids[start:end]), logits[end - 1], atol=1e-4)
    assert runtime.position == 40
    runtime.reset()
    stepwise = np.stack([runtime.decode(id) for id in case.ids])
    np.testing.assert_allclose(stepwise, logits, atol=1e-4)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_growing_cache_equals_the_shared_buffer(tiny, export, batch):
    """As transformers.js calls it: past grows by what present returned, also for several sequences at once."""
    model = tiny("mistral", sliding_window=5)
    exported = export(model)
    session = onnxruntime.InferenceSession(exported.directory / "model.onnx")
    prompts = [model.ids[:9], model.ids[20:29]][:batch]
    expected = [model.reference(prompt)[1] for prompt in prompts]
    past = {s["name"]: np.zeros([batch, 2, 0, 16], np.float32) for s in exported.artifact.states}
    done = 0
    for length in (6, 1, 1, 1):
        feeds = {
            "input_ids": np.array(prompts)[:, done : done + length],
            "attention_mask": np.ones([batch, done + length], np.int64),
        }
        done += length
        names = [output.name for output in session.get_outputs()]
        results = dict(zip(names, session.run(names, {**feeds, **past}), strict=True))
        past = {name: results[name.replace("past_key_values", "present")] for name in past}
        np.testing.assert_allclose(results["logits"][:, 0], [e[done - 1] for e in expected], atol=1e-4)


def dequantized(tiny, plan):
    """The model of transformers with each stored matrix replaced by what its codes stand for."""
    model = copy.deepcopy(tiny.model)
    tables = ("model.embed_tokens.weight", "lm_head.weight")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                encoded = plan.encode(name, parameter.numpy(), "tables" if name in tables else "weights")
                value = (
                    encoded.dequantize()
                    if isinstance(encoded, QuantizedTensor)
                    else encoded.astype(np.float32)
                )
                parameter.copy_(torch.from_numpy(value))
        return model(torch.tensor([tiny.ids])).logits[0].numpy()


# 72 and 104 columns make 3 and 4 blocks of 32, the last one padded: an odd number of 4-bit zero points.
PADDED = dict(hidden_size=72, head_dim=16, intermediate_size=104)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("weights", "tables", "symmetric"),
    [
        ("int8", "int8", True),
        ("int8", "int8", False),
        ("int4", "int4", True),
        ("int4", "int4", False),
        ("int8", "int4", False),
        ("fp32", "int4", True),
        ("fp16", "fp16", True),
    ],
)
def test_codes_reach_the_runtime_unchanged(tiny, export, weights, tables, symmetric, tied, profile):
    model = tiny("llama", tie_word_embeddings=tied, **PADDED)
    plan = QuantizationPlan(weights, tables, 32, symmetric)
    exported = export(model, plan=plan, profile=profile, exporter=OnnxExporter(accuracy_level=0))
    expected = dequantized(model, QuantizationPlan(weights, tables, 32, symmetric))
    np.testing.assert_allclose(exported.runtime().all_logits(model.ids), expected, atol=1e-4)
    quantized = {error["name"] for error in plan.errors}
    matrices = {name for name, shape in model.config().backbone_shapes().items() if len(shape) == 2}
    assert (
        weights.startswith("fp") or matrices <= quantized
    )  # each by its own name, though q, k and v are stored as one


def test_int8_activations_cost_little(tiny, export):
    model = tiny("llama", tie_word_embeddings=True)
    exported = export(model, plan=QuantizationPlan("int8", "int8"))
    assert exported.artifact.precision == {
        "weights": "int8",
        "tables": "int8",
        "activations": "int8",
        "block_size": 32,
        "symmetric": True,
        "accuracy_level": 4,
        "kv_cache": "fp32",
    }
    logits = model.reference()[1]
    error = exported.runtime().all_logits(model.ids) - logits
    assert 1e-4 < np.sqrt((error**2).mean()) < 0.08 * logits.std()


class MixedPlan(QuantizationPlan):
    """int4 for the keys alone, as a search over tensors may choose."""

    def encode(self, name, weight, role):
        kind = "int4" if "k_proj" in name else "int8"
        return QuantizationPlan(kind, kind).encode(name, weight, role)


def test_projections_of_different_precisions_stay_apart(tiny, export):
    model = tiny("qwen2", tie_word_embeddings=True)
    exported = export(model, plan=MixedPlan("int8", "int8"), exporter=OnnxExporter(accuracy_level=0))
    expected = dequantized(model, MixedPlan("int8", "int8"))
    np.testing.assert_allclose(exported.runtime().all_logits(model.ids), expected, atol=1e-4)


def read_graph(exported):
    return onnx.load(exported.directory / "model.onnx", load_external_data=False)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8", "int4"])
def test_a_shared_table_is_stored_once(tiny, export, precision, profile):
    rows, columns = 1000, 64
    model = tiny("llama", tie_word_embeddings=True, vocab_size=rows)
    sizes = {}
    for layout in ("shared", "untied"):
        plan = QuantizationPlan(precision, precision)
        exported = export(model, model.folded(layout), plan=plan, profile=profile)
        graph = read_graph(exported).graph
        table_bytes = rows * columns * {"fp32": 4, "fp16": 2, "int8": 1, "int4": 0.5}[precision]
        large = [t for t in external_tensors(read_graph(exported)) if t.length >= table_bytes]
        assert len({(t.offset, t.length) for t in large}) == {"shared": 1, "untied": 2}[layout]
        names = {t.name for t in large}
        assert not [n.name for n in graph.node if n.op_type == "Reshape" and names & set(n.input)]
        sizes[layout] = (exported.directory / "model.onnx_data").stat().st_size
    assert sizes["untied"] - sizes["shared"] >= table_bytes


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("maps", ["both", "head", "embedding"])
def test_maps_of_a_shared_table(tiny, export, maps, profile):
    model = tiny("llama", tie_word_embeddings=True)
    rng, folded = np.random.default_rng(0), model.folded("shared")
    head, embedding = (np.eye(64) + 0.1 * rng.standard_normal((64, 64)) for _ in range(2))
    tables = SharedTable(
        folded.tables.table, None if maps == "embedding" else head, None if maps == "head" else embedding
    )
    shared = with_tables(folded, tables, "maps")
    untied = with_tables(model.folded("untied"), separate(tables), "maps")
    logits = [export(model, m, profile=profile).runtime().all_logits(model.ids) for m in (shared, untied)]
    assert np.abs(logits[0] - model.reference()[1]).max() > 0.1  # the maps do something
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-4)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("bits", [4, 8])
def test_maps_of_a_quantised_table_with_padded_rows(tiny, export, bits, profile):
    model = tiny("llama", tie_word_embeddings=True, **PADDED)
    rng, folded = np.random.default_rng(0), model.folded("shared")
    maps = [np.eye(72) + 0.1 * rng.standard_normal((72, 72)) for _ in range(2)]
    stored = QuantizationPlan("fp32", f"int{bits}").encode("table", folded.tables.table, "tables")
    expected = with_tables(folded, separate(SharedTable(stored.dequantize(), *maps)), "maps")
    shared = with_tables(folded, SharedTable(folded.tables.table, *maps), "maps")
    plan, exporter = QuantizationPlan("fp32", f"int{bits}"), OnnxExporter(accuracy_level=0)
    found = export(model, shared, plan=plan, profile=profile, exporter=exporter).runtime()
    np.testing.assert_allclose(
        found.all_logits(model.ids), export(model, expected).runtime().all_logits(model.ids), atol=1e-4
    )


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("logits", ["last", "all"])
def test_ids_without_a_token_are_masked(tiny, export, profile, logits):
    model = tiny("llama", tie_word_embeddings=True)
    runtime = export(model, profile=profile, tokenizer_length=120, logits=logits).runtime()
    for found in (runtime.prefill(model.ids), runtime.all_logits(model.ids)[-1]):
        assert np.isfinite(found).all() and (found[120:] < -1e8).all()
        np.testing.assert_allclose(found[:120], model.reference()[1][-1, :120], atol=1e-4)


def test_logits_of_all_positions(tiny, export):
    model = tiny("llama", tie_word_embeddings=True)
    last, every = (export(model, logits=logits) for logits in ("last", "all"))
    assert [e.artifact.outputs[0]["shape"][1] for e in (last, every)] == [1, "sequence_length"]
    runtime = every.runtime()
    np.testing.assert_allclose(runtime.prefill(model.ids), model.reference()[1][-1], atol=1e-4)
    session = onnxruntime.InferenceSession(every.directory / "model.onnx")
    feeds = {"input_ids": np.array([model.ids]), "attention_mask": np.ones([1, 40], np.int64)}
    feeds |= {s["name"]: np.zeros([1, 2, 0, 16], np.float32) for s in every.artifact.states}
    np.testing.assert_allclose(session.run(["logits"], feeds)[0][0], model.reference()[1], atol=1e-4)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("inline_below", [0, 1024, 1 << 30])
def test_weights_in_the_graph_or_beside_it(tiny, export, inline_below, profile):
    model = tiny("llama", tie_word_embeddings=True, **PADDED)
    plan = QuantizationPlan("int4", "int4", 32, symmetric=False)
    exporter = OnnxExporter(accuracy_level=0, inline_below=inline_below)
    exported = export(model, plan=plan, exporter=exporter, profile=profile)
    tensors = external_tensors(read_graph(exported))
    assert all(t.length >= inline_below and t.offset % 64 == 0 for t in tensors)
    assert all(t.offset % 4096 == 0 for t in tensors if t.length >= 1 << 16)
    assert bool(tensors) == (inline_below < 1 << 30)
    assert bool((exported.directory / "model.onnx_data").stat().st_size) == bool(tensors)
    expected = dequantized(model, QuantizationPlan("int4", "int4", 32, symmetric=False))
    np.testing.assert_allclose(exported.runtime().all_logits(model.ids), expected, atol=1e-4)


def test_only_standard_operators_in_the_standard_profile(tiny, export):
    for fields in (dict(tie_word_embeddings=True), dict(tie_word_embeddings=False)):
        for precision in ("fp32", "fp16", "int8", "int4"):
            model = tiny("llama", **fields)
            exported = export(model, plan=QuantizationPlan(precision, precision), profile="standard")
            graph = read_graph(exported)
            assert [(i.domain, i.version) for i in graph.opset_import] == [("", 23)]
            assert {node.domain for node in graph.graph.node} == {""}
            onnx.checker.check_model(str(exported.directory / "model.onnx"), full_check=True)


def test_a_left_padded_row_stays_finite(tiny, export):
    """The standard profile masks by position: padding changes nothing, and a fully masked query is finite."""
    model = tiny("llama", tie_word_embeddings=True)
    exported = export(model, profile="standard", logits="all")
    session = onnxruntime.InferenceSession(exported.directory / "model.onnx")
    ids = np.array([[0, 0, 0, *model.ids[:6]], model.ids[10:19]])
    mask = np.ones_like(ids)
    mask[0, :3] = 0
    feeds = {"input_ids": ids, "attention_mask": mask}
    feeds |= {s["name"]: np.zeros([2, 2, 0, 16], np.float32) for s in exported.artifact.states}
    (found,) = session.run(["logits"], feeds)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found[0, 3:], model.reference(model.ids[:6])[1], atol=1e-4)
    np.testing.assert_allclose(found[1], model.reference(model.ids[10:19])[1], atol=1e-4)


@pytest.mark.parametrize("profile", PROFILES)
def test_genai_generates_the_same_tokens(tiny, export, profile):
    og = pytest.importorskip("onnxruntime_genai")
    model = tiny("qwen2", tie_word_embeddings=True)
    exported = export(model, profile=profile)
    (exported.directory / "generation_config.json").write_text(json.dumps({"top_p": 0.9, "pad_token_id": 3}))
    OnnxExporter().finish(
        exported.directory, exported.config, context_length=96, bos_id=None, end_ids=[129, 130]
    )
    written = json.loads((exported.directory / "genai_config.json").read_text())
    assert written["model"]["eos_token_id"] == [129, 130] and written["model"]["pad_token_id"] == 3
    assert written["search"]["top_p"] == 0.9 and written["search"]["max_length"] == 96
    assert written["search"]["past_present_share_buffer"] == (profile == "default")
    runtime, logits = exported.runtime(), None
    expected = list(model.ids[:12])
    logits = runtime.prefill(expected)
    for _ in range(20):
        expected.append(int(logits.argmax()))
        if expected[-1] in (129, 130):
            break
        logits = runtime.decode(expected[-1])
    genai = og.Model(str(exported.directory))
    parameters = og.GeneratorParams(genai)
    parameters.set_search_options(do_sample=False, max_length=32)
    generator = og.Generator(genai, parameters)
    generator.append_tokens(np.array(model.ids[:12], np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    assert list(generator.get_sequence(0)) == expected


def rewritten(tiny, tmp_path, change):
    """The checkpoint with another set of tensors."""
    shutil.copytree(tiny.path, tmp_path / "changed")
    file = tmp_path / "changed" / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return type(tiny)(tiny.model, tmp_path / "changed", tiny.ids)


def test_tensors_that_do_not_fit_are_listed_at_once(tiny, export, tmp_path):
    def change(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(64)
        tensors["model.extra"] = torch.ones(2)
        tensors["model.layers.0.mlp.down_proj.weight"] = torch.ones(64, 97)

    broken = rewritten(tiny("llama", tie_word_embeddings=True), tmp_path, change)
    expected = (
        r"2 missing \(model.layers.1.mlp.up_proj.weight, model.norm.weight\); "
        r"2 not part of this architecture \(model.extra, model.layers.0.self_attn.q_proj.bias\); "
        r"1 of another shape \(model.layers.0.mlp.down_proj.weight \[64, 97\] instead of \[64, 96\]\)"
    )
    with pytest.raises(InputError, match=expected):
        check_backbone(broken.folded(), broken.config())
    with pytest.raises(InputError, match=expected):
        export(broken)


def test_known_buffers_are_ignored(tiny, export, tmp_path):
    def change(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    model = rewritten(tiny("llama", tie_word_embeddings=True), tmp_path, change)
    np.testing.assert_allclose(export(model).runtime().all_logits(model.ids), model.reference()[1], atol=1e-4)


@pytest.mark.parametrize(
    ("fields", "options", "match"),
    [
        ({}, dict(profile="fast"), "--profile fast is not known to onnx; choose default or standard"),
        ({}, dict(context=97), "--context 97 is more than"),
        ({}, dict(block_size=512), "block-size 512 .* 16, 32, 64, 128, 256"),
        (dict(head_dim=20), {}, "head_dim 20 is not a multiple of 8.*--profile standard"),
    ],
)
def test_what_cannot_be_built_is_refused(tiny, fields, options, match):
    with pytest.raises(InputError, match=match):
        OnnxExporter().check(tiny("llama", **fields).config(), ExportOptions(**options))


def test_the_interface_is_described(tiny, export):
    artifact = export(tiny("llama", tie_word_embeddings=True)).artifact
    assert artifact.inputs == [
        {"name": "input_ids", "dtype": "int64", "shape": ["batch_size", "sequence_length"]},
        {"name": "attention_mask", "dtype": "int64", "shape": ["batch_size", "total_sequence_length"]},
    ]
    assert artifact.outputs == [{"name": "logits", "dtype": "float32", "shape": ["batch_size", 1, 131]}]
    assert artifact.states[3] == {
        "name": "past_key_values.1.value",
        "output": "present.1.value",
        "dtype": "float32",
        "shape": ["batch_size", 2, "past_sequence_length", 16],
    }
    assert len(artifact.states) == 4
    assert artifact.hidden_states == ["hidden_states.0", "hidden_states.1", "hidden_states.2"]
    assert artifact.precision["activations"] == "fp32" and artifact.precision["block_size"] is None


@pytest.mark.parametrize(
    ("harm", "match"),
    [
        (
            lambda folder: (folder / "model.onnx_data").write_bytes(b""),
            r"bytes at 0 of model.onnx_data, which has 0",
        ),
        (lambda folder: change_graph(folder, lambda g: g.node[0].input.append("nowhere")), "not valid ONNX"),
        (
            lambda folder: change_graph(folder, lambda g: g.initializer[0].dims.append(3)),
            "its type and shape make",
        ),
    ],
)
def test_a_written_model_is_read_back(tiny, export, harm, match):
    exported = export(tiny("llama", tie_word_embeddings=True))
    check_model_file(exported.directory / "model.onnx")
    harm(exported.directory)
    with pytest.raises(PitDeployError, match=match):
        check_model_file(exported.directory / "model.onnx")


def change_graph(folder, change):
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    change(model.graph)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
