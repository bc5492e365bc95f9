"""Rewritten log densities have PyMC's values and gradients."""

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from pytensor.graph.traversal import toposort
from pytensor.tensor.elemwise import Elemwise

from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.posterior.simplify import LIMIT_OF_NEGATIVE_BINOMIAL, prepared

RNG = np.random.default_rng(1)
X = RNG.normal(size=60)
GROUP = RNG.integers(2, size=60)
COUNTS = RNG.poisson(3, size=60)
COUNTS[:3] = 0, 0, 1000
EXPOSURE = np.where(np.arange(60) < 2, 0.0, 1.5)


def one_n(b):
    """Return the mean and number of successes of a regression."""
    return pt.exp(b[0] + b[1] * X), pt.exp(b[2])


def n_of_groups(b):
    """Return one number of successes for each group."""
    return pt.exp(b[0] + b[1] * X), pt.exp(b[1:] * 2)[GROUP]


def n_of_rows(b):
    """Return a regression of the mean and of the number of successes."""
    return pt.exp(b[0] + b[1] * X), pt.exp(b[2] + b[0] * X)


def mean_without_exponential(b):
    """Return a mean that is not on the log scale."""
    return pt.softplus(b[0] + b[1] * X) + 0.1, b[2] ** 2


def mean_of_n(b):
    """Return a mean that depends on the number of successes."""
    return pt.exp(b[0]) * (1 + X**2) * b[2] ** 2, b[2] ** 2


def one_mean(b):
    """Return a mean that all rows share."""
    return pt.exp(b[0]), pt.exp(b[2])


def mean_of_zero(b):
    """Return means that are zero where nothing was counted."""
    return EXPOSURE * pt.exp(b[0] + b[1] * X), pt.exp(b[2])


MEANS = [
    one_n,
    n_of_groups,
    n_of_rows,
    mean_without_exponential,
    mean_of_n,
    one_mean,
    mean_of_zero,
]


def negative_binomial(mean_and_n):
    """Return a model of counts."""
    with pm.Model() as model:
        b = pm.Normal("b", 0, 2, shape=3)
        mean, n = mean_and_n(b)
        pm.NegativeBinomial("y", mu=mean, alpha=n, observed=COUNTS)
    return model


def has_limit(graph):
    """Tell whether PyMC's choice between two densities is in a graph."""
    found = [str(node.op).lower() for node in toposort([graph]) if isinstance(node.op, Elemwise)]
    return "gt" in found


@pytest.mark.parametrize("mean_and_n", MEANS, ids=lambda function: function.__name__)
def test_negative_binomial_of_a_mean_keeps_values_and_gradients(mean_and_n):
    """Values and gradients are PyMC's, without its second branch."""
    model = negative_binomial(mean_and_n)
    posterior = Posterior(model)
    assert not has_limit(posterior._log_likelihood_template)
    value, gradient = model.compile_logp(), model.compile_dlogp()
    for _ in range(20):
        position = RNG.normal(0, 2, size=3)
        np.testing.assert_allclose(
            posterior.log_density(position), value({"b": position}), rtol=1e-12
        )
        np.testing.assert_allclose(
            posterior.gradient(position), gradient({"b": position}), rtol=1e-10
        )


@pytest.mark.parametrize(
    "position", [(800.0, 0, 0), (-800.0, 0, 0), (30.0, 0, -30), (-30.0, 0, 20)]
)
def test_negative_binomial_keeps_values_where_means_overflow(position):
    """Means that are no numbers of double precision have a log density and a gradient."""
    model, position = negative_binomial(one_n), np.array(position)
    posterior = Posterior(model)
    expected = model.compile_logp()({"b": position}), model.compile_dlogp()({"b": position})
    assert np.isfinite(expected[1]).all()
    np.testing.assert_allclose(posterior.log_density(position), expected[0], rtol=1e-12)
    np.testing.assert_allclose(posterior.gradient(position), expected[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("log_n", [24.0, 60.0, 300.0])
def test_negative_binomial_of_many_successes_is_that_of_the_limit(log_n):
    """A random number of successes above PyMC's limit counts as the limit, and has no gradient."""
    model = negative_binomial(one_n)
    posterior, position = Posterior(model), np.array([1.0, 0.5, log_n])
    at_limit = np.array([1.0, 0.5, np.log(LIMIT_OF_NEGATIVE_BINOMIAL)])
    prior = -(position[2] ** 2 - at_limit[2] ** 2) / 8
    difference = posterior.log_density(position) - posterior.log_density(at_limit)
    np.testing.assert_allclose(difference, prior, rtol=1e-9)
    mean = np.exp(1 + 0.5 * X)
    bound = np.sum((COUNTS - mean) ** 2 + COUNTS) / 1e10
    rounding = len(X) * 1e-15 * 2.2e11
    poisson = model.compile_logp()({"b": position})
    assert abs(posterior.log_density(position) - poisson) < bound + rounding
    gradient = posterior.gradient(position)
    np.testing.assert_allclose(gradient, model.compile_dlogp()({"b": position}), rtol=1e-6)


def choice_in(value, n, **mean_or_p):
    """Return PyMC's choice between two densities of counts."""
    density = pm.logp(pm.NegativeBinomial.dist(n=n, **mean_or_p), value)
    return density.owner.inputs[0].owner.inputs[2]


def test_choices_that_look_like_a_negative_binomial_stay():
    """Given numbers of successes, other probabilities and a user's choices keep their density."""
    value, n, mean = pt.lvector("value"), pt.dscalar("n"), pt.dvector("mean")
    choice = choice_in(value, n, mu=mean)
    assert not has_limit(prepared(choice))
    condition, poisson, other = choice.owner.inputs
    assert has_limit(prepared(pt.switch(condition, 2 * poisson, other)))
    assert has_limit(prepared(pt.switch(condition, poisson, other + 1)))
    assert has_limit(prepared(pt.switch(pt.gt(n, 1e3), poisson, other)))
    p = pt.sigmoid(pt.log(2 * n) - pt.log(mean))
    assert has_limit(prepared(choice_in(value, n, p=p)))
    given = choice_in(value, pt.constant(1e13), mu=mean)
    at = {value: COUNTS, mean: np.exp(X)}
    assert prepared(given).eval(at).tolist() == given.eval(at).tolist()
