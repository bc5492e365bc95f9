"""Transitions against exact laws: chains that begin in a law keep it, and others come to it.

Moments of independent chains are compared with the exact ones in their standard errors. A right
transition is beyond `LARGEST_SCORE` by chance in one of some hundred seeds for all tests together.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy import special

from pymc_sgmcmc.matrices import Dense, Diagonal
from pymc_sgmcmc.polishing import ensemble
from pymc_sgmcmc.polishing.chains import FIRST_LOOK, advance_until_still, root_of
from pymc_sgmcmc.polishing.comparison import compare
from pymc_sgmcmc.polishing.ensemble import (
    Kernel,
    begin,
    propose_jumps,
    shortened,
    transition,
)

LARGEST_SCORE = 4.0

MEAN = np.array([1.0, -2.0, 0.5])
ROOT = np.array([[0.3, 0.0, 0.0], [0.6, 0.8, 0.0], [-0.5, 1.0, 1.5]])
COVARIANCE = ROOT @ ROOT.T
SHAPE = 2.0
"""Of the gamma law whose logarithm is the skewed target."""


def gaussian(positions):
    slopes = -np.linalg.solve(COVARIANCE, (positions - MEAN).T).T
    return 0.5 * ((positions - MEAN) * slopes).sum(1), slopes


def skewed(positions):
    """Independent logarithms of gamma variables, whose moments are polygamma functions."""
    return (SHAPE * positions - np.exp(positions)).sum(1), SHAPE - np.exp(positions)


def gaussian_draws(rng, n):
    return MEAN + rng.standard_normal((n, 3)) @ ROOT.T


def skewed_draws(rng, n):
    return np.log(rng.gamma(SHAPE, size=(n, 3)))


def scores_of_gaussian(positions):
    """Means and products in whitened coordinates, whose moments are known, in standard errors."""
    white = np.linalg.solve(ROOT, (positions - MEAN).T).T
    products = (white[:, :, None] * white[:, None]).reshape(len(white), -1)
    second = (products.mean(0) - np.eye(3).ravel()) / np.sqrt(1 + np.eye(3).ravel())
    return np.sqrt(len(white)) * np.concatenate([white.mean(0), second])


def scores_of_skewed(positions):
    """First three central moments of each coordinate, by cumulants, in standard errors."""
    centred = positions - special.digamma(SHAPE)
    second, third = special.polygamma(1, SHAPE), special.polygamma(2, SHAPE)
    scores = []
    for power, expected in ((1, 0.0), (2, second), (3, third)):
        values = centred**power
        scores.append((values.mean(0) - expected) / (values.std(0) / np.sqrt(len(values))))
    return np.concatenate(scores)


TARGETS = {
    "gaussian": (gaussian, gaussian_draws, scores_of_gaussian),
    "skewed": (skewed, skewed_draws, scores_of_skewed),
}
# The preconditioners are far from the covariances, so that a term which is left out shows.
KERNELS = {
    "dense": (Dense(np.array([[0.5, 0, 0], [0.3, 0.6, 0], [0.2, -0.4, 0.9]])), 0.8, (1.0,), 0.0),
    "diagonal": (Diagonal(np.array([0.3, 0.7, 1.0])), 0.7, (1.0,), 0.0),
    "factors": (Dense(ROOT), 1.5, (1.0, 0.1), 0.0),
    "jumps": (Dense(ROOT), 0.5, (1.0,), 0.7),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("target", TARGETS)
def test_chains_keep_the_exact_law(target, kernel, rng):
    density, draws, scores = TARGETS[target]
    root, step_size, factors, jumps = KERNELS[kernel]
    states = begin(density, draws(rng, 20_000))
    used = Kernel(root, step_size, draws(rng, 100), factors, jumps)
    rates = []
    for _ in range(12):
        states, acceptance, _ = transition(density, states, used, rng)
        rates.append(acceptance.mean())
    assert 0.03 < np.mean(rates) < 0.9  # many proposals of both fates
    assert np.abs(scores(states.positions)).max() < LARGEST_SCORE
    values, slopes = density(states.positions)
    np.testing.assert_allclose(states.log_densities, values)
    np.testing.assert_allclose(states.gradients, slopes)


def test_shortened_drifts_keep_the_exact_law(rng, monkeypatch):
    monkeypatch.setattr(ensemble, "LONGEST_DRIFT", 0.5)
    states = begin(gaussian, gaussian_draws(rng, 20_000))
    kernel = Kernel(Dense(ROOT), 1.5, states.positions)
    slopes = shortened(states.gradients @ kernel.root, np.full((20_000, 1), 1.5))
    drifts = 0.5 * 1.5 * slopes
    lengths = np.sqrt((drifts**2).sum(1))
    assert lengths.max() == pytest.approx(0.5 * np.sqrt(3 * 1.5))
    assert 0.2 < np.isclose(lengths, lengths.max()).mean() < 0.8
    for _ in range(12):
        states, _, _ = transition(gaussian, states, kernel, rng)
    assert np.abs(scores_of_gaussian(states.positions)).max() < LARGEST_SCORE


@pytest.mark.parametrize("factor", [0.6, 1.6])
def test_law_of_wrong_width_and_mean_is_corrected(factor, rng):
    starts = MEAN + 0.7 * ROOT.sum(1) + factor * (gaussian_draws(rng, 3000) - MEAN)
    run = advance_until_still(gaussian, starts, root_of(starts), 200, rng)
    assert not run.moving
    assert np.abs(scores_of_gaussian(run.positions[-1])).max() < LARGEST_SCORE
    shifts = compare(starts.reshape(4, 750, 3), starts, run.positions)
    sd = np.sqrt(np.diag(COVARIANCE))
    errors = (shifts.posterior_mean - MEAN) / sd / shifts.mean_error
    assert np.abs(errors).max() < LARGEST_SCORE
    errors = np.log(shifts.posterior_sd / sd) / shifts.log_sd_error
    assert np.abs(errors).max() < LARGEST_SCORE


def test_chains_of_a_right_run_end_at_the_first_look(rng):
    starts = gaussian_draws(rng, 400)
    counted = []
    run = advance_until_still(
        gaussian, starts, root_of(starts), 200, rng, advanced=lambda: counted.append(1)
    )
    assert run.transitions == len(counted) == FIRST_LOOK
    assert not run.moving
    assert run.positions.shape == (18, 400, 3)
    assert run.log_densities.shape == run.acceptance.shape == (18, 400)
    assert 0.4 < run.acceptance.mean() < 0.75


@pytest.mark.parametrize("most", [FIRST_LOOK, FIRST_LOOK + 1, 3 * FIRST_LOOK])
def test_chains_that_still_move_say_so(most, rng):
    starts = MEAN + 200 * ROOT.sum(1) + gaussian_draws(rng, 50)
    run = advance_until_still(gaussian, starts, Dense(0.05 * ROOT), most, rng)
    assert run.moving
    assert run.transitions == most
    assert len(run.positions) >= 18


def test_jumps_are_as_probable_as_their_opposites(rng):
    points = np.array([[0.0], [1.0], [5.0]])
    jumps = propose_jumps(np.zeros((30_000, 1)), points, rng)[:, 0]
    sizes, counts = np.unique(jumps, return_counts=True)
    np.testing.assert_array_equal(sizes, [-5, -4, -1, 0, 1, 4, 5])
    np.testing.assert_allclose(counts[[0, 1, 2, 4, 5, 6]] / 30_000, 1 / 9, atol=0.008)


def test_jumps_level_the_masses_of_two_modes(rng):
    def density(positions):
        away = np.abs(positions) - 20
        return np.logaddexp(-0.5 * (positions - 20) ** 2, -0.5 * (positions + 20) ** 2).sum(1), (
            -np.sign(positions) * away
        )

    starts = rng.standard_normal((400, 1)) + np.where(np.arange(400) < 100, 20, -20)[:, None]
    run = advance_until_still(density, starts, root_of(starts), 300, rng)
    assert not run.moving
    assert (run.positions[-1] > 0).mean() == pytest.approx(0.5, abs=0.1)  # four standard errors


def test_chains_outside_of_the_support_come_in_and_do_not_leave(rng):
    def density(positions):
        inside = (positions > 0).all(1)
        return np.where(inside, -positions.sum(1), -np.inf), np.where(
            inside[:, None], -np.ones_like(positions), 0.0
        )

    states = begin(density, rng.normal(size=(300, 1)))
    kernel = Kernel(Diagonal(np.ones(1)), 2.0, states.positions)
    for _ in range(60):
        inside = states.positions[:, 0] > 0
        states, acceptance, _ = transition(density, states, kernel, rng)
        assert np.isfinite(acceptance).all()
        assert (states.positions[inside, 0] > 0).all()
    assert (states.positions > 0).all()
