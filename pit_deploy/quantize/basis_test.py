from typing import Any

import numpy as np
import pytest

from pit_deploy.errors import InputError
from pit_deploy.quantize import Basis, apply_basis, quantization_basis, token_second_moment
from pit_deploy.quantize.basis import RIDGE, noise_factor, random_rotation


def problem(
    size: int = 24, vocabulary: int = 400, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """A table with orthonormal columns, two general maps, and states [samples, size] of uneven spread."""
    rng = np.random.default_rng(seed)
    table = np.linalg.qr(rng.standard_normal((vocabulary, size)))[0]
    head_map = rng.standard_normal((size, size)) @ np.diag(np.logspace(-1, 1, size))
    embedding_map = rng.standard_normal((size, size)) @ np.diag(np.logspace(1, -1, size))
    states = rng.standard_normal((500, size)) @ rng.standard_normal((size, size))
    return table, head_map, embedding_map, states


def moment_of(states: np.ndarray) -> np.ndarray:
    return states.T @ states / len(states)


def nuclear(matrix: np.ndarray) -> float:
    return float(np.linalg.norm(matrix, "nuc"))


def noise(matrix: np.ndarray, *factors: np.ndarray) -> float:
    """‖A‖² Σ ‖A⁻¹ F‖², straight from the definition."""
    inverse = np.linalg.inv(matrix)
    return float(np.linalg.norm(matrix) ** 2 * np.linalg.norm(inverse @ np.hstack(factors)) ** 2)


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_head_alone_attains_the_nuclear_norm(seed: int | None) -> None:
    _, head_map, embedding_map, states = problem()
    basis = quantization_basis(
        head_map, embedding_map, moment_of(states), embedding_weight=0, rotation_seed=seed
    )
    factor = noise_factor(head_map, moment_of(states))
    assert noise(basis.matrix, factor) == pytest.approx(nuclear(factor) ** 2, rel=1e-9)


def test_embedding_alone_attains_the_nuclear_norm() -> None:
    _, head_map, embedding_map, states = problem()
    basis = quantization_basis(head_map, embedding_map, moment_of(states), head_weight=0)
    assert noise(basis.matrix, embedding_map) == pytest.approx(nuclear(embedding_map) ** 2, rel=1e-9)


@pytest.mark.parametrize(("head_weight", "embedding_weight"), [(1, 1), (1, 0.05), (0.2, 3)])
def test_no_perturbation_does_better(head_weight: float, embedding_weight: float) -> None:
    _, head_map, embedding_map, states = problem()
    basis = quantization_basis(
        head_map,
        embedding_map,
        moment_of(states),
        head_weight=head_weight,
        embedding_weight=embedding_weight,
    )
    head = noise_factor(head_map, moment_of(states))
    factors = (
        np.sqrt(head_weight) * head / nuclear(head),
        np.sqrt(embedding_weight) * embedding_map / nuclear(embedding_map),
    )
    best = noise(basis.matrix, *factors)
    assert best == pytest.approx(nuclear(np.hstack(factors)) ** 2, rel=1e-9)
    rng = np.random.default_rng(1)
    size = np.linalg.norm(basis.matrix) / len(head_map)
    for scale in (1e-4, 1e-2, 1):
        for _ in range(20):
            other = basis.matrix + scale * size * rng.standard_normal(basis.matrix.shape)
            assert noise(other, *factors) >= best * (1 - 1e-12)
    assert noise(np.eye(len(head_map)), *factors) > best


def weighted_rows(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Uneven weights that sum to 1, and the second moment of the rows under them."""
    weights = np.random.default_rng(3).exponential(size=len(table)) ** 4
    weights /= weights.sum()
    return weights, sum(weight * np.outer(row, row) for weight, row in zip(weights, table, strict=True))


def test_token_second_moment_by_hand() -> None:
    table = problem()[0]
    weights, expected = weighted_rows(table)
    np.testing.assert_allclose(token_second_moment(table, 7 * weights, uniform_share=0), expected, atol=1e-15)
    even = token_second_moment(table, weights, uniform_share=1)
    np.testing.assert_allclose(even, np.eye(24) / len(table), atol=1e-15)  # columns are orthonormal
    half = token_second_moment(table, weights, uniform_share=0.5)
    np.testing.assert_allclose(half, (expected + even) / 2, atol=1e-15)


def test_row_weights_minimise_the_weighted_noise() -> None:
    table, head_map, embedding_map, states = problem()
    weights, rows = weighted_rows(table)
    factor = noise_factor(head_map, moment_of(states))

    def weighted_noise(matrix: np.ndarray) -> float:
        """The noise of each row goes with its own norm, and counts by its weight."""
        norms = np.linalg.norm(table @ matrix, axis=1) ** 2
        return float(weights @ norms * np.linalg.norm(np.linalg.inv(matrix) @ factor) ** 2)

    basis = quantization_basis(
        head_map, embedding_map, moment_of(states), embedding_weight=0, row_second_moment=rows
    )
    best = weighted_noise(basis.matrix)
    values, vectors = np.linalg.eigh(rows)
    assert best == pytest.approx(nuclear((vectors * np.sqrt(values)) @ vectors.T @ factor) ** 2, rel=1e-9)
    np.testing.assert_allclose(basis.matrix @ basis.inverse, np.eye(24), atol=1e-10)
    plain = quantization_basis(head_map, embedding_map, moment_of(states), embedding_weight=0)
    assert weighted_noise(plain.matrix) > best
    rng = np.random.default_rng(1)
    for scale in (1e-4, 1e-2, 1):
        for _ in range(20):
            other = basis.matrix + scale * basis.matrix.std() * rng.standard_normal(basis.matrix.shape)
            assert weighted_noise(other) >= best * (1 - 1e-12)


def test_even_rows_change_nothing() -> None:
    table, head_map, embedding_map, states = problem()
    even = token_second_moment(table, np.ones(len(table)))
    with_rows = quantization_basis(head_map, embedding_map, moment_of(states), row_second_moment=even)
    without = quantization_basis(head_map, embedding_map, moment_of(states))
    np.testing.assert_allclose(with_rows.matrix, without.matrix, atol=1e-9)


@pytest.mark.parametrize(
    ("probabilities", "share", "match"),
    [
        (np.ones(3), 0.5, r"probabilities is \[3\], but table is \[400, 24\]"),
        (np.ones(400), 1.5, "uniform_share is 1.5"),
        (-np.ones(400), 0.5, "not negative"),
        (np.full(400, np.nan), 0.5, "finite"),
        (np.zeros(400), 0.5, "not all zero"),
    ],
)
def test_bad_probabilities_are_refused(probabilities: np.ndarray, share: float, match: str) -> None:
    with pytest.raises(InputError, match=match):
        token_second_moment(problem()[0], probabilities, uniform_share=share)


def test_a_singular_row_moment_is_refused() -> None:
    table, head_map, embedding_map, states = problem()
    one_token = np.eye(1, len(table))[0]
    rows = token_second_moment(table, one_token, uniform_share=0)
    with pytest.raises(InputError, match="larger uniform_share"):
        quantization_basis(head_map, embedding_map, moment_of(states), row_second_moment=rows)


def test_the_scale_of_states_and_maps_does_not_matter() -> None:
    _, head_map, embedding_map, states = problem()
    one = quantization_basis(head_map, embedding_map, moment_of(states))
    other = quantization_basis(30 * head_map, embedding_map / 7, 100 * moment_of(states))
    np.testing.assert_allclose(one.matrix, other.matrix, atol=1e-9)


def test_factor_is_the_second_moment_with_the_ridge() -> None:
    _, head_map, _, states = problem()
    moment = moment_of(states)
    factor = noise_factor(head_map, moment)
    ridge = RIDGE * np.diag(moment).mean() * np.eye(len(moment))
    np.testing.assert_allclose(
        factor @ factor.T, head_map @ (moment + ridge) @ head_map.T, rtol=1e-8, atol=1e-8
    )


def test_inverse_and_rotation() -> None:
    _, head_map, embedding_map, states = problem()
    basis = quantization_basis(head_map, embedding_map, moment_of(states))
    np.testing.assert_allclose(basis.matrix @ basis.inverse, np.eye(24), atol=1e-10)
    plain = quantization_basis(head_map, embedding_map, moment_of(states), rotation_seed=None)
    np.testing.assert_allclose(plain.matrix, plain.matrix.T, atol=1e-12)
    np.testing.assert_allclose(plain.matrix @ random_rotation(24, 0), basis.matrix, atol=1e-12)
    rotation = random_rotation(24, 5)
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(24), atol=1e-12)
    np.testing.assert_array_equal(rotation, random_rotation(24, 5))


def test_another_basis_is_the_same_model() -> None:
    table, head_map, embedding_map, states = problem()
    basis = quantization_basis(head_map, embedding_map, moment_of(states))
    logits = states @ head_map.T @ table.T
    new_table, new_head, new_embedding = (
        table @ basis.matrix,
        basis.inverse @ head_map,
        basis.inverse @ embedding_map,
    )
    np.testing.assert_allclose(states @ new_head.T @ new_table.T, logits, atol=1e-10 * np.abs(logits).max())
    np.testing.assert_allclose(new_table @ new_embedding, table @ embedding_map, atol=1e-10)

    applied = apply_basis(table, head_map, embedding_map, basis)
    for got, exact in zip(applied, (new_table, new_head, new_embedding), strict=True):
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, exact.astype(np.float32))


def test_apply_basis_over_several_chunks() -> None:
    rng = np.random.default_rng(2)
    table = rng.standard_normal((60_000, 8)).astype(np.float32)
    matrix = rng.standard_normal((8, 8))
    applied, _, _ = apply_basis(table, np.eye(8), np.eye(8), Basis(matrix, np.linalg.inv(matrix)))
    np.testing.assert_allclose(applied, table.astype(np.float64) @ matrix, rtol=1e-6, atol=1e-6)


def test_rank_deficient_moment_is_carried_by_the_ridge() -> None:
    _, head_map, embedding_map, states = problem()
    basis = quantization_basis(head_map, embedding_map, moment_of(states[:3]), embedding_weight=0)
    assert np.isfinite(basis.inverse).all()
    np.testing.assert_allclose(basis.matrix @ basis.inverse, np.eye(24), atol=1e-8)


def replaced(array: np.ndarray, value: float) -> np.ndarray:
    array = array.copy()
    array[1, 2] = value
    return array


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda h, e, m: (h, e, replaced(m, np.nan)), "state_second_moment holds 1 numbers"),
        (lambda h, e, m: (replaced(h, np.inf), e, m), "head_map holds 1 numbers"),
        (lambda h, e, m: (h[:, :-1], e, m), r"head_map is \[24, 23\]; it must be \[24, 24\]"),
        (lambda h, e, m: (h, e[:-1], m), r"embedding_map is \[23, 24\]"),
        (lambda h, e, m: (h, e, m[0]), r"state_second_moment is \[24\]"),
        (lambda h, e, m: (h, e, -m), "is not a second moment"),
        (lambda h, e, m: (h, e, 0 * m), "is not a second moment"),
        (lambda h, e, m: (0 * h, e, m), "all zero"),
        (lambda h, e, m: (np.diag([1.0] * 3 + [0] * 21), np.diag([0.0] * 4 + [1] * 20), m), "singular"),
    ],
)
def test_bad_input_is_refused(change: Any, match: str) -> None:
    _, head_map, embedding_map, states = problem()
    with pytest.raises(InputError, match=match):
        quantization_basis(*change(head_map, embedding_map, moment_of(states)))


@pytest.mark.parametrize("weights", [(0, 0), (-1, 1), (1, -1), (float("nan"), 1)])
def test_bad_weights_are_refused(weights: tuple[float, float]) -> None:
    _, head_map, embedding_map, states = problem()
    with pytest.raises(InputError, match="head_weight"):
        quantization_basis(
            head_map,
            embedding_map,
            moment_of(states),
            head_weight=weights[0],
            embedding_weight=weights[1],
        )


def test_apply_basis_refuses_another_width() -> None:
    with pytest.raises(InputError, match=r"table is \[5, 3\]"):
        apply_basis(np.zeros((5, 3)), np.eye(4), np.eye(4), Basis(np.eye(4), np.eye(4)))


def test_a_sorted_basis_puts_the_best_approximation_in_front() -> None:
    """The leading columns are the best of their rank for logits over states and rows; the model stays the same."""
    table, head_map, embedding_map, states = problem()
    columns, moment = 8, moment_of(states)
    rows = token_second_moment(table, np.arange(len(table)))  # weights the noise and not the order
    basis = quantization_basis(head_map, embedding_map, moment, row_second_moment=rows, leading=columns)
    np.testing.assert_allclose(basis.matrix @ basis.inverse, np.eye(len(head_map)), atol=1e-9)
    ridge = 1e-3 * np.trace(moment) / len(moment)
    root = np.linalg.cholesky(moment + ridge * np.eye(len(moment)))
    logits = table @ head_map @ root  # [vocabulary, size]: their squares are summed over rows and states
    estimate = (table @ basis.matrix)[:, :columns] @ (basis.inverse @ head_map)[:columns] @ root
    singular = np.linalg.svd(logits, compute_uv=False)
    assert np.linalg.norm(logits - estimate) ** 2 == pytest.approx((singular[columns:] ** 2).sum(), rel=1e-6)


def test_rotations_of_a_sorted_basis_stay_within_its_blocks() -> None:
    _, head_map, embedding_map, states = problem()
    spans = []
    for seed in (0, 1, None):
        basis = quantization_basis(head_map, embedding_map, moment_of(states), leading=8, rotation_seed=seed)
        spans.append(basis.matrix[:, :8] @ np.linalg.pinv(basis.matrix[:, :8]))
    np.testing.assert_allclose(spans[0], spans[1], atol=1e-9)
    np.testing.assert_allclose(spans[0], spans[2], atol=1e-9)


@pytest.mark.parametrize("leading", [0, 24, -1])
def test_a_sorted_block_of_all_or_no_columns_is_refused(leading: int) -> None:
    _, head_map, embedding_map, states = problem()
    with pytest.raises(InputError, match=f"leading is {leading}"):
        quantization_basis(head_map, embedding_map, moment_of(states), leading=leading)
