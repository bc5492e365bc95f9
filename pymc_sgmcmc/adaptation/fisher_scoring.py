r"""The matrices of stochastic gradient Fisher scoring, and a test of whether it has converged."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.compile.mode import Mode
from pytensor.compile.sharedvalue import SharedVariable

from pymc_sgmcmc.adaptation.base import Adaptation, AdaptationState, Seen
from pymc_sgmcmc.adaptation.convergence import (
    chi_square_bound,
    chi_square_statistic,
    elementwise_statistic,
    window_mean_variance,
)
from pymc_sgmcmc.adaptation.gradient_noise import (
    FEWEST_ROWS,
    NoiseModel,
    RowSample,
    sample_rows,
    shrunk,
)
from pymc_sgmcmc.batching import Batching
from pymc_sgmcmc.compiling.compiled import compile_quietly
from pymc_sgmcmc.dynamics.osgfs import ScoringMatrices, scoring_matrices
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.posterior.threads import on_one_thread
from pymc_sgmcmc.tuning import prior_precision

START_ROWS = 10_000
"""The covariance of gradients at the start of a chain, and that after convergence, are from at
least this many rows. A variance then has a relative error of 1.4 % where gradients are Gaussian."""

ROWS_A_DIMENSION = 20
"""Each later covariance of gradients is from at least this many rows for each dimension. It is a
compromise between the error of one estimate, which later ones average out, and its time."""

MEMORY = 10
"""Before convergence the covariance is averaged over this many updates, so that it forgets earlier
positions of the chain. An average over fewer would be noisier."""

FEWEST_TRANSITIONS = 1000
"""Two updates are at least this many transitions apart, so that their time is a small part of that
of the transitions."""

SHORTEST_WINDOW, LONGEST_WINDOW = 50, 10_000
"""The default number of gradients in a window of the convergence statistic is within these bounds.
A shorter window would hardly show a drift in its noise, and a longer one would delay the
result."""


class FisherScoringAdaptation(Adaptation):
    """Adaptation of the covariance of the gradient, D and Σ of a chain, with a convergence test.

    Parameters
    ----------
    posterior : Posterior
    batching : Batching
    drift, root : SharedVariable, shape (d, d)
        D and S of the compiled transitions.
    noise : NoiseModel
        The way in which V is learned.
    precision : numpy.ndarray, shape (d, d), optional
        H where it is fixed. Default: N C + G.
    start : numpy.ndarray, shape (d,), optional
        Position at which the first matrices are computed. Default: that of the chain.
    k, max_k, covariance_rows, update_every, rule, b, window
        As in `OSGFS`.
    mode : str or Mode, optional
        Mode in which PyTensor compiles the gradient of the prior, where each draw needs it.
    """

    def __init__(
        self,
        posterior: Posterior,
        batching: Batching,
        drift: SharedVariable,
        root: SharedVariable,
        noise: NoiseModel,
        *,
        precision: np.ndarray | None,
        start: np.ndarray | None,
        k: str | float,
        max_k: float,
        covariance_rows: int | None,
        update_every: int | None,
        rule: str,
        b: float,
        window: int | None,
        mode: str | Mode | None = None,
    ):
        dimension, n_rows = posterior.dimension, posterior.n_rows
        self.stats = {"converged": bool, "convergence_statistic": np.float64, "k": np.float64}
        self._posterior, self._drift, self._root = posterior, drift, root
        self._noise, self._precision = noise, precision
        self._mode = mode
        self._k, self._max_k, self._rule, self._b, self._window = k, max_k, rule, b, window
        self._without_replacement = batching.without_replacement
        # For the paper's bounds, V = (cN/n) NC.
        self._noise_ratio = batching.variance_factor * n_rows / batching.batch_size
        fewest = max(ROWS_A_DIMENSION * dimension, FEWEST_ROWS)
        rows = covariance_rows or int(np.clip(batching.batch_size, fewest, max(fewest, START_ROWS)))
        self._rows = min(rows, n_rows)
        self._start_rows = min(max(self._rows, START_ROWS), n_rows)
        # An update costs r (3·4d + d²) operations for C and about 30 d³ for W, a transition
        # about 4nd. So many transitions cost ten times as much as an update.
        operations = self._rows * (12 + dimension) + 30 * dimension**2
        amortised = 10 * operations / (4 * batching.batch_size)
        self.transitions = update_every or int(
            np.clip(amortised, FEWEST_TRANSITIONS, 10 * FEWEST_TRANSITIONS)
        )
        self._at_start = None if start is None else self._start(start)

    # --- Methods of the base class -----------------------------------------------------------

    def begin(self, position: np.ndarray) -> AdaptationState:
        """State with the matrices of the centre, or of the rows at the first position."""
        return self._start(position) if self._at_start is None else self._at_start

    def load(self, state: AdaptationState) -> None:
        """Set D and S."""
        matrices = state_matrices(state)
        self._drift.set_value(matrices.drift.astype(self._posterior.dtype))
        self._root.set_value(matrices.root.astype(self._posterior.dtype))

    def with_others(self, state: AdaptationState, position: np.ndarray) -> AdaptationState:
        """State with the curvature of the prior for the present values of the other variables.

        Where these are its parameters, as mean and covariance of a hierarchical model, the matrices
        would otherwise be those of another posterior until the next update.
        """
        if self._precision is not None or not self._posterior.prior_depends_on_others:
            return state
        precision = self._prior_precision(position, state["row_covariance"])
        return self._choose({**state, "prior_precision": precision})

    def update(
        self, state: AdaptationState, seen: Seen
    ) -> tuple[AdaptationState, dict[str, np.ndarray]]:
        """Add gradients to the window, and at a boundary compute C and the matrices anew."""
        k = 2 * state["fractions"].min()
        state, converged, statistics = self._follow_windows(state, seen.gradients)
        state = {**state, **self._noise.follow(state, seen)}
        if seen.at_boundary:
            state = self._learn(state, seen)
        last = slice(seen.thin - 1, None, seen.thin)
        recorded = converged[last]
        return state, {
            "converged": recorded,
            "convergence_statistic": statistics[last],
            "k": np.full(len(recorded), k),
        }

    # --- Convergence -------------------------------------------------------------------------

    def _follow_windows(
        self, state: AdaptationState, gradients: np.ndarray
    ) -> tuple[AdaptationState, np.ndarray, np.ndarray]:
        """State after these gradients, and the flag and the last statistic after each of them."""
        total, count = state["window_sum"], int(state["window_count"])
        length = int(state["window_length"])
        flag, statistic = bool(state["converged"]), float(state["statistic"])
        flags = np.empty(len(gradients), dtype=bool)
        statistics = np.empty(len(gradients))
        start = 0
        while start < len(gradients):
            end = min(start + max(1, length - count), len(gradients))
            # The sum is sequential, so that it does not depend on where a run of draws ends.
            total = np.cumsum(np.vstack([total, gradients[start:end]]), axis=0)[-1]
            count += end - start
            flags[start : end - 1], statistics[start : end - 1] = flag, statistic
            if count >= length:
                statistic = self._statistic(state, total / count, count)
                flag = flag or statistic <= 1
                total, count = np.zeros_like(total), 0
            flags[end - 1], statistics[end - 1] = flag, statistic
            start = end
        followed = {
            **state,
            "window_sum": total,
            "window_count": np.asarray(count),
            "converged": np.asarray(flag),
            "statistic": np.asarray(statistic),
        }
        return followed, flags, statistics

    def _statistic(self, state: AdaptationState, mean: np.ndarray, count: int) -> float:
        """Statistic of a window relative to its bound."""
        if self._rule == "elementwise":
            return elementwise_statistic(mean, state["gradient_variances"], count) / self._b
        variance = state["window_variance"]
        if count != state["window_length"]:
            variance = window_mean_variance(state["noise"], state["fractions"], count)
        return chi_square_statistic(mean, state["basis"], variance) / chi_square_bound(len(mean))

    # --- Covariance of the gradient ----------------------------------------------------------

    def _start(self, position: np.ndarray) -> AdaptationState:
        """State of a chain whose matrices are from rows at a position."""
        dimension = self._posterior.dimension
        state: AdaptationState = {
            "updates": np.asarray(0),
            "converged": np.asarray(False),
            "reset": np.asarray(False),
            "statistic": np.asarray(np.inf),
            "window_sum": np.zeros(dimension),
            "window_count": np.asarray(0),
            "recent_positions": np.empty((0, dimension)),
            "recent_gradients": np.empty((0, dimension)),
        }
        sample = sample_rows(self._posterior, position, self._start_rows, seed=0)
        return self._restart(state, position, sample)

    def _restart(
        self, state: AdaptationState, position: np.ndarray, sample: RowSample
    ) -> AdaptationState:
        """State with averages that begin with a sample of rows."""
        covariance = sample.covariance
        noise, weight = self._noise.start(sample)
        state = {
            **state,
            "row_covariance": covariance,
            "prior_precision": self._prior_precision(position, covariance),
            "rows": np.asarray(float(len(sample))),
            "noise_covariance": noise,
            "noise_weight": np.asarray(float(weight)),
        }
        return self._choose(state)

    def _learn(self, state: AdaptationState, seen: Seen) -> AdaptationState:
        """State after an update at a boundary."""
        position = np.asarray(seen.positions[-1], dtype=float)
        state = {**state, "updates": state["updates"] + 1}

        def sample(count: int) -> RowSample:
            return sample_rows(
                self._posterior,
                position,
                count,
                seed=int(state["updates"]),
                next_rows=seen.next_rows(),
                without_replacement=self._without_replacement,
            )

        if state["converged"] and not state["reset"]:
            # The positions so far, from which C is computed, may be far from the posterior.
            state = {**state, "reset": np.asarray(True)}
            state = self._restart(state, position, sample(self._start_rows))
            if self._noise.needs_rows:
                return state
        # The average is over the last MEMORY updates before convergence, and over all afterwards.
        least = 0.0 if state["converged"] else 1 / MEMORY
        rows = None
        if self._precision is None or self._noise.needs_rows:
            rows = sample(self._rows)
            known = float(state["rows"])
            weight = max(len(rows) / (known + len(rows)), least)
            covariance = rows.covariance
            prior_precision = self._prior_precision(position, covariance)
            state = {
                **state,
                "row_covariance": _mix(state["row_covariance"], covariance, weight),
                "prior_precision": _mix(state["prior_precision"], prior_precision, weight),
                "rows": np.asarray(len(rows) / weight),
            }
        noise = self._noise.learn(state, rows)
        if noise is not None:
            weight = max(1 / (float(state["noise_weight"]) + 1), least)
            state = {
                **state,
                "noise_covariance": _mix(state["noise_covariance"], noise, weight),
                "noise_weight": np.asarray(1 / weight),
                "recent_positions": np.empty((0, len(position))),
                "recent_gradients": np.empty((0, len(position))),
            }
        return self._choose(state)

    def _choose(self, state: AdaptationState) -> AdaptationState:
        """State with the matrices and the window that follow from its averages."""
        covariance = shrunk(state["row_covariance"], float(state["rows"]))
        precision = self._precision
        if precision is None:
            precision = self._posterior.n_rows * covariance + state["prior_precision"]
        noise = self._noise.covariance(covariance, state["noise_covariance"])
        # Beside another step method this is done in each draw.
        matrices = on_one_thread(
            scoring_matrices, precision, noise, self._k, self._max_k, self._noise_ratio
        )
        smallest = 2 * matrices.fractions.min()
        length = self._window or int(
            np.clip(np.ceil(1 / smallest), SHORTEST_WINDOW, LONGEST_WINDOW)
        )
        return {
            **state,
            "basis": matrices.basis,
            "noise": matrices.noise,
            "fractions": matrices.fractions,
            "gradient_variances": matrices.gradient_variances,
            "window_length": np.asarray(length),
            "window_variance": window_mean_variance(matrices.noise, matrices.fractions, length),
        }

    @cached_property
    def _compiled_prior_gradient(self) -> Callable[[np.ndarray], np.ndarray]:
        """Gradient of the log prior in the mode of the transitions, a hundred times as fast."""
        position = pt.tensor("position", shape=(None,), dtype=self._posterior.dtype)
        gradient = self._posterior.prior_gradient(position)
        function = compile_quietly([position], gradient, self._mode or "NUMBA")
        return lambda at: function(np.asarray(at, dtype=self._posterior.dtype))

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the compiled gradient, which is compiled again when needed."""
        return {key: kept for key, kept in vars(self).items() if key != "_compiled_prior_gradient"}

    def _prior_precision(self, position: np.ndarray, covariance: np.ndarray) -> np.ndarray:
        """G, the curvature of the negative log prior, or zero where H is known without it."""
        if self._precision is not None:
            return np.zeros_like(covariance)
        information = self._posterior.n_rows * np.diag(covariance)
        gradient = None
        if self._posterior.prior_depends_on_others:
            gradient = self._compiled_prior_gradient
        return prior_precision(self._posterior, position, information, gradient)


def _mix(old: np.ndarray, new: np.ndarray, weight: float) -> np.ndarray:
    return (1 - weight) * old + weight * new


def state_matrices(state: AdaptationState) -> ScoringMatrices:
    """Matrices of a state."""
    return ScoringMatrices(state["basis"], state["noise"], state["fractions"])
