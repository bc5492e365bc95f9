r"""The plain minibatch gradient."""

from __future__ import annotations

from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.gradient_estimators.base import GradientEstimator
from pymc_sgmcmc.posterior import Posterior


class PlainGradient(GradientEstimator[Posterior]):
    r"""The minibatch gradient scaled to the full data.

    .. math:: \hat\nabla(\theta) = \nabla \log p(\theta)
              + \frac{N}{n} \sum_{j \in S} \nabla \log p(x_j \mid \theta)

    This is the estimate of Welling and Teh (2011), eq. 4.
    """

    name = "plain"

    def __call__(self, position: TensorVariable, index: TensorVariable) -> TensorVariable:
        """Gradient estimate, shape (d,)."""
        posterior, rows = self.posterior, self.batching.rows(index)
        likelihood = posterior.rows_gradient(
            posterior.of_rows(position), rows, self.batching.length
        )
        return posterior.gradient_with_prior(position, self._scale * likelihood)
