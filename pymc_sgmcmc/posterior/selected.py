"""Gradients of single rows without the entries that are zero because a row does not select them.

In ``(U[user] * V[item]).sum(-1)`` each row of data meets one row of U and one of V. All others of
the d numbers of its gradient are zero. This module finds the variables that enter the rows only
through such selections, and differentiates with respect to the entries that each row selects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Constant, Variable, equal_computations
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors
from pytensor.tensor.basic import Join
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.math import Dot
from pytensor.tensor.shape import SpecifyShape
from pytensor.tensor.subtensor import AdvancedSubtensor, Subtensor, indices_from_subtensor
from pytensor.tensor.type import TensorType
from pytensor.tensor.variable import TensorVariable
from scipy import sparse

from pymc_sgmcmc.posterior.graphs import is_integer, is_product
from pymc_sgmcmc.posterior.posterior import Posterior
from pymc_sgmcmc.posterior.reading import Indexing, Reading, is_all
from pymc_sgmcmc.posterior.simplify import prepared

type Table = np.ndarray | sparse.csr_array
"""Numbers with a row for each row of data."""

ALL = slice(None)
"""This entry of an index takes the whole axis."""


class RowGradients:
    """Gradients of the log likelihood of single rows, as a table: here all d numbers of each.

    Attributes
    ----------
    posterior : Posterior
    width : int
        Numbers that are stored for a row.
    """

    def __init__(self, posterior: Posterior):
        self.posterior = posterior
        self.width = posterior.dimension

    def of_rows(self, position: TensorVariable, rows: Sequence[TensorVariable]) -> TensorVariable:
        """Symbolic gradients of symbolic rows, shape (rows, width)."""
        return self.posterior.single_row_gradients(position, rows)

    def total(self, table: TensorVariable, rows: Sequence[TensorVariable]) -> TensorVariable:
        """Symbolic sum, shape (d,), of the gradients of rows, of the type of the table."""
        return table.sum(0)

    def at(self, position: np.ndarray, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Gradients of rows, shape (rows, width)."""
        return self.posterior.row_gradients(position, rows)

    def table(self, position: np.ndarray, rows: Sequence[np.ndarray]) -> Table:
        """Gradients of rows in double precision, shape (rows, d), sparse where most are zero."""
        return self.at(position, rows).astype(float, copy=False)

    def total_of_all(self, table: np.ndarray) -> np.ndarray:
        """Sum, shape (d,), of the gradients of all rows, in double precision."""
        return table.sum(0, dtype=np.float64)


@dataclass(frozen=True, eq=False)
class Selection:
    """The entries ``V[index]`` of a variable that an array of indices selects along an axis.

    Attributes
    ----------
    variable : TensorVariable
        The value variable V.
    axis : int
        The axis of V that is indexed.
    index : TensorVariable, shape (rows,)
        A function of symbolic rows.
    entries : TensorVariable, shape (rows, ...)
        A symbolic input in place of the entries, with rows as the first axis.
    """

    variable: TensorVariable
    axis: int
    index: TensorVariable
    entries: TensorVariable

    @property
    def width(self) -> int:
        """Numbers that a row selects."""
        return int(np.prod(self.entries.type.shape[1:]))


@dataclass(frozen=True, eq=False)
class SelectedGraph:
    """A log likelihood of rows in terms of the entries that rows select.

    Attributes
    ----------
    rows : list of TensorVariable
        Symbolic rows.
    length : TensorVariable
        Their number.
    log_likelihood : TensorVariable
        A scalar.
    selections : tuple of Selection
        In the order of the layout.
    whole : tuple of TensorVariable
        The variables that enter otherwise, in the order of the layout.
    """

    rows: list[TensorVariable]
    length: TensorVariable
    log_likelihood: TensorVariable
    selections: tuple[Selection, ...]
    whole: tuple[TensorVariable, ...]


class SelectedRowGradients(RowGradients):
    """The numbers of the gradient of each row that are not zero whatever the position.

    First come the columns of each selection, and then those of variables that rows use otherwise. A
    variable that no row depends on has no column.
    """

    def __init__(self, posterior: Posterior, graph: SelectedGraph):
        super().__init__(posterior)
        self._graph = graph
        self._places, self._whole_places = places_of(posterior, graph)
        widths = [selection.width for selection in graph.selections]
        self._stops = np.cumsum([0, *widths]).tolist()
        self.width = self._stops[-1] + len(self._whole_places)

    def of_rows(self, position: TensorVariable, rows: Sequence[TensorVariable]) -> TensorVariable:
        """Symbolic gradients of symbolic rows, shape (rows, width)."""
        graph = self._graph
        count = rows[0].shape[0]
        single = [_of_one_row(variable) for variable in graph.rows]
        entries = [_of_one_row(selection.entries) for selection in graph.selections]
        replacements = {
            **dict(zip(graph.rows, single, strict=True)),
            **{
                selection.entries: of_one
                for selection, of_one in zip(graph.selections, entries, strict=True)
            },
            graph.length: pt.constant(1, dtype="int64"),
        }
        log_density = prepared(
            clone_replace(graph.log_likelihood, replacements, rebuild_strict=False)
        )
        pieces = pt.grad(log_density, [*entries, *graph.whole], disconnected_inputs="ignore")
        gradient = pt.concatenate([piece.ravel() for piece in pieces])
        of_rows = {of_one: row[:, None] for of_one, row in zip(single, rows, strict=True)}
        for of_one, selection, places in zip(
            entries, graph.selections, self._symbolic_places(rows), strict=True
        ):
            shape = (count, 1, *selection.entries.type.shape[1:])
            of_rows[of_one] = position[places.ravel()].reshape(shape)
        return self.posterior.vectorized(gradient, position, of_rows, count)

    def total(self, table: TensorVariable, rows: Sequence[TensorVariable]) -> TensorVariable:
        """Symbolic sum, shape (d,), of the gradients of rows, of the type of the table."""
        total = pt.zeros(self.posterior.dimension, dtype=table.dtype)
        for start, stop, places in zip(
            self._stops, self._stops[1:], self._symbolic_places(rows), strict=False
        ):
            total = pt.inc_subtensor(total[places.ravel()], table[:, start:stop].ravel())
        if len(self._whole_places):
            of_whole = table[:, self._stops[-1] :].sum(0)
            total = pt.inc_subtensor(total[self._whole_places], of_whole)
        return total

    def at(self, position: np.ndarray, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Gradients of rows, shape (rows, width)."""
        position = np.ascontiguousarray(position, dtype=self.posterior.dtype)
        self.posterior.count_evaluated(len(rows[0]))
        (gradients,) = self._function_of_rows(position, *rows)
        return np.asarray(gradients)

    def table(self, position: np.ndarray, rows: Sequence[np.ndarray]) -> Table:
        """Gradients of rows in double precision, shape (rows, d), sparse."""
        values = self.at(position, rows).astype(float, copy=False)
        selected = self._function_of_places(*rows)
        whole = np.broadcast_to(self._whole_places, (len(values), len(self._whole_places)))
        places = np.concatenate([*selected, whole], axis=1)
        stops = np.arange(0, values.size + 1, max(1, self.width))
        shape = (len(values), self.posterior.dimension)
        return sparse.csr_array((values.ravel(), places.ravel(), stops), shape=shape)

    def total_of_all(self, table: np.ndarray) -> np.ndarray:
        """Sum, shape (d,), of the gradients of all rows, in double precision."""
        total, start = np.zeros(self.posterior.dimension), 0
        for rows in self.posterior.chunks(self.width):
            stop = start + len(rows[0])
            (of_rows,) = self._function_of_total(table[start:stop].astype(np.float64), *rows)
            total += of_rows
            start = stop
        return total

    def _symbolic_places(self, rows: Sequence[TensorVariable]) -> list[TensorVariable]:
        """Coordinates that rows select, shape (rows, width of the selection), by selection."""
        replacements = dict(zip(self._graph.rows, rows, strict=True))
        indices = clone_replace(
            [selection.index for selection in self._graph.selections],
            replacements,
            rebuild_strict=False,
        )
        return [
            pt.constant(places)[index] for places, index in zip(self._places, indices, strict=True)
        ]

    @cached_property
    def _function_of_rows(self):
        position, rows = self.posterior.position_and_rows()
        return self.posterior.compile_for_setup([position, *rows], [self.of_rows(position, rows)])

    @cached_property
    def _function_of_places(self):
        _, rows = self.posterior.position_and_rows()
        return self.posterior.compile_for_setup(rows, self._symbolic_places(rows))

    @cached_property
    def _function_of_total(self):
        _, rows = self.posterior.position_and_rows()
        table = pt.matrix("table", dtype="float64")
        return self.posterior.compile_for_setup([table, *rows], [self.total(table, rows)])

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the functions, which are compiled again when needed."""
        compiled = {"_function_of_rows", "_function_of_places", "_function_of_total"}
        return {name: value for name, value in vars(self).items() if name not in compiled}


def places_of(posterior: Posterior, graph: SelectedGraph) -> tuple[list[np.ndarray], np.ndarray]:
    """Coordinates of each entry of the indexed axes, (entries, width) each, and of `graph.whole`.

    A row selects those of one entry with each selection.
    """
    layout = posterior.layout
    numbers = np.arange(layout.dimension)
    places = {
        variable: numbers[part].reshape(shape)
        for variable, part, shape in zip(
            layout.variables, layout.slices, layout.shapes, strict=True
        )
    }
    of_selections = [
        np.moveaxis(places[selection.variable], selection.axis, 0).reshape(-1, selection.width)
        for selection in graph.selections
    ]
    whole = [places[variable].ravel() for variable in graph.whole]
    return of_selections, np.concatenate([np.empty(0, dtype=int), *whole])


def stored_gradients(posterior: Posterior) -> RowGradients:
    """The gradients of single rows that take the fewest numbers a row.

    These are the selected ones, where they are fewer than d. Rows that are groups have all.
    """
    if posterior.rows_are_groups:
        return RowGradients(posterior)
    selected = SelectedRowGradients(posterior, selected_graph(posterior))
    return selected if 0 < selected.width < posterior.dimension else RowGradients(posterior)


def selected_graph(posterior: Posterior) -> SelectedGraph:
    """The log likelihood of rows in terms of the entries that rows select.

    Entries of a variable are selected where all that rows use of it are selections by arrays of
    indices, and these take fewer numbers than the variable has.

    It is a function of the position of the rows.
    """
    layout = posterior.layout
    _, rows, length = posterior.terms_of_rows
    sizes = dict(zip(layout.variables, layout.sizes, strict=True))
    # Lengths of dimensions are no part of the types of variables.
    shapes = dict(zip(layout.variables, layout.shapes, strict=True))
    chosen = list(layout.variables)
    while True:
        selections = _Selections(shapes, chosen, posterior.reading)
        graph = selections.replaced(posterior.sum_of_terms)
        used = set(ancestors([graph]))
        found = [selection for selection in selections.found if selection.entries in used]
        widths = dict.fromkeys(layout.variables, 0)
        for selection in found:
            widths[selection.variable] += selection.width
        kept = [
            variable
            for variable in chosen
            if variable not in used and 0 < widths[variable] < sizes[variable]
        ]
        if kept == chosen:
            break
        chosen = kept
    found.sort(key=lambda selection: layout.variables.index(selection.variable))
    others = tuple(variable for variable in layout.variables if variable in used)
    return SelectedGraph(rows, length, graph, tuple(found), others)


def _of_one_row(variable: TensorVariable) -> TensorVariable:
    """New symbolic input of the kind of another one, for one row."""
    return TensorType(variable.dtype, shape=(1, *variable.type.shape[1:]))(variable.name)


# --- Selections in a graph --------------------------------------------------------------------


class _Selections:
    """Replace selections from chosen variables in a graph by symbolic inputs.

    Parameters
    ----------
    shapes : mapping of TensorVariable to tuple of int
        All value variables and their shapes.
    chosen : sequence of TensorVariable
        Those whose selected entries become inputs. The others stay in the graph.
    reading : Reading
        That of the graph.

    Attributes
    ----------
    found : list of Selection
    """

    def __init__(
        self,
        shapes: Mapping[TensorVariable, tuple[int, ...]],
        chosen: Sequence[TensorVariable],
        reading: Reading,
    ):
        self._shapes, self._chosen, self._reading = shapes, set(chosen), reading
        self.found: list[Selection] = []

    def replaced(self, graph: TensorVariable) -> TensorVariable:
        """The graph with selections of rows done first and replaced by inputs."""
        entries = {
            each.result: selected
            for each in self._reading.indexings
            if (selected := self._selected(each)) is not None
        }
        return clone_replace([graph], entries, rebuild_strict=False)[0]

    def _selected(self, indexing: Indexing) -> TensorVariable | None:
        """What a place selects from variables by rows, None where it is of another form."""
        array, places, first = indexing.array, indexing.places, 0
        # `x[0, index]` is `x[0][index]`.
        while _is_number(places[first]) and not isinstance(places[first + 1], slice):
            first += 1
        if first:
            array, places = array[places[:first]], places[first:]
        axis = next((number for number, place in enumerate(places) if not is_all(place)), 0)
        index, others = self._reading.vectors.get(places[axis]), places[axis + 1 :]
        if index is None or (axis and others) or any(other is None for other in others):
            return None
        if not indexing.of or indexing.of & self._reading.rows:
            return None
        entries = self._entries(array, axis, index)
        if not others:
            return entries
        # NumPy pairs several arrays of indices, as in `x[row, column]`.
        paired = any(isinstance(other, Variable) and other.type.ndim for other in others)
        return entries[(pt.arange(index.shape[0]) if paired else ALL, *others)]

    def _entries(self, array: TensorVariable, axis: int, index: TensorVariable) -> TensorVariable:
        """The entries of an array along an axis, in the place of this axis."""
        if array in self._chosen:
            return pt.moveaxis(self._input(array, axis, index), 0, axis)
        node = array.owner
        if node is not None and self._reading.of(node.inputs):
            if isinstance(node.op, AdvancedSubtensor):
                inner = self._index_of_index(node, axis, index)
                if inner is not None:
                    return self._entries(node.inputs[0], axis, inner)
            elif len(node.outputs) == 1 and not array.type.broadcastable[axis]:
                entries = entries_of_result(
                    node, axis, lambda x, along: self._entries(x, along, index)
                )
                if entries is not None:
                    return entries
        return array[(*(ALL,) * axis, index)]

    def _index_of_index(
        self, node: Apply, axis: int, index: TensorVariable
    ) -> TensorVariable | None:
        """The index k[index] of ``x[k][index]``, None where the node is not of this form."""
        places = indices_from_subtensor(node.inputs[1:], node.op.idx_list)
        inner = places[-1]
        if len(places) != axis + 1 or not all(is_all(place) for place in places[:-1]):
            return None
        if not (isinstance(inner, Variable) and inner.type.ndim == 1 and is_integer(inner)):
            return None
        return inner[index]

    def _input(self, variable: TensorVariable, axis: int, index: TensorVariable) -> TensorVariable:
        """The symbolic input for a selection; equal selections have one."""
        for selection in self.found:
            if (
                selection.variable is variable
                and selection.axis == axis
                and equal_computations([selection.index], [index])
            ):
                return selection.entries
        shape = list(self._shapes[variable])
        del shape[axis]
        entries = TensorType(variable.dtype, shape=(None, *shape))(f"{variable.name}_entries")
        self.found.append(Selection(variable, axis, index, entries))
        return entries


def _is_number(place: Any) -> bool:
    return isinstance(place, Constant) and place.ndim == 0


# --- Operations that treat the entries along an axis alike --------------------------------------

Entries = Callable[[TensorVariable, int], TensorVariable]
"""The selected entries of an array along an axis, in the place of this axis."""


def entries_of_result(node: Apply, axis: int, entries: Entries) -> TensorVariable | None:
    """Selected entries of the result of an operation from those of its inputs.

    None where the operation mixes the entries along this axis, or is not known.

    Parameters
    ----------
    node : Apply
        The node of the operation, which has one output.
    axis : int
        The axis of the output along which entries are selected.
    entries : callable
        Gives the entries of an input along one of its axes.
    """
    op, x = node.op, node.inputs[0]
    match op:
        case Elemwise():
            return op(*(x if x.type.broadcastable[axis] else entries(x, axis) for x in node.inputs))
        case DimShuffle():
            # The axis is no new one: it would have length one, which nobody selects from.
            return entries(x, op.new_order[axis]).dimshuffle(*op.new_order)
        case CAReduce():
            reduced = range(x.type.ndim) if op.axis is None else op.axis
            kept = [number for number in range(x.type.ndim) if number not in reduced]
            return op(entries(x, kept[axis]))
        case Join() if axis != op.axis:
            return op(*(entries(part, axis) for part in node.inputs))
        case Dot() | Blockwise() if is_product(node):
            left, right = node.inputs
            return op(left, entries(right, 1)) if axis else op(entries(left, 0), right)
        case Subtensor():
            places = indices_from_subtensor(node.inputs[1:], op.idx_list)
            places = [*places, *(ALL,) * (x.type.ndim - len(places))]
            kept = [number for number, place in enumerate(places) if isinstance(place, slice)]
            if is_all(places[kept[axis]]):
                return entries(x, kept[axis])[tuple(places)]
        case SpecifyShape():
            return entries(x, axis)
    return None
