"""Draws whose log density is minus infinity, which a gradient does not keep a chain from.

A constraint such as ``pm.Potential("order", pt.switch(a < b, 0, -np.inf))`` has gradient zero where
it holds and where it does not, so only a Metropolis decision obeys it. The same holds for values of
a parameter that its distribution does not have, such as a negative scale.
"""

from __future__ import annotations

import logging

import numpy as np

from pymc_sgmcmc.posterior import Posterior

log = logging.getLogger("pymc.sgmcmc")

MOST_COMPARED = 100
"""At so many draws of a chain, evenly spaced, the log density is evaluated. A region that holds
three hundredths of the draws is met with probability 0.95, and 100 evaluations of a model with some
hundred parameters take 10 milliseconds."""


def prepare(posterior: Posterior) -> None:
    """Compile the log densities, once for all processes of chains."""
    PossibleDraws(posterior, 0, 1).see(posterior.initial_position[None], 1)


class PossibleDraws:
    """Evaluates the log density at some draws of a chain after tuning.

    Parameters
    ----------
    posterior : Posterior
    tune, total : int
        Draws of tuning, and all draws.
    rows : bool
        Whether rows are evaluated beside the prior part.
    """

    def __init__(self, posterior: Posterior, tune: int, total: int, *, rows: bool = True):
        self._posterior, self._rows = posterior, rows
        count = min(total - tune, MOST_COMPARED)
        self._compared = set(np.linspace(total, tune, count, endpoint=False, dtype=int).tolist())
        self._seen = self._impossible = 0

    def see(self, positions: np.ndarray, first: int) -> None:
        """Evaluate those to be compared among draws from number `first` on, counted from 1."""
        for number, position in enumerate(positions, first):
            if number in self._compared:
                try:
                    possible = self._posterior.is_possible(position, rows=self._rows)
                except Exception:
                    # An operation that fails there says nothing of the chain, which goes on.
                    log.debug("Draw %d was not evaluated", number, exc_info=True)
                    continue
                self._seen += 1
                self._impossible += not possible

    def warning(self) -> str | None:
        """What was found, None where the log density was finite at all draws."""
        if not self._impossible:
            return None
        return (
            f"The log density is minus infinity or NaN at {self._impossible} of {self._seen} draws "
            "that were looked at, so the draws are not from the posterior. A constraint such as "
            "`pm.Potential(..., pt.switch(..., 0, -np.inf))`, or a parameter that left its range, "
            "has no gradient that keeps a chain inside. Use a transform (`pm.Truncated`, "
            "`pm.distributions.transforms.ordered`), or sample with NUTS."
        )
