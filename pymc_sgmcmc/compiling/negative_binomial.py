"""PyMC's negative binomial density in one branch, which takes less time."""

from __future__ import annotations

import pytensor.scalar as ps
import pytensor.tensor as pt
from pymc import NegativeBinomial
from pymc.distributions.dist_math import binomln
from pymc.logprob.utils import CheckParameterValue
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Apply, Constant, Variable, equal_computations
from pytensor.graph.rewriting.basic import node_rewriter
from pytensor.graph.traversal import graph_inputs
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.math import softplus
from pytensor.tensor.variable import TensorVariable

LIMIT = 1e10
"""PyMC's density is that of Poisson where there are more successes n than this."""


@node_rewriter([Elemwise])
def local_negative_binomial(fgraph, node):
    """switch(n > 10^10, Poisson, negative binomial) -> negative binomial of n of at most 10^10.

    Compiled code evaluates both for each row. With w = log(mean / n) the density is
    log binom(y + n - 1, y) + y w - (y + n) softplus(w). At n = 10^10 that of Poisson differs from
    it by ((y - mean)^2 - y) / (2 n), and by the rounding of log-gamma functions, 10^-5 for each
    row, which depends on y alone. The difference y - (y + n) sigmoid(w) in the gradient has the
    relative accuracy of y, too little in single precision.
    """
    output = node.outputs[0]
    if output.type.dtype != "float64" or (found := _parameters(node)) is None:
        return None
    value, n, logit = found
    log_mean = pt.log(n) - logit
    n = pt.minimum(n, LIMIT)
    ratio = log_mean - pt.log(n)
    # A mean of zero is allowed where nothing is counted.
    power = pt.switch(pt.eq(value, 0), 0, value * ratio)
    density = binomln(value + n - 1, value) + power - (value + n) * softplus(ratio)
    return [density.astype(output.type.dtype)]


def _parameters(node: Apply) -> tuple[TensorVariable, TensorVariable, TensorVariable] | None:
    """Value, n and logit of p where a node is the choice in PyMC's density for a random n."""
    choice = node.outputs[0]
    n = _input_of(choice, (ps.Switch, 0), (ps.GT, 0))
    value = _input_of(choice, (ps.Switch, 2), (ps.Add, 0), (ps.Add, 1), (ps.Switch, 2), (ps.Mul, 0))
    p = _input_of(choice, (ps.Switch, 2), (ps.Add, 1), (ps.Switch, 2), (ps.Mul, 1), (ps.Log, 0))
    logit = _input_of(p, (ps.Sigmoid, 0))
    if n is None or value is None or p is None or logit is None:
        return None
    # A number of successes that is given may be above the limit, and its posterior is Poisson's.
    if all(isinstance(variable, Constant | SharedVariable) for variable in graph_inputs([n])):
        return None
    # The rest is left to PyMC: this is its density, or another one whose parts look like these.
    density = NegativeBinomial.logp(value, n, p)
    whole = _input_of(density, (CheckParameterValue, 0), (ps.Switch, 2))
    if whole is None or not equal_computations([choice], [whole]):
        return None
    return value, n, logit


def _input_of(variable: Variable | None, *path: tuple[type, int]) -> Variable | None:
    """Follow inputs by number through operations, None where one is not as expected."""
    for operation, number in path:
        variable = _without_added_axes(variable)
        if variable is None or variable.owner is None:
            return None
        op, inputs = variable.owner.op, variable.owner.inputs
        if not isinstance(op.scalar_op if isinstance(op, Elemwise) else op, operation):
            return None
        if number >= len(inputs):
            return None
        variable = inputs[number]
    return variable


def _without_added_axes(variable: Variable | None) -> Variable | None:
    """A variable before axes are added in front of it, as broadcasting would."""
    while variable is not None and variable.owner is not None:
        op = variable.owner.op
        if not isinstance(op, DimShuffle) or not op.is_left_expand_dims:
            break
        variable = variable.owner.inputs[0]
    return variable
