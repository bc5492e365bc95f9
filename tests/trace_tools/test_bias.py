"""Stated accuracy, batch size and the report of a run's bias."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pymc as pm
import pytest
import xarray as xr
from scipy import stats
from scipy.signal import lfilter

from pymc_sgmcmc import (
    MALA,
    OSGFS,
    SGHMC,
    SGLD,
    SGLDCV,
    SGNHT,
    NonFinitePositionError,
    bias_report,
)
from pymc_sgmcmc.adaptation import Seen
from pymc_sgmcmc.adaptation.monitor import LangevinMonitor, SteinMonitor
from pymc_sgmcmc.dynamics import AVERAGED, EULER
from pymc_sgmcmc.matrices import Dense, Diagonal
from pymc_sgmcmc.record import SETTINGS
from pymc_sgmcmc.stein import beyond_doubt, mean_gradient_test, stein_variance_error
from pymc_sgmcmc.step_methods import repeat
from pymc_sgmcmc.trace_tools.bias import bias_warnings
from pymc_sgmcmc.trace_tools.errors import SECOND_MOMENT, SKEWNESS, STEIN, Error, Errors
from pymc_sgmcmc.trace_tools.verdict import draws_needed, of_convergence, overall, verdicts
from pymc_sgmcmc.tuning import choose_batch_size
from tests.support.exact_law import exact_noise_operator, fixed_point
from tests.support.langevin_chains import as_trace
from tests.support.linear_gaussian import LinearGaussian, injected_covariance
from tests.support.models import logistic_model, two_variable_model
from tests.support.sampling import QUICK

NUMBA = {"mode": "NUMBA"}
QUIET = {"progressbar": False, "quiet": True, "compute_convergence_checks": False}


@pytest.fixture(scope="module")
def problem() -> LinearGaussian:
    return LinearGaussian.simulate(40, 3, seed=6)


def sample(model, step, **settings):
    settings = {"draws": 300, "tune": 200, "chains": 2, "cores": 1, "random_seed": 1, **settings}
    with model:
        return pm.sample(step=step, **{**QUIET, **settings})


# --- The estimates --------------------------------------------------------------------------


@pytest.mark.parametrize("preconditioner", ["identity", "diagonal", "inverse"])
@pytest.mark.parametrize("batch_size", [8, 40])
@pytest.mark.parametrize("law", [EULER, AVERAGED], ids=lambda law: law.name)
@pytest.mark.usefixtures("uncompiled")
def test_error_is_that_of_the_exact_law(problem, rng, preconditioner, batch_size, law):
    """From the exact second moment of the gradients: the error of each variance to 1e-8."""
    H, d = problem.precision, 3
    scale = 1 / np.linalg.eigvalsh(H)[-1]
    M = {
        "identity": scale * np.eye(d),
        "diagonal": scale * np.diag([1.0, 0.5, 2.0]),
        "inverse": np.linalg.inv(H),
    }[preconditioner]
    h = 0.4
    step = SGLD(
        model=problem.model(), batch_size=batch_size, step_size=h, preconditioner=M,
        compile_kwargs=NUMBA,
    )  # fmt: skip
    noise = exact_noise_operator(problem, step.batching, None)
    F = np.eye(d) - h / 2 * M @ H
    injected = injected_covariance(M, H, h, law.name)
    covariance = fixed_point(lambda L: F @ L @ F.T + injected + h**2 / 4 * M @ noise(L) @ M, h * M)
    second_moment = H @ covariance @ H + noise(covariance)
    # Gradients with just that second moment: in each of 20 batches the rows of a root of it.
    rows = np.linalg.cholesky(d * second_moment).T
    gradients = np.tile(rows, (1, 20, 1)).reshape(1, 20 * d, d)
    found = law.variance_error(gradients, np.full((1, 20 * d), h), Dense(M), Dense(H))
    exact = np.diag(covariance) / np.diag(np.linalg.inv(H)) - 1
    np.testing.assert_allclose(found.value, exact, rtol=1e-8, atol=1e-10)
    has_error = law is EULER or batch_size < 40
    assert (exact > 0.01).all() if has_error else np.abs(exact).max() < 1e-10


@pytest.mark.parametrize("law", [EULER, AVERAGED], ids=lambda law: law.name)
def test_diagonal_matrices_give_the_same_error(rng, law):
    """Chains with step sizes of their own have errors of their own."""
    gradients, sizes = rng.normal(size=(2, 200, 3)), np.repeat([[0.3], [0.9]], 200, axis=1)
    M, H = Diagonal(np.array([1.0, 2.0, 0.5])), Diagonal(np.array([1.0, 0.4, 3.0]))
    found = law.variance_error(gradients, sizes, M, H)
    dense = law.variance_error(gradients, sizes, Dense(M.dense()), Dense(H.dense()))
    np.testing.assert_allclose(found.value, dense.value, rtol=1e-10)
    np.testing.assert_allclose(found.standard_error, dense.standard_error, rtol=1e-10)


def test_stein_error_of_wide_draws(rng):
    """Draws of N(0, s² / p) with gradients of N(0, 1 / p): an error of s² - 1."""
    p, s = np.array([1.0, 4.0]), np.array([1.2, 0.9])
    positions = s * rng.normal(size=(4, 5000, 2)) / np.sqrt(p)
    gradients = -positions * p + rng.normal(size=positions.shape)
    found = stein_variance_error(positions, gradients)
    assert (np.abs(found.value - (s**2 - 1)) < 4.5 * found.standard_error).all()
    assert (found.standard_error < 0.05).all()


def test_mean_gradient_shows_a_chain_away_from_its_law(rng):
    gradients = rng.normal(size=(4, 1000, 3))
    assert mean_gradient_test(gradients) > 1e-3
    gradients[..., 1] += 0.15
    assert mean_gradient_test(gradients) < 1e-3
    many = rng.normal(size=(2, 400, 60))
    assert mean_gradient_test(many) > 1e-3
    assert mean_gradient_test(many + 0.3) < 1e-3


INNOVATIONS = {
    "normal": lambda rng, size: rng.normal(size=size),
    "heavy tails": lambda rng, size: rng.standard_t(3, size=size),
    "skewed": lambda rng, size: rng.exponential(size=size) - 1,
}


@pytest.mark.parametrize("name", INNOVATIONS)
def test_size_of_the_mean_gradient_test(rng, name):
    """Autoregressive gradients of 15 coordinates with 100 effective draws, the fewest of a run that
    counts as converged. Below each level are as many right runs, up to 4.5 binomial deviations."""
    runs, draws, rho = 600, 1000, 0.95
    innovations = INNOVATIONS[name](rng, (4 * runs, draws + 200, 15)).astype(np.float32)
    gradients = lfilter([1], [1, -rho], innovations, axis=1)[:, 200:]
    found = np.array([mean_gradient_test(each) for each in gradients.reshape(runs, 4, draws, 15)])
    for level in (0.1, 0.01, 0.001):
        assert (found < level).mean() < level + 4.5 * np.sqrt(level / runs)
    assert (found < 0.1).mean() > 0.03


# --- Batch size -----------------------------------------------------------------------------


@pytest.mark.parametrize("noise_rows", [3.0, 300.0, 1e5])
def test_batch_size_is_near_the_cheapest(noise_rows):
    error = 0.05
    N, row, d = 100_000, 40, 10
    sizes = np.arange(1, N + 1)
    overhead = (12_000 + 2 * d**2) / (row + 50)
    cost = (overhead + sizes) * (1 + error + noise_rows / sizes * (N - sizes) / (N - 1))
    chosen = choose_batch_size(noise_rows, N, row, 2 * d**2, error=error)
    assert cost[chosen - 1] <= 1.1 * cost.min()
    assert chosen <= max(np.argmin(cost) + 1, 0.1 * overhead)


def test_batch_size_of_averaged_noises():
    """Rows that cost little, and more where noise or single rows would make the step smaller."""
    N, row = 100_000, 40
    overhead = 12_000 / (row + 50)
    settings = {"law": AVERAGED, "error": 0.05}
    assert choose_batch_size(0.01, N, row, **settings) == int(0.1 * overhead)
    noisy = choose_batch_size(100.0, N, row, **settings)
    sizes = np.arange(1, N + 1)
    noise = 100.0 / sizes * (N - sizes) / (N - 1)
    cost = (overhead + sizes) / np.minimum(4 * 0.05 / (noise + 0.05), 1)
    assert noisy > 10 * int(0.1 * overhead)
    assert cost[noisy - 1] <= 1.11 * cost.min()
    # A step of 1 moves a chain by half of the largest row over the batch size.
    far = choose_batch_size(0.01, N, row, largest=400.0, **settings)
    assert 0.5 * 400.0 / far * 0.5 <= 0.5 < 0.5 * 400.0 / int(0.1 * overhead)


@pytest.mark.usefixtures("uncompiled")
def test_batch_size_of_control_variates_does_not_grow_with_the_data():
    sizes = []
    for n_rows in (2_000, 20_000):
        rng = np.random.default_rng(1)
        X = rng.normal(size=(n_rows, 3))
        y = rng.random(n_rows) < 1 / (1 + np.exp(-X @ [0.5, -0.5, 0.2]))
        with pm.Model() as model:
            beta = pm.Normal("beta", 0, 5, shape=3)
            pm.Bernoulli("y", logit_p=X @ beta, observed=y)
        sizes.append(SGLDCV(model=model, compile_kwargs=NUMBA).batch_size)
    assert sizes[0] / sizes[1] == pytest.approx(1, abs=0.3)


@pytest.mark.parametrize("step_class", [SGLDCV, SGHMC, SGNHT, OSGFS])
@pytest.mark.usefixtures("uncompiled")
def test_nothing_has_to_be_given(step_class):
    step = step_class(model=logistic_model(), compile_kwargs=NUMBA)
    assert 1 <= step.batch_size <= 400
    assert step.run_settings.attributes["batch_size_from"] == "computed"
    assert step.bias == 0.05


# --- Stated accuracy ------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [0.01, 0.2])
@pytest.mark.parametrize("law", [EULER, AVERAGED], ids=lambda law: law.name)
@pytest.mark.usefixtures("uncompiled")
def test_step_size_has_the_stated_bias(bias, law):
    """The law has this error at the step size, unless that is the largest one."""
    step = SGLDCV(
        model=logistic_model(), batch_size=10, gradient="cv", integrator=law.name, bias=bias,
        compile_kwargs=NUMBA,
    )  # fmt: skip
    noise, curvature = (step.run_settings.attributes[name] for name in ("noise", "curvature"))
    error = law.inflation(step.step_size, noise, curvature)
    assert error == pytest.approx(bias) or (law is AVERAGED and step.step_size == 1 / curvature)


@pytest.mark.filterwarnings("ignore::pymc_sgmcmc.BatchSizeWarning")
@pytest.mark.usefixtures("uncompiled")
def test_stated_bias_of_other_samplers():
    settings = {"model": logistic_model(), "batch_size": 40, "compile_kwargs": NUMBA}
    for step_class in (SGHMC, SGNHT):
        # With plain gradients the noise limits the step; beyond that limit it is the same.
        steps = [step_class(bias=bias, **settings).step_size for bias in (0.01, 0.05)]
        assert steps[0] < steps[1]
    k = [OSGFS(bias=bias, **settings).scoring._max_k for bias in (0.01, 0.05)]
    assert k[0] == pytest.approx(4 * 0.01 / 0.36)
    assert k[1] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("step_class", "settings", "error", "message"),
    [
        (SGLDCV, {"bias": 0.0}, ValueError, "`bias` should be positive"),
        (SGLDCV, {"bias": 1.0}, ValueError, r"in \(0, 1\), such as 0.05, but got 1.0"),
        (SGLDCV, {"bias": "small"}, TypeError, "`bias` should be a positive number"),
        (SGLDCV, {"bias": 0.1, "step_size": 0.1}, ValueError, "got both bias=0.1 and step_size"),
        (OSGFS, {"bias": 0.1, "k": 0.1}, ValueError, "got both bias=0.1 and k=0.1"),
        (MALA, {"bias": 0.1}, TypeError, "`MALA` takes no argument `bias`"),
    ],
)
def test_bad_bias(step_class, settings, error, message):
    batch = {} if step_class is MALA else {"batch_size": 100}
    with pytest.raises(error, match=message):
        step_class(model=logistic_model(), compile_kwargs=NUMBA, **batch, **settings)


# --- Running estimate and tuning ------------------------------------------------------------


def seen(rng, draws, thin, *, tuning, size, boundary=False):
    shape = (draws * thin, 2)
    return Seen(
        rng.normal(size=shape), size * rng.normal(size=shape), partial(np.arange, 3),
        tuning, boundary, thin, np.full(draws * thin, 0.2),
    )  # fmt: skip


@pytest.mark.parametrize(
    "monitor",
    [*(LangevinMonitor(law, Dense(np.eye(2))) for law in (EULER, AVERAGED)), SteinMonitor()],
)
def test_running_estimate_does_not_depend_on_the_runs(rng, monitor):
    whole = seen(rng, 30, 2, tuning=False, size=1.0)
    parts = [slice(0, 20), slice(20, 22), slice(22, 60)]
    _, expected = monitor.update(monitor.begin(np.zeros(2)), whole)
    state, found = monitor.begin(np.zeros(2)), []
    for part in parts:
        one = Seen(
            whole.positions[part], whole.gradients[part], whole.next_rows, False, False, 2,
            whole.step_sizes[part],
        )  # fmt: skip
        state, recorded = monitor.update(state, one)
        found.append(recorded["variance_error"])
    np.testing.assert_array_equal(np.concatenate(found), expected["variance_error"])


def test_running_estimate_of_a_chain(problem):
    model = problem.model()
    idata = sample(model, SGHMC(model=model, compile_kwargs=NUMBA), draws=2000)
    assert abs(float(idata.sample_stats["variance_error"][:, -1].mean())) < 0.2


# --- The report of a run --------------------------------------------------------------------


@pytest.fixture(scope="module")
def run():
    model = logistic_model()
    return model, sample(model, SGLDCV(model=model, compile_kwargs=NUMBA), draws=1000, chains=4)


def test_report(run):
    _, idata = run
    before = idata.copy(deep=True)
    report = bias_report(idata)
    assert list(report.index) == [
        "beta[feature=intercept]", "beta[feature=age]", "beta[feature=height]"
    ]  # fmt: skip
    assert list(report.columns) == [
        "mean", "sd", "sd_se", "variance_error", "variance_error_se", "stein_error",
        "stein_error_se", "rerun_error", "rerun_error_se", "predicted_mean_error", "mean_error",
        "mean_error_se", "extrapolated", "extrapolated_se", "ess_bulk", "r_hat", "verdict",
        "draws_needed",
    ]  # fmt: skip
    assert (report["verdict"] == "ok").all()
    assert (report["variance_error"] < 0.05).all()
    assert (report["stein_error"].abs() < 4.5 * report["stein_error_se"] + 0.06).all()
    assert (report["stein_error_se"] < 0.05).all()
    assert report["mean_error"].isna().all()
    assert (report["predicted_mean_error"].abs() < 0.1).all()
    assert report["draws_needed"].isna().all()
    assert "within the stated 0.05: all 3 coordinates are ok" in report.attrs["verdict"]
    xr.testing.assert_identical(
        idata["sample_stats"].to_dataset(), before["sample_stats"].to_dataset()
    )


def test_settings_are_in_the_trace(run, tmp_path):
    _, idata = run
    attributes = idata["sample_stats"].attrs
    assert attributes["sgmcmc_sampler"] == "SGLDCV"
    assert "for a variance error of 0.05, with gradient noise" in attributes["sgmcmc_why"]
    assert idata[SETTINGS]["preconditioner"].shape == (3, 3)
    idata.to_netcdf(tmp_path / "run.nc")
    read = xr.open_datatree(tmp_path / "run.nc")
    assert bias_report(read).equals(bias_report(idata))
    assert read["sample_stats"].attrs["sgmcmc_batch_size"] == attributes["sgmcmc_batch_size"]


def test_a_large_given_step_is_reported(caplog):
    """Where the true error is above the stated one the run says so, and so does the report."""
    model = logistic_model()
    step = SGLDCV(
        model=model, batch_size=100, step_size=0.8, preconditioner="curvature", thin=4,
        gradient="cv", integrator="euler", compile_kwargs=NUMBA,
    )  # fmt: skip
    with caplog.at_level(logging.WARNING, logger="pymc.sgmcmc"):
        idata = sample(
            model, step, draws=1000, quiet=False, compute_convergence_checks=True, chains=4
        )
    assert "too large by up to" in caplog.text
    assert "more than the default 0.05" in caplog.text
    assert "Use a `step_size` of about 0.1" in caplog.text
    report = bias_report(idata)
    assert (report["verdict"] == "variance too large").all()
    assert bias_report(idata, bias=0.5)["verdict"].eq("ok").all()
    # The true one: (1 + V h/4) / (1 - h/4) - 1 with little noise V.
    assert report["variance_error"].between(0.2, 0.45).all()


def test_a_good_run_says_nothing(run):
    assert bias_warnings(run[1]) == []


@pytest.mark.parametrize("step_class", [SGHMC, OSGFS])
def test_report_of_other_samplers(step_class):
    model = logistic_model()
    idata = sample(model, step_class(model=model, compile_kwargs=NUMBA), draws=1000, chains=4)
    report = bias_report(idata)
    assert report.attrs["method"] == "Stein's identity"
    assert (report["variance_error"].abs() < 4.5 * report["variance_error_se"] + 0.06).all()
    with pytest.raises(ValueError, match=r"can repeat runs whose law is known, .* of "):
        bias_report(idata, model, rerun=True)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_settings_from_several_processes():
    model = logistic_model()
    idata = sample(model, SGLDCV(model=model, compile_kwargs=QUICK), draws=20, tune=20, cores=2)
    assert idata["sample_stats"].attrs["sgmcmc_sampler"] == "SGLDCV"


def test_bad_traces(run):
    _, idata = run
    with pytest.raises(ValueError, match="should have `gradient` and `position`"):
        bias_report(xr.DataTree.from_dict({"posterior": idata["posterior"].to_dataset()}))
    broken = idata.copy(deep=True)
    broken["sample_stats"]["gradient"].values[0, 3] = np.nan
    with pytest.raises(ValueError, match="All draws should be finite, but 1 of chain"):
        bias_report(broken)
    short = idata.copy()
    short["sample_stats"] = xr.DataTree(idata["sample_stats"].to_dataset().isel(draw=slice(0, 3)))
    with pytest.raises(ValueError, match=r"4 chains of 1000 draws, but .* 4 chains of 3"):
        bias_report(short)
    with pytest.raises(ValueError, match="A chain should have at least 4 draws"):
        bias_report(idata.isel(draw=slice(0, 3)))
    no_sizes = idata.copy()
    stats = idata["sample_stats"].to_dataset().drop_vars("step_size")
    no_sizes["sample_stats"] = xr.DataTree(stats)
    with pytest.raises(ValueError, match="should have `step_size` in `sample_stats`"):
        bias_report(no_sizes)
    with pytest.raises(ValueError, match=r"`bias` should be in \(0, 1\), but got 2.0"):
        bias_report(idata, bias=2.0)


# --- Verdicts -------------------------------------------------------------------------------


GOOD = {
    "sd_se": 0.01, "variance_error": 0.025, "variance_error_se": 0.001, "stein_error": 0.03,
    "stein_error_se": 0.03, "rerun_error": np.nan, "rerun_error_se": np.nan,
    "predicted_mean_error": 0.01, "mean_error": np.nan, "mean_error_se": np.nan,
    "ess_bulk": 1000.0, "r_hat": 1.0,
}  # fmt: skip


def errors_of(cases: list[dict[str, float]], method: str = SECOND_MOMENT) -> Errors:
    """The table of a run of 1000 draws a chain with such coordinates, named x, y, z."""
    table = pd.DataFrame([GOOD | case for case in cases])
    sure = beyond_doubt(len(cases))
    ess, r_hat, sd_se = (table[name].to_numpy() for name in ("ess_bulk", "r_hat", "sd_se"))
    ones = np.ones(len(cases))

    def source(name: str, limit: float, sure: float) -> Error:
        return Error(table[name].to_numpy(), table[f"{name}_se"].to_numpy(), limit, sure, method)

    sources = {
        "variance_error": source("variance_error", 0.05, 2.0 if method == SECOND_MOMENT else sure),
        "stein_error": source("stein_error", 0.05, sure),
        "rerun_error": source("rerun_error", 0.05, sure),
        "mean_error": source("mean_error", 0.1, sure),
        "predicted_mean_error": Error(
            table["predicted_mean_error"].to_numpy(), 0 * ones, 0.1, 0.0, SKEWNESS
        ),
    }
    labels = tuple(np.resize(["x", "y", "z"], len(cases)).tolist())
    return Errors(
        labels, 0 * ones, ones, 0 * ones, sd_se, sources, ess, r_hat, ones > 0, 0.05, "stated",
        0.5, 1000,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("numbers", "verdict", "draws"),
    [
        ({}, "ok", None),
        ({"ess_bulk": 399.0}, "cannot tell", 1003),
        ({"r_hat": 1.02}, "cannot tell", 2000),
        ({"ess_bulk": 99.0}, "not converged", None),
        ({"r_hat": 1.06}, "not converged", None),
        ({"variance_error": 0.06}, "variance too large", None),
        ({"variance_error": 0.09, "variance_error_se": 0.03}, "cannot tell", 2250),
        ({"variance_error": 0.04, "variance_error_se": 0.05}, "cannot tell", 2778),
        ({"stein_error": 0.3, "stein_error_se": 0.1}, "variance too large", None),
        ({"stein_error": -0.3, "stein_error_se": 0.1}, "variance too small", None),
        ({"stein_error": -0.1, "stein_error_se": 0.05}, "ok", None),
        ({"stein_error": -0.2, "stein_error_se": 0.1}, "cannot tell", 12880),
        ({"stein_error": -0.11, "stein_error_se": 0.04, "sd_se": 0.039}, "cannot tell", 3231),
        ({"sd_se": 0.06}, "cannot tell", 1440),
        ({"sd_se": 0.049}, "ok", None),
        ({"rerun_error": -0.2, "rerun_error_se": 0.03}, "variance too small", None),
        ({"rerun_error": 0.2, "rerun_error_se": 0.03}, "variance too large", None),
        ({"rerun_error": -0.1, "rerun_error_se": 0.04}, "ok", None),
        ({"rerun_error": -0.1, "rerun_error_se": 0.06}, "cannot tell", 1688),
        ({"stein_error": np.nan, "stein_error_se": np.nan}, "ok", None),
        ({"predicted_mean_error": -0.2}, "cannot tell", None),
        ({"predicted_mean_error": 0.2, "mean_error": 0.02, "mean_error_se": 0.03}, "ok", None),
        ({"mean_error": 0.02, "mean_error_se": 0.03}, "ok", None),
        ({"mean_error": -0.3, "mean_error_se": 0.05}, "mean off", None),
        ({"mean_error": 0.27, "mean_error_se": 0.131}, "cannot tell", 2376),
        ({"mean_error": -0.06, "mean_error_se": 0.04}, "cannot tell", 4000),
    ],
)  # fmt: skip
def test_verdict_of_a_coordinate(numbers, verdict, draws):
    errors = errors_of([numbers])
    assert verdicts(errors).tolist() == [verdict]
    needed = np.nan if draws is None else draws
    np.testing.assert_allclose(draws_needed(errors), [needed], atol=1)
    words = overall(errors)
    expected = {
        "ok": "within the stated 0.05",
        "cannot tell": "0 of 1 coordinates are ok, 1 cannot be told. ",
        "not converged": "Not converged: 1 of 1",
        "variance too large": "Variances of 1 of 1 coordinates are too large by up to",
        "variance too small": "Variances of 1 of 1 coordinates are too small by up to 0.",
        "mean off": "Means of 1 of 1 coordinates are off",
    }
    assert expected[verdict] in words
    assert (draws is not None) == ("draws a chain" in words)
    if verdict == "variance too small":
        measured = numbers.get("rerun_error", 0) < 0
        assert ("Use a smaller `bias`" if measured else "The draws do not cover") in words
    if "sd_se" in numbers and verdict == "cannot tell":
        assert "The standard deviation of `x` is known to 1" in words
    if abs(numbers.get("predicted_mean_error", 0)) > 0.1 and verdict != "ok":
        assert "The error of the mean of `x`, which gradients do not show, may be" in words


def words_on(cases: list[dict[str, float]]) -> str:
    """Verdict on a run with such coordinates."""
    return overall(errors_of(cases))


def test_no_number_of_draws_is_advised_that_nobody_takes():
    near = {"mean_error": 0.0999, "mean_error_se": 0.01}
    words = words_on([near, {"ess_bulk": 279.0}])
    assert "Use about 1500 draws a chain. For 1 of them more than 30 times the draws" in words
    assert "draws a chain" not in words_on([near, {}])


def test_no_coordinate_is_ok_where_chains_are_apart_in_another_one():
    errors = errors_of([{}, {"r_hat": 2.0, "ess_bulk": 5.0}])
    assert verdicts(errors).tolist() == ["cannot tell", "not converged"]
    assert np.isnan(draws_needed(errors)).all()
    assert verdicts(errors_of([{}, {"r_hat": 1.1}])).tolist() == ["ok", "not converged"]


def test_errors_between_the_stated_one_and_twice_that_are_not_called_within():
    words = words_on([{"variance_error": 0.06, "variance_error_se": 0.01}])
    assert words.startswith("Variance errors of at most 0.06 are within twice the stated 0.05: all")


def test_all_that_is_wrong_is_said():
    words = words_on([{"variance_error": 0.3}, {}, {"mean_error": -0.3, "mean_error_se": 0.05}])
    assert (
        "Variances of 1 of 3 coordinates are too large by up to 0.3, most of all that of `x`"
        in words
    )
    assert "Means of 1 of 3 coordinates are off" in words
    assert "most of all that of `z`" in words


def test_the_slowest_of_many_coordinates_are_judged(rng):
    idata = exact_run(rng, 210)
    slow = lfilter([1], [1, -0.99], rng.normal(size=(4, 1000)), axis=1)
    idata["sample_stats"]["position"].values[..., 7] = slow
    idata["sample_stats"]["gradient"].values[..., 7] = -slow / 50 + rng.normal(size=slow.shape)
    (warning,) = bias_warnings(idata)
    assert "1 of the 200 slowest of 210 coordinates have R-hat" in warning
    assert "such as `position[7]`" in warning


def test_objections_say_which_coordinates_were_looked_at():
    ess, r_hat = np.array([50.0, 500.0]), np.array([1.2, 1.0])
    assert "1 of the 2 slowest of 7 coordinates" in of_convergence(ess, r_hat, ("a", "b"), 7)
    assert "1 of 2 coordinates" in of_convergence(ess, r_hat, ("a", "b"), 2)


def test_none_of_many_coordinates_is_off_by_chance(rng):
    """Errors of just the bound in 100 coordinates: a word on any of them in one run of 40."""
    dimension, runs, standard_error = 100, 2000, 0.05
    estimates = 0.1 + standard_error * rng.normal(size=(runs, dimension))
    good = errors_of([{"mean_error_se": standard_error}] * dimension, STEIN)
    share = np.mean(
        [
            "mean off"
            in verdicts(
                replace(
                    good,
                    sources=good.sources | {"mean_error": replace(good["mean_error"], value=row)},
                )
            )
            for row in estimates
        ]
    )
    expected = stats.norm.sf(2)
    assert abs(share - expected) < 4.5 * np.sqrt(expected / runs)
    assert beyond_doubt(1) == pytest.approx(2)


def test_variances_that_are_too_small_are_said(rng):
    """Chains that saw only a part of the posterior: half the width, with gradients of all of it."""
    idata = exact_run(rng, 2)
    kept = idata["sample_stats"].to_dataset()
    kept["position"][..., 0] *= 0.5
    kept["gradient"][..., 0] = -kept["position"][..., 0] + rng.normal(size=(4, 1000))
    idata["sample_stats"] = xr.DataTree(kept)
    report = bias_report(idata)
    assert report["verdict"].tolist() == ["variance too small", "ok"]
    assert report["stein_error"].iloc[0] == pytest.approx(-0.75, abs=0.1)
    assert "too small by up to 0.7" in report.attrs["verdict"]
    (warning,) = bias_warnings(idata)
    assert warning.startswith(report.attrs["verdict"])
    assert "Variances of 1 of 2 coordinates are too small by up to" in warning
    assert "The draws do not cover the posterior" in warning


def test_ok_is_a_standard_deviation_that_is_known(rng):
    """Draws sinh(a z) of slow chains z, whose kurtosis of 178 few draws show.

    A third of the standard deviations is off by more than 10 %. At most one run in 20 is "ok"
    nevertheless, up to 3.5 binomial deviations.
    """
    a, rho, runs = 1.2, 0.6, 200
    z = lfilter([1], [1, -rho], rng.normal(size=(4 * runs, 600, 1)), axis=1)[:, 100:]
    z *= np.sqrt(1 - rho**2)
    x = np.sinh(a * z)
    # The derivative in x of -z²/2 - log dx/dz.
    g = -(z + a * np.tanh(a * z)) / (a * np.cosh(a * z))
    sd = np.sqrt((np.exp(2 * a**2) - 1) / 2)
    off, ok = np.abs(x.reshape(runs, -1).std(1) / sd - 1) > 0.1, []
    for run in range(runs):
        part = slice(4 * run, 4 * run + 4)
        report = bias_report(as_trace(x[part], g[part], 0.1, np.eye(1)), bias=0.2)
        ok.append(report["verdict"].iloc[0] == "ok")
    assert off.mean() > 0.2
    assert (off & ok).mean() <= 0.05 + 3.5 * np.sqrt(0.05 * 0.95 / runs)


def exact_run(rng, dimension, draws=4000):
    """Draws of N(0, I) in a trace without settings, with their gradients."""
    positions = rng.normal(size=(4, draws // 4, dimension))
    gradients = -positions + rng.normal(size=positions.shape)
    dims = ("chain", "draw", "position_dim_0")
    statistics = xr.Dataset(
        {
            "position": (dims, positions),
            "gradient": (dims, gradients),
            "step_size": (dims[:2], np.full(positions.shape[:2], 0.1)),
        }
    )
    return xr.DataTree.from_dict({"sample_stats": statistics})


def test_none_of_many_variances_is_too_large_by_chance(rng):
    """Errors of variances by Stein's identity are as uncertain as what they are compared with."""
    idata = exact_run(rng, 100)
    report = bias_report(idata, bias=0.002)
    assert report.attrs["method"] == "Stein's identity"
    z = (report["variance_error"] - 0.002) / report["variance_error_se"]
    assert z.max() > 2  # some are beyond two standard errors, as some have to be
    assert "variance too large" not in set(report["verdict"])
    idata["sample_stats"].attrs["sgmcmc_bias"] = 0.002
    assert bias_warnings(idata) == []


# --- The second run -------------------------------------------------------------------------


def flat_hierarchy() -> pm.Model:
    """Six centred groups of two rows: by gradient and curvature their mean is far from a mode."""
    rng = np.random.default_rng(1)
    group = np.repeat(np.arange(6), 2)
    y = rng.normal(0, 0.3, size=6)[group] + rng.normal(size=12)
    with pm.Model() as model:
        scale = pm.HalfNormal("scale", 1.0)
        effect = pm.Normal("effect", 0.0, scale, shape=6)
        pm.Normal("y", effect[group], 1.0, observed=y)
    return model


@pytest.mark.slow
def test_pairs_have_the_center_of_the_run(monkeypatch):
    """The mean of the nearest Gaussian is no mode, and curvature there is no guide."""
    model, made = flat_hierarchy(), []

    class Recorded(SGLD):
        def __init__(self, *args, **settings):
            super().__init__(*args, **settings)
            made.append((self, settings))

    with model:
        first = SGLDCV(gradient="cv", integrator="euler", compile_kwargs=NUMBA)
    idata = sample(model, first, draws=20, tune=20)
    monkeypatch.setattr(repeat, "SGLD", Recorded)
    bias_report(idata, model, rerun=True, compile_kwargs=NUMBA)
    ((second, settings),) = made
    assert settings["compile_kwargs"] == NUMBA
    np.testing.assert_array_equal(second.center.position, first.center.position)
    np.testing.assert_allclose(
        second.center.curvature.covariance.dense(),
        first.center.curvature.covariance.dense(),
        rtol=1e-6,
        atol=1e-9,
    )


def test_bad_settings_of_a_report(run):
    _, idata = run
    with pytest.raises(TypeError, match=r"got None. Pass `model=`"):
        bias_report(idata, rerun=True)
    with pytest.raises(TypeError, match="`bias` should be a positive number, but got 'a'"):
        bias_report(idata, bias="a")


# --- Compound steps -------------------------------------------------------------------------


def test_a_run_too_short_for_a_report(caplog):
    model = logistic_model()
    step = SGLDCV(model=model, compile_kwargs=QUICK)
    with caplog.at_level(logging.WARNING, logger="pymc.sgmcmc"):
        sample(model, step, draws=3, quiet=False, compute_convergence_checks=True)
    assert (
        caplog.text.count("The bias of the run is not known. A chain should have at least 4") == 1
    )
    assert "Traceback" not in caplog.text


def test_a_run_without_one_finite_draw_is_reported(caplog):
    """PyMC's own table of a trace of NaN says nothing."""
    model = logistic_model()
    step = SGLDCV(model=model, step_size=1e300, preconditioner="identity", compile_kwargs=QUICK)
    with caplog.at_level(logging.WARNING, logger="pymc.sgmcmc"):
        sample(model, step, draws=25, tune=0, quiet=False, compute_convergence_checks=True)
    assert "All draws should be finite, but 25 of chain 0, 25 of chain 1 are not" in caplog.text


@pytest.mark.slow
def test_compound_step_with_metropolis(caplog, tmp_path):
    """Settings, check and report are those of the one step method of this package."""
    model = two_variable_model()
    ours = SGLDCV(
        [model["intercept"], model["slope"]], model=model, batch_size=100, step_size=0.8,
        preconditioner="curvature", thin=4, gradient="cv", integrator="euler",
        compile_kwargs=NUMBA,
    )  # fmt: skip
    with model:
        other = pm.Metropolis([model["sigma"]])
    with caplog.at_level(logging.WARNING, logger="pymc.sgmcmc"):
        idata = sample(
            model, [ours, other], draws=300, quiet=False, compute_convergence_checks=True
        )
    assert "too large by up to" in caplog.text
    assert "more than the default 0.05" in caplog.text
    attributes = idata["sample_stats"].attrs
    assert attributes["sgmcmc_sampler"] == "SGLDCV"
    assert attributes["sgmcmc_step_methods"] == 2
    assert idata[SETTINGS]["precision"].shape == (2, 2)
    report = bias_report(idata)
    assert list(report.index) == ["intercept", "slope"]
    assert report.attrs["method"] == "second moment of the gradients"
    # (1 + V h/4) / (1 - h/4) - 1 with little noise V.
    assert report["variance_error"].between(0.2, 0.45).all()
    with pytest.raises(ValueError, match="but the trace is of 2 step methods"):
        bias_report(idata, model, rerun=True)
    idata.to_netcdf(tmp_path / "run.nc")
    assert bias_report(xr.open_datatree(tmp_path / "run.nc")).equals(report)


@pytest.mark.slow
def test_compound_step_with_another_step_size():
    """NUTS records a `step_size` as well, here before ours."""
    model = two_variable_model()
    settings = {
        "batch_size": 100, "bias": 0.04, "gradient": "cv", "integrator": "euler", "model": model,
        "compile_kwargs": NUMBA,
    }  # fmt: skip
    ours = SGLDCV([model["intercept"], model["slope"]], **settings)
    with model:
        other = pm.NUTS([model["sigma"]], compile_kwargs=NUMBA)
    idata = sample(model, [other, ours], draws=50, tune=20)
    recorded = idata["sample_stats"]
    assert recorded.attrs["sgmcmc_step_size_column"] == 1
    np.testing.assert_array_equal(recorded["step_size"][..., 1], ours.step_size)
    report = bias_report(idata)
    assert report.attrs["bias"] == 0.04
    assert report.attrs["method"] == "second moment of the gradients"
    assert report["variance_error"].between(0.02, 0.08).all()


def test_compound_step_with_two_of_ours():
    """Their statistics share a name, so there are neither settings nor a report."""
    model = two_variable_model()
    settings = {
        "model": model,
        "batch_size": 20,
        "step_size": 1e-4,
        "preconditioner": "identity",
        "compile_kwargs": QUICK,
    }
    steps = [SGLD([model[name]], **settings) for name in ("intercept", "slope")]
    with model:
        steps.append(pm.Metropolis([model["sigma"]]))
    idata = sample(model, steps, draws=20, tune=20)
    assert SETTINGS not in idata.children
    assert "sgmcmc_sampler" not in idata["sample_stats"].attrs
    with pytest.raises(ValueError, match="should be numbers of one step method"):
        bias_report(idata)


# --- A chain that fails ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        (
            {},
            "Give a smaller `step_size`, for example {quarter} "
            'with `preconditioner="curvature"`, a smaller `bias` or a `center` .* with NUTS',
        ),
        (
            {"step_size": 0.1, "preconditioner": "curvature"},
            "Try a smaller `step_size`, for example {quarter}, or leave it out",
        ),
    ],
)
def test_advice_where_a_chain_fails(monkeypatch, settings, advice):
    """A step size that was computed is not left out once more; what tuning made of it counts."""
    monkeypatch.setattr(LangevinMonitor, "step_size_factor", lambda self, state: 0.5)
    rng = np.random.default_rng(2)
    x = rng.normal(size=200)
    with pm.Model() as model:
        slope = pm.Normal("slope", 0, 10)
        pm.Poisson("y", pm.math.exp(slope * x), observed=rng.poisson(np.exp(0.5 * x)))
        step = SGLDCV(batch_size=100, compile_kwargs=QUICK, **settings)
    size = 0.5 * step.step_size
    remedy = advice.format(quarter=re.escape(f"{size / 4:.3g}"))
    message = f"step size of {size:.3g} with .* is too large.*{remedy}"
    with pytest.raises(NonFinitePositionError, match=message):
        sample(model, step, draws=5, tune=5, chains=1, initvals={"slope": 300.0})
