r"""A model in blocks; its start, the curvature there, and what step sizes follow from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import cloudpickle
import numpy as np
from scipy import optimize

from pymc_sgmcmc.adaptation.rmsprop import rmsprop_diagonal
from pymc_sgmcmc.matrices import largest_of_products
from pymc_sgmcmc.posterior.two_sided import TwoSided, rows_of_block
from pymc_sgmcmc.sampling.by_blocks.block import Turn, UserGroup
from pymc_sgmcmc.sampling.by_blocks.grid import Grid
from pymc_sgmcmc.sampling.by_blocks.steps import (
    BlockStep,
    LangevinBlocks,
    QuasiNewtonBlocks,
    RMSpropBlocks,
)
from pymc_sgmcmc.step_methods.hamcmc import REGULARIZATION as PART_OF_LARGEST

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


DECAY, REGULARIZATION = 0.99, 1e-5
"""These are α and λ of RMSprop, the defaults of `PSGLD`."""

STEP_NAMES = ("sgld", "psgld", "hamcmc")
"""These are the names of the samplers."""

CURVATURE, IDENTITY = "curvature", "identity"
"""These are the preconditioners of SGLD: the inverse diagonal of the curvature at the start, and
none."""


class Blocks:
    """The blocks of a model and their places in a position, (d,), of its posterior.

    Parameters
    ----------
    model : TwoSided
    grid : Grid
    batch_size : int, optional
        The most rows of a block that one gradient of a run takes.

    Attributes
    ----------
    groups : list of UserGroup
        Without settings.
    shares : numpy.ndarray, shape (B,)
        The probabilities of the parts.
    """

    def __init__(self, model: TwoSided, grid: Grid, batch_size: int | None = None):
        self.model, self.grid, self.batch_size = model, grid, batch_size
        self.counts = grid.counts()
        self.shares = self.counts / self.counts.sum()
        density, (users, items) = cloudpickle.dumps(model.density), model.sides
        self._users, self._items = (
            [side.places[numbers].ravel() for numbers in groups]
            for side, groups in zip(model.sides, grid.groups, strict=True)
        )
        shapes = [(len(numbers), items.places.shape[1]) for numbers in grid.groups[1]]
        data = [[values[numbers] for values in items.data] for numbers in grid.groups[1]]
        self.groups = [
            UserGroup(
                number=b,
                density=density,
                dtype=model.density.log_density.dtype,
                shapes=((len(numbers), users.places.shape[1]), shapes),
                rows=[
                    rows_of_block(model.posterior.take(rows), model.sides, (numbers, others))
                    for rows, others in zip(grid.rows[b], grid.groups[1], strict=True)
                ],
                data=([values[numbers] for values in users.data], data),
                batch_size=batch_size,
            )
            for b, numbers in enumerate(grid.groups[0])
        ]

    def places(self, users: int, items: int) -> np.ndarray:
        """Places of the coordinates of a group of users, and then of a group of items."""
        return np.concatenate([self._users[users], self._items[items]])

    def with_settings(self, settings: Sequence[np.ndarray]) -> list[UserGroup]:
        """The groups with arrays of a sampler, each of shape (d,)."""
        of_items = [[values[places] for places in self._items] for values in settings]
        return [
            replace(
                group,
                settings=[
                    (values[self._users[group.number]], items)
                    for values, items in zip(settings, of_items, strict=True)
                ],
            )
            for group in self.groups
        ]

    def turn(self, part: int, iteration: int = 0) -> Turn:
        """An iteration with this part."""
        return Turn(0, 0, iteration, part, 1 / self.shares[part], 1.0)

    def of_part(
        self, turn: Turn, at: np.ndarray, batch_size: int | None = None
    ) -> tuple[float, np.ndarray]:
        """Value and gradient of the prior and of the weighted rows of a part."""
        total, gradient = 0.0, np.zeros_like(at)
        with np.errstate(all="ignore"):
            for group in self.groups:
                places = self.places(group.number, group.items(turn))
                value, gradient[places] = group.value_and_gradient(turn, at[places], batch_size)
                total += value
        return total, gradient

    def whole(self, at: np.ndarray) -> tuple[float, np.ndarray]:
        """Log posterior and its gradient, as the mean over the parts with their probabilities."""
        total, gradient = 0.0, np.zeros_like(at)
        for part in np.flatnonzero(self.counts):
            value, of_part = self.of_part(self.turn(int(part)), at)
            total += self.shares[part] * value
            gradient += self.shares[part] * of_part
        return total, gradient

    def estimates(self, at: np.ndarray) -> Iterator[tuple[float, np.ndarray]]:
        """Gradients as the iterations see them, each with its probability."""
        parts = np.flatnonzero(self.counts)
        repeats = -(-FEWEST_ESTIMATES // len(parts)) if self.batch_size is not None else 1
        for iteration in range(repeats):
            for part in parts:
                _, gradient = self.of_part(self.turn(int(part), iteration), at, self.batch_size)
                yield self.shares[part] / repeats, gradient

    def curvature_along(self, at: np.ndarray, step: np.ndarray) -> np.ndarray:
        """Product of the curvature with a short step, by a central difference of gradients."""
        return (self.whole(at - step)[1] - self.whole(at + step)[1]) / 2


def find_start(blocks: Blocks, initial: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A point of large density, by L-BFGS from near the initial point."""

    def negative(at: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = blocks.whole(at)
        return -value, -gradient

    begin = initial + START_SCALE * rng.standard_normal(len(initial))
    result = optimize.minimize(
        negative, begin, jac=True, method="L-BFGS-B", options={"maxiter": SEARCH_STEPS}
    )
    return result.x if np.isfinite(result.fun) else begin


def diagonal_curvature(blocks: Blocks, at: np.ndarray) -> np.ndarray:
    """Diagonal of the curvature, from differences of gradients.

    Rows of a user do not depend on other users. So one difference, with the same coordinate of all
    users moved, gives the curvature of that coordinate for all of them.
    """
    curvature = np.zeros_like(at)
    for side in blocks.model.sides:
        for moved in side.places.T:
            step = np.zeros_like(at)
            step[moved] = DIFFERENCE
            curvature[moved] = blocks.curvature_along(at, step)[moved] / DIFFERENCE
        found = curvature[side.places]
        # Where the density is not log-concave a coordinate may have none.
        least = found[found > 0].min() if (found > 0).any() else 1.0
        curvature[side.places] = np.maximum(found, least)
    return curvature


def largest_curvature(blocks: Blocks, at: np.ndarray, diagonal: np.ndarray) -> float:
    """Largest eigenvalue of MH for a diagonal M, to a few per cent, by the Lanczos method."""
    root, d = np.sqrt(diagonal), len(at)

    def product(direction: np.ndarray) -> np.ndarray:
        step = root * direction.ravel()
        short = DIFFERENCE * np.sqrt(d) / np.linalg.norm(step)
        return root * blocks.curvature_along(at, short * step) / short

    start = np.random.default_rng(1980).standard_normal(d)
    return largest_of_products(product, start, 0.05, min(d, 8))


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


def measure(blocks: Blocks, start: np.ndarray, rng: np.random.Generator) -> Scale:
    """Curvature and variance of the gradient around a start.

    The variance is that at a draw from the Gaussian with the diagonal curvature, since at a mode
    the residuals of rows are smaller than where a chain is.
    """
    curvature = diagonal_curvature(blocks, start)
    mean, square = np.zeros_like(start), np.zeros_like(start)
    for share, estimate in blocks.estimates(draw_around(start, curvature, rng)):
        mean += share * estimate
        square += share * estimate**2
    variance = np.maximum(square - mean**2, 0)
    return Scale(start, curvature, variance, square / blocks.counts.sum() ** 2)


def draw_around(start: np.ndarray, curvature: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A draw from the Gaussian with a diagonal curvature at a point of large density."""
    return start + rng.standard_normal(len(start)) / np.sqrt(curvature)


@dataclass(frozen=True, eq=False)
class Design:
    """A sampler, its settings, and what its step size follows from.

    Attributes
    ----------
    step : BlockStep
    settings : sequence of numpy.ndarray, shape (d,)
    largest_curvature : float
        λ_max(MH), with M of the settings.
    mean_variance : float
        The mean over the coordinates of the diagonal of MV.
    """

    step: BlockStep
    settings: Sequence[np.ndarray]
    largest_curvature: float
    mean_variance: float

    def step_size(self, bias: float, smallest_share: float) -> float:
        r"""The step size h for a variance that is too large by `bias`, on average.

        .. math:: h = \frac{4\,\mathrm{bias}}{\overline{(MV)_{jj}} + \lambda_{\max}(MH)}

        It is at most :math:`2 \min_i |\Omega_i| / (N \lambda_{\max}(MH))`: the weighted curvature
        of a part is at most :math:`N / |\Omega_i|` times that of all, and a longer step could
        diverge where the same part is drawn repeatedly.
        """
        wanted = 4 * bias / (self.mean_variance + self.largest_curvature)
        return float(min(wanted, 2 * smallest_share / self.largest_curvature))


def design_of(
    name: str,
    blocks: Blocks,
    scale: Scale,
    *,
    preconditioner: str,
    memory: int,
    is_rescaled: bool = True,
) -> Design:
    """The design of one of `STEP_NAMES`, with M of PSGLD as in the paper where not rescaled."""

    def largest_of(diagonal: np.ndarray) -> float:
        return largest_curvature(blocks, scale.start, diagonal)

    if name == "psgld":
        diagonal = rmsprop_diagonal(scale.moment, REGULARIZATION)
        largest, variance = largest_of(diagonal), float((diagonal * scale.variance).mean())
        size = largest + variance if is_rescaled else 1.0
        step = RMSpropBlocks(int(blocks.counts.sum()), DECAY, REGULARIZATION, size)
        return Design(step, (), largest / size, variance / size)
    inverse = np.ones_like(scale.start) if preconditioner == IDENTITY else 1 / scale.curvature
    largest, variance = largest_of(inverse), float((inverse * scale.variance).mean())
    if name == "sgld":
        return Design(LangevinBlocks(), (inverse,), largest, variance)
    threshold = PART_OF_LARGEST * largest
    gamma = 1 / (largest + threshold)
    settings = gamma * inverse, threshold / inverse, threshold / inverse
    return Design(QuasiNewtonBlocks(memory), settings, 1.0, gamma * variance)
