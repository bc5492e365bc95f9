"""Traces are written to files and read back as they were."""

from __future__ import annotations

import numpy as np
import pymc as pm
import pytest
import xarray as xr

from pymc_sgmcmc import OSGFS, SGLD, bias_report, stein_calibrate, zero_variance
from pymc_sgmcmc.record import SETTINGS as SETTINGS_GROUP
from pymc_sgmcmc.record import RunSettings, attach, make_rectangular, stored_matrix
from tests.support.langevin_chains import Gaussian, as_trace
from tests.support.models import logistic_model, two_variable_model
from tests.support.sampling import QUICK

SETTINGS = {
    "draws": 10,
    "tune": 5,
    "chains": 2,
    "cores": 1,
    "random_seed": 1,
    "progressbar": False,
    "quiet": True,
    "compute_convergence_checks": False,
    "discard_tuned_samples": False,
}


def check_round_trip(idata: xr.DataTree, folder) -> None:
    idata.to_netcdf(folder / "trace.nc", engine="h5netcdf")
    with xr.open_datatree(folder / "trace.nc", engine="h5netcdf") as read:
        xr.testing.assert_identical(read.load(), idata)
    idata.to_zarr(folder / "trace.zarr")
    with xr.open_datatree(folder / "trace.zarr", engine="zarr") as read:
        xr.testing.assert_identical(read.load(), idata)


@pytest.fixture(scope="module")
def compound():
    """Run with two step methods for two coordinates and one."""
    with two_variable_model() as model:
        steps = [
            SGLD(
                [model["intercept"], model["slope"]],
                step_size=1e-4,
                preconditioner="identity",
                compile_kwargs=QUICK,
            ),
            SGLD([model["sigma"]], step_size=1e-4, preconditioner="identity", compile_kwargs=QUICK),
        ]
        return pm.sample(step=steps, **SETTINGS)


def test_run_with_one_step_method(tmp_path):
    """Flags, settings and their arrays."""
    with logistic_model():
        idata = pm.sample(step=OSGFS(compile_kwargs=QUICK), **SETTINGS)
    assert SETTINGS_GROUP in idata.children
    check_round_trip(idata, tmp_path)


@pytest.mark.slow
def test_run_with_steps_of_different_dimension(compound, tmp_path):
    check_round_trip(compound, tmp_path)
    for group in ("sample_stats", "warmup_sample_stats"):
        position = compound[group]["position"]
        assert position.dims == ("chain", "draw", "position_dim_0", "position_dim_1")
        assert position.shape[2:] == (2, 2)
        assert np.isfinite(compound[group]["gradient"][:, :, 0]).all()
        assert np.isfinite(compound[group]["gradient"][:, :, 1, 0]).all()
        assert np.isnan(position[:, :, 1, 1]).all()
    found = compound["sample_stats"]["position"]
    np.testing.assert_array_equal(found[:, :, 0, 1], compound["posterior"]["slope"])
    np.testing.assert_allclose(np.exp(found[:, :, 1, 0]), compound["posterior"]["sigma"])


def test_gradients_of_two_steps_are_still_refused(compound):
    """They belong to different points: no tool may take them for those of one."""
    with pytest.raises(ValueError, match="should be numbers of one step method"):
        zero_variance(compound)
    with pytest.raises(ValueError, match="should be numbers of one step method"):
        bias_report(compound)


def test_single_precision_stays():
    vectors = np.empty((1, 1, 2), dtype=object)
    vectors[0, 0, :] = [np.ones(2, np.float32), np.ones(1, np.float32)]
    stats = xr.Dataset({"gradient": (("chain", "draw", "gradient_dim_0"), vectors)})
    idata = xr.DataTree.from_dict({"sample_stats": stats})
    make_rectangular(idata)
    assert idata["sample_stats"]["gradient"].dtype == np.float32


def test_settings_that_files_cannot_hold(tmp_path, rng):
    """None is left out, truth values are numbers, a matrix of low rank is in its parts."""
    attributes = {"sampler": "SGLD", "bias": None, "exact": True, "rows": np.int64(3)}
    arrays = {
        "center": rng.normal(size=4),
        "precision_scale": np.ones(4),
        "precision_vectors": rng.normal(size=(4, 2)),
        "precision_factors": np.ones(2),
    }
    x = rng.normal(size=(2, 10, 4))
    idata = as_trace(x, -x)
    attach(idata, RunSettings(attributes, arrays, tuple("abcd")))
    written = idata["sample_stats"].attrs
    assert "sgmcmc_bias" not in written
    assert written["sgmcmc_exact"] == 1
    check_round_trip(idata, tmp_path)
    assert stored_matrix(idata[SETTINGS_GROUP], "precision").diagonal().shape == (4,)


def test_calibrated_trace(tmp_path):
    target = Gaussian(np.diag([1.0, 4.0]), np.eye(2))
    x, g = target.chains(4, 400, 0.4, np.eye(2) / 4, seed=1)
    check_round_trip(stein_calibrate(as_trace(x, g, 0.4, np.eye(2) / 4)), tmp_path)
