"""Step sizes as functions of the number of the transition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pymc_sgmcmc.checks import accepts, positive_number

MOST_THINNING = 1000
"""The default number of transitions a recorded draw is at most this number. It bounds the time of a
draw where the chain is slow, so that a run shows progress; its draws are then dependent."""

StepSize = float | Callable[[int], float]


@dataclass(frozen=True)
class PolynomialDecay:
    r"""The decreasing step size :math:`h_t = a (b + t)^{-\gamma}` of Welling and Teh (2011).

    With :math:`\gamma \in (1/2, 1]` the steps sum to infinity and their squares do not, so
    that the chain converges to the posterior while it moves more and more slowly.

    Parameters
    ----------
    a : float
        Scale, positive.
    b : float
        Offset, positive: the step is about constant for the first b transitions.
    gamma : float
        Rate, in (0, 1].

    Examples
    --------
    >>> decay = PolynomialDecay(a=1.0, b=1.0, gamma=1.0)
    >>> decay(0), decay(3)
    (1.0, 0.25)
    """

    a: float
    b: float = 1.0
    gamma: float = 0.55

    def __post_init__(self):
        positive_number("a", self.a)
        positive_number("b", self.b)
        positive_number("gamma", self.gamma, most=1.0)

    def __call__(self, transition: int) -> float:
        """Step size of a transition, counted from 0."""
        return float(self.a * (self.b + transition) ** -self.gamma)


def check_step_size(step_size: StepSize) -> StepSize:
    """Return a valid step size or schedule.

    Raises
    ------
    TypeError, ValueError
        Where it is neither a positive finite number nor a function that gives one.
    """
    if callable(step_size):
        if isinstance(step_size, type) or not accepts(step_size, 0):
            raise TypeError(
                "`step_size` should be a function of the number of the transition, such as "
                f"`lambda t: 0.1 / (1 + t)`, but got {step_size!r}."
            )
        step_sizes(step_size, 0, 1)
        return step_size
    if isinstance(step_size, bool) or not isinstance(step_size, int | float | np.number):
        raise TypeError(
            "`step_size` should be a positive number, a function of the transition number or "
            f"None, but got {step_size!r}."
        )
    if not (np.isfinite(step_size) and step_size > 0):
        raise ValueError(
            f"`step_size` should be positive and finite, but got {step_size}. Leave it out to "
            "have it computed."
        )
    return float(step_size)


def step_sizes(step_size: StepSize, first: int, count: int) -> np.ndarray:
    """Step sizes of a run of transitions, shape (count,).

    Raises
    ------
    TypeError, ValueError
        Where a schedule gives anything but a number that is positive and finite.
    """
    if not callable(step_size):
        return np.full(count, step_size)
    results = [step_size(transition) for transition in range(first, first + count)]
    for transition, number in enumerate(map(np.asarray, results), start=first):
        if number.ndim or number.dtype.kind not in "iuf":
            description = (
                f"an array of shape {number.shape}"
                if number.ndim
                else repr(results[transition - first])
            )
            raise TypeError(
                "`step_size` as a function should give one number for each transition, but gave "
                f"{description} for transition {transition}."
            )
    values = np.array(results, dtype=float)
    good = np.isfinite(values) & (values > 0)
    if not good.all():
        bad = int(np.argmin(good))
        raise ValueError(
            "`step_size` as a function should give positive finite numbers, but gave "
            f"{values[bad]} for transition {first + bad}."
        )
    return values
