"""Negative binomial densities in one branch have PyMC's values and gradients."""

import numpy as np
import pymc as pm
import pytensor
import pytensor.scalar as ps
import pytensor.tensor as pt
import pytest
from pytensor.graph.traversal import toposort
from pytensor.tensor.elemwise import Elemwise

from pymc_sgmcmc.compiling.negative_binomial import LIMIT
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.posterior.graphs import simplify_for_gradients

RNG = np.random.default_rng(1)
MODE = pytensor.compile.Mode(linker="py", optimizer="fast_run")
X = RNG.normal(size=60)
GROUP = RNG.integers(2, size=60)
COUNTS = RNG.poisson(3, size=60)
COUNTS[:3] = 0, 0, 1000
EXPOSURE = np.where(np.arange(60) < 2, 0.0, 1.5)


def predictor(b):
    """Return a linear predictor."""
    return b[0] + b[1] * X


FAMILIES = {
    "one n": lambda b: {"mu": pt.exp(predictor(b)), "alpha": pt.exp(b[2])},
    "n of groups": lambda b: {"mu": pt.exp(predictor(b)), "alpha": pt.exp(b[1:] * 2)[GROUP]},
    "n of rows": lambda b: {"mu": pt.exp(predictor(b)), "alpha": pt.exp(b[2] + b[0] * X)},
    "dispersion": lambda b: {"mu": pt.exp(predictor(b) - 1), "alpha": 1 / pt.exp(b[2])},
    "dispersion of groups": lambda b: {"mu": pt.exp(predictor(b)), "alpha": 1 / b[1:][GROUP] ** 2},
    "softplus": lambda b: {"mu": pt.softplus(predictor(b)) + 0.1, "alpha": b[2] ** 2},
    "mean of n": lambda b: {"mu": pt.exp(b[0]) * (1 + X**2) * b[2] ** 2, "alpha": b[2] ** 2},
    "one mean": lambda b: {"mu": pt.exp(b[0]), "alpha": pt.exp(b[2])},
    "means of zero": lambda b: {"mu": EXPOSURE * pt.exp(predictor(b)), "alpha": pt.exp(b[2])},
    "probability": lambda b: {"p": pt.sigmoid(predictor(b)), "n": pt.exp(b[2])},
}


def negative_binomial(parameters, counts=COUNTS):
    """Return a model of counts."""
    with pm.Model() as model:
        b = pm.Normal("b", 0, 2, shape=3)
        pm.NegativeBinomial("y", **parameters(b), observed=counts)
    return model


def has_limit(graph):
    """Tell whether PyMC's choice between two densities is in a graph."""
    found = [str(node.op).lower() for node in toposort([graph]) if isinstance(node.op, Elemwise)]
    return "gt" in found


@pytest.mark.parametrize(
    ("family", "zeros"),
    [*((family, True) for family in FAMILIES), ("dispersion", False), ("n of groups", False)],
)
def test_negative_binomial_keeps_values_and_gradients(family, zeros):
    """Values and gradients are PyMC's, without its second branch."""
    model = negative_binomial(FAMILIES[family], COUNTS if zeros else COUNTS + 1)
    posterior = Posterior(model)
    assert not has_limit(posterior._log_likelihood_template)
    value, gradient = model.compile_logp(mode=MODE), model.compile_dlogp(mode=MODE)
    rng = np.random.default_rng(2)
    for _ in range(20):
        position = rng.normal(0, 2, size=3)
        of_pymc = gradient({"b": position})
        assert np.isfinite(of_pymc).all()
        np.testing.assert_allclose(
            posterior.log_density(position), value({"b": position}), rtol=1e-12
        )
        np.testing.assert_allclose(posterior.gradient(position), of_pymc, rtol=1e-10)


def test_negative_binomial_keeps_values_where_means_overflow():
    """Means that are no numbers of double precision have a log density and a gradient."""
    model = negative_binomial(FAMILIES["one n"])
    posterior, value, gradient = Posterior(model), model.compile_logp(), model.compile_dlogp()
    for position in np.array([(800.0, 0, 0), (-800.0, 0, 0), (30.0, 0, -30), (-30.0, 0, 20)]):
        of_pymc = gradient({"b": position})
        assert np.isfinite(of_pymc).all()
        np.testing.assert_allclose(
            posterior.log_density(position), value({"b": position}), rtol=1e-12
        )
        np.testing.assert_allclose(posterior.gradient(position), of_pymc, rtol=1e-9, atol=1e-12)


def test_negative_binomial_of_many_successes_is_that_of_the_limit():
    """A random number of successes above PyMC's limit counts as the limit, and has no gradient."""
    model = negative_binomial(FAMILIES["one n"])
    posterior, value, gradient = Posterior(model), model.compile_logp(), model.compile_dlogp()
    mean = np.exp(1 + 0.5 * X)
    bound = np.sum(np.abs((COUNTS - mean) ** 2 - COUNTS)) / (2 * LIMIT)
    rounding = len(X) * 1e-5
    at_limit = np.array([1.0, 0.5, np.log(LIMIT)])
    for log_n in (24.0, 60.0, 300.0):
        position = np.array([1.0, 0.5, log_n])
        prior = -(log_n**2 - at_limit[2] ** 2) / 8
        difference = posterior.log_density(position) - posterior.log_density(at_limit)
        np.testing.assert_allclose(difference, prior, rtol=1e-9)
        poisson = value({"b": position})
        assert abs(posterior.log_density(position) - poisson) < bound + rounding
        of_poisson = gradient({"b": position})
        np.testing.assert_allclose(posterior.gradient(position), of_poisson, rtol=1e-6)


def simplified(graph):
    """Return a graph as samplers take it."""
    return simplify_for_gradients([graph])[0]


def choice_in(value, n, **mean_or_p):
    """Return PyMC's choice between two densities of counts."""
    density = pm.logp(pm.NegativeBinomial.dist(n=n, **mean_or_p), value)
    return density.owner.inputs[0].owner.inputs[2]


def test_choices_that_look_like_a_negative_binomial_stay():
    """Given numbers of successes, other probabilities and a user's choices stay as they are."""
    value, n, mean = pt.lvector("value"), pt.dscalar("n"), pt.dvector("mean")
    choice = choice_in(value, n, mu=mean)
    assert not has_limit(simplified(choice))
    condition, poisson, other = choice.owner.inputs
    assert has_limit(simplified(pt.switch(condition, 2 * poisson, other)))
    assert has_limit(simplified(pt.switch(condition, poisson, other + 1)))
    assert has_limit(simplified(pt.switch(pt.gt(n, 1e3), poisson, other)))
    assert has_limit(simplified(choice_in(value, n, p=n / (n + mean))))
    given = choice_in(value, pt.constant(1e13), mu=mean)
    at = {value: COUNTS, mean: np.exp(X)}
    assert simplified(given).eval(at).tolist() == given.eval(at).tolist()
    shared = choice_in(value, pytensor.shared(1e13), mu=mean)
    assert has_limit(simplified(shared))
    sum_of_one = Elemwise(ps.add)(other)
    with pytensor.config.change_flags(on_opt_error="raise"):
        assert has_limit(simplified(pt.switch(condition, poisson, sum_of_one)))


def test_single_precision_keeps_both_branches():
    """The one branch would lose as many digits of the gradient as the counts have."""
    value, n, mean = pt.lvector("value"), pt.fscalar("n"), pt.fvector("mean")
    choice = choice_in(value.astype("float32"), n, mu=mean)
    assert choice.dtype == "float32"
    assert has_limit(simplified(choice))
