r"""Running estimate of the variance error of a chain, from its gradients alone.

At stationarity the second moments of a Langevin chain do not change, so for
:math:`\theta' = \theta + \tfrac{h}{2} M \hat\nabla + N(0, h M)` with unbiased :math:`\hat\nabla`

.. math:: -\operatorname{sym} \mathrm{E}[(\theta - \mu) (M \nabla \log \pi)^\top]
          = M + \tfrac{h}{4} M \, \mathrm{E}[\hat\nabla \hat\nabla^\top] M

while draws of the posterior would have M on the left-hand side (Stein's identity). The excess on
the right is the discretisation error and the gradient noise. Where M is about the covariance of a
near-Gaussian posterior, the excess relative to M is the error of the variance. It is a mean of
squares, whose Monte Carlo error is a few per cent *of itself* after a thousand draws. For other
dynamics the left-hand side itself is estimated. The error of its mean over coordinates is about
:math:`\sqrt{2 / (d K)}` after K independent draws.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import numpy as np

from pymc_sgmcmc.adaptation.base import Adaptation, AdaptationState, Seen
from pymc_sgmcmc.dynamics import Law
from pymc_sgmcmc.matrices import Matrix

STATISTIC = "variance_error"
"""The running estimate is recorded under this name."""


class _Monitor(Adaptation):
    """Record of a statistic of running means over the draws, which begin anew after tuning."""

    transitions = 10**9
    stats: Mapping[str, type] = {STATISTIC: np.float64}

    @abstractmethod
    def _values(
        self, state: AdaptationState, positions: np.ndarray, gradients: np.ndarray
    ) -> np.ndarray:
        """Values of some draws, shape (draws, ...), whose means are taken."""

    @abstractmethod
    def _statistic(self, means: np.ndarray, step_sizes: np.ndarray) -> np.ndarray:
        """Statistic after each of some draws, from the means up to it."""

    def begin(self, position: np.ndarray) -> AdaptationState:
        """No draws yet."""
        return {"total": np.asarray(0.0), "count": np.asarray(0), "tuning": np.asarray(True)}

    def update(
        self, state: AdaptationState, seen: Seen
    ) -> tuple[AdaptationState, dict[str, np.ndarray]]:
        """Add the recorded draws."""
        if state["tuning"] and not seen.tuning:
            anew = {"total": np.asarray(0.0), "count": np.asarray(0), "tuning": np.asarray(False)}
            state = {**state, **anew}
        recorded = slice(seen.thin - 1, None, seen.thin)
        values = self._values(state, seen.positions[recorded], seen.gradients[recorded])
        # Sequential sums do not depend on where a run of draws ends.
        total = np.broadcast_to(state["total"], values.shape[1:])
        totals = np.cumsum(np.vstack([total, values]), axis=0)[1:]
        counts = int(state["count"]) + np.arange(1, len(totals) + 1)
        statistic = self._statistic(totals / counts[:, None], seen.step_sizes[recorded])
        state = {**state, "total": totals[-1], "count": np.asarray(counts[-1])}
        return state, {STATISTIC: statistic}


class LangevinMonitor(_Monitor):
    """Record of the variance error of a chain whose law is known.

    Parameters
    ----------
    law : Law
    preconditioner : Matrix
        The fixed preconditioner M.
    precision : Matrix, optional
        The curvature H at the centre, the inverse of M where it is not given.
    """

    def __init__(self, law: Law, preconditioner: Matrix, precision: Matrix | None = None):
        self._law, self._matrices = law, (preconditioner, precision)

    def _values(
        self, state: AdaptationState, positions: np.ndarray, gradients: np.ndarray
    ) -> np.ndarray:
        return self._law.excess(gradients, *self._matrices)

    def _statistic(self, means: np.ndarray, step_sizes: np.ndarray) -> np.ndarray:
        return step_sizes * means.max(1)


class SteinMonitor(_Monitor):
    r"""Record of the mean over coordinates of :math:`-\mathrm{Cov}(\theta_i, \hat\nabla_i) - 1`."""

    def begin(self, position: np.ndarray) -> AdaptationState:
        """No draws yet; positions count from the first."""
        return {**super().begin(position), "origin": np.asarray(position, dtype=float)}

    def _values(
        self, state: AdaptationState, positions: np.ndarray, gradients: np.ndarray
    ) -> np.ndarray:
        positions, gradients = positions.astype(float) - state["origin"], gradients.astype(float)
        products = np.einsum("ki,ki->k", positions, gradients)
        return np.column_stack([positions, gradients, products])

    def _statistic(self, means: np.ndarray, step_sizes: np.ndarray) -> np.ndarray:
        position, gradient = np.split(means[:, :-1], 2, axis=1)
        centred = means[:, -1] - np.einsum("ki,ki->k", position, gradient)
        return -centred / position.shape[1] - 1
