"""A chain of compiled transitions, without PyMC."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from pymc_sgmcmc import SGHMC, SGLD, SGLDCV, SecondOrder
from pymc_sgmcmc.adaptation import Adaptation
from pymc_sgmcmc.batching import ShuffledWindows
from pymc_sgmcmc.chain import BLOCK_TRANSITIONS, Chain
from pymc_sgmcmc.matrices import Diagonal
from tests.support.models import logistic_model
from tests.support.samplers import SAMPLERS

NUMBA = {"mode": "NUMBA"}


@pytest.fixture(scope="module")
def chain() -> Chain:
    step = SGHMC(
        batch_size=20, gradient="svrg", thin=3, model=logistic_model(), compile_kwargs=NUMBA
    )
    return step.chain


@pytest.fixture(scope="module")
def single():
    """A step method of control variates, each of whose transitions is a draw."""
    return SGLDCV(batch_size=20, thin=1, model=logistic_model(), compile_kwargs=NUMBA)


@pytest.fixture(scope="module")
def replaced():
    """A step method whose rows are drawn with replacement."""
    return SGLDCV(
        step_size=1e-2, preconditioner="identity", gradient=SecondOrder(batching="replace"),
        batch_size=20, model=logistic_model(), compile_kwargs=NUMBA,
    )  # fmt: skip


def test_draws_do_not_depend_on_how_many_are_asked_for(chain):
    chain.begin(np.random.default_rng(1), np.zeros(3), tune=10)
    whole = chain.advance(40)
    chain.begin(np.random.default_rng(1), np.zeros(3), tune=10)
    parts = [chain.advance(count) for count in (1, 12, 27)]
    np.testing.assert_array_equal(
        np.concatenate([part.positions for part in parts]), whole.positions
    )
    np.testing.assert_array_equal(
        np.concatenate([part.stats["step_size"] for part in parts]),
        whole.stats["step_size"],
    )


@pytest.mark.parametrize("gradient", ["svrg", "saga"])
@pytest.mark.usefixtures("without_compiler")
def test_goes_on_from_a_stored_state(gradient):
    step = SGLD(
        batch_size=20,
        step_size=1e-3,
        preconditioner="identity",
        gradient=gradient,
        model=logistic_model(),
        compile_kwargs=NUMBA,
    )
    chain = step.chain
    chain.begin(np.random.default_rng(1), np.zeros(3))
    chain.advance(7)
    stored = pickle.dumps(chain.state)
    expected = chain.advance(30)
    chain.begin(np.random.default_rng(2), np.ones(3))
    chain.advance(11)
    chain.state = pickle.loads(stored)
    resumed = chain.advance(30)
    np.testing.assert_array_equal(resumed.positions, expected.positions)
    np.testing.assert_array_equal(resumed.gradients, expected.gradients)


def test_runs_after_tuning_are_long_and_ask_for_no_row_numbers(monkeypatch, single):
    """Neither the windows of the tuner nor a permutation of all rows may cost time then."""
    chain = single.chain
    chain.begin(np.random.default_rng(1), np.zeros(3), tune=100)
    assert chain.run_length() == 100
    chain.advance(100)
    batching = chain.block.batching
    assert isinstance(batching, ShuffledWindows)
    monkeypatch.setattr(type(batching), "_permutation", None)
    assert chain.run_length() == min(chain.transitions_per_order - 100, BLOCK_TRANSITIONS)
    chain.advance(chain.run_length())


def test_each_chain_has_an_order_of_its_own(single):
    """One order for all chains would have the same effect on each, which R-hat cannot show."""
    step, windows = single, []
    for seed in (1, 2):
        step.chain.begin(np.random.default_rng(seed), np.zeros(3))
        step.chain.advance(1)
        windows.append(step.batching.selected(np.int64(0)))
    assert not np.array_equal(np.sort(windows[0]), np.sort(windows[1]))


class QuarterStep(Adaptation):
    """A step size of a quarter from the second half of ten draws of tuning on."""

    transitions = 20  # Five draws of four transitions.
    only_tunes = True

    def begin(self, position):
        return {"factor": np.asarray(1.0)}

    def load(self, state):
        pass

    def step_size_factor(self, state):
        return float(state["factor"])

    def update(self, state, seen):
        quarter = seen.tuning and seen.at_boundary
        return ({"factor": np.asarray(0.24)} if quarter else state), {}


@pytest.mark.parametrize(("most_thin", "thin"), [(100, 16), (16, 16), (10, 10), (4, 4), (None, 4)])
def test_thinning_follows_the_step_size(most_thin, thin, replaced):
    """A draw has the same time as before; the transitions are those of a chain without thinning."""
    block, adaptations = replaced.block, [QuarterStep()]
    thinned = Chain(block, step_size=1e-2, thin=4, adaptations=adaptations, most_thin=most_thin)
    thinned.begin(np.random.default_rng(1), np.zeros(3), tune=10)
    draws = thinned.advance(30)
    np.testing.assert_array_equal(draws.stats["n_steps"], np.repeat([4, thin], [10, 20]))
    assert thinned.state.transitions == 40 + 20 * thin

    every = Chain(block, step_size=1e-2, adaptations=adaptations)
    every.begin(np.random.default_rng(1), np.zeros(3), tune=40)
    transitions = every.advance(40 + 20 * thin)
    recorded = np.cumsum(draws.stats["n_steps"]) - 1
    np.testing.assert_array_equal(draws.positions, transitions.positions[recorded])
    np.testing.assert_array_equal(draws.gradients, transitions.gradients[recorded])


def test_a_chain_resumes_with_its_thinning(single):
    settings = {"step_size": 1e-2, "thin": 4, "adaptations": [QuarterStep()], "most_thin": 99}
    chain = Chain(single.block, **settings)
    chain.begin(np.random.default_rng(1), np.zeros(3), tune=10)
    chain.advance(12)
    stored = pickle.dumps(chain.state)
    expected = chain.advance(500)
    other = Chain(single.block, **settings)
    other.state = pickle.loads(stored)
    parts = [other.advance(count) for count in (3, 497)]
    np.testing.assert_array_equal(
        np.concatenate([part.positions for part in parts]), expected.positions
    )
    assert (expected.stats["n_steps"] == 16).all()


def test_begins_around_a_point(chain):
    positions = []
    for seed in range(400):
        chain.begin(
            np.random.default_rng(seed), np.arange(3.0), root=Diagonal(np.array([1.0, 2.0, 0.5]))
        )
        positions.append(chain.state.position)
    z = (np.array(positions) - np.arange(3)) / [1.0, 2.0, 0.5]
    assert np.abs(z.mean(0)).max() < 4.5 / np.sqrt(400)
    assert np.abs(z.var(0) - 1).max() < 4.5 * np.sqrt(2 / 400)


def test_stays_where_the_run_began_when_it_leaves_the_finite_numbers():
    step = SGLDCV(
        batch_size=20,
        step_size=lambda t: 1e-3 if t < 41 else 1e300,
        preconditioner="identity",
        thin=2,
        model=logistic_model(),
        compile_kwargs=NUMBA,
    )
    chain = step.chain
    chain.begin(np.random.default_rng(1), np.zeros(3))
    before = chain.snapshot
    draws = chain.advance(30)
    assert len(draws) == 20
    assert draws.bad_transition in (41, 42)
    assert all(len(values) == 20 for values in draws.stats.values())
    assert np.isfinite(draws.positions).all()
    assert chain.snapshot == before


def test_a_chain_that_has_not_begun(chain):
    with pytest.raises(RuntimeError, match="Call `begin` first"):
        Chain(chain.block, step_size=0.1).advance(1)


def test_noise_may_be_given(chain):
    """The noise of the chain's own generator, given in parts, leads to the same draws."""
    chain.begin(np.random.default_rng(1), np.zeros(3))
    generator = np.random.Generator(type(chain.state.noise_rng.bit_generator)())
    generator.bit_generator.state = chain.state.noise_rng.bit_generator.state
    start = chain.state
    expected = chain.advance(50)
    noise = generator.standard_normal((150, chain.block.noise_size), dtype=chain.block.dtype)
    chain.state = start
    first = chain.advance(20, noise[:60])
    second = chain.advance(30, noise[60:])
    positions = np.concatenate([first.positions, second.positions])
    np.testing.assert_array_equal(positions, expected.positions)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: sampler.name)
def test_nothing_keeps_the_memory_of_a_run(sampler, monkeypatch):
    """The next run overwrites noise and records, so that all that is kept should be a copy."""
    step = sampler.step_class(
        model=logistic_model(),
        batch_size=20,
        gradient="cv",
        thin=3,
        compile_kwargs=NUMBA,
        **sampler.settings,
    )
    chain, run = step.chain, Chain._run
    monkeypatch.setattr(Chain, "run_length", lambda chain: 7)

    def run_and_overwrite(chain, *arguments):
        draws = run(chain, *arguments)
        for memory in (chain.block._noise, *chain.block._function._records):
            memory[:] = np.nan
        return draws

    results = []
    for method in (run, run_and_overwrite):
        monkeypatch.setattr(Chain, "_run", method)
        chain.begin(np.random.default_rng(1), np.zeros(3), tune=14)
        results.append((chain.advance(70), chain.state))
    (expected, state), (found, other) = results
    np.testing.assert_array_equal(found.positions, expected.positions)
    np.testing.assert_array_equal(found.gradients, expected.gradients)
    for name, values in expected.stats.items():
        np.testing.assert_array_equal(found.stats[name], values)
    for adapted, same in zip(state.adapted, other.adapted, strict=True):
        for name, value in adapted.items():
            np.testing.assert_array_equal(value, same[name])
    assert np.isfinite(found.positions).all()
