"""The search for the mode of a posterior."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import numpy as np
from scipy import linalg, optimize

from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.gradient_estimators.center_difference import (
    CenterDifference,
    find_center_difference,
)
from pymc_sgmcmc.matrices import Diagonal, Matrix
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.stages import log
from pymc_sgmcmc.tuning.center import Center, center_at, second_order_is_quick
from pymc_sgmcmc.tuning.curvature import (
    SMALLEST,
    Curvature,
    coordinate_scale,
    curvature_at,
    dense_curvature,
    has_dense_curvature,
    prior_precision_diagonal,
    row_information,
    scaled_precision,
)
from pymc_sgmcmc.tuning.subsample import Subsample

CENTER_TOLERANCE = 1e-2
"""The search ends at about this distance from the mode, in posterior standard deviations. Control
variates and curvature hardly change over such a distance."""

FEWEST_STEPS = 30
"""The search takes at least this many steps before the curvature is computed for it."""

FLAT_DIRECTION = 0.05
"""A direction is flat where the curvature is less than this part of what single rows say of it."""

MOST_SADDLES = 5
"""A search leaves at most this many saddles, which bounds the time."""

MOST_STEPS = 200
"""A search in the scales of a curvature makes at most this many steps. It needs 20 where the
posterior is near a Gaussian, and one with independent coordinates 20 to 150. Where more are needed
the mode is far from the mass."""

LEAST_DIFFERENCE = 1.0
"""A log density is higher than another where it is so by more than this, which is above the error
that a search leaves in it."""

NEWTON_PROGRESS = 0.3
"""After a Newton step that leaves more than this part of the distance, the curvature is computed
anew, and after another one the steps are left to another search. A step leaves a tenth for a
regression with a third as many predictors as rows, and nearly all for group effects with their
scale."""

INFORMED_SHARE = 30.0
"""Rows inform an effect of a group, scaled by its standard deviation, so strongly that both lie on
a curve, where their information is more than this many times that of its prior."""


def find_mode(
    posterior: Posterior,
    subsample: Subsample,
    large: Subsample,
    start: np.ndarray,
    scale: np.ndarray,
    *,
    is_near: bool = False,
) -> Center:
    """Search the mode on a subsample, then on more rows, and then on all.

    A pass over all rows may read files, so the last search takes as few as it can. From a start
    that is near, as the same mode in other coordinates, only that is made.
    """
    if is_near:
        position, rough = start, curvature_at(posterior, subsample, start, scale)
    else:
        position, rough = _mode_of_subsample(posterior, subsample, start, scale)
    found = _by_newton(posterior, subsample, position, rough)
    if found is None:
        position = _minimize_towards(
            posterior.log_density_and_gradient, start, position, rough.root, CENTER_TOLERANCE
        )
    position, gradient, difference = found or (position, None, None)
    if second_order_is_quick(posterior):
        difference = difference or find_center_difference(posterior, position, order=2)
    rows, of_rows = (large, None) if difference is None else (subsample, difference.curvature)
    curvature = curvature_at(posterior, rows, position, of_rows=of_rows)
    center = center_at(posterior, position, curvature, gradient)
    rests = center.distance <= 10 * CENTER_TOLERANCE
    return replace(center, difference=difference, is_mode=True, came_to_rest=rests)


def _mode_of_subsample(
    posterior: Posterior, subsample: Subsample, start: np.ndarray, scale: np.ndarray
) -> tuple[np.ndarray, Curvature]:
    """Mode of a subsample and the curvature near it.

    A search in rough scales that has taken as many steps as the curvature takes gradients goes on
    in the scales of the curvature. It is then at most about twice as long as the shorter one of
    searches in the one or the other. Second derivatives take no longer than few gradients.
    """
    density = subsample.log_density_and_gradient
    if not has_dense_curvature(posterior):
        position = minimize(density, start, Diagonal(scale), tolerance=0.1)
        return position, curvature_at(posterior, subsample, position)
    columns = 0 if posterior.has_second_derivatives else posterior.dimension
    steps = max(FEWEST_STEPS, 2 * columns)
    near = minimize(density, start, Diagonal(scale), tolerance=0.1, steps=steps)
    try:
        near, curvature = _off_saddles(posterior, subsample, near, steps)
    except ValueError:  # It need be finite only at the mode.
        position = minimize(density, near, Diagonal(scale), tolerance=0.1)
        return position, curvature_at(posterior, subsample, position)
    position = minimize(density, near, curvature.root, tolerance=0.1, steps=MOST_STEPS)
    if np.max(np.abs(position - near) / curvature.standard_deviations) > 1:
        curvature = curvature_at(posterior, subsample, position)
    return position, curvature


def _off_saddles(
    posterior: Posterior, subsample: Subsample, position: np.ndarray, steps: int
) -> tuple[np.ndarray, Curvature]:
    """Position from which no short way leads higher, and the curvature there.

    Exchangeable components begin alike, where the gradient of their differences is zero or nearly
    so, and a search stays there. So it begins again a standard deviation away, in the direction in
    which the log density is flat or bends upwards.
    """
    density = subsample.log_density_and_gradient
    for left in reversed(range(MOST_SADDLES + 1)):
        value, gradient = density(position)
        scale = coordinate_scale(posterior, subsample, position)
        scaled = scaled_precision(posterior, subsample, position, scale)
        (curvature,), direction = linalg.eigh(scaled, subset_by_index=(0, 0))
        # A search that has not ended may be where the log density bends a little upwards.
        largest = FLAT_DIRECTION if np.max(np.abs(scale * gradient)) < 1 else -1.0
        if not left or curvature > largest or curvature == 0:
            break
        away = scale * direction[:, 0] / np.sqrt(abs(curvature))
        for begin in (position + away, position - away):
            with suppress(ValueError):  # The log density is not finite there.
                end = minimize(density, begin, Diagonal(scale), tolerance=0.1, steps=steps)
                if density(end)[0] > value + LEAST_DIFFERENCE:
                    position = end
                    break
        else:
            break
    return position, dense_curvature(scaled, scale)


def _by_newton(
    posterior: Posterior,
    subsample: Subsample,
    position: np.ndarray,
    curvature: Curvature,
) -> tuple[np.ndarray, np.ndarray, CenterDifference | None] | None:
    """Mode of all rows near that of a subsample, its gradient and expansion there.

    It is None where Newton steps do not come nearer to it, with the curvature at the nearest
    position. A step that should end at the mode is followed by the pass for the expansion there,
    which has the gradient too.
    """
    is_quick = second_order_is_quick(posterior)
    nearest, at_nearest, before = position, None, np.inf
    ends = is_of_nearest = False
    while True:
        difference = find_center_difference(posterior, position, order=2) if ends else None
        if difference is None:
            gradient = posterior.gradient(position)
        else:
            gradient = difference.gradient + posterior.log_prior_and_gradient(position)[1]
        distance = np.inf  # where the log density is not finite
        if np.isfinite(gradient).all():
            distance = float(np.max(np.abs(curvature.root.T @ gradient)))
        if distance <= CENTER_TOLERANCE:
            return position, gradient, difference
        progress = distance <= NEWTON_PROGRESS * before
        if at_nearest is None and distance == np.inf:
            return None
        if not progress and (is_of_nearest or not is_quick):
            return None
        # The next step goes as much nearer as the last one did.
        ends = is_quick and distance * distance <= CENTER_TOLERANCE * before < np.inf
        if at_nearest is None or distance <= before:
            nearest, at_nearest, before = position, gradient, distance
        is_of_nearest = not progress
        if not progress:
            of_rows = find_center_difference(posterior, nearest, order=2).curvature
            curvature = curvature_at(posterior, subsample, nearest, of_rows=of_rows)
            before = float(np.max(np.abs(curvature.root.T @ at_nearest)))
        position = nearest + curvature.covariance @ at_nearest


def collapsed_coordinates(
    posterior: Posterior, subsample: Subsample, center: Center, start: np.ndarray
) -> tuple[int, ...]:
    """Coordinates whose prior is far narrower at a centre than at the start, the narrowest first.

    The density of group effects with an unknown scale has no bound where scale and effects are
    zero. A search may go there without end, whatever the rows say. It then finds a Gaussian of zero
    width, at which all gradients are small. The curvature of the prior has then grown beyond what
    rounding leaves of a smaller one, and is far above that of the rows: otherwise these may be what
    makes it narrow.
    """
    prior = np.abs(prior_precision_diagonal(posterior, center.position))
    before = np.abs(prior_precision_diagonal(posterior, start))
    information = row_information(posterior, subsample, center.position)
    with np.errstate(all="ignore"):
        narrower = (SMALLEST * prior > before) & (np.sqrt(SMALLEST) * prior > information)
    collapsed = np.flatnonzero(narrower & (before > 0))
    return tuple(collapsed[np.argsort(-prior[collapsed], kind="stable")].tolist())


def informed_effects(posterior: Posterior, subsample: Subsample, center: Center) -> np.ndarray:
    """Coordinates of groups whose fixed prior says far less than the rows.

    Effects of groups with a fixed prior are non-centred ones, which a scale multiplies.
    """
    position = center.position
    prior = prior_precision_diagonal(posterior, position)
    start = prior_precision_diagonal(posterior, posterior.initial_position)
    fixed = np.isclose(prior, start, rtol=1e-3)
    gradients = subsample.gradients_of_some_rows(position)
    information = posterior.n_rows * np.mean(gradients**2, axis=0)
    of_group = np.mean(gradients != 0, axis=0) < 0.5
    return np.flatnonzero(fixed & (prior > 0) & of_group & (information > INFORMED_SHARE * prior))


def minimize(
    log_density_and_gradient: Callable[[np.ndarray], tuple[float, np.ndarray]],
    start: np.ndarray,
    scale: Matrix,
    tolerance: float,
    steps: int = 1000,
) -> np.ndarray:
    """Maximize a log density by L-BFGS in scaled coordinates.

    Long steps may lead to an edge of the support, or to where a probability is rounded to one. A
    search that ends there begins again and goes half of its way first.

    Raises
    ------
    ValueError
        Where the log density or its gradient is not finite at the start.
    """

    def objective(coordinates: np.ndarray) -> tuple[float, np.ndarray]:
        with np.errstate(all="ignore"):
            value, gradient = log_density_and_gradient(start + scale @ coordinates)
            return -value, -(scale.T @ gradient)

    place, radius = np.zeros_like(start), np.inf
    if not _are_finite(*objective(place)):
        raise ModelError(
            "The log posterior or its gradient is not finite at the start of the search for "
            "the mode. Check the model with `model.debug()`, or give `center`."
        )
    while steps > 0:
        end, taken, at_edge = _minimize_near(objective, place, radius, tolerance, steps)
        steps -= max(1, taken)
        distance = float(np.abs(end - place).max())
        if at_edge and distance > 20 * tolerance:
            radius = distance / 2
            continue
        # Near an edge that is one, differences of gradients are finite only on one side.
        if not at_edge or radius == np.inf:
            place = end
        if distance < radius:
            break
    return start + scale @ place


def _are_finite(value: float, gradient: np.ndarray) -> bool:
    return bool(np.isfinite(value) and np.isfinite(gradient).all())


def _minimize_near(
    objective: Callable[[np.ndarray], tuple[float, np.ndarray]],
    start: np.ndarray,
    radius: float,
    tolerance: float,
    steps: int,
) -> tuple[np.ndarray, int, bool]:
    """Minimize a function by L-BFGS where no coordinate differs more than a radius from the start.

    Returns
    -------
    place : numpy.ndarray
        Where the search ended.
    steps : int
        How many it took.
    at_edge : bool
        Whether it ended where the function does not decrease only as it is no number beyond.
    """
    begin: tuple[np.ndarray, float, np.ndarray] | None = None
    last, edge = begin, False

    def finite(coordinates: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal begin, last, edge
        last = (coordinates.copy(), *objective(coordinates))
        if _are_finite(*last[1:]):
            begin = begin or last  # The first evaluation is at the start.
            return last[1:]
        # SciPy ends a search at an infinite value. Where the function seems to rise as steeply as
        # it falls where the step begins, the step becomes shorter.
        edge = True
        assert begin is not None
        place, value, gradient = begin
        return value + abs(gradient @ (coordinates - place)) + LEAST_DIFFERENCE, -gradient

    def accept(intermediate_result: optimize.OptimizeResult) -> None:
        nonlocal begin
        begin = last

    # SciPy stops at a bound on the largest component of the gradient. In scaled coordinates that
    # component is about the distance to the mode in standard deviations.
    result = optimize.minimize(
        finite,
        start,
        jac=True,
        method="L-BFGS-B",
        bounds=None if radius == np.inf else np.array([start - radius, start + radius]).T,
        callback=accept,
        options={
            "gtol": tolerance,
            "ftol": 0.0,
            "maxiter": steps,
            "maxcor": 20,
        },
    )
    ended_early = not np.max(np.abs(result.jac)) <= 10 * tolerance
    if ended_early:
        log.debug("Search for the mode ended early: %s", result.message)
    inside = bool(np.abs(result.x - start).max() < radius)
    return result.x, result.nit, edge and ended_early and inside and result.nit < steps


def _minimize_towards(
    density: Callable[[np.ndarray], tuple[float, np.ndarray]],
    start: np.ndarray,
    position: np.ndarray,
    scale: Matrix,
    tolerance: float,
) -> np.ndarray:
    """Search from a position or, where the log density is not finite there, from the way to it.

    At the mode of a subsample the probability of another row may be zero in floating point, such as
    that of a category in the middle.
    """
    way = position - start
    while not np.array_equal(start + way, start):
        with suppress(ValueError):
            return minimize(density, start + way, scale, tolerance, MOST_STEPS)
        way = way / 2
    return minimize(density, start, scale, tolerance)
