"""Noise of minibatches from the gradients of single rows, and rows that cause most of it."""

from __future__ import annotations

import sys

import numpy as np
import pymc as pm
import pytest

from pymc_sgmcmc import (
    OSGFS,
    SGHMC,
    SGLD,
    SGLDCV,
    BatchSizeWarning,
    Posterior,
    bias_report,
)
from pymc_sgmcmc.dynamics import EULER
from pymc_sgmcmc.tuning import find_center, least_cost, row_noise
from pymc_sgmcmc.tuning.row_noise import CANDIDATES, _squares_without, largest

NUMBA = {"mode": "NUMBA"}
QUIET = {"progressbar": False, "quiet": True, "compute_convergence_checks": False}


def regression(n_rows=30_000, extreme=(), rare=0, seed=3):
    """Linear regression with an extreme predictor in some rows, or one that few rows have."""
    rng = np.random.default_rng(seed)
    X = np.column_stack([np.ones(n_rows), rng.normal(size=(n_rows, 2))])
    X[list(extreme), 2] = 300.0
    if rare:
        X[:, 2] = 0.0
        X[rng.choice(n_rows, rare, replace=False), 2] = 1.0
    y = X @ [1.0, 0.5, 0.1] + rng.normal(size=n_rows)
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 10, shape=3)
        pm.Normal("y", X @ beta, 1.0, observed=y)
    covariance = np.linalg.inv(X.T @ X + np.eye(3) / 100)
    return model, X, covariance, covariance @ X.T @ y


def cost(noise_rows, largest, drawn, kept):
    return least_cost(noise_rows, largest, drawn, kept, operations=(16, 18), law=EULER, error=0.05)


def found_noise(model, **settings):
    posterior = Posterior(model)
    center = find_center(posterior, posterior.initial_position)
    return row_noise(posterior, center, **settings)


@pytest.mark.parametrize(("extreme", "rare"), [((), 0), ((17, 20_000), 0), ((), 6)])
@pytest.mark.parametrize("order", [0, 1])
def test_covariance_is_that_of_all_rows(extreme, rare, order):
    """This also holds where two or six rows, which a sample would miss, cause most of the noise."""
    model, X, covariance, mean = regression(extreme=extreme, rare=rare)
    y = model.rvs_to_values[model["y"]].data
    deviations = found_noise(model, order=order).deviations
    # E over the posterior of (x x⊤ δ)(x x⊤ δ)⊤ = x x⊤ (x⊤ P x), exactly.
    leverage = np.einsum("ni,ij,nj->n", X, covariance, X)
    weights = leverage if order else (y - X @ mean) ** 2
    exact = np.einsum("n,ni,nj->ij", weights, X, X) / len(X)
    root = np.linalg.cholesky(covariance)
    ratio = np.trace(root.T @ (deviations.T @ deviations / len(deviations)) @ root)
    ratio /= np.trace(root.T @ exact @ root)
    # With control variates sixteen points stand for a row: a chi-square of 16 has an sd of 35 %.
    assert ratio == pytest.approx(1.0, abs=0.7 if order else 0.1)


@pytest.mark.parametrize("order", [1, 2])
def test_rows_at_one_point_are_those_of_the_order(order):
    """By hand: counts with the logarithm of the mean linear, less the derivative for order 2."""
    rng = np.random.default_rng(4)
    X = rng.normal(size=(8, 2))
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 1, shape=2)
        pm.Poisson("y", pm.math.exp(X @ beta), observed=rng.poisson(1.0, size=8))
    posterior = Posterior(model)
    center = find_center(posterior, posterior.initial_position)
    shift = np.array([0.7, -0.4])
    points = [{"beta": center.position + shift}]
    found = row_noise(posterior, center, order=order, joint_draws=points).deviations
    at_center, moved = np.exp(X @ center.position), X @ shift
    rows = at_center * (np.exp(moved) - 1 - (moved if order == 2 else 0))
    rows = -rows[:, None] * X
    exact = 8 / 7 * np.cov(rows.T, bias=True)
    np.testing.assert_allclose(found.T @ found / len(found), exact, rtol=1e-6)


def test_extreme_rows_are_kept():
    model, *_ = regression(extreme=(17, 20_000))
    noise = found_noise(model, order=1, cost=cost)
    assert {17, 20_000} <= set(noise.kept)
    assert noise.n_rows == 30_000 - len(noise.kept)
    # Plain gradients take no rows always, and neither does a run without any reason for it.
    assert not len(found_noise(model, order=0, cost=cost).kept)
    assert not len(found_noise(regression()[0], order=1, cost=cost).kept)
    # Of second order the rows of a linear regression have no noise at all.
    assert not len(found_noise(model, order=2, cost=cost).kept)


@pytest.mark.slow
def test_rows_that_are_kept_make_draws_cheaper():
    """With these rows in every transition the step size is more than ten times as large."""
    model, *_ = regression(rare=6)
    settings = {"model": model, "gradient": "cv", "integrator": "euler", "compile_kwargs": NUMBA}
    step = SGLDCV(**settings)
    with pytest.warns(BatchSizeWarning, match="parameters that only a few rows inform"):
        given = SGLDCV(batch_size=step.batch_size, **settings)
    assert step.run_settings.attributes["kept_rows"] >= 6
    assert given.run_settings.attributes["kept_rows"] == 0
    assert "others in every transition" in step.run_settings.attributes["why"]
    assert given.step_size < 0.1 * step.step_size


@pytest.mark.parametrize(("step_class", "mode"), [(SGLDCV, "CVM"), (SGHMC, "CVM"), (SGLDCV, "JAX")])
def test_law_with_kept_rows(step_class, mode):
    """With rare rows, means and variances are those of the posterior."""
    model, _, covariance, mean = regression(rare=6)
    with model:
        step = step_class(gradient="cv", compile_kwargs={"mode": mode})
        assert step.run_settings.attributes["kept_rows"] >= 6
        idata = pm.sample(
            step=step, draws=1000, tune=300, chains=2, cores=1, random_seed=1, **QUIET
        )
    report = bias_report(idata)
    sd = np.sqrt(np.diag(covariance))
    # Monte-Carlo errors from the effective draws, at 4.5 standard errors, and the stated bias.
    off = np.abs(report["mean"] - mean) / sd
    assert (off < 4.5 / np.sqrt(report["ess_bulk"])).all()
    error = np.abs((report["sd"] / sd) ** 2 - 1)
    assert (error < 0.05 + 4.5 * np.sqrt(2 / report["ess_bulk"])).all()


@pytest.mark.usefixtures("uncompiled")
def test_samplers_with_a_noise_of_their_own_keep_none():
    model, *_ = regression(n_rows=3000, rare=6)
    step = OSGFS(model=model, gradient="cv", batch_size=100)
    assert step.run_settings.attributes["kept_rows"] == 0
    plain = SGLD(model=model, batch_size=3000)
    assert plain.run_settings.attributes["kept_rows"] == 0


def test_largest_values_are_those_of_a_stable_sort(rng):
    """Equal values keep their order, and NaN comes last."""
    values = rng.integers(0, 6, size=60).astype(float)
    values[[3, 30, 31]] = np.nan, np.inf, np.nan
    for count in (0, 1, 10, 59, 60):
        expected = np.argsort(-values, kind="stable")[:count]
        assert np.array_equal(largest(values, count), expected)


@pytest.mark.parametrize(("rows", "worst"), [(3, 10), (200, 60), (200, 0)])
@pytest.mark.parametrize("longest", [500, 5])
def test_squares_of_the_rows_that_remain(rows, worst, longest, monkeypatch, rng):
    """Products that are added up for all candidates, or rows of a long position."""
    module = sys.modules["pymc_sgmcmc.tuning.row_noise"]
    monkeypatch.setattr(module, "GRAM_DIMENSION", longest)
    sample = rng.normal(size=(rows, 7))
    of_worst = rng.normal(scale=5, size=(4, worst, 7))
    candidates = [number for number in CANDIDATES if number <= worst]
    expected = [
        np.linalg.norm(np.concatenate([sample, of_worst[:, number:].reshape(-1, 7)]), 2) ** 2
        for number in candidates
    ]
    found = _squares_without(sample, of_worst, candidates)
    np.testing.assert_allclose(found, expected, rtol=1e-9)
