"""The mode of a posterior, or a point near it, for control variates and curvature."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from scipy import linalg, optimize, stats

from pymc_sgmcmc.checks import one_of
from pymc_sgmcmc.errors import CenterWarning
from pymc_sgmcmc.matrices import apply, apply_transposed, triangular_root
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.tuning.curvature import (
    DENSE_DIMENSION,
    Curvature,
    coordinate_scale,
    curvature_at,
    difference_width,
    prior_precision_diagonal,
    row_information,
)
from pymc_sgmcmc.tuning.gaussian import (
    FEWEST_PAIRS,
    HOPELESS_SHIFT,
    PAIRS_ALONG_COORDINATES,
    Mismatch,
    MismatchAlongCoordinates,
    fit_gaussian,
    mismatch,
    mismatch_along_coordinates,
    steepest_curvature,
)
from pymc_sgmcmc.tuning.subsample import SUBSAMPLE_OPERATIONS, SUBSAMPLE_ROWS, Subsample

_log = logging.getLogger("pymc.sgmcmc")  # below PyMC's logger, so that its settings hold

SEARCHES = ("lbfgs", "sgd")
"""Names of the searches for the mode."""

CENTER_TOLERANCE = 1e-2
"""Distance to the mode, in posterior standard deviations, at which the search ends."""

FARTHEST_CENTER = 3.0
"""Distance from the mode, in posterior standard deviations, beyond which a centre is no mode."""

MOST_UNLIKE_GAUSSIAN = 3.0
"""Factor by which the fall of the log density around the centre may differ from a Gaussian's,
and the mean curvature over it from that at the centre."""

LARGEST_SHIFT = 0.3
"""Distance of a Gaussian's mean from a better one, in standard deviations, that is small."""

LARGEST_INIT_SHIFT = 1.0
"""That distance where the Gaussian is a user's."""

LARGEST_SPREAD = 5.0
"""Standard deviation of the log density over a Gaussian, less its own, that is small: one of 200
group effects and their scale has about one."""

LARGEST_LOSS = 0.05
"""Part of a Gaussian outside of the posterior's support that is small."""

ABSURD_DISTANCE = 1e4
"""Standard deviations beyond which a message gives no number."""

FLAT_CURVATURE = 1e-7
"""Smallest over largest curvature, of coordinates scaled to one, of a direction that is flat: the
floor that `dense_curvature` puts under it is 1e-8."""

FLAT = 1e-6
"""Mean curvature, relative to that at the centre, below which a direction is flat."""

COLLAPSED_PRIOR = 1e8
"""Curvature of the log prior over that at the start, of coordinates that have no room left."""

COLLAPSED_SHARE = 1e4
"""Curvature of the log prior there over what the rows say."""

MOST_RECENTERINGS = 4
"""Passes over the data for the Gaussian nearest to the posterior, at most."""

NEWTON_STEPS = 2
"""Of the centre of a long position towards the mean of the posterior, at most,"""

NEWTON_PROGRESS = 0.35
"""and the part of the distance that each may leave: of a regression with as many as a third as many
predictors as rows a tenth is left, of group effects with their scale nearly all."""

MOST_NARROWINGS = 20
"""Times that a Gaussian that is far from the posterior is made narrower, at most."""

LARGEST_NARROWING = 16.0
"""Factor by which its variance in a direction is then divided at once, at most."""

DISPERSED_PAIRS = 3
"""Pairs of searches for other modes, from starts within 2 of the first in each coordinate. Those of
a pair are on opposite sides of it: where modes are exchangeable, they end at different ones."""

FARTHEST_MODE = 5.0
"""Distance, in standard deviations, at which two searches ended at different modes."""

NEGLIGIBLE_MODE = 20.0
"""Difference of log densities beyond which the lower mode holds nearly no mass."""

LEAST_VALLEY = 1.0
"""Log density half-way below that at both ends, from which these are two modes."""

EXPECTED_ITERATIONS = 20
"""Steps of the search for that Gaussian for which its rows are reckoned."""

EVIDENCE_DRAWS = 50
"""Points at which the log density is averaged to choose between two Gaussians."""

SMALLEST_CONDITIONAL = 1e-12
"""Standard deviation of a coordinate given those before it, over that of its own, from which the
root of a covariance is not singular: rounding leaves some 1e-16 d."""


@dataclass(frozen=True)
class Center:
    """A point near the posterior mode with what the control variate needs there.

    Attributes
    ----------
    position : numpy.ndarray, shape (d,)
    gradient : numpy.ndarray, shape (d,)
        Full-data gradient of the log posterior.
    likelihood_gradient : numpy.ndarray, shape (d,)
        The part of it that comes from the rows.
    curvature : Curvature
    bend : numpy.ndarray, shape (d,), optional
        By how many standard deviations each mean is off for a chain with all variances too large by
        a factor of two, to first order: from the third derivatives of the log density.
    """

    position: np.ndarray
    gradient: np.ndarray
    likelihood_gradient: np.ndarray
    curvature: Curvature
    bend: np.ndarray | None = None

    @property
    def distance(self) -> float:
        """Estimated distance to the mode in posterior standard deviations (largest axis)."""
        return float(np.max(np.abs(apply_transposed(self.curvature.root, self.gradient))))


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
        center = _find_mode(posterior, subsample, large, start, scale, method)
    flat = any(issubclass(one.category, CenterWarning) for one in record)
    collapsed = collapsed_coordinates(posterior, subsample, center, start)
    if not center.curvature.is_dense:
        judge = Subsample(posterior, evaluations=2 * PAIRS_ALONG_COORDINATES)
        center, along = _recentered(posterior, judge, center)
        if _is_guide(along) and not flat and not len(collapsed):
            warn_of_other_modes(posterior, subsample, center, start, scale)
        else:
            _warn_of_no_guide(posterior, along, center, collapsed, flat, at_mode=True)
        return center
    # Control variates at the centre leave so little noise that fewer rows serve as well.
    judge = Subsample(posterior, evaluations=8 * max(FEWEST_PAIRS, posterior.dimension))
    found = _mismatch(posterior, judge, center)
    if _is_guide(found) and not flat and not len(collapsed):
        warn_of_other_modes(posterior, subsample, center, start, scale)
        return _with_bend(center, found.gradient)
    with np.errstate(all="ignore"):
        better, near = _nearest_gaussian(posterior, judge, center, start, scale, subsample)
    if not near:
        if flat and _has_flat_direction(center.curvature):
            # Along it other searches end wherever rounding leaves them.
            better = center
        found = _mismatch(posterior, judge, better)
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
    return _with_bend(better, _mismatch(posterior, judge, better).gradient)


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
    along = _mismatch_along(posterior, judge, center)
    for _ in range(NEWTON_STEPS):
        finite = np.isfinite(along.gradient).all() and np.isfinite(along.newton).all()
        if along.shift <= LARGEST_SHIFT or not finite:
            break
        shift = apply(center.curvature.root, along.newton)
        try:
            moved = center_at(posterior, center.position + shift, center.curvature)
        except ValueError:  # nothing finite there
            break
        after = _mismatch_along(posterior, judge, moved)
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


def _find_mode(
    posterior: Posterior,
    subsample: Subsample,
    large: Subsample,
    start: np.ndarray,
    scale: np.ndarray,
    method: str,
) -> Center:
    position = _minimize(subsample.log_density_and_gradient, start, scale, tolerance=0.1)
    curvature = curvature_at(posterior, large, position)
    if method == "sgd":
        position = _newton_sgd(posterior, position, curvature)
    else:
        before = position
        position = _minimize(
            posterior.log_density_and_gradient,
            before,
            curvature.root,
            tolerance=CENTER_TOLERANCE,
        )
        if np.max(np.abs(position - before) / curvature.standard_deviations) > 1:
            curvature = curvature_at(posterior, large, position)
    return center_at(posterior, position, curvature)


def warn_of_other_modes(
    posterior: Posterior,
    subsample: Subsample,
    center: Center,
    start: np.ndarray,
    scale: np.ndarray,
    *,
    at_mode: bool = True,
) -> None:
    """Warn where searches from dispersed starts end at another mode that may hold mass.

    With `at_mode` false the centre is that of a Gaussian that is near the posterior. Where it has
    no mode nearby, modes say nothing of the mass, and nothing is said.

    Warns
    -----
    CenterWarning
    """
    rng = np.random.default_rng(1963)
    sds = center.curvature.standard_deviations
    with np.errstate(all="ignore"):
        # On the same rows as the others, which move the mode by some standard deviations.
        first = _minimize(subsample.log_density_and_gradient, center.position, scale, 0.1)
        top, _ = subsample.log_density_and_gradient(first)
        moved = float(np.max(np.abs(first - center.position) / sds))
        if not at_mode and moved > FARTHEST_MODE:
            return
        far = max(FARTHEST_MODE, 2 * moved)
        shifts = rng.uniform(-2, 2, size=(DISPERSED_PAIRS, len(start)))
        for begin in (start + sign * shift for shift in shifts for sign in (1, -1)):
            try:
                end = _minimize(subsample.log_density_and_gradient, begin, scale, 0.1)
            except ValueError:
                continue  # not finite there
            value, gradient = subsample.log_density_and_gradient(end)
            distance = float(np.max(np.abs(end - first) / sds))
            ended = np.max(np.abs(scale * gradient)) < 1
            if not (ended and distance > far and value > top - NEGLIGIBLE_MODE):
                continue
            between, _ = subsample.log_density_and_gradient((first + end) / 2)
            if not between < min(value, top) - LEAST_VALLEY:
                continue  # of one mode, from which a search ended early
            warnings.warn(
                "The posterior has more than one mode: a search from another start ended "
                f"{distance:.3g} standard deviations from the centre, where the log density is "
                f"{abs(value - top):.3g} {'higher' if value > top else 'lower'}. Chains begin at "
                "one of them, hardly ever leave it, and agree there. Order or fix what makes modes "
                "exchangeable, give `center`, or sample with NUTS.",
                CenterWarning,
                stacklevel=3,
            )
            return


# --- The Gaussian nearest to the posterior ---------------------------------------------------


def _gradient_around(
    posterior: Posterior, subsample: Subsample, center: Center
) -> Callable[[np.ndarray], np.ndarray]:
    """Gradient of the log posterior from a subsample, with control variates at a centre."""
    _, at_center = posterior.log_likelihood_and_gradient(center.position, subsample.rows)
    correction = center.likelihood_gradient - subsample.weight * at_center

    def gradient(position: np.ndarray) -> np.ndarray:
        return subsample.gradient(position) + correction

    return gradient


def _mismatch(posterior: Posterior, subsample: Subsample, center: Center) -> Mismatch:
    rng = np.random.default_rng(1735)
    gradient = _gradient_around(posterior, subsample, center)
    return mismatch(gradient, center.position, center.curvature.root, rng)


def _mismatch_along(
    posterior: Posterior, subsample: Subsample, center: Center
) -> MismatchAlongCoordinates:
    gradient = _gradient_around(posterior, subsample, center)
    root, rng = center.curvature.root, np.random.default_rng(1735)
    with np.errstate(all="ignore"):
        return mismatch_along_coordinates(
            gradient, center.position, root, rng, difference_width(posterior)
        )


def collapsed_coordinates(
    posterior: Posterior, subsample: Subsample, center: Center, start: np.ndarray
) -> np.ndarray:
    """Coordinates to which the prior leaves no room at a centre, but did at the start, worst first.

    The density of group effects with a scale of their own has no bound where scale and effects
    are zero: a search may go there without end, and finds a Gaussian of no width, at which all
    gradients are small. Nothing in the rows asks for it.
    """
    prior = np.abs(prior_precision_diagonal(posterior, center.position))
    before = np.abs(prior_precision_diagonal(posterior, start))
    information = row_information(posterior, subsample, center.position)
    with np.errstate(all="ignore"):
        narrower = (prior > COLLAPSED_PRIOR * before) & (prior > COLLAPSED_SHARE * information)
    found = np.flatnonzero(narrower & (before > 0))
    return found[np.argsort(-prior[found], kind="stable")]


def _is_guide(
    found: Mismatch | MismatchAlongCoordinates, largest_shift: float = LARGEST_SHIFT
) -> bool:
    """Whether a Gaussian is near the posterior."""
    if not (found.shift <= largest_shift and found.lost <= LARGEST_LOSS):
        return False
    scales = found.scales
    return bool(scales[0] > 1 / MOST_UNLIKE_GAUSSIAN and scales[-1] < MOST_UNLIKE_GAUSSIAN)


def _nearest_gaussian(
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
    far = [(unlikeness(_mismatch(posterior, judge, mode), mode), mode)]
    for position, root in begins:
        center: Center | None = None
        settles = True
        for _ in range(MOST_RECENTERINGS):
            # Rows that are left out move the mean: control variates at the last one.
            gradient = (
                subsample.gradient
                if center is None
                else _gradient_around(posterior, subsample, center)
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
            found = _mismatch(posterior, judge, center)
            if _is_guide(found, LARGEST_SHIFT / 3) or not found.shift <= HOPELESS_SHIFT:
                break
        if center is None:
            continue
        found = _mismatch(posterior, judge, center)
        how_far = unlikeness(found, center)
        evidence, spread = _evidence(subsample, center)
        if _is_guide(found) and not how_far[0] and spread <= LARGEST_SPREAD:
            near.append((evidence, center))
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
        found = _mismatch(posterior, judge, center)
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
        _gradient_around(posterior, judge, center),
        center.position,
        root,
        np.random.default_rng(1953),
        difference_width(posterior),
    )
    return replace(center, curvature=_curvature_of(root / np.sqrt(max(1.0, steepest))))


def _evidence(subsample: Subsample, center: Center) -> tuple[float, float]:
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
    gradient = _gradient_around(posterior, subsample, center)
    root = curvature.root if curvature.is_dense else np.diag(curvature.root)
    found = mismatch(gradient, position, root, np.random.default_rng(1735))
    scales = found.scales
    if curvature.is_dense:
        shift, guide = found.shift, _is_guide(found, LARGEST_INIT_SHIFT)
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


def center_at(
    posterior: Posterior, position: np.ndarray, curvature: Curvature | None = None
) -> Center:
    """Evaluate what a control variate needs at a given point: one pass over the data."""
    _, gradient = posterior.log_density_and_gradient(position)
    _, prior_gradient = posterior.log_prior_and_gradient(position)
    if not np.isfinite(gradient).all():
        labels = [
            label
            for label, value in zip(posterior.labels, gradient, strict=True)
            if not np.isfinite(value)
        ]
        raise ValueError(
            f"The gradient of the log posterior is not finite at the centre ({labels[:5]}). "
            "Give another `center`, or other initial values."
        )
    if curvature is None:
        evaluations = 2 * max(FEWEST_PAIRS, posterior.dimension)
        curvature = curvature_at(posterior, Subsample(posterior, evaluations), position)
    return Center(np.asarray(position, float), gradient, gradient - prior_gradient, curvature)


def laplace_draws(posterior: Posterior, center: Center, count: int) -> list[dict[str, np.ndarray]]:
    """Points drawn from the Gaussian approximation of a posterior at a centre."""
    rng = np.random.default_rng(2014)
    return [
        posterior.layout.unravel(
            center.position + apply(center.curvature.root, rng.standard_normal(posterior.dimension))
        )
        for _ in range(count)
    ]


def laplace_pairs(posterior: Posterior, center: Center, count: int) -> list[dict[str, np.ndarray]]:
    """Points of the Gaussian approximation in pairs on opposite sides, along orthogonal directions.

    Means over all directions of functions that are quadratic around the centre are exact. The
    squared distances have the mean of those of draws, d, and about their spread.
    """
    d = posterior.dimension
    rng = np.random.default_rng(2014)
    sets = -(-count // (2 * d))
    radii = stats.chi.ppf((np.arange(sets) + 0.5) / sets, d)
    radii *= np.sqrt(d / np.mean(radii**2))
    points = []
    for radius in radii:
        directions = np.linalg.qr(rng.standard_normal((d, d)))[0][: (count + 1) // 2]
        for direction in directions:
            shift = apply(center.curvature.root, radius * direction)
            points += [center.position + shift, center.position - shift]
    return [posterior.layout.unravel(point) for point in points]


def _minimize(log_density_and_gradient, start, scale, tolerance: float) -> np.ndarray:
    """Maximize a log density by L-BFGS in scaled coordinates."""

    def objective(coordinates):
        value, gradient = log_density_and_gradient(start + apply(scale, coordinates))
        if not (np.isfinite(value) and np.isfinite(gradient).all()):
            return np.inf, np.zeros_like(coordinates)
        return -value, -apply_transposed(scale, gradient)

    first = objective(np.zeros_like(start))
    if not np.isfinite(first[0]):
        raise ValueError(
            "The log posterior or its gradient is not finite at the start of the search for "
            "the mode. Check the data and the priors with `model.debug()`, or give `center`."
        )
    # SciPy stops on the largest gradient component, which in scaled coordinates is about the
    # distance to the mode in standard deviations.
    result = optimize.minimize(
        objective,
        np.zeros_like(start),
        jac=True,
        method="L-BFGS-B",
        options={"gtol": tolerance, "ftol": 0.0, "maxiter": 1000, "maxcor": 20},
    )
    if not np.max(np.abs(result.jac)) <= 10 * tolerance:
        _log.debug("Search for the mode ended early: %s", result.message)
    return start + apply(scale, result.x)


def _newton_sgd(posterior: Posterior, position: np.ndarray, curvature: Curvature) -> np.ndarray:
    """One pass of Newton steps of size 1/k from blocks of rows in random order."""
    rng = np.random.default_rng(1951)
    blocks = np.array_split(
        rng.permutation(posterior.n_rows), max(1, posterior.n_rows // SUBSAMPLE_ROWS)
    )
    for number, block in enumerate(blocks, start=1):
        rows = posterior.take(np.sort(block))
        _, gradient = posterior.log_prior_and_gradient(position)
        _, row_gradient = posterior.log_likelihood_and_gradient(position, rows)
        gradient = gradient + posterior.n_rows / len(block) * row_gradient
        position = position + apply(curvature.covariance, gradient) / number
    return position
