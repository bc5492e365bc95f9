"""The curvature of long positions, of low rank plus diagonal."""

from __future__ import annotations

import numpy as np
import pymc as pm
import pytest

from pymc_sgmcmc import SGHMC, SGLDCV, bias_report
from pymc_sgmcmc.matrices import Diagonal, LowRank
from pymc_sgmcmc.tuning import curvature
from pymc_sgmcmc.tuning.curvature import low_rank_curvature

NUMBA = {"mode": "NUMBA"}
QUIET = {"progressbar": False, "quiet": True, "compute_convergence_checks": False}


@pytest.mark.parametrize("largest", [30.0, 4000.0])
def test_curvature_with_a_few_directions_is_found(rng, largest):
    """H with two large eigenvalues in scaled coordinates, others 0.5: found to a percent."""
    d = 200
    scale = rng.uniform(0.1, 10, size=d)
    vectors = np.linalg.qr(rng.normal(size=(d, 2)))[0]
    inner = 0.5 * np.eye(d) + vectors * (np.array([largest, 5.0]) - 0.5) @ vectors.T
    H = inner / np.outer(scale, scale)
    found = low_rank_curvature(lambda positions: -positions @ H, np.zeros(d), scale, 1e-3)
    assert len(found.precision.factors) == 2
    np.testing.assert_allclose(found.precision.dense(), H, rtol=0.02, atol=0.02 * np.diag(H).min())
    root = found.root.dense()
    values = np.linalg.eigvalsh(root.T @ H @ root)
    assert 0.98 < values[0] <= values[-1] < 1.02
    # The diagonal alone leaves the largest eigenvalue, and says so.
    alone = found.without_directions()
    values = np.linalg.eigvalsh(H / np.sqrt(np.outer(np.diag(H), np.diag(H))))
    assert alone.relative_to(alone.root).max() == pytest.approx(values[-1], rel=0.05)


def test_no_direction_is_better_than_others(rng):
    """An even spread of eigenvalues from 0.9 to 1.1: a diagonal, and the largest as a bound."""
    d = 100
    rotation = np.linalg.qr(rng.normal(size=(d, d)))[0]
    H = rotation * np.linspace(0.9, 1.1, d) @ rotation.T
    found = low_rank_curvature(lambda positions: -positions @ H, np.zeros(d), np.ones(d), 1e-3)
    assert isinstance(found.precision, Diagonal)
    assert found.relative_to(found.root).max() == pytest.approx(1.1, rel=0.05)


@pytest.fixture
def wide_model(monkeypatch):
    """A position that counts as long."""
    monkeypatch.setattr(curvature, "DENSE_DIMENSION", 50)
    monkeypatch.setattr(curvature, "DENSE_OPERATIONS", 0)
    rng = np.random.default_rng(5)
    d, n_rows = 60, 3000
    X = 2 * rng.normal(size=(n_rows, 1)) + rng.normal(size=(n_rows, d))
    y = X @ rng.normal(0, 0.1, size=d) + rng.normal(size=n_rows)
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 1, shape=d)
        pm.Normal("y", X @ beta, 1.0, observed=y)
    return model, np.linalg.inv(X.T @ X + np.eye(d))


def test_a_long_position(wide_model, tmp_path):
    """Correlated predictors beyond the dense matrices: right variances, and a report of them."""
    model, covariance = wide_model
    with model:
        step = SGLDCV(compile_kwargs=NUMBA)
        assert isinstance(step.center.curvature.precision, LowRank)
        idata = pm.sample(step=step, draws=200, tune=100, chains=2, cores=1, random_seed=1, **QUIET)
    report = bias_report(idata)
    # Averages over many coordinates: of the mean squared error and the variance ratio.
    sd = np.sqrt(np.diag(covariance))
    assert np.mean((report["sd"] / sd) ** 2) == pytest.approx(1.0, abs=0.06)
    errors, uncertain = report["variance_error"], report["variance_error_se"]
    assert ((errors - 4.5 * uncertain < 0.05) & (errors + 4.5 * uncertain > -0.05)).all()
    assert report.attrs["method"] == "second moment of the gradients"
    idata.to_netcdf(tmp_path / "run.nc")
    # A second run takes the preconditioner from the trace.
    settings = idata["sgmcmc_settings"]
    assert settings["preconditioner_vectors"].shape == settings["precision_vectors"].shape


def test_other_dynamics_take_the_diagonal(wide_model):
    model, _ = wide_model
    step = SGHMC(model=model, gradient="cv", compile_kwargs=NUMBA)
    found = step.center.curvature
    assert isinstance(found.precision, Diagonal)
    assert found.relative_to(found.root).max() > 30
