"""Exact chains from the draws of a run, until their law no longer moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from pymc_sgmcmc.matrices import Dense, Diagonal, Matrix
from pymc_sgmcmc.polishing.comparison import doubt, imbalance, movement
from pymc_sgmcmc.polishing.ensemble import Density, Kernel, begin, transition
from pymc_sgmcmc.polishing.modes import covariance_factor

ADAPTED = 8
"""The step size follows the acceptance rate of all chains together for this many transitions. The
rate of a hundred chains in one transition is known to 0.05."""

FIRST_LOOK = 24
"""The law is judged for the first time after this many transitions."""

GROWTH = 1.5
"""Between two looks the number of transitions grows by this factor."""

DISCARDED = 4
"""The first one in so many transitions is left out of the law."""

STILL_ENOUGH = 0.05
"""The chains go on until the means over the later part have at most this standard error, in
posterior standard deviations, and that of the log standard deviations."""

GOOD_ACCEPTANCE = (0.4, 0.75)
"""The step size is adapted again where the acceptance rate is outside of this range."""

HARDLY_EVER = 0.02
"""A chain hardly ever moves where its mean acceptance rate is lower. The step size follows a mean
rate of all chains that is lower at any time."""

STUCK = 0.02
"""Where more than this part of the chains hardly ever moved, the step size needs several factors:
the posterior is much narrower in some places than in others."""

FACTORS = (1.0, 1.0, 0.2, 0.04)
"""The factors of the step size are then drawn from these. Half of the transitions are whole."""

WITH_JUMPS = 0.1
"""This part of the transitions are jumps after the first look. Where the law is not known by then,
there may be several modes."""

MOST_DENSE = 1_000
"""Up to this many coordinates the preconditioner is a dense matrix."""


@dataclass(frozen=True)
class Run:
    """States of the exact chains.

    Attributes
    ----------
    positions : numpy.ndarray, shape (transitions, n, d)
        States after the discarded transitions.
    log_densities, acceptance : numpy.ndarray, shape (transitions, n)
    transitions : int
        Number of transitions, with those that were discarded.
    moving : bool
        Whether the law still moved at the end, was not that of the posterior by its gradients, or
        some chains did not move at all.
    """

    positions: np.ndarray
    log_densities: np.ndarray
    acceptance: np.ndarray
    transitions: int
    moving: bool


def advance_until_still(
    density: Density,
    starts: np.ndarray,
    root: Matrix,
    most: int,
    rng: np.random.Generator,
    *,
    advanced: Callable[[], None] = lambda: None,
) -> Run:
    """Advance exact chains until their law no longer moves.

    At each look the last half of the transitions is compared with the quarter before it. Where the
    law has moved, the preconditioner becomes the covariance of the last half, and the count of
    transitions begins again there. After the first look there are jumps between the starts.

    Parameters
    ----------
    density : callable
    starts : numpy.ndarray, shape (n, d)
    root : Matrix
        A root of the first preconditioner.
    most : int
        Largest number of transitions, at least `FIRST_LOOK`.
    rng : numpy.random.Generator
    advanced : callable
        Called after each transition.
    """
    states = begin(density, starts)
    step_size = 1.65**2 * starts.shape[1] ** (-1 / 3)
    kernel = Kernel(root, step_size, starts)
    history: list[tuple[np.ndarray, ...]] = []
    count, next_look, moving = 0, FIRST_LOOK, True
    for total in range(1, most + 1):
        states, acceptance, jumped = transition(density, states, kernel, rng)
        history.append((*states, acceptance))
        count += 1
        advanced()
        rate = float(acceptance.mean())
        if not jumped and (count <= ADAPTED or rate < HARDLY_EVER):
            kernel = kernel.adapted(rate, gain=1.0 / np.sqrt(min(count, 4)))
        if count < next_look and total < most:
            continue
        # Not those that are discarded.
        later = history[len(history) // DISCARDED :]
        positions, log_densities, gradients, acceptances = map(np.array, zip(*later, strict=True))
        rates = acceptances.mean(0)
        stuck = float((rates < HARDLY_EVER).mean()) > STUCK
        moving = stuck or has_moved(positions, gradients)
        if not moving and is_known(positions):
            break
        next_look = max(FIRST_LOOK, int(GROWTH * count))
        if most - total < FIRST_LOOK:  # Too few remain to begin again.
            continue
        kernel = replace(kernel, jump_probability=WITH_JUMPS)
        if stuck:
            kernel = replace(kernel, factors=FACTORS)
        if moving:
            kernel = replace(kernel, root=root_of(positions[len(positions) // 3 :]))
        if moving or not GOOD_ACCEPTANCE[0] < rates.mean() < GOOD_ACCEPTANCE[1]:
            history, count = [], 0
    return Run(positions, log_densities, acceptances, total, moving)


def root_of(draws: np.ndarray) -> Matrix:
    """Root of the covariance of draws, shape (..., d)."""
    flat = draws.reshape(-1, draws.shape[-1])
    if flat.shape[1] > MOST_DENSE:
        return Diagonal(flat.std(0))
    return Dense(covariance_factor(flat))


def has_moved(later: np.ndarray, gradients: np.ndarray) -> bool:
    """Whether the law moved between the first third and the rest, or has to, beyond doubt."""
    cut = max(1, len(later) // 3)
    scores = np.concatenate([movement(later[:cut], later[cut:]), imbalance(later, gradients)])
    return bool(np.abs(scores).max() > doubt(later.shape[2], later.shape[1]))


def is_known(later: np.ndarray) -> bool:
    """Whether means and log standard deviations over chains and transitions are known well."""
    n = later.shape[1]
    scaled = (later - later.mean((0, 1))) / later.std((0, 1))
    means, squares = scaled.mean(0), (scaled**2).mean(0)
    error = means.std(0, ddof=1) / np.sqrt(n)
    sd_error = 0.5 * squares.std(0, ddof=1) / np.sqrt(n)
    return bool(max(error.max(), sd_error.max()) <= STILL_ENOUGH)
