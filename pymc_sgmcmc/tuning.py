r"""Centre, curvature and step size of a posterior, from its gradients alone.

Everything here is deterministic for a given model and data: rows are sampled with fixed seeds.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import linalg, optimize

from pymc_sgmcmc.batching import Batching
from pymc_sgmcmc.errors import CenterWarning
from pymc_sgmcmc.posterior import Posterior

_log = logging.getLogger(__name__)

DENSE_DIMENSION = 500
"""Positions up to this length get a dense curvature matrix, longer ones its diagonal."""

VARIANCE_INFLATION = 0.05
"""Relative excess of the stationary variance that the default step size allows."""

CENTER_TOLERANCE = 1e-2
"""Distance to the mode, in posterior standard deviations, at which the search ends."""

SUBSAMPLE_ROWS = 10_000
"""Rows from which curvature is computed, and on which the search for the mode begins."""


FARTHEST_CENTER = 3.0
"""Distance from the mode, in posterior standard deviations, beyond which a centre is no mode."""

MOST_UNLIKE_GAUSSIAN = 3.0
"""Factor by which the fall of the log density around the centre may differ from a Gaussian's."""

LAPLACE_DRAWS = 8
"""Points around the centre at which the noise of a control variate is computed."""

NOISE_ROWS = 10_000
"""Most rows from whose gradients the gradient noise is computed, one by one."""


@dataclass(frozen=True)
class Curvature:
    r"""Local Gaussian approximation of the posterior: :math:`H = -\nabla^2 \log \pi`.

    Attributes
    ----------
    precision : numpy.ndarray, shape (d, d) or (d,)
        H, or its diagonal.
    covariance : numpy.ndarray, of the same shape
        Its inverse.
    root : numpy.ndarray, of the same shape
        L with covariance L Lᵀ.
    """

    precision: np.ndarray
    covariance: np.ndarray
    root: np.ndarray

    @property
    def is_dense(self) -> bool:
        """Whether off-diagonal curvature is known."""
        return self.precision.ndim == 2

    @property
    def standard_deviations(self) -> np.ndarray:
        """Standard deviation of each coordinate, shape (d,)."""
        return np.sqrt(np.diag(self.covariance) if self.is_dense else self.covariance)


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
    """

    position: np.ndarray
    gradient: np.ndarray
    likelihood_gradient: np.ndarray
    curvature: Curvature

    @property
    def distance(self) -> float:
        """Estimated distance to the mode in posterior standard deviations (largest axis)."""
        return float(np.max(np.abs(apply_transposed(self.curvature.root, self.gradient))))


# --- Small linear algebra for matrices that may be diagonals -------------------------------


def apply(matrix: np.ndarray, vector: np.ndarray) -> np.ndarray:
    """Product of a scalar, diagonal or dense matrix with a vector."""
    return matrix @ vector if np.ndim(matrix) == 2 else matrix * vector


def apply_transposed(matrix: np.ndarray, vector: np.ndarray) -> np.ndarray:
    """Product of the transposed matrix with a vector."""
    return matrix.T @ vector if np.ndim(matrix) == 2 else matrix * vector


def matrix_root(matrix: np.ndarray) -> np.ndarray:
    """Root L of a positive definite matrix, L Lᵀ, scalar or diagonal ones included.

    Raises
    ------
    ValueError
        Where the matrix is not symmetric positive definite.
    """
    matrix = np.asarray(matrix, dtype=float)
    if not np.isfinite(matrix).all():
        raise ValueError("`preconditioner` should be finite, but has NaN or infinite entries.")
    if matrix.ndim < 2:
        if not (matrix > 0).all():
            raise ValueError(
                f"`preconditioner` should be positive, but its smallest entry is {matrix.min()}."
            )
        return np.sqrt(matrix)
    if not np.allclose(matrix, matrix.T, rtol=1e-6, atol=0):
        raise ValueError("`preconditioner` should be symmetric.")
    try:
        return linalg.cholesky(matrix, lower=True)
    except linalg.LinAlgError:
        smallest = linalg.eigvalsh(matrix)[0]
        raise ValueError(
            "`preconditioner` should be positive definite, but its smallest eigenvalue is "
            f"{smallest:.3g}."
        ) from None


# --- Centre ---------------------------------------------------------------------------------


def find_center(posterior: Posterior, start: np.ndarray, method: str = "lbfgs") -> Center:
    """Search the posterior mode.

    The search begins on a subsample of rows, whose mode is within a few posterior standard
    deviations of the mode, and whose curvature makes the second part, on all rows, a
    well-conditioned problem that takes a handful of passes over the data.

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
    """
    if method not in ("lbfgs", "sgd"):
        raise ValueError(f"`center` should be 'lbfgs', 'sgd', or a point, but got {method!r}.")
    subsample = _Subsample(posterior)
    scale = _coordinate_scale(posterior, subsample, start)
    position = _minimize(subsample.log_density_and_gradient, start, scale, tolerance=0.1)
    curvature = _curvature(posterior, subsample, position)
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
            curvature = _curvature(posterior, subsample, position)
    center = center_at(posterior, position, curvature)
    check_center(posterior, center)
    return center


def check_center(posterior: Posterior, center: Center) -> None:
    """Warn where a centre is no mode, or no guide to the posterior around it.

    On the surface of the ellipsoid that holds a Gaussian in d dimensions, at distance
    sqrt(d) in its own units, the log density is lower by d / 2 than at its mode.

    Warns
    -----
    CenterWarning
        Where the gradient at the centre is large, or the log density falls by much more or
        much less than d / 2: at a mode on a boundary, say, where a variance goes to zero.
    """
    if center.distance > FARTHEST_CENTER:
        warnings.warn(
            f"The search for the posterior mode ended {center.distance:.3g} posterior standard "
            "deviations away from it, judged by the gradient there. The log density may have no "
            "mode, jump, or be badly scaled: check the model with `model.debug()`, give `center`, "
            "or sample with NUTS.",
            CenterWarning,
            stacklevel=2,
        )
        return
    rng = np.random.default_rng(1735)
    top, _ = posterior.log_density_and_gradient(center.position)
    ratios = []
    for _ in range(2):
        direction = rng.standard_normal(posterior.dimension)
        direction *= np.sqrt(posterior.dimension) / np.linalg.norm(direction)
        shift = apply(center.curvature.root, direction)
        for sign in (1.0, -1.0):
            value, _ = posterior.log_density_and_gradient(center.position + sign * shift)
            ratios.append((top - value) / (posterior.dimension / 2))
    lowest, middle = np.min(ratios), np.median(ratios)
    bounds = (1 / MOST_UNLIKE_GAUSSIAN, MOST_UNLIKE_GAUSSIAN)
    if not (bounds[0] < middle < bounds[1] and lowest > 0):
        warnings.warn(
            "The posterior around its mode is far from the Gaussian with the curvature there: one "
            f"standard deviation away the log density falls by {middle:.3g} times what it should. "
            "The mode may lie on a boundary, as that of a group scale near zero does; the centre, "
            "the preconditioner and the step size are then no guide. Use a non-centred "
            "parametrisation or a prior that keeps scales from zero, give `center`, or sample "
            "with NUTS.",
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
        curvature = _curvature(posterior, _Subsample(posterior), position)
    return Center(np.asarray(position, float), gradient, gradient - prior_gradient, curvature)


class _Subsample:
    """The posterior with its likelihood estimated from a fixed random set of rows."""

    def __init__(self, posterior: Posterior):
        count = min(posterior.n_rows, max(SUBSAMPLE_ROWS, 20 * posterior.dimension))
        self.posterior = posterior
        self.weight = posterior.n_rows / count
        if count == posterior.n_rows:
            self.rows = posterior.take(slice(None))
        else:
            rng = np.random.default_rng(2011)
            self.rows = posterior.take(
                np.sort(rng.choice(posterior.n_rows, size=count, replace=False))
            )

    def log_density_and_gradient(self, position: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = self.posterior.log_prior_and_gradient(position)
        row_value, row_gradient = self.posterior.log_likelihood_and_gradient(position, self.rows)
        return value + self.weight * row_value, gradient + self.weight * row_gradient

    def single_row_gradients(self, position: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Gradients of single rows, shape (rows, d), without a compiled function of their own."""
        return np.array(
            [
                self.posterior.log_likelihood_and_gradient(
                    position, [values[number : number + 1] for values in self.rows]
                )[1]
                for number in numbers
            ]
        )


def _coordinate_scale(
    posterior: Posterior, subsample: _Subsample, position: np.ndarray
) -> np.ndarray:
    """Rough scale of each coordinate from the size of single rows' gradients."""
    count = len(subsample.rows[0])
    numbers = np.unique(np.linspace(0, count - 1, 200).astype(int))
    gradients = subsample.single_row_gradients(position, numbers)
    information = posterior.n_rows * np.mean(gradients**2, axis=0)
    information = np.where(np.isfinite(information), information, 0.0)
    information += np.abs(_prior_precision_diagonal(posterior, position))
    positive = information > 0
    if not positive.any():
        return np.ones_like(information)
    # A coordinate that no sampled row informs gets the scale of the least informed one.
    information[~positive] = information[positive].min()
    return 1.0 / np.sqrt(information)


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


# --- Curvature ------------------------------------------------------------------------------


def _curvature(posterior: Posterior, subsample: _Subsample, position: np.ndarray) -> Curvature:
    scale = _coordinate_scale(posterior, subsample, position)
    if posterior.dimension > DENSE_DIMENSION:
        precision = 1.0 / scale**2
        return Curvature(precision, scale**2, scale)
    # Differences of gradients over a small fraction of a standard deviation each way; in
    # single precision rounding asks for wider ones.
    width = 1e-2 if posterior.dtype == "float64" else 0.2
    columns = []
    for coordinate, size in enumerate(scale * width):
        shift = np.zeros_like(position)
        shift[coordinate] = size
        _, ahead = subsample.log_density_and_gradient(position + shift)
        _, behind = subsample.log_density_and_gradient(position - shift)
        columns.append((behind - ahead) / (2 * size))
    scaled = np.array(columns) * np.outer(scale, scale)
    return dense_curvature(0.5 * (scaled + scaled.T), scale)


def dense_curvature(scaled: np.ndarray, scale: np.ndarray) -> Curvature:
    """Curvature from a precision matrix in scaled coordinates, made positive definite.

    Where some direction is flat or bends the wrong way, its absolute curvature, or a small
    fraction of the largest, takes its place: any positive definite matrix is a valid
    preconditioner, only less apt.
    """
    if not np.isfinite(scaled).all():
        raise ValueError(
            "The curvature of the log posterior is not finite at the centre. Give another "
            "`center`, or a `preconditioner` and a `step_size`."
        )
    values, vectors = linalg.eigh(scaled)
    floor = 1e-8 * np.abs(values).max()
    if values[0] <= floor:
        warnings.warn(
            "The log posterior is flat or bends upwards in some direction at the centre "
            f"(smallest eigenvalue of the scaled curvature {values[0]:.2g}): the centre may not "
            "be a mode, or the posterior may be improper. Check the priors.",
            CenterWarning,
            stacklevel=2,
        )
    values = np.maximum(np.abs(values), max(floor, np.finfo(float).tiny))
    precision = (vectors * values) @ vectors.T / np.outer(scale, scale)
    covariance = (vectors / values) @ vectors.T * np.outer(scale, scale)
    covariance = 0.5 * (covariance + covariance.T)
    return Curvature(precision, covariance, linalg.cholesky(covariance, lower=True))


def _prior_precision_diagonal(posterior: Posterior, position: np.ndarray) -> np.ndarray:
    """Diagonal of the prior's curvature by random signs: exact where it is diagonal."""
    rng = np.random.default_rng(1990)
    width = 1e-4 if posterior.dtype == "float64" else 1e-2
    estimates = []
    for _ in range(4):
        signs = rng.choice([-1.0, 1.0], size=posterior.dimension)
        _, ahead = posterior.log_prior_and_gradient(position + width * signs)
        _, behind = posterior.log_prior_and_gradient(position - width * signs)
        with np.errstate(invalid="ignore"):
            estimates.append(signs * (behind - ahead) / (2 * width))
    estimate = np.mean(estimates, axis=0)
    return np.where(np.isfinite(estimate), estimate, 0.0)


# --- Step size ------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepSizeChoice:
    r"""A step size in closed form, and what it was computed from.

    Attributes
    ----------
    step_size : float
        :math:`h = 4 \delta / (\lambda_{\max}(MV) + \lambda_{\max}(MH))`.
    noise : float
        :math:`\lambda_{\max}(MV)`, gradient noise in units of curvature.
    curvature : float
        :math:`\lambda_{\max}(MH)`.
    batch_size_needed : int
        Rows a minibatch with which noise and curvature would limit the step alike.
    """

    step_size: float
    noise: float
    curvature: float
    batch_size_needed: int


def choose_step_size(
    posterior: Posterior,
    center: Center,
    preconditioner_root: np.ndarray,
    batching: Batching,
    *,
    control_variate: bool,
    joint_draws: Sequence[Mapping[str, np.ndarray]] | None = None,
    inflation: float = VARIANCE_INFLATION,
) -> StepSizeChoice:
    r"""Largest step whose stationary variance exceeds the posterior's by a given fraction.

    Parameters
    ----------
    posterior, center, batching
    preconditioner_root : numpy.ndarray
        L with M = L Lᵀ: scalar, diagonal or dense.
    control_variate : bool
        Whether the gradient is that of Baker et al., whose noise is averaged over the Laplace
        approximation, or the plain one, whose noise is taken at the centre.
    joint_draws : sequence of mappings, optional
        Points at which to take the noise of a control variate, with values of the variables
        outside the position too, whose moves add to it; `laplace_draws` where not given.
    inflation : float
        :math:`\delta`, relative.
    """
    deviations = row_deviations(
        posterior, center, control_variate=control_variate, joint_draws=joint_draws
    )
    row_covariance = _largest_eigenvalue(_whiten(deviations, preconditioner_root))
    n_rows, batch_size = posterior.n_rows, batching.batch_size
    noise = n_rows**2 / batch_size * batching.variance_factor * row_covariance
    curvature = largest_curvature(center.curvature, preconditioner_root)
    step_size = 4 * inflation / (noise + curvature)
    # Solve N²/n c(n) λ = λ_max(MH) for n, with c = (N - n)/(N - 1) without replacement.
    ratio = n_rows**2 * row_covariance / curvature
    if batching.without_replacement:
        ratio = ratio * n_rows / (n_rows - 1 + ratio)
    needed = int(np.clip(np.ceil(ratio), 1, n_rows))
    return StepSizeChoice(float(step_size), float(noise), float(curvature), needed)


def row_deviations(
    posterior: Posterior,
    center: Center,
    *,
    control_variate: bool,
    joint_draws: Sequence[Mapping[str, np.ndarray]] | None = None,
) -> np.ndarray:
    r"""Gradients of single rows less their mean, shape (rows, d), for a random set of rows.

    Their mean outer product estimates C, the covariance over rows, so that the covariance of a
    gradient estimate from n rows is :math:`V = \tfrac{N^2}{n} c\, C`.

    Parameters
    ----------
    posterior, center
    control_variate : bool
        Whether the gradient is the plain one, whose rows are taken at the centre, or that of
        Baker et al., whose rows are differences to the centre, averaged over `joint_draws`.
    joint_draws : sequence of mappings, optional
        `laplace_draws` where not given.
    """
    subsample = _Subsample(posterior)
    available = len(subsample.rows[0])
    rng = np.random.default_rng(2018)
    # Many rows: predictors with heavy tails put most of the noise into few of them.
    numbers = rng.permutation(available)[:NOISE_ROWS]
    if not control_variate:
        gradients = subsample.single_row_gradients(center.position, numbers)
        return gradients - gradients.mean(0)
    groups = np.array_split(numbers, min(LAPLACE_DRAWS, len(numbers)))
    points = joint_draws or laplace_draws(posterior, center)
    others = {name: np.array(shared.get_value()) for name, shared in posterior.others.items()}
    differences = []
    for group, point in zip(groups, points, strict=False):
        posterior.set_others({**others, **point})
        difference = subsample.single_row_gradients(posterior.layout.ravel(point), group)
        posterior.set_others(others)
        difference -= subsample.single_row_gradients(center.position, group)
        differences.append(difference - difference.mean(0))
    return np.concatenate(differences)


def laplace_draws(posterior: Posterior, center: Center) -> list[dict[str, np.ndarray]]:
    """Points drawn from the Gaussian approximation of a posterior at a centre."""
    rng = np.random.default_rng(2014)
    return [
        posterior.layout.unravel(
            center.position + apply(center.curvature.root, rng.standard_normal(posterior.dimension))
        )
        for _ in range(LAPLACE_DRAWS)
    ]


def _whiten(gradients: np.ndarray, root: np.ndarray) -> np.ndarray:
    return gradients @ root if np.ndim(root) == 2 else gradients * root


def _largest_eigenvalue(rows: np.ndarray) -> float:
    """Largest eigenvalue of the mean outer product of the rows."""
    return float(linalg.svdvals(rows)[0] ** 2 / len(rows))


def largest_curvature(curvature: Curvature, root: np.ndarray) -> float:
    """λ_max(MH) for M = L Lᵀ."""
    if not curvature.is_dense:
        diagonal = np.diag(root @ root.T) if np.ndim(root) == 2 else np.asarray(root) ** 2
        return float(np.max(curvature.precision * diagonal))
    product = (
        root.T @ curvature.precision @ root
        if np.ndim(root) == 2
        else curvature.precision * np.outer(*(np.broadcast_to(root, len(curvature.precision)),) * 2)
    )
    return float(linalg.eigvalsh(product)[-1])
