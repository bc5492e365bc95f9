"""Chains that diverged and are finite: found, told with the step size, and refused."""

from __future__ import annotations

import logging
from functools import partial

import numpy as np
import pymc as pm
import pytest

from pymc_sgmcmc import (
    SGLDCV,
    bias_report,
    discard_unconverged,
    gradient_convergence,
    kernel_stein_discrepancy,
    stein_calibrate,
    zero_variance,
)
from pymc_sgmcmc.trace_tools.divergence import LARGEST_EXCESS, find_divergence
from tests.support.langevin_chains import as_trace

NUMBA = {"mode": "NUMBA"}
TOOLS = [
    zero_variance,
    partial(zero_variance, moments="only"),
    stein_calibrate,
    kernel_stein_discrepancy,
    gradient_convergence,
    discard_unconverged,
]


def langevin(rng, precision, step_size, draws, noise=0.0):
    """Positions and gradients of a chain on a Gaussian."""
    x, d = np.zeros(len(precision)), len(precision)
    positions, gradients = np.empty((2, draws, d))
    for draw in range(draws):
        gradient = -precision * x + np.sqrt(noise) * rng.normal(size=d)
        positions[draw], gradients[draw] = x, gradient
        x = x + step_size / 2 * gradient + np.sqrt(step_size) * rng.normal(size=d)
    return positions, gradients


@pytest.mark.parametrize("step_size", [4.02, 4.5, 6.0])
def test_a_step_that_is_too_large(rng, step_size):
    x, g = langevin(rng, np.array([1.0, 0.1]), step_size, 700)
    assert find_divergence(x, g) is not None


@pytest.mark.parametrize("noise", [0.0, 1e4, 1e6])
@pytest.mark.parametrize("step_size", [3.9, 1.0, 0.01])
def test_chains_at_stationarity_have_not_diverged(rng, step_size, noise):
    """Also those just stable, slow, or much too wide by their noise; not if that is absurd."""
    x, g = langevin(rng, np.array([1.0, 0.1]), step_size, 2000, noise / step_size)
    excess = (1 + noise / 4) / (1 - step_size / 4) - 1  # the exact law, of the first coordinate
    assert (find_divergence(x[200:], g[200:]) is None) == (excess < LARGEST_EXCESS)


@pytest.mark.parametrize("seed", range(20))
def test_heavy_tails_are_no_growth(seed):
    x = np.random.default_rng(seed).standard_cauchy(size=(400, 3))
    assert find_divergence(x, -2 * x / (1 + x**2)) is None


def test_distance_from_the_centre(rng):
    x = 1e5 + rng.normal(size=(100, 2))
    gradient = 1e5 - x
    assert find_divergence(x, gradient) is None
    # Of the right width it may be at a mode that was not found.
    assert find_divergence(x, gradient, np.zeros(2), np.ones(2)) is None
    message = find_divergence(x, 5 * gradient, np.zeros(2), np.ones(2))
    assert message == "is 1e+05 posterior standard deviations away from the centre"


@pytest.mark.parametrize("draws", [8, 12, 30, 79])
def test_short_chains_have_not_grown_by_chance(rng, draws):
    for _ in range(20):
        x = rng.normal(size=(draws, 200))
        assert find_divergence(x, -x) is None


def regression():
    rng = np.random.default_rng(1)
    X = np.column_stack([np.ones(500), rng.normal(size=(500, 2))])
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 5, shape=3)
        pm.Normal("y", X @ beta, 1.0, observed=X @ [0.5, -1.0, 0.3] + rng.normal(size=500))
    return model


@pytest.mark.parametrize("chains", [1, 2])
def test_a_run_that_diverged_is_told_and_refused(caplog, chains):
    """As the issue of a chain of draws of 1e47 without a word: the advice names the step size."""
    with regression(), caplog.at_level(logging.WARNING, logger="pymc.sgmcmc"):
        step = SGLDCV(step_size=5, preconditioner="curvature", compile_kwargs=NUMBA)
        idata = pm.sample(
            step=step, draws=150, tune=20, chains=chains, cores=1, random_seed=1, progressbar=False
        )
    assert np.isfinite(idata["posterior"]["beta"]).all()
    assert np.abs(idata["posterior"]["beta"]).max() > 1e20
    told = [one.message for one in caplog.records if one.name == "pymc.sgmcmc"]
    assert any("Diverged: chain 0" in one and "`step_size`, such as 1.2" in one for one in told)
    report = bias_report(idata)
    assert (report["verdict"] == "diverged").all()
    too_large = 'step size of 5 with `preconditioner="curvature"` is too large'
    assert too_large in report.attrs["verdict"]
    for tool in TOOLS:
        with pytest.raises(ValueError, match=f"(diverged|chain 0) .* {too_large}"):
            tool(idata)


def test_the_preconditioner_of_a_step_size_by_a_function_is_named():
    with regression():
        step = SGLDCV(
            step_size=lambda number: 5.0 + 0 * number,
            preconditioner="curvature",
            compile_kwargs=NUMBA,
        )
        idata = pm.sample(
            step=step, draws=150, tune=20, chains=1, random_seed=1, progressbar=False, quiet=True
        )
    with pytest.raises(ValueError, match='step size with `preconditioner="curvature"` is too'):
        zero_variance(idata)


def test_the_advice_for_one_chain_of_several(rng):
    x, g = (
        np.stack(one)
        for one in zip(
            langevin(rng, np.ones(2), 0.5, 400), langevin(rng, np.ones(2), 5.0, 400), strict=True
        )
    )
    with pytest.raises(ValueError, match=r"chain 1 .* or leave it out, `idata.sel\(chain=\[0\]\)`"):
        zero_variance(as_trace(x, g))
