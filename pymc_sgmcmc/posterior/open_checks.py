"""Whether a parameter of a distribution can leave its range while a chain moves.

PyMC asserts ranges such as ``sigma > 0``. A scale that is the exponential of an unconstrained
number keeps its range, and ``a + b * x`` does not. Intervals of results, from those of the inputs
of each operation, tell most of the former.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from itertools import product

import numpy as np
import pytensor.scalar.basic as scalar_basic
import pytensor.scalar.math as scalar_math
from pymc.logprob.utils import CheckParameterValue
from pymc.model import Model
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.traversal import ancestors, toposort
from pytensor.scalar.basic import ScalarOp
from pytensor.tensor.basic import Alloc, Join, MakeVector, ScalarFromTensor, TensorFromScalar
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.math import All, Max, Min, Sum
from pytensor.tensor.shape import Reshape, SpecifyShape
from pytensor.tensor.special import Softmax
from pytensor.tensor.subtensor import (
    AdvancedIncSubtensor,
    AdvancedSubtensor,
    IncSubtensor,
    Subtensor,
)

from pymc_sgmcmc.posterior.graphs import leaf_value
from pymc_sgmcmc.posterior.large_constants import large_constants_by_sample

Interval = tuple[float, float]
"""The smallest and the largest number that a result may have."""

ANY: Interval = (-math.inf, math.inf)
NOT_NEGATIVE: Interval = (0.0, math.inf)
PART: Interval = (0.0, 1.0)


def has_open_checks(model: Model) -> bool:
    """Whether an assertion on parameters may fail somewhere in the space of the model's variables.

    A value that is at least zero counts as positive, and probabilities as adding up to one.
    """
    with large_constants_by_sample(model):
        log_densities = model.logp(vars=[*model.basic_RVs, *model.potentials], sum=False)
    values = set(model.value_vars)
    nodes = list(toposort(log_densities))
    intervals: dict[Variable, Interval] = {}
    for node in nodes:
        interval = _of_node(node, intervals)
        intervals.update(dict.fromkeys(node.outputs, interval))
    return any(
        _is_open(asserted, values, intervals)
        for node in nodes
        if isinstance(node.op, CheckParameterValue) and node.op.can_be_replaced_by_ninf
        for asserted in node.inputs[1:]
    )


def _is_open(
    condition: Variable, values: AbstractSet[Variable], intervals: dict[Variable, Interval]
) -> bool:
    """Whether a condition depends on variables and is not always true."""
    node = condition.owner
    if node is None or values.isdisjoint(ancestors([condition])):
        return False
    if isinstance(node.op, All | MakeVector | ScalarFromTensor | TensorFromScalar | DimShuffle):
        return any(_is_open(operand, values, intervals) for operand in node.inputs)
    operation = getattr(node.op, "scalar_op", None)
    if isinstance(operation, scalar_basic.AND):
        return any(_is_open(operand, values, intervals) for operand in node.inputs)
    if isinstance(operation, scalar_basic.OR):
        return False  # Two numbers are close, as the sum of probabilities and one.
    if isinstance(operation, scalar_basic.GT | scalar_basic.GE):
        larger, smaller = node.inputs
    elif isinstance(operation, scalar_basic.LT | scalar_basic.LE):
        smaller, larger = node.inputs
    else:
        return True
    return not _interval(larger, intervals)[0] >= _interval(smaller, intervals)[1]


def _interval(variable: Variable, intervals: dict[Variable, Interval]) -> Interval:
    if variable in intervals:
        return intervals[variable]
    numbers = leaf_value(variable)
    if numbers is None or not numbers.size or numbers.dtype.kind not in "biuf":
        return ANY
    if np.isnan(numbers).any():
        return ANY
    return float(numbers.min()), float(numbers.max())


def _of_node(node: Apply, intervals: dict[Variable, Interval]) -> Interval:
    """Interval of the results of a node."""
    operation = node.op
    if isinstance(operation, Softmax) or _is_share(node, intervals):
        return PART
    of_numbers = operation.scalar_op if isinstance(operation, Elemwise) else operation
    if isinstance(of_numbers, ScalarOp):
        return _of_scalars(of_numbers, [_interval(operand, intervals) for operand in node.inputs])
    if isinstance(operation, Sum):
        smallest, largest = _interval(node.inputs[0], intervals)
        return (0.0 if smallest >= 0 else -math.inf), (0.0 if largest <= 0 else math.inf)
    if isinstance(operation, IncSubtensor | AdvancedIncSubtensor):
        if not operation.set_instead_of_inc:
            return ANY
        return _union([_interval(operand, intervals) for operand in node.inputs[:2]])
    if isinstance(operation, Join | MakeVector):
        return _union([_interval(operand, intervals) for operand in node.inputs])
    if isinstance(
        operation,
        DimShuffle | Subtensor | AdvancedSubtensor | Reshape | SpecifyShape | Alloc | Max | Min
        | CheckParameterValue | TensorFromScalar | ScalarFromTensor,
    ):  # fmt: skip
        return _interval(node.inputs[0], intervals)
    return ANY


def _is_share(node: Apply, intervals: dict[Variable, Interval]) -> bool:
    """Whether a node divides numbers that are not negative by their sum."""
    if not isinstance(getattr(node.op, "scalar_op", None), scalar_basic.TrueDiv):
        return False
    part, total = node.inputs
    while total.owner is not None and isinstance(total.owner.op, DimShuffle):
        (total,) = total.owner.inputs
    return (
        total.owner is not None
        and isinstance(total.owner.op, Sum)
        and total.owner.inputs[0] is part
        and _interval(part, intervals)[0] >= 0
    )


def _union(intervals: Sequence[Interval]) -> Interval:
    return min(low for low, _ in intervals), max(high for _, high in intervals)


def _of_scalars(operation: ScalarOp, inputs: Sequence[Interval]) -> Interval:
    """Interval of an operation on numbers of given intervals."""
    found = next((rule for kind, rule in RULES if isinstance(operation, kind)), None)
    if found is None:
        return ANY
    with np.errstate(all="ignore"):
        smallest, largest = found(inputs)
    return (-math.inf if math.isnan(smallest) else smallest), (
        math.inf if math.isnan(largest) else largest
    )


def _increasing(function: Callable[..., float]) -> Callable[[Sequence[Interval]], Interval]:
    def of(inputs: Sequence[Interval]) -> Interval:
        lowest, highest = zip(*inputs, strict=True)
        return float(function(*lowest)), float(function(*highest))

    return of


def _difference(inputs: Sequence[Interval]) -> Interval:
    (low, high), (other_low, other_high) = inputs
    return low - other_high, high - other_low


def _product(inputs: Sequence[Interval]) -> Interval:
    low, high = inputs[0]
    for other in inputs[1:]:
        # Zero times infinity is zero here: the largest numbers are not reached.
        corners = [
            0.0 if 0.0 in corner else corner[0] * corner[1]
            for corner in product((low, high), other)
        ]
        low, high = min(corners), max(corners)
    return low, high


def _quotient(inputs: Sequence[Interval]) -> Interval:
    numerator, (low, high) = inputs
    if low < 0:
        return ANY
    inverse = (1 / high if high > 0 else math.inf), (1 / low if low > 0 else math.inf)
    return _product([numerator, inverse])


def _size(inputs: Sequence[Interval]) -> Interval:
    ((low, high),) = inputs
    return (0.0 if low <= 0 <= high else min(abs(low), abs(high))), max(abs(low), abs(high))


def _power(inputs: Sequence[Interval]) -> Interval:
    (low, _), exponent = inputs
    even = exponent[0] == exponent[1] and exponent[0] % 2 == 0
    return NOT_NEGATIVE if low >= 0 or even else ANY


RULES: list[tuple[type | tuple[type, ...], Callable[[Sequence[Interval]], Interval]]] = [
    ((scalar_basic.Identity, scalar_basic.Cast), lambda inputs: inputs[0]),
    (scalar_basic.Second, lambda inputs: inputs[1]),
    (scalar_basic.Switch, lambda inputs: _union(inputs[1:])),
    (scalar_basic.Add, _increasing(lambda *numbers: sum(numbers))),
    (scalar_basic.Sub, _difference),
    (scalar_basic.Mul, _product),
    (scalar_basic.TrueDiv, _quotient),
    (scalar_basic.Reciprocal, lambda inputs: _quotient([(1.0, 1.0), *inputs])),
    (scalar_basic.Neg, lambda inputs: (-inputs[0][1], -inputs[0][0])),
    (scalar_basic.Abs, _size),
    (scalar_basic.Sign, _increasing(np.sign)),
    (scalar_basic.Sqr, lambda inputs: _product([_size(inputs)] * 2)),
    (scalar_basic.Sqrt, lambda inputs: NOT_NEGATIVE),
    (scalar_basic.Exp, _increasing(np.exp)),
    (scalar_basic.Log1p, _increasing(np.log1p)),
    (scalar_math.Softplus, lambda inputs: NOT_NEGATIVE),
    (scalar_math.Sigmoid, lambda inputs: PART),
    (scalar_math.Erf, lambda inputs: (-1.0, 1.0)),
    (scalar_math.Erfc, lambda inputs: (0.0, 2.0)),
    (scalar_basic.Pow, _power),
    (scalar_basic.Minimum, _increasing(min)),
    (scalar_basic.Maximum, _increasing(max)),
]
"""Rules by the type of an operation; results of others may be any number."""
