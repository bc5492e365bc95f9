r"""A search for funnels: parts of a posterior far narrower than the part around its centre.

In a model of centred effects, :math:`\theta_g \sim N(\mu, \tau^2)`, effects become as narrow as τ
where τ is small. Where rows leave it open how small it is, much of the posterior may lie where a
step that suits the centre is too long. Gradients at points of the Gaussian around the centre hardly
show it, since few of these points lie there. Rows say nothing of τ given the effects, so that the
way into the funnel can be followed without them: their log likelihood is taken as quadratic, and
the other coordinates x are integrated out by Laplace's approximation, as in Rue, Martino and
Chopin (2009),

.. math:: \log \pi(u) = \log p(\hat x, u) - \tfrac12 \log \det H(u).

Steps for a relative variance error δ at the centre, with its covariance Λ as the preconditioner,
leave the covariance :math:`(H - \delta H \Lambda H)^{-1}` of x given u. Over it, the mean gradient
in u is that of

.. math:: \log \pi(u) + \tfrac12 \log \det(1 - \delta \Lambda H(u)),

which is what a chain has for the law of u. It has none of the part where a step is not stable.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import linalg
from scipy.interpolate import CubicSpline

from pymc_sgmcmc.errors import CenterWarning, warn
from pymc_sgmcmc.guests import remedy
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.posterior.position import PositionLayout, untransformed
from pymc_sgmcmc.tuning.center import Center
from pymc_sgmcmc.tuning.curvature import (
    coordinate_scale,
    curvature_by_differences,
    scaled_precision,
)
from pymc_sgmcmc.tuning.step_size import VARIANCE_INFLATION
from pymc_sgmcmc.tuning.subsample import Subsample

SMALLEST_RATIO = 0.85
"""A chain may have so small a part of the standard deviation of the posterior along a way. Down to
0.75 the prediction is right to 0.05, and beyond it is too small by up to 0.2, since chains go some
way into the part where a step is not stable."""

LONGEST_WAY = 40
"""The way into a funnel is followed to both sides as far as this, in standard deviations of the
Gaussian around the centre. The posterior is up to three times as wide."""

NEGLIGIBLE = 1e-5
"""A way ends where the density is less than this part of the largest. The standard deviation of an
exponential tail is then right to a hundredth."""

PARTS = 20
"""Densities are interpolated at so many places in a standard deviation."""

WAYS = (3, 10)
"""So many ways are followed, the fewer the longer the position is."""

COORDINATES = 1000
"""So many coordinates have all ways together, which bounds the time."""

LEAST_BEND = 0.01
"""A coordinate makes no funnel where one standard deviation of it, given the others, changes the
curvature of no other one by this part."""

BEND_WIDTH = 0.3
"""Second differences are taken over so many standard deviations of a coordinate given the others,
which is small enough for the bend and large enough for single precision."""

LARGEST_INFORMATION = 0.1
"""Rows are the cause of at most this part of the curvature in a coordinate that makes a funnel."""

MOST_NEWTON_STEPS = 7
"""Newton steps to the mode of the other coordinates. One is enough where their prior is normal."""

NEWTON_TOLERANCE = 1e-3
"""The steps end where one is shorter than this many standard deviations."""


@dataclass(frozen=True)
class Funnel:
    """A way along which a posterior becomes narrow, and what a chain makes of it.

    Attributes
    ----------
    coordinate : int
        The scale that changes most along the way.
    narrow : int
        The narrowest coordinate of the variable that becomes narrow most of all.
    variable : str
        This variable.
    sd_ratio : float
        Predicted standard deviation along the way, relative to that of the posterior.
    """

    coordinate: int
    narrow: int
    variable: str
    sd_ratio: float


def warn_of_funnel(posterior: Posterior, subsample: Subsample, center: Center) -> None:
    """Warn where a chain with steps for the centre misses a narrow part of the posterior.

    Warns
    -----
    CenterWarning
    """
    with np.errstate(all="ignore"):
        funnel = find_funnel(posterior, subsample, center)
    if funnel is None:
        return
    labels, name = posterior.labels, funnel.variable
    call = remedy(posterior.model, [name])
    warn(
        f"The posterior is a funnel: {labels[funnel.narrow]} is much narrower in a tail of "
        f"{labels[funnel.coordinate]} than around the centre, and steps are too long there. The "
        f"standard deviation of {labels[funnel.coordinate]} may be only {funnel.sd_ratio:.2g} "
        f"times that of the posterior. Write `{name}` non-centred, "
        f"{'' if call is None else f'use {call}, '}or sample with NUTS.",
        CenterWarning,
    )


def find_funnel(
    posterior: Posterior,
    subsample: Subsample,
    center: Center,
    inflation: float = VARIANCE_INFLATION,
) -> Funnel | None:
    """The way on which a chain would miss most, None where it misses little.

    Parameters
    ----------
    subsample : Subsample
        The rows from which the curvature is computed.
    inflation : float
        Relative error of variances that steps are for.
    """
    if not posterior.has_rows:
        return None
    bends = _bends(posterior, center)
    bending = _bending(bends)
    if not bending:
        return None
    information = _information(posterior, subsample, center)
    share = information.diagonal() / center.curvature.precision.diagonal()
    bending = [number for number in bending if share[number] < LARGEST_INFORMATION]
    if not bending:
        return None
    others = np.setdiff1d(np.arange(posterior.dimension), bending)
    found = [
        _along(posterior, center, direction, others, information, inflation)
        for direction in _directions(center, bends, bending)
    ]
    funnels = [each for each in found if each is not None and each.sd_ratio < SMALLEST_RATIO]
    return min(funnels, key=lambda funnel: funnel.sd_ratio, default=None)


def _bends(posterior: Posterior, center: Center) -> np.ndarray:
    """Relative change of the prior's curvature in each coordinate along each other, shape (d, d).

    Rows are the coordinates that move, by a standard deviation given the others. The change of the
    curvature in j along i is the second difference along j of the gradient in i. Coordinates of
    effects follow their scale by what rows say of them, so that they are as wide at any scale.
    """
    scale = center.curvature.conditional_deviations
    width = BEND_WIDTH * scale
    at, shifts = center.position, np.diag(width)
    gradients = posterior.prior_gradients(np.concatenate([at[None], at + shifts, at - shifts]))
    (here,), ahead, behind = np.split(gradients, [1, 1 + len(at)])
    curvature = -(ahead + behind - 2 * here).T / width**2
    if posterior.coordinates is not None:
        curvature[:, posterior.coordinates.follow_scales] = 0.0
    return scale[:, None] * curvature * scale**2


def _bending(bends: np.ndarray) -> list[int]:
    """Coordinates along which the prior of others becomes narrower or wider.

    The first one changes it most. Effects change the curvature in their scale too. But each of them
    changes little else, while the scale changes the curvature in all of them; and the curvature in
    a normal variable does not change along itself.
    """
    changes = np.abs(bends)
    own = changes.diagonal().copy()
    np.fill_diagonal(changes, 0.0)
    whole = changes.sum(1)
    largest = np.where(whole[:, None] > whole, changes, 0.0).max(axis=1)
    bending = np.flatnonzero((largest > LEAST_BEND) & (own > LEAST_BEND))
    return bending[np.argsort(-largest[bending], kind="stable")].tolist()


def _directions(center: Center, bends: np.ndarray, bending: list[int]) -> list[np.ndarray]:
    """Ways on which the prior becomes narrower, each a standard deviation of the posterior long.

    The first one is that on which it does so most: a scale may be a product of several. The others
    follow one coordinate each.
    """
    dimension = len(bends)
    count = int(np.clip(COORDINATES // dimension, *WAYS))
    slopes = np.zeros((len(bending), dimension))
    slopes[np.arange(len(bending)), bending] = 1.0
    if len(bending) > 1:
        others = np.setdiff1d(np.arange(dimension), bending)
        combined = np.zeros(dimension)
        combined[bending] = (
            bends[np.ix_(bending, others)].sum(1) / center.curvature.conditional_deviations[bending]
        )
        slopes = np.concatenate([combined[None], slopes])
    directions = []
    for slope in slopes[:count]:
        direction = center.curvature.covariance @ slope
        directions.append(direction / np.sqrt(slope @ direction))
    return directions


def _information(posterior: Posterior, subsample: Subsample, center: Center) -> np.ndarray:
    """Curvature of the log likelihood, shape (d, d)."""
    scale = coordinate_scale(posterior, subsample, center.position)
    precision = scaled_precision(posterior, subsample, center.position, scale)
    everything = np.arange(posterior.dimension)
    prior = _prior_curvature(
        posterior, center.position, everything, center.curvature.conditional_deviations
    )
    return precision / np.outer(scale, scale) - prior


def _prior_curvature(
    posterior: Posterior, position: np.ndarray, some: np.ndarray, scale: np.ndarray
) -> np.ndarray:
    """Minus the Hessian of the log prior in some coordinates of known scales."""

    def gradients(values: np.ndarray) -> np.ndarray:
        positions = np.tile(position, (len(values), 1))
        positions[:, some] = values
        return posterior.prior_gradients(positions)[:, some]

    width = posterior.difference_width * scale
    return curvature_by_differences(gradients, position[some], width)


def _along(
    posterior: Posterior,
    center: Center,
    direction: np.ndarray,
    others: np.ndarray,
    information: np.ndarray,
    inflation: float,
) -> Funnel | None:
    """What a chain makes of the law of the place on a way.

    Parameters
    ----------
    others : numpy.ndarray of int
        Coordinates that do not bend the prior, over which the density is integrated.
    information : numpy.ndarray, shape (d, d)
        Curvature of the log likelihood.
    """
    found: dict[int, tuple[float, np.ndarray]] = {}
    for side in (1, -1):
        for place in range(0, side * (LONGEST_WAY + 1), side):
            position = center.position + place * direction
            try:
                here = _laplace(posterior, center, position, others, information)
            except (linalg.LinAlgError, ValueError):
                break
            found[place] = here
            if here[0] < max(log_mass for log_mass, _ in found.values()) + np.log(NEGLIGIBLE):
                break
    if len(found) < 2:
        return None
    places = sorted(found)
    block = np.ix_(others, others)
    root = linalg.cholesky(center.curvature.covariance.dense()[block], lower=True)
    steepness = np.array([linalg.eigvalsh(root.T @ found[place][1] @ root) for place in places])
    between = np.linspace(places[0], places[-1], PARTS * (places[-1] - places[0]) + 1)
    log_masses = CubicSpline(places, [found[place][0] for place in places])(between)
    # Each direction becomes steeper by about the same factor from place to place.
    steepness = np.exp(CubicSpline(places, np.log(np.maximum(steepness, 1e-9)))(between))
    stable = np.maximum(1 - inflation * steepness, 0.0)
    sd = _deviation(between, log_masses)
    with np.errstate(divide="ignore"):
        chain_sd = _deviation(between, log_masses + 0.5 * np.log(stable).sum(1))
    curvature = np.zeros((2, posterior.dimension))
    curvature[:, others] = [found[place][1].diagonal() for place in (places[0], places[-1])]
    curvature /= center.curvature.precision.diagonal()
    narrow, variable = _narrowest(posterior.layout, max(curvature, key=np.max))
    moved = np.abs(direction / center.curvature.standard_deviations)
    moved[others] = 0.0
    coordinate = int(moved.argmax())
    return Funnel(coordinate, narrow, variable, chain_sd / sd)


def _narrowest(layout: PositionLayout, curvature: np.ndarray) -> tuple[int, str]:
    """The narrowest coordinate of the variable that becomes narrow most of all, and its name.

    A mean of effects becomes narrow with them.
    """
    growth = np.log(np.maximum(curvature, 1.0))
    growths = [growth[part] for part in layout.slices]
    number = max(range(len(growths)), key=lambda number: growths[number].sum())
    narrow = layout.slices[number].start + int(growths[number].argmax())
    return narrow, untransformed(layout.names[number])


def _deviation(places: np.ndarray, log_masses: np.ndarray) -> float:
    """Standard deviation of a law."""
    masses = np.exp(log_masses - log_masses.max())
    masses /= masses.sum()
    return float(np.sqrt(masses @ (places - masses @ places) ** 2))


def _laplace(
    posterior: Posterior,
    center: Center,
    position: np.ndarray,
    others: np.ndarray,
    information: np.ndarray,
) -> tuple[float, np.ndarray]:
    """Logarithm of the mass over the others, and the curvature at their mode.

    The rest is that of the position.

    Raises
    ------
    numpy.linalg.LinAlgError, ValueError
        Where the log density bends upwards or is not finite, or Newton's method finds no mode.
    """
    position, scale = position.copy(), center.curvature.conditional_deviations[others]
    of_others = information[np.ix_(others, others)]

    def density_and_gradient() -> tuple[float, np.ndarray]:
        value, prior = posterior.log_prior_and_gradient(position)
        shift = position - center.position
        likelihood = center.likelihood_gradient - information @ shift
        value += float(0.5 * shift @ (center.likelihood_gradient + likelihood))
        return value, (prior + likelihood)[others]

    _, gradient = density_and_gradient()
    for _ in range(MOST_NEWTON_STEPS):
        curvature = _prior_curvature(posterior, position, others, scale) + of_others
        factor = linalg.cholesky(curvature, lower=True)
        position[others] += linalg.cho_solve((factor, True), gradient)
        value, gradient = density_and_gradient()
        left = linalg.solve_triangular(factor, gradient, lower=True, check_finite=False)
        if np.abs(left).max() < NEWTON_TOLERANCE:
            return value - float(np.log(factor.diagonal()).sum()), curvature
        scale = np.minimum(scale, curvature.diagonal() ** -0.5)
    raise linalg.LinAlgError(f"{MOST_NEWTON_STEPS} Newton steps do not end at a mode.")
