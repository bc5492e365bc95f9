"""Whether a matrix is singular does not depend on how a factorisation rounds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import linalg

from pymc_sgmcmc.matrices import (
    SINGULAR,
    covariance_root,
    dependent_coordinates,
    matrix_root,
)

CORES = ("Haswell", "SkylakeX", "Zen")
"""Kernels of OpenBLAS, which round apart."""

COUNT_ACCEPTED = """
import numpy as np
from scipy import linalg
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
