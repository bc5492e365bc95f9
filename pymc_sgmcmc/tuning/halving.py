"""Step size by successive halving: MAMBA (Coullon, South and Nemeth 2021)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

KEPT = 3
"""One in this many candidates goes on to the next round, which is as many times as long."""


@dataclass(frozen=True)
class Candidate:
    """A step size, where its chain stands, and its score in the last round (small is good)."""

    step_size: float
    state: Any
    score: float


def successive_halving(
    step_sizes: Sequence[float],
    run: Callable[[float, Any, int], tuple[Any, float]],
    transitions: int,
) -> list[Candidate]:
    """Candidates of the last round, the best first.

    Chains with all step sizes run for some transitions; the best third runs on for three times
    as many, and so on until one is left. All candidates see the same amount of computation in a
    round, so that large steps are rewarded for mixing and punished for bias.

    Parameters
    ----------
    step_sizes : sequence of float
    run : callable
        Of a step size, the state of its chain (None at the start) and a number of transitions;
        returns the state after them and a score, infinite or NaN where the chain diverged.
    transitions : int
        Of the first round.

    Raises
    ------
    ValueError
        Where all chains diverged.

    References
    ----------
    J. Coullon, L. South and C. Nemeth (2021). Efficient and generalizable tuning strategies for
    stochastic gradient MCMC. arXiv:2105.13059.

    Examples
    --------
    >>> ran = successive_halving([0.1, 1.0, 10.0], lambda h, state, n: (None, abs(h - 1)), 10)
    >>> ran[0].step_size
    1.0
    """
    candidates = [Candidate(float(one), None, np.inf) for one in step_sizes]
    while True:
        ran = []
        for one in candidates:
            state, score = run(one.step_size, one.state, transitions)
            ran.append(Candidate(one.step_size, state, score))
        ran = sorted((one for one in ran if np.isfinite(one.score)), key=lambda one: one.score)
        if not ran:
            raise ValueError(
                "All chains of the search for a step size left the finite numbers, the last with "
                f"step size {min(one.step_size for one in candidates):.3g}. Give `step_size`."
            )
        candidates = ran[: max(1, len(candidates) // KEPT)]
        if len(candidates) == 1:
            return candidates
        transitions *= KEPT
