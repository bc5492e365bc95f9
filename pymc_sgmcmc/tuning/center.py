"""The mode of a posterior, or a point near it, for control variates and curvature."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from scipy import sparse

from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.gradient_estimators.center_difference import CenterDifference
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.tuning.curvature import Curvature, curvature_at, has_dense_curvature
from pymc_sgmcmc.tuning.gaussian import (
    FEWEST_PAIRS,
    NONE,
    Mismatch,
    MismatchAlongCoordinates,
    chi_quantiles,
)
from pymc_sgmcmc.tuning.subsample import Subsample


@dataclass(frozen=True)
class Center:
    """A point near the posterior mode with the gradients and the curvature there.

    Attributes
    ----------
    position : numpy.ndarray, shape (d,)
    gradient : numpy.ndarray, shape (d,)
        Full-data gradient of the log posterior.
    likelihood_gradient : numpy.ndarray, shape (d,)
        The part of the gradient that comes from the rows.
    curvature : Curvature
    difference : CenterDifference, optional
        The second-order expansion of the rows there, where their sum has been computed.
    bend : numpy.ndarray, shape (d,), optional
        Error of each mean, in standard deviations and to first order, for a chain whose variances
        are all too large by a factor of two. It comes from third derivatives of the log density.
    of_rows : scipy.sparse.csr_array, shape (d, d), optional
        Minus the Hessian of the log likelihood there, where rows have few coordinates each.
    steepest : float
        Largest curvature within reach of a long run, in units of that of the Gaussian.
    misfit : Mismatch or MismatchAlongCoordinates
        How the Gaussian around it differs from the posterior, as far as a search has compared them.
    is_guide : bool
        Whether that Gaussian is near the posterior, as far as is known.
    is_mode : bool
        Whether it is the end of a search for the mode.
    came_to_rest : bool
        Whether this search did so, in coordinates that remained what they were.
    collapsed : tuple of int
        Coordinates whose prior is of zero width at the end of that search, the narrowest first.
    """

    position: np.ndarray
    gradient: np.ndarray
    likelihood_gradient: np.ndarray
    curvature: Curvature
    difference: CenterDifference | None = field(default=None, repr=False, compare=False)
    bend: np.ndarray | None = None
    of_rows: sparse.csr_array | None = field(default=None, repr=False, compare=False)
    steepest: float = 1.0
    misfit: Mismatch | MismatchAlongCoordinates = field(default=NONE, repr=False, compare=False)
    is_guide: bool = True
    is_mode: bool = False
    came_to_rest: bool = True
    collapsed: tuple[int, ...] = ()

    @property
    def distance(self) -> float:
        """Estimated distance to the mode in posterior standard deviations (largest axis)."""
        return float(np.max(np.abs(self.curvature.root.T @ self.gradient)))


def second_order_is_quick(posterior: Posterior) -> bool:
    """Whether one pass sums the second-order expansion of all rows at a position."""
    return has_dense_curvature(posterior) and posterior.has_second_derivatives


def center_at(
    posterior: Posterior,
    position: np.ndarray,
    curvature: Curvature | None = None,
    gradient: np.ndarray | None = None,
) -> Center:
    """Centre at a given point, by one pass over the data where its gradient is not known."""
    if gradient is None:
        gradient = posterior.gradient(position)
    _, prior_gradient = posterior.log_prior_and_gradient(position)
    if not np.isfinite(gradient).all():
        labels = [
            label
            for label, value in zip(posterior.labels, gradient, strict=True)
            if not np.isfinite(value)
        ]
        raise ModelError(
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
            center.position + center.curvature.root @ rng.standard_normal(posterior.dimension)
        )
        for _ in range(count)
    ]


def laplace_pairs(posterior: Posterior, center: Center, count: int) -> list[dict[str, np.ndarray]]:
    """Points of the Gaussian approximation in pairs on opposite sides, along orthogonal directions.

    The mean over all directions is exact for functions that are quadratic around the centre. The
    squared distances from the centre have the same mean as those of draws, d, and about the same
    spread.
    """
    d = posterior.dimension
    rng = np.random.default_rng(2014)
    sets = -(-count // (2 * d))
    radii = chi_quantiles(sets, d)
    radii *= np.sqrt(d / np.mean(radii**2))
    points = []
    for radius in radii:
        directions = np.linalg.qr(rng.standard_normal((d, d)))[0][: (count + 1) // 2]
        for direction in directions:
            shift = center.curvature.root @ (radius * direction)
            points += [center.position + shift, center.position - shift]
    return [posterior.layout.unravel(point) for point in points]
