r"""The minibatch gradient with control variates at a fixed centre, of first or second order."""

from __future__ import annotations

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.batching import Batching
from pymc_sgmcmc.gradient_estimators.base import GradientEstimator
from pymc_sgmcmc.gradient_estimators.center_difference import CenterDifference
from pymc_sgmcmc.posterior import Posterior

SECOND_ORDER = "second_order"
"""The name of control variates of second order."""


class ControlVariateGradient(GradientEstimator[Posterior]):
    r"""The minibatch gradient with control variates at a fixed centre.

    .. math:: \tilde\nabla(\theta) = \nabla \log \pi(\hat\theta)
              + [\nabla \log p(\theta) - \nabla \log p(\hat\theta)]
              + \frac{N}{n} \sum_{j \in S} [\nabla \log p(x_j \mid \theta)
                                            - \nabla \log p(x_j \mid \hat\theta)]

    with the same rows S in both sums (Baker et al. 2019, eq. 4). The estimate is unbiased for any
    centre. Its variance is zero at the centre and grows with the square of the distance from it.

    Control variates of second order subtract :math:`A_j (\theta - \hat\theta)` from the difference
    of each row j, with :math:`A_j = \nabla^2 \log p(x_j \mid \hat\theta)`, and add
    :math:`\sum_{j=1}^N A_j (\theta - \hat\theta)`. The variance then grows with the fourth power of
    the distance. The estimate is unbiased since the sum is over all rows; that of a sample of the
    rows would not do. Far from the centre the shift is taken shorter in all of these terms, see
    `CenterDifference.along_shift`.

    Other step methods may move other variables of the posterior. The differences are then between
    the present values of these variables and those for which the centre was computed, so the
    estimate is unbiased for the conditional gradient.

    Parameters
    ----------
    posterior : Posterior
    batching : Batching
        Minibatch scheme over `data` and `columns` of the difference.
    difference : CenterDifference
        Gradient of rows less that at the centre, and for second order less its derivative there.
    likelihood_gradient : numpy.ndarray, shape (d,)
        Gradient of the log likelihood of all rows at the centre, in terms of their position.
    kept : numpy.ndarray of int, optional
        Numbers of rows K that every estimate evaluates and no minibatch has. Their differences
        :math:`\sum_{j \in K}` have no noise, and N counts the other rows.
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
        if difference.sums_of is not None:
            self.name = SECOND_ORDER
        self._kept_data = [
            pytensor.shared(
                np.ascontiguousarray(values),
                f"kept_{number}",
                shape=(self.kept_rows if batching.static else None, *values.shape[1:]),
            )
            for number, values in enumerate(difference.rows_of(self.kept) if self.kept_rows else ())
        ]
        # A vector of length one broadcasts only with a static shape.
        self._likelihood_gradient = pytensor.shared(
            np.asarray(likelihood_gradient, dtype=posterior.dtype),
            "likelihood_gradient_at_center",
            shape=(posterior.dimension,),
        )

    def __call__(self, position: TensorVariable, index: TensorVariable) -> TensorVariable:
        """Gradient estimate, shape (d,)."""
        along_shift, weight = None, None
        seen = self.posterior.of_rows(position)
        if self._difference.sums_of is not None:
            along_shift, weight = self._difference.along_shift(seen)
        rows = self.batching.rows(index), self.batching.length
        estimate = self._likelihood_gradient + self._scale * self._difference(seen, *rows, weight)
        if along_shift is not None:
            estimate = estimate + along_shift
        if self.kept_rows:
            length = (
                pt.constant(self.kept_rows, dtype="int64")
                if self.batching.static
                else self._kept_data[0].shape[0]
            )
            estimate = estimate + self._difference(seen, self._kept_data, length, weight)
        return self.posterior.gradient_with_prior(position, estimate)
