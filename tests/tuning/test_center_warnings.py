"""A default run warns before it samples if the posterior is far from its centre's Gaussian."""

from __future__ import annotations

import logging
import warnings

import numpy as np
import pymc as pm
import pytest
from scipy import special, stats

from pymc_sgmcmc import SGHMC, SGLDCV
from pymc_sgmcmc.errors import CenterWarning
from pymc_sgmcmc.matrices import Diagonal
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.tuning import find_center
from pymc_sgmcmc.tuning.gaussian import mismatch_along_coordinates

NUMBA = {"mode": "NUMBA"}
NO_GUIDE = "No Gaussian was found near the posterior"


def linear_model() -> pm.Model:
    """A scale with a transform, and a vector."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=200)
    with pm.Model() as model:
        slope = pm.Normal("slope", 0, 5, shape=2)
        sigma = pm.HalfNormal("sigma", 2.0)
        pm.Normal("y", slope[0] + slope[1] * x, sigma, observed=1 + 2 * x + rng.normal(size=200))
    return model


def grouped_logistic(groups, rows_a_group=10):
    """Non-centred random intercepts with an unknown scale."""
    rng = np.random.default_rng(1)
    group = np.repeat(np.arange(groups), rows_a_group)
    X = np.column_stack([np.ones(len(group)), rng.normal(size=(len(group), 2))])
    eta = X @ [-0.5, 1.0, 0.5] + 1.2 * rng.normal(size=groups)[group]
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 2, shape=3)
        log_scale = pm.Normal("log_scale", 0, 1)
        z = pm.Normal("z", shape=groups)
        pm.Bernoulli(
            "y",
            logit_p=X @ beta + pm.math.exp(log_scale) * z[group],
            observed=rng.random(len(group)) < stats.logistic.cdf(eta),
        )
    return model


def counts_in_centred_groups(groups=50, spread=1.5, flat=False):
    """The density has no bound where the scale of the groups is zero."""
    rng = np.random.default_rng(2)
    group = np.repeat(np.arange(groups), 4)
    with pm.Model() as model:
        intercept = pm.Normal("intercept", 0, 5)
        scale = pm.math.exp(pm.Flat("log_scale")) if flat else pm.HalfNormal("scale", 1)
        effect = pm.Normal("effect", 0, scale, shape=groups)
        counts = rng.poisson(np.exp(0.5 + spread * rng.normal(size=groups)[group]))
        pm.Poisson("y", pm.math.exp(intercept + effect[group]), observed=counts)
    return model


def exchangeable_components():
    """The search begins half-way between the two modes."""
    rng = np.random.default_rng(0)
    y = np.where(rng.random(400) < 0.5, -0.7, 0.7) + rng.normal(size=400)
    with pm.Model() as model:
        means = pm.Normal("means", 0, 5, shape=2)
        pm.NormalMixture("y", np.array([0.5, 0.5]), means, 1.0, observed=y)
    return model


def exchangeable_components_in_a_long_position():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(2000, 510))
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 1, shape=510)
        means = pm.Normal("means", 0, 5, shape=2)
        pm.Normal("y", X @ beta, 1, observed=X[:, 0] + rng.normal(size=2000))
        observed = np.where(rng.random(2000) < 0.4, -2, 2) + rng.normal(size=2000)
        pm.NormalMixture("k", np.array([0.4, 0.6]), means, 1.0, observed=observed)
    return model


def two_modes_beside_effects_of_groups(groups=100, each=200):
    """The sign of `root` is in no row, and searches in the scales of the start take long."""
    rng = np.random.default_rng(3)
    group = np.repeat(np.arange(groups), each)
    x = rng.normal(size=len(group))
    rate = np.exp(rng.normal(1.0, 0.5, groups)[group] + rng.normal(0.3, 0.3, groups)[group] * x)
    with pm.Model() as model:
        root = pm.Normal("root", 0, 1)
        mean, sd = pm.Normal("mean", 0, 2, shape=2), pm.HalfNormal("sd", 1, shape=2)
        intercept = pm.Normal("intercept", mean[0], sd[0], shape=groups)
        slope = pm.Normal("slope", mean[1], sd[1], shape=groups)
        predictor = intercept[group] + slope[group] * x
        pm.Poisson("counts", pm.math.exp(predictor), observed=rng.poisson(rate))
        pm.Normal("squares", root**2, 1, observed=rng.normal(1.44, 1, size=len(x)))
    return model


def known_variances(groups=1000):
    """Exactly Gaussian, with curvatures that differ between coordinates."""
    rng = np.random.default_rng(3)
    group = rng.integers(groups, size=5 * groups)
    with pm.Model() as model:
        effect = pm.Normal("effect", 0, 1, shape=groups)
        pm.Normal("y", effect[group], 1.0, observed=rng.normal(size=5 * groups))
    return model


def many_predictors():
    """Among so many coordinates a few have a mean several standard deviations from the mode."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(6000, 520))
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 1, shape=520)
        y = rng.random(6000) < stats.logistic.cdf(X[:, 0])
        pm.Bernoulli("y", logit_p=X @ beta, observed=y)
    return model


def search(model):
    posterior = Posterior(model)
    return find_center(posterior, posterior.initial_position)


@pytest.mark.parametrize(
    ("make_model", "message"),
    [
        (
            lambda: grouped_logistic(520),
            f"{NO_GUIDE}.*deviations in z.*far from the mass",
        ),
        (exchangeable_components, "more than one mode"),
        (exchangeable_components_in_a_long_position, "more than one mode"),
        (two_modes_beside_effects_of_groups, "more than one mode"),
    ],
    ids=["groups", "modes", "modes in a long position", "modes beside groups"],
)
def test_a_centre_that_is_no_guide(make_model, message):
    with pytest.warns(CenterWarning, match=message) as record:
        center = search(make_model())
    assert len(record) == 1  # The only warning is about the centre that is used.
    assert np.isfinite(center.position).all()
    # No runaway: of the last version 1e-15, and -34 for the log of the scale.
    assert center.curvature.standard_deviations.min() > 1e-5
    assert np.abs(center.position).max() < 20


@pytest.mark.slow
def test_the_slope_of_a_funnel_is_no_mode():
    """Effects of three groups of many rows: scales are wider far from the centre than there."""
    rng = np.random.default_rng(2)
    group = np.arange(100_000) % 3
    y = rng.normal((0.5 + rng.normal(0, 0.01, 3))[group], 1)
    with pm.Model() as model:
        mean, sd = pm.Normal("mean", 0, 5), pm.HalfNormal("sd", 2)
        effect = pm.Normal("effect", 0, sd, shape=3)
        pm.Normal("y", mean + effect[group], pm.HalfNormal("sigma", 2), observed=y)
    with pytest.warns(CenterWarning, match="is a funnel") as caught:
        search(model)
    assert not [warning for warning in caught if "more than one mode" in str(warning.message)]


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_components_that_begin_alike(count):
    """At the initial point all components are the same, and the gradient does not tell them apart.

    The last version stayed there: components at 2.3 and -0.5 in place of 3 and 0.
    """
    rng = np.random.default_rng(0)
    y = rng.normal(3.0 * rng.integers(count, size=5000), 1)
    with pm.Model() as model:
        weights = pm.Dirichlet("weights", np.ones(count))
        means = pm.Normal("means", y.mean(), 5, shape=count)
        sds = pm.HalfNormal("sds", 2, shape=count)
        pm.NormalMixture("y", weights, means, sds, observed=y)
    with pytest.warns(CenterWarning, match="more than one mode"):
        center = search(model)
    means, log_sds = np.split(center.position[count - 1 :], 2)
    np.testing.assert_allclose(np.sort(means), 3 * np.arange(count), atol=0.2)
    np.testing.assert_allclose(log_sds, 0, atol=0.15)


def test_a_mode_at_a_scale_of_zero():
    """Also the nearest Gaussian with independent coordinates is there where the prior is flat."""
    message = r"ended at a scale of zero: .* such as effect\[\d+\] non-centred"
    with pytest.warns(CenterWarning, match=message) as record:
        search(counts_in_centred_groups(520, spread=0.0, flat=True))
    assert len(record) == 1


def test_a_long_position_leaves_a_scale_of_zero():
    """The joint mode is at a scale of zero, and the mass where the effects were drawn."""
    spread = 0.3
    center = search(counts_in_centred_groups(520, spread=spread))  # and no CenterWarning
    assert center.position[1] == pytest.approx(np.log(spread), abs=0.2)
    assert center.curvature.standard_deviations[1] > 0.02


@pytest.mark.parametrize("centred", [True, False])
def test_effects_of_groups_with_many_records(centred):
    """With its scale an effect of which rows say much lies on a curve, unless it is centred."""
    rng, groups = np.random.default_rng(5), 5
    group = rng.integers(groups, size=2000)
    with pm.Model() as model:
        mean, scale = pm.Normal("mean", 0, 5), pm.Exponential("scale", 1)
        if centred:
            effect = pm.Normal("effect", mean, scale, shape=groups)
        else:
            effect = mean + scale * pm.Normal("z", shape=groups)
        outcome = rng.normal(0, 0.6, groups)[group] + rng.normal(size=2000)
        pm.Normal("y", effect[group], 1.0, observed=outcome)
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        search(model)
    messages = [str(warning.message) for warning in record]
    if centred:
        assert not messages
    else:
        assert len(messages) == 1
        assert "say far more of z[" in messages[0]
        assert "centred ones" in messages[0]


def test_classes_in_schools():
    """Effects that depend on each other have another Gaussian with independent coordinates."""
    rng = np.random.default_rng(8)
    school = np.repeat(np.arange(40), 4)
    group = rng.integers(160, size=2000)
    effects = 0.5 * rng.normal(size=40)[school] + 0.4 * rng.normal(size=160)
    with pm.Model() as model:
        mean, of_schools = pm.Normal("mean", 0, 2), pm.HalfNormal("of_schools")
        u = pm.Normal("u", 0, of_schools, shape=40)
        v = pm.Normal("v", 0, pm.HalfNormal("of_classes"), shape=160)
        y = 1 + effects[group] + rng.normal(size=2000)
        pm.Normal("y", mean + u[school[group]] + v[group], pm.HalfNormal("sigma"), observed=y)
    posterior = Posterior(model, standardizes=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CenterWarning)
        center = find_center(posterior, posterior.initial_position)
    assert center.is_guide


@pytest.mark.slow
def test_crossed_effects_of_a_long_position():
    """The joint mode has scales some ten standard deviations too large."""
    rng = np.random.default_rng(4)
    first, second = rng.integers(300, size=6000), rng.integers(240, size=6000)
    level = -0.3 + 0.8 * rng.normal(size=300)[first] + 0.5 * rng.normal(size=240)[second]
    with pm.Model() as model:
        scales = pm.HalfNormal("scales", shape=2)
        mean = pm.Normal("mean")
        one, other = pm.Normal("one", shape=300), pm.Normal("other", shape=240)
        effects = scales[0] * one[first] + scales[1] * other[second]
        pm.Bernoulli("y", logit_p=mean + effects, observed=rng.random(6000) < special.expit(level))
    with pytest.warns(CenterWarning, match=NO_GUIDE):
        center = search(model)
    assert center.position[:2] == pytest.approx(np.log([0.8, 0.5]), abs=0.25)


@pytest.mark.parametrize(
    "make_model",
    [lambda: grouped_logistic(60), counts_in_centred_groups, known_variances, many_predictors],
)
def test_a_centre_that_is_a_guide(make_model):
    """There is no warning, since few groups have a Gaussian near their posterior."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        search(make_model())


@pytest.mark.slow
def test_two_thousand_groups_are_warned_of_and_not_converged(caplog):
    """Intercept -0.12 and log scale 4.02 where the posterior has -0.48 and 0.13."""
    with grouped_logistic(2000), caplog.at_level(logging.WARNING, logger="pymc.sgmcmc"):
        with pytest.warns(CenterWarning, match=NO_GUIDE):
            step = SGHMC(compile_kwargs=NUMBA)
        pm.sample(step=step, draws=200, tune=200, chains=2, cores=1, random_seed=1)
    assert any(record.message.startswith("Not converged") for record in caplog.records)


def test_mismatch_of_a_skewed_coordinate():
    """log π = x - exp(x) in each coordinate: E[-H] = exp(1/2) times that at the mode."""
    scale = Diagonal(np.ones(2000))
    misfit = mismatch_along_coordinates(
        lambda x: 1 - np.exp(x), np.zeros(2000), scale, np.random.default_rng(1), 1e-3
    )
    assert misfit.precision.mean() == pytest.approx(np.exp(0.5), rel=0.05)
    assert misfit.gradient.mean() == pytest.approx(1 - np.exp(0.5), rel=0.02)
    # None of two thousand coordinates is beyond doubt by chance.
    assert misfit.shift < np.exp(0.5) - 1
    assert misfit.scales[1] < 2 * np.exp(0.5)


# --- Errors of means that a stated bias brings -----------------------------------------------


@pytest.mark.parametrize(("d", "n_rows"), [(20, 1000), (150, 600), (520, 4000)])
@pytest.mark.usefixtures("uncompiled")
def test_predicted_error_of_a_mean(d, n_rows, caplog):
    r"""Of the log scale of a regression: coefficients too wide by δ add δ d to 2 N squares.

    Its standard deviation is 1 / sqrt(2 N), so that its mean is off by δ d / sqrt(2 N) of these.
    """
    rng = np.random.default_rng(11)
    X = rng.normal(size=(n_rows, d))
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 10, shape=d)
        scale = pm.HalfNormal("scale", 5)
        pm.Normal("y", X @ beta, scale, observed=X[:, 0] + rng.normal(size=n_rows))
    with caplog.at_level(logging.WARNING, logger="pymc.sgmcmc"):
        step = SGLDCV(model=model, bias=0.05, compile_kwargs=NUMBA)  # and no CenterWarning
    errors = 0.05 * np.abs(step.run_settings.arrays["mean_shift"])
    assert step.run_settings.labels[np.argmax(errors)] == "scale_log__"
    expected = 0.05 * d / np.sqrt(2 * n_rows)
    # The posterior has N - d degrees of freedom, and the curvature is that of one point.
    assert errors.max() == pytest.approx(expected, rel=0.15)
    told = "the mean of `scale_log__` is off by up to about" in caplog.text
    # Without gradient noise variances are not too large.
    assert told == (errors.max() > 0.1 and step.batch_size < n_rows)


def test_two_modes_are_reported():
    """The sign of a factor that enters squared gives two equal modes that are far apart."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=500)
    with pm.Model() as model:
        root = pm.Normal("root", 0.5, 3.0)
        pm.Normal("y", root**2 * x, 1.0, observed=4 * x + rng.normal(size=500))
    posterior = Posterior(model)
    with pytest.warns(CenterWarning, match="more than one mode"):
        find_center(posterior, posterior.initial_position)


def test_one_mode_is_not_reported(recwarn):
    posterior = Posterior(linear_model())
    find_center(posterior, posterior.initial_position)
    assert not [warning for warning in recwarn if warning.category is CenterWarning]
