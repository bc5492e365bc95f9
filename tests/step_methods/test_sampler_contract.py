"""The contract with PyMC for every sampler, and for every gradient estimator with one of them.

`test_step_contract.py` has the rest, which does not depend on the sampler.
"""

from __future__ import annotations

import logging
import pickle
from functools import partial

import numpy as np
import pymc as pm
import pytest

from pymc_sgmcmc import MALA, SGHMC, SGLDCV, SGNHT, ULA, ResampledMomentum, chain
from tests.support.models import logistic_model, two_variable_model
from tests.support.samplers import ESTIMATORS, SAMPLERS, Sampler
from tests.support.sampling import NUMBA, QUICK, sample

FULL = [Sampler("ULA", ULA), Sampler("MALA", MALA)]
"""These evaluate all rows, and take no gradient estimator."""
SPECIAL = [
    Sampler(
        "SGHMC (fresh momenta)", partial(SGHMC, integrator=ResampledMomentum("baoab", every=7))
    ),
    Sampler("SGNHT (diagonal)", partial(SGNHT, thermostat="diagonal")),
]
REPEATED = ("HAMCMC (between)", "SGHMC (Euler)", "SGRLD", "ULA", *(one.name for one in SPECIAL))
"""These are left out of the default run, since they repeat others."""

USUAL = [sampler for sampler in SAMPLERS if sampler.careful]
PAIRS = [
    pytest.param(
        sampler,
        gradient,
        id=f"{sampler.name}-{gradient}",
        # Each sampler once, and each estimator once.
        marks=pytest.mark.slow
        if sampler.name in REPEATED or (gradient != "cv" and sampler is not USUAL[0])
        else (),
    )
    for sampler in [*USUAL, *SPECIAL]
    for gradient in ESTIMATORS
]
PAIRS.append(pytest.param(Sampler("SGLDCV", SGLDCV), "second_order", id="SGLDCV-second_order"))
WHOLE = [
    pytest.param(one, None, id=one.name, marks=pytest.mark.slow if one.name in REPEATED else ())
    for one in FULL
]
every_pair = pytest.mark.parametrize(("sampler", "gradient"), [*PAIRS, *WHOLE])
every_estimate = pytest.mark.parametrize(("sampler", "gradient"), PAIRS)


@pytest.fixture(scope="module")
def model():
    return logistic_model()


def make(sampler, gradient, **settings):
    """A step method, with minibatches where it takes an estimator."""
    if gradient is not None:
        settings = {"gradient": gradient, "batch_size": 100} | settings
    return sampler.step_class(**{"thin": 3, "compile_kwargs": QUICK} | settings)


@pytest.fixture(scope="module")
def steps(model):
    """Step methods, each made once; `pm.sample` resets them. Rows get new orders within runs."""
    made = {}

    def get(sampler, gradient, anew=False):
        key = sampler.name, gradient
        if anew or key not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(chain, "EPOCHS_BETWEEN_SHUFFLES", 2)
                made[key] = make(sampler, gradient, model=model)
        return made[key]

    return get


def assert_same(actual, expected):
    np.testing.assert_array_equal(actual.posterior["beta"], expected.posterior["beta"])
    for name in expected.sample_stats.data_vars:
        if name not in ("divergences", "perf_counter_diff"):
            np.testing.assert_array_equal(actual.sample_stats[name], expected.sample_stats[name])


@every_pair
@pytest.mark.filterwarnings("ignore::pymc_sgmcmc.BatchSizeWarning")
def test_seeds_processes_and_runs(sampler, gradient, steps, model, monkeypatch):
    """The same seed gives the same draws: again, in processes, in runs of other lengths."""
    step, run = steps(sampler, gradient), partial(sample, model, draws=15)
    expected = run(step)
    beta = expected.posterior["beta"].to_numpy()
    assert np.isfinite(beta).all()
    assert not np.array_equal(beta[0], beta[1])
    assert not np.array_equal(run(step, seed=4, chains=1).posterior["beta"], beta[:1])
    assert_same(run(step), expected)
    assert_same(run(step, cores=2, mp_ctx="fork"), expected)
    monkeypatch.setattr(chain, "BLOCK_TRANSITIONS", 12)
    assert_same(run(step), expected)


@pytest.mark.slow
@every_pair
def test_processes_that_do_not_fork(sampler, gradient, steps, model):
    step = steps(sampler, gradient)
    assert_same(sample(model, step, cores=2, mp_ctx="forkserver"), sample(model, step))


@every_pair
@pytest.mark.filterwarnings("ignore::pymc_sgmcmc.BatchSizeWarning")
def test_state_in_the_middle_of_a_run(sampler, gradient, steps):
    """A chain draws the same numbers again from a state: here, and in a step method made anew."""
    step = steps(sampler, gradient)

    def walk(point, count, step=step):
        positions = []
        for _ in range(count):
            point, (stats,) = step.step(point)
            positions.append((point["beta"], stats["gradient"]))
        return point, np.array(positions)

    for used in (0, 1, 10, 17):  # The tuning ends at 10.
        step.setup_chain(np.random.default_rng(5), 10, 30)
        point, _ = walk({"beta": np.zeros(3)}, used)
        state = pickle.dumps(step.sampling_state)
        _, expected = walk(point, 20)
        step.setup_chain(np.random.default_rng(6), 10, 30)
        walk({"beta": np.ones(3)}, 4)
        step.sampling_state = pickle.loads(state)
        _, resumed = walk(point, 20)
        np.testing.assert_array_equal(resumed, expected)
    fresh = steps(sampler, gradient, anew=True)
    fresh.setup_chain(np.random.default_rng(7), 10, 30)
    fresh.sampling_state = pickle.loads(state)
    np.testing.assert_array_equal(walk(point, 20, fresh)[1], expected)


@every_estimate
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
@every_pair
@pytest.mark.parametrize("other", [pm.Slice, pm.NUTS])
def test_compound_step(sampler, gradient, other, caplog):
    """Some variables by the sampler, the others by another one, in any order."""
    model = two_variable_model()
    with model:
        ours = [model["slope"], model["intercept"]]
        step = make(sampler, gradient, vars=ours, thin=12, compile_kwargs=NUMBA)
        others = other([model["sigma"]])
        with caplog.at_level(logging.ERROR, logger="pymc"):
            idata = sample(model, [step, others], draws=400, tune=100)
    assert float(abs(idata.posterior["intercept"].mean() - 1.0)) < 0.1
    assert float(abs(idata.posterior["slope"].mean() - 2.0)) < 0.1
    assert float(abs(idata.posterior["sigma"].mean() - 0.5)) < 0.08


@pytest.mark.slow
@every_pair
def test_single_precision(sampler, gradient):
    """Draws in float32 have the posterior's mean and about its standard deviation."""
    with pm.pytensorf.pytensor.config.change_flags(floatX="float32", warn_float64="ignore"):
        model = two_variable_model()
        step = make(sampler, gradient, model=model, thin=12, compile_kwargs=NUMBA)
        idata = sample(model, step, draws=600, tune=100, chains=2)
    assert idata.sample_stats["gradient"].dtype == np.float32
    slope = idata.posterior["slope"].to_numpy()
    assert abs(slope.mean() - 2.0) < 0.1
    assert 0.5 < slope.std() / 0.026 < 2.0
