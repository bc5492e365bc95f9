"""Groups as rows, whose records are rows of a source."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from pymc.model import Model
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Variable
from pytensor.graph.traversal import ancestors

from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.posterior.reading import before_casts
from pymc_sgmcmc.posterior.row_access import RowAccess
from pymc_sgmcmc.posterior.rows import RowLeaf, SeparatedModel, keep_whole
from pymc_sgmcmc.posterior.threads import OfRows, in_order
from pymc_sgmcmc.sources import RowSource
from pymc_sgmcmc.sources.group_index import GroupIndex, index_of_groups, segments
from pymc_sgmcmc.sources.schema import PARTITION_BYTES, row_bytes
from pymc_sgmcmc.stages import with_progress

NOT_HELD = np.iinfo(np.int64).max // 2
"""Place of the first record of a group whose records are not in memory. No array is as long, so
that taking such a record is an error of NumPy."""

READING_BYTES = 32
"""Bytes of a record that reading takes beside its columns, for its number and orders of these."""

_log = logging.getLogger("pymc.sgmcmc")  # below PyMC's logger, so that its settings hold


class GroupsOfSource(RowAccess):
    """Rows that are groups, of which records in a source are read group by group.

    Arrays of some groups are their numbers, the place of the first record of each group, and the
    columns of the records, group after group. All rows share the last ones: no row has a part of
    them of its own.

    Parameters
    ----------
    source : RowSource
    column : str
        Column with the codes of the groups.
    n_groups : int

    Attributes
    ----------
    index : GroupIndex
    n_rows : int
        Number of groups.
    """

    def __init__(self, source: RowSource, column: str, n_groups: int):
        self.source, self.column, self.n_rows = source, column, n_groups
        self.index: GroupIndex = index_of_groups(source, column, n_groups)
        self.starts = self._kept(np.full(n_groups, NOT_HELD), "starts")
        self._columns: dict[str, SharedVariable] = {}

    def whole(self, name: str, values: np.ndarray) -> SharedVariable:
        """The column of the records of the groups that `hold` names.

        Parameters
        ----------
        name : str
        values : numpy.ndarray
            First rows of the column, in the type that the model has.
        """
        if name not in self._columns:
            mean_count = float(self.index.counts.mean())
            self._columns[name] = self._kept(values[:0], name, mean_count * values[0].size)
        return self._columns[name]

    def _kept(self, values: np.ndarray, name: str, elements_a_row: float = 0.0) -> SharedVariable:
        shared = keep_whole(values, name, elements_a_row)
        shared.tag.groups_of_source = self
        return shared

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns."""
        return tuple(self._columns)

    @property
    def shared(self) -> tuple[SharedVariable, ...]:
        """The arrays that all rows share."""
        return self.starts, *self._columns.values()

    # --- Reading -----------------------------------------------------------------------------

    def take(self, selection: slice | np.ndarray) -> list[np.ndarray]:
        """Numbers of groups, places of their first records, and columns of the records."""
        if isinstance(selection, slice):
            numbers = np.arange(*selection.indices(self.n_rows))
        else:
            numbers = np.asarray(selection, dtype=np.int64)
        groups = np.unique(numbers)
        starts = np.full(self.n_rows, NOT_HELD)
        counts = self.index.counts[groups]
        starts[groups] = np.cumsum(counts) - counts
        return [numbers, starts, *self._read(self.index.rows_of(groups))]

    def rows_of_source(self, numbers: np.ndarray) -> np.ndarray:
        """Numbers of the rows of the source that `take` reads."""
        return self.index.rows_of(np.unique(numbers))

    def not_finite_in(self, group: int) -> str | None:
        """A number in the records of a group that is not finite, in words; None without any."""
        rows = self.index.rows_of(np.array([group]))
        for name, values in self.source.take(rows, self.names).items():
            wrong = ~np.isfinite(values).reshape(len(rows), -1)
            if wrong.any():
                row = int(rows[np.argmax(wrong.any(axis=1))])
                partition = int(np.searchsorted(self.source.offsets, row, side="right")) - 1
                value = values.reshape(-1)[wrong.ravel()][0]
                return (
                    f"the column `{name}` has {value} in row {row}, in "
                    f"{self.source.origin(partition)}"
                )
        return None

    def _read(self, rows: np.ndarray) -> list[np.ndarray]:
        found = self.source.take(rows, self.names)
        return [
            np.ascontiguousarray(found[name], dtype=shared.dtype)
            for name, shared in self._columns.items()
        ]

    def part(self, rows: Sequence[np.ndarray], selection: slice | np.ndarray) -> list[np.ndarray]:
        """Some of the groups that were taken."""
        numbers, *shared = rows
        return [np.ascontiguousarray(numbers[selection]), *shared]

    def joined(
        self, first: Sequence[np.ndarray], start: int, second: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Groups that were taken, those of the first ones from a place on, and the second ones."""
        before, second_starts = first[0][start:], second[1]
        missing = np.setdiff1d(before, second[0])
        counts = self.index.counts[missing]
        places = segments(first[1][missing], counts)
        starts = second_starts.copy()
        starts[missing] = len(second[2]) + np.cumsum(counts) - counts
        columns = [
            np.concatenate([values, earlier[places]])
            for earlier, values in zip(first[2:], second[2:], strict=True)
        ]
        return [np.concatenate([before, second[0]]), starts, *columns]

    # --- Passes ------------------------------------------------------------------------------

    def each(self, function: OfRows, value: Any, length: int, threads: int) -> Iterator[Any]:
        """Results of a function of a value and of so many groups after the others, in order."""
        parts = [
            np.arange(start, min(start + length, self.n_rows))
            for start in range(0, self.n_rows, length)
        ]
        pieces = ([part, *shared] for part, shared in self._with_records(parts))
        found = in_order(function, value, pieces, threads)
        return with_progress(zip(map(len, parts), found, strict=True), self.n_rows)

    def _with_records(
        self, parts: Sequence[np.ndarray]
    ) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
        """Parts of the groups, and arrays with their records.

        The records of as many consecutive parts as fit into memory are read together, since
        records that lie in no order of groups take a pass over the source each time.
        """
        for stretch in self._stretches(parts):
            _, *shared = self.take(np.concatenate([np.empty(0, np.int64), *stretch]))
            for part in stretch:
                yield part, shared

    def _stretches(self, parts: Sequence[np.ndarray]) -> Iterator[list[np.ndarray]]:
        stretch: list[np.ndarray] = []
        size = 0
        for part in parts:
            of_part = int(self.index.counts[part].sum()) * self._bytes_of_reading
            if stretch and size + of_part > self._most_bytes:
                yield stretch
                stretch, size = [], 0
            stretch.append(part)
            size += of_part
        if stretch:
            yield stretch

    @property
    def _most_bytes(self) -> int:
        """Bytes that are read together in a pass."""
        if self.index.order is None:
            return min(self.source.memory, PARTITION_BYTES)
        return self.source.memory

    @property
    def record_bytes(self) -> int:
        """Bytes of a record in memory."""
        return row_bytes(
            {name: (np.dtype(v.dtype), v.type.shape[1:]) for name, v in self._columns.items()}
        )

    @property
    def _bytes_of_reading(self) -> int:
        of_source = row_bytes({name: self.source.columns[name] for name in self.names})
        return self.record_bytes + of_source + READING_BYTES

    def tell_of_passes(self) -> None:
        """Log how often a pass over the groups reads the source, where that is more than once."""
        size = self.source.n_rows * self._bytes_of_reading
        if self.index.order is not None and size > self._most_bytes:
            _log.info(
                "The rows do not lie in the order of `%s`, so each pass over the groups reads them "
                "%d times. Sort the data by this column, or give more `memory` to `open_rows`.",
                self.column,
                -(-size // self._most_bytes),
            )

    # --- Records in the shared variables -----------------------------------------------------

    def hold(self, numbers: np.ndarray) -> None:
        """Put the records of groups into the shared variables, where they are not there."""
        held = self.starts.get_value(borrow=True)
        if len(held) and (held[numbers] < NOT_HELD).all():
            return
        self._hold(self.take(numbers)[1:])

    def each_held(self, parts: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
        """Parts of the groups, with their records in the shared variables meanwhile."""
        present: list[np.ndarray] | None = None
        try:
            for part, shared in self._with_records(parts):
                if shared is not present:
                    self._hold(shared)
                    present = shared
                yield part
        finally:
            self.release()

    def release(self) -> None:
        """Leave no records in the shared variables."""
        nothing = [np.empty((0, *v.type.shape[1:]), v.dtype) for v in self.shared]
        self._hold(nothing)

    def _hold(self, arrays: Sequence[np.ndarray]) -> None:
        for shared, values in zip(self.shared, arrays, strict=True):
            shared.set_value(values, borrow=True)


def column_of(variable: Variable) -> tuple[RowSource, str] | None:
    """Source and column whose first rows a variable of a model has, None for others.

    A column in another type counts as well.
    """
    variable = before_casts(variable)
    source = getattr(variable.tag, "source_of_rows", None)
    if source is None or variable.name not in source.columns:
        return None
    return source, str(variable.name)


def groups_of_source(variables: Sequence[Variable]) -> GroupsOfSource | None:
    """The groups whose records some variables depend on, None where these are in memory."""
    for variable in ancestors(variables):
        groups = getattr(variable.tag, "groups_of_source", None)
        if groups is not None:
            return groups
    return None


def mark_groups(model: Model, groups: GroupsOfSource) -> None:
    """Note in a model of groups where the records of these are."""
    model.observed_RVs[-1].tag.groups_of_source = groups


def check_source(groups: GroupsOfSource, rows: Any) -> None:
    """Refuse other rows than those that a model of groups was written on.

    Raises
    ------
    ModelError
    """
    same = isinstance(rows, RowSource) and (
        rows is groups.source
        or (rows.columns == groups.source.columns and rows.signature() == groups.source.signature())
    )
    if not same:
        given = "another source" if isinstance(rows, RowSource) else repr(rows)
        raise ModelError(
            "The records of the groups are in the source whose method `head` gave the data of the "
            f"model, and `rows` should be this source, but is {given}. Pass it, for example "
            "`SGLDCV(rows=rows)`."
        )


def on_groups(separated: SeparatedModel, groups: GroupsOfSource) -> SeparatedModel:
    """A model whose rows are groups, with the arrays that all rows share as further leaves."""
    shared = tuple(
        RowLeaf(str(v.name), (v,), np.empty((0, *v.type.shape[1:]), v.dtype), shared_by_rows=True)
        for v in groups.shared
    )
    return replace(separated, leaves=(*separated.leaves, *shared), first_rows_only=True)
