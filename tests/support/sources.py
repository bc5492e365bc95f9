"""Rows of arrays in memory as a source that counts what is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pymc_sgmcmc.sources import RowSource


class CountedRows(RowSource):
    """Arrays in partitions of so many rows.

    Attributes
    ----------
    reads : int
        Partitions that were read.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], rows: int = 700):
        self._arrays, self.reads = dict(arrays), 0
        self.columns = {name: (values.dtype, values.shape[1:]) for name, values in arrays.items()}
        count = len(next(iter(arrays.values())))
        self.offsets = np.append(np.arange(0, count, rows), count)

    def partition(self, number: int, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Rows of a partition."""
        self.reads += 1
        rows = slice(self.offsets[number], self.offsets[number + 1])
        return {name: np.ascontiguousarray(self._arrays[name][rows]) for name in names}

    def signature(self) -> str:
        """A constant, since the arrays do not change."""
        return "arrays"
