"""Friction, gradient noise, step size and thinning of samplers with momentum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import linalg, optimize

from pymc_sgmcmc.checks import as_array
from pymc_sgmcmc.dynamics.underdamped import Underdamped
from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.matrices import Dense, Diagonal, Matrix, as_matrix
from pymc_sgmcmc.schedules import MOST_THINNING
from pymc_sgmcmc.step_methods.setup import Setup
from pymc_sgmcmc.tuning import DENSE_DIMENSION, VARIANCE_INFLATION, Center

MOST_TIME_STEP = 1.0
"""The default step is at most this many units of 1 / sqrt(λ_max(MH)), half of what is stable.

The law of a Gaussian alone would often allow a longer step, but the error on other posteriors is of
second order in the step. For the log rate of a Poisson distribution given five counts, whose
posterior is skewed, BAOAB with this step is wrong by less than 1 % in the variance.
"""

NOISE_ESTIMATE_ERROR = 0.2
"""The default step size assumes that the estimate of the gradient noise is wrong by at least this
relative amount. It covers noise that changes with the position."""


@dataclass(frozen=True)
class GradientNoise:
    r"""Covariance V of a gradient estimate, in coordinates in which M = I.

    Attributes
    ----------
    root : Diagonal or Dense
        L Q with M = L L⊤ and L⊤VL = Q diag(w) Q⊤. Its columns are the directions of the noise.
    variances : numpy.ndarray, scalar or (d,)
        The variances w of the noise in these directions.
    """

    root: Matrix
    variances: np.ndarray

    @property
    def largest(self) -> float:
        """λ_max(MV)."""
        return float(np.max(self.variances))


def curvature_range(center: Center, root: Matrix) -> tuple[float, float]:
    """Smallest and largest eigenvalue of MH."""
    values = center.curvature.relative_to(root)
    return float(np.min(values)), float(np.max(values))


def rows_noise(setup: Setup) -> Diagonal | Dense:
    """V from gradients of single rows at the centre: dense up to d = 500, diagonal beyond."""
    deviations = setup.gradient_deviations()
    if deviations.shape[1] > DENSE_DIMENSION:
        return Diagonal((deviations**2).sum(axis=0))
    return Dense(deviations.T @ deviations)


def rows_noise_error(setup: Setup) -> float:
    """Relative error to expect of `rows_noise`.

    The noise of a control variate is an average over points around the centre. It grows with the
    square of the distance from the centre, which varies more for smaller d.
    """
    if not setup.estimator.reduces_variance:
        return NOISE_ESTIMATE_ERROR
    return max(NOISE_ESTIMATE_ERROR, 0.5 / np.sqrt(setup.posterior.dimension))


def check_noise(
    noise: float | np.ndarray, dimension: int, name: str = "noise_estimate"
) -> Diagonal | Dense:
    """Return a covariance of the gradient that a user gave.

    Raises
    ------
    ValueError
        Where it has another shape than (), (d,) or (d, d), or is not positive semidefinite.
    """
    noise = as_array(name, noise)
    if noise.shape not in ((), (dimension,), (dimension, dimension)):
        raise ModelError(
            f"`{name}` should be a number or an array of shape ({dimension},) or "
            f"({dimension}, {dimension}), but has shape {noise.shape}."
        )
    if not np.isfinite(noise).all():
        raise ValueError(f"`{name}` should be finite, but has NaN or infinite entries.")
    if not np.allclose(noise, noise.T, rtol=1e-6, atol=0):
        raise ValueError(f"`{name}` should be symmetric, as a covariance is.")
    covariance = as_matrix(noise)
    values = covariance.eigenvalues()
    if np.min(values) < -1e-8 * np.max(np.abs(values)):
        raise ValueError(
            f"`{name}` should be positive semidefinite, as a covariance is, but its smallest "
            f"eigenvalue is {np.min(values):.3g}."
        )
    return covariance


def noise_directions(noise: Diagonal | Dense, root: Matrix) -> GradientNoise:
    """Directions in which the noise of the gradient is uncorrelated, and its variances there."""
    covariance = noise.congruence(root)
    if isinstance(covariance, Diagonal):
        return GradientNoise(root, np.maximum(covariance.values, 0))
    values, vectors = linalg.eigh(covariance.values)
    return GradientNoise(Dense(root @ vectors), np.maximum(values, 0))


def directional_curvature(center: Center | None, directions: Matrix) -> np.ndarray:
    """Curvature of the posterior in the directions of the noise, 0 where not known."""
    if center is None:
        return np.asarray(0.0)
    precision = center.curvature.precision
    if isinstance(directions, Diagonal):
        return precision.diagonal() * directions.values**2
    columns = directions.dense()
    return np.einsum("ij,ij->j", columns, precision @ columns)


def critical_friction(curvature: float) -> float:
    """Smallest friction at which motion in a direction of this curvature does not oscillate."""
    return 2 * np.sqrt(curvature)


def solve_step_size(
    integrator: type[Underdamped],
    friction: float,
    noise: float,
    curvature: float,
    uncorrected: Callable[[float], float],
    inflation: float = VARIANCE_INFLATION,
) -> float:
    """Step at which the one-dimensional law has a given variance inflation.

    Parameters
    ----------
    integrator : type
    friction : float
    noise, curvature : float
        Gradient variance and curvature in the direction where they are largest, in units of M.
    uncorrected : callable
        Share of the noise that is not corrected, as a function of the step.
    inflation : float
    """

    def excess(step_size: float) -> float:
        from_noise = uncorrected(step_size) * float(
            integrator.noise_share(step_size, friction, noise, curvature)
        )
        from_step = integrator.discretization_inflation(step_size, friction, curvature)
        return (1 + from_noise) * (1 + from_step) - 1 - inflation

    most = min(
        MOST_TIME_STEP / np.sqrt(curvature),
        0.999 * integrator.largest_step_size(friction, curvature),
    )
    if excess(most) <= 0:
        return float(most)
    least = 1e-15 * most
    if excess(least) > 0:
        raise ValueError(
            f"`friction` should correct for the noise of the gradient, but no step size does with "
            f"{friction:.3g} and a noise of {noise:.3g}. Give more `friction` (critical damping is "
            f"at {critical_friction(curvature):.3g}), or a larger `batch_size`."
        )
    return float(optimize.brentq(excess, least, most, xtol=1e-20, rtol=1e-10))


def relaxation_transitions(
    integrator: type[Underdamped], step_size: float, friction: float, curvature: float
) -> int:
    """Transitions after which the start counts 1/e in the mean, at most `MOST_THINNING`."""
    a, b = integrator.recurrence(step_size, friction, curvature)
    radius = float(np.abs(np.roots([1.0, -a, -b])).max())
    transitions = np.inf if radius >= 1 else -1 / np.log(radius) if radius > 0 else 0.0
    # At the largest default step the number is 1, up to rounding.
    return int(np.clip(np.ceil(transitions - 1e-6), 1, MOST_THINNING))


def check_correction(
    integrator: type[Underdamped],
    step_size: float,
    friction: float,
    variances: np.ndarray,
    curvatures: np.ndarray,
    steepest: float,
    or_else: str,
) -> None:
    """Make sure that friction allows more noise than the gradient has.

    Parameters
    ----------
    integrator : type
    step_size, friction : float
    variances, curvatures : numpy.ndarray, scalar or (d,)
        Gradient noise and curvature in the directions of the noise, in units of M.
    steepest : float
        λ_max(MH), 0 where not known.
    or_else : str
        Advice beside more rows a minibatch.

    Raises
    ------
    ValueError
        Where α I - β̂ is not positive definite, or the step is unstable.
    """
    stable = np.inf if steepest == 0 else integrator.largest_step_size(friction, steepest)
    if step_size >= stable:
        raise ModelError(
            f"`step_size` should be below {stable:.3g} to be stable with friction {friction:.3g} "
            f"and this preconditioner at the centre, but is {step_size:.3g}. Leave it out to have "
            "it computed."
        )

    def share(step_size: float, friction: float) -> float:
        return float(np.max(integrator.noise_share(step_size, friction, variances, curvatures)))

    noise_ratio = share(step_size, friction)
    if noise_ratio < 1:
        return
    largest = optimize.brentq(lambda step: share(step, friction) - 1, 1e-12 * step_size, step_size)
    remedy = f"a `step_size` below {largest:.3g} with this preconditioner"
    if share(step_size, 1e6 * friction) < 1:
        needed = optimize.brentq(
            lambda value: share(step_size, value) - 1, friction, 1e6 * friction
        )
        remedy = f"`friction` above {needed:.3g}, " + remedy
    raise ModelError(
        f"The friction is too small for the noise: at step size {step_size:.3g} the gradient has "
        f"{noise_ratio:.3g} times the noise that friction {friction:.3g} allows. "
        f"Use {remedy}, a larger `batch_size`, {or_else}."
    )
