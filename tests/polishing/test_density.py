"""The log density at many positions together is that at each of them."""

from __future__ import annotations

import sys
import time

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


@pytest.mark.parametrize("fault", ["wrong", "failing"])
def test_a_wrong_or_failing_evaluation_together_is_not_used(fault, monkeypatch, rng):
    posterior = Posterior(logistic_model())
    positions = rng.standard_normal((5, 3))
    # The functions of one position are compiled by now.
    expected = [posterior.log_density_and_gradient(position)[0] for position in positions]
    right = Posterior.compile_for_setup

    def compiled(self, inputs, outputs, **settings):
        if fault == "failing":
            raise NotImplementedError
        return right(self, inputs, [2 * output for output in outputs], **settings)

    monkeypatch.setattr(Posterior, "compile_for_setup", compiled)
    density = FullDensity(posterior, positions)
    assert not density.together
    np.testing.assert_allclose(density(positions)[0], expected)


def test_the_clock_has_no_say(monkeypatch, rng):
    """Both ways round differently, so that a choice by the time that they take changes draws."""
    clock = time.perf_counter

    def refused():
        assert not sys._getframe(1).f_globals["__name__"].startswith("pymc_sgmcmc")
        return clock()

    monkeypatch.setattr(time, "perf_counter", refused)
    assert FullDensity(Posterior(logistic_model()), rng.standard_normal((5, 3))).together


def test_an_operation_for_each_position_and_row_is_not_used(rng):
    with pm.Model() as model:
        root, *_ = pm.LKJCholeskyCov("root", n=2, eta=2, sd_dist=pm.Exponential.dist(1.0, shape=2))
        pm.MvNormal("y", pm.Normal("mu", shape=2), chol=root, observed=rng.normal(size=(40, 2)))
    posterior = Posterior(model)
    positions = 0.1 * rng.standard_normal((5, posterior.dimension))
    density = FullDensity(posterior, positions)
    assert not density.together
    expected = [posterior.log_density_and_gradient(position)[0] for position in positions]
    np.testing.assert_allclose(density(positions)[0], expected)


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
