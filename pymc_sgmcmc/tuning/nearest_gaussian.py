"""The Gaussian nearest to a posterior whose mode is no guide, and what says that it is near."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from scipy import linalg

from pymc_sgmcmc.matrices import triangular_root
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
from pymc_sgmcmc.tuning.subsample import SUBSAMPLE_OPERATIONS, Subsample

MOST_UNLIKE_GAUSSIAN = 3.0
"""Factor by which the fall of the log density around the centre may differ from a Gaussian's,
and the mean curvature over it from that at the centre."""

LARGEST_SHIFT = 0.3
"""Distance of a Gaussian's mean from a better one, in standard deviations, that is small."""

LARGEST_SPREAD = 5.0
"""Standard deviation of the log density over a Gaussian, less its own, that is small: one of 200
group effects and their scale has about one."""

LARGEST_LOSS = 0.05
"""Part of a Gaussian outside of the posterior's support that is small."""

MOST_RECENTERINGS = 4
"""Passes over the data for the Gaussian nearest to the posterior, at most."""

MOST_NARROWINGS = 20
"""Times that a Gaussian that is far from the posterior is made narrower, at most."""

LARGEST_NARROWING = 16.0
"""Factor by which its variance in a direction is then divided at once, at most."""

EXPECTED_ITERATIONS = 20
"""Steps of the search for that Gaussian for which its rows are reckoned."""

EVIDENCE_DRAWS = 50
"""Points at which the log density is averaged to choose between two Gaussians."""

SMALLEST_CONDITIONAL = 1e-12
"""Standard deviation of a coordinate given those before it, over that of its own, from which the
root of a covariance is not singular: rounding leaves some 1e-16 d."""


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
    return mismatch(gradient, center.position, center.curvature.root, rng)


def mismatch_along_at(
    posterior: Posterior, subsample: Subsample, center: Center
) -> MismatchAlongCoordinates:
    """The same along each coordinate, of long positions."""
    gradient = gradient_around(posterior, subsample, center)
    root, rng = center.curvature.root, np.random.default_rng(1735)
    with np.errstate(all="ignore"):
        return mismatch_along_coordinates(
            gradient, center.position, root, rng, difference_width(posterior)
        )


def is_guide(
    found: Mismatch | MismatchAlongCoordinates, largest_shift: float = LARGEST_SHIFT
) -> bool:
    """Whether a Gaussian is near the posterior."""
    if not (found.shift <= largest_shift and found.lost <= LARGEST_LOSS):
        return False
    scales = found.scales
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

    Where none is near it is the least unlike of those found and that at the mode, narrowed so that
    a step that is computed from it is stable. One of no width is near nothing.
    """

    def unlikeness(found: Mismatch, center: Center) -> tuple[bool, float]:
        collapsed = collapsed_coordinates(posterior, subsample_of_mode, center, start)
        return bool(len(collapsed)), _unlikeness(found)

    pairs = 2 * max(FEWEST_PAIRS, posterior.dimension)
    subsample = Subsample(posterior, pairs * EXPECTED_ITERATIONS, 4 * SUBSAMPLE_OPERATIONS)
    # Where the mode has no curvature, a search that begins there may not leave it.
    begins = [(mode.position, mode.curvature.root), (start, np.diag(scale))]
    near: list[tuple[float, Center]] = []
    far = [(unlikeness(mismatch_at(posterior, judge, mode), mode), mode)]
    for position, root in begins:
        center: Center | None = None
        settles = True
        for _ in range(MOST_RECENTERINGS):
            # Rows that are left out move the mean: control variates at the last one.
            gradient = (
                subsample.gradient
                if center is None
                else gradient_around(posterior, subsample, center)
            )
            fitted = fit_gaussian(gradient, position, root, settles=settles)
            position, root, settles = fitted.mean, fitted.root, fitted.converged
            try:
                center = center_at(posterior, position, _curvature_of(root))
            except (ValueError, linalg.LinAlgError):  # nothing finite there
                center = None
                break
            if subsample.weight == 1:
                break
            found = mismatch_at(posterior, judge, center)
            if is_guide(found, LARGEST_SHIFT / 3) or not found.shift <= HOPELESS_SHIFT:
                break
        if center is None:
            continue
        found = mismatch_at(posterior, judge, center)
        how_far = unlikeness(found, center)
        bound, spread = evidence(subsample, center)
        if is_guide(found) and not how_far[0] and spread <= LARGEST_SPREAD:
            near.append((bound, center))
        else:
            far.append((how_far, center))
    if near:
        return max(near, key=lambda one: one[0])[1], True
    return _narrowed(posterior, judge, min(far, key=lambda one: one[0])[1]), False


def _unlikeness(found: Mismatch) -> float:
    """How far a Gaussian is from the posterior: zero where it is right."""
    worst = max(found.shift, float(np.abs(found.scales - 1).max()))
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
    return Curvature(inverse.T @ inverse, lower @ lower.T, lower)


def _narrowed(posterior: Posterior, judge: Subsample, center: Center) -> Center:
    """Gaussian so narrow that nowhere in it the curvature is larger than its own."""
    for _ in range(MOST_NARROWINGS):
        found = mismatch_at(posterior, judge, center)
        root = center.curvature.root
        if np.isfinite(found.scales).all():
            values, vectors = linalg.eigh(found.precision)
            values = np.abs(values)
            if values.max() < MOST_UNLIKE_GAUSSIAN:
                break
            root = root @ (vectors * np.clip(values, 1.0, LARGEST_NARROWING) ** -0.5) @ vectors.T
        else:
            root = root / 2  # points outside of the support
        center = replace(center, curvature=_curvature_of(root))
    root = center.curvature.root
    steepest = steepest_curvature(
        gradient_around(posterior, judge, center),
        center.position,
        root,
        np.random.default_rng(1953),
        difference_width(posterior),
    )
    return replace(center, curvature=_curvature_of(root / np.sqrt(max(1.0, steepest))))


def evidence(subsample: Subsample, center: Center) -> tuple[float, float]:
    """What a Gaussian says of the log evidence, but for a constant, and how unsure it is.

    The mean over its draws of the log density less its own is a bound (Jordan et al. 1999). Their
    standard deviation is zero where the posterior is this Gaussian.
    """
    rng = np.random.default_rng(1748)
    root = center.curvature.root
    draws = rng.standard_normal((EVIDENCE_DRAWS, len(root)))
    # The mode of a subsample is standard deviations from that of all rows.
    balance = root.T @ (center.gradient - subsample.gradient(center.position))
    log_weights = 0.5 * (draws**2).sum(1) + draws @ balance
    log_weights += [
        subsample.log_density_and_gradient(center.position + root @ draw)[0] for draw in draws
    ]
    bound = np.mean(log_weights - 0.5 * (draws**2).sum(1)) + np.log(np.abs(np.diag(root))).sum()
    return float(bound), float(log_weights.std())
