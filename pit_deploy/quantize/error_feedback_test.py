import dataclasses

import numpy as np
import pytest

from pit_deploy.errors import InputError
from pit_deploy.quantize import QuantizationOptions, QuantizedTensor, round_to_nearest
from pit_deploy.quantize.error_feedback import FeedbackOptions, quantize_with_feedback
from pit_deploy.quantize.scale_search import round_with_search

torch = pytest.importorskip("torch")

# bits, block size, symmetric
SETTINGS = [
    (4, 32, True),
    (4, 32, False),
    (4, 64, False),
    (4, 128, True),
    (4, None, False),
    (8, 32, True),
    (8, 32, False),
]


def problem(rows: int = 24, columns: int = 160, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A weight and the second moment of strongly correlated, uneven inputs."""
    rng = np.random.default_rng(seed)
    inputs = rng.standard_normal((500, 40)) @ rng.standard_normal((40, columns))
    inputs = (inputs + rng.standard_normal((500, columns))) * np.exp(rng.standard_normal(columns) / 2)
    return rng.standard_normal((rows, columns)).astype(np.float32), inputs.T @ inputs


def output_error(weight: np.ndarray, tensor: QuantizedTensor, hessian: np.ndarray) -> float:
    difference = weight - tensor.dequantize(np.float64)
    return float(np.einsum("rc,cd,rd->", difference, hessian, difference))


@pytest.mark.parametrize(("bits", "block", "symmetric"), SETTINGS)
def test_beats_rounding_on_correlated_inputs(bits: int, block: int | None, symmetric: bool) -> None:
    weight, hessian = problem()
    options = QuantizationOptions(bits, block, symmetric)
    plain = output_error(weight, round_to_nearest(weight, options), hessian)
    searched = output_error(weight, round_with_search(weight, hessian.diagonal(), options), hessian)
    once = output_error(
        weight, quantize_with_feedback(weight, hessian, options, FeedbackOptions(revisions=0)), hessian
    )
    full = quantize_with_feedback(weight, hessian, options)
    assert full.zero_points is None if symmetric else full.zero_points is not None
    assert searched < plain
    assert once < 0.5 * plain
    assert output_error(weight, full, hessian) < once


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_last_column_gets_the_best_code_there_is(symmetric: bool) -> None:
    weight, hessian = problem(6, 32)
    feedback = FeedbackOptions(ordering=False, revisions=0)
    tensor = quantize_with_feedback(weight, hessian, QuantizationOptions(4, 32, symmetric), feedback)
    damped = hessian + feedback.damping * np.trace(hessian) / 32 * np.eye(32)
    for row in range(6):
        errors = []
        for code in range(16):
            codes = tensor.codes.copy()
            codes[row, 31] = code
            other = dataclasses.replace(tensor, codes=codes)
            errors.append(output_error(weight[row : row + 1], other.rows(slice(row, row + 1)), damped))
        assert int(np.argmin(errors)) == tensor.codes[row, 31]


def test_independent_inputs_leave_nothing_to_feed_back() -> None:
    weight, _ = problem(8, 64)
    options = QuantizationOptions(4, 32)
    tensor = quantize_with_feedback(weight, np.eye(64), options, FeedbackOptions(revisions=0))
    searched = round_with_search(weight, np.ones(64), options)
    np.testing.assert_array_equal(tensor.codes, searched.codes)
    np.testing.assert_allclose(tensor.scales, searched.scales, rtol=1e-6)


def test_same_bytes_each_time_and_for_any_multiple_of_the_moment() -> None:
    weight, hessian = problem()
    options = QuantizationOptions(4, 32, False)
    first = quantize_with_feedback(weight, hessian, options)
    for other in (hessian, 4 * hessian):
        again = quantize_with_feedback(weight, other, options)
        assert again.codes.tobytes() == first.codes.tobytes()
        assert again.scales.tobytes() == first.scales.tobytes()


@pytest.mark.parametrize("symmetric", [True, False])
def test_columns_without_input_and_zero_weights(symmetric: bool) -> None:
    weight, hessian = problem(5, 100)
    hessian[:, 40:72] = 0
    hessian[40:72] = 0
    weight[2] = 0
    tensor = quantize_with_feedback(weight, hessian, QuantizationOptions(4, 32, symmetric))
    assert not tensor.dequantize()[2].any()
    assert np.abs(tensor.dequantize()[:, 40:64] - weight[:, 40:64]).max() < 0.5
    nothing = quantize_with_feedback(weight, np.zeros((100, 100)), QuantizationOptions(4, 32, symmetric))
    assert nothing.error_against(weight).relative_rms < 0.12


def test_positive_scales_are_kept() -> None:
    weight, hessian = problem()
    tensor = quantize_with_feedback(weight, hessian, QuantizationOptions(4, 32, positive_scales=True))
    assert (tensor.scales > 0).all()


def test_what_does_not_fit_is_refused() -> None:
    weight, hessian = problem(3, 32)
    options = QuantizationOptions(4)
    with pytest.raises(InputError, match=r"hessian is \[32, 32\].*\[31, 31\]"):
        quantize_with_feedback(weight[:, :31], hessian, options)
    hessian[3, 4] = np.nan
    with pytest.raises(InputError, match=r"hessian holds 1"):
        quantize_with_feedback(weight, hessian, options)
    with pytest.raises(InputError, match="damping is 0"):
        FeedbackOptions(damping=0)
    with pytest.raises(InputError, match="revisions is -1"):
        FeedbackOptions(revisions=-1)
    with pytest.raises(InputError, match="importance"):
        round_with_search(weight, np.ones(3), options)
