"""Centre and covariance from an approximation of the posterior that the user already has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from pymc.model import Model
from pymc.variational.approximations import Approximation
from scipy import linalg
from xarray import DataTree

from pymc_sgmcmc.checks import as_array
from pymc_sgmcmc.matrices import Dense, Diagonal, as_matrix, matrix_root
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.posterior.graphs import shape_of
from pymc_sgmcmc.posterior.transforms import unconstrain
from pymc_sgmcmc.tuning.curvature import DENSE_DIMENSION, Curvature

APPROXIMATION_DRAWS = 2_000
"""An approximation of `pymc.fit` is represented by this many draws. A standard deviation from them
has a relative error of 1.6 %."""

DRAWS_FOR_A_MATRIX = 5
"""A dense covariance is estimated from at least this many draws for each dimension, and only its
diagonal from fewer. It is a compromise: the largest eigenvalues of a covariance from so few draws
are too large by a factor of up to about two, and a diagonal leaves out all correlations."""


def initial_gaussian(init: Any, model: Model, posterior: Posterior) -> tuple[np.ndarray, Curvature]:
    """Mean and curvature of the unconstrained position from a user's approximation.

    Parameters
    ----------
    init : mapping, xarray.DataTree or pymc Approximation
        ``{"mean": (d,), "covariance": (d, d) or (d,)}`` of the unconstrained position; draws of
        all free variables in a ``posterior`` group, as Pathfinder in `pymc_extras` or a short run
        of NUTS returns them; or the approximation that `pymc.fit` returns.
    model : pymc.Model
    posterior : Posterior

    Raises
    ------
    TypeError, ValueError
        Where it is none of these, or has the wrong shape.
    """
    if isinstance(init, Mapping) and not isinstance(init, DataTree):
        mean, covariance = _from_mapping(init, posterior.dimension)
    elif isinstance(init, DataTree | Approximation):
        if isinstance(init, Approximation):
            init = init.sample(APPROXIMATION_DRAWS, random_seed=2011)
        positions = _positions(init, model, posterior)
        mean, covariance = positions.mean(0), _covariance(positions)
    else:
        raise TypeError(
            "`init` should be a mapping with 'mean' and 'covariance', draws in a DataTree, or an "
            f"approximation of `pymc.fit`, but got {type(init).__name__}."
        )
    if not np.isfinite(mean).all():
        raise ValueError("The mean of `init` should be finite, but has NaN or infinite entries.")
    root = matrix_root(covariance, "The covariance of `init`")
    matrix = as_matrix(covariance)
    if isinstance(matrix, Diagonal):
        return mean, Curvature(matrix.inverse, matrix, root)
    inverse = linalg.solve_triangular(root.dense(), np.eye(len(mean)), lower=True)
    return mean, Curvature(Dense(inverse.T @ inverse), matrix, root)


def _from_mapping(init: Mapping[str, Any], dimension: int) -> tuple[np.ndarray, np.ndarray]:
    if set(init) != {"mean", "covariance"}:
        raise ValueError(
            f"`init` should have the keys 'mean' and 'covariance', but has {sorted(init)}."
        )
    mean = as_array("init['mean']", init["mean"])
    covariance = as_array("init['covariance']", init["covariance"])
    shapes = ((dimension,), (dimension, dimension))
    if mean.shape != (dimension,) or covariance.shape not in shapes:
        raise ValueError(
            f"`init` should have a mean of shape ({dimension},) and a covariance of shape "
            f"({dimension}, {dimension}) or ({dimension},), of the unconstrained position, but "
            f"they have shapes {mean.shape} and {covariance.shape}."
        )
    return mean, covariance


def _positions(draws: DataTree, model: Model, posterior: Posterior) -> np.ndarray:
    """Unconstrained positions of draws, shape (draws, d)."""
    group = draws.children.get("posterior")
    names = [variable.name for variable in model.free_RVs]
    missing = [name for name in names if group is None or name not in group.data_vars]
    if group is None or missing:
        raise ValueError(
            "`init` should have draws of all free variables in its `posterior` group, but lacks "
            f"{missing}."
        )
    values = {}
    for variable in model.free_RVs:
        draws_of = np.asarray(group[variable.name])
        shape, expected = draws_of.shape[2:], tuple(shape_of(variable))
        if draws_of.ndim < 2 or shape != expected:
            raise ValueError(
                f"Each draw of `{variable.name}` in `init` should have shape {expected}, but has "
                f"shape {shape}. Give the draws of a fit to this model."
            )
        values[variable.name] = draws_of
    flat = {name: array.reshape(-1, *array.shape[2:]) for name, array in values.items()}
    return unconstrain(flat, model, posterior.layout)


def _covariance(positions: np.ndarray) -> np.ndarray:
    count, dimension = positions.shape
    if count < 2:
        raise ValueError(f"`init` should have at least 2 draws, but has {count}.")
    if dimension > DENSE_DIMENSION or count < DRAWS_FOR_A_MATRIX * dimension:
        return positions.var(0, ddof=1)
    return np.atleast_2d(np.cov(positions.T))
