"""All chains at once on the device of JAX."""

from __future__ import annotations

import signal
from functools import partial

import jax
import numpy as np
import pymc as pm
import pytest

import pymc_sgmcmc as sg
from pymc_sgmcmc import SGLD, SGLDCV, FirstOrder, NonFinitePositionError, Posterior
from pymc_sgmcmc.batching import first_order
from pymc_sgmcmc.gradient_estimators import WeightedGradient
from pymc_sgmcmc.sampling import vectorized
from pymc_sgmcmc.vectorized import KEY, ChainsOnDevice, minibatches_on_device, strides_of_windows
from tests.support.linear_gaussian import (
    LinearGaussian,
    covariance_z_scores,
    formula_covariance,
    sgld_covariance,
)
from tests.support.models import logistic_model
from tests.support.sampling import QUIET

JAX = {"mode": "JAX"}
Z_BOUND = 4.5
N_ROWS, BATCH_SIZE, DIMENSION = 40, 5, 3

pytestmark = pytest.mark.filterwarnings("ignore:`center` is:pymc_sgmcmc.CenterWarning")


@pytest.fixture(scope="module")
def problem() -> LinearGaussian:
    return LinearGaussian.simulate(N_ROWS, DIMENSION, seed=3)


def sampler(problem, batching="shuffle", **settings):
    settings = {
        "batch_size": BATCH_SIZE,
        "step_size": 0.6 / np.linalg.eigvalsh(problem.precision)[-1],
        "preconditioner": "identity",
        "gradient": FirstOrder(batching=batching),
        "center": {"beta": problem.mean + 1.0},
        "thin": 30,
        "compile_kwargs": JAX,
        **settings,
    }
    model = settings.pop("model", None) or problem.model()
    return model, SGLD(model=model, **settings)


@pytest.fixture(scope="module")
def made(problem):
    """A model and a step method, for which three chains are compiled once."""
    return sampler(problem)


def sample(model, step, chains=3, draws=20, tune=10, **kwargs):
    kwargs = {"chain_method": "vectorized", "marginalize": None, **QUIET, **kwargs}
    return sg.sample(draws, tune=tune, chains=chains, step=step, model=model, **kwargs)


@pytest.mark.parametrize("batching", ["shuffle", pytest.param("replace", marks=pytest.mark.slow)])
def test_law_is_that_of_the_sampler(problem, batching):
    """Last of a few draws of many chains, against the exact law with its bias."""
    model, step = sampler(problem, batching)
    draws = sample(model, step, chains=3000, draws=9, tune=1, random_seed=1)
    last = draws["posterior"]["beta"].values[:, -1]
    at = problem.mean + 1.0
    if batching == "replace":
        exact = formula_covariance(problem, BATCH_SIZE, 1.0, step.step_size, at)
    else:
        order = first_order(N_ROWS)(np.arange(N_ROWS))
        windows = [
            order[(start + stride * np.arange(BATCH_SIZE)) % N_ROWS]
            for start in range(N_ROWS)
            for stride in strides_of_windows(N_ROWS, BATCH_SIZE)
        ]
        exact = sgld_covariance(problem, windows, step.step_size, at)
    mean_z, covariance_z = covariance_z_scores(last, problem.mean, exact)
    assert np.abs(mean_z).max() < Z_BOUND
    assert np.abs(covariance_z).max() < Z_BOUND
    _, posterior_z = covariance_z_scores(last, problem.mean, np.linalg.inv(problem.precision))
    assert np.abs(posterior_z).max() > 2 * Z_BOUND


@pytest.mark.parametrize(
    "step_class",
    [
        sg.SGHMC,
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (SGLD, SGLDCV, sg.SGNHT, sg.PSGLD, sg.HAMCMC)
        ),
    ],
)
def test_transitions_are_those_of_single_chains(step_class):
    """The same noise and minibatches give the draws that the block gives one chain."""
    model = logistic_model()
    step = step_class(model=model, batch_size=300, compile_kwargs=JAX)
    block, thin = step.block, 7  # 256 is no multiple of it
    device = ChainsOnDevice(block)
    rng = np.random.default_rng(2)
    seeds = rng.integers(2**32, size=(2, 2), dtype=np.uint32)
    starts = step.center.position + 0.01 * rng.normal(size=(2, block.dimension))
    auxiliaries = [block.dynamics.initial_auxiliaries(start, rng) for start in starts]
    parts = (starts, *(np.stack(parts) for parts in zip(*auxiliaries, strict=True)))
    count = device.draws_of_call(thin) * thin
    sizes = np.linspace(0.05, 0.04, count)
    state, found = device.advance(device.begin(seeds, parts), sizes, thin)
    _, following = device.advance(state, sizes, thin)
    drawn = minibatches_on_device(step.batching)
    for number, seed in enumerate(seeds):
        key = jax.random.wrap_key_data(seed, impl=KEY)
        *_, of_first = jax.random.split(jax.random.fold_in(key, 0), 3)
        pending = np.asarray(drawn(of_first, block.lag))
        here = tuple(part[number] for part in parts)
        # The curvature pairs of HAMCMC amplify how products of matrices are rounded.
        calls, most = ((found,), 3) if step_class is sg.HAMCMC else ((found, following), None)
        for call, of_call in enumerate(calls):
            of_rows, of_noise, _ = jax.random.split(jax.random.fold_in(key, call), 3)
            indices = np.asarray(drawn(of_rows, block.static_length))[:count]
            indices = np.concatenate([pending, indices])
            shape = block.static_length, block.noise_size
            noise = np.asarray(jax.random.normal(of_noise, shape, block.dtype))[:count]
            ran = block(here, indices, noise, sizes)
            recorded = slice(thin - 1, None, thin)
            for name in ("positions", "gradients"):
                np.testing.assert_allclose(
                    getattr(of_call, name)[number][:most],
                    getattr(ran, name)[recorded][:most],
                    rtol=1e-7,
                )
            here = ran.positions[-1], *(part[-1] for part in ran.auxiliaries)
            pending = indices[-block.lag :]
    assert (found.first_bad == -1).all()


def test_draws_of_a_chain_do_not_depend_on_the_others(made, problem, monkeypatch):
    model, step = made
    few = sample(model, step, random_seed=4)
    # So do chains of which the device takes a part at once.
    monkeypatch.setattr("pymc_sgmcmc.vectorized.DEVICE_ELEMENTS", 5000)
    many = sample(model, sampler(problem, model=model)[1], chains=5, random_seed=4)
    for group in ("posterior", "sample_stats"):
        for name in few[group].data_vars:
            np.testing.assert_allclose(few[group][name], many[group][name][:3], rtol=1e-10)
    assert len(np.unique(many["posterior"]["beta"].values[:, 0, 0])) == 5


def test_trace_is_that_of_chains_in_turn(made):
    """Groups, names, shapes and settings, warm-up draws included."""
    model, step = made
    kwargs = {"random_seed": 1, "discard_tuned_samples": False}
    found = sample(model, step, **kwargs)
    expected = sample(model, step, chain_method="parallel", cores=1, **kwargs)
    assert set(expected.children) - set(found.children) == {"sgmcmc_moments"}
    for name, group in found.children.items():
        assert dict(group.sizes) == dict(expected[name].sizes)
        assert {key: value.dtype for key, value in group.data_vars.items()} == {
            key: value.dtype for key, value in expected[name].data_vars.items()
        }
    ours, theirs = found["sample_stats"].attrs, expected["sample_stats"].attrs
    assert {key for key in theirs if not key.startswith("sampling")} <= set(ours)
    assert ours["sgmcmc_thin"] == theirs["sgmcmc_thin"] == 30
    stats = found["sample_stats"]
    np.testing.assert_allclose(
        stats["gradient_norm"], np.linalg.norm(stats["gradient"], axis=-1), rtol=1e-10
    )
    np.testing.assert_allclose(stats["position"], found["posterior"]["beta"])


def test_tuning_is_taken_over():
    """A step size that tuning changes, here by the noise of few rows, is that of all chains."""
    model = logistic_model()
    step = SGLDCV(model=model, gradient="cv", integrator="euler", compile_kwargs=JAX)
    factors = []
    tuned = vectorized._tuned

    def seen(*arguments):
        pilot, warnings = tuned(*arguments)
        factors.append(step.chain.present_step_size() / step.step_size)
        return pilot, warnings

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vectorized, "_tuned", seen)
        draws = sample(model, step, tune=200, random_seed=1)
    assert factors[0] != 1
    np.testing.assert_allclose(
        draws["sample_stats"]["step_size"], factors[0] * step.step_size, rtol=1e-12
    )


def test_tools_take_the_draws(problem):
    model = problem.model()
    step = SGLDCV(model=model, compile_kwargs=JAX)
    draws = sample(model, step, chains=100, draws=200, tune=100, random_seed=1)
    table = sg.summary(draws)
    sds = np.sqrt(np.diag(np.linalg.inv(problem.precision)))
    assert (np.abs(table["mean"] - problem.mean) < 4.5 * table["mean_error"] + 0.01 * sds).all()
    np.testing.assert_allclose(table["sd"], sds, rtol=0.06)
    assert (sg.bias_report(draws)["verdict"] == "ok").all()
    reduced = sg.zero_variance(draws)
    assert reduced is not None


def test_windows_are_nearly_all_pairs():
    """Rows have equal probabilities, and pairs about those of draws without replacement."""
    rows, size = 60, 12
    counts = np.zeros((rows, rows))
    strides = strides_of_windows(rows, size)
    for start in range(rows):
        for stride in strides:
            window = (start + stride * np.arange(size)) % rows
            counts[np.ix_(window, window)] += 1
    probabilities = counts / (rows * len(strides))
    np.testing.assert_allclose(np.diag(probabilities), size / rows)
    pairs = probabilities[~np.eye(rows, dtype=bool)]
    expected = size * (size - 1) / (rows * (rows - 1))
    assert np.std(pairs) < 0.5 * expected
    # Consecutive rows are 0.37 of the pairs.
    assert (pairs > 0).mean() > 0.8


def test_a_chain_that_diverges_is_told_and_the_others_go_on(caplog):
    with pm.Model() as model:
        x = pm.Normal("x", 0, 1)
        pm.Potential("wall", -(x**4) / 4)
        pm.Normal("y", x, 1, observed=np.zeros(50))
    step = SGLD(
        model=model,
        batch_size=50,
        step_size=0.03,
        preconditioner="identity",
        thin=5,
        compile_kwargs=JAX,
    )
    starts = [{"x": 0.1}] * 4 + [{"x": 15.0}]
    draws = sample(model, step, chains=5, tune=0, draws=80, initvals=starts, quiet=False)
    assert "1 chain became NaN or infinite at transition" in caplog.text
    assert "Their draws after that are NaN, and all others are kept" in caplog.text
    values = draws["posterior"]["x"].values
    assert np.isfinite(values[:4]).all()
    assert np.isnan(values[4, 10:]).all()
    stats = draws["sample_stats"].isel(chain=4, draw=-1)
    assert np.isnan(stats["gradient_norm"])
    assert stats["n_steps"] == 0
    # The first chain tunes.
    with pytest.raises(NonFinitePositionError, match=r"1 chain became NaN .* smaller"):
        sample(model, step, chains=5, tune=20, draws=80, initvals=starts)


@pytest.mark.filterwarnings("ignore::pymc_sgmcmc.CenterWarning")
def test_warnings_are_told(caplog):
    """Those of draws without density, as of chains in turn."""
    with pm.Model() as model:
        a, b = pm.Normal("a", initval=-1), pm.Normal("b", initval=1)
        pm.Potential("order", pm.math.switch(a < b, 0.0, -np.inf))
        pm.Normal("y", a + b, 1, observed=np.random.default_rng(1).normal(size=200))
    step = partial(SGLDCV, compile_kwargs=JAX)
    sample(model, step, chains=6, draws=20, tune=20, quiet=False, random_seed=1)
    assert "The log density is minus infinity or NaN at" in caplog.text


def test_a_schedule_is_asked_for_the_transitions_of_the_run_only(problem):
    sizes = np.full(300, 0.01)
    model, step = sampler(problem, thin=10, step_size=lambda t: sizes[t])
    assert sample(model, step, draws=20, tune=10)["posterior"].sizes["draw"] == 20


def test_interrupt_keeps_draws(made, monkeypatch):
    model, step = made
    advance, calls = ChainsOnDevice.advance, []

    def interrupted(self, *arguments):
        calls.append(1)
        if len(calls) == 4:
            signal.raise_signal(signal.SIGINT)
        return advance(self, *arguments)

    monkeypatch.setattr(ChainsOnDevice, "advance", interrupted)
    draws = sample(model, step, draws=500, random_seed=1)
    assert draws["posterior"].sizes == {"chain": 3, "draw": 4 * 8 - 10, "beta_dim_0": 3}


@pytest.mark.slow
def test_transforms_and_deterministics():
    rng = np.random.default_rng(3)
    y = rng.normal(1, 2, size=500)
    with pm.Model() as model:
        mean = pm.Normal("mean", 0, 10)
        sd = pm.HalfNormal("sd", 5)
        pm.Deterministic("ratio", mean / sd)
        pm.Normal("y", mean, sd, observed=y)
    draws = sample(model, partial(SGLDCV, compile_kwargs=JAX), chains=50, draws=40, tune=100)
    posterior = draws["posterior"]
    np.testing.assert_allclose(posterior["ratio"], posterior["mean"] / posterior["sd"])
    assert abs(float(posterior["sd"].mean()) - y.std()) < 0.02


def test_what_is_refused(problem):
    model = problem.model()
    numba = SGLDCV(model=model)
    with pytest.raises(ValueError, match=r"SGLDCV has another mode"):
        sample(model, numba)
    with pytest.raises(ValueError, match="should be one of 'parallel', 'vectorized'"):
        sample(model, numba, chain_method="pmap")
    with pytest.raises(ValueError, match="Leave out `accuracy`, `store`"):
        sample(model, numba, accuracy=0.05)
    changing = SGLD(model=model, gradient="svrg", compile_kwargs=JAX, batch_size=20)
    with pytest.raises(ValueError, match=r"goes on to adapt \(RefreshedReference\)"):
        sample(model, changing)
    gradient = WeightedGradient(Posterior(model), np.arange(1.0, 41), 20, static=True)
    given = {"step_size": 0.01, "preconditioner": "identity", "compile_kwargs": JAX}
    with pytest.raises(ValueError, match='scheme "weighted" are not drawn'):
        sample(model, SGLD(model=model, gradient=gradient, **given))
