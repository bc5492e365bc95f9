"""Elimination of sparse matrices against dense ones."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import linalg, sparse

from pymc_sgmcmc.elimination import Elimination, elements_of_factor, elimination_order


def crossed(rng, rows: int = 300, lengths: tuple[int, ...] = (60, 12, 3)) -> sparse.csr_array:
    """Precision of factors with a slope of the first, and two coordinates that all rows have."""
    numbers, total = [], 0
    for length in (*lengths[:1], *lengths):
        numbers.append(total + rng.integers(length, size=rows))
        total += length
    numbers[0] = numbers[1] - lengths[0]
    design = np.zeros((rows, total + 2))
    for number in numbers:
        design[np.arange(rows), number] = rng.normal(size=rows)
    design[:, total:] = rng.normal(size=(rows, 2))
    design[3:, -1] = 0
    return sparse.csr_array(design.T @ design + np.eye(total + 2))


def chains(rng, rows: int = 300) -> sparse.csr_array:
    """Precision of two factors, each level of which meets few of the other, in no order."""
    first = np.arange(rows) % 150
    second = 150 + (first + rng.integers(2, size=rows)) % 140
    design = np.zeros((rows, 290))
    design[np.arange(rows), first], design[np.arange(rows), second] = 1.0, rng.normal(size=rows)
    order = rng.permutation(290)
    return sparse.csr_array((design.T @ design + np.eye(290))[np.ix_(order, order)])


@pytest.mark.parametrize("kind", ["crossed", "unlabelled", "chains", "dense", "diagonal"])
def test_all_is_that_of_the_dense_matrix(rng, kind):
    columns = last = None
    if kind in ("crossed", "unlabelled"):
        matrix = crossed(rng)
        last = np.arange(137) >= 135
        if kind == "crossed":
            columns = np.repeat([0, 1, 2, 3, -1], [60, 60, 12, 3, 2])
    elif kind == "chains":
        matrix = chains(rng)
    else:
        matrix = sparse.csr_array(np.eye(30) + (kind == "dense"))
    order, dense = elimination_order(matrix, columns, last), matrix.toarray()
    assert sorted(order.places) == list(range(len(dense)))
    assert order.left <= {"crossed": 17, "chains": 40, "dense": 30, "diagonal": 6}.get(kind, 80)
    factors, inverse = Elimination(matrix, order), np.linalg.inv(dense)
    np.testing.assert_allclose(factors.log_determinant(), np.linalg.slogdet(dense)[1])
    vector = rng.normal(size=len(dense))
    np.testing.assert_allclose(factors.solve(vector), inverse @ vector, rtol=1e-9)
    rows, columns = np.nonzero(dense)
    found = factors.inverse_at(rows, columns)
    np.testing.assert_allclose(found, inverse[rows, columns], rtol=1e-8, atol=1e-11)
    root, inverse_root = factors.root.toarray(), factors.inverse_root
    np.testing.assert_allclose(root @ root.T, dense, atol=1e-9)
    np.testing.assert_allclose(inverse_root @ root, np.eye(len(dense)), atol=1e-9)
    assert kind == "unlabelled" or inverse_root.nnz <= 1.1 * elements_of_factor(matrix)


@pytest.mark.parametrize("stages", ["columns", "neighbours"])
def test_the_inverse_at_places_that_hold_zeros(rng, stages):
    """Places are those of the order, whatever cancels in a matrix."""
    places = crossed(rng)
    columns = np.repeat([0, 1, 2, 3, -1], [60, 60, 12, 3, 2]) if stages == "columns" else None
    order = elimination_order(places, columns)
    # Coefficients of a level that the others join.
    dense, level = places.toarray() + 20 * np.eye(137), np.arange(60)
    dense[level, 60 + level] = dense[60 + level, level] = 0
    rows, columns = places.nonzero()
    found = Elimination(sparse.csr_array(dense), order).inverse_at(rows, columns)
    np.testing.assert_allclose(found, np.linalg.inv(dense)[rows, columns], atol=1e-13)


def test_coordinates_at_the_end(rng):
    """Without them determinant and inverse are those of the others."""
    matrix, last = crossed(rng), np.arange(137) >= 135
    order = elimination_order(matrix, np.repeat([0, 1, 2, 3, -1], [60, 60, 12, 3, 2]), last)
    assert order.places[-2:].tolist() == [135, 136]
    factors = Elimination(matrix, order)
    dense = matrix.toarray()
    others = dense[:135, :135]
    np.testing.assert_allclose(factors.log_determinant(2), np.linalg.slogdet(others)[1])
    rows, columns = np.nonzero(dense)
    expected = np.zeros_like(dense)
    expected[:135, :135] = np.linalg.inv(others)
    found = factors.inverse_at(rows, columns, 2)
    np.testing.assert_allclose(found, expected[rows, columns], rtol=1e-8, atol=1e-11)
    root = factors.root_at_end(2)
    np.testing.assert_allclose(root @ root.T, np.linalg.inv(dense)[135:, 135:])


@pytest.mark.parametrize("place", [0, 136])
def test_matrices_that_are_not_positive_definite(rng, place):
    matrix = crossed(rng).tolil()
    matrix[place, place] = -1
    with pytest.raises(linalg.LinAlgError):
        Elimination(matrix.tocsr())
