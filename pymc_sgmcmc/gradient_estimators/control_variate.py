r"""The minibatch gradient with control variates at a fixed centre (Baker et al. 2019)."""

from __future__ import annotations

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.batching import Batching
from pymc_sgmcmc.gradient_estimators.base import GradientEstimator
from pymc_sgmcmc.gradient_estimators.center_difference import CenterDifference
from pymc_sgmcmc.posterior import Posterior


class ControlVariateGradient(GradientEstimator):
    r"""The minibatch gradient with control variates at a fixed centre.

    .. math:: \tilde\nabla(\theta) = \nabla \log \pi(\hat\theta)
              + [\nabla \log p(\theta) - \nabla \log p(\hat\theta)]
              + \frac{N}{n} \sum_{j \in S} [\nabla \log p(x_j \mid \theta)
                                            - \nabla \log p(x_j \mid \hat\theta)]

    with the same rows S in both sums (Baker et al. 2019, eq. 4). Unbiased for any centre; the
    variance is zero there and grows with the square of the distance from it.

    Where the posterior has other variables, which other step methods move, the differences
    are taken between their present values and those that the centre was computed with, so the
    estimate stays unbiased for the conditional gradient.

    Parameters
    ----------
    posterior : Posterior
    batching : Batching
        Over `data` and `columns` of the difference.
    difference : CenterDifference
        Gradient of rows less that at the centre.
    likelihood_gradient : numpy.ndarray, shape (d,)
        Gradient of the log likelihood of all rows at the centre.
    kept : numpy.ndarray of int, optional
        Numbers of rows K that each estimate takes, and no minibatch has: their differences
        :math:`\sum_{j \in K}` have no noise, and N counts the others.
    """

    name = "cv"
    reduces_variance = True

    def __init__(
        self,
        posterior: Posterior,
        batching: Batching,
        difference: CenterDifference,
        likelihood_gradient: np.ndarray,
        kept: np.ndarray | None = None,
    ):
        super().__init__(posterior, batching)
        self._difference = difference
        if kept is not None:
            self.kept = np.asarray(kept)
        self._kept_data = [
            pytensor.shared(
                np.ascontiguousarray(values[kept]),
                f"kept_{number}",
                shape=(self.kept_rows if batching.static else None, *values.shape[1:]),
            )
            for number, values in enumerate([*difference.data, *difference.columns])
            if self.kept_rows
        ]
        # A vector of length one broadcasts only with a static shape.
        self._likelihood_gradient = pytensor.shared(
            np.asarray(likelihood_gradient, dtype=posterior.dtype),
            "likelihood_gradient_at_center",
            shape=(posterior.dimension,),
        )

    def __call__(self, position: TensorVariable, index: TensorVariable) -> TensorVariable:
        """Gradient estimate, shape (d,)."""
        difference = self._difference(position, self.batching.rows(index), self.batching.length)
        estimate = (
            self.posterior.prior_gradient(position)
            + self._likelihood_gradient
            + self._scale * difference
        )
        if self.kept_rows:
            length = (
                pt.constant(self.kept_rows, dtype="int64")
                if self.batching.static
                else self._kept_data[0].shape[0]
            )
            estimate = estimate + self._difference(position, self._kept_data, length)
        return estimate
