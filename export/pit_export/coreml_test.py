"""Core ML packages of tiny models in the evaluator, against transformers and `pit_deploy.decoder`."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pit_deploy.architecture import DecoderConfig
from pit_deploy.checkpoint import open_checkpoint
from pit_deploy.decoder import build_decoder, load_weights
from pit_deploy.errors import InputError, ParityError
from pit_deploy.export_options import Artifact, ExportOptions
from pit_deploy.folding import FoldedModel, load_folded
from pit_deploy.golden import logsumexp
from pit_deploy.manifest import CoreMLProgram, State
from pit_deploy.quantize import QuantizedTensor
from pit_deploy.quantize.options import QuantizationOptions
from pit_deploy.quantize.plan import QuantizationPlan
from pit_deploy.quantize.round_to_nearest import round_to_nearest
from pit_deploy.runtimes.mil import MilRuntime
from pit_deploy.runtimes.mil_program import MilProgram, quiet_coremltools, weights_file

coremltools = quiet_coremltools()
from pit_export import coreml_layouts  # noqa: E402
from pit_export.backbone import Backbone  # noqa: E402
from pit_export.coreml import CoreMLExporter  # noqa: E402
from pit_export.coreml_checks import Place, check_packages, check_same_states  # noqa: E402
from pit_export.coreml_weights import LEVELS, Palette, palettized  # noqa: E402

CONTEXT = 96
PROFILES = ("cpu_gpu", "neural_engine", "stateless")
TOKENS = 120
"""Of the tokenizer; the table has 131 rows."""


@dataclass
class Export:
    """An export of a tiny model."""

    directory: Path
    artifact: Artifact
    plan: QuantizationPlan
    config: DecoderConfig
    context: int

    def runtime(self, *, rounding: bool = True) -> MilRuntime:
        manifest = SimpleNamespace(
            coreml=CoreMLProgram(**self.artifact.coreml),
            context_length=self.context,
            vocab_size=self.config.vocab_size,
            states=[State(**s) for s in self.artifact.states],
            hidden_states=self.artifact.hidden_states,
        )
        bundle: Any = SimpleNamespace(
            manifest=manifest, path=self.directory, file=lambda name: self.directory / name
        )
        return MilRuntime(bundle, rounding=rounding)

    def program(self, file: str = "model.mlpackage") -> MilProgram:
        return MilProgram.open(self.directory / file)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """`exported(tiny, profile, precision, **options)`: made once."""
    made: dict[Any, Export] = {}

    def make(
        model: Any,
        profile: str,
        weights: str = "fp16",
        tables: str | None = None,
        *,
        folded: FoldedModel | None = None,
        plan: QuantizationPlan | None = None,
        context: int = CONTEXT,
        **options: Any,
    ) -> Export:
        key = (str(model.path), profile, weights, tables, id(folded), id(plan), context, repr(options))
        if key not in made:
            asked = ExportOptions(
                to="coreml",
                profile=profile,
                weights=weights,
                tables=tables or weights,
                context=context,
                **options,
            )
            grids = CoreMLExporter().grids(asked)
            used = plan or QuantizationPlan(weights, tables or weights, grids=grids)
            config, directory = model.config(), tmp_path_factory.mktemp(profile)
            source = folded or load_folded(open_checkpoint(model.path), asked.layout or "untied")
            artifact = CoreMLExporter().write(source, config, asked, used, TOKENS, directory)
            made[key] = Export(
                directory, artifact, used, replace(config, vocab_size=source.vocab_size), context
            )
        return made[key]

    return make


@pytest.fixture(scope="module")
def llama(tiny):
    return tiny("llama", tie_word_embeddings=False)


def mean_kl(expected: np.ndarray, found: np.ndarray) -> float:
    p, q = (
        logits[:, :TOKENS].astype(np.float64) - np.array([[logsumexp(row[:TOKENS])] for row in logits])
        for logits in (expected, found)
    )
    return float((np.exp(p) * (p - q)).sum(axis=1).mean())


def relative(expected: np.ndarray, found: np.ndarray) -> float:
    """RMS of the difference over the spread of what is expected, ids without a token aside."""
    e, f = expected[..., :TOKENS], found[..., :TOKENS]
    return float(np.sqrt(np.mean((e - f) ** 2)) / e.std())


def in_pieces(runtime: MilRuntime, ids: list[int]) -> np.ndarray:
    """Logits at the end of a prompt in one call, of a second prompt, and of single tokens after it."""
    found = [runtime.prefill(ids[:20]), runtime.prefill(ids[20:30])]
    return np.stack([*found, *(runtime.decode(id) for id in ids[30:])])


@pytest.mark.parametrize("profile", PROFILES)
def test_equals_transformers_and_keeps_its_cache(llama, exported, profile):
    weights = "fp32" if profile == "stateless" else "fp16"
    limit = 1e-5 if weights == "fp32" else 4e-3
    states, logits = llama.reference()
    runtime = exported(llama, profile, weights).runtime()
    found_states, found = runtime.hidden_states(llama.ids)
    assert relative(logits, found) < limit
    for expected, value in zip(states, found_states[:-1], strict=True):
        assert np.sqrt(np.mean((value - expected) ** 2)) / expected.std() < limit
    assert mean_kl(logits, found) < 1e-3
    assert runtime.position == 0
    assert relative(np.concatenate([logits[[19, 29]], logits[30:]]), in_pieces(runtime, llama.ids)) < limit
    assert runtime.position == 40
    runtime.reset()
    assert relative(logits[:8], np.stack([runtime.decode(id) for id in llama.ids[:8]])) < limit
    assert (found[:, TOKENS:] < -5e4).all() and np.isfinite(found).all()


def test_equals_the_decoder_in_pytorch(llama, exported):
    """The program mirrors `pit_deploy.decoder`, which shares no line with it."""
    folded, config = llama.folded("untied"), llama.config()
    decoder = build_decoder(config, CONTEXT, tables=folded.tables, tokenizer_length=TOKENS, masked_logit=-6e4)
    load_weights(decoder, config, Backbone(folded, config).read, folded.tables)
    with torch.no_grad():
        expected = decoder(torch.tensor([llama.ids]), torch.tensor([0]))[0].numpy()
    found = exported(llama, "stateless", "fp32").runtime().all_logits(llama.ids)
    np.testing.assert_allclose(found, expected, atol=2e-4)


CASES = {
    "qwen2": ("stateless", "fp32", "qwen2", dict(tie_word_embeddings=False)),
    "qwen3": ("neural_engine", "fp16", "qwen3", dict(head_dim=32, tie_word_embeddings=False)),
    "qwen2 with biases, channel by channel": (
        "neural_engine",
        "fp16",
        "qwen2",
        dict(tie_word_embeddings=False),
    ),
    "window": ("stateless", "fp32", "mistral", dict(sliding_window=5)),
    "window in a state": ("cpu_gpu", "fp16", "mistral", dict(sliding_window=5)),
    "one head of keys, gelu": (
        "cpu_gpu",
        "fp16",
        "llama",
        dict(num_key_value_heads=1, hidden_act="gelu", attention_bias=True, mlp_bias=True),
    ),
    "no groups, tanh": (
        "stateless",
        "fp32",
        "llama",
        dict(num_key_value_heads=4, hidden_act="gelu_pytorch_tanh", head_dim=24),
    ),
}


@pytest.mark.parametrize("case", list(CASES))
def test_families(tiny, exported, case):
    profile, weights, family, fields = CASES[case]
    model = tiny(family, **fields)
    runtime = exported(model, profile, weights).runtime()
    logits = model.reference()[1]
    limit = 1e-5 if weights == "fp32" else 6e-3
    assert relative(logits, runtime.all_logits(model.ids)) < limit
    assert relative(np.concatenate([logits[[19, 29]], logits[30:]]), in_pieces(runtime, model.ids)) < limit


def test_a_shared_table_is_stored_once(tiny, exported):
    model = tiny("llama", tie_word_embeddings=True)
    shared = exported(model, "cpu_gpu", "int8", layout="shared")
    untied = exported(model, "cpu_gpu", "int8", layout="untied")
    sizes = [weights_file(e.directory / "model.mlpackage").stat().st_size for e in (shared, untied)]
    assert sizes[1] - sizes[0] > 131 * 64  # codes of a table, one byte each
    names = [part["name"] for part in shared.artifact.coreml["parts"]]
    assert names == ["embedding", "layers.0", "layers.1", "head", "other"]
    found = [e.runtime().all_logits(model.ids) for e in (shared, untied)]
    np.testing.assert_array_equal(*found)


def test_folds_of_a_shared_table(tiny, exported, tmp_path):
    from pit_deploy.folding import SharedTable, separate, with_tables

    model = tiny("llama", tie_word_embeddings=True)
    rng = np.random.default_rng(0)
    plain = model.folded("shared").tables.table
    matrix = np.eye(64) + 0.1 * rng.normal(size=(64, 64))
    table = SharedTable((plain @ np.linalg.inv(matrix)).astype(np.float32), matrix, matrix)
    folded = with_tables(model.folded("shared"), table, "test")
    np.testing.assert_allclose(separate(table).head, plain, atol=1e-5)
    runtime = exported(model, "stateless", "fp32", folded=folded, layout="shared").runtime()
    assert relative(model.reference()[1], runtime.all_logits(model.ids)) < 1e-5


@pytest.mark.parametrize(("weights", "symmetric"), [("int8", True), ("int4", True), ("int4", False)])
def test_codes_are_ours_and_not_rounded_again(llama, exported, weights, symmetric):
    plan = QuantizationPlan(weights, weights, 32, symmetric)
    made = exported(llama, "cpu_gpu", weights, plan=plan)
    spec = coremltools.utils.load_spec(str(made.directory / "model.mlpackage"))
    bits = {"int8": 8, "int4": 4}[weights]
    folded, checked = llama.folded("untied"), 0
    for function in spec.mlProgram.functions.values():
        for name, arrays in compressed(function, made.program().path):
            original = original_name(name, folded)
            weight = _weight(folded, original)
            expected = round_to_nearest(weight, QuantizationOptions(bits, 32, symmetric))
            data = arrays["data"].astype(np.int16)
            if symmetric:
                data += 1 << (bits - 1)
                assert "offset" not in arrays
            else:
                np.testing.assert_array_equal(arrays["offset"].astype(np.uint8), expected.zero_points)
            np.testing.assert_array_equal(data, expected.codes)
            np.testing.assert_array_equal(arrays["scale"], expected.scales.astype(np.float16))
            checked += 1
    assert checked == 2 * (2 * 7 + 2)  # both functions, seven matrices a layer and two tables
    assert {error["name"] for error in plan.errors} == {
        *(n for n, shape in llama.config().backbone_shapes().items() if len(shape) == 2),
        "model.embed_tokens.weight",
        "lm_head.weight",
    }


def compressed(function: Any, package: Path) -> Any:
    """The names and arrays of the compressed constants of a function, as the file has them."""
    from pit_deploy.runtimes.mil_program import _Reader

    reader = _Reader(package)
    for op in function.block_specializations[function.opset].operations:
        if op.type.startswith("constexpr_"):
            yield op.outputs[0].name, {n: reader.raw(a.arguments[0].value) for n, a in op.inputs.items()}


def original_name(name: str, folded: FoldedModel) -> str:
    names = [*folded.tensor_names(), "model.embed_tokens.weight", "lm_head.weight"]
    return next(original for original in names if original.replace(".", "_") == name)


def _weight(folded: FoldedModel, name: str) -> np.ndarray:
    tables: Any = folded.tables
    special = {"model.embed_tokens.weight": tables.embedding, "lm_head.weight": tables.head}
    return special[name] if name in special else folded.read(name)


def quantized_reference(llama, encode) -> np.ndarray:
    """Logits of transformers with each matrix replaced by what `encode(name, weight)` stands for."""
    model = copy.deepcopy(llama.model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.from_numpy(encode(name, parameter.numpy()).dequantize()))
        return model(torch.tensor([llama.ids])).logits[0].numpy()


@pytest.mark.parametrize("profile", PROFILES)
def test_int8(llama, exported, profile):
    made = exported(llama, profile, "int8")

    def encode(name: str, weight: np.ndarray) -> QuantizedTensor | Palette:
        if profile == "neural_engine":
            return palettized(weight.astype(np.float16), 8)
        return round_to_nearest(weight, QuantizationOptions(8, 32 if profile == "cpu_gpu" else None))

    assert relative(quantized_reference(llama, encode), made.runtime().all_logits(llama.ids)) < 6e-3
    assert mean_kl(llama.reference()[1], made.runtime().all_logits(llama.ids)) < 7e-3
    assert made.artifact.precision["block_size"] == (32 if profile == "cpu_gpu" else None)
    assert all(e["block_size"] == (32 if profile == "cpu_gpu" else None) for e in made.plan.errors)
    assert len(made.plan.errors) == 16


def test_palettes(llama, exported):
    made = exported(llama, "neural_engine", "int4")
    encode = lambda name, weight: palettized(weight.astype(np.float16), 4)  # noqa: E731
    assert relative(quantized_reference(llama, encode), made.runtime().all_logits(llama.ids)) < 6e-3
    weight = np.random.default_rng(0).normal(size=(96, 40)).astype(np.float16)
    for bits, limit in ((4, 0.12), (6, 0.04), (8, 0.02)):
        palette = palettized(weight, bits)
        assert palette.palettes.shape == (3, 1 << bits) and palette.bits == bits
        assert palette.shape == weight.shape
        assert palette.nbytes == 96 * 40 * bits // 8 + 3 * 2 * (1 << bits) + 96 * 2
        difference = palette.dequantize() - weight
        assert np.linalg.norm(difference) < limit * np.linalg.norm(weight.astype(np.float32))
        np.testing.assert_array_equal(palette.rows(slice(32, 64)).dequantize(), palette.dequantize()[32:64])
    from coremltools.optimize.coreml._quantization_passes import palettize_weights

    made = palettize_weights.grouped_channelwise_compress(
        weight / np.abs(weight).max(axis=1, keepdims=True), "KMEANS", 4, 0, 32
    )
    exact = Palette(
        made.indices.astype(np.uint8), made.lut.reshape(3, 16), np.abs(weight).max(axis=1, keepdims=True)
    )
    errors = [np.linalg.norm(p.dequantize() - weight) for p in (palettized(weight, 4), exact)]
    assert errors[0] < 1.01 * errors[1]
    odd = palettized(weight[:7], 8)
    assert len(odd.palettes) == 1
    np.testing.assert_array_equal(odd.rows(slice(2, 5)).dequantize(), odd.dequantize()[2:5])


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_palettes_have_the_nearest_numbers_and_their_means(bits):
    rng = np.random.default_rng(3)
    weight = rng.standard_t(5, (32 * 17, 24)).astype(np.float16)
    weight[40] = 0  # a row without a scale
    palette = palettized(weight, bits)
    parts = [palettized(weight[start : start + 32], bits) for start in range(0, len(weight), 32)]
    np.testing.assert_array_equal(palette.palettes, np.concatenate([part.palettes for part in parts]))
    np.testing.assert_array_equal(palette.indices, np.concatenate([part.indices for part in parts]))
    np.testing.assert_array_equal(palette.scales, np.concatenate([part.scales for part in parts]))
    scaled = (weight / palette.scales).astype(np.float16).astype(np.float64)
    numbers = palette.palettes.astype(np.float64)
    assert (np.diff(numbers, axis=1) >= 0).all() and np.abs(numbers).max() <= 1
    for group, own, indices in zip(
        scaled.reshape(17, -1), numbers, palette.indices.reshape(17, -1), strict=True
    ):
        distance = np.abs(group[:, None] - own)
        np.testing.assert_array_equal(distance[np.arange(len(group)), indices], distance.min(axis=1))
        if bits == 4:  # many weights a number: near the end of Lloyd's algorithm
            means = [group[indices == n].mean() if (indices == n).any() else own[n] for n in range(16)]
            np.testing.assert_allclose(own, means, atol=0.02)
    expected = np.take_along_axis(
        np.repeat(palette.palettes, 32, axis=0), palette.indices.astype(np.int64), axis=1
    )
    np.testing.assert_array_equal(palette.dequantize(), (expected * palette.scales).astype(np.float32))


@pytest.mark.parametrize("value", [0.0, -3.0, 6e-8, 65504.0])
def test_palettes_of_one_number_are_exact(value):
    weight = np.full((32, 8), value, np.float16)
    np.testing.assert_array_equal(palettized(weight, 4).dequantize(), weight)


def test_levels_are_the_numbers_of_float16_up_to_one():
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    every = every[np.abs(every) <= 1]
    np.testing.assert_array_equal(np.sort(every.astype(np.float64)), LEVELS)


def test_a_mixed_plan(llama, exported):
    """As a search leaves it: some tensors prepared with 4 bits and zero points, others with 8."""
    folded = llama.folded("untied")
    four, eight = (QuantizationOptions(bits, 32, bits == 8) for bits in (4, 8))
    names = [
        *(n for n in folded.tensor_names() if folded.read(n).ndim == 2),
        "lm_head.weight",
        "model.embed_tokens.weight",
    ]
    prepared = {
        n: round_to_nearest(_weight(folded, n), four if n.endswith("up_proj.weight") else eight)
        for n in names
    }
    plan = QuantizationPlan(
        "int4", "int8", 32, False, prepared=prepared, bits={n: t.bits for n, t in prepared.items()}
    )
    made = exported(llama, "cpu_gpu", "int4", "int8", plan=plan)
    expected = quantized_reference(llama, lambda name, weight: prepared[name])
    assert relative(expected, made.runtime().all_logits(llama.ids)) < 6e-3


def test_a_mixed_plan_of_palettes(llama, exported):
    """As a search leaves it: palettes of 4, 6 and 8 bits, whose numbers are in the package."""
    folded = llama.folded("untied")
    names = [
        *(n for n in folded.tensor_names() if folded.read(n).ndim == 2),
        "lm_head.weight",
        "model.embed_tokens.weight",
    ]
    bits = {n: 4 if "up_proj" in n else 6 if "q_proj" in n else 8 for n in names}
    prepared = {n: palettized(_weight(folded, n).astype(np.float16), bits[n]) for n in names}
    plan = QuantizationPlan("int4", "int8", 32, False, prepared=prepared, bits=bits)
    made = exported(llama, "neural_engine", "int4", "int8", plan=plan)
    expected = quantized_reference(llama, lambda name, weight: prepared[name])
    assert relative(expected, made.runtime().all_logits(llama.ids)) < 6e-3
    assert {e["name"]: e["bits"] for e in made.plan.errors} == bits


@pytest.mark.parametrize("weights", ["fp16", "int8", "int4"])
def test_two_functions_have_one_set_of_weights(tiny, exported, weights, monkeypatch):
    model = tiny("llama", hidden_size=256, intermediate_size=512, vocab_size=1000, tie_word_embeddings=False)
    both = exported(model, "cpu_gpu", weights)
    monkeypatch.setattr("pit_export.coreml.PREFILL_TOKENS", 1)  # both functions then take one token
    from pit_export import coreml

    original = coreml._save

    def only_decode(decoder, profile, length, directory):
        decoder.add_function("decode", 1)
        decoder.graph.save(directory / coreml.MODEL_FILE, "decode")
        return [Place("decode", coreml.MODEL_FILE, "decode", 1)]

    monkeypatch.setattr(coreml, "_save", only_decode)
    one = exported(model, "cpu_gpu", weights, context=CONTEXT - 1)
    monkeypatch.setattr(coreml, "_save", original)
    sizes = [weights_file(e.directory / "model.mlpackage").stat().st_size for e in (both, one)]
    assert sizes[0] <= 1.02 * sizes[1]
    stated = sum(part["bytes"] for part in both.artifact.coreml["parts"])
    assert abs(sizes[0] - stated) < 0.02 * stated + 20_000  # headers and alignment of each constant


@pytest.fixture(scope="module")
def massive(tiny, tmp_path_factory):
    """A model whose residual stream has one channel at 24,000, as SmolLM2's has one at 23,800."""
    from pit_export.conftest import Tiny

    base = tiny("llama", tie_word_embeddings=False)
    model = copy.deepcopy(base.model)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 7] = torch.where(torch.arange(131) % 3 == 0, 24_000.0, -23_000.0)
        for layer in model.model.layers:  # what reads it is small, as in models that train such channels
            for part in (
                layer.self_attn.q_proj,
                layer.self_attn.k_proj,
                layer.mlp.gate_proj,
                layer.mlp.up_proj,
            ):
                part.weight[:, 7] *= 0.3
    path = tmp_path_factory.mktemp("massive")
    model.save_pretrained(path)
    return Tiny(model, path, base.ids)


@pytest.mark.parametrize("profile", PROFILES)
def test_massive_activations(massive, exported, profile):
    logits = massive.reference()[1]
    found = exported(massive, profile, "fp16").runtime().all_logits(massive.ids)
    assert mean_kl(logits, found) < 1e-3
    assert (found[:, :TOKENS].argmax(1) == logits[:, :TOKENS].argmax(1)).mean() >= 0.97


def naive_norm(graph, x, gain, eps, axis, name):
    from coremltools.converters.mil.mil import Builder as mb

    mean = mb.reduce_mean(x=mb.mul(x=x, y=x), axes=[axis], keep_dims=True)
    scale = mb.rsqrt(x=mb.add(x=mean, y=graph.number(eps)), epsilon=graph.number(0))
    return mb.mul(x=mb.mul(x=x, y=scale), y=gain, name=name)


@pytest.mark.parametrize("profile", PROFILES)
def test_the_naive_norm_fails(massive, llama, exported, profile, monkeypatch):
    """A square past 65504 is inf and the row becomes 0: finite, wrong logits. The export must not pass."""
    monkeypatch.setattr(coreml_layouts, "rms_norm", naive_norm)
    with pytest.raises(ParityError, match="float16 changes the logits"):
        exported(massive, profile, "fp16", context=94)
    with pytest.raises(ParityError, match="float16 changes the logits after an activation of 24000"):
        exported(llama, profile, "fp16", context=94)  # also where the model at hand has none
    monkeypatch.setattr("pit_export.coreml_checks._Runs.check", lambda self, hidden_states: None)
    found = exported(massive, profile, "fp16", context=93).runtime().all_logits(massive.ids)
    assert np.isfinite(found).all()
    assert mean_kl(massive.reference()[1], found) > 0.1


def test_cache_length_of_the_neural_engine(llama, exported):
    made = exported(llama, "neural_engine", "int8", context=70)
    assert [s["shape"] for s in made.artifact.states] == [[2, 2, 96, 16]] * 2
    assert made.artifact.notes == [
        "the cache has room for 96 tokens instead of 70: the Neural Engine wants a multiple of 32"
    ]
    runtime = made.runtime()
    runtime.prefill([1] * 69)
    runtime.decode(1)
    from pit_deploy.errors import ContextFullError

    with pytest.raises(ContextFullError):
        runtime.decode(1)
    assert exported(llama, "cpu_gpu", "int8", context=70).artifact.states[0]["shape"] == [2, 2, 70, 16]


def test_what_the_manifest_is_told(llama, exported):
    made = exported(llama, "neural_engine", "fp16")
    program = made.artifact.coreml
    assert (program["specification_version"], program["minimum_system"]) == (9, "iOS18")
    assert program["compute_units"] == "cpuAndNeuralEngine"
    assert [(f["name"], f["tokens"]) for f in program["functions"]] == [("prefill", 64), ("decode", 1)]
    units = {part["name"]: part["unit"] for part in program["parts"]}
    assert units["layers.1"] == units["head"] == "neural_engine" and units["embedding"] == "cpu"
    assert made.artifact.states[0] == {
        "name": "k_cache", "dtype": "float16", "shape": [2, 2, CONTEXT, 16], "output": None
    }  # fmt: skip
    passed = exported(llama, "stateless", "fp32")
    assert passed.artifact.coreml["specification_version"] == 8
    assert [f["package"] for f in passed.artifact.coreml["functions"]] == [
        "prefill.mlpackage",
        "model.mlpackage",
    ]
    assert passed.artifact.states[1]["output"] == "v_cache_out"
    assert passed.artifact.inputs[0]["shape"] == [1, "tokens"]


def test_wide_heads_are_cut_for_the_neural_engine(llama, exported, monkeypatch):
    monkeypatch.setattr("pit_export.coreml.HEAD_ROWS", 48)
    made = exported(llama, "neural_engine", "fp16", context=92)
    rows = [
        s.types[0].shape[1] for s in made.program().functions["decode"].steps if s.name.startswith("head_")
    ]
    assert rows == [48, 48, 35]
    assert relative(llama.reference()[1], made.runtime().all_logits(llama.ids)) < 4e-3


def test_all_logits(llama, exported):
    made = exported(llama, "cpu_gpu", "fp16", logits="all")
    assert made.artifact.outputs[0]["shape"] == [1, "tokens", 131]
    runtime = made.runtime()
    logits = llama.reference()[1]
    assert relative(logits, runtime.all_logits(llama.ids)) < 4e-3
    assert relative(logits[39], runtime.prefill(llama.ids)) < 4e-3


REFUSED = {
    "fp32 states": (
        dict(profile="cpu_gpu", weights="fp32", tables="fp32"),
        "--weights fp32.*states of Core ML",
    ),
    "int4 for iOS 17": (
        dict(profile="stateless", weights="int4", tables="int8"),
        "--weights int4.*fp32, fp16, int8",
    ),
    "two float types": (dict(profile="stateless", weights="fp32", tables="int8"), "fp32 and --tables int8"),
    "one table in the Neural Engine": (dict(profile="neural_engine", layout="shared"), "--layout shared"),
    "blocks that do not fit": (dict(profile="cpu_gpu", block_size=128), "hidden_size 64.*--block-size 128"),
    "feedback for palettes": (dict(profile="neural_engine", quantizer="feedback"), "--quantizer feedback"),
    "a search for channels": (dict(profile="stateless", max_kl=0.1), "--max-kl or --max-bytes"),
    "too much context": (dict(profile="cpu_gpu", context=97), "max_position_embeddings 96"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_options_that_cannot_be_built(llama, case):
    options, message = REFUSED[case]
    asked = ExportOptions(**{"to": "coreml", "weights": "int8", "tables": "int8", **options})
    with pytest.raises(InputError, match=message):
        CoreMLExporter().check(llama.config(), asked)


# What tracing makes of a cache that is written the wrong way, and other packages that must not leave an export.


class TracedCache(torch.nn.Module):
    """A layer of cache that is traced; `by_slice` writes it as Core ML understands, else by a tensor of positions."""

    def __init__(self, by_slice: bool) -> None:
        super().__init__()
        self.by_slice = by_slice
        self.register_buffer("k_cache", torch.zeros(1, 2, 8, 4))

    def forward(self, input_ids, position):
        x = (input_ids.float() + 1).view(1, 1, 1, 1).expand(1, 2, 1, 4)
        if self.by_slice:
            end = position[0] + 1
            self.k_cache[:, :, position[0] : end, :] = x
        else:
            self.k_cache[0, :, position] = x[0]
        return (self.k_cache.sum(2, keepdim=True) + x).sum((1, 2)).view(1, 1, 4) * 0.1


def traced(by_slice: bool, path: Path) -> Path:
    inputs = (torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    module = torch.jit.trace(TracedCache(by_slice).eval(), inputs, check_trace=False)
    model = coremltools.convert(
        module,
        inputs=[
            coremltools.TensorType("input_ids", (1, 1), dtype=np.int32),
            coremltools.TensorType("position", (1,), dtype=np.int32),
        ],
        outputs=[coremltools.TensorType("logits", dtype=np.float16)],
        states=[
            coremltools.StateType(
                coremltools.TensorType(shape=(1, 2, 8, 4), dtype=np.float16), name="k_cache"
            )
        ],
        minimum_deployment_target=coremltools.target.iOS18,
        skip_model_load=True,
    )
    model.save(str(path))
    return path


def test_a_cache_written_by_a_tensor_of_positions_is_refused(tmp_path):
    traced(False, tmp_path / "model.mlpackage")
    place = Place("decode", "model.mlpackage", "main", 1)
    with pytest.raises(ParityError, match=r"never writes its state k_cache .*no coreml_update_state"):
        check_packages(tmp_path, [place], ["logits"], 4)


def test_a_cache_written_by_slices_is_kept(tmp_path):
    program = MilProgram.open(traced(True, tmp_path / "model.mlpackage"))
    assert program.functions["main"].written_states() == {"k_cache"}
    state = program.new_state()
    for position, id in enumerate((3, 1)):
        program.run({"input_ids": np.array([[id]]), "position": np.array([position])}, state)
    np.testing.assert_array_equal(state["k_cache"][0, :, :3, 0], [[4, 2, 0]] * 2)


def test_a_state_that_stays_what_it_was_is_refused(llama, exported, monkeypatch, tmp_path):
    """The write is there, and writes what was read."""
    from coremltools.converters.mil.mil import Builder as mb

    real = mb.slice_update
    monkeypatch.setattr(mb, "slice_update", lambda x, update, begin, end: mb.identity(x=x))
    with pytest.raises(ParityError, match="the state k_cache did not change in a run"):
        exported(llama, "cpu_gpu", "fp16", context=91)
    monkeypatch.setattr(mb, "slice_update", real)


def test_a_mask_that_lets_old_numbers_through_is_refused(llama, exported, monkeypatch):
    from pit_export.coreml_decoder import DecoderGraph

    monkeypatch.setattr("pit_export.coreml_decoder.MASKED_SCORE", -1.0)
    with pytest.raises(ParityError, match="past the tokens changes the logits"):
        exported(llama, "cpu_gpu", "fp16", context=90)
    assert DecoderGraph.__doc__


def test_an_infinite_mask_is_refused(llama, exported, monkeypatch):
    """A row of a padded prompt sees nothing: with -inf it is not a number, with -3e4 it is only useless."""
    monkeypatch.setattr("pit_export.coreml_decoder.MASKED_SCORE", -np.inf)
    with pytest.raises(ParityError, match="are not finite"):
        exported(llama, "stateless", "fp16", context=89)


def test_padded_rows_are_finite_and_do_not_count(llama, exported):
    runtime = exported(llama, "stateless", "fp16").runtime()
    prompt = llama.ids[:5]  # 59 rows of padding on the left see no key at all
    expected = llama.reference(prompt)[1][-1]
    assert relative(expected, runtime.prefill(prompt)) < 4e-3


def test_an_op_that_the_system_lacks_is_refused(llama, exported):
    made = exported(llama, "cpu_gpu", "fp16")
    program = made.program()
    program.specification_version = 8
    from pit_export.coreml_checks import check_operations

    with pytest.raises(
        ParityError, match=r"the op .*, which specification version 8 does not know .*version 9"
    ):
        check_operations(program, program.functions["decode"])


def test_functions_must_agree_on_their_states(llama, exported):
    functions = [
        exported(llama, "cpu_gpu", "int8", context=c).program().functions["decode"] for c in (70, CONTEXT)
    ]
    with pytest.raises(ParityError, match="do not agree on their states"):
        check_same_states(Path("bundle"), dict(zip(("prefill", "decode"), functions, strict=True)))


def test_functions_must_write_alike(llama, exported, monkeypatch):
    from pit_export.coreml_cache import StateCache

    original = StateCache._write

    def other_order(self, name, layer, new):
        other = {"k_cache": "v_cache", "v_cache": "k_cache"}[name] if self._tokens == 1 else name
        return original(self, other, layer, new)

    monkeypatch.setattr(StateCache, "_write", other_order)
    with pytest.raises(ParityError, match="prefill and decode do not write the state"):
        exported(llama, "cpu_gpu", "fp16", context=88)
