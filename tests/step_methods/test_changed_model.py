"""Changes in a model after its step method was made are noticed before a chain begins."""

from __future__ import annotations

import numpy as np
import pymc as pm
import pytensor
import pytest

from pymc_sgmcmc import SGLD
from pymc_sgmcmc.errors import ModelError

N = 100

pytestmark = pytest.mark.usefixtures("without_compiler")


@pytest.fixture
def model():
    rng = np.random.default_rng(1)
    with pm.Model(coords={"group": range(5)}) as model:
        prior_mean = pm.Data("prior_mean", 0.0)
        sigma = pm.Data("sigma", 1.0)
        table = pm.Data("table", np.zeros(5), dims="group")
        x = pm.Data("x", rng.normal(size=N))
        weight = pm.Data("weight", 1.0)
        beta = pm.Normal("beta", prior_mean, 1)
        pm.Potential("more", -weight * beta**2)
        group = rng.integers(5, size=N)
        pm.Normal("y", beta * x + table[group], sigma, observed=rng.normal(size=N))
        pm.Data("unused", 1.0)
    return model


def step_of(model):
    quick = {"mode": "FAST_COMPILE"}
    return SGLD(
        model=model,
        step_size=1e-3,
        preconditioner="identity",
        batch_size=20,
        gradient="plain",
        compile_kwargs=quick,
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prior_mean", 1.0),
        ("sigma", 2.0),
        ("table", np.ones(5)),
        ("x", np.ones(N)),
        ("weight", 0.0),
    ],
)
def test_shared_values_of_every_kind(model, name, value):
    step = step_of(model)
    step.setup_chain(1, 10, 10)
    with model:
        pm.set_data({name: value})
    with pytest.raises(ModelError, match=f"The data `{name}` were changed after the step method"):
        step.setup_chain(1, 10, 10)


def test_what_the_density_does_not_have_may_change(model):
    step = step_of(model)
    with model:
        pm.set_data({"unused": 3.0, "sigma": 1.0})
    step.setup_chain(1, 10, 10)


def test_rows_changed_in_place():
    x = pytensor.shared(np.arange(N, dtype=float), "x", borrow=True)
    with pm.Model() as model:
        pm.Normal("y", pm.Normal("beta") * x, 1, observed=np.zeros(N))
    step = step_of(model)
    values = x.get_value(borrow=True)
    values *= 2
    with pytest.raises(ModelError, match="The data `x` were changed"):
        step.setup_chain(1, 10, 10)


@pytest.mark.parametrize("added", ["likelihood", "potential", "variable"])
def test_variables_added(model, added):
    step = step_of(model)
    with model:
        if added == "likelihood":
            pm.Normal("new", model["beta"], 1, observed=np.ones(3))
        elif added == "potential":
            pm.Potential("new", -(model["beta"] ** 2))
        else:
            pm.Normal("new")
    with pytest.raises(ModelError, match="`new` was added or removed"):
        step.setup_chain(1, 10, 10)


@pytest.mark.parametrize("given", ["beta", ["beta"], ("beta",)])
@pytest.mark.usefixtures("uncompiled")
def test_variables_by_name(model, given):
    assert [
        variable.name
        for variable in SGLD(
            given, model=model, step_size=1e-3, preconditioner="identity", batch_size=9
        ).vars
    ] == ["beta"]
