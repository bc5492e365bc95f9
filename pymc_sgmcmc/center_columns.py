r"""Per-row quantities of the gradient at a fixed centre, computed once for all rows.

The control variate needs :math:`\sum_{j \in S} \nabla \log p(x_j \mid \hat\theta)` in each
transition. For a generalised linear model this is :math:`X_S^\top r_S` with residuals
:math:`r_j` that never change: storing one number a row saves the transcendental functions,
which take most of the time. This module finds such quantities in any gradient graph: vectors
with one entry a row that depend on the rows and the centre alone, just before the sum over rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Variable
from pytensor.graph.replace import clone_replace
from pytensor.graph.rewriting.utils import rewrite_graph
from pytensor.graph.traversal import toposort
from pytensor.tensor.type import TensorType
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.posterior import Posterior

MOST_EXTRA_MEMORY = 1 / 8
"""Columns are stored where they take at most this fraction of the memory of the data."""


@dataclass(frozen=True)
class CenterColumns:
    """The gradient at the centre as a function of rows and of stored columns.

    Attributes
    ----------
    columns : tuple of numpy.ndarray, each of N elements
        The stored quantities, leading length N; empty where nothing was worth storing.
    """

    columns: tuple[np.ndarray, ...]
    _gradient: TensorVariable
    _rows: tuple[TensorVariable, ...]
    _length: TensorVariable
    _column_rows: tuple[TensorVariable, ...]
    _center: TensorVariable

    def gradient(
        self,
        center: TensorVariable,
        rows: Sequence[TensorVariable],
        length: TensorVariable,
    ) -> TensorVariable:
        """Symbolic gradient of the log likelihood of some rows at the centre, shape (d,).

        Parameters
        ----------
        center : TensorVariable, shape (d,)
        rows : sequence of TensorVariable
            Rows of the data, followed by those of `columns`.
        length : TensorVariable
            Number of rows.
        """
        replacements = dict(zip((*self._rows, *self._column_rows), rows, strict=True))
        replacements |= {self._length: length, self._center: center}
        return clone_replace(self._gradient, replacements, rebuild_strict=False)


def find_center_columns(posterior: Posterior, center: np.ndarray) -> CenterColumns:
    """Find and compute the per-row quantities of the gradient at a centre.

    The free variables outside the position keep the values that they have now.
    """
    rows = tuple(
        pt.tensor(f"rows_{index}", dtype=values.dtype, shape=(None, *values.shape[1:]))
        for index, values in enumerate(posterior.data)
    )
    length = pt.lscalar("length")
    at = pt.tensor("center", dtype=posterior.dtype, shape=(posterior.dimension,))
    # Without what only carries shapes, which would look like a use of each vector.
    gradient = rewrite_graph(
        posterior.rows_gradient(at, rows, length), include=("canonicalize", "stabilize")
    )
    cut = _last_row_vectors(posterior, gradient, rows, length, at, center)
    row_bytes = sum(values[:1].nbytes for values in posterior.data)
    if sum(np.dtype(vector.dtype).itemsize for vector in cut) > MOST_EXTRA_MEMORY * row_bytes:
        cut = []
    column_rows = tuple(
        pt.tensor(f"column_{index}", dtype=vector.dtype, shape=(None, *vector.type.shape[1:]))
        for index, vector in enumerate(cut)
    )
    columns = _evaluate(posterior, cut, rows, length, at, center) if cut else ()
    if cut:
        gradient = clone_replace(
            gradient, dict(zip(cut, column_rows, strict=True)), rebuild_strict=False
        )
    return CenterColumns(columns, gradient, rows, length, column_rows, at)


def _last_row_vectors(
    posterior: Posterior,
    gradient: TensorVariable,
    rows: tuple[TensorVariable, ...],
    length: TensorVariable,
    at: TensorVariable,
    center: np.ndarray,
) -> list[TensorVariable]:
    """Vectors with one entry a row that feed something that has not."""
    nodes = list(toposort([gradient]))
    of_rows, of_center = _descendants(nodes, rows), _descendants(nodes, [at])
    candidates = [
        output
        for node in nodes
        for output in node.outputs
        if output in of_rows and output in of_center and _has_one_entry_a_row(output)
    ]
    if not candidates or posterior.n_rows < 8:
        return []
    aligned = _aligned(posterior, candidates, rows, length, at, center)
    elsewhere = {
        variable
        for node in nodes
        if not any(output in aligned for output in node.outputs)
        for variable in node.inputs
    }
    return [vector for vector in candidates if vector in aligned and vector in elsewhere]


def _has_one_entry_a_row(variable: Variable) -> bool:
    """Whether the type allows one floating number a row: shape (n,), (n, 1), ..."""
    if not isinstance(variable.type, TensorType) or not variable.type.ndim:
        return False
    length, *others = variable.type.shape
    return (
        length != 1
        and all(other == 1 for other in others)
        and variable.type.dtype.startswith("float")
    )


def _descendants(nodes, roots) -> set[Variable]:
    found = set(roots)
    for node in nodes:
        if any(variable in found for variable in node.inputs):
            found.update(node.outputs)
    return found


def _aligned(posterior, candidates, rows, length, at, center) -> set[Variable]:
    """Those candidates whose value on some rows is the rows of their value on more rows.

    Found by evaluation: it needs no knowledge of any operation.
    """
    function = posterior.compile_for_setup([at, length, *rows], candidates, quick=True)
    chosen = np.random.default_rng(2019).choice(
        posterior.n_rows, size=min(posterior.n_rows, 23), replace=False
    )
    parts = [chosen, chosen[:7], chosen[7:]]
    center = np.ascontiguousarray(center, dtype=posterior.dtype)
    whole, first, second = (
        function(center, np.int64(len(part)), *posterior.take(part)) for part in parts
    )
    return {
        candidate
        for candidate, value, left, right in zip(candidates, whole, first, second, strict=True)
        if len(value) == len(chosen)
        and len(left) == 7
        and np.allclose(value, np.concatenate([left, right]), rtol=1e-6, atol=0, equal_nan=False)
    }


def _evaluate(posterior, cut, rows, length, at, center) -> tuple[np.ndarray, ...]:
    """Values of the vectors for all rows, in chunks."""
    function = posterior.compile_for_setup([at, length, *rows], cut)
    center = np.ascontiguousarray(center, dtype=posterior.dtype)
    columns = [
        np.empty((posterior.n_rows, *vector.type.shape[1:]), dtype=vector.dtype) for vector in cut
    ]
    start = 0
    for chunk in posterior.chunks():
        stop = start + len(chunk[0])
        values = function(center, np.int64(stop - start), *chunk)
        for column, value in zip(columns, values, strict=True):
            column[start:stop] = value
        start = stop
    return tuple(columns)
