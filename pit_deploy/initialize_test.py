from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg

from pit_deploy.errors import InputError
from pit_deploy.initialize import (
    multiply,
    orthonormality_error,
    polar,
    random_orthonormal,
    reorthonormalize,
    scratch_scale,
)


def _table(rng: np.random.Generator, rows: int, columns: int, condition: float) -> np.ndarray:
    """A table whose singular values go evenly from 1 to `condition` on a log scale."""
    left = np.linalg.qr(rng.standard_normal((rows, columns)))[0]
    right = np.linalg.qr(rng.standard_normal((columns, columns)))[0]
    return (left * np.logspace(0, np.log10(condition), columns)) @ right.T


@pytest.mark.parametrize(("rows", "columns"), [(31, 31), (263, 24), (20001, 7), (5, 1)])
@pytest.mark.parametrize("condition", [1.0, 90.0, 999.0, 1e5, 9e5])
def test_polar_equals_scipy(rng: np.random.Generator, rows: int, columns: int, condition: float) -> None:
    table = _table(rng, rows, columns, condition)
    found = polar(table, dtype=np.float64)
    memory, transform = scipy.linalg.polar(table)
    # The Gram matrix loses eps * cond²; past its limit the triangular factor loses eps * cond only.
    assert np.abs(found.memory - memory).max() < 1e-12 + 1e-15 * condition * min(condition, 1e3)
    assert np.abs(found.transform - transform).max() < 1e-10 * np.abs(transform).max()
    assert orthonormality_error(found.memory) < 1e-12 + 1e-15 * condition
    assert (
        np.abs(multiply(found.memory, found.transform, np.float64) - table).max() < 1e-9 * np.abs(table).max()
    )
    assert found.condition == pytest.approx(np.linalg.cond(table), rel=1e-6)


def test_float32_results(rng: np.random.Generator) -> None:
    for condition in (50.0, 1e5):
        found = polar(_table(rng, 500, 16, condition).astype(np.float32))
        assert found.memory.dtype == np.float32
        assert orthonormality_error(found.memory) < 1e-6


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (np.ones((3, 4)), r"3 rows and 4 columns.*vocab_size"),
        (np.zeros((9, 3)), r"zero everywhere"),
        (
            np.outer(np.arange(9.0), np.ones(3)),
            r"\[9, 3\] is rank deficient \(rank 1, singular values .* to 24.7\)",
        ),
        (np.eye(9, 3) * [1, 1, 3e-7], r"condition number 3.33e\+06, above the limit 1e\+06 .*3e-07 to 1\)"),
        (np.where(np.eye(20000, 3) > 0, np.nan, 1.0), r"3 values that are not finite, the first at \[0, 0\]"),
        (np.where(np.arange(60000).reshape(-1, 3) == 50000, np.inf, 1.0), r"1 values .* at \[16666, 2\]"),
    ],
)
def test_unusable_tables_are_refused_with_numbers(table: np.ndarray, message: str) -> None:
    with pytest.raises(InputError, match=message):
        polar(table)


def test_random_orthonormal() -> None:
    memory = random_orthonormal(4000, 32, seed=3)
    assert memory.dtype == np.float32
    assert orthonormality_error(memory) < 1e-6
    assert np.array_equal(memory, random_orthonormal(4000, 32, seed=3))
    assert not np.array_equal(memory, random_orthonormal(4000, 32, seed=4))
    norms = np.linalg.norm(memory, axis=1)
    assert np.sqrt((norms**2).mean()) == pytest.approx(np.sqrt(32 / 4000), rel=1e-5)
    with pytest.raises(InputError, match="3 rows and 4 columns"):
        random_orthonormal(3, 4)


def test_scratch_scale_gives_rows_of_norms_that_do_not_depend_on_the_size() -> None:
    for rows, columns in ((4096, 64), (2000, 128)):
        memory = random_orthonormal(rows, columns)
        scale, multiplier = scratch_scale(rows, columns)
        embedding, head = memory / scale * multiplier, memory * scale  # z T⁻¹ c and z T
        assert np.sqrt((embedding**2).sum(axis=1).mean()) == pytest.approx(4.0, rel=1e-5)
        assert np.sqrt((head**2).sum(axis=1).mean()) == pytest.approx(0.5, rel=1e-5)


def test_reorthonormalize_is_the_nearest(rng: np.random.Generator) -> None:
    memory = random_orthonormal(300, 9)
    drifted = memory + 1e-3 * rng.standard_normal(memory.shape).astype(np.float32)
    expected = scipy.linalg.polar(drifted.astype(np.float64))[0]
    assert np.abs(reorthonormalize(drifted) - expected).max() < 1e-6
