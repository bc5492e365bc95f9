"""Operations on matrices that Numba compiles in less than a second.

PyTensor 3.3 writes the calls of BLAS for a product of two matrices into each place that has one,
which takes Numba 15 to 20 seconds a product where its cache is empty. NumPy's own `dot` in Numba
takes less than one, and is no slower at run time. A diagonal matrix, as in the derivative of a
Cholesky factor, takes long for the texts of errors that cannot happen. Others are used in
the functions that this package compiles, as rewrites of their mode: other functions of the process
keep PyTensor's.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import Any

import numpy as np
from pytensor.compile.mode import Mode, get_mode
from pytensor.graph.rewriting.basic import dfs_rewriter, node_rewriter
from pytensor.link.numba.linker import NumbaLinker
from pytensor.tensor.basic import AllocDiag, cast, switch
from pytensor.tensor.math import Dot

from pymc_sgmcmc.compiling.numba_loop.trigamma import register_trigamma

FLOATING = ("float32", "float64")
"""These are the types of numbers that BLAS multiplies."""

LAST = 49.45
"""This position in the order of the rewrites comes after all that look for a `Dot`."""

WITHOUT_BATCH = 60.1
"""This position comes after that which takes operations out of loops over a batch of one."""


SMALL = 1000
"""A call of BLAS takes as long as a loop over a matrix of so many elements, of 20 to 100 columns,
which is measured (80 nanoseconds). Smaller products are loops."""


class NumpyDot(Dot):
    """The product of two matrices, by `numpy.dot` in Numba."""


@node_rewriter([Dot])
def _use_numpy_dot(fgraph, node):
    types = {variable.type.dtype for variable in (*node.inputs, *node.outputs)}
    if type(node.op) is not Dot or not types <= set(FLOATING):
        return None
    dtype = node.outputs[0].type.dtype
    return [NumpyDot()(*(cast(factor, dtype) for factor in node.inputs))]


_use_numpy_dot_everywhere = dfs_rewriter(_use_numpy_dot)


@node_rewriter([AllocDiag])
def _diagonal_of_elements(fgraph, node):
    """A diagonal matrix of known size as a function of elements."""
    (values,), op = node.inputs, node.op
    size = values.type.shape[-1] if values.type.ndim == 1 else None
    if size is None or op.offset:
        return None
    return [switch(np.eye(size, dtype=bool), values, np.zeros((), values.type.dtype))]


_diagonals_of_elements = dfs_rewriter(_diagonal_of_elements)


def with_numpy_products(mode: Mode | str | None) -> Mode:
    """The mode, whose functions use `NumpyDot` and functions of elements where it is Numba's.

    Inner graphs of scans are rewritten in the mode of the function as well.
    """
    given: Mode = get_mode(mode)
    if not isinstance(given.linker, NumbaLinker):
        return given
    _register()
    own = (_use_numpy_dot_everywhere, LAST), (_diagonals_of_elements, WITHOUT_BATCH)
    return given.register(*own)


def _contiguous(matrix):
    """The matrix where BLAS reads it as it lies in memory, otherwise a copy."""
    return np.ascontiguousarray(matrix)


def _product(x, y, out):
    """The product of two matrices, or of a matrix and a vector, written to an array."""
    np.dot(x, y, out)


def _sized(array, shape):
    """The array where it has a shape, otherwise another one."""
    if array.shape == shape:
        return array
    return np.empty(shape, array.dtype)


def _chosen(condition, one, other):
    """One of two numbers."""
    return one if condition else other


def _larger(one, other):
    """The larger number, or what is no number."""
    return one if one > other or one != one else other


def _smaller(one, other):
    """The smaller number, or what is no number."""
    return one if one < other or one != one else other


def _valid(numbers, most, length):
    """The length where all numbers are those of elements, which may count from the end, or zero."""
    wrong = False
    for number in numbers:
        wrong |= (number < -most) | (number >= most)
    return 0 if wrong else length


def _wanted(length, size, product):
    """The length, where -1 stands for the one that makes a product to a size."""
    return length if length >= 0 else size // max(-product, 1)


_SCALAR = (_sized, _chosen, _larger, _smaller, _valid, _wanted)


def functions_in_numba() -> dict[str, Callable[..., Any]]:
    """Functions that Numba compiles once, by their names in the source of a loop.

    Numba takes a time to compile a function that grows with the square of the number of branches.
    """
    _register()
    return {f.__name__.removeprefix("_"): f for f in (_contiguous, _product, *_SCALAR)}


def _register() -> None:
    """Tell PyTensor how Numba computes the product; its dispatch imports Numba, in a second."""
    if "numba" in vars(NumpyDot):
        return
    register_trigamma()
    from numba.extending import overload, register_jitable
    from pytensor.link.numba.dispatch.basic import numba_njit, register_funcify_and_cache_key

    for function in _SCALAR:
        register_jitable(function)

    @overload(_contiguous)
    def contiguous(matrix):
        if matrix.layout in "CF":
            return lambda matrix: matrix
        return lambda matrix: np.ascontiguousarray(matrix)

    # Sums in any order let the processor add several numbers at once.
    @overload(_product, jit_options={"fastmath": {"reassoc", "contract"}})
    def product(x, y, out):
        def by_blas(x, y, out):
            np.dot(_contiguous(x), _contiguous(y), out)

        def over_rows(x, y, out):
            if x.size > SMALL:
                np.dot(_contiguous(x), _contiguous(y), out)
                return
            for i in range(x.shape[0]):
                total = out.dtype.type(0)
                for j in range(x.shape[1]):
                    total += x[i, j] * y[j]
                out[i] = total

        def over_columns(x, y, out):
            if x.size > SMALL:
                np.dot(_contiguous(x), _contiguous(y), out)
                return
            out[:] = 0
            for j in range(x.shape[1]):
                factor = y[j]
                for i in range(x.shape[0]):
                    out[i] += x[i, j] * factor

        if y.ndim == 2:
            return by_blas
        return over_columns if x.layout == "F" else over_rows

    @numba_njit
    def by_matrix(x, y):
        return np.dot(_contiguous(x), _contiguous(y))

    @numba_njit
    def by_column(x, y):
        return np.dot(_contiguous(x), np.ascontiguousarray(y).reshape(-1)).reshape(-1, 1)

    @register_funcify_and_cache_key(NumpyDot)
    def numba_funcify_numpy_dot(op, node, **kwargs):
        is_column = node.inputs[1].type.shape[1] == 1
        key = f"{__name__}.NumpyDot, column: {is_column}, version 2"
        return by_column if is_column else by_matrix, sha256(key.encode()).hexdigest()

    NumpyDot.numba = numba_funcify_numpy_dot
