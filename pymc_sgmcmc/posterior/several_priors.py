"""The part of a log density without rows at several positions in one call.

It has some hundred operations on short arrays, whose calls take longer than their arithmetic. For
several positions together there are as many calls as for one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.op import HasInnerGraph
from pytensor.graph.replace import vectorize_graph
from pytensor.graph.traversal import toposort
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.posterior.threads import SharedFunction, on_one_thread

TOGETHER = 64
"""So many positions are evaluated together. Calls take little of the time then, and arrays of more
positions would leave the cache of a core."""

COMPARED = 3
"""The results are compared with those for single positions at this many."""

Priors = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Values, shape (positions,), and gradients, (positions, d), at positions, (positions, d)."""


def several_priors(
    log_density: Callable[[TensorVariable], TensorVariable],
    gradient: Callable[[TensorVariable], TensorVariable],
    one_by_one: Priors,
    compiled: Callable[[list, list], SharedFunction],
    position: np.ndarray,
) -> Priors:
    """Function of several positions, `one_by_one` where another is wrong or fails.

    Parameters
    ----------
    log_density, gradient : callable
        Symbolic value and gradient at a symbolic position.
    one_by_one : callable
        Values and gradients, each by a call of its own.
    compiled : callable
        Compiles a function of inputs and outputs.
    position : numpy.ndarray, shape (d,)
        The functions are compared near this position.
    """
    one = pt.tensor("position", shape=(None,), dtype=position.dtype)
    several = pt.tensor("positions", shape=(None, len(position)), dtype=position.dtype)
    outputs = [log_density(one), gradient(one)]
    # Linear algebra of many matrices has large graphs, whose rewrites take much time and memory.
    if any(isinstance(node.op, Blockwise | HasInnerGraph) for node in toposort(outputs)):
        return one_by_one
    near = position + 0.1 * np.random.default_rng(1965).standard_normal((COMPARED, len(position)))
    near = near.astype(position.dtype)
    try:
        function = compiled([several], vectorize_graph(outputs, {one: several}))
        found = _in_parts(function, near)
    except Exception:  # Operations may fail in any way where they do not allow another axis.
        return one_by_one
    tolerance = np.sqrt(np.finfo(position.dtype).eps)
    for values, wanted in zip(found, one_by_one(near), strict=True):
        largest = np.abs(wanted[np.isfinite(wanted)]).max(initial=0)
        if not np.allclose(values, wanted, tolerance, tolerance * largest, equal_nan=True):
            return one_by_one

    def together(positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        try:
            return _in_parts(function, positions)
        except Exception:  # Shapes may depend on values.
            return one_by_one(positions)

    return together


def _in_parts(function: SharedFunction, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    values, gradients = np.empty(len(positions)), np.empty(positions.shape)
    for start in range(0, len(positions), TOGETHER):
        part = slice(start, start + TOGETHER)
        # What does not depend on the position is there once, for all of them.
        values[part], gradients[part] = on_one_thread(function, positions[part])
    return values, gradients
