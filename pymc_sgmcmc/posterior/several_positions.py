"""Parts of a log density and their gradients at several positions in one call.

The part without rows has some hundred operations on short arrays, whose calls take longer than
their arithmetic. For several positions together there are as many calls as for one. Rows of many
predictors take products of matrices for several positions in place of a matrix and a vector.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.op import HasInnerGraph
from pytensor.graph.replace import vectorize_graph
from pytensor.graph.traversal import toposort
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.posterior.threads import SharedFunction, on_one_thread

PIECE_BYTES = 8_000_000
"""So many positions are evaluated together that their arrays take about this memory. They are then
mostly in the cache of a core."""

FEWEST_TOGETHER = 16
"""Where fewer positions have so much memory, arithmetic takes most of the time, and nothing is
saved. These are normal vectors of a hundred elements and data of thousands of values."""

COMPARED = 3
"""The results are compared with those for single positions at this many."""

TOLERANCE = {"float64": 1e-8, "float32": 1e-3}
"""Largest differences of both, beside the largest element."""


class SeveralPriors:
    """Log densities and gradients at several positions.

    Parameters
    ----------
    function : SharedFunction
        Of positions, shape (positions, d).
    most : int
        So many positions are evaluated together.
    """

    def __init__(self, function: SharedFunction, most: int):
        self._function, self._most = function, most

    def __call__(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Values, shape (positions,), and gradients, of the shape of the positions."""
        values = np.empty(len(positions))
        gradients = np.empty(positions.shape)
        for start in range(0, len(positions), self._most):
            part = slice(start, start + self._most)
            # What does not depend on the position is there once, for all of them.
            values[part], gradients[part] = on_one_thread(self._function, positions[part])
        return values, gradients


def several_priors(
    log_density: Callable[[TensorVariable], TensorVariable],
    gradient: Callable[[TensorVariable], TensorVariable],
    single: Callable[[np.ndarray], tuple[float, np.ndarray]],
    compiled: Callable[[list, list], SharedFunction],
    position: np.ndarray,
) -> SeveralPriors | None:
    """Function of several positions, None where it is wrong, fails, or would save no time.

    Parameters
    ----------
    log_density, gradient : callable
        Symbolic value and gradient at a symbolic position.
    single, compiled, position
        As of `at_several_positions`.
    """
    single(position)  # which compiles it
    most = PIECE_BYTES // max(1, _peak_bytes(lambda: single(position)))
    if most < FEWEST_TOGETHER:
        return None
    one = pt.tensor("position", shape=(None,), dtype=position.dtype)
    outputs = [log_density(one), gradient(one)]
    function = at_several_positions(outputs, one, [], single, compiled, position)
    return None if function is None else SeveralPriors(function, most)


def at_several_positions(
    outputs: Sequence[TensorVariable],
    one: TensorVariable,
    others: Sequence[TensorVariable],
    single: Callable[..., tuple[float, np.ndarray]],
    compiled: Callable[[list, list], SharedFunction],
    position: np.ndarray,
    *arrays: np.ndarray,
) -> SharedFunction | None:
    """Function of several positions, None where it is wrong or fails.

    Parameters
    ----------
    outputs : sequence of TensorVariable
        Value and gradient at `one` position.
    one : TensorVariable, shape (d,)
    others : sequence of TensorVariable
        Other inputs.
    single : callable
        Value and gradient at one position, of this and the other inputs.
    compiled : callable
        Compiles a function of inputs and outputs.
    position : numpy.ndarray, shape (d,)
        The functions are compared near this position.
    *arrays : numpy.ndarray
        The other inputs for which they are compared.
    """
    rng = np.random.default_rng(1965)
    near = position + 0.1 * rng.standard_normal((COMPARED, len(position)))
    near = near.astype(position.dtype)
    several = pt.tensor("positions", shape=(None, len(position)), dtype=position.dtype)
    # Linear algebra of many matrices has large graphs, whose rewrites take much time and memory.
    if any(isinstance(node.op, Blockwise | HasInnerGraph) for node in toposort(outputs)):
        return None
    try:
        expected = [single(each, *arrays) for each in near]
        function = compiled([several, *others], vectorize_graph(outputs, {one: several}))
        values, gradients = on_one_thread(function, near, *arrays)
        values = np.broadcast_to(values, len(near))  # It may not depend on the position.
        gradients = np.broadcast_to(gradients, near.shape)
    except Exception:  # Operations may fail in any way where they do not allow another axis.
        return None
    agree = _agree(np.column_stack([gradients, values]), expected, position.dtype)
    return function if agree else None


def _agree(
    found: np.ndarray, expected: Sequence[tuple[float, np.ndarray]], dtype: np.dtype
) -> bool:
    wanted = np.array([np.append(gradient, value) for value, gradient in expected])
    tolerance = TOLERANCE[dtype.name]
    largest = np.abs(wanted[np.isfinite(wanted)]).max(initial=0)
    return np.allclose(found, wanted, rtol=tolerance, atol=tolerance * largest, equal_nan=True)


def _peak_bytes(call: Callable[[], object]) -> int:
    """Memory that the arrays of a call take at most at the same time."""
    started = not tracemalloc.is_tracing()
    if started:
        tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        call()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        if started:
            tracemalloc.stop()
    return peak - before
