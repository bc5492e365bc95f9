"""A chain of compiled transitions, without PyMC."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from pymc_sgmcmc import SGHMC, SGLD, SGLDCV
from pymc_sgmcmc.chain import BLOCK_TRANSITIONS, Chain
from pymc_sgmcmc.matrices import Diagonal
from tests.support.models import logistic_model

NUMBA = {"mode": "NUMBA"}


@pytest.fixture(scope="module")
def chain() -> Chain:
    step = SGHMC(
        batch_size=20, gradient="svrg", thin=3, model=logistic_model(), compile_kwargs=NUMBA
    )
    return step.chain


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


def test_runs_after_tuning_are_long_and_ask_for_no_row_numbers(monkeypatch):
    """Neither the windows of the tuner nor a permutation of all rows may cost time then."""
    step = SGLDCV(batch_size=20, thin=1, model=logistic_model(), compile_kwargs=NUMBA)
    chain = step.chain
    chain.begin(np.random.default_rng(1), np.zeros(3), tune=100)
    assert chain.run_length() == 100
    batching = chain.block.batching
    monkeypatch.setattr(type(batching), "_permutation", None)
    chain.advance(100)
    assert chain.run_length() == min(chain.draws_per_order - 100, BLOCK_TRANSITIONS)
    chain.advance(chain.run_length())


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
