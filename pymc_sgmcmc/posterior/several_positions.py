"""Parts of a log density and their gradients at several positions in one call.

The part without rows has some hundred operations on short arrays, whose calls take longer than
their arithmetic. For several positions together there are as many calls as for one. Rows of many
predictors take products of matrices for several positions in place of a matrix and a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.op import HasInnerGraph
from pytensor.graph.replace import vectorize_graph
from pytensor.graph.traversal import toposort
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.posterior.agreement import agree
from pymc_sgmcmc.posterior.threads import SharedFunction, on_one_thread

TOGETHER = 64
"""So many positions are evaluated together. Calls take little of the time then, and arrays of more
positions would leave the cache of a core."""

COMPARED = 3
"""The results are compared with those for single positions at this many."""


def in_parts(function: SharedFunction, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values, shape (positions,), and gradients, (positions, d), of a function of positions."""
    values, gradients = np.empty(len(positions)), np.empty(positions.shape)
    for start in range(0, len(positions), TOGETHER):
        part = slice(start, start + TOGETHER)
        # What does not depend on the position is there once, for all of them.
        values[part], gradients[part] = on_one_thread(function, positions[part])
    return values, gradients


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
    wanted = np.array([np.append(gradient, value) for value, gradient in expected])
    found, precision = np.column_stack([gradients, values]), np.sqrt(np.finfo(position.dtype).eps)
    size = np.abs(wanted) + np.abs(wanted[np.isfinite(wanted)]).max(initial=0)
    return function if agree(found, wanted, size, precision) else None
