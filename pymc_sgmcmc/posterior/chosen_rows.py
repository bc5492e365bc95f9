"""Rows that a model chooses from longer arrays, as in ``rate[~censored]``, as data of their own.

With the numbers w of the rows, ``exp(a + b * x + u[group])[w]`` is ``exp(a + b * x[w] +
u[group[w]])``, where ``x[w]`` and ``group[w]`` are data with one entry a row. The index is moved
through operations that keep the entries of the first axis apart, and stays at all others.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import graph_inputs, toposort, walk
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.subtensor import AdvancedSubtensor, Subtensor, indices_from_subtensor
from pytensor.tensor.type import TensorType
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.posterior.graphs import is_product, leaf_value, remake, value_of
from pymc_sgmcmc.posterior.reading import is_all
from pymc_sgmcmc.posterior.rows import is_whole


class Choice(NamedTuple):
    """Numbers of entries along the first axis, each at most once, and how many there are of all."""

    numbers: np.ndarray
    length: int


type Choices = dict[Variable, Choice]
"""The entries that are chosen, by the variable that has them."""


def choices_of_rows(graph: TensorVariable) -> Choices:
    """Where a graph chooses some of the rows of arrays that are made of data."""
    nodes = toposort([graph])
    return {node.outputs[0]: choice for node in nodes if (choice := _choice(node)) is not None}


def on_chosen_rows(graph: TensorVariable, choices: Choices, n_rows: int) -> TensorVariable:
    """A graph whose choices of so many rows are made of the data of these rows alone."""
    chosen: dict[Variable, Variable] = {
        variable: _entries(variable.owner.inputs[0], pt.constant(choice.numbers), {})
        for variable, choice in choices.items()
        if len(choice.numbers) == n_rows
    }
    return clone_replace([graph], chosen, rebuild_strict=False)[0] if chosen else graph


def _choice(node: Apply) -> Choice | None:
    """The choice that a node makes, if any.

    An index with repetitions, such as the group of each record, chooses no rows.
    """
    if not isinstance(node.op, Subtensor | AdvancedSubtensor):
        return None
    place, *others = indices_from_subtensor(node.inputs[1:], node.op.idx_list)
    if is_all(place) or not all(map(is_all, others)):
        return None
    parts = walk(
        node.inputs[:1],
        lambda each: [each.owner.inputs[number] for number in _with_the_rows(each)],
        bfs=False,
    )
    data = [each for each in parts if not _with_the_rows(each) and _is_data(each)]
    lengths = {len(value_of(each)) for each in data}
    if len(lengths) != 1:
        return None
    (length,) = lengths
    index = pt.constant(np.arange(length))[place]
    if index.type.ndim != 1 or not _is_data(index):
        return None
    try:
        numbers = value_of(index)
    except IndexError:  # Codes out of range are told later, with their row.
        return None
    is_choice = len(numbers) < length and len(np.unique(numbers)) == len(numbers)
    return Choice(numbers, length) if is_choice else None


def _with_the_rows(variable: Variable) -> list[int]:
    """Numbers of the inputs of an array whose entries along the first axis are its own, if any."""
    node = variable.owner
    match None if node is None else node.op:
        case Elemwise():
            return [
                number for number, each in enumerate(node.inputs) if not each.type.broadcastable[0]
            ]
        case DimShuffle(new_order=(0, *_)):
            return [0]
        case Subtensor() | AdvancedSubtensor():
            place, *_ = indices_from_subtensor(node.inputs[1:], node.op.idx_list)
            arrays = {
                number: each
                for number, each in enumerate(node.inputs)
                if number and isinstance(each.type, TensorType)
            }
            if not arrays:
                return [0] if is_all(place) else []
            # The axes of arrays come first where the first axis is indexed, and of these those of
            # the array with most axes. A mask has another number of entries.
            if not isinstance(place, Variable) or "bool" in {a.dtype for a in arrays.values()}:
                return []
            ndim = max(1, *(each.type.ndim for each in arrays.values()))
            return [
                number
                for number, each in arrays.items()
                if each.type.ndim == ndim and not each.type.broadcastable[0]
            ]
        case _:
            return [0] if node is not None and is_product(node) else []


def _entries(variable: Variable, numbers: Variable, known: dict[Variable, Variable]) -> Variable:
    """Entries of an array by their numbers along the first axis."""
    if variable not in known:
        if with_rows := _with_the_rows(variable):
            inputs = list(variable.owner.inputs)
            for number in with_rows:
                inputs[number] = _entries(inputs[number], numbers, known)
            (known[variable],) = remake(variable.owner, inputs)
        elif _is_data(variable):
            known[variable] = pt.constant(value_of(variable)[numbers.data], name=variable.name)
        else:
            known[variable] = variable[numbers]
    return known[variable]


def _is_data(variable: Variable) -> bool:
    """Whether an array is made of data alone, of which each row has a part of its own."""
    return all(
        isinstance(each, Constant) or (leaf_value(each) is not None and not is_whole(each))
        for each in graph_inputs([variable])
    )
