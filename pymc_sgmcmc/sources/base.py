"""Rows of named columns in partitions, which are read one at a time, and functions of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from typing import Any

import numpy as np
import pymc as pm
from pytensor.tensor.sharedvar import TensorSharedVariable

from pymc_sgmcmc.checks import quoted, whole_number
from pymc_sgmcmc.errors import RowsError
from pymc_sgmcmc.sources.cluster import results, send, submit
from pymc_sgmcmc.sources.passes import client_of_passes
from pymc_sgmcmc.sources.schema import (
    MEMORY,
    NUMBERS,
    Schema,
    check_numbers,
    check_partition,
    without_missing,
)
from pymc_sgmcmc.sources.standardisation import Moments, Standardisation, Sums, sums_of
from pymc_sgmcmc.stages import with_progress

HEAD_ROWS = 1009
"""A model is written on this many first rows. The number is a prime, so that no parameter has that
length by chance."""

ALONE = 8
"""Pairs of rows that a transformation is also applied to alone. A function that numbers two
categories afresh in each call passes a pair with probability 3/4, and so all with 1/10."""

TransformFunction = Callable[[dict[str, np.ndarray]], Mapping[str, Any]]
"""From columns by name to columns by name, with as many rows."""


class RowSource(ABC):
    """Rows of named columns, in partitions.

    Attributes
    ----------
    columns : mapping of str to (numpy.dtype, tuple of int)
        Type, and shape of one row, of each column.
    offsets : numpy.ndarray of int, shape (partitions + 1,)
        Partition i has the rows from ``offsets[i]`` to ``offsets[i + 1]``.
    memory : int
        The rows of a run take at most so many bytes at a time, 2 GiB where nothing else is set.
    client : dask.distributed.Client or None
        Passes run on its cluster, and rows are gathered there.
    """

    columns: Schema
    offsets: np.ndarray
    memory: int = MEMORY
    client: Any = None
    _at_hand: tuple[np.ndarray, Mapping[str, np.ndarray]] | None = None
    """Numbers and columns of rows that were gathered before."""
    _last: tuple[int, tuple[str, ...], dict[str, np.ndarray]] | None = None
    """Number, columns and rows of the partition that was read last."""
    last_index: tuple[str, int, Any] | None = None
    """Column of codes, number of groups and index of them that was made last."""

    @property
    def n_rows(self) -> int:
        """Number of all rows."""
        return int(self.offsets[-1])

    @property
    def n_partitions(self) -> int:
        """Number of partitions."""
        return len(self.offsets) - 1

    def count(self, number: int) -> int:
        """Number of rows of a partition."""
        return int(self.offsets[number + 1] - self.offsets[number])

    @abstractmethod
    def partition(self, number: int, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Columns of all rows of a partition."""

    @abstractmethod
    def signature(self) -> str:
        """Text that changes where the data change."""

    def origin(self, number: int) -> str:
        """Where the rows of a partition are, for messages."""
        return f"partition {number}"

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
        rows = self.empty(names, stop - start)
        number = int(np.searchsorted(self.offsets, start, side="right")) - 1
        at = start
        while at < stop:
            begin, end = int(self.offsets[number]), int(self.offsets[number + 1])
            until = min(stop, end)
            for name, values in self._kept(number, names).items():
                rows[name][at - start : until - start] = values[at - begin : until - begin]
            at, number = until, number + 1
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
        if self._at_hand is not None and np.array_equal(numbers, self._at_hand[0]):
            return {name: self._at_hand[1][name] for name in names}
        rows = self.empty(names, len(numbers))
        if not len(numbers):
            return rows
        if numbers.min() < 0 or numbers.max() >= self.n_rows:
            raise RowsError(
                f"Numbers of rows should be from 0 to {self.n_rows - 1}, but got "
                f"{numbers.min()} to {numbers.max()}."
            )
        places_of = self.places(numbers)
        found: Iterator[dict[str, np.ndarray]]
        if self.workers is None:
            found = (
                self.select(number, numbers[places] - self.offsets[number], names)
                for number, places in places_of.items()
            )
        else:
            found = self._on_workers(
                lambda number: partial(
                    _selected, within=numbers[places_of[number]] - self.offsets[number]
                ),
                list(places_of),
                names,
            )
        for places, columns in zip(places_of.values(), found, strict=True):
            for name, values in columns.items():
                rows[name][places] = values
        return rows

    def places(self, numbers: np.ndarray) -> dict[int, np.ndarray]:
        """Places of the rows of each partition among some rows, by the number of the partition."""
        order = np.argsort(numbers, kind="stable")
        bounds = np.searchsorted(numbers[order], self.offsets)
        return {
            int(number): order[bounds[number] : bounds[number + 1]]
            for number in np.flatnonzero(np.diff(bounds))
        }

    @contextmanager
    def at_hand(self, numbers: np.ndarray, columns: Mapping[str, np.ndarray]) -> Iterator[None]:
        """Let `take` return columns of these rows, which were gathered before."""
        self._at_hand = numbers, columns
        try:
            yield
        finally:
            self._at_hand = None

    # --- On the workers of a cluster ---

    @property
    def workers(self) -> Any:
        """The client of the cluster on which passes run, None where there is none."""
        return self.client if self.client is not None else client_of_passes()

    def collection(self, number: int, names: Sequence[str]) -> Any:
        """Dask collections that a partition is made of, None where a worker reads it."""
        return None

    def from_result(self, result: Any, number: int, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Columns of a partition from the result of `collection`, where there is one."""
        return self._whole(number, names)

    def select_from(
        self, result: Any, number: int, within: np.ndarray, names: Sequence[str]
    ) -> dict[str, np.ndarray]:
        """Columns of some rows of a partition, from the result of `collection`."""
        if result is None:
            return self.select(number, within, names)
        columns = self.from_result(result, number, names)
        return {name: values[within] for name, values in columns.items()}

    def started(self, client: Any, number: int, names: Sequence[str]) -> Any:
        """Future of the result of `collection` on a cluster, None where there is nothing to do."""
        collection = self.collection(number, names)
        if isinstance(collection, Mapping):
            return {name: client.compute(each) for name, each in collection.items()}
        return None if collection is None else client.compute(collection)

    def _on_workers(
        self, function_of: Callable[[int], Callable], numbers: Sequence[int], names: Sequence[str]
    ) -> Iterator[Any]:
        """Results of functions of (source, result of `collection`, number, names), in order."""
        client = self.workers

        def submitted() -> Iterator[Any]:
            source = send(client, self)
            for number in numbers:
                yield submit(
                    client,
                    "rows",
                    function_of(number),
                    source,
                    self.started(client, number, names),
                    number,
                    tuple(names),
                )

        return results(client, submitted)

    def mapped(self, function: Callable, names: Sequence[str]) -> Iterator[Any]:
        """Results of a function of columns, of all partitions in order, where these are.

        Parameters
        ----------
        function : callable
            Of a dictionary of the columns of a partition.
        names : sequence of str
            Columns that it takes.
        """
        numbers = range(self.n_partitions)
        found = (
            (function(self._whole(number, names)) for number in numbers)
            if self.workers is None
            else self._on_workers(lambda _: partial(_of_columns, function=function), numbers, names)
        )
        return with_progress(zip(np.diff(self.offsets), found, strict=True), self.n_rows)

    def select(
        self, number: int, within: np.ndarray, names: Sequence[str]
    ) -> dict[str, np.ndarray]:
        """Columns of some rows of a partition, by their numbers within it."""
        kept = self._kept(number, tuple(names))
        return {name: values[within] for name, values in kept.items()}

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
            Where a column has another name, or has no numbers.
        TypeError
            Outside of the context of a model.
        """
        names = self._checked(names or None)
        self._check_numbers(names, "be in a model")
        first = self.read(0, whole_number("rows", rows, 2), names)
        variables = tuple(pm.Data(name, values) for name, values in first.items())
        for variable in variables:
            variable.tag.source_of_rows = self
        return variables if len(variables) > 1 else variables[0]

    def categories(self, name: str) -> np.ndarray:
        """Labels of a column of codes: code k stands for the label k.

        Raises
        ------
        RowsError
            Where a column has another name, or was not stored as categories.
        """
        self._checked([name])
        if name not in self.categorical:
            raise RowsError(
                f"The column `{name}` was not stored as categories, so it has no labels. "
                "Categories of parquet files and Dask dataframes have labels."
            )
        return self._labels_of(name)

    def _labels_of(self, name: str) -> np.ndarray:
        """Labels of one of the `categorical` columns."""
        raise NotImplementedError

    @property
    def categorical(self) -> frozenset[str]:
        """Names of the columns of codes that have labels."""
        return frozenset()

    def transform(
        self, function: TransformFunction, names: Sequence[str] | None = None
    ) -> TransformedRows:
        """Rows of which a function makes others, as they are read.

        Parameters
        ----------
        function : callable
            From a dictionary of columns, each an array with rows along the first axis, to such a
            dictionary, with as many rows. It is called for one partition after another, so each row
            of the result may depend on this row alone. It must not change the arrays in place.
        names : sequence of str, optional
            Columns that the function takes. The others stay as they are. By default it takes all,
            and the result has only what it returns.

        Returns
        -------
        TransformedRows

        Raises
        ------
        RowsError
            Where the function changes the number of rows, values are missing, or rows depend on
            others.
        TypeError
            Where it returns no dictionary.

        Examples
        --------
        >>> import numpy as np
        >>> from pymc_sgmcmc.sources import ArraySource
        >>> rows = ArraySource({"distance": np.array([1.0, 10.0, 100.0]), "y": np.arange(3)})
        >>> logs = rows.transform(
        ...     lambda columns: {"log": np.log10(columns["distance"])}, ["distance"]
        ... )
        >>> logs.read(1, 3)
        {'y': array([1, 2]), 'log': array([1., 2.])}
        """
        return TransformedRows(self, function, names)

    def standardise(self, name: str, *names: str) -> StandardisedRows:
        """Rows with columns shifted and scaled to mean 0 and standard deviation 1.

        This takes one pass over the rows. A column that is constant is shifted only: its scale is
        1. Each column of a matrix has its own mean and scale.

        Parameters
        ----------
        name, *names : str
            Columns. The others stay as they are.

        Returns
        -------
        StandardisedRows
            With the attributes `means` and `scales`.

        Raises
        ------
        RowsError
            Where a column has another name, no numbers, or a value that is not finite.

        Examples
        --------
        >>> import numpy as np
        >>> from pymc_sgmcmc.sources import ArraySource
        >>> rows = ArraySource({"x": np.array([1.0, 1.0, 5.0, 5.0])}, partition_rows=2)
        >>> standardised = rows.standardise("x")
        >>> standardised.means["x"], standardised.scales["x"]
        (array(3.), array(2.))
        >>> standardised.read(1, 3)["x"]
        array([-1.,  1.])
        """
        names = self._checked([name, *names])
        self._check_numbers(names, "be standardised")
        first = {name: values[0] for name, values in self.read(0, 1, names).items()}
        moments = {name: Moments(values) for name, values in first.items()}
        for number, sums in enumerate(self.mapped(partial(_sums, first=first), names)):
            for name, of_part in sums.items():
                moments[name].join(of_part)
                if not moments[name].are_finite:
                    raise RowsError(
                        f"The column `{name}` should have finite values to be standardised, but "
                        f"partition {number} has others. Leave these rows out of the data."
                    )
        return StandardisedRows(self, Standardisation(moments), names)

    def digest_of_ends(self) -> str:
        """Text that changes with the first and the last rows."""
        ends = (0, max(0, self.n_rows - HEAD_ROWS))
        return " ".join(_digest(self.read(start, start + HEAD_ROWS)) for start in ends)

    def __getstate__(self) -> dict:
        """Everything but the client, and the partition that was read last."""
        left_out = ("_last", "_at_hand", "client", "last_index")
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def _checked(self, names: Sequence[str] | None) -> tuple[str, ...]:
        names = tuple(self.columns) if names is None else tuple(names)
        unknown = [name for name in names if name not in self.columns]
        if unknown:
            raise RowsError(
                f"Columns should be of {quoted(list(self.columns))}, but got {quoted(unknown)}."
            )
        return names

    def _check_numbers(self, names: Sequence[str], purpose: str) -> None:
        columns = {name: self.columns[name] for name in names}
        remedy = "Make numbers of it by `transform`, or leave it out."
        check_numbers(columns, f" to {purpose}", remedy)

    def empty(self, names: Sequence[str], count: int) -> dict[str, np.ndarray]:
        """Columns of so many rows, whose values are still to be set."""
        return {
            name: np.empty((count, *self.columns[name][1]), dtype=self.columns[name][0])
            for name in names
        }

    def _kept(self, number: int, names: tuple[str, ...]) -> dict[str, np.ndarray]:
        """A partition, read where it is not that which was read last."""
        last = self._last  # one look, since another thread may read as well
        if last is None or last[:2] != (number, names):
            last = self._last = number, names, self._whole(number, names)
        return last[2]

    def _whole(self, number: int, names: Sequence[str]) -> dict[str, np.ndarray]:
        """A partition, of which no value is missing."""
        return self._plain(number, self.partition(number, names))

    def _plain(self, number: int, columns: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Columns of a partition as arrays without masks, of which no value is missing."""
        return without_missing(columns, int(self.offsets[number]), self.origin(number))


class DerivedRows(RowSource):
    """Rows that are made of those of a source, in the same partitions."""

    def __init__(self, source: RowSource):
        self._source, self.offsets = source, source.offsets
        self.memory, self.client = source.memory, source.client

    @abstractmethod
    def _needed(self, names: Sequence[str]) -> list[str]:
        """Columns of the source that given columns are made of."""

    @abstractmethod
    def _made_of(
        self, number: int, columns: dict[str, np.ndarray], names: Sequence[str]
    ) -> dict[str, np.ndarray]:
        """Given columns of a partition, from those that they are made of."""

    def origin(self, number: int) -> str:
        """That of the source."""
        return self._source.origin(number)

    def partition(self, number: int, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Columns that are made of a partition of the source."""
        return self._made_of(number, self._source._whole(number, self._needed(names)), names)

    def collection(self, number: int, names: Sequence[str]) -> Any:
        """That of the source."""
        return self._source.collection(number, self._needed(names))

    def from_result(self, result: Any, number: int, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Columns that are made of a partition of the source."""
        columns = self._source.from_result(result, number, self._needed(names))
        return self._made_of(number, columns, names)

    def select(
        self, number: int, within: np.ndarray, names: Sequence[str]
    ) -> dict[str, np.ndarray]:
        """Columns that are made of some rows of a partition, and of no others."""
        columns = self._source.select(number, within, self._needed(names))
        return self._made_of(number, columns, names)


class TransformedRows(DerivedRows):
    """Rows that a function makes of those of a source, see `RowSource.transform`.

    Parameters
    ----------
    source : RowSource
    function : callable
    names : sequence of str, optional
        Columns that the function takes, all where not given.
    """

    def __init__(
        self, source: RowSource, function: TransformFunction, names: Sequence[str] | None = None
    ):
        super().__init__(source)
        self._function, self._taken = function, source._checked(names or None)
        first = source.read(0, HEAD_ROWS, self._taken)
        made = self._call(first)
        self._check_rows_alone(first, made)
        kept = [name for name in source.columns if name not in {*self._taken, *made}]
        self._made = {name: (values.dtype, values.shape[1:]) for name, values in made.items()}
        self.columns = {name: source.columns[name] for name in kept} | self._made
        self._first_rows = _digest(made)

    @property
    def categorical(self) -> frozenset[str]:
        """Those of the source that the function does not make."""
        return self._source.categorical & (set(self.columns) - set(self._made))

    def _labels_of(self, name: str) -> np.ndarray:
        return self._source.categories(name)

    # The function gets whole partitions, so that its results have the same bits.
    select = RowSource.select

    def signature(self) -> str:
        """That of the source, and a digest of what the function makes of the first rows."""
        return f"{self._source.signature()}; transformed: {self._first_rows}"

    def _needed(self, names: Sequence[str]) -> list[str]:
        kept = [name for name in names if name not in self._made]
        return kept if len(kept) == len(names) else list(dict.fromkeys([*kept, *self._taken]))

    def _made_of(
        self, number: int, columns: dict[str, np.ndarray], names: Sequence[str]
    ) -> dict[str, np.ndarray]:
        made: dict[str, np.ndarray] = {}
        if not self._made.keys().isdisjoint(names):
            taken = {name: columns[name] for name in self._taken}
            count = len(next(iter(taken.values())))
            if count:
                made = self._call(taken, int(self.offsets[number]))
                remedy = "The function should return the same type and shape for all rows."
                check_partition(made, self._made, count, number, remedy)
            else:
                made = {
                    name: np.empty((0, *shape), type_)
                    for name, (type_, shape) in self._made.items()
                }
        return {name: (made if name in self._made else columns)[name] for name in names}

    def _call(self, columns: dict[str, np.ndarray], first: int = 0) -> dict[str, np.ndarray]:
        """Result of the function, with as many rows as it was given, from a first number on."""
        given = {name: values.view() for name, values in columns.items()}
        for values in given.values():
            values.flags.writeable = False  # they may be the user's own arrays
        made = self._function(given)
        if not isinstance(made, Mapping) or not made:
            raise TypeError(
                "The function should return a dictionary with at least one column, but returned "
                f"{type(made).__name__}. Return arrays by name."
            )
        count = len(next(iter(given.values())))
        arrays = {name: np.asanyarray(values) for name, values in made.items()}
        for name, values in arrays.items():
            if values.shape[:1] != (count,):
                raise RowsError(
                    f"The function should return as many rows as it got, {count}, but `{name}` has "
                    f"the shape {values.shape}. Leave rows out of the data before, not here."
                )
        return without_missing(arrays, first, "what the function returns")

    def _check_rows_alone(self, first: dict[str, np.ndarray], made: dict[str, np.ndarray]) -> None:
        """Refuse a function whose rows depend on the rows beside them, such as a centred column."""
        count = len(next(iter(made.values())))
        for start in np.linspace(0, max(count - 2, 0), ALONE).astype(int):
            pair = slice(start, start + 2)
            alone = self._call({name: values[pair] for name, values in first.items()}, start)
            for name, values in made.items():
                if not _alike(alone.get(name), values[pair]):
                    raise RowsError(
                        f"The function should make each row of `{name}` of this row alone, but row "
                        f"{start} depends on the rows beside it. Compute what it needs of all rows "
                        "before; `standardise` does so for means."
                    )


class StandardisedRows(TransformedRows):
    """Rows with standardised columns, see `RowSource.standardise`.

    Attributes
    ----------
    means, scales : dict of str to numpy.ndarray
        What each standardised column was shifted by, and then divided by.
    """

    def __init__(self, source: RowSource, function: Standardisation, names: Sequence[str]):
        super().__init__(source, function, names)
        self.means, self.scales = function.means, function.scales

    # Only chosen rows are standardised, with the same bits as in their partition.
    select = DerivedRows.select


def _selected(
    source: RowSource, result: Any, number: int, names: Sequence[str], *, within: np.ndarray
) -> dict[str, np.ndarray]:
    return source.select_from(result, number, within, names)


def _of_columns(
    source: RowSource, result: Any, number: int, names: Sequence[str], *, function: Callable
) -> Any:
    return function(source.from_result(result, number, names))


def _sums(columns: Mapping[str, np.ndarray], *, first: Mapping[str, np.ndarray]) -> dict[str, Sums]:
    """Sums of a partition, relative to the first row of all."""
    return {name: sums_of(values, first[name]) for name, values in columns.items()}


def _alike(values: np.ndarray | None, others: np.ndarray) -> bool:
    """Whether two arrays are equal up to rounding."""
    if values is None or values.shape != others.shape:
        return False
    if values.dtype.kind == "f":
        largest = np.max(np.abs(others[np.isfinite(others)]), initial=0)
        return np.allclose(values, others, rtol=1e-3, atol=1e-5 * largest, equal_nan=True)
    return np.array_equal(values, others)


def _digest(columns: Mapping[str, np.ndarray]) -> str:
    """Text that changes with any value of some columns."""
    digest = sha256()
    for name, values in columns.items():
        digest.update(f"{name} {values.dtype} {values.shape}".encode())
        numbers = values.dtype.kind in NUMBERS
        digest.update(values.tobytes() if numbers else repr(values.tolist()).encode())
    return digest.hexdigest()[:16]
