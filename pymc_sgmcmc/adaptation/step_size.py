r"""The step size of Langevin dynamics, computed anew during tuning from the gradients of the chain.

The closed form needs the curvature and the covariance V of the gradient estimate. Both are computed
around the centre, from a part of the rows. The gradients of the chain show both over the mass of
the posterior and from all rows.
"""

from __future__ import annotations

from copy import copy
from typing import Self

import numpy as np
from scipy import linalg

from pymc_sgmcmc.adaptation.base import Adaptation, AdaptationState, Seen
from pymc_sgmcmc.dynamics import Law
from pymc_sgmcmc.matrices import Dense, Implicit, Matrix
from pymc_sgmcmc.tuning import DENSE_DIMENSION, Center

FIRST_WINDOW = 100
"""The step size is set for the first time after this many draws, and then at each multiple of them.
Each window of draws is twice as long as the one before and starts anew, since a chain may begin far
from its law."""

MARGIN = 0.9
"""Tuning aims at this part of the stated error, so that errors of the estimate rarely lead to a
larger error than the stated one."""

SMALLEST_FACTOR, LARGEST_FACTOR = 0.01, 10.0
"""Tuning multiplies the computed step size by a factor within these bounds. They keep a wrong
estimate from an unusual window from stopping the chain or making it diverge at once."""

GRADIENTS_A_DRAW = 10
"""At most this many gradients of the transitions to a draw are used. Their noise is independent in
each transition, and so many give the noise of a window with a small error at little cost."""

STANDARD_ERRORS = 3.0
"""The error of a coordinate counts after subtracting this many standard errors, since the largest
of many errors is large by chance alone."""

SQUARES_A_DRAW = 1 / 1.3
"""Each draw gives this many independent squares. Squares of draws that are one relaxation time
apart have the autocorrelation time (1 + e⁻²) / (1 - e⁻²) = 1.3."""


class LangevinStepSize(Adaptation):
    r"""Adaptation that keeps the variance error of a chain whose law is known near the stated one.

    It is the step size of the law, see `Law.step_size`, for :math:`M = L L^\top`, H the curvature
    at the centre c, and the noise V that the chain meets. V is the covariance of the residuals
    :math:`r = \hat\nabla + H (\theta - c)`, which hold the noise of the gradients and the part of
    the posterior that is not Gaussian. Noise is independent between transitions, while the
    gradients follow the position, so a few draws suffice for its covariance. With averaged noises
    only half the covariance of differences of successive residuals counts: what the position
    explains of a residual hardly changes in a transition, and adds to the error in the second order
    of the step size. As it does so in proportion to the step, a longer step is the geometric mean
    of the present one and of that of the formula. The direction of
    largest variance is searched in the draws of even number and measured in those of odd number,
    and vice versa. The largest eigenvalue of one estimate would be too large, by
    :math:`(1 + \sqrt{d / K})^2` after K residuals. An error of a coordinate that is larger than
    chance explains bounds the step as well. In dimensions above `DENSE_DIMENSION` only the
    coordinates are used, and the step is never made larger.

    Parameters
    ----------
    law : Law
    preconditioner : Matrix
        The fixed preconditioner M.
    thin : int
    step_size : float
        The computed step size.
    bias : float
        Stated relative error :math:`\delta`.
    center : Center
        The centre, with c and H.
    longest : float
        No step is longer.
    largest_force : float
        Where the dynamics take a larger gradient for one of this size, so does the estimate of the
        noise: one excursion would make the step tiny.
    """

    only_tunes = True

    def __init__(
        self,
        law: Law,
        preconditioner: Matrix,
        thin: int,
        step_size: float,
        bias: float,
        center: Center,
        longest: float = np.inf,
        largest_force: float = np.inf,
    ):
        self.transitions = FIRST_WINDOW * thin
        self._law, self._bias, self._step_size = law, bias, step_size
        self._longest, self._largest_force = longest, largest_force
        self._preconditioner = preconditioner
        self._center = center.position
        self._precision = center.curvature.precision
        self._largest = float(center.curvature.relative_to(preconditioner.root).max())
        implicit = isinstance(self._precision, Implicit)
        self._searches = len(self._center) <= DENSE_DIMENSION and not implicit
        self._successive = self._searches and law.averaged
        if self._searches:
            self._root = preconditioner.root
            curvature = self._precision.congruence(self._root)
            self._curvature = curvature.dense(len(self._center))

    def at_bias(self, thin: int, step_size: float, bias: float) -> Self:
        """The same for another stated error, with its step size and transitions a draw."""
        other = copy(self)
        other.transitions = FIRST_WINDOW * thin
        other._step_size, other._bias = step_size, bias
        return other

    def begin(self, position: np.ndarray) -> AdaptationState:
        """No draws yet."""
        d = len(position)
        residuals = (2, d) if self._searches else (2, 0)
        return {
            "factor": np.asarray(1.0),
            "draws": np.asarray(0),
            "step_sizes": np.asarray(0.0),
            # The last position and gradient, if their successors are still to come.
            "last": np.zeros((2, d if self._successive else 0)),
            "window": np.asarray(FIRST_WINDOW),
            "excess": np.zeros(d),
            # The first entry is for draws of even number, the second for odd ones.
            "products": np.zeros((*residuals, residuals[1])),
            "residuals": np.zeros(residuals),
            "counts": np.zeros(2, dtype=int),
        }

    def step_size_factor(self, state: AdaptationState) -> float:
        """Factor that tuning has found."""
        return float(state["factor"])

    def update(
        self, state: AdaptationState, seen: Seen
    ) -> tuple[AdaptationState, dict[str, np.ndarray]]:
        """Add draws during tuning, and at a boundary set the step size anew."""
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
        """State with further draws added one by one, so that the length of runs has no effect."""
        excess, draws = state["excess"].copy(), int(state["draws"])
        products, residuals, counts = (
            state[name].copy() for name in ("products", "residuals", "counts")
        )
        gradients = self._tamed(seen.gradients.astype(float), seen.step_sizes)
        recorded = gradients[seen.thin - 1 :: seen.thin]
        moved = recorded @ self._preconditioner
        for square in moved**2 / self._preconditioner.diagonal():
            excess += square
        step_sizes = float(state["step_sizes"])
        for step_size in seen.step_sizes[seen.thin - 1 :: seen.thin]:
            step_sizes += float(step_size)
        last = state["last"]
        if self._searches:
            path = np.stack([seen.positions.astype(float), gradients])
            # Pairs of successive transitions lie in one draw, or in two draws of one transition.
            length = max(seen.thin, 1 + self._successive)
            if draws * seen.thin % length:
                path = np.concatenate([last[:, None], path], axis=1)
            number, rest = divmod(path.shape[1], length)
            last = path[:, -1] if rest else np.zeros_like(last)
            path = path[:, : number * length].reshape(2, number, length, len(excess))
            apart = max(1, length // GRADIENTS_A_DRAW)
            for half, of_draw in enumerate(path.swapaxes(0, 1), start=draws * seen.thin // length):
                if self._successive:
                    before, after = slice(0, length - 1, 2 * apart), slice(1, None, 2 * apart)
                    shifts, found = (of_draw[:, after] - of_draw[:, before]) / np.sqrt(2)
                else:
                    positions, found = of_draw[:, apart - 1 :: apart]
                    shifts = positions - self._center
                found = found + shifts @ self._precision
                products[half % 2] += found.T @ found
                residuals[half % 2] += found.sum(0)
                counts[half % 2] += len(found)
        return {
            **state,
            "draws": np.asarray(draws + len(recorded)),
            "step_sizes": np.asarray(step_sizes),
            "last": last,
            "excess": excess,
            "products": products,
            "residuals": residuals,
            "counts": counts,
        }

    def _tamed(self, gradients: np.ndarray, step_sizes: np.ndarray) -> np.ndarray:
        """Gradients as the dynamics take them."""
        if not np.isfinite(self._largest_force):
            return gradients
        forces = np.sqrt(np.einsum("ij,ij->i", gradients, gradients @ self._preconditioner))
        largest = self._largest_force / np.minimum(1.0, step_sizes)
        return gradients * (largest / np.maximum(forces, largest))[:, None]

    def _factor(self, state: AdaptationState) -> float:
        """Step size to use, in units of the computed one."""
        draws = int(state["draws"])
        chance = STANDARD_ERRORS * np.sqrt(2 / (draws * SQUARES_A_DRAW))
        squares = max(0.0, 1 - chance) * state["excess"] / draws
        expected = self._law.expected_squares(self._preconditioner, self._precision)
        # In the direction in which noise and what the curvature adds to it are largest.
        share, most = self._law.of_curvature, 1.0
        largest = float((squares - (1 - share) * expected).max())
        if self._searches:
            means = state["residuals"] / state["counts"][:, None]
            products = state["products"] / state["counts"][:, None, None]
            noises = products - means[:, :, None] * means[:, None, :]
            added = share * self._curvature
            whitened = [added + Dense(V).congruence(self._root).values for V in noises]
            largest, most = max(largest, _largest_direction(*whitened)), LARGEST_FACTOR
        noise = max(0.0, largest - share * self._largest)
        step_size = self._law.step_size(noise, self._largest, MARGIN * self._bias)
        step_size = min(step_size, self._longest)
        if self._successive:
            present = float(state["step_sizes"]) / draws
            step_size = min(step_size, float(np.sqrt(step_size * present)))
        return float(np.clip(step_size / self._step_size, SMALLEST_FACTOR, most))


def _largest_direction(first: np.ndarray, second: np.ndarray) -> float:
    r"""Mean of :math:`v^\top A v` for v the first eigenvector of one estimate and A the other."""
    variances = []
    for searched, measured in ((first, second), (second, first)):
        largest = linalg.eigh(searched)[1][:, -1]
        variances.append(float(largest @ measured @ largest))
    return 0.5 * sum(variances)
