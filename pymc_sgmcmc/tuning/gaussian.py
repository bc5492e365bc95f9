r"""The Gaussian nearest to a posterior, for centres where the mode is no guide.

In hierarchical models the joint mode may lie many standard deviations from where the posterior
has its mass, or at a scale of zero where the density has no bound. The Gaussian
:math:`q = N(m, L L^\top)` with

.. math:: \mathrm{E}_q[\nabla \log \pi] = 0, \qquad
          \mathrm{E}_q[-\nabla^2 \log \pi] = (L L^\top)^{-1}

is the one with the least Kullback-Leibler divergence to the posterior (Opper and Archambeau
2009). Its mean is close to that of the posterior, and its precision is the curvature that a
chain meets on average. Both expectations are computed from gradients at points of q.

References
----------
M. Opper and C. Archambeau (2009). The variational Gaussian approximation revisited. *Neural
Computation* 21, 786-792.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import linalg

FEWEST_PAIRS = 50
"""Antithetic pairs of points at which gradients are averaged, at least; and at least d."""

MOST_ITERATIONS = 60
"""Steps after which the search is given up."""

CONVERGED_SHIFT = 0.05
"""Step of the mean, in standard deviations, below which the search ends."""

CONVERGED_SCALE = 0.1
"""Relative change of the precision in any direction below which it ends."""

LARGEST_STEP = 1.0
"""Longest step of the mean in each direction, in standard deviations."""

HOPELESS_SHIFT = 5.0
"""Mean gradient, after a third of the steps, at which the search is given up."""

PRECISION_BOUNDS = (0.25, 4.0)
"""Bounds on the change of the precision in one step."""


@dataclass(frozen=True)
class Gaussian:
    """N(mean, root rootᵀ).

    Attributes
    ----------
    mean : numpy.ndarray, shape (d,)
    root : numpy.ndarray, shape (d, d)
    converged : bool
        Whether the search ended because nothing changed any more.
    """

    mean: np.ndarray
    root: np.ndarray
    converged: bool


@dataclass(frozen=True)
class Mismatch:
    """How a Gaussian differs from a posterior, in units in which it is N(0, I).

    Attributes
    ----------
    gradient : numpy.ndarray, shape (d,)
        Mean gradient of the log posterior.
    precision : numpy.ndarray, shape (d, d)
        Mean curvature; the unit matrix where the Gaussian is right.
    lost : float
        Part of the points with no gradient, outside of the support say.
    """

    gradient: np.ndarray
    precision: np.ndarray
    lost: float = 0.0

    @property
    def shift(self) -> float:
        """Largest distance to the better mean in standard deviations."""
        return float(np.abs(self.gradient).max())

    @property
    def scales(self) -> np.ndarray:
        """Relative precisions in the directions in which they are uncorrelated, or NaN."""
        if not np.isfinite(self.precision).all():
            return np.full(len(self.precision), np.nan)
        return linalg.eigvalsh(self.precision)


def mismatch(
    gradient: Callable[[np.ndarray], np.ndarray],
    mean: np.ndarray,
    root: np.ndarray,
    rng: np.random.Generator,
) -> Mismatch:
    """Mean gradient and curvature over a Gaussian.

    Points are in antithetic pairs along random orthogonal directions: exact for a quadratic
    log density.
    """
    d = len(mean)
    sets = max(1, int(np.ceil(FEWEST_PAIRS / d)))
    total, outer, used = np.zeros(d), np.zeros((d, d)), 0
    for _ in range(sets):
        directions = np.linalg.qr(rng.standard_normal((d, d)))[0]
        radii = np.sqrt(rng.chisquare(d, size=d))
        for direction, radius in zip(directions, radii, strict=True):
            shift = radius * (root @ direction)
            ahead = root.T @ gradient(mean + shift)
            behind = root.T @ gradient(mean - shift)
            if not (np.isfinite(ahead).all() and np.isfinite(behind).all()):
                continue
            total += 0.5 * (ahead + behind)
            # -(ahead - behind) / 2 = radius * (mean curvature between the two) @ direction.
            outer += np.outer(direction, behind - ahead) / (2 * radius)
            used += 1
    if used < max(2, d * sets / 2):
        return Mismatch(np.full(d, np.inf), np.full((d, d), np.nan), 1.0)
    precision = d * outer / used
    lost = 1 - used / (sets * d)
    return Mismatch(total / used, 0.5 * (precision + precision.T), lost)


def fit_gaussian(
    gradient: Callable[[np.ndarray], np.ndarray], mean: np.ndarray, root: np.ndarray
) -> Gaussian:
    """Search the Gaussian nearest to a density with a given gradient of its logarithm.

    The expectations are over the same standardised points in each step, so that the search is
    that of a fixed point.

    Parameters
    ----------
    gradient : callable
        Of the log density at a position, shape (d,).
    mean, root : numpy.ndarray, shape (d,) and (d, d)
        Where to begin.
    """
    for iteration in range(MOST_ITERATIONS):
        found = mismatch(gradient, mean, root, np.random.default_rng(1747))
        if not np.isfinite(found.shift):
            # Half the width: fewer points where the density vanishes.
            root = root / 2
            continue
        if iteration >= MOST_ITERATIONS / 3 and found.shift > HOPELESS_SHIFT:
            break
        values, vectors = linalg.eigh(found.precision)
        # Half the way: whole steps can go round a skewed posterior for ever.
        change = np.clip((1 + values) / 2, *PRECISION_BOUNDS)
        step = vectors @ np.clip(vectors.T @ found.gradient / change, -LARGEST_STEP, LARGEST_STEP)
        mean = mean + root @ step
        root = root @ (vectors * change**-0.5) @ vectors.T
        small = np.abs(step).max() < CONVERGED_SHIFT
        if small and np.abs(values - 1).max() < CONVERGED_SCALE:
            return Gaussian(mean, root, True)
    return Gaussian(mean, root, False)
