r"""Where a chain starts, the curvature there, and the step size, from gradients of whole parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize
from scipy.sparse import linalg as sparse_linalg

from pymc_sgmcmc.posterior.two_sided import TwoSided
from pymc_sgmcmc.sampling.by_blocks.block import Places, Turn, UserGroup, user_groups
from pymc_sgmcmc.sampling.by_blocks.grid import Grid

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


class Gradients:
    """Gradients of the parts at a position, (d,), of all users and then all items, computed here.

    Parameters
    ----------
    model : TwoSided
    grid : Grid
    batch_size : int, optional
        As of the run.
    """

    def __init__(self, model: TwoSided, grid: Grid, batch_size: int | None = None):
        self.sides, self.places = model.sides, Places.of(model, grid)
        self._whole = user_groups(model, grid, ())
        self._batches = user_groups(model, grid, (), batch_size)
        self.counts = grid.counts()
        self.shares = self.counts / self.counts.sum()
        self._has_batches = batch_size is not None

    def turn(self, part: int, iteration: int = 0) -> Turn:
        """An iteration with this part."""
        return Turn(0, 0, iteration, part, 1 / self.shares[part], 1.0)

    def of_part(
        self, groups: Sequence[UserGroup], turn: Turn, at: np.ndarray
    ) -> tuple[float, np.ndarray]:
        """Value and gradient of the prior and of the weighted rows of a part."""
        total, gradient = 0.0, np.zeros_like(at)
        with np.errstate(all="ignore"):
            for b, group in enumerate(groups):
                block = b, group.items(turn)
                value, found = group.value_and_gradients(turn, *self.places.cut(at, *block))
                total += value
                self.places.fill(gradient, *block, found)
        return total, gradient

    def whole(self, at: np.ndarray) -> tuple[float, np.ndarray]:
        """Log posterior and its gradient, as the mean over the parts with their probabilities."""
        total, gradient = 0.0, np.zeros_like(at)
        for part in np.flatnonzero(self.counts):
            value, of_part = self.of_part(self._whole, self.turn(int(part)), at)
            total += self.shares[part] * value
            gradient += self.shares[part] * of_part
        return total, gradient

    def estimates(self, at: np.ndarray) -> Iterator[tuple[float, np.ndarray]]:
        """Gradients as the iterations see them, each with its probability."""
        parts = np.flatnonzero(self.counts)
        repeats = -(-FEWEST_ESTIMATES // len(parts)) if self._has_batches else 1
        for iteration in range(repeats):
            for part in parts:
                turn = self.turn(int(part), iteration)
                _, gradient = self.of_part(self._batches, turn, at)
                yield self.shares[part] / repeats, gradient


def find_start(gradients: Gradients, initial: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A point of large density, by L-BFGS from near the initial point."""

    def negative(at: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = gradients.whole(at)
        return -value, -gradient

    begin = initial + START_SCALE * rng.standard_normal(len(initial))
    result = optimize.minimize(
        negative, begin, jac=True, method="L-BFGS-B", options={"maxiter": SEARCH_STEPS}
    )
    return result.x if np.isfinite(result.fun) else begin


def diagonal_curvature(gradients: Gradients, at: np.ndarray) -> np.ndarray:
    """Diagonal of the curvature, from differences of gradients.

    Rows of a user do not depend on other users. So one difference, with the same coordinate of all
    users moved, gives the curvature of that coordinate for all of them.
    """
    curvature = np.zeros_like(at)
    first, second = gradients.sides
    of_sides = np.split(np.arange(len(at)), [first.size * first.width])
    for side, places in zip((first, second), of_sides, strict=True):
        for column in range(side.width):
            moved = places[column :: side.width]
            for sign in (-1, 1):
                beside = at.copy()
                beside[moved] += sign * DIFFERENCE
                curvature[moved] -= sign * gradients.whole(beside)[1][moved] / (2 * DIFFERENCE)
        positive = curvature[places][curvature[places] > 0]
        # Where the density is not log-concave a coordinate may have none.
        curvature[places] = np.maximum(curvature[places], positive.min() if len(positive) else 1.0)
    return curvature


def largest_curvature(gradients: Gradients, at: np.ndarray, diagonal: np.ndarray) -> float:
    """Largest eigenvalue of MH for a diagonal M, to a few per cent, by the Lanczos method."""
    scales = np.sqrt(diagonal)

    def product(direction: np.ndarray) -> np.ndarray:
        step = scales * np.ravel(direction)
        step = step * (DIFFERENCE * np.sqrt(len(step)) / np.linalg.norm(step))
        change = np.zeros(len(step))
        for sign in (-1, 1):
            change -= sign * gradients.whole(at + sign * step)[1]
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
    start : numpy.ndarray, shape (d,)
    curvature : numpy.ndarray, shape (d,)
        The diagonal of H at the start.
    variance : numpy.ndarray, shape (d,)
        The diagonal of V, the variance of the estimated gradient, at a typical point.
    moment : numpy.ndarray, shape (d,)
        Mean square of the estimated gradient there, divided by N².
    """

    start: np.ndarray
    curvature: np.ndarray
    variance: np.ndarray
    moment: np.ndarray


def measure(gradients: Gradients, start: np.ndarray, rng: np.random.Generator) -> Scale:
    """Curvature and variance of the gradient around a start.

    The variance is that at a draw from the Gaussian with the diagonal curvature, since at a mode
    the residuals of rows are smaller than where a chain is.
    """
    curvature = diagonal_curvature(gradients, start)
    mean, square = np.zeros_like(start), np.zeros_like(start)
    for share, estimate in gradients.estimates(draw_around(start, curvature, rng)):
        mean += share * estimate
        square += share * estimate**2
    variance = np.maximum(square - mean**2, 0)
    return Scale(start, curvature, variance, square / gradients.counts.sum() ** 2)


def draw_around(start: np.ndarray, curvature: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A draw from the Gaussian with a diagonal curvature at a point of large density."""
    return start + rng.standard_normal(len(start)) / np.sqrt(curvature)
