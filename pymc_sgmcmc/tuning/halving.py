"""Step size by successive halving: MAMBA (Coullon, South and Nemeth 2021)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

KEPT = 3
"""One candidate in this many goes on to the next round, which is longer by the same factor. All
rounds then cost about the same (Coullon, South and Nemeth 2021)."""


@dataclass(frozen=True)
class Candidate:
    """A step size, the state of its chain, and its score in the last round (low is good)."""

    step_size: float
    state: Any
    score: float


def successive_halving(
    step_sizes: Sequence[float],
    run: Callable[[float, Any, int], tuple[Any, float]],
    transitions: int,
) -> list[Candidate]:
    """Candidates of the last round, the best first.

    Chains with all step sizes run for a number of transitions. The best third goes on for three
    times as many, and so on until one chain is left. In a round all candidates make the same number
    of transitions, so larger steps have better mixing and more bias.

    Parameters
    ----------
    step_sizes : sequence of float
    run : callable
        Function of a step size, the state of its chain (None at the start) and a number of
        transitions. It returns the state after these and a score, which is infinite or NaN where
        the chain diverged.
    transitions : int
        Number of transitions in the first round.

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
    candidates = [Candidate(float(step_size), None, np.inf) for step_size in step_sizes]
    while True:
        finished = []
        for candidate in candidates:
            state, score = run(candidate.step_size, candidate.state, transitions)
            finished.append(Candidate(candidate.step_size, state, score))
        finished = sorted(
            (candidate for candidate in finished if np.isfinite(candidate.score)),
            key=lambda candidate: candidate.score,
        )
        if not finished:
            smallest = min(candidate.step_size for candidate in candidates)
            raise ValueError(
                "All chains of the search for a step size became NaN or infinite, the last with "
                f"step size {smallest:.3g}. Give `step_size`."
            )
        candidates = finished[: max(1, len(candidates) // KEPT)]
        if len(candidates) == 1:
            return candidates
        transitions *= KEPT
