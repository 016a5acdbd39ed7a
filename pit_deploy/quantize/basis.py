"""The basis in which a shared token table is quantised with least harm (derived in docs/quantization.md).

A folded model of layout `shared` has a table Z [V, d] with orthonormal columns, a head map and an embedding
map [d, d]: the logits of a normalised state n are `(n @ head_map.T) @ Z.T`, the embedding of a row z is
`z @ embedding_map`. For any invertible A the table `Z A` with the maps `A⁻¹ head_map` and `A⁻¹ embedding_map`
is the same model. Rounding the table isn't the same in every A.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pit_deploy.errors import InputError
from pit_deploy.quantize.tensor import row_chunks

RIDGE = 1e-3
"""What is added to the diagonal of the states' second moment, relative to its mean: directions that the
calibration text never shows must keep some weight."""

UNIFORM_SHARE = 0.25
"""The default share of the row weights that is spread evenly over the vocabulary, chosen by measurement
(docs/quantization.md)."""


@dataclass(frozen=True, eq=False)
class Basis:
    """A change of basis of the shared table: `matrix` A and its `inverse`, float64 [d, d]."""

    matrix: np.ndarray
    inverse: np.ndarray


def quantization_basis(
    head_map: np.ndarray,
    embedding_map: np.ndarray,
    state_second_moment: np.ndarray,
    *,
    head_weight: float = 1.0,
    embedding_weight: float = 0.3,
    rotation_seed: int | None = 0,
    row_second_moment: np.ndarray | None = None,
    leading: int | None = None,
) -> Basis:
    """The basis that minimises the expected noise of head and embedding under blockwise rounding.

    `state_second_moment` is E[nᵀ n] over a calibration text, n the normalised state that `head_map` takes.
    With `C = head_map H^(1/2)` (H is the moment with a ridge of 1e-3 of its mean diagonal) and
    `D = embedding_map`,

        A = (head_weight C Cᵀ / ‖C‖_*² + embedding_weight D Dᵀ / ‖D‖_*²)^(1/4) R

    up to a scalar that no rounding with scales sees; ‖·‖_* is the nuclear norm, so that a weight of 1 counts
    each noise relative to the least that a table of its own could have. R is a random rotation from
    `rotation_seed`; None leaves it out.

    `row_second_moment` is G = E[zᵀ z] over the table's rows by how much they matter, as `token_second_moment`
    gives it; None counts all rows alike (G is then a multiple of the identity). With it C and D become
    G^(1/2) C and G^(1/2) D above, and A is multiplied by G^(-1/2) from the left.

    `leading` sorts the basis in two: of all bases, the first so many columns then carry the most of the logits, all
    rows counted alike, and the noise is least among the bases that do so. (The blocks span the first eigenvectors of
    C Cᵀ and the others, and each has the form above within its space.)

    Raises `InputError` for wrong shapes, numbers that are not finite, a
    moment that is not positive semidefinite, negative weights, or maps so singular that A has no inverse.
    """
    size = head_map.shape[0]
    for name, array in (
        ("head_map", head_map),
        ("embedding_map", embedding_map),
        ("state_second_moment", state_second_moment),
    ):
        _require_square(array, name, size)
    if not (min(head_weight, embedding_weight) >= 0 and 0 < head_weight + embedding_weight < np.inf):
        raise InputError(
            f"head_weight {head_weight} and embedding_weight {embedding_weight} must be finite, not negative "
            f"and not both zero."
        )
    if leading is not None and not 0 < leading < size:
        raise InputError(
            f"leading is {leading}; a table of {size} columns has 1 to {size - 1} of them in front."
        )
    rows_root, _ = row_roots(row_second_moment, size)
    head = noise_factor(head_map, state_second_moment)
    factors = [
        (weight / _nuclear_norm(rows_root @ factor) ** 2, factor)
        for weight, factor in ((head_weight, head), (embedding_weight, embedding_map.astype(np.float64)))
        if weight > 0
    ]
    matrices, inverses = [], []
    for number, space in enumerate(_spaces(head, leading)):
        moment = None if row_second_moment is None else space.T @ row_second_moment @ space
        root, inverse_root = row_roots(moment, space.shape[1])
        target = np.zeros_like(root)
        for weight, factor in factors:
            part = root @ (space.T @ factor)
            target += weight * (part @ part.T)
        values, vectors = np.linalg.eigh(target)
        if not values[0] > np.finfo(np.float64).eps * size * values[-1]:
            raise InputError(
                f"The quantisation basis is singular: eigenvalues from {values[0]:.3g} to {values[-1]:.3g}; "
                f"head_map (with head_weight {head_weight}) and embedding_map (with embedding_weight "
                f"{embedding_weight}) leave directions of the table unused."
            )
        columns, seed = len(values), rotation_seed
        rotation = np.eye(columns) if seed is None else random_rotation(columns, seed + number)
        quarter = (values / values[-1]) ** 0.25
        matrices.append(space @ inverse_root @ (vectors * quarter) @ (vectors.T @ rotation))
        inverses.append((rotation.T @ vectors / quarter) @ vectors.T @ root @ space.T)
    return Basis(matrix=np.hstack(matrices), inverse=np.vstack(inverses))


def _spaces(head: np.ndarray, leading: int | None) -> list[np.ndarray]:
    """Orthonormal columns of the spaces that the blocks of the basis span."""
    if leading is None:
        return [np.eye(len(head))]
    vectors = importance(head)
    return [vectors[:, :leading], vectors[:, leading:]]


def importance(factor: np.ndarray) -> np.ndarray:
    """The eigenvectors of `factor factorᵀ` [d, d] as columns, by falling eigenvalue.

    With the head's factor C (see `quantization_basis`) the projection of a table with orthonormal columns onto the
    first r of them is what rank r can keep of the logits, over states and rows.
    """
    return np.linalg.eigh(factor @ factor.T)[1][:, ::-1]


def token_second_moment(
    table: np.ndarray, probabilities: np.ndarray, *, uniform_share: float = UNIFORM_SHARE
) -> np.ndarray:
    """The second moment of the rows of `table` [V, d] by how much they matter, float64 [d, d].

    `probabilities` [V] is the model's mean next-token distribution over a calibration text (it is normalised
    here). `uniform_share` of the weight is spread evenly over the vocabulary, so that tokens the text never
    calls for keep their precision. Raises `InputError` for another length, negative or not finite numbers, or
    a share outside 0 to 1.
    """
    weights = np.asarray(probabilities, dtype=np.float64)
    if table.ndim != 2 or weights.shape != table.shape[:1]:
        raise InputError(f"probabilities is {list(weights.shape)}, but table is {list(table.shape)}.")
    if not 0 <= uniform_share <= 1:
        raise InputError(f"uniform_share is {uniform_share}; it must be between 0 and 1.")
    if not (weights.min() >= 0 and 0 < weights.sum() < np.inf):
        raise InputError("probabilities must be finite, not negative and not all zero.")
    weights = (1 - uniform_share) * weights / weights.sum() + uniform_share / len(weights)
    moment = np.zeros((table.shape[1], table.shape[1]))
    for rows in row_chunks(*table.shape):
        part = table[rows].astype(np.float64)
        moment += (part * weights[rows, None]).T @ part
    return moment


def noise_factor(head_map: np.ndarray, state_second_moment: np.ndarray) -> np.ndarray:
    """`C = head_map H^(1/2)` with the ridge on H, float64 [d, d].

    Raises `InputError` where the moment has a clearly negative eigenvalue.
    """
    moment = np.asarray(state_second_moment, dtype=np.float64)
    moment = (moment + moment.T) / 2
    moment = moment + RIDGE * np.trace(moment) / len(moment) * np.eye(len(moment))
    values, vectors = np.linalg.eigh(moment)
    if values[0] < 0 or values[-1] <= 0:
        raise InputError(
            f"state_second_moment is not a second moment: its eigenvalues go from {values[0]:.3g} to "
            f"{values[-1]:.3g} with the ridge, and none may be negative."
        )
    return np.asarray(head_map, dtype=np.float64) @ ((vectors * np.sqrt(values)) @ vectors.T)


def random_rotation(size: int, seed: int) -> np.ndarray:
    """A random orthogonal matrix [size, size] from a seeded generator; uniform (Haar)."""
    gaussian = np.random.Generator(np.random.PCG64(seed)).standard_normal((size, size))
    q, r = np.linalg.qr(gaussian)
    return q * np.sign(np.diagonal(r))  # the signs make the distribution uniform


def apply_basis(
    table: np.ndarray, head_map: np.ndarray, embedding_map: np.ndarray, basis: Basis
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The table [V, d] and both maps [d, d] in another basis: the same model, as float32.

    The table is multiplied in float64, one chunk of rows at a time. Raises `InputError` where shapes do not
    fit.
    """
    size = basis.matrix.shape[0]
    if table.ndim != 2 or table.shape[1] != size:
        raise InputError(f"table is {list(table.shape)}, but the basis needs [vocabulary, {size}].")
    _require_square(head_map, "head_map", size)
    _require_square(embedding_map, "embedding_map", size)
    new_table = np.empty(table.shape, np.float32)
    for rows in row_chunks(*table.shape):
        new_table[rows] = table[rows].astype(np.float64) @ basis.matrix
    return (
        new_table,
        (basis.inverse @ head_map.astype(np.float64)).astype(np.float32),
        (basis.inverse @ embedding_map.astype(np.float64)).astype(np.float32),
    )


def row_roots(row_second_moment: np.ndarray | None, size: int) -> tuple[np.ndarray, np.ndarray]:
    """G^(1/2) and G^(-1/2), for G with mean eigenvalue 1: its scale has no part in the basis."""
    if row_second_moment is None:
        return np.eye(size), np.eye(size)
    _require_square(row_second_moment, "row_second_moment", size)
    values, vectors = np.linalg.eigh((row_second_moment + row_second_moment.T) / 2)
    if not values[0] > np.finfo(np.float64).eps * size * values[-1]:
        raise InputError(
            f"row_second_moment has eigenvalues from {values[0]:.3g} to {values[-1]:.3g}; all must be "
            f"positive. Give token_second_moment a larger uniform_share."
        )
    roots = np.sqrt(values / values.mean())
    return (vectors * roots) @ vectors.T, (vectors / roots) @ vectors.T


def _nuclear_norm(matrix: np.ndarray) -> float:
    norm = float(np.linalg.svd(matrix, compute_uv=False).sum())
    if norm == 0:
        raise InputError("A map of the shared table is all zero; this is no model.")
    return norm


def _require_square(array: np.ndarray, name: str, size: int) -> None:
    if array.shape != (size, size):
        raise InputError(f"{name} is {list(array.shape)}; it must be [{size}, {size}] like the other maps.")
    wrong = int(np.count_nonzero(~np.isfinite(array)))
    if wrong:
        raise InputError(f"{name} holds {wrong} numbers that are not finite; no basis follows from it.")
