"""The Gaussian nearest to a posterior whose mode is far from its mass, and tests of its fit."""

from __future__ import annotations

import warnings
from contextlib import suppress
from dataclasses import replace

import numpy as np
from scipy import linalg

from pymc_sgmcmc.errors import CenterWarning, ModelError
from pymc_sgmcmc.gradient_estimators.center_difference import find_center_difference
from pymc_sgmcmc.matrices import Dense, triangular_root
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.tuning.center import Center, center_at
from pymc_sgmcmc.tuning.curvature import (
    Curvature,
    coordinate_scale,
    dense_curvature,
    scaled_precision,
)
from pymc_sgmcmc.tuning.gaussian import (
    FEWEST_PAIRS,
    FLAT,
    MOST_ITERATIONS,
    Mismatch,
    MismatchAlongCoordinates,
    fit_gaussian,
    mismatch,
    mismatch_along_coordinates,
    steepest_curvature,
)
from pymc_sgmcmc.tuning.judge import ControlVariates, judge_at
from pymc_sgmcmc.tuning.mean_field import mean_field
from pymc_sgmcmc.tuning.mode_search import collapsed_coordinates
from pymc_sgmcmc.tuning.subsample import SUBSAMPLE_OPERATIONS, Subsample

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

LARGEST_RESPONSE = 9.0
"""A Gaussian is near the posterior where the variance of the posterior is at most this many times
its own, a factor of three between standard deviations. For the log scale of up to 200 group effects
that rows inform the variance is at most three times as large, and for a funnel 20 times."""

SMALL_FORCE = 0.25
"""The force that measures this variance moves the mean of a Gaussian by this many standard
deviations. It is a compromise between `CENTER_TOLERANCE`, the error of that mean, and the long tail
of a log scale, in which a large force moves the mean without bound."""

LARGEST_LOSS = 0.05
"""A Gaussian is near the posterior where at most this part of its points is outside of the support.
This part of a Gaussian lies more than 1.6 standard deviations from its mean on one side."""

MOST_RECENTERINGS = 6
"""The search for the nearest Gaussian is made with control variates at this many centres at most,
each the result before. Each costs as much as the curvature of many rows."""

STEPS_AROUND_CENTER = 10
"""The search makes at most this many steps around one centre, since control variates are good only
near it. A search that begins at the nearest Gaussian with independent coordinates needs about 5."""

MOST_NARROWINGS = 20
"""A Gaussian that is far from the posterior is made narrower at most this many times, which bounds
the time."""

LARGEST_NARROWING = 16.0
"""One narrowing divides the variance in a direction by at most this factor, since the curvature may
be smaller in the narrower Gaussian."""

EXPECTED_ITERATIONS = 20
"""Where a search on few rows ends far from the posterior, as with effects that these hardly inform,
another has as many rows as this number of steps can take in a bounded time."""

SPREAD_DRAWS = 50
"""The spread is measured at this many points. It is a compromise between its noise and its time."""

SMALLEST_CONDITIONAL = 1e-12
"""The root of a covariance is singular where the standard deviation of a coordinate, given those
before it, is less than this part of its marginal one. Rounding leaves about 1e-16 d."""


def mismatch_at(judge: ControlVariates, center: Center) -> Mismatch:
    """How the Gaussian of a centre differs from the posterior, whose control variates are there."""
    rng = np.random.default_rng(1735)
    return mismatch(judge.gradients, center.position, center.curvature.root.dense(), rng)


def mismatch_along_at(
    posterior: Posterior, subsample: Subsample, center: Center
) -> MismatchAlongCoordinates:
    """How the Gaussian of a centre differs along each coordinate, for long positions."""
    gradient = ControlVariates(subsample, center).gradient
    root, rng = center.curvature.root, np.random.default_rng(1735)
    with np.errstate(all="ignore"):
        return mismatch_along_coordinates(
            gradient, center.position, root, rng, posterior.difference_width
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
    judge: ControlVariates,
    mode: Center,
    start: np.ndarray,
    scale: np.ndarray,
    subsample: Subsample,
    large: Subsample,
) -> tuple[Center, Mismatch, bool]:
    """Centre at the mean of the Gaussian nearest to the posterior, and whether it is near.

    The search begins at the nearest Gaussian with independent coordinates, first from the mode, and
    where that ends at no Gaussian near the posterior, from the start of the search for the mode.

    Where no Gaussian is near, the centre is that of the fitted Gaussian, or of that at the mode,
    which differs least from the posterior. It is then narrowed, so that a step computed from it is
    stable. A Gaussian of zero width counts as far from the posterior.
    """

    def unlikeness(misfit: Mismatch, center: Center) -> tuple[bool, float]:
        collapsed = collapsed_coordinates(posterior, subsample, center, start)
        return bool(len(collapsed)), _unlikeness(misfit)

    def fits(misfit: Mismatch, center: Center, deviation: float) -> bool:
        collapsed, _ = unlikeness(misfit, center)
        return is_guide(misfit) and not collapsed and deviation <= LARGEST_SPREAD

    around = _around_mode(posterior, judge, mode, large)
    if around is not None and fits(*around):
        misfit, center, _ = around
        if response(posterior, center, misfit) <= LARGEST_RESPONSE:
            return center, misfit, True
    evaluations = EXPECTED_ITERATIONS * 2 * max(FEWEST_PAIRS, posterior.dimension)
    more = Subsample(posterior, evaluations, 4 * SUBSAMPLE_OPERATIONS)
    far: list[tuple[tuple[bool, float], Center]] = []
    begins = [(mode.position, mode.curvature.conditional_deviations), (start, scale)]
    collapsed = collapsed_coordinates(posterior, subsample, mode, start)
    # A search that begins at a scale of zero hardly leaves it.
    for position, deviations in begins[1:] if len(collapsed) else begins:
        try:
            position, _ = mean_field(posterior, position, deviations)
        except ValueError:  # The log density is not finite around the start.
            continue
        begin = None
        for rows in (subsample, more):
            try:
                center, misfit, deviation = _fitted(posterior, rows, large, position, begin)
            except (ValueError, linalg.LinAlgError):  # Gradient or curvature are not finite there.
                break
            near = fits(misfit, center, deviation)
            if near and response(posterior, center, misfit) <= LARGEST_RESPONSE:
                return center, misfit, True
            far.append((unlikeness(misfit, center), center))
            # More rows help neither where the log density bends upwards over the Gaussian nor where
            # the posterior is much wider.
            agree = misfit.scales[0] > FLAT and misfit.scales[-1] < MOST_UNLIKE_GAUSSIAN
            if rows.count == more.count or near or not agree:
                break
            position, begin = center.position, center
    far.insert(0, (unlikeness(mismatch_at(judge, mode), mode), mode))
    _, center = min(far, key=lambda candidate: candidate[0])
    if center is not mode:
        judge = judge_at(posterior, center, large)
    misfit = mismatch_at(judge, center)
    return _narrowed(posterior, judge, center, misfit), misfit, False


def _around_mode(
    posterior: Posterior, judge: ControlVariates, mode: Center, large: Subsample
) -> tuple[Mismatch, Center, float] | None:
    """Mismatch, centre and spread of the Gaussian that a search from the mode finds.

    The mean of a regression with many predictors lies a few standard deviations from the mode,
    where control variates of second order at the mode still hold, and few rows are enough. It is
    None without these, and where the search does not end within some steps.
    """
    if judge.excess is None:
        return None
    with suppress(ValueError, linalg.LinAlgError):
        root = mode.curvature.root.dense()
        fitted = fit_gaussian(judge.gradients, mode.position, root, steps=STEPS_AROUND_CENTER)
        if fitted.converged:
            center = center_at(posterior, fitted.mean, _curvature_of(fitted.root))
            center = replace(
                center, difference=find_center_difference(posterior, center.position, order=2)
            )
            judge = judge_at(posterior, center, large)
            return mismatch_at(judge, center), center, spread(judge, center)
    return None


def _fitted(
    posterior: Posterior,
    subsample: Subsample,
    large: Subsample,
    position: np.ndarray,
    begin: Center | None,
) -> tuple[Center, Mismatch, float]:
    """Centre of the Gaussian that a search from a position finds, its mismatch and spread.

    The search begins with the curvature at the position, or with that of a centre there.

    Raises
    ------
    ValueError
        Where gradient or curvature are not finite at the position or at the end of the search.
    numpy.linalg.LinAlgError
        Where the search ends at a singular Gaussian.
    """
    curvature, excess = _curvature_and_excess(posterior, subsample, large, position)
    center = begin or center_at(posterior, position, curvature)
    if subsample.weight == 1:
        centers, steps = 1, MOST_ITERATIONS
    else:
        centers, steps = MOST_RECENTERINGS, STEPS_AROUND_CENTER
    ended = False
    for number in range(centers):
        if number:
            _, excess = _curvature_and_excess(posterior, subsample, large, center.position)
        density = ControlVariates(subsample, center, excess)
        root, last = center.curvature.root.dense(), number == centers - 1
        settles = ended or not last or centers == 1
        fitted = fit_gaussian(
            density.gradients, center.position, root, settles=settles, steps=steps
        )
        center = center_at(posterior, fitted.mean, _curvature_of(fitted.root))
        if fitted.drifts:
            raise ModelError("The search for a Gaussian drifts.")
        if fitted.converged or last:
            misfit = mismatch_at(judge_at(posterior, center, large), center)
            if ended or is_guide(misfit, LARGEST_SHIFT / 3) or _unlikeness(misfit) == np.inf:
                break
            ended = fitted.converged
    return center, misfit, spread(density, center)


def _curvature_and_excess(
    posterior: Posterior, subsample: Subsample, large: Subsample, position: np.ndarray
) -> tuple[Curvature, np.ndarray | None]:
    """Curvature at a position, and by how much that of a subsample exceeds it."""
    scale = coordinate_scale(posterior, subsample, position)
    precision = scaled_precision(posterior, large, position, scale)
    with warnings.catch_warnings():
        # The density may bend upwards far from the mode, where the Gaussian need not.
        warnings.simplefilter("ignore", CenterWarning)
        curvature = dense_curvature(precision, scale)
    if subsample.count == large.count:
        return curvature, None
    excess = scaled_precision(posterior, subsample, position, scale) - precision
    return curvature, excess / np.outer(scale, scale)


def _unlikeness(misfit: Mismatch) -> float:
    """Distance of a Gaussian from the posterior: zero where they are equal."""
    worst = max(misfit.shift, float(np.abs(misfit.scales - 1).max()))
    # Without curvature in any direction the Gaussian ran away where the density is constant.
    return worst if np.isfinite(worst) and misfit.scales[-1] > FLAT else np.inf


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


def _narrowed(
    posterior: Posterior, judge: ControlVariates, center: Center, misfit: Mismatch
) -> Center:
    """Gaussian so narrow that the curvature at its points is not larger than its own."""
    for _ in range(MOST_NARROWINGS):
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
        misfit = mismatch_at(judge, center)
    root = center.curvature.root.dense()
    width = posterior.difference_width
    steepest = steepest_curvature(judge.gradients, center.position, root, width)
    return replace(center, curvature=_curvature_of(root / np.sqrt(max(1.0, steepest))))


def spread(density: ControlVariates, center: Center) -> float:
    """Standard deviation of the log density less that of a Gaussian, over the Gaussian.

    It is zero where the posterior is this Gaussian.
    """
    rng = np.random.default_rng(1748)
    root = center.curvature.root.dense()
    draws = rng.standard_normal((SPREAD_DRAWS, len(root)))
    values, _ = density.log_densities_and_gradients(center.position + draws @ root.T)
    return float((0.5 * (draws**2).sum(1) + values).std())


def response(posterior: Posterior, center: Center, misfit: Mismatch) -> float:
    r"""Variance of a posterior along one direction, divided by that of a Gaussian near it.

    In a funnel many Gaussians are near the posterior, each in its part of it, and points of one do
    not show the others. But a small force moves the mean from one to the next: with a linear
    function added to the log density, the mean moves by the covariance times its gradient. The mean
    of the nearest Gaussian with independent coordinates does so too, also where coordinates are
    correlated (Giordano, Broderick and Jordan 2018). The direction is that in which the trace of
    the curvature over the Gaussian changes most, such as the log scale of group effects.

    Parameters
    ----------
    posterior : Posterior
    center : Center
    misfit : Mismatch
        The mismatch at this centre.

    References
    ----------
    R. Giordano, T. Broderick and M. I. Jordan (2018). Covariances, robustness, and variational
    Bayes. *Journal of Machine Learning Research* 19 (51), 1-49.
    """
    root, precision = center.curvature.root, center.curvature.precision
    # Half the gradient of the trace, see `find_center._with_surroundings`, zero for a Gaussian.
    direction = misfit.gradient - root.T @ center.gradient
    direction = direction / max(float(np.linalg.norm(direction)), np.finfo(float).tiny)
    tilt = SMALL_FORCE * (precision @ (root @ direction))
    scale = center.curvature.conditional_deviations
    try:
        ahead, behind = (
            mean_field(posterior, center.position, scale, side * tilt)[0] for side in (1.0, -1.0)
        )
    except ValueError:  # The log density is not finite around the mean, so nothing is known.
        return 1.0
    return float(tilt @ (ahead - behind)) / (2 * SMALL_FORCE**2)
