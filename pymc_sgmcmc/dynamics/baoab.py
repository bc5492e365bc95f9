r"""Underdamped Langevin dynamics by the BAOAB splitting (Leimkuhler and Matthews 2013)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pymc_sgmcmc.dynamics.base import Array
from pymc_sgmcmc.dynamics.underdamped import Underdamped, functions_for


@dataclass(frozen=True)
class BAOAB(Underdamped):
    r"""BAOAB with one gradient a transition.

    .. math::
        v_+ &= v + \delta M \hat\nabla(\theta) \\
        v'  &= e^{-\gamma\delta} v_+ + \sqrt{1 - e^{-2\gamma\delta}}\, L \xi \\
        \theta' &= \theta + \tfrac{\delta}{2} (v_+ + v')

    A transition ends after the second drift (A). The half kick (B) at its end and that at the
    beginning of the next are at the same position, and both are made at once with one gradient. The
    positions are those of BAOAB, and the velocities are half a kick behind.

    On a Gaussian with precision H (M = I) and with an exact gradient, the position has *exactly*
    the covariance :math:`H^{-1}` for every step below :math:`2 / \sqrt{\lambda_{\max}(H)}`. Noise
    of the gradient with variance V in a direction of curvature H inflates the variance by

    .. math:: u = \frac{\delta^2 V}{4 (1 - \delta^2 H / 4)} \coth \frac{\gamma\delta}{2}
                \approx \frac{\delta V}{2 \gamma} .

    This follows from the recurrence of the positions, with :math:`c = e^{-\gamma\delta}`:
    :math:`\theta_{k+1} - (1 + c) \theta_k + c\, \theta_{k-1} = \tfrac{\delta}{2} [(1 + c) \delta
    \hat\nabla_k + \sqrt{1 - c^2}\, (\xi_k + \xi_{k-1})]`. Injecting the variance
    :math:`(1 - c^2)(1 - u)` therefore makes the covariance of the position exact again, for
    constant V, wherever L⊤VL and L⊤HL commute, as for M = H⁻¹ and for V proportional to H.
    With an unknown curvature (0) a relative :math:`\delta^2 H / 4` of u remains.

    The attributes are those of `Underdamped`.
    """

    @staticmethod
    def noise_share(step_size: Array, friction: Array, noise: Array, curvature: Array) -> Array:
        """The share u above, whose limit without friction is infinite."""
        xp = functions_for(step_size, friction, noise, curvature)
        squared = step_size**2
        return (
            squared * noise / (4 - squared * curvature) / xp.tanh(0.5 * friction * step_size)
        )  # 4 u tanh(.) (1 - squared H / 4) = squared V

    @staticmethod
    def injected_variance(step_size: Array, friction: Array) -> Array:
        """1 - exp(-2 friction step)."""
        return -functions_for(step_size, friction).expm1(-2 * friction * step_size)

    @staticmethod
    def discretization_inflation(step_size: float, friction: float, curvature: float) -> float:
        """0: BAOAB is exact for a Gaussian."""
        return 0.0

    @staticmethod
    def largest_step_size(friction: float, curvature: float) -> float:
        """2 / sqrt(H)."""
        return 2 / np.sqrt(curvature)

    @staticmethod
    def recurrence(step_size: float, friction: float, curvature: float) -> tuple[float, float]:
        """(1 + c)(1 - step² H / 2) and -c."""
        c = np.exp(-friction * step_size)
        return (1 + c) * (1 - step_size**2 * curvature / 2), -c

    def move(
        self, position: Array, velocity: Array, gradient: Array, injected: Array, step_size: Array
    ) -> tuple[Array, Array]:
        """B (both halves), A, O, A."""
        xp = functions_for(step_size, self.friction)
        kicked = velocity + step_size * (self.preconditioner @ gradient)
        following = xp.exp(-self.friction * step_size) * kicked + injected
        return position + 0.5 * step_size * (kicked + following), following
