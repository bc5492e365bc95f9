"""Functions of counts that are looked up."""

from __future__ import annotations

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from scipy import special

from pymc_sgmcmc import Posterior
from pymc_sgmcmc.compiling.compiled import NUMPY_MODE, compile_quietly
from pymc_sgmcmc.compiling.whole_numbers import OfWholeNumbers

FUNCTIONS = {
    "log gamma": (pt.gammaln, special.gammaln),
    "digamma": (pt.psi, special.psi),
    "trigamma": (pt.tri_gamma, lambda x: special.polygamma(1, x)),
}
COUNTS = {
    "few": [0, 3, 1, 1, 3, 0, 2, 2, 2],
    "to half of the rows": [4, 0, 0, 0, 0, 0, 0, 0, 0],
    "large": [9, 1000, 3],
    "all of 8 bits": np.repeat(np.arange(128), 3),
    "negative": [-1, 0, 0, 1, 0, 0],
    "none": [],
}


def looked_up(function) -> list[OfWholeNumbers]:
    operations = [node.op for node in function.maker.fgraph.apply_nodes]
    return [each for each in operations if isinstance(each, OfWholeNumbers)]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64"])
def test_values_are_those_of_each_row(name, dtype):
    of_graph, of_array = FUNCTIONS[name]
    y, number = pt.vector("y", dtype=dtype), pt.scalar("number")
    function = compile_quietly([y, number], of_graph(number + y), NUMPY_MODE)
    assert len(looked_up(function)) == 1
    for case, counts in COUNTS.items():
        values = np.asarray(counts).astype(dtype)
        if np.array_equal(values, counts):  # The type holds them.
            found = function(values, 2.3)
            assert found.dtype == np.float64
            np.testing.assert_array_equal(found, of_array(values + 2.3), err_msg=case)


@pytest.mark.parametrize("dtype", ["uint8", "int64"])
def test_log_factorials(dtype):
    """A whole number beside the counts, whose sum has their type or a wider one."""
    y = pt.vector("y", dtype=dtype)
    function = compile_quietly([y], pt.gammaln(y + 1), NUMPY_MODE)
    assert looked_up(function)
    counts = np.repeat(np.array([0, 7, 255]), 200).astype(dtype)
    # SciPy takes 16 bits in single precision, and so does PyTensor.
    np.testing.assert_array_equal(function(counts), special.gammaln(counts + np.ones(1, "int8")))


def test_functions_of_other_sums_are_left():
    counts, others = pt.lvector("counts"), pt.vector("others")
    function = compile_quietly([counts, others], pt.gammaln(counts + others), NUMPY_MODE)
    assert not looked_up(function)


def test_derivatives_of_a_model_of_counts(rng):
    y = rng.negative_binomial(2, 0.4, size=400)
    with pm.Model() as model:
        log_mean, alpha = pm.Normal("log_mean"), pm.HalfNormal("alpha", 5)
        pm.NegativeBinomial("y", mu=pm.math.exp(log_mean), alpha=alpha, observed=y)
    position = np.array([0.7, 0.4])
    point = {"log_mean": position[0], "alpha_log__": position[1]}
    density, gradient = Posterior(model).log_density_and_gradient(position)
    assert density == pytest.approx(model.compile_logp()(point), rel=1e-12)
    np.testing.assert_allclose(gradient, model.compile_dlogp()(point), rtol=1e-9)
