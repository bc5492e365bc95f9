"""Short silent runs, and checks that runs of any step method pass."""

from __future__ import annotations

import numpy as np
import pymc as pm
import pytensor
import pytest

from pymc_sgmcmc.step_methods.estimators import ESTIMATORS
from tests.support.models import logistic_model, two_variable_model, two_variable_moments

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


def check_processes_and_resumption(step_class, **settings):
    """Check that draws are the same in other processes, and after resuming in a run of draws."""
    model = logistic_model()

    def fresh():
        return step_class(
            model=model, batch_size=100, gradient="cv", thin=3, compile_kwargs=NUMBA, **settings
        )

    step = fresh()
    expected = sample(model, step).posterior["beta"]
    np.testing.assert_array_equal(sample(model, step, cores=2).posterior["beta"], expected)

    def walk(stepper, point, count):
        draws = []
        for _ in range(count):
            point, _ = stepper.step(point)
            draws.append(point["beta"])
        return point, draws

    step.setup_chain(np.random.default_rng(5), 10, 30)
    point, _ = walk(step, model.initial_point(), 7)
    state = step.sampling_state
    _, rest = walk(step, point, 12)
    other = fresh()
    other.setup_chain(np.random.default_rng(6), 10, 30)
    other.sampling_state = state
    np.testing.assert_array_equal(walk(other, point, 12)[1], rest)


def check_float32(step_class, **settings):
    with pytensor.config.change_flags(floatX="float32"):
        model = logistic_model()
        step = step_class(
            model=model, batch_size=100, gradient="cv", compile_kwargs=NUMBA, **settings
        )
        idata = sample(model, step, draws=500, chains=1)
    assert idata.posterior["beta"].dtype == np.float32
    center = step.center
    draws = idata.posterior["beta"].values[0]
    assert np.all(np.abs(draws.mean(0) - center.position) < center.curvature.standard_deviations)
    ratio = draws.std(0) / center.curvature.standard_deviations
    assert np.all((ratio > 0.7) & (ratio < 1.4))


def check_two_variables(idata):
    """Check means and scales of `two_variable_model` against the exact ones."""
    for name, (mean, sd) in two_variable_moments().items():
        draws = idata.posterior[name]
        assert abs(float(draws.mean()) - mean) < 0.2 * sd, name
        assert float(draws.std()) == pytest.approx(sd, rel=0.15), name


def check_compound(step_class, other, **settings):
    """Check means and scales where another step method moves one of the variables."""
    model = two_variable_model()
    with model:
        steps = [
            step_class(
                [model["slope"], model["intercept"]], batch_size=100, gradient="cv",
                compile_kwargs=NUMBA, **settings,
            ),
            other([model["sigma"]]),
        ]  # fmt: skip
        idata = sample(model, steps, draws=600, tune=200, chains=1)
    exact = {"intercept": (1.0, 0.026), "slope": (2.0, 0.026), "sigma": (0.5, 0.019)}
    for name, (truth, sd) in exact.items():
        draws = idata.posterior[name].values
        assert abs(draws.mean() - truth) < 5 * sd
        assert 0.8 < draws.std() / sd < 1.25


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
