"""Modes of the same density are found at the centre with other signs or exchanged elements."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from pymc.distributions.transforms import ordered
from pytensor.raise_op import Assert

from pymc_sgmcmc.errors import CenterWarning
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.posterior.position import layout_from_model
from pymc_sgmcmc.tuning import find_center
from pymc_sgmcmc.tuning.other_modes import _are_joined, _mode_by_symmetry
from pymc_sgmcmc.tuning.subsample import Subsample
from pymc_sgmcmc.tuning.symmetries import MOST_SYMMETRIES, symmetries


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
    y = rng.normal(np.where(rng.random(2000) < 0.3, 4, 0))
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


def two_means_beside_coefficients():
    """Each coefficient is a variable of its own, so that sets of them are many."""
    rng = np.random.default_rng(4)
    X = rng.normal(size=(2000, 12))
    y = X.sum(1) + rng.normal(np.where(rng.random(2000) < 0.3, 4, 0))
    with pm.Model() as model:
        predictor = sum(pm.Normal(f"b{k}") * X[:, k] for k in range(12))
        low, high = pm.Normal("low", 0, 5, initval=-1), pm.Normal("high", 0, 5, initval=1)
        weight = pm.Beta("weight", 2, 2)
        components = [pm.Normal.dist(mean + predictor, 1) for mean in (low, high)]
        pm.Mixture("y", pm.math.stack([weight, 1 - weight]), components, observed=y)
    return model


def unmixing():
    """Half-way to the matrix with another sign the matrix has no inverse."""
    rng = np.random.default_rng(5)
    sources = rng.laplace(size=(2000, 2))
    with pm.Model() as model:
        matrix = pm.Normal("matrix", 0, 2, shape=(2, 2), initval=np.eye(2))
        inverse = pt.linalg.inv(matrix)
        rows = pm.Data("rows", sources @ [[1.0, 0.4], [-0.3, 1.0]])
        density = pm.logp(pm.Laplace.dist(0, 1), rows @ inverse).sum(1)
        pm.Potential("y", density + pt.log(pt.abs(pt.linalg.det(inverse))))
    return model


def bent_ridge():
    """Variances add up, and a curve leads from each way to share them to the other."""
    rng = np.random.default_rng(6)
    with pm.Model() as model:
        log_sds = pm.Normal("log_sds", 0, 1, shape=2)
        sd = pm.math.sqrt(pm.math.exp(2 * log_sds).sum())
        pm.Normal("y", 0, sd, observed=rng.normal(0, 1.4, size=2000))
    return model


def search(model):
    posterior = Posterior(model, rows="rows" if "rows" in model.named_vars else None)
    return find_center(posterior, posterior.initial_position)


@pytest.mark.parametrize(
    ("model", "change"),
    [
        (slopes_of_unknown_sign, "another sign of factor and effect"),
        (mixture, "elements 0 and 1 of means and weights exchanged"),
        (lambda: mixture(single=True), "elements 0 and 1 of means and one exchanged"),
        (network, "another sign of inner and outer"),
        (two_means_beside_coefficients, "weight, low and high exchanged"),
        (unmixing, "another sign of matrix"),
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


def test_the_ends_of_a_bent_ridge_are_one_mode():
    posterior = Posterior(bent_ridge())
    # Several Gaussians are as near as each other, in the middle of the ridge and at its ends.
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The posterior has more than one mode")
        warnings.filterwarnings("ignore", "No Gaussian was found", CenterWarning)
        center = find_center(posterior, posterior.initial_position)
    center = replace(center, position=np.log([1.36, 0.33]))  # The sum of the variances is 1.96.
    subsample = Subsample(posterior)
    ((change, image),) = [
        each for each in symmetries(posterior.layout, center.position) if "exchanged" in each[0]
    ]
    assert change == "elements 0 and 1 of log_sds exchanged"
    ends = center.position, image(center.position)
    high, low = (subsample.log_density_and_gradient(end)[0] for end in (ends[0], np.mean(ends, 0)))
    assert low < high - 1
    assert _mode_by_symmetry(posterior, subsample, center) is None


def test_a_position_that_a_model_refuses_is_no_mode():
    with pm.Model() as model:
        large = pm.Normal("large", 20, 5)
        empty = pm.Normal("empty", shape=(2, 0))
        positive = Assert("not positive")(large, large > 0)
        pm.Normal("y", positive + empty.sum(), 1, observed=np.full(500, 20.0))
    search(model)  # and no error


@pytest.mark.parametrize("position", [np.zeros(80), np.arange(80.0)])
def test_there_are_not_too_many(position):
    """Without a bound the sets of forty variables would be 1e12."""
    with pm.Model() as model:
        for number in range(40):
            pm.Normal(f"x{number}", shape=2)
    layout = layout_from_model(model, None, model.initial_point())
    assert sum(1 for _ in symmetries(layout, position)) <= 3 * MOST_SYMMETRIES


def test_exchanged_elements_of_a_simplex():
    with pm.Model() as model:
        weights = pm.Dirichlet("weights", np.ones(4))
    transform = model.rvs_to_transforms[weights]
    values = np.array([0.1, 0.3, 0.4, 0.2])
    layout = layout_from_model(model, None, model.initial_point())
    position = transform.forward(values).eval()
    ((change, image),) = symmetries(layout, position)
    assert change == "elements 0 and 2 of weights exchanged"
    np.testing.assert_allclose(transform.backward(image(position)).eval(), values[[2, 1, 0, 3]])


def test_ends_of_a_ridge_are_joined_and_two_modes_are_not():
    def of_ridge(position):  # (log l, y) with y = 0.6 l within 0.1 l, as in the neck of a funnel
        log_l, y = position
        residual = (y * np.exp(-log_l) - 0.6) / 0.1
        slopes = np.array([y, -1.0]) * np.exp(-log_l) / 0.1
        return -0.5 * residual**2, residual * slopes

    def of_two(position):
        shifts = np.stack([position, position - [8.0, 3.0]])
        logs = -0.5 * (shifts**2).sum(1)
        value = np.logaddexp(*logs)
        return value, -np.exp(logs - value) @ shifts

    neck, mouth = np.array([-6.0, 0.6 * np.exp(-6)]), np.array([-1.0, 0.6 * np.exp(-1)])
    assert of_ridge((neck + mouth) / 2)[0] < -100
    sds = np.array([0.5, 0.1])
    assert _are_joined(of_ridge, neck, mouth, sds, -1.0)
    assert not _are_joined(of_two, np.array([8.0, 3.0]), np.zeros(2), np.ones(2), -1.0)
