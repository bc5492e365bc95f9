r"""Observed variables of different lengths as one set of rows.

Each record of each variable is a row, so the log likelihood is a sum over :math:`N = \sum_b N_b`
rows, and everything that takes minibatches of rows stays as it is. Variables of one form, such as
those of a loop over groups, are one term on all of their records: what differs between them is
indexed by the number of the variable, as in ``mu[group]``. A row of one form is none of another:
each form is evaluated on all rows of a minibatch, and counts for its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.replace import vectorize_graph
from pytensor.graph.traversal import ancestors, toposort
from pytensor.tensor.basic import get_underlying_scalar_constant_value
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.exceptions import NotScalarConstantError
from pytensor.tensor.math import Dot
from pytensor.tensor.subtensor import Subtensor, indices_from_subtensor

from pymc_sgmcmc.posterior.graphs import leaf_value, rebuild, remake, shape_inputs
from pymc_sgmcmc.posterior.rows import RowLeaf, Term

NUMBER = "the number of the observed variable"
"""Name of the rows that say which variable a record is of, for messages."""


@dataclass(frozen=True, eq=False)
class Block:
    """A term with rows of its own.

    Attributes
    ----------
    term : Term
    leaves : dict of Variable to RowLeaf
        Its data with one entry a row.
    n_rows : int
    """

    term: Term
    leaves: dict[Variable, RowLeaf]
    n_rows: int


def pooled(blocks: Sequence[Block]) -> tuple[list[Term], list[RowLeaf], int]:
    """Terms and data of the records of several blocks, and the number of these records."""
    n_rows = sum(block.n_rows for block in blocks)
    terms: list[Term] = []
    leaves: list[RowLeaf] = []
    start = 0
    forms = _forms([_with_own_data(block) for block in blocks])
    for form in forms:
        stop = start + form.n_rows
        of_form = [_among(leaf, start, n_rows) for leaf in form.leaves.values()]
        log_density = form.term.log_density
        if len(forms) > 1:
            own = np.zeros(n_rows, dtype=bool)
            own[start:stop] = True
            mask = _leaf(f"rows of {form.term.name}", own)
            of_form.append(mask)
            (is_own,) = mask.variables
            axes = (0, *["x"] * (log_density.type.ndim - 1))
            log_density = pt.switch(is_own.dimshuffle(*axes), log_density, 0.0)
        terms.append(replace(form.term, log_density=log_density))
        leaves += of_form
        start = stop
    return terms, leaves, n_rows


def _leaf(name: str, values: np.ndarray) -> RowLeaf:
    """Rows that are no data of the user's."""
    variable = pt.tensor(name, dtype=values.dtype, shape=(None,))
    return RowLeaf(name, (variable,), values, is_data=False)


def _with_own_data(block: Block) -> Block:
    """A block whose data are variables of its own, since an array may be in several blocks."""
    own: dict[Variable, Variable] = {variable: variable.type() for variable in block.leaves}
    (log_density,) = rebuild([block.term.log_density], own)
    leaves = {
        own[variable]: replace(leaf, variables=(own[variable],), parts=((0, leaf),))
        for variable, leaf in block.leaves.items()
    }
    return replace(block, term=replace(block.term, log_density=log_density), leaves=leaves)


def _among(leaf: RowLeaf, start: int, n_rows: int) -> RowLeaf:
    """Data of a form among all rows.

    Rows of other forms have those of one record, at which the density is evaluated and left out.
    """
    if len(leaf.values) == n_rows:
        return leaf
    values = np.repeat(leaf.values[len(leaf.values) // 2][None], n_rows, axis=0)
    values[start : start + len(leaf.values)] = leaf.values
    return _moved(leaf, start, values=values)


def _moved(leaf: RowLeaf, start: int, **changes: Any) -> RowLeaf:
    """Data that begin at another row."""
    parts = tuple((start + first, part) for first, part in leaf.parts)
    return replace(leaf, parts=parts, **changes)


def _forms(blocks: Sequence[Block]) -> list[Block]:
    """Blocks of one form as one block each."""
    alike: dict[tuple, list[Block]] = {}
    for block in blocks:
        nodes = toposort([block.term.log_density])
        operations = tuple((node.op, len(node.inputs)) for node in nodes)
        alike.setdefault(operations, []).append(block)
    forms: list[Block] = []
    for group in alike.values():
        form = _joined(group) if len(group) > 1 else None
        forms += group if form is None else [form]
    return [
        replace(form, term=replace(form.term, built_for=form.term.built_for or form.n_rows))
        for form in forms
    ]


@dataclass(frozen=True)
class _Counterparts:
    """Variables that have the same place in the graphs of several blocks.

    Attributes
    ----------
    variables : tuple of Variable
        One of each block.
    joined : Variable or None
        The graph that stands for all of them, None where nothing can.
    varies : bool
        Whether it has an entry for each block along its first axis. Otherwise it is the same for
        all, but for the rows.
    has_rows : bool
    rows_first : bool
        Whether rows are along the first axis.
    """

    variables: tuple[Variable, ...]
    joined: Any
    varies: bool = False
    has_rows: bool = False
    rows_first: bool = True


def _joined(blocks: Sequence[Block]) -> Block | None:
    """Blocks whose graphs have the same operations as one block, None where that cannot be."""
    if any(leaf.axis for block in blocks for leaf in block.leaves.values()):
        return None
    lengths = [block.n_rows for block in blocks]
    number = _leaf(NUMBER, np.repeat(np.arange(len(blocks)), lengths))
    (code,) = number.variables
    found: dict[Variable, _Counterparts] = {}

    def counterparts(variables: tuple[Variable, ...]) -> _Counterparts:
        known = found.get(variables[0])
        if known is None:
            known = found[variables[0]] = _of_inputs(variables, blocks)
        return known if known.variables == variables else _Counterparts(variables, None)

    for nodes in zip(*(toposort([block.term.log_density]) for block in blocks), strict=True):
        in_shape = shape_inputs(nodes[0])
        inputs = [
            (place in in_shape and _of_shapes(variables, lengths)) or counterparts(variables)
            for place, variables in enumerate(zip(*(node.inputs for node in nodes), strict=True))
        ]
        outputs, varies = _applied(nodes[0], inputs, code, lengths[0])
        has_rows = any(each.has_rows for each in inputs)
        moves = isinstance(nodes[0].op, DimShuffle) and nodes[0].op.new_order[:1] != (0,)
        rows_first = all(each.rows_first for each in inputs) and not (has_rows and moves)
        for place, variables in enumerate(zip(*(node.outputs for node in nodes), strict=True)):
            found[variables[0]] = _Counterparts(
                variables, outputs[place], varies, has_rows, rows_first
            )

    total = counterparts(tuple(block.term.log_density for block in blocks))
    if total.joined is None or total.varies or not total.has_rows:
        return None
    leaves = {
        variable: _concatenated(
            [block.leaves[each] for block, each in zip(blocks, known.variables, strict=True)]
        )
        for variable, known in found.items()
        if variable in blocks[0].leaves
    }
    names = tuple(name for block in blocks for name in block.term.names)
    first = blocks[0].term
    term = Term(first.name, pt.as_tensor(total.joined), names, first.built_for or lengths[0])
    if code in ancestors([total.joined]):
        leaves[code] = number
    return Block(term, leaves, sum(lengths))


def _of_inputs(variables: tuple[Variable, ...], blocks: Sequence[Block]) -> _Counterparts:
    """Counterparts without an operation: data, constants and variables of the model."""
    first, nothing = variables[0], _Counterparts(variables, None)
    are_rows = {variable in block.leaves for variable, block in zip(variables, blocks, strict=True)}
    if any(each.owner is not None or each.type.ndim != first.type.ndim for each in variables):
        return nothing
    if are_rows == {True}:
        kinds = {
            (leaf.values.dtype, leaf.values.shape[1:])
            for leaf in (b.leaves[each] for b, each in zip(blocks, variables, strict=True))
        }
        return _Counterparts(variables, first, has_rows=True) if len(kinds) == 1 else nothing
    if True in are_rows:
        return nothing
    if all(each is first for each in variables) or (
        isinstance(first, Constant) and all(first.equals(each) for each in variables)
    ):
        return _Counterparts(variables, first)
    if any(each.type != first.type for each in variables):
        return nothing
    if isinstance(first, Constant):
        # Data in compiled graphs are shared variables.
        stacked = np.stack([np.asarray(each.data) for each in variables])
        return _Counterparts(variables, pytensor.shared(stacked, shape=stacked.shape), varies=True)
    return _Counterparts(variables, pt.stack(variables), varies=True)


def _of_shapes(variables: tuple[Variable, ...], lengths: Sequence[int]) -> _Counterparts | None:
    """Counterparts that are known lengths, of which that of a block is the number of its rows."""
    values = []
    for variable, length in zip(variables, lengths, strict=True):
        value = leaf_value(variable)
        try:
            value = get_underlying_scalar_constant_value(variable) if value is None else value
        except NotScalarConstantError:
            return None
        values.append(np.where(np.equal(value, length), -1, value))
    same = all(np.array_equal(values[0], value) for value in values)
    return _Counterparts(variables, variables[0]) if same else None


def _applied(
    node: Apply, inputs: Sequence[_Counterparts], code: Variable, n_rows: int
) -> tuple[list[Variable | None], bool]:
    """Outputs of an operation on what stands for its inputs, and whether they vary by block."""
    joined = [each.joined for each in inputs]
    if None in joined:
        return [None] * len(node.outputs), False
    if not any(each.varies for each in inputs):
        if all(new is old for new, old in zip(joined, node.inputs, strict=True)):
            return list(node.outputs), False
        return remake(node, joined), False
    if not any(each.has_rows for each in inputs):
        return _of_blocks(node, inputs), True
    by_row = _of_product(node, inputs, code) or _elementwise(node, inputs, code, n_rows)
    return by_row or [None] * len(node.outputs), False


def _of_blocks(node: Apply, inputs: Sequence[_Counterparts]) -> list[Variable | None]:
    """Outputs for each block of an operation that has no rows."""
    if isinstance(node.op, Subtensor) and not inputs[0].varies:
        # An entry by its number, which differs: the entries by a vector of numbers.
        places = indices_from_subtensor([each.joined for each in inputs[1:]], node.op.idx_list)
        single = [not isinstance(place, slice) for place in places]
        if any(each.varies for each in inputs[1:]):
            if not single[0] or single != sorted(single, reverse=True):
                return [None]
            whole, first = inputs[0].joined, leaf_value(places[0])
            in_order = np.arange(whole.type.shape[0] or 0)
            if len(places) == 1 and first is not None and np.array_equal(first, in_order):
                return [whole]
            return [whole[tuple(places)]]
    batched = {
        old: each.joined for old, each in zip(node.inputs, inputs, strict=True) if each.varies
    }
    same = {
        old: each.joined for old, each in zip(node.inputs, inputs, strict=True) if not each.varies
    }
    try:
        return list(vectorize_graph(node.outputs, {**same, **batched}))
    except (NotImplementedError, TypeError, ValueError):
        return [None] * len(node.outputs)


def _of_product(
    node: Apply, inputs: Sequence[_Counterparts], code: Variable
) -> list[Variable | None]:
    """Products of the rows of a matrix with coefficients that vary by block."""
    operation = node.op.core_op if isinstance(node.op, Blockwise) else node.op
    if not isinstance(operation, Dot) or [each.varies for each in inputs] != [False, True]:
        return []
    rows, coefficients = (each.joined for each in inputs)
    if [each.type.ndim for each in node.inputs] != [2, 2]:
        return []
    return [(rows[:, :, None] * coefficients[code]).sum(axis=1)]


def _elementwise(
    node: Apply, inputs: Sequence[_Counterparts], code: Variable, n_rows: int
) -> list[Variable | None]:
    """Results for each row of an elementwise operation, whose rows are its first axis."""
    if not isinstance(node.op, Elemwise):
        return []
    operands = []
    for old, each in zip(node.inputs, inputs, strict=True):
        length = old.type.shape[0]
        if each.has_rows and not (each.rows_first and length in (None, n_rows)):
            return []
        if each.varies and length != 1:
            return []
        operands.append(each.joined[code][:, 0] if each.varies else each.joined)
    return list(node.op.make_node(*operands).outputs)


def _concatenated(leaves: Sequence[RowLeaf]) -> RowLeaf:
    """Data of several blocks, one after the other."""
    starts = np.cumsum([0, *(len(leaf.values) for leaf in leaves[:-1])]).tolist()
    moved = [_moved(leaf, start) for leaf, start in zip(leaves, starts, strict=True)]
    values = np.concatenate([leaf.values for leaf in leaves])
    return replace(leaves[0], values=values, parts=sum((leaf.parts for leaf in moved), ()))
