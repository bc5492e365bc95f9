r"""Langevin dynamics with averaged noises (Leimkuhler and Matthews 2013)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytensor.tensor as pt

from pymc_sgmcmc.dynamics.base import Array, Auxiliary, Gradient, State, Transition, folded
from pymc_sgmcmc.dynamics.langevin import Langevin
from pymc_sgmcmc.dynamics.law import AVERAGED, Law


@dataclass(frozen=True)
class AveragedLangevin(Langevin):
    r"""Langevin dynamics whose noise is the mean of two successive ones.

    .. math:: \theta_{k+1} = \theta_k + \tfrac{h}{2} M \hat\nabla(\theta_k)
              + \tfrac{\sqrt{h}}{2} L (\xi_k + \xi_{k+1}), \qquad M = L L^\top, \;
              \xi \sim N(0, I)

    The state is the position and the last noise, so that a transition takes one new noise and one
    gradient. It is the limit of BAOAB at large friction.

    For a Gaussian posterior with precision H the stationary law is Gaussian. It has the posterior's
    mean and a covariance that solves

    .. math:: \Lambda = F \Lambda F^\top + \tfrac{h}{4} (F M + M F^\top) + \tfrac{h}{2} M
              + \tfrac{h^2}{4} M \mathcal{V}(\Lambda) M, \qquad F = I - \tfrac{h}{2} M H,

    so that without gradient noise it is *exactly* the posterior's for every stable step, h λ < 4.
    Noise of covariance V adds about :math:`\tfrac{h}{4} M V`. On posteriors that are not Gaussian
    the error is of second order in h.

    Where other step methods move other variables after each draw, the last noise belongs to their
    former values. Standard deviations are then too large by up to a tenth for draws of one
    transition with h H = 1, by 1 % for two relaxation times, and by less for longer draws.

    Where a coordinate is mirrored, so is the noise that the next transition takes.

    With a largest force F the drift is tamed (Brosse et al. 2019): where
    :math:`f = (\hat\nabla^\top M \hat\nabla)^{1/2}` is larger than F / h, for h below 1, it is
    shorter by the factor F / (h f), so that nothing is tamed as h goes to zero. Where the curvature
    or the noise grows along a bent posterior, a chain that comes there by chance returns, which
    would leave for ever otherwise. On a posterior that is nearly Gaussian f is the length of a
    normal vector, which is hardly ever so large.

    The other attributes are those of `Langevin`.

    Attributes
    ----------
    largest_force : scalar, optional
        F, with no bound by default.

    References
    ----------
    N. Brosse, A. Durmus, É. Moulines and S. Sabanis (2019). The tamed unadjusted Langevin
    algorithm. *Stochastic Processes and their Applications* 129, 3638-3663.
    """

    largest_force: Array | None = None

    integrated: ClassVar[Law] = AVERAGED

    def auxiliaries(self, dimension: int) -> tuple[Auxiliary, ...]:
        """Half of the last noise."""
        return (Auxiliary("half_noise", (dimension,)),)

    def scaled_noise(self, noise: Array, step_sizes: Array) -> Array:
        r"""Rows :math:`\tfrac{\sqrt{h}}{2} L \xi`."""
        return 0.5 * super().scaled_noise(noise, step_sizes)

    def transition(
        self,
        state: State,
        gradient: Gradient,
        scaled_noise: Array,
        step_size: Array,
    ) -> Transition:
        """One step from the position and half of the last noise."""
        position, before = state
        estimate = gradient(position)
        drift = self.preconditioner @ estimate
        if self.largest_force is not None:
            # The least number keeps the root of zero from being divided by.
            square = pt.maximum(pt.dot(estimate, drift), np.finfo(np.float32).tiny)
            most = self.largest_force / pt.minimum(1.0, step_size)
            drift = drift * pt.minimum(1.0, most / pt.sqrt(square))
        following = position + 0.5 * step_size * drift + (before + scaled_noise)
        reflected = folded(following, self.mirrored)
        if self.mirrored is not None:
            scaled_noise = pt.where(pt.eq(reflected, following), scaled_noise, -scaled_noise)
        return Transition((reflected, scaled_noise), estimate)
