r"""The covariance V of a gradient estimate, learned while a chain runs.

There are three ways, one for each kind of estimate: from the gradients of rows, from their
differences to those at a centre, or from the transitions themselves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pymc_sgmcmc.adaptation.base import AdaptationState, Seen
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.tuning import Center, laplace_pairs

FEWEST_ROWS = 500
"""A sample has at least this many rows. The relative error of a variance from them is about 6 %."""

ROWS_TO_TRUST = 10
"""A covariance of gradients from at least this many rows for each dimension is used without
shrinkage. Its largest eigenvalue is then too large by a factor of at most about 1.7."""

START_POINTS = (100, 400)
"""Before a chain begins V is averaged over a number of points around the centre within these
bounds. It is a compromise between the error of the average and its time."""

START_ELEMENTS = 50_000_000
"""The average over points around the centre uses as many points as keep rows times coordinates
times points below this number, which bounds its time."""


# --- Rows -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowSample:
    """Gradients of a sample of rows at one position.

    Attributes
    ----------
    rows : list of numpy.ndarray
        The rows of each array of data.
    gradients : numpy.ndarray, shape (rows, d)
    n_rows : int
        The number of rows N.
    distinct : bool
        Whether no row is in the sample twice.
    """

    rows: list[np.ndarray]
    gradients: np.ndarray
    n_rows: int
    distinct: bool

    def __len__(self) -> int:
        return len(self.gradients)

    @property
    def covariance(self) -> np.ndarray:
        """Estimate of C."""
        return row_covariance(self.gradients, self.n_rows, distinct=self.distinct)


def sample_rows(
    posterior: Posterior,
    position: np.ndarray,
    count: int,
    *,
    seed: int,
    next_rows: np.ndarray | None = None,
    without_replacement: bool = True,
) -> RowSample:
    """Gradients of rows: all rows, the next minibatch if it is large enough, or random rows.

    Parameters
    ----------
    posterior : Posterior
    position : numpy.ndarray, shape (d,)
    count : int
    seed : int
        Seed of the choice among all rows.
    next_rows : numpy.ndarray, optional
        Numbers of the rows of the next minibatch.
    without_replacement : bool
        Whether the rows of the next minibatch are distinct.
    """
    following = np.empty(0, dtype=np.int64) if next_rows is None else next_rows
    distinct = True
    if count >= posterior.n_rows:
        numbers = np.arange(posterior.n_rows)
    elif count <= len(following):
        numbers, distinct = following[:count], without_replacement
    else:
        rng = np.random.default_rng([1959, seed, *following[:4]])
        numbers = rng.choice(posterior.n_rows, size=count, replace=False)
    rows = posterior.take(numbers)
    gradients = posterior.row_gradients(position, rows)
    return RowSample(rows, gradients, posterior.n_rows, distinct)


def row_covariance(gradients: np.ndarray, n_rows: int, *, distinct: bool) -> np.ndarray:
    """Unbiased estimate of C, the covariance with divisor N over all N rows.

    Parameters
    ----------
    gradients : numpy.ndarray, shape (rows, d)
        Gradients of single rows, a random sample of all N.
    n_rows : int
        The number of rows N.
    distinct : bool
        Whether the sample is without replacement.
    """
    if len(gradients) < 2:
        return np.zeros((gradients.shape[1],) * 2)
    gradients = np.asarray(gradients, dtype=float)
    centred = gradients - gradients.mean(0)
    covariance = centred.T @ centred / (len(gradients) - 1)
    return covariance * (n_rows - 1) / n_rows if distinct else covariance


def shrunk(covariance: np.ndarray, rows: float) -> np.ndarray:
    """Covariance from few rows, linearly shrunk towards its diagonal."""
    dimension = len(covariance)
    if rows >= ROWS_TO_TRUST * dimension:
        return covariance
    weight = dimension / (dimension + rows)
    return (1 - weight) * covariance + weight * np.diag(np.diag(covariance))


def values_of_others(posterior: Posterior) -> dict[str, np.ndarray]:
    """Present values of the variables outside the position."""
    return {name: np.array(value.get_value()) for name, value in posterior.others.items()}


# --- Noise ----------------------------------------------------------------------------------


class NoiseModel(ABC):
    """The way in which V is learned. What is learned is part of the state of an adaptation.

    Attributes
    ----------
    needs_rows : bool
        Whether V is learned from samples of rows.
    """

    needs_rows: bool = True

    @abstractmethod
    def start(self, sample: RowSample) -> tuple[np.ndarray, float]:
        """V to begin with, and its weight in later updates."""

    def follow(self, state: AdaptationState, seen: Seen) -> dict[str, np.ndarray]:
        """The entries of the state that change with a run of transitions."""
        return {}

    def learn(self, state: AdaptationState, sample: RowSample | None) -> np.ndarray | None:
        """V since the last update, or None, the default, where it follows from C alone."""
        return None

    def covariance(self, rows: np.ndarray, learned: np.ndarray) -> np.ndarray:
        """V from the averages of C and of the results of `learn`."""
        return learned


class PlainNoise(NoiseModel):
    r"""V of the plain gradient, :math:`\tfrac{N^2}{n} c\, C`.

    Parameters
    ----------
    scale : float
        :math:`N^2 c / n`.
    """

    def __init__(self, scale: float):
        self._scale = scale

    def start(self, sample: RowSample) -> tuple[np.ndarray, float]:
        """V from C."""
        return self._scale * shrunk(sample.covariance, len(sample)), 0.0

    def covariance(self, rows: np.ndarray, learned: np.ndarray) -> np.ndarray:
        """V from the average of C."""
        return self._scale * rows


class ControlVariateNoise(NoiseModel):
    """V of control variates, from the gradients of rows less those at the centre.

    Parameters
    ----------
    posterior : Posterior
    center : Center
    scale : float
        As for `PlainNoise`.
    joint_draws : sequence of mappings, optional
        Points around the centre, given where the position has not all variables.
    """

    def __init__(
        self,
        posterior: Posterior,
        center: Center,
        scale: float,
        joint_draws: Sequence[Mapping[str, np.ndarray]] | None = None,
    ):
        self._posterior, self._center, self._scale = posterior, center, scale
        self._others_at_center = values_of_others(posterior)
        self._first = self._around_center(joint_draws)

    def start(self, sample: RowSample) -> tuple[np.ndarray, float]:
        """V over the Laplace approximation, with the weight of its points."""
        return self._first

    def learn(self, state: AdaptationState, sample: RowSample | None) -> np.ndarray:
        """V at the position of the sample."""
        assert sample is not None
        return self._noise(sample)

    def _noise(self, sample: RowSample) -> np.ndarray:
        present = values_of_others(self._posterior)
        self._posterior.set_others(self._others_at_center)
        at_center = self._posterior.row_gradients(self._center.position, sample.rows)
        self._posterior.set_others(present)
        differences = sample.gradients - at_center
        covariance = row_covariance(differences, sample.n_rows, distinct=sample.distinct)
        return self._scale * shrunk(covariance, len(sample))

    def _around_center(
        self, joint_draws: Sequence[Mapping[str, np.ndarray]] | None
    ) -> tuple[np.ndarray, float]:
        """V averaged over the Laplace approximation, and the number of points.

        V is about quadratic in the distance from the centre. The average over K random points would
        have a relative error of sqrt(2 / K).
        """
        posterior, dimension = self._posterior, self._posterior.dimension
        rows = min(max(FEWEST_ROWS, ROWS_TO_TRUST * dimension), posterior.n_rows)
        count = int(np.clip(START_ELEMENTS // (rows * dimension), *START_POINTS))
        points = joint_draws[:count] if joint_draws else None
        points = points or laplace_pairs(posterior, self._center, count)
        present = values_of_others(posterior)
        total = np.zeros((dimension, dimension))
        for number, point in enumerate(points):
            posterior.set_others({**present, **point})
            position = posterior.layout.ravel(point)
            total += self._noise(sample_rows(posterior, position, rows, seed=number))
        posterior.set_others(present)
        return total / len(points), float(len(points))


class ResidualNoise(NoiseModel):
    r"""V of any estimator: the covariance of :math:`\hat\nabla + H \theta` over transitions.

    Parameters
    ----------
    first : NoiseModel
        Model of V at the start, which the estimate from transitions replaces.
    """

    needs_rows = False

    def __init__(self, first: NoiseModel):
        self._first = first

    def start(self, sample: RowSample) -> tuple[np.ndarray, float]:
        """V of the model for the start, with weight zero."""
        return self._first.start(sample)[0], 0.0

    def follow(self, state: AdaptationState, seen: Seen) -> dict[str, np.ndarray]:
        """Positions and gradients since the last update."""
        return {
            "recent_positions": np.concatenate([state["recent_positions"], seen.positions]),
            "recent_gradients": np.concatenate([state["recent_gradients"], seen.gradients]),
        }

    def learn(self, state: AdaptationState, sample: RowSample | None) -> np.ndarray:
        """V from the transitions since the last update."""
        inverse = np.linalg.inv(state["basis"])
        positions = state["recent_positions"] - state["recent_positions"].mean(0)
        residuals = state["recent_gradients"] + positions @ (inverse.T @ inverse)
        return shrunk(np.atleast_2d(np.cov(residuals.T)), len(residuals))
