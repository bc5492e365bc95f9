"""The unconstrained position: order, labels and shapes."""

from __future__ import annotations

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest

from pymc_sgmcmc.compiling.compiled import PYTHON_MODE
from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.posterior.position import layout_from_model
from tests.support.row_models import Y


def layout_of(model: pm.Model, variables=None):
    return layout_from_model(model, variables, model.initial_point())


@pytest.fixture
def model() -> pm.Model:
    coords = {"feature": ["age", "dose"], "group": [10, 20, 30], "k": ["u", "v", "w"]}
    with pm.Model(coords=coords) as model:
        model.add_coord("unnamed", length=2)
        pm.Normal("plain")
        pm.Normal("beta", dims="feature")
        pm.Normal("by_group", dims=("group", "feature"))
        pm.Normal("free_axes", shape=(2, 2))
        pm.HalfNormal("scale", dims="feature")
        pm.Dirichlet("p", np.ones(3), dims="k")
        pm.ZeroSumNormal("effect", dims=("feature", "k"))
        pm.Normal("numbered", dims="unnamed")
        pm.HalfNormal("sigma")
        pm.Normal("y", 0.0, 1.0, observed=Y)
    return model


def test_labels(model):
    labels = layout_of(model).labels
    assert labels == (
        "plain",
        "beta[feature=age]",
        "beta[feature=dose]",
        *(f"by_group[group={g}, feature={f}]" for g in (10, 20, 30) for f in ("age", "dose")),
        *(f"free_axes[{i}, {j}]" for i in range(2) for j in range(2)),
        "scale_log__[feature=age]",
        "scale_log__[feature=dose]",
        # The unconstrained coordinates of a simplex are not those of its entries.
        "p_simplex__[0]",
        "p_simplex__[1]",
        *(f"effect_zerosum__[feature={f}, {i}]" for f in ("age", "dose") for i in range(2)),
        "numbered[unnamed=0]",
        "numbered[unnamed=1]",
        "sigma_log__",
    )


def test_labels_are_in_the_order_of_the_position(model):
    layout = layout_of(model)
    assert len(layout.labels) == layout.dimension == sum(layout.sizes)
    position = np.arange(layout.dimension, dtype=float)
    point = layout.unravel(position)
    assert point["by_group"][2, 1] == layout.labels.index("by_group[group=30, feature=dose]")
    assert point["effect_zerosum__"][1, 0] == layout.labels.index(
        "effect_zerosum__[feature=dose, 0]"
    )


def test_ravel_and_unravel_are_inverse(model):
    layout = layout_of(model)
    position = np.random.default_rng(1).normal(size=layout.dimension)
    point = layout.unravel(position)
    assert {name: value.shape for name, value in point.items()} == {
        name: value.shape for name, value in model.initial_point().items()
    }
    np.testing.assert_array_equal(layout.ravel(point), position)
    point["beta"][:] = 9.0
    assert not np.any(position == 9.0)


def test_split_and_join_are_inverse(model):
    layout = layout_of(model)
    at = np.random.default_rng(2).normal(size=layout.dimension)
    position = pt.vector("position", dtype=layout.dtype)
    pieces = layout.split(position)
    evaluate = pytensor.function(
        [position], [*pieces.values(), layout.join(list(pieces.values()))], mode=PYTHON_MODE
    )
    *values, joined = evaluate(at)
    np.testing.assert_array_equal(joined, at)
    for variable, value, expected in zip(pieces, values, layout.unravel(at).values(), strict=True):
        np.testing.assert_array_equal(value, expected)
        assert variable.type.ndim == np.ndim(value)


def test_same_order_as_pymc(model):
    """Step methods of PyMC ravel the point of the model as it comes."""
    layout = layout_of(model)
    assert list(layout.names) == list(model.initial_point())
    chosen = [model["sigma"], model["by_group"], model["plain"]]
    assert layout_of(model, chosen).names == ("plain", "by_group", "sigma_log__")


def test_variable_named_twice(model):
    assert layout_of(model, [model["beta"], model["plain"], model["beta"]]).dimension == 3


def test_discrete_variables_are_refused():
    with pm.Model() as model:
        pm.Normal("b")
        pm.Poisson("k", 2.0)
        pm.Bernoulli("flag", 0.5)
        pm.Normal("y", 0.0, 1.0, observed=Y)
    with pytest.raises(ModelError, match=r"`k`, `flag` are discrete.*`vars`.*pm.Metropolis"):
        Posterior(model)
    with pytest.raises(ModelError, match="`k` is discrete"):
        Posterior(model, [model["b"], model["k"]])


def test_unknown_variables_are_refused(model):
    with pm.Model():
        stranger = pm.Normal("stranger")
    for wrong, name in ((stranger, "stranger"), (model["y"], "y"), ("gamma", "gamma")):
        match = f"`vars` should be free variables of the model, but got `{name}`.*`plain`, `beta`"
        with pytest.raises(ModelError, match=match):
            layout_of(model, [model["plain"], wrong])
    with pytest.raises(ModelError, match="`vars` is empty"):
        layout_of(model, [])
    with pytest.raises(ModelError, match=r"`vars` should be .* but got `3`"):
        layout_of(model, 3)


def test_mixed_precision_is_refused():
    with pm.Model() as model:
        pm.Normal("b")
        with pytensor.config.change_flags(floatX="float32"):
            pm.Normal("c")
        pm.Normal("y", 0.0, 1.0, observed=Y)
    with pytest.raises(ModelError, match=r"single `pytensor\.config\.floatX`"):
        layout_of(model)
