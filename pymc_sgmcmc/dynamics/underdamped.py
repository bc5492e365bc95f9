"""The common interface of integrators of underdamped Langevin dynamics."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Variable

from pymc_sgmcmc.dynamics.base import (
    Array,
    Auxiliary,
    Dynamics,
    Gradient,
    State,
    Transition,
)
from pymc_sgmcmc.matrices import Matrix


def functions_for(*values: Array) -> ModuleType:
    """`pytensor.tensor` where a value is symbolic, else `numpy`."""
    return pt if any(isinstance(value, Variable) for value in values) else np


def numeric(value: Array) -> np.ndarray:
    """Present value of an array or of a shared variable."""
    return np.asarray(value.get_value() if hasattr(value, "get_value") else value)


@dataclass(frozen=True)
class Underdamped(Dynamics):
    r"""One gradient a transition of the diffusion with momentum.

    .. math:: d\theta = v\, dt, \qquad
              dv = M \nabla \log \pi(\theta)\, dt - \gamma v\, dt + \sqrt{2 \gamma}\, L\, dW,
              \qquad M = L L^\top

    which leaves :math:`\pi(\theta)\, N(v; 0, M)` invariant. The mass is :math:`M^{-1}`. The state
    of the chain is the position and the velocity v. A gradient estimate with covariance V adds
    noise to v, so the injected noise is reduced by as much. With the eigenvectors of the noise,
    :math:`L^\top \hat V L = Q \operatorname{diag}(w)\, Q^\top`, the injected noise is
    :math:`L Q \operatorname{diag}(s (1 - u))^{1/2} \xi`. Here s is the variance that an exact
    gradient needs, and u is the share of it that gradient noise already provides (`noise_share`).

    Attributes
    ----------
    preconditioner : Matrix
        M, the inverse of the mass.
    root : Matrix
        The matrix L in M = L Lᵀ.
    friction : scalar
        :math:`\gamma`, in units of 1 / time, where time has the unit of the step size.
    noise_root : Matrix
        L Q, whose columns are the directions of the gradient noise, or L without a correction.
    noise : scalar or (d,)
        Estimated variances w of the gradient in these directions, or 0 without a correction.
    noise_curvature : scalar or (d,)
        Curvature of the posterior in the same directions, or 0 where it is not known.
    resample_every : scalar or None
        Number of transitions after which the velocity is drawn anew from N(0, M). It is never drawn
        anew where this is None.
    """

    preconditioner: Matrix
    root: Matrix
    friction: Array
    noise_root: Matrix
    noise: Array = 0.0
    noise_curvature: Array = 0.0
    resample_every: Array = None

    # --- The integrator ---------------------------------------------------------------------

    @staticmethod
    @abstractmethod
    def noise_share(step_size: Array, friction: Array, noise: Array, curvature: Array) -> Array:
        """Share u of the injected noise that gradient noise replaces.

        It is also the relative excess of the position's variance without this correction.
        """

    @staticmethod
    @abstractmethod
    def injected_variance(step_size: Array, friction: Array) -> Array:
        """Variance s that a transition with an exact gradient needs, in units of M."""

    @staticmethod
    @abstractmethod
    def discretization_inflation(step_size: float, friction: float, curvature: float) -> float:
        """Relative excess of the variance of a Gaussian for an exact gradient."""

    @staticmethod
    @abstractmethod
    def largest_step_size(friction: float, curvature: float) -> float:
        """Step below which a Gaussian is stable for an exact gradient."""

    @staticmethod
    @abstractmethod
    def recurrence(step_size: float, friction: float, curvature: float) -> tuple[float, float]:
        """Coefficients a, b of the mean, E θ'' = a E θ' + b E θ, about the mode of a Gaussian."""

    @abstractmethod
    def move(
        self, position: Array, velocity: Array, gradient: Array, injected: Array, step_size: Array
    ) -> tuple[Array, Array]:
        """Position and velocity after a transition; `injected` is the noise of the velocity."""

    # --- The contract of dynamics -----------------------------------------------------------

    def auxiliaries(self, dimension: int) -> Sequence[Auxiliary]:
        """The velocity, and a clock where it is resampled from time to time."""
        velocity = Auxiliary("velocity", (dimension,))
        return (velocity,) if self.resample_every is None else (velocity, Auxiliary("clock", (1,)))

    def initial_auxiliaries(
        self, position: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, ...]:
        """A velocity from N(0, M)."""
        velocity = self.root.map(numeric) @ rng.standard_normal(len(position))
        return (velocity,) if self.resample_every is None else (velocity, np.zeros(1))

    def noise_size(self, dimension: int) -> int:
        """One number for each coordinate, or two where velocities are drawn anew."""
        return dimension if self.resample_every is None else 2 * dimension

    def scaled_noise(self, noise: Array, step_sizes: Array) -> Array:
        """Injected noise, shape (transitions, d), or with new velocities (transitions, 2, d)."""
        xp = functions_for(noise, step_sizes, self.friction)
        steps = step_sizes[:, None]
        share = self.noise_share(steps, self.friction, self.noise, self.noise_curvature)
        amplitude = (self.injected_variance(steps, self.friction) * (1 - share)) ** 0.5
        if self.resample_every is None:
            return self.noise_root.each(amplitude * noise)
        injected = self.noise_root.each(amplitude * noise[:, 0::2])
        return xp.stack([injected, self.root.each(noise[:, 1::2])], axis=1)

    def transition(
        self,
        state: State,
        gradient: Gradient,
        scaled_noise: Array,
        step_size: Array,
    ) -> Transition:
        """One transition, from a new velocity where it is time for one."""
        position, velocity, *clock = state
        estimate = gradient(position)
        if self.resample_every is None:
            following = self.move(position, velocity, estimate, scaled_noise, step_size)
            return Transition(following, estimate)
        (time,) = clock
        injected, fresh = scaled_noise[0], scaled_noise[1]
        xp = functions_for(position, time)
        velocity = xp.where(time < 0.5, fresh, velocity)
        following = self.move(position, velocity, estimate, injected, step_size)
        return Transition((*following, (time + 1) % self.resample_every), estimate)
