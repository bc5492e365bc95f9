"""Maximise a log likelihood of a few coordinates to full precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize

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
"""A step is halved at most this many times."""


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
    objective: Objective, start: np.ndarray, most_iterations: int, labels: Sequence[str]
) -> Maximum:
    """Maximise by L-BFGS-B, and then by Newton's method.

    Raises
    ------
    ConvergenceError
    """
    crude = np.abs(np.diag(information_at(objective, start)))
    scales = 1 / np.sqrt(np.where(np.isfinite(crude) & (crude > 0), crude, 1))

    def negative(scaled: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = objective(scaled * scales)
        return -value, -gradient * scales

    with np.errstate(all="ignore"):
        near = minimize(
            negative,
            start / scales,
            method="L-BFGS-B",
            jac=True,
            options={"maxiter": most_iterations, "maxfun": 10 * most_iterations, "ftol": 1e-7},
        )
    position = near.x * scales
    if not np.isfinite(objective(position)[0]):
        position = start
    return climb(objective, position, most_iterations, labels, done=near.nit)


def climb(
    objective: Objective,
    position: np.ndarray,
    most_iterations: int,
    labels: Sequence[str],
    *,
    information: np.ndarray | None = None,
    done: int = 0,
    tolerance: float = CONVERGED,
) -> Maximum:
    """Maximise by Newton's method with halved steps.

    Second derivatives take many evaluations, and hardly change near the maximum. They are computed
    anew only where a step does not lower the decrement to a tenth, and at the end.

    Parameters
    ----------
    objective : Objective
    position : numpy.ndarray, shape (d,)
    most_iterations : int
    labels : sequence of str
        Labels of the coordinates, for messages.
    information : numpy.ndarray, optional
        An earlier value, from which the search begins.
    done : int
        Iterations before this search.
    tolerance : float
        The last step is the one whose decrement is below this. Where it is more than the default,
        the information remains that of the last step.

    Raises
    ------
    ConvergenceError
    """
    value, gradient = objective(position)
    last_decrement, is_new = np.inf, information is None
    for iteration in range(done + 1, most_iterations + 1):
        if is_new or information is None:
            information = information_at(objective, position, information)
        step = _newton_step(information, gradient)
        decrement = float(gradient @ step)
        position_before = position
        for halving in range(HALVINGS):
            proposal = position + step / 2**halving
            proposed, slope = objective(proposal)
            # Rounding may lower the value at the maximum itself.
            rounding = 1e-12 * abs(value) if decrement < CONVERGED else 0.0
            if proposed >= value - rounding and np.isfinite(slope).all():
                position, value, gradient = proposal, proposed, slope
                break
        stands_still = position is position_before or decrement > 0.1 * last_decrement
        # A step with earlier second derivatives leaves a part of its length, others the square.
        enough = tolerance if is_new else 0.01 * tolerance
        if decrement < enough or (decrement < NEARLY_CONVERGED and stands_still and is_new):
            if tolerance <= CONVERGED:
                information = information_at(objective, position, information)
            return Maximum(position, value, information, iteration)
        if position is position_before and is_new:
            break
        last_decrement, is_new = decrement, stands_still
    worst = int(np.argmax(np.nan_to_num(np.abs(gradient), nan=np.inf)))
    raise ConvergenceError(
        f"The search for the maximum did not converge within {most_iterations} iterations: the "
        f"slope by `{labels[worst]}` is still {gradient[worst]:.3g}. Scale the predictors, choose "
        "priors whose centres lie near the data, or raise `max_iterations`."
    )


def _newton_step(information: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    """Newton's step, uphill where the log likelihood is not concave, none where it is flat."""
    values, vectors = scaled_eigenvectors(information)
    along = vectors.T @ gradient
    lengths = np.abs(values)
    steps = np.where(lengths > SMALLEST_EIGENVALUE, along / np.maximum(lengths, 1e-300), 0.0)
    return vectors @ steps


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
