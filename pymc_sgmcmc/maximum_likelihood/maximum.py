"""Maximise a log likelihood of a few coordinates to full precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pymc_sgmcmc.errors import ConvergenceError
from pymc_sgmcmc.marginal.likelihood import Objective, value_of

CONVERGED = 1e-10
"""The search ends after the step whose Newton decrement, its squared length in standard errors, is
below this. Newton's method squares the distance, so that the end is exact up to rounding."""

NEARLY_CONVERGED = 1e-5
"""Below this decrement the search also ends where the decrement no longer falls to a tenth in a
step. That is so at the boundary of a parameter, where the log likelihood is then this close to its
limit. With a centred block and a covariance that is nearly singular, rounding leaves some 1e-6."""

DIFFERENCE = 1e-3
"""Second derivatives are differences of gradients over this many conditional standard errors to
either side. The error is the square of it, and rounding adds some 1e-11."""

LONGEST_DIFFERENCE = 1e-2
"""Differences are over at most this distance, relative to the coordinate where that is above one.
At the boundary a standard error is infinite."""

SMALLEST_EIGENVALUE = 1e-8
"""Directions count as flat where the information, scaled to a unit diagonal, has an eigenvalue
below this. Differences of gradients leave up to some 1e-9."""

HALVINGS = 40
"""A step, or the radius of steps, is halved at most this many times."""


@dataclass(frozen=True, eq=False)
class Maximum:
    """A maximum of a log likelihood.

    Attributes
    ----------
    position : numpy.ndarray, shape (d,)
    value : float
    information : numpy.ndarray, shape (d, d)
        Negative second derivatives.
    iterations : int
    inside : bool
        Whether it is known not to be at a boundary.
    """

    position: np.ndarray
    value: float
    information: np.ndarray
    iterations: int
    inside: bool = False


def information_at(
    objective: Objective, position: np.ndarray, information: np.ndarray | None = None
) -> np.ndarray:
    """Negative second derivatives by central differences of the gradient.

    Parameters
    ----------
    objective : Objective
    position : numpy.ndarray, shape (d,)
    information : numpy.ndarray, optional
        An earlier value, from which the lengths of the differences are taken.
    """
    longest = LONGEST_DIFFERENCE * np.maximum(1, np.abs(position))
    steps = 1e-2 * longest
    if information is not None:
        with np.errstate(divide="ignore", invalid="ignore"):
            steps = DIFFERENCE / np.sqrt(np.abs(np.diag(information)))
        steps = np.where(np.isfinite(steps), np.minimum(steps, longest), longest)
    rows = [
        (objective(position - step)[1] - objective(position + step)[1]) / (2 * step.sum())
        for step in np.diag(steps)
    ]
    return (np.array(rows) + np.array(rows).T) / 2


def check_start(objective: Objective, start: np.ndarray) -> None:
    """Refuse to search from a position where the log likelihood is not finite.

    Raises
    ------
    ConvergenceError
    """
    value, gradient = objective(start)
    if not (np.isfinite(value) and np.isfinite(gradient).all()):
        raise ConvergenceError(
            "The log likelihood is not finite at the initial point of the model. Choose priors "
            "whose centres lie near the data, since the search starts there."
        )


def maximize(
    objective: Objective,
    position: np.ndarray,
    most_iterations: int,
    labels: Sequence[str],
    *,
    information: np.ndarray | None = None,
    tolerance: float = CONVERGED,
) -> Maximum:
    """Maximise by quasi-Newton steps of bounded length.

    Second derivatives take many evaluations, so steps only update them, by the symmetric formula of
    rank one (Nocedal and Wright, 2006, section 6.2). They are computed anew where the decrement
    does not fall to a tenth in as many steps as they take evaluations, and at the end.

    A quadratic function of the log of a scale holds over a distance of about one. So steps are at
    most as long as a radius, which is one at first, and relative to coordinates above one. It
    doubles where the value rises as expected, and is halved where it does not.

    Parameters
    ----------
    objective : Objective
    position : numpy.ndarray, shape (d,)
    most_iterations : int
    labels : sequence of str
        Labels of the coordinates, for messages.
    information : numpy.ndarray, optional
        An earlier value, from which the search begins.
    tolerance : float
        The last step is the one whose decrement is below this. Where it is more than the default,
        the information remains that of the last step.

    Raises
    ------
    ConvergenceError
    """
    value, gradient = objective(position)
    is_new = information is None
    if information is None:
        information = information_at(objective, position)
    radius, last_decrement, still = 1.0, np.inf, 0
    for iteration in range(1, most_iterations + 1):
        relative = np.maximum(1, np.abs(position))
        step, decrement = _newton_step(information, gradient, radius * relative)
        length = float(np.abs(step / relative).max())
        proposed, slope = objective(position + step)
        expected = gradient @ step - 0.5 * abs(step @ information @ step)
        gain, is_near = proposed - value, decrement < NEARLY_CONVERGED
        updated = _updated(information, step, gradient - slope)
        # Rounding may lower the value at the maximum itself.
        rounding = 1e-12 * abs(value) if is_near else 0.0
        accepted = gain >= -rounding and np.isfinite(slope).all()
        if accepted:
            position, value, gradient = position + step, proposed, slope
        if not accepted or (gain < 0.25 * expected and not is_near):
            radius = length / 2
        elif gain > 0.75 * expected and length > 0.9 * radius:
            radius *= 2
        stands_still = not accepted or decrement > 0.1 * last_decrement
        still = still + 1 if stands_still else 0
        # A step with earlier second derivatives leaves a part of its length, others the square.
        enough = decrement < (tolerance if is_new else 0.01 * tolerance)
        if enough or (is_near and stands_still and is_new):
            if tolerance <= CONVERGED and not (is_new and enough):
                information = information_at(objective, position, information)
            return Maximum(position, value, information, iteration)
        is_short = radius < 0.5**HALVINGS
        if is_short and is_new:
            break
        is_new = is_short or still > 2 * len(position)
        if is_new:
            information, still = information_at(objective, position, information), 0
        else:
            information = updated
        last_decrement = decrement
    worst = int(np.argmax(np.nan_to_num(np.abs(gradient), nan=np.inf)))
    raise ConvergenceError(
        f"The search for the maximum did not converge within {most_iterations} iterations: the "
        f"slope by `{labels[worst]}` is still {gradient[worst]:.3g}. Scale the predictors, choose "
        "priors whose centres lie near the data, or raise `max_iterations`."
    )


def _newton_step(
    information: np.ndarray, gradient: np.ndarray, longest: np.ndarray
) -> tuple[np.ndarray, float]:
    """Newton's step, bounded along each eigenvector, and the decrement of the whole step.

    It is uphill where the log likelihood is not concave, and none where that is flat.
    """
    values, vectors = scaled_eigenvectors(information)
    along, lengths = vectors.T @ gradient, np.abs(values)
    steps = np.where(lengths > SMALLEST_EIGENVALUE, along / np.maximum(lengths, 1e-300), 0.0)
    bounds = 1 / np.abs(vectors / longest[:, None]).max(axis=0)
    return vectors @ np.clip(steps, -bounds, bounds), float(along @ steps)


def _updated(information: np.ndarray, step: np.ndarray, change: np.ndarray) -> np.ndarray:
    """Information with which a step changes the gradient as it did, where that is well-defined."""
    rest = change - information @ step
    product = float(rest @ step)
    if not abs(product) > SMALLEST_EIGENVALUE * (np.abs(rest) @ np.abs(step)):
        return information
    return information + np.outer(rest, rest) / product


def scaled_eigenvectors(information: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues of the information scaled to a unit diagonal, and vectors in coordinates.

    With vectors V and eigenvalues w the inverse of the information is ``V @ diag(1 / w) @ V.T``.
    """
    diagonal = np.abs(np.diag(information))
    scales = 1 / np.sqrt(np.where(diagonal > 0, diagonal, 1))
    values, vectors = np.linalg.eigh(information * np.outer(scales, scales))
    return values, scales[:, None] * vectors


def at_boundary(objective: Objective, maximum: Maximum) -> list[int]:
    """Coordinates that run away: the value does not fall on one side.

    A standard deviation that goes to zero, for example, goes to minus infinity on the log scale,
    and the information goes to zero with it. Around a maximum inside, the value falls by half the
    squared distance in standard errors on both sides.
    """
    indices, value_at = [], value_of(objective)
    for index, curvature in enumerate(np.diag(maximum.information)):
        direction = np.zeros(len(maximum.position))
        # Where the information is zero, rounding may have made it negative.
        direction[index] = 1 / np.sqrt(max(abs(curvature), 1e-300))
        if any(_runs_away(value_at, maximum, side * direction) for side in (-1, 1)):
            indices.append(index)
    return indices


def _runs_away(
    value_at: Callable[[np.ndarray], float], maximum: Maximum, direction: np.ndarray
) -> bool:
    """Whether the value does not fall as the information says.

    It falls by less than a fiftieth of that over a standard error, or by more than ten times that
    over an eighth of one. On the side away from the boundary the information grows, and towards it
    the value may be rounding alone.
    """

    def fall(fraction: float) -> float:
        value = value_at(maximum.position + fraction * direction)
        return (maximum.value - value) / (0.5 * fraction**2) if np.isfinite(value) else np.nan

    fraction, ratio = 1.0, fall(1.0)
    while np.isnan(ratio) and fraction > 1e-12:
        fraction /= 2
        ratio = fall(fraction)
    return ratio < 0.02 or fall(min(fraction, 0.125)) > 10
