"""What the tools read of a trace, what they refuse, and what they leave as it was."""

from __future__ import annotations

import inspect

import numpy as np
import pymc as pm
import pytest
import xarray as xr

import pymc_sgmcmc
from pymc_sgmcmc import (
    SGLDCV,
    ModelError,
    bias_report,
    discard_unconverged,
    gradient_convergence,
    gradients,
    kernel_stein_discrepancy,
    stein_calibrate,
    stein_thin,
    zero_variance,
)
from pymc_sgmcmc.trace_tools.bias import bias_warnings
from pymc_sgmcmc.trace_tools.reader import read_run
from tests.support.langevin_chains import Gaussian, as_trace

QUIET = {"progressbar": False, "quiet": True, "compute_convergence_checks": False}
TWO = np.diag([1.0, 4.0])
M = np.diag([1.0, 0.25])


@pytest.fixture
def trace():
    x, g = Gaussian(TWO, 0.3 * TWO).chains(4, 500, 0.5, M, seed=1)
    return as_trace(x, g, 0.5, M, gradient="cv", n_rows=1000, batch_size=100)


def changed(trace, **variables):
    """A trace with other statistics."""
    stats = trace["sample_stats"].to_dataset()
    out = trace.copy()
    out["sample_stats"] = xr.DataTree(
        stats.assign({name: stats[name].copy(data=one) for name, one in variables.items()})
    )
    return out


def test_chains_that_still_climb_are_told_apart_from_a_wrong_sign(trace):
    """Gradients that a sampler used itself are right: such chains have not converged."""
    climbing = np.linspace(0, 20, 500)[:, None] + trace["sample_stats"]["position"].values
    # They point to where the chains go.
    away = changed(trace, position=climbing, gradient=0.3 * (climbing - 10))
    with pytest.raises(ValueError, match="The chains have not converged: gradients point away"):
        read_run(away)
    assert (bias_report(away)["verdict"] == "not converged").all()
    (warning,) = bias_warnings(away)
    assert warning.startswith("Not converged")
    assert "sign" not in warning
    away["sample_stats"].attrs = {}
    with pytest.raises(ValueError, match="Check its sign, or compute the gradients"):
        read_run(away)


# --- Models ---------------------------------------------------------------------------------

TAKE_A_MODEL = {
    name: function
    for name in pymc_sgmcmc.__all__
    if inspect.isfunction(function := getattr(pymc_sgmcmc, name))
    and "model" in inspect.signature(function).parameters
}


@pytest.mark.parametrize("function", TAKE_A_MODEL.values(), ids=TAKE_A_MODEL)
@pytest.mark.parametrize("wrong", [3, "model"])
def test_a_model_that_is_none(function, wrong, trace):
    others = {"idata": trace, "names": "z", "parts": 2, "store": "run.zarr"}
    needed = inspect.signature(function).parameters
    given = {name: value for name, value in others.items() if name in needed}
    with pytest.raises(TypeError, match=f"`model` should be a PyMC model, but got {wrong!r}"):
        function(**given, model=wrong)


@pytest.mark.parametrize("name", ["chain", "draw"])
@pytest.mark.parametrize("kind", ["free", "local", "deterministic", "observed"])
def test_variables_with_the_name_of_a_dimension(name, kind):
    """xarray would take their draws for the labels of the dimension."""
    codes = np.repeat(np.arange(30), 4)
    names = dict.fromkeys(("free", "local", "deterministic", "observed"))
    names |= {other: other for other in names} | {kind: name}
    with pm.Model() as model:
        mean = pm.Normal(names["free"])
        effect = pm.Normal(names["local"], shape=30)
        pm.Deterministic(names["deterministic"], 2 * mean)
        pm.Normal(names["observed"], mean + effect[codes], 1.0, observed=np.sin(codes))
        for function in (
            SGLDCV,
            pymc_sgmcmc.sample,
            lambda: pymc_sgmcmc.PriorMetropolis([effect]),
            lambda: pymc_sgmcmc.marginalize(model, names["local"]),
        ):
            with pytest.raises(ModelError, match=f"`{name}` has the name of a dimension"):
                function()


# --- What is read ---------------------------------------------------------------------------


def test_step_sizes_of_a_compound_step():
    """Not those of the other step methods, which are in the next column."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=200)
    with pm.Model():
        slope = pm.Normal("slope")
        pm.Normal("y", slope * x, 1, observed=x + rng.normal(size=200))
        offset = pm.Normal("offset")
        pm.Normal("z", offset, 1, observed=rng.normal(size=20))
        steps = [
            pm.NUTS([offset]),
            SGLDCV([slope], batch_size=20, rows=["y"], compile_kwargs={"mode": "FAST_COMPILE"}),
        ]
        idata = pm.sample(step=steps, draws=20, tune=20, chains=2, cores=1, random_seed=1, **QUIET)
    sizes = idata["sample_stats"]["step_size"].values
    assert sizes.shape[2] == 2
    column = idata["sample_stats"].attrs["sgmcmc_step_size_column"]
    assert column == 1
    run = read_run(idata)
    np.testing.assert_allclose(run.step_sizes, sizes[..., column].mean(1))


def test_transitions_between_draws(trace):
    assert read_run(trace).thin == 1
    assert read_run(trace.isel(draw=slice(None, None, 5))).thin == 5
    assert read_run(trace.isel(draw=[0, 1, 5, 6, 20])).thin is None
    stats = trace["sample_stats"].to_dataset().assign_attrs(sgmcmc_thin=3)
    trace["sample_stats"] = xr.DataTree(stats)
    assert read_run(trace.isel(draw=slice(100, None, 5))).thin == 15


def test_order_of_dimensions_does_not_matter(trace):
    turned = trace.copy()
    for name in ("posterior", "sample_stats"):
        turned[name] = xr.DataTree(trace[name].to_dataset().transpose("draw", ..., "chain"))
    xr.testing.assert_allclose(zero_variance(turned).mean, zero_variance(trace).mean)
    # What has no value for each draw is left alone.
    turned["posterior"]["fixed"] = xr.DataArray(np.arange(2), dims="coordinate")
    assert "fixed" not in zero_variance(turned).mean
    expected = stein_calibrate(trace)
    found = stein_calibrate(turned)
    for name in ("theta", "fixed"):
        assert found["posterior"][name].dims == turned["posterior"][name].dims
    np.testing.assert_array_equal(found["posterior"]["fixed"], [0, 1])
    for group, name in (("sample_stats", "position"), ("posterior", "theta")):
        turned_back = found[group][name].transpose(*expected[group][name].dims)
        xr.testing.assert_allclose(turned_back, expected[group][name])


# --- What is refused ------------------------------------------------------------------------

TOOLS = [
    zero_variance,
    stein_calibrate,
    gradient_convergence,
    discard_unconverged,
    kernel_stein_discrepancy,
    bias_report,
]


@pytest.mark.parametrize("tool", TOOLS)
def test_what_is_no_trace(tool):
    with pytest.raises(TypeError, match=r"`idata` should be an xarray.DataTree, .* type NoneType"):
        tool(None)


@pytest.mark.parametrize("tool", TOOLS)
def test_a_chain_without_its_dimension(tool, trace):
    with pytest.raises(ValueError, match=r"has no `chain`. Select with lists or slices"):
        tool(trace.sel(chain=0))


@pytest.mark.parametrize("tool", [zero_variance, stein_calibrate, stein_thin, discard_unconverged])
def test_other_draws_in_the_posterior(tool, trace):
    trace["posterior"] = xr.DataTree(trace["posterior"].to_dataset().isel(draw=slice(100)))
    with pytest.raises(ValueError, match=r"4 chains of 100 draws, but .* has 4 chains of 500"):
        tool(trace)


@pytest.mark.parametrize("tool", [zero_variance, stein_calibrate])
def test_a_trace_without_posterior(tool, trace):
    without = trace.drop_nodes("posterior")
    with pytest.raises(ValueError, match=r"should have a group `posterior`, but has \['sample"):
        tool(without)


def test_gradients_of_other_draws():
    with pm.Model() as model:
        pm.Normal("theta")
        pm.Normal("y", 0, 1, observed=np.zeros(3))
    draws = xr.Dataset({"theta": (("chain", "draw"), np.zeros((2, 9)))})
    stats = xr.Dataset({"lp": (("chain", "draw"), np.zeros((2, 18)))})
    with pytest.raises(ValueError, match=r"2 chains of 9 draws, but .* has 2 chains of 18"):
        gradients(xr.DataTree.from_dict({"posterior": draws, "sample_stats": stats}), model)


def test_a_chain_that_does_not_move(trace):
    positions = trace["sample_stats"]["position"].values.copy()
    positions[1, :, 0] = positions[1, 0, 0]
    with pytest.raises(ValueError, match=r"`theta\[0\]` is constant in chain 1"):
        zero_variance(changed(trace, position=positions))


def test_objects(trace):
    with pytest.raises(ValueError, match=r"should be numbers .* but are object and float64"):
        zero_variance(
            changed(trace, position=trace["sample_stats"]["position"].values.astype(object))
        )


def test_dependent_coordinates(trace):
    """Two equal ones, in each tool a message."""
    stats = trace["sample_stats"]
    both = {
        name: np.concatenate([stats[name].values] * 2, axis=2) for name in ("position", "gradient")
    }
    same = as_trace(both["position"], both["gradient"])
    for tool in (zero_variance, kernel_stein_discrepancy, stein_calibrate, gradient_convergence):
        with pytest.raises(ValueError, match="functions of others"):
            tool(same)


def test_units_of_any_size(trace):
    """Coordinates with deviations 1e-10 and 1e10: no warnings, and the same numbers."""
    units = np.array([1e-10, 1e10])
    stats = trace["sample_stats"]
    position, gradient = (stats[name].values for name in ("position", "gradient"))
    scaled = as_trace(position * units, gradient / units)
    plain = as_trace(position, gradient)
    np.testing.assert_allclose(
        stein_calibrate(scaled)["stein_calibration"]["sd_ratio"],
        stein_calibrate(plain)["stein_calibration"]["sd_ratio"],
    )
    np.testing.assert_allclose(
        gradient_convergence(scaled)["statistic"], gradient_convergence(plain)["statistic"]
    )
    np.testing.assert_allclose(
        zero_variance(scaled).mcse["theta"] / units, zero_variance(plain).mcse["theta"]
    )


# --- Groups ---------------------------------------------------------------------------------


@pytest.fixture
def with_groups(trace):
    """Attributes of the root, groups in groups, and draws that are not those of the posterior."""
    rng = np.random.default_rng(1)
    prior = xr.Dataset({"theta": (("chain", "draw"), rng.normal(size=(4, 500)))})
    inner = xr.Dataset({"value": ("number", np.arange(3))})
    moments = xr.Dataset({"batch_position": (("chain", "batch"), np.ones((4, 3)))})
    groups = {"prior": prior, "extra/inner": inner, "sgmcmc_moments": moments}
    out = xr.DataTree.from_dict(
        {"/": xr.Dataset(attrs={"note": "keep"}), **groups}, name="of the user"
    )
    for name, node in trace.children.items():
        out[name] = node
    return out


@pytest.mark.parametrize(
    "tool",
    [
        stein_calibrate,
        lambda idata: stein_thin(with_all_rows(idata), 20),
        lambda idata: discard_unconverged(with_late_chain(idata)),
    ],
    ids=["stein_calibrate", "stein_thin", "discard_unconverged"],
)
def test_what_is_not_of_the_draws_stays(tool, with_groups):
    before = with_groups.copy(deep=True)
    after = tool(with_groups)
    xr.testing.assert_identical(with_groups, before)
    assert after.attrs == {"note": "keep"}
    assert after.name == "of the user"
    for path in ("prior", "extra/inner"):
        xr.testing.assert_identical(after[path].to_dataset(), before[path].to_dataset())
    # Those of the draws before are not those of the draws after.
    assert "sgmcmc_moments" not in after.children


def with_all_rows(idata):
    stats = idata["sample_stats"].to_dataset().assign_attrs(sgmcmc_batch_size=1000)
    out = idata.copy()
    out["sample_stats"] = xr.DataTree(stats)
    return out


def with_late_chain(idata):
    gradient = idata["sample_stats"]["gradient"].values.copy()
    gradient[2, :50] += 100.0
    return changed(idata, gradient=gradient)


def test_gradients_keep_what_else_there_is():
    with pm.Model() as model:
        pm.Normal("theta")
        pm.Normal("y", 0, 1, observed=np.zeros(3))
        pm.Data("w", np.ones(2))
    draws = xr.Dataset({"theta": (("chain", "draw"), np.random.default_rng(1).normal(size=(2, 9)))})
    observed = xr.Dataset({"y": ("y_dim_0", np.zeros(3))})
    tree = xr.DataTree.from_dict(
        {
            "/": xr.Dataset(attrs={"note": "keep"}),
            "posterior": draws,
            "observed_data": observed,
            "constant_data": xr.Dataset({"w": ("w_dim_0", np.ones(2))}),
            "extra/inner": observed,
        },
        name="of the user",
    )
    found = gradients(tree, model)
    assert found.attrs == {"note": "keep"}
    assert found.name == "of the user"
    assert "inner" in found["extra"].children
    with model:
        pm.set_data({"w": np.zeros(2)})
    with pytest.warns(UserWarning, match="other values of `w` than the trace"):
        gradients(tree, model)


def test_moments_say_where_they_are_left_out(trace):
    with pytest.raises(ValueError, match="sgmcmc_moments` of a complete run"):
        zero_variance(stein_calibrate(trace), moments="only")


def test_gradients_of_elements_in_another_order():
    """Labels say which is which; by position the gradients would be those of other elements."""
    with pm.Model(coords={"feature": ["b", "a"]}) as model:
        pm.Normal("theta", [0.0, 5.0], dims="feature")
        pm.Normal("y", 0, 1, observed=np.zeros(3))
    x = np.random.default_rng(1).normal([0.0, 5.0], size=(2, 50, 2))
    draws = xr.Dataset({"theta": (("chain", "draw", "feature"), x)}, coords={"feature": ["b", "a"]})
    tree = xr.DataTree.from_dict({"posterior": draws})
    expected = gradients(tree, model)["sample_stats"]["gradient"].values
    np.testing.assert_allclose(expected, [0.0, 5.0] - x)
    turned = xr.DataTree.from_dict({"posterior": draws.sortby("feature")})
    with pytest.raises(ValueError, match=r"`theta` .* `feature` is a, b in the trace and b, a in"):
        gradients(turned, model)
    back = turned.sel(feature=list(model.coords["feature"]))
    np.testing.assert_allclose(gradients(back, model)["sample_stats"]["gradient"], expected)
