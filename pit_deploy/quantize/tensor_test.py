import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from pit_deploy.errors import InputError
from pit_deploy.quantize import QuantizationOptions, QuantizedTensor, round_to_nearest

# rows, columns, block size, bits, symmetric
RUNTIME_CASES: list[tuple[int, int, int, int, bool]] = [
    (7, 96, 32, 4, True),
    (7, 96, 32, 4, False),  # three blocks: an odd number of zero points a row
    (5, 128, 16, 4, False),
    (7, 96, 32, 8, True),
    (7, 96, 32, 8, False),
    (3, 100, 32, 4, True),  # the last block is padded
    (3, 100, 32, 4, False),
    (1, 100, 64, 8, False),
    (2, 64, 128, 4, False),  # one block, longer than the row
]


def quantized(
    rows: int, columns: int, block_size: int | None, bits: int, symmetric: bool, seed: int = 0
) -> tuple[np.ndarray, QuantizedTensor]:
    weight = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    return weight, round_to_nearest(weight, QuantizationOptions(bits, block_size, symmetric))


def run_one_node(node: Any, initializers: Any, inputs: Any, outputs: Any) -> list[np.ndarray]:
    onnx = pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    helper = onnx.helper
    kinds = {np.dtype(np.float32): onnx.TensorProto.FLOAT, np.dtype(np.int64): onnx.TensorProto.INT64}
    graph = helper.make_graph(
        [node],
        "one_node",
        [helper.make_tensor_value_info(name, kinds[a.dtype], a.shape) for name, a in inputs.items()],
        [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in outputs],
        [onnx.numpy_helper.from_array(np.ascontiguousarray(a), name) for name, a in initializers.items()],
    )
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)],
        ir_version=10,
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(list(outputs), inputs)


@pytest.mark.parametrize("accuracy_level", [None, 0])
@pytest.mark.parametrize("case", RUNTIME_CASES)
def test_packing_is_what_matmul_nbits_reads(
    case: tuple[int, int, int, int, bool], accuracy_level: int | None
) -> None:
    onnx = pytest.importorskip("onnx")
    _, tensor = quantized(*case)
    rows, columns = tensor.shape
    initializers: dict[str, np.ndarray] = {"b": tensor.packed_codes(), "scales": tensor.scales}
    if (points := tensor.packed_zero_points()) is not None:
        initializers["zero_points"] = points
    attributes = dict(K=columns, N=rows, bits=tensor.bits, block_size=tensor.block_size)
    if accuracy_level is not None:
        attributes["accuracy_level"] = accuracy_level
    node = onnx.helper.make_node(
        "MatMulNBits", ["a", *initializers], ["y"], domain="com.microsoft", **attributes
    )
    a = np.random.default_rng(1).standard_normal((4, columns)).astype(np.float32)
    (y,) = run_one_node(node, initializers, {"a": a}, ["y"])
    expected = a.astype(np.float64) @ tensor.dequantize(np.float64).T
    np.testing.assert_allclose(y, expected, atol=1e-4)


@pytest.mark.parametrize("case", [case for case in RUNTIME_CASES if case[1] % case[2] == 0])
def test_packing_is_what_gather_block_quantized_reads(case: tuple[int, int, int, int, bool]) -> None:
    onnx = pytest.importorskip("onnx")
    _, tensor = quantized(*case)
    rows = tensor.shape[0]
    initializers: dict[str, np.ndarray] = {"data": tensor.packed_codes().reshape(rows, -1)}
    inputs = ["data", "ids", "scales"]
    initializers["scales"] = tensor.scales
    if (points := tensor.packed_zero_points()) is not None:
        initializers["zero_points"] = points
        inputs.append("zero_points")
    node = onnx.helper.make_node(
        "GatherBlockQuantized",
        inputs,
        ["y"],
        domain="com.microsoft",
        bits=tensor.bits,
        block_size=tensor.block_size,
        gather_axis=0,
        quantize_axis=1,
    )
    ids = np.array([[rows - 1, 0, rows // 2]], np.int64)
    (y,) = run_one_node(node, initializers, {"ids": ids}, ["y"])
    np.testing.assert_array_equal(y, tensor.dequantize()[ids])


def test_packing_by_hand() -> None:
    codes = np.arange(32, dtype=np.uint8).reshape(1, 32) % 16
    tensor = QuantizedTensor(
        codes, np.ones((1, 2), np.float32), np.array([[3, 12]], np.uint8), bits=4, block_size=16, columns=32
    )
    assert tensor.packed_codes().shape == (1, 2, 8)
    assert tensor.packed_codes()[0, 0].tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    packed_points = tensor.packed_zero_points()
    assert packed_points is not None and packed_points.tolist() == [[0xC3]]
    assert tensor.nbytes == 16 + 8 + 1
    assert tensor.dequantize()[0, :2].tolist() == [-3.0, -2.0]
    assert tensor.dequantize()[0, 16:18].tolist() == [-12.0, -11.0]


def test_whole_row_of_odd_length_packs_with_a_zero_nibble() -> None:
    weight, tensor = quantized(3, 21, None, 4, False)
    assert tensor.block_size == tensor.columns == 21
    assert tensor.packed_codes().shape == (3, 1, 11)
    assert np.all(tensor.packed_codes()[:, 0, -1] < 16)
    assert tensor.nbytes == 3 * 11 + 3 * 4 + 3
    assert tensor.shape == weight.shape


@pytest.mark.parametrize("case", RUNTIME_CASES)
def test_nbytes_counts_what_is_stored(case: tuple[int, int, int, int, bool]) -> None:
    _, tensor = quantized(*case)
    stored = tensor.packed_codes().nbytes + tensor.scales.nbytes
    if (points := tensor.packed_zero_points()) is not None:
        stored += points.nbytes
    assert tensor.nbytes == stored


def test_error_against_arithmetic() -> None:
    weight = np.array([[3.0] * 16, [0.0] * 16, [4.0] * 16], np.float32)
    codes = np.full((3, 16), 128, np.uint8)
    codes[0] += 3
    codes[2] += 2
    tensor = QuantizedTensor(codes, np.ones((3, 1), np.float32), None, 8, 16, 16)
    error = tensor.error_against(weight)
    assert error.relative_rms == pytest.approx(2 / 5)  # sqrt(16 * 4) / sqrt(16 * (9 + 16))
    assert error.max_abs == 2
    assert error.worst_row == 2
    assert error.worst_row_relative_rms == pytest.approx(0.5)
    assert error.mean_row_relative_rms == pytest.approx(0.25)
    assert json.loads(json.dumps(error.to_dict())) == error.to_dict()


def test_error_against_refuses_another_shape() -> None:
    _, tensor = quantized(3, 32, 32, 4, True)
    with pytest.raises(InputError, match=r"\[3, 31\].*\[3, 32\]"):
        tensor.error_against(np.zeros((3, 31)))


def test_rows_is_a_view_with_the_same_values() -> None:
    _, tensor = quantized(9, 100, 32, 4, False)
    part = tensor.rows(slice(2, 7, 2))
    np.testing.assert_array_equal(part.dequantize(), tensor.dequantize()[2:7:2])
    assert np.shares_memory(part.codes, tensor.codes)
    assert tensor.rows(slice(0, 0)).shape == (0, 100)


def test_dequantize_over_several_chunks_and_dtypes() -> None:
    _, tensor = quantized(3, 200_000, 32, 8, True)
    values = (tensor.codes.astype(np.float64) - 128) * np.repeat(tensor.scales.astype(np.float64), 32, axis=1)
    np.testing.assert_allclose(tensor.dequantize(np.float64), values, rtol=1e-6)
    assert tensor.dequantize(np.float16).dtype == np.float16


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"bits": 3}, "bits is 3"),
        ({"columns": 0}, "columns is 0"),
        ({"block_size": 24}, "block_size 24 does not go with columns 40"),
        ({"block_size": 8}, "block_size 8"),
        ({"block_size": 16}, "codes has 64 columns, but columns 40 and block_size 16 make 48"),
        ({"codes": np.zeros((2, 64), np.int8)}, r"codes is int8 \[2, 64\]"),
        (
            {"scales": np.ones((2, 3), np.float32)},
            r"scales is float32 \[2, 3\]; codes needs float32 \[2, 2\]",
        ),
        ({"scales": np.ones((2, 2))}, "scales is float64"),
        ({"scales": np.array([[1, 1], [1, np.nan]], np.float32)}, r"scales holds 1 .* first at \[1, 1\]"),
        ({"zero_points": np.zeros((2, 1), np.uint8)}, "zero_points is uint8"),
        ({"zero_points": np.full((2, 2), 16, np.uint8)}, "zero_points holds 16, but bits 4 ends at 15"),
        ({"codes": np.full((2, 64), 16, np.uint8)}, "codes holds 16, but bits 4 ends at 15"),
        ({"codes": np.zeros((2, 64), np.uint8)}, "codes past columns 40 must equal the zero point"),
    ],
)
def test_fields_that_do_not_fit_are_refused(change: Any, match: str) -> None:
    _, tensor = quantized(2, 40, 32, 4, True)
    with pytest.raises(InputError, match=match):
        dataclasses.replace(tensor, **change)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_block_of_columns_has_the_same_values(bits: int) -> None:
    weight = np.random.default_rng(0).standard_normal((5, 70)).astype(np.float32)
    tensor = round_to_nearest(weight, QuantizationOptions(bits, 16, symmetric=False))
    for start, stop in ((0, 32), (32, 70), (16, 64)):
        np.testing.assert_array_equal(
            tensor.column_block(start, stop).dequantize(), tensor.dequantize()[:, start:stop]
        )
    for start, stop in ((0, 20), (8, 32), (32, 32), (64, 80)):
        with pytest.raises(InputError, match="between blocks"):
            tensor.column_block(start, stop)
