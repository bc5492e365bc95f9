"""Stochastic gradient Nosé-Hoover thermostat (Ding et al. 2014)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import numpy as np

from pymc_sgmcmc.checks import or_none, positive_number
from pymc_sgmcmc.dynamics.baoab import BAOAB
from pymc_sgmcmc.dynamics.sgnht import NoseHoover
from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.matrices import Dense
from pymc_sgmcmc.schedules import step_sizes
from pymc_sgmcmc.step_methods.base import StochasticGradientStep
from pymc_sgmcmc.step_methods.estimators import Gradient
from pymc_sgmcmc.step_methods.momentum import (
    NOISE_ESTIMATE_ERROR,
    critical_friction,
    curvature_range,
    noise_directions,
    relaxation_transitions,
    rows_noise,
    solve_step_size,
)
from pymc_sgmcmc.step_methods.settings import CommonSettings, Preconditioner
from pymc_sgmcmc.step_methods.setup import Design, Pace, Setup

THERMOSTATS = ("scalar", "diagonal")
"""The thermostat is one number, or one for each coordinate of the momentum."""

MOST_THERMOSTAT = 10.0
"""A chain counts as frozen where its thermostat is more than this many times what friction and
noise explain. A stationary thermostat fluctuates by far less, see `FEWEST_DEGREES`."""

FEWEST_DEGREES = 4
"""A thermostat with fewer degrees of freedom has a default mass that is larger in proportion.

Otherwise ξ would often be negative, and in one dimension, at half of the largest stable step, the
variance of a Gaussian would be wrong by 5 %."""


class SGNHT(StochasticGradientStep):
    r"""Stochastic gradient Nosé-Hoover thermostat.

    Underdamped Langevin dynamics with a friction ξ that adapts to the noise of the gradient, in
    momenta r of unit mass (:math:`\dot\theta = L r`, M = L L⊤):

    .. math:: dr = L^\top \hat\nabla\, dt - \xi r\, dt + \sqrt{2 A}\, dW, \qquad
              d\xi = \frac{1}{\mu} \left(\frac{r^\top r}{d} - 1\right) dt

    The dynamics are those of Ding et al. (2014). They are integrated by the BADODAB splitting
    (Leimkuhler and Shang 2016) with one gradient a transition, see
    `pymc_sgmcmc.dynamics.sgnht.NoseHoover`. The paper's Euler step overflows at step sizes at which
    this splitting is accurate.

    **Law.** With the gradient of all rows and for small steps the law is
    :math:`\pi(\theta)\, N(r; 0, I)\, N(\xi; A, 1/(\mu d))`. Gradient noise of covariance V with
    :math:`L^\top V L = w I` moves the mean of ξ to :math:`A + \epsilon w / 2`. It leaves the law of
    the position as it is, to first order in ε, without an estimate of w. A scalar thermostat
    corrects only the mean noise over all directions: directions with more noise get too wide, by
    :math:`\epsilon (w_j - \bar w) / 2A`, and others too narrow. ``thermostat="diagonal"`` corrects
    noise that is uncorrelated in the coordinates of r. The temperature is measured at a point of
    the splitting where the position has not felt all of the noise. A variance that noise would
    inflate by u is therefore too small by about :math:`\epsilon^2 H u`.
    `SGHMC` corrects noise of any covariance, with an estimate made at set-up. This sampler needs no
    estimate, and it follows noise that changes.

    **Cost.** A transition takes one gradient of n rows, independent of N, and two products with L.

    Parameters
    ----------
    friction : float, optional
        A, in units of 1 / time, which is the mean of ξ for a gradient without noise. Default:
        critical damping of the slowest direction at the centre,
        :math:`2 \sqrt{\lambda_{\min}(MH)}`.
    thermostat : {"scalar", "diagonal"}
        One thermostat, or one for each coordinate of r. With a dense preconditioner and a known
        centre, the coordinates of the diagonal one are the directions of the gradient noise at the
        centre.
    thermostat_mass : float, optional
        μ, in units of time². Default: :math:`4 / A^2`, and more for fewer than four degrees of
        freedom. Then ξ fluctuates by :math:`A / 2\sqrt{d}`, at most A / 4, and becomes stationary
        within about :math:`4 / A` to :math:`16 / A` of time.
    step_size : float or callable, optional
        :math:`\epsilon`, in units of time, see `SGHMC`. Default: the step of BAOAB with friction A
        at which noise that the thermostat does not correct changes a variance by `bias`, and at
        most :math:`1 / \sqrt{\lambda_{\max}(MH)}`. That noise is the largest of three: the largest
        deviation of the noise of a direction from the mean, the largest noise times
        :math:`\epsilon^2 \lambda_{\max}(MH)`, and 20 % of the largest noise.
    preconditioner : {"curvature", "identity"}, float, (d,) or (d, d) array, optional
        M, the inverse of the mass matrix. Default: "curvature". It is needed where
        `step_size` is given.

    Raises
    ------
    ValueError, TypeError
        For an unknown thermostat, or a friction or thermostat mass that is not positive; otherwise
        as `SGLD`.

    Notes
    -----
    `sample_stats` has ``thermostat``, the mean of ξ after each draw. Its excess over `friction`
    comes from the noise of the gradient.

    References
    ----------
    N. Ding, Y. Fang, R. Babbush, C. Chen, R. D. Skeel and H. Neven (2014). Bayesian sampling
    using stochastic gradient thermostats. *NeurIPS*.

    B. Leimkuhler and X. Shang (2016). Adaptive thermostats for noisy gradient systems. *SIAM
    Journal on Scientific Computing* 38, A712-A736.

    Examples
    --------
    >>> step = SGNHT(batch_size=100, gradient="cv", compile_kwargs={"mode": "FAST_COMPILE"})
    """

    name = "sgnht"

    def __init__(
        self,
        vars: Sequence | None = None,
        *,
        friction: float | None = None,
        thermostat: str = "scalar",
        thermostat_mass: float | None = None,
        gradient: Gradient = "cv",
        preconditioner: Preconditioner = None,
        **settings: Unpack[CommonSettings],
    ):
        if thermostat not in THERMOSTATS:
            names = " or ".join(map(repr, THERMOSTATS))
            raise ValueError(f"`thermostat` should be {names}, but got {thermostat!r}.")
        self._thermostat = thermostat
        self._friction = or_none(
            positive_number, "friction", friction, unit=" (in units of 1 / time)"
        )
        self._thermostat_mass = or_none(
            positive_number, "thermostat_mass", thermostat_mass, unit=" (in units of time²)"
        )
        super().__init__(vars, gradient=gradient, preconditioner=preconditioner, **settings)

    def _design(self, setup: Setup) -> Design:
        diagonal = self._thermostat == "diagonal"
        _, root = setup.preconditioner()
        computes = setup.settings.step_size is None or self._friction is None
        center = setup.center if computes else setup.known_center
        noise = None
        if center is not None:
            noise = noise_directions(rows_noise(setup), root)
            if diagonal and isinstance(root, Dense):
                root = noise.root
        friction = self._friction
        if friction is None:
            friction = critical_friction(curvature_range(setup.center, root)[0])

        def computed() -> Pace:
            assert noise is not None  # known where there is a centre
            smallest, largest = curvature_range(setup.center, root)
            unequal = 0.0 if diagonal else np.abs(noise.variances - noise.variances.mean()).max()
            share = max(NOISE_ESTIMATE_ERROR, unequal / max(noise.largest, np.finfo(float).tiny))
            step_size = solve_step_size(
                BAOAB,
                friction,
                noise.largest,
                largest,
                lambda step: max(share, step**2 * largest),
                setup.bias,
            )
            thin = relaxation_transitions(BAOAB, step_size, friction, smallest)
            return Pace(step_size, thin, setup.choose_step_size(root))

        pace = setup.pace(computed)
        degrees = 1 if diagonal else setup.posterior.dimension
        mass = self._thermostat_mass or 4 / friction**2 * max(1, FEWEST_DEGREES / degrees)
        self.friction, self.thermostat_mass = friction, mass
        noise_size = 0.0
        if noise is not None and center is not None:
            noise_size = float(np.mean(noise.variances))
            largest = curvature_range(center, root)[1]
            first_step = float(step_sizes(pace.step_size, 0, 1)[0])
            check_heat(first_step, friction, noise_size, largest, setup.estimator.remedy)
        dynamics = NoseHoover(
            root=root.map(setup.shared),
            friction=setup.shared(friction, "friction"),
            thermostat_mass=setup.shared(mass, "thermostat_mass"),
            diagonal=diagonal,
        )

        def watch(stats: Mapping[str, Any]) -> str | None:
            expected = friction + stats["step_size"] * noise_size
            return _frozen(stats["thermostat"], expected)

        return Design(dynamics, pace, watch=watch)


def check_heat(
    step_size: float, friction: float, noise: float, curvature: float, or_else: str
) -> None:
    r"""Make sure that the thermostat can absorb the noise of the gradient.

    Whatever the friction, each kick adds :math:`\epsilon^2 \mathrm{tr}(MV) / d` to the mean square
    of the momentum, of which the thermostat measures one half. Beyond 2 it grows without end.

    Raises
    ------
    ValueError
        Where it cannot, or the step is unstable.
    """
    stable = BAOAB.largest_step_size(friction, curvature)
    if step_size >= stable:
        raise ModelError(
            f"`step_size` should be below {stable:.3g} to be stable at the centre with this "
            f"preconditioner, but is {step_size:.3g}. Leave it out to have it computed."
        )
    if step_size**2 * noise >= 1:
        raise ModelError(
            f"The gradient noise is too large for the thermostat: at step size {step_size:.3g} "
            f"each step adds {step_size**2 * noise:.3g} times the kinetic energy. Use a "
            f"`step_size` below {noise**-0.5:.3g} with this preconditioner, a larger `batch_size`, "
            f"{or_else}."
        )


def _frozen(thermostat: float, expected: float) -> str | None:
    """Warning where a thermostat is far above its stationary law, otherwise None.

    The large gradients at a start far from the posterior have this effect.
    """
    if not thermostat > MOST_THERMOSTAT * expected:
        return None
    return (
        f"The thermostat is at {thermostat:.3g}, but should be about {expected:.3g}, so the chain "
        "hardly moves and its draws are too narrow. Give `initvals` nearer to the posterior, or "
        "none, or use SGHMC."
    )
