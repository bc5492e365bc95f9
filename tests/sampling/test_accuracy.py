"""Runs of a stated accuracy: how the steps are chosen, and whether the errors cover."""

from __future__ import annotations

import logging
import re
from functools import partial

import numpy as np
import pymc as pm
import pytest
import xarray as xr

from pymc_sgmcmc import (
    SGHMC,
    SGLD,
    SGLDCV,
    CalibrationError,
    bias_report,
    summary,
    uncalibrated,
)
from pymc_sgmcmc.record import ACCURACY, MOMENTS
from pymc_sgmcmc.sampling import accuracy as loop
from pymc_sgmcmc.sampling import run as run_module
from tests.sampling.test_sample import NUMBA, SMALL, check_same, interrupted_in, ours, press_ctrl_c
from tests.support.models import logistic_model, two_variable_model, two_variable_moments

pytestmark = pytest.mark.usefixtures("without_compiler")


def accurate(model, step, accuracy=0.05, **settings):
    return ours(
        model, step, accuracy=accuracy, **{"draws": 1000, "tune": 500, "chains": 4, **settings}
    )


@pytest.fixture(scope="module")
def linear():
    model = two_variable_model()
    return model, SGLDCV(model=model, batch_size=40, **NUMBA)


@pytest.mark.slow
def test_errors_cover(linear):
    """Of 20 runs x 3 variables 95 %, up to 3.5 binomial deviations, against the exact moments."""
    model, step = linear
    exact = two_variable_moments()
    covered = []
    for seed in range(20):
        idata = accurate(model, step, seed=seed)
        assert idata[ACCURACY].attrs["calibrated"] == 1
        table = summary(idata)
        for name, (mean, sd) in exact.items():
            row = table.loc[name]
            assert row["mean_error"] <= 0.07 * sd
            assert row["sd_error"] <= 0.1 * sd
            covered.append(
                [
                    abs(row["mean"] - mean) <= row["mean_error"],
                    abs(row["sd"] - sd) <= row["sd_error"],
                ]
            )
    assert (np.mean(covered, 0) > 0.95 - 3.5 * np.sqrt(0.05 * 0.95 / 60)).all()


def saturation_curve() -> tuple[pm.Model, dict[str, tuple[float, float]]]:
    """A curved posterior of two coordinates, with the moments of both on a grid."""
    rng = np.random.default_rng(11)
    x = rng.uniform(0.05, 1.5, 1000)
    y = 10 * x / (4 + x) + 0.4 * rng.normal(size=1000)
    with pm.Model() as model:
        top, half = pm.Normal("top", 2, 1), pm.Normal("half", 1, 1)
        pm.Normal("y", pm.math.exp(top) * x / (pm.math.exp(half) + x), 0.4, observed=y)
    grids = {"top": np.linspace(1.2, 4.0, 1201), "half": np.linspace(0.0, 3.2, 1201)}
    tops, shapes = np.exp(grids["top"])[:, None], x / (np.exp(grids["half"])[:, None] + x)
    log_density = (tops * (shapes @ y) - tops**2 / 2 * (shapes**2).sum(1)) / 0.4**2
    log_density -= (grids["top"][:, None] - 2) ** 2 / 2 + (grids["half"] - 1) ** 2 / 2
    weights = np.exp(log_density - log_density.max())
    weights /= weights.sum()
    moments = {}
    for number, (name, grid) in enumerate(grids.items()):
        marginal = weights.sum(1 - number)
        mean = marginal @ grid
        moments[name] = (mean, np.sqrt(marginal @ (grid - mean) ** 2))
    return model, moments


@pytest.mark.slow
def test_errors_cover_on_a_curved_posterior():
    """Of 10 runs x 2 variables 95 %, up to 3.5 binomial deviations."""
    model, exact = saturation_curve()
    step, covered = SGLDCV(model=model, **NUMBA), []
    for seed in range(10):
        table = summary(accurate(model, step, 0.02, seed=seed))
        for name, (mean, sd) in exact.items():
            row = table.loc[name]
            covered.append(
                [
                    abs(row["mean"] - mean) <= row["mean_error"],
                    abs(row["sd"] - sd) <= row["sd_error"],
                ]
            )
    assert (np.mean(covered, 0) > 0.95 - 3.5 * np.sqrt(0.05 * 0.95 / 20)).all()


def test_draws_of_the_chains_are_those_of_the_steps(linear, caplog):
    model, step = linear
    with caplog.at_level(logging.INFO):
        idata = accurate(model, step, quiet=False)
    attributes = idata[ACCURACY].attrs
    assert attributes["accuracy"] == 0.05
    assert attributes["why"] in caplog.text
    assert "Stated errors: at most" in caplog.text
    assert attributes["why"] == "Steps for a variance error of 0.05, and a correction."
    same = step.at_bias(0.05, loop.RELAXATION_TIMES)
    assert same.thin == loop.RELAXATION_TIMES * step.thin
    check_same(
        uncalibrated(idata), ours(model, same, draws=1000, tune=500, chains=4, accuracy=None)
    )
    # The draws have the stated deviations, which are known far better than those of draws.
    stated = idata[ACCURACY]["sd"].values
    x = idata["sample_stats"]["position"]
    np.testing.assert_allclose(x.std(("chain", "draw"), ddof=1), stated)
    assert (idata[ACCURACY]["sd_error"] < 0.02).all()
    assert (bias_report(uncalibrated(idata))["verdict"] == "ok").all()


def test_same_draws_with_processes_and_after_other_runs(linear):
    model, step = linear
    ours(model, step)  # in the middle of whose run of draws the accurate one begins
    check_same(accurate(model, step, cores=2), accurate(model, step))


def test_deterministics_names_and_functions_of_the_draws(monkeypatch):
    given = []
    monkeypatch.setitem(run_module.AT_THE_END, "log_prior", lambda idata, **_: given.append(idata))
    with two_variable_model() as model:
        pm.Deterministic("ratio", model["slope"] / model["sigma"])
    step = SGLDCV(model=model, batch_size=40, **NUMBA)
    idata = accurate(model, step, idata_kwargs={"log_prior": True})
    x = idata["sample_stats"]["position"]
    np.testing.assert_allclose(idata["posterior"]["sigma"], np.exp(x[..., 2]))
    np.testing.assert_allclose(idata["posterior"]["ratio"], x[..., 1] / np.exp(x[..., 2]))
    assert len(given) == 1
    assert given[0] is idata  # whose draws are the corrected ones
    few = accurate(model, step, var_names=["ratio", "sigma"])
    assert set(few["posterior"].data_vars) == {"ratio", "sigma"}
    np.testing.assert_array_equal(few["posterior"]["ratio"], idata["posterior"]["ratio"])
    tables = (summary(trace).loc[["ratio", "sigma"]] for trace in (few, idata))
    np.testing.assert_allclose(*(table.to_numpy() for table in tables))


@pytest.mark.parametrize("accuracy", [None, 0.05])
def test_functions_of_draws_that_are_not_recorded(linear, accuracy):
    model, step = linear
    with pytest.raises(ValueError, match="`var_names` leaves out `intercept`"):
        ours(
            model,
            step,
            accuracy=accuracy,
            var_names=["slope", "sigma"],
            idata_kwargs={"log_prior": True},
        )


# --- How the steps are chosen ------------------------------------------------------------------


def skewed_model(prior_sd: float = 5.0) -> pm.Model:
    """A rate of which two events in 200 rows are known."""
    with pm.Model() as model:
        log_rate = pm.Normal("log_rate", 0.0, prior_sd)
        pm.Poisson("y", pm.math.exp(log_rate), observed=np.repeat([1, 0], [2, 198]))
    return model


def skewed_moments(prior_sd: float = 5.0) -> tuple[float, float]:
    """Mean and standard deviation on a grid."""
    grid = np.linspace(-15.0, 0.0, 100_001)
    log_density = -(grid**2) / (2 * prior_sd**2) + 2 * grid - 200 * np.exp(grid)
    weights = np.exp(log_density - log_density.max())
    weights /= weights.sum()
    mean = weights @ grid
    return mean, np.sqrt(weights @ (grid - mean) ** 2)


@pytest.fixture(scope="module")
def skewed():
    model = skewed_model()
    return model, SGLDCV(model=model, batch_size=20, **NUMBA)


@pytest.mark.parametrize("corrected", [True, False])
def test_errors_cover_where_the_posterior_is_skewed(skewed, monkeypatch, corrected):
    model, step = skewed

    def refused(idata):
        raise CalibrationError("The posterior is too far from Gaussian.")

    if not corrected:
        monkeypatch.setattr(loop, "of_calibration", refused)
    idata = accurate(model, step, 0.05)
    mean, sd = skewed_moments()
    stated = idata[ACCURACY]
    assert abs(stated["mean"].item() - mean) <= stated["mean_error"].item() * sd
    assert abs(stated["sd"].item() / sd - 1) <= stated["sd_error"].item()
    assert max(stated["mean_error"].item(), stated["sd_error"].item()) <= 0.05
    if not corrected:
        assert stated.attrs["calibrated"] == 0
        assert uncalibrated(idata) is idata


def test_longer_draws_where_there_are_too_few(skewed, caplog):
    model, step = skewed
    with caplog.at_level(logging.INFO):
        idata = accurate(model, step, 0.02, draws=100, quiet=False)
    assert "Sampling again, with longer draws." in caplog.text
    thin = idata["sample_stats"].attrs["sgmcmc_thin"]
    first = ours(model, step.at_bias(0.02, loop.RELAXATION_TIMES), draws=100, tune=500, chains=4)
    assert first["sample_stats"].attrs["sgmcmc_thin"] < thin


def test_errors_that_are_not_known(linear, monkeypatch, caplog):
    model, step = linear

    def refuse(idata):
        raise ValueError("All chains should be near. `idata.sel` leaves some out.")

    monkeypatch.setattr(loop, "of_draws", refuse)
    with caplog.at_level(logging.WARNING):
        idata = accurate(model, step, draws=100, quiet=False)
    assert "The errors of the run are not known. All chains should be near." in caplog.text
    assert "idata.sel" not in caplog.text
    assert ACCURACY not in idata.children


def test_more_draws_are_asked_for(skewed, caplog):
    model, step = skewed
    with caplog.at_level(logging.WARNING):
        idata = accurate(model, step, 0.01, quiet=False, draws=100)
    found = re.search(r"Use about (\d+) draws a chain", caplog.text)
    assert found, caplog.text
    assert "of 1 coordinates is above the accuracy 0.01" in caplog.text
    caplog.clear()
    more = accurate(model, step, 0.01, quiet=False, draws=int(found.group(1)))
    assert "above the accuracy" not in caplog.text
    assert more[ACCURACY]["sd_error"].max() < idata[ACCURACY]["sd_error"].max()


# --- Runs that are stopped, and arguments -------------------------------------------------------


def test_interrupt_keeps_corrected_draws(linear, monkeypatch):
    model, step = linear
    long = step.at_bias(0.001, loop.RELAXATION_TIMES)
    monkeypatch.setattr(type(step), "at_bias", lambda *arguments: long)
    monkeypatch.setattr(type(long.chain), "run_length", lambda chain: 100)
    interrupted_in(long, 12, monkeypatch)
    idata = accurate(model, step, accuracy=0.001, draws=2000)
    assert idata["posterior"].sizes["chain"] == 1
    assert 400 <= idata["posterior"].sizes["draw"] < 2000
    assert idata[ACCURACY].attrs["calibrated"] == 1
    assert MOMENTS in uncalibrated(idata).children


def test_an_interrupted_run_is_not_compared_with_nuts(linear, monkeypatch, caplog):
    model, step = linear
    long = step.at_bias(0.001, loop.RELAXATION_TIMES)
    monkeypatch.setattr(type(step), "at_bias", lambda *arguments: long)
    monkeypatch.setattr(type(long.chain), "run_length", lambda chain: 100)
    interrupted_in(long, 12, monkeypatch)
    accurate(model, step, accuracy=0.001, draws=2000, quiet=False)
    assert "interrupted before it could be repeated" in caplog.text
    assert "NUTS" not in caplog.text


def test_interrupt_between_draws_keeps_the_best_run(linear, monkeypatch):
    """While a run is corrected, and before the first draw of the next one."""
    model, step = linear
    few = {"accuracy": 0.001, "draws": 100}
    first = ours(model, step.at_bias(0.001, loop.RELAXATION_TIMES), draws=100, tune=500, chains=4)
    errors = loop.of_calibration  # of each run, after those of its draws

    def press_and_correct(idata):
        press_ctrl_c()
        return errors(idata)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "of_calibration", press_and_correct)
        kept = accurate(model, step, **few)
    xr.testing.assert_allclose(uncalibrated(kept)["posterior"].dataset, first["posterior"].dataset)
    draws_of, calls = run_module._Run.draws_of, []

    def interrupted(*arguments, **options):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return draws_of(*arguments, **options)

    monkeypatch.setattr(run_module._Run, "draws_of", interrupted)
    kept = accurate(model, step, **few)
    xr.testing.assert_allclose(uncalibrated(kept)["posterior"].dataset, first["posterior"].dataset)
    assert len(calls) == 2


def test_interrupt_while_groups_are_computed_keeps_the_draws(linear, monkeypatch, caplog):
    model, step = linear
    # PyMC evaluates the log likelihood of one draw after the other.
    settings = {"accuracy": 0.3, "draws": 100, "tune": 100}
    first = accurate(model, step, **settings)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setitem(run_module.AT_THE_END, "log_prior", interrupted)
    every = dict.fromkeys(run_module.AT_THE_END, True)
    kept = accurate(model, step, quiet=False, idata_kwargs=every, **settings)
    xr.testing.assert_equal(kept["posterior"].dataset, first["posterior"].dataset)
    assert "log_likelihood" in kept.children
    assert "`pymc.compute_log_prior(idata)` does it" in caplog.text


@pytest.mark.parametrize(
    ("accuracy", "error", "message"),
    [
        (0.0, ValueError, "`accuracy` should be"),
        (1.0, ValueError, r"in \(0, 1\), such as 0.02"),
        (-0.1, ValueError, "`accuracy` should be"),
        (float("nan"), ValueError, "`accuracy` should be"),
        ("high", TypeError, "`accuracy` should be"),
        (True, TypeError, "`accuracy` should be"),
    ],
)
def test_bad_accuracy(linear, accuracy, error, message):
    with pytest.raises(error, match=message):
        accurate(*linear, accuracy)


@pytest.mark.parametrize(
    "make",
    [
        partial(SGHMC, **SMALL),
        partial(SGLD, **SMALL),
    ],
)
def test_step_methods_that_cannot_keep_to_an_accuracy(make):
    model = logistic_model()
    with pytest.raises(ValueError, match="needs a step method that computes its step size"):
        accurate(model, make(model=model))
