r"""Estimators of the gradient of the log posterior from a minibatch.

An estimator turns a posterior and a minibatch scheme into a symbolic function of a position
and an index. All are unbiased for each position; they differ in their variance.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.replace import clone_replace
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.batching import Batching
from pymc_sgmcmc.center_columns import CenterColumns
from pymc_sgmcmc.posterior import Posterior


class GradientEstimator(ABC):
    """Symbolic estimate of the gradient of the log posterior."""

    name: str

    def __init__(self, posterior: Posterior, batching: Batching):
        self.posterior = posterior
        self.batching = batching
        scale = np.asarray(batching.n_rows / batching.batch_size, dtype=posterior.dtype)
        self._scale = pt.constant(scale) if batching.static else pytensor.shared(scale, "N_over_n")

    @abstractmethod
    def __call__(self, position: TensorVariable, index: TensorVariable) -> TensorVariable:
        """Gradient estimate, shape (d,), at a position from the rows of an index."""


class PlainGradient(GradientEstimator):
    r"""The minibatch gradient scaled to the full data.

    .. math:: \hat\nabla(\theta) = \nabla \log p(\theta)
              + \frac{N}{n} \sum_{j \in S} \nabla \log p(x_j \mid \theta)

    (Welling and Teh 2011, eq. 4.)
    """

    name = "plain"

    def __call__(self, position: TensorVariable, index: TensorVariable) -> TensorVariable:
        """Gradient estimate, shape (d,)."""
        rows = self.batching.rows(index)
        likelihood = self.posterior.rows_gradient(position, rows, self.batching.length)
        return self.posterior.prior_gradient(position) + self._scale * likelihood


class ControlVariateGradient(GradientEstimator):
    r"""The minibatch gradient with control variates at a fixed centre.

    .. math:: \tilde\nabla(\theta) = \nabla \log \pi(\hat\theta)
              + [\nabla \log p(\theta) - \nabla \log p(\hat\theta)]
              + \frac{N}{n} \sum_{j \in S} [\nabla \log p(x_j \mid \theta)
                                            - \nabla \log p(x_j \mid \hat\theta)]

    with the same rows S in both sums (Baker et al. 2019, eq. 4). Unbiased for any centre; the
    variance falls with the square of the distance to it.

    Where the posterior has other variables, which other step methods move, the differences
    are taken between their present values and those that the centre was computed with, so the
    estimate stays unbiased for the conditional gradient.

    Parameters
    ----------
    posterior : Posterior
    batching : Batching
        Over the data of the posterior, followed by the columns of `center_columns`.
    center : numpy.ndarray, shape (d,)
    likelihood_gradient : numpy.ndarray, shape (d,)
        Gradient of the log likelihood of all rows at the centre.
    center_columns : CenterColumns
        The gradient of rows at the centre.
    center_of_others : dict, optional
        Values that the other variables had when the centre was computed.
    """

    name = "cv"

    def __init__(
        self,
        posterior: Posterior,
        batching: Batching,
        center: np.ndarray,
        likelihood_gradient: np.ndarray,
        center_columns: CenterColumns,
        center_of_others: dict[str, np.ndarray] | None = None,
    ):
        super().__init__(posterior, batching)
        self._center_columns = center_columns
        # Static shapes: a position of length one would otherwise not broadcast.
        shape = (posterior.dimension,)
        self._center = pytensor.shared(
            np.asarray(center, dtype=posterior.dtype), "center", shape=shape
        )
        self._likelihood_gradient = pytensor.shared(
            np.asarray(likelihood_gradient, dtype=posterior.dtype),
            "likelihood_gradient_at_center",
            shape=shape,
        )
        self._center_of_others: dict[SharedVariable, SharedVariable] = {
            shared: pytensor.shared(
                np.array((center_of_others or {}).get(name, shared.get_value())),
                f"{name}_center",
                shape=shared.type.shape,
            )
            for name, shared in posterior.others.items()
        }

    def __call__(self, position: TensorVariable, index: TensorVariable) -> TensorVariable:
        """Gradient estimate, shape (d,)."""
        rows = self.batching.rows(index)
        length = self.batching.length
        here = self.posterior.rows_gradient(position, rows[: len(self.posterior.data)], length)
        at_center = self._center_columns.gradient(self._center, rows, length)
        if self._center_of_others:
            at_center = clone_replace(at_center, self._center_of_others)
        return (
            self.posterior.prior_gradient(position)
            + self._likelihood_gradient
            + self._scale * (here - at_center)
        )
