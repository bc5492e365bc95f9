"""Short silent runs, and checks that runs of any step method pass."""

from __future__ import annotations

import numpy as np
import pymc as pm
import pytest

from pymc_sgmcmc.step_methods.estimators import ESTIMATORS
from tests.support.models import logistic_model, two_variable_moments

NUMBA = {"mode": "NUMBA"}
"""Transitions are compiled as those of users are by default."""

QUICK = {"mode": "FAST_COMPILE"}
"""NumPy evaluates transitions, where a test makes too few of them to be worth compiling."""

QUIET = {"progressbar": False, "quiet": True, "compute_convergence_checks": False}
"""These arguments of `pm.sample` suppress its output."""


def estimator(gradient, batching=None):
    """The estimator of a name with a minibatch scheme, where one is given."""
    return gradient if batching is None else ESTIMATORS[gradient](batching=batching)


def z_score(values, expected, batches=100):
    """Z score of the mean of a chain's values, from means of batches."""
    values = np.asarray(values)[: len(values) // batches * batches]
    means = values.reshape(batches, -1, *values.shape[1:]).mean(1)
    return (means.mean(0) - expected) / (means.std(0, ddof=1) / np.sqrt(batches))


def sample(model, step, draws=25, tune=10, chains=2, cores=1, seed=3, run=pm.sample, **kwargs):
    with model:
        return run(
            step=step,
            draws=draws,
            tune=tune,
            chains=chains,
            cores=cores,
            random_seed=seed,
            **{**QUIET, **kwargs},
        )


def check_two_variables(idata):
    """Check means and scales of `two_variable_model` against the exact ones."""
    for name, (mean, sd) in two_variable_moments().items():
        draws = idata.posterior[name]
        assert abs(float(draws.mean()) - mean) < 0.2 * sd, name
        assert float(draws.std()) == pytest.approx(sd, rel=0.15), name


def check_estimators(step_class, gradient, **settings):
    """Check means and scales of a logistic regression with default settings."""
    model = logistic_model()
    step = step_class(
        model=model, batch_size=250, gradient=gradient, compile_kwargs=NUMBA, **settings
    )
    draws = sample(model, step, draws=600, chains=1).posterior["beta"].values[0]
    center = step.center
    sd = center.curvature.standard_deviations
    assert np.all(np.abs(draws.mean(0) - center.position) < 0.5 * sd)
    assert np.all(np.abs(draws.std(0) / sd - 1) < 0.25)
