"""How a posterior reads its rows: arrays in memory, or a source that is read in parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from pymc.model import Model

from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.posterior.rows import RowLeaf, SeparatedModel
from pymc_sgmcmc.posterior.threads import OfRows, in_order, read_ahead
from pymc_sgmcmc.sources import RowSource, cluster
from pymc_sgmcmc.sources.arrays import joined
from pymc_sgmcmc.stages import with_progress


class RowAccess(ABC):
    """Rows of several arrays by their numbers. They have a part of each array of their own."""

    n_rows: int

    @abstractmethod
    def take(self, selection: slice | np.ndarray) -> list[np.ndarray]:
        """The given rows of all arrays, contiguous."""

    @abstractmethod
    def each(self, function: OfRows, value: Any, length: int, threads: int) -> Iterator[Any]:
        """Results of a function of a value and of so many rows after the others, in order."""

    def part(self, rows: Sequence[np.ndarray], selection: slice | np.ndarray) -> list[np.ndarray]:
        """Some of the rows that were taken."""
        return [values[selection] for values in rows]

    def joined(
        self, first: Sequence[np.ndarray], start: int, second: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Rows that were taken, those of the first ones from a place on, and the second ones."""
        return joined(first, start, second)


class RowsInMemory(RowAccess):
    """Rows of arrays with a common leading length."""

    def __init__(self, arrays: Sequence[np.ndarray], n_rows: int):
        self.arrays, self.n_rows = tuple(arrays), n_rows

    def take(self, selection: slice | np.ndarray) -> list[np.ndarray]:
        """The given rows of all arrays, contiguous."""
        return [np.ascontiguousarray(values[selection]) for values in self.arrays]

    def each(self, function: OfRows, value: Any, length: int, threads: int) -> Iterator[Any]:
        """Results of a function of a value and of so many rows after the others, in order."""
        return in_order(function, value, _ranges(self, length), threads)


def _ranges(access: RowAccess, length: int) -> Iterator[list[np.ndarray]]:
    """All rows in order, so many at a time."""
    for start in range(0, access.n_rows, length):
        yield access.take(slice(start, start + length))


class _Pieces(NamedTuple):
    """What a partition adds to a pass.

    Attributes
    ----------
    head : list of numpy.ndarray
        Rows before the first range that begins in the partition, of a range that began before.
    results : list
        Results of the ranges that are whole.
    tail : list of numpy.ndarray
        Rows of a range that goes on in the next partition.
    """

    head: list[np.ndarray]
    results: list[Any]
    tail: list[np.ndarray]


class RowsOfSource(RowAccess):
    """Rows of columns of a source, in the types that the model has.

    Parameters
    ----------
    source : RowSource
    columns : mapping of str to numpy.dtype
        Names of columns, and their types in the model.
    """

    def __init__(self, source: RowSource, columns: dict[str, np.dtype]):
        self.source, self._columns, self.n_rows = source, columns, source.n_rows
        self._kept: tuple[Any, Any, Any] | None = None

    def take(self, selection: slice | np.ndarray) -> list[np.ndarray]:
        """The given rows of all columns, contiguous."""
        names = list(self._columns)
        if isinstance(selection, slice):
            start, stop, _ = selection.indices(self.n_rows)
            if self.source.workers is None:
                rows = self.source.read(start, stop, names)
            else:
                rows = self.source.take(np.arange(start, stop), names)
        else:
            rows = self.source.take(selection, names)
        return self._as_in_model(rows)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns."""
        return tuple(self._columns)

    def _as_in_model(self, rows: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        return [
            np.ascontiguousarray(rows[name], dtype=dtype) for name, dtype in self._columns.items()
        ]

    def each(self, function: OfRows, value: Any, length: int, threads: int) -> Iterator[Any]:
        """Results of a function of a value and of so many rows after the others, in order.

        Where the source has a client, the function runs where the partitions are. The ranges of
        rows are the same, and so are the results.
        """
        counts = (min(length, self.n_rows - start) for start in range(0, self.n_rows, length))
        client = self.source.workers
        found = (
            in_order(function, value, self._ranges(length, threads), threads)
            if client is None
            else self._each_on(client, function, value, length)
        )
        return with_progress(zip(counts, found, strict=True), self.n_rows)

    def _ranges(self, length: int, threads: int) -> Iterator[list[np.ndarray]]:
        """All rows, of which a partition is read ahead where several threads compute."""
        ranges = _ranges(self, length)
        if threads == 1:
            return ranges
        return read_ahead(ranges, 1 + int(np.diff(self.source.offsets).max()) // length)

    def _each_on(self, client: Any, function: OfRows, value: Any, length: int) -> Iterator[Any]:
        offsets = self.source.offsets
        touched = [
            number for number in range(self.source.n_partitions) if self.source.count(number)
        ]

        def submitted() -> Iterator[Any]:
            """Futures of the results of whole ranges, and of that which ends after them."""
            sent = self._sent(client, value)
            task = cluster.send(client, function)
            open_pieces: list[Any] = []
            for number in touched:
                start, stop = int(offsets[number]), int(offsets[number + 1])
                pieces = cluster.submit(
                    client,
                    "pass",
                    _pieces,
                    task,
                    sent,
                    self.source.started(client, number, self.names),
                    number,
                    (-start) % length,
                    length,
                )
                ends = -(-start // length) * length <= stop
                if start % length:
                    open_pieces.append(cluster.submit(client, "pass", attrgetter("head"), pieces))
                    if ends:
                        yield cluster.submit(client, "pass", _joined, task, sent, open_pieces)
                        open_pieces = []
                if ends:
                    yield cluster.submit(client, "pass", attrgetter("results"), pieces)
                    open_pieces = [cluster.submit(client, "pass", attrgetter("tail"), pieces)]
            if self.n_rows % length:
                yield cluster.submit(client, "pass", _joined, task, sent, open_pieces)

        for results in cluster.results(client, submitted):
            yield from results

    def _sent(self, client: Any, value: Any) -> Any:
        """Future of a parcel with these rows and a value, which is kept for the next pass."""
        kept = self._kept
        if (
            kept is None
            or kept[0] is not value
            or kept[1] is not client
            or not cluster.is_there(kept[2])
        ):
            kept = self._kept = value, client, cluster.send(client, (self, value))
        return kept[2]

    def __getstate__(self) -> dict:
        return {**vars(self), "_kept": None}


def _pieces(
    function: OfRows,
    sent: tuple[RowsOfSource, Any],
    result: Any,
    number: int,
    first: int,
    length: int,
) -> _Pieces:
    """Results of the ranges of a partition, of which the first begins at its row `first`."""
    access, value = sent
    rows = access._as_in_model(access.source.from_result(result, number, access.names))
    count = len(rows[0])
    first = min(first, count)
    end = first + (count - first) // length * length
    return _Pieces(
        [values[:first] for values in rows],
        [
            # Copies, since BLAS may round otherwise where rows are aligned otherwise.
            function(value, [values[start : start + length].copy() for values in rows])
            for start in range(first, end, length)
        ],
        [values[end:] for values in rows],
    )


def _joined(
    function: OfRows, sent: tuple[RowsOfSource, Any], pieces: list[list[np.ndarray]]
) -> list[Any]:
    """Result of a range whose rows are in several partitions."""
    rows = [np.concatenate(parts) for parts in zip(*pieces, strict=True)]
    return [function(sent[1], rows)]


def names_of_source(source: RowSource, data_variables: Sequence[str]) -> list[str]:
    """Names of the data variables of a model that are columns of a source.

    Raises
    ------
    ModelError
        Where there are none.
    """
    names = [name for name in data_variables if name in source.columns]
    if not names:
        raise ModelError(
            "The model should have data variables with the names of columns of `rows`, of "
            f"{', '.join(f'`{name}`' for name in source.columns)}, but has none. Write it on what "
            '`rows.head("...")` returns.'
        )
    return names


def on_source(
    separated: SeparatedModel, source: RowSource
) -> tuple[SeparatedModel, dict[str, np.dtype]]:
    """A model on the first rows of a source, with one leaf a column, and the types of the columns.

    Columns whose first rows are alike are one leaf where the data are all in memory.

    Raises
    ------
    ModelError
        Where an array of as many rows is no column of the source.
    """
    leaves: dict[str, RowLeaf] = {}
    for leaf in separated.leaves:
        for variable in leaf.variables:
            alone = replace(leaf, variables=(variable,))
            name = next((origin.name for origin in alone.sources()), None)
            if name is None or name not in source.columns:
                raise no_column(leaf.name, separated.n_rows)
            if name in leaves:
                variables = (*leaves[name].variables, variable)
                leaves[name] = replace(leaves[name], variables=variables)
            else:
                leaves[name] = replace(alone, name=name)
    for name, leaf in leaves.items():
        _, shape = source.columns[name]
        if leaf.axis or leaf.values.shape[1:] != shape:
            raise ModelError(
                f"The data `{name}` should have the shape (rows, {', '.join(map(str, shape))}) of "
                f"the column of `rows`, but {leaf.values.shape} was found. Pass what `rows.head` "
                "returned."
            )
        _check_first_rows(leaf, source)
    columns = {name: leaf.values.dtype for name, leaf in leaves.items()}
    separated = replace(separated, leaves=tuple(leaves.values()), first_rows_only=True)
    return separated, columns


def no_column(name: str, n_rows: int) -> ModelError:
    """Error for data that are as long as the first rows of a source, and not in it."""
    return ModelError(
        f"The data `{name}` have as many rows as those that `rows.head` returned, {n_rows}, but "
        "are no column of `rows`. Add a column to `rows`, or choose another number of rows in "
        "`rows.head`."
    )


def _check_first_rows(leaf: RowLeaf, source: RowSource) -> None:
    """Refuse data of the user's own with the name of a column, but with other values.

    Raises
    ------
    ModelError
    """
    if all(hasattr(origin.tag, "source_of_rows") for origin in leaf.sources()):
        return
    first = source.read(0, len(leaf.values), [leaf.name])[leaf.name].astype(leaf.values.dtype)
    if not np.array_equal(first, leaf.values, equal_nan=leaf.values.dtype.kind == "f"):
        raise ModelError(
            f"The data `{leaf.name}` have the name of a column of `rows`, but not the values of "
            "its first rows, so that the model would get other data. Change columns by "
            "`rows.transform`, and write the model on what `rows.head` returns."
        )


def refuse_first_rows(model: Model) -> None:
    """Refuse a model on the first rows of a source, where the source is not given.

    Raises
    ------
    ModelError
    """
    for variable in model.data_vars:
        source = getattr(variable.tag, "source_of_rows", None)
        count = len(variable.get_value(borrow=True)) if source is not None else 0
        if source is not None and count < source.n_rows:
            raise ModelError(
                f"The data `{variable.name}` are the first {count} of {source.n_rows} rows of a "
                "source, and the others would be left out. Pass the source as `rows`, for example "
                "`SGLDCV(rows=rows)`, or write the model on arrays of all rows."
            )
