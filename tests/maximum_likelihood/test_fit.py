"""Fits by maximum marginal likelihood against published values and against other programs."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pymc as pm
import pytensor.tensor as pt
import pytest
from scipy import special, stats
from scipy.optimize import approx_fprime

from pymc_sgmcmc import datasets
from pymc_sgmcmc.compiling.compiled import PYTHON_MODE
from pymc_sgmcmc.errors import BoundaryWarning, ConvergenceError, ModelError
from pymc_sgmcmc.marginal import likelihood, marginalize
from pymc_sgmcmc.marginal.check import checked_density
from pymc_sgmcmc.marginal.exact import exact
from pymc_sgmcmc.marginal.likelihood import (
    Groups,
    Likelihood,
    RestrictedLikelihood,
    fixed_effects,
)
from pymc_sgmcmc.marginal.quadrature import laplace, quadrature
from pymc_sgmcmc.marginal.structure import find_structure
from pymc_sgmcmc.maximum_likelihood import fit as fitting
from pymc_sgmcmc.maximum_likelihood import fit_marginal
from tests.marginal import models

N_GROUPS = 30

pytestmark = pytest.mark.usefixtures("without_compiler")


@pytest.fixture
def as_written(monkeypatch) -> None:
    """Likelihoods are evaluated as they are written, since simplifying them takes longer."""
    monkeypatch.setattr(likelihood, "NUMPY_MODE", PYTHON_MODE)


def groups_of(model: pm.Model, names: list[str]) -> Groups:
    return Groups(model, checked_density(model, find_structure(model, names)))


def random_intercepts(rng, sd: float = 0.8) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Groups of 2 to 8 records, a predictor and outcomes."""
    group = np.repeat(np.arange(N_GROUPS), rng.integers(2, 9, size=N_GROUPS))
    x = rng.normal(size=len(group))
    return group, x, 1 + 0.5 * x + sd * rng.normal(size=N_GROUPS)[group] + rng.normal(size=len(x))


def linear_model(group, x, y) -> pm.Model:
    with pm.Model(coords={"predictor": ["one", "x"], "school": np.arange(N_GROUPS)}) as model:
        beta = pm.Normal("beta", 0, 1, dims="predictor")
        sd, sigma = pm.HalfNormal("sd", 1), pm.HalfNormal("sigma", 1)
        z = pm.Normal("z", 0, sd, dims="school")
        pm.Normal("y", beta[0] + beta[1] * x + z[group], sigma, observed=y)
    return model


def slopes_model(group, x, y, centre=(0.0, 0.0), scale: float = 1.0) -> pm.Model:
    X = np.column_stack([np.ones_like(x), x])
    n_groups = group.max() + 1
    with pm.Model(coords={"effect": ["Intercept", "slope"], "group": np.arange(n_groups)}) as model:
        beta = pm.Normal("beta", centre, scale, dims="effect")
        root, _, _ = pm.LKJCholeskyCov("root", n=2, eta=1, sd_dist=pm.HalfNormal.dist(scale))
        u = pm.MvNormal("u", pt.zeros(2), chol=root, dims=("group", "effect"))
        sigma = pm.HalfNormal("sigma", scale)
        pm.Normal("y", (X * (beta + u[group])).sum(axis=1), sigma, observed=y)
    return model


def logistic_model(X, trials, group, y, sd_scale: float = 1.0) -> pm.Model:
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 2, shape=X.shape[1])
        sd = pm.HalfNormal("sd", sd_scale)
        z = pm.Normal("z", shape=int(group.max()) + 1)
        pm.Binomial("y", n=trials, logit_p=X @ beta + sd * z[group], observed=y)
    return model


@pytest.fixture(scope="module")
def sleepstudy(data_folder):
    frame = datasets.load("sleepstudy", data_folder).frame
    days, reaction = (frame[name].to_numpy(float) for name in ("Days", "Reaction"))
    return slopes_model(pd.factorize(frame["Subject"])[0], days, reaction, (250, 10), 30.0)


@pytest.fixture(scope="module")
def cbpp(data_folder):
    frame = datasets.load("cbpp", data_folder).frame
    X = pd.get_dummies(frame["period"].astype(str)).to_numpy(float).copy()
    X[:, 0] = 1
    trials, incidence = frame["size"].to_numpy(), frame["incidence"].to_numpy()
    return logistic_model(X, trials, pd.factorize(frame["herd"])[0], incidence)


# The values are those of lme4, which are published with these data.


def test_sleepstudy_by_maximum_likelihood(sleepstudy):
    fit = fit_marginal(sleepstudy, ["u"], method="exact")
    estimates, errors = fit.estimates, fit.standard_errors
    np.testing.assert_allclose(fit.minus_two_log_likelihood, 1751.9393, atol=5e-5)
    np.testing.assert_allclose(fit.aic, 1763.9393, atol=5e-5)
    np.testing.assert_allclose(estimates["beta"], [251.4051, 10.4673], atol=5e-5)
    np.testing.assert_allclose(errors["beta"], [6.632, 1.502], atol=5e-4)
    np.testing.assert_allclose(estimates["root_corr"][0, 1], 0.081, atol=5e-4)
    np.testing.assert_allclose(estimates["sigma"] ** 2, 654.941, atol=5e-4)
    # lme4 prints 23.7805 where its search ends. In a balanced design the maximum is known: the
    # covariance of the least-squares lines of the subjects, less that of their errors.
    np.testing.assert_allclose(estimates["root_stds"], [23.7805, 5.7168], atol=1e-4)
    X = np.column_stack([np.ones(10), np.arange(10)])
    reaction = sleepstudy.rvs_to_values[sleepstudy["y"]].data
    lines = np.linalg.lstsq(X, reaction.reshape(18, 10).T)[0]
    errors_of_lines = 654.94102706 * np.linalg.inv(X.T @ X)
    expected = np.sqrt(np.diag(np.cov(lines, bias=True) - errors_of_lines))
    np.testing.assert_allclose(estimates["root_stds"], expected, rtol=1e-7)


@pytest.mark.slow
def test_sleepstudy_by_restricted_maximum_likelihood(sleepstudy):
    fit = fit_marginal(sleepstudy, ["u"], method="exact", reml=True)
    np.testing.assert_allclose(fit.minus_two_log_likelihood, 1743.628, atol=5e-4)
    np.testing.assert_allclose(fit.estimates["beta"], [251.4051, 10.4673], atol=5e-5)
    np.testing.assert_allclose(fit.standard_errors["beta"], [6.825, 1.546], atol=5e-4)
    np.testing.assert_allclose(fit.estimates["root_stds"] ** 2, [612.09, 35.07], atol=5e-3)
    np.testing.assert_allclose(fit.estimates["root_corr"][0, 1], 0.066, atol=5e-4)
    # The conditional modes of the first subject, 308.
    np.testing.assert_allclose(fit.modes["u"][0], [2.2586, 9.1990], atol=5e-5)


@pytest.mark.slow
def test_cbpp_by_laplace(cbpp):
    fit = fit_marginal(cbpp, ["z"])
    assert fit.method == "laplace"
    beta = [-1.3985, -0.9923, -1.1287, -1.5803]
    np.testing.assert_allclose(fit.estimates["beta"], beta, atol=5e-5)
    np.testing.assert_allclose(fit.estimates["sd"], 0.6423, atol=5e-5)
    np.testing.assert_allclose(-0.5 * fit.minus_two_log_likelihood, -92.0263, atol=5e-5)


@pytest.mark.slow
def test_cbpp_by_quadrature(cbpp):
    fit = fit_marginal(cbpp, ["z"], method="quadrature", points=25)
    beta = [-1.39923, -0.99140, -1.12782, -1.57947]
    np.testing.assert_allclose(fit.estimates["beta"], beta, atol=5e-6)
    np.testing.assert_allclose(fit.estimates["sd"], 0.6475, atol=5e-5)
    np.testing.assert_allclose(fit.minus_two_log_likelihood, 183.967, atol=5e-4)


@pytest.mark.slow
def test_contraception_by_laplace(data_folder):
    # The published values, 2413.617 and 1.1091, 1.3763 of the number of children, are those of a
    # search that ended early. These are of a search by NumPy alone, to seven digits.
    frame = datasets.load("contraception", data_folder).frame
    children = [frame["livch"].astype(str) == level for level in ("1", "2", "3+")]
    X = np.column_stack([np.ones(len(frame)), frame["urban"], frame["age"], *children])
    group = pd.factorize(frame["district"])[0]
    fit = fit_marginal(logistic_model(X.astype(float), 1, group, frame["use"].to_numpy()), "z")
    beta = [-1.689711, 0.732991, -0.026595, 1.109184, 1.376395, 1.345234]
    np.testing.assert_allclose(fit.estimates["beta"], beta, atol=1e-6)
    np.testing.assert_allclose(fit.estimates["sd"] ** 2, 0.2124, atol=5e-5)
    np.testing.assert_allclose(fit.minus_two_log_likelihood, 2413.61569, atol=5e-6)


@pytest.mark.parametrize("reml", [False, True])
def test_unbalanced_groups_as_statsmodels(rng, reml):
    formula = pytest.importorskip("statsmodels.formula.api")
    group, x, y = random_intercepts(rng)
    frame = pd.DataFrame({"group": group, "x": x, "y": y})
    reference = formula.mixedlm("y ~ x", frame, groups="group").fit(reml=reml, gtol=1e-8)
    fit = fit_marginal(linear_model(group, x, y), ["z"], reml=reml)
    np.testing.assert_allclose(fit.estimates["beta"], reference.fe_params, atol=1e-5)
    np.testing.assert_allclose(fit.estimates["sigma"] ** 2, reference.scale, atol=1e-4)
    np.testing.assert_allclose(fit.estimates["sd"] ** 2, reference.cov_re.iloc[0, 0], atol=1e-4)
    np.testing.assert_allclose(fit.minus_two_log_likelihood, -2 * reference.llf, atol=1e-6)


def assert_gradient(objective, position: np.ndarray) -> None:
    _, slope = objective(position)
    steps = 1e-4 * np.eye(len(position))
    differences = [
        (
            8 * (objective(position + step)[0] - objective(position - step)[0])
            - (objective(position + 2 * step)[0] - objective(position - 2 * step)[0])
        )
        / (12 * step.sum())
        for step in steps
    ]
    np.testing.assert_allclose(slope, differences, atol=1e-6 * max(1, np.abs(slope).max()))


@pytest.mark.usefixtures("as_written")
@pytest.mark.parametrize(
    ("make", "points"),
    [
        (models.logistic_intercepts, 1),
        (models.logistic_intercepts, 3),
        (models.poisson_with_data_and_groups_predictor, 1),
        (models.gamma_frailty, 1),
        (models.gamma_frailty, 3),
        (models.student_records, 1),
        (models.logistic_slopes, 1),
        (models.two_variables, 3),
    ],
)
def test_the_gradient_is_that_of_the_value(rng, make, points):
    groups = groups_of(*make(rng))
    density = groups.density
    graph = laplace(density) if points == 1 else quadrature(density, points, moving=True)
    position = groups.layout.ravel(groups.initial_point)
    position = position + 0.3 * rng.normal(size=len(position))
    assert_gradient(Likelihood(groups, graph), position)


def test_the_gradient_of_the_restricted_likelihood(rng):
    groups = groups_of(linear_model(*random_intercepts(rng)), ["z"])
    objective = Likelihood(groups, exact(groups.density))
    fixed = fixed_effects(groups, objective)
    assert fixed.tolist() == [True, True, False, False]
    restricted = RestrictedLikelihood(objective, fixed, np.zeros(4))
    assert_gradient(restricted, rng.normal(size=2))


def test_restricted_likelihood_integrates_the_fixed_effects(rng):
    groups = groups_of(linear_model(*random_intercepts(rng)), ["z"])
    objective = Likelihood(groups, exact(groups.density))
    restricted = RestrictedLikelihood(objective, np.array([True, True, False, False]), np.zeros(4))
    rest = np.array([-0.2, 0.1])
    effects, factor = restricted.estimate(rest)
    grid = np.linspace(-8, 8, 21)
    values = [
        objective(restricted.complete(effects + factor @ [first, second], rest))[0]
        for first in grid
        for second in grid
    ]
    cell = (grid[1] - grid[0]) ** 2 * np.abs(np.linalg.det(factor))
    expected = np.logaddexp.reduce(values) + np.log(cell)
    np.testing.assert_allclose(restricted(rest)[0], expected, rtol=1e-10)


@pytest.mark.slow
def test_observed_variables_without_local_ones_count(rng):
    group, x, y = random_intercepts(rng)
    model = linear_model(group, x, y)
    with model:
        pm.Normal("z_score", model["beta"][1], model["sigma"], observed=[0.3, -1.0, 2.0])
    fit = fit_marginal(model, ["z"])

    def log_likelihood(parameters: np.ndarray) -> float:
        first, second, sd, sigma = parameters
        covariance = sd**2 * (group[:, None] == group) + sigma**2 * np.eye(len(y))
        records = stats.multivariate_normal(first + second * x, covariance).logpdf(y)
        return records + stats.norm(second, sigma).logpdf([0.3, -1.0, 2.0]).sum()

    estimates = fit.to_dataframe()["estimate"].to_numpy()
    np.testing.assert_allclose(fit.minus_two_log_likelihood, -2 * log_likelihood(estimates))
    assert np.abs(approx_fprime(estimates, log_likelihood, 1e-7)).max() < 1e-3
    information = np.array(
        [
            approx_fprime(estimates, lambda p, i=i: approx_fprime(p, log_likelihood, 1e-4)[i], 1e-4)
            for i in range(4)
        ]
    )
    errors = np.sqrt(np.diag(np.linalg.inv(-information)))
    np.testing.assert_allclose(fit.to_dataframe()["standard_error"], errors, rtol=1e-2)


def test_result_has_dims_labels_and_modes(rng):
    group, x, y = random_intercepts(rng)
    model = linear_model(group, x, y)
    with model:
        pm.Deterministic("ratio", model["sd"] / model["sigma"])
        pm.Deterministic("intercept", model["beta"][0] + model["z"], dims="school")
    fit = fit_marginal(model, model["z"])
    assert fit.labels == ("beta[predictor=one]", "beta[predictor=x]", "sd", "sigma", "ratio")
    assert fit.estimates["beta"].dims == ("predictor",)
    assert fit.n_groups == N_GROUPS
    table = fit.to_dataframe()
    assert table.index.tolist() == list(fit.labels)
    np.testing.assert_allclose(np.sqrt(np.diag(fit.covariance)), table["standard_error"])
    sd, sigma = float(fit.estimates["sd"]), float(fit.estimates["sigma"])
    np.testing.assert_allclose(fit.estimates["ratio"], sd / sigma)
    # The delta method for the ratio by hand.
    slope = np.array([1 / sigma, -sd / sigma**2])
    variance = slope @ fit.covariance[2:4, 2:4] @ slope
    np.testing.assert_allclose(fit.standard_errors["ratio"] ** 2, variance, rtol=1e-6)
    # The best linear unbiased prediction of each group.
    counts = np.bincount(group)
    X = np.column_stack([np.ones_like(x), x])
    residuals = np.bincount(group, y - X @ fit.estimates["beta"].values)
    prediction = sd**2 * residuals / (sigma**2 + counts * sd**2)
    np.testing.assert_allclose(fit.modes["z"], prediction, atol=1e-10)
    assert fit.modes["z"].dims == ("school",)
    intercept = float(fit.estimates["beta"][0])
    np.testing.assert_allclose(fit.modes["intercept"], intercept + prediction, atol=1e-10)
    text = repr(fit)
    assert "30 groups" in text
    assert "beta[predictor=x]" in text


@pytest.mark.slow
def test_modes_are_on_the_scale_of_the_variable(rng):
    group = np.repeat(np.arange(N_GROUPS), 6)
    hazard = rng.gamma(2.0, 0.5, size=N_GROUPS)
    times = rng.exponential(size=len(group)) / hazard[group]
    with pm.Model() as model:
        shape, scale = pm.Exponential("shape", 1), pm.HalfNormal("scale", 1)
        frailty = pm.Gamma("frailty", shape, shape, shape=N_GROUPS)
        pm.Exponential("times", scale * frailty[group], observed=times)
    fit = fit_marginal(model, ["frailty"], method="quadrature")
    shape, scale = float(fit.estimates["shape"]), float(fit.estimates["scale"])
    # The law given the records is a Gamma law, as is known, and so is the marginal likelihood.
    total = np.bincount(group, times)
    np.testing.assert_allclose(
        fit.modes["frailty"], (shape + 6) / (shape + scale * total), rtol=1e-8
    )
    log_likelihood = (
        shape * np.log(shape)
        + 6 * np.log(scale)
        + special.gammaln(shape + 6)
        - special.gammaln(shape)
        - (shape + 6) * np.log(shape + scale * total)
    ).sum()
    np.testing.assert_allclose(fit.minus_two_log_likelihood, -2 * log_likelihood, rtol=1e-9)


@pytest.mark.slow
def test_chunks_of_groups_change_nothing(rng, monkeypatch):
    model = linear_model(*random_intercepts(rng))

    def results():
        return groups_of(model, ["z"]), fit_marginal(model, ["z"])

    _, together = results()
    monkeypatch.setattr(likelihood, "ELEMENTS", 20)
    groups, apart = results()
    assert len(groups.chunks(1)) > 5
    np.testing.assert_array_equal(np.concatenate(groups.chunks(1)), np.arange(N_GROUPS))
    np.testing.assert_allclose(apart.to_dataframe(), together.to_dataframe(), rtol=1e-7)
    np.testing.assert_allclose(apart.modes["z"], together.modes["z"], atol=1e-7)


@pytest.fixture
def sampled(monkeypatch) -> list[bool]:
    """Searches begin on a sample of 60 groups; the list says which of them ended from there."""
    monkeypatch.setattr(fitting, "SMALLEST_SAMPLE", 60)
    from_sample, ended = fitting._from_sample, []

    def watched(*arguments):
        maximum = from_sample(*arguments)
        ended.append(maximum is not None)
        return maximum

    monkeypatch.setattr(fitting, "_from_sample", watched)
    return ended


MANY_GROUPS = 600


@pytest.mark.parametrize("kind", ["logistic", "linear", "reml"])
def test_a_search_on_a_sample_ends_at_the_maximum_of_all_groups(rng, sampled, kind):
    group = np.repeat(np.arange(MANY_GROUPS), rng.integers(2, 6, size=MANY_GROUPS))
    x, effect = rng.normal(size=len(group)), rng.normal(size=MANY_GROUPS)[group]
    with pm.Model() as model:
        beta, sd = pm.Normal("beta", shape=2), pm.HalfNormal("sd")
        z = pm.Normal("z", 0, sd, shape=MANY_GROUPS)
        predictor = beta[0] + beta[1] * x + z[group]
        if kind == "logistic":
            y = rng.random(len(group)) < special.expit(0.5 * x + effect)
            pm.Bernoulli("y", logit_p=predictor, observed=y.astype(int))
        else:
            y = 1 + 0.5 * x + effect + rng.normal(size=len(group))
            pm.Normal("y", predictor, pm.HalfNormal("sigma"), observed=y)
    groups = groups_of(model, ["z"])
    approximate = laplace if kind == "logistic" else exact
    objective = Likelihood(groups, approximate(groups.density))
    restricted = None
    if kind == "reml":
        fixed = fixed_effects(groups, objective)
        restricted = RestrictedLikelihood(objective, fixed, np.zeros(4))
    sample = fitting._sample(groups, objective)
    quick = fitting._search(groups, objective, sample, restricted, 100)
    assert sampled == [True]
    assert quick.inside
    on_all = fitting._search(groups, objective, None, restricted, 100)
    errors = 1 / np.sqrt(np.diag(on_all.information))
    assert (np.abs(quick.position - on_all.position) < 1e-6 * errors).all()
    scale = np.outer(errors, errors)
    np.testing.assert_allclose(quick.information * scale, on_all.information * scale, atol=1e-5)
    np.testing.assert_allclose(quick.value, on_all.value, rtol=1e-12)


@pytest.mark.parametrize("in_sample", [0, 1])
def test_a_level_that_is_rare_in_the_sample(rng, sampled, in_sample):
    group = np.repeat(np.arange(MANY_GROUPS), 3)
    order = np.random.default_rng(fitting.SEED).permutation(MANY_GROUPS)
    rare = np.isin(group, order[60 - in_sample :][:8]).astype(float)
    y = 1 + rare + rng.normal(size=MANY_GROUPS)[group] + rng.normal(size=len(group))
    with pm.Model() as model:
        beta, sd, sigma = pm.Normal("beta", shape=2), pm.HalfNormal("sd"), pm.HalfNormal("sigma")
        z = pm.Normal("z", 0, sd, shape=MANY_GROUPS)
        pm.Normal("y", beta[0] + beta[1] * rare + z[group], sigma, observed=y)
    result = fit_marginal(model, "z")
    assert len(sampled) == in_sample
    # In a balanced design the estimates are differences of means.
    means, few = np.bincount(group, y) / 3, np.bincount(group, rare) > 0
    expected = [means[~few].mean(), means[few].mean() - means[~few].mean()]
    errors = result.standard_errors["beta"]
    assert (np.abs(result.estimates["beta"] - expected) < 1e-6 * errors).all()
    sd, sigma = float(result.estimates["sd"]), float(result.estimates["sigma"])
    variance = (sd**2 + sigma**2 / 3) / np.array([(~few).sum(), few.sum()])
    np.testing.assert_allclose(errors**2, [variance[0], variance.sum()], rtol=1e-5)


def without_group_effects(rng) -> tuple[np.ndarray, np.ndarray]:
    """Groups with the same means, so that the standard deviation between them is zero."""
    group = np.repeat(np.arange(N_GROUPS), 5)
    y = rng.normal(size=len(group))
    return group, y - (np.bincount(group, y) / 5)[group]


@pytest.mark.parametrize("reml", [False, True])
@pytest.mark.parametrize("centred", [False, True])
def test_a_standard_deviation_of_zero_is_said(rng, centred, reml):
    group, y = without_group_effects(rng)
    with pm.Model() as model:
        mean, sd, sigma = pm.Normal("mean"), pm.HalfNormal("sd"), pm.HalfNormal("sigma")
        z = pm.Normal("z", 0, sd if centred else 1, shape=N_GROUPS)
        pm.Normal("y", mean + z[group] * (1 if centred else sd), sigma, observed=y)
    with pytest.warns(BoundaryWarning, match="boundary of the range of `sd`:"):
        fit = fit_marginal(model, ["z"], reml=reml)
    assert fit.estimates["sd"] < 1e-3
    assert np.isnan(fit.standard_errors["sd"])
    variance = (y**2).sum() / (len(y) - reml)
    expected = (len(y) - reml) * (np.log(2 * np.pi * variance) + 1) + reml * np.log(len(y))
    np.testing.assert_allclose(fit.minus_two_log_likelihood, expected, atol=1e-4)
    error = np.sqrt(variance / len(y))
    np.testing.assert_allclose(fit.standard_errors["mean"], error, rtol=1e-4)
    np.testing.assert_allclose(fit.estimates["sigma"] ** 2, variance, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_a_correlation_of_one_is_said(seed):
    rng = np.random.default_rng(20261121 + seed)
    group, noise = without_group_effects(rng)
    x = np.tile(np.arange(5.0) - 2, N_GROUPS)
    noise -= (np.bincount(group, noise * x) / 10)[group] * x
    effect = rng.normal(size=N_GROUPS)[group]
    model = slopes_model(group, x, effect * (1 + 0.5 * x) + 0.5 * noise)
    with pytest.warns(BoundaryWarning, match="`root`"):
        fit = fit_marginal(model, ["u"])
    np.testing.assert_allclose(fit.estimates["root_corr"][0, 1], 1, atol=1e-4)
    assert np.isnan(fit.standard_errors["root_corr"][0, 1])
    assert np.isfinite(fit.standard_errors["root_stds"]).all()


@pytest.mark.slow
def test_separated_records_are_said(rng):
    group = np.repeat(np.arange(N_GROUPS), 5)
    x = np.tile([0.0, 0.0, 0.0, 1.0, 1.0], N_GROUPS)
    y = np.where(x == 1, 1, rng.integers(0, 2, size=len(x)))
    model = logistic_model(np.column_stack([np.ones_like(x), x]), 1, group, y)
    with pytest.warns(BoundaryWarning, match="`beta`"):
        fit = fit_marginal(model, ["z"])
    assert np.isnan(fit.standard_errors["beta"][1])


@pytest.mark.parametrize("centred", [True, False])
def test_effects_of_a_second_factor_that_stay_are_refused(rng, centred):
    group, _, y = random_intercepts(rng)
    with pm.Model() as model:
        mean, sd, sd_w = pm.Normal("mean"), pm.HalfNormal("sd"), pm.HalfNormal("sd_w")
        z = pm.Normal("z", 0, sd, shape=N_GROUPS)
        w = pm.Normal("w", 0, sd_w if centred else 1, shape=4)
        second = (w if centred else sd_w * w)[np.arange(len(y)) % 4]
        pm.Normal("y", mean + z[group] + second, 1, observed=y)
    with pytest.raises(ModelError, match=r"Effects of several factors need priors.*name them too"):
        fit_marginal(model, "z")


def test_groups_without_records_change_no_estimate(rng):
    group, x, y = random_intercepts(rng)
    fits = []
    for more in (0, 3):
        with pm.Model() as model:
            beta, sd = pm.Normal("beta"), pm.HalfNormal("sd")
            z = pm.Normal("z", 0, sd, shape=N_GROUPS + more)
            pm.Normal("y", beta * x + z[group], 1, observed=y)
        fits.append(fit_marginal(model, ["z"]))
    assert fits[1].minus_two_log_likelihood == pytest.approx(fits[0].minus_two_log_likelihood)
    np.testing.assert_allclose(fits[1].estimates["sd"], fits[0].estimates["sd"], rtol=1e-6)


def test_a_variable_without_influence_is_refused(rng):
    group, x, y = random_intercepts(rng)
    with pm.Model() as model:
        tau = pm.HalfNormal("tau")
        beta, sd = pm.Normal("beta", 0, tau, shape=3), pm.HalfNormal("sd")
        z = pm.Normal("z", 0, sd, shape=N_GROUPS)
        pm.Normal("y", beta[0] + beta[1] * x + z[group], 1, observed=y)
    with pytest.raises(ModelError, match=r"but not on `tau`, `beta\[2\]`"):
        fit_marginal(model, ["z"])


@pytest.mark.parametrize(
    ("reml", "match"), [(False, "does not determine `a`, `b`"), (True, "some of which are collin")]
)
def test_variables_that_replace_each_other_are_refused(rng, reml, match):
    group, _, y = random_intercepts(rng)
    with pm.Model() as model:
        a, b, sd = pm.Normal("a"), pm.Normal("b"), pm.HalfNormal("sd")
        z = pm.Normal("z", 0, sd, shape=N_GROUPS)
        pm.Normal("y", a + b + z[group], 1, observed=y)
    with pytest.raises(ModelError, match=match):
        fit_marginal(model, ["z"], reml=reml)


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"method": "exact"}, ModelError, "not quadratic in the local variables"),
        ({"reml": True}, ModelError, "`reml=True` is for linear mixed models"),
        ({"method": "lme4"}, ValueError, "`method` should be one of 'exact', 'laplace'"),
        ({"points": 5}, ValueError, '`points` should be given with method="quadrature" only'),
        ({"method": "quadrature", "points": 0}, ValueError, "`points` should be a whole number"),
        ({"max_iterations": 2}, ConvergenceError, "did not converge within 2 iterations"),
    ],
)
def test_settings_that_do_not_fit_the_model(rng, settings, error, match):
    group, x, _ = random_intercepts(rng)
    X = np.column_stack([np.ones_like(x), x])
    model = logistic_model(X, 1, group, rng.integers(0, 2, size=len(x)))
    with pytest.raises(error, match=match):
        fit_marginal(model, ["z"], **settings)


def test_too_few_iterations_of_a_linear_model(rng):
    with pytest.raises(ConvergenceError, match="did not converge within 1 iterations"):
        fit_marginal(linear_model(*random_intercepts(rng)), ["z"], max_iterations=1)


def test_reml_needs_an_exact_method_and_fixed_effects(rng):
    group, x, y = random_intercepts(rng)
    with pytest.raises(ModelError, match='should go with method="exact"'):
        fit_marginal(linear_model(group, x, y), ["z"], reml=True, method="laplace")
    with pm.Model() as model:
        sd = pm.HalfNormal("sd")
        z = pm.Normal("z", 0, sd, shape=N_GROUPS)
        pm.Normal("y", z[group], 1, observed=y)
    with pytest.raises(ModelError, match="quadratic in no global variable"):
        fit_marginal(model, ["z"], reml=True)


@pytest.mark.slow
def test_potentials_and_infinite_starts_are_refused(rng):
    group, x, y = random_intercepts(rng)
    model = linear_model(group, x, y)
    with model:
        pm.Potential("penalty", -(model["sd"] ** 2))
    with pytest.raises(ModelError, match="no potentials, but has `penalty`"):
        fit_marginal(model, ["z"])
    with pytest.raises(ConvergenceError, match="not finite at the initial point"):
        fit_marginal(linear_model(group, x, np.where(x > 2, np.inf, y)), ["z"])


def test_a_laplace_prior_is_not_taken_for_quadratic(rng):
    # Its second derivatives are zero wherever they exist.
    group, _, y = random_intercepts(rng)
    with pm.Model() as model:
        mean = pm.Normal("mean")
        z = pm.Laplace("z", 0, 1, shape=N_GROUPS)
        pm.Normal("y", mean + z[group], 1, observed=y)
    with pytest.raises(ModelError, match="not quadratic in the local variables"):
        marginalize(model, ["z"], method="exact")
