"""The conjugate law of the mean and the covariance of normal vectors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class NormalInverseWishartLaw:
    r"""Law of a mean μ and a covariance Σ, with its update by normal vectors.

    .. math:: \Sigma \sim \mathcal{W}^{-1}(\Phi, \nu), \qquad
              \mu \mid \Sigma \sim N(\mu_0, \tfrac{1}{\lambda} \Sigma)

    The precision :math:`\Lambda = \Sigma^{-1}` has the law :math:`\mathcal{W}(\Phi^{-1}, \nu)`.

    Attributes
    ----------
    mean : numpy.ndarray, shape (q,)
        :math:`\mu_0`.
    strength : float
        :math:`\lambda`, the number of vectors that the knowledge of the mean is worth.
    scale : numpy.ndarray, shape (q, q)
        :math:`\Phi`.
    degrees : float
        :math:`\nu`, larger than q - 1.
    """

    mean: np.ndarray
    strength: float
    scale: np.ndarray
    degrees: float

    def given(self, vectors: np.ndarray) -> NormalInverseWishartLaw:
        r"""Law given vectors :math:`\theta_1, \dots, \theta_K \sim N(\mu, \Sigma)`.

        .. math::
            \lambda' &= \lambda + K, \qquad \nu' = \nu + K, \qquad
            \mu_0' = (\lambda \mu_0 + K \bar\theta) / (\lambda + K) \\
            \Phi' &= \Phi + \sum_{i=1}^K (\theta_i - \bar\theta)(\theta_i - \bar\theta)^\top
              + \frac{\lambda K}{\lambda + K} (\bar\theta - \mu_0)(\bar\theta - \mu_0)^\top

        Parameters
        ----------
        vectors : numpy.ndarray, shape (K, q)
        """
        count, average = len(vectors), vectors.mean(0)
        deviations, offset = vectors - average, average - self.mean
        strength = self.strength + count
        return NormalInverseWishartLaw(
            mean=(self.strength * self.mean + count * average) / strength,
            strength=strength,
            scale=self.scale
            + deviations.T @ deviations
            + self.strength * count / strength * np.outer(offset, offset),
            degrees=self.degrees + count,
        )

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        r"""A mean, and the Cholesky factor of its precision, shapes (q,) and (q, q).

        With :math:`\Phi = L L^\top` and A lower triangular, :math:`A_{ii}^2 \sim
        \chi^2_{\nu - i + 1}` (i from 1) and :math:`A_{ij} \sim N(0, 1)` below the diagonal,
        :math:`L^{-\top} A A^\top L^{-1}` has the law of Λ (Bartlett 1933).
        """
        q = len(self.mean)
        bartlett = np.tril(rng.standard_normal((q, q)), -1)
        bartlett[np.diag_indices(q)] = np.sqrt(rng.chisquare(self.degrees - np.arange(q)))
        # SciPy's triangular solver starts threads, which take milliseconds for small matrices.
        root = np.linalg.solve(np.linalg.cholesky(self.scale).T, bartlett)
        # R in Bᵀ = QR gives B Bᵀ = Rᵀ R without squaring the condition number.
        factor = np.linalg.qr(root.T, mode="r").T
        factor = factor * np.sign(np.diag(factor))
        noise = np.linalg.solve(factor.T, rng.standard_normal(q))
        return self.mean + noise / np.sqrt(self.strength), factor

    def log_density(self, mean: np.ndarray, factor: np.ndarray) -> float:
        r"""Log density of μ and Λ = L Lᵀ, up to a constant.

        .. math:: \tfrac12 (\nu - q) \log |\Lambda| - \tfrac12 \operatorname{tr}(\Phi \Lambda)
                  - \tfrac{\lambda}{2} (\mu - \mu_0)^\top \Lambda (\mu - \mu_0)
        """
        log_determinant = 2 * np.log(np.diag(factor)).sum()
        offset = factor.T @ (mean - self.mean)
        trace = np.einsum("ij,ik,jk->", self.scale, factor, factor)
        return 0.5 * float(
            (self.degrees - len(mean)) * log_determinant - trace - self.strength * offset @ offset
        )


def packed(factor: np.ndarray) -> np.ndarray:
    """Entries of a Cholesky factor row by row, with the logarithms of the diagonal.

    These are the unconstrained values that PyMC has for a positive definite matrix.
    """
    entries = factor.copy()
    np.fill_diagonal(entries, np.log(np.diag(factor)))
    return entries[np.tril_indices(len(factor))]


def unpacked(values: np.ndarray, size: int) -> np.ndarray:
    """The Cholesky factor, shape (size, size), of packed values."""
    factor = np.zeros((size, size))
    factor[np.tril_indices(size)] = values
    np.fill_diagonal(factor, np.exp(np.diag(factor)))
    return factor


def log_jacobian(factor: np.ndarray) -> float:
    r"""Log of :math:`|\partial \Lambda / \partial v|` for the packed values v of L, Λ = L Lᵀ.

    It is :math:`\sum_{i=1}^q (q - i + 2) \log L_{ii}`, up to a constant.
    """
    return float(np.arange(len(factor) + 1, 1, -1) @ np.log(np.diag(factor)))
