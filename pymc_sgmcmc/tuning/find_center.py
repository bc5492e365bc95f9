"""The centre of a posterior: its mode, or where that is no guide the Gaussian nearest to it."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace

import numpy as np
from scipy import linalg

from pymc_sgmcmc.checks import one_of
from pymc_sgmcmc.errors import CenterWarning
from pymc_sgmcmc.matrices import apply, apply_transposed
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.tuning.center import FARTHEST_CENTER, Center, center_at
from pymc_sgmcmc.tuning.curvature import (
    DENSE_DIMENSION,
    Curvature,
    coordinate_scale,
)
from pymc_sgmcmc.tuning.gaussian import (
    FEWEST_PAIRS,
    PAIRS_ALONG_COORDINATES,
    Mismatch,
    MismatchAlongCoordinates,
    mismatch,
)
from pymc_sgmcmc.tuning.mode_search import SEARCHES, collapsed_coordinates, find_mode
from pymc_sgmcmc.tuning.nearest_gaussian import (
    LARGEST_LOSS,
    LARGEST_SHIFT,
    MOST_UNLIKE_GAUSSIAN,
    gradient_around,
    is_guide,
    mismatch_along_at,
    mismatch_at,
    nearest_gaussian,
)
from pymc_sgmcmc.tuning.other_modes import warn_of_other_modes
from pymc_sgmcmc.tuning.subsample import Subsample

_log = logging.getLogger("pymc.sgmcmc")  # below PyMC's logger, so that its settings hold

LARGEST_INIT_SHIFT = 1.0
"""That distance where the Gaussian is a user's."""

ABSURD_DISTANCE = 1e4
"""Standard deviations beyond which a message gives no number."""

FLAT_CURVATURE = 1e-7
"""Smallest over largest curvature, of coordinates scaled to one, of a direction that is flat: the
floor that `dense_curvature` puts under it is 1e-8."""

FLAT = 1e-6
"""Mean curvature, relative to that at the centre, below which a direction is flat."""

NEWTON_STEPS = 2
"""Of the centre of a long position towards the mean of the posterior, at most,"""

NEWTON_PROGRESS = 0.35
"""and the part of the distance that each may leave: of a regression with as many as a third as many
predictors as rows a tenth is left, of group effects with their scale nearly all."""


def find_center(posterior: Posterior, start: np.ndarray, method: str = "lbfgs") -> Center:
    """Search the posterior mode, or where that is no guide the Gaussian nearest to the posterior.

    The search begins on a subsample of rows, whose mode is within a few posterior standard
    deviations of the mode, and whose curvature makes the second part, on all rows, a
    well-conditioned problem that takes a handful of passes over the data. Then gradients at
    points of the Gaussian that mode and curvature describe show whether the posterior is like it.
    Where it is not, as with the group effects of hierarchical models, mean and curvature come
    from the Gaussian nearest to the posterior, see `pymc_sgmcmc.tuning.gaussian`.

    Parameters
    ----------
    posterior : Posterior
    start : numpy.ndarray, shape (d,)
    method : {"lbfgs", "sgd"}
        "lbfgs" passes over all rows until the gradient is small. "sgd" passes once, with
        Newton steps of decreasing size from blocks of rows, and then once more for the
        gradient: for data too large for more.

    Raises
    ------
    ValueError
        Where the log density or its gradient is not finite at the start.

    Warns
    -----
    CenterWarning
        Where neither is a guide to the posterior.
    """
    one_of("center", method, SEARCHES, ", or a point")
    subsample = Subsample(posterior)
    large = Subsample(posterior, evaluations=2 * posterior.dimension)
    scale = coordinate_scale(posterior, subsample, start)
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always", CenterWarning)
        center = find_mode(posterior, subsample, large, start, scale, method)
    flat = any(issubclass(one.category, CenterWarning) for one in record)
    collapsed = collapsed_coordinates(posterior, subsample, center, start)
    if not center.curvature.is_dense:
        judge = Subsample(posterior, evaluations=2 * PAIRS_ALONG_COORDINATES)
        center, along = _recentered(posterior, judge, center)
        if is_guide(along) and not flat and not len(collapsed):
            warn_of_other_modes(posterior, subsample, center, start, scale)
        else:
            _warn_of_no_guide(posterior, along, center, collapsed, flat, at_mode=True)
        return center
    # Control variates at the centre leave so little noise that fewer rows serve as well.
    judge = Subsample(posterior, evaluations=8 * max(FEWEST_PAIRS, posterior.dimension))
    found = mismatch_at(posterior, judge, center)
    if is_guide(found) and not flat and not len(collapsed):
        warn_of_other_modes(posterior, subsample, center, start, scale)
        return _with_bend(center, found.gradient)
    with np.errstate(all="ignore"):
        better, near = nearest_gaussian(posterior, judge, center, start, scale, subsample)
    if not near:
        if flat and _has_flat_direction(center.curvature):
            # Along it other searches end wherever rounding leaves them.
            better = center
        found = mismatch_at(posterior, judge, better)
        at_mode = better.position is center.position
        _warn_of_no_guide(posterior, found, better, collapsed, flat, at_mode=at_mode)
        return better
    distance = np.abs((better.position - center.position) / better.curvature.standard_deviations)
    _log.info(
        "The posterior mode is up to %.2g standard deviations from where the posterior has its "
        "mass: the centre and the curvature are those of the Gaussian nearest to it",
        distance.max(),
    )
    warn_of_other_modes(posterior, subsample, better, start, scale, at_mode=False)
    return _with_bend(better, mismatch_at(posterior, judge, better).gradient)


def _with_bend(center: Center, mean_gradient: np.ndarray) -> Center:
    r"""Centre with the shift of the mean of a chain that is too wide.

    Over :math:`N(m, \Lambda)` the mean of :math:`\nabla \log \pi` less that at m is half the third
    derivatives times Λ; with an excess δΛ of the covariance δ times that balances :math:`H` times
    the shift of the mean.

    Parameters
    ----------
    center : Center
    mean_gradient : numpy.ndarray, shape (d,)
        Over the Gaussian of the centre, in coordinates in which it is N(0, I).
    """
    root = center.curvature.root
    balance = mean_gradient - apply_transposed(root, center.gradient)
    return replace(center, bend=apply(root, balance) / center.curvature.standard_deviations)


def _recentered(
    posterior: Posterior, judge: Subsample, center: Center
) -> tuple[Center, MismatchAlongCoordinates]:
    """Centre of a long position at the mean of a Gaussian with the curvature at the mode.

    Of many coordinates the mean of some is standard deviations from the mode, as that of the scale
    of a regression with many predictors is.
    """
    along = mismatch_along_at(posterior, judge, center)
    for _ in range(NEWTON_STEPS):
        finite = np.isfinite(along.gradient).all() and np.isfinite(along.newton).all()
        if along.shift <= LARGEST_SHIFT or not finite:
            break
        shift = apply(center.curvature.root, along.newton)
        try:
            moved = center_at(posterior, center.position + shift, center.curvature)
        except ValueError:  # nothing finite there
            break
        after = mismatch_along_at(posterior, judge, moved)
        if not after.shift < NEWTON_PROGRESS * along.shift:
            break  # the mode of many group effects, say, which a Gaussian this narrow cannot leave
        center, along = moved, after
    balance = along.newton - along.newton_of(
        apply_transposed(center.curvature.root, center.gradient)
    )
    bend = apply(center.curvature.root, balance) / center.curvature.standard_deviations
    return replace(center, bend=bend), along


def _has_flat_direction(curvature: Curvature) -> bool:
    """Whether a curvature is at the floor of `dense_curvature` in some direction."""
    scale = np.diag(curvature.precision) ** -0.5
    values = linalg.eigvalsh(curvature.precision * np.outer(scale, scale))
    return bool(values[0] < FLAT_CURVATURE * values[-1])


def _shown(distance: float) -> str:
    """A distance for a message: of so many standard deviations the number says nothing."""
    return f"{distance:.3g}" if distance < ABSURD_DISTANCE else f"more than {ABSURD_DISTANCE:g}"


def _warn_of_no_guide(
    posterior: Posterior,
    found: Mismatch | MismatchAlongCoordinates,
    center: Center,
    collapsed: np.ndarray,
    flat: bool,
    *,
    at_mode: bool,
) -> None:
    """Warn of the centre that is used, where the posterior is far from the Gaussian around it.

    Parameters
    ----------
    posterior
    found
        The mismatch at this centre.
    center : Center
    collapsed : numpy.ndarray of int
        Coordinates to which the prior leaves no room at the mode, or where its search ended.
    flat : bool
        Whether the log posterior is flat or bends upwards there.
    at_mode : bool
        Whether the centre is there as well.

    Warns
    -----
    CenterWarning
    """
    worst = posterior.labels[int(np.argmax(np.nan_to_num(np.abs(found.gradient), nan=np.inf)))]
    scales = found.scales
    if len(collapsed):
        cause = (
            "The search for the mode ran to a scale of zero, where the density of group effects "
            f"such as {posterior.labels[collapsed[0]]} has no bound: write them non-centred, as "
            "scale * z with z ~ Normal(0, 1)."
        )
    elif scales[0] < FLAT or (at_mode and flat):
        cause = (
            "The log posterior is flat or bends upwards in some direction there: priors may be "
            "improper, predictors tell outcomes apart without a proper prior, or the search ended "
            "half-way between modes that are exchangeable, which other initial values (`initval`) "
            "or an ordered transform tell apart."
        )
    elif at_mode and center.distance > FARTHEST_CENTER:
        cause = (
            f"The search for the mode ended {_shown(center.distance)} posterior standard "
            "deviations away from it: the log density may have no mode, jump, or be badly scaled, "
            "see `model.debug()`."
        )
    else:
        cause = (
            "The mode may lie on a boundary, as that of a group scale near zero does, or far from "
            "the mass, as that of many group effects with their scale does, or there may be none, "
            "as with outcomes that predictors separate without a proper prior."
        )
    warnings.warn(
        "No Gaussian was found near the posterior, so chains may not converge, and their draws may "
        f"be wrong: over the one used the mean gradient is {_shown(found.shift)} standard "
        f"deviations, most of all in {worst}, and the mean curvature {scales[0]:.3g} to "
        f"{scales[-1]:.3g} times its own. {cause} Integrate group effects out, use other priors or "
        "another parametrisation, give `center`, or sample with NUTS.",
        CenterWarning,
        stacklevel=3,
    )


def center_of(posterior: Posterior, position: np.ndarray, curvature: Curvature) -> Center:
    """Centre at the mean of a Gaussian that a user gave.

    A diagonal says nothing of correlations, so only the directions in which the posterior is
    narrower than it are held against it, and they bound the step.

    Warns
    -----
    CenterWarning
        Where gradients over the Gaussian show that it is far from the posterior.
    """
    center = center_at(posterior, position, curvature)
    if posterior.dimension > DENSE_DIMENSION:
        return center
    evaluations = 2 * max(FEWEST_PAIRS, posterior.dimension)
    subsample = Subsample(posterior, evaluations)
    gradient = gradient_around(posterior, subsample, center)
    root = curvature.root if curvature.is_dense else np.diag(curvature.root)
    found = mismatch(gradient, position, root, np.random.default_rng(1735))
    scales = found.scales
    if curvature.is_dense:
        shift, guide = found.shift, is_guide(found, LARGEST_INIT_SHIFT)
    else:
        shift = _shift_across(found)
        guide = shift <= LARGEST_INIT_SHIFT and found.lost <= LARGEST_LOSS
        guide = guide and bool(1 / MOST_UNLIKE_GAUSSIAN < scales[-1] < MOST_UNLIKE_GAUSSIAN)
        if scales[-1] > 1:
            center = replace(center, curvature=replace(curvature, remainder=float(scales[-1])))
    if not guide:
        remedy = (
            "Step size and preconditioner are then no guide."
            if curvature.is_dense
            else "Its variances are wrong, or leave strong correlations out, with which chains mix "
            "slowly: give a dense covariance, or more draws."
        )
        warnings.warn(
            "`init` is far from the posterior: over it the mean gradient is "
            f"{shift:.3g} of its standard deviations, and the mean curvature is "
            f"{scales[0]:.3g} to {scales[-1]:.3g} times that of `init`. {remedy} "
            "Leave `init` out to have them computed.",
            CenterWarning,
            stacklevel=3,
        )
    return center


def _shift_across(found: Mismatch) -> float:
    """Largest distance to the better mean, where curvatures differ from one by far."""
    if not np.isfinite(found.precision).all():
        return np.inf
    values, vectors = linalg.eigh(found.precision)
    step = vectors @ (vectors.T @ found.gradient / np.maximum(values, 1.0))
    return float(np.abs(step).max())


def check_given_center(center: Center) -> None:
    """Warn where a centre of the user is far from a mode.

    Warns
    -----
    CenterWarning
    """
    if center.distance > FARTHEST_CENTER:
        warnings.warn(
            f"`center` is {_shown(center.distance)} posterior standard deviations away from the "
            "mode, judged by gradient and curvature there. Control variates bring little noise "
            "only near the mode, and preconditioner and step size come from the curvature at "
            "the centre. Leave `center` out to have the mode searched.",
            CenterWarning,
            stacklevel=2,
        )
