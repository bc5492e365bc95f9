r"""A search for funnels: parts of a posterior far narrower than the part around its centre.

In a model of centred effects, :math:`\theta_g \sim N(\mu, \tau^2)`, effects become as narrow as τ
where τ is small. Where rows leave it open how small it is, much of the posterior may lie where a
step that suits the centre is too long. Gradients at points of the Gaussian around the centre hardly
show it, since few of these points lie there. Rows have the effects, and only the prior has their
scale, so that the way into the funnel can be followed without rows: their log likelihood is taken
as quadratic in the effects, and the other coordinates are integrated out by Laplace's
approximation, as in Rue, Martino and Chopin (2009).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
from pymc.util import get_untransformed_name, is_transformed_name
from scipy import linalg
from scipy.interpolate import PchipInterpolator

from pymc_sgmcmc.errors import CenterWarning
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.tuning.center import Center
from pymc_sgmcmc.tuning.curvature import (
    coordinate_scale,
    difference_width,
    prior_precision_diagonal,
    scaled_precision,
)
from pymc_sgmcmc.tuning.subsample import Subsample

NARROWER = 4.0
"""The posterior is too narrow for a step that suits the centre where its curvature in some
direction, given the coordinates that no row has, is more than this many times that of the Gaussian
around the centre. Variances of a chain are there too large by four times what the step is for."""

LARGEST_SHARE = 0.02
"""At most this part of the posterior may be so narrow. With 0.5 % the standard deviation of the log
scale of effects is right, with 5 % it is too small by a fifth, and with 20 % by a third."""

LONGEST_WAY = 20
"""The way into a funnel is followed to both sides as far as this, in standard deviations of the
Gaussian around the centre. The posterior is up to three times as wide."""

NEGLIGIBLE = 2e-3
"""A way ends where the density is less than this part of the largest."""

PARTS = 20
"""Masses and curvatures are interpolated at so many places in a standard deviation."""

MOST_WAYS = 10
"""So many ways are followed, along those coordinates that bend the prior most. A model has few
scales of effects, or a scale for each coefficient, which are alike."""

LEAST_BEND = 0.02
"""A coordinate makes no funnel where one standard deviation of it changes the curvature of no other
one by this part."""

MOST_NEWTON_STEPS = 8
"""Newton steps to the mode of the other coordinates. One is enough where their prior is normal."""

NEWTON_TOLERANCE = 1e-3
"""The steps end where one is shorter than this many standard deviations."""


@dataclass(frozen=True)
class Funnel:
    """A coordinate along which a posterior becomes narrow.

    Attributes
    ----------
    coordinate : int
        It has a long tail into the narrow part.
    share : float
        Part of the posterior that is too narrow for a step that suits the centre.
    narrow : int
        The coordinate that becomes narrowest.
    """

    coordinate: int
    share: float
    narrow: int


def warn_of_funnel(posterior: Posterior, subsample: Subsample, center: Center) -> None:
    """Warn where much of a posterior is far narrower than the part around the centre.

    Warns
    -----
    CenterWarning
    """
    with np.errstate(all="ignore"):
        funnel = find_funnel(posterior, subsample, center)
    if funnel is None:
        return
    labels, layout, narrow = posterior.labels, posterior.layout, funnel.narrow
    name = next(
        name
        for name, part in zip(layout.names, layout.slices, strict=True)
        if part.start <= narrow < part.stop
    )
    name = get_untransformed_name(name) if is_transformed_name(name) else name
    warnings.warn(
        f"The posterior is a funnel: about {max(funnel.share, 0.01):.0%} of it lies where "
        f"{labels[narrow]} is less than half as wide as around the centre, in a tail of "
        f"{labels[funnel.coordinate]}. Steps are too long there, so draws may miss this tail. "
        f"Write `{name}` non-centred, sample with NUTS or, where it has effects of groups, "
        f'integrate it out by `sample(marginalize=["{name}"])`.',
        CenterWarning,
        stacklevel=3,
    )


def find_funnel(posterior: Posterior, subsample: Subsample, center: Center) -> Funnel | None:
    """The coordinate along which most of the posterior is too narrow, None where there is none.

    The subsample has the rows from which the curvature is computed.
    """
    if not posterior.has_rows:
        return None
    has_rows = _has_rows(posterior, subsample, center)
    bending = _bending(posterior, center, has_rows)
    if not bending:
        return None
    others = np.setdiff1d(np.arange(posterior.dimension), bending)
    effects = has_rows[others]
    information = _row_information(posterior, subsample, center, others)
    information[~effects] = information[:, ~effects] = 0.0
    found = [
        _along(posterior, center, number, others, effects, information)
        for number in bending[:MOST_WAYS]
    ]
    funnels = [funnel for funnel in found if funnel is not None and funnel.share > LARGEST_SHARE]
    return max(funnels, key=lambda funnel: funnel.share, default=None)


def _has_rows(posterior: Posterior, subsample: Subsample, center: Center) -> np.ndarray:
    """Whether the log likelihood has a derivative in each coordinate, shape (d,)."""
    rng = np.random.default_rng(2009)
    points = [center.position, *(center.position + _draws(center, rng) for _ in range(2))]
    gradients = posterior.likelihood_gradient(np.array(points), subsample.rows)
    return (gradients != 0).any(axis=0)


def _draws(center: Center, rng: np.random.Generator) -> np.ndarray:
    return center.curvature.root @ rng.standard_normal(len(center.position))


def _bending(posterior: Posterior, center: Center, has_rows: np.ndarray) -> list[int]:
    """Coordinates of the prior alone along which that of effects becomes narrower or wider.

    The first one changes it most.
    """
    precision = center.curvature.precision.diagonal()[has_rows]

    def curvature(position: np.ndarray) -> np.ndarray:
        return prior_precision_diagonal(posterior, position)[has_rows] / precision

    here = curvature(center.position)
    changes = {
        number: np.abs(curvature(center.position + _direction(center, number)) - here).max(
            initial=0.0
        )
        for number in np.flatnonzero(~has_rows).tolist()
    }
    bending = [number for number, change in changes.items() if change > LEAST_BEND]
    return sorted(bending, key=lambda number: -changes[number])


def _narrow_scale(center: Center) -> np.ndarray:
    """Standard deviation of each coordinate given the others, shape (d,)."""
    return center.curvature.precision.diagonal() ** -0.5


def _direction(center: Center, number: int) -> np.ndarray:
    """Mean change of all coordinates for a change of one by a standard deviation."""
    deviations = center.curvature.standard_deviations
    unit = np.zeros(len(deviations))
    unit[number] = 1.0
    return center.curvature.covariance @ unit / deviations[number]


def _row_information(
    posterior: Posterior, subsample: Subsample, center: Center, effects: np.ndarray
) -> np.ndarray:
    """Curvature of the log likelihood in some coordinates."""
    scale = coordinate_scale(posterior, subsample, center.position)
    precision = scaled_precision(posterior, subsample, center.position, scale)
    block = np.ix_(effects, effects)
    prior = _prior_curvature(posterior, center.position, effects, _narrow_scale(center)[effects])
    return precision[block] / np.outer(scale[effects], scale[effects]) - prior


def _prior_curvature(
    posterior: Posterior, position: np.ndarray, effects: np.ndarray, scale: np.ndarray
) -> np.ndarray:
    """Minus the Hessian of the log prior in some coordinates of known scales."""
    shifts = np.zeros((len(effects), len(position)))
    width = difference_width(posterior) * scale
    shifts[np.arange(len(effects)), effects] = width
    gradients = posterior.prior_gradients(np.concatenate([position - shifts, position + shifts]))
    below, above = np.split(gradients[:, effects], 2)
    curvature = (below - above) / (2 * width[:, None])
    return 0.5 * (curvature + curvature.T)


def _along(
    posterior: Posterior,
    center: Center,
    number: int,
    others: np.ndarray,
    effects: np.ndarray,
    information: np.ndarray,
) -> Funnel | None:
    """What part of the posterior is too narrow along a coordinate.

    Parameters
    ----------
    others : numpy.ndarray of int
        Coordinates that do not bend the prior, over which the density is integrated.
    effects : numpy.ndarray of bool
        Which of these have rows. The others, such as the mean of the effects, follow them.
    information : numpy.ndarray, shape (others, others)
        Curvature of the log likelihood.
    """
    direction = _direction(center, number)
    likelihood = center.likelihood_gradient[others]
    found: dict[int, tuple[float, np.ndarray]] = {}
    for side in (1, -1):
        for place in range(0, side * (LONGEST_WAY + 1), side):
            position = center.position + place * direction
            try:
                here = _laplace(posterior, center, position, others, information, likelihood)
            except (linalg.LinAlgError, ValueError):  # It bends upwards, or is not finite.
                break
            if here is None:
                break
            found[place] = here
            if here[0] < max(log_mass for log_mass, _ in found.values()) + np.log(NEGLIGIBLE):
                break
    if len(found) < 2:
        return None
    places = sorted(found)
    log_masses = np.array([found[place][0] for place in places])
    curvatures = [found[place][1][np.ix_(effects, effects)] for place in places]
    block = np.ix_(others[effects], others[effects])
    root = linalg.cholesky(center.curvature.covariance.dense()[block], lower=True)
    steepest = [linalg.eigvalsh(root.T @ each @ root)[-1] for each in curvatures]
    if max(steepest) <= NARROWER:
        return None
    between = np.linspace(places[0], places[-1], PARTS * (places[-1] - places[0]) + 1)
    masses = np.exp(PchipInterpolator(places, log_masses - log_masses.max())(between))
    narrow = PchipInterpolator(places, np.log(steepest))(between) > np.log(NARROWER)
    usual = center.curvature.precision.diagonal()[others[effects]]
    narrowest = curvatures[int(np.argmax(steepest))].diagonal() / usual
    share = float(masses[narrow].sum() / masses.sum())
    return Funnel(number, share, int(others[effects][narrowest.argmax()]))


def _laplace(
    posterior: Posterior,
    center: Center,
    position: np.ndarray,
    others: np.ndarray,
    information: np.ndarray,
    likelihood: np.ndarray,
) -> tuple[float, np.ndarray] | None:
    """Logarithm of the mass over the others, and the curvature at their mode.

    The rest is that of the position. The result is None where Newton's method finds no mode.

    Raises
    ------
    numpy.linalg.LinAlgError, ValueError
        Where the log density bends upwards or is not finite.
    """
    position, scale = position.copy(), _narrow_scale(center)[others]
    curvature = factor = None
    for _ in range(MOST_NEWTON_STEPS):
        value, prior = posterior.log_prior_and_gradient(position)
        shift = position[others] - center.position[others]
        gradient = prior[others] + likelihood - information @ shift
        if curvature is not None and factor is not None:
            left = linalg.solve_triangular(factor, gradient, lower=True, check_finite=False)
            if np.abs(left).max() < NEWTON_TOLERANCE:
                value += float(likelihood @ shift - 0.5 * shift @ information @ shift)
                return value - float(np.log(factor.diagonal()).sum()), curvature
        curvature = _prior_curvature(posterior, position, others, scale) + information
        factor = linalg.cholesky(curvature, lower=True)
        position[others] += linalg.cho_solve((factor, True), gradient)
        scale = np.minimum(scale, curvature.diagonal() ** -0.5)
    return None
