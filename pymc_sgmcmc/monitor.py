r"""Running estimate of the variance error of a chain, from its gradients alone.

At stationarity nothing of a Langevin chain changes its second moments, so for
:math:`\theta' = \theta + \tfrac{h}{2} M \hat\nabla + N(0, h M)` with unbiased :math:`\hat\nabla`

.. math:: -\operatorname{sym} \mathrm{E}[(\theta - \mu) (M \nabla \log \pi)^\top]
          = M + \tfrac{h}{4} M \, \mathrm{E}[\hat\nabla \hat\nabla^\top] M

while draws of the posterior have M on the left-hand side (Stein's identity): the excess on the
right is the discretisation error and the gradient noise. Relative to M it is the error of the
variance where M is about the covariance of a near-Gaussian posterior, and a mean of squares,
whose Monte-Carlo error is a few percent *of itself* after a thousand draws. Of other dynamics
the left-hand side is estimated as it stands, for which the error of the mean over coordinates is
about :math:`\sqrt{2 / (d K)}` after K independent draws.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import linalg

from pymc_sgmcmc.adaptation import Adaptation, AdaptationState, Seen
from pymc_sgmcmc.linear_algebra import (
    Matrix,
    apply,
    apply_to_rows,
    congruent,
    diagonal,
    matrix_root,
)
from pymc_sgmcmc.tuning import DENSE_DIMENSION

STATISTIC = "variance_error"
"""Name of the recorded running estimate."""

DRAWS_BETWEEN_UPDATES = 100
"""Draws between two changes of the step size while tuning."""

MARGIN = 0.95
"""Part of the stated error that tuning aims at."""

SMALLEST_FACTOR, LARGEST_FACTOR = 0.01, 10.0
"""Bounds on what tuning makes of a computed step size, as factors of it."""

GRADIENTS_A_DRAW = 10
"""Gradients of the transitions to a draw, at most, that the step size is tuned by: their noise is
anew in each transition, where the positions are not."""


def langevin_excess(gradients: np.ndarray, preconditioner: Matrix) -> np.ndarray:
    r"""Relative variance error of each draw for a step of 1: its mean over draws times h.

    .. math:: \tfrac14 (M \hat\nabla)_i^2 / M_{ii}

    Parameters
    ----------
    gradients : numpy.ndarray, shape (..., d)
    preconditioner : numpy.ndarray, scalar, (d,) or (d, d), or LowRank

    Returns
    -------
    numpy.ndarray, shape (..., d)
    """
    moved = apply_to_rows(preconditioner, np.asarray(gradients, dtype=float))
    return 0.25 * moved**2 / diagonal(preconditioner)


class LangevinMonitor(Adaptation):
    r"""Records the variance error of a Langevin chain, and keeps its step to the stated one.

    While tuning, the step size is set anew from the gradients that the chain has met,

    .. math:: h = \frac{4 \delta}{\lambda_{\max}(L^\top \mathrm{E}[\hat\nabla
              \hat\nabla^\top] L)}, \qquad M = L L^\top

    which is the closed form with the curvature and the noise of the gradient where the posterior
    has its mass, and with those of all rows: the few from which the step size was computed may
    have had more, or fewer, of those that make most of the noise. The largest direction is
    searched in one half of the gradients and measured in the other; the largest error of a
    coordinate bounds the step too. In dimensions above `DENSE_DIMENSION` there are the
    coordinates alone, and the step is never made larger.

    Parameters
    ----------
    preconditioner : numpy.ndarray, scalar, (d,) or (d, d), or LowRank
        M, fixed.
    thin : int
    step_size : float or None
        Computed step size to be kept to `bias`; None leaves the given one alone.
    bias : float
        Stated relative error.
    """

    def __init__(self, preconditioner: Matrix, thin: int, step_size: float | None, bias: float):
        self.transitions = DRAWS_BETWEEN_UPDATES * thin
        self.stats = {STATISTIC: np.float64}
        self._preconditioner = preconditioner
        self._step_size = step_size
        self._bias = bias
        self._root = matrix_root(preconditioner)

    def begin(self, position: np.ndarray) -> AdaptationState:
        """No draws yet."""
        dimension = len(position)
        # One matrix for draws of even and one for draws of odd number.
        matrices = (2, dimension, dimension) if self._tunes(dimension) else (2, 0, 0)
        return {
            "products": np.zeros(matrices),
            "gradients": np.zeros(2, dtype=int),
            "total": np.zeros(len(position)),
            "count": np.asarray(0),
            "tuning": np.asarray(True),
            "factor": np.asarray(1.0),
        }

    def load(self, state: AdaptationState) -> None:
        """Nothing: the step size is an argument of the transitions."""

    def step_size_factor(self, state: AdaptationState) -> float:
        """Factor that tuning has found."""
        return float(state["factor"])

    def update(
        self, state: AdaptationState, seen: Seen
    ) -> tuple[AdaptationState, dict[str, np.ndarray]]:
        """Add the recorded draws; at a boundary while tuning, set the step size anew."""
        state = _anew_after_tuning(state, seen)
        recorded = slice(seen.thin - 1, None, seen.thin)
        excess = langevin_excess(seen.gradients[recorded], self._preconditioner)
        totals = _running_sum(state["total"], excess)
        counts = int(state["count"]) + np.arange(1, len(totals) + 1)
        running = seen.step_sizes[recorded] * (totals / counts[:, None]).max(1)
        if seen.tuning and self._tunes(len(state["total"])):
            state = _with_products(state, seen)
        factor = state["factor"]
        if self._step_size is not None and seen.tuning and seen.at_boundary:
            factor = np.asarray(self._factor(state, totals[-1] / counts[-1], int(counts[-1])))
        state = {
            **state,
            "total": totals[-1],
            "count": np.asarray(counts[-1]),
            "factor": factor,
        }
        return state, {STATISTIC: running}

    def _tunes(self, dimension: int) -> bool:
        return self._step_size is not None and dimension <= DENSE_DIMENSION

    def _factor(self, state: AdaptationState, excess: np.ndarray, count: int) -> float:
        assert self._step_size is not None
        if count < DRAWS_BETWEEN_UPDATES:
            return 1.0
        largest, most = float(excess.max()), 1.0
        if self._tunes(len(excess)):
            means = state["products"] / state["gradients"][:, None, None]
            largest = max(largest, 0.25 * _largest_direction(means, self._root))
            most = LARGEST_FACTOR
        wanted = MARGIN * self._bias / self._step_size
        return float(np.clip(wanted / max(largest, wanted / most), SMALLEST_FACTOR, most))


def _with_products(state: AdaptationState, seen: Seen) -> AdaptationState:
    """State with the products of the gradients of more draws, one draw after the other."""
    products, gradients = state["products"].copy(), state["gradients"].copy()
    stride = max(1, seen.thin // GRADIENTS_A_DRAW)
    dimension = seen.gradients.shape[1]
    draws = seen.gradients.reshape(-1, seen.thin, dimension)[:, stride - 1 :: stride]
    for number, some in enumerate(draws.astype(float), start=int(state["count"])):
        products[number % 2] += some.T @ some
        gradients[number % 2] += len(some)
    return {**state, "products": products, "gradients": gradients}


def _largest_direction(means: np.ndarray, root: np.ndarray) -> float:
    r"""Largest :math:`v^\top L^\top A L v` of two estimates of A, v from one and A the other.

    The largest eigenvalue of one estimate is too large, by a factor of
    :math:`(1 + \sqrt{d / K})^2` after K gradients with A the identity.
    """
    whitened = [congruent(one, root) for one in means]
    last = len(means[0]) - 1
    found = []
    for here, there in (whitened, whitened[::-1]):
        _, vectors = linalg.eigh(here, subset_by_index=[last, last])
        found.append(float(vectors[:, 0] @ apply(there, vectors[:, 0])))
    return 0.5 * sum(found)


class SteinMonitor(Adaptation):
    r"""Records the mean over coordinates of :math:`-\mathrm{Cov}(\theta_i, \hat\nabla_i) - 1`."""

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
    """Sums after each value, one after the other: the same wherever a run of draws ends."""
    return np.cumsum(np.vstack([total, values]), axis=0)[1:]
