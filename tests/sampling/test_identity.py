"""Models are the same where they were built alike, and differ where anything in them does."""

from __future__ import annotations

import numpy as np
import pymc as pm
import pytest

from pymc_sgmcmc import marginalize
from pymc_sgmcmc.sampling.identity import differences, identity_of_model
from tests.support.row_models import CASES


@pytest.mark.parametrize("kind", ["ordinary", "with_data", "minibatch"])
def test_a_model_that_is_built_again_is_the_same_and_no_other_is(kind):
    identities = {}
    for name, case in CASES.items():
        first, second = (identity_of_model(getattr(case, kind)()) for _ in range(2))
        assert not differences(first, second), name
        identities[name] = first
    for name, identity in identities.items():
        assert [other for other in CASES if not differences(identity, identities[other])] == [name]


def regression(
    *, sd=2.0, dims="feature", scale=pm.HalfNormal, slope=1.0, shift=0.0, lower=None, data=pm.Data
):
    rng = np.random.default_rng(1)
    X, y = rng.normal(size=(30, 2)), rng.normal(size=30)
    X[-1, -1] += shift
    with pm.Model(coords={"feature": ["a", "b"], "other": ["c", "d"]}) as model:
        predictors = data("predictors", X) if data else X
        beta = pm.Normal("beta", 0, sd, dims=dims)
        sigma = scale("sigma", 1.0)
        mean = pm.Deterministic("mean", slope * (predictors @ beta))
        pm.Normal("y", mean, sigma, observed=y)
        if lower is not None:
            pm.Potential("bound", pm.math.switch(beta.sum() > lower, 0.0, -1.0))
    return model


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"sd": 2.5}, ["variable `beta` has another definition"]),
        ({"dims": "other"}, ["variable `beta` has another dims", "data"]),
        ({"scale": pm.HalfCauchy}, ["variable `sigma` has another definition"]),
        ({"scale": pm.Normal}, ["variable `sigma` has another transform, definition"]),
        ({"slope": 2.0}, ["variable `y` has another definition"]),
        ({"shift": 1e-12}, ["data `predictors` is another one"]),
        ({"lower": 0.0}, ["variable `bound` is new"]),
        ({"data": None}, ["variable `y` has another definition", "data", "data"]),
    ],
    ids=str,
)
def test_each_difference_is_named(change, expected):
    found = differences(identity_of_model(regression()), identity_of_model(regression(**change)))
    found = [text for text in found if not text.startswith("data `feature")]
    assert len(found) >= 1
    for text in expected:
        assert any(each.startswith(text) for each in found), found
    assert not [each for each in found if not each.startswith(tuple(expected))]


def test_parts_of_data_that_do_not_lie_in_one_piece():
    X = np.random.default_rng(1).normal(size=(1000, 8))

    def of(values):
        with pm.Model() as model:
            pm.Normal("y", pm.Normal("mean"), observed=values)
        return identity_of_model(model)

    assert not differences(of(X[:, ::2]), of(X[:, ::2].copy()))
    assert not differences(of(np.asfortranarray(X)), of(X))
    changed = X.copy()
    changed[999, 7] += 1e-15
    assert differences(of(np.asfortranarray(changed)), of(X))


def test_parameters_of_transforms_and_functions_of_densities_are_compared():
    def model_of(upper, power):
        with pm.Model() as model:
            interval = pm.distributions.transforms.Interval(0, upper)
            b = pm.Normal("b", 5, 10, transform=interval)
            pm.CustomDist(
                "y", b, logp=lambda value, mean: -abs((value - mean) ** power), observed=np.ones(9)
            )
        return model

    first = identity_of_model(model_of(10.0, 2.0))
    assert not differences(first, identity_of_model(model_of(10.0, 2.0)))
    (found,) = differences(first, identity_of_model(model_of(20.0, 2.0)))
    assert found == "variable `b` has another transform"
    (found,) = differences(first, identity_of_model(model_of(10.0, 4.0)))
    assert found == "variable `y` has another log density"


def test_what_was_integrated_out_is_compared():
    def groups_of(sd):
        group = np.repeat(np.arange(9), 3)
        with pm.Model() as model:
            mean = pm.Normal("mean")
            z = pm.Normal("z", 0, sd, shape=9)
            pm.Normal("y", mean + z[group], 1, observed=np.ones(27))
        return identity_of_model(marginalize(model, "z"))

    assert not differences(groups_of(1.0), groups_of(1.0))
    assert differences(groups_of(1.0), groups_of(2.0))


def test_computed_settings_follow_from_the_data_and_are_not_told():
    before = {
        "data": {"y": "a" * 64},
        "setting": {"step_size": 0.1, "thin": 3, "tune": 10},
        "argument": {"thin": 3},
    }
    after = {
        "data": {"y": "b" * 64},
        "setting": {"step_size": 0.2, "thin": 4, "tune": 20},
        "argument": {"thin": 4},
    }
    told = differences(before, after)
    assert told[0] == "data `y` is another one"
    assert not [text for text in told if "step_size" in text]
    for name in ("setting `thin`", "setting `tune`", "argument `thin`"):
        assert any(name in text for text in told)
    told = differences(before, {**after, "data": before["data"]})
    assert any("`step_size`" in text for text in told)
