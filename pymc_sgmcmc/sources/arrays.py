"""Rows of NumPy arrays, in memory or in files that are mapped into memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pymc_sgmcmc.checks import whole_number
from pymc_sgmcmc.sources.base import RowSource
from pymc_sgmcmc.sources.files import digest_of_files, stamp, unchanged
from pymc_sgmcmc.sources.schema import (
    PARTITION_BYTES,
    Schema,
    check_numbers,
    common_length,
    row_bytes,
    schema_of,
    without_missing,
)


class ArraySource(RowSource):
    """Rows of arrays with a common leading length, such as `numpy.memmap`.

    A process that gets mapped arrays maps their files again, and has no copy of them.

    Parameters
    ----------
    arrays : mapping of str to numpy.ndarray
        Columns by name, with rows along the first axis.
    partition_rows : int, optional
        Rows of a partition. By default they take about 64 MB.

    Raises
    ------
    RowsError
        Where arrays have different numbers of rows, no rows, no numbers, or missing values.

    Examples
    --------
    >>> import numpy as np
    >>> from pymc_sgmcmc.sources import ArraySource
    >>> rows = ArraySource({"x": np.arange(10.0)}, partition_rows=4)
    >>> rows.n_partitions, rows.take([7, 2])["x"]
    (3, array([7., 2.]))
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], *, partition_rows: int | None = None):
        count = common_length(arrays)
        arrays = without_missing(arrays)
        self.columns: Schema = schema_of(arrays)
        check_numbers(self.columns)
        self._arrays = dict(arrays)
        maps = [whole for whole in map(_whole_map, arrays.values()) if whole is not None]
        files = {str(whole.filename) for whole in maps}
        self._stamps = {file: stamp(file) for file in sorted(files)}
        length = max(1, PARTITION_BYTES // row_bytes(self.columns))
        if partition_rows is not None:
            length = whole_number("partition_rows", partition_rows, 1)
        self.offsets = np.append(np.arange(0, count, length), count)

    def partition(self, number: int, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Views of the rows of a partition."""
        rows = slice(self.offsets[number], self.offsets[number + 1])
        with unchanged(self._stamps):
            return {name: self._arrays[name][rows] for name in names}

    def signature(self) -> str:
        """Types, shapes, sums of the first and last partition, and sizes and times of files."""
        parts = [f"{name} {dtype} {shape}" for name, (dtype, shape) in self.columns.items()]
        for number in (0, self.n_partitions - 1):
            sums = self.partition(number, list(self.columns)).values()
            parts += [str(np.asarray(values, dtype=float).sum()) for values in sums]
        if self._stamps:
            parts.append(digest_of_files(self._stamps))
        return f"{self.n_rows} rows: " + "; ".join(parts)

    def __getstate__(self) -> dict:
        """With the places of mapped arrays in their files, and not their values."""
        arrays = {name: _place(values) for name, values in self._arrays.items()}
        return super().__getstate__() | {"_arrays": arrays}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        self._arrays = {name: _mapped(place) for name, place in self._arrays.items()}


def _whole_map(values: np.ndarray) -> np.memmap | None:
    """The array of a mapped file that some values are a view of."""
    whole = None
    array: Any = values
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap):
            whole = array
        array = array.base
    return whole if whole is not None and whole.filename is not None else None


def _place(values: np.ndarray) -> np.ndarray | tuple:
    """File, offset, shape, strides and type of mapped values; others as they are."""
    whole = _whole_map(values)
    if whole is None:
        return values
    offset = values.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    return str(whole.filename), whole.offset + offset, values.shape, values.strides, values.dtype


def _mapped(place: np.ndarray | tuple) -> np.ndarray:
    """Values from their place in a file."""
    if isinstance(place, np.ndarray):
        return place
    file, offset, shape, strides, dtype = place
    return np.ndarray(shape, dtype, np.memmap(file, np.uint8, "r"), offset, strides)


def joined(
    first: Sequence[np.ndarray], start: int, second: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Rows of arrays, those of the first ones from a place on, and the second ones."""
    return [
        np.concatenate([earlier[start:], values])
        for earlier, values in zip(first, second, strict=True)
    ]
