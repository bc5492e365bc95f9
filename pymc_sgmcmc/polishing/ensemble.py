r"""Independent chains of MALA with one kernel, advanced together. Arrays only.

A transition of a chain is that of `dynamics.MetropolisAdjustedLangevin` in coordinates in which the
preconditioner :math:`L L^\top` is I,

.. math::
    \theta^* = \theta + L \left(\tfrac{h}{2} c(L^\top \nabla(\theta)) + \sqrt{h}\, \xi\right),
    \qquad \xi \sim N(0, I).

The function c shortens long drifts, so that chains that begin far from the posterior come back
(Roberts and Tweedie 1996, section 1.4.1). The step size
may be multiplied by a factor drawn for each chain and transition. It does not depend on the state,
so that each transition leaves the posterior as it is. In between there are jumps by the difference
of two points of a fixed set, with a random sign, which is a symmetric proposal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from pymc_sgmcmc.dynamics.metropolis_adjusted import log_acceptance
from pymc_sgmcmc.matrices import Matrix

type Density = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Log densities, shape (n,), and their gradients, (n, d), at positions, (n, d)."""

TARGET_ACCEPTANCE = 0.574
"""MALA moves fastest at this acceptance rate in high dimension (Roberts and Rosenthal 1998)."""

SLOPE = 0.6
"""At that rate the acceptance falls by about this much where the logarithm of the step size grows
by one: in high dimension it is :math:`2 \\Phi(-c h^{3/2})`."""

LARGEST_CHANGE = 1.0
"""The logarithm of the step size changes by at most this at once."""

LONGEST_DRIFT = 3.0
"""A drift is shortened where it is longer than this many times the noise. On a Gaussian posterior
the drift is about half as long as the noise."""


class States(NamedTuple):
    """States of n chains.

    Attributes
    ----------
    positions : numpy.ndarray, shape (n, d)
    log_densities : numpy.ndarray, shape (n,)
    gradients : numpy.ndarray, shape (n, d)
    """

    positions: np.ndarray
    log_densities: np.ndarray
    gradients: np.ndarray


@dataclass(frozen=True)
class Kernel:
    """Kernel of the chains.

    Attributes
    ----------
    root : Matrix
        L, a root of the preconditioner.
    step_size : float
        h.
    points : numpy.ndarray, shape (m, d)
        Points whose differences are jumps.
    factors : tuple of float
        Factors of the step size, drawn with equal probability.
    jump_probability : float
        Part of the transitions that are jumps.
    """

    root: Matrix
    step_size: float
    points: np.ndarray
    factors: tuple[float, ...] = (1.0,)
    jump_probability: float = 0.0

    def adapted(self, acceptance: float, gain: float = 1.0) -> Kernel:
        """The kernel with the step size that a mean acceptance rate suggests."""
        change = gain * (acceptance - TARGET_ACCEPTANCE) / SLOPE
        change = float(np.clip(change, -LARGEST_CHANGE, LARGEST_CHANGE))
        return replace(self, step_size=self.step_size * np.exp(change))


def begin(density: Density, positions: np.ndarray) -> States:
    """States at positions."""
    return States(positions, *density(positions))


def transition(
    density: Density, states: States, kernel: Kernel, rng: np.random.Generator
) -> tuple[States, np.ndarray, bool]:
    """Advance all chains by one transition.

    Returns
    -------
    states : States
    acceptance : numpy.ndarray, shape (n,)
        Probabilities of acceptance.
    jumped : bool
        Whether the transition was a jump.
    """
    n, _ = states.positions.shape
    jumped = rng.random() < kernel.jump_probability
    if jumped:
        proposals = propose_jumps(states.positions, kernel.points, rng)
        after = States(proposals, *density(proposals))
    else:
        step_sizes = kernel.step_size * rng.choice(kernel.factors, size=(n, 1))
        moves = np.sqrt(step_sizes) * rng.standard_normal(states.positions.shape)
        slopes = shortened(states.gradients @ kernel.root, step_sizes)
        proposals = states.positions + (0.5 * step_sizes * slopes + moves) @ kernel.root.T
        after = States(proposals, *density(proposals))
        slopes = slopes + shortened(after.gradients @ kernel.root, step_sizes)
    with np.errstate(all="ignore"):
        log_ratio = after.log_densities - states.log_densities
        if not jumped:
            log_ratio = log_acceptance(log_ratio, slopes, slopes, moves, step_sizes[:, 0])
        # Both log densities may be minus infinity, at a start outside of the support.
        log_ratio = np.nan_to_num(log_ratio, nan=-np.inf, posinf=np.inf, neginf=-np.inf)
        acceptance = np.exp(np.minimum(0.0, log_ratio))
    accepted = np.log(rng.random(n)) < log_ratio
    return _chosen(accepted, after, states), acceptance, jumped


def shortened(gradients: np.ndarray, step_sizes: np.ndarray) -> np.ndarray:
    """Whitened gradients, (n, d), those of long drifts shortened for step sizes of shape (n, 1)."""
    lengths = 0.5 * step_sizes * np.sqrt((gradients**2).sum(1, keepdims=True))
    longest = LONGEST_DRIFT * np.sqrt(step_sizes * gradients.shape[1])
    return gradients * (longest / np.maximum(lengths, longest))


def propose_jumps(
    positions: np.ndarray, points: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Positions moved by differences of points, each with the same probability as its opposite."""
    first, second = rng.integers(len(points), size=(2, len(positions)))
    return positions + points[first] - points[second]


def _chosen(chosen: np.ndarray, first: States, second: States) -> States:
    """The first states where chosen, and the second elsewhere."""
    return States(
        np.where(chosen[:, None], first.positions, second.positions),
        np.where(chosen, first.log_densities, second.log_densities),
        np.where(chosen[:, None], first.gradients, second.gradients),
    )
