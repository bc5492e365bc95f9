"""What a contender of the benchmark receives and what it gives back.

A contender is a module ``contender_<name>.py`` of this package with one function::

    def prepare(problem: Problem, settings: Settings) -> Prepared

which loads its libraries, builds its data structures, compiles, and returns one function a method.
It runs in a worker process of its own, so it may change process-wide settings (floating point width
of JAX, ``pytensor.config.floatX``) and may need another Python than the program that times it.
This module is imported by every worker and so needs the standard library and NumPy only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

Run = Callable[[int], np.ndarray]
"""Runs a chain of ``settings.transitions`` transitions from ``problem.start``.

The argument seeds all randomness of the chain. The value has shape (transitions, features): the
position after every transition, complete when the function returns (no pending device work).
"""


class UnavailableError(RuntimeError):
    """A contender cannot take part; the message says what is missing and how to get it."""


@dataclass(frozen=True)
class Settings:
    """One configuration of the benchmark.

    Attributes
    ----------
    batch : int
        Rows in a minibatch.
    step_size : float
        h of ``theta' = theta + (h/2) gradient + N(0, h)``; libraries which write
        ``theta + eps gradient + N(0, 2 eps)`` take ``eps = h/2``.
    transitions : int
        Transitions in one chain, the same for every call and every contender, so that a compiled
        loop may have a fixed length.
    """

    batch: int
    step_size: float
    transitions: int


@dataclass(frozen=True)
class Prepared:
    """A contender ready to be timed.

    Attributes
    ----------
    runs : mapping of str to Run
        One function a method of :data:`common.METHODS`; a method may be missing.
    packages : tuple of str
        Distributions whose versions are worth reporting.
    notes : mapping of str to str
        Remarks on a method for the report, e.g. which of several memory layouts was taken.
    """

    runs: Mapping[str, Run]
    packages: tuple[str, ...]
    notes: Mapping[str, str] = field(default_factory=dict)
