"""Modes that no chain reached are found, with their masses, and others are not made up."""

from __future__ import annotations

import numpy as np
import pymc as pm
import pytest

from pymc_sgmcmc.polishing import modes as module
from pymc_sgmcmc.polishing.density import FullDensity
from pymc_sgmcmc.polishing.modes import covariance_factor, find_modes, prior_starts
from pymc_sgmcmc.posterior import Posterior
from tests.support.models import logistic_model


def two_modes_model(masses, sds=(0.2, 0.2), shape=()):
    """A posterior of x and z with x in a mixture at -3 and 3, and z standard normal."""
    masses, sds = np.array(masses), np.array(sds)
    with pm.Model() as model:
        x = pm.Flat("x")
        z = pm.Normal("z", shape=shape)
        logs = np.log(masses / sds) - 0.5 * ((x - np.array([-3.0, 3.0])) / sds) ** 2
        pm.Potential("mixture", pm.math.logsumexp(logs))
        pm.Normal("y", 0 * z.sum(), 1.0, observed=np.zeros(3))
    return model


def modes_of(model, draws, rng):
    """Modes outside of draws of shape (n, d)."""
    posterior = Posterior(model)
    density = FullDensity(posterior, draws)
    log_densities, _ = density(draws)
    starts = prior_starts(model, posterior, 1)
    return find_modes(density, draws[None], log_densities[None], starts, posterior.labels, rng)


@pytest.mark.parametrize(
    ("masses", "sds", "copy"),
    [
        ((0.5, 0.5), (0.2, 0.2), True),
        ((0.75, 0.25), (0.2, 0.2), False),
        ((0.05, 0.95), (0.2, 0.2), False),
        ((0.5, 0.5), (0.4, 0.1), False),
    ],
    ids=["same", "smaller", "larger", "narrower"],
)
def test_mass_of_a_mode_that_the_run_has_not_seen(rng, masses, sds, copy):
    draws = np.column_stack([-3 + sds[0] * rng.standard_normal(4000), rng.standard_normal(4000)])
    found = modes_of(two_modes_model(masses, sds), draws, rng)
    assert len(found) == 1
    np.testing.assert_allclose(found[0].position, [3.0, 0.0], atol=0.1)
    assert found[0].log_mass == pytest.approx(np.log(masses[1] / masses[0]), abs=0.15)
    assert found[0].is_copy == copy
    assert found[0].distance == pytest.approx(6 / sds[0], rel=0.1)
    assert found[0].place.startswith("`x` = ")


def test_a_mode_that_is_nearer_than_draws_of_many_coordinates(rng):
    """It is 15 standard deviations away, as the draws are, but none is on the way to it."""
    draws = np.column_stack(
        [-3 + 0.4 * rng.standard_normal(4000), rng.standard_normal((4000, 220))]
    )
    model = two_modes_model((0.1, 0.9), (0.4, 0.4), shape=220)
    (mode,) = modes_of(model, draws, rng)
    assert mode.position[0] == pytest.approx(3.0, abs=0.2)
    assert mode.mass > 1


def test_negligible_modes_and_those_of_the_run_are_not_named(rng):
    draws = np.column_stack([-3 + 0.2 * rng.standard_normal(4000), rng.standard_normal(4000)])
    assert modes_of(two_modes_model((0.998, 0.002)), draws, rng) == []
    draws[::2, 0] += 6
    assert modes_of(two_modes_model((0.5, 0.5)), draws, rng) == []


def test_a_posterior_with_one_mode_has_no_other(rng):
    model = logistic_model()
    draws = Posterior(model).initial_position + 0.1 * rng.standard_normal((400, 3))
    draws += [0.6, 1.0, -1.0]
    assert modes_of(model, draws, rng) == []


def test_too_many_coordinates_are_not_searched(monkeypatch, rng):
    monkeypatch.setattr(module, "MOST_COORDINATES", 2)
    assert modes_of(logistic_model(), rng.standard_normal((50, 3)), rng) is None


def test_priors_without_draws_give_no_starts():
    with pm.Model() as model:
        mean = pm.Flat("mean")
        pm.Normal("y", mean, 1.0, observed=np.zeros(3))
    assert prior_starts(model, Posterior(model), 1).shape == (0, 1)


def test_covariance_factor_of_few_and_of_many_draws(rng):
    scale = np.array([1e-6, 1.0, 1e6])
    few = covariance_factor(scale * rng.standard_normal((2, 3)))
    assert np.isfinite(few).all()
    assert (np.diag(few) > 0).all()
    many = covariance_factor(scale * rng.standard_normal((20_000, 3)))
    np.testing.assert_allclose(many / scale[:, None], np.eye(3), atol=0.05)
