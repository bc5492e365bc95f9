"""Parts of rows, over which the log density of a model has to be a sum.

A statistic of a column, such as its largest value or mean, may be the same in all parts of a few
random rows, and differ in others. So the parts are chosen by the data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

FEW_ROWS = 24
"""So many random rows are compared with two parts of them. It is a compromise between the time of
the check and the chance to meet a row that the split treats wrongly."""

MOST_APART = 100
"""At most so many rows that differ are added up. Continuous columns differ in any two rows, and of
an indicator one that is not zero is looked for."""

MOST_ALONE = 8
"""So many of these rows are added up one by one, and of more rows half of them and the others, for
each bit of their places. A model may take long for a single row."""

MOST_EXTREMES = 50
"""The rows with the least and largest values are looked for in so many columns of each array."""

LONG_ROW = 1000
"""The time for a row is then that of its elements."""

BLOCK_ELEMENTS = 1_000_000
"""Passes over the data look at so many array elements at a time."""


@dataclass(frozen=True)
class Comparison:
    """Rows, parts of them that should add up to them, and what it means where they do not.

    Attributes
    ----------
    rows : numpy.ndarray of int
    parts : sequence of numpy.ndarray of int
    reason : str
    by_value : bool
        Whether the rows were chosen by their values.
    """

    rows: np.ndarray
    parts: Sequence[np.ndarray]
    reason: str
    by_value: bool = True


def comparisons(
    arrays: Sequence[np.ndarray],
    sampled: np.ndarray,
    others: np.ndarray | None,
    rng: np.random.Generator,
) -> list[Comparison]:
    """Rows and parts of them to be compared.

    Parameters
    ----------
    arrays : sequence of numpy.ndarray
        The data, with the rows along the first axis.
    sampled : numpy.ndarray of int
        Random rows.
    others : numpy.ndarray of int or None
        Many rows, all of them for example, where they are compared as well.
    rng : numpy.random.Generator
        For two random parts of these.
    """
    # The two parts have different lengths, since equal lengths would hide an array that still has
    # the old length and broadcasts.
    reason = "two parts of a few rows do not add up to these rows"
    found = [Comparison(sampled, _thirds(sampled), reason, by_value=False)]
    apart = rows_that_differ(arrays, sampled[:2])
    alone = apart[:MOST_ALONE]
    reason = "single rows do not add up to these rows"
    found.append(Comparison(alone, list(alone[:, None]), reason))
    if len(apart) > MOST_ALONE:
        places = np.arange(len(apart))
        reason = "two parts of rows that differ do not add up to these rows"
        for bit in range(int(places[-1]).bit_length()):
            is_set = (places >> bit) % 2 == 1
            found.append(Comparison(apart, (apart[is_set], apart[~is_set]), reason))
    extremes = np.setdiff1d(extreme_rows(arrays), apart)
    if len(extremes):
        both = np.concatenate([apart, extremes])
        reason = "rows with extreme values of a column change others"
        found.append(Comparison(both, (apart, extremes), reason))
    if others is not None and len(others) > FEW_ROWS:
        parts = [others[np.sort(part)] for part in _thirds(rng.permutation(len(others)))]
        reason = "two parts of the rows do not add up to all of them"
        found.append(Comparison(others, parts, reason, by_value=False))
    return found


def _thirds(rows: np.ndarray) -> list[np.ndarray]:
    first = max(1, len(rows) // 3)
    return [part for part in (rows[:first], rows[first:]) if len(part)]


def blocks_of(array: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """First row of each block of rows, and the block as a matrix."""
    width = array[0].size
    step = max(1, BLOCK_ELEMENTS // max(1, width))
    for start in range(0, len(array), step):
        block = array[start : start + step]
        yield start, block.reshape(len(block), width)


def rows_that_differ(arrays: Sequence[np.ndarray], rows: Iterable[int]) -> np.ndarray:
    """Numbers of the given rows, and of others that differ from the first of them.

    Each column in which not all rows are equal has another value in one of the rows, as long as
    these are at most `MOST_APART`.

    Examples
    --------
    >>> rows_that_differ([np.eye(5)], [0]).tolist()
    [0, 1, 2, 3, 4]
    """
    chosen = [int(row) for row in rows]
    for array in arrays:
        width = array[0].size
        first = array[chosen[0]].reshape(width)
        same = np.flatnonzero((array[chosen].reshape(len(chosen), width) == first).all(0))
        for start, block in blocks_of(array):
            if not len(same) or len(chosen) >= MOST_APART:
                break
            differ = block[:, same] != first[same]
            found = differ.any(0)
            places = start + np.unique(differ.argmax(0)[found])
            chosen.extend(int(place) for place in places[: MOST_APART - len(chosen)])
            same = same[~found]
    return np.array([*dict.fromkeys(chosen)])


def _of_columns(function: np.ufunc, block: np.ndarray) -> np.ndarray:
    """Least or largest value of each column of a matrix.

    NumPy takes four times as long for short rows, so several of them are one at first.
    """
    rows, width = block.shape
    together = min(rows, max(1, LONG_ROW // width))
    whole = rows // together * together
    folded = function.reduce(block[:whole].reshape(-1, together * width))
    return function.reduce(np.concatenate([folded.reshape(-1, width), block[whole:]]))


def extreme_rows(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Numbers of the rows with the least and the largest value of a column.

    Examples
    --------
    >>> extreme_rows([np.array([2, 5, 3, 1, 4])]).tolist()
    [1, 3]
    """
    chosen: set[int] = set()
    for array in arrays:
        width = array[0].size
        columns = np.unique(np.linspace(0, width - 1, min(width, MOST_EXTREMES)).astype(int))
        if not width:
            continue
        ends = [
            (_of_columns(np.minimum, block), _of_columns(np.maximum, block))
            for _, block in blocks_of(array)
        ]
        least, largest = (np.array(of_blocks) for of_blocks in zip(*ends, strict=True))
        of_least, of_largest = least.argmin(0), largest.argmax(0)
        for number, (start, block) in enumerate(blocks_of(array)):
            lowest, highest = (
                columns[of_least[columns] == number],
                columns[of_largest[columns] == number],
            )
            chosen.update(start + block[:, lowest].argmin(0))
            chosen.update(start + block[:, highest].argmax(0))
    return np.array(sorted(chosen), dtype=int)
