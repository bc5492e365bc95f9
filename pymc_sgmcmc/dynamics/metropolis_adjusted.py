r"""The Metropolis-adjusted Langevin algorithm (Roberts and Tweedie 1996)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytensor.tensor as pt

from pymc_sgmcmc.dynamics.base import (
    Array,
    Auxiliary,
    Dynamics,
    Gradient,
    State,
    Transition,
)
from pymc_sgmcmc.matrices import Matrix


def log_acceptance(
    change: Array, gradient_sum: Array, moved: Array, move: Array, step_size: Array
) -> Array:
    r"""Logarithm of the ratio :math:`\alpha` of `MetropolisAdjustedLangevin`, of one chain or many.

    Parameters
    ----------
    change : array, shape (...,)
        Of the log density, :math:`\log \pi(\theta^*) - \log \pi(\theta)`.
    gradient_sum, moved, move : array, shape (..., d)
        :math:`g + g^*`, :math:`M (g + g^*)` and :math:`\zeta`. Drifts may have any other vectors
        in the place of both gradients, as functions of the position.
    step_size : array, shape (...,)
    """
    return (
        change
        - 0.5 * (gradient_sum * move).sum(-1)
        - 0.125 * step_size * (gradient_sum * moved).sum(-1)
    )


@dataclass(frozen=True)
class MetropolisAdjustedLangevin(Dynamics):
    r"""A Langevin proposal that is accepted or rejected so that the posterior is invariant.

    .. math::
        \theta^* &= \theta + \tfrac{h}{2} M \nabla(\theta) + \zeta, \qquad
        \zeta = \sqrt{h}\, L \xi, \quad M = L L^\top \\
        \log \alpha &= \log \pi(\theta^*) - \log \pi(\theta)
            - \tfrac12 (g + g^*)^\top \zeta - \tfrac{h}{8} (g + g^*)^\top M (g + g^*)

    with :math:`g = \nabla(\theta)`, :math:`g^* = \nabla(\theta^*)` and acceptance with probability
    :math:`\min(1, \alpha)`. The last two terms are the log ratio of the proposal densities
    :math:`q(\theta \mid \theta^*) / q(\theta^* \mid \theta)`, written without the inverse of M. The
    law is the posterior for each h *where the gradient is that of all rows*. With minibatches
    neither the density nor the proposal would be a function of the position.

    A proposal at which the log density is NaN is rejected. The uniform number of the decision is
    :math:`u = \Phi(\xi_{d+1})`, so a transition takes only standard normal numbers. Log density and
    gradient at the present position are parts of the state, so each transition evaluates them once.

    Attributes
    ----------
    preconditioner, root : Matrix
        M and L.
    log_density : callable
        Symbolic log posterior at a symbolic position, up to a constant.
    evaluate : callable
        Function of a NumPy position for the start: log density, up to the same constant, and
        gradient.
    """

    preconditioner: Matrix
    root: Matrix
    log_density: Gradient
    evaluate: Callable[[np.ndarray], tuple[float, np.ndarray]]

    stats: tuple[str, ...] = ("accepted", "acceptance_rate")
    depends_on_others: ClassVar[bool] = True

    def auxiliaries(self, dimension: int) -> Sequence[Auxiliary]:
        """Log density and gradient at the position."""
        return (Auxiliary("log_density", ()), Auxiliary("gradient_here", (dimension,)))

    def initial_auxiliaries(
        self, position: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, ...]:
        """Log density and gradient at a position, by one pass over all rows."""
        value, gradient = self.evaluate(position)
        return np.asarray(value), gradient

    def auxiliaries_after_move(
        self, position: np.ndarray, auxiliaries: tuple[np.ndarray, ...], rng: np.random.Generator
    ) -> tuple[np.ndarray, ...]:
        """New values, since those at the old position or for the old posterior are invalid."""
        return self.initial_auxiliaries(position, rng)

    def noise_size(self, dimension: int) -> int:
        """One number for each coordinate, and one for the decision."""
        return dimension + 1

    def scaled_noise(self, noise: Array, step_sizes: Array) -> Array:
        r"""Rows :math:`\sqrt{h} L \xi`, followed by log u."""
        move = step_sizes[:, None] ** 0.5 * self.root.each(noise[:, :-1])
        root_half = np.asarray(np.sqrt(0.5), dtype=noise.dtype)
        log_uniform = pt.log(0.5 * pt.erfc(-root_half * noise[:, -1:]))
        return pt.concatenate([move, log_uniform], axis=1)

    def transition(
        self,
        state: State,
        gradient: Gradient,
        scaled_noise: Array,
        step_size: Array,
    ) -> Transition:
        """One proposal and its decision, with whether it was accepted, and min(1, α)."""
        position, log_density, gradient_here = state
        move, log_uniform = scaled_noise[:-1], scaled_noise[-1]
        proposal = position + 0.5 * step_size * (self.preconditioner @ gradient_here) + move
        gradient_there = gradient(proposal)
        log_density_there = self.log_density(proposal)
        gradient_sum = gradient_here + gradient_there
        moved = self.preconditioner @ gradient_sum
        change = log_density_there - log_density
        log_ratio = log_acceptance(change, gradient_sum, moved, move, step_size)
        log_ratio = pt.switch(pt.isnan(log_ratio), -np.inf, log_ratio)
        accepted = log_uniform < log_ratio
        following = (
            pt.switch(accepted, proposal, position),
            pt.switch(accepted, log_density_there, log_density),
            pt.switch(accepted, gradient_there, gradient_here),
        )
        acceptance_rate = pt.exp(pt.minimum(log_ratio, 0.0))
        return Transition(following, gradient_here, (accepted, acceptance_rate))
