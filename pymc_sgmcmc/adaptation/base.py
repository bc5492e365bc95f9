"""Changes between blocks of transitions, from positions and gradients of the chain so far.

The compiled transitions are pure functions. Quantities that follow the chain more slowly (the
reference point of SVRG, a preconditioner that is tuned, the gradient covariance of OSGFS) are
held in shared variables. An adaptation sets these between two blocks, from a small state that
belongs to the chain.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

AdaptationState = Mapping[str, np.ndarray]
"""A state holds arrays by name. They are never changed in place."""


@dataclass(frozen=True)
class Seen:
    """A run of transitions, with the information that adaptations use.

    Attributes
    ----------
    positions : numpy.ndarray, shape (B, d)
    gradients : numpy.ndarray, shape (B, d)
        Gradient estimates at these positions.
    next_rows : callable
        Function that returns the numbers of the rows, shape (n,), from which the gradient at the
        last position is computed. It may take a time that grows with the data.
    tuning : bool
    at_boundary : bool
        Whether the run ends at a boundary of the adaptation.
    thin : int
        Transitions a recorded draw; B is a multiple of it.
    step_sizes : numpy.ndarray, shape (B,)
    """

    positions: np.ndarray
    gradients: np.ndarray
    next_rows: Callable[[], np.ndarray]
    tuning: bool
    at_boundary: bool
    thin: int
    step_sizes: np.ndarray


class Adaptation(ABC):
    """A change between blocks. Its state is part of the state of the chain.

    Runs of draws never cross a boundary, but may end before it. So `update` must give the same
    state after a and then b transitions as after a + b.

    Attributes
    ----------
    transitions : int
        Transitions between two boundaries, rounded to whole draws.
    only_tunes : bool
        Whether `update` does nothing after tuning, so that runs need not end at a boundary.
    stats : mapping of str to numpy dtypes
        Names and types of the statistics that are recorded with each draw.
    """

    transitions: int
    only_tunes: bool = False
    stats: Mapping[str, np.dtype | type] = {}

    @abstractmethod
    def begin(self, position: np.ndarray) -> AdaptationState:
        """State at the start of a chain."""

    def load(self, state: AdaptationState) -> None:  # noqa: B027  # nothing to set by default
        """Set the shared variables of the compiled transitions for a state, where it has some."""

    def with_others(self, state: AdaptationState, position: np.ndarray) -> AdaptationState:
        """State after other step methods may have moved variables outside the position.

        It is unchanged by default.
        """
        return state

    def step_size_factor(self, state: AdaptationState) -> float:
        """Factor of the step size of the next transitions."""
        return 1.0

    @abstractmethod
    def update(
        self, state: AdaptationState, seen: Seen
    ) -> tuple[AdaptationState, dict[str, np.ndarray]]:
        """State after a run of transitions, and the statistics of its draws.

        Each recorded array has shape (draws,) or (draws, ...).
        """
