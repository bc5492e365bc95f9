r"""The step size of Langevin dynamics, set anew while tuning from what the chain has met.

The closed form needs the curvature and the covariance V of the gradient estimate, which are
computed around the centre, from some of the rows. The chain meets both where the posterior has its
mass, and draws from all rows.
"""

from __future__ import annotations

import numpy as np
from scipy import linalg

from pymc_sgmcmc.adaptation.base import Adaptation, AdaptationState, Seen
from pymc_sgmcmc.adaptation.monitor import langevin_excess
from pymc_sgmcmc.matrices import LowRank, Matrix, apply_to_rows, congruent, matrix_root
from pymc_sgmcmc.tuning import DENSE_DIMENSION, Center

FIRST_WINDOW = 100
"""Draws after which the step size is set for the first time, and between two changes. Each window
of draws is twice as long as the one before, and forgets it: a chain may begin far from its law."""

MARGIN = 0.9
"""Part of the stated error that tuning aims at."""

SMALLEST_FACTOR, LARGEST_FACTOR = 0.01, 10.0
"""Bounds on what tuning makes of a computed step size, as factors of it."""

GRADIENTS_A_DRAW = 10
"""Gradients of the transitions to a draw, at most, that are used: their noise is anew in each."""

STANDARD_ERRORS = 3.0
"""By which an error of a coordinate has to be larger than the others' to count: the largest of many
is large by chance."""

SQUARES_A_DRAW = 1 / 1.3
"""Independent squares a draw, where draws are a relaxation time apart."""


class LangevinStepSize(Adaptation):
    r"""Keeps the variance error of a Langevin chain to the stated one.

    .. math:: h = \frac{4 \delta}{\lambda_{\max}(L^\top (H + V) L)}, \qquad M = L L^\top

    with H the curvature at the centre c and V from the residuals
    :math:`r = \hat\nabla + H (\theta - c)`, the noise of the gradients and what is not Gaussian
    of the posterior. Noise is independent between transitions, where the gradients themselves
    follow the position, so that even a few draws tell its covariance. The largest direction is
    searched in the draws of even number and measured in those of odd number, and the other way
    round: the largest eigenvalue of one estimate is too large, by :math:`(1 + \sqrt{d / K})^2`
    after K residuals. Beyond that, an error of a coordinate that is larger by more than chance
    bounds the step. In dimensions above `DENSE_DIMENSION` there are the coordinates alone, and
    the step is never made larger.

    Parameters
    ----------
    preconditioner : numpy.ndarray, scalar, (d,) or (d, d), or LowRank
        M, fixed.
    thin : int
    step_size : float
        The computed one.
    bias : float
        Stated relative error :math:`\delta`.
    center : Center
        c and H.
    """

    def __init__(
        self, preconditioner: Matrix, thin: int, step_size: float, bias: float, center: Center
    ):
        self.transitions = FIRST_WINDOW * thin
        self._preconditioner = preconditioner
        self._wanted = MARGIN * bias / step_size
        self._center = center.position
        self._precision = center.curvature.precision
        low_rank = isinstance(self._precision, LowRank)
        self._searches = len(self._center) <= DENSE_DIMENSION and not low_rank
        if self._searches:
            self._root = matrix_root(preconditioner)
            self._curvature = _square(congruent(self._precision, self._root), len(self._center))

    def begin(self, position: np.ndarray) -> AdaptationState:
        """No draws yet."""
        d = len(position)
        residuals = (2, d) if self._searches else (2, 0)
        return {
            "factor": np.asarray(1.0),
            "draws": np.asarray(0),
            "window": np.asarray(FIRST_WINDOW),
            "excess": np.zeros(d),
            # One for draws of even and one for draws of odd number.
            "products": np.zeros((*residuals, residuals[1])),
            "residuals": np.zeros(residuals),
            "counts": np.zeros(2, dtype=int),
        }

    def load(self, state: AdaptationState) -> None:
        """Nothing: the step size is an argument of the transitions."""

    def step_size_factor(self, state: AdaptationState) -> float:
        """Factor that tuning has found."""
        return float(state["factor"])

    def update(
        self, state: AdaptationState, seen: Seen
    ) -> tuple[AdaptationState, dict[str, np.ndarray]]:
        """Add draws while tuning; at a boundary set the step size anew."""
        if not seen.tuning:
            return state, {}
        state = self._with_draws(state, seen)
        if seen.at_boundary and state["draws"] >= FIRST_WINDOW:
            state = {**state, "factor": np.asarray(self._factor(state))}
            if state["draws"] >= state["window"]:
                window = np.asarray(2 * state["window"])
                state = {**self.begin(self._center), "factor": state["factor"], "window": window}
        return state, {}

    def _with_draws(self, state: AdaptationState, seen: Seen) -> AdaptationState:
        """State with the sums of more draws, one by one: the same for runs of any length."""
        excess, draws = state["excess"].copy(), int(state["draws"])
        products, residuals, counts = (
            state[name].copy() for name in ("products", "residuals", "counts")
        )
        recorded = seen.gradients[seen.thin - 1 :: seen.thin]
        for one in langevin_excess(recorded, self._preconditioner):
            excess += one
        if self._searches:
            stride = max(1, seen.thin // GRADIENTS_A_DRAW)
            each = (-1, seen.thin, len(excess))
            gradients = seen.gradients.reshape(each)[:, stride - 1 :: stride].astype(float)
            positions = seen.positions.reshape(each)[:, stride - 1 :: stride].astype(float)
            for number, (some, at) in enumerate(
                zip(gradients, positions, strict=True), start=draws
            ):
                rest = some + apply_to_rows(self._precision, at - self._center)
                products[number % 2] += rest.T @ rest
                residuals[number % 2] += rest.sum(0)
                counts[number % 2] += len(rest)
        return {
            **state,
            "draws": np.asarray(draws + len(recorded)),
            "excess": excess,
            "products": products,
            "residuals": residuals,
            "counts": counts,
        }

    def _factor(self, state: AdaptationState) -> float:
        """What the step size should be, in units of the computed one."""
        draws = int(state["draws"])
        chance = STANDARD_ERRORS * np.sqrt(2 / (draws * SQUARES_A_DRAW))
        largest, most = max(0.0, 1 - chance) * float(state["excess"].max()) / draws, 1.0
        if self._searches:
            means = state["residuals"] / state["counts"][:, None]
            products = state["products"] / state["counts"][:, None, None]
            noise = products - means[:, :, None] * means[:, None, :]
            whitened = [self._curvature + congruent(one, self._root) for one in noise]
            largest, most = max(largest, 0.25 * _largest_direction(*whitened)), LARGEST_FACTOR
        return float(np.clip(self._wanted / max(largest, 1e-300), SMALLEST_FACTOR, most))


def _square(matrix: np.ndarray, dimension: int) -> np.ndarray:
    return matrix if matrix.ndim == 2 else np.diag(np.broadcast_to(matrix, dimension))


def _largest_direction(first: np.ndarray, second: np.ndarray) -> float:
    r"""Mean of :math:`v^\top A v` for v the largest direction of one estimate, A the other."""
    found = []
    for here, there in ((first, second), (second, first)):
        largest = linalg.eigh(here)[1][:, -1]
        found.append(float(largest @ there @ largest))
    return 0.5 * sum(found)
