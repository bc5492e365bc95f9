"""Columns under names of the user's choice, and matrices of several columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pymc_sgmcmc.checks import quoted
from pymc_sgmcmc.errors import RowsError
from pymc_sgmcmc.sources.base import DerivedRows, RowSource
from pymc_sgmcmc.sources.schema import NUMBERS


class ChosenColumns(DerivedRows):
    """Some columns of a source: one under another name, or several as the columns of a matrix.

    Parameters
    ----------
    source : RowSource
    choice : mapping of str to str or list of str
        By its new name, a column of the source, or a list of those that are joined to a matrix of
        their common type.

    Raises
    ------
    RowsError
        Where columns cannot be joined.

    Examples
    --------
    >>> from pymc_sgmcmc.sources import ArraySource
    >>> rows = ArraySource({"a": np.arange(3), "b": np.arange(3) / 2, "c": np.ones(3)})
    >>> ChosenColumns(rows, {"X": ["a", "b"], "y": "c"}).read(1, 3)
    {'X': array([[1. , 0.5], [2. , 1. ]]), 'y': array([1., 1.])}
    """

    def __init__(self, source: RowSource, choice: Mapping[str, str | list[str]]):
        super().__init__(source)
        self._choice = choice
        self.columns = {
            name: _joined(source, name, chosen)
            if isinstance(chosen, list)
            else source.columns[chosen]
            for name, chosen in choice.items()
        }

    @property
    def categorical(self) -> frozenset[str]:
        """Those that the source has under their names there."""
        return frozenset(
            name
            for name, chosen in self._choice.items()
            if isinstance(chosen, str) and chosen in self._source.categorical
        )

    def _labels_of(self, name: str) -> np.ndarray:
        # Those of a matrix are had from the source itself.
        return self._source.categories(str(self._choice[name]))

    def signature(self) -> str:
        """That of the source, and the choice."""
        return f"{self._source.signature()}; columns: {dict(self._choice)}"

    def _needed(self, names: Sequence[str]) -> list[str]:
        return names_of_choice({name: self._choice[name] for name in names})

    def _made_of(
        self, number: int, columns: dict[str, np.ndarray], names: Sequence[str]
    ) -> dict[str, np.ndarray]:
        made = {}
        for name in names:
            chosen = self._choice[name]
            if isinstance(chosen, str):
                made[name] = columns[chosen]
            else:
                # Column by column in memory, which takes half the time of row by row. The rows that
                # a model takes are put row by row when they become numbers of its type.
                stacked = np.stack([columns[each] for each in chosen], dtype=self.columns[name][0])
                made[name] = stacked.T
        return made


def check_choice(choice: Any) -> dict[str, str | list[str]]:
    """Return columns that a user chose.

    Raises
    ------
    TypeError
        Where they are no mapping from names to names or lists of names.
    """
    if isinstance(choice, Mapping) and choice and all(isinstance(name, str) for name in choice):
        lists = {
            name: chosen if isinstance(chosen, str) else list(chosen)
            for name, chosen in choice.items()
            if isinstance(chosen, str | list | tuple) and chosen
        }
        named = all(isinstance(each, str) for chosen in lists.values() for each in chosen)
        if named and len(lists) == len(choice):
            return lists
    raise TypeError(
        '`columns` should be a mapping such as {"X": ["distance", "hour"], "y": "late"}, but got '
        f"{choice!r}. Give a column, or a list of columns of a matrix, by each name."
    )


def names_of_choice(choice: Mapping[str, str | list[str]]) -> list[str]:
    """Columns of the source that are chosen, each once."""
    lists = [[chosen] if isinstance(chosen, str) else chosen for chosen in choice.values()]
    return list(dict.fromkeys(name for chosen in lists for name in chosen))


def check_names(names: Sequence[str], existing: Sequence[str], origin: str) -> None:
    """Refuse names of columns that do not exist.

    Raises
    ------
    RowsError
    """
    unknown = [name for name in names if name not in existing]
    if unknown:
        raise RowsError(
            f"The columns of {origin} are {quoted(existing)}, but got {quoted(unknown)}. Choose "
            "some of these by `columns`."
        )


def _joined(source: RowSource, name: str, chosen: list[str]) -> tuple[np.dtype, tuple[int, ...]]:
    """Type, and shape of one row, of a matrix."""
    types = {each: source.columns[each] for each in chosen}
    for each, (dtype, shape) in types.items():
        if dtype.kind not in NUMBERS or shape:
            found = f"the shape (rows, {', '.join(map(str, shape))})" if shape else str(dtype)
            raise RowsError(
                f"The matrix `{name}` should have columns of numbers, but `{each}` has {found}. "
                "Choose it under a name of its own, and make numbers of it by `transform`."
            )
    codes = [each for each in chosen if each in source.categorical]
    if codes and len(codes) < len(chosen):
        others = [each for each in chosen if each not in codes]
        raise RowsError(
            f"The matrix `{name}` should have codes of categories or other numbers, but "
            f"{quoted(codes)} are codes and {quoted(others)} are not. Choose two matrices."
        )
    return np.result_type(*(dtype for dtype, _ in types.values())), (len(chosen),)
