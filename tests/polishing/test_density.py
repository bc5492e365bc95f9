"""The log density at many positions together is that at each of them."""

from __future__ import annotations

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from pymc_sgmcmc.polishing import density as module
from pymc_sgmcmc.polishing.density import FullDensity
from pymc_sgmcmc.posterior import Posterior
from tests.support.models import logistic_model, two_variable_model


def groups_model():
    rng = np.random.default_rng(4)
    group = rng.integers(0, 6, size=90)
    with pm.Model() as model:
        sd = pm.HalfNormal("sd", 1.0)
        effects = pm.Normal("effects", 0.0, sd, shape=6)
        pm.Poisson("y", pt.exp(effects[group]), observed=rng.poisson(1.0, size=90))
    return model


def mixture_model():
    with pm.Model() as model:
        weights = pm.Dirichlet("weights", np.ones(2))
        means = pm.Normal("means", 0.0, 3.0, shape=2)
        pm.NormalMixture("y", weights, means, 0.5, observed=np.linspace(-2, 2, 70))
    return model


MODELS = {
    "logistic": logistic_model,
    "minibatch": lambda: logistic_model(50),
    "two variables": two_variable_model,
    "groups": groups_model,
    "mixture": mixture_model,
}


@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_of_any_pieces_and_threads(monkeypatch, rng, name):
    posterior = Posterior(MODELS[name]())
    positions = posterior.initial_position + 0.5 * rng.standard_normal((7, posterior.dimension))
    expected = [posterior.log_density_and_gradient(position) for position in positions]
    density = FullDensity(posterior, positions)
    assert density.together
    monkeypatch.setattr(module, "TOGETHER_ELEMENTS", 1)
    monkeypatch.setattr(module, "SHORTEST_PIECE", 9)
    for together in (True, False):
        density.together = together
        values, gradients = density(positions)
        np.testing.assert_allclose(values, [value for value, _ in expected], rtol=1e-9)
        np.testing.assert_allclose(
            gradients, [slope for _, slope in expected], rtol=1e-7, atol=1e-8
        )
    assert density.passes == 2


def test_draws_do_not_depend_on_the_number_of_threads(monkeypatch, rng):
    posterior = Posterior(logistic_model())
    positions = rng.standard_normal((5, 3))
    monkeypatch.setattr(module, "TOGETHER_ELEMENTS", 1)
    of_threads = [FullDensity(posterior, positions, threads)(positions) for threads in (1, 2, 9)]
    for values, gradients in of_threads[1:]:
        np.testing.assert_array_equal(values, of_threads[0][0])
        np.testing.assert_array_equal(gradients, of_threads[0][1])


def test_a_wrong_or_failing_evaluation_together_is_not_used(monkeypatch, rng):
    posterior = Posterior(logistic_model())
    positions = rng.standard_normal((5, 3))
    right = FullDensity._compiled

    def wrong(self):
        prior, rows = right(self)
        return prior, lambda *inputs: [2 * output for output in rows(*inputs)]

    def failing(self):
        raise NotImplementedError

    for compiled in (wrong, failing):
        monkeypatch.setattr(FullDensity, "_compiled", compiled)
        density = FullDensity(posterior, positions)
        assert not density.together
        values, _ = density(positions)
        expected = [posterior.log_density_and_gradient(position)[0] for position in positions]
        np.testing.assert_allclose(values, expected)


def test_values_that_are_not_finite_have_density_zero(rng):
    posterior = Posterior(logistic_model())
    density = FullDensity(posterior, rng.standard_normal((5, 3)))
    positions = np.array([[0.0, 0.0, 0.0], [np.nan, 0.0, 0.0], [1e200, 0.0, 0.0]])
    values, gradients = density(positions)
    assert np.isfinite(values[0])
    assert (values[1:] == -np.inf).all()
    assert (gradients[1:] == 0).all()


@pytest.mark.slow
def test_mixtures_are_evaluated_together(rng):
    """Their gradients have graphs inside, which are written out."""
    posterior = Posterior(mixture_model())
    density = FullDensity(posterior, rng.standard_normal((50, posterior.dimension)))
    assert density.together
