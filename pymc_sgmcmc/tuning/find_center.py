"""The centre of a posterior: its mode, or the mean of the nearest Gaussian."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import numpy as np

from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.matrices import Diagonal
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.posterior.check_rows import defect_at
from pymc_sgmcmc.posterior.sparse_curvature import SparseCurvature
from pymc_sgmcmc.tuning.center import Center, center_at
from pymc_sgmcmc.tuning.curvature import (
    SIGNS,
    Curvature,
    coordinate_scale,
    curvature_at,
    curvature_of_matrices,
    diagonal_curvature,
    has_dense_curvature,
    sparse_curvature,
)
from pymc_sgmcmc.tuning.gaussian import (
    CONVERGED_SHIFT,
    LARGEST_SHIFT,
    MOST_ITERATIONS,
    PAIRS_ALONG_COORDINATES,
    MismatchAlongCoordinates,
    is_guide,
    next_radius,
)
from pymc_sgmcmc.tuning.judge import ControlVariates, with_steepest
from pymc_sgmcmc.tuning.mean_field import mean_field
from pymc_sgmcmc.tuning.mode_search import (
    NEWTON_PROGRESS,
    collapsed_coordinates,
    find_mode,
    minimize,
)
from pymc_sgmcmc.tuning.nearest_gaussian import mismatch_along_at, narrowed, nearest_gaussian
from pymc_sgmcmc.tuning.subsample import Subsample
from pymc_sgmcmc.tuning.suspicions import OF_A_SEARCH, warn_of

ROUGH_STEPS = 50
"""The search for the nearest Gaussian of effects begins after so many steps of one with independent
coordinates, which need not end."""

EFFECT_PAIRS = 4
"""Its means are over so many antithetic pairs of points. A preconditioner hardly shows their noise,
and each pair takes some passes over the rows."""

SPREADING_STEPS = 3
"""In so many first steps only effects vary around their mean: two for their curvature, and one for
the curvature of scales."""


def find_center(posterior: Posterior, start: np.ndarray) -> Center:
    """Search the posterior mode or, where the mass lies elsewhere, the nearest Gaussian.

    The search begins on a subsample of rows. Its mode is within a few posterior standard deviations
    of the mode, and its curvature makes the search on all rows a well-conditioned problem that
    takes a few passes over the data. Then gradients at points of the Gaussian with this mode and
    curvature show whether the posterior is near it. Where it is not, as with the group effects of
    hierarchical models, mean and curvature are those of the Gaussian nearest to the posterior, see
    `pymc_sgmcmc.tuning.gaussian`.

    Parameters
    ----------
    posterior : Posterior
    start : numpy.ndarray, shape (d,)

    Raises
    ------
    ValueError
        Where the log density or its gradient is not finite at the start.

    Warns
    -----
    CenterWarning
        Where neither Gaussian is near the posterior, or where much of the posterior is far narrower
        than the Gaussian.
    """
    rows = Subsample(posterior)
    large = Subsample(posterior, evaluations=2 * posterior.dimension)
    with np.errstate(all="ignore"):
        value, gradient = rows.log_density_and_gradient(start)
    is_finite = np.isfinite(value) and np.isfinite(gradient).all()
    # In coordinates of effects the density of a negative scale is a number.
    if not (is_finite and (posterior.coordinates is None or posterior.is_possible(start))):
        raise ModelError(
            "The log posterior or its gradient is not finite at the start of the search for the "
            f"mode: {defect_at(posterior, start)}."
        )
    scale = coordinate_scale(posterior, rows, start)
    effects = None if has_dense_curvature(posterior) else sparse_curvature(posterior)
    values, center = posterior.values_at(start), None
    if effects is not None and (
        posterior.coordinates is not None or effects.have_scales(start, scale)
    ):
        with suppress(ValueError), np.errstate(all="ignore"):  # Not finite around the start.
            center = _center_of_effects(posterior, rows, effects, start, scale)
    if center is None:
        # Coordinates may be others after each search.
        mode = _settled_mode(posterior, rows, large, posterior.positions_at(values), scale)
        search = nearest_gaussian if mode.curvature.is_dense else _long_center
        center = search(posterior, mode, posterior.positions_at(values), scale, rows, large)
    warn_of(OF_A_SEARCH, posterior, rows, center)
    return narrowed(posterior, center, large)


def _settled_mode(
    posterior: Posterior,
    subsample: Subsample,
    large: Subsample,
    start: np.ndarray,
    scale: np.ndarray,
) -> Center:
    """Mode, in coordinates of effects for what rows say there, none where neither comes to rest."""
    own = posterior.coordinates
    if own is not None:
        start = own.informed(start, _information(posterior, subsample, start))
        scale = coordinate_scale(posterior, subsample, start)
    center, before = find_mode(posterior, subsample, large, start, scale), np.inf
    while own is not None and center.came_to_rest:
        if center.curvature.is_dense:
            moved = own.adapted(center.position, center.curvature.precision)
        else:
            information = _information(posterior, subsample, center.position)
            moved = own.informed(center.position, information)
        scale = coordinate_scale(posterior, subsample, moved)
        center = find_mode(posterior, subsample, large, moved, scale, is_near=True)
        deviations = center.curvature.standard_deviations
        distance = float(np.max(np.abs(center.position - moved) / deviations))
        if distance <= 1:
            break
        if not distance < before / 2:
            return replace(center, came_to_rest=False)
        before = distance
    return center


def _information(posterior: Posterior, subsample: Subsample, position: np.ndarray) -> np.ndarray:
    """What rows say of each effect of own coordinates where the others are known.

    It is the second derivative in the position of the rows, by random signs. It is exact for levels
    that have no row in common, whatever the scale of the effects.
    """
    own, seen, rows = posterior.coordinates, posterior.position_of_rows(position), subsample.rows
    assert own is not None
    squares = np.mean(posterior.row_gradients(seen, subsample.some_rows) ** 2, axis=0)
    signs = np.random.default_rng(1963).choice([-1.0, 1.0], size=(SIGNS, len(seen)))
    found = np.zeros(len(seen))
    for column in own.columns:
        mean = posterior.n_rows * squares[column].mean()
        width = posterior.difference_width * (mean**-0.5 if mean > 0 else 1.0)
        shifts = np.zeros(signs.shape)
        shifts[:, column] = width * signs[:, column]
        ends = np.concatenate([seen + shifts, seen - shifts])
        ahead, behind = np.split(posterior.gradient_of_rows(ends, rows)[:, column], 2)
        change = np.mean(signs[:, column] * (behind - ahead), axis=0)
        found[column] = subsample.weight * np.maximum(change, 0.0) / (2 * width)
    return np.nan_to_num(found)


def _long_center(
    posterior: Posterior,
    mode: Center,
    start: np.ndarray,
    scale: np.ndarray,
    subsample: Subsample,
    large: Subsample,
) -> Center:
    """Centre of a position too long for matrices, at the mode or near the mean.

    The parameters are those of `nearest_gaussian`.
    """
    judge = Subsample(posterior, evaluations=2 * PAIRS_ALONG_COORDINATES)
    collapsed = collapsed_coordinates(posterior, subsample, mode, start)
    center, is_flat = _recentered(posterior, judge, mode), mode.curvature.is_flat
    if collapsed or not (center.is_guide or is_flat):
        # A search that begins at a scale of zero hardly leaves it.
        begin = (start, scale)
        if not collapsed:
            begin = mode.position, mode.curvature.conditional_deviations
        with suppress(ValueError), np.errstate(all="ignore"):  # Not finite around the start.
            better = _recentered(posterior, judge, _around_mean_field(posterior, large, *begin))
            is_nearer = collapsed or better.misfit.shift < center.misfit.shift
            if is_nearer and not collapsed_coordinates(posterior, subsample, better, start):
                center, collapsed = better, () if better.is_guide else collapsed
    near = center.is_guide and not (is_flat or collapsed)
    return replace(center, is_guide=near, collapsed=collapsed)


def _center_of_effects(
    posterior: Posterior,
    subsample: Subsample,
    effects: SparseCurvature,
    start: np.ndarray,
    scale: np.ndarray,
) -> Center:
    """Centre of a long position with effects of many levels and their scales.

    The joint mode of these is at a scale of zero or far from the mass, so it is not searched. In
    coordinates of effects that of all others is, given the scales, which rows do not see.

    Raises
    ------
    ValueError
        Where log density or gradient are not finite around the position, or at the mean.
    """
    if posterior.coordinates is not None:
        start, scale = _between_forms(posterior, effects, start, scale)

        def given_scales(position: np.ndarray) -> tuple[float, np.ndarray]:
            value, gradient = subsample.log_density_and_gradient(position)
            return value, np.where(effects.seen, gradient, 0.0)

        start = minimize(given_scales, start, Diagonal(scale), tolerance=0.1)
    position, deviations = _between_forms(posterior, effects, start, scale)
    mean, _ = mean_field(posterior, position, deviations, steps=ROUGH_STEPS)
    for _ in range(2):
        mean, deviations = _between_forms(posterior, effects, mean, deviations)
        mean, curvature, gradient = _nearest_of_effects(posterior, effects, mean, deviations)
        deviations = curvature.conditional_deviations
        # Effects depend little on their scale only where their mean is about zero.
        moved = np.abs(mean / curvature.standard_deviations)[effects.effects].max()
        if posterior.coordinates is None or moved <= 1:
            break
    sds, one = curvature.standard_deviations, np.ones(len(mean))
    center = center_at(posterior, mean, curvature)
    shift = curvature.covariance @ gradient / sds
    misfit = MismatchAlongCoordinates(shift, 0 * one, one, 0 * one, one)
    bend = curvature.covariance @ (gradient - center.gradient) / sds
    of_rows = effects.of_rows(mean, curvature.conditional_deviations)
    center = replace(center, bend=bend, of_rows=of_rows, misfit=misfit, is_guide=is_guide(misfit))
    judge = Subsample(posterior, evaluations=2 * PAIRS_ALONG_COORDINATES)
    return with_steepest(center, ControlVariates(judge, center))


def _nearest_of_effects(
    posterior: Posterior, effects: SparseCurvature, mean: np.ndarray, deviations: np.ndarray
) -> tuple[np.ndarray, Curvature, np.ndarray]:
    """Mean and curvature of the Gaussian nearest to a posterior, and the mean gradient over it."""
    curvature, radius, length, renews = diagonal_curvature(deviations), 1.0, np.inf, True
    normals = np.random.default_rng(1961).standard_normal((EFFECT_PAIRS, len(mean)))
    for number in range(MOST_ITERATIONS):
        # Scales move when the spread of the effects is known, of which they are functions.
        moves = effects.effects if number < SPREADING_STEPS else np.True_
        shifts = [np.where(moves, curvature.root @ z, 0.0) for z in normals]
        gradient = np.mean(
            [posterior.gradient(mean + side * each) for each in shifts for side in (1, -1)], axis=0
        )
        if renews:
            scale = curvature.conditional_deviations
            curvature = curvature_of_matrices(effects.around(mean, shifts, scale))
        if not number:
            continue
        step = curvature.covariance @ gradient
        longest = float(np.abs(step / curvature.standard_deviations).max())
        ends = number > SPREADING_STEPS and longest < CONVERGED_SHIFT
        if ends and renews:
            break
        # While the distance falls by the steps, these double and the curvature remains.
        taken, radius = min(radius, length), next_radius(radius, length, longest)
        renews = ends or number < SPREADING_STEPS or radius <= taken
        length = longest
        mean = mean + step * min(1.0, radius / longest)
    return mean, curvature, gradient


def _between_forms(
    posterior: Posterior, effects: SparseCurvature, position: np.ndarray, scale: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The same values in coordinates of effects for what the rows say there, and their scales."""
    coordinates = posterior.coordinates
    if coordinates is None:
        return position, scale
    position = coordinates.adapted(position, effects.at(position, scale))
    return position, np.abs(effects.at(position, scale).diagonal()) ** -0.5


def _around_mean_field(
    posterior: Posterior, subsample: Subsample, position: np.ndarray, scale: np.ndarray
) -> Center:
    """Centre of a long position at the mean of the nearest Gaussian with independent coordinates.

    For many group effects it is near the mass where their scale is not known, and the mode is not.

    Raises
    ------
    ValueError
        Where log density or gradient are not finite around the position, or at the mean.
    """
    mean, deviations = mean_field(posterior, position, scale)
    return center_at(posterior, mean, curvature_at(posterior, subsample, mean, deviations))


def _recentered(posterior: Posterior, judge: Subsample, center: Center) -> Center:
    """Centre of a long position at the mean of a Gaussian with the curvature at the mode.

    Among many coordinates a few may have a mean that is several standard deviations from the mode,
    for example the scale of a regression with many predictors.
    """
    misfit = mismatch_along_at(posterior, judge, center)
    while misfit.shift > LARGEST_SHIFT and np.isfinite(misfit.newton).all():
        shift = center.curvature.root @ misfit.newton
        try:
            moved = center_at(posterior, center.position + shift, center.curvature)
        except ValueError:  # The gradient at that point is not finite.
            break
        after = mismatch_along_at(posterior, judge, moved)
        if not after.shift < NEWTON_PROGRESS * misfit.shift:
            break  # Newton steps cannot leave a narrow mode such as that of many group effects.
        center, misfit = moved, after
    root = center.curvature.root
    balance = misfit.newton - misfit.newton_of(root.T @ center.gradient)
    bend = root @ balance / center.curvature.standard_deviations
    return replace(center, bend=bend, misfit=misfit, is_guide=is_guide(misfit))
