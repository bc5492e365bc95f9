r"""Stochastic gradient Hamiltonian Monte Carlo (Chen, Fox and Guestrin 2014)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pymc_sgmcmc.dynamics.base import Array
from pymc_sgmcmc.dynamics.underdamped import Underdamped


@dataclass(frozen=True)
class SGHMCEuler(Underdamped):
    r"""The Euler update of the paper.

    .. math::
        v' &= (1 - \alpha) v + \epsilon M \hat\nabla(\theta)
              + N(0,\, 2 (\alpha - \hat\beta) M) \\
        \theta' &= \theta + \epsilon v', \qquad \alpha = \gamma \epsilon, \quad
              \hat\beta = \tfrac{1}{2} \epsilon^2 M \hat V

    This is eq. 15 of Chen et al. Their velocity is a distance for each transition,
    :math:`\epsilon v`, and their learning rate is :math:`\eta = \epsilon^2 M`. Here v is a distance
    for each unit of time. Its law is N(0, M) at stationarity whatever the step, so the step may
    change.

    On a Gaussian with precision H in one dimension (M = 1) the stationary variance is
    :math:`H^{-1} (1 + u - \hat u)(4 - 2\alpha) / (4 - 2\alpha - \epsilon^2 H)`, with
    :math:`u = \epsilon V / 2\gamma` from the noise of the gradient and :math:`\hat u` its estimate.
    The chain is unstable from :math:`\epsilon^2 H = 4 - 2\alpha` on. Gradient noise enters the
    velocity exactly as the injected noise does, so the correction is exact for constant V.

    The attributes are those of `Underdamped`.
    """

    @staticmethod
    def noise_share(step_size: Array, friction: Array, noise: Array, curvature: Array) -> Array:
        """The eigenvalues of β̂ / α."""
        return 0.5 * step_size * noise / friction

    @staticmethod
    def injected_variance(step_size: Array, friction: Array) -> Array:
        """2 α."""
        return 2 * friction * step_size

    @staticmethod
    def discretization_inflation(step_size: float, friction: float, curvature: float) -> float:
        """ε² H / (4 - 2 α - ε² H)."""
        kinetic = step_size**2 * curvature
        return kinetic / (4 - 2 * friction * step_size - kinetic)

    @staticmethod
    def largest_step_size(friction: float, curvature: float) -> float:
        """The smaller of the steps at which ε² H + 2 γ ε = 4 and α = 1."""
        stable = (np.sqrt(friction**2 + 4 * curvature) - friction) / curvature
        return min(stable, 1 / friction)

    @staticmethod
    def recurrence(step_size: float, friction: float, curvature: float) -> tuple[float, float]:
        """2 - α - ε² H and -(1 - α)."""
        alpha = friction * step_size
        return 2 - alpha - step_size**2 * curvature, alpha - 1

    def move(
        self, position: Array, velocity: Array, gradient: Array, injected: Array, step_size: Array
    ) -> tuple[Array, Array]:
        """Velocity, then position with the new velocity."""
        kick = step_size * (self.preconditioner @ gradient)
        following = (1 - self.friction * step_size) * velocity + kick + injected
        return position + step_size * following, following
