"""The curvature of long positions of which each row has few coordinates."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import sparse
from scipy.sparse.linalg import ArpackNoConvergence, eigsh

from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.posterior.selected import selected_graph
from pymc_sgmcmc.posterior.sparse_curvature import SparseCurvature
from pymc_sgmcmc.tuning.curvature import (
    MOST_DIRECTIONS,
    NOT_FINITE,
    SMALLEST,
    Curvature,
    curvature_of_directions,
)


def curvature_around(
    effects: SparseCurvature, mean: np.ndarray, shifts: Sequence[np.ndarray], scale: np.ndarray
) -> Curvature:
    """Mean curvature at points on both sides of a mean.

    Raises
    ------
    ValueError
        Where it is not finite.
    """
    return curvature_of_matrices(
        [(effects.at(mean + each, scale) + effects.at(mean - each, scale)) / 2 for each in shifts]
    )


def curvature_of_matrices(matrices: Sequence[sparse.csr_array]) -> Curvature:
    """Mean curvature as a diagonal with the directions of largest and smallest curvature.

    Raises
    ------
    ValueError
        Where a matrix is not finite.
    """
    mean = sum(matrices[1:], matrices[0]) / len(matrices)
    if not np.isfinite(mean.data).all():
        raise ModelError(NOT_FINITE)
    dimension = mean.shape[0]
    diagonal = np.abs(mean.diagonal())
    scale = np.where(diagonal > 0, diagonal, 1.0) ** -0.5
    scaling = sparse.diags_array(scale)
    start = np.random.default_rng(1950).standard_normal(dimension)
    count = min(2 * MOST_DIRECTIONS, dimension // 2)
    try:
        values, vectors = eigsh(scaling @ mean @ scaling, k=count, which="BE", v0=start, tol=1e-2)
    except ArpackNoConvergence as failure:  # Those that did converge suffice.
        values, vectors = failure.eigenvalues, failure.eigenvectors
    ascending = np.argsort(values)
    values, vectors = values[ascending], vectors[:, ascending]
    other_mean = (dimension - values.sum()) / (dimension - len(values))
    # Where the log density bends upwards at some points a small curvature is known only up to its
    # standard error.
    scaled = scale[:, None] * vectors
    each = np.array([np.einsum("ij,ij->j", scaled, matrix @ scaled) for matrix in matrices])
    error = each.std(axis=0, ddof=1) / np.sqrt(len(matrices))
    relative = np.maximum(np.abs(values), np.maximum(error, SMALLEST)) / other_mean
    low = int(np.searchsorted(values, other_mean))
    return curvature_of_directions(scale / np.sqrt(other_mean), relative, vectors, low)


def sparse_curvature(posterior: Posterior) -> SparseCurvature | None:
    """The sparse curvature of a posterior, None where it has none or takes too many gradients."""
    if posterior.rows_are_groups or not posterior.has_rows:
        return None
    graph = selected_graph(posterior)
    if not graph.selections:
        return None
    found = SparseCurvature(posterior, graph)
    # The directions of largest curvature take at least two gradients each.
    few = np.count_nonzero(~found.effects) <= MOST_DIRECTIONS
    return found if few and found.evaluations <= 2 * MOST_DIRECTIONS else None
