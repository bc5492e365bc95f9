"""Rows of NumPy arrays, in memory or in files that are mapped into memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pymc_sgmcmc.checks import whole_number
from pymc_sgmcmc.errors import RowsError
from pymc_sgmcmc.sources.base import RowSource

PARTITION_BYTES = 2**26
"""A partition has about so many bytes, 64 MB."""


class ArraySource(RowSource):
    """Rows of arrays with a common leading length, such as `numpy.memmap`.

    Parameters
    ----------
    arrays : mapping of str to numpy.ndarray
        Columns by name, with rows along the first axis.
    partition_rows : int, optional
        Rows of a partition. By default they take about 64 MB.

    Raises
    ------
    RowsError
        Where arrays have different numbers of rows, no rows, or no numbers.

    Examples
    --------
    >>> import numpy as np
    >>> from pymc_sgmcmc.sources import ArraySource
    >>> rows = ArraySource({"x": np.arange(10.0)}, partition_rows=4)
    >>> rows.n_partitions, rows.take([7, 2])["x"]
    (3, array([7., 2.]))
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], *, partition_rows: int | None = None):
        lengths = {name: len(values) if np.ndim(values) else 0 for name, values in arrays.items()}
        if len(set(lengths.values())) != 1 or not all(lengths.values()):
            listed = ", ".join(f"`{name}` has {length}" for name, length in lengths.items())
            raise RowsError(
                f"Arrays should have the same number of rows, at least 1, but {listed or 'none'} "
                "was given. Put rows along the first axis."
            )
        for name, values in arrays.items():
            if values.dtype.kind not in "biuf":
                raise RowsError(
                    f"The array `{name}` should have numbers, but has the type {values.dtype}. "
                    "Convert it first."
                )
        self._arrays = dict(arrays)
        self.columns = {name: (values.dtype, values.shape[1:]) for name, values in arrays.items()}
        count = next(iter(lengths.values()))
        row_bytes = sum(values[:1].nbytes for values in arrays.values())
        length = max(1, PARTITION_BYTES // row_bytes)
        if partition_rows is not None:
            length = whole_number("partition_rows", partition_rows, 1)
        self.offsets = np.append(np.arange(0, count, length), count)

    def partition(self, number: int, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Views of the rows of a partition."""
        rows = slice(self.offsets[number], self.offsets[number + 1])
        return {name: self._arrays[name][rows] for name in names}

    def signature(self) -> str:
        """Types, shapes, and the sums of the first and last partition's bytes."""
        parts = [f"{name} {dtype} {shape}" for name, (dtype, shape) in self.columns.items()]
        for number in (0, self.n_partitions - 1):
            sums = self.partition(number, list(self.columns)).values()
            parts += [str(np.asarray(values, dtype=float).sum()) for values in sums]
        return f"{self.n_rows} rows: " + "; ".join(parts)
