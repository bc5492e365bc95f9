"""A log density split into a part without rows and a sum over the rows of the data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby

import numpy as np
import pytensor
import pytensor.tensor as pt
from pymc.data import MinibatchOp
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Variable
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors
from pytensor.tensor import TensorVariable
from pytensor.tensor.type import TensorType

from pymc_sgmcmc.posterior.graphs import Length, rebuild
from pymc_sgmcmc.posterior.position import PositionLayout


def keep_whole(values: np.ndarray, name: str, elements_a_row: float = 0.0) -> SharedVariable:
    """A shared array that a graph indexes by its rows, and that is never subsampled itself.

    Rows that are groups of records are numbers of groups, and their records lie in such arrays.

    Parameters
    ----------
    values : numpy.ndarray
        Not written to afterwards.
    name : str
    elements_a_row : float
        The mean number of elements that a row reads or has computed from them, which bounds the
        memory of passes.
    """
    values = np.asarray(values, order="C")
    shared = pytensor.shared(
        values, name, shape=(None, *values.shape[1:]) if values.ndim else (), borrow=True
    )
    shared.tag.elements_a_row = elements_a_row
    return shared


def is_whole(variable: Variable) -> bool:
    """Whether a variable is an array of `keep_whole`."""
    return hasattr(variable.tag, "elements_a_row")


@dataclass(frozen=True, eq=False)
class RowLeaf:
    """One data array with an axis that runs over the rows.

    Attributes
    ----------
    name : str
        Name in messages.
    variables : tuple of Variable
        The variables by which it enters the graph of the log density, possibly several.
    values : numpy.ndarray
        The full data with the axis of rows first, of length N. They are never written to.
    axis : int
        The axis of the variables that runs over the rows.
    shared_by_rows : bool
        Whether the rows have no parts of the array of their own, as records of groups. It is not
        cut where some rows are chosen, and its values are not those of all rows.
    parts : tuple of (int, RowLeaf)
        The data that the values were made of, with the first row of each, where these are several
        or have fewer rows.
    is_data : bool
        Whether the values are data of the user's.
    """

    name: str
    variables: tuple[Variable, ...] = field(repr=False)
    values: np.ndarray = field(repr=False)
    axis: int = 0
    shared_by_rows: bool = False
    parts: tuple[tuple[int, RowLeaf], ...] = field(default=(), repr=False)
    is_data: bool = True

    @property
    def originals(self) -> list[RowLeaf]:
        """The data that the values were made of."""
        return [part for _, part in self.parts] or [self] if self.is_data else []

    def record(self, row: int) -> tuple[RowLeaf, int] | None:
        """The data of the user's that a row has, and its number there, None for other rows."""
        if not self.parts:
            return self, row
        return next(
            (
                (part, row - start)
                for start, part in self.parts
                if start <= row < start + len(part.values)
            ),
            None,
        )

    def placeholder(self, length: int | None = None) -> TensorVariable:
        """New symbolic input for a set of rows, of a fixed number where given."""
        shape = (length, *self.values.shape[1:])
        return TensorType(self.values.dtype, shape=shape)(name=f"{self.name}_rows")

    def in_place(self, rows: TensorVariable) -> dict[Variable, TensorVariable]:
        """Replacements of the variables of the graph by symbolic rows."""
        in_axis = pt.moveaxis(rows, 0, self.axis) if self.axis else rows
        return dict.fromkeys(self.variables, in_axis)

    def sources(self) -> list[SharedVariable]:
        """The `pymc.Data` variables that the values were taken from."""
        origins = [
            variable.owner.inputs[variable.index]
            if variable.owner is not None and isinstance(variable.owner.op, MinibatchOp)
            else variable
            for variable in self.variables
        ]
        return [variable for variable in origins if isinstance(variable, SharedVariable)]


@dataclass(frozen=True, eq=False)
class Term:
    """One additive term of a model's log density, elementwise or already summed.

    Attributes
    ----------
    name : str
    log_density : TensorVariable
    parts : tuple of str
        Names of the terms of the model that it is the sum of, where these are several.
    built_for : int or None
        The number of rows in its graph, None for that of the model.
    """

    name: str
    log_density: TensorVariable
    parts: tuple[str, ...] = ()
    built_for: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the terms of the model that it is the sum of."""
        return self.parts or (self.name,)


@dataclass(frozen=True, eq=False)
class SeparatedModel:
    """A log density split into a part without rows and a sum over rows.

    It does not change with the model: `pymc.set_data` has no effect on it.

    Attributes
    ----------
    full_terms : tuple of Term
        Prior, Jacobians, potentials and likelihoods that are not subsampled.
    row_terms : tuple of Term
        Likelihood terms, unscaled, on the data of the model.
    leaves : tuple of RowLeaf
        The data arrays to subsample together.
    n_rows : int
        The number of rows N.
    batch_size : int or None
        Rows that the model's `pymc.Minibatch` draws, None for an ordinary model.
    lengths : tuple of Variable
        Lengths of the model's dimensions that run over the rows.
    row_numbers : tuple of Variable
        Arrays 0, 1, ..., N - 1 that number the rows of any part of the data and are not data.
    only_beside_rows : bool
        A length in the graph that equals the number of rows is taken for that number only in
        expressions of the data, not in those of parameters alone. (With minibatches of 10,
        ``pt.zeros(10)`` may have the length of a minibatch or of something else.)
    copied : tuple of (shared variable, numpy.ndarray)
        Shared variables of the model that hold no rows, with copies of their values.
    first_rows_only : bool
        Whether the data of the model are the first rows of a source, which say nothing of others.
    by_row : callable, optional
        The split where free variables with an entry for each row are selected from by its number,
        None where there are none.
    """

    full_terms: tuple[Term, ...]
    row_terms: tuple[Term, ...]
    leaves: tuple[RowLeaf, ...]
    n_rows: int
    batch_size: int | None
    lengths: tuple[Variable, ...] = ()
    row_numbers: tuple[Variable, ...] = ()
    only_beside_rows: bool = False
    copied: tuple[tuple[SharedVariable, np.ndarray], ...] = ()
    first_rows_only: bool = False
    by_row: Callable[[], SeparatedModel | None] | None = field(default=None, repr=False)

    def row_log_densities(
        self, rows: Sequence[TensorVariable], length: TensorVariable
    ) -> list[TensorVariable]:
        """Likelihood terms with the data replaced by symbolic rows.

        Parameters
        ----------
        rows : sequence of TensorVariable
            One tensor a leaf, in the order of `leaves`.
        length : TensorVariable
            Their common leading length (an integer scalar, a constant where shapes must be
            static).
        """
        replacements: dict[Variable, Variable] = dict.fromkeys(self.lengths, length)
        for variable in self.row_numbers:
            replacements[variable] = pt.arange(length, dtype=variable.dtype)
        for leaf, tensor in zip(self.leaves, rows, strict=True):
            replacements |= leaf.in_place(tensor)
        of_model = self.n_rows if self.batch_size is None else self.batch_size
        densities: list[TensorVariable] = []
        for built_for, terms in groupby(self.row_terms, lambda term: term.built_for or of_model):
            densities += rebuild(
                [term.log_density for term in terms],
                replacements,
                [Length(built_for, length)],
                self.only_beside_rows,
            )
        return densities

    @property
    def leaves_of_rows(self) -> tuple[RowLeaf, ...]:
        """The leaves of which each row has a part of its own. They come first."""
        return tuple(leaf for leaf in self.leaves if not leaf.shared_by_rows)

    @property
    def elements_in_whole_arrays(self) -> int:
        """Elements that a row reads, on average, of arrays of `keep_whole`; 0 without these."""
        return int(np.ceil(sum(array.tag.elements_a_row for array in self._whole_arrays)))

    @property
    def has_whole_arrays(self) -> bool:
        """Whether rows are numbers that select from arrays of `keep_whole`."""
        return bool(self._whole_arrays)

    @cached_property
    def _whole_arrays(self) -> list[Variable]:
        return list(filter(is_whole, ancestors([term.log_density for term in self.row_terms])))

    def readings(self) -> Iterator[SeparatedModel]:
        """Possible readings of the graph. The first is this one, which is the most likely."""
        numbers = [
            leaf
            for leaf in self.leaves
            if not self.first_rows_only
            and leaf.values.ndim == 1
            and leaf.values.dtype.kind in "iu"
            and np.array_equal(leaf.values, np.arange(self.n_rows))
        ]
        readings = [self]
        if numbers and len(numbers) < len(self.leaves):
            # In `log_p[np.arange(N), y]` the first index numbers rows and is not a trend.
            variables = tuple(variable for leaf in numbers for variable in leaf.variables)
            others = tuple(leaf for leaf in self.leaves if leaf not in numbers)
            readings.append(replace(self, leaves=others, row_numbers=variables))
        yield from readings
        yield from (replace(reading, only_beside_rows=True) for reading in readings)
        if self.by_row is not None and (reading := self.by_row()) is not None:
            yield reading

    def widest_row(self, layout: PositionLayout) -> int:
        """Elements of a row of all data, or of the widest intermediate result that has rows.

        A model may multiply a few columns by a large matrix of weights. The size of the data then
        does not bound the memory.
        """
        rows = [leaf.placeholder() for leaf in self.leaves]
        position = pt.tensor("position", shape=(layout.dimension,), dtype=layout.dtype)
        densities = clone_replace(
            self.row_log_densities(rows, pt.lscalar("length")),
            layout.split(position),
            rebuild_strict=False,
        )
        of_leaves = sum(leaf.values[0].size for leaf in self.leaves_of_rows)
        widths = [of_leaves, self.elements_in_whole_arrays]
        for variable in ancestors(densities):
            shape = getattr(variable.type, "shape", ())
            if None in shape:
                widths.append(int(np.prod([size for size in shape if size is not None])))
        return max(widths)


def record_of(
    leaves: Iterable[RowLeaf], row: int, values: Iterable[np.ndarray]
) -> tuple[int, dict[str, np.ndarray]]:
    """The number of a row in the data of the user, and its values by the names of these."""
    number, named = row, {}
    for leaf, value in zip(leaves, values, strict=False):
        record = leaf.record(row)
        if leaf.is_data and record is not None:
            original, number = record
            named[original.name] = value
    return number, named


def merge(leaves: Iterable[RowLeaf]) -> tuple[RowLeaf, ...]:
    """Leaves without duplicates, since each leaf costs a copy of its data."""
    merged: list[RowLeaf] = []
    for leaf in leaves:
        for number, earlier in enumerate(merged):
            if (
                leaf.axis == earlier.axis
                and leaf.values.dtype == earlier.values.dtype
                and np.array_equal(leaf.values, earlier.values)
            ):
                merged[number] = replace(earlier, variables=earlier.variables + leaf.variables)
                break
        else:
            merged.append(leaf)
    return tuple(merged)
