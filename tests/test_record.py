"""The settings and statistics that a run writes into its trace at its end."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pymc as pm
import pytest

from pymc_sgmcmc import SGLD, SGLDCV, SVRG
from pymc_sgmcmc.record import MOMENTS, OF_CHAIN, RECORD, SETTINGS, RunSettings, settings_of
from tests.support.models import logistic_model, two_variable_model
from tests.support.sampling import QUICK

NUMBA = {"mode": "NUMBA"}
SAMPLING = {
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


@pytest.fixture(scope="module")
def step_and_trace():
    with logistic_model():
        step = SGLDCV(
            batch_size=20, step_size=1e-3, preconditioner="identity", compile_kwargs=NUMBA
        )
        return step, pm.sample(step=step, **SAMPLING)


def test_coordinates_have_labels(step_and_trace):
    _, idata = step_and_trace
    for group in ("sample_stats", "warmup_sample_stats"):
        stats = idata[group]
        assert stats["gradient"].dims == ("chain", "draw", "unconstrained_position")
        assert stats["position"].dims == ("chain", "draw", "unconstrained_position")
    age = idata["sample_stats"]["position"].sel(unconstrained_position="beta[feature=age]")
    np.testing.assert_array_equal(age, idata.posterior["beta"].sel(feature="age"))


def test_nothing_is_left_of_the_channel(step_and_trace):
    _, idata = step_and_trace
    for group in ("sample_stats", "warmup_sample_stats"):
        assert not [name for name in idata[group].variables if str(name).startswith(RECORD)]
    assert {SETTINGS, MOMENTS} <= set(idata.children)
    assert settings_of(idata)["sampler"] == "SGLDCV"


def test_what_transitions_and_the_set_up_cost(step_and_trace):
    step, idata = step_and_trace
    settings = settings_of(idata)
    assert settings["gradients_a_transition"] == 1
    assert settings["rows_a_transition"] == 20
    assert settings["setup_passes"] == step.posterior.rows_evaluated / step.posterior.n_rows > 2
    assert 0 < settings["setup_seconds"] < 600


@pytest.mark.usefixtures("uncompiled")
def test_passes_of_svrg_are_counted():
    step = SGLD(
        model=logistic_model(), gradient=SVRG(refresh=5), batch_size=20, step_size=1e-3,
        preconditioner="identity",
    )  # fmt: skip
    rows = step.run_settings.attributes["rows_a_transition"]
    assert rows == 20 + step.posterior.n_rows / 5


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("tuned", ["kept", "discarded"])
def test_settings_and_moments_come_from_any_process(cores, tuned):
    with logistic_model():
        step = SGLDCV(
            batch_size=20, step_size=1e-3, preconditioner="identity", compile_kwargs=NUMBA
        )
        settings = {**SAMPLING, "cores": cores, "discard_tuned_samples": tuned == "discarded"}
        idata = pm.sample(step=step, **settings)
    assert settings_of(idata)["batch_size"] == 20
    moments = idata[MOMENTS]
    assert moments["mean"].shape == (2, 3)
    mean = idata["posterior"]["beta"].mean("draw")
    np.testing.assert_allclose(moments["mean"], mean, atol=1e-9)


@pytest.mark.usefixtures("without_compiler")
def test_coordinates_of_one_of_two_step_methods():
    with two_variable_model() as model:
        step = SGLD(
            [model["intercept"], model["slope"]],
            step_size=1e-4,
            preconditioner="identity",
            compile_kwargs=QUICK,
        )
        idata = pm.sample(step=[step, pm.Metropolis([model["sigma"]])], **SAMPLING)
    position = idata["sample_stats"]["position"]
    assert position.dtype == np.float64
    np.testing.assert_array_equal(
        position.sel(unconstrained_position="slope"), idata["posterior"]["slope"]
    )
    assert MOMENTS not in idata.children
    assert settings_of(idata)["step_methods"] == 2


def test_importing_changes_nothing_in_pymc():
    """The first step method that is made wraps the end of `pymc.sample`.

    Importing is quick, since what takes longest is imported where it is used.
    """
    code = """
import sys
import pymc.sampling.mcmc as mcmc
before, modules = dict(vars(mcmc)), set(sys.modules)
import pymc_sgmcmc, pymc as pm
slow = {"arviz_base", "arviz_stats", "arviz_plots", "matplotlib", "scipy.stats", "numba", "jax"}
assert not slow & (set(sys.modules) - modules)
assert all(vars(mcmc)[name] is value for name, value in before.items() if name[:2] != "__")
with pm.Model():
    mean = pm.Normal("mean")
    pm.Normal("y", mean, 1, observed=[0.0] * 10)
    for _ in range(2):
        settings = {"step_size": 0.01, "preconditioner": "identity", "batch_size": 5}
        pymc_sgmcmc.SGLD(**settings, compile_kwargs={"mode": "FAST_COMPILE"})
assert mcmc._sample_return.__wrapped__ is before["_sample_return"]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_matrices_of_a_chain_have_dimensions_of_their_own():
    """Roots of a precision and of a preconditioner have different numbers of elements."""
    arrays = {}
    for matrix, size in (("precision", 3), ("preconditioner", 5)):
        for part in ("values_of_root", "values_of_inverse"):
            arrays[f"{OF_CHAIN}{matrix}_{part}"] = np.ones(size)
        arrays[f"{OF_CHAIN}{matrix}_factors"] = np.ones((2, size))
    dataset = RunSettings({}, arrays, ("x", "z")).dataset()
    assert dataset.sizes["chain_precision_element_of_root"] == 3
    assert dataset.sizes["chain_preconditioner_element_of_root"] == 5
    assert dataset["chain_precision_factors"].dims[1] == "chain_precision_direction"
