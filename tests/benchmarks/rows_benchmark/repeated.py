"""A source of any number of rows: those of one partition, again and again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pymc_sgmcmc.sources import RowSource


class RepeatedRows(RowSource):
    """Copies of the same rows, each of them a partition, which takes no time to read."""

    def __init__(self, rows: Mapping[str, np.ndarray], copies: int) -> None:
        self._rows = dict(rows)
        self.columns = {name: (values.dtype, values.shape[1:]) for name, values in rows.items()}
        self.offsets = np.arange(copies + 1) * len(next(iter(rows.values())))

    def partition(self, number: int, names: Sequence[str]) -> dict[str, np.ndarray]:
        """The same rows for each number."""
        return {name: self._rows[name] for name in names}

    def signature(self) -> str:
        """The number of rows says it all."""
        return f"{self.n_rows} repeated rows"
