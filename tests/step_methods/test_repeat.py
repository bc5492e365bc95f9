"""A second run has every setting of the first except the step size."""

from __future__ import annotations

import numpy as np
import pymc as pm
import pytest

from pymc_sgmcmc import SGLD, SGLDCV, SVRG, SecondOrder, bias_report
from pymc_sgmcmc.batching import make_batching
from pymc_sgmcmc.gradient_estimators import PlainGradient
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.record import SETTINGS
from pymc_sgmcmc.step_methods.repeat import repeated_step
from pymc_sgmcmc.trace_tools.reader import settings_of
from tests.support.models import logistic_model
from tests.support.sampling import QUICK

NUMBA = {"mode": "NUMBA"}
"""For settings, which do not depend on how the transitions are compiled."""

QUIET = {"progressbar": False, "quiet": True, "compute_convergence_checks": False}

OF_THE_STEP_SIZE = {
    "step_size", "step_size_from", "thin", "bias", "noise", "curvature", "why",
}  # fmt: skip
"""These settings are about the step size, or say where settings are from."""


def rare_column():
    """A column of zeros and ones with 0.06 % ones: their rows are in each transition."""
    rng = np.random.default_rng(2)
    n_rows = 20_000
    X = np.column_stack([np.ones(n_rows), rng.normal(size=n_rows), rng.random(n_rows) < 6e-4])
    y = rng.random(n_rows) < 1 / (1 + np.exp(-X @ [0.2, 0.5, 1.0]))
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 5, shape=3)
        pm.Bernoulli("y", logit_p=X @ beta, observed=y)
    return model


def two_blocks():
    """Two observed variables have different lengths, of which the rows of one are named."""
    rng = np.random.default_rng(3)
    with pm.Model() as model:
        slope = pm.Normal("slope")
        x = rng.normal(size=500)
        pm.Normal("y", slope * x, 1, observed=x + rng.normal(size=500))
        pm.Normal("calibration", slope, 0.5, observed=rng.normal(1, 0.5, size=30))
    return model


CASES = {
    "plain": (logistic_model, SGLD, {"batch_size": 400}),
    "control variates": (logistic_model, SGLDCV, {}),
    "rows in each transition": (rare_column, SGLDCV, {}),
    "named rows": (two_blocks, SGLDCV, {"rows": ["y"]}),
    "replacement": (
        logistic_model,
        SGLDCV,
        {"gradient": SecondOrder(batching="replace"), "batch_size": 30},
    ),
    "svrg": (logistic_model, SGLD, {"gradient": SVRG(refresh=7), "batch_size": 50}),
    "saga": (logistic_model, SGLD, {"gradient": "saga", "batch_size": 50}),
    "step given": (
        logistic_model,
        SGLDCV,
        {"step_size": 1e-3, "preconditioner": "identity", "batch_size": 50},
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("without_compiler")
def test_every_setting_but_the_step_size(case):
    make_model, step_class, settings = CASES[case]
    model = make_model()
    with model:
        first = step_class(compile_kwargs=QUICK, **settings)
        idata = pm.sample(step=first, draws=4, tune=2, chains=1, random_seed=1, **QUIET)
    arrays = idata[SETTINGS].to_dataset() if SETTINGS in idata.children else None
    second = repeated_step(
        model, settings_of(idata), arrays, step_size=1e-4, thin=3, compile_kwargs=QUICK
    )
    expected, actual = first.run_settings, second.run_settings
    where_from = {name for name in expected.attributes if name.endswith("_from")}
    where_from |= {"rows", "setup_passes", "setup_seconds"}
    compared = set(expected.attributes) - OF_THE_STEP_SIZE - where_from
    compared -= {"sampler"}  # `SGLD` with the law and the gradient of the run
    compared -= {"largest_force"}  # no setting of it
    force = expected.attributes.get("largest_force", np.inf)
    assert second.largest_force.get_value() == pytest.approx(force)
    assert compared >= {"law", "gradient", "batching", "batch_size", "n_rows", "kept_rows"}
    for name in compared:
        assert actual.attributes[name] == expected.attributes[name], name
    assert second.posterior.data_names == first.posterior.data_names
    # A given centre is not searched, so nothing is known of the skewness there.
    compared = {name: expected.arrays[name] for name in set(expected.arrays) - {"mean_shift"}}
    for name, values in compared.items():
        np.testing.assert_allclose(actual.arrays[name], values, rtol=1e-9, atol=0, err_msg=name)
    if case == "rows in each transition":
        assert expected.attributes["kept_rows"] >= 5
    if case == "named rows":
        assert second.posterior.n_rows == 500
    assert second.step_size == 1e-4
    assert second.thin == 3


@pytest.mark.slow
def test_report_of_a_run_with_rows_in_each_transition():
    """Without these rows the second run would be forty times as wide, and the report wrong."""
    model = rare_column()
    with model:
        step = SGLDCV(compile_kwargs=NUMBA)
        idata = pm.sample(
            step=step, draws=2000, tune=200, chains=2, cores=1, random_seed=1, **QUIET
        )
    report = bias_report(idata, model, rerun=True, random_seed=2, compile_kwargs=NUMBA)
    assert (report["mean_error_se"] < 0.2).all()
    assert not report["verdict"].isin(["mean off", "variance too large"]).any()


@pytest.mark.usefixtures("without_compiler")
def test_a_run_with_an_estimator_made_by_hand_is_not_repeated():
    model = logistic_model()
    posterior = Posterior(model)
    estimator = PlainGradient(posterior, make_batching("shuffle", posterior.data, 20))
    with model:
        step = SGLD(
            gradient=estimator, step_size=1e-3, preconditioner="identity", compile_kwargs=QUICK
        )
        idata = pm.sample(step=step, draws=10, tune=2, chains=1, random_seed=1, **QUIET)
    with pytest.raises(ValueError, match="an estimator made by hand"):
        bias_report(idata, model, rerun=True)
