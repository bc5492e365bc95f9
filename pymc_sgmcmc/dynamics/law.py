r"""The stationary law of dynamics on a posterior that is near a Gaussian.

Each dynamics answers for its own law: what a step size does to the variance, how long a chain
remembers, and what stored gradients show of its error. Nothing outside decides by the name of a
sampler which formula holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import linalg

from pymc_sgmcmc.matrices import Dense, Implicit, Matrix
from pymc_sgmcmc.stein import Estimate, mean_with_error, split_into_batches, standard_error


@dataclass(frozen=True)
class Law:
    r"""Law of :math:`\theta' = \theta + \tfrac{h}{2} M \hat\nabla(\theta) + \sqrt{h} L \zeta`.

    The noises :math:`\zeta` of Euler's scheme are independent standard normal vectors, and those of
    averaged noises are :math:`(\xi_k + \xi_{k+1}) / 2`. On a Gaussian posterior with precision H
    and for gradients with covariance V the covariance is too large by the solution X of

    .. math:: X H M + M H X = \tfrac{h}{2} M (\mathrm{E}[\hat\nabla \hat\nabla^\top] - r H) M,

    with r = 0 for Euler's scheme and r = 1 for averaged noises. In a direction in which M is 1, the
    variance is too large by the factor :math:`h (V + (1 - r) H) / (4 - h H)`.

    Attributes
    ----------
    name : str
        The name that a trace has of it.
    averaged : bool
        Whether the noises are averaged.

    References
    ----------
    B. Leimkuhler and C. Matthews (2013). Rational construction of stochastic numerical methods for
    molecular sampling. *Applied Mathematics Research eXpress* 2013, 34-56.
    """

    name: str
    averaged: bool

    @property
    def of_curvature(self) -> float:
        """1 - r, the share of the curvature that adds to the variance as noise does."""
        return 0.0 if self.averaged else 1.0

    def step_size(self, noise: float, curvature: float, error: float) -> float:
        r"""Largest step with at most a relative error :math:`\delta` of each variance.

        It is :math:`4 \delta / (V + (1 - r + \delta) H)`. For averaged noises it is at most 1 / H,
        a quarter of the bound of stability, since the curvature of a posterior that is not Gaussian
        is larger elsewhere.

        Parameters
        ----------
        noise, curvature : float
            :math:`\lambda_{\max}(MV)` and :math:`\lambda_{\max}(MH)`.
        error : float

        Examples
        --------
        >>> EULER.step_size(0.0, 1.0, 0.25), AVERAGED.step_size(0.0, 1.0, 0.25)
        (0.8, 1.0)
        """
        step_size = 4 * error / (noise + (self.of_curvature + error) * curvature)
        return min(step_size, self.largest_step_size(curvature) / 4) if self.averaged else step_size

    def inflation(self, step_size: float, noise: float, curvature: float) -> float:
        """Relative error of the variance in a direction with this noise and curvature.

        Examples
        --------
        >>> EULER.inflation(0.8, 0.0, 1.0), AVERAGED.inflation(0.8, 0.0, 1.0)
        (0.25, 0.0)
        """
        excess = noise + self.of_curvature * curvature
        return step_size * excess / (4 - step_size * curvature)

    def largest_step_size(self, curvature: float) -> float:
        """The bound of stability, 4 / H."""
        return 4 / curvature

    def relaxation_time(self, step_size: float, curvature: float) -> float:
        """Transitions after which a chain has forgotten its state in a direction: 2 / (h H)."""
        return 2 / (step_size * curvature)

    def excess(
        self, gradients: np.ndarray, preconditioner: Matrix, precision: Matrix | None
    ) -> np.ndarray:
        r"""Relative variance error of each draw for a step of 1.

        Its mean over draws, times h, estimates the error for M about the inverse of H:

        .. math:: \tfrac14 [(M \hat\nabla)_i^2 - r (M H M)_{ii}] / M_{ii}

        Parameters
        ----------
        gradients : numpy.ndarray, shape (..., d)
        preconditioner : Matrix
            M.
        precision : Matrix or None
            H, the inverse of M where it is not given.

        Returns
        -------
        numpy.ndarray, shape (..., d)
        """
        moved = np.asarray(gradients, dtype=float) @ preconditioner
        expected = self.expected_squares(preconditioner, precision)
        return 0.25 * (moved**2 / preconditioner.diagonal() - (1 - self.of_curvature) * expected)

    def variance_error(
        self,
        gradients: np.ndarray,
        step_sizes: np.ndarray,
        preconditioner: Matrix,
        precision: Matrix,
    ) -> Estimate:
        r"""Relative error of each variance of a chain, X above on the diagonal.

        Where the noise of the gradient depends on the position, its mean over the chain counts.

        Parameters
        ----------
        gradients : numpy.ndarray, shape (chains, draws, d)
        step_sizes : numpy.ndarray, shape (chains, draws)
        preconditioner : Matrix
            M.
        precision : Matrix
            H, the curvature at the mode. Where one of the two is known by products alone, or both
            are diagonal, M is taken for the inverse of H.

        Examples
        --------
        >>> rng = np.random.default_rng(1)
        >>> gradients, step_sizes = rng.normal(size=(4, 1000, 2)), np.full((4, 1000), 0.2)
        >>> identity = Dense(np.eye(2))
        >>> EULER.variance_error(gradients, step_sizes, identity, identity).value.round(2)
        array([0.05, 0.05])
        >>> AVERAGED.variance_error(gradients, step_sizes, identity, identity).value.round(2) + 0.0
        array([0., 0.])
        """
        h = step_sizes[..., None]
        matrices = (preconditioner, precision)
        implicit = any(isinstance(each, Implicit) for each in matrices)
        if implicit or not any(isinstance(each, Dense) for each in matrices):
            return mean_with_error(h * self.excess(gradients, preconditioner, precision))
        root = preconditioner.root
        values, vectors = linalg.eigh(precision.congruence(root).dense())
        directions = root @ vectors
        sums = values[:, None] + values
        variances = np.einsum("ij,j,ij->i", directions, 1 / values, directions)
        # Squares of the last column are half the step sizes, which may be those of each chain.
        scaled = np.sqrt(0.5 * h) * np.insert(gradients @ directions, len(values), 1.0, axis=-1)
        share = 1 - self.of_curvature

        def errors(rows: np.ndarray) -> np.ndarray:
            products = rows.T @ rows / len(rows)
            excess = (products[:-1, :-1] - share * products[-1, -1] * np.diag(values)) / sums
            return np.einsum("ij,jk,ik->i", directions, excess, directions) / variances

        batches = np.concatenate(split_into_batches(scaled))
        return Estimate(
            errors(np.concatenate(scaled)),
            standard_error(np.array([errors(batch) for batch in batches])),
        )

    @staticmethod
    def expected_squares(preconditioner: Matrix, precision: Matrix | None) -> np.ndarray | float:
        """(M H M) over M on the diagonal, 1 where M is the inverse of H, or taken for that."""
        implicit = isinstance(preconditioner, Implicit) or isinstance(precision, Implicit)
        if precision is None or implicit:
            return 1.0
        if isinstance(preconditioner, Dense):
            values = preconditioner.values
            return np.einsum("ij,ji->i", values, (precision @ values)) / np.diag(values)
        return preconditioner.diagonal() * precision.diagonal()


EULER = Law("euler", averaged=False)
AVERAGED = Law("averaged", averaged=True)

LAWS = {law.name: law for law in (EULER, AVERAGED)}
"""The laws that a trace can name."""
