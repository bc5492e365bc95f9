"""Positions at which a parameter of a distribution is invalid."""

from __future__ import annotations

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from pymc_sgmcmc.posterior import Posterior

X = np.linspace(-1, 1, 50)
COUNTS = np.arange(50) % 4
LABELS = COUNTS % 2


def regression():
    beta, sigma = pm.Normal("beta", shape=2), pm.HalfNormal("sigma")
    pm.Normal("y", beta[0] + beta[1] * X, sigma, observed=X)


def transformed_scales():
    first, second = pm.Normal("first"), pm.Uniform("second", 0, 2)
    group = pm.Exponential("group", 1, shape=4)
    sigma = pt.exp(first) + second**2 + group[COUNTS] / (1 + second) + pt.softplus(first)
    pm.Normal("y", first, pt.maximum(sigma, 0.1) * pt.sqrt(second), observed=X)


def counts():
    alpha, a = pm.Exponential("alpha", 1), pm.Normal("a")
    pm.NegativeBinomial("y", mu=pt.exp(a + X), alpha=alpha, observed=COUNTS)
    pm.ZeroInflatedPoisson("z", psi=pm.Beta("psi", 1, 1), mu=pt.exp(a), observed=COUNTS)


def proportions():
    mean, concentration = pm.Normal("mean"), pm.HalfNormal("concentration")
    pm.Beta("y", mu=pm.math.sigmoid(mean), nu=concentration, observed=0.3 + 0.1 * X)


def classes():
    beta = pm.Normal("beta", shape=4)
    pm.Categorical("y", p=pm.math.softmax(beta), observed=COUNTS)
    pm.Bernoulli("z", logit_p=beta[0] * X, observed=LABELS)


def shares():
    share, nu = pm.Dirichlet("share", np.ones(4)), pm.Gamma("nu", 2, 0.1)
    pm.Multinomial("y", n=3, p=share, observed=np.tile([1, 1, 1, 0], (50, 1)))
    pm.StudentT("z", nu=nu, mu=0, sigma=share[0], observed=X)


def probit():
    p = pm.math.invprobit(pm.Normal("a") + X)
    pm.Bernoulli("y", p, observed=LABELS)


def linear_scale():
    a = pm.Normal("a", 1, 1)
    pm.Normal("y", 0, a + 0.1 * X, observed=X)


def linear_shape():
    a = pm.Normal("a", 1, 1)
    pm.Gamma("y", a + 0.1 * X, 1, observed=np.exp(X))


def linear_probability():
    p = pm.Normal("p", 0.5, 1)
    pm.Bernoulli("y", p, observed=np.ones(50))


def difference_of_scales():
    first, second = pm.HalfNormal("first"), pm.HalfNormal("second")
    pm.Normal("y", 0, first - second, observed=X)


@pytest.mark.parametrize(
    "make", [regression, transformed_scales, counts, proportions, classes, shares, probit]
)
def test_ranges_that_are_kept(make):
    with pm.Model() as model:
        make()
    posterior = Posterior(model)
    assert posterior.is_possible(posterior.initial_position)


@pytest.mark.parametrize(
    ("make", "inside", "outside"),
    [
        (linear_scale, [1.0], [-0.05]),
        (linear_shape, [1.0], [-0.5]),
        (linear_probability, [0.9], [1.5]),
        (difference_of_scales, [1.0, 0.0], [0.0, 1.0]),
    ],
)
def test_ranges_that_are_left(make, inside, outside):
    """Log densities outside may be numbers, as those of a gamma distribution of negative shape."""
    with pm.Model() as model:
        make()
    posterior = Posterior(model)
    assert posterior.is_possible(np.array(inside))
    assert not posterior.is_possible(np.array(outside))
