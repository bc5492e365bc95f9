r"""Optimized stochastic gradient Fisher scoring (El hanchi 2018).

This module has the transition, and the choice of its two matrices in closed form in plain NumPy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy import linalg

from pymc_sgmcmc.dynamics.base import (
    Array,
    Dynamics,
    Gradient,
    State,
    Transition,
)

SMALLEST_CURVATURE = 1e-8
"""Eigenvalues of a scaled precision matrix are raised to at least this part of the largest, about
the root of the rounding error, so that the inverse keeps half of the digits."""


@dataclass(frozen=True)
class FisherScoring(Dynamics):
    r"""One step of stochastic gradient Fisher scoring.

    .. math:: \theta' = \theta + D \hat\nabla(\theta) + S \xi, \qquad
              S S^\top = \Sigma = 2D - D (H + V) D, \quad \xi \sim N(0, I)

    This is eq. 8 of El hanchi (2018). Algorithm 1 there cites eq. 7, whose covariance is too large
    by :math:`1 / (1 - k/4)`. The covariance of the stationary law on a Gaussian posterior with
    precision H solves :math:`\Lambda = (I - DH) \Lambda (I - DH)^\top + D \mathcal{V}(\Lambda)
    D^\top + \Sigma`. It is exactly the posterior's where :math:`V = \mathcal{V}(H^{-1})`. D takes
    the place of the step size, which is ignored.

    Attributes
    ----------
    drift : (d, d)
        The matrix D.
    root : (d, d)
        The matrix S.
    """

    drift: Array
    root: Array

    def scaled_noise(self, noise: Array, step_sizes: Array) -> Array:
        r"""Rows :math:`S \xi`, by one matrix product instead of many."""
        return noise @ self.root.T

    def transition(
        self,
        state: State,
        gradient: Gradient,
        scaled_noise: Array,
        step_size: Array,
    ) -> Transition:
        """One step from the position, which is the whole state."""
        (position,) = state
        estimate = gradient(position)
        return Transition((position + self.drift @ estimate + scaled_noise,), estimate)


@dataclass(frozen=True)
class ScoringMatrices:
    r"""D and Σ in the basis W in which both curvature and gradient noise are diagonal.

    With :math:`W^\top H W = I` and :math:`W^\top V W = \mathrm{diag}(v)`, coordinates u of
    :math:`\theta = m + W u` move independently of each other:
    :math:`u_j' = (1 - d_j) u_j + d_j \epsilon_j + s_j \xi_j`, with gradient noise
    :math:`\epsilon_j` of variance :math:`v_j`.

    Attributes
    ----------
    basis : numpy.ndarray, shape (d, d)
        W, in units of the position.
    noise : numpy.ndarray, shape (d,)
        v, gradient noise in units of the curvature.
    fractions : numpy.ndarray, shape (d,)
        :math:`d_j = k_j / 2`, the part of the way to the mode that one transition goes.
    """

    basis: np.ndarray
    noise: np.ndarray
    fractions: np.ndarray

    @property
    def drift(self) -> np.ndarray:
        r""":math:`D = W \mathrm{diag}(d) W^\top`."""
        return (self.basis * self.fractions) @ self.basis.T

    @property
    def injected(self) -> np.ndarray:
        """Variances of the injected noise in the basis, 2d - d²(1 + v), clipped at zero."""
        return np.maximum(self.fractions * (2 - self.fractions * (1 + self.noise)), 0.0)

    @property
    def root(self) -> np.ndarray:
        r"""S with :math:`S S^\top = \Sigma`."""
        return self.basis * np.sqrt(self.injected)

    @property
    def injected_covariance(self) -> np.ndarray:
        """Σ."""
        return (self.basis * self.injected) @ self.basis.T

    @cached_property
    def gradient_variances(self) -> np.ndarray:
        """Diagonal of H + V, the variance of each coordinate of a gradient, shape (d,)."""
        inverse = np.linalg.inv(self.basis)
        return np.einsum("ji,j->i", inverse**2, 1 + self.noise)


def joint_basis(precision: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    r"""W and v with :math:`W^\top H W = I` and :math:`W^\top V W = \mathrm{diag}(v)`.

    Parameters
    ----------
    precision : numpy.ndarray, shape (d, d)
        The matrix H. Where it is not positive definite in coordinates scaled by its diagonal, small
        or negative eigenvalues are replaced by their absolute value or a small fraction of the
        largest.
    noise : numpy.ndarray, shape (d, d)
        V, the covariance of a gradient estimate.
    """
    diagonal = np.abs(np.diag(precision))
    positive = diagonal > 0
    scale = np.sqrt(np.where(positive, diagonal, diagonal[positive].min() if positive.any() else 1))
    scaled = precision / np.outer(scale, scale)
    values, vectors = linalg.eigh(0.5 * (scaled + scaled.T))
    floor = SMALLEST_CURVATURE * max(np.abs(values).max(), np.finfo(float).tiny)
    root = vectors / np.sqrt(np.maximum(np.abs(values), floor)) / scale[:, None]
    whitened = root.T @ noise @ root
    variances, rotation = linalg.eigh(0.5 * (whitened + whitened.T))
    return root @ rotation, np.maximum(variances, 0.0)


# --- Choices of k -----------------------------------------------------------------------------


def matrix_fractions(noise: np.ndarray, max_k: float) -> np.ndarray:
    r"""Largest :math:`d_j \le c/2` of each direction with :math:`\Sigma \succeq 0`.

    :math:`\Sigma \succeq 0 \Leftrightarrow D \preceq 2 (H + V)^{-1}`, so
    :math:`d_j = \min(c/2, 2 / (1 + v_j))`. This closes the gap between (13) and (15) that El hanchi
    (2018) leaves open.
    """
    return np.minimum(max_k / 2, 2 / (1 + noise))


def scalar_bound(noise: np.ndarray) -> float:
    r"""Largest k of :math:`D = \tfrac{k}{2} H^{-1}` with Σ ⪰ 0: 4 / (1 + max v)."""
    return float(4 / (1 + noise.max()))


def weak_prior_bound(noise_ratio: float) -> float:
    r"""Bound (13) of El hanchi (2018), :math:`k \le 4n / (N + n)`: sufficient where H = NC + G.

    Parameters
    ----------
    noise_ratio : float
        The ratio cN/n of V and NC, with the factor c of the minibatch scheme, which the paper
        leaves out.
    """
    return 4 / (1 + noise_ratio)


def strong_prior_bound(precision: np.ndarray, noise: np.ndarray) -> float:
    r"""Bound (15) of El hanchi (2018), :math:`k \le 4r / (r + N/n)`, which is sufficient.

    For any V it is :math:`k \le 4r / (r + 1)` with :math:`r = \lambda_{\min}(H^{-1}) /
    \lambda_{\max}(H^{-1} V H^{-1})`, which is (15) for :math:`V = (cN/n) N C`. It depends on the
    units of the parameters.
    """
    covariance = np.linalg.inv(precision)
    largest = linalg.eigvalsh(covariance @ noise @ covariance)[-1]
    r = linalg.eigvalsh(covariance)[0] / max(largest, np.finfo(float).tiny)
    return float(4 * r / (r + 1)) if np.isfinite(r) else 4.0


def scoring_matrices(
    precision: np.ndarray,
    noise: np.ndarray,
    k: str | float,
    max_k: float,
    noise_ratio: float = np.nan,
) -> ScoringMatrices:
    """D and Σ for a precision H, a covariance V of the gradient and a choice of k.

    Parameters
    ----------
    precision, noise : numpy.ndarray, shape (d, d)
        H and V.
    k : {"matrix", "scalar", "weak_prior", "strong_prior", "paper"} or float
        See `OSGFS`.
    max_k : float
        Bound c on k, which has no effect where k is a number.
    noise_ratio : float
        The ratio cN/n, for "weak_prior" and "paper".
    """
    basis, variances = joint_basis(precision, noise)
    if k == "matrix":
        return ScoringMatrices(basis, variances, matrix_fractions(variances, max_k))
    if k == "scalar":
        value = min(max_k, scalar_bound(variances))
    elif k == "weak_prior":
        value = min(max_k, weak_prior_bound(noise_ratio))
    elif k == "strong_prior":
        value = min(max_k, strong_prior_bound(precision, noise))
    elif k == "paper":
        bounds = weak_prior_bound(noise_ratio), strong_prior_bound(precision, noise)
        value = min(max_k, *[max(bounds)])
    else:
        value = float(k)
    return ScoringMatrices(basis, variances, np.full(len(variances), value / 2))
