"""Arrays of codes that say which record belongs to which group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.traversal import ancestors, graph_inputs
from pytensor.tensor.basic import Alloc
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.shape import SpecifyShape
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.errors import ModelError, NotTogetherError
from pymc_sgmcmc.posterior.graphs import leaf_value, value_of
from pymc_sgmcmc.posterior.group_access import GroupsOfSource, column_of
from pymc_sgmcmc.posterior.reading import Indexing
from pymc_sgmcmc.posterior.row_access import no_column
from pymc_sgmcmc.posterior.rows import keep_whole
from pymc_sgmcmc.sources import RowSource


@dataclass(frozen=True, eq=False)
class Records:
    """Records that lie in groups by an array of codes: record i belongs to group ``codes[i]``.

    Attributes
    ----------
    variables : tuple of Variable
        The variables of the graph that hold the codes.
    codes : numpy.ndarray, shape (records,)
        Those in the model, which are the first ones where the records are rows of a source.
    n_groups : int
    column : tuple of (RowSource, str), optional
        The source, and its column of codes, where the records are rows of one.
    groups : GroupsOfSource, optional
        Where all of these are read.
    """

    variables: tuple[Variable, ...]
    codes: np.ndarray
    n_groups: int
    column: tuple[RowSource, str] | None = None
    groups: GroupsOfSource | None = None

    @property
    def n_records(self) -> int:
        """Number of all records."""
        return len(self.codes) if self.column is None else self.column[0].n_rows

    @cached_property
    def order(self) -> np.ndarray:
        """Numbers of the records, sorted by group."""
        return np.argsort(self.codes, kind="stable")

    @cached_property
    def counts(self) -> np.ndarray:
        """Number of records of each group."""
        if self.groups is not None:
            return self.groups.index.counts
        return np.bincount(self.codes, minlength=self.n_groups)

    def starts(self) -> SharedVariable:
        """Place of the first record of each group where those in memory lie group after group."""
        if self.groups is not None:
            return self.groups.starts
        return keep_whole(np.cumsum(self.counts) - self.counts, "starts")

    def data(self, variable: Variable, values: np.ndarray, name: str) -> SharedVariable:
        """Data of the records in memory, group after group.

        Parameters
        ----------
        variable : Variable
            That of the graph.
        values : numpy.ndarray
            Data of the records in the order of the codes.
        name : str

        Raises
        ------
        ModelError
            Where the variable is no column of the source of the records.
        """
        if self.groups is not None:
            column = column_of(variable)
            if column is None or column[0] is not self.groups.source:
                raise no_column(name, len(values))
            return self.groups.whole(column[1], values)
        size = float(self.counts.mean()) * values[0].size
        return keep_whole(values[self.order], name, elements_a_row=size)


class NotCellsError(Exception):
    """The entries of a graph are not those of the cells, each by itself."""


@dataclass(frozen=True, eq=False)
class Cells:
    """Groups that are pairs of codes, such as county and year, or more than pairs.

    Attributes
    ----------
    lengths : tuple of int
        Of the leading axes, along which the groups lie in C order.
    """

    lengths: tuple[int, ...]

    @property
    def n_groups(self) -> int:
        """Number of all cells."""
        return prod(self.lengths)

    @cached_property
    def _numbers(self) -> list[SharedVariable]:
        """The number along each axis, of each group."""
        along = np.unravel_index(np.arange(self.n_groups), self.lengths)
        return [pytensor.shared(each, "cell", shape=each.shape) for each in along]

    def entries_of(self, value: TensorVariable, shape: Sequence[int]) -> TensorVariable:
        """A variable with one axis for the groups in place of the leading axes of a value."""
        of_groups = (self.n_groups, *shape[len(self.lengths) :])
        return value.type.clone(shape=of_groups)(name=value.name)

    def at_codes(self, place: Indexing, name: str, of: Mapping[Variable, Variable]) -> Variable:
        """The result of a place, whose codes are numbers of cells.

        Raises
        ------
        NotCellsError, ModelError
        """
        codes = [_values_of_codes(each, name) for each in place.together]
        for of_axis, length in zip(codes, self.lengths, strict=True):
            _check_codes(of_axis, length, name)
        numbers = np.ravel_multi_index(codes, self.lengths).astype(np.int64)
        return self.of(place.array, of)[pytensor.shared(numbers, "cells", shape=numbers.shape)]

    def of(self, variable: Variable, of: Mapping[Variable, Variable]) -> TensorVariable:
        """A variable with one axis for the groups in place of its leading axes.

        Parameters
        ----------
        variable : Variable
        of : mapping
            What stands for values, see `entries_of`.

        Raises
        ------
        NotCellsError
        """
        n_axes = len(self.lengths)
        rest = variable.type.ndim - n_axes
        if rest < 0:
            raise NotCellsError
        return self._of(variable, [*range(n_axes), *[None] * rest], of)

    def _of(
        self, variable: Variable, places: list[int | None], of: Mapping[Variable, Variable]
    ) -> TensorVariable:
        """A variable of which some axes have places among those of the cells.

        The indices move through elementwise operations, so that only entries of some groups are
        computed where these are chosen. The result has the axis of the groups, of length one where
        all have the same entries, and then the other axes.
        """
        if variable in of and places[: len(self.lengths)] == list(range(len(self.lengths))):
            return of[variable]
        node = variable.owner
        op, inputs = (None, []) if node is None else (node.op, node.inputs)
        if isinstance(op, Elemwise):
            return op(*(self._of(each, places, of) for each in inputs))
        if isinstance(op, Alloc | SpecifyShape) and None not in places:
            repeated = pt.shape_padleft(inputs[0], variable.type.ndim - inputs[0].type.ndim)
            return self._of(repeated, places, of)
        if isinstance(op, DimShuffle):
            before: list[int | None] = [None] * inputs[0].type.ndim
            for axis, place in zip(op.new_order, places, strict=True):
                if axis != "x":
                    before[axis] = place
            others = [axis for axis, place in enumerate(before) if place is None]
            order = [
                axis if axis == "x" else 1 + others.index(axis)
                for axis, place in zip(op.new_order, places, strict=True)
                if place is None
            ]
            return self._of(inputs[0], before, of).dimshuffle(0, *order)
        if not set(of).isdisjoint(ancestors([variable])):
            raise NotCellsError
        index = {
            axis: 0 if variable.type.shape[axis] == 1 else self._numbers[place]
            for axis, place in enumerate(places)
            if place is not None
        }
        others = [axis for axis, place in enumerate(places) if place is None]
        chosen = variable.dimshuffle(*index, *others)[tuple(index.values())] if index else variable
        return chosen if chosen.type.ndim > len(others) else pt.shape_padleft(chosen)


def cells_of(places: Sequence[Indexing], length_of: Callable[[Variable, int], int]) -> Cells | None:
    """The cells that the codes of all records tell, None where these tell single axes."""
    lengths = {
        tuple(length_of(each.array, axis) for axis in range(len(each.together))) for each in places
    }
    on_source = any(
        column_of(variable) is not None for each in places for variable in ancestors(each.together)
    )
    if len(lengths) != 1 or on_source:
        return None
    (common,) = lengths
    return Cells(common) if common else None


def _values_of_codes(variable: Variable, name: str) -> np.ndarray:
    """Codes of the records, which may be computed from data but not from parameters."""
    roots = [root for root in graph_inputs([variable]) if not isinstance(root, Constant)]
    of_data = all(leaf_value(root) is not None for root in roots)
    codes = np.asarray(value_of(variable)) if of_data else None
    if codes is None or codes.dtype.kind not in "iu":
        raise ModelError(
            f"The groups of the records of `{name}` should be given by an array of integers, but "
            "depend on parameters or on text. Index the local variables by data."
        )
    if codes.ndim != 1:
        raise ModelError(
            f"Each record of `{name}` should belong to one group, but the index array has shape "
            f"{codes.shape}. Records that belong to several groups cannot be integrated out."
        )
    return codes


def find_records(name: str, places: Sequence[Indexing], n_groups: int) -> Records | None:
    """Records of an observed variable, None where its entries are the groups."""
    if not places:
        return None
    variables = tuple(each.index for each in places)
    codes, *others = (_values_of_codes(each, name) for each in variables)
    column, *columns = {column_of(each) for each in variables}  # alike in the first rows, perhaps
    if columns or not all(np.array_equal(codes, other) for other in others):
        raise NotTogetherError(
            f"The records of `{name}` belong to groups by two different index arrays: the effects "
            "are crossed, or a record depends on two groups."
        )
    _check_codes(codes, n_groups, name)
    roots = ancestors(variables[:1]) if column is None else ()
    if computed_of := [root.name for root in roots if column_of(root) is not None]:
        raise ModelError(
            f"The codes of the groups of the records of `{name}` should be a column of `rows`, but "
            f"are computed from `{computed_of[0]}`. Add such a column by `rows.transform`."
        )
    return Records(variables, codes.astype(np.int64), n_groups, column)


def _check_codes(codes: np.ndarray, n_groups: int, name: str) -> None:
    """Refuse codes out of range."""
    wrong = (codes < 0) | (codes >= n_groups)
    if wrong.any():
        record = int(np.argmax(wrong))
        raise ModelError(
            f"The group codes of `{name}` should be between 0 and {n_groups - 1}, but record "
            f"{record} has {codes[record]}. Number the groups from 0, as `pandas.factorize` does."
        )
