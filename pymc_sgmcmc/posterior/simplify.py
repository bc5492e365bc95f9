"""Rewrites of the log density of rows that make its gradient cheaper without changing values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pytensor.scalar as ps
import pytensor.tensor as pt
from pymc.pytensorf import rewrite_pregrad
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.replace import clone_replace
from pytensor.graph.rewriting.basic import in2out, node_rewriter
from pytensor.graph.traversal import toposort
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.math import neg, softplus
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.compiling.compiled import PYTHON_MODE, compile_quietly
from pymc_sgmcmc.compiling.graph_notes import copy_without_notes
from pymc_sgmcmc.compiling.merging import lengths_of_64_bits
from pymc_sgmcmc.limits import free_memory
from pymc_sgmcmc.posterior.graphs import leaf_value
from pymc_sgmcmc.posterior.threads import OfRows, SharedFunction

SLOW = (ps.Sin, ps.Cos, ps.Exp, ps.Log, ps.Pow, ps.Tanh)
"""Reading a number from memory takes less time than computing one of these functions."""


def drop_settled_switches(
    terms: Sequence[TensorVariable],
    data: Iterable[Variable],
    each_chunk: Callable[[OfRows, Any], Iterable[Any]],
) -> list[TensorVariable]:
    """Replace switches on a condition that holds for all rows of the data, or for none.

    Distributions check their support, as in ``switch(0 <= y <= 1, ..., -inf)``. Since the data are
    known, such a condition is evaluated once, here, instead of in each transition.

    Parameters
    ----------
    terms : sequence of TensorVariable
        Elementwise log densities of symbolic rows.
    data : iterable of Variable
        What the conditions depend on: symbolic rows, or variables with values.
    each_chunk : callable
        Applies a function of a value and of some rows to all rows, in pieces.
    """
    data = list(data)
    conditions = _conditions_on(data, terms)
    if not conditions:
        return list(terms)
    rows = [variable for variable in data if leaf_value(variable) is None]
    of_rows = _Conditions(rows, conditions)
    always = np.ones(len(conditions), dtype=bool)
    never = np.ones(len(conditions), dtype=bool)
    for of_chunk in each_chunk(_all_and_none, of_rows):
        always &= of_chunk[0]
        never &= of_chunk[1]
        if not (always | never).any():
            return list(terms)
    settled = {
        condition: bool(is_always)
        for condition, is_always, is_never in zip(conditions, always, never, strict=True)
        if is_always or is_never
    }
    return _choose_branches(terms, settled)


def _conditions_on(
    variables: Iterable[Variable], terms: Sequence[TensorVariable]
) -> list[Variable]:
    """Conditions of the switches of terms that are functions of some variables alone."""
    nodes = list(toposort(terms))
    known = _functions_of(variables, nodes)
    switches = [node for node in nodes if _is(node, ps.Switch) and node.inputs[0] in known]
    return list(dict.fromkeys(node.inputs[0] for node in switches))


class _Conditions:
    """Conditions as functions of rows, which are compiled where they are first evaluated."""

    def __init__(self, rows: list[Variable], conditions: list[Variable]):
        self._rows, self._conditions = rows, conditions

    @cached_property
    def evaluate(self) -> Callable[..., list[np.ndarray]]:
        """Values of the conditions, from arrays of rows."""
        return SharedFunction(compile_quietly(self._rows, self._conditions, PYTHON_MODE))

    def __getstate__(self) -> dict[str, Any]:
        return {"_rows": self._rows, "_conditions": self._conditions}


def _all_and_none(
    conditions: _Conditions, rows: Sequence[np.ndarray]
) -> tuple[list[bool], list[bool]]:
    """Whether each condition holds for all of some rows, and whether for none of them."""
    values = conditions.evaluate(*rows)
    return [bool(np.all(value)) for value in values], [not np.any(value) for value in values]


def computed_once(log_density: TensorVariable, n_rows: int) -> TensorVariable:
    """A log density with arrays of so many rows in place of what is computed of constants alone.

    Such is the basis of a Gaussian process, which each transition would compute again for its rows.
    """
    nodes = list(toposort([log_density]))
    known, slow = _functions_of([], nodes), set[Variable]()
    for node in nodes:
        if node.outputs[0] in known and (_is(node, SLOW) or not slow.isdisjoint(node.inputs)):
            slow.update(node.outputs)
    last = [v for node in nodes if node.outputs[0] not in known for v in node.inputs if v in slow]
    kept = [
        variable
        for variable in dict.fromkeys(last)
        if variable.type.shape.count(n_rows) == 1
        and None not in variable.type.shape
        and 0 < np.prod(variable.type.shape) * np.dtype(variable.dtype).itemsize < free_memory()
    ]
    if not kept:
        return log_density
    values = compile_quietly([], kept, PYTHON_MODE)()
    # What is not finite stays as it is, for an error that names the data it is computed of.
    finite = [(v, value) for v, value in zip(kept, values, strict=True) if np.isfinite(value).all()]
    arrays = {v: pt.constant(value) for v, value in finite}
    return clone_replace([log_density], arrays, rebuild_strict=False)[0]


def _functions_of(placeholders: Iterable[Variable], nodes: Iterable[Apply]) -> set[Variable]:
    """Variables that depend on the placeholders and constants alone."""
    reached = set(placeholders)
    for node in nodes:
        if all(variable in reached or isinstance(variable, Constant) for variable in node.inputs):
            reached.update(node.outputs)
    return reached


def _choose_branches(
    terms: Sequence[TensorVariable], settled: dict[Variable, bool]
) -> list[TensorVariable]:
    rebuilt: dict[Variable, Variable] = {}
    for node in toposort(terms):
        inputs = [rebuilt.get(variable, variable) for variable in node.inputs]
        if _is(node, ps.Switch) and node.inputs[0] in settled:
            chosen = inputs[1 if settled[node.inputs[0]] else 2]
            output = node.outputs[0]
            if chosen.type.broadcastable != output.type.broadcastable:
                # A branch that is the same for all rows still counts once a row, and once for
                # each entry of the other branch.
                chosen = pt.broadcast_arrays(chosen, *inputs)[0]
            rebuilt[output] = chosen.astype(output.dtype)
        elif inputs != node.inputs:
            outputs = node.clone_with_new_inputs(inputs, strict=False).outputs
            rebuilt.update(zip(node.outputs, outputs, strict=True))
    return [rebuilt.get(term, term) for term in terms]


def prepared(log_density: TensorVariable) -> TensorVariable:
    """A log density after the rewrites that PyMC makes before it takes a gradient, and our own.

    They keep it accurate, and its value shares expressions with its gradient. PyMC's function
    changes its graph, which may be a part of other graphs, so it gets a copy.
    """
    graph = copy_without_notes([log_density])
    lengths_of_64_bits.rewrite(graph)
    rewrite_pregrad(graph)
    in2out(local_log_logistic).rewrite(graph)
    return graph.outputs[0]


@node_rewriter([Elemwise])
def local_log_logistic(fgraph, node):
    """switch(y, -softplus(-x), -softplus(x)) -> switch(y, x, 0) - softplus(x).

    This is the Bernoulli log density on the logit scale. Compiled code evaluates both branches. The
    new form, with its gradient y - sigmoid(x), needs one exponential a row in place of two.
    """
    if not _is(node, ps.Switch):
        return None
    condition, when_true, when_false = node.inputs
    argument = _negated_softplus_argument(when_false)
    opposite = _negated_softplus_argument(when_true)
    if argument is None or opposite is None or _negated(opposite) is not argument:
        return None
    linear = pt.switch(condition, argument, np.zeros((), dtype=node.outputs[0].dtype))
    return [(linear - softplus(argument)).astype(node.outputs[0].dtype)]


def _negated_softplus_argument(variable: Variable) -> Variable | None:
    """X of -softplus(x)."""
    inner = _negated(variable)
    if inner is None or inner.owner is None or inner.owner.op != softplus:
        return None
    return inner.owner.inputs[0]


def _negated(variable: Variable) -> Variable | None:
    """X of -x."""
    if variable.owner is None or variable.owner.op != neg:
        return None
    return variable.owner.inputs[0]


def _is(node: Apply, scalar_op: type | tuple[type, ...]) -> bool:
    return isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, scalar_op)
