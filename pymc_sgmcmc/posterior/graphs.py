"""Rebuild graphs of log densities on other rows, and without parts that gradients do not need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pytensor.tensor as pt
from pymc.data import MinibatchOp
from pymc.logprob.utils import local_remove_check_parameter
from pymc.variational.minibatch_rv import MinibatchRandomVariable
from pytensor.compile.builders import OpFromGraph, SymbolicOp
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.basic import in2out
from pytensor.graph.traversal import ancestors, graph_inputs, toposort
from pytensor.scalar.basic import Cast, ScalarType, constant
from pytensor.tensor import NoneConst, TensorVariable
from pytensor.tensor.basic import (
    Alloc,
    ARange,
    Join,
    MakeVector,
    get_underlying_scalar_constant_value,
    second,
)
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.exceptions import NotScalarConstantError
from pytensor.tensor.math import Dot, Sum, add, mul, neg, sub, true_div
from pytensor.tensor.reshape import JoinDims, SplitDims
from pytensor.tensor.shape import Reshape, SpecifyShape
from pytensor.tensor.subtensor import (
    AdvancedIncSubtensor,
    AdvancedSubtensor,
    IncSubtensor,
    Subtensor,
)
from pytensor.tensor.type import TensorType

from pymc_sgmcmc.compiling.compiled import NUMPY_MODE, compile_quietly, evaluate
from pymc_sgmcmc.compiling.graph_notes import forget_notes
from pymc_sgmcmc.compiling.negative_binomial import local_negative_binomial


@dataclass(frozen=True)
class Length:
    """The number of rows for which a graph was built, and the number that should replace it."""

    built_for: int
    now: TensorVariable


def rebuild(
    outputs: Sequence[Variable],
    replacements: Mapping[Variable, Variable],
    lengths: Sequence[Length] = (),
    only_beside_rows: bool = False,
) -> list[Variable]:
    """Rebuild a graph on other data, also where the number of rows is a constant of the graph.

    ``pt.zeros(N)``, ``x.reshape((N, -1))`` and the static shapes that distributions assert
    keep the number of rows of the data that the model was built with. Nodes are made anew, since
    replacement in place would assert the old static shapes.

    Parameters
    ----------
    outputs : sequence of Variable
    replacements : mapping
        Replacements of the data.
    lengths : sequence of Length
        Numbers of rows that change. Rows of several kinds, such as records and groups of them, have
        one each.
    only_beside_rows : bool
        Leave lengths alone in nodes that do not depend on the replaced variables.
    """
    rebuilt = dict(replacements)
    on_rows = set(replacements)
    for node in toposort(outputs):
        if all(output in replacements for output in node.outputs):
            continue
        beside_rows = not on_rows.isdisjoint(node.inputs)
        if beside_rows:
            on_rows.update(node.outputs)
        inputs = [rebuilt.get(variable, variable) for variable in node.inputs]
        if beside_rows or not only_beside_rows:
            for length in lengths:
                inputs = _with_length(node, inputs, length, beside_rows)
        if all(new is old for new, old in zip(inputs, node.inputs, strict=True)):
            continue
        for old, new in zip(node.outputs, remake(node, inputs, lengths), strict=True):
            rebuilt.setdefault(old, new)
    return [rebuilt.get(output, output) for output in outputs]


def remake(node: Apply, inputs: list[Variable], lengths: Sequence[Length] = ()) -> list[Variable]:
    """Outputs of a node on other inputs, whose static shapes may differ."""
    op = node.op
    if isinstance(op, SymbolicOp):
        # Such an Op holds an inner graph for the shapes that it was made with.
        return op(*inputs, return_list=True)
    if isinstance(op, OpFromGraph) and op.pullback_overrides is None:
        inner = op.fgraph.unfreeze()
        return rebuild(
            inner.outputs,
            dict(zip(inner.inputs, inputs, strict=True)),
            lengths,
            only_beside_rows=True,
        )
    return node.clone_with_new_inputs(inputs, strict=False).outputs


def shape_inputs(node: Apply) -> range:
    """Places of the inputs of a node that are lengths, or vectors of them."""
    match node.op:
        case Alloc() | SpecifyShape():
            return range(1, len(node.inputs))
        case Reshape() | SplitDims() | ARange():
            return range(1, 2)
        case _:
            return range(0)


def _with_length(
    node: Apply, inputs: list[Variable], length: Length, beside_rows: bool
) -> list[Variable]:
    """Inputs of a node with the old number of rows replaced where they give a shape.

    In a node `beside_rows` the length of a dimension that parameters share with the rows is one.
    """
    inputs = list(inputs)
    for index in shape_inputs(node):
        old = node.inputs[index]
        if not isinstance(old.type, TensorType):
            continue
        if old.type.ndim:
            inputs[index] = _fresh_shape(old, inputs[index], length, beside_rows)
        elif _is_old_length(old, length, beside_rows):
            # A shape that is only asserted need not be asserted for the rows.
            inputs[index] = NoneConst if isinstance(node.op, SpecifyShape) else length.now
    return inputs


def _is_old_length(variable: Variable, length: Length, beside_rows: bool) -> bool:
    try:
        value = get_underlying_scalar_constant_value(variable)
    except NotScalarConstantError:
        # An expression such as `expand_dims(N, 0)[0]` is constant too.
        roots = [root for root in graph_inputs([variable]) if not isinstance(root, Constant)]
        if not all(beside_rows and _is_shared_length(root) for root in roots):
            return False
        value = evaluate(variable)
    return value is not None and int(value) == length.built_for


def _is_shared_length(variable: Variable) -> bool:
    """Whether a variable is the length of a dimension."""
    return isinstance(variable, SharedVariable) and variable.type.ndim == 0


def _fresh_shape(old: Variable, new: Variable, length: Length, beside_rows: bool) -> Variable:
    """A vector of lengths with the old number of rows replaced."""
    if isinstance(old, Constant):
        entries = [pt.constant(int(size), dtype="int64") for size in old.data]
        stale = [int(size) == length.built_for for size in old.data]
    elif old.owner is not None and isinstance(old.owner.op, MakeVector):
        entries = list(new.owner.inputs)
        stale = [_is_old_length(size, length, beside_rows) for size in old.owner.inputs]
    else:
        return new
    if not any(stale):
        return new
    return pt.stack(
        [length.now if is_old else size for size, is_old in zip(entries, stale, strict=True)]
    )


def simplify_for_gradients(tensors: Sequence[TensorVariable]) -> list[TensorVariable]:
    """Drop parameter checks and left-over minibatch scaling nodes, and restore index arrays.

    The checks cost time in each transition. They also turn the log density at an invalid parameter
    into -inf, whose gradient is zero, so a chain outside the support would go on unnoticed. Without
    the checks the log density is NaN, which stops the chain with a message.
    """
    # A copy of the nodes, which may be changed; inputs and constants stay the same.
    graph = FunctionGraph(outputs=list(tensors), clone=True, copy_inputs=False, copy_orphans=False)
    forget_notes(graph)
    in2out(local_remove_check_parameter, local_negative_binomial).rewrite(graph)
    for node in graph.toposort():
        if isinstance(node.op, MinibatchRandomVariable):
            graph.replace(node.outputs[0], node.inputs[0])
        elif isinstance(node.op, Subtensor):
            inputs = [_wide(variable) for variable in node.inputs]
            if inputs != node.inputs:
                graph.replace(node.outputs[0], node.op(*inputs))
        elif isinstance(node.op, MakeVector) and node.op.dtype.startswith("float"):
            graph.replace(node.outputs[0], _of_distinct(node))
    return list(graph.outputs)


def _of_distinct(vector: Apply) -> TensorVariable:
    """A vector of numbers as entries of one of distinct numbers.

    PyMC's log density of `pt.stack([0, b])[index]` has each row's number in place of the index.
    """
    keys = [each.data.item() if isinstance(each, Constant) else each for each in vector.inputs]
    distinct = dict(zip(keys, vector.inputs, strict=True))
    if len(distinct) == len(keys):
        return vector.outputs[0]
    places = {key: place for place, key in enumerate(distinct)}
    return vector.op(*distinct.values())[pt.constant([places[key] for key in keys], dtype="int64")]


def _wide(variable: Variable) -> Variable:
    """A constant index in 64 bits, in fewer of which PyTensor's sums of indices may overflow."""
    if not isinstance(variable.type, ScalarType) or variable.type.dtype == "int64":
        return variable
    try:
        return constant(int(get_underlying_scalar_constant_value(variable)), dtype="int64")
    except NotScalarConstantError:
        return variable


def leaf_value(variable: Variable) -> np.ndarray | None:
    """Data of a constant or shared tensor, None for anything else."""
    if not isinstance(variable.type, TensorType):
        return None
    if isinstance(variable, Constant):
        return np.asarray(variable.data)
    if isinstance(variable, SharedVariable):
        return np.asarray(variable.get_value(borrow=True))
    return None


def is_integer(variable: Variable) -> bool:
    """Whether a tensor has whole numbers."""
    return variable.dtype.startswith(("int", "uint"))


def is_product(node: Apply) -> bool:
    """Whether a node is a product of two matrices."""
    op = node.op.core_op if isinstance(node.op, Blockwise) else node.op
    return isinstance(op, Dot) and all(each.type.ndim == 2 for each in node.inputs)


SELECTIONS = (
    AdvancedSubtensor,
    Alloc,
    JoinDims,
    Reshape,
    SpecifyShape,
    SplitDims,
    Subtensor,
)
"""These operations are linear in their first input. The others are shapes and indices."""


def linear_inputs(node: Apply, same: Sequence[bool]) -> set[int] | None:
    """Inputs in which a node is linear together, None where others than these change.

    Parameters
    ----------
    node : Apply
    same : sequence of bool
        Whether each input remains the same.
    """
    op = node.op.core_op if isinstance(node.op, Blockwise) else node.op
    is_cast = isinstance(getattr(op, "scalar_op", None), Cast) and not is_integer(node.outputs[0])
    if isinstance(op, DimShuffle | Sum) or op == neg or is_cast:
        return {0}
    if isinstance(op, SELECTIONS):
        return {0} if all(same[1:]) else None
    if isinstance(op, IncSubtensor | AdvancedIncSubtensor):
        return {0, 1} if all(same[2:]) else None
    if op in (add, sub):
        return set(range(len(same)))
    if op == mul and same.count(False) == 1:
        return {same.index(False)}
    if op == true_div and same[1]:
        return {0}
    if op == second and same[0]:
        return {1}
    if isinstance(op, Dot) and any(same):
        return {same.index(False)} if False in same else {1}
    if isinstance(op, Join):
        return set(range(len(same)))
    return None


def cast_of_integers(node: Apply) -> bool:
    """Whether a node gives whole numbers another type of whole numbers."""
    is_cast = isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, Cast)
    return is_cast and is_integer(node.inputs[0]) and is_integer(node.outputs[0])


def shape_of(variable: Variable) -> list[int]:
    """Shape of a variable, evaluated where the graph does not tell it."""
    # The rewrites of this mode take shapes from those of inputs: a random variable is not drawn,
    # which an improper one cannot be.
    return [
        int(compile_quietly([], pt.shape(variable)[axis], NUMPY_MODE)())
        if length is None
        else int(length)
        for axis, length in enumerate(variable.type.shape)
    ]


def value_of(variable: Variable) -> np.ndarray:
    """Value of a graph without inputs."""
    value = leaf_value(variable)
    return evaluate(variable) if value is None else value


def changed_variable(values: Iterable[tuple[SharedVariable, np.ndarray]]) -> str | None:
    """Name of the first shared variable that has other than its earlier values, None for none."""
    for variable, value in values:
        if not np.array_equal(variable.get_value(borrow=True), value, equal_nan=True):
            return variable.name
    return None


def by_weights(
    weighted: TensorVariable, size: int, weights: TensorVariable, length: TensorVariable
) -> TensorVariable:
    """Terms, shape (length, size), of a weighted sum of so many vectors."""
    terms = [
        pt.grad(weighted[entry], weights, disconnected_inputs="ignore") for entry in range(size)
    ]
    # Only the length of the weights is still in the graph.
    ones = {weights: pt.ones(length, dtype=weights.dtype)}
    return rebuild([pt.stack(terms, axis=1)], ones)[0]


def minibatch_nodes(roots: Sequence[Variable]) -> list:
    """Nodes of `pymc.Minibatch` in a graph."""
    nodes = {
        variable.owner: None
        for variable in ancestors(roots)
        if variable.owner is not None and isinstance(variable.owner.op, MinibatchOp)
    }
    return list(nodes)
