"""Stated errors of means and standard deviations: against exact laws, and how often they cover."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import xarray as xr
from scipy import stats

from pymc_sgmcmc.record import MEAN_SHIFT, SETTINGS
from pymc_sgmcmc.trace_tools.affine_map import calibrate
from pymc_sgmcmc.trace_tools.reader import read_run
from pymc_sgmcmc.trace_tools.stated import (
    SHARE_OF_SHIFT,
    _shift,
    of_calibration,
    of_draws,
)
from tests.support.langevin_chains import Gaussian, as_trace

H = np.array([[2.0, 0.6, 0.0], [0.6, 1.0, 0.2], [0.0, 0.2, 0.5]])
M = np.linalg.inv(H)
MEAN = np.array([1.0, -2.0, 3.0])
SD = np.sqrt(np.diag(M))


def test_exact_gradients_give_exact_moments():
    """Without noise the control variates and the slope leave no error, and none is stated."""
    x, g = Gaussian(H, np.zeros((3, 3)), MEAN).chains(4, 500, 0.8, M, seed=1)
    errors = of_calibration(as_trace(x, g, 0.8, M))
    np.testing.assert_allclose(errors.mean, MEAN, rtol=1e-9)
    np.testing.assert_allclose(errors.sd, SD, rtol=1e-9)
    np.testing.assert_allclose(errors.covariance, M, rtol=1e-8)
    assert errors.largest < 1e-8
    assert np.abs(x.mean((0, 1)) - MEAN).max() > 0.01


@pytest.mark.slow
def test_errors_of_noisy_runs_cover():
    """Of 100 x 3 means and deviations 95 % are within the stated errors, up to 4 binomial sds.

    Stated errors that are twice as large would cover all of them.
    """
    covered, wide = [], []
    for seed in range(100):
        x, g = Gaussian(H, 0.3 * H, MEAN).chains(4, 500, 0.5, M, seed=100 + 10 * seed)
        errors = of_calibration(as_trace(x, g, 0.5, M))
        covered.append(np.abs(errors.mean - MEAN) <= errors.mean_error * errors.sd)
        covered.append(np.abs(errors.sd / SD - 1) <= errors.sd_error)
        wide.append(x.std((0, 1)) / SD)
    assert np.mean(wide) > 1.05  # what is corrected
    for part in (covered[::2], covered[1::2]):
        assert np.mean(part) > 0.95 - 4 * np.sqrt(0.05 * 0.95 / 300)
        assert np.mean(part) < 1


def test_errors_of_draws_as_they_are():
    """The bias of small steps is stated, and the Monte-Carlo error beside it."""
    covered = []
    for seed in range(30):
        x, g = Gaussian(H, 0.3 * H, MEAN).chains(4, 2000, 0.2, M, seed=5000 + 10 * seed)
        errors = of_draws(as_trace(x, g, 0.2, M))
        assert errors.covariance is None
        np.testing.assert_allclose(errors.sd, x.std((0, 1), ddof=1), rtol=1e-3)
        covered.append(np.abs(errors.mean - MEAN) <= errors.mean_error * errors.sd)
        covered.append(np.abs(errors.sd / SD - 1) <= errors.sd_error)
    for part in (covered[::2], covered[1::2]):
        assert np.mean(part) > 0.95 - 4 * np.sqrt(0.05 * 0.95 / 90)


def test_chains_that_have_not_converged_are_refused():
    x, g = Gaussian(H, 0.3 * H, MEAN).chains(4, 500, 0.5, M, seed=1)
    apart = np.array([0.0, 0.0, 0.3, 0.3])[:, None, None] * SD
    with pytest.raises(ValueError, match="have not converged"):
        of_calibration(as_trace(x + apart, g - apart @ H, 0.5, M))


# --- Several runs --------------------------------------------------------------------------


# --- A skewed posterior, whose chains are off in the mean too -----------------------------------

GRID = np.linspace(-7.0, 7.0, 1401)


def log_density(x):
    return -(x**2) / 2 + 0.25 * x**3 / 6 - 0.2 * x**4 / 24


def gradient(x):
    return -x + 0.25 * x**2 / 2 - 0.2 * x**3 / 6


def posterior_moments() -> tuple[float, float]:
    weights = np.exp(log_density(GRID))
    weights /= weights.sum()
    mean = weights @ GRID
    return mean, np.sqrt(weights @ (GRID - mean) ** 2)


def law_of_chain(step_size: float) -> np.ndarray:
    """Stationary probabilities on the grid of Langevin dynamics with exact gradients."""
    kernel = stats.norm.pdf(
        GRID[None], (GRID + step_size / 2 * gradient(GRID))[:, None], np.sqrt(step_size)
    )
    kernel /= kernel.sum(1, keepdims=True)
    for _ in range(12):
        kernel = kernel @ kernel
    return kernel[len(GRID) // 2]


def draws_of_chain(step_size: float, chains: int = 4, draws: int = 10_000) -> np.ndarray:
    """Stratified draws of the stationary law, in random order."""
    law = law_of_chain(step_size)
    levels = (np.arange(chains * draws) + 0.5) / (chains * draws)
    x = np.interp(levels, np.cumsum(law) - law / 2, GRID)
    return np.random.default_rng(2).permutation(x).reshape(chains, draws, 1)


@pytest.fixture(scope="module", params=[0.5, 1.0])
def skewed(request) -> tuple[xr.DataTree, float]:
    """A trace, and the exact mean of its law."""
    x = draws_of_chain(request.param)
    trace = as_trace(x, gradient(x), request.param, np.eye(1))
    return trace, float(law_of_chain(request.param) @ GRID)


def test_shift_of_the_mean(skewed):
    """To first order: the corrected mean is off by less than half, a part that is stated."""
    trace, mean_of_chain = skewed
    mean, sd = posterior_moments()
    errors = of_calibration(trace)
    shift, corrected = mean_of_chain - mean, mean_of_chain - errors.mean[0]
    assert shift > 0.01 * sd  # what is corrected
    assert corrected == pytest.approx(shift, rel=0.1)
    assert abs(errors.mean[0] - mean) <= errors.mean_error[0] * errors.sd[0]
    assert errors.mean_bias[0] == pytest.approx(SHARE_OF_SHIFT * corrected / errors.sd[0], rel=1e-3)
    assert abs(errors.sd[0] / sd - 1) <= errors.sd_error[0]


def with_prediction(trace: xr.DataTree, mean_shift: np.ndarray) -> xr.DataTree:
    settings = trace[SETTINGS].to_dataset()
    settings[MEAN_SHIFT] = ("unconstrained_position", mean_shift)
    return trace.assign({SETTINGS: xr.DataTree(settings)})


@pytest.mark.parametrize(
    ("error", "expected"),
    [(0.0, [0.03, -0.02, 0.01]), (1.0, [0.1, 0.0, -0.1]), (0.05, None)],
    ids=["shown by the draws", "predicted", "between"],
)
def test_shift_is_pulled_to_what_the_centre_predicts(error, expected):
    """A prediction of half a deviation for variances of twice the size, at a fifth more."""
    x, g = Gaussian(H, 0.3 * H).chains(4, 500, 0.5, M, seed=1)
    trace, predicted = as_trace(x, g, 0.5, M), np.array([0.5, 0.0, -0.5])
    found = replace(
        calibrate(read_run(trace)),
        mean_shift=SD * [0.03, -0.02, 0.01],
        mean_shift_error=SD * error,
        inflation=0.2,
    )
    shift, shift_error = (
        values / SD for values in _shift(with_prediction(trace, predicted), found, SD)
    )
    if expected is None:
        squares = 0.07**2 + 0.02**2 + 0.11**2
        kept = 1 - 3 * error**2 / squares
        assert 0.4 < kept < 0.9
        expected = 0.2 * predicted + kept * np.array([-0.07, -0.02, 0.11])
        np.testing.assert_allclose(shift_error, kept * error)
    np.testing.assert_allclose(shift, expected, atol=1e-12)
