r"""Stochastic gradient Langevin dynamics (Welling and Teh 2011)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pymc_sgmcmc.dynamics.base import (
    Array,
    Dynamics,
    Gradient,
    State,
    Transition,
    folded,
    numbers,
)
from pymc_sgmcmc.dynamics.law import EULER, Law
from pymc_sgmcmc.matrices import Matrix


@dataclass(frozen=True)
class Langevin(Dynamics):
    r"""One Euler step of the preconditioned Langevin diffusion.

    .. math:: \theta' = \theta + \tfrac{h}{2} M \hat\nabla(\theta) + \sqrt{h}\, L \xi,
              \qquad M = L L^\top, \quad \xi \sim N(0, I)

    For a Gaussian posterior with precision H the stationary law is Gaussian. It has the posterior's
    mean and a covariance that solves
    :math:`\Lambda = F \Lambda F^\top + hM + \tfrac{h^2}{4} M \mathcal{V}(\Lambda) M`,
    :math:`F = I - \tfrac{h}{2} M H`, with :math:`\mathcal{V}` the covariance of the gradient
    estimate. The covariance is larger than the posterior's by about
    :math:`\tfrac{h}{4}(MV + MH)`.

    Mirrored coordinates are positive, and become their absolute value after the step. This leaves
    the posterior on the positive half invariant as h goes to zero, by reflection, where M is
    diagonal in these coordinates. Without them all methods take arrays as well as symbolic tensors.

    Attributes
    ----------
    preconditioner : Matrix
        The symmetric positive definite matrix M.
    root : Matrix
        The matrix L in M = L Lᵀ, of the same kind.
    mirrored : (d,), optional
        Ones for mirrored coordinates, zeros for the others.
    is_tuned : bool
        Whether M changes along a chain, so that no formula of its law is known.
    """

    preconditioner: Matrix
    root: Matrix
    mirrored: Array | None = None
    is_tuned: bool = False

    integrated: ClassVar[Law] = EULER

    @property
    def law(self) -> Law | None:
        """The law for which settings are computed."""
        return None if self.is_tuned else self.integrated

    @property
    def fixed_preconditioner(self) -> Matrix | None:
        """M as numbers."""
        return None if self.is_tuned else self.preconditioner.map(numbers)

    def scaled_noise(self, noise: Array, step_sizes: Array) -> Array:
        r"""Rows :math:`\sqrt{h} L \xi`, by one matrix product instead of many."""
        return step_sizes[:, None] ** 0.5 * self.root.each(noise)

    def transition(
        self,
        state: State,
        gradient: Gradient,
        scaled_noise: Array,
        step_size: Array,
    ) -> Transition:
        """One step from the position, which is the whole state."""
        (position,) = state
        estimate = gradient(position)
        drift = self.preconditioner @ estimate
        following = position + 0.5 * step_size * drift + scaled_noise
        return Transition((folded(following, self.mirrored),), estimate)
