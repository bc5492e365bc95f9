"""Errors of means and variances by pairs of chains at the whole and at half the step size."""

from __future__ import annotations

import logging

import numpy as np
import pymc as pm
import pytest
import xarray as xr
from scipy import stats

from pymc_sgmcmc import SGLD, SGLDCV, FirstOrder, bias_report
from pymc_sgmcmc.record import HALF_STEP, SETTINGS, settings_of
from pymc_sgmcmc.step_methods.repeat import repeated_step, step_of
from pymc_sgmcmc.trace_tools import half_step
from pymc_sgmcmc.trace_tools.half_step import half_step_error
from tests.support.models import logistic_model

NUMBA = {"mode": "NUMBA"}
QUICK = {"mode": "FAST_COMPILE"}
QUIET = {"progressbar": False, "quiet": True, "compute_convergence_checks": False}

COUNTS = np.array([1, 0, 2, 0, 1, 0, 0, 1])
ONES = np.ones((len(COUNTS), 1))
STEP_SIZE = 0.12


def log_rate() -> pm.Model:
    """A skewed posterior: the logarithm of a rate, of which few events are seen."""
    with pm.Model() as model:
        log_rate = pm.Normal("log_rate", 0.0, 2.0, shape=1)
        pm.Poisson("y", pm.math.exp(ONES @ log_rate), observed=COUNTS)
    return model


def sample(model, step, **settings):
    settings = {"draws": 500, "tune": 100, "chains": 4, "cores": 1, "random_seed": 1, **settings}
    with model:
        return pm.sample(step=step, **{**QUIET, **settings})


def moments_of_chain(step_size: float) -> np.ndarray:
    """Mean and variance of the stationary law of Langevin steps on a grid of positions."""
    grid = np.linspace(-6.0, 3.0, 1500)
    gradient = COUNTS.sum() - len(COUNTS) * np.exp(grid) - grid / 4
    kernel = stats.norm.pdf(grid, (grid + step_size / 2 * gradient)[:, None], np.sqrt(step_size))
    kernel /= kernel.sum(axis=1, keepdims=True)
    # The law of which the kernel makes itself, and whose sum is one.
    equations = kernel.T - np.eye(len(grid))
    equations[0] = 1.0
    law = np.linalg.solve(equations, np.eye(len(grid))[0])
    mean = law @ grid
    return np.array([mean, law @ (grid - mean) ** 2])


@pytest.fixture(scope="module")
def skewed():
    """A run with all rows in each gradient, so that its law is that of the grid."""
    model = log_rate()
    step = SGLD(
        model=model, batch_size=len(COUNTS), step_size=STEP_SIZE, preconditioner="identity",
        thin=4, compile_kwargs=NUMBA,
    )  # fmt: skip
    return model, sample(model, step)


def test_the_error_is_that_of_the_exact_law(skewed, monkeypatch):
    monkeypatch.setattr(half_step, "PRECISE", 0.004)
    model, idata = skewed
    errors = half_step_error(idata, settings_of(idata), model, 1, NUMBA, most=20.0)
    moments = {factor: moments_of_chain(factor * STEP_SIZE) for factor in (1.0, 0.5, 0.25, 0.125)}
    sd = float(idata.posterior["log_rate"].std())
    expected = 2 * (moments[1.0] - moments[0.5])
    for error, wanted, unit in zip(errors, expected, (sd, sd**2), strict=True):
        assert abs(error.value[0] - wanted / unit) < 4.5 * error.standard_error[0]
        assert error.standard_error[0] < 0.01
        assert abs(wanted / unit) > 4 * error.standard_error[0]
    # Richardson's extrapolation leaves less than a fifth of the error of the mean.
    limit = (8 * moments[0.125] - 6 * moments[0.25] + moments[0.5]) / 3
    assert abs(moments[1.0] - expected - limit)[0] < 0.2 * abs(moments[1.0] - limit)[0]


def test_the_step_method_of_a_run_need_not_be_made_again(monkeypatch):
    """The pairs of a step method that is in use are those of one that is made from the trace."""
    x = np.random.default_rng(1).normal(size=60)
    with pm.Model() as model:
        data = pm.Data("x", x)
        slope = pm.Normal("slope")
        pm.Poisson("y", pm.math.exp(slope * data), observed=np.arange(60) % 3)
    steps = [
        SGLDCV(
            model=model,
            batch_size=size,
            gradient=FirstOrder(batching="replace"),
            compile_kwargs=QUICK,
        )
        for size in (20, 30)
    ]
    idata = sample(model, steps[0], draws=50)
    settings, arrays = settings_of(idata), idata[SETTINGS]
    assert step_of(model, settings, arrays) is steps[0]
    again = half_step_error(idata, settings, model, 1, QUICK)
    monkeypatch.setattr(half_step, "repeated_step", None)
    for error, expected in zip(
        half_step_error(idata, settings, model, 1, None), again, strict=True
    ):
        np.testing.assert_array_equal(error, expected)
    with model:
        pm.set_data({"x": x + 1})
    assert step_of(model, settings, arrays) is None


def test_the_report_has_means_without_their_error(skewed):
    model, idata = skewed
    report = bias_report(idata, model, rerun=True, random_seed=1, compile_kwargs=NUMBA)
    row = report.loc["log_rate[0]"]
    assert row["extrapolated"] == pytest.approx(row["mean"] - row["mean_error"] * row["sd"])
    assert row["extrapolated_se"] > row["mean_error_se"] * row["sd"]
    assert (bias_report(idata)["extrapolated"].isna()).all()


def test_no_error_is_found_where_there_is_none():
    model = logistic_model()
    step = SGLDCV(model=model, gradient="cv", integrator="euler", compile_kwargs=NUMBA)
    idata = sample(model, step, draws=1000)
    report = bias_report(idata, model, rerun=True, random_seed=2, compile_kwargs=NUMBA)
    assert (report["mean_error"].abs() < 4.5 * report["mean_error_se"] + 0.02).all()
    assert (report["mean_error_se"] <= 0.02).all()
    assert (report["verdict"] == "ok").all()


@pytest.mark.slow
@pytest.mark.parametrize("gradient", ["svrg", "saga"])
def test_estimators_with_a_memory_have_one_for_each_chain(gradient):
    model = log_rate()
    step = SGLD(
        model=model, gradient=gradient, batch_size=2, step_size=STEP_SIZE,
        preconditioner="identity", thin=4, compile_kwargs=NUMBA,
    )  # fmt: skip
    idata = sample(model, step, draws=300)
    for error in half_step_error(idata, settings_of(idata), model, 1, NUMBA):
        assert np.isfinite(error.value).all()
        assert error.standard_error[0] < 0.1


def groups_of_few_records() -> pm.Model:
    """Centred effects of groups, whose log scale has a skewed posterior."""
    rng = np.random.default_rng(3)
    group = np.repeat(np.arange(40), 12)
    y = rng.normal(0, 0.6, size=40)[group] + rng.normal(size=len(group))
    with pm.Model() as model:
        mean = pm.Normal("mean", 0.0, 2.0)
        scale = pm.HalfNormal("scale", 1.0)
        effect = pm.Normal("effect", mean, scale, shape=40)
        pm.Normal("y", effect[group], 1.0, observed=y)
    return model


@pytest.mark.slow
def test_a_run_on_a_skewed_posterior_measures_its_means(caplog, tmp_path):
    model = groups_of_few_records()
    with caplog.at_level(logging.INFO, logger="pymc.sgmcmc"), model:
        step = SGLDCV(bias=0.1, gradient="cv", integrator="euler", compile_kwargs=NUMBA)
        idata = pm.sample(
            step=step, draws=1000, tune=200, chains=4, cores=1, random_seed=1, progressbar=False
        )
    assert "The posterior is skewed: pairs of chains" in caplog.text
    report = bias_report(idata)
    assert report["mean_error"].notna().all()
    assert (report["mean_error_se"] < 0.05).all()
    off = report["verdict"] == "mean off"
    assert off.any() == ("`bias_report(idata).extrapolated`" in caplog.text)
    assert report["mean_error"].abs().idxmax() == "scale_log__"
    idata.to_netcdf(tmp_path / "run.nc")
    assert bias_report(xr.open_datatree(tmp_path / "run.nc")).equals(report)


def test_pairs_in_coordinates_of_effects():
    """They have the coordinates of the run and the variables of the model."""
    rng = np.random.default_rng(3)
    group = rng.integers(6, size=300)
    with pm.Model() as model:
        mean, scale = pm.Normal("mean"), pm.HalfNormal("scale")
        effects = mean + scale * pm.Normal("z", shape=6)
        pm.Normal("y", effects[group], 1, observed=rng.normal(size=6)[group] + rng.normal(size=300))
    step = SGLDCV(model=model, compile_kwargs=QUICK)
    idata = sample(model, step, chains=2, draws=200)
    made = repeated_step(
        model, settings_of(idata), idata[SETTINGS], step_size=0.5, thin=1, compile_kwargs=QUICK
    )
    positions = rng.normal(size=(3, 8))
    of_run, of_pairs = (each.posterior.values_at(positions) for each in (step, made))
    np.testing.assert_allclose(of_pairs, of_run, rtol=1e-10)
    assert np.abs(of_run - positions).max() > 0.1
    errors = half_step_error(idata, settings_of(idata), model, 1, QUICK)
    assert np.abs(errors.mean.value).max() < 0.1
    assert np.abs(errors.variance.value).max() < 0.2


def averaged_moments(step_size: float) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance, with standard errors, of simulated chains with averaged noises."""
    rng = np.random.default_rng(6)
    chains, moments = 40_000, []
    log_rate, before = np.full(chains, np.log(np.mean(COUNTS))), np.zeros(chains)
    for number in range(round(40 / step_size)):
        noise = 0.5 * np.sqrt(step_size) * rng.normal(size=chains)
        gradient = np.sum(COUNTS) - len(COUNTS) * np.exp(log_rate) - log_rate / 4
        log_rate, before = log_rate + 0.5 * step_size * gradient + before + noise, noise
        if number * step_size > 10:
            moments.append((log_rate.mean(), log_rate.var()))
    moments = np.array(moments)
    return moments.mean(0), moments[::20].std(0) / np.sqrt(len(moments[::20]))


def test_pairs_of_averaged_noises_bound_their_error():
    """Twice the difference of the moments at the whole and at half the step size."""
    model = log_rate()
    step = SGLD(
        model=model, batch_size=len(COUNTS), step_size=STEP_SIZE, preconditioner="identity",
        integrator="averaged", thin=4, compile_kwargs=NUMBA,
    )  # fmt: skip
    idata = sample(model, step)
    errors = half_step_error(idata, settings_of(idata), model, 1, NUMBA, most=4.0)
    whole, half = (averaged_moments(factor * STEP_SIZE) for factor in (1.0, 0.5))
    sd = np.sqrt(whole[0][1])
    expected = 2 * (whole[0] - half[0]) / np.array([sd, sd**2])
    uncertain = 2 * np.hypot(whole[1], half[1]) / np.array([sd, sd**2])
    for error, wanted, se in zip(errors, expected, uncertain, strict=True):
        assert abs(error.value[0] - wanted) < 4.5 * np.hypot(error.standard_error[0], se)
        assert abs(wanted) < 0.05  # that of Euler's scheme is several times as large


def test_a_run_on_a_nearly_gaussian_posterior_does_not(caplog):
    model = logistic_model()
    with caplog.at_level(logging.INFO, logger="pymc.sgmcmc"), model:
        step = SGLDCV(gradient="cv", integrator="euler", compile_kwargs=NUMBA)
        idata = pm.sample(
            step=step, draws=300, tune=100, chains=4, cores=1, random_seed=1, progressbar=False
        )
    assert "skewed" not in caplog.text
    assert HALF_STEP not in idata.children
