"""Convergence from windows of stored gradients: level, power, and what is left of a trace."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import xarray as xr

from pymc_sgmcmc import discard_unconverged, gradient_convergence
from pymc_sgmcmc.trace_tools.convergence import window_means
from pymc_sgmcmc.trace_tools.reader import read_run
from tests.support.langevin_chains import Gaussian, as_trace, langevin

DIMENSION = 3


def target(noise: float) -> tuple[Gaussian, np.ndarray]:
    """Correlated Gaussian whose gradient has noise, and the inverse of its precision."""
    root = np.random.default_rng(3).normal(size=(DIMENSION, DIMENSION))
    H = root @ root.T + np.eye(DIMENSION)
    return Gaussian(H, noise * np.diag(np.diag(H))), np.linalg.inv(H)


def trace_of(x, g, h, M, H, thin=1) -> xr.DataTree:
    trace = as_trace(x, g, h, M, thin=thin)
    group = trace["sgmcmc_settings"]
    group["precision"] = group["preconditioner"].copy(data=H)
    return trace


def gradient(gaussian: Gaussian):
    root = np.linalg.cholesky(gaussian.noise)

    def estimate(theta, rng):
        return -theta @ gaussian.precision + rng.normal(size=theta.shape) @ root.T

    return estimate


# --- Level -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step_size", "noise", "thin", "chains", "draws"),
    [(0.5, 3.0, 1, 1, 1000), (0.1, 0.0, 20, 4, 400), (0.1, 50.0, 3, 4, 400)],
    ids=["one chain", "exact and thinned", "noisy and thinned"],
)
def test_level_at_stationarity(step_size, noise, thin, chains, draws):
    """Chains from their exact law: the share of windows that pass, over 20 traces."""
    gaussian, M = target(noise)
    x, g = gaussian.chains(20 * chains, draws, step_size, M, seed=7, thin=thin)
    shares = []
    for start in range(0, len(x), chains):
        part = slice(start, start + chains)
        trace = trace_of(x[part], g[part], step_size, M, gaussian.precision, thin)
        found = gradient_convergence(trace)
        assert (found["last_half_probability"] > 1e-4).all()
        shares.append(found["passed"].mean().item())
    z = (np.mean(shares) - 0.95) / (np.std(shares, ddof=1) / np.sqrt(len(shares)))
    assert abs(z) < 4.5
    assert np.std(shares, ddof=1) / np.sqrt(len(shares)) < 0.01


def test_level_with_more_coordinates_than_windows():
    """Bonferroni's bound on the largest of the single statistics: windows pass at least as often
    as stated."""
    x = np.random.default_rng(2).normal(size=(40, 200, 60))
    shares = [
        gradient_convergence(as_trace(x[i : i + 1], -x[i : i + 1]))["passed"].mean().item()
        for i in range(40)
    ]
    error = np.std(shares, ddof=1) / np.sqrt(40)
    assert 0.95 - 4.5 * error < np.mean(shares) < 0.98 + 4.5 * error


def test_selected_draws_count_as_thinned():
    """Every tenth draw of a trace: its thinning is known from the labels of the draws."""
    gaussian, M = target(0.0)
    x, g = gaussian.chains(4, 4000, 0.1, M, seed=1)
    trace = trace_of(x, g, 0.1, M, gaussian.precision)
    every = trace.sel(draw=slice(None, None, 10))
    thinned = trace_of(x[:, ::10], g[:, ::10], 0.1, M, gaussian.precision, thin=10)
    assert read_run(every).thin == read_run(thinned).thin == 10
    assert read_run(trace.isel(draw=[0, 1, 3, *range(10, 60)]), agreeing_chains=False).thin is None


# --- Chains from afar ------------------------------------------------------------------------


def test_chain_from_afar_is_flagged_until_it_arrives():
    """20 standard deviations away; it halves its distance every 14 draws."""
    h = 0.1
    gaussian, M = target(1.0)
    root = np.linalg.cholesky(M)
    start = np.zeros((4, DIMENSION))
    start[2] = 20 * root[:, 0]
    x, g = langevin(gradient(gaussian), start, 2000, h, M, seed=1)
    found = gradient_convergence(trace_of(x, g, h, M, gaussian.precision))
    length = found.attrs["window"]
    distance = np.linalg.norm(np.linalg.solve(root, x[2].T), axis=0)
    gone = int(np.argmax(distance < 5))
    assert gone > 15
    assert not found["passed"][2, : max(1, gone - length // 2)].any()
    cut = found["unconverged_draws"].values
    assert gone < cut[2] < gone + 2 * length
    assert (cut[[0, 1, 3]] == 0).all()
    assert not found["converged"].sel(chain=2, draw=slice(None, cut[2] - 1)).any()
    assert found["converged"].sel(chain=2, draw=slice(cut[2], None)).all()
    assert found["passed"][2, 2 * cut[2] :].mean() > 0.85


def test_elementwise_rule():
    """The paper's passes the more rarely the more coordinates there are."""
    x = np.random.default_rng(1).normal(size=(4, 1000, 8))
    found = gradient_convergence(as_trace(x, -x), rule="elementwise", window=20)
    # |N(0, 1)| < 1 in all of 8 independent coordinates.
    assert found["passed"].mean().item() == pytest.approx(0.6827**8, abs=0.02)
    wide = gradient_convergence(as_trace(x, -x), rule="elementwise", window=20, b=3.0)
    assert wide["passed"].mean().item() == pytest.approx(0.9973**8, abs=0.02)


def test_unconverged_draws_are_discarded(caplog):
    x = np.random.default_rng(1).normal(size=(3, 400, 2))
    x[1, :50] += 20
    idata = as_trace(x, -x)
    idata["warmup_posterior"] = idata["posterior"]
    idata["log_likelihood"] = xr.Dataset({"y": (("chain", "draw", "row"), np.zeros((3, 400, 2)))})
    idata["observed_data"] = xr.Dataset({"y": ("row", np.zeros(2))})
    idata["sgmcmc_moments"] = xr.Dataset({"mean": ("chain", np.zeros(3))})
    before = idata.copy(deep=True)
    with caplog.at_level(logging.INFO, logger="pymc.sgmcmc"):
        kept = discard_unconverged(idata)
    xr.testing.assert_identical(idata, before)
    count = kept["sample_stats"].attrs["sgmcmc_discarded_draws"]
    assert 50 <= count <= 60
    assert f"{count} of 400 draws of each chain are left out" in caplog.text
    assert kept["posterior"]["draw"].values[0] == count
    for group in ("posterior", "sample_stats", "log_likelihood"):
        assert kept[group].sizes["draw"] == 400 - count
    assert kept["warmup_posterior"].sizes["draw"] == 400
    assert "observed_data" in kept.children
    assert "sgmcmc_moments" not in kept.children
    again = discard_unconverged(kept)
    assert again["sample_stats"].sizes["draw"] == 400 - count


def test_chains_that_never_converge():
    """One of four is on its way to the end: nothing is left, and it is said which."""
    gaussian, M = target(1.0)
    start = np.zeros((4, DIMENSION))
    start[2] = 20 * np.linalg.cholesky(M)[:, 0]
    x, g = langevin(gradient(gaussian), start, 400, 0.004, M, seed=1)
    with pytest.raises(ValueError, match=r"chains \[2\] did not.*idata.sel\(chain=\[0, 1, 3\]\)"):
        discard_unconverged(as_trace(x, g))


def test_one_slow_chain_is_refused():
    gaussian, M = target(1.0)
    x, g = langevin(gradient(gaussian), np.full((1, DIMENSION), 20.0), 400, 0.004, M, seed=1)
    with pytest.raises(ValueError, match=r"still on their way.*shorter `window`"):
        gradient_convergence(as_trace(x, g))


# --- Bad input -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rule": "chi"}, "`rule` should be one of"),
        ({"level": 1.0}, r"`level` should be in \(0, 1\)"),
        ({"b": 0.0}, "`b` should be positive"),
        ({"window": 0}, "`window` should be a whole number of draws, at least 1, but got 0"),
        ({"window": 26}, "at most a quarter of the 100 draws of a chain, 25, but got 26"),
        ({"window": 2.5}, "`window` should be a whole number"),
        ({"window": 25}, "should have 8 independent windows, but has about 0 of 25"),
    ],
)
def test_wrong_settings(settings, message):
    x = np.random.default_rng(1).normal(size=(1, 100, 2))
    with pytest.raises(ValueError, match=message):
        gradient_convergence(as_trace(x, -x), **settings)


def test_trace_without_gradients():
    with pytest.raises(ValueError, match="gradients\\(idata, model\\)"):
        gradient_convergence(xr.DataTree.from_dict({"posterior": xr.Dataset()}))


def test_window_means_are_those_of_slices(rng):
    values = rng.normal(size=(20, 2))
    expected = [values[start : start + 6].mean(0) for start in range(15)]
    np.testing.assert_allclose(window_means(values, 6), expected)
