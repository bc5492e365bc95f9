r"""Hamiltonian dynamics with noisy gradients and nothing that corrects for them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pymc_sgmcmc.dynamics.base import Array
from pymc_sgmcmc.dynamics.underdamped import Underdamped


@dataclass(frozen=True)
class NaiveSGHMC(Underdamped):
    r"""Leapfrog steps with the minibatch gradient: the naive SGHMC of Chen et al. (2014), §3.1.

    .. math::
        v' = v + \epsilon M \hat\nabla(\theta), \qquad \theta' = \theta + \epsilon v'

    This is the leapfrog method with velocities half a step behind the positions. There is neither
    friction nor injected noise.

    **No law.** With the gradient of all rows a transition preserves volume, and on a Gaussian with
    precision H (M = I) it preserves
    :math:`I = v^\top v + \theta^\top H \theta - \epsilon\, \theta^\top H v`. Noise of the
    gradient with covariance V adds :math:`\epsilon^2 \operatorname{tr} V` to the mean of I in each
    transition, and the entropy of the law grows (their theorem 3.1). So variances grow without
    bound, unless velocities are drawn anew: then they end at values that are too large.

    The attributes are those of `Underdamped`, with a friction of zero.
    """

    @staticmethod
    def noise_share(step_size: Array, friction: Array, noise: Array, curvature: Array) -> Array:
        """Zero, since there is no injected noise to replace."""
        return 0.0 * step_size

    @staticmethod
    def injected_variance(step_size: Array, friction: Array) -> Array:
        """Zero."""
        return 0.0 * step_size

    @staticmethod
    def discretization_inflation(step_size: float, friction: float, curvature: float) -> float:
        """ε² H / (4 - ε² H), where velocities are drawn anew at random times far apart."""
        return step_size**2 * curvature / (4 - step_size**2 * curvature)

    @staticmethod
    def largest_step_size(friction: float, curvature: float) -> float:
        """The step at which ε² H = 4."""
        return 2 / np.sqrt(curvature)

    @staticmethod
    def recurrence(step_size: float, friction: float, curvature: float) -> tuple[float, float]:
        """2 - ε² H and -1."""
        return 2 - step_size**2 * curvature, -1.0

    def move(
        self, position: Array, velocity: Array, gradient: Array, injected: Array, step_size: Array
    ) -> tuple[Array, Array]:
        """Velocity, then position with the new velocity."""
        following = velocity + step_size * (self.preconditioner @ gradient) + injected
        return position + step_size * following, following
