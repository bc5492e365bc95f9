"""The gradient of all rows."""

from __future__ import annotations

import pytensor.tensor as pt
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.batching import AllRows
from pymc_sgmcmc.gradient_estimators.base import GradientEstimator
from pymc_sgmcmc.posterior import Posterior


class FullGradient(GradientEstimator[Posterior]):
    r"""The gradient of the log posterior itself.

    .. math:: \nabla(\theta) = \nabla \log p(\theta) + \sum_{i=1}^N \nabla \log p(x_i \mid \theta)

    Parameters
    ----------
    posterior : Posterior
    static : bool
        As for `Batching`.
    """

    name = "full"
    reduces_variance = True

    def __init__(self, posterior: Posterior, *, static: bool = False):
        super().__init__(posterior, AllRows(posterior.data, posterior.n_rows, static=static))

    def __call__(self, position: TensorVariable, index: TensorVariable) -> TensorVariable:
        """Gradient, shape (d,)."""
        posterior, rows = self.posterior, self.batching.rows(index)
        likelihood = posterior.rows_gradient(
            posterior.of_rows(position), rows, self.batching.length
        )
        return posterior.gradient_with_prior(position, likelihood)

    def log_density(self, position: TensorVariable) -> TensorVariable:
        """Symbolic log posterior on the same rows."""
        rows = self.batching.rows(pt.constant(0))
        return self.posterior.prior_log_density(position) + self.posterior.rows_log_density(
            self.posterior.of_rows(position), rows, self.batching.length
        )
