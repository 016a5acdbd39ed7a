"""The ops of an ML Program in NumPy, each with the parameter names of the MIL specification.

Numbers of type fp16 are held in float32 arrays; `mil_program` rounds every result to the type that the program
declares, so an op here computes in float32 and rounds once. What is not here goes through coremltools' own value
inference (`infer`), which is also what the tests compare these functions with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pit_deploy.errors import PitDeployError
from pit_deploy.extras import require

Array = np.ndarray


def _linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    y = x @ weight.T
    return y if bias is None or not np.any(bias) else y + bias


def _matmul(x: Array, y: Array, transpose_x: bool = False, transpose_y: bool = False) -> Array:
    x = np.swapaxes(x, -1, -2) if transpose_x else x
    y = np.swapaxes(y, -1, -2) if transpose_y else y
    return np.matmul(x, y)


def _conv(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    strides: Sequence[int] = (1, 1),
    pad_type: str = "valid",
    pad: Sequence[int] = (),
    dilations: Sequence[int] = (1, 1),
    groups: int = 1,
) -> Array:
    """Pointwise convolutions alone: kernel 1x1, one group, stride 1."""
    pointwise = (
        weight.ndim == 4 and weight.shape[2:] == (1, 1) and groups == 1 and np.all(np.equal(strides, 1))
    )
    if not pointwise or (pad_type == "custom" and np.any(pad)):
        raise PitDeployError(
            f"a conv with weight {list(weight.shape)}, strides {list(strides)} and {groups} groups is not "
            f"evaluated; only 1x1 kernels in one group are."
        )
    batch, channels, height, width = x.shape
    y = weight.reshape(len(weight), channels) @ x.reshape(batch, channels, height * width)
    if bias is not None:
        y = y + bias[:, None]
    return y.reshape(batch, len(weight), height, width)


def _softmax(x: Array, axis: int = -1) -> Array:
    shifted = np.exp(x - x.max(axis=int(axis), keepdims=True))
    shifted /= shifted.sum(axis=int(axis), keepdims=True)
    return shifted


def _attention(query: Array, key: Array, value: Array, attn_mask: Array | None = None) -> Array:
    scores = np.matmul(query, np.swapaxes(key, -1, -2))
    scores *= np.float32(1 / math.sqrt(query.shape[-1]))
    if attn_mask is not None:
        scores = (
            np.where(attn_mask, scores, np.float32(-np.inf))
            if attn_mask.dtype == bool
            else scores + attn_mask
        )
    return np.matmul(_softmax(scores), value)


def _gather(
    x: Array, indices: Array, axis: int = 0, batch_dims: int = 0, validate_indices: bool = False
) -> Array:
    if batch_dims:
        return infer("gather", x=x, indices=indices, axis=axis, batch_dims=batch_dims)
    size = x.shape[int(axis)]
    if np.any(indices >= size) or np.any(indices < -size):
        raise PitDeployError(f"gather: an index is outside the {size} rows of its axis {int(axis)}.")
    return np.take(x, indices, axis=int(axis))


def _slice_by_index(
    x: Array,
    begin: Array,
    end: Array,
    stride: Array | None = None,
    begin_mask: Array | None = None,
    end_mask: Array | None = None,
    squeeze_mask: Array | None = None,
) -> Array:
    return x[_slices(x.shape, begin, end, stride, begin_mask, end_mask, squeeze_mask)].copy()


def _slice_update(
    x: Array,
    update: Array,
    begin: Array,
    end: Array,
    stride: Array | None = None,
    begin_mask: Array | None = None,
    end_mask: Array | None = None,
    squeeze_mask: Array | None = None,
    in_place: bool = False,
) -> Array:
    """`in_place` writes into `x` itself, for a caller that knows that nobody else reads it."""
    result = x if in_place else x.copy()
    place = _slices(x.shape, begin, end, stride, begin_mask, end_mask, squeeze_mask)
    if result[place].shape != update.shape:
        raise PitDeployError(
            f"slice_update: {list(np.shape(update))} is written into a place of {list(result[place].shape)} "
            f"(begin {np.asarray(begin).tolist()}, end {np.asarray(end).tolist()} of {list(x.shape)})."
        )
    result[place] = update
    return result


def _slices(
    shape: Sequence[int],
    begin: Array,
    end: Array,
    stride: Array | None,
    begin_mask: Array | None,
    end_mask: Array | None,
    squeeze_mask: Array | None,
) -> tuple[slice | int, ...]:
    rank = len(shape)
    none = [False] * rank
    begins = none if begin_mask is None else begin_mask
    ends = none if end_mask is None else end_mask
    squeezed = none if squeeze_mask is None else squeeze_mask
    places: list[slice | int] = []
    for axis in range(rank):
        step = 1 if stride is None else int(stride[axis])
        first, last = int(begin[axis]), int(end[axis])
        if squeezed[axis]:
            places.append(first)
            continue
        places.append(slice(None if begins[axis] else first, None if ends[axis] else last, step))
    return tuple(places)


def _concat(values: Sequence[Array], axis: int, interleave: bool = False) -> Array:
    if interleave:
        return infer("concat", values=values, axis=axis, interleave=interleave)
    return np.concatenate([np.atleast_1d(value) for value in values], axis=int(axis))


def _reduce(function: Callable[..., Any]) -> Callable[..., Array]:
    def reduce(x: Array, axes: Array | None = None, keep_dims: bool = False) -> Array:
        axis = None if axes is None else tuple(int(a) for a in np.atleast_1d(axes))
        return np.asarray(function(x, axis=axis, keepdims=bool(keep_dims)))

    return reduce


def _binary(function: Callable[..., Any]) -> Callable[..., Array]:
    return lambda x, y: function(x, y)


def _gelu(x: Array, mode: str = "EXACT") -> Array:
    if mode == "EXACT":
        return 0.5 * x * (1 + _erf(x / np.float32(math.sqrt(2))))
    if mode == "TANH_APPROXIMATION":
        return 0.5 * x * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3)))
    return infer("gelu", x=x, mode=mode)


def _erf(x: Array) -> Array:
    values = np.fromiter(map(math.erf, np.ravel(x).tolist()), np.float32, x.size)
    return values.reshape(x.shape)


def _silu(x: Array) -> Array:
    with np.errstate(over="ignore"):  # exp of a large number is inf, and x / inf is the right 0
        return x / (1 + np.exp(-x))


_CASTS = {"fp32": np.float32, "fp16": np.float16, "int32": np.int32, "bool": np.bool_, "int16": np.int16}
_CASTS |= {"uint16": np.uint16, "int8": np.int8, "uint8": np.uint8}


def _cast(x: Array, dtype: str) -> Array:
    if dtype == "fp16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(np.float32)
    return x.astype(_CASTS[dtype])


OPERATORS: dict[str, Callable[..., Any]] = {
    "linear": _linear,
    "matmul": _matmul,
    "conv": _conv,
    "softmax": _softmax,
    "scaled_dot_product_attention": _attention,
    "gather": _gather,
    "slice_by_index": _slice_by_index,
    "slice_by_size": lambda x, begin, size: x[
        tuple(slice(int(b), None if s == -1 else int(b) + int(s)) for b, s in zip(begin, size, strict=True))
    ].copy(),
    "slice_update": _slice_update,
    "concat": _concat,
    "reshape": lambda x, shape: x.reshape([int(n) for n in shape]),
    "transpose": lambda x, perm: np.transpose(x, [int(n) for n in perm]),
    "expand_dims": lambda x, axes: np.expand_dims(x, tuple(int(a) for a in axes)),
    "squeeze": lambda x, axes=None: np.squeeze(x, None if axes is None else tuple(int(a) for a in axes)),
    "tile": lambda x, reps: np.tile(x, [int(n) for n in reps]),
    "identity": lambda x: x,
    "cast": _cast,
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "maximum": _binary(np.maximum),
    "minimum": _binary(np.minimum),
    "pow": _binary(np.power),
    "abs": lambda x: np.abs(x),
    "square": lambda x: x * x,
    "sqrt": lambda x: np.sqrt(x),
    "rsqrt": lambda x, epsilon=1e-12: 1 / np.sqrt(x + np.float32(epsilon)),
    "inverse": lambda x, epsilon=1e-4: 1 / (x + np.float32(epsilon)),
    "exp": lambda x: np.exp(x),
    "tanh": lambda x: np.tanh(x),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": _silu,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": _gelu,
    "reduce_max": _reduce(np.max),
    "reduce_min": _reduce(np.min),
    "reduce_sum": _reduce(np.sum),
    "reduce_mean": _reduce(np.mean),
    "reduce_sum_square": _reduce(lambda x, **kwargs: np.sum(x * x, **kwargs)),
    "greater": _binary(np.greater),
    "greater_equal": _binary(np.greater_equal),
    "less": _binary(np.less),
    "less_equal": _binary(np.less_equal),
    "equal": _binary(np.equal),
    "logical_or": _binary(np.logical_or),
    "logical_and": _binary(np.logical_and),
    "logical_not": lambda x: np.logical_not(x),
    "select": lambda cond, a, b: np.where(cond, a, b),
    "shape": lambda x: np.array(x.shape, np.int32),
}


def _real_div(x: Array, y: Array) -> Array:
    if not np.issubdtype(np.asarray(x).dtype, np.floating):
        return infer("real_div", x=x, y=y)
    with np.errstate(divide="ignore", invalid="ignore"):
        return x / y


OPERATORS["real_div"] = _real_div

VIEWS = frozenset({"reshape", "transpose", "expand_dims", "squeeze", "identity"})
"""Ops whose result may be their input's own memory."""
MOVES = VIEWS | {
    "gather",
    "slice_by_index",
    "slice_by_size",
    "slice_update",
    "concat",
    "tile",
    "read_state",
    "shape",
}
"""Ops that only move numbers: their results need no rounding."""


def knows(op_type: str) -> bool:
    """Whether an op can be evaluated: here, or by coremltools' value inference."""
    return op_type in OPERATORS or _infers(op_type)


def _infers(op_type: str) -> bool:
    registry = require("coremltools.converters.mil.mil.ops.registry", "coreml").SSAOpRegistry
    operation = require("coremltools.converters.mil.mil", "coreml").Operation
    versions = registry.core_ops.get(op_type, {})
    return any(cls.value_inference is not operation.value_inference for cls in versions.values())


def infer(op_type: str, **inputs: Any) -> Any:
    """The result of an op by coremltools' own value inference, which it runs on ops whose inputs are all constant.

    Raises `PitDeployError` where coremltools has none for these inputs.
    """
    mil = require("coremltools.converters.mil.mil", "coreml")
    target = require("coremltools", "coreml").target.iOS18
    with mil.Function({}, opset_version=target):
        results = getattr(mil.Builder, op_type)(**inputs)
    results = results if isinstance(results, (list, tuple)) else [results]
    values = [result.val for result in results]
    if any(value is None for value in values):
        raise PitDeployError(f"coremltools has no value inference of the op {op_type} for these inputs.")
    arrays = [np.asarray(value) for value in values]
    return arrays[0] if len(arrays) == 1 else arrays
