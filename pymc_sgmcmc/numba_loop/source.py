"""The operations of a transition as the source of a loop, for Numba.

They are written one after the other: loops over elements, products by `numpy.dot`, slices. All
others are calls of PyTensor's functions. An array which no later transition reads is written into
the memory of the transition before, and one that is recorded to the place where it is recorded.
Rows that are gathered from a matrix are read where they are needed, and what is only summed up
along rows or added to rows is evaluated there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import singledispatchmethod
from hashlib import sha256
from textwrap import indent
from typing import Any

import numpy as np
import pytensor.scalar.basic as scalar_basic
import pytensor.scalar.math as scalar_math
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.op import Op
from pytensor.scalar.basic import Composite, ScalarOp, ScalarType
from pytensor.tensor.basic import Alloc, Join, ScalarFromTensor, TensorFromScalar
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.math import Dot, Sum
from pytensor.tensor.shape import Shape_i, SpecifyShape
from pytensor.tensor.subtensor import (
    AdvancedIncSubtensor,
    AdvancedSubtensor,
    Subtensor,
    indices_from_subtensor,
)
from pytensor.tensor.type import TensorType

from pymc_sgmcmc.numba_loop.prefetch import prefetch_in_numba
from pymc_sgmcmc.numba_loop.products import FLOATING, contiguous_in_numba, product_in_numba

VERSION = 15
"""This number is a part of the key in the compile cache. It changes with the code of this folder,
and with the names of its modules, by which cached functions find what they call."""

EXPRESSIONS: dict[type[ScalarOp], str] = {
    scalar_basic.Sub: "({0} - {1})",
    scalar_basic.TrueDiv: "({0} / {1})",
    scalar_basic.Neg: "(-{0})",
    scalar_basic.Sqr: "({0} * {0})",
    scalar_basic.Reciprocal: "(1 / {0})",
    scalar_basic.Exp: "np.exp({0})",
    scalar_basic.Expm1: "np.expm1({0})",
    scalar_basic.Log: "np.log({0})",
    scalar_basic.Log1p: "np.log1p({0})",
    scalar_basic.Sqrt: "np.sqrt({0})",
    scalar_basic.Tanh: "np.tanh({0})",
    scalar_basic.Identity: "{0}",
    scalar_basic.Second: "{1}",
    scalar_basic.Switch: "({1} if {0} else {2})",
    scalar_basic.LT: "({0} < {1})",
    scalar_basic.GT: "({0} > {1})",
    scalar_basic.LE: "({0} <= {1})",
    scalar_basic.GE: "({0} >= {1})",
    scalar_basic.EQ: "({0} == {1})",
    scalar_basic.NEQ: "({0} != {1})",
    scalar_math.Sigmoid: "(1 / (1 + np.exp(-{0})))",
}
"""Source of scalar operations. Those that are not here are calls of PyTensor's functions."""


OF_ANY_TYPE = (scalar_basic.Identity, scalar_basic.Second, scalar_basic.Switch)
"""These operations only choose one of their inputs."""

AHEAD = 2
"""Rows are asked for this number of transitions before they are read."""

NO_NUMBERS = {"nan": "np.nan", "inf": "np.inf", "-inf": "(-np.inf)"}
"""Source of the numbers whose text Python does not read."""


class Source:
    """Source of the operations of a graph.

    A tensor without axes is a number in the source. A matrix of one column or row is a vector, and
    a tensor of one element a number, as long as no operation needs more.

    Parameters
    ----------
    inputs : sequence of Variable
    entries : int
        Number of inputs that are entries of sequences.
    carried : set of Variable
        Variables whose arrays the next transition may read. They get new memory in each transition.
    recorded : mapping of Variable to str
        Variables that are recorded, and the names of their records.
    nodes : sequence of Apply
        Operations that will be written, in their order.
    """

    def __init__(
        self,
        inputs: Sequence[Variable],
        entries: int,
        carried: set[Variable],
        recorded: Mapping[Variable, str],
        nodes: Sequence[Apply],
    ):
        self.names: dict[Variable, str] = {}
        self.constants: list[np.ndarray] = []
        self.environment: dict[str, Any] = {
            "np": np,
            "contiguous": contiguous_in_numba(),
            "product": product_in_numba(),
        }
        self._carried, self._recorded = carried, recorded
        self._in_records: set[str] = set()
        self._before: list[str] = []
        self._lines: list[str] = []
        # The axis of a vector that stands for a matrix, -1 for a number, and its name.
        self._vectors: dict[Variable, tuple[int, str]] = {}
        # Functions of the places i and j of matrices that are not in memory, and their lengths.
        self._late: dict[Variable, tuple[Callable[[str, str], str], tuple[str, str]]] = {}
        self._of_row: list[str] = []
        self._readers: dict[Variable, list[Apply]] = {}
        for node in nodes:
            for variable in node.inputs:
                self._readers.setdefault(variable, []).append(node)
        self._changed = storage(_changed_in_place(nodes))
        self._keys: list[str | None] = []
        self._lengths: dict[int, int] = {}
        self._count = 0
        self._entries = [f"entry_{number}" for number in range(entries)]
        self._arguments = [f"given_{number}" for number in range(len(inputs) - entries)]
        self.names.update(zip(inputs, [*self._entries, *self._arguments], strict=True))

    # --- Names ------------------------------------------------------------------------------

    def new(self, prefix: str = "t") -> str:
        """A name that is not in use."""
        self._count += 1
        return f"{prefix}{self._count}"

    def line(self, text: str) -> None:
        """Add a line, or several."""
        self._lines.append(text)

    def name(self, variable: Variable) -> str:
        """Name of a variable, or the source of a constant number."""
        if variable in self.names:
            return self.names[variable]
        if isinstance(variable, Constant):
            return self._constant(variable)
        if variable in self._late:
            return self._in_memory(variable)
        axis, value = self._vectors[variable]
        self.names[variable] = name = self.new()
        if axis < 0:
            self.line(f"{name} = np.full({(1,) * variable.type.ndim}, {value})")
        else:
            shape = "(-1, 1)" if axis == 0 else "(1, -1)"
            self.line(f"{name} = contiguous({value}).reshape({shape})")
        return name

    def _constant(self, variable: Constant) -> str:
        value = np.asarray(variable.data)
        if value.ndim == 0:
            number = repr(value.item())
            number = NO_NUMBERS.get(number, f"({number})")
            return f"np.float32({number})" if value.dtype == np.float32 else number
        self.names[variable] = name = self.new("constant_")
        self.constants.append(value)
        self._arguments.append(name)
        return name

    def _given(self, length: int) -> str:
        """Name of an argument for a length, so that models of other sizes have the same source."""
        name = f"length_{self._lengths.setdefault(length, len(self._lengths))}"
        if name not in self._arguments:
            self.constants.append(np.asarray(length))
            self._arguments.append(name)
        return name

    def element(self, variable: Variable, places: Sequence[str]) -> str:
        """Source of one element of a variable, of which an axis of length one has one place."""
        if variable.type.ndim == 0:
            return self.name(variable)
        own = [
            "0" if broadcast else place
            for place, broadcast in zip(places, variable.type.broadcastable, strict=True)
        ]
        if variable in self._vectors:
            axis, value = self._vectors[variable]
            return value if axis < 0 else f"{value}[{own[axis]}]"
        if variable in self._late and variable not in self.names:
            return self._late[variable][0](*own)
        return f"{self.name(variable)}[{', '.join(own)}]"

    def length(self, variable: Variable, axis: int) -> str:
        """Source of the length of an axis."""
        if variable.type.shape[axis] == 1:
            return "1"
        if variable in self._vectors:
            return f"{self._vectors[variable][1]}.shape[0]"
        if variable in self._late:
            return self._late[variable][1][axis]
        return f"{self.name(variable)}.shape[{axis}]"

    def _in_memory(self, variable: Variable) -> str:
        """Name of a matrix that was to be evaluated where it is read."""
        rows, columns = (self.length(variable, axis) for axis in (0, 1))
        name = self.allocate(variable, [rows, columns])
        heads = [f"for i in range({rows}):", f"for j in range({columns}):"]
        self._write_loops(heads, lambda: [f"{name}[i, j] = {self.element(variable, 'ij')}"])
        self.names[variable] = name
        return name

    def _write_loops(
        self,
        heads: Sequence[str],
        body: Callable[[], list[str]],
        first: Sequence[str] = (),
        last: Sequence[str] = (),
    ) -> None:
        """Write loops: lines at the begin and end of the outer one, and lines in the inner one."""
        before, self._lines, self._of_row = self._lines, [], []
        stores = body()
        lines, self._lines = [*self._lines, *stores], before
        inner = _nested(heads[1:], lines)
        self.line(_nested(heads[:1], [*first, *self._of_row, inner, *last]))

    def _is_late(self, variable: Variable, node: Apply) -> bool:
        """Whether a matrix can be evaluated where it is read.

        What it is made of must not change in the transition.
        """
        return (
            variable.type.ndim == 2
            and not any(variable.type.broadcastable)
            and not self._changed & storage(node.inputs)
        )

    def _is_read_once(self, node: Apply) -> bool:
        """Whether the result is a matrix that is only summed up along rows, or added to rows."""
        (out, *others), readers = node.outputs, self._readers.get(node.outputs[0], [])
        if others or len(readers) != 1 or not self._is_late(out, node):
            return False
        if out.type.dtype not in FLOATING:  # The sums of whole numbers depend on their type.
            return False
        op, inputs = readers[0].op, readers[0].inputs
        if isinstance(op, AdvancedIncSubtensor):
            return inputs[1] is out and _adds_rows(op, inputs)
        return type(op) is Sum and op.axis == (1,)

    def allocate(self, variable: Variable, lengths: Sequence[str]) -> str:
        """Name of an array for a variable.

        It is the place where the variable is recorded, or else, if possible, the memory of the last
        transition.
        """
        name, dtype = self.new(), f"np.{_type(variable)}"
        if variable in self._recorded and len(lengths) == variable.type.ndim:
            record = self._recorded[variable]
            self.line(f"{name} = {record}[k]")
            for axis, length in enumerate(lengths):
                self.line(_same_length(length, f"{name}.shape[{axis}]"))
            self._in_records.add(record)
            return name
        new = f"{name} = np.empty(({', '.join(lengths)},), {dtype})"
        if variable in self._carried:
            self.line(new)
            return name
        self._before.append(f"{name} = np.empty({(0,) * len(lengths)}, {dtype})")
        differs = " or ".join(
            f"{name}.shape[{axis}] != {length}" for axis, length in enumerate(lengths)
        )
        self.line(f"if {differs}:\n    {new}")
        return name

    # --- Operations -------------------------------------------------------------------------

    @singledispatchmethod
    def write(self, op: Op, node: Apply) -> None:
        """Write an operation."""
        self._write_call(op, node)

    def _write_call(self, op: Op, node: Apply) -> None:
        """Write a call of PyTensor's function."""
        function = self._function(op, node)
        arguments = [
            f"np.asarray({self.name(variable)})"
            if isinstance(variable.type, TensorType) and variable.type.ndim == 0
            else self.name(variable)
            for variable in node.inputs
        ]
        results = [self.new() for _ in node.outputs]
        self.line(f"{', '.join(results)} = {function}({', '.join(arguments)})")
        for variable, result in zip(node.outputs, results, strict=True):
            is_number = isinstance(variable.type, TensorType) and variable.type.ndim == 0
            self.names[variable] = f"{result}.item()" if is_number else result

    def _function(self, op: Op, node: Apply) -> str:
        from pytensor.link.numba.dispatch.basic import numba_funcify_and_cache_key

        function, key = numba_funcify_and_cache_key(op, node=node)
        self._keys.append(key)
        name = self.new("function_")
        self.environment[name] = function
        return name

    @write.register(SpecifyShape)
    @write.register(ScalarFromTensor)
    @write.register(TensorFromScalar)
    def _write_same(self, op: Op, node: Apply) -> None:
        self.names[node.outputs[0]] = self.name(node.inputs[0])

    @write.register
    def _write_shape(self, op: Shape_i, node: Apply) -> None:
        self.names[node.outputs[0]] = self.length(node.inputs[0], op.i)

    @write.register
    def _write_dimshuffle(self, op: DimShuffle, node: Apply) -> None:
        (x,), (out,) = node.inputs, node.outputs
        order = tuple(op.new_order)
        kept = self._vectors.get(x, (None, ""))
        if x.type.ndim and all(x.type.broadcastable) and out.type.ndim == 0:
            self.names[out] = self.element(x, ["0"] * x.type.ndim)
        elif x.type.ndim == 0 or kept[0] == -1:
            self._vectors[out] = (-1, self.name(x) if x.type.ndim == 0 else kept[1])
        elif order in ((0, "x"), ("x", 0)) and x.type.ndim == 1 and x not in self._vectors:
            self._vectors[out] = (order.index(0), self.name(x))
        elif len(order) == 1 and kept[0] == order[0]:
            self.names[out] = kept[1]
        elif order == (1, 0):
            self.names[out] = f"{self.name(x)}.T"
        else:
            self._write_call(op, node)

    @write.register
    def _write_dot(self, op: Dot, node: Apply) -> None:
        x, y = node.inputs
        (out,) = node.outputs
        types = {variable.type.dtype for variable in (x, y, out)}
        if len(types) > 1 or not types <= set(FLOATING):
            self._write_call(op, node)
            return
        column, row = self._vectors.get(y, (1, "")), self._vectors.get(x, (0, ""))
        if column[0] == 0 and row[0] == 1:
            result = self.new()
            self.line(f"{result} = np.dot(contiguous({row[1]}), contiguous({column[1]}))")
            self._vectors[out] = (-1, result)
        elif column[0] == 0:
            result = self._product(out, self.name(x), column[1], [self.length(x, 0)])
            self._vectors[out] = (0, result)
        elif row[0] == 1:
            result = self._product(out, f"{self.name(y)}.T", row[1], [self.length(y, 1)])
            self._vectors[out] = (1, result)
        else:
            lengths = [self.length(x, 0), self.length(y, 1)]
            self.names[out] = self._product(out, self.name(x), self.name(y), lengths)

    def _product(self, out: Variable, x: str, y: str, lengths: Sequence[str]) -> str:
        """Write a product of a matrix and a vector or matrix."""
        result = self.allocate(out, lengths)
        self.line(f"product({x}, {y}, {result})")
        return result

    @write.register
    def _write_subtensor(self, op: Subtensor, node: Apply) -> None:
        def source(entry: Any) -> str:
            if isinstance(entry, slice):
                parts = (entry.start, entry.stop, entry.step)
                words = ["" if part is None else source(part) for part in parts]
                return ":".join(words if words[2] else words[:2])
            return self.name(entry) if isinstance(entry, Variable) else repr(entry)

        entries = indices_from_subtensor(node.inputs[1:], op.idx_list)
        result = self.new()
        if isinstance(entries[0], slice):
            self._ask_for_rows(node.inputs[0], entries[0])
        self.line(f"{result} = {self.name(node.inputs[0])}[{', '.join(map(source, entries))}]")
        self.names[node.outputs[0]] = result

    def _ask_for_rows(self, x: Variable, window: slice) -> None:
        """Ask for the window of a later transition, where its first row is an entry."""
        if not isinstance(window.start, Variable) or not isinstance(window.stop, Variable):
            return
        name, start = self.name(x), self.name(window.start)
        if name in self._arguments and start in self._entries and window.step is None:
            self.environment["prefetch"] = prefetch_in_numba()
            later = f"sequence_{self._entries.index(start)}[min(k + {AHEAD}, transitions - 1)]"
            self.line(f"prefetch({name}, {later}, {self.name(window.stop)} - {start})")

    @write.register
    def _write_gather(self, op: AdvancedSubtensor, node: Apply) -> None:
        x, *indices = node.inputs
        (out,) = node.outputs
        if not _is_of_rows(op, x, indices):
            self._write_call(op, node)
            return
        places = self.name(indices[0])
        if x.type.ndim == 1:
            self.names[out] = self.new()
            self.line(f"{self.names[out]} = {self.name(x)}[{places}]")
            return
        name = self.name(x)
        lengths = self.length(indices[0], 0), self.length(x, 1)
        heads = [f"for i in range({lengths[0]}):"]
        self.line(_nested(heads, _row_number(self.new("row_"), f"{places}[i]", name)))

        def element(i: str, j: str) -> str:
            row = self.new("row_")
            self._of_row.append(f"{row} = {name}[{places}[{i}]]")
            return f"{row}[{j}]"

        self._late[out] = element, lengths
        if not self._is_late(out, node):
            self._in_memory(out)

    @write.register
    def _write_scatter(self, op: AdvancedIncSubtensor, node: Apply) -> None:
        base, values, *indices = node.inputs
        if not _adds_rows(op, node.inputs):
            self._write_call(op, node)
            return
        result, places, row = self.new(), self.name(indices[0]), self.new("row_")
        at = ["i", "j"][: base.type.ndim]
        heads = self._loops([indices[0], values], [0])[1]
        self.line(f"{result} = {self.name(base)}{'' if op.inplace else '.copy()'}")
        if base.type.ndim == 2:
            heads.append("for j in range(n_j):")
            self.line(f"n_j = {result}.shape[1]")
            if values.type.ndim == 2 and not values.type.broadcastable[1]:
                self.line(_same_length(self.length(values, 1), "n_j"))
        if values.type.ndim and not (values in self._vectors or values in self._late):
            self.name(values)
        place = ", ".join([row, *at[1:]])
        self._write_loops(
            heads,
            lambda: [f"{result}[{place}] += {self.element(values, at[: values.type.ndim])}"],
            _row_number(row, f"{places}[i]", result),
        )
        self.names[node.outputs[0]] = result

    @write.register
    def _write_alloc(self, op: Alloc, node: Apply) -> None:
        value, *shape = node.inputs
        (out,) = node.outputs
        if not (shape and all(value.type.broadcastable)):
            self._write_call(op, node)
            return
        number = self.element(value, ["0"] * value.type.ndim)
        self.names[out] = self.allocate(out, [self.name(length) for length in shape])
        self.line(f"{self.names[out]}[:] = {number}")

    @write.register
    def _write_join(self, op: Join, node: Apply) -> None:
        parts = node.inputs
        if any(part.type.ndim != 1 for part in parts):
            self._write_call(op, node)
            return
        result = self.new()
        names = [f"contiguous({self.name(part)})" for part in parts]
        self.line(f"{result} = np.concatenate(({', '.join(names)},))")
        self.names[node.outputs[0]] = result

    @write.register
    def _write_reduction(self, op: CAReduce, node: Apply) -> None:
        (x,), (out,) = node.inputs, node.outputs
        # Sums of one column are PyTensor's: a sum in another order has other last digits.
        of_columns = x.type.ndim == 2 and op.axis == (0,) and not x.type.broadcastable[1]
        of_rows = x.type.ndim == 2 and op.axis == (1,) and not x.type.broadcastable[0]
        of_all = x.type.ndim in (1, 2) and out.type.ndim == 0
        if type(op) is not Sum or not (of_columns or of_rows or of_all):
            self._write_call(op, node)
            return
        result = self.new()
        places, heads = self._loops([x], range(x.type.ndim))
        if of_all:
            self.line(f"{result} = np.{_type(out)}(0)")
            self._write_loops(heads, lambda: [f"{result} += {self.element(x, places)}"])
        elif of_rows:
            result, total = self.allocate(out, ["n_i"]), self.new("s")
            self._write_loops(
                heads,
                lambda: [f"{total} += {self.element(x, places)}"],
                [f"{total} = np.{op.acc_dtype}(0)"],
                [f"{result}[i] = {total}"],
            )
        else:
            self.line(f"{result} = np.zeros(n_j, np.{op.acc_dtype})")
            self._write_loops(heads, lambda: [f"{result}[j] += {self.element(x, places)}"])
            self.line(f"{result} = {result}.astype(np.{_type(out)})")
        self.names[out] = result

    @write.register
    def _write_elemwise(self, op: Elemwise, node: Apply) -> None:
        if node.outputs[0].type.ndim > 2:
            self._write_call(op, node)
            return
        for variable in node.inputs:  # Names are made before the loop.
            if variable.type.ndim and variable not in self._vectors | self._late:
                self.name(variable)
        if node.outputs[0].type.ndim == 0:
            results = self._scalar(op.scalar_op, [self.name(x) for x in node.inputs], node)
            for variable, result in zip(node.outputs, results, strict=True):
                self.names[variable] = self.new()
                self.line(f"{self.names[variable]} = {result}")
            return
        # An axis of length one is left out, so that a column or row stays a vector.
        broadcast = node.outputs[0].type.broadcastable
        axes = [axis for axis in range(len(broadcast)) if not broadcast[axis]]
        if len(broadcast) != 2 or len(axes) != 1:
            axes = list(range(len(broadcast)))
        places, heads = self._loops(node.inputs, axes)
        at = [place for axis, place in enumerate(places) if axis in axes]
        lengths = [f"n_{place}" for place in at]
        if self._is_read_once(node):
            kept = self.new("n_"), self.new("n_")
            self.line(f"{', '.join(kept)} = {', '.join(lengths)}")

            def element(i: str, j: str) -> str:
                elements = [self.element(variable, [i, j]) for variable in node.inputs]
                return self._scalar(op.scalar_op, elements, node)[0]

            self._late[node.outputs[0]] = element, kept
            return
        names = [self.allocate(variable, lengths) for variable in node.outputs]
        for variable, name in zip(node.outputs, names, strict=True):
            if len(axes) == len(broadcast):
                self.names[variable] = name
            else:
                self._vectors[variable] = (axes[0], name)

        def stores() -> list[str]:
            elements = [self.element(variable, places) for variable in node.inputs]
            results = self._scalar(op.scalar_op, elements, node)
            return [
                f"{name}[{', '.join(at)}] = {result}"
                for name, result in zip(names, results, strict=True)
            ]

        self._write_loops(heads, stores)

    def _loops(
        self, inputs: Sequence[Variable], axes: Sequence[int]
    ) -> tuple[list[str], list[str]]:
        """Names of the places of an element on all axes, and heads of loops over some axes."""
        places = ["i", "j"][: max(variable.type.ndim for variable in inputs)]
        for axis in axes:
            lengths = [
                self.length(variable, axis)
                for variable in inputs
                if variable.type.ndim and not variable.type.broadcastable[axis]
            ]
            self.line(f"n_{places[axis]} = {lengths[0] if lengths else 1}")
            for other in dict.fromkeys(lengths):
                if other != lengths[0]:
                    # Each place that raises an error frees all arrays, and takes long to compile.
                    count = f"n_{places[axis]}"
                    self.line(f"if {other} != {count}:\n    unequal, {count} = True, 0")
        return places, [f"for {places[axis]} in range(n_{places[axis]}):" for axis in axes]

    def _scalar(self, op: ScalarOp, values: Sequence[str], node: Apply) -> list[str]:
        """Source of the results of a scalar operation; those of a Composite get lines."""
        if isinstance(op, Composite):
            names: dict[Variable, str] = dict(zip(op.fgraph.inputs, values, strict=True))

            def name(variable: Variable) -> str:
                return names[variable] if variable in names else self._constant(variable)

            for inner in op.fgraph.toposort():
                results = self._scalar(inner.op, [name(x) for x in inner.inputs], inner)
                for variable, result in zip(inner.outputs, results, strict=True):
                    names[variable] = self.new("s")
                    self.line(f"{names[variable]} = {result}")
            return [name(variable) for variable in op.fgraph.outputs]
        types = [x.type.dtype for x in node.inputs]
        floating = [dtype in FLOATING for dtype in types]
        # Numba has other rules than NumPy for sums of truth values and of unsigned integers.
        narrow = not any(floating) and any(dtype[0] in "ub" for dtype in types)
        if isinstance(op, scalar_basic.Add | scalar_basic.Mul):
            is_sum, logical = isinstance(op, scalar_basic.Add), set(types) == {"bool"}
            if logical or not narrow:
                sign = (" | " if is_sum else " & ") if logical else (" + " if is_sum else " * ")
                return [f"({sign.join(values)})"]
        if isinstance(op, scalar_basic.Cast) and op.o_type.dtype in FLOATING:
            return [f"np.{op.o_type.dtype}({values[0]})"]
        expression = EXPRESSIONS.get(type(op))
        if expression is not None and (
            all(floating) or not (narrow or "np." in expression) or type(op) in OF_ANY_TYPE
        ):
            return [expression.format(*values)]
        scalars = [ScalarType(dtype).make_variable() for dtype in types]
        function = self._function(op, op.make_node(*scalars))
        return [f"{function}({', '.join(values)})"]

    # --- The loop ---------------------------------------------------------------------------

    def of_loop(self, outputs: Sequence[Variable], states: int, memories: int) -> str:
        """Source of the function: the operations in a loop.

        The first outputs are the state and the memory, of which only the last is returned.
        """
        results = [self.name(variable) for variable in outputs]
        carried = self._arguments[: states + memories]
        records, stores = [], []
        for number, (variable, result) in enumerate(zip(outputs, results, strict=True)):
            if states <= number < states + memories:
                continue
            record = f"record_{number}"
            records.append(record)
            lengths = [self._given(length) for length in variable.type.shape]
            if variable.type.ndim == 0:
                stores.append(f"{record}[k] = {result}")
            elif record not in self._in_records:
                places = ["i", "j", "l"][: variable.type.ndim]
                stores.extend(
                    _same_length(f"{result}.shape[{axis}]", length)
                    for axis, length in enumerate(lengths)
                )
                heads = [
                    f"for {place} in range({length}):"
                    for place, length in zip(places, lengths, strict=True)
                ]
                at = ", ".join(places)
                stores.append(_nested(heads, [f"{record}[k, {at}] = {result}[{at}]"]))
        sequences = [f"sequence_{number}" for number in range(len(self._entries))]
        body = [
            *(
                f"{entry} = {sequence}[k]"
                for entry, sequence in zip(self._entries, sequences, strict=True)
            ),
            *self._lines,
            *stores,
            f"{', '.join(carried)}, = {', '.join(results[: len(carried)])},",
        ]
        lines = [
            f"transitions = len({sequences[0]})",
            "unequal = False",
            *self._before,
            _nested(["for k in range(transitions):"], body),
            "if unequal:\n    raise ValueError('lengths differ')",
            f"return ({''.join(f'{name}, ' for name in carried[states:])})",
        ]
        head = f"def transitions({', '.join([*sequences, *self._arguments, *records])}):"
        self.source = _nested([head], lines)
        return self.source

    @property
    def key(self) -> str | None:
        """Key of the function in the compile cache, None where a part of it cannot be cached."""
        if any(key is None for key in self._keys):
            return None
        return sha256(f"{VERSION} {self.source} {self._keys}".encode()).hexdigest()


def storage(outputs: Sequence[Variable]) -> set[Variable]:
    """Variables which may share their memory with one of the outputs, the outputs included."""
    found, waiting = set(), list(outputs)
    while waiting:
        variable = waiting.pop()
        if variable not in found:
            found.add(variable)
            node = variable.owner
            if node is not None and not isinstance(node.op, Elemwise | Dot | Alloc | Sum):
                waiting.extend(node.inputs)
    return found


def _is_of_rows(op: Op, x: Variable, indices: Sequence[Variable]) -> bool:
    """Whether an operation selects elements of a vector, or rows of a matrix, by their numbers."""
    return (
        x.type.ndim in (1, 2)
        and tuple(op.idx_list) == (0,)
        and len(indices) == 1
        and indices[0].type.ndim == 1
        and indices[0].type.dtype.startswith(("int", "uint"))
    )


def _adds_rows(op: AdvancedIncSubtensor, inputs: Sequence[Variable]) -> bool:
    """Whether an operation adds to selected elements of a vector, or rows of a matrix."""
    base, values, *indices = inputs
    adds = not op.set_instead_of_inc and not op.ignore_duplicates
    return adds and _is_of_rows(op, base, indices) and values.type.ndim in (0, base.type.ndim)


def _changed_in_place(nodes: Sequence[Apply]) -> list[Variable]:
    """Variables whose arrays are changed by an operation."""
    return [
        node.inputs[number]
        for node in nodes
        for numbers in node.op.destroy_map.values()
        for number in numbers
    ]


def _row_number(name: str, number: str, array: str) -> list[str]:
    """Source of a number of a row, which may count from the end as in NumPy."""
    return [
        f"{name} = {number}",
        f"if not -{array}.shape[0] <= {name} < {array}.shape[0]:",
        "    raise IndexError('a number is out of range')",
    ]


def _type(variable: Variable) -> str:
    dtype = variable.type.dtype
    return "bool_" if dtype == "bool" else dtype


def _same_length(length: str, expected: str) -> str:
    """Source of a check, without which a loop would read beyond an array."""
    return f"if {length} != {expected}:\n    raise ValueError('lengths differ')"


def _nested(heads: Sequence[str], body: Sequence[str]) -> str:
    """Lines of a body inside of nested blocks."""
    text = "\n".join(body)
    for head in reversed(heads):
        text = f"{head}\n{indent(text, '    ')}"
    return text
