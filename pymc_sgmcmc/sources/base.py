"""Rows of named columns in partitions, which are read one at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
import pymc as pm
from pytensor.tensor.sharedvar import TensorSharedVariable

from pymc_sgmcmc.checks import quoted, whole_number
from pymc_sgmcmc.errors import RowsError

HEAD_ROWS = 1009
"""A model is written on this many first rows. The number is a prime, so that no parameter has that
length by chance."""


class RowSource(ABC):
    """Rows of named columns, in partitions.

    Attributes
    ----------
    columns : mapping of str to (numpy.dtype, tuple of int)
        Type, and shape of one row, of each column.
    offsets : numpy.ndarray of int, shape (partitions + 1,)
        Partition i has the rows from ``offsets[i]`` to ``offsets[i + 1]``.
    """

    columns: Mapping[str, tuple[np.dtype, tuple[int, ...]]]
    offsets: np.ndarray
    _last: tuple[int, tuple[str, ...], dict[str, np.ndarray]] | None = None
    """Number, columns and rows of the partition that was read last."""

    @property
    def n_rows(self) -> int:
        """Number of all rows."""
        return int(self.offsets[-1])

    @property
    def n_partitions(self) -> int:
        """Number of partitions."""
        return len(self.offsets) - 1

    @abstractmethod
    def partition(self, number: int, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Columns of all rows of a partition."""

    @abstractmethod
    def signature(self) -> str:
        """Text that changes where the data change."""

    def read(self, start: int, stop: int, names: Sequence[str] | None = None) -> dict:
        """Columns of the rows from `start` to `stop`.

        The partition that was read last is kept, so that pieces in order read each partition once.

        Raises
        ------
        RowsError
            Where a column has another name.
        """
        names = self._checked(names)
        stop = max(start, min(stop, self.n_rows))
        rows = self._empty(names, stop - start)
        first = int(np.searchsorted(self.offsets, start, side="right")) - 1
        at = start
        while at < stop:
            begin, end = int(self.offsets[first]), int(self.offsets[first + 1])
            until = min(stop, end)
            for name, values in self._kept(first, names).items():
                rows[name][at - start : until - start] = values[at - begin : until - begin]
            at, first = until, first + 1
        return rows

    def take(self, numbers: np.ndarray, names: Sequence[str] | None = None) -> dict:
        """Columns of rows by their numbers, in any order. Each partition is read once at most.

        Raises
        ------
        RowsError
            Where a column has another name, or a number is out of range.
        """
        names = self._checked(names)
        numbers = np.asarray(numbers)
        rows = self._empty(names, len(numbers))
        if not len(numbers):
            return rows
        if numbers.min() < 0 or numbers.max() >= self.n_rows:
            raise RowsError(
                f"Numbers of rows should be from 0 to {self.n_rows - 1}, but got "
                f"{numbers.min()} to {numbers.max()}."
            )
        order = np.argsort(numbers, kind="stable")
        bounds = np.searchsorted(numbers[order], self.offsets)
        for number in np.flatnonzero(np.diff(bounds)):
            places = order[bounds[number] : bounds[number + 1]]
            within = numbers[places] - self.offsets[number]
            for name, values in self._kept(int(number), names).items():
                rows[name][places] = values[within]
        return rows

    def head(
        self, *names: str, rows: int = HEAD_ROWS
    ) -> TensorSharedVariable | tuple[TensorSharedVariable, ...]:
        """`pymc.Data` with the first rows of columns, on which a model is written.

        Parameters
        ----------
        *names : str
            Columns, which the data variables are named after.
        rows : int
            Number of first rows. No parameter of the model should have this length.

        Raises
        ------
        RowsError
            Where a column has another name.
        TypeError
            Outside of the context of a model.
        """
        first = self.read(0, whole_number("rows", rows, 2), self._checked(names or None))
        variables = tuple(pm.Data(name, values) for name, values in first.items())
        return variables if len(variables) > 1 else variables[0]

    def __getstate__(self) -> dict:
        """Everything but the partition that was read last."""
        return {name: value for name, value in vars(self).items() if name != "_last"}

    def _checked(self, names: Sequence[str] | None) -> tuple[str, ...]:
        names = tuple(self.columns) if names is None else tuple(names)
        unknown = [name for name in names if name not in self.columns]
        if unknown:
            raise RowsError(
                f"Columns should be of {quoted(list(self.columns))}, but got {quoted(unknown)}."
            )
        return names

    def _empty(self, names: Sequence[str], count: int) -> dict[str, np.ndarray]:
        return {
            name: np.empty((count, *self.columns[name][1]), dtype=self.columns[name][0])
            for name in names
        }

    def _kept(self, number: int, names: tuple[str, ...]) -> dict[str, np.ndarray]:
        """A partition, read where it is not that which was read last."""
        last = self._last  # one look, since another thread may read as well
        if last is None or last[:2] != (number, names):
            last = self._last = number, names, self.partition(number, names)
        return last[2]
