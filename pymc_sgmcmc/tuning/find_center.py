"""The centre of a posterior: its mode, or the mean of the nearest Gaussian."""

from __future__ import annotations

import logging
import warnings
from contextlib import suppress
from dataclasses import replace

import numpy as np
from scipy import linalg

from pymc_sgmcmc.errors import CenterWarning, ModelError, warn
from pymc_sgmcmc.guests import remedy
from pymc_sgmcmc.matrices import Diagonal
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.posterior.check_rows import defect_at
from pymc_sgmcmc.posterior.sparse_curvature import SparseCurvature
from pymc_sgmcmc.tuning.center import FARTHEST_CENTER, Center, center_at
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
from pymc_sgmcmc.tuning.funnel import warn_of_funnel
from pymc_sgmcmc.tuning.gaussian import (
    CONVERGED_SHIFT,
    FEWEST_PAIRS,
    FLAT,
    PAIRS_ALONG_COORDINATES,
    Mismatch,
    MismatchAlongCoordinates,
    growth,
)
from pymc_sgmcmc.tuning.judge import ControlVariates, judge_at, with_steepest
from pymc_sgmcmc.tuning.mean_field import mean_field
from pymc_sgmcmc.tuning.mode_search import (
    collapsed_coordinates,
    find_mode,
    informed_effects,
    minimize,
)
from pymc_sgmcmc.tuning.nearest_gaussian import (
    LARGEST_SHIFT,
    is_guide,
    mismatch_along_at,
    mismatch_at,
    nearest_gaussian,
)
from pymc_sgmcmc.tuning.other_modes import warn_of_other_modes
from pymc_sgmcmc.tuning.subsample import Subsample

_log = logging.getLogger("pymc.sgmcmc")  # below PyMC's logger, so that its settings hold

ABSURD_DISTANCE = 1e4
"""A message gives a larger distance than this many standard deviations only as "more than", since
the number itself would have no meaning."""

FLAT_CURVATURE = 1e-7
"""A direction is flat where its curvature, in coordinates scaled to a diagonal of ones, is less
than this part of the largest. It is ten times the smallest part, 1e-8, that `dense_curvature`
leaves."""

NEWTON_STEPS = 2
"""The centre of a long position makes at most this many Newton steps towards the mean of the
posterior. A step that helps leaves about a tenth of the distance, so more are hardly needed."""

NEWTON_PROGRESS = 0.35
"""A Newton step is kept where it leaves less than this part of the distance. A step leaves a tenth
for a regression with a third as many predictors as rows, and nearly all for group effects with
their scale."""

MOST_ADAPTATIONS = 3
"""Coordinates of effects are adapted to a mode, and the mode is searched in them, so often."""

ROUGH_STEPS = 50
"""The search for the nearest Gaussian of effects begins after so many steps of one with independent
coordinates, which need not end."""

EFFECT_PAIRS = 4
"""Its means are over so many antithetic pairs of points. A preconditioner hardly shows their noise,
and each pair takes some passes over the rows."""

SPREADING_STEPS = 3
"""In so many first steps only effects vary around their mean: two for their curvature, and one for
the curvature of scales."""

MOST_EFFECT_STEPS = 20
"""It makes at most so many steps, which bounds the time. Effects need 5 to 10."""


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
    subsample = Subsample(posterior)
    large = Subsample(posterior, evaluations=2 * posterior.dimension)
    with np.errstate(all="ignore"):
        value, gradient = subsample.log_density_and_gradient(start)
    is_finite = np.isfinite(value) and np.isfinite(gradient).all()
    # In coordinates of effects the density of a negative scale is a number.
    if not (is_finite and (posterior.coordinates is None or posterior.is_possible(start))):
        raise ModelError(
            "The log posterior or its gradient is not finite at the start of the search for the "
            f"mode: {defect_at(posterior, start)}."
        )
    scale = coordinate_scale(posterior, subsample, start)
    effects = None if has_dense_curvature(posterior) else sparse_curvature(posterior)
    values = posterior.values_at(start)
    if effects is not None and (
        posterior.coordinates is not None or effects.have_scales(start, scale)
    ):
        with suppress(ValueError), np.errstate(all="ignore"):  # Not finite around the start.
            return _center_of_effects(posterior, subsample, effects, start, scale)
        start = posterior.positions_at(values)  # which may be others now
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always", CenterWarning)
        center, settled = _settled_mode(posterior, subsample, large, start, scale)
    start = posterior.positions_at(values)
    flat = any(issubclass(warning.category, CenterWarning) for warning in record)
    collapsed = collapsed_coordinates(posterior, subsample, center, start)
    if not settled and posterior.coordinates is not None:
        # What rows say of effects sends them and their scale to zero.
        collapsed = np.union1d(collapsed, np.flatnonzero(posterior.coordinates.apart))
    if not center.curvature.is_dense:
        return _long_center(posterior, subsample, large, center, start, scale, collapsed, flat)
    judge = judge_at(posterior, center, large)
    if not flat and not len(collapsed) and _may_be_guide(posterior, subsample, judge, center):
        misfit = mismatch_at(judge, center)
        if is_guide(misfit):
            warn_of_other_modes(posterior, subsample, center, start, scale)
            warn_of_funnel(posterior, large, center)
            return _with_surroundings(judge, center, misfit.gradient)
    with np.errstate(all="ignore"):
        better, misfit, near = nearest_gaussian(
            posterior, judge, center, start, scale, subsample, large
        )
    if not near:
        if flat and _has_flat_direction(center.curvature):
            # Along a flat direction rounding decides where other searches end.
            better, misfit = center, mismatch_at(judge, center)
        mode = center if better.position is center.position else None
        informed = informed_effects(posterior, subsample, better.position, start)
        _warn_of_no_guide(posterior, misfit, collapsed, informed, flat, mode)
        return better
    distance = np.abs((better.position - center.position) / better.curvature.standard_deviations)
    _log.info(
        "The posterior mode is up to %.2g standard deviations (%s) from the mean of the nearest "
        "Gaussian, so centre and curvature are those of this Gaussian",
        distance.max(),
        posterior.labels[int(distance.argmax())],
    )
    warn_of_other_modes(posterior, subsample, better, start, scale, at_mode=False)
    warn_of_funnel(posterior, large, better)
    return _with_surroundings(judge, better, misfit.gradient)


def _settled_mode(
    posterior: Posterior,
    subsample: Subsample,
    large: Subsample,
    start: np.ndarray,
    scale: np.ndarray,
) -> tuple[Center, bool]:
    """Mode, in coordinates of effects for what rows say there, and whether both came to rest."""
    own = posterior.coordinates
    if own is not None:
        start = own.informed(start, _information(posterior, subsample, start))
        scale = coordinate_scale(posterior, subsample, start)
    center = find_mode(posterior, subsample, large, start, scale)
    for _ in range(0 if own is None else MOST_ADAPTATIONS):
        assert own is not None
        if center.curvature.is_dense:
            moved = own.adapted(center.position, center.curvature.precision)
        else:
            information = _information(posterior, subsample, center.position)
            moved = own.informed(center.position, information)
        scale = coordinate_scale(posterior, subsample, moved)
        center = find_mode(posterior, subsample, large, moved, scale)
        distance = np.abs(center.position - moved) / center.curvature.standard_deviations
        if distance.max() <= 1:
            return center, True
    return center, own is None


def _information(posterior: Posterior, subsample: Subsample, position: np.ndarray) -> Diagonal:
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
    return Diagonal(np.nan_to_num(found))


def _may_be_guide(
    posterior: Posterior, subsample: Subsample, judge: ControlVariates, center: Center
) -> bool:
    """Whether a few rows and points leave it open that the Gaussian of a mode is near the mass."""
    pairs = max(FEWEST_PAIRS, posterior.dimension)
    if judge.subsample.count * pairs <= 2 * subsample.count * PAIRS_ALONG_COORDINATES:
        return True  # The comparison itself takes no longer.
    return mismatch_along_at(posterior, subsample, center).shift <= LARGEST_SHIFT


def _with_surroundings(judge: ControlVariates, center: Center, mean_gradient: np.ndarray) -> Center:
    r"""Centre with the shift of the mean of a chain whose variances are too large, and steepness.

    The mean of :math:`\nabla \log \pi` over :math:`N(m, \Lambda)`, less its value at m, is half
    the third derivatives times Λ. A chain whose covariance exceeds Λ by δΛ has δ times this mean
    gradient, which balances :math:`H` times the shift of its mean.

    Parameters
    ----------
    center : Center
    mean_gradient : numpy.ndarray, shape (d,)
        Mean gradient over the Gaussian of the centre, in coordinates in which it is N(0, I).
    """
    root = center.curvature.root
    balance = mean_gradient - root.T @ center.gradient
    bend = root @ balance / center.curvature.standard_deviations
    return with_steepest(replace(center, bend=bend), judge)


def _long_center(
    posterior: Posterior,
    subsample: Subsample,
    large: Subsample,
    mode: Center,
    start: np.ndarray,
    scale: np.ndarray,
    collapsed: np.ndarray,
    flat: bool,
) -> Center:
    """Centre of a position too long for matrices, at the mode or near the mean.

    The parameters are those of `find_center` and `_warn_of_no_guide`.
    """
    judge = Subsample(posterior, evaluations=2 * PAIRS_ALONG_COORDINATES)
    center, misfit = _recentered(posterior, judge, mode)
    at_mode = True
    if len(collapsed) or not (is_guide(misfit) or flat):
        # A search that begins at a scale of zero hardly leaves it.
        begin = (
            (start, scale)
            if len(collapsed)
            else (mode.position, mode.curvature.conditional_deviations)
        )
        with suppress(ValueError), np.errstate(all="ignore"):  # Not finite around the start.
            around = _around_mean_field(posterior, large, *begin)
            better, misfit_there = _recentered(posterior, judge, around)
            escaped = not len(collapsed_coordinates(posterior, subsample, better, start))
            if escaped and (len(collapsed) or misfit_there.shift < misfit.shift):
                center, misfit, at_mode = better, misfit_there, False
                if is_guide(misfit):
                    collapsed = collapsed[:0]
    if is_guide(misfit) and not flat and not len(collapsed):
        warn_of_other_modes(posterior, subsample, center, start, scale, at_mode=at_mode)
    else:
        informed = informed_effects(posterior, subsample, center.position, start)
        end = center if at_mode else None
        _warn_of_no_guide(posterior, misfit, collapsed, informed, flat, end)
    return center


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
    step = curvature.covariance @ gradient
    longest = float(np.abs(step / curvature.standard_deviations).max())
    center = center_at(posterior, mean, curvature)
    bend = curvature.covariance @ (gradient - center.gradient) / curvature.standard_deviations
    of_rows = effects.of_rows(mean, curvature.conditional_deviations)
    center = replace(center, bend=bend, of_rows=of_rows)
    if not longest <= LARGEST_SHIFT:
        worst = posterior.labels[int(np.argmax(np.abs(step / curvature.standard_deviations)))]
        warn(
            f"No Gaussian was found near the posterior, whose mean is {_shown(longest)} standard "
            f"deviations away in {worst}, so draws may be wrong. Change priors, give `center`, or "
            "sample with NUTS.",
            CenterWarning,
        )
    judge = Subsample(posterior, evaluations=2 * PAIRS_ALONG_COORDINATES)
    return with_steepest(center, ControlVariates(judge, center))


def _nearest_of_effects(
    posterior: Posterior, effects: SparseCurvature, mean: np.ndarray, deviations: np.ndarray
) -> tuple[np.ndarray, Curvature, np.ndarray]:
    """Mean and curvature of the Gaussian nearest to a posterior, and the mean gradient over it."""
    curvature, radius, length, renews = diagonal_curvature(deviations), 1.0, np.inf, True
    normals = np.random.default_rng(1961).standard_normal((EFFECT_PAIRS, len(mean)))
    for number in range(MOST_EFFECT_STEPS):
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
        factor = growth(radius, length, longest)
        renews = ends or number < SPREADING_STEPS or factor <= 1
        radius *= factor
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
    with warnings.catch_warnings():
        # The density may bend upwards away from the mode.
        warnings.simplefilter("ignore", CenterWarning)
        curvature = curvature_at(posterior, subsample, mean, deviations)
    return center_at(posterior, mean, curvature)


def _recentered(
    posterior: Posterior, judge: Subsample, center: Center
) -> tuple[Center, MismatchAlongCoordinates]:
    """Centre of a long position at the mean of a Gaussian with the curvature at the mode.

    Among many coordinates a few may have a mean that is several standard deviations from the mode,
    for example the scale of a regression with many predictors.
    """
    misfit = mismatch_along_at(posterior, judge, center)
    for _ in range(NEWTON_STEPS):
        finite = np.isfinite(misfit.gradient).all() and np.isfinite(misfit.newton).all()
        if misfit.shift <= LARGEST_SHIFT or not finite:
            break
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
    return replace(center, bend=bend), misfit


def _has_flat_direction(curvature: Curvature) -> bool:
    """Whether a curvature is at the floor of `dense_curvature` in some direction."""
    precision = curvature.precision.dense()
    scale = np.diag(precision) ** -0.5
    values = linalg.eigvalsh(precision * np.outer(scale, scale))
    return bool(values[0] < FLAT_CURVATURE * values[-1])


def _shown(distance: float) -> str:
    """A distance for a message, as "more than ..." where the number would have no meaning."""
    return f"{distance:.3g}" if distance < ABSURD_DISTANCE else f"more than {ABSURD_DISTANCE:g}"


def _warn_of_no_guide(
    posterior: Posterior,
    misfit: Mismatch | MismatchAlongCoordinates,
    collapsed: np.ndarray,
    informed: np.ndarray,
    flat: bool,
    mode: Center | None,
) -> None:
    """Warn that the posterior is far from the Gaussian around the centre in use.

    Parameters
    ----------
    posterior
    misfit
        The mismatch at this centre.
    collapsed : numpy.ndarray of int
        Coordinates whose prior has collapsed at the mode, or at the end of its search.
    informed : numpy.ndarray of int
        Effects of groups of which rows say far more than their prior, whose parameters are fixed.
    flat : bool
        Whether the log posterior is flat or bends upwards at the mode.
    mode : Center or None
        End of the search for the mode, where the centre in use is there.

    Warns
    -----
    CenterWarning
    """
    worst = posterior.labels[int(np.argmax(np.nan_to_num(np.abs(misfit.gradient), nan=np.inf)))]
    scales = misfit.scales
    if len(collapsed):
        cause = (
            "The search for the mode ended at a scale of zero: write group effects such as "
            f"{posterior.labels[collapsed[0]]} non-centred."
        )
    elif mode is not None and not flat and mode.distance > FARTHEST_CENTER:
        cause = (
            f"The search for the mode ended {_shown(mode.distance)} standard deviations from it: "
            "the log density may jump, be badly scaled or have no mode."
        )
    elif scales[0] < FLAT or (mode is not None and flat):
        cause = (
            "The log posterior is flat or bends upwards there: priors may be improper, outcomes "
            "separated, or modes exchangeable."
        )
    elif len(informed):
        cause = (
            f"Rows say far more of {posterior.labels[informed[0]]} than its prior: write effects "
            "of groups with many records as centred ones, `pm.Normal(name, mean, scale)`."
        )
    else:
        cause = (
            "The mode may lie on a boundary or far from the mass (many group effects), or "
            "outcomes may be separated."
        )
    call = remedy(posterior.model)
    warn(
        "No Gaussian was found near the posterior, so draws may be wrong (mean gradient "
        f"{_shown(misfit.shift)} standard deviations in {worst}, curvature ratio {scales[0]:.3g} "
        f"to {scales[-1]:.3g}). {cause} Change priors or parametrisation, "
        f"{'' if call is None else f'use {call}, '}give `center`, or sample with NUTS.",
        CenterWarning,
    )


def check_given_center(center: Center) -> None:
    """Warn where a centre of the user is far from a mode.

    Warns
    -----
    CenterWarning
    """
    if center.distance > FARTHEST_CENTER:
        warn(
            f"`center` is {_shown(center.distance)} posterior standard deviations from the mode, "
            "too far for control variates and the computed step size. Leave `center` out to have "
            "the mode searched.",
            CenterWarning,
        )
