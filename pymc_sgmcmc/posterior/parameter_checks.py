"""Log densities that are minus infinity where a parameter of a distribution is invalid.

PyMC asserts that parameters are valid, such as probabilities between 0 and 1, and its own samplers
take the log density to be minus infinity otherwise. Without that the formula may be finite: the log
density of a success is log p at p = 1.5 as well. A Metropolis decision would then accept it.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import pytensor.tensor as pt
from pymc.logprob.utils import CheckParameterValue
from pytensor.graph.basic import Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.traversal import ancestors
from pytensor.tensor import TensorVariable
from pytensor.tensor.basic import MakeVector, ScalarFromTensor
from pytensor.tensor.math import All
from pytensor.tensor.random.op import RandomVariable


def checks_as_values(
    log_density: TensorVariable, variable: Variable | None, values: AbstractSet[Variable]
) -> TensorVariable:
    """A log density with assertions on parameters turned into minus infinity.

    Parameters
    ----------
    log_density : TensorVariable
    variable : Variable or None
        Its random variable, None for a potential. Where its parameters are scalars for each
        element, the log density of an element depends on the parameters of that element alone.
    values : set of Variable
        Value variables. Assertions that do not depend on them are dropped.
    """
    # A copy of the nodes, which may be changed; inputs and constants stay the same.
    graph = FunctionGraph(outputs=[log_density], clone=True, copy_inputs=False, copy_orphans=False)
    for node in graph.toposort():
        if not (isinstance(node.op, CheckParameterValue) and node.op.can_be_replaced_by_ninf):
            continue
        inside, *asserted = node.inputs
        conditions = [
            condition
            for each in asserted
            for condition in _operands(each)
            if not values.isdisjoint(ancestors([condition]))
        ]
        by_element = _has_scalar_parameters(variable)
        for condition in conditions:
            fits = by_element and condition.type.ndim <= inside.type.ndim
            holds = condition if fits else pt.all(condition)
            inside = pt.switch(holds, inside, -pt.inf).astype(inside.type.dtype)
        graph.replace(node.outputs[0], inside)
    return graph.outputs[0]


def _operands(condition: Variable) -> list[Variable]:
    """The conditions of which an assertion demands that all elements hold."""
    node = condition.owner
    if node is None:
        return [condition]
    of_all = isinstance(node.op, All) and node.outputs[0].type.ndim == 0
    if of_all or isinstance(node.op, MakeVector | ScalarFromTensor):
        return [operand for each in node.inputs for operand in _operands(each)]
    return [condition]


def _has_scalar_parameters(variable: Variable | None) -> bool:
    operation = None if variable is None or variable.owner is None else variable.owner.op
    return isinstance(operation, RandomVariable) and not any(
        (operation.ndim_supp, *operation.ndims_params)
    )
