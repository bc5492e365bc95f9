r"""Where a chain starts, the curvature there, and the step size, from gradients of whole parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize
from scipy.sparse import linalg as sparse_linalg

from pymc_sgmcmc.posterior.two_sided import Side, TwoSided
from pymc_sgmcmc.sampling.by_blocks.block import Turn, UserGroup, user_groups
from pymc_sgmcmc.sampling.by_blocks.grid import Grid, item_group

SEARCH_STEPS = 50
"""The search for a start takes at most so many steps. A chain needs a start of large density and no
mode, since it leaves the mode at once."""

START_SCALE = 0.1
"""The search begins so far, in standard deviations of the prior for priors of scale one, from the
initial point of the model. That point is often zero, where the gradient of ``U[user] * V[item]``
is zero too."""

DIFFERENCE = 1e-4
"""Differences of gradients are taken over this distance, for positions of about unit size."""

FEWEST_ESTIMATES = 16
"""With minibatches the variance of the gradient is estimated from so many, or from one a part."""

Matrices = tuple[np.ndarray, np.ndarray]
"""Positions, gradients or settings of users and items, of shapes (size, width)."""


class Gradients:
    """Gradients of the parts at positions of all users and items, computed here.

    Parameters
    ----------
    model : TwoSided
    grid : Grid
    batch_size : int, optional
        As of the run.
    """

    def __init__(self, model: TwoSided, grid: Grid, batch_size: int | None = None):
        self._grid, self._sides = grid, model.sides
        self._whole = user_groups(model, grid, ((), ()))
        self._batches = user_groups(model, grid, ((), ()), batch_size)
        self.counts = grid.counts()
        self.shares = self.counts / self.counts.sum()
        self._has_batches = batch_size is not None

    def turn(self, part: int, iteration: int = 0) -> Turn:
        """An iteration with this part."""
        return Turn(0, 0, iteration, part, 1 / self.shares[part], 1.0)

    def of_part(
        self, groups: Sequence[UserGroup], turn: Turn, at: Matrices
    ) -> tuple[float, Matrices]:
        """Value and gradients of the prior and of the weighted rows of a part."""
        users, items = self._grid.groups
        total = 0.0
        gradients = np.zeros_like(at[0]), np.zeros_like(at[1])
        with np.errstate(all="ignore"):
            for b, group in enumerate(groups):
                numbers = users[b], items[item_group(b, turn.part, self._grid.parts)]
                pieces = [x[chosen].ravel() for x, chosen in zip(at, numbers, strict=True)]
                value, found = group.value_and_gradients(turn, *pieces)
                total += value
                for gradient, chosen, piece in zip(gradients, numbers, found, strict=True):
                    gradient[chosen] = piece.reshape(len(chosen), -1)
        return total, gradients

    def whole(self, at: Matrices) -> tuple[float, Matrices]:
        """Log posterior and its gradients, as the mean over the parts with their probabilities."""
        total, gradients = 0.0, (np.zeros_like(at[0]), np.zeros_like(at[1]))
        for part in np.flatnonzero(self.counts):
            value, of_part = self.of_part(self._whole, self.turn(int(part)), at)
            total += self.shares[part] * value
            for gradient, piece in zip(gradients, of_part, strict=True):
                gradient += self.shares[part] * piece
        return total, gradients

    def estimates(self, at: Matrices) -> Iterator[tuple[float, Matrices]]:
        """Gradients as the iterations see them, each with its probability."""
        parts = np.flatnonzero(self.counts)
        repeats = -(-FEWEST_ESTIMATES // len(parts)) if self._has_batches else 1
        for iteration in range(repeats):
            for part in parts:
                turn = self.turn(int(part), iteration)
                _, gradients = self.of_part(self._batches, turn, at)
                yield self.shares[part] / repeats, gradients


def find_start(gradients: Gradients, initial: Matrices, rng: np.random.Generator) -> Matrices:
    """A point of large density, by L-BFGS from near the initial point."""

    def negative(vector: np.ndarray) -> tuple[float, np.ndarray]:
        value, of_value = gradients.whole(_split(vector, initial))
        return -value, -_joined(of_value)

    begin = _joined(initial)
    begin = begin + START_SCALE * rng.standard_normal(len(begin))
    result = optimize.minimize(
        negative, begin, jac=True, method="L-BFGS-B", options={"maxiter": SEARCH_STEPS}
    )
    return _split(result.x if np.isfinite(result.fun) else begin, initial)


def diagonal_curvature(gradients: Gradients, sides: Sequence[Side], at: Matrices) -> Matrices:
    """Diagonal of the curvature, from differences of gradients.

    Rows of a user do not depend on other users. So one difference, with the same coordinate of all
    users moved, gives the curvature of that coordinate for all of them.
    """
    results = [np.zeros_like(x) for x in at]
    for side, result in enumerate(results):
        for column in range(result.shape[1]):
            for sign in (-1, 1):
                users, items = at[0].copy(), at[1].copy()
                (users, items)[side][:, column] += sign * DIFFERENCE
                slope = gradients.whole((users, items))[1][side][:, column]
                result[:, column] -= sign * slope / (2 * DIFFERENCE)
    for result in results:
        positive = result[result > 0]
        # Where the density is not log-concave a coordinate may have none.
        least = np.min(positive, initial=np.inf) if len(positive) else 1.0
        np.maximum(result, least, out=result)
    return results[0], results[1]


def largest_curvature(gradients: Gradients, at: Matrices, diagonal: Matrices) -> float:
    """Largest eigenvalue of MH for a diagonal M, to a few per cent, by the Lanczos method."""
    scales = np.sqrt(_joined(diagonal))

    def product(direction: np.ndarray) -> np.ndarray:
        step = scales * np.ravel(direction)
        step = step * (DIFFERENCE * np.sqrt(len(step)) / np.linalg.norm(step))
        change = np.zeros(len(step))
        for sign in (-1, 1):
            moved = _split(_joined(at) + sign * step, at)
            change -= sign * _joined(gradients.whole(moved)[1])
        length = np.linalg.norm(step / scales) / np.linalg.norm(direction)
        return scales * change / (2 * length)

    d = len(scales)
    if d < 3:  # too few for Lanczos
        matrix = np.column_stack([product(column) for column in np.eye(d)])
        return float(np.linalg.eigvalsh((matrix + matrix.T) / 2)[-1])
    start = np.random.default_rng(1980).standard_normal(d)
    values = sparse_linalg.eigsh(
        sparse_linalg.LinearOperator((d, d), matvec=product, dtype=float),
        k=1,
        which="LA",
        v0=start,
        tol=0.05,
        ncv=min(d, 8),
        return_eigenvectors=False,
    )
    return float(values[0])


@dataclass(frozen=True, eq=False)
class Scale:
    """What the step sizes follow from.

    Attributes
    ----------
    start : Matrices
    curvature : Matrices
        The diagonal of H at the start.
    variance : Matrices
        The diagonal of V, the variance of the estimated gradient, at a typical point.
    moment : Matrices
        Mean square of the estimated gradient there, divided by N².
    """

    start: Matrices
    curvature: Matrices
    variance: Matrices
    moment: Matrices


def measure(
    gradients: Gradients, sides: Sequence[Side], start: Matrices, rng: np.random.Generator
) -> Scale:
    """Curvature and variance of the gradient around a start.

    The variance is that at a draw from the Gaussian with the diagonal curvature, since at a mode
    the residuals of rows are smaller than where a chain is.
    """
    curvature = diagonal_curvature(gradients, sides, start)
    at = draw_around(start, curvature, rng)
    mean = [np.zeros_like(x) for x in at]
    square = [np.zeros_like(x) for x in at]
    for share, estimate in gradients.estimates(at):
        for side in range(2):
            mean[side] += share * estimate[side]
            square[side] += share * estimate[side] ** 2
    variance = [np.maximum(s - m**2, 0) for s, m in zip(square, mean, strict=True)]
    n_rows = gradients.counts.sum()
    moment = [s / n_rows**2 for s in square]
    return Scale(start, curvature, (variance[0], variance[1]), (moment[0], moment[1]))


def draw_around(start: Matrices, curvature: Matrices, rng: np.random.Generator) -> Matrices:
    """A draw from the Gaussian with a diagonal curvature at a point of large density."""
    users, items = (
        x + rng.standard_normal(x.shape) / np.sqrt(values)
        for x, values in zip(start, curvature, strict=True)
    )
    return users, items


def _split(vector: np.ndarray, like: Matrices) -> Matrices:
    """The inverse of `_joined`, for matrices of these shapes."""
    users, items = like
    return vector[: users.size].reshape(users.shape), vector[users.size :].reshape(items.shape)


def _joined(matrices: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([matrix.ravel() for matrix in matrices])
