"""The density at many positions together is that of the posterior at each."""

from __future__ import annotations

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from pymc_sgmcmc import Posterior
from pymc_sgmcmc.polishing import density as module
from pymc_sgmcmc.polishing.density import FullDensity


def logistic():
    rng = np.random.default_rng(1)
    X = rng.normal(size=(501, 3))
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 2, shape=3)
        scale = pm.HalfNormal("scale", 1)
        pm.Bernoulli("y", logit_p=scale * pt.dot(X, beta), observed=X[:, 0] > 0)
    return model


def grouped():
    rng = np.random.default_rng(2)
    group = rng.integers(6, size=300)
    with pm.Model() as model:
        effects = pm.ZeroSumNormal("effects", 1, shape=6)
        sd = pm.Exponential("sd", 1)
        pm.Normal("y", effects[group], sd, observed=rng.normal(size=300))
    return model


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("model", [logistic, grouped])
def test_it_is_the_posterior_at_each_position(model, threads, rng, monkeypatch):
    monkeypatch.setattr(module, "TOGETHER_ELEMENTS", 1000)  # so that there are several pieces
    posterior = Posterior(model())
    positions = rng.normal(size=(12, posterior.dimension))
    density = FullDensity(posterior, positions, threads)
    density.together = True  # which of both ways is quicker depends on the machine
    one_by_one = [posterior.log_density_and_gradient(position) for position in positions]
    for _ in range(2):
        values, gradients = density(positions)
        np.testing.assert_allclose(values, [value for value, _ in one_by_one], rtol=1e-9)
        expected = np.array([gradient for _, gradient in one_by_one])
        np.testing.assert_allclose(gradients, expected, rtol=1e-7, atol=1e-8)
    assert density.passes == 2
    density.together = False
    np.testing.assert_allclose(density(positions)[0], values, rtol=1e-9)


def test_large_models_are_evaluated_together(rng):
    X = rng.normal(size=(20_000, 3))
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 2, shape=3)
        pm.Normal("y", pt.dot(X, beta), 1, observed=X[:, 0])
    posterior = Posterior(model)
    assert FullDensity(posterior, rng.normal(size=(50, 3))).together


def test_what_is_not_finite_has_no_density(rng):
    posterior = Posterior(logistic())
    positions = rng.normal(size=(4, 4))
    density = FullDensity(posterior, positions)
    positions[1, 3] = 2000.0  # the exponential of the scale overflows
    positions[2, 0] = np.nan
    values, gradients = density(positions)
    np.testing.assert_array_equal(np.isneginf(values), [False, True, True, False])
    np.testing.assert_array_equal(gradients[1:3], 0.0)
    assert np.isfinite(gradients).all()
