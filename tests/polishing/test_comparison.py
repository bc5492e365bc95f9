"""Shifts of statistics on ensembles whose laws are known, over many seeds."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from pymc_sgmcmc.polishing.comparison import (
    PROBABILITIES,
    compare,
    doubt,
    imbalance,
    movement,
)

CHAINS, DIMENSION, TRANSITIONS = 200, 5, 10


def ensemble(rng, starts, memory, mean=0.0, sd=1.0):
    """Exact chains from starts, autoregressive, with a Gaussian law that they keep."""
    states, each = [(starts - mean) / sd], memory ** (1 / TRANSITIONS)
    for _ in range(2 * TRANSITIONS):
        noise = rng.standard_normal(starts.shape)
        states.append(each * states[-1] + np.sqrt(1 - each**2) * noise)
    return mean + sd * np.array(states[TRANSITIONS:])


def scores_of(rng, memory, *, run_mean=0.0, run_sd=1.0, chains=CHAINS):
    """Shifts minus the true ones, in their standard errors, shape (statistics, d)."""
    run = run_mean + run_sd * rng.standard_normal((4, 500, DIMENSION))
    starts = run[:, :: 2000 // chains].reshape(-1, DIMENSION)
    shifts = compare(run, starts, ensemble(rng, starts, memory))
    means = (shifts.mean + run_mean) / shifts.mean_error
    sds = (shifts.log_sd + np.log(run_sd)) / shifts.log_sd_error
    return shifts, np.concatenate([[means, sds], shifts.probability_scores])


@pytest.mark.parametrize(("memory", "chains"), [(0.0, 200), (0.8, 200), (0.95, 200), (0.9, 40)])
def test_right_runs_are_rarely_beyond_doubt(memory, chains):
    found = [scores_of(np.random.default_rng(seed), memory, chains=chains)[1] for seed in range(60)]
    scores = np.array(found)
    # One of a hundred is expected at most, and four of sixty would be so by chance once in 300.
    assert (np.abs(scores).max((1, 2)) > doubt(DIMENSION, chains)).sum() < 4
    spread = scores.std((0, 2))
    np.testing.assert_allclose(spread[spread > 0], 1.0, atol=0.15)
    # Of 40 chains too few are beyond the outer quantiles.
    assert (spread > 0).sum() == (7 if chains == 200 else 5)


@pytest.mark.parametrize(
    ("memory", "mean", "sd"), [(0.0, 0.5, 1.3), (0.8, 0.5, 1.0), (0.8, 0.0, 1.3)]
)
def test_shifts_are_right_whatever_the_chains_remember(memory, mean, sd):
    found = [
        scores_of(np.random.default_rng(seed), memory, run_mean=mean, run_sd=sd)
        for seed in range(30)
    ]
    scores = np.array([each[:2] for _, each in found])
    # The estimates are off by a part of their errors, since ratios are not linear.
    assert np.abs(scores.mean((0, 2))).max() < 0.5
    memories = np.mean([shifts.memory for shifts, _ in found])
    # Of the mean of the later part, and never below zero.
    assert memories == pytest.approx(memory**1.5, abs=0.05)
    if memory == 0:
        assert all((-each.mean > 4 * each.mean_error).all() for each, _ in found)


def test_quantiles_move_as_those_of_the_laws(rng):
    run = rng.exponential(size=(4, 2000, 1))
    starts = run[:, ::20].reshape(-1, 1)
    later = rng.exponential(size=(20, 400, 1)) * 1.5
    shifts = compare(run, starts, later)
    expected = -np.log1p(-np.array(PROBABILITIES)) * (1.5 - 1) / 1.5
    off = (shifts.quantiles[:, 0] - expected) / shifts.quantile_errors[:, 0]
    assert np.abs(off).max() < 4
    # More than a probability p is below the quantile of the run where the posterior is wider.
    assert (shifts.probability_scores[2:] > 4).all()


def test_doubt_grows_with_the_number_of_coordinates_and_falls_with_that_of_chains():
    assert doubt(1, 200) < doubt(10, 200) < doubt(1000, 200) < 6
    assert doubt(10, 1000) < doubt(10, 20)


def test_law_that_moves_is_seen_and_one_at_rest_is_not(rng):
    states = rng.standard_normal((12, 100, 3))
    assert np.abs(movement(states[:4], states[4:])).max() < doubt(3, 100)
    later = states[4:] * np.array([1.0, 1.6, 1.0]) + np.array([0.6, 0, 0])
    scores = movement(states[:4], later)
    assert scores[0, 0] > doubt(3, 100)
    assert scores[1, 1] > doubt(3, 100)
    assert np.abs(scores[:, 2]).max() < doubt(3, 100)


def test_chains_that_stand_still_have_not_moved():
    states = np.repeat(np.arange(30.0).reshape(1, 30, 1), 4, axis=0)
    assert (movement(states[:2], states[2:]) == 0).all()


def test_gradients_show_a_part_of_the_posterior_without_draws(rng):
    """The law of draws above -1 is at rest where no chain goes below."""
    draws = rng.standard_normal((TRANSITIONS, CHAINS, 300))
    scores = imbalance(draws, -draws)
    assert scores.shape == (2, 300)
    np.testing.assert_allclose(scores.std(1), 1.0, atol=0.15)
    assert np.abs(scores).max() < doubt(300, CHAINS)
    cut = stats.truncnorm.rvs(-1, np.inf, size=(TRANSITIONS, CHAINS, 5), random_state=rng)
    assert (np.abs(imbalance(cut, -cut)).min(1) > doubt(5, CHAINS)).all()
