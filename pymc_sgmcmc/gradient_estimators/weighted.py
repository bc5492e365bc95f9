r"""Minibatch gradients whose rows have different probabilities."""

from __future__ import annotations

import numpy as np
import pytensor
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.batching import WeightedRows
from pymc_sgmcmc.gradient_estimators.base import GradientEstimator
from pymc_sgmcmc.posterior import Posterior


class WeightedGradient(GradientEstimator):
    r"""The minibatch gradient of rows drawn with probabilities p, plain or with control variates.

    .. math:: \hat\nabla(\theta) = \nabla \log p(\theta)
              + \frac{1}{n} \sum_{j \in S} \frac{1}{p_j} \nabla \log p(x_j \mid \theta)

    With control variates the sum is that of the differences from the centre, and the gradient of
    all rows at the centre is added (Baker et al. 2019, §3.1). Both are unbiased for any positive
    probabilities.

    Parameters
    ----------
    posterior : Posterior
    batching : WeightedRows
        Minibatch scheme over the data of the posterior and, as the last array, the weights
        :math:`1 / (N p_j)`.
    center, likelihood_gradient : numpy.ndarray, shape (d,), optional
        The centre, and the gradient of the log likelihood of all rows there.
    """

    def __init__(
        self,
        posterior: Posterior,
        batching: WeightedRows,
        center: np.ndarray | None = None,
        likelihood_gradient: np.ndarray | None = None,
    ):
        super().__init__(posterior, batching)
        self.name = "plain" if center is None else "cv"
        self.reduces_variance = center is not None
        self._at_center = [
            pytensor.shared(
                np.asarray(values, dtype=posterior.dtype), name, shape=(posterior.dimension,)
            )
            for values, name in (
                (center, "center"),
                (likelihood_gradient, "likelihood_gradient_at_center"),
            )
            if values is not None
        ]

    def __call__(self, position: TensorVariable, index: TensorVariable) -> TensorVariable:
        """Gradient estimate, shape (d,)."""
        *rows, weights = self.batching.rows(index)
        estimate = self.posterior.weighted_rows_gradient(position, rows, weights)
        prior = self.posterior.prior_gradient(position)
        if not self._at_center:
            return prior + self._scale * estimate
        center, likelihood_gradient = self._at_center
        difference = estimate - self.posterior.weighted_rows_gradient(center, rows, weights)
        return prior + likelihood_gradient + self._scale * difference
