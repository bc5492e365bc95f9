"""Matrices of all kinds, and whether one is singular, however a factorisation rounds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from scipy import linalg, sparse

from pymc_sgmcmc.elimination import elements_of_factor
from pymc_sgmcmc.matrices import (
    SINGULAR,
    Dense,
    Diagonal,
    LowRank,
    as_matrix,
    covariance_root,
    dependent_coordinates,
    extreme_eigenvalues,
    factored,
    matrix_root,
)

D = 6


def matrix_of(kind):
    """A symmetric positive definite matrix of some kind."""
    rng = np.random.default_rng(3)
    scale, vectors = rng.uniform(0.5, 2, size=D), np.linalg.qr(rng.normal(size=(D, 2)))[0]
    if kind == "low rank":
        return LowRank(scale, vectors, np.array([3.0, -0.6]), scale)
    if kind == "factored":
        return factored(sparse.csr_array(nested_matrix(rng, levels=4, groups=2)))
    return as_matrix(
        {"scalar": 0.7, "diagonal": scale, "dense": np.cov(rng.normal(size=(D, 20)))}[kind]
    )


KINDS = ("scalar", "diagonal", "dense", "low rank", "factored")


def nested_matrix(rng, levels, groups):
    """Precision of levels that each belong to a group, in no order, as a dense array."""
    d = levels + groups
    matrix = np.diag(rng.uniform(1, 2, size=d))
    for level in range(levels):
        group = levels + level % groups
        matrix[level, group] = matrix[group, level] = rng.normal()
        matrix[group, group] += matrix[level, group] ** 2
    order = rng.permutation(d)
    return matrix[np.ix_(order, order)]


@pytest.fixture(params=KINDS)
def matrix(request):
    return matrix_of(request.param)


def test_operations_are_those_of_the_dense_matrix(matrix, rng):
    vector, rows, full = rng.normal(size=D), rng.normal(size=(4, D)), matrix.dense(D)
    np.testing.assert_allclose(full, full.T)
    root, inverse = matrix.root, matrix.inverse
    np.testing.assert_allclose(root.dense(D) @ root.dense(D).T, full)
    np.testing.assert_allclose(inverse.dense(D), np.linalg.inv(full))
    np.testing.assert_allclose(np.broadcast_to(matrix.diagonal(), D), np.diag(full))
    for factor in (matrix, root, root.T, inverse):
        np.testing.assert_allclose(factor @ vector, factor.dense(D) @ vector)
        np.testing.assert_allclose(rows @ factor, rows @ factor.dense(D))
        np.testing.assert_allclose(factor.each(rows), rows @ factor.dense(D).T)
        assert type(factor) in (type(matrix), type(root))


@pytest.mark.parametrize("kind", KINDS)
def test_congruence(matrix, kind):
    root = matrix_of(kind).root.T  # not symmetric where it need not be
    expected = root.dense(D).T @ matrix.dense(D) @ root.dense(D)
    found = matrix.congruence(root)
    np.testing.assert_allclose(found.dense(D), expected, atol=1e-14)
    assert isinstance(found, Diagonal) == (
        isinstance(matrix, Diagonal) and isinstance(root, Diagonal)
    )
    values = np.linalg.eigvalsh(expected)
    assert found.eigenvalues().max() == pytest.approx(values[-1])
    assert extreme_eigenvalues(matrix, root, D) == pytest.approx(values[[0, -1]], rel=1e-3)


@pytest.mark.parametrize("root", [False, True])
def test_symbolic_products(matrix, root, rng):
    matrix = matrix.root if root else matrix
    symbolic = matrix.map(pytensor.shared)
    x, rows = pt.vector("x", dtype="float64"), pt.matrix("rows", dtype="float64")
    products = [symbolic @ x, symbolic.each(rows), symbolic.T @ x, symbolic.each(x[None])]
    vector, many, full = rng.normal(size=D), rng.normal(size=(3, D)), matrix.dense(D)
    product, of_each, of_transposed, of_one = pytensor.function(
        [x, rows], products, mode="FAST_COMPILE"
    )(vector, many)
    np.testing.assert_allclose(product, full @ vector)
    np.testing.assert_allclose(of_each, many @ full.T)
    np.testing.assert_allclose(of_transposed, full.T @ vector)
    np.testing.assert_allclose(of_one, [full @ vector])


def test_sparse_factors(rng):
    """Levels in groups have inverse factors as sparse as the matrix, in any order."""
    dense = nested_matrix(rng, levels=60, groups=7)
    matrix = sparse.csr_array(dense)
    found = factored(matrix)
    assert found.root.values.size == found.inverse_root.values.size == (matrix.nnz + 67) / 2
    assert elements_of_factor(matrix) == found.inverse_root.values.size
    np.testing.assert_allclose(found.dense(), dense, atol=1e-12)
    np.testing.assert_allclose(found.inverse.dense(), np.linalg.inv(dense), atol=1e-10)
    with pytest.raises(linalg.LinAlgError, match="pivot"):
        factored(matrix - 10 * sparse.eye_array(67))


def test_a_matrix_is_made_of_numbers_arrays_and_tensors(matrix):
    assert as_matrix(matrix) is matrix
    for number in (2, np.float32(2.0), pt.constant(2.0)):
        assert isinstance(as_matrix(number), Diagonal)
    assert isinstance(as_matrix([1, 2]), Diagonal)
    assert isinstance(as_matrix(pt.vector()), Diagonal)
    assert isinstance(as_matrix(np.eye(2)), Dense)
    assert isinstance(as_matrix(pt.matrix()), Dense)


CORES = ("Haswell", "SkylakeX", "Zen")
"""Kernels of OpenBLAS, which round apart."""

COUNT_ACCEPTED = """
import numpy as np
from scipy import linalg, sparse
from pymc_sgmcmc.matrices import covariance_root

accepted = plainly = 0
for seed in range(100):
    x = np.random.default_rng(seed).normal(size=(500, 4))
    x[:, 3] = x[:, 1]
    covariance = np.cov(x.T)
    for factor, counts in ((covariance_root, True), (linalg.cholesky, False)):
        try:
            factor(covariance)
        except linalg.LinAlgError:
            continue
        accepted, plainly = accepted + counts, plainly + (not counts)
print(accepted, plainly)
"""


def with_smallest(smallest, d=5):
    """A correlation matrix with about this smallest eigenvalue."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(d, d))
    vectors = np.linalg.qr(x)[0]
    matrix = vectors * np.r_[smallest, np.ones(d - 1)] @ vectors.T
    scale = np.sqrt(np.diag(matrix))
    return matrix / np.outer(scale, scale)


@pytest.mark.parametrize("units", [1.0, 1e-12, 1e12])
def test_the_bound_is_that_stated(units):
    scale = np.geomspace(1, units, 5)
    both = np.outer(scale, scale)
    root = covariance_root(both * with_smallest(100 * SINGULAR))
    assert np.allclose(root @ root.T / both, with_smallest(100 * SINGULAR))
    for singular in (0.01 * SINGULAR, 0.0, -1e-16):
        with pytest.raises(linalg.LinAlgError, match="smallest eigenvalue"):
            covariance_root(both * with_smallest(singular))
        with pytest.raises(ValueError, match="`preconditioner` should be positive definite"):
            matrix_root(both * with_smallest(singular))


def test_dependent_coordinates_are_named():
    x = np.random.default_rng(1).normal(size=(300, 5))
    x[:, 4] = 1e6 * (x[:, 1] - 2 * x[:, 2])
    np.testing.assert_array_equal(dependent_coordinates(np.cov(x.T)), [1, 2, 4])


def flags():
    """Of the processor, empty where the system does not tell."""
    try:
        return Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return []


@pytest.mark.parametrize("core", CORES)
def test_no_kernels_accept_equal_coordinates(core):
    """A factorisation alone accepts some, others on each machine."""
    needed = "avx512f" if core == "SkylakeX" else "avx2"
    if needed not in flags():
        pytest.skip(f"the processor has no {needed}")
    found = subprocess.run(
        [sys.executable, "-c", COUNT_ACCEPTED],
        env={**os.environ, "OPENBLAS_CORETYPE": core},
        capture_output=True,
        text=True,
        check=True,
    )
    accepted, plainly = map(int, found.stdout.split())
    assert accepted == 0
    assert 0 < plainly < 100  # or this test would show nothing
