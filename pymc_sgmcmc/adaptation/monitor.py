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

from typing import Any

import numpy as np

from pymc_sgmcmc.adaptation.base import Adaptation, AdaptationState, Seen
from pymc_sgmcmc.dynamics import Law
from pymc_sgmcmc.matrices import Matrix

STATISTIC = "variance_error"
"""The running estimate is recorded under this name."""


class LangevinMonitor(Adaptation):
    """Record of the variance error of a chain whose law is known.

    Parameters
    ----------
    law : Law
    preconditioner : Matrix
        The fixed preconditioner M.
    precision : Matrix, optional
        The curvature H at the centre, the inverse of M where it is not given.
    """

    transitions = 10**9

    def __init__(self, law: Law, preconditioner: Matrix, precision: Matrix | None = None):
        self.stats = {STATISTIC: np.float64}
        self._law, self._matrices = law, (preconditioner, precision)

    def begin(self, position: np.ndarray) -> AdaptationState:
        """No draws yet."""
        return {
            "total": np.zeros(len(position)),
            "count": np.asarray(0),
            "tuning": np.asarray(True),
        }

    def load(self, state: AdaptationState) -> None:
        """Nothing to set."""

    def update(
        self, state: AdaptationState, seen: Seen
    ) -> tuple[AdaptationState, dict[str, np.ndarray]]:
        """Add the recorded draws."""
        state = _anew_after_tuning(state, seen)
        recorded = slice(seen.thin - 1, None, seen.thin)
        excess = self._law.excess(seen.gradients[recorded], *self._matrices)
        totals = _running_sum(state["total"], excess)
        counts = int(state["count"]) + np.arange(1, len(totals) + 1)
        running = seen.step_sizes[recorded] * (totals / counts[:, None]).max(1)
        state = {**state, "total": totals[-1], "count": np.asarray(counts[-1])}
        return state, {STATISTIC: running}


class SteinMonitor(Adaptation):
    r"""Record of the mean over coordinates of :math:`-\mathrm{Cov}(\theta_i, \hat\nabla_i) - 1`."""

    transitions = 10**9

    def __init__(self) -> None:
        self.stats = {STATISTIC: np.float64}

    def begin(self, position: np.ndarray) -> AdaptationState:
        """No draws yet; positions count from the first."""
        return {
            "origin": np.asarray(position, dtype=float),
            "total": np.zeros(2 * len(position) + 1),
            "count": np.asarray(0),
            "tuning": np.asarray(True),
        }

    def load(self, state: AdaptationState) -> None:
        """Nothing to set."""

    def update(
        self, state: AdaptationState, seen: Seen
    ) -> tuple[AdaptationState, dict[str, np.ndarray]]:
        """Add the recorded draws."""
        state = _anew_after_tuning(state, seen)
        recorded = slice(seen.thin - 1, None, seen.thin)
        positions = seen.positions[recorded].astype(float) - state["origin"]
        gradients = seen.gradients[recorded].astype(float)
        products = np.einsum("ki,ki->k", positions, gradients)
        totals = _running_sum(state["total"], np.column_stack([positions, gradients, products]))
        counts = int(state["count"]) + np.arange(1, len(totals) + 1)
        means = totals / counts[:, None]
        dimension = positions.shape[1]
        centred = means[:, -1] - np.einsum(
            "ki,ki->k", means[:, :dimension], means[:, dimension : 2 * dimension]
        )
        state = {**state, "total": totals[-1], "count": np.asarray(counts[-1])}
        return state, {STATISTIC: -centred / dimension - 1}


def _anew_after_tuning(state: AdaptationState, seen: Seen) -> AdaptationState:
    """State whose sums begin with the first draw after tuning."""
    if seen.tuning or not state["tuning"]:
        return state
    return {
        **state,
        "total": np.zeros_like(state["total"]),
        "count": np.asarray(0),
        "tuning": np.asarray(False),
    }


def _running_sum(total: Any, values: np.ndarray) -> np.ndarray:
    """Sequential sums after each value, which do not depend on where a run of draws ends."""
    return np.cumsum(np.vstack([total, values]), axis=0)[1:]
