"""The reference position of a gradient estimator, which follows the chain from time to time."""

from __future__ import annotations

import numpy as np

from pymc_sgmcmc.adaptation.base import Adaptation, AdaptationState, Seen
from pymc_sgmcmc.gradient_estimators.base import Reference


class RefreshedReference(Adaptation):
    """Adaptation that makes the last position the reference at each boundary.

    Parameters
    ----------
    reference : Reference
    """

    def __init__(self, reference: Reference):
        self.transitions = reference.refresh
        self._reference = reference

    def begin(self, position: np.ndarray) -> AdaptationState:
        """Reference at a position."""
        return self._reference.at(position)

    def load(self, state: AdaptationState) -> None:
        """Set the reference of the estimator."""
        self._reference.load(state)

    def update(
        self, state: AdaptationState, seen: Seen
    ) -> tuple[AdaptationState, dict[str, np.ndarray]]:
        """Follow the chain at a boundary."""
        return (self.begin(seen.positions[-1]) if seen.at_boundary else state), {}
