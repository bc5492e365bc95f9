"""A diagonal preconditioner from the sizes of the gradients (Li et al. 2016)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from pytensor.compile.sharedvalue import SharedVariable

from pymc_sgmcmc.adaptation.base import Adaptation, AdaptationState, Seen
from pymc_sgmcmc.posterior import Posterior

TRANSITIONS_BETWEEN_UPDATES = 100
"""During tuning the preconditioner changes after this many transitions, which is the memory of the
second moment at the default decay of 0.99."""

ROWS_AT_START = 1_000
"""The second moment at the start of a chain is from the gradients of this many rows. Its root, of
which the preconditioner is made, then has a relative error of some per cent."""


class RMSprop(Adaptation):
    r"""Diagonal preconditioner from a running second moment of gradients, frozen after tuning.

    The state is the second moment v of the gradient a row, and the diagonal of M that is in use.
    """

    only_tunes = True

    def __init__(
        self,
        posterior: Posterior,
        preconditioner: SharedVariable,
        root: SharedVariable,
        *,
        decay: float,
        regularization: float,
        batch_size: int,
        size_of: Callable[[np.ndarray], float] | None,
    ):
        self.transitions = TRANSITIONS_BETWEEN_UPDATES
        self._posterior = posterior
        self._preconditioner, self._root = preconditioner, root
        self._decay = decay
        self._regularization = regularization
        self._batch_size = batch_size
        self._size_of = size_of

    def begin(self, position: np.ndarray) -> AdaptationState:
        """Second moment of a minibatch's mean gradient, from a sample of rows at the start."""
        posterior = self._posterior
        count = min(posterior.n_rows, ROWS_AT_START)
        numbers = np.random.default_rng(2016).choice(posterior.n_rows, size=count, replace=False)
        rows = posterior.row_gradients(position, posterior.take(np.sort(numbers)))
        mean = rows.mean(0) + posterior.log_prior_and_gradient(position)[1] / posterior.n_rows
        moment = mean**2 + rows.var(0) / self._batch_size
        return {"second_moment": moment, "preconditioner": self._diagonal(moment)}

    def load(self, state: AdaptationState) -> None:
        """Set M and its root."""
        diagonal = state["preconditioner"]
        self._preconditioner.set_value(diagonal.astype(self._preconditioner.dtype))
        self._root.set_value(np.sqrt(diagonal).astype(self._root.dtype))

    def update(
        self, state: AdaptationState, seen: Seen
    ) -> tuple[AdaptationState, dict[str, np.ndarray]]:
        """Follow the gradients, and change M at a boundary during tuning."""
        if not seen.tuning:
            return state, {}
        gradients = seen.gradients.astype(float) / self._posterior.n_rows
        # v after B transitions is a weighted sum of the B squares and the v before.
        weights = self._decay ** np.arange(len(gradients), dtype=float)[::-1]
        moment = self._decay ** len(gradients) * state["second_moment"]
        moment = moment + (1 - self._decay) * weights @ gradients**2
        diagonal = self._diagonal(moment) if seen.at_boundary else state["preconditioner"]
        return {"second_moment": moment, "preconditioner": diagonal}, {}

    def _diagonal(self, moment: np.ndarray) -> np.ndarray:
        diagonal = 1 / (self._regularization + np.sqrt(moment))
        return diagonal if self._size_of is None else diagonal / self._size_of(diagonal)
