"""The nested head's graph against arithmetic with the table as it was rounded."""

import dataclasses

import numpy as np
import onnx
import pytest

from pit_deploy.errors import InputError
from pit_deploy.folding import SharedTable
from pit_deploy.quantize.nested import NestedHead
from pit_deploy.quantize.plan import QuantizationPlan
from pit_deploy.runtimes.onnxruntime import external_tensors
from pit_export.onnx import OnnxExporter

ROWS, SIZE, COLUMNS = 1000, 64, 32


@pytest.fixture(scope="module")
def model(tiny):
    return tiny("llama", tie_word_embeddings=True, vocab_size=ROWS)


@pytest.fixture(scope="module")
def folded(model):
    """The model with maps that are no identity, so that the head and the embedding differ."""
    rng, plain = np.random.default_rng(0), model.folded("shared")
    maps = [np.eye(SIZE) + 0.1 * rng.standard_normal((SIZE, SIZE)) for _ in range(2)]
    return dataclasses.replace(plain, tables=SharedTable(plain.tables.table, *maps))


def plan(bits: int, nested: NestedHead | None, block: int = 32, symmetric: bool = True) -> QuantizationPlan:
    return QuantizationPlan("fp32", f"int{bits}", block, symmetric, nested=nested)


def runtimes(export, model, folded, bits, shortlist, block=32, symmetric=True, **options):
    """The same model with a nested and with the full head; activations stay float."""
    return [
        export(
            model,
            folded,
            plan=plan(bits, nested, block, symmetric),
            exporter=OnnxExporter(accuracy_level=0),
            **options,
        )
        for nested in (NestedHead(COLUMNS, shortlist), None)
    ]


@pytest.mark.parametrize(
    ("bits", "block", "symmetric"), [(8, 32, True), (8, 16, True), (8, 16, False), (4, 32, True)]
)
def test_the_shortlist_is_finished_and_the_rest_estimated(model, folded, export, bits, block, symmetric):
    shortlist = 50
    nested, full = runtimes(export, model, folded, bits, shortlist, block, symmetric)
    graph = onnx.load(nested.directory / "model.onnx", load_external_data=False).graph
    gathers = [node.op_type for node in graph.node if "shortlist.ids" in "".join(node.input)]
    assert gathers.count("Gather") == (2 if bits == 8 and symmetric else 0)
    found, exact = (e.runtime().all_logits(model.ids) for e in (nested, full))
    states = full.runtime().hidden_states(model.ids)[0][-1]
    table = plan(bits, None, block, symmetric).encode("pit.table", folded.tables.table, "tables").dequantize()
    gain = folded.read("model.norm.weight")
    normed = states / np.sqrt((states**2).mean(-1, keepdims=True) + model.config().rms_norm_eps) * gain
    mapped = normed @ folded.tables.head_map.T
    estimate = mapped[:, :COLUMNS] @ table[:, :COLUMNS].T
    for row in range(len(found)):
        chosen = np.argsort(-estimate[row])[:shortlist]
        expected = estimate[row].copy()
        expected[chosen] = exact[row][chosen]
        np.testing.assert_allclose(found[row], expected, atol=2e-4)
    assert np.abs(found - exact).max() > 0.1  # the estimates are no exact logits


def test_a_rest_of_many_blocks_is_gathered_by_its_own_operator(model, folded, export, monkeypatch):
    """The product with a column for every block would be the slower way: here from two blocks on."""
    monkeypatch.setattr("pit_export.onnx_contrib.FEW_BLOCKS", 1)
    for block, operators in ((32, {"Gather"}), (16, {"GatherBlockQuantized"})):
        nested = runtimes(export, model, folded, 8, 50, block)[0]
        graph = onnx.load(nested.directory / "model.onnx", load_external_data=False).graph
        found = {node.op_type for node in graph.node if "shortlist.ids" in "".join(node.input)}
        assert found - {"ScatterElements"} == operators


def test_prefill_and_decode_agree(model, folded, export):
    nested, _ = runtimes(export, model, folded, 8, 50)
    runtime = nested.runtime()
    every = runtime.all_logits(model.ids)
    first = runtime.prefill(model.ids[:-1])
    np.testing.assert_allclose(first, every[-2], atol=1e-4)
    np.testing.assert_allclose(runtime.decode(model.ids[-1]), every[-1], atol=1e-4)


def test_embedding_rows_are_those_of_the_whole_table(model, folded, export):
    nested, full = runtimes(export, model, folded, 8, 50)
    states = [e.runtime().hidden_states(model.ids)[0][0] for e in (nested, full)]
    np.testing.assert_allclose(*states, atol=1e-6)


def test_each_part_of_the_table_is_stored_once(model, folded, export):
    for bits in (8, 4):
        sizes = []
        for exported in runtimes(export, model, folded, bits, 50):
            graph = onnx.load(exported.directory / "model.onnx", load_external_data=False)
            half = ROWS * COLUMNS * bits // 8
            parts = {
                (t.offset, t.length)
                for t in external_tensors(graph)
                if t.name.startswith("pit.table") and t.length >= half
            }
            sizes.append(sum(length for _, length in parts))
        assert sizes == [ROWS * SIZE * bits // 8] * 2


def test_ids_without_a_token_never_enter_the_shortlist(model, folded, export):
    table = folded.tables.table.copy()
    table[-600:] = 0  # padded rows have the logit 0, above many others
    padded = dataclasses.replace(folded, tables=dataclasses.replace(folded.tables, table=table))
    nested, full = runtimes(export, model, padded, 8, 200, tokenizer_length=400)
    found, exact = (e.runtime().all_logits(model.ids) for e in (nested, full))
    assert found[:, 400:].max() < -1e8
    finished = np.isclose(found[:, :400], exact[:, :400], atol=1e-4).sum(axis=1)
    assert (finished >= 200).all()


def test_a_split_inside_a_block_is_refused(model, folded, export):
    with pytest.raises(InputError, match="--head-columns 48 cannot split"):
        export(model, folded, plan=plan(8, NestedHead(48, 10)))
    for head in (NestedHead(48, 10), NestedHead(64, 10), NestedHead(32, 1000)):
        with pytest.raises(InputError, match=r"--head-columns|--shortlist"):
            head.check(ROWS, SIZE, 32)
