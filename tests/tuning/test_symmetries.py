"""Modes of the same density are found at the centre with other signs or exchanged elements."""

from __future__ import annotations

import warnings

import numpy as np
import pymc as pm
import pytest
from pymc.distributions.transforms import ordered

from pymc_sgmcmc.errors import CenterWarning
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.posterior.position import layout_from_model
from pymc_sgmcmc.tuning import find_center
from pymc_sgmcmc.tuning.symmetries import images


def slopes_of_unknown_sign(prior=pm.Normal):
    """A factor and what it multiplies have no sign, and no search ends near this centre."""
    rng = np.random.default_rng(1)
    group, x = rng.integers(20, size=4000), rng.normal(size=4000)
    slope = 2 * rng.normal(1, 0.5, 20)[group]
    with pm.Model() as model:
        factor = prior("factor", sigma=3)
        effect = pm.Normal("effect", shape=20)
        pm.Normal("y", factor * effect[group] * x, 1, observed=rng.normal(slope * x))
    return model


def mixture(single=False, **transform):
    rng = np.random.default_rng(2)
    y = rng.normal(4 * rng.integers(2, size=2000))
    with pm.Model() as model:
        means = pm.Normal("means", 0, 10, shape=2, initval=[0.0, 1.0], **transform)
        if single:
            one = pm.Beta("one", 2, 2)
            weights = pm.math.stack([one, 1 - one])
        else:
            weights = pm.Dirichlet("weights", [2, 2])
        pm.NormalMixture("y", weights, means, 1, observed=y)
    return model


def network():
    rng = np.random.default_rng(3)
    X = rng.normal(size=(2000, 2))
    y = np.tanh(X @ [[1.5, -1.0], [0.5, 1.0]]) @ [2.0, 1.0]
    with pm.Model() as model:
        inner, outer = pm.Normal("inner", shape=(2, 2)), pm.Normal("outer", shape=2)
        pm.Normal("y", pm.math.tanh(X @ inner) @ outer, 0.3, observed=rng.normal(y, 0.3))
    return model


def search(model):
    posterior = Posterior(model)
    return find_center(posterior, posterior.initial_position)


@pytest.mark.parametrize(
    ("model", "change"),
    [
        (slopes_of_unknown_sign, "another sign of factor and effect"),
        (mixture, "elements 0 and 1 of means and weights exchanged"),
        (lambda: mixture(single=True), "elements 0 and 1 of means and one exchanged"),
        (network, "another sign of inner and outer"),
    ],
)
def test_a_mode_by_symmetry_is_told(model, change):
    with pytest.warns(CenterWarning, match=f"more than one mode: with {change}.*the same"):
        search(model())


@pytest.mark.parametrize(
    "model", [lambda: slopes_of_unknown_sign(pm.HalfNormal), lambda: mixture(transform=ordered)]
)
def test_without_symmetry_nothing_is_told(model):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The posterior has more than one mode")
        search(model())


def test_exchanged_elements_of_a_simplex():
    with pm.Model() as model:
        weights = pm.Dirichlet("weights", np.ones(4))
    transform = model.rvs_to_transforms[weights]
    values = np.array([0.1, 0.3, 0.4, 0.2])
    layout = layout_from_model(model, None, model.initial_point())
    ((change, image),) = images(layout, transform.forward(values).eval())
    assert change == "elements 0 and 2 of weights exchanged"
    np.testing.assert_allclose(transform.backward(image).eval(), values[[2, 1, 0, 3]])
