"""How a posterior reads its rows: arrays in memory, or a source that is read in parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.posterior.rows import RowLeaf, SeparatedModel
from pymc_sgmcmc.sources import RowSource


class RowAccess(Protocol):
    """Rows of several arrays by their numbers."""

    n_rows: int

    def take(self, selection: slice | np.ndarray) -> list[np.ndarray]:
        """The given rows of all arrays, contiguous."""
        ...


class RowsInMemory:
    """Rows of arrays with a common leading length."""

    def __init__(self, arrays: Sequence[np.ndarray], n_rows: int):
        self.arrays, self.n_rows = tuple(arrays), n_rows

    def take(self, selection: slice | np.ndarray) -> list[np.ndarray]:
        """The given rows of all arrays, contiguous."""
        return [np.ascontiguousarray(values[selection]) for values in self.arrays]


class RowsOfSource:
    """Rows of columns of a source, in the types that the model has.

    Parameters
    ----------
    source : RowSource
    columns : mapping of str to numpy.dtype
        Names of columns, and their types in the model.
    """

    def __init__(self, source: RowSource, columns: dict[str, np.dtype]):
        self.source, self._columns, self.n_rows = source, columns, source.n_rows

    def take(self, selection: slice | np.ndarray) -> list[np.ndarray]:
        """The given rows of all columns, contiguous."""
        names = list(self._columns)
        if isinstance(selection, slice):
            start, stop, _ = selection.indices(self.n_rows)
            rows = self.source.read(start, stop, names)
        else:
            rows = self.source.take(selection, names)
        return [
            np.ascontiguousarray(rows[name], dtype=dtype) for name, dtype in self._columns.items()
        ]


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
                raise ModelError(
                    f"The data `{leaf.name}` have as many rows as those that `rows.head` returned, "
                    f"{separated.n_rows}, but are no column of `rows`. Add a column to `rows`, or "
                    "choose another number of rows in `rows.head`."
                )
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
    columns = {name: leaf.values.dtype for name, leaf in leaves.items()}
    separated = replace(separated, leaves=tuple(leaves.values()), first_rows_only=True)
    return separated, columns
