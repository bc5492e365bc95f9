"""Monte-Carlo EM against exact marginal likelihoods, quadrature and published values."""

from __future__ import annotations

import logging

import numpy as np
import pandas as pd
import pymc as pm
import pytest
from scipy import optimize, stats

from pymc_sgmcmc import datasets
from pymc_sgmcmc.errors import BoundaryWarning, ConvergenceError, ModelError
from pymc_sgmcmc.marginal.exact import exact
from pymc_sgmcmc.marginal.likelihood import Likelihood
from pymc_sgmcmc.maximum_likelihood import fit_marginal, mcem
from pymc_sgmcmc.maximum_likelihood.maximum import information_at, maximize
from pymc_sgmcmc.maximum_likelihood.mcem import GroupChains, MonteCarloEM
from tests.maximum_likelihood.test_fit import (
    N_GROUPS,
    groups_of,
    linear_model,
    logistic_model,
    random_intercepts,
    without_group_effects,
)

pytestmark = pytest.mark.usefixtures("without_compiler")

SEED = 20_181_205


def assert_within_its_error(fit, expected: np.ndarray) -> None:
    """Estimates are within four Monte-Carlo errors, which are small beside the standard errors."""
    table = fit.to_dataframe()
    distances = (table["estimate"] - expected) / table["monte_carlo_error"]
    assert np.abs(distances).max() < 4
    assert (table["monte_carlo_error"] < 0.06 * table["standard_error"]).all()


@pytest.mark.slow
def test_cbpp_agrees_with_quadrature(data_folder):
    frame = datasets.load("cbpp", data_folder).frame
    X = pd.get_dummies(frame["period"].astype(str)).to_numpy(float).copy()
    X[:, 0] = 1
    trials, incidence = frame["size"].to_numpy(), frame["incidence"].to_numpy()
    model = logistic_model(X, trials, pd.factorize(frame["herd"])[0], incidence)
    fit = fit_marginal(model, "z", method="mcem", random_seed=SEED)
    # The values of lme4 with 25 nodes, and the standard errors of method="quadrature".
    assert_within_its_error(fit, [-1.39923, -0.99140, -1.12782, -1.57947, 0.6475])
    errors = [0.23351, 0.30677, 0.32677, 0.42759, 0.18052]
    np.testing.assert_allclose(fit.to_dataframe()["standard_error"], errors, rtol=0.03)
    assert abs(fit.minus_two_log_likelihood - 183.967) < 4 * fit.minus_two_log_likelihood_error
    assert fit.minus_two_log_likelihood_error < 0.1
    assert "Monte-Carlo error" in repr(fit)


def test_linear_models_have_their_maximum(rng, caplog, monkeypatch):
    monkeypatch.setattr(mcem, "SMALLEST_FRACTION", 0.99)
    # The search starts far from the maximum, unlike that of `fit_marginal`.
    groups = groups_of(linear_model(*random_intercepts(rng)), ["z"])
    likelihood = Likelihood(groups, exact(groups.density))
    start, labels = np.array([0.0, 0.0, -1.0, 1.0]), groups.layout.labels
    expected = maximize(likelihood, start, 100, labels)
    search = MonteCarloEM(groups, np.random.default_rng(SEED), 0.05, 100)
    with caplog.at_level(logging.WARNING, logger="pymc.sgmcmc"):
        drawn = search.maximize(start, labels)
    errors = np.sqrt(np.diag(drawn.covariance))
    assert (np.abs(drawn.maximum.position - expected.position) < 4 * errors).all()
    standard_errors = np.sqrt(np.diag(np.linalg.inv(expected.information)))
    assert (errors < 0.05 * standard_errors).all()
    # The second derivatives are exact for Gaussian groups.
    scale = np.outer(standard_errors, standard_errors)
    information = information_at(likelihood, drawn.maximum.position)
    np.testing.assert_allclose(drawn.maximum.information * scale, information * scale, atol=1e-4)
    value = likelihood(drawn.maximum.position)[0]
    assert abs(drawn.maximum.value - value) < 4 * drawn.value_error
    assert "the draws of `z` are correlated in 30 of 30 groups" in caplog.text


@pytest.mark.slow
def test_four_quantities_a_group_have_the_maximum_of_their_gaussian_law(rng):
    size, records = 4, 12
    group = np.repeat(np.arange(N_GROUPS), records)
    X = np.column_stack([np.ones(len(group)), rng.normal(size=(len(group), size - 1))])
    effects = 0.3 + rng.normal(size=(N_GROUPS, size)) * [0.5, 0.7, 0.9, 1.1]
    y = (X * effects[group]).sum(axis=1) + rng.normal(size=len(group))
    with pm.Model() as model:
        beta, sd = pm.Normal("beta", shape=size), pm.HalfNormal("sd", shape=size)
        z = pm.Normal("z", 0, sd, shape=(N_GROUPS, size))
        pm.Normal("y", (X * (beta + z[group])).sum(axis=1), 1, observed=y)
    fit = fit_marginal(model, "z", method="mcem", random_seed=SEED)

    def minus_two_log_likelihood(parameters: np.ndarray) -> float:
        beta, variances = parameters[:size], parameters[size:] ** 2
        of_groups = X.reshape(N_GROUPS, records, size)
        covariance = np.einsum("gik,k,gjk->gij", of_groups, variances, of_groups)
        residuals = (y - X @ beta).reshape(N_GROUPS, records)
        return -2 * sum(
            stats.multivariate_normal(cov=each + np.eye(records)).logpdf(residual)
            for each, residual in zip(covariance, residuals, strict=True)
        )

    estimates = fit.to_dataframe()["estimate"].to_numpy()
    maximum = optimize.minimize(minus_two_log_likelihood, estimates, tol=1e-4)
    assert_within_its_error(fit, maximum.x)
    difference = fit.minus_two_log_likelihood - maximum.fun
    assert abs(difference) < 4 * fit.minus_two_log_likelihood_error


def test_draws_have_the_law_of_their_group(rng):
    group, x, y = random_intercepts(rng)
    groups = groups_of(linear_model(group, x, y), ["z"])
    chains = GroupChains(groups, np.random.default_rng(SEED))
    counts = np.bincount(group)
    for beta, log_sd in ((np.zeros(2), 0.0), (np.array([1.0, 0.5]), -0.7)):
        chains.move(np.array([*beta, log_sd, 0.0]))
        draws = chains.draw(4000)[:, :, 0]
        precision = np.exp(-2 * log_sd) + counts
        residuals = np.bincount(group, y - beta[0] - beta[1] * x)
        standard = (draws - residuals / precision) * np.sqrt(precision)
        # Proposals of a Student-t law have a variance of 5/3, and about a fifth is not accepted.
        assert np.abs(standard.mean(axis=0)).max() < 5 * 1.3 / np.sqrt(4000)
        assert abs(standard.var() - 1) < 5 * 1.3 * np.sqrt(2 / standard.size)
        assert np.abs(stats.kurtosis(standard, axis=None)) < 0.1
        accepted = (np.diff(draws, axis=0) != 0).mean()
        assert 0.7 < accepted < 0.95
        assert (chains.effective() > 0.9).all()


@pytest.mark.slow
def test_a_seed_gives_the_same_estimates(rng):
    model = linear_model(*random_intercepts(rng))
    fits = [
        fit_marginal(model, "z", method="mcem", monte_carlo_error=1, random_seed=seed)
        for seed in (1, 1, 2)
    ]
    first, again, other = (fit.to_dataframe() for fit in fits)
    pd.testing.assert_frame_equal(first, again)
    assert first.columns.tolist() == ["estimate", "standard_error", "monte_carlo_error"]
    assert (first["estimate"] != other["estimate"]).all()
    assert fits[0].minus_two_log_likelihood == fits[1].minus_two_log_likelihood


def test_a_standard_deviation_of_zero_is_said(rng):
    group, y = without_group_effects(rng)
    with pm.Model() as model:
        mean, sd = pm.Normal("mean"), pm.HalfNormal("sd")
        z = pm.Normal("z", shape=N_GROUPS)
        pm.Normal("y", mean + sd * z[group], 1, observed=y)
    with pytest.warns(BoundaryWarning, match="boundary of the range of `sd`:"):
        fit = fit_marginal(model, "z", method="mcem", random_seed=SEED)
    assert fit.estimates["sd"] < 0.1
    assert np.isnan(fit.standard_errors["sd"])


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"points": 5}, ValueError, '`points` should be given with method="quadrature" only'),
        ({"reml": True}, ModelError, '`reml=True` should go with method="exact"'),
        ({"monte_carlo_error": -0.1}, ValueError, "`monte_carlo_error` should be positive"),
        ({"monte_carlo_error": "0.1"}, TypeError, "`monte_carlo_error` should be a positive"),
        (
            {"method": "laplace", "monte_carlo_error": 0.1},
            ValueError,
            '`monte_carlo_error` should be given with method="mcem" only',
        ),
        ({"max_iterations": 3}, ConvergenceError, "within 3 iterations"),
    ],
)
def test_settings_that_do_not_fit(rng, settings, error, match):
    model = linear_model(*random_intercepts(rng))
    with pytest.raises(error, match=match):
        fit_marginal(model, ["z"], **{"method": "mcem", "random_seed": SEED, **settings})


@pytest.mark.slow
def test_a_larger_error_than_stated_is_said(rng, caplog, monkeypatch):
    monkeypatch.setattr(mcem, "MOST_BATCHES", mcem.FEWEST_BATCHES)
    model = linear_model(*random_intercepts(rng))
    with caplog.at_level(logging.WARNING, logger="pymc.sgmcmc"):
        fit = fit_marginal(model, "z", method="mcem", monte_carlo_error=1e-4, random_seed=SEED)
    assert "`monte_carlo_error` should be at most 0.0001 standard errors, but is 0.0" in caplog.text
    assert "1000 a group" in caplog.text
    table = fit.to_dataframe()
    assert (table["monte_carlo_error"] > 1e-4 * table["standard_error"]).any()
