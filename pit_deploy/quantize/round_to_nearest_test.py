import tracemalloc
from typing import Any

import numpy as np
import pytest

from pit_deploy.errors import InputError
from pit_deploy.quantize import QuantizationOptions, round_to_nearest

OPTIONS = [
    QuantizationOptions(bits, block_size, symmetric, positive)
    for bits in (4, 8)
    for block_size in (16, 32, 128, None)
    for symmetric, positive in ((True, False), (True, True), (False, False))
]


def reference(weight: np.ndarray, options: QuantizationOptions) -> np.ndarray:
    """One block at a time in Python: the same rule, written without vectors."""
    rows, columns = weight.shape
    size = columns if options.block_size is None else options.block_size
    half, largest = 2 ** (options.bits - 1), 2**options.bits - 1
    out = np.empty((rows, columns), np.float32)
    for row in range(rows):
        for start in range(0, columns, size):
            block = weight[row, start : start + size].astype(np.float32)
            ends = np.append(block, np.float32(0)) if len(block) < size or not options.symmetric else block
            low, high, zero = ends.min(), ends.max(), np.float32(half)
            if not options.symmetric:
                scale = np.float32(high / np.float32(largest)) - np.float32(low / np.float32(largest))
                zero = np.float32(round(float(np.float32(-low / scale)))) if scale else np.float32(0)
            elif options.positive_scales:
                scale = max(high / np.float32(half - 1), low / np.float32(-half))
            else:
                scale = (high if high > -low else low) / np.float32(-half)
            scale = np.float32(scale) or np.float32(1)
            codes = [min(max(round(float(w / scale)) + int(zero), 0), largest) for w in block]
            out[row, start : start + size] = [np.float32((code - int(zero)) * scale) for code in codes]
    return out


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", [(5, 128), (1, 100), (3, 17), (2, 1)])
def test_equals_the_rule_block_by_block(shape: tuple[int, int], options: QuantizationOptions) -> None:
    weight = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    tensor = round_to_nearest(weight, options)
    np.testing.assert_array_equal(tensor.dequantize(), reference(weight, options))
    assert (tensor.zero_points is None) == options.symmetric
    if options.positive_scales or not options.symmetric:
        assert tensor.scales.min() > 0


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_no_weight_is_off_by_more_than_a_step(options: QuantizationOptions) -> None:
    weight = np.random.default_rng(3).standard_normal((6, 256)) * np.logspace(-20, 20, 6)[:, None]
    tensor = round_to_nearest(weight, options)
    step = np.repeat(np.abs(tensor.scales), tensor.block_size, axis=1)
    # half a step, or a full one where the side opposite to the extreme has no code left
    assert np.all(np.abs(tensor.dequantize(np.float64) - weight) <= step * 1.001)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("extreme", [-3.0, 3.0])
def test_signed_extreme_is_exact_and_has_code_zero(bits: int, extreme: float) -> None:
    weight = np.random.default_rng(4).uniform(-1, 1, (4, 32)).astype(np.float32)
    weight[:, 7] = extreme
    tensor = round_to_nearest(weight, QuantizationOptions(bits))
    assert np.all(tensor.codes[:, 7] == 0)
    assert np.all(tensor.dequantize()[:, 7] == extreme)
    assert np.all(np.sign(tensor.scales) == -np.sign(extreme))


def test_halves_go_to_the_even_code() -> None:
    weight = np.array([[-8.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 6.5] + [0.0] * 8])
    tensor = round_to_nearest(weight, QuantizationOptions(4, 16))
    assert tensor.dequantize()[0, :8].tolist() == [-8, 0, 2, 2, 0, -2, -2, 6]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_zero_and_denormal_blocks_become_zeros_with_a_usable_scale(options: QuantizationOptions) -> None:
    weight = np.zeros((3, 64), np.float32)
    weight[1] = 1e-44
    weight[2, :16] = 1
    tensor = round_to_nearest(weight, options)
    np.testing.assert_array_equal(tensor.dequantize()[:2], 0)
    np.testing.assert_array_equal(tensor.dequantize()[2, 16:], 0)
    np.testing.assert_allclose(tensor.dequantize()[2, :16], 1, rtol=1e-6)
    assert np.all(np.abs(tensor.scales) >= np.finfo(np.float32).tiny)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_huge_outliers_stay_finite(options: QuantizationOptions) -> None:
    weight = np.full((2, 64), 1e-3, np.float32)
    weight[0, 5], weight[0, 6] = 3e38, -3e38
    weight[1, 60] = -1e30
    values = round_to_nearest(weight, options).dequantize(np.float64)
    assert np.all(np.isfinite(values))
    assert values[0, 5] == pytest.approx(3e38, rel=0.15)
    assert values[0, 6] == pytest.approx(-3e38, rel=0.15)
    assert values[1, 60] == pytest.approx(-1e30, rel=1e-6)


def test_asymmetric_range_holds_zero_exactly() -> None:
    weight = np.random.default_rng(5).uniform(2, 3, (4, 32)).astype(np.float32)
    weight[2:] *= -1
    tensor = round_to_nearest(weight, QuantizationOptions(4, symmetric=False))
    assert tensor.zero_points is not None
    assert tensor.zero_points.tolist() == [[0], [0], [15], [15]]
    assert np.abs(tensor.dequantize() - weight).max() <= 0.5 * 3 / 15 + 1e-6


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_float_types(dtype: type) -> None:
    weight: np.ndarray = np.random.default_rng(6).standard_normal((3, 40)).astype(dtype)
    tensor = round_to_nearest(weight, QuantizationOptions(8))
    np.testing.assert_array_equal(
        tensor.dequantize(), round_to_nearest(weight.astype(np.float32), QuantizationOptions(8)).dequantize()
    )


def test_not_finite_weights_are_counted_and_located() -> None:
    weight = np.zeros((9000, 64))
    weight[8000, 3], weight[8500, 0], weight[8500, 1] = np.nan, np.inf, 1e300
    with pytest.raises(
        InputError, match=r"weight holds 3 numbers that are not finite, the first at \[8000, 3\]"
    ):
        round_to_nearest(weight, QuantizationOptions(4))


@pytest.mark.parametrize("weight", [np.zeros(8), np.zeros((2, 0)), np.zeros((2, 16), np.int32)])
def test_other_ranks_and_types_are_refused(weight: np.ndarray) -> None:
    with pytest.raises(InputError, match="quantisation needs"):
        round_to_nearest(weight, QuantizationOptions(4))


def test_no_rows() -> None:
    tensor = round_to_nearest(np.zeros((0, 64), np.float32), QuantizationOptions(4))
    assert tensor.shape == (0, 64) and tensor.dequantize().shape == (0, 64)


def test_memory_stays_bounded_and_the_result_repeats() -> None:
    weight = np.random.default_rng(7).standard_normal((12288, 576), dtype=np.float32)  # 28 MB
    options = QuantizationOptions(4, symmetric=False)
    tracemalloc.start()
    first = round_to_nearest(weight, options)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert first.zero_points is not None
    output = first.codes.nbytes + first.scales.nbytes + first.zero_points.nbytes
    assert peak - output < 8e6
    second = round_to_nearest(weight, options)
    np.testing.assert_array_equal(first.codes, second.codes)
    np.testing.assert_array_equal(first.scales, second.scales)


def test_chunks_do_not_change_the_result() -> None:
    weight = np.random.default_rng(8).standard_normal((3000, 300)).astype(np.float32)
    options = QuantizationOptions(4)
    whole = round_to_nearest(weight, options)
    parts = [round_to_nearest(weight[start : start + 7], options) for start in range(0, 3000, 7)]
    np.testing.assert_array_equal(whole.codes, np.concatenate([part.codes for part in parts]))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"bits": 5}, "bits is 5"),
        ({"bits": 4, "block_size": 48}, "block_size is 48"),
        ({"bits": 4, "block_size": 8}, "block_size is 8"),
        ({"bits": 4, "block_size": 0}, "block_size is 0"),
        ({"bits": 4, "symmetric": False, "positive_scales": True}, "positive_scales=True .* symmetric=False"),
    ],
)
def test_illegal_options_are_refused(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        QuantizationOptions(**arguments)
