"""Which rows of a source belong to which group, by a column of codes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from pymc_sgmcmc.errors import RowsError
from pymc_sgmcmc.sources.base import RowSource

_log = logging.getLogger("pymc.sgmcmc")  # below PyMC's logger, so that its settings hold


@dataclass(frozen=True, eq=False)
class GroupIndex:
    """Numbers of the rows of each group.

    It takes 16 bytes a group. Where the rows do not lie in the order of their groups it takes 4
    bytes a row as well, or 8 with more than 2 147 483 647 rows.

    Attributes
    ----------
    counts : numpy.ndarray of int, shape (groups,)
        Number of rows of each group.
    order : numpy.ndarray of int, shape (rows,), optional
        Numbers of the rows, group after group, and in the order of the source within a group. None
        where they are 0, 1, ...
    """

    counts: np.ndarray
    order: np.ndarray | None

    @cached_property
    def starts(self) -> np.ndarray:
        """Place of the first row of each group where rows lie group after group."""
        return np.cumsum(self.counts) - self.counts

    def rows_of(self, groups: np.ndarray) -> np.ndarray:
        """Numbers of the rows of some groups, group after group.

        Examples
        --------
        >>> index = GroupIndex(np.array([2, 0, 1]), np.array([0, 2, 1]))
        >>> index.rows_of(np.array([2, 0]))
        array([1, 0, 2])
        """
        places = segments(self.starts[groups], self.counts[groups])
        return places if self.order is None else self.order[places].astype(np.int64)


def segments(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Whole numbers from each start, so many of them, one segment after the other.

    Examples
    --------
    >>> segments(np.array([5, 0]), np.array([2, 3]))
    array([5, 6, 0, 1, 2])
    """
    shifts = starts - (np.cumsum(counts) - counts)
    return np.repeat(shifts, counts) + np.arange(counts.sum())


def index_of_groups(source: RowSource, column: str, n_groups: int) -> GroupIndex:
    """Index of the groups of a column of codes, which takes one or two passes over it alone.

    The second pass is for rows that do not lie in the order of their groups. The index that was
    made last is kept with the source.

    Raises
    ------
    RowsError
        Where codes are no whole numbers from 0 to the number of groups.
    """
    kept = source.last_index
    if kept is not None and kept[:2] == (column, n_groups):
        return kept[2]
    counts, in_order = _counts(source, column, n_groups)
    order = None if in_order else _order(source, column, counts)
    index = GroupIndex(counts, order)
    source.last_index = column, n_groups, index
    empty = int((counts == 0).sum())
    if empty:
        _log.info(
            "%d of %d groups have no rows by the column `%s`, and say nothing of other variables.",
            empty,
            n_groups,
            column,
        )
    return index


def _counts(source: RowSource, column: str, n_groups: int) -> tuple[np.ndarray, bool]:
    """Number of rows of each group, and whether the rows lie in the order of their groups."""
    counts, in_order, last = np.zeros(n_groups, dtype=np.int64), True, 0
    for number, codes in _codes(source, column):
        lowest, highest = int(codes.min()), int(codes.max())
        if lowest < 0 or highest >= n_groups:
            raise _out_of_range(source, column, number, codes, n_groups)
        counts[lowest : highest + 1] += np.bincount(codes - lowest)
        in_order = in_order and codes[0] >= last and bool((np.diff(codes) >= 0).all())
        last = int(codes[-1])
    return counts, in_order


def _order(source: RowSource, column: str, counts: np.ndarray) -> np.ndarray:
    """Numbers of the rows, group after group."""
    type_ = np.int32 if source.n_rows <= np.iinfo(np.int32).max else np.int64
    order = np.empty(source.n_rows, dtype=type_)
    following = np.cumsum(counts) - counts  # the place of the next row of each group
    for number, codes in _codes(source, column):
        within = np.argsort(codes, kind="stable")
        present, found = np.unique(codes, return_counts=True)
        order[segments(following[present], found)] = source.offsets[number] + within
        following[present] += found
    return order


def _codes(source: RowSource, column: str) -> Iterator[tuple[int, np.ndarray]]:
    """Number of each partition that has rows, and its codes as 64-bit integers."""
    for number, codes in enumerate(source.mapped(partial(_column, name=column), [column])):
        if len(codes):
            yield number, _whole(source, column, number, codes)


def _column(columns: Mapping[str, np.ndarray], *, name: str) -> np.ndarray:
    return columns[name]


def _whole(source: RowSource, column: str, number: int, codes: np.ndarray) -> np.ndarray:
    """Codes as integers.

    Raises
    ------
    RowsError
        Where they are no whole numbers.
    """
    with np.errstate(invalid="ignore"):
        whole = codes.astype(np.int64)
    wrong = whole != codes
    if codes.dtype.kind == "f" and wrong.any():
        place = int(np.argmax(wrong))
        raise RowsError(
            f"The column `{column}` should have whole numbers, which number the groups, but row "
            f"{int(source.offsets[number]) + place}, in {source.origin(number)}, has "
            f"{codes[place]}. Leave such rows out, or number the groups from 0."
        )
    return whole


def _out_of_range(
    source: RowSource, column: str, number: int, codes: np.ndarray, n_groups: int
) -> RowsError:
    """Error for a partition with a code below zero or beyond the groups."""
    place = int(np.argmax((codes < 0) | (codes >= n_groups)))
    remedy = (
        "Leave out rows without a group, whose code is often -1."
        if codes[place] < 0
        else "Give the local variables an entry for each group, or number the groups from 0."
    )
    return RowsError(
        f"The column `{column}` should have codes of groups from 0 to {n_groups - 1}, but row "
        f"{int(source.offsets[number]) + place}, in {source.origin(number)}, has the code "
        f"{codes[place]}. {remedy}"
    )
