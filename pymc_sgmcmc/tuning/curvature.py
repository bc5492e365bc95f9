r"""Curvature of a log posterior, :math:`H = -\nabla^2 \log \pi`, from its gradients alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import linalg

from pymc_sgmcmc.errors import CenterWarning
from pymc_sgmcmc.linear_algebra import congruent, eigenvalues
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.tuning.subsample import Subsample

DENSE_DIMENSION = 500
"""Positions up to this length get a dense curvature matrix, longer ones its diagonal."""


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

    def relative_to(self, root: np.ndarray) -> np.ndarray:
        """Eigenvalues of MH for M = L Lᵀ, of their diagonals where H is diagonal."""
        if not self.is_dense and np.ndim(root) == 2:
            return self.precision * np.einsum("ij,ij->i", root, root)
        return eigenvalues(congruent(self.precision, root))


def curvature_at(posterior: Posterior, subsample: Subsample, position: np.ndarray) -> Curvature:
    """Curvature at a position, dense up to `DENSE_DIMENSION`."""
    scale = coordinate_scale(posterior, subsample, position)
    if posterior.dimension > DENSE_DIMENSION:
        precision = 1.0 / scale**2
        return Curvature(precision, scale**2, scale)

    def gradient(position: np.ndarray) -> np.ndarray:
        return subsample.log_density_and_gradient(position)[1]

    precision = curvature_by_differences(gradient, position, scale * difference_width(posterior))
    return dense_curvature(precision * np.outer(scale, scale), scale)


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


def coordinate_scale(
    posterior: Posterior, subsample: Subsample, position: np.ndarray
) -> np.ndarray:
    """Rough scale of each coordinate from the size of single rows' gradients."""
    count = len(subsample.rows[0])
    numbers = np.unique(np.linspace(0, count - 1, 200).astype(int))
    gradients = subsample.single_row_gradients(position, numbers)
    information = posterior.n_rows * np.mean(gradients**2, axis=0)
    information = np.where(np.isfinite(information), information, 0.0)
    information += np.abs(prior_precision_diagonal(posterior, position))
    positive = information > 0
    if not positive.any():
        return np.ones_like(information)
    # A coordinate that no sampled row informs gets the scale of the least informed one.
    information[~positive] = information[positive].min()
    return 1.0 / np.sqrt(information)


def prior_precision(
    posterior: Posterior, position: np.ndarray, information: np.ndarray
) -> np.ndarray:
    """Curvature of the negative log prior, shape (d, d), by differences of its gradient.

    Parameters
    ----------
    posterior
    position : numpy.ndarray, shape (d,)
    information : numpy.ndarray, shape (d,)
        Curvature of the likelihood in each coordinate, zero where it has none: the prior
        matters over distances of its inverse root.
    """
    informed = information > 0
    scale = np.where(
        informed,
        1 / np.sqrt(np.where(informed, information, 1.0)),
        1e-2 * np.maximum(1.0, np.abs(position)),
    )

    def gradient(position: np.ndarray) -> np.ndarray:
        return posterior.log_prior_and_gradient(position)[1]

    return curvature_by_differences(gradient, position, scale * difference_width(posterior))


def curvature_by_differences(
    gradient: Callable[[np.ndarray], np.ndarray], position: np.ndarray, width: np.ndarray
) -> np.ndarray:
    """Minus the Jacobian of a gradient, symmetric, by central differences of given widths."""
    columns = []
    for coordinate, size in enumerate(width):
        shift = np.zeros(len(position))
        shift[coordinate] = size
        columns.append((gradient(position - shift) - gradient(position + shift)) / (2 * size))
    curvature = np.array(columns)
    return 0.5 * (curvature + curvature.T)


def difference_width(posterior: Posterior) -> float:
    """Width of a difference of gradients in standard deviations.

    Small against one; in single precision rounding asks for more.
    """
    return 1e-3 if posterior.dtype == "float64" else 0.2


def prior_precision_diagonal(posterior: Posterior, position: np.ndarray) -> np.ndarray:
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
