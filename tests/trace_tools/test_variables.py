"""Gradients and positions of a trace by variable, with the dimensions of the model."""

from __future__ import annotations

import numpy as np
import pymc as pm
import pytest
import xarray as xr

from pymc_sgmcmc import ULA, by_variable, gradients
from tests.support.sampling import QUIET

RUN = {"draws": 20, "tune": 5, "chains": 2, "cores": 1, "random_seed": 1, **QUIET}


@pytest.fixture(scope="module")
def model():
    coords = {"feature": ["x", "z"], "group": [10, 20, 30], "share": list("abc")}
    with pm.Model(coords=coords) as model:
        slopes = pm.Normal("slopes", dims=("feature", "group"))
        scale = pm.HalfNormal("scale")
        shares = pm.Dirichlet("shares", np.ones(3), dims="share")
        shift = pm.Normal("shift", shape=2)
        mean = slopes.sum() + shares[0] + shift.sum()
        pm.Normal("y", mean, scale, observed=np.linspace(0, 1, 30))
    return model


@pytest.fixture(scope="module")
def idata(model):
    with model:
        step = ULA(
            step_size=1e-3, preconditioner="identity", compile_kwargs={"mode": "FAST_COMPILE"}
        )
        return pm.sample(step=step, **RUN)


def test_positions_are_the_variables(idata):
    draws, positions = idata["posterior"], by_variable(idata, "position")
    assert set(positions) == {"slopes", "scale_log__", "shares_simplex__", "shift"}
    xr.testing.assert_allclose(positions["slopes"], draws["slopes"])
    xr.testing.assert_allclose(positions["shift"], draws["shift"])
    np.testing.assert_allclose(positions["scale_log__"], np.log(draws["scale"]))
    assert positions["scale_log__"].dims == ("chain", "draw")
    one = positions["slopes"].sel(feature="z", group=20)
    np.testing.assert_array_equal(
        one,
        idata["sample_stats"]["position"].sel(unconstrained_position="slopes[feature=z, group=20]"),
    )


def test_a_variable_of_other_elements_has_its_labels(idata):
    shares = by_variable(idata)["shares_simplex__"]
    assert shares.dims[2:] == ("shares_simplex___dim_0",)
    assert shares.coords[shares.dims[2]].values.tolist() == [
        "shares_simplex__[0]",
        "shares_simplex__[1]",
    ]


def test_gradients_of_another_sampler(idata, model):
    """As they are in the flat array, also after draws were left out."""
    computed = gradients(idata.sel(draw=slice(None, None, 5)), model)
    flat = computed["sample_stats"]["gradient"].values
    found = by_variable(computed)
    np.testing.assert_array_equal(found["slopes"].values.reshape(2, 4, 6), flat[..., :6])
    assert found["slopes"].sel(feature="x").dims == ("chain", "draw", "group")
    assert found.sizes["draw"] == 4


def test_elements_in_another_order_are_not_mixed_up(idata):
    """The dimensions of the group `posterior` count only where they label the coordinates."""
    changed = idata.copy()
    turned = idata["posterior"]["slopes"].transpose("chain", "draw", "group", "feature")
    changed["posterior"] = xr.DataTree(idata["posterior"].to_dataset().assign(slopes=turned))
    found = by_variable(changed)["slopes"]
    assert found.dims[2:] == ("slopes_dim_0",)
    label = "slopes[feature=z, group=20]"
    expected = idata["sample_stats"]["gradient"].sel(unconstrained_position=label)
    np.testing.assert_array_equal(found.sel(slopes_dim_0=label), expected)


def test_what_has_no_such_statistic(idata):
    without = idata.copy()
    without["sample_stats"] = xr.DataTree(
        idata["sample_stats"].to_dataset().drop_vars(["gradient", "position"])
    )
    with pytest.raises(ValueError, match="should have the `gradient` of one step method"):
        by_variable(without)
    with pytest.raises(ValueError, match="`statistic` should be one of 'gradient', 'position'"):
        by_variable(idata, "energy")
