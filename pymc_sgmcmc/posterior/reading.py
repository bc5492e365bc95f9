"""One reading of a graph: what its variables depend on, and where arrays of numbers index others.

Rows of data, entries of variables that rows select, effects of groups and the records of groups are
all found in this table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.traversal import toposort, walk
from pytensor.scalar.basic import Cast
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.shape import Shape, Shape_i
from pytensor.tensor.subtensor import AdvancedSubtensor, Subtensor, indices_from_subtensor
from pytensor.tensor.type import TensorType
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.posterior.graphs import cast_of_integers, is_integer, leaf_value
from pymc_sgmcmc.posterior.rows import is_whole


@dataclass(frozen=True, eq=False)
class Indexing:
    """A place where arrays of numbers select entries of another array.

    Attributes
    ----------
    node : Apply
    of : frozenset of Variable
        What the array depends on.
    """

    node: Apply
    of: frozenset[Variable]

    @property
    def array(self) -> Variable:
        """What is indexed."""
        return self.node.inputs[0]

    @property
    def result(self) -> Variable:
        """The entries."""
        return self.node.outputs[0]

    @cached_property
    def places(self) -> tuple[Any, ...]:
        """The index of each axis: a slice, a number, an array, or None for a new axis."""
        return indices_from_subtensor(self.node.inputs[1:], self.node.op.idx_list)

    @cached_property
    def indices(self) -> dict[int, Variable]:
        """Arrays of numbers by the axis that they index."""
        return {
            axis: place
            for axis, place in enumerate(self.places)
            if isinstance(getattr(place, "type", None), TensorType)
            and place.type.ndim
            and place.dtype != "bool"
        }

    @property
    def axis(self) -> int:
        """The first axis that an array indexes."""
        return next(iter(self.indices))

    @property
    def index(self) -> Variable:
        """The array that indexes this axis."""
        return self.indices[self.axis]

    @property
    def together(self) -> tuple[Variable, ...]:
        """The vectors that index the leading axes, where they are several and the only indices."""
        count, others = len(self.indices), self.places[len(self.indices) :]
        is_leading = list(self.indices) == list(range(count))
        of_rows = all(index.type.ndim == 1 for index in self.indices.values())
        is_alone = all(map(is_all, others))
        is_tuple = count > 1 and is_leading and of_rows and is_alone
        return tuple(self.indices.values()) if is_tuple else ()


class Reading:
    """What each variable of graphs depends on, by one walk from the inputs on.

    Parameters
    ----------
    graphs : sequence of Variable
    values : iterable of Variable
        Value variables. Shapes do not depend on them.
    rows : iterable of Variable
        Symbolic rows.
    through : bool
        Whether entries that an array of numbers selects depend on what they are selected from.
        Those of groups belong to records otherwise, and are no quantities of groups any more.

    Attributes
    ----------
    nodes : list of Apply
        Without those that give shapes.
    indexings : list of Indexing
    """

    def __init__(
        self,
        graphs: Sequence[Variable],
        values: Iterable[Variable],
        rows: Iterable[Variable] = (),
        *,
        through: bool = True,
    ):
        self.nodes: list[Apply] = []
        self.indexings: list[Indexing] = []
        self.values, self.rows = frozenset(values), frozenset(rows)
        self._roots = {root: frozenset([root]) for root in self.values | self.rows}
        for node in toposort(graphs):
            of = self.of(node.inputs)
            if isinstance(node.op, Shape | Shape_i):
                of &= self.rows
            else:
                self.nodes.append(node)
            if isinstance(node.op, AdvancedSubtensor):
                indexing = Indexing(node, self.of(node.inputs[:1]))
                if indexing.indices:
                    self.indexings.append(indexing)
                    of = of if through or not indexing.of else frozenset()
            for output in node.outputs:  # A root may be made of others, as a random variable is.
                self._roots.setdefault(output, of)

    @property
    def dependent(self) -> list[Indexing]:
        """Where something that depends on values or rows is indexed."""
        return [each for each in self.indexings if each.of]

    def of(self, variables: Iterable[Variable]) -> frozenset[Variable]:
        """The values and rows that variables depend on."""
        return frozenset().union(*(self._roots.get(each, ()) for each in variables))

    @cached_property
    def vectors(self) -> dict[Variable, TensorVariable]:
        """Vectors of whole numbers with one number for each row, as functions of the rows alone.

        Returns
        -------
        dict of Variable to TensorVariable
            The value is the same vector before casts that keep all numbers.
        """
        numbers = [row for row in self.rows if is_integer(row)]
        matrices = {row for row in numbers if row.type.ndim == 2}
        vectors: dict[Variable, TensorVariable] = {
            row: row for row in numbers if row.type.ndim == 1
        }
        for node in self.nodes:
            output = node.outputs[0]
            if not node.inputs or getattr(output.type, "ndim", None) != 1 or not is_integer(output):
                continue
            first = node.inputs[0]
            if cast_of_integers(node) and first in vectors:
                keeps_all = np.can_cast(first.dtype, output.dtype)
                vectors[output] = vectors[first] if keeps_all else output
                continue
            match node.op:
                case Elemwise():
                    others = [variable for variable in node.inputs if variable not in vectors]
                    # A number for all rows, as in `group - 1`.
                    is_vector = len(others) < len(node.inputs) and all(
                        self.rows.isdisjoint(self.of([other])) and other.type.broadcastable[0]
                        for other in others
                    )
                case Subtensor():
                    places = indices_from_subtensor(node.inputs[1:], node.op.idx_list)
                    is_vector = first in matrices and is_all(places[0])
                case AdvancedSubtensor():
                    is_vector = first.type.ndim == 1 and node.inputs[1] in vectors
                    is_vector &= self.rows.isdisjoint(self.of([first]))
                case _:
                    is_vector = False
            if is_vector:
                vectors[output] = output
        return vectors


def is_all(place: Any) -> bool:
    """Whether an index takes the whole axis."""
    return isinstance(place, slice) and place == slice(None)


def before_casts(variable: Variable) -> Variable:
    """A variable before it was given other types."""
    while (
        variable.owner is not None
        and isinstance(variable.owner.op, Elemwise)
        and isinstance(variable.owner.op.scalar_op, Cast)
    ):
        variable = variable.owner.inputs[0]
    return variable


def axes_of_length(
    graph: Variable, length: int, known: Collection[Variable] = ()
) -> dict[Variable, int]:
    """The axis along which data in a graph have so many entries, of those that have one.

    Rows lead in the data of a user, but PyTensor turns constants of a model into other constants:
    the rows of `pt.stack([x, z])` lie along the last axis.

    Parameters
    ----------
    graph : Variable
    length : int
    known : collection of Variable
        Variables that are no such data, nor is what they are made of.
    """
    found = walk([graph], lambda each: [] if each in known else _inputs(each), bfs=False)
    data = {
        each: values.shape
        for each in found
        if each not in known and not is_whole(each) and (values := leaf_value(each)) is not None
    }
    return {each: shape.index(length) for each, shape in data.items() if length in shape}


def _inputs(variable: Variable) -> list[Variable]:
    """Inputs of what makes a variable, without a vector of which it is one entry, as in ``u[3]``.

    Such vectors may be as long as the data by chance.
    """
    node = variable.owner
    if node is None:
        return []
    is_entry = isinstance(node.op, Subtensor) and variable.type.ndim < node.inputs[0].type.ndim == 1
    return node.inputs[1:] if is_entry else node.inputs
