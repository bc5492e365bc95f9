"""Arrays of the user's data are not read to compare constants."""

from __future__ import annotations

import numpy as np
import pymc as pm
import pytest
from pytensor.graph.traversal import ancestors
from pytensor.tensor.variable import TensorConstant, TensorConstantSignature

from pymc_sgmcmc.compiling.large_constants import FEWEST_NUMBERS, large_constants_by_sample
from pymc_sgmcmc.marginal.search import local_structures
from pymc_sgmcmc.posterior import Posterior


@pytest.fixture
def model(rng):
    """Equal predictors as two constants, and others that differ in one number."""
    X = rng.normal(size=(FEWEST_NUMBERS, 20))
    other = X.copy()
    other[7, 3] += 1
    with pm.Model() as model:
        first, second = pm.Normal("first", shape=20), pm.Normal("second", shape=20)
        mean = pm.math.dot(X, first) + pm.math.dot(X.copy(), second) + pm.math.dot(other, first)
        pm.Normal("y", mean, 1.0, observed=rng.normal(size=len(X)))
    return model


def large_constants(model):
    outputs = [*model.basic_RVs, *model.potentials, *model.rvs_to_values.values()]
    return [
        variable
        for variable in ancestors(outputs)
        if isinstance(variable, TensorConstant) and variable.data.size >= FEWEST_NUMBERS
    ]


def test_large_constants_are_not_read(model, monkeypatch):
    read = []
    total = TensorConstantSignature.sum

    def recorded(signature):
        read.append(signature[1].size)
        return total.fget(signature)

    monkeypatch.setattr(TensorConstantSignature, "sum", property(recorded))
    posterior = Posterior(model, check=False)
    local_structures(model)
    posterior.is_possible(np.zeros(40))
    assert max(read) < FEWEST_NUMBERS
    model.logp()
    assert max(read) == 20 * FEWEST_NUMBERS


def test_equal_constants_are_merged(model):
    """The predictors are equal twice, and once but for one number."""
    posterior = Posterior(model, check=False)
    assert sorted(values.shape for values in posterior.data) == [(FEWEST_NUMBERS,)] + 2 * [
        (FEWEST_NUMBERS, 20)
    ]
    first, equal, other = (c for c in large_constants(model) if c.type.ndim == 2)
    with large_constants_by_sample(model):
        signatures = {constant.merge_signature() for constant in (first, equal, other)}
    assert len(signatures) == 2


def test_numbers_that_are_missing_are_equal(rng):
    """As for PyTensor, and a number is not equal to one that is missing."""
    values = np.where(rng.random(FEWEST_NUMBERS) < 0.5, np.nan, 1.0)
    values[0] = 1.0
    other = values.copy()
    other[5000] = 2.0
    with pm.Model() as model:
        for name, numbers in (("a", values), ("b", values.copy()), ("c", other)):
            pm.Potential(name, pm.Normal(f"x{name}") * pm.math.sum(numbers))
    constants = large_constants(model)
    with large_constants_by_sample(model):
        assert len({constant.merge_signature() for constant in constants}) == 2
    assert len({constant.merge_signature() for constant in constants}) == 2


def test_constants_are_as_before_also_after_an_error(model):
    constants = large_constants(model)

    def fail():
        with large_constants_by_sample(model), large_constants_by_sample(model):
            assert all("merge_signature" in vars(constant) for constant in constants)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not any("merge_signature" in vars(constant) for constant in constants)
