"""The operations of a transition as the source of a loop, for Numba.

They are written one after the other: loops over elements, products by `numpy.dot`, slices, and
scans of a state. All others are calls of PyTensor's functions. An array which no later transition
reads is written into the memory of the transition before, and one that is recorded to the place
where it is recorded. Rows that are gathered, axes in another order and repeated numbers are read
where they are needed, and what is only summed up or added to rows is evaluated there.

Numba takes long to compile calls and places that raise an error. So an error is a number, which the
function returns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import singledispatchmethod
from hashlib import sha256
from textwrap import indent
from typing import Any

import numpy as np
import pytensor.scalar.basic as scalar_basic
import pytensor.scalar.math as scalar_math
from pytensor.compile.ops import DeepCopyOp
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.op import Op
from pytensor.raise_op import CheckAndRaise
from pytensor.scalar.basic import Composite, ScalarOp, ScalarType
from pytensor.scan.op import Scan
from pytensor.tensor.basic import (
    Alloc,
    AllocEmpty,
    ARange,
    Join,
    MakeVector,
    ScalarFromTensor,
    Split,
    TensorFromScalar,
)
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.math import Dot, Sum
from pytensor.tensor.shape import Reshape, Shape_i, SpecifyShape
from pytensor.tensor.subtensor import (
    AdvancedIncSubtensor,
    AdvancedSubtensor,
    IncSubtensor,
    Subtensor,
    indices_from_subtensor,
)
from pytensor.tensor.type import TensorType
from pytensor.tensor.type_other import NoneTypeT

from pymc_sgmcmc.compiling.numba_loop.prefetch import prefetch_in_numba
from pymc_sgmcmc.compiling.numba_loop.products import FLOATING, functions_in_numba

VERSION = 20
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
    scalar_basic.Switch: "chosen({0}, {1}, {2})",
    scalar_basic.LT: "({0} < {1})",
    scalar_basic.GT: "({0} > {1})",
    scalar_basic.LE: "({0} <= {1})",
    scalar_basic.GE: "({0} >= {1})",
    scalar_basic.EQ: "({0} == {1})",
    scalar_basic.NEQ: "({0} != {1})",
    scalar_basic.AND: "({0} & {1})",
    scalar_basic.OR: "({0} | {1})",
    scalar_basic.IsNan: "({0} != {0})",
    scalar_basic.IsInf: "(abs({0}) == np.inf)",
    scalar_basic.Abs: "abs({0})",
    scalar_basic.IntDiv: "({0} // {1})",
    scalar_basic.Maximum: "larger({0}, {1})",
    scalar_basic.Minimum: "smaller({0}, {1})",
    scalar_math.Sigmoid: "(1 / (1 + np.exp(-{0})))",
}
"""Source of scalar operations. Those that are not here are calls of PyTensor's functions."""


OF_ANY_TYPE = (scalar_basic.Identity, scalar_basic.Second, scalar_basic.Switch)
"""These operations only choose one of their inputs."""

OF_TRUTH = (scalar_basic.AND, scalar_basic.OR)
"""These operations are of truth values."""

REDUCTIONS: dict[type[ScalarOp], tuple[str, str]] = {
    scalar_basic.Add: ("0", "{0} + {1}"),
    scalar_basic.Mul: ("1", "{0} * {1}"),
    scalar_basic.Maximum: ("-np.inf", EXPRESSIONS[scalar_basic.Maximum]),
    scalar_basic.Minimum: ("np.inf", EXPRESSIONS[scalar_basic.Minimum]),
    scalar_basic.AND: ("True", EXPRESSIONS[scalar_basic.AND]),
    scalar_basic.OR: ("False", EXPRESSIONS[scalar_basic.OR]),
}
"""First value and source of operations that reduce the elements along some axes to one."""

PLACES = "ijlmopqruvwxyz"
"""Names of the places of an element, one for each axis."""

AHEAD = 2
"""Rows are asked for this number of transitions before they are read."""

ELEMENT_OF_ROW = re.compile(r"(\bvectors_\d+\[\d+)\]\[")
"""Source of an element of a row, of which it makes an index of the array."""

STOP = "<stop>"
"""It stands for the end of the function with the first error, until what it returns is known."""

NO_NUMBERS = {"nan": "np.nan", "inf": "np.inf", "-inf": "(-np.inf)"}
"""Source of the numbers whose text Python does not read."""

DIFFERENT = ValueError("lengths differ")
"""This is the error where there is no other, since what is wrong gets the length zero."""


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
        self.environment: dict[str, Any] = {"np": np, **functions_in_numba()}
        self._carried, self._recorded = carried, recorded
        self._in_records: set[str] = set()
        self._before: list[str] = []
        self._lines: list[str] = []
        # Functions of the places of an element of arrays that are not in memory, and their lengths.
        self._late: dict[Variable, tuple[Callable[..., str], Sequence[str]]] = {}
        # For some of these, matrices of one column or row: the other axis, and a vector in memory.
        self._vectors: dict[Variable, tuple[int, str]] = {}
        self.errors: dict[str, Exception] = {repr(DIFFERENT): DIFFERENT}
        self._of_row: list[str] = []
        self._readers: dict[Variable, list[Apply]] = {}
        self._changed: set[Variable] = set()
        self._prepare(nodes)
        self._keys: list[str | None] = []
        self._entries_of: dict[Variable, list[str]] = {}
        self._valid_lengths: dict[tuple[str, str, str], str] = {}
        # Names of lengths, by the source of a length and by the number that types have for it.
        self._known_lengths: dict[str, str] = {}
        self._static: dict[int, str] = {}
        # Arrays with a row for each vector of a type and length, and how many rows they have.
        self._vectors_of: dict[tuple[str, str], str] = {}
        self._rows_of: dict[str, int] = {}
        self._depth = 0
        self._count = 0
        self._entries = [f"entry_{number}" for number in range(entries)]
        self._arguments = [f"given_{number}" for number in range(len(inputs) - entries)]
        self.names.update(zip(inputs, [*self._entries, *self._arguments], strict=True))

    def _prepare(self, nodes: Sequence[Apply]) -> None:
        """Note what nodes that will be written read and change."""
        for node in nodes:
            for variable in node.inputs:
                self._readers.setdefault(variable, []).append(node)
            for numbers in node.op.destroy_map.values():
                self._changed |= storage([node.inputs[number] for number in numbers])

    # --- Names ------------------------------------------------------------------------------

    def new(self, prefix: str = "t") -> str:
        """A name that is not in use."""
        self._count += 1
        return f"{prefix}{self._count}"

    def line(self, text: str) -> None:
        """Add a line, or several."""
        self._lines.append(text)

    def check(self, wrong: str, error: Exception = DIFFERENT) -> None:
        """Note an error where a condition is true. What follows has to be safe nevertheless."""
        self.errors.setdefault(repr(error), error)
        self.line(f"failed |= {2 ** list(self.errors).index(repr(error))} * ({wrong})")

    def common(self, lengths: Sequence[str]) -> str:
        """Name of a length that several are equal to, which is zero where they are not."""
        first, *others = dict.fromkeys(lengths)
        if not others:
            return first
        length = self.new("n_")
        equal = "".join(f" * ({other} == {first})" for other in others)
        self.line(f"{length} = {first}{equal}")
        self.check(" | ".join(f"({other} != {first})" for other in others))
        return length

    def name(self, variable: Variable) -> str:
        """Name of a variable, or the source of a constant number."""
        if variable in self.names:
            return self.names[variable]
        if isinstance(variable, Constant):
            return self._constant(variable)
        return self._in_memory(variable)

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

    def element(self, variable: Variable, places: Sequence[str]) -> str:
        """Source of one element of a variable, of which an axis of length one has one place."""
        if variable.type.ndim == 0:
            return self.name(variable)
        own = [
            "0" if broadcast else place
            for place, broadcast in zip(places, variable.type.broadcastable, strict=True)
        ]
        if variable in self._late and variable not in self.names:
            return self._late[variable][0](*own)
        return f"{self.name(variable)}[{', '.join(own)}]"

    def length(self, variable: Variable, axis: int) -> str:
        """Source of the length of an axis."""
        if variable.type.shape[axis] == 1:
            return "1"
        if variable in self._late:
            length = self._late[variable][1][axis]
        else:
            length = f"{self.name(variable)}.shape[{axis}]"
        length, size = self._known_lengths.get(length, length), variable.type.shape[axis]
        if size is None:
            return length
        # Lengths that are equal by their types have the name of one that is known by now.
        if not self._depth:
            self._static.setdefault(size, length)
        return self._static.get(size, length)

    def _in_memory(self, variable: Variable) -> str:
        """Name of an array that was to be evaluated where it is read.

        Rows and their transpose are one array: a product with them adds in the same order whether
        they are gathered or a part of adjacent rows.
        """
        node = variable.owner
        is_transpose = isinstance(node.op, DimShuffle) and tuple(node.op.new_order) == (1, 0)
        if is_transpose and variable not in self._recorded:
            self.names[variable] = name = f"{self.name(node.inputs[0])}.T"
            return name
        lengths = [self.length(variable, axis) for axis in range(variable.type.ndim)]
        name = self.allocate(variable, lengths)
        self._store(variable, lengths, lambda *at: f"{name}[{', '.join(at)}]")
        self.names[variable] = name
        return name

    def _store(
        self,
        variable: Variable,
        lengths: Sequence[str],
        place: Callable[..., str],
        sign: str = "=",
    ) -> None:
        """Write the elements of a variable to places, or add them, repeated on missing axes."""
        at = PLACES[: len(lengths)]
        own = at[len(at) - variable.type.ndim :]
        self._write_loops(
            _loops(at, lengths), lambda: [f"{place(*at)} {sign} {self.element(variable, own)}"]
        )

    def _repeated(self, variable: Variable, lengths: Sequence[str]) -> list[str]:
        """Lengths to which a variable is repeated, checked against those that it has itself."""
        lengths, skipped = list(lengths), len(lengths) - variable.type.ndim
        for axis, broadcast in enumerate(variable.type.broadcastable):
            if not broadcast:
                own = self.length(variable, axis)
                lengths[skipped + axis] = self.common([lengths[skipped + axis], own])
        return lengths

    def _read_late(
        self, out: Variable, node: Apply, element: Callable[..., str], lengths: Sequence[str]
    ) -> None:
        """Evaluate a variable where it is read, or now where its inputs change afterwards."""
        self._late[out] = element, lengths
        if self._change(node.inputs):
            self._in_memory(out)

    def _change(self, inputs: Sequence[Variable]) -> bool:
        """Whether arrays in memory are changed by some operation, so that they are read now."""
        shared = storage([v for v in inputs if v not in self._late or v in self._vectors])
        return not self._changed.isdisjoint([*inputs, *shared])

    def _same(self, variable: Variable, out: Variable) -> None:
        """Let one variable stand for another."""
        tables: tuple[dict[Variable, Any], ...] = (self.names, self._late, self._vectors)
        for table in tables:
            if variable in table:
                table[out] = table[variable]
        if isinstance(variable, Constant):
            self.names[out] = self.name(variable)

    def _number(self, out: Variable, number: str) -> None:
        """Let a number stand for a tensor of one element."""
        if out.type.ndim:
            self._late[out] = lambda *at: number, ["1"] * out.type.ndim
        else:
            self.names[out] = number

    def _vector(self, out: Variable, axis: int, name: str) -> None:
        """Let a vector in memory stand for a matrix of one column or row."""
        self._vectors[out] = axis, name
        lengths = [f"{name}.shape[0]", "1"]
        self._late[out] = lambda *at: f"{name}[{at[axis]}]", lengths if axis == 0 else lengths[::-1]

    def _write_loops(
        self,
        heads: Sequence[str],
        body: Callable[[], list[str]],
        first: Sequence[str] = (),
        last: Sequence[str] = (),
        depth: int = 1,
    ) -> None:
        """Write loops: lines at the begin and end of one of them, and lines in the inner one."""
        before, self._lines, self._of_row = self._lines, [], []
        self._depth += 1
        stores = body()
        self._depth -= 1
        lines, self._lines = [*self._lines, *stores], before
        inner = _nested(heads[max(depth, 1) :], lines)
        if depth:
            inner = _nested(heads[1:depth], [*first, inner, *last])
        self.line(_nested(heads[:1], [*self._of_row, inner]))

    def _is_read_once(self, node: Apply) -> bool:
        """Whether the result is an array that is only summed up, or added to rows."""
        (out, *others), readers = node.outputs, self._readers.get(node.outputs[0], [])
        if others or len(readers) != 1 or any(out.type.broadcastable):
            return False
        # What it is made of must not change in the transition.
        if out.type.dtype not in FLOATING or self._change(node.inputs):
            return False
        op, inputs = readers[0].op, readers[0].inputs
        if isinstance(op, AdvancedIncSubtensor):
            added = inputs[1] is out and out.type.ndim == readers[0].outputs[0].type.ndim
            return added and _scattered(op, inputs) == [0]
        return isinstance(op, CAReduce) and out not in self._recorded and out not in self._carried

    def allocate(self, variable: Variable, lengths: Sequence[str]) -> str:
        """Name of an array for a variable.

        It is the place where the variable is recorded, or else, if possible, the memory of the last
        transition.
        """
        dtype, shape = f"np.{_type(variable)}", f"({', '.join(lengths)},)"
        is_kept = variable in self._recorded or variable in self._carried
        is_row = len(lengths) == 1 and not (self._depth or is_kept)
        name = self._row(dtype, lengths[0]) if is_row else self.new()
        self._known_lengths |= {f"{name}.shape[{axis}]": each for axis, each in enumerate(lengths)}
        if is_row:
            return name
        if variable in self._recorded and len(lengths) == variable.type.ndim:
            record = self._recorded[variable]
            # A loop would write beyond a record of other lengths.
            self.line(f"{name} = sized({record}[k], {shape})")
            self.check(f"{record}.shape[1:] != {shape}")
            self._in_records.add(record)
            return name
        if variable in self._carried:
            self.line(f"{name} = np.empty({shape}, {dtype})")
            return name
        self._before.append(f"{name} = np.empty({(0,) * len(lengths)}, {dtype})")
        self.line(f"{name} = sized({name}, {shape})")
        return name

    def _row(self, dtype: str, length: str) -> str:
        """A row of one array of all vectors of a type and length.

        Numba takes longer to compile arrays that have names of their own.
        """
        if (dtype, length) not in self._vectors_of:
            self._vectors_of[dtype, length] = array = self.new("vectors_")
            self._before.append(f"{array} = np.empty((0, 0), {dtype})")
            self.line(f"{array} = sized({array}, ({array}_rows, {length}))")
        array = self._vectors_of[dtype, length]
        row = self._rows_of.get(array, 0)
        self._rows_of[array] = row + 1
        return f"{array}[{row}]"

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

    @write.register
    def _write_specified(self, op: SpecifyShape, node: Apply) -> None:
        value, *sizes = node.inputs
        for axis, (before, size) in enumerate(zip(value.type.shape, sizes, strict=True)):
            if before is None and not isinstance(size.type, NoneTypeT):
                # Lengths by types are not compared, so that nothing may follow.
                self.line(f"if {self.length(value, axis)} != {self.name(size)}:\n    {STOP}")
        self._same(value, node.outputs[0])

    @write.register(ScalarFromTensor)
    @write.register(TensorFromScalar)
    @write.register(DeepCopyOp)
    def _write_same(self, op: Op, node: Apply) -> None:
        self._same(node.inputs[0], node.outputs[0])

    @write.register
    def _write_check(self, op: CheckAndRaise, node: Apply) -> None:
        value, *conditions = node.inputs
        for condition in conditions:
            truth = self.element(condition, ["0"] * getattr(condition.type, "ndim", 0))
            self.check(f"not {truth}", op.exc_type(op.msg))
        self._same(value, node.outputs[0])

    @write.register
    def _write_vector(self, op: MakeVector, node: Apply) -> None:
        (out,) = node.outputs
        self._entries_of[out] = [self.name(entry) for entry in node.inputs]
        readers = self._readers.get(out, [])
        if not readers or not all(isinstance(reader.op, Reshape) for reader in readers):
            self.names[out] = self.allocate(out, [str(len(node.inputs))])
            for number, entry in enumerate(self._entries_of[out]):
                self.line(f"{self.names[out]}[{number}] = {entry}")

    @write.register
    def _write_range(self, op: ARange, node: Apply) -> None:
        start, stop, step = node.inputs
        if not (isinstance(step, Constant) and step.data == 1):
            return self._write_call(op, node)
        first, length = self.name(start), self.new("n_")
        self.line(f"{length} = max({self.name(stop)} - {first}, 0)")
        self._read_late(node.outputs[0], node, lambda i: f"({first} + {i})", [length])

    @write.register
    def _write_reshape(self, op: Reshape, node: Apply) -> None:
        x, shape = node.inputs
        (out,) = node.outputs
        if not op.ndim or not x.type.ndim:
            return self._write_call(op, node)
        if shape in self._entries_of:
            wanted = self._entries_of[shape]
        else:
            wanted = [f"{self.name(shape)}[{number}]" for number in range(op.ndim)]
        lengths = [self.new("n_") for _ in wanted]
        own = [self.length(x, axis) for axis in range(x.type.ndim)]
        size, product = self.new("n_"), " * ".join(lengths)
        self.line(f"{size} = {' * '.join(own)}")
        self.line(f"{', '.join(lengths)}, = {', '.join(wanted)},")
        # One of the lengths may be -1.
        for length in lengths:
            self.line(f"{length} = wanted({length}, {size}, {product})")
        self.check(f"{product} != {size}")
        self.line(f"{lengths[0]} *= {product} == {size}")
        flat = ""
        if x.type.ndim > 1:
            flat = self.new()
            self.line(f"{flat} = np.ascontiguousarray({self.name(x)}).reshape(-1)")
        if op.ndim == 1 and flat and out not in self._recorded:
            self.names[out] = flat
            return

        def element(*at: str) -> str:
            place = at[0]
            for index, length in zip(at[1:], lengths[1:], strict=True):
                place = f"({place} * {length} + {index})"
            return f"{flat}[{place}]" if flat else self.element(x, [place])

        self._read_late(out, node, element, lengths)

    @write.register
    def _write_scan(self, op: Scan, node: Apply) -> None:
        info = op.info
        states = info.n_untraced_sit_sot
        others = info.n_seqs + info.n_mit_mot + info.n_mit_sot + info.n_sit_sot + info.n_nit_sot
        if others or not states:
            return self._write_call(op, node)
        steps, *given = node.inputs
        names = [self.new("state_") for _ in range(states)]
        for name, first in zip(names, given, strict=False):
            value = self.name(first)
            self.line(f"{name} = {value}{'.copy()' if first.type.ndim else ''}")
        beside = [self.name(variable) for variable in given[states:]]
        # Graphs of other scans have the same variables for the same operations.
        graph = op.fgraph.unfreeze()
        self.names.update(zip(graph.inputs, [*names, *beside], strict=True))
        nodes = graph.toposort()
        self._prepare(nodes)
        self._carried = self._carried | storage(graph.outputs)
        before, self._lines = self._lines, []
        self._depth += 1
        valid = dict(self._valid_lengths)
        for inner in nodes:
            self.write(inner.op, inner)
        *results, stop = [self.name(v) for v in graph.outputs] + ([] if info.as_while else [""])
        body = [*self._lines, f"{', '.join(names)}, = {', '.join(results)},"]
        if stop:
            body.append(f"if {stop}:\n    break")
        self._lines, self._valid_lengths = before, valid
        self._depth -= 1
        self.line(_nested([f"for {self.new('step_')} in range({self.name(steps)}):"], body))
        self.names.update(zip(node.outputs, names, strict=True))

    @write.register
    def _write_shape(self, op: Shape_i, node: Apply) -> None:
        self.names[node.outputs[0]] = self.length(node.inputs[0], op.i)

    @write.register
    def _write_dimshuffle(self, op: DimShuffle, node: Apply) -> None:
        (x,), (out,) = node.inputs, node.outputs
        order = tuple(op.new_order)
        axis, vector = self._vectors.get(x, (None, ""))
        if not (x.type.ndim and out.type.ndim):
            number = self.new()
            self.line(f"{number} = {self.element(x, ['0'] * x.type.ndim)}")
            self._number(out, number)
        elif order == (axis,):
            self.names[out] = vector
        elif order == (1, 0) and x not in self._late:
            self.names[out] = f"{self.name(x)}.T"
        else:

            def element(*at: str) -> str:
                axes = range(x.type.ndim)
                return self.element(x, [at[order.index(a)] if a in order else "0" for a in axes])

            lengths = ["1" if axis == "x" else self.length(x, axis) for axis in order]
            self._read_late(out, node, element, lengths)
            if order in ((0, "x"), ("x", 0)) and x not in self._late:
                self._vectors[out] = (order.index(0), self.name(x))

    @write.register
    def _write_dot(self, op: Dot, node: Apply) -> None:
        x, y = node.inputs
        (out,) = node.outputs
        types = {variable.type.dtype for variable in (x, y, out)}
        if len(types) > 1 or not types <= set(FLOATING):
            return self._write_call(op, node)
        column, row = self._vectors.get(y, (1, "")), self._vectors.get(x, (0, ""))
        if column[0] == 0 and row[0] == 1:
            result = self.new()
            self.line(f"{result} = np.dot(contiguous({row[1]}), contiguous({column[1]}))")
            self._number(out, result)
        elif column[0] == 0:
            result = self._product(out, self.name(x), column[1], [self.length(x, 0)])
            self._vector(out, 0, result)
        elif row[0] == 1:
            result = self._product(out, f"{self.name(y)}.T", row[1], [self.length(y, 1)])
            self._vector(out, 1, result)
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
        (out,), x = node.outputs, node.inputs[0]
        entries = indices_from_subtensor(node.inputs[1:], op.idx_list)
        places = self._places_of_part(x, entries)
        if out.type.ndim and places is not None:
            axes = [axis for axis, place in enumerate(places) if place is None]

            def element(*at: str) -> str:
                free = iter(at)
                return self.element(x, [next(free) if p is None else p for p in places])

            self._read_late(out, node, element, [self.length(x, axis) for axis in axes])
            return
        if isinstance(entries[0], slice):
            self._ask_for_rows(x, entries[0])
        self.names[out] = self.new()
        self.line(f"{self.names[out]} = {self.name(x)}[{self._index(entries)}]")

    def _places_of_part(self, x: Variable, entries: Sequence[Any]) -> list[str | None] | None:
        """Places of the elements of a part of an array, None for whole axes."""
        places: list[str | None] = []
        for entry in entries:
            number = entry.data if isinstance(entry, Constant) else entry
            if isinstance(entry, slice) and entry == slice(None):
                places.append(None)
            elif isinstance(number, int | np.integer):
                last = f"{self.length(x, len(places))} - " if number < 0 else ""
                places.append(f"{last}{abs(number)}")
            else:
                return None
        if None not in places and len(places) == x.type.ndim:
            return None
        return [*places, *[None] * (x.type.ndim - len(places))]

    def _index(self, entries: Sequence[Any]) -> str:
        """Source of an index."""

        def source(entry: Any) -> str:
            if isinstance(entry, slice):
                parts = (entry.start, entry.stop, entry.step)
                words = ["" if part is None else source(part) for part in parts]
                return ":".join(words if words[2] else words[:2])
            return self.name(entry) if isinstance(entry, Variable) else repr(entry)

        return ", ".join(map(source, entries))

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
        axes = _numbered(op, x, indices)
        if not axes:
            return self._write_call(op, node)
        name = self.name(x)  # Numbers from the end are places in memory alone.
        lengths = self._selected_lengths(
            [self.length(x, a) for a in range(x.type.ndim)], axes, indices
        )

        def element(*at: str) -> str:
            places = self._selected_places(at, axes, indices)
            if axes == [0] and len(at) > 1 and at[0] == PLACES[0]:
                row = self.new("row_")
                self._of_row.append(f"{row} = {name}[{places[0]}]")
                return f"{row}[{', '.join(at[1:])}]"
            return f"{name}[{', '.join(places)}]"

        self._read_late(out, node, element, lengths)

    def _selected_lengths(
        self, lengths: Sequence[str], axes: Sequence[int], indices: Sequence[Variable]
    ) -> list[str]:
        """Lengths of what numbers on some axes select, whose place is that of the first axis."""
        names = [self.name(index) for index in indices]
        selected = self.common([f"{name}.shape[0]" for name in names])
        for axis, name in zip(axes, names, strict=True):
            selected = self._valid(name, lengths[axis], selected)
        return [*lengths[: axes[0]], selected, *lengths[axes[-1] + 1 :]]

    def _selected_places(
        self, at: Sequence[str], axes: Sequence[int], indices: Sequence[Variable]
    ) -> list[str]:
        """Places in an array of an element of what numbers select."""
        first = axes[0]
        numbers = [f"{self.name(index)}[{at[first]}]" for index in indices]
        return [*at[:first], *numbers, *at[first + 1 :]]

    def _valid(self, numbers: str, most: str, length: str) -> str:
        """A number of places, which is zero where their numbers are not those of elements."""
        key = numbers, most, length
        if key not in self._valid_lengths:
            self._valid_lengths[key] = valid = self.new("n_")
            self.line(f"{valid} = valid({numbers}, {most}, {length})")
            self.check(f"{valid} != {length}", IndexError("a number is out of range"))
        return self._valid_lengths[key]

    @write.register
    def _write_scatter(self, op: AdvancedIncSubtensor, node: Apply) -> None:
        base, values, *indices = node.inputs
        axes = _scattered(op, node.inputs)
        if not axes:
            return self._write_call(op, node)
        result, sign = self.new(), "=" if op.set_instead_of_inc else "+="
        self.line(f"{result} = {self.name(base)}{'' if op.inplace else '.copy()'}")
        whole = [f"{result}.shape[{axis}]" for axis in range(base.type.ndim)]
        lengths = self._repeated(values, self._selected_lengths(whole, axes, indices))

        def place(*at: str) -> str:
            return f"{result}[{', '.join(self._selected_places(at, axes, indices))}]"

        self._store(values, lengths, place, sign)
        self.names[node.outputs[0]] = result

    @write.register
    def _write_split(self, op: Split, node: Apply) -> None:
        x, sizes = node.inputs
        name, start, fits = self.name(sizes), "0", self.new()
        lengths = [self.length(x, axis) for axis in range(x.type.ndim)]
        self.line(f"{fits} = ({name}.sum() == {lengths[op.axis]}) & ({name}.min() >= 0)")
        self.check(f"not {fits}")
        for number, part in enumerate(node.outputs):
            length, end = self.new("n_"), self.new("n_")
            self.line(f"{length} = {name}[{number}] * {fits}\n{end} = {start} + {length}")
            lengths = [*lengths[: op.axis], length, *lengths[op.axis + 1 :]]

            def element(*at: str, start: str = start) -> str:
                places = [f"({start} + {p})" if a == op.axis else p for a, p in enumerate(at)]
                return self.element(x, places)

            self._read_late(part, node, element, lengths)
            start = end

    @write.register
    def _write_set(self, op: IncSubtensor, node: Apply) -> None:
        base, value, *indices = node.inputs
        if op.inplace and storage([base]) & storage([value]):
            return self._write_call(op, node)
        result, part = self.new(), self.new()
        index = self._index(indices_from_subtensor(indices, op.idx_list))
        axes = base.type.ndim - sum(not isinstance(entry, slice) for entry in op.idx_list)
        sign = "=" if op.set_instead_of_inc else "+="
        self.line(f"{result} = {self.name(base)}{'' if op.inplace else '.copy()'}")
        if not axes:
            self.line(f"{result}[{index}] {sign} {self.name(value)}")
        else:
            self.line(f"{part} = {result}[{index}]")
            lengths = self._repeated(value, [f"{part}.shape[{axis}]" for axis in range(axes)])
            self._store(value, lengths, lambda *at: f"{part}[{', '.join(at)}]", sign)
        self.names[node.outputs[0]] = result

    @write.register
    def _write_alloc(self, op: Alloc, node: Apply) -> None:
        value, *shape = node.inputs
        skipped = len(shape) - value.type.ndim
        lengths = self._repeated(value, [self.name(length) for length in shape])
        self._read_late(
            node.outputs[0], node, lambda *at: self.element(value, at[skipped:]), lengths
        )

    @write.register
    def _write_empty(self, op: AllocEmpty, node: Apply) -> None:
        lengths = [self.name(length) for length in node.inputs]
        self.names[node.outputs[0]] = self.allocate(node.outputs[0], lengths)

    @write.register
    def _write_join(self, op: Join, node: Apply) -> None:
        parts, (out,) = node.inputs, node.outputs
        lengths: list[str] = []
        for axis in range(out.type.ndim):
            of_parts = [self.length(part, axis) for part in parts]
            total = f"({' + '.join(of_parts)})"
            lengths.append(total if axis == op.axis else self.common(of_parts))
        result, start = self.allocate(out, lengths), self.new("n_")
        self.line(f"{start} = 0")
        for part in parts:
            own = self.length(part, op.axis)
            if out.type.ndim == 1 and own == "1":
                self.line(f"{result}[{start}] = {self.element(part, ['0'])}\n{start} += 1")
                continue

            def place(*at: str) -> str:
                places = [f"{start} + {p}" if a == op.axis else p for a, p in enumerate(at)]
                return f"{result}[{', '.join(places)}]"

            self._store(part, [*lengths[: op.axis], own, *lengths[op.axis + 1 :]], place)
            self.line(f"{start} += {own}")
        self.names[out] = result

    @write.register
    def _write_reduction(self, op: CAReduce, node: Apply) -> None:
        (x,), (out,) = node.inputs, node.outputs
        if out in self.names:
            return  # It is added up where its numbers are computed.
        axes = range(x.type.ndim) if op.axis is None else op.axis
        kept = [axis for axis in range(x.type.ndim) if axis not in axes]
        acc = getattr(op, "acc_dtype", None) or out.type.dtype
        source = REDUCTIONS.get(type(op.scalar_op))
        logical = isinstance(op.scalar_op, OF_TRUTH)
        types = ("bool",) if logical else (*FLOATING, "int64")
        known = x.type.ndim and (x.type.dtype if logical else acc) in types
        if source is None or not known or (acc not in FLOATING and "inf" in source[0]):
            return self._write_call(op, node)
        places, own, heads = self._loops([x], range(x.type.ndim))
        first = source[0] if logical else f"np.{acc}({source[0]})"
        at = [places[axis] for axis in kept]
        result, value, depth = self.new(), self.new("s"), len(kept)
        lengths = [own[axis] for axis in kept]
        total = result if not kept else self.new("s")
        if kept != list(range(depth)):
            # Sums are of other numbers than PyTensor's in no place: each adds them up in order.
            self.line(f"{result} = np.full(({', '.join(lengths)},), {first})")
            total, depth = f"{result}[{', '.join(at)}]", 0
        elif kept:
            result = self.allocate(out, lengths)
        else:
            self.line(f"{result} = {first}")

        def stores() -> list[str]:
            element = self.element(x, places)
            return [f"{value} = {element}", f"{total} = {source[1].format(total, value)}"]

        self._write_loops(
            heads,
            stores,
            [f"{total} = {first}"],
            [f"{result}[{', '.join(at)}] = {total}"],
            depth,
        )
        if kept and not depth and acc != out.type.dtype:
            self.line(f"{result} = {result}.astype(np.{_type(out)})")
        self.names[out] = result

    @write.register
    def _write_elemwise(self, op: Elemwise, node: Apply) -> None:
        if all(node.outputs[0].type.broadcastable):
            elements = [self.element(x, ["0"] * x.type.ndim) for x in node.inputs]
            results = self._scalar(op.scalar_op, elements, node)
            for variable, result in zip(node.outputs, results, strict=True):
                name = self.new()
                self.line(f"{name} = {result}")
                self._number(variable, name)
            return
        # An axis of length one is left out, so that a column or row stays a vector.
        broadcast = node.outputs[0].type.broadcastable
        axes = [axis for axis in range(len(broadcast)) if not broadcast[axis]]
        if len(broadcast) != 2 or len(axes) != 1:
            axes = list(range(len(broadcast)))
        places, lengths, heads = self._loops(node.inputs, axes)
        at = [places[axis] for axis in axes]
        if self._is_read_once(node):

            def element(*at: str) -> str:
                elements = [self.element(variable, at) for variable in node.inputs]
                return self._scalar(op.scalar_op, elements, node)[0]

            self._late[node.outputs[0]] = element, lengths
            return
        sums = [self._sum_of(variable) for variable in node.outputs]
        names = [
            self.allocate(variable, lengths) if total is None else self.new()
            for variable, total in zip(node.outputs, sums, strict=True)
        ]
        for variable, name, total in zip(node.outputs, names, sums, strict=True):
            if total is not None:
                self.names[total] = name
                self.line(f"{name} = np.{_type(total)}(0)")
            elif len(axes) == len(broadcast):
                self.names[variable] = name
            else:
                self._vector(variable, axes[0], name)

        def stores() -> list[str]:
            elements = [self.element(variable, places) for variable in node.inputs]
            results = self._scalar(op.scalar_op, elements, node)
            return [
                f"{name}[{', '.join(at)}] = {result}" if total is None else f"{name} += {result}"
                for name, result, total in zip(names, results, sums, strict=True)
            ]

        self._write_loops(heads, stores)

    def _sum_of(self, variable: Variable) -> Variable | None:
        """The sum of all numbers of an array that nothing else reads, None where it is not."""
        readers = self._readers.get(variable, [])
        if len(readers) != 1 or type(readers[0].op) is not Sum:
            return None
        if variable in self._recorded or variable in self._carried:
            return None
        (total,) = readers[0].outputs
        same = total.type.dtype == readers[0].op.acc_dtype == variable.type.dtype
        is_number = total.type.ndim == 0 and not any(variable.type.broadcastable)
        return total if same and is_number and total.type.dtype in FLOATING else None

    def _loops(
        self, inputs: Sequence[Variable], axes: Sequence[int]
    ) -> tuple[list[str], list[str], list[str]]:
        """Places of an element on all axes, and lengths and heads of loops over some axes."""
        places = list(PLACES[: max(variable.type.ndim for variable in inputs)])
        lengths = [
            self.common(
                [
                    self.length(variable, axis)
                    for variable in inputs
                    if variable.type.ndim and not variable.type.broadcastable[axis]
                ]
                or ["1"]
            )
            for axis in axes
        ]
        return places, lengths, _loops([places[axis] for axis in axes], lengths)

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
        if set(types) == {"bool"} and type(op) in OF_TRUTH:
            narrow = False
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
            if variable.type.ndim == 0:
                stores.append(f"{record}[k] = {result}")
            elif record not in self._in_records:
                places = PLACES[: variable.type.ndim]
                lengths = [
                    self.common([f"{record}.shape[{axis + 1}]", f"{result}.shape[{axis}]"])
                    for axis in range(variable.type.ndim)
                ]
                heads, at = _loops(places, lengths), ", ".join(places)
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
        memory = "".join(f"{name}, " for name in carried[states:])
        lines = [
            f"transitions = len({sequences[0]})",
            "failed = 0",
            *self._before,
            _nested(["for k in range(transitions):"], body),
            f"return (failed, {memory})",
        ]
        head = f"def transitions({', '.join([*sequences, *self._arguments, *records])}):"
        text = _nested([head], lines)
        text = text.replace(STOP, f"return (failed | 1, {memory})")
        for array, rows in self._rows_of.items():
            text = text.replace(f"{array}_rows", str(rows))
        self.source = ELEMENT_OF_ROW.sub(r"\1, ", text)
        return self.source

    @property
    def key(self) -> str | None:
        """Key of the function in the compile cache, None where a part of it cannot be cached.

        Numba imports this package's modules by their names where it reads from the cache, so that
        these are in all keys.
        """
        if any(key is None for key in self._keys):
            return None
        return sha256(f"{__name__} {VERSION} {self.source} {self._keys}".encode()).hexdigest()


def storage(outputs: Sequence[Variable]) -> set[Variable]:
    """Variables which may share their memory with one of the outputs, the outputs included."""
    found, waiting = set(), list(outputs)
    while waiting:
        variable = waiting.pop()
        if variable not in found:
            found.add(variable)
            node = variable.owner
            if node is not None:
                number = node.outputs.index(variable)
                shared = [*node.op.view_map.get(number, []), *node.op.destroy_map.get(number, [])]
                copied = isinstance(node.op, DeepCopyOp)  # where a loop carries the copy on
                waiting.extend(node.inputs if copied else [node.inputs[i] for i in shared])
    return found


def _numbered(op: Op, x: Variable, indices: Sequence[Variable]) -> list[int] | None:
    """Adjacent axes on which an operation selects parts of an array by their numbers."""
    axes = [axis for axis, entry in enumerate(op.idx_list) if not isinstance(entry, slice)]
    whole = all(entry == slice(None) for entry in op.idx_list if isinstance(entry, slice))
    in_order = [op.idx_list[axis] for axis in axes] == list(range(len(indices)))
    adjacent = axes[-1] - axes[0] == len(axes) - 1
    of_numbers = all(
        index.type.ndim == 1 and index.type.dtype.startswith(("int", "uint")) for index in indices
    )
    alike = of_numbers and len({index.type.broadcastable for index in indices}) == 1
    return axes if whole and in_order and adjacent and alike else None


def _scattered(op: AdvancedIncSubtensor, inputs: Sequence[Variable]) -> list[int] | None:
    """Axes on which an operation adds to or sets parts of an array by their numbers."""
    base, values, *indices = inputs
    axes = _numbered(op, base, indices)
    if not axes or op.ignore_duplicates:
        return None
    return axes if values.type.ndim <= base.type.ndim - len(axes) + 1 else None


def _type(variable: Variable) -> str:
    dtype = variable.type.dtype
    return "bool_" if dtype == "bool" else dtype


def _loops(places: Sequence[str], lengths: Sequence[str]) -> list[str]:
    """Heads of loops over places."""
    return [f"for {p} in range({length}):" for p, length in zip(places, lengths, strict=True)]


def _nested(heads: Sequence[str], body: Sequence[str]) -> str:
    """Lines of a body inside of nested blocks."""
    text = "\n".join(body)
    for head in reversed(heads):
        text = f"{head}\n{indent(text, '    ')}"
    return text
