"""Rewrites of the log density of rows that make its gradient cheaper without changing values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pytensor.scalar as ps
import pytensor.tensor as pt
from pymc import NegativeBinomial
from pymc.distributions.dist_math import binomln
from pymc.logprob.utils import CheckParameterValue
from pymc.pytensorf import rewrite_pregrad
from pytensor.graph.basic import Apply, Constant, Variable, equal_computations
from pytensor.graph.rewriting.basic import in2out, node_rewriter
from pytensor.graph.traversal import toposort
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.math import neg, softplus
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.graph_notes import copy_without_notes
from pymc_sgmcmc.posterior.compiled import PYTHON_MODE, compile_quietly
from pymc_sgmcmc.posterior.threads import OfRows, SharedFunction


def drop_settled_switches(
    terms: Sequence[TensorVariable],
    placeholders: Sequence[TensorVariable],
    each_chunk: Callable[[OfRows, Any], Iterator[Any]],
) -> list[TensorVariable]:
    """Replace switches on a condition that holds for all rows of the data, or for none.

    Distributions check their support, as in ``switch(0 <= y <= 1, ..., -inf)``. Since the data are
    known, such a condition is evaluated once, here, instead of in each transition.

    Parameters
    ----------
    terms : sequence of TensorVariable
        Elementwise log densities of symbolic rows.
    placeholders : sequence of TensorVariable
        The symbolic rows.
    each_chunk : callable
        Applies a function of a value and of some rows to all rows, in pieces.
    """
    conditions = _conditions_on(placeholders, terms)
    if not conditions:
        return list(terms)
    of_rows = _Conditions(list(placeholders), conditions)
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


def drop_switches_on_data(
    terms: Sequence[TensorVariable], data: Iterable[Variable]
) -> list[TensorVariable]:
    """Replace switches on a condition on data in memory that holds everywhere, or nowhere.

    The data are variables with values, which are all that the conditions depend on.
    """
    conditions = _conditions_on(data, terms)
    if not conditions:
        return list(terms)
    values = compile_quietly([], conditions, PYTHON_MODE)()
    settled = {
        condition: bool(np.all(value))
        for condition, value in zip(conditions, values, strict=True)
        if np.all(value) or not np.any(value)
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

    def __init__(self, rows: list[TensorVariable], conditions: list[Variable]):
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
    in2out(local_negative_binomial).rewrite(graph)
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


@node_rewriter([Elemwise])
def local_negative_binomial(fgraph, node):
    """PyMC's negative binomial density of a mean -> with one softplus, and one branch for all n.

    With w = log(mean / n) it is log binom(y + n - 1, y) + y w - (y + n) softplus(w). PyMC takes the
    Poisson density above n = 10^10, and compiled code evaluates both for each row. Here a random n
    counts as 10^10 there, which changes a log density by less than (y - mean)^2 / 10^10.
    """
    if (found := _negative_binomial_of_mean(node)) is None:
        return None
    value, n, log_mean = found
    n = pt.minimum(n, LIMIT_OF_NEGATIVE_BINOMIAL)
    ratio = log_mean - pt.log(n)
    # A mean of zero is allowed where nothing is counted.
    power = pt.switch(pt.eq(value, 0), 0, value * ratio)
    density = binomln(value + n - 1, value) + power - (value + n) * softplus(ratio)
    return [density.astype(node.outputs[0].dtype)]


LIMIT_OF_NEGATIVE_BINOMIAL = 1e10
"""PyMC's density is that of Poisson above this number of successes."""


def _negative_binomial_of_mean(
    node: Apply,
) -> tuple[TensorVariable, TensorVariable, TensorVariable] | None:
    """Value, n and log mean where a node is the choice in PyMC's density of a mean and random n."""
    choice = node.outputs[0]
    n = _input_of(choice, (ps.Switch, 0), (ps.GT, 0))
    value = _input_of(choice, (ps.Switch, 2), (ps.Add, 0), (ps.Add, 1), (ps.Switch, 2), (ps.Mul, 0))
    p = _input_of(choice, (ps.Switch, 2), (ps.Add, 1), (ps.Switch, 2), (ps.Mul, 1), (ps.Log, 0))
    log_n = _input_of(p, (ps.Sigmoid, 0), (ps.Sub, 0))
    log_mean = _input_of(p, (ps.Sigmoid, 0), (ps.Sub, 1))
    if n is None or value is None or p is None or log_n is None or log_mean is None:
        return None
    if not _is_logarithm(log_n, n) or isinstance(_without_added_axes(n), Constant):
        return None
    # The rest is left to PyMC: this is its density, or another one whose parts look like these.
    density = NegativeBinomial.logp(value, n, p)
    whole = _input_of(density, (CheckParameterValue, 0), (ps.Switch, 2))
    if whole is None or not equal_computations([choice], [whole]):
        return None
    return value, n, log_mean


def _is_logarithm(variable: Variable, of: Variable) -> bool:
    """Whether a variable is log(of), which is x where `of` is exp(x)."""
    if (argument := _input_of(variable, (ps.Log, 0))) is not None:
        return _without_added_axes(argument) is _without_added_axes(of)
    exponent = _input_of(of, (ps.Exp, 0))
    return exponent is not None and _without_added_axes(exponent) is _without_added_axes(variable)


def _input_of(variable: Variable | None, *path: tuple[type, int]) -> Variable | None:
    """Follow inputs by number through operations, None where one is not as expected."""
    for operation, number in path:
        variable = _without_added_axes(variable)
        if variable is None or variable.owner is None:
            return None
        op = variable.owner.op
        if not isinstance(op.scalar_op if isinstance(op, Elemwise) else op, operation):
            return None
        variable = variable.owner.inputs[number]
    return variable


def _without_added_axes(variable: Variable | None) -> Variable | None:
    """A variable before axes are added in front of it, as broadcasting would."""
    while variable is not None and variable.owner is not None:
        op = variable.owner.op
        if not isinstance(op, DimShuffle) or not op.is_left_expand_dims:
            break
        variable = variable.owner.inputs[0]
    return variable


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


def _is(node: Apply, scalar_op: type) -> bool:
    return isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, scalar_op)
