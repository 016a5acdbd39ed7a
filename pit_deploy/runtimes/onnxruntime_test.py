"""The runtime's own behaviour, on graphs small enough to write by hand."""

from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from pit_deploy.errors import ContextFullError, InputError
from pit_deploy.manifest import BundleError
from pit_deploy.runtimes.base import FullRuntime
from pit_deploy.runtimes.onnxruntime import OnnxRuntime, check_external_data, external_tensors

ROWS = 5


def write_model(path, *, location="data.bin", opset=21, length=None):
    """A "decoder" whose logits are the running sum of one-hot ids: the cache keeps the one-hot rows.

    The table [5, 5] is the identity, in a file of its own.
    """
    (path / "data.bin").write_bytes(np.eye(ROWS, dtype=np.float32).tobytes())
    table = TensorProto(name="table", data_type=TensorProto.FLOAT, dims=[ROWS, ROWS])
    table.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", "0"), ("length", str(length or 4 * ROWS * ROWS))):
        table.external_data.add(key=key, value=value)
    constants = [
        onnx.numpy_helper.from_array(np.array(v, np.int64), name)
        for name, v in (("axis", [1]), ("time", 2), ("minus_one", [-1]))
    ]
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["rows"]),
        helper.make_node("Unsqueeze", ["rows", "axis"], ["new"]),
        helper.make_node("Concat", ["past_key_values.0.key", "new"], ["present.0.key"], axis=2),
        helper.make_node("CumSum", ["present.0.key", "time"], ["sums"]),
        helper.make_node("Squeeze", ["sums", "axis"], ["hidden_states.0"]),
        helper.make_node("Gather", ["hidden_states.0", "minus_one"], ["last"], name="last_position", axis=1),
        helper.make_node("Identity", ["last"], ["logits"]),
    ]
    value, kinds = helper.make_tensor_value_info, TensorProto
    graph = helper.make_graph(
        nodes,
        "sum",
        [
            value("input_ids", kinds.INT64, ["batch_size", "s"]),
            value("attention_mask", kinds.INT64, ["batch_size", "t"]),
            value("past_key_values.0.key", kinds.FLOAT, ["batch_size", 1, "p", ROWS]),
        ],
        [
            value("logits", kinds.FLOAT, ["batch_size", 1, ROWS]),
            value("present.0.key", kinds.FLOAT, ["batch_size", 1, "t", ROWS]),
        ],
        [table, *constants],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    (path / "model.onnx").write_bytes(model.SerializeToString())
    return path / "model.onnx"


@pytest.fixture
def runtime(tmp_path):
    return OnnxRuntime(write_model(tmp_path), 6, ["hidden_states.0"], 1, "standard")


def test_prefill_appends_and_reset_empties(runtime):
    assert isinstance(runtime, FullRuntime)
    assert runtime.vocab_size == ROWS and runtime.context_length == 6
    assert runtime.prefill([1, 2]).tolist() == [0, 1, 1, 0, 0]
    assert runtime.decode(2).tolist() == [0, 1, 2, 0, 0]
    assert runtime.prefill([4, 4]).tolist() == [0, 1, 2, 0, 2]
    assert runtime.position == 5
    runtime.reset()
    assert runtime.position == 0
    assert runtime.decode(3).tolist() == [0, 0, 0, 1, 0]


def test_the_context_is_checked_before_running(runtime):
    runtime.prefill([0] * 5)
    with pytest.raises(ContextFullError) as caught:
        runtime.prefill([1, 1])
    assert (caught.value.used, caught.value.needed, caught.value.context_length) == (5, 2, 6)
    assert runtime.position == 5
    assert runtime.decode(1).tolist() == [5, 1, 0, 0, 0]
    for ids, match in (([], "no tokens"), ([5], "5 is outside"), ([-1], "-1 is outside")):
        runtime.reset()
        with pytest.raises(InputError, match=match):
            runtime.prefill(ids)


def test_the_probe_gives_all_positions_and_writes_nothing(runtime, tmp_path):
    before = sorted(tmp_path.iterdir())
    runtime.prefill([1])
    assert runtime.all_logits([0, 1, 1]).tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 2, 0, 0, 0]]
    assert runtime.position == 0
    states, logits = runtime.hidden_states([2, 3])
    assert states.shape == (1, 2, ROWS)
    assert states[0].tolist() == logits.tolist() == [[0, 0, 1, 0, 0], [0, 0, 1, 1, 0]]
    assert sorted(tmp_path.iterdir()) == before


def test_hidden_states_need_names(tmp_path):
    with pytest.raises(InputError, match="no names"):
        OnnxRuntime(write_model(tmp_path), 6, [], 1, "standard").hidden_states([1])


def test_what_cannot_be_opened_is_one_sentence(tmp_path):
    path = write_model(tmp_path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(InputError, match=r"cannot open .*model\.onnx"):
        OnnxRuntime(path, 6, profile="standard")
    with pytest.raises(InputError, match=r"cannot open .*opset"):
        OnnxRuntime(write_model(tmp_path, opset=900), 6, profile="standard")
    with pytest.raises(InputError, match=r"cannot open .*none\.onnx") as caught:
        OnnxRuntime(tmp_path / "none.onnx", 6, profile="standard")
    assert "\n" not in str(caught.value)


def bundle(path, sizes):
    entries = [SimpleNamespace(path=name, size=size) for name, size in sizes.items()]
    manifest = SimpleNamespace(files=entries, model_file="model.onnx")
    return SimpleNamespace(model_path=path / "model.onnx", manifest=manifest, path=path)


@pytest.mark.parametrize(
    ("fields", "listed", "kind"),
    [
        ({}, {"data.bin": 100}, None),
        ({}, {"data.bin": 99}, "wrong_size"),
        ({}, {"other.bin": 100}, "unlisted_file"),
        (dict(length=96), {"data.bin": 100}, "wrong_size"),
        (dict(length=-4), {"data.bin": 100}, "wrong_size"),
        (dict(location="../data.bin"), {"data.bin": 100}, "path_escape"),
        (dict(location="/etc/passwd"), {"data.bin": 100}, "path_escape"),
    ],
)
def test_external_data_must_be_what_the_manifest_lists(tmp_path, fields, listed, kind):
    write_model(tmp_path, **fields)
    if kind is None:
        check_external_data(bundle(tmp_path, listed))
        return
    with pytest.raises(BundleError, match="table") as caught:
        check_external_data(bundle(tmp_path, listed))
    assert caught.value.kind == kind


def test_a_graph_that_is_no_graph(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"\xff\xff\xff")
    with pytest.raises(BundleError, match="cannot be read") as caught:
        check_external_data(bundle(tmp_path, {}))
    assert caught.value.kind == "unreadable_file"


def test_external_tensors_of_inner_graphs_are_found(tmp_path):
    model = onnx.load(write_model(tmp_path), load_external_data=False)
    inner = onnx.GraphProto()
    inner.CopyFrom(model.graph)
    for holder in ("then_branch", "else_branch"):
        node = model.graph.node.add(op_type="If", name=holder)
        node.attribute.append(helper.make_attribute(holder, inner))
    assert [t.name for t in external_tensors(model)] == ["table"] * 3
