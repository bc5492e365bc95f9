"""`polish` on right and wrong runs of PyMC models."""

from __future__ import annotations

import re
from functools import partial

import numpy as np
import pandas as pd
import pymc as pm
import pytensor.tensor as pt
import pytest
import xarray as xr

from pymc_sgmcmc import SGLDCV, marginalize, polish, recover, sample
from pymc_sgmcmc.record import ACCURACY, INTEGRATED, LOCAL, PREFIX
from pymc_sgmcmc.trace_tools.reader import has_gradients

NUMBA = {"mode": "NUMBA"}
LARGEST_SCORE = 4.0

RIGHT_STEP = 0.15
"""About the step size that is computed for a variance error of 5 % below."""


def logistic() -> pm.Model:
    rng = np.random.default_rng(1)
    X = rng.normal(size=(1000, 3))
    y = rng.random(1000) < 1 / (1 + np.exp(-X @ np.array([0.5, -1.0, 1.5])))
    with pm.Model(coords={"feature": ["a", "b", "c"]}) as model:
        outcomes = pm.Data("outcomes", y.astype(int))
        beta = pm.Normal("beta", 0, 2, dims="feature")
        pm.Deterministic("odds", pt.exp(beta), dims="feature")
        pm.Bernoulli("y", logit_p=pt.dot(pm.Data("X", X), beta), observed=outcomes)
    return model


def run_of(model, *, accuracy=None, **settings) -> xr.DataTree:
    quiet = {"progressbar": False, "random_seed": 3, "cores": 1, "chains": 4, "tune": 300}
    with model:
        step = SGLDCV(compile_kwargs=NUMBA, **settings)
        return sample(600, step=step, accuracy=accuracy, **quiet)


def polished_of(idata, model, **settings):
    return polish(idata, model, **{"random_seed": 5, "progressbar": False, **settings})


def as_trace(**variables) -> xr.DataTree:
    """A trace of nothing but the draws, (chains, draws, ...), of variables."""
    arrays = {
        name: (("chain", "draw", *(f"{name}_dim_{axis}" for axis in range(np.ndim(x) - 2))), x)
        for name, x in variables.items()
    }
    return xr.DataTree.from_dict({"posterior": xr.Dataset(arrays)})


@pytest.fixture(scope="module")
def right():
    """Model and run. Tests that change the data set them back."""
    model = logistic()
    return model, run_of(model)


# --- Right runs ------------------------------------------------------------------------------


def test_right_run_is_ok_and_its_polished_draws_are_a_trace(right):
    model, idata = right
    before = idata.copy(deep=True)
    polished = polished_of(idata, model)
    assert polished.verdict == "ok"
    assert polished.passes == polished.report.attrs["passes"] < 60
    assert list(polished.report.index) == [f"beta[feature={name}]" for name in "abc"]
    assert 0.4 < polished.report.attrs["acceptance"] < 0.75
    trace = polished.idata
    assert set(trace.children) == {"posterior", "sample_stats", "observed_data", "constant_data"}
    assert trace["posterior"].sizes["chain"] == 4
    assert list(trace["posterior"]["feature"].values) == ["a", "b", "c"]
    np.testing.assert_allclose(trace["posterior"]["odds"], np.exp(trace["posterior"]["beta"]))
    stats, label = trace["sample_stats"], trace["sample_stats"]["position"].dims[-1]
    np.testing.assert_array_equal(stats["position"].values, trace["posterior"]["beta"].values)
    assert list(stats[label].values) == list(polished.report.index)
    with model:
        position = trace["posterior"]["beta"].values[1, 2]
        assert stats["lp"].values[1, 2] == pytest.approx(model.compile_logp()({"beta": position}))
    xr.testing.assert_identical(idata, before)


def test_polished_draws_are_right_and_can_be_polished(right):
    model, idata = right
    assert polished_of(polished_of(idata, model).idata, model).verdict == "ok"


def test_seed_decides(right):
    model, idata = right
    first, second = (polished_of(idata, model, random_seed=1, modes=False) for _ in range(2))
    xr.testing.assert_identical(first.idata, second.idata)
    pd.testing.assert_frame_equal(first.report, second.report)


def test_trace_without_gradients_in_the_context_of_its_model(right):
    model, idata = right
    alone = as_trace(beta=idata["posterior"]["beta"].values)
    with model:
        polished = polish(alone, modes=False, random_seed=5, progressbar=False, cores=1)
    assert polished.verdict == "ok"
    assert "not searched" in polished.report.attrs["verdict"]


def test_one_chain_is_never_off(right):
    model, idata = right
    polished = polished_of(idata.sel(chain=[2]), model)
    assert polished.verdict in ("ok", "cannot tell")
    assert polished.idata["posterior"].sizes["chain"] == 1


def test_run_with_a_stated_accuracy(right):
    model, _ = right
    idata = run_of(model, accuracy=0.03)
    assert ACCURACY in idata.children
    assert not has_gradients(idata)
    polished = polished_of(idata, model)
    assert polished.verdict == "ok"
    # What was accepted is the accuracy, not the larger error that was corrected.
    assert polished.report.attrs["bias"] == pytest.approx(0.06)


# --- Exact law -------------------------------------------------------------------------------


def test_gaussian_posterior_has_its_exact_moments_from_a_run_that_is_too_wide(rng):
    X = rng.normal(size=(400, 3)) @ np.array([[1.0, 0.9, 0], [0, 0.4, 0.5], [0, 0, 2.0]])
    y = X @ np.ones(3) + rng.normal(size=400)
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 1, shape=3)
        pm.Normal("y", pt.dot(X, beta), 1, observed=y)
    covariance = np.linalg.inv(X.T @ X + np.eye(3))
    mean, sd = covariance @ X.T @ y, np.sqrt(np.diag(covariance))
    draws = mean + 1.5 * sd + 1.6 * rng.multivariate_normal(np.zeros(3), covariance, (4, 1000))
    polished = polished_of(as_trace(beta=draws), model, draws=1000)
    report = polished.report
    assert polished.verdict == "off"
    scores = (report["polished_mean"] - mean) / sd / report["mean_shift_se"]
    assert scores.abs().max() < LARGEST_SCORE
    scores = np.log(report["polished_sd"] / sd) / report["log_sd_shift_se"]
    assert scores.abs().max() < LARGEST_SCORE
    # There are a thousand chains, and each is counted once although it has several draws.
    white = np.linalg.solve(
        np.linalg.cholesky(covariance),
        (polished.idata["posterior"]["beta"].values.reshape(-1, 3) - mean).T,
    )
    assert np.abs(white.mean(1)).max() < LARGEST_SCORE / np.sqrt(1000)
    errors = (np.cov(white) - np.eye(3)) / np.sqrt((1 + np.eye(3)) / 1000)
    assert np.abs(errors).max() < LARGEST_SCORE


# --- Wrong runs ------------------------------------------------------------------------------


def test_steps_that_are_ten_times_too_large(right):
    model, _ = right
    euler = {"gradient": "cv", "integrator": "euler"}
    idata = run_of(model, step_size=10 * RIGHT_STEP, preconditioner="curvature", **euler)
    polished = polished_of(idata, model)
    assert polished.verdict == "off"
    assert set(polished.report["verdict"]) == {"variance too large"}
    assert (polished.report["log_sd_shift"] < -np.log(1.2)).all()


@pytest.mark.parametrize("stored", [True, False])
def test_data_that_were_changed_after_the_run(right, stored):
    model, idata = right
    before = model["outcomes"].get_value()
    changed = np.where(np.arange(1000) < 100, 1 - before, before)
    try:
        with model:
            pm.set_data({"outcomes": changed})
        if stored:
            with pytest.raises(ValueError, match="other values of `outcomes`"):
                polished_of(idata, model)
        else:
            polished = polished_of(as_trace(beta=idata["posterior"]["beta"].values), model)
            assert polished.verdict == "off"
            assert "mean off" in set(polished.report["verdict"])
    finally:
        with model:
            pm.set_data({"outcomes": before})


def two_modes(prior_mean: float = 0.0) -> tuple[pm.Model, float]:
    """Modes at about -2 and 2, and the standard deviation of each.

    The mass of the first is exp(-prior_mean) times that of the second.
    """
    with pm.Model() as model:
        mu = pm.Normal("mu", prior_mean, 2)
        pm.Normal("y", mu**2, 1, observed=np.full(20, 4.0))
    return model, 1 / (4 * np.sqrt(20))


def test_mode_that_no_chain_reached(rng):
    model, sd = two_modes()
    polished = polished_of(as_trace(mu=2 + sd * rng.normal(size=(4, 500))), model)
    assert polished.verdict == "off"
    assert polished.report.attrs["modes"][0] == pytest.approx(-2, abs=0.05)
    assert "another mode with the same mass" in polished.report.attrs["verdict"]


def test_mass_of_a_mode_that_no_chain_reached(rng):
    model, sd = two_modes(1.5)
    polished = polished_of(as_trace(mu=2 + sd * rng.normal(size=(4, 500))), model)
    assert polished.verdict == "off"
    mass = float(re.search(r"about ([0-9.]+) times", polished.report.attrs["verdict"])[1])
    assert mass == pytest.approx(np.exp(-1.5), rel=0.25)


def test_masses_of_two_modes(rng):
    model, sd = two_modes()
    signs = rng.choice([-1, 1], size=(4, 500))
    right = polished_of(as_trace(mu=signs * (2 + sd * rng.normal(size=signs.shape))), model)
    assert right.verdict == "ok"
    signs = rng.choice([-1, 1], size=(4, 500), p=[0.15, 0.85])
    wrong = polished_of(as_trace(mu=signs * (2 + sd * rng.normal(size=signs.shape))), model)
    assert wrong.verdict == "off"
    assert wrong.report["polished_mean"].item() == pytest.approx(0, abs=0.8)


@pytest.mark.parametrize(("width", "verdict"), [(1.0, "ok"), (0.5, "off")])
def test_funnel(rng, width, verdict):
    with pm.Model() as model:
        v = pm.Normal("v", 0, 1)
        pm.Normal("x", 0, pt.exp(v / 2), shape=3)
        pm.Normal("y", v, 1000, observed=np.zeros(4))
    draws = width * rng.normal(size=(4, 1000))
    x = np.exp(draws / 2)[..., None] * rng.normal(size=(4, 1000, 3))
    polished = polished_of(as_trace(v=draws, x=x), model)
    assert polished.verdict in (verdict, "cannot tell" if verdict == "ok" else verdict)


def test_chains_that_never_came_to_the_posterior(right, rng):
    model, _ = right
    lost = np.array([8.0, 8.0, -8.0]) + 0.1 * rng.normal(size=(4, 500, 3))
    polished = polished_of(as_trace(beta=lost), model)
    assert polished.verdict == "off"
    sd = right[1]["posterior"]["beta"].std(("chain", "draw"))
    off = polished.idata["posterior"]["beta"] - right[1]["posterior"]["beta"].mean(
        ("chain", "draw")
    )
    assert (np.abs(off.mean(("chain", "draw"))) < 0.3 * sd).all()


# --- Bad input -------------------------------------------------------------------------------


def test_what_is_no_trace_or_no_model(right):
    model, idata = right
    with pytest.raises(TypeError, match=r"`idata` should be an xarray.DataTree"):
        polish({"posterior": 1}, model)
    with pytest.raises(TypeError, match=r"`model` should be a PyMC model"):
        polish(idata, "model")
    with pytest.raises(TypeError, match=r"`model` should be a PyMC model, but got None. Pass"):
        polish(idata)


@pytest.mark.parametrize(
    ("setting", "match"),
    [
        ({"draws": 5}, "`draws` should be"),
        ({"draws": "all"}, "`draws` should be"),
        ({"passes": 1}, "`passes` should be"),
        ({"cores": 0}, "`cores` should be"),
    ],
)
def test_settings_out_of_range(right, setting, match):
    model, idata = right
    with pytest.raises((TypeError, ValueError), match=match):
        polish(idata, model, **setting)


def test_model_with_other_variables(right):
    _, idata = right
    with pm.Model() as model:
        mu = pm.Normal("mu", 0, 1, shape=3)
        pm.Normal("y", mu.sum(), 1, observed=np.zeros(10))
    with pytest.raises(ValueError, match="has the coordinates"):
        polish(idata, model)
    with pytest.raises(ValueError, match="mu"):
        polish(as_trace(beta=np.zeros((2, 50, 3))), model)


def test_draws_that_cannot_be_used(right):
    model, idata = right
    beta = idata["posterior"]["beta"].values
    with pytest.raises(ValueError, match="at least 20 draws, but has 2 chains of 5"):
        polish(as_trace(beta=beta[:2, :5]), model)
    broken = beta.copy()
    broken[1, 7] = np.nan
    with pytest.raises(ValueError, match="finite"):
        polish(as_trace(beta=broken), model)
    with pytest.raises(ValueError, match="All coordinates should move"):
        polish(as_trace(beta=np.ones((4, 100, 3))), model)


def grouped() -> pm.Model:
    """A linear mixed model, whose effects `sample` integrates out."""
    rng = np.random.default_rng(4)
    group = np.repeat(np.arange(40), 3)
    with pm.Model() as model:
        mean = pm.Normal("mean", 0, 10)
        effect = pm.Normal("effect", 0, 0.7, shape=40)
        y = 1 + 0.7 * rng.normal(size=40)[group] + rng.normal(size=120)
        pm.Normal("y", mean + effect[group], 1, observed=y)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("sampled", [pytest.param(True, marks=pytest.mark.slow), False])
def test_variables_that_were_integrated_out(sampled, rng):
    """They are integrated out again, `recover` adds them, and the mean has its exact law.

    Compiling the transitions takes most of the time of a run, so that exact draws replace it.
    """
    model = grouped()
    y = model.rvs_to_values[model["y"]].data
    precision = 120 / (1 + 3 * 0.7**2) + 1 / 100
    center = y.sum() / (1 + 3 * 0.7**2) / precision
    if sampled:
        quiet = {"progressbar": False, "random_seed": 3, "cores": 1, "chains": 4}
        with model:
            idata = sample(600, tune=300, step=partial(SGLDCV, compile_kwargs=NUMBA), **quiet)
    else:
        means = center + rng.normal(size=(4, 600)) / np.sqrt(precision)
        idata = as_trace(mean=means, effect=np.zeros((4, 600, 40)))
        settings = {f"{PREFIX}{INTEGRATED}": '["effect"]'}
        idata["sample_stats"] = xr.DataTree(xr.Dataset(attrs=settings))
    polished = polished_of(idata, model)
    assert list(polished.report.index) == ["mean"]
    if sampled:
        assert polished.report.attrs["run"] == "ok"
    draws = polished.idata["posterior"]["mean"].values
    # Of 200 exact chains.
    assert abs(draws.mean() - center) < 4.5 / np.sqrt(200 * precision)
    recovered = recover(polished.idata, model, progressbar=False)
    assert recovered["posterior"]["effect"].shape == (*draws.shape, 40)
    with pytest.raises(ValueError, match="with `effect`, which `sample` has integrated out"):
        polished_of(idata, marginalize(model, "effect"))


def test_local_variables_that_were_sampled_apart_are_refused(right):
    model, idata = right
    groups = {name: group.to_dataset() for name, group in idata.children.items()}
    settings = {f"{PREFIX}{LOCAL}": '["effect"]'}
    groups["sample_stats"] = groups["sample_stats"].assign_attrs(settings)
    with pytest.raises(ValueError, match="has sampled `effect` by `LocalSampling`"):
        polish(xr.DataTree.from_dict(groups), model)
