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
    SGLD,
    SGLDCV,
    ULA,
    BatchSizeWarning,
    bias_report,
    marginalize,
    sample,
)
from pymc_sgmcmc.batching import WeightedRows
from pymc_sgmcmc.gradient_estimators.weighted import WeightedGradient
from pymc_sgmcmc.posterior import Posterior
from tests.support.linear_gaussian import LinearGaussian
from tests.support.models import logistic_model
from tests.support.sampling import NUMBA, QUIET, z_score

WEIGHTS = np.array([1.0, 5.0, 0.5, 2.0, 1.5])
GIVEN = {"step_size": 0.01, "batch_size": 2, "preconditioner": "identity"}


@pytest.mark.parametrize("with_center", [False, True])
def test_mean_and_covariance_by_enumeration(with_center):
    """All 25 minibatches of two rows, with their probabilities."""
    posterior = Posterior(logistic_model(n_rows=5))
    batching = WeightedRows(posterior.data, 2, WEIGHTS, dtype=posterior.dtype)
    center = np.array([0.3, -0.2, 0.5])
    position = np.array([-0.4, 0.1, 0.2])

    def likelihood(position):
        return posterior.gradient(position) - posterior.log_prior_and_gradient(position)[1]

    estimator = WeightedGradient(
        posterior, batching, *([center, likelihood(center)] if with_center else [])
    )
    theta = pt.vector("theta", shape=(3,))
    index = batching.index_variable("index")
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


@pytest.mark.parametrize("sampler", [SGLD, SGLDCV])
def test_rows_that_are_hardly_ever_drawn(sampler):
    """A chain would follow the posterior without them."""
    weights = np.where(np.arange(200) < 100, 1e-9, 1.0)
    with logistic_model(n_rows=200):
        with pytest.warns(BatchSizeWarning, match="the noise of the gradient is .* times"):
            sampler(**GIVEN, row_weights=weights)
        sampler(**GIVEN, row_weights=np.linspace(0.2, 1, 200))


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


@pytest.mark.parametrize("gradient", ["plain", "cv"])
def test_stationary_law_on_a_linear_model(gradient):
    """The exact mean, and the exact covariance where the noise does not depend on the position."""
    model = LinearGaussian.simulate(40, 2, seed=3)
    weights = np.random.default_rng(4).uniform(0.5, 2, size=40)
    step_size = 0.4 / np.linalg.eigvalsh(model.precision)[-1]
    with model.model():
        step = SGLD(
            gradient=gradient,
            step_size=step_size,
            preconditioner="identity",
            batch_size=20,
            row_weights=weights,
            thin=4,
            compile_kwargs=NUMBA,
        )
        idata = sample(draws=10_000, tune=200, chains=2, cores=1, step=step, random_seed=1, **QUIET)
    draws = idata.sample_stats["position"].values.reshape(-1, 2)
    assert np.abs(z_score(draws, model.mean, batches=len(draws) // 100)).max() < 4.5


def test_settings_of_the_run():
    model = logistic_model(n_rows=200)
    weights = np.linspace(1, 2, 200)
    with model:
        for sampler in (SGLD, SGLDCV):
            step = sampler(**GIVEN, row_weights=weights)
            idata = pm.sample(600, tune=0, chains=2, cores=1, step=step, random_seed=1, **QUIET)
            attributes = idata.sample_stats.attrs
            assert attributes["sgmcmc_batching"] == "weighted"
            assert attributes["sgmcmc_gradient"] == ("plain" if sampler is SGLD else "cv")
            with pytest.raises(ValueError, match="has `row_weights`"):
                bias_report(idata, rerun=True, model=model)
        other = SGLD(**GIVEN, row_weights=2 * weights).run_settings.attributes["row_weights"]
        assert other != attributes["sgmcmc_row_weights"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"row_weights": np.ones(4)}, "one number for each of the 5 rows, but have 4"),
        ({"row_weights": np.array([1, 1, 1, 1, 0])}, "should be positive numbers"),
        ({"row_weights": np.array([1, 1, 1, 1, np.nan])}, "should be positive numbers"),
        ({"row_weights": np.ones((5, 1))}, "should be positive numbers"),
        ({"row_weights": np.array([1, 1, 1, 1, 1e-40])}, "at least 1e-30 of the largest"),
        ({"step_size": None, "preconditioner": None}, "need `step_size` and `batch_size`"),
        ({"batch_size": None}, "need `step_size` and `batch_size`"),
        ({"batching": "shuffle"}, "rows with replacement"),
        ({"gradient": "svrg"}, 'go with `gradient="plain"` or "cv"'),
        ({"local": "beta"}, "neither with `local`"),
    ],
)
def test_weights_that_are_refused(settings, message):
    with logistic_model(n_rows=5), pytest.raises(ValueError, match=message):
        SGLD(**{**GIVEN, "row_weights": WEIGHTS} | settings)


def test_samplers_and_models_that_take_none():
    with (
        logistic_model(n_rows=5),
        pytest.raises(TypeError, match="draws rows with equal probabilities"),
    ):
        HAMCMC(row_weights=WEIGHTS)
    with logistic_model(n_rows=5), pytest.raises(TypeError, match="uses the gradient of all rows"):
        ULA(row_weights=WEIGHTS)
    group = np.repeat(np.arange(5), 4)
    with pm.Model() as joint:
        effect = pm.Normal("effect", 0, pm.HalfNormal("sd"), shape=5)
        pm.Normal("y", effect[group], 1, observed=np.ones(20))
    with marginalize(joint, ["effect"]), pytest.raises(ValueError, match="groups as rows"):
        SGLD(**GIVEN, row_weights=np.ones(5))
