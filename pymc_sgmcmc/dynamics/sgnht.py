r"""Stochastic gradient Nosé-Hoover thermostat (Ding et al. 2014)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pymc_sgmcmc.dynamics.base import (
    Array,
    Auxiliary,
    Dynamics,
    Gradient,
    State,
    Transition,
)
from pymc_sgmcmc.dynamics.underdamped import functions_for, numeric
from pymc_sgmcmc.matrices import Matrix


@dataclass(frozen=True)
class NoseHoover(Dynamics):
    r"""BADODAB with one gradient a transition.

    The diffusion, in momenta r of unit mass (:math:`\dot\theta = L r`, M = L L⊤),

    .. math:: dr = L^\top \nabla \log \pi\, dt - \xi r\, dt + \sqrt{2 A}\, dW, \qquad
              d\xi = \frac{1}{\mu} \left(\frac{r^\top r}{d} - 1\right) dt

    leaves :math:`\pi(\theta)\, N(r; 0, I)\, N(\xi; A, 1 / (\mu d))` invariant. Noise of the
    gradient with covariance :math:`w I` in these units acts like a larger A. The thermostat moves
    to :math:`\xi \approx A + \epsilon w / 2`, and π stays invariant to first order without any
    estimate of w. A diagonal thermostat, :math:`d\xi_j = (r_j^2 - 1)\, dt / \mu` with law
    :math:`N(A, 1 / \mu)` each, does the same for noise with a different variance in each coordinate
    of r.

    A transition is a sequence of exact flows. The two kicks (B) between two drifts (A) are joined:

    .. math::
        r_1 &= r + \epsilon L^\top \hat\nabla(\theta) \\
        \xi_1 &= \xi + \tfrac{\epsilon}{2\mu} (r_1^\top r_1 / d - 1) \\
        r' &= e^{-\epsilon\xi_1} r_1
              + \sqrt{A (1 - e^{-2\epsilon\xi_1}) / \xi_1}\; \zeta, \quad \zeta \sim N(0, I) \\
        \xi' &= \xi_1 + \tfrac{\epsilon}{2\mu} (r'^\top r' / d - 1) \\
        \theta' &= \theta + \tfrac{\epsilon}{2} L (r_1 + r')

    This is the splitting of Leimkuhler and Shang (2016). Ding et al. print an explicit Euler step,
    algorithm 1, which diverges at step sizes at which this splitting is accurate. With ξ fixed at A
    it is BAOAB.

    Attributes
    ----------
    root : Matrix
        L with M = L L⊤, the inverse of the mass.
    friction : scalar
        A, the mean of the thermostat for an exact gradient, in units of 1 / time.
    thermostat_mass : scalar
        μ, in units of time².
    diagonal : bool
        Whether each coordinate of r has its own thermostat.
    """

    root: Matrix
    friction: Array
    thermostat_mass: Array
    diagonal: bool = False

    stats = ("thermostat",)

    def auxiliaries(self, dimension: int) -> Sequence[Auxiliary]:
        """Momentum r and thermostat ξ."""
        thermostats = dimension if self.diagonal else 1
        return Auxiliary("momentum", (dimension,)), Auxiliary("thermostat", (thermostats,))

    def initial_auxiliaries(
        self, position: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, ...]:
        """Draws from their law for an exact gradient."""
        momentum, thermostat = (
            rng.standard_normal(auxiliary.shape) for auxiliary in self.auxiliaries(len(position))
        )
        scale = numeric(self.thermostat_mass) * len(position) / len(thermostat)
        return momentum, numeric(self.friction) + thermostat / np.sqrt(scale)

    def transition(
        self,
        state: State,
        gradient: Gradient,
        scaled_noise: Array,
        step_size: Array,
    ) -> Transition:
        """B (both halves), A, D, O, D, A, with the mean of the thermostats as statistic."""
        position, momentum, thermostat = state
        xp = functions_for(position, step_size)
        estimate = gradient(position)
        kicked = momentum + step_size * (self.root.T @ estimate)
        halfway = thermostat + self._heat(kicked, step_size)
        # (1 - exp(-x)) / x, also where the friction passes through zero.
        exponent = 2 * step_size * halfway
        still = abs(exponent) < 1e-30
        ratio = xp.where(still, 1.0, -xp.expm1(-exponent) / xp.where(still, 1.0, exponent))
        noise = (2 * self.friction * step_size * ratio) ** 0.5 * scaled_noise
        following = xp.exp(-step_size * halfway) * kicked + noise
        after = halfway + self._heat(following, step_size)
        drift = self.root @ (kicked + following)
        state = (position + 0.5 * step_size * drift, following, after)
        return Transition(state, estimate, (after.mean(),))

    def _heat(self, momentum: Array, step_size: Array) -> Array:
        """Change of the thermostat in half a step."""
        squares = momentum**2
        temperature = squares if self.diagonal else squares.mean(keepdims=True)
        return 0.5 * step_size / self.thermostat_mass * (temperature - 1)
