"""The log predictive density of held-out rows along a chain."""

from __future__ import annotations

import sys

import numpy as np
import pymc as pm
import pytest
import xarray as xr
from scipy import stats
from scipy.special import logsumexp

from pymc_sgmcmc import ModelError, predictive_density
from pymc_sgmcmc.trace_tools.predictive_density import minibatch_warnings

module = sys.modules["pymc_sgmcmc.trace_tools.predictive_density"]
"""The module, whose name the package gives to its function."""


def regression(rng, n=30):
    """A normal regression with a transformed scale, on `pymc.Data` with labelled rows."""
    X = rng.normal(size=(n, 2))
    with pm.Model(coords={"row": np.arange(n), "feature": ["a", "b"]}) as model:
        data = pm.Data("X", X, dims=("row", "feature"))
        y = pm.Data("y", X.sum(1) + rng.normal(size=n), dims="row")
        slopes = pm.Normal("slopes", 0, 1, dims="feature")
        sd = pm.HalfNormal("sd")
        pm.Normal("outcome", data @ slopes, sd, observed=y, dims="row")
    return model


def some_draws(rng, chains=2, draws=7):
    posterior = xr.Dataset(
        {
            "slopes": (("chain", "draw", "feature"), rng.normal(size=(chains, draws, 2))),
            "sd": (("chain", "draw"), rng.uniform(0.5, 2, size=(chains, draws))),
        },
        coords={"chain": [3, 4][:chains], "draw": np.arange(draws) + 10, "feature": ["a", "b"]},
    )
    return xr.DataTree.from_dict({"posterior": posterior})


@pytest.mark.parametrize("elements", [1, 25, 10_000])
def test_against_scipy(rng, monkeypatch, elements):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", elements)
    model, idata = regression(rng), some_draws(rng)
    X, y = rng.normal(size=(5, 2)), rng.normal(size=5)
    before = {name: model[name].get_value() for name in ("X", "y")}
    found = predictive_density(idata, model, {"X": X, "y": y}, coords={"row": np.arange(5)})
    slopes, sd = (idata["posterior"][name].values for name in ("slopes", "sd"))
    of_rows = stats.norm.logpdf(y, slopes @ X.T, sd[..., None])
    np.testing.assert_allclose(found["log_density"], of_rows.mean(-1), rtol=1e-12)
    for draw in range(7):
        up_to = logsumexp(of_rows[:, : draw + 1], axis=1) - np.log(draw + 1)
        np.testing.assert_allclose(found["log_predictive_density"][:, draw], up_to.mean(-1))
    assert found.attrs == {"rows": 5}
    assert found["log_density"].dims == ("chain", "draw")
    np.testing.assert_array_equal(found["chain"], [3, 4])
    for name, values in before.items():
        np.testing.assert_array_equal(model[name].get_value(), values)
    np.testing.assert_array_equal(model.coords["row"], np.arange(30))


def test_rows_of_the_model_and_of_several_variables(rng):
    counts, heights = rng.poisson(2, size=6), rng.normal(size=(6, 3))
    with pm.Model() as model:
        rate = pm.Exponential("rate", 1)
        pm.Poisson("count", rate, observed=counts)
        pm.Normal("height", rate, 1, observed=heights)
    draws = xr.Dataset({"rate": (("chain", "draw"), rng.uniform(1, 3, size=(1, 4)))})
    idata = xr.DataTree.from_dict({"posterior": draws})
    rates = draws["rate"].values[0, :, None]
    of_counts = stats.poisson.logpmf(counts, rates)
    of_heights = stats.norm.logpdf(heights, rates[..., None], 1).sum(-1)
    with model:
        both = predictive_density(idata)["log_density"][0]
    np.testing.assert_allclose(both, (of_counts + of_heights).mean(1))
    alone = predictive_density(idata, model, var_names="count")["log_density"][0]
    np.testing.assert_allclose(alone, of_counts.mean(1))


def test_variables_that_are_not_used_and_total_size(rng):
    """Densities of rows are not scaled to another number of them."""
    with pm.Model() as model:
        mean = pm.Normal("mean")
        other = pm.Normal("other")
        pm.Normal("y", mean, 1, observed=pm.Data("values", np.zeros(10)), total_size=10)
        pm.Normal("x", other, 1, observed=np.zeros(10))
    draws = xr.Dataset({"mean": (("chain", "draw"), rng.normal(size=(1, 4)))})
    idata = xr.DataTree.from_dict({"posterior": draws})
    found = predictive_density(idata, model, {"values": [0.5]}, var_names="y")["log_density"]
    np.testing.assert_allclose(found, stats.norm.logpdf(0.5, draws["mean"]))
    with pytest.raises(ValueError, match="should have draws of `other`"):
        predictive_density(idata, model)


def test_bad_input(rng):
    model, idata = regression(rng), some_draws(rng)
    with pytest.raises(KeyError, match=r"of the model, of `X`, `y`, but got `Z`"):
        predictive_density(idata, model, {"Z": np.ones(3)})
    with pytest.raises(ValueError, match="`var_names` should name some of"):
        predictive_density(idata, model, var_names="slopes")
    with pytest.raises(TypeError, match="Pass `model=`"):
        predictive_density(idata)
    before = model["X"].get_value()
    with pytest.raises(ValueError, match="row"):
        predictive_density(idata, model, {"X": np.ones((4, 2))})
    with pm.Model() as plain:
        slope = pm.Normal("slope")
        x, y = pm.Data("x", np.ones((10, 2))), pm.Data("y", np.ones(10))
        pm.Normal("out", slope * x.sum(1), 1, observed=y)
    draws = xr.DataTree.from_dict(
        {"posterior": xr.Dataset({"slope": (("chain", "draw"), [[0.0, 1.0]])})}
    )
    for data, message in (
        ({"x": np.ones((4, 2))}, "The data of the model should fit together"),
        ({"x": np.ones((0, 2)), "y": np.zeros(0)}, "The data should have a row at least"),
        ({"x": np.full((4, 2), np.nan), "y": np.zeros(4)}, "should have no NaN, but has .* `x`"),
        ({"x": "a", "y": np.zeros(4)}, "`new_data` should have other values for `x`, `y`"),
        ({"x": 3, "y": 3}, "`new_data` should have other values for `x`, `y`"),
    ):
        with pytest.raises(ValueError, match=message):
            predictive_density(draws, plain, data)
        np.testing.assert_array_equal(plain["x"].get_value(), np.ones((10, 2)))
    with pytest.raises(TypeError, match="`new_data` should be a mapping"):
        predictive_density(idata, model, [1])
    with pytest.raises(ValueError, match="`coords` should come with the `new_data`"):
        predictive_density(idata, model, coords={"row": [1]})
    np.testing.assert_array_equal(model["X"].get_value(), before)
    with pm.Model() as other:
        mean = pm.Normal("mean")
        pm.Normal("a", mean, 1, observed=np.zeros(3))
        pm.Normal("b", mean, 1, observed=np.zeros(4))
    draws = xr.DataTree.from_dict({"posterior": xr.Dataset({"mean": (("chain", "draw"), [[0.0]])})})
    with pytest.raises(ValueError, match="should have as many rows as each other"):
        predictive_density(draws, other)
    with pm.Model() as minibatch:
        mean = pm.Normal("mean")
        batch = pm.Minibatch(np.zeros(50), batch_size=5)
        pm.Normal("a", mean, 1, observed=batch, total_size=50)
    with pytest.raises(ModelError, match=r"Write the model on `pymc.Data`"):
        predictive_density(draws, minibatch)
    (message,) = minibatch_warnings(draws, minibatch)
    assert "take one minibatch. Give" in message
    assert not minibatch_warnings(draws, other)
