"""Rows with different probabilities: unbiased by enumeration, with the right covariance."""

from __future__ import annotations

from itertools import product

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest

from pymc_sgmcmc import (
    HAMCMC,
    SGHMC,
    SGLD,
    SGLDCV,
    BatchSizeWarning,
    bias_report,
    marginalize,
    sample,
)
from pymc_sgmcmc.batching import WeightedRows
from pymc_sgmcmc.gradient_estimators import WeightedGradient
from pymc_sgmcmc.posterior import Posterior
from tests.support.linear_gaussian import LinearGaussian
from tests.support.models import logistic_model
from tests.support.sampling import NUMBA, QUIET, z_score

WEIGHTS = np.array([1.0, 5.0, 0.5, 2.0, 1.5])
GIVEN = {"step_size": 0.01, "preconditioner": "identity"}


@pytest.mark.parametrize("with_center", [False, True])
def test_mean_and_covariance_by_enumeration(with_center):
    """All 25 minibatches of two rows, with their probabilities."""
    posterior = Posterior(logistic_model(n_rows=5))
    center = np.array([0.3, -0.2, 0.5])
    position = np.array([-0.4, 0.1, 0.2])
    estimator = WeightedGradient(posterior, WEIGHTS, 2, center if with_center else None)
    theta = pt.vector("theta", shape=(3,))
    index = estimator.batching.index_variable("index")
    estimate = pytensor.function([theta, index], estimator(theta, index[0]))
    probabilities = WEIGHTS / WEIGHTS.sum()
    pairs = list(product(range(5), repeat=2))
    weights = np.array([probabilities[list(pair)].prod() for pair in pairs])
    values = np.array([estimate(position, np.array([pair])) for pair in pairs])
    mean = weights @ values
    np.testing.assert_allclose(mean, posterior.gradient(position), rtol=1e-9)
    rows = posterior.row_gradients(position, posterior.data)
    if with_center:
        rows = rows - posterior.row_gradients(center, posterior.data)
    scaled = rows / probabilities[:, None]
    deviations = scaled - probabilities @ scaled
    covariance = deviations.T @ (probabilities[:, None] * deviations) / 2
    centred = values - mean
    np.testing.assert_allclose(centred.T @ (weights[:, None] * centred), covariance, rtol=1e-8)
    if not with_center:
        assert len(rows) == 5
        # The planted error of weights that are left out is seen.
        unweighted = weights @ [rows[list(pair)].sum(0) * 2.5 for pair in pairs]
        assert not np.allclose(unweighted, posterior.gradient(position), rtol=1e-3)


def test_weights_of_any_size():
    """Only ratios count, also where the sum is infinite."""
    posterior = Posterior(logistic_model(n_rows=5))
    draws, weights = [], []
    for factor in (1.0, 1e307, 1e-290):
        batching = WeightedRows(posterior.data, 4, factor * WEIGHTS, dtype=posterior.dtype)
        draws.append(batching.draw(np.random.default_rng(1), 100))
        weights.append(batching._data[-1])
    assert np.array_equal(draws[0], draws[1])
    np.testing.assert_allclose(weights, np.tile(WEIGHTS.mean() / WEIGHTS, (3, 1)), rtol=1e-12)


@pytest.mark.parametrize("center", [None, np.zeros(3)])
def test_rows_that_are_hardly_ever_drawn(center):
    """A chain would follow the posterior without them."""
    posterior = Posterior(logistic_model(n_rows=200))
    with pytest.warns(BatchSizeWarning, match="the noise of the gradient is .* times"):
        WeightedGradient(posterior, np.where(np.arange(200) < 100, 1e-9, 1.0), 2, center)
    WeightedGradient(posterior, np.linspace(0.2, 1, 200), 2, center)


def test_rows_are_drawn_with_their_probabilities():
    posterior = Posterior(logistic_model(n_rows=5))
    batching = WeightedRows(posterior.data, 4, WEIGHTS, dtype=posterior.dtype)
    numbers = batching.draw(np.random.default_rng(1), 50_000)
    expected = WEIGHTS / WEIGHTS.sum()
    observed = np.bincount(numbers.ravel(), minlength=5) / numbers.size
    error = np.sqrt(expected * (1 - expected) / numbers.size)
    assert np.abs((observed - expected) / error).max() < 4.5
    rng = np.random.default_rng(1)
    pieces = [batching.draw(rng, count) for count in (20_000, 30_000)]
    assert np.array_equal(np.concatenate(pieces), numbers)


@pytest.mark.parametrize("with_center", [False, True])
def test_stationary_law_on_a_linear_model(with_center):
    """The exact mean, and the exact covariance where the noise does not depend on the position."""
    model = LinearGaussian.simulate(40, 2, seed=3)
    weights = np.random.default_rng(4).uniform(0.5, 2, size=40)
    step_size = 0.4 / np.linalg.eigvalsh(model.precision)[-1]
    with model.model() as problem:
        center = model.mean if with_center else None
        step = SGLD(
            gradient=WeightedGradient(Posterior(problem), weights, 20, center),
            step_size=step_size,
            preconditioner="identity",
            thin=4,
            compile_kwargs=NUMBA,
        )
        idata = sample(draws=10_000, tune=200, chains=2, cores=1, step=step, random_seed=1, **QUIET)
    draws = idata.sample_stats["position"].values.reshape(-1, 2)
    assert np.abs(z_score(draws, model.mean, batches=len(draws) // 100)).max() < 4.5


def test_settings_of_the_run():
    with logistic_model(n_rows=200) as model:
        weighted = WeightedGradient(Posterior(model), np.linspace(1, 2, 200), 2)
        step = SGLD(**GIVEN, gradient=weighted)
        idata = pm.sample(600, tune=0, chains=2, cores=1, step=step, random_seed=1, **QUIET)
    attributes = idata.sample_stats.attrs
    assert attributes["sgmcmc_batching"] == "weighted"
    assert attributes["sgmcmc_gradient"] == "plain"
    with pytest.raises(ValueError, match="an estimator made by hand"):
        bias_report(idata, rerun=True, model=model)


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        (np.ones(4), ValueError, "should be 5 positive numbers, .* have shape"),
        (np.array([1, 1, 1, 1, 0]), ValueError, "5 positive numbers, .* are 0 to 1"),
        (np.array([1, 1, 1, 1, -1]), ValueError, "5 positive numbers"),
        (np.array([1, 1, 1, 1, np.nan]), ValueError, "5 positive numbers"),
        (np.ones((5, 1)), ValueError, "5 positive numbers"),
        (np.array([1, 1, 1, 1, 1e-40]), ValueError, "at least 1e-30 of the largest"),
        (["a"] * 5, TypeError, "`probabilities` should be .* numbers"),
    ],
)
def test_probabilities_that_are_refused(weights, error, message):
    with pytest.raises(error, match=message):
        WeightedGradient(Posterior(logistic_model(n_rows=5)), weights, 2)


@pytest.mark.parametrize(
    ("sampler", "settings"),
    [(SGLDCV, {}), (HAMCMC, {}), (SGHMC, GIVEN)],
    ids=["step size", "scales", "noise estimate"],
)
def test_nothing_is_computed_from_their_noise(sampler, settings):
    with logistic_model(n_rows=200) as model:
        weighted = WeightedGradient(Posterior(model), np.linspace(1, 2, 200), 20)
        with pytest.raises(ValueError, match="noise of rows with different probabilities is not"):
            sampler(gradient=weighted, **settings)


@pytest.mark.usefixtures("uncompiled")
def test_other_samplers_take_them():
    with logistic_model(n_rows=200) as model:
        weighted = WeightedGradient(Posterior(model), np.linspace(1, 2, 200), 20)
        SGHMC(gradient=weighted, noise_estimate=None, friction=1.0, **GIVEN)


def test_models_that_take_none():
    group = np.repeat(np.arange(5), 4)
    with pm.Model() as joint:
        effect = pm.Normal("effect", 0, pm.HalfNormal("sd"), shape=5)
        pm.Normal("y", effect[group], 1, observed=np.ones(20))
    posterior = Posterior(marginalize(joint, ["effect"]))
    with pytest.raises(ValueError, match="groups as rows"):
        WeightedGradient(posterior, np.ones(5), 2)
