"""Functions of counts that are computed once for each count, and not for each row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytensor.scalar.basic as scalar_basic
import pytensor.scalar.math as scalar_math
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op
from pytensor.graph.rewriting.basic import node_rewriter
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.type import integer_dtypes
from pytensor.tensor.utils import import_func_from_string

SLOW_FUNCTIONS = (scalar_math.GammaLn, scalar_math.Psi, scalar_math.TriGamma)
"""Computing these functions takes ten times as long as to read an entry of a table, or longer."""


class OfWholeNumbers(Op):
    """A function of the sum of counts and a number that all rows share.

    Counts repeat, so that the function is computed for each whole number up to the largest one.
    The values are those of the function at each row, to the last bit.

    Parameters
    ----------
    function : str
        Module and name of a function of an array, such as ``"scipy.special.gammaln"``.
    argument_dtype, dtype : str
        Of the sums and of the values.
    """

    __props__ = ("function", "argument_dtype", "dtype")

    def __init__(self, function: str, argument_dtype: str, dtype: str):
        self.function, self.argument_dtype, self.dtype = function, argument_dtype, dtype
        self._call = import_func_from_string(function)

    def make_node(self, counts: Variable, number: Variable) -> Apply:
        """Apply the function to a vector of counts, and a number in an array of length one."""
        return Apply(self, [counts, number], [counts.type.clone(dtype=self.dtype)()])

    def perform(self, node: Apply, inputs: Any, output_storage: Any) -> None:
        """Look the counts up, or compute all where a table would not be much shorter."""
        counts, number = inputs
        if counts.size and counts.min() >= 0 and counts.max() < counts.size / 2:
            table = self._values(np.arange(int(counts.max()) + 1, dtype=counts.dtype), number)
            values = table[counts]
        else:
            values = self._values(counts, number)
        output_storage[0][0] = values

    def _values(self, counts: np.ndarray, number: np.ndarray) -> np.ndarray:
        sums = np.asarray(counts + number, dtype=self.argument_dtype)
        return np.asarray(self._call(sums), dtype=self.dtype)


@node_rewriter([Elemwise])
def of_whole_numbers(fgraph, node):
    """Replace slow functions of the sum of counts and a number by `OfWholeNumbers`."""
    operation = node.op
    if not isinstance(operation.scalar_op, SLOW_FUNCTIONS) or operation.nfunc_spec is None:
        return None
    (argument,) = node.inputs
    sum_of = argument.owner
    if sum_of is None or not isinstance(sum_of.op, Elemwise) or len(sum_of.inputs) != 2:
        return None
    if not isinstance(sum_of.op.scalar_op, scalar_basic.Add):
        return None
    for counts, number in (sum_of.inputs, sum_of.inputs[::-1]):
        if _are_counts(counts) and number.type.broadcastable == (True,):
            dtypes = argument.type.dtype, node.outputs[0].type.dtype
            return [OfWholeNumbers(operation.nfunc_spec[0], *dtypes)(counts, number)]
    return None


def _are_counts(values: Variable) -> bool:
    return values.type.dtype in integer_dtypes and values.type.broadcastable == (False,)
