r"""Curvature of a log posterior, :math:`H = -\nabla^2 \log \pi`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import linalg, sparse
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

from pymc_sgmcmc.elimination import SCATTERED, elements_of_factor
from pymc_sgmcmc.errors import CenterWarning, ModelError, warn
from pymc_sgmcmc.matrices import (
    Dense,
    Diagonal,
    Implicit,
    LowRank,
    Matrix,
    Sparse,
    extreme_eigenvalues,
    factored,
)
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.posterior.position import DENSE_DIMENSION
from pymc_sgmcmc.posterior.selected import selected_graph
from pymc_sgmcmc.posterior.sparse_curvature import SparseCurvature
from pymc_sgmcmc.stages import stage
from pymc_sgmcmc.tuning.subsample import Subsample

DENSE_OPERATIONS = 2e11
"""Longer positions have them too where a row has data for each coordinate, as in a regression, and
the curvature takes so many multiplications at most: some ten seconds of BLAS. In other models most
elements are zero, and few directions describe the others."""

LOW_RANK_DIMENSION = 20_000
"""Positions up to this length have a diagonal curvature with a few directions, and longer positions
a diagonal one. The bound limits the memory of the directions, at most 8 MB, and the time to find
them."""

MOST_DIRECTIONS = 50
"""A curvature of low rank plus diagonal has at most this many directions. More directions would
describe more correlations, but each costs gradients to find it and products in each transition."""

WORTHWHILE_DIRECTION = 1.5
"""A direction is kept where its curvature is more than this many times the mean of the others. It
is a compromise between a larger step size and the products in each transition."""

TRACE_PROBES = 16
"""The mean curvature is estimated from this many random directions. It is a compromise between the
error of the estimate and two passes over the sampled rows for each direction."""

SHORTER = 1e-3
MOST_SHORTER = 4
"""Differences that are not finite are taken anew over distances shorter by this factor, until they
have been taken so many times."""

NOT_FINITE = (
    "The curvature of the log posterior is not finite at the centre. Give another `center`, or a "
    "`preconditioner` and a `step_size`."
)

SMALLEST = 1e-8
"""No curvature is smaller than this part of the largest, about what rounding leaves."""

SIGNS = 16
"""Vectors of random signs. An effect and the mean of its group have the same signs in all of them
with probability 3e-5, and then their curvatures cancel."""


@dataclass(frozen=True)
class Curvature:
    r"""Local Gaussian approximation of the posterior: :math:`H = -\nabla^2 \log \pi`.

    Attributes
    ----------
    precision : Matrix
        H, or an approximation: its diagonal, or a diagonal with its largest directions.
    covariance : of the same kind
        The inverse of `precision`.
    root : of the same kind
        The matrix L in covariance = L Lᵀ.
    remainder, least : float
        Largest and smallest eigenvalue of the covariance times the curvature itself, where
        `precision` is only an approximation and they are known.
    """

    precision: Matrix
    covariance: Matrix
    root: Matrix
    remainder: float = 1.0
    least: float = 1.0

    @property
    def is_dense(self) -> bool:
        """Whether all off-diagonal curvature is known."""
        return isinstance(self.precision, Dense)

    @property
    def standard_deviations(self) -> np.ndarray:
        """Standard deviation of each coordinate, shape (d,)."""
        return np.sqrt(self.covariance.diagonal())

    @property
    def conditional_deviations(self) -> np.ndarray:
        """Standard deviation of each coordinate given the others, shape (d,)."""
        return self.precision.diagonal() ** -0.5

    def without_directions(self) -> Curvature:
        """The diagonal of a curvature known by products alone; any other curvature unchanged."""
        if not isinstance(self.precision, Implicit):
            return self
        precision = Diagonal(self.precision.diagonal())
        root = Diagonal(precision.values**-0.5)
        remainder = float(self.relative_to(root).max())
        return Curvature(precision, precision.inverse, root, remainder)

    def relative_to(self, root: Matrix) -> np.ndarray:
        """Eigenvalues of MH for M = L Lᵀ, or of their diagonals where H is diagonal.

        Where `precision` is an approximation the first and the last are bounds on the eigenvalues.
        For matrices known by products alone there are only these two.
        """
        if isinstance(self.precision, Implicit) or isinstance(root, LowRank | Sparse):
            values = extreme_eigenvalues(self.precision, root, len(self.standard_deviations))
        elif isinstance(self.precision, Diagonal) and isinstance(root, Dense):
            values = self.precision.values * np.einsum("ij,ij->i", root.values, root.values)
        else:
            values = self.precision.congruence(root).eigenvalues()
        bounds = self.remainder * values
        if len(values) > 1:
            bounds[np.argmin(values)] = self.least * values.min()
        return bounds


def has_dense_curvature(posterior: Posterior) -> bool:
    """Whether the curvature is a dense matrix, by its time and memory."""
    d = posterior.dimension
    # A decomposition takes as long as the curvature of about ten rows a coordinate.
    operations = (posterior.n_rows + 10 * d) * d**2
    is_long_regression = posterior.row_elements >= d and operations <= DENSE_OPERATIONS
    return d <= DENSE_DIMENSION or (is_long_regression and posterior.has_second_derivatives)


@stage("Computing the curvature", "It takes longer the more coordinates there are.")
def curvature_at(
    posterior: Posterior,
    subsample: Subsample,
    position: np.ndarray,
    scale: np.ndarray | None = None,
    of_rows: np.ndarray | None = None,
) -> Curvature:
    """Curvature at a position: dense, or of low rank or diagonal for long positions.

    Rough scales of the coordinates are computed where not given.
    """
    if scale is None:
        scale = coordinate_scale(posterior, subsample, position)
    if not has_dense_curvature(posterior):
        width = posterior.difference_width
        return low_rank_curvature(subsample.gradients_alone, position, scale, width)
    return dense_curvature(scaled_precision(posterior, subsample, position, scale, of_rows), scale)


def scaled_precision(
    posterior: Posterior,
    subsample: Subsample,
    position: np.ndarray,
    scale: np.ndarray,
    of_rows: np.ndarray | None = None,
) -> np.ndarray:
    """Minus the Hessian of the log density in scaled coordinates, shape (d, d).

    The part of the likelihood is that of the subsample where it is not given.
    """
    if of_rows is None:
        of_rows = likelihood_curvature(posterior, subsample, position, scale)
    width = posterior.difference_width
    of_prior = _over_short_distances(
        lambda near: curvature_by_differences(posterior.prior_gradients, position, width * near),
        scale,
    )
    return (of_prior + of_rows) * np.outer(scale, scale)


def likelihood_curvature(
    posterior: Posterior, subsample: Subsample, position: np.ndarray, scale: np.ndarray
) -> np.ndarray:
    """Minus the Hessian of the log likelihood of a subsample, shape (d, d).

    Where there are no second derivatives it is from differences of gradients.
    """
    rows = subsample.rows
    if posterior.has_second_derivatives:
        return subsample.weight * posterior.likelihood_curvature(position, rows)
    width = posterior.difference_width
    return subsample.weight * _over_short_distances(
        lambda near: curvature_by_differences(
            lambda positions: posterior.likelihood_gradient(positions, rows),
            position,
            width * near,
        ),
        scale,
    )


def _over_short_distances(
    curvature_over: Callable[[np.ndarray], np.ndarray], scale: np.ndarray
) -> np.ndarray:
    """A curvature by differences over given distances, over shorter ones where they overflow.

    A coordinate that rows and prior hardly inform has a large scale, over which gradients may
    overflow.
    """
    for _ in range(MOST_SHORTER):
        curvature = curvature_over(scale)
        finite = np.isfinite(curvature)
        if finite.all():
            break
        overflows = ~finite.diagonal() if not finite.diagonal().all() else ~finite.all(axis=1)
        scale = np.where(overflows, scale * SHORTER, scale)
    return curvature


def diagonal_curvature(scale: np.ndarray, remainder: float = 1.0, least: float = 1.0) -> Curvature:
    """Curvature of coordinates with the given standard deviations."""
    precision, covariance = Diagonal(1.0 / scale**2), Diagonal(scale**2)
    return Curvature(precision, covariance, Diagonal(scale), remainder, least)


def low_rank_curvature(
    gradients: Callable[[np.ndarray], np.ndarray],
    position: np.ndarray,
    scale: np.ndarray,
    width: float,
) -> Curvature:
    r"""A diagonal with the directions of largest curvature, from products with vectors alone.

    In coordinates scaled by D the curvature :math:`D H D` has a few large eigenvalues, with the
    eigenvectors U, where predictors or groups are correlated. Let c be the mean of the other
    eigenvalues. Then

    .. math:: H \approx c\, D^{-1} [I + U \mathrm{diag}(\lambda / c - 1) U^\top] D^{-1}

    The large eigenvalues are computed by Lanczos' method (ARPACK). The mean of the others comes
    from Hutchinson's estimate of the trace, with probes orthogonal to U (Meyer et al. 2021).

    Parameters
    ----------
    gradients : callable
        Gradients of the log density at several positions, both of shape (positions, d).
    position : numpy.ndarray, shape (d,)
    scale : numpy.ndarray, shape (d,)
        D, rough standard deviations.
    width : float
        Width of the differences of gradients, in standard deviations.

    Raises
    ------
    ValueError
        Where the curvature is not finite.
    """
    dimension = len(position)

    def product(vector: np.ndarray) -> np.ndarray:
        length = np.linalg.norm(vector)
        direction = scale * vector.ravel() / length
        for shorter in SHORTER ** np.arange(MOST_SHORTER):  # Near an edge it need be short.
            shift = width * shorter * direction
            behind, ahead = gradients(np.array([position - shift, position + shift]))
            change = scale * (behind - ahead) * (length / (2 * width * shorter))
            if np.isfinite(change).all():
                return change
        raise ModelError(NOT_FINITE)

    rng = np.random.default_rng(1950)
    keeps = dimension <= LOW_RANK_DIMENSION
    count = max(1, min(MOST_DIRECTIONS, dimension // 10)) if keeps else 1
    operator = LinearOperator((dimension, dimension), matvec=product, dtype=float)
    try:
        values, vectors = eigsh(
            operator, k=count, which="LA", v0=rng.standard_normal(dimension), tol=1e-2
        )
    except ArpackNoConvergence as failure:  # The eigenvalues that did converge suffice.
        values, vectors = failure.eigenvalues, failure.eigenvectors
    # The probes are orthogonal to U, since the large eigenvalues would dominate the estimate.
    probes = rng.choice([-1.0, 1.0], size=(TRACE_PROBES, dimension))
    probes -= probes @ vectors @ vectors.T
    trace = float(np.mean([probe @ product(probe) for probe in probes]))
    other_mean = trace / (dimension - len(values))
    if not (np.isfinite(other_mean) and other_mean > 0):
        warn(
            "The mean curvature of the log posterior at the centre should be positive, but is "
            f"{other_mean:.2g}. It may have no mode there, or be improper: check the priors.",
            CenterWarning,
        )
        return diagonal_curvature(scale)
    if not keeps:
        mean = (trace + values.sum()) / dimension
        remainder = max(1.0, float(values.max(initial=0.0)) / mean)
        return diagonal_curvature(scale / np.sqrt(mean), remainder)
    return curvature_of_directions(scale / np.sqrt(other_mean), values / other_mean, vectors, 0)


def curvature_of_directions(
    scale: np.ndarray, values: np.ndarray, vectors: np.ndarray, low: int
) -> Curvature:
    r"""A diagonal with the directions of largest and smallest curvature.

    Parameters
    ----------
    scale : numpy.ndarray, shape (d,)
        D, such that the mean curvature in the other directions of :math:`D H D` is 1.
    values, vectors : numpy.ndarray, shape (k,) and (d, k)
        Eigenvalues of :math:`D H D` in ascending order, and their eigenvectors.
    low : int
        So many of them are the smallest of all, and the others the largest.
    """
    side = np.where(np.arange(len(values)) < low, -1.0, 1.0)
    size = side * np.log(np.maximum(values, np.finfo(float).tiny))
    order = np.argsort(-size, kind="stable")[:MOST_DIRECTIONS]
    kept = order[size[order] > np.log(WORTHWHILE_DIRECTION)]
    # Those left out bound the others, or the mildest one does where none is left out.
    is_left = ~np.isin(np.arange(len(values)), kept)
    left, top, bottom = values[is_left], values[low:], values[:low]
    largest = left.max() if is_left[low:].any() else top.min(initial=np.inf)
    smallest = left.min() if is_left[:low].any() else bottom.max(initial=0.0)
    remainder = max(1.0, float(largest)) if len(top) else 1.0
    least = min(1.0, float(smallest)) if len(bottom) else 1.0
    if not len(kept):
        return diagonal_curvature(scale, remainder, least)
    precision = LowRank(1 / scale, vectors[:, kept], values[kept] - 1, 1 / scale)
    covariance = precision.inverse
    return Curvature(precision, covariance, covariance.root, remainder, least)


def dense_curvature(scaled: np.ndarray, scale: np.ndarray) -> Curvature:
    """Curvature from a precision matrix in scaled coordinates, made positive definite.

    Where the log density is flat or bends upwards in a direction, the curvature is replaced by its
    absolute value, or by a small fraction of the largest curvature. Any positive definite matrix is
    a valid preconditioner, though a less efficient one.
    """
    if not np.isfinite(scaled).all():
        raise ModelError(NOT_FINITE)
    values, vectors = linalg.eigh(scaled)
    floor = SMALLEST * np.abs(values).max()
    if values[0] <= floor:
        warn(
            "The log posterior is flat or bends upwards at the centre (smallest eigenvalue of the "
            f"scaled curvature {values[0]:.2g}). It may have no mode there, or be improper: check "
            "the priors.",
            CenterWarning,
        )
    values = np.maximum(np.abs(values), max(floor, np.finfo(float).tiny))
    precision = (vectors * values) @ vectors.T / np.outer(scale, scale)
    covariance = (vectors / values) @ vectors.T * np.outer(scale, scale)
    covariance = 0.5 * (covariance + covariance.T)
    root = linalg.cholesky(covariance, lower=True)
    return Curvature(Dense(precision), Dense(covariance), Dense(root))


def coordinate_scale(
    posterior: Posterior, subsample: Subsample, position: np.ndarray
) -> np.ndarray:
    """Rough scale of each coordinate from the size of single rows' gradients."""
    information = row_information(posterior, subsample, position)
    information += np.abs(prior_precision_diagonal(posterior, position))
    positive = information > 0
    if not positive.any():
        return np.ones_like(information)
    # A coordinate that no sampled row informs gets the scale of the least informed one.
    information[~positive] = information[positive].min()
    return 1.0 / np.sqrt(information)


def row_information(posterior: Posterior, subsample: Subsample, position: np.ndarray) -> np.ndarray:
    """Rough curvature of the log likelihood in each coordinate, from single rows' gradients."""
    gradients = subsample.gradients_of_some_rows(position)
    information = posterior.n_rows * np.mean(gradients**2, axis=0)
    return np.where(np.isfinite(information), information, 0.0)


def prior_precision(
    posterior: Posterior,
    position: np.ndarray,
    information: np.ndarray,
    gradient: Callable[[np.ndarray], np.ndarray] | None = None,
) -> np.ndarray:
    """Curvature of the negative log prior, shape (d, d), by differences of its gradient.

    Parameters
    ----------
    posterior
    position : numpy.ndarray, shape (d,)
    information : numpy.ndarray, shape (d,)
        Curvature of the likelihood in each coordinate, zero where the rows tell nothing. The prior
        is differentiated over distances of its inverse root.
    gradient : callable, optional
        Function of a position that gives the gradient of the log prior, where there is a quicker
        one than that for set-up.
    """
    informed = information > 0
    scale = np.where(
        informed,
        1 / np.sqrt(np.where(informed, information, 1.0)),
        1e-2 * np.maximum(1.0, np.abs(position)),
    )

    def gradients(positions: np.ndarray) -> np.ndarray:
        if gradient is not None:
            return np.array([gradient(at) for at in positions], dtype=float)
        return posterior.prior_gradients(positions)

    return curvature_by_differences(gradients, position, scale * posterior.difference_width)


def curvature_by_differences(
    gradients: Callable[[np.ndarray], np.ndarray], position: np.ndarray, width: np.ndarray
) -> np.ndarray:
    """Minus the Jacobian of a gradient, symmetric, by central differences of given widths.

    The gradients are those at several positions, both of shape (positions, d).
    """
    shifts = np.diag(width)
    behind, ahead = np.split(gradients(np.concatenate([position - shifts, position + shifts])), 2)
    curvature = (behind - ahead) / (2 * width[:, None])
    return 0.5 * (curvature + curvature.T)


def prior_precision_diagonal(posterior: Posterior, position: np.ndarray) -> np.ndarray:
    """Diagonal of the prior's curvature by random signs, exact where the curvature is diagonal."""
    rng = np.random.default_rng(1990)
    width = 1e-4 if posterior.dtype == "float64" else 1e-2
    signs = rng.choice([-1.0, 1.0], size=(SIGNS, posterior.dimension))
    shifts = width * signs
    ahead, behind = np.split(
        posterior.prior_gradients(np.concatenate([position + shifts, position - shifts])), 2
    )
    with np.errstate(invalid="ignore"):
        estimate = np.mean(signs * (behind - ahead) / (2 * width), axis=0)
    return np.where(np.isfinite(estimate), estimate, 0.0)


def curvature_of_matrices(matrices: Sequence[sparse.csr_array]) -> Curvature:
    """Mean curvature by sparse factors, or as a diagonal with its largest and smallest directions.

    The way is taken in which a draw costs less, by the condition number that directions leave.

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
    error = np.maximum(each.std(axis=0, ddof=1) / np.sqrt(len(matrices)), SMALLEST)
    relative = np.maximum(np.abs(values), error) / other_mean
    low = int(np.searchsorted(values, other_mean))
    few = curvature_of_directions(scale / np.sqrt(other_mean), relative, vectors, low)
    if not np.all(values > error):
        return few
    # A draw takes as many transitions as curvatures relative to the preconditioner differ.
    fixed, of_factor = SCATTERED * mean.nnz, 2 * SCATTERED * elements_of_factor(mean)
    if fixed + of_factor > (few.remainder / few.least) * (fixed + few.covariance.cost):
        return few
    try:
        precision = factored(mean)
    except linalg.LinAlgError:
        return few
    return Curvature(precision, precision.inverse, precision.inverse.root)


def sparse_curvature(posterior: Posterior) -> SparseCurvature | None:
    """The sparse curvature of a posterior, None where it has none or takes too many gradients."""
    if posterior.rows_are_groups or not posterior.has_rows:
        return None
    graph = selected_graph(posterior)
    if not graph.selections:
        return None
    found = SparseCurvature(posterior, graph)
    border = np.count_nonzero(~found.effects)
    return found if border <= DENSE_DIMENSION and found.entries <= MOST_DIRECTIONS else None
