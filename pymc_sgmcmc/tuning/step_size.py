"""Step size in closed form, from curvature, gradient noise and the law of the dynamics."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pymc_sgmcmc.batching import Batching
from pymc_sgmcmc.dynamics.law import EULER, Law
from pymc_sgmcmc.gradient_estimators.center_difference import reach
from pymc_sgmcmc.matrices import Matrix
from pymc_sgmcmc.tuning.center import Center
from pymc_sgmcmc.tuning.gaussian import NONE

VARIANCE_INFLATION = 0.05
"""By default the stationary variance may exceed that of the posterior by this relative amount. A
standard deviation is then too large by 2.5 %, which hardly shows beside the Monte Carlo error of a
few hundred draws."""


LARGEST_MOVE = 0.5
"""A single row moves a chain by at most this many posterior standard deviations. Larger moves lead
to where the noise is larger still: with control variates of second order it grows with the fourth
power of the distance from the centre."""


@dataclass(frozen=True)
class StepSizeChoice:
    r"""A step size in closed form, and the noise and curvature from which it was computed.

    Attributes
    ----------
    step_size : float
        That of the law, see `Law.step_size`.
    error : float
        The relative error of the variance that it was computed for.
    longest : float
        No step is longer, whatever the stated error: so that no single row moves a chain far, and
        so that it is stable where the posterior is steepest within reach of a long run.
    largest_force : float
        Gradients are hardly ever larger, in units of the preconditioner. It is infinite where it is
        not known that a Gaussian is near the posterior.
    noise : float
        :math:`\lambda_{\max}(MV)`, gradient noise in units of curvature.
    curvature, smallest_curvature : float
        :math:`\lambda_{\max}(MH)` and :math:`\lambda_{\min}(MH)`.
    batch_size_needed : int
        Rows a minibatch with which noise and curvature would limit the step equally.
    """

    step_size: float
    error: float
    longest: float
    largest_force: float
    noise: float
    curvature: float
    smallest_curvature: float
    batch_size_needed: int


def choose_step_size(
    center: Center,
    preconditioner_root: Matrix,
    batching: Batching,
    *,
    row_noise: float,
    noise_factors: tuple[float, float] = (1.0, 0.0),
    inflation: float = VARIANCE_INFLATION,
    law: Law = EULER,
    largest: float = 0.0,
) -> StepSizeChoice:
    r"""Largest step whose stationary variance exceeds the posterior's by at most a given fraction.

    Parameters
    ----------
    center, batching
    preconditioner_root : Matrix
        The matrix L in M = L Lᵀ.
    row_noise : float
        Largest eigenvalue of L⊤ C L for the covariance C of the rows that minibatches are drawn
        from, see `RowNoise`.
    noise_factors : tuple of float
        Factors of the gradient estimator, see `GradientEstimator.noise_factors`.
    inflation : float
        The relative error :math:`\delta` of the variance.
    law : Law
    largest : float
        The largest gradient of a row, see `RowNoise`.
    """
    n_rows, batch_size = batching.n_rows, batching.batch_size
    curvatures = center.curvature.relative_to(preconditioner_root)
    curvature, smallest = float(curvatures.max()), float(curvatures.min())
    of_noise, of_curvature = noise_factors
    factor = batching.variance_factor
    noise = of_noise * n_rows**2 / batch_size * factor * row_noise + of_curvature * curvature
    longest = law.largest_step_size(curvature * center.steepest)
    if batch_size < n_rows:
        longest = min(longest, largest_step_of_rows(largest * curvature, batch_size))
    step_size = min(law.step_size(noise, curvature, inflation), longest)
    # Solve N²/n c(n) λ = λ_max(MH) for n, with c = (N - n)/(N - 1) without replacement.
    ratio = of_noise * n_rows**2 * row_noise / curvature
    ratio += of_curvature * batch_size / max(factor, np.finfo(float).tiny)
    if batching.without_replacement:
        ratio = ratio * n_rows / (n_rows - 1 + ratio)
    needed = int(np.clip(np.ceil(ratio), 1, n_rows))
    return StepSizeChoice(
        float(step_size),
        inflation,
        float(longest),
        _largest_force(center, curvature, noise),
        float(noise),
        curvature,
        smallest,
        needed,
    )


def _largest_force(center: Center, curvature: float, noise: float) -> float:
    """Length that gradients have where a Gaussian vector of this curvature and noise is longest.

    The mean square of a gradient is the mean curvature over the posterior (Stein's identity).
    """
    if not center.is_guide or center.misfit is NONE:
        return np.inf
    over_posterior = curvature * max(1.0, float(center.misfit.scales[-1]))
    return reach(len(center.position)) * float(np.sqrt(over_posterior + noise))


def largest_step_of_rows(largest: float, batch_size: int) -> float:
    """Largest step with which no single row moves the chain far, in units of the curvature."""
    return 2 * LARGEST_MOVE * batch_size / largest if largest else np.inf
