"""Stochastic gradient Langevin dynamics as step methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

import numpy as np

from pymc_sgmcmc.checks import one_of
from pymc_sgmcmc.dynamics import AveragedLangevin, Langevin
from pymc_sgmcmc.step_methods.base import StochasticGradientStep
from pymc_sgmcmc.step_methods.estimators import Gradient
from pymc_sgmcmc.step_methods.mirror import MIRRORING
from pymc_sgmcmc.step_methods.settings import CommonSettings, Preconditioner
from pymc_sgmcmc.step_methods.setup import Design, Kind, Setup

INTEGRATORS = {"euler": Langevin, "averaged": AveragedLangevin}
"""Names of the ways in which the diffusion is made discrete."""


class SGLD(StochasticGradientStep):
    r"""Stochastic gradient Langevin dynamics.

    .. math:: \theta' = \theta + \tfrac{h}{2} M \hat\nabla(\theta) + N(0, h M)

    with :math:`\hat\nabla` an unbiased estimate of the gradient of the log posterior from a
    minibatch of rows (Welling and Teh 2011, eq. 4, with M = I). There is no accept-reject step.

    **Law.** The stationary law of the chain is near the posterior and not equal to it. On a
    Gaussian posterior with precision H it has the right mean and, for small h, a covariance that is
    too large by the relative amount :math:`\tfrac{h}{4}(MV + MH)`, with V the covariance of the
    gradient estimate. With a plain gradient V grows with N at a fixed batch size, so h must shrink.
    Prefer `SGLDCV` for large data.

    **Cost.** A transition takes one gradient of n rows, independent of N.

    Parameters
    ----------
    integrator : {"euler", "averaged"}
        How the diffusion is made discrete. "euler" is the algorithm as Welling and Teh, and Baker
        et al., print it. "averaged" takes the mean of two successive noises (Leimkuhler and
        Matthews 2013): the law is then exact for Gaussian posteriors without gradient noise, and
        of second order in h for others. The default is "averaged" for `SGLDCV` and its subclasses,
        and "euler" for the others.

    Raises
    ------
    ModelError
        Where the rows of the model cannot be separated.
    ValueError, TypeError
        For invalid settings.

    Warns
    -----
    BatchSizeWarning
        Where the noise of the gradient makes the computed step much smaller than the curvature
        would. The message names a batch size at which it would not.
    CenterWarning
        Where the search for the mode failed, or the posterior around it is far from Gaussian.

    Notes
    -----
    `sample_stats` has, for each draw, the unconstrained ``position``, the ``gradient``
    estimate there (the one that makes the next transition), its norm ``gradient_norm``, and
    the ``step_size``. Chains begin at the centre, displaced by one draw from the Laplace
    approximation, unless `initvals` other than the model's initial point are given to
    `pymc.sample`. The data are those at the time when the step method was made, and sampling after
    `pymc.set_data` is refused.

    References
    ----------
    M. Welling and Y. W. Teh (2011). Bayesian learning via stochastic gradient Langevin
    dynamics. *ICML*.

    Examples
    --------
    >>> import numpy as np, pymc as pm
    >>> rng = np.random.default_rng(1)
    >>> x = rng.normal(size=1000)
    >>> with pm.Model():
    ...     slope = pm.Normal("slope", 0, 10)
    ...     _ = pm.Normal("y", slope * x, 1.0, observed=2 * x + rng.normal(size=1000))
    ...     step = SGLD(batch_size=1000, compile_kwargs={"mode": "FAST_COMPILE"})
    ...     idata = pm.sample(
    ...         step=step, draws=200, tune=0, chains=1, random_seed=1, progressbar=False, quiet=True
    ...     )
    >>> bool(abs(idata.posterior["slope"].mean() - 2) < 0.1)
    True
    """

    name = "sgld"
    _kind = Kind(takes_low_rank=True, bounds_noise=True, mirrors=MIRRORING)

    def __init__(
        self,
        vars: Sequence | None = None,
        *,
        integrator: str = "euler",
        gradient: Gradient = "plain",
        preconditioner: Preconditioner = None,
        **settings: Unpack[CommonSettings],
    ):
        self._dynamics = INTEGRATORS[one_of("integrator", integrator, tuple(INTEGRATORS))]
        self._law = self._dynamics.integrated
        super().__init__(vars, gradient=gradient, preconditioner=preconditioner, **settings)

    def _design(self, setup: Setup) -> Design:
        matrix, root = setup.preconditioner()
        pace = setup.pace(lambda: setup.closed_form(root, tuned=True))
        matrices = matrix.map(setup.shared), root.map(setup.shared)
        dynamics = self._dynamics(*matrices, setup.mirrored())
        # Where a step size is given, neither noise nor curvature need be known.
        force = np.inf if pace.choice is None else pace.choice.largest_force
        self.largest_force = setup.shared(force, "largest_force")
        if isinstance(dynamics, AveragedLangevin):
            dynamics = replace(dynamics, largest_force=self.largest_force)
        return Design(dynamics, pace)


class SGLDCV(SGLD):
    r"""Stochastic gradient Langevin dynamics with control variates.

    .. math::
        \theta_{k+1} &= \theta_k + \tfrac{h}{2} M \tilde\nabla(\theta_k)
              + \tfrac{\sqrt{h}}{2} L (\xi_k + \xi_{k+1}), \qquad M = L L^\top \\
        \tilde\nabla(\theta) &= \nabla \log \pi(\hat\theta)
              + [\nabla \log p(\theta) - \nabla \log p(\hat\theta)] \\
              &\quad + \tfrac{N}{n} \sum_{j \in S} [\nabla \log p(x_j \mid \theta)
                                            - \nabla \log p(x_j \mid \hat\theta)]

    with the same rows S in both terms, less what is linear in the position, which is exact from all
    rows (see `ControlVariateGradient`). It is the same as `SGLD` with ``gradient="second_order"``
    and ``integrator="averaged"``. ``gradient="cv"`` and ``integrator="euler"`` make it algorithm 1
    of Baker et al. (2019).

    **Law.** On a Gaussian posterior the covariance is too large by the relative amount
    :math:`\tfrac{h}{4} MV`, and exact without gradient noise. The gradient covariance V grows with
    the fourth power of the distance from the centre, or with its square for "cv". For a posterior
    that contracts like :math:`N^{-1/2}` around the centre, V does not grow relative to the
    curvature, so the same batch size is right for all N. Where the batch size is computed, every
    transition evaluates the rows that would cause most of V, such as those of a rare level of a
    factor. These rows then cause no noise.

    **Cost.** A transition takes at most two gradients of n rows, independent of N. Their difference
    is taken inside sums and products, so that a regression needs one matrix product for both.
    Quantities at the centre, such as its fitted values, are stored once where they take little
    memory, and a transition then costs as much as one of `SGLD`. The centre takes a few passes over
    the data, once.

    References
    ----------
    J. Baker, P. Fearnhead, E. B. Fox and C. Nemeth (2019). Control variates for stochastic
    gradient MCMC. *Statistics and Computing* 29, 599-615.

    Examples
    --------
    >>> import numpy as np, pymc as pm
    >>> rng = np.random.default_rng(1)
    >>> x = rng.normal(size=5000)
    >>> with pm.Model():
    ...     slope = pm.Normal("slope", 0, 10)
    ...     _ = pm.Poisson("y", pm.math.exp(slope * x), observed=rng.poisson(np.exp(0.5 * x)))
    ...     step = SGLDCV(batch_size=50, compile_kwargs={"mode": "FAST_COMPILE"})
    ...     idata = pm.sample(step=step, draws=200, tune=0, chains=1, random_seed=1,
    ...                       progressbar=False, quiet=True)
    >>> bool(abs(idata.posterior["slope"].mean() - 0.5) < 0.05)
    True
    """

    name = "sgldcv"
    _kind = Kind(takes_low_rank=True, bounds_noise=True)

    def __init__(
        self,
        vars: Sequence | None = None,
        *,
        integrator: str = "averaged",
        gradient: Gradient = "second_order",
        preconditioner: Preconditioner = None,
        **settings: Unpack[CommonSettings],
    ):
        super().__init__(
            vars,
            integrator=integrator,
            gradient=gradient,
            preconditioner=preconditioner,
            **settings,
        )
