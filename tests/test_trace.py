"""Labels of stored positions and gradients."""

from __future__ import annotations

import numpy as np
import pymc as pm
import pytest
import xarray as xr

from pymc_sgmcmc import SGLDCV, label_positions
from tests.models import logistic_model


@pytest.fixture(scope="module")
def step_and_trace():
    model = logistic_model()
    with model:
        step = SGLDCV(batch_size=20, step_size=1e-3, compile_kwargs={"mode": "CVM"})
        idata = pm.sample(
            step=step,
            draws=10,
            tune=5,
            chains=2,
            random_seed=1,
            progressbar=False,
            quiet=True,
            compute_convergence_checks=False,
            discard_tuned_samples=False,
        )
    return step, idata


def test_labels(step_and_trace):
    step, idata = step_and_trace
    labelled = label_positions(idata, step.posterior.labels)
    for group in ("sample_stats", "warmup_sample_stats"):
        stats = labelled[group]
        assert stats["gradient"].dims == ("chain", "draw", "unconstrained_position")
        assert stats["position"].dims == ("chain", "draw", "unconstrained_position")
    age = labelled["sample_stats"]["position"].sel(unconstrained_position="beta[feature=age]")
    np.testing.assert_array_equal(age, idata.posterior["beta"].sel(feature="age"))
    assert "gradient_dim_0" in idata["sample_stats"].dims, "the input was changed"
    assert set(labelled.children) == set(idata.children)


def test_labelled_trace_is_written_and_read_back(step_and_trace, tmp_path):
    step, idata = step_and_trace
    labelled = label_positions(idata, step.posterior.labels)
    labelled.to_netcdf(tmp_path / "trace.nc", engine="h5netcdf")
    with xr.open_datatree(tmp_path / "trace.nc", engine="h5netcdf") as read:
        xr.testing.assert_equal(
            read["sample_stats"].to_dataset(), labelled["sample_stats"].to_dataset()
        )


def test_wrong_labels(step_and_trace):
    step, idata = step_and_trace
    with pytest.raises(ValueError, match=r"name the 3 coordinates .* but has 2 entries"):
        label_positions(idata, step.posterior.labels[:2])


def test_trace_without_gradients(step_and_trace):
    _, idata = step_and_trace
    with pytest.raises(ValueError, match="should have `gradient`"):
        label_positions(xr.DataTree.from_dict({"posterior": idata["posterior"].to_dataset()}), [])
