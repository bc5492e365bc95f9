"""Step size of Langevin dynamics in closed form, from curvature and gradient noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pymc_sgmcmc.batching import Batching
from pymc_sgmcmc.linear_algebra import apply_to_rows, largest_mean_square
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.tuning.center import Center, laplace_draws
from pymc_sgmcmc.tuning.subsample import Subsample

VARIANCE_INFLATION = 0.05
"""Relative excess of the stationary variance that the default step size allows."""

NOISE_ROWS = 10_000
"""Most rows from whose gradients the gradient noise is computed, one by one."""

NOISE_ELEMENTS = 20_000_000
"""Bound on rows times dimension there: 160 MB."""

NOISE_POINTS = 1000
"""Points around the centre, at most, among which those rows are divided. The noise grows with the
squared distance, so that one far point would speak for all rows that it has."""

ROWS_A_POINT = 8
"""Rows at each of these points, at least: their mean is subtracted."""


@dataclass(frozen=True)
class StepSizeChoice:
    r"""A step size in closed form, and what it was computed from.

    Attributes
    ----------
    step_size : float
        :math:`h = 4 \delta / (\lambda_{\max}(MV) + \lambda_{\max}(MH))`.
    noise : float
        :math:`\lambda_{\max}(MV)`, gradient noise in units of curvature.
    curvature : float
        :math:`\lambda_{\max}(MH)`.
    batch_size_needed : int
        Rows a minibatch with which noise and curvature would limit the step alike.
    """

    step_size: float
    noise: float
    curvature: float
    batch_size_needed: int


def choose_step_size(
    posterior: Posterior,
    center: Center,
    preconditioner_root: np.ndarray,
    batching: Batching,
    *,
    deviations: np.ndarray,
    noise_factors: tuple[float, float] = (1.0, 0.0),
    inflation: float = VARIANCE_INFLATION,
) -> StepSizeChoice:
    r"""Largest step whose stationary variance exceeds the posterior's by a given fraction.

    Parameters
    ----------
    posterior, center, batching
    preconditioner_root : numpy.ndarray
        L with M = L Lᵀ: scalar, diagonal or dense.
    deviations : numpy.ndarray, shape (rows, d)
        From `row_deviations`.
    noise_factors : tuple of float
        Of the gradient estimator, see `GradientEstimator.noise_factors`.
    inflation : float
        :math:`\delta`, relative.
    """
    # L⊤g: gradients in coordinates in which M = I.
    row_covariance = largest_mean_square(apply_to_rows(preconditioner_root, deviations))
    n_rows, batch_size = posterior.n_rows, batching.batch_size
    curvature = float(center.curvature.relative_to(preconditioner_root).max())
    of_noise, of_curvature = noise_factors
    factor = batching.variance_factor
    noise = of_noise * n_rows**2 / batch_size * factor * row_covariance + of_curvature * curvature
    step_size = 4 * inflation / (noise + curvature)
    # Solve N²/n c(n) λ = λ_max(MH) for n, with c = (N - n)/(N - 1) without replacement.
    ratio = of_noise * n_rows**2 * row_covariance / curvature
    ratio += of_curvature * batch_size / max(factor, np.finfo(float).tiny)
    if batching.without_replacement:
        ratio = ratio * n_rows / (n_rows - 1 + ratio)
    needed = int(np.clip(np.ceil(ratio), 1, n_rows))
    return StepSizeChoice(float(step_size), float(noise), float(curvature), needed)


def row_deviations(
    posterior: Posterior,
    center: Center,
    *,
    control_variate: bool,
    joint_draws: Sequence[Mapping[str, np.ndarray]] | None = None,
) -> np.ndarray:
    r"""Gradients of single rows less their mean, shape (rows, d), for a random set of rows.

    Their mean outer product estimates C, the covariance over rows, so that the covariance of a
    gradient estimate from n rows is :math:`V = \tfrac{N^2}{n} c\, C`.

    Parameters
    ----------
    posterior, center
    control_variate : bool
        Whether the gradient is the plain one, whose rows are taken at the centre, or that of
        Baker et al., whose rows are differences to the centre, averaged over `joint_draws`.
    joint_draws : sequence of mappings, optional
        Points at which to take the noise of a control variate, with values of the variables
        outside the position too, whose moves add to it; `laplace_draws` where not given.
    """
    subsample = Subsample(posterior)
    available = len(subsample.rows[0])
    rng = np.random.default_rng(2018)
    # Many rows: predictors with heavy tails put most of the noise into few of them.
    most = int(np.clip(NOISE_ELEMENTS // posterior.dimension, ROWS_A_POINT, NOISE_ROWS))
    numbers = rng.permutation(available)[:most]
    if not control_variate:
        gradients = subsample.single_row_gradients(center.position, numbers)
        return gradients - gradients.mean(0)
    count = int(np.clip(len(numbers) // ROWS_A_POINT, 1, NOISE_POINTS))
    points = joint_draws or laplace_draws(posterior, center, count)
    groups = np.array_split(numbers, min(count, len(points)))
    others = {name: np.array(shared.get_value()) for name, shared in posterior.others.items()}
    differences = []
    for group, point in zip(groups, points, strict=False):
        posterior.set_others({**others, **point})
        difference = subsample.single_row_gradients(posterior.layout.ravel(point), group)
        posterior.set_others(others)
        difference -= subsample.single_row_gradients(center.position, group)
        # Unbiased: some of the variance goes into the mean of so few rows.
        bessel = np.sqrt(len(group) / max(1, len(group) - 1))
        differences.append(bessel * (difference - difference.mean(0)))
    return np.concatenate(differences)
