"""Langevin samplers with the gradient of all rows: baselines for teaching and tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import numpy as np

from pymc_sgmcmc.dynamics.metropolis_adjusted import MetropolisAdjustedLangevin
from pymc_sgmcmc.gradient_estimators import FullGradient
from pymc_sgmcmc.schedules import StepSize
from pymc_sgmcmc.step_methods.base import StochasticGradientStep
from pymc_sgmcmc.step_methods.mirror import OF_ALL_ROWS
from pymc_sgmcmc.step_methods.settings import ChainSettings, Preconditioner
from pymc_sgmcmc.step_methods.setup import Design, Kind, Pace, Setup, default_thinning
from pymc_sgmcmc.step_methods.sgld import SGLD

OPTIMAL_MALA_SCALE = 1.65
"""This scale of the proposal in one coordinate gives MALA an acceptance rate of 0.574, which is
optimal in high dimension (Roberts and Rosenthal 1998)."""


class ULA(SGLD):
    r"""The unadjusted Langevin algorithm: `SGLD` with the gradient of all rows.

    .. math:: \theta' = \theta + \tfrac{h}{2} M \nabla(\theta) + N(0, h M)

    **Law.** For a Gaussian posterior with precision H the mean is right, and the precision of the
    chain is :math:`H - \tfrac{h}{4} H M H`: variances are too large by
    :math:`1 / (1 - \tfrac{h}{4} \lambda(MH))` in each eigen-direction. In general the bias is of
    first order in h (Roberts and Tweedie 1996; "ULA" in Howell's notes, section 4). `MALA` has
    none.

    **Cost.** A transition takes one gradient of *all* N rows. The sampler is for teaching, and a
    reference for the other samplers, whose cost does not depend on N. The data are not copied. The
    rows of the model must be separable, as for the other samplers.

    **Without data** the target is the prior with the potentials, as in figures of Langevin
    samplers on densities in the plane. Observed variables without rows, such as a single number,
    are a part of it.

    Raises
    ------
    TypeError
        For `batch_size` or `gradient`, which have no meaning here; otherwise as `SGLD`.

    References
    ----------
    G. O. Roberts and R. L. Tweedie (1996). Exponential convergence of Langevin distributions
    and their discrete approximations. *Bernoulli* 2, 341-363.

    Examples
    --------
    >>> step = ULA(compile_kwargs={"mode": "FAST_COMPILE"})
    """

    name = "ula"
    _kind = Kind(takes_low_rank=True, bounds_noise=True, takes_all_rows=True, mirrors=OF_ALL_ROWS)

    def __init__(
        self,
        vars: Sequence | None = None,
        *,
        integrator: str = "euler",
        preconditioner: Preconditioner = None,
        step_size: StepSize | None = None,
        bias: float | None = None,
        **settings: Unpack[ChainSettings],
    ):
        super().__init__(
            vars,
            integrator=integrator,
            preconditioner=preconditioner,
            step_size=step_size,
            bias=bias,
            **settings,
        )


class MALA(StochasticGradientStep):
    r"""The Metropolis-adjusted Langevin algorithm, with the gradient of all rows.

    .. math::
        \theta^* &= \theta + \tfrac{h}{2} M \nabla(\theta) + N(0, h M) \\
        \theta' &= \theta^* \text{ with probability } \min\left\{1,
            \frac{\pi(\theta^*)\, q(\theta \mid \theta^*)}
                 {\pi(\theta)\, q(\theta^* \mid \theta)}\right\},
            \quad \theta \text{ otherwise}

    with q the density of the proposal. See Roberts and Tweedie (1996) and Howell, section 2.

    **Law.** The law is the posterior for each h. There is no bias, only more or less
    autocorrelation.

    **Cost.** A transition takes one log density and gradient of *all* N rows. The sampler is for
    teaching and a reference. The data are not copied. A compound step takes one more evaluation a
    draw, since the other variables have moved. The rows of the model must be separable, as for the
    other samplers. In single precision the log density of many rows has few digits left after the
    point: use double precision beyond ten thousand rows or so.

    **Without data** the target is the prior with the potentials, as for `ULA`. Random-walk
    Metropolis, to compare with, is `pymc.Metropolis` with ``elemwise_update = False``.

    Parameters
    ----------
    step_size : float or callable, optional
        The step size h. Default: :math:`h = 1.65^2 \left(\sum_i \lambda_i^3\right)^{-1/3}` with
        :math:`\lambda_i` the eigenvalues of MH. For M the inverse curvature this is
        :math:`1.65^2 d^{-1/3}`, at which Roberts and Rosenthal (1998) find the acceptance rate
        of 0.574 that is best in high dimension.

    Raises
    ------
    TypeError
        For `batch_size` or `gradient`, which have no meaning here; otherwise as `SGLD`.

    Notes
    -----
    Beside the statistics of `SGLD`, `sample_stats` has for the last transition of each draw
    whether it was ``accepted`` (0 or 1) and the probability of that, ``acceptance_rate``. The
    ``gradient`` is the exact one at the recorded position.

    References
    ----------
    G. O. Roberts and R. L. Tweedie (1996). Exponential convergence of Langevin distributions
    and their discrete approximations. *Bernoulli* 2, 341-363.

    G. O. Roberts and J. S. Rosenthal (1998). Optimal scaling of discrete approximations to
    Langevin diffusions. *Journal of the Royal Statistical Society B* 60, 255-268.

    Examples
    --------
    >>> step = MALA(compile_kwargs={"mode": "FAST_COMPILE"})
    >>> bool(idata.sample_stats["acceptance_rate"].mean() > 0.5)
    True

    A density without data, here with two modes:

    >>> with pm.Model():
    ...     x = pm.Flat("x")
    ...     density = pm.math.exp(-(x**2)) + pm.math.exp(-((x - 4) ** 2))
    ...     _ = pm.Potential("density", pm.math.log(density))
    ...     step = MALA(
    ...         step_size=1.0, preconditioner="identity", compile_kwargs={"mode": "FAST_COMPILE"}
    ...     )
    >>> step.posterior.has_rows
    False
    """

    name = "mala"
    _kind = Kind(takes_all_rows=True, is_exact=True, is_metropolis=True)

    def __init__(
        self,
        vars: Sequence | None = None,
        *,
        preconditioner: Preconditioner = None,
        step_size: StepSize | None = None,
        **settings: Unpack[ChainSettings],
    ):
        super().__init__(vars, preconditioner=preconditioner, step_size=step_size, **settings)

    def _design(self, setup: Setup) -> Design:
        posterior, estimator = setup.posterior, setup.estimator
        assert isinstance(estimator, FullGradient)
        matrix, root = setup.preconditioner()

        def optimal() -> Pace:
            step_size = optimal_mala_step(setup.center.curvature.relative_to(root))
            choice = setup.choose_step_size(root)
            return Pace(step_size, default_thinning(step_size, choice.smallest_curvature), choice)

        pace = setup.pace(optimal)
        # This call compiles the function that begins a chain here, and not in each process.
        posterior.log_density_and_gradient(posterior.initial_position)
        dynamics = MetropolisAdjustedLangevin(
            matrix.map(setup.shared),
            root.map(setup.shared),
            estimator.log_density,
            posterior.log_density_and_gradient,
        )
        return Design(dynamics, pace)


def optimal_mala_step(curvatures: np.ndarray) -> float:
    r"""Step of MALA for a Gaussian with eigenvalues :math:`\lambda` of MH, in closed form.

    .. math:: h = 1.65^2 \left(\sum_i \lambda_i^3\right)^{-1/3}

    The acceptance rate is :math:`2 \Phi(-\tfrac18 h^{3/2} (\sum_i \lambda_i^3)^{1/2})` in high
    dimension (Roberts and Rosenthal 1998, theorems 1 and 3).
    """
    return float(OPTIMAL_MALA_SCALE**2 / np.cbrt(np.sum(curvatures**3)))
