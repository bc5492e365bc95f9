"""The contract with PyMC for every sampler, by default and with every gradient estimator.

`test_step_contract.py` has the rest, which does not depend on the sampler.
"""

from __future__ import annotations

import logging

import numpy as np
import pymc as pm
import pytest

from pymc_sgmcmc import chain
from tests.support.models import logistic_model, two_variable_model
from tests.support.samplers import ESTIMATORS, SAMPLERS
from tests.support.sampling import NUMBA, sample

every_estimator = pytest.mark.parametrize(
    "gradient",
    [
        # That of the most used step methods in the default run; SAGA has a test of its own.
        pytest.param(name, marks=() if name == "cv" else pytest.mark.slow)
        for name in ESTIMATORS
    ],
)
VARIANTS = ("HAMCMC (between)", "SGHMC (Euler)", "HAMCMC", "SGRLD")
"""These are left out of the default run, since they repeat others or have their own tests."""

every_sampler = pytest.mark.parametrize(
    "sampler",
    [
        pytest.param(one, id=one.name, marks=pytest.mark.slow if one.name in VARIANTS else ())
        for one in SAMPLERS
        if one.careful
    ],
    scope="module",
)


one_sampler = pytest.mark.parametrize(
    "sampler",
    [
        pytest.param(one, id=one.name, marks=() if number == 0 else pytest.mark.slow)
        for number, one in enumerate(sampler for sampler in SAMPLERS if sampler.careful)
    ],
    scope="module",
)
"""All parameters run, but only the first one in the default run."""


@pytest.fixture(scope="module")
def model():
    return logistic_model()


@pytest.fixture(scope="module")
def steps(model):
    """Step methods by sampler and gradient, each compiled once; `pm.sample` resets them."""
    made = {}

    def get(sampler, gradient="cv"):
        key = sampler.name, gradient
        if key not in made:
            made[key] = sampler.step_class(
                model=model, gradient=gradient, batch_size=100, thin=3, compile_kwargs=NUMBA
            )
        return made[key]

    return get


def assert_same(actual, expected):
    np.testing.assert_array_equal(actual.posterior["beta"], expected.posterior["beta"])
    for name in expected.sample_stats.data_vars:
        if name not in ("divergences", "perf_counter_diff"):
            np.testing.assert_array_equal(actual.sample_stats[name], expected.sample_stats[name])


@every_sampler
@pytest.mark.filterwarnings("ignore::pymc_sgmcmc.BatchSizeWarning")
def test_seeds_processes_and_runs(sampler, steps, model, monkeypatch):
    """The same seed gives the same draws: again, in processes, in runs of other lengths."""
    step = steps(sampler)
    expected = sample(model, step)
    beta = expected.posterior["beta"].to_numpy()
    assert np.isfinite(beta).all()
    assert not np.array_equal(beta[0], beta[1])
    assert not np.array_equal(sample(model, step, seed=4).posterior["beta"], beta)
    assert_same(sample(model, step), expected)
    assert_same(sample(model, step, cores=2, mp_ctx="fork"), expected)
    monkeypatch.setattr(chain, "BLOCK_TRANSITIONS", 12)
    assert_same(sample(model, step), expected)


@pytest.mark.slow
@every_sampler
def test_processes_that_do_not_fork(sampler, steps, model):
    step = steps(sampler)
    assert_same(sample(model, step, cores=2, mp_ctx="forkserver"), sample(model, step))


@every_sampler
@every_estimator
@pytest.mark.filterwarnings("ignore::pymc_sgmcmc.BatchSizeWarning")
def test_state_in_the_middle_of_a_run(sampler, gradient, steps):
    """A chain draws the same numbers again from a state."""
    step = steps(sampler, gradient)
    step.setup_chain(np.random.default_rng(5), 10, 30)

    def walk(point, count):
        positions = []
        for _ in range(count):
            point, (stats,) = step.step(point)
            positions.append((point["beta"], stats["gradient"]))
        return point, np.array(positions)

    point, _ = walk({"beta": np.zeros(3)}, 17)
    state = step.sampling_state
    _, expected = walk(point, 20)
    step.setup_chain(np.random.default_rng(6), 10, 30)
    walk({"beta": np.ones(3)}, 4)
    step.sampling_state = state
    _, resumed = walk(point, 20)
    np.testing.assert_array_equal(resumed, expected)


@every_sampler
@every_estimator
@pytest.mark.filterwarnings("ignore::pymc_sgmcmc.BatchSizeWarning")
def test_recorded_gradient_is_an_estimate_at_the_recorded_position(sampler, gradient, steps):
    step = steps(sampler, gradient)
    step.setup_chain(np.random.default_rng(5), 0, 300)
    point, errors = {"beta": np.zeros(3)}, []
    for _ in range(300):
        point, (stats,) = step.step(point)
        errors.append(stats["gradient"] - step.posterior.gradient(stats["position"]))
        np.testing.assert_array_equal(point["beta"], stats["position"])
    errors = np.array(errors)
    # Independent given the positions, with mean zero.
    z = errors.mean(0) / (errors.std(0) / np.sqrt(len(errors)))
    assert np.abs(z).max() < 4.5
    assert errors.std(0).min() > 0


@pytest.mark.slow
@one_sampler
def test_compound_step(sampler, caplog):
    """Some variables by the sampler, the others by NUTS or slices, in any order."""
    model = two_variable_model()
    with model:
        step = sampler.step_class(
            vars=[model["slope"], model["intercept"]],
            batch_size=100,
            gradient="cv",
            thin=12,
            compile_kwargs=NUMBA,
        )
        other = pm.Slice([model["sigma"]])
        with caplog.at_level(logging.ERROR, logger="pymc"):
            idata = sample(model, [step, other], draws=400, tune=100)
    assert float(abs(idata.posterior["intercept"].mean() - 1.0)) < 0.1
    assert float(abs(idata.posterior["slope"].mean() - 2.0)) < 0.1
    assert float(abs(idata.posterior["sigma"].mean() - 0.5)) < 0.08


@pytest.mark.slow
@every_sampler
def test_single_precision(sampler):
    """Draws in float32 have the posterior's mean and about its standard deviation."""
    with pm.pytensorf.pytensor.config.change_flags(floatX="float32", warn_float64="ignore"):
        model = two_variable_model()
        step = sampler.step_class(
            model=model, batch_size=100, gradient="cv", thin=12, compile_kwargs=NUMBA
        )
        idata = sample(model, step, draws=600, tune=100, chains=2)
    assert idata.sample_stats["gradient"].dtype == np.float32
    slope = idata.posterior["slope"].to_numpy()
    assert abs(slope.mean() - 2.0) < 0.1
    assert 0.5 < slope.std() / 0.026 < 2.0
