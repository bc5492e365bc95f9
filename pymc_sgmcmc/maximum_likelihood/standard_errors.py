"""Standard errors of a maximum, on the constrained scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pymc_sgmcmc.errors import UndeterminedError
from pymc_sgmcmc.marginal.likelihood import Objective, RestrictedLikelihood
from pymc_sgmcmc.maximum_likelihood.factors import Factors
from pymc_sgmcmc.maximum_likelihood.maximum import (
    SMALLEST_EIGENVALUE,
    Maximum,
    at_boundary,
    scaled_eigenvectors,
)

DIFFERENCE = 1e-5
"""Derivatives of the constrained values are central differences over this distance, relative to the
coordinate where that is above one. Truncation and rounding are then both at some 1e-10."""

UNDETERMINED = 1e-3
"""An entry has no standard error where a unit step in a direction that the likelihood does not
determine moves it by more than this times the standard error from the other directions."""


@dataclass(frozen=True, eq=False)
class Uncertainty:
    """The uncertainty of the constrained values at a maximum.

    Attributes
    ----------
    position : numpy.ndarray, shape (d,)
        The maximum, with the fixed effects where they follow from it.
    covariance : numpy.ndarray, shape (entries, entries)
    standard_errors : numpy.ndarray, shape (entries,)
        NaN where the likelihood does not determine the entry.
    at_boundary : tuple of int
        Coordinates of the position that run away to the boundary.
    """

    position: np.ndarray
    covariance: np.ndarray
    standard_errors: np.ndarray
    at_boundary: tuple[int, ...]


def uncertainty(
    objective: Objective,
    restricted: RestrictedLikelihood | Factors | None,
    maximum: Maximum,
    constrain: Callable[[np.ndarray], np.ndarray],
    labels: Sequence[str],
) -> Uncertainty:
    """Standard errors by the delta method from the observed information.

    Parameters
    ----------
    objective : Objective
    restricted : RestrictedLikelihood, Factors or None
        Where the fixed effects follow from the others, which are the coordinates of the maximum.
    maximum : Maximum
    constrain : callable
        The constrained values of a position.
    labels : sequence of str
        Labels of the coordinates of the maximum.

    Raises
    ------
    ModelError
        Where the likelihood does not determine the position.
    """
    position, dimension = maximum.position, len(maximum.position)
    boundary = [] if maximum.inside else at_boundary(objective, maximum)
    inside = np.setdiff1d(np.arange(dimension), boundary)
    values, inner = scaled_eigenvectors(maximum.information[np.ix_(inside, inside)])
    vectors = np.zeros((dimension, len(inside)))
    vectors[inside] = inner
    flat = values < SMALLEST_EIGENVALUE
    if flat.any() and not boundary:
        weights = np.abs(vectors[:, flat]).max(axis=1)
        involved = [
            label
            for label, weight in zip(labels, weights, strict=True)
            if weight > 1e-3 * weights.max()
        ]
        raise UndeterminedError(
            f"The likelihood does not determine {', '.join(f'`{name}`' for name in involved)}: it "
            "is flat along a direction of these."
        )
    root = vectors[:, ~flat] / np.sqrt(values[~flat])
    undetermined = np.concatenate([np.eye(dimension)[:, boundary], vectors[:, flat]], axis=1)
    if restricted is not None:
        moves = jacobian(
            lambda rest: restricted.complete(restricted.estimate(rest)[0], rest), position
        )
        effects, factor = restricted.estimate(position)
        of_effects = np.zeros((len(moves), len(effects)))
        of_effects[restricted.fixed] = factor
        root = np.concatenate([moves @ root, of_effects], axis=1)
        undetermined = moves @ undetermined
        position = restricted.complete(effects, position)
        boundary = list(np.flatnonzero(~restricted.fixed)[boundary])
    slopes = jacobian(constrain, position)
    constrained_root = slopes @ root
    standard_errors = np.linalg.norm(constrained_root, axis=1)
    moved = np.abs(slopes @ undetermined).max(axis=1, initial=0)
    unknown = moved > UNDETERMINED * standard_errors
    standard_errors[unknown] = np.nan
    covariance = constrained_root @ constrained_root.T
    covariance[unknown], covariance[:, unknown] = np.nan, np.nan
    return Uncertainty(position, covariance, standard_errors, tuple(map(int, boundary)))


def jacobian(function: Callable[[np.ndarray], np.ndarray], position: np.ndarray) -> np.ndarray:
    """Derivatives by central differences, with a column for each coordinate."""
    steps = np.diag(DIFFERENCE * np.maximum(1, np.abs(position)))
    columns = [
        (function(position + step) - function(position - step)) / (2 * step.sum()) for step in steps
    ]
    return np.array(columns).T
