"""The contenders of ``transition_cost.py``, each in a process of its own.

A contender is a module ``contender_<name>`` with ``PACKAGES``, the distributions whose versions
are worth reporting, and one function::

    def prepare(problem: Problem, settings: Settings) -> dict[str, Run]

which builds the data structures, compiles, and returns one function for each of `METHODS`, or for
those that it has.
It may change settings of the whole process (floating point width of JAX), and may run in another
Python than the program that times it. The modules that all contenders import therefore need NumPy
only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common import METHODS as OF_FIRST_ORDER

METHODS = (*OF_FIRST_ORDER, "second-order")
"""SGLD and SGLD-CV by Euler's scheme without preconditioner, and what `SGLDCV()` does: averaged
noises and control variates of second order, preconditioned by the curvature, its step size 1."""

MOST_KEPT = 20_000

CONTENDERS = ("ours", "numba", "sgmcmcjax", "blackjax")
"""Contenders in the order of the table's columns."""

Run = Callable[[int], Any]
"""Runs a chain of ``settings.transitions`` transitions from ``problem.start``.

The argument is the seed. The value is an array of shape (transitions, features), the position after
every transition, complete when the function returns (no pending device work).
"""


def in_parts(chain: Callable[[int, int], Any], transitions: int) -> Run:
    """A run whose positions stay in the processor's caches: only those of its last part are kept.

    Short transitions would otherwise take less time than the pages of memory of their positions.
    """
    parts = max(1, transitions // MOST_KEPT)

    def run(seed: int) -> Any:
        for part in range(parts):
            positions = chain(seed * parts + part, transitions // parts)
        return positions

    return run


@dataclass(frozen=True)
class Settings:
    """Settings of all chains of a configuration.

    Attributes
    ----------
    batch : int
        Rows in a minibatch.
    step_size : float
        h of ``theta' = theta + (h/2) gradient + N(0, h)``; libraries which write
        ``theta + eps gradient + N(0, 2 eps)`` take ``eps = h/2``. That of "second-order" is 1.
    transitions : int
        Transitions of a chain, fixed so that a compiled loop may have a fixed length.
    """

    batch: int
    step_size: float
    transitions: int
