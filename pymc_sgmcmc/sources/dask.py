"""Rows of Dask arrays and dataframes, of which one partition is computed at a time."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pymc_sgmcmc.checks import import_optional
from pymc_sgmcmc.errors import RowsError
from pymc_sgmcmc.sources.base import RowSource
from pymc_sgmcmc.sources.columns import check_names
from pymc_sgmcmc.sources.schema import CODES, check_partition, common_length, offsets_of, schema_of

REMEDY = "Give Dask the right types (`meta`), or compute the partitions in the same way."


class _DaskSource(RowSource):
    """What rows of Dask arrays and dataframes have in common."""

    def __init__(self) -> None:
        self._process: int | None = os.getpid()

    def __setstate__(self, state: dict) -> None:
        # A task of a worker that waited for another task could wait forever.
        vars(self).update(state, _process=None)

    def partition(self, number: int, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Columns of a partition, which is computed."""
        return self.from_result(self._compute(self.collection(number, names)), number, names)

    def _checked_partition(
        self, number: int, found: Mapping[str, Any], names: Sequence[str]
    ) -> dict[str, np.ndarray]:
        """Columns of a partition, which are as Dask has described them."""
        columns = self._plain(number, found)
        expected = {name: self.columns[name] for name in names}
        check_partition(columns, expected, self.count(number), number, REMEDY)
        return columns

    def _compute(self, collection: Any) -> Any:
        """Result of a collection, by the client or scheduler of the user, or in this thread.

        Threads and clients of Dask do not go on in a forked process, where they would wait forever.
        """
        dask = import_optional("dask", "dask", "Reading Dask collections")
        here = os.getpid() == self._process
        if here and self.workers is not None:
            return dask.compute(collection, scheduler=self.workers)[0]
        chosen = here and dask.base.get_scheduler() is not None
        return dask.compute(collection, **({} if chosen else {"scheduler": "synchronous"}))[0]


class DaskArraySource(_DaskSource):
    """Rows of Dask arrays with a common length of the first axis.

    A partition is a chunk of the first array along this axis, and the others get its chunks. Chunks
    of unknown length are computed once, to count their rows.

    Parameters
    ----------
    arrays : mapping of str to dask.array.Array
        Columns by name.

    Raises
    ------
    RowsError
        Where arrays have different numbers of rows, or no rows.
    ImportError
        Where Dask is not installed.

    Examples
    --------
    >>> import dask.array as da
    >>> from pymc_sgmcmc.sources import DaskArraySource
    >>> rows = DaskArraySource({"x": da.arange(10, chunks=4)})
    >>> rows.n_partitions, rows.take([7, 2])["x"]
    (3, array([7, 2]))
    """

    def __init__(self, arrays: Mapping[str, Any]):
        super().__init__()
        arrays = {name: _with_lengths(array) for name, array in arrays.items()}
        common_length(arrays)
        lengths = next(iter(arrays.values())).chunks[0]
        self._arrays = {name: array.rechunk({0: lengths}) for name, array in arrays.items()}
        self.columns = schema_of(arrays)
        self.offsets = offsets_of(lengths, "The Dask arrays")

    def collection(self, number: int, names: Sequence[str]) -> dict[str, Any]:
        """Chunks of a partition."""
        return {name: self._arrays[name].blocks[number] for name in names}

    def from_result(self, result: Any, number: int, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Columns from the results of the chunks."""
        return self._checked_partition(number, result, names)

    def signature(self) -> str:
        """Number of rows, and names that Dask gives to the arrays, which follow from their data."""
        return f"{self.n_rows} rows: " + "; ".join(
            f"{name} {array.name}" for name, array in self._arrays.items()
        )


class DaskFrameSource(_DaskSource):
    """Rows of a Dask dataframe, with its partitions.

    Partitions are computed once to count their rows. A column of categories becomes codes, and
    `categories` has its labels. Dask finds those that it does not know in the same pass.

    Parameters
    ----------
    frame : dask.dataframe.DataFrame
    names : sequence of str, optional
        Columns to read, all where not given.

    Raises
    ------
    RowsError
        Where there are no such columns, or no rows.
    ImportError
        Where Dask is not installed.

    Examples
    --------
    >>> import dask.dataframe as dd
    >>> import pandas as pd
    >>> from pymc_sgmcmc.sources import DaskFrameSource
    >>> frame = dd.from_pandas(pd.DataFrame({"late": [1, 0, 1, 1]}), npartitions=2)
    >>> rows = DaskFrameSource(frame)
    >>> rows.n_partitions, rows.take([3, 1])["late"]
    (2, array([1, 0]))
    """

    def __init__(self, frame: Any, names: Sequence[str] | None = None):
        super().__init__()
        names = list(frame.columns) if names is None else list(names)
        check_names(names, list(frame.columns), "the Dask dataframe")
        frame = frame[names]
        empty = frame._meta
        categories = [name for name in names if empty[name].dtype == "category"]
        unknown = [name for name in categories if not frame[name].cat.known]
        if unknown:
            frame = frame.categorize(columns=unknown, index=False)
            empty = frame._meta
        self._frame = frame
        self._labels = {name: empty[name].cat.categories for name in categories}
        self.columns = {name: (self._values(empty[name]).dtype, ()) for name in names}
        lengths = self._compute(frame.map_partitions(len))
        self.offsets = offsets_of(lengths, "The Dask dataframe")

    @property
    def categorical(self) -> frozenset[str]:
        """Names of the columns of categories."""
        return frozenset(self._labels)

    def _labels_of(self, name: str) -> np.ndarray:
        return self._labels[name].to_numpy()

    def collection(self, number: int, names: Sequence[str]) -> Any:
        """A partition of the dataframe."""
        return self._frame[list(names)].partitions[number]

    def from_result(self, result: Any, number: int, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Columns from the result of a partition."""
        found = {
            name: np.ma.array(self._values(result[name]), mask=result[name].isna().to_numpy())
            for name in names
        }
        columns = self._checked_partition(number, found, names)
        for name in self.categorical.intersection(names):
            if (columns[name] < 0).any():
                raise RowsError(
                    f"Partition {number} of the Dask data has categories in its column `{name}` "
                    f"that Dask does not know of, but only {list(self._labels[name])}. Call "
                    f'`frame["{name}"].cat.as_unknown()`, or give all categories to Dask (`meta`).'
                )
        return columns

    def signature(self) -> str:
        """Number of rows, and the token that Dask gives to the dataframe."""
        token = import_optional("dask", "dask", "Reading Dask collections").base.tokenize(
            self._frame
        )
        return f"{self.n_rows} rows: {', '.join(self.columns)} {token}"

    def _values(self, series: Any) -> np.ndarray:
        """Values of a pandas series, codes where it has categories."""
        if series.name not in self._labels:
            return series.to_numpy()
        labels = self._labels[series.name]
        return series.cat.set_categories(labels).cat.codes.to_numpy().astype(CODES)


def _with_lengths(array: Any) -> Any:
    """An array whose chunks have known lengths."""
    if np.isnan(array.shape).any():
        array = array.copy()  # the user's array stays as it is
        array.compute_chunk_sizes()
    return array
