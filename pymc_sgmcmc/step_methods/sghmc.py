"""Stochastic gradient Hamiltonian Monte Carlo (Chen, Fox and Guestrin 2014)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np

from pymc_sgmcmc.checks import one_of, or_none, positive_number, whole_number
from pymc_sgmcmc.dynamics.baoab import BAOAB
from pymc_sgmcmc.dynamics.naive_sghmc import NaiveSGHMC
from pymc_sgmcmc.dynamics.sghmc import SGHMCEuler
from pymc_sgmcmc.dynamics.underdamped import Underdamped
from pymc_sgmcmc.errors import UncorrectedNoiseWarning, warn
from pymc_sgmcmc.matrices import Matrix
from pymc_sgmcmc.schedules import StepSize, step_sizes
from pymc_sgmcmc.step_methods.base import StochasticGradientStep
from pymc_sgmcmc.step_methods.estimators import Gradient
from pymc_sgmcmc.step_methods.momentum import (
    NOISE_ESTIMATE_ERROR,
    GradientNoise,
    check_correction,
    check_noise,
    critical_friction,
    curvature_range,
    directional_curvature,
    noise_directions,
    relaxation_transitions,
    rows_noise,
    rows_noise_error,
    solve_step_size,
)
from pymc_sgmcmc.step_methods.settings import CommonSettings, Preconditioner
from pymc_sgmcmc.step_methods.setup import Design, Pace, Setup

INTEGRATORS: dict[str, type[Underdamped]] = {
    "baoab": BAOAB,
    "euler": SGHMCEuler,
    "naive": NaiveSGHMC,
}
"""These classes integrate the dynamics. The names are those of the setting."""


@dataclass(frozen=True)
class ResampledMomentum:
    """An integrator of `SGHMC` whose velocities are drawn anew from N(0, M) from time to time.

    It is not needed, since friction has the same effect, except for "naive". Frequent resampling
    makes the chain a random walk.

    Parameters
    ----------
    integrator : {"baoab", "euler", "naive"}
    every : int or {"draw"}
        Number of transitions after which velocities are drawn, or "draw" for once in each recorded
        draw.

    Raises
    ------
    TypeError, ValueError
    """

    integrator: str
    every: int | str = "draw"

    def __post_init__(self):
        one_of("integrator", self.integrator, sorted(INTEGRATORS))
        if isinstance(self.every, str):
            one_of("every", self.every, ["draw"], " or a whole number")
        else:
            whole_number("every", self.every, 1, " of transitions")


class SGHMC(StochasticGradientStep):
    r"""Stochastic gradient Hamiltonian Monte Carlo: underdamped Langevin dynamics.

    With ``integrator="baoab"``, one gradient a transition (Leimkuhler and Matthews 2013),

    .. math::
        v_+ &= v + \epsilon M \hat\nabla(\theta), \qquad
        v' = c\, v_+ + N(0,\, (1 - c^2)\, L (I - U) L^\top), \\
        \theta' &= \theta + \tfrac{\epsilon}{2} (v_+ + v'), \qquad
        c = e^{-\gamma\epsilon}, \quad M = L L^\top,

    and with ``integrator="euler"``, Chen, Fox and Guestrin (2014), eq. 15,

    .. math::
        v' = (1 - \alpha) v + \epsilon M \hat\nabla(\theta) + N(0,\, 2 (\alpha I - \hat\beta) M),
        \qquad \theta' = \theta + \epsilon v',

    where :math:`\alpha = \gamma\epsilon` and :math:`\hat\beta = \tfrac12 \epsilon^2 M \hat V`.
    The paper's velocity is :math:`\epsilon v`, and its learning rate is
    :math:`\eta = \epsilon^2 M`. Its number of leapfrog steps is `thin` here, and each step has its
    own minibatch.

    ``integrator="naive"`` is for teaching: Hamiltonian dynamics with the minibatch gradient and
    *without* friction, :math:`v' = v + \epsilon M \hat\nabla(\theta)`,
    :math:`\theta' = \theta + \epsilon v'` (Chen et al., §3.1). Nothing corrects for the noise of
    the gradient, so its law is not the posterior, and a warning says so. In a direction of gradient
    noise V (M = I) the mean of :math:`v^2 + H \theta^2 - \epsilon H \theta v` grows by
    :math:`\epsilon^2 V` in each transition, without bound. With `ResampledMomentum` the variance
    has a limit, which is too large.

    **Law.** With the gradient of all rows and for small steps, the law is
    :math:`\pi(\theta)\, N(v; 0, M)`. On a Gaussian posterior the mean is right at every stable
    step. Take a direction of curvature H and gradient noise V where M = I. The noise makes the
    variance of the position too large by a relative :math:`u \approx \epsilon V / 2\gamma`, exactly
    so for Euler; for BAOAB it is
    :math:`\tfrac14 \epsilon^2 V \coth(\gamma\epsilon/2) / (1 - \epsilon^2 H/4)`. The step adds
    nothing for BAOAB and :math:`\epsilon^2 H / (4 - 2\alpha - \epsilon^2 H)` for Euler.

    **Correction.** The noise of the gradient is estimated at set-up, from gradients of single
    rows at the centre, and the injected noise is reduced by as much: U and :math:`\hat\beta`. For a
    constant V this removes the inflation by noise. It does so exactly for Euler, and for BAOAB
    exactly where V and H commute after whitening by M, as for M = H⁻¹ or V proportional to H, and
    to first order in ε otherwise. Without the estimate (``noise_estimate=None``) the variances are
    too large. On a regression with 40 rows and 5 a minibatch the variance was 1.37 times the
    posterior's, and with the estimate 1.003 (Euler) and 1.0001 (BAOAB) times. The remaining error
    comes from that of the estimate, and from noise that changes with the position.

    **Cost.** A transition takes one gradient of n rows, independent of N, a product with M, and for
    the noise a product with a matrix of its directions.

    Parameters
    ----------
    integrator : {"baoab", "euler", "naive"} or ResampledMomentum
        BAOAB is more accurate at any step; Euler is that of the paper. "naive" has no friction and
        no right law, and needs a `step_size`. `ResampledMomentum` draws velocities anew besides.
    friction : float, optional
        :math:`\gamma`, in units of 1 / time, where time is the unit of `step_size`. For the matrix
        friction C of the paper, :math:`C M = \gamma I`. Default: critical damping of the slowest
        direction at the centre, :math:`2 \sqrt{\lambda_{\min}(MH)}`, which is 2 for
        ``preconditioner="curvature"``.
    step_size : float or callable, optional
        :math:`\epsilon`, in units of time. A position moves by :math:`\epsilon v` with v of
        covariance M, so :math:`\epsilon` has no unit for ``preconditioner="curvature"`` and that
        of the position for "identity". :math:`\epsilon^2` has the role of h in `SGLD`. Default:
        the step at which the law above has the variance inflation given as `bias` where V is wrong
        by 20 %, and at most :math:`1 / \sqrt{\lambda_{\max}(MH)}`. The assumed error of V is larger
        where less is known: :math:`1 / 2\sqrt{d}` with a control variate, :math:`\sqrt{2n/N}` for
        windows of rows, and all of V without `noise_estimate`. For a function, friction and noise
        are checked at transition 0, so it should decrease.
    preconditioner : {"curvature", "identity"}, float, (d,) or (d, d) array, optional
        M, the inverse of the mass matrix. Default: "curvature". It is needed where
        `step_size` is given.
    noise_estimate : {"rows"}, None, float, (d,) or (d, d) array
        Estimate of V, the covariance of the gradient estimate. "rows" (default) is computed from
        gradients of single rows at the centre, dense up to d = 500 and diagonal beyond. With None
        there is no correction. There is none either with "rows" for ``gradient="svrg"``
        and ``"saga"``, since only a bound on their noise is known.

    Raises
    ------
    ValueError
        Where the friction is too small for the noise of the gradient
        (:math:`\alpha I - \hat\beta` is not positive definite); the message says by how much.
        For invalid settings, as `SGLD`.

    Warns
    -----
    UncorrectedNoiseWarning
        For ``integrator="naive"``.

    Notes
    -----
    `friction` is an attribute, as `step_size` and `thin` are. Velocities begin as draws from
    N(0, M).

    References
    ----------
    T. Chen, E. B. Fox and C. Guestrin (2014). Stochastic gradient Hamiltonian Monte Carlo.
    *ICML*.

    B. Leimkuhler and C. Matthews (2013). Rational construction of stochastic numerical methods
    for molecular sampling. *Applied Mathematics Research eXpress* 2013, 34-56.

    Examples
    --------
    >>> step = SGHMC(batch_size=100, gradient="cv", compile_kwargs={"mode": "FAST_COMPILE"})
    """

    name = "sghmc"

    def __init__(
        self,
        vars: Sequence | None = None,
        *,
        integrator: str | ResampledMomentum = "baoab",
        friction: float | None = None,
        noise_estimate: str | float | np.ndarray | None = "rows",
        gradient: Gradient = "cv",
        preconditioner: Preconditioner = None,
        **settings: Unpack[CommonSettings],
    ):
        every: int | str | None = None
        if isinstance(integrator, ResampledMomentum):
            every, integrator = integrator.every, integrator.integrator
        self._integrator = one_of(
            "integrator", integrator, sorted(INTEGRATORS), " or a ResampledMomentum"
        )
        self._resample_every = every
        if integrator == "naive":
            _check_naive(friction, noise_estimate, settings.get("step_size"))
            friction = noise_estimate = None
        elif isinstance(friction, int | float) and friction == 0:
            raise ValueError(
                f"`friction` should be positive (in units of 1 / time), but got {friction!r}: "
                "without friction nothing corrects for the noise of the gradient. To see that, use "
                "`integrator='naive'`."
            )
        self._friction = or_none(
            positive_number, "friction", friction, unit=" (in units of 1 / time)"
        )
        self._noise_estimate = _check_noise_estimate(noise_estimate)
        if integrator == "naive":
            message = _naive_message(self._resample_every)
            warn(message, UncorrectedNoiseWarning)
        super().__init__(vars, gradient=gradient, preconditioner=preconditioner, **settings)

    def _design(self, setup: Setup) -> Design:
        integrator = INTEGRATORS[self._integrator]
        matrix, root = setup.preconditioner()
        friction = 0.0 if self._integrator == "naive" else self._friction
        if friction is None:
            friction = critical_friction(curvature_range(setup.center, root)[0])
        noise, error = self._noise(setup, root)

        def computed() -> Pace:
            smallest, largest = curvature_range(setup.center, root)
            choice = setup.choose_step_size(root)
            variance = choice.noise if noise is None else noise.largest
            step_size = solve_step_size(
                integrator, friction, variance, largest, lambda _: error, setup.bias
            )
            thin = relaxation_transitions(integrator, step_size, friction, smallest)
            return Pace(step_size, thin, choice)

        pace = setup.pace(computed)
        center = setup.known_center
        first_step = float(step_sizes(pace.step_size, 0, 1)[0])
        if integrator is SGHMCEuler and friction * first_step > 1:
            raise ValueError(
                "With `integrator='euler'`, `friction` times `step_size` should be at most 1, but "
                f"is {friction:.3g} × {first_step:.3g} = {friction * first_step:.3g}. Make either "
                "smaller, or use `integrator='baoab'`."
            )
        shared = setup.shared
        correction = {}
        if noise is not None:
            curvatures = directional_curvature(center, noise.root)
            steepest = 0.0 if center is None else curvature_range(center, root)[1]
            check_correction(
                integrator,
                first_step,
                friction,
                noise.variances,
                curvatures,
                steepest,
                setup.estimator.remedy,
            )
            correction = {
                "noise": shared(noise.variances, "gradient_noise"),
                "noise_curvature": shared(curvatures, "noise_curvature"),
            }
        every = self._resample_every
        if isinstance(every, str):
            every = pace.thin
        self.friction = friction
        dynamics = integrator(
            preconditioner=matrix.map(shared),
            root=root.map(shared),
            friction=shared(friction, "friction"),
            noise_root=(root if noise is None else noise.root).map(shared),
            resample_every=None if every is None else shared(every, "resample_every"),
            **correction,
        )
        return Design(dynamics, pace)

    def _noise(self, setup: Setup, root: Matrix) -> tuple[GradientNoise | None, float]:
        """Noise to correct for, and the relative error to expect of its estimate."""
        noise_estimate = self._noise_estimate
        if noise_estimate is None:
            return None, 1.0
        if isinstance(noise_estimate, str):
            if setup.estimator.noise_factors != (1.0, 0.0):
                return None, 1.0  # With the bound on their noise variances would be too small.
            return noise_directions(rows_noise(setup), root), rows_noise_error(setup)
        covariance = check_noise(noise_estimate, setup.posterior.dimension)
        if not covariance.eigenvalues().any():
            return None, 1.0
        return noise_directions(covariance, root), NOISE_ESTIMATE_ERROR


def _check_naive(friction: Any, noise_estimate: Any, step_size: StepSize | None) -> None:
    """Refuse settings that the naive integrator has not, and a step size to be computed.

    Raises
    ------
    ValueError
    """
    if friction is not None and friction != 0:
        raise ValueError(
            f"`integrator='naive'` has no friction, but got friction={friction!r}. Leave it out, "
            "or use `integrator='euler'`."
        )
    if not (isinstance(noise_estimate, str) or noise_estimate is None):
        raise ValueError(
            "`integrator='naive'` injects no noise that could be reduced, but got "
            f"noise_estimate={noise_estimate!r}. Leave it out, or use `integrator='euler'`."
        )
    if step_size is None:
        raise ValueError(
            "`integrator='naive'` should come with `step_size` and `preconditioner`, since it has "
            "no right law from which a step size could be computed."
        )


def _naive_message(resample_every: int | str | None) -> str:
    grows = (
        "its variance grows without bound"
        if resample_every is None
        else "its variance ends at a value that is too large"
    )
    return (
        "With `integrator='naive'` nothing corrects for the noise of the gradient, so the law of "
        f"the chain is not the posterior: {grows}. Use it to see that, and `integrator='baoab'` "
        "for results."
    )


def _check_noise_estimate(noise_estimate: Any) -> Any:
    if isinstance(noise_estimate, str | bool) and noise_estimate != "rows":
        raise ValueError(
            "`noise_estimate` should be 'rows', None, a number or an array, but got "
            f"{noise_estimate!r}."
        )
    return noise_estimate
