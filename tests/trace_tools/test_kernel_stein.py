"""Kernel Stein discrepancy and Stein thinning of traces."""

from __future__ import annotations

import sys

import numpy as np
import pymc as pm
import pytest
import xarray as xr

from pymc_sgmcmc import kernel_stein_discrepancy, stein_thin
from pymc_sgmcmc.stein import stein_kernel
from tests.support.langevin_chains import Gaussian, as_trace


def test_kernel_is_that_of_its_derivatives(rng):
    """Against differences of k(x, y) = (1 + |x - y|^2)^-1/2, at each pair."""
    x, g = rng.normal(size=(4, 3)), rng.normal(size=(4, 3))

    def k(a, b):
        return (1 + ((a - b) ** 2).sum()) ** -0.5

    def slope(function, at, step=1e-4):
        steps = step * np.eye(3)
        return np.array([(function(at + one) - function(at - one)) / (2 * step) for one in steps])

    found = stein_kernel(x + 100.0, g)
    for i in range(4):
        for j in range(4):
            in_y = slope(lambda b, i=i: k(x[i], b), x[j])
            in_x = slope(lambda a, j=j: k(a, x[j]), x[i])
            both = sum(
                slope(lambda b, i=i, at=axis: slope(lambda a: k(a, b), x[i])[at], x[j])[axis]
                for axis in range(3)
            )
            expected = g[i] @ g[j] * k(x[i], x[j]) + g[i] @ in_y + g[j] @ in_x + both
            assert found[i, j] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("noise", [0.0, 5.0])
def test_discrepancy_of_the_posterior_itself_is_zero_within_its_error(noise):
    """Over 60 correlated posteriors, with gradients as noisy as you like."""
    rng = np.random.default_rng(4)
    root = np.array([[3.0, 0.0], [2.9, 0.5]])
    precision = np.linalg.inv(root @ root.T)
    scores = []
    for _ in range(60):
        x = rng.normal(size=(2, 150, 2)) @ root.T
        g = -x @ precision + noise * rng.normal(size=x.shape) @ np.linalg.inv(root)
        found = kernel_stein_discrepancy(as_trace(x, g))
        scores.append(found.value / found.standard_error)
    assert abs(np.mean(scores)) < 4.5 * np.std(scores, ddof=1) / np.sqrt(60)
    assert 0.7 < np.std(scores, ddof=1) < 1.4


def test_discrepancy_shows_the_bias_of_a_chain():
    """With gradients as noisy as large: variances 1.03 and 2.2 times those of the posterior."""
    target = Gaussian(np.diag([1.0, 9.0]), np.diag([1.0, 9.0]))
    M = np.diag([1.0, 1 / 9])
    small, large = (
        kernel_stein_discrepancy(as_trace(*target.chains(4, 500, h, M, seed=1, thin=thin)))
        for h, thin in ((0.05, 80), (1.5, 3))
    )
    assert abs(small.value) < 4.5 * small.standard_error
    assert large.value > 4.5 * large.standard_error


def test_number_of_draws():
    x = np.random.default_rng(1).normal(size=(2, 1000, 1))
    trace = as_trace(x, -x)
    few, many = (kernel_stein_discrepancy(trace, draws=draws) for draws in (100, 400))
    assert few.standard_error == pytest.approx(4 * many.standard_error, rel=0.2)
    with pytest.raises(ValueError, match="`draws` should be"):
        kernel_stein_discrepancy(trace, draws=1)


def test_coordinates_that_depend_on_each_other():
    x = np.random.default_rng(1).normal(size=(2, 100, 1)) * np.ones(2)
    with pytest.raises(ValueError, match=r"`theta\[0\]`, `theta\[1\]` are.*functions of others"):
        kernel_stein_discrepancy(as_trace(x, -x))


def test_few_draws_of_many_coordinates():
    """Variances alone where covariances cannot be told."""
    x = np.random.default_rng(1).normal(size=(2, 20, 60))
    assert np.isfinite(kernel_stein_discrepancy(as_trace(x, -x)).value)


# --- Thinning --------------------------------------------------------------------------------


@pytest.fixture
def biased():
    """Exact gradients at draws whose deviations are too large by a quarter."""
    x = 1.25 * np.random.default_rng(1).normal(size=(3, 500, 2))
    return as_trace(x, -x)


def test_thinned_draws_are_nearer_to_the_posterior(biased):
    pytest.importorskip("stein_thinning")
    biased["warmup_posterior"] = biased["posterior"].to_dataset()
    biased["observed_data"] = xr.Dataset({"y": ("row", np.zeros(2))})
    thinned = stein_thin(biased, draws=100)
    draws = thinned["posterior"]["theta"]
    assert draws.sizes["chain"] == 1
    assert draws.sizes["draw"] == 100
    np.testing.assert_allclose(draws.std("draw").values, 1, atol=0.06)
    np.testing.assert_allclose(draws.mean("draw").values, 0, atol=0.03)
    np.testing.assert_array_equal(draws[0], thinned["sample_stats"]["position"][0])
    for number in (0, 99):
        one = draws[0, number]
        where = {"chain": one["of_chain"].item(), "draw": one["of_draw"].item()}
        np.testing.assert_array_equal(biased["posterior"]["theta"].sel(where), one)
    assert set(thinned.children) == {"posterior", "sample_stats", "observed_data"}
    assert kernel_stein_discrepancy(thinned).value < kernel_stein_discrepancy(biased).value / 4


def test_gradients_of_minibatches_are_refused(biased):
    pytest.importorskip("stein_thinning")
    biased["sample_stats"].attrs.update(sgmcmc_n_rows=1000, sgmcmc_batch_size=10)
    with pytest.raises(ValueError, match=r"minibatches of 10 of 1000 rows.*Pass `model=`"):
        stein_thin(biased)


def test_gradients_are_computed_with_a_model():
    pytest.importorskip("stein_thinning")
    rng = np.random.default_rng(1)
    with pm.Model() as model:
        slope = pm.Normal("slope", 0, 1)
        pm.Normal("y", slope, 1, observed=np.zeros(3))
    draws = xr.Dataset({"slope": (("chain", "draw"), rng.normal(size=(2, 200)))})
    thinned = stein_thin(xr.DataTree.from_dict({"posterior": draws}), 40, model)
    assert thinned["posterior"]["slope"].std().item() == pytest.approx(0.5, abs=0.04)


def test_more_draws_than_there_are(biased):
    pytest.importorskip("stein_thinning")
    with pytest.raises(ValueError, match="at most the 1500 draws of the trace, but got 2000"):
        stein_thin(biased, draws=2000)


def test_without_the_library(biased, monkeypatch):
    monkeypatch.setitem(sys.modules, "stein_thinning", None)
    monkeypatch.setitem(sys.modules, "stein_thinning.thinning", None)
    with pytest.raises(ImportError, match=r"pymc_sgmcmc\[thinning\]"):
        stein_thin(biased)
