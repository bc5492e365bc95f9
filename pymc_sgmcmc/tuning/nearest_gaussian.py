"""The Gaussian nearest to a posterior whose mode is far from its mass, and tests of its fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from scipy import linalg

from pymc_sgmcmc.matrices import Dense, triangular_root
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.tuning.center import Center, center_at
from pymc_sgmcmc.tuning.curvature import (
    Curvature,
    difference_width,
)
from pymc_sgmcmc.tuning.gaussian import (
    FEWEST_PAIRS,
    HOPELESS_SHIFT,
    Mismatch,
    MismatchAlongCoordinates,
    fit_gaussian,
    mismatch,
    mismatch_along_coordinates,
    steepest_curvature,
)
from pymc_sgmcmc.tuning.mode_search import collapsed_coordinates
from pymc_sgmcmc.tuning.subsample import SUBSAMPLE_OPERATIONS, SUBSAMPLE_ROWS, Subsample

MOST_UNLIKE_GAUSSIAN = 3.0
"""A Gaussian is near the posterior where the mean curvature over it differs from its own by less
than this factor in each direction. Standard deviations then differ by less than a factor of 1.8,
with which a preconditioner still works well."""

LARGEST_SHIFT = 0.3
"""A Gaussian is near the posterior where its mean is at most this many standard deviations from a
better one. The mode of a mildly skewed posterior passes, and that of many group effects does
not."""

LARGEST_SPREAD = 5.0
"""A Gaussian is near the posterior where the log density less its own has at most this standard
deviation over it. For 200 group effects and their scale the standard deviation is about one."""

LARGEST_LOSS = 0.05
"""A Gaussian is near the posterior where at most this part of its points is outside of the support.
This part of a Gaussian lies more than 1.6 standard deviations from its mean on one side."""

MOST_RECENTERINGS = 4
"""The search for the nearest Gaussian is repeated with control variates at its last result at most
this many times. Each time costs one pass over the data."""

MOST_NARROWINGS = 20
"""A Gaussian that is far from the posterior is made narrower at most this many times, which bounds
the time."""

LARGEST_NARROWING = 16.0
"""One narrowing divides the variance in a direction by at most this factor, since the curvature may
be smaller in the narrower Gaussian."""

EXPECTED_ITERATIONS = 20
"""The number of rows for the search of the nearest Gaussian is chosen for this number of steps, so
that its time is bounded."""

EVIDENCE_DRAWS = 50
"""Two Gaussians are compared by the log density at this many points of each. It is a compromise
between the noise of the comparison and its time."""

SMALLEST_CONDITIONAL = 1e-12
"""The root of a covariance is singular where the standard deviation of a coordinate, given those
before it, is less than this part of its marginal one. Rounding leaves about 1e-16 d."""


LARGEST_JUDGE_ERROR = 0.05
"""The rows that judge a Gaussian leave an error of at most this many standard deviations in a
gradient over it, a sixth of `LARGEST_SHIFT`, where they can be afforded."""


def judge_of(posterior: Posterior, center: Center) -> Subsample:
    """Rows with which to compare a posterior and Gaussians near a centre.

    Control variates at the centre leave the noise of the differences of the rows' gradients, which
    sets the number of rows. It is measured on as many rows as can be afforded, since a few of them
    may cause most of it.
    """
    affordable = Subsample(posterior, evaluations=8 * max(FEWEST_PAIRS, posterior.dimension))
    if affordable.count <= SUBSAMPLE_ROWS:
        return affordable
    rng, root = np.random.default_rng(1736), center.curvature.root
    shift = root @ rng.standard_normal(posterior.dimension)
    squares = np.zeros((2, posterior.dimension))
    for piece in posterior.pieces(affordable.rows, posterior.dimension):
        at_center = posterior.row_gradients(center.position, piece)
        for sums, side in zip(squares, (1, -1), strict=True):
            differences = posterior.row_gradients(center.position + side * shift, piece)
            sums += (((differences - at_center) @ root) ** 2).sum(0)
    # The error of a sum over all N rows from n of them is at most N rms / sqrt(n).
    largest = np.max(squares) / affordable.count
    rows = posterior.n_rows**2 * largest / LARGEST_JUDGE_ERROR**2
    if not rows < affordable.count:
        return affordable
    return Subsample(posterior, count=int(rows))


def gradient_around(
    posterior: Posterior, subsample: Subsample, center: Center
) -> Callable[[np.ndarray], np.ndarray]:
    """Gradient of the log posterior from a subsample, with control variates at a centre."""
    _, at_center = posterior.log_likelihood_and_gradient(center.position, subsample.rows)
    correction = center.likelihood_gradient - subsample.weight * at_center

    def gradient(position: np.ndarray) -> np.ndarray:
        return subsample.gradient(position) + correction

    return gradient


def mismatch_at(posterior: Posterior, subsample: Subsample, center: Center) -> Mismatch:
    """How the Gaussian of a centre differs from the posterior."""
    rng = np.random.default_rng(1735)
    gradient = gradient_around(posterior, subsample, center)
    return mismatch(gradient, center.position, center.curvature.root.dense(), rng)


def mismatch_along_at(
    posterior: Posterior, subsample: Subsample, center: Center
) -> MismatchAlongCoordinates:
    """How the Gaussian of a centre differs along each coordinate, for long positions."""
    gradient = gradient_around(posterior, subsample, center)
    root, rng = center.curvature.root, np.random.default_rng(1735)
    with np.errstate(all="ignore"):
        return mismatch_along_coordinates(
            gradient, center.position, root, rng, difference_width(posterior)
        )


def is_guide(
    misfit: Mismatch | MismatchAlongCoordinates, largest_shift: float = LARGEST_SHIFT
) -> bool:
    """Whether a Gaussian is near the posterior."""
    if not (misfit.shift <= largest_shift and misfit.lost <= LARGEST_LOSS):
        return False
    scales = misfit.scales
    return bool(scales[0] > 1 / MOST_UNLIKE_GAUSSIAN and scales[-1] < MOST_UNLIKE_GAUSSIAN)


def nearest_gaussian(
    posterior: Posterior,
    judge: Subsample,
    mode: Center,
    start: np.ndarray,
    scale: np.ndarray,
    subsample_of_mode: Subsample,
) -> tuple[Center, bool]:
    """Centre at the mean of the Gaussian nearest to the posterior, and whether it is near.

    Where no Gaussian is near, the centre is that of the fitted Gaussian, or of that at the mode,
    which differs least from the posterior. It is then narrowed, so that a step computed from it is
    stable. A Gaussian of zero width counts as far from the posterior.
    """

    def unlikeness(misfit: Mismatch, center: Center) -> tuple[bool, float]:
        collapsed = collapsed_coordinates(posterior, subsample_of_mode, center, start)
        return bool(len(collapsed)), _unlikeness(misfit)

    pairs = 2 * max(FEWEST_PAIRS, posterior.dimension)
    subsample = Subsample(posterior, pairs * EXPECTED_ITERATIONS, 4 * SUBSAMPLE_OPERATIONS)
    # A search that begins at a mode without curvature may not leave it.
    begins = [(mode.position, mode.curvature.root.dense()), (start, np.diag(scale))]
    near: list[tuple[float, Center]] = []
    far = [(unlikeness(mismatch_at(posterior, judge, mode), mode), mode)]
    for position, root in begins:
        center: Center | None = None
        settles = True
        for _ in range(MOST_RECENTERINGS):
            # Control variates at the last mean correct for the rows that are left out.
            gradient = (
                subsample.gradient
                if center is None
                else gradient_around(posterior, subsample, center)
            )
            fitted = fit_gaussian(gradient, position, root, settles=settles)
            position, root, settles = fitted.mean, fitted.root, fitted.converged
            try:
                center = center_at(posterior, position, _curvature_of(root))
            except (ValueError, linalg.LinAlgError):  # Gradient or curvature are not finite there.
                center = None
                break
            if subsample.weight == 1:
                break
            misfit = mismatch_at(posterior, judge, center)
            if is_guide(misfit, LARGEST_SHIFT / 3) or not misfit.shift <= HOPELESS_SHIFT:
                break
        if center is None:
            continue
        misfit = mismatch_at(posterior, judge, center)
        rank = unlikeness(misfit, center)
        bound, spread = evidence(subsample, center)
        if is_guide(misfit) and not rank[0] and spread <= LARGEST_SPREAD:
            near.append((bound, center))
        else:
            far.append((rank, center))
    if near:
        return max(near, key=lambda candidate: candidate[0])[1], True
    return _narrowed(posterior, judge, min(far, key=lambda candidate: candidate[0])[1]), False


def _unlikeness(misfit: Mismatch) -> float:
    """Distance of a Gaussian from the posterior: zero where they are equal."""
    worst = max(misfit.shift, float(np.abs(misfit.scales - 1).max()))
    return worst if np.isfinite(worst) else np.inf


def _curvature_of(root: np.ndarray) -> Curvature:
    """Curvature whose inverse has a given root, of any shape.

    Raises
    ------
    numpy.linalg.LinAlgError
        Where the root is singular or not finite.
    """
    if not np.isfinite(root).all():
        raise linalg.LinAlgError("The root of a covariance is not finite.")
    lower = triangular_root(root)
    deviations = np.sqrt((lower**2).sum(1))
    if not (np.abs(np.diag(lower)) > SMALLEST_CONDITIONAL * deviations).all():
        raise linalg.LinAlgError("The root of a covariance is singular.")
    inverse = linalg.solve_triangular(lower, np.eye(len(lower)), lower=True)
    return Curvature(Dense(inverse.T @ inverse), Dense(lower @ lower.T), Dense(lower))


def _narrowed(posterior: Posterior, judge: Subsample, center: Center) -> Center:
    """Gaussian so narrow that the curvature at its points is not larger than its own."""
    for _ in range(MOST_NARROWINGS):
        misfit = mismatch_at(posterior, judge, center)
        root = center.curvature.root.dense()
        if np.isfinite(misfit.scales).all():
            values, vectors = linalg.eigh(misfit.precision)
            values = np.abs(values)
            if values.max() < MOST_UNLIKE_GAUSSIAN:
                break
            root = root @ (vectors * np.clip(values, 1.0, LARGEST_NARROWING) ** -0.5) @ vectors.T
        else:
            root = root / 2  # Some points are outside of the support.
        center = replace(center, curvature=_curvature_of(root))
    root = center.curvature.root.dense()
    steepest = steepest_curvature(
        gradient_around(posterior, judge, center),
        center.position,
        root,
        np.random.default_rng(1953),
        difference_width(posterior),
    )
    return replace(center, curvature=_curvature_of(root / np.sqrt(max(1.0, steepest))))


def evidence(subsample: Subsample, center: Center) -> tuple[float, float]:
    """Bound on the log evidence from a Gaussian, up to a constant, and its standard deviation.

    The bound is the mean over draws of the log density less that of the Gaussian (Jordan et al.
    1999). The standard deviation of this difference is zero where the posterior is this Gaussian.
    """
    rng = np.random.default_rng(1748)
    root = center.curvature.root.dense()
    draws = rng.standard_normal((EVIDENCE_DRAWS, len(root)))
    # The mode of a subsample is several standard deviations from that of all rows.
    balance = root.T @ (center.gradient - subsample.gradient(center.position))
    log_weights = 0.5 * (draws**2).sum(1) + draws @ balance
    log_weights += [
        subsample.log_density_and_gradient(center.position + root @ draw)[0] for draw in draws
    ]
    bound = np.mean(log_weights - 0.5 * (draws**2).sum(1)) + np.log(np.abs(np.diag(root))).sum()
    return float(bound), float(log_weights.std())
