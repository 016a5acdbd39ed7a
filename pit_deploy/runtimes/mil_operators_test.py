"""Each op against a second implementation: coremltools' value inference where it has one, PyTorch elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from pit_deploy.errors import PitDeployError
from pit_deploy.runtimes.mil_program import quiet_coremltools

quiet_coremltools()
from pit_deploy.runtimes.mil_operators import OPERATORS, infer, knows  # noqa: E402

RNG = np.random.default_rng(3)
A, B = RNG.normal(size=(2, 3, 4, 5)).astype(np.float32), RNG.normal(size=(1, 3, 4, 5)).astype(np.float32)
POSITIVE = np.abs(A) + np.float32(0.1)
INTS = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
FLAGS = RNG.random((2, 3, 4, 5)) < 0.5


def tensor(value: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(value))


# Ops that coremltools infers no value for, or that the check should not take from it: by PyTorch.
TORCH: dict[str, list[tuple[dict[str, Any], Callable[..., torch.Tensor]]]] = {
    "linear": [
        (
            {"x": A, "weight": A[0, 0], "bias": A[0, 0, :, 0]},
            lambda x, weight, bias: F.linear(x, weight, bias),
        ),
        ({"x": A, "weight": A[0, 0]}, lambda x, weight: F.linear(x, weight)),
    ],
    "conv": [
        (
            {
                "x": A,
                "weight": RNG.normal(size=(7, 3, 1, 1)).astype(np.float32),
                "bias": np.ones(7, np.float32),
            },
            lambda x, weight, bias: F.conv2d(x, weight, bias),
        )
    ],
    "scaled_dot_product_attention": [
        (
            {"query": A, "key": A + 1, "value": A - 1, "attn_mask": B[0, 0, :, :4]},
            lambda query, key, value, attn_mask: F.scaled_dot_product_attention(query, key, value, attn_mask),
        ),
        (
            {"query": A, "key": A + 1, "value": A - 1, "attn_mask": np.tri(4, dtype=bool)},
            lambda query, key, value, attn_mask: F.scaled_dot_product_attention(query, key, value, attn_mask),
        ),
    ],
    "silu": [({"x": np.float32([-200, -3, 0, 2, 90])}, lambda x: F.silu(x))],
    "gelu": [
        ({"x": A, "mode": "EXACT"}, lambda x, mode: F.gelu(x)),
        ({"x": A, "mode": "TANH_APPROXIMATION"}, lambda x, mode: F.gelu(x, approximate="tanh")),
    ],
    "softmax": [
        ({"x": A, "axis": 1}, lambda x, axis: x.softmax(1)),
        ({"x": np.full((1, 4), -3e4, np.float32), "axis": -1}, lambda x, axis: x.softmax(-1)),
    ],
}
# By coremltools itself.
INFERRED: dict[str, list[dict[str, Any]]] = {
    "matmul": [{"x": A, "y": A, "transpose_y": True}, {"x": A, "y": A, "transpose_x": True}],
    "gather": [
        {"x": A, "indices": np.int32([[2, 0], [1, 1]]), "axis": 1, "validate_indices": False},
        {"x": A[0], "indices": np.int32([-1]), "axis": 0, "validate_indices": False},
    ],
    "slice_by_index": [
        {"x": A, "begin": [0, 1, 0, 2], "end": [2, 3, 4, 5]},
        {"x": A, "begin": [0, 0, 3, 0], "end": [2, 3, 0, 5], "stride": [1, 2, -1, 1]},
        {
            "x": A,
            "begin": [1, 1, 0, 0],
            "end": [2, 2, 2, 2],
            "begin_mask": [False] * 4,
            "end_mask": [False] * 4,
        }
        | {"squeeze_mask": [True, False, False, False]},
        {"x": A, "begin": [9, 1, 0, 0], "end": [9, 2, 9, 9], "begin_mask": [True] + [False] * 3}
        | {"end_mask": [True, False, True, True]},
    ],
    "slice_by_size": [{"x": A, "begin": [0, 1, 0, 2], "size": [2, 2, -1, 3]}],
    "slice_update": [
        {"x": A, "update": B[:, :2, :1], "begin": [1, 0, 2, 0], "end": [2, 2, 3, 5]},
        {"x": A, "update": A[:1, :, :2], "begin": [1, 0, 0, 0], "end": [2, 3, 4, 5], "stride": [1, 1, 2, 1]},
    ],
    "concat": [{"values": [A, B], "axis": 0}, {"values": [A, A], "axis": 1, "interleave": True}],
    "reshape": [{"x": A, "shape": [6, -1]}],
    "transpose": [{"x": A, "perm": [0, 2, 3, 1]}],
    "expand_dims": [{"x": A, "axes": [0, 3]}],
    "squeeze": [{"x": B, "axes": [0]}, {"x": B}],
    "tile": [{"x": A[0, 0], "reps": [2, 3]}],
    "identity": [{"x": A}],
    "cast": [{"x": A, "dtype": "int32"}, {"x": INTS, "dtype": "fp32"}, {"x": A, "dtype": "bool"}],
    "add": [{"x": A, "y": B}, {"x": INTS, "y": np.int32(3)}],
    "sub": [{"x": A, "y": B}],
    "mul": [{"x": A, "y": B}],
    "real_div": [{"x": A, "y": POSITIVE}, {"x": INTS, "y": np.int32(2)}],
    "maximum": [{"x": A, "y": B}],
    "minimum": [{"x": A, "y": B}],
    "pow": [{"x": POSITIVE, "y": B}],
    "abs": [{"x": A}],
    "square": [{"x": A}],
    "sqrt": [{"x": POSITIVE}],
    "rsqrt": [{"x": POSITIVE}, {"x": POSITIVE, "epsilon": np.float32(0.5)}],
    "inverse": [{"x": POSITIVE}, {"x": POSITIVE, "epsilon": np.float32(0.5)}],
    "exp": [{"x": A}],
    "tanh": [{"x": A}],
    "sigmoid": [{"x": A}],
    "relu": [{"x": A}],
    "reduce_max": [{"x": A, "axes": [1], "keep_dims": True}, {"x": A}],
    "reduce_min": [{"x": A, "axes": [-1], "keep_dims": False}],
    "reduce_sum": [{"x": A, "axes": [0, 2], "keep_dims": True}],
    "reduce_mean": [{"x": A, "axes": [3], "keep_dims": True}],
    "reduce_sum_square": [{"x": A, "axes": [3], "keep_dims": True}],
    "greater": [{"x": A, "y": B}],
    "greater_equal": [{"x": INTS, "y": INTS[:1]}],
    "less": [{"x": A, "y": B}],
    "less_equal": [{"x": INTS, "y": INTS[:1]}],
    "equal": [{"x": INTS, "y": INTS[:1]}],
    "logical_or": [{"x": FLAGS, "y": ~FLAGS}],
    "logical_and": [{"x": FLAGS, "y": FLAGS[:1]}],
    "logical_not": [{"x": FLAGS}],
    "select": [{"cond": FLAGS, "a": A, "b": A + 1}],
    "shape": [{"x": A}],
}


@pytest.mark.parametrize("op", sorted(TORCH))
def test_equals_pytorch(op: str) -> None:
    for inputs, reference in TORCH[op]:
        expected = reference(**{n: tensor(v) if isinstance(v, np.ndarray) else v for n, v in inputs.items()})
        found = OPERATORS[op](**inputs)
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op", sorted(INFERRED))
def test_equals_coremltools(op: str) -> None:
    for inputs in INFERRED[op]:
        expected = infer(op, **inputs)
        before = {name: np.copy(value) for name, value in inputs.items() if isinstance(value, np.ndarray)}
        found = OPERATORS[op](**inputs)
        assert np.shape(found) == np.shape(expected)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
        for name, value in before.items():
            np.testing.assert_array_equal(inputs[name], value, err_msg=f"{op} changes its {name}")


def test_every_op_has_a_second_implementation() -> None:
    assert sorted(TORCH.keys() | INFERRED.keys()) == sorted(OPERATORS)


def test_a_cast_to_fp16_rounds_and_overflows() -> None:
    found = OPERATORS["cast"](np.float32([1 + 2**-12, 7e4, -2049, 1e-9]), "fp16")
    np.testing.assert_array_equal(found, np.float32([1, np.inf, -2048, 0]))
    assert found.dtype == np.float32


def test_slice_update_in_place_writes_into_its_input() -> None:
    x = A.copy()
    inputs = INFERRED["slice_update"][0]
    expected = OPERATORS["slice_update"](**inputs)
    found = OPERATORS["slice_update"](**{**inputs, "x": x}, in_place=True)
    assert found is x
    np.testing.assert_array_equal(x, expected)


def test_errors_name_the_numbers() -> None:
    with pytest.raises(PitDeployError, match="outside the 3 rows"):
        OPERATORS["gather"](A[0], np.int32([3]), 0)
    with pytest.raises(PitDeployError, match=r"\[1, 3, 4, 5\] is written into a place of \[1, 2, 4, 5\]"):
        OPERATORS["slice_update"](A, B, [0, 0, 0, 0], [1, 2, 4, 5])
    with pytest.raises(PitDeployError, match=r"weight \[3, 3, 3, 3\]"):
        OPERATORS["conv"](A, np.ones((3, 3, 3, 3), np.float32))


def test_what_is_not_here_comes_from_coremltools() -> None:
    assert "floor" not in OPERATORS and knows("floor")
    np.testing.assert_array_equal(infer("floor", x=A), np.floor(A))
    parts = infer("split", x=A, num_splits=2, axis=2)
    assert [part.shape for part in parts] == [(2, 3, 2, 5)] * 2
    assert not knows("lstm") and not knows("no_such_op")
