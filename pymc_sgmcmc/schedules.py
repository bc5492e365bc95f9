"""Step sizes as functions of the number of the transition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pymc_sgmcmc.checks import as_array

MOST_THINNING = 1000
"""Bound on the default number of transitions a recorded draw."""

StepSize = float | Callable[[int], float]


@dataclass(frozen=True)
class PolynomialDecay:
    r"""The decreasing step size :math:`h_t = a (b + t)^{-\gamma}` of Welling and Teh (2011).

    With :math:`\gamma \in (1/2, 1]` the steps sum to infinity and their squares do not, so
    that the chain converges to the posterior, ever more slowly.

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
        for name in ("a", "b"):
            value = getattr(self, name)
            if not (np.isfinite(value) and value > 0):
                raise ValueError(f"`{name}` should be positive and finite, but got {value}.")
        if not 0 < self.gamma <= 1:
            raise ValueError(f"`gamma` should be in (0, 1], but got {self.gamma}.")

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
            "have it computed from the curvature of the posterior."
        )
    return float(step_size)


def step_sizes(step_size: StepSize, first: int, count: int) -> np.ndarray:
    """Step sizes of a run of transitions, shape (count,).

    Raises
    ------
    ValueError
        Where a schedule gives a value that is not positive and finite.
    """
    if not callable(step_size):
        return np.full(count, step_size)
    given = [step_size(transition) for transition in range(first, first + count)]
    shapes = [np.shape(one) for one in given]
    if any(shapes):
        bad = next(number for number, shape in enumerate(shapes) if shape)
        raise ValueError(
            "`step_size` as a function should give one number for a transition, but gave an array "
            f"of shape {shapes[bad]} for transition {first + bad}."
        )
    values = as_array("step_size", given)
    good = np.isfinite(values) & (values > 0)
    if not good.all():
        bad = int(np.argmin(good))
        raise ValueError(
            f"The step size schedule gave {values[bad]} for transition {first + bad}, but step "
            "sizes should be positive and finite."
        )
    return values
