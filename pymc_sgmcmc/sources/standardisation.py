"""Means and standard deviations of columns in one pass, and columns that are scaled by them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np


class Sums(NamedTuple):
    """Number of some rows, and mean and sum of squares of their deviations from a given row."""

    rows: int
    mean: np.ndarray
    squares: np.ndarray


def sums_of(values: np.ndarray, shift: np.ndarray) -> Sums:
    """Sums of rows, along the first axis, relative to a given row."""
    if not len(values):
        return Sums(0, np.zeros(()), np.zeros(()))
    with np.errstate(invalid="ignore", over="ignore"):  # see `Moments.are_finite`
        deviations = values - shift.astype(float)
        mean = deviations.mean(axis=0)
        deviations -= mean
        return Sums(len(values), mean, np.square(deviations).sum(axis=0))


class Moments:
    """Mean and sum of squares of rows that come in parts.

    Parts are joined as by Chan, Golub and LeVeque (1983), Algorithms for computing the sample
    variance, The American Statistician 37(3). All values are taken relative to one of the rows, so
    that a large mean costs no digits, and those of a constant column are exactly zero.

    Parameters
    ----------
    shift : numpy.ndarray
        This row.

    Examples
    --------
    >>> moments = Moments(np.array([1.0, 6.0]))
    >>> for row in ([1.0, 6.0], [5.0, 6.0]):
    ...     moments.join(sums_of(np.array([row]), np.array([1.0, 6.0])))
    >>> moments.mean, moments.scale
    (array([3., 6.]), array([2., 1.]))
    """

    def __init__(self, shift: np.ndarray) -> None:
        self._count, self._shift = 0, np.asarray(shift, dtype=float)
        self._mean = self._squares = np.zeros(())

    def join(self, part: Sums) -> None:
        """Take sums of further rows into account."""
        if not part.rows:
            return
        with np.errstate(invalid="ignore", over="ignore"):  # see `are_finite`
            total = self._count + part.rows
            difference = part.mean - self._mean
            between = difference**2 * (self._count * part.rows / total)
            self._squares = self._squares + part.squares + between
            self._mean = self._mean + difference * (part.rows / total)
        self._count = total

    @property
    def are_finite(self) -> bool:
        """Whether no row so far had NaN or an infinite value."""
        return bool(np.isfinite(self._squares).all())

    @property
    def mean(self) -> np.ndarray:
        """Mean of all rows."""
        return np.asarray(self._shift + self._mean)

    @property
    def scale(self) -> np.ndarray:
        """Standard deviation of all rows, and 1 where it is zero."""
        deviation = np.sqrt(self._squares / max(self._count, 1))
        return np.where(deviation > 0, deviation, 1.0)


class Standardisation:
    """A function that shifts and scales columns.

    Parameters
    ----------
    moments : mapping of str to Moments

    Attributes
    ----------
    means, scales : dict of str to numpy.ndarray
    """

    def __init__(self, moments: Mapping[str, Moments]):
        self.means = {name: each.mean for name, each in moments.items()}
        self.scales = {name: each.scale for name, each in moments.items()}

    def __call__(self, columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Standardised columns. Single precision stays, and short integers become it."""
        return {
            name: ((values - self.means[name]) / self.scales[name]).astype(
                np.result_type(values.dtype, np.float32)
            )
            for name, values in columns.items()
        }
