"""The table of means, deviations and quantiles with errors, and the draws behind it."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
import pandas as pd
import pymc as pm
import pytest
import xarray as xr
from scipy import stats

from pymc_sgmcmc import bias_report, summary, uncalibrated
from pymc_sgmcmc.record import ACCURACY
from pymc_sgmcmc.trace_tools.calibrated import with_stated_errors
from pymc_sgmcmc.trace_tools.stated import of_calibration
from tests.support.langevin_chains import Gaussian, as_trace

H = np.array([[4.0, 1.0], [1.0, 1.0]])
MEAN = np.array([0.5, -1.0])
COVARIANCE = np.linalg.inv(H)
STEP_SIZE = 0.5


def model_of_two() -> pm.Model:
    """A model whose variables are functions of a position of two coordinates."""
    with pm.Model() as model:
        theta = pm.Flat("theta", shape=2)
        pm.Deterministic("sum", theta.sum())
        pm.Deterministic("scaled", 1000 * theta[0] - 3)
        pm.Deterministic("factor", pm.math.exp(theta[1] / 2))
        pm.Deterministic("square", (theta - MEAN) ** 2)
        pm.Normal("y", theta, 1.0, observed=[0.0, 0.0])
    return model


def exact_table() -> pd.DataFrame:
    """Means, deviations and quantiles of these functions."""
    sd = np.sqrt(np.diag(COVARIANCE))
    laws = {
        "theta[0]": stats.norm(MEAN[0], sd[0]),
        "theta[1]": stats.norm(MEAN[1], sd[1]),
        "sum": stats.norm(MEAN.sum(), np.sqrt(COVARIANCE.sum())),
        "scaled": stats.norm(1000 * MEAN[0] - 3, 1000 * sd[0]),
        "factor": stats.lognorm(sd[1] / 2, scale=np.exp(MEAN[1] / 2)),
        "square[0]": stats.gamma(0.5, scale=2 * sd[0] ** 2),
        "square[1]": stats.gamma(0.5, scale=2 * sd[1] ** 2),
    }
    return pd.DataFrame(
        {
            "mean": [law.mean() for law in laws.values()],
            "sd": [law.std() for law in laws.values()],
            "5%": [law.ppf(0.05) for law in laws.values()],
            "50%": [law.ppf(0.5) for law in laws.values()],
            "95%": [law.ppf(0.95) for law in laws.values()],
        },
        index=list(laws),
    )


def trace_of(seed: int, step_size: float = STEP_SIZE, draws: int = 1000) -> xr.DataTree:
    """Noisy chains of the Gaussian, with all variables of the model."""
    x, g = Gaussian(H, 0.3 * H, MEAN).chains(
        4, draws, step_size, COVARIANCE, seed=seed, thin=int(np.ceil(1 / step_size))
    )
    trace = as_trace(x, g, step_size, COVARIANCE, thin=int(np.ceil(1 / step_size)))
    dims = ("chain", "draw")
    posterior = trace["posterior"].to_dataset().rename(coordinate="theta_dim_0")
    posterior["sum"] = (dims, x.sum(-1))
    posterior["scaled"] = (dims, 1000 * x[..., 0] - 3)
    posterior["factor"] = (dims, np.exp(x[..., 1] / 2))
    posterior["square"] = ((*dims, "square_dim_0"), (x - MEAN) ** 2)
    return trace.assign(posterior=xr.DataTree(posterior))


def calibrated_trace(seed: int) -> xr.DataTree:
    idata = trace_of(seed)
    return with_stated_errors(idata, of_calibration(idata), model_of_two(), {"accuracy": 0.05})


def covered(table: pd.DataFrame) -> pd.DataFrame:
    """Whether errors of means, deviations and quantiles are within the stated ones."""
    off = (table[["mean", "sd", "5%", "50%", "95%"]] - exact_table()).abs()
    return pd.DataFrame(
        {
            "mean": off["mean"] <= table["mean_error"],
            "sd": off["sd"] <= table["sd_error"],
            "quantile": off[["5%", "50%", "95%"]].max(axis=1) <= table["quantile_error"],
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize("calibrated", [True, False])
def test_errors_cover(calibrated):
    """95 % of 60 runs for every variable, up to 3.5 binomial deviations (0.95 - 0.10).

    By chance one converged run in a thousand is refused.
    """
    tables = []
    for seed in range(60):
        with contextlib.suppress(ValueError):
            idata = calibrated_trace(100 * seed) if calibrated else trace_of(100 * seed, 0.1)
            tables.append(summary(idata))
    assert len(tables) >= 58
    share = sum(covered(table).astype(float) for table in tables) / len(tables)
    assert (share > 0.95 - 0.10).all(axis=None), share
    mean = sum(tables) / len(tables)
    # Errors are not larger than they need to be.
    assert (mean["mean_error"] < 0.1 * exact_table()["sd"]).all()
    assert (mean["sd_error"] < 0.15 * exact_table()["sd"]).all()


def test_calibrated_draws_have_the_stated_moments():
    idata = calibrated_trace(1)
    table, stated = summary(idata), idata[ACCURACY]
    draws = idata["posterior"]["theta"].values.reshape(-1, 2)
    np.testing.assert_allclose(draws.mean(0), stated["mean"])
    np.testing.assert_allclose(draws.std(0, ddof=1), stated["sd"])
    np.testing.assert_allclose(table.loc[["theta[0]", "theta[1]"], "mean"], stated["mean"])
    # A linear function of one coordinate has its errors, in units of its own.
    np.testing.assert_allclose(table.loc["scaled", "sd"], 1000 * stated["sd"][0], rtol=1e-3)
    for column in ("mean_error", "sd_error"):
        np.testing.assert_allclose(
            table.loc["scaled", column], 1000 * table.loc["theta[0]", column], rtol=0.1
        )
    assert table.attrs["accuracy"] == 0.05
    posterior = idata["posterior"]
    np.testing.assert_allclose(posterior["factor"], np.exp(posterior["theta"][..., 1] / 2))
    np.testing.assert_allclose(posterior["sum"], posterior["theta"].sum("theta_dim_0"))


def test_uncalibrated_gives_the_trace_of_the_chains():
    idata, made = calibrated_trace(1), trace_of(1)
    assert not uncalibrated(idata).identical(idata)
    assert uncalibrated(idata).identical(made)
    assert uncalibrated(made) is made
    pd.testing.assert_frame_equal(bias_report(uncalibrated(idata)), bias_report(made))
    with pytest.raises(ValueError, match=r"`uncalibrated\(idata\)`"):
        bias_report(idata)
    with pytest.raises(TypeError, match="DataTree"):
        uncalibrated(made["posterior"].to_dataset())


def test_names_and_probabilities():
    idata = trace_of(1, 0.1, draws=400)
    table = summary(idata, ["factor", "theta"], probabilities=[0.025, 0.975])
    assert list(table.index) == ["factor", "theta[0]", "theta[1]"]
    assert table.index.name == "parameter"
    assert [name for name in table if name.endswith("%")] == ["2.5%", "97.5%"]
    assert "quantile_error" not in summary(idata, probabilities=[])
    for wrong in ("ab", [[0.5], [0.5, 0.6]]):
        with pytest.raises(TypeError, match="`probabilities` should be numbers in"):
            summary(idata, probabilities=wrong)
    for wrong in (0.5, [0.0], [1.5], [np.nan], [[0.5]]):
        with pytest.raises(ValueError, match="`probabilities` should be numbers in"):
            summary(idata, probabilities=wrong)
    with pytest.raises(ValueError, match="gamma"):
        summary(idata, ["gamma"])


def test_trace_without_gradients():
    idata = trace_of(1, 0.1, draws=400)
    stats_ = idata["sample_stats"].to_dataset().drop_vars("gradient")
    with pytest.raises(ValueError, match="should have `gradient`"):
        summary(idata.assign(sample_stats=xr.DataTree(stats_)))


def test_constant_variables_have_no_errors():
    idata = trace_of(1, 0.1, draws=400)
    posterior = idata["posterior"].to_dataset()
    posterior["constant"] = xr.full_like(posterior["sum"], 3.0)
    table = summary(idata.assign(posterior=xr.DataTree(posterior)))
    assert table.loc["constant", "mean"] == 3
    assert table.loc["constant", "sd"] == 0
    assert table.loc["constant", "mean_error"] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("calibrated", [True, False])
def test_functions_that_are_not_finite_are_nan_and_the_others_are_as_before(calibrated):
    idata = calibrated_trace(1) if calibrated else trace_of(1, 0.1, draws=400)
    expected = summary(idata)
    posterior = idata["posterior"].to_dataset()
    posterior["square"] = posterior["square"].copy()
    posterior["square"][1, 7, 0] = np.nan
    posterior["infinite"] = xr.full_like(posterior["sum"], np.inf)
    table = summary(idata.assign(posterior=xr.DataTree(posterior)))
    assert table.loc[["square[0]", "infinite"]].isna().all(axis=None)
    others = [name for name in expected.index if name != "square[0]"]
    pd.testing.assert_frame_equal(table.loc[others], expected.loc[others])


def test_stated_errors_are_of_all_draws_of_one_run():
    idata = calibrated_trace(1)
    for part in ({"chain": [0]}, {"draw": slice(100)}, {"draw": slice(None, None, 10)}):
        with pytest.raises(ValueError, match="stated errors are of 4 chains of 1000 draws, but"):
            summary(idata.isel(part))
    made = uncalibrated(idata)
    expected = summary(made.isel(chain=[0, 1]))
    errors = replace(of_calibration(made), covariance=None)
    small_steps = with_stated_errors(made, errors, None, {})
    assert summary(small_steps).attrs["draws"] == 1000
    pd.testing.assert_frame_equal(summary(small_steps.isel(chain=[0, 1])), expected)
