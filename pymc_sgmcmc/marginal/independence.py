r"""Draws of several local quantities a group, by Metropolis steps from a proposal near their law.

The proposal is a Student-t law at the mode with the scale of the curvature. With the weights
:math:`w = p / q` and M their largest value over their mean, n steps leave an error in total
variation of at most :math:`(1 - 1/M)^n` (Mengersen and Tweedie, 1996).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import gammaln, logsumexp

from pymc_sgmcmc.marginal.inversion import LogDensity
from pymc_sgmcmc.marginal.newton import solve_upper

DEGREES_OF_FREEDOM = 5.0
"""The proposal has heavier tails than a Gaussian prior gives, so that weights are bounded. With
fewer degrees of freedom more proposals would be rejected."""

STEPS = 16
"""So many proposals are evaluated at a time. Groups of a logistic model need no more."""

MOST_ROUNDS = 16
"""A group takes at most this many times `STEPS` proposals, which bounds the time."""

ACCEPTED_ERROR = 1e-3
"""A group takes no more steps where the bound on its error in total variation, from the weights
that it has met, is below this. It is the Monte-Carlo error of a probability from 250 000 draws."""


class Recovered(NamedTuple):
    """Draws of several groups.

    Attributes
    ----------
    block : numpy.ndarray, shape (groups, q)
    effective : numpy.ndarray, shape (groups,)
        Effective sample size of the weights of the proposals, as a fraction of their number.
    """

    block: np.ndarray
    effective: np.ndarray


def metropolis(
    log_density: LogDensity,
    centre: np.ndarray,
    root: Sequence[Sequence[np.ndarray]],
    rng: np.random.Generator,
) -> Recovered:
    """One draw for each group.

    Parameters
    ----------
    log_density : callable
        Up to a constant, of points of shape (points, n, q).
    centre : numpy.ndarray, shape (groups, q)
    root : matrix of numpy.ndarray, each of shape (groups,)
        Lower triangular factor of the negative Hessian at the centre.
    rng : numpy.random.Generator
    """
    n_groups, size = centre.shape
    state, log_weight = np.empty((n_groups, size)), np.full(n_groups, -np.inf)
    largest = np.full(n_groups, -np.inf)
    # Sums of weights and of their squares, in units of the largest weight.
    total, squares = np.zeros(n_groups), np.zeros(n_groups)
    count = np.full(n_groups, STEPS)
    places = np.arange(n_groups)
    for steps in STEPS * np.arange(1, MOST_ROUNDS + 1):
        points, log_weights = proposals(log_density, centre, root, places, rng, STEPS)
        uniforms = np.log(rng.random(log_weights.shape))
        for proposal, proposed, uniform in zip(points, log_weights, uniforms, strict=True):
            # The first proposal is the first state.
            accepted = uniform + np.maximum(log_weight[places], -np.finfo(float).max) < proposed
            state[places[accepted]] = proposal[accepted]
            log_weight[places[accepted]] = proposed[accepted]
        highest = np.maximum(largest[places], log_weights.max(axis=0))
        known = np.isfinite(highest)
        places, highest, log_weights = places[known], highest[known], log_weights[:, known]
        shrink, weights = np.exp(largest[places] - highest), np.exp(log_weights - highest)
        total[places] = total[places] * shrink + weights.sum(axis=0)
        squares[places] = squares[places] * shrink**2 + (weights**2).sum(axis=0)
        largest[places] = highest
        error = (1 - total[places] / steps) ** (steps - 1)
        count[places] = steps
        places = places[error > ACCEPTED_ERROR]
        if not len(places):
            break
    with np.errstate(invalid="ignore", divide="ignore"):
        effective = total**2 / (count * squares)
    state[~np.isfinite(log_weight)] = np.nan
    return Recovered(state, effective)


def proposals(
    log_density: LogDensity,
    centre: np.ndarray,
    root: Sequence[Sequence[np.ndarray]],
    places: np.ndarray,
    rng: np.random.Generator,
    count: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Proposals, shape (count, n, q), for the groups at n places, and logarithms of their weights.

    The weights lack a factor that is the same for all proposals of a group: `log_constant`.
    """
    size, degrees = centre.shape[1], DEGREES_OF_FREEDOM
    noise = rng.normal(size=(size, count, len(places)))
    noise *= np.sqrt(degrees / rng.chisquare(degrees, size=noise.shape[1:]))
    chosen = [[entry[places] for entry in row] for row in root]
    points = centre[places] + np.stack(solve_upper(chosen, list(noise)), axis=-1)
    log_weights = log_density(points, places) - _log_kernel((noise**2).sum(axis=0), size)
    return points, np.where(np.isnan(log_weights), -np.inf, log_weights)


def log_weights_of(
    log_density: np.ndarray,
    block: np.ndarray,
    centre: np.ndarray,
    root: Sequence[Sequence[np.ndarray]],
) -> np.ndarray:
    """Logarithms of the weights of given blocks, shape (n,), up to the same factor."""
    size, moved = centre.shape[1], (block - centre).T
    noise = [sum(root[row][k] * moved[row] for row in range(k, size)) for k in range(size)]
    log_weights = log_density - _log_kernel(sum(entry**2 for entry in noise), size)
    return np.where(np.isnan(log_weights), -np.inf, log_weights)


def log_constant(root: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
    """Logarithm of the constant of each group's proposal, shape (n,)."""
    size, degrees = len(root), DEGREES_OF_FREEDOM
    constant = gammaln((degrees + size) / 2) - gammaln(degrees / 2)
    constant -= 0.5 * size * np.log(np.pi * degrees)
    return constant + sum(np.log(entries[row]) for row, entries in enumerate(root))


def normal_rule(size: int, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Quasi-random nodes, shape (count, q), and logarithms of weights for the standard normal law.

    They are those of importance sampling from the standard proposal, scaled so that the rule is
    exact for polynomials up to the third degree.
    """
    from scipy.stats import chi2, norm, qmc  # takes half a second to import

    degrees = DEGREES_OF_FREEDOM
    uniform = qmc.Sobol(size + 1, rng=seed).random(count // 2)
    scale = np.sqrt(degrees / chi2.ppf(uniform[:, size:], degrees))
    half = norm.ppf(uniform[:, :size]) * scale
    nodes = np.concatenate([half, -half])
    squares = (nodes**2).sum(axis=1)
    log_weights = -0.5 * squares - _log_kernel(squares, size)
    log_weights -= logsumexp(log_weights)
    moments = np.einsum("k,ki,kj->ij", np.exp(log_weights), nodes, nodes)
    return np.linalg.solve(np.linalg.cholesky(moments), nodes.T).T, log_weights


def _log_kernel(squares: np.ndarray, size: int) -> np.ndarray:
    """Logarithm of Student's density without its constant."""
    degrees = DEGREES_OF_FREEDOM
    return -0.5 * (degrees + size) * np.log1p(squares / degrees)
