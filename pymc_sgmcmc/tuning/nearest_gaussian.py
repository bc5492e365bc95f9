"""The Gaussian nearest to a posterior whose mode is far from its mass, and tests of its fit."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import numpy as np
from scipy import linalg

from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.gradient_estimators.center_difference import find_center_difference
from pymc_sgmcmc.matrices import Dense, Matrix, triangular_root
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.stages import log
from pymc_sgmcmc.tuning.center import Center, center_at
from pymc_sgmcmc.tuning.curvature import (
    Curvature,
    coordinate_scale,
    curvature_at,
    diagonal_curvature,
    scaled_precision,
)
from pymc_sgmcmc.tuning.gaussian import (
    FARTHEST,
    FEWEST_PAIRS,
    FLAT,
    LARGEST_NARROWING,
    LARGEST_SHIFT,
    MOST_ITERATIONS,
    MOST_UNLIKE_GAUSSIAN,
    NONE,
    PAIRS_ALONG_COORDINATES,
    Mismatch,
    MismatchAlongCoordinates,
    fit_gaussian,
    is_guide,
    mismatch,
    mismatch_along_coordinates,
    steepest_curvature,
)
from pymc_sgmcmc.tuning.judge import ControlVariates, judge_at, with_steepest
from pymc_sgmcmc.tuning.mean_field import mean_field
from pymc_sgmcmc.tuning.mode_search import CENTER_TOLERANCE, collapsed_coordinates
from pymc_sgmcmc.tuning.subsample import SUBSAMPLE_OPERATIONS, Subsample

LARGEST_SPREAD = 5.0
"""A Gaussian is near the posterior where the log density less its own has at most this standard
deviation over it, which is larger where the posterior is a curve. For 200 group effects and their
scale the standard deviation is about one."""

SMALL_FORCE = 0.25
"""The force that measures the variance along a direction moves the mean of a Gaussian by this many
standard deviations, and half of them where that moves it far away, while it is more than
`CENTER_TOLERANCE`, the error of that mean."""

STEPS_AROUND_CENTER = 10
"""The search for the nearest Gaussian makes at most this many steps with control variates around
one centre, since they are good only near it. A search that begins at the nearest Gaussian with
independent coordinates needs about 5."""


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


def nearest_gaussian(
    posterior: Posterior,
    mode: Center,
    start: np.ndarray,
    scale: np.ndarray,
    subsample: Subsample,
    large: Subsample,
) -> Center:
    """Centre of a short position: the mode, or the mean of the Gaussian nearest to the posterior.

    The search for that begins at the nearest Gaussian with independent coordinates, first from the
    mode, and where that ends at no Gaussian near the posterior, from the start of the search for
    the mode; in the other order where the mode is too far away. Where no Gaussian is near, the
    centre is that which differs least from the posterior. A Gaussian of zero width counts as far
    from the posterior.

    Parameters
    ----------
    posterior : Posterior
    mode : Center
    start, scale : numpy.ndarray, shape (d,)
        Where the search for the mode began, and rough standard deviations there.
    subsample, large : Subsample
        Rows for searches, and more of them for the curvature.
    """
    judge = judge_at(posterior, mode, large)
    collapsed = collapsed_coordinates(posterior, subsample, mode, start)
    could_be_near = not (collapsed or mode.curvature.is_flat)
    if could_be_near and _may_be_guide(posterior, subsample, judge, mode):
        mode = replace(mode, misfit=mismatch_at(judge, mode))
        if is_guide(mode.misfit):
            return _with_surroundings(judge, mode)
    with np.errstate(all="ignore"):
        found, near = _nearest(posterior, judge, mode, start, scale, subsample, large)
    if not near:
        return replace(found, is_guide=False, collapsed=collapsed)
    distance = np.abs((found.position - mode.position) / found.curvature.standard_deviations)
    log.info(
        "The posterior mode is up to %.2g standard deviations (%s) from the mean of the nearest "
        "Gaussian, so centre and curvature are those of this Gaussian",
        distance.max(),
        posterior.labels[int(distance.argmax())],
    )
    return _with_surroundings(judge, found)


def _may_be_guide(
    posterior: Posterior, subsample: Subsample, judge: ControlVariates, center: Center
) -> bool:
    """Whether a few rows and points leave it open that the Gaussian of a mode is near the mass."""
    pairs = max(FEWEST_PAIRS, posterior.dimension)
    if judge.subsample.count * pairs <= 2 * subsample.count * PAIRS_ALONG_COORDINATES:
        return True  # The comparison itself takes no longer.
    return mismatch_along_at(posterior, subsample, center).shift <= LARGEST_SHIFT


def _with_surroundings(judge: ControlVariates, center: Center) -> Center:
    r"""Centre with the shift of the mean of a chain whose variances are too large, and steepness.

    The mean of :math:`\nabla \log \pi` over :math:`N(m, \Lambda)`, less its value at m, is half
    the third derivatives times Λ. A chain whose covariance exceeds Λ by δΛ has δ times this mean
    gradient, which balances :math:`H` times the shift of its mean.
    """
    root = center.curvature.root
    balance = center.misfit.gradient - root.T @ center.gradient
    bend = root @ balance / center.curvature.standard_deviations
    return with_steepest(replace(center, bend=bend), judge)


def _nearest(
    posterior: Posterior,
    judge: ControlVariates,
    mode: Center,
    start: np.ndarray,
    scale: np.ndarray,
    subsample: Subsample,
    large: Subsample,
) -> tuple[Center, bool]:
    """Centre with the nearest Gaussian, or that which differs least, and whether it is near."""

    def collapsed(center: Center) -> tuple[int, ...]:
        return collapsed_coordinates(posterior, subsample, center, start)

    def unlikeness(center: Center) -> tuple[bool, float]:
        return bool(collapsed(center)), _unlikeness(center.misfit)

    def is_near(center: Center, density: ControlVariates) -> bool:
        return (
            is_guide(center.misfit)
            and not collapsed(center)
            and spread(density, center) <= LARGEST_SPREAD
            and response(posterior, center) <= MOST_UNLIKE_GAUSSIAN**2
        )

    if mode.misfit is NONE:
        mode = replace(mode, misfit=mismatch_at(judge, mode))
    around = _around_mode(posterior, judge, mode, large)
    if around is not None and is_near(*around):
        return around[0], True
    # As many rows as so many steps take in a bounded time.
    evaluations = STEPS_AROUND_CENTER * 2 * max(FEWEST_PAIRS, posterior.dimension)
    more = Subsample(posterior, evaluations, 2 * SUBSAMPLE_OPERATIONS)
    far = [mode]
    begins = [(mode.position, mode.curvature.conditional_deviations), (start, scale)]
    if collapsed(mode):
        begins = begins[1:]  # A search that begins at a scale of zero hardly leaves it.
    elif not (mode.came_to_rest and _is_within_reach(mode.misfit)):
        begins.reverse()
    for position, deviations in begins:
        try:
            position, deviations = mean_field(posterior, position, deviations)
        except ValueError:  # The log density is not finite around the start.
            continue
        begin = None
        for rows in (subsample, more):
            try:
                center, density = _fitted(posterior, rows, large, position, deviations, begin)
            except (ValueError, linalg.LinAlgError):  # Gradient or curvature are not finite there.
                break
            if is_near(center, density):
                return center, True
            far.append(center)
            # More rows help neither where the log density bends upwards over the Gaussian nor where
            # the posterior is much wider, or not of its form.
            scales = center.misfit.scales
            agree = scales[0] > FLAT and scales[-1] < MOST_UNLIKE_GAUSSIAN
            if rows.count == more.count or is_guide(center.misfit) or not agree:
                break
            position, begin = center.position, center
    # Along a flat direction rounding decides where searches end.
    return min(far[:1] if mode.curvature.has_flat_direction else far, key=unlikeness), False


def _around_mode(
    posterior: Posterior, judge: ControlVariates, mode: Center, large: Subsample
) -> tuple[Center, ControlVariates] | None:
    """Centre of the Gaussian that a search from the mode finds, and the log density around it.

    The mean of a regression with many predictors lies a few standard deviations from the mode,
    where control variates of second order at the mode still hold, and few rows are enough. So is
    that of a posterior which is a little skewed, over whose Gaussian at the mode the curvature is
    that of the mode. It is None for others, and where the search does not end within some steps.
    """
    if judge.excess is None and not is_guide(mode.misfit, np.inf):
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
            return replace(center, misfit=mismatch_at(judge, center)), judge
    return None


def _fitted(
    posterior: Posterior,
    subsample: Subsample,
    large: Subsample,
    position: np.ndarray,
    deviations: np.ndarray,
    begin: Center | None,
) -> tuple[Center, ControlVariates]:
    """Centre of the Gaussian that a search from a position finds, and the log density around it.

    The search begins with a centre there, or with the curvature at the position. Where that is far
    flatter than around it, as on a ridge, it begins with the given standard deviations.

    Raises
    ------
    ValueError
        Where gradient or curvature are not finite at the position or at the end of the search.
    numpy.linalg.LinAlgError
        Where the search ends at a singular Gaussian.
    """

    def around(center: Center) -> ControlVariates:
        return ControlVariates(
            subsample, center, _excess(posterior, subsample, large, center.position)
        )

    if begin is None:
        scale = coordinate_scale(posterior, subsample, position)
        curvature = curvature_at(posterior, large, position, scale)
        center = center_at(posterior, position, curvature)
        density = around(center)
        if not _is_within_reach(mismatch_at(density, center)):
            center = replace(center, curvature=diagonal_curvature(deviations))
    else:
        center, density = begin, around(begin)
    steps = MOST_ITERATIONS if subsample.weight == 1 else STEPS_AROUND_CENTER
    centers, ended = MOST_ITERATIONS // steps, False
    for number in range(centers):
        density = around(center) if number else density
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
    return replace(center, misfit=misfit), density


def _is_within_reach(misfit: Mismatch | MismatchAlongCoordinates) -> bool:
    """Whether a search can reach the mean, since a step goes about one standard deviation."""
    return misfit.shift <= MOST_ITERATIONS


def _excess(
    posterior: Posterior, subsample: Subsample, large: Subsample, position: np.ndarray
) -> np.ndarray | None:
    """By how much the curvature of a subsample exceeds that of more rows, None for the same."""
    if subsample.count == large.count:
        return None
    scale = coordinate_scale(posterior, subsample, position)
    few, many = (scaled_precision(posterior, each, position, scale) for each in (subsample, large))
    return (few - many) / np.outer(scale, scale)


def _unlikeness(misfit: Mismatch | MismatchAlongCoordinates) -> float:
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
    if not (np.abs(np.diag(lower)) > len(lower) * np.finfo(float).eps * deviations).all():
        raise linalg.LinAlgError("The root of a covariance is singular.")
    inverse = linalg.solve_triangular(lower, np.eye(len(lower)), lower=True)
    return Curvature(Dense(inverse.T @ inverse), Dense(lower @ lower.T), Dense(lower))


def narrowed(posterior: Posterior, center: Center, large: Subsample) -> Center:
    """Centre whose Gaussian is so narrow that the curvature at its points is not above its own.

    A step that is computed from it is then stable where no Gaussian is near the posterior. It is
    that of short positions. The others are left as they are.
    """
    if center.is_guide or not center.curvature.is_dense:
        return center
    judge, misfit = judge_at(posterior, center, large), center.misfit
    for _ in range(MOST_ITERATIONS):
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
    draws = rng.standard_normal((FEWEST_PAIRS, len(root)))
    values, _ = density.log_densities_and_gradients(center.position + draws @ root.T)
    return float((0.5 * (draws**2).sum(1) + values).std())


def response(posterior: Posterior, center: Center) -> float:
    r"""Variance of a posterior along one direction, divided by that of a Gaussian near it.

    In a funnel many Gaussians are near the posterior, each in its part of it, and points of one do
    not show the others. But a small force moves the mean from one to the next: with a linear
    function added to the log density, the mean moves by the covariance times its gradient. The mean
    of the nearest Gaussian with independent coordinates does so too, also where coordinates are
    correlated (Giordano, Broderick and Jordan 2018). The direction is that in which the trace of
    the curvature over the Gaussian changes most, such as the log scale of group effects.

    References
    ----------
    R. Giordano, T. Broderick and M. I. Jordan (2018). Covariances, robustness, and variational
    Bayes. *Journal of Machine Learning Research* 19 (51), 1-49.
    """
    root, precision = center.curvature.root, center.curvature.precision
    # Half the gradient of the trace, see `_with_surroundings`, zero for a Gaussian.
    direction = center.misfit.gradient - root.T @ center.gradient
    direction = direction / max(float(np.linalg.norm(direction)), np.finfo(float).tiny)
    tilt, force = precision @ (root @ direction), SMALL_FORCE
    scale: np.ndarray | Matrix = center.curvature.conditional_deviations

    def mean(slope: float) -> np.ndarray:
        return mean_field(posterior, center.position, scale, slope * tilt, root)[0]

    try:
        # Where independent coordinates are of another place, those of the Gaussian itself count.
        moved = root.T @ (precision @ (mean(0.0) - center.position))
        scale = root if np.abs(moved).max() > 1 else scale
        while force > CENTER_TOLERANCE:
            along = float(tilt @ (mean(force) - mean(-force))) / 2
            if abs(along) <= FARTHEST:
                return along / force
            # A log scale may run away, in whose tail the log density falls by one in a unit.
            force /= 2
    except ValueError:  # The log density is not finite around the mean, so nothing is known.
        return 1.0
    return np.inf
