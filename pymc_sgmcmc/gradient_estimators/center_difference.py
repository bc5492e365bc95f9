r"""The difference between the gradients of a set of rows at a position and at a fixed centre.

The control variate needs :math:`\sum_{j \in S} [\nabla \log p(x_j \mid \theta)
- \nabla \log p(x_j \mid \hat\theta)]` in each transition. For a generalised linear model this is
:math:`X_S^\top (\hat\mu_S - \mu_S)`. The outcomes cancel, one matrix product is enough for both
gradients, and the means :math:`\hat\mu_j` at the centre never change. This module finds such
forms in any gradient graph. It takes the difference inside sums and products. Arrays with entries
for each row that depend only on the rows and the centre are computed once, for all rows.

Control variates of second order subtract :math:`\sum_{j \in S} \nabla^2 \log p(x_j \mid \hat\theta)
(\theta - \hat\theta)` as well. With a linear predictor :math:`\eta_j` what is left is
:math:`x_j r_j` with :math:`r_j = \ell'_j(\eta_j) - \ell'_j(\hat\eta_j) - \ell''_j(\hat\eta_j)
(\eta_j - \hat\eta_j)`: one more stored number a row, and no more products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.compile.executor import Function
from pytensor.compile.mode import optdb
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.gradient import pushforward
from pytensor.graph.basic import Apply, Constant, Variable, clone_get_equiv
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.replace import clone_replace, vectorize_graph
from pytensor.graph.rewriting.basic import dfs_rewriter, node_rewriter
from pytensor.graph.rewriting.db import RewriteDatabaseQuery
from pytensor.graph.traversal import ancestors, toposort
from pytensor.tensor.math import Dot
from pytensor.tensor.rewriting.shape import ShapeFeature
from pytensor.tensor.shape import Shape_i
from pytensor.tensor.type import TensorType
from pytensor.tensor.variable import TensorVariable
from scipy import sparse

from pymc_sgmcmc.batching import MOST_COPIED
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.posterior.evaluation import ARRAYS_OF_PRODUCTS
from pymc_sgmcmc.posterior.graphs import linear_inputs
from pymc_sgmcmc.posterior.threads import OfRows

MOST_EXTRA_MEMORY = 1 / 2
"""Columns are stored where they take at most this fraction of the memory of the data, after
subtracting the data that are no longer needed, or a fraction of a gigabyte. It is a compromise
between the memory and the time of a second evaluation at the centre in each transition."""

MOST_OPERATIONS = 2
"""A difference of second order that has more than this many times the operations of the gradient
takes minutes to compile. Derivatives of each row at the centre are then stored, where they fit."""

BEYOND = 3.0
"""The length of a Gaussian vector is about normal with a standard deviation below 1. So far beyond
its mean are few draws of a posterior near a Gaussian, and of others the expansion there is poor."""

COMPARED_ROWS = 23
"""What is found by evaluation is compared for so many rows, of which a few may be alike."""

_REWRITES = RewriteDatabaseQuery(include=["merge", "canonicalize", "stabilize"])
"""These rewrites bring the two gradients into one form before their difference is taken."""


@dataclass(frozen=True)
class CenterDifference:
    """Symbolic difference of gradients, as a function of rows.

    Positions are those of the rows, other than the centre.

    Attributes
    ----------
    needed : tuple of int
        Numbers of the arrays of the posterior's data that the difference needs.
    column_types : tuple of (numpy.dtype, tuple of int)
        Type, and shape of one row, of the stored quantities. Empty where nothing is stored.
    sums_of : callable, optional
        Gradient at the centre, and the matrix by which the shift from it is multiplied in control
        variates of second order, of a posterior and some of its rows. None for those of first
        order.
    position : numpy.ndarray, shape (d,)
        The centre.
    known_curvature : scipy.sparse.csr_array, optional
        Minus the matrix of `sums`, where it was computed otherwise and is sparse.
    """

    needed: tuple[int, ...]
    column_types: tuple[tuple[np.dtype, tuple[int, ...]], ...]
    sums_of: OfRows | None
    _posterior: Posterior
    _columns_of: Callable[[Sequence[np.ndarray]], list[np.ndarray]] | None
    _graph: TensorVariable
    _here: TensorVariable
    _rows: tuple[TensorVariable, ...]
    _length: TensorVariable
    _center: SharedVariable
    _center_of_others: Mapping[str, SharedVariable]
    position: np.ndarray
    _weight: TensorVariable | None = None
    known_curvature: sparse.csr_array | None = None

    def move_center(
        self, center: np.ndarray, center_of_others: Mapping[str, np.ndarray] | None = None
    ) -> None:
        """Take the difference to another centre from now on, in compiled functions as well.

        This is possible only without stored columns, which belong to one centre.

        Parameters
        ----------
        center : numpy.ndarray, shape (d,)
        center_of_others : mapping, optional
            Values at the centre of free variables outside the position. Those that are not given do
            not change.

        Raises
        ------
        ValueError
            Where columns are stored.
        """
        if self.column_types:
            raise ValueError(
                "The stored columns belong to one centre. To move it, find the difference with "
                "`store_columns=False`."
            )
        self._center.set_value(np.array(center, dtype=self._center.dtype))
        for name, value in (center_of_others or {}).items():
            shared = self._center_of_others[name]
            shared.set_value(np.array(value, dtype=shared.dtype))

    def with_curvature(self, curvature: sparse.csr_array) -> CenterDifference:
        """The same difference with a curvature that was computed otherwise."""
        return replace(self, known_curvature=curvature)

    @cached_property
    def sums(self) -> tuple[np.ndarray, np.ndarray]:
        """The sums of `sums_of` over all rows by one pass, shapes (d,) and (d, d).

        They are in terms of the position of the rows.

        The second is that of the very matrices that minibatches subtract. It need not be symmetric.
        """
        posterior, of_rows = self._posterior, self.sums_of
        assert of_rows is not None
        d = posterior.dimension
        if isinstance(of_rows, _StoredSums) and posterior.source is None:
            # Sums of the same chunks, so that they are those of a source to the last bit.
            pieces: Iterable[Any] = map(_sums, posterior.in_chunks(self.columns, d))
        else:
            pieces = posterior.each_chunk(of_rows, d)
        gradient, derivative = np.zeros(d), np.zeros((d, d))
        for of_part, derivative_of_part in pieces:
            gradient += of_part
            derivative += derivative_of_part
        return gradient, derivative

    @property
    def gradient(self) -> np.ndarray:
        """Gradient of the log likelihood of all rows at the centre, in terms of the position."""
        return self._posterior.gradients_from_rows(self.position, self.sums[0])

    @cached_property
    def curvature(self) -> np.ndarray:
        """Minus the Hessian of the log likelihood of all rows at the centre, shape (d, d)."""
        gradient, derivative = self.sums
        of_rows = -0.5 * (derivative + derivative.T)
        return self._posterior.curvature_from_rows(self.position, of_rows, gradient)

    def along_shift(self, position: TensorVariable) -> tuple[TensorVariable, TensorVariable]:
        r"""The sum of the matrices times the shift from the centre, shape (d,), and its weight.

        Beyond `reach` the shift is taken only as far. The difference of two gradients may be
        bounded, as where the scale of group effects goes to zero, and a product with a long shift
        is not: its noise would drive a chain farther away. The estimate is unbiased for any weight
        that the rows do not change.
        """
        dimension = self._posterior.dimension
        # Rounded to single precision it would hide directions of small curvature.
        shift = (position - self._center).astype("float64")
        if self.known_curvature is not None:
            product = _product(-self.known_curvature, shift)
        else:
            derivative = pytensor.shared(
                self.sums[1], "derivative_at_center", shape=(dimension, dimension)
            )
            product = derivative @ shift
        weight = pt.constant(1.0)
        if self._weight is not None:
            square = pt.maximum(-(shift * product).sum(), np.finfo(float).tiny)
            weight = pt.minimum(1.0, reach(dimension) / pt.sqrt(square))
        dtype = self._posterior.dtype
        return (weight * product).astype(dtype), weight.astype(dtype)

    def rows_of(self, numbers: np.ndarray) -> list[np.ndarray]:
        """Rows of the data that are needed, followed by those of the stored quantities."""
        return self.from_rows(self._posterior.take(numbers))

    def from_rows(self, rows: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Rows of the data that are needed, and of the stored quantities, from those of all."""
        return [*(rows[index] for index in self.needed), *self._columns(rows)]

    @property
    def shared_by_rows(self) -> tuple[bool, ...]:
        """For each array of the data that is needed whether rows have no parts of their own."""
        return tuple(self._posterior.shared_by_rows[index] for index in self.needed)

    def joined(
        self, first: Sequence[np.ndarray], start: int, second: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Rows that were read, those of the first ones from a place on, and the second ones."""
        count = len(self.needed)
        data = self._posterior.joined(first[:count], start, second[:count])
        stored = zip(first[count:], second[count:], strict=True)
        return [*data, *(np.concatenate([before[start:], after]) for before, after in stored)]

    @property
    def data(self) -> tuple[np.ndarray, ...]:
        """The arrays of the posterior's data that are needed, where they are in memory."""
        data = self._posterior.data
        return tuple(data[index] for index in self.needed)

    @cached_property
    def columns(self) -> tuple[np.ndarray, ...]:
        """The stored quantities of all rows, computed at the first use."""
        columns = [
            np.empty((self._posterior.n_rows, *shape), dtype=dtype)
            for dtype, shape in self.column_types
        ]
        # A matrix a row takes as many evaluations as it has columns: pieces are between those that
        # bound its memory and those that bound the number of calls.
        start, wide = 0, [int(np.prod(shape)) for _, shape in self.column_types]
        width = min(max(wide, default=1), int(self._posterior.dimension**1.5))
        for chunk in self._posterior.chunks(width) if columns else ():
            stop = start + len(chunk[0])
            for column, values in zip(columns, self._columns(chunk), strict=True):
                column[start:stop] = values
            start = stop
        return tuple(columns)

    def _columns(self, rows: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [] if self._columns_of is None else self._columns_of(rows)

    def __call__(
        self,
        position: TensorVariable,
        rows: Sequence[TensorVariable],
        length: TensorVariable,
        weight: TensorVariable | None = None,
    ) -> TensorVariable:
        """Gradient of the log likelihood of the given rows less that at the centre, shape (d,).

        Parameters
        ----------
        position : TensorVariable, shape (d,)
        rows : sequence of TensorVariable
            Rows of `data`, followed by those of `columns`.
        length : TensorVariable
            Number of rows.
        weight : TensorVariable, optional
            That of `along_shift`, for control variates of second order.
        """
        replacements = dict(zip(self._rows, rows, strict=True))
        replacements |= {self._length: length, self._here: position}
        if self._weight is not None:
            assert weight is not None
            replacements[self._weight] = weight
        return clone_replace(self._graph, replacements, rebuild_strict=False)


def _product(matrix: sparse.csr_array, vector: TensorVariable) -> TensorVariable:
    """Product of a sparse matrix and a vector, by elements in the order of the rows."""
    elements = matrix.tocoo()
    values, rows, columns = (
        pytensor.shared(each, name)
        for each, name in (
            (elements.data, "elements_at_center"),
            (elements.row.astype(np.int64), "rows_of_elements"),
            (elements.col.astype(np.int64), "columns_of_elements"),
        )
    )
    return pt.inc_subtensor(pt.zeros(matrix.shape[0])[rows], values * vector[columns])


def reach(dimension: int) -> float:
    """How far the shift is taken, in standard deviations of a likelihood with this curvature.

    A Gaussian law of so many coordinates is hardly ever `BEYOND` standard deviations farther.
    """
    return float(np.sqrt(dimension)) + BEYOND


class _Columns:
    """Stored quantities as a function of rows.

    Parameters
    ----------
    posterior : Posterior
    inputs : sequence of TensorVariable
        The number of rows, and rows of each array of data.
    quantities : sequence of TensorVariable
    """

    def __init__(
        self,
        posterior: Posterior,
        inputs: Sequence[TensorVariable],
        quantities: Sequence[TensorVariable],
    ):
        self._posterior, self._inputs, self._quantities = posterior, inputs, quantities

    @cached_property
    def _function(self) -> Function:
        quantities = _by_rows(self._quantities)
        return self._posterior.compile_for_setup(list(self._inputs), quantities)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the function, which is compiled again when needed."""
        return {name: value for name, value in vars(self).items() if name != "_function"}

    def __call__(self, rows: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [np.asarray(values) for values in self._function(np.int64(len(rows[0])), *rows)]


@dataclass(frozen=True)
class _Sums:
    """Gradient of rows at the centre and its derivative there, as functions of rows.

    Parameters
    ----------
    posterior : Posterior
    inputs : sequence of TensorVariable
        The number of rows, and rows of each array of data.
    gradient : TensorVariable, shape (d,)
        The sum of the gradients.
    tangent : TensorVariable, shape (d,)
        Derivative of the sum of the gradients along `shift`.
    shift : TensorVariable, shape (d,)
    """

    _posterior: Posterior
    _inputs: Sequence[TensorVariable]
    _gradient: TensorVariable
    _tangent: TensorVariable
    _shift: TensorVariable

    @cached_property
    def _function(self) -> Function:
        d = self._posterior.dimension
        # Data in compiled graphs are shared variables.
        directions = pytensor.shared(np.eye(d, dtype=self._posterior.dtype), shape=(d, d))
        with np.errstate(divide="ignore"):  # PyTensor divides by the length of an empty variable.
            along_all = vectorize_graph(self._tangent, {self._shift: directions})
        return self._posterior.compile_for_setup(list(self._inputs), [self._gradient, along_all])

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the function, which is compiled again when needed."""
        return {name: value for name, value in vars(self).items() if name != "_function"}

    def __call__(
        self, posterior: Posterior, rows: Sequence[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        posterior.count_evaluated(len(rows[0]))
        total = np.zeros((1 + posterior.dimension, posterior.dimension))
        for piece in posterior.pieces(rows, ARRAYS_OF_PRODUCTS * posterior.dimension):
            gradient, along_all = self._function(np.array(len(piece[0])), *piece)
            total[0] += gradient
            total[1:] += along_all
        return total[0], total[1:].T  # a row of `along_all` is the product with a direction


def find_center_difference(
    posterior: Posterior,
    center: np.ndarray,
    center_of_others: Mapping[str, np.ndarray] | None = None,
    *,
    store_columns: bool = True,
    order: int = 1,
) -> CenterDifference:
    """Find the difference to the gradient at a centre, and compute its per-row quantities.

    Parameters
    ----------
    posterior : Posterior
    center : numpy.ndarray, shape (d,)
    center_of_others : mapping, optional
        Values at the centre of the free variables outside the position. Default: their present
        values.
    store_columns : bool
        Whether to compute quantities of rows at the centre once, for all rows. The centre is then
        fixed.
    order : {1, 2}
        Order of the control variates.
    """
    rows = tuple(
        pt.tensor(f"rows_{index}", dtype=dtype, shape=(None, *shape))
        for index, (dtype, shape) in enumerate(posterior.row_types)
    )
    given, center = center, posterior.position_of_rows(center)
    length = pt.lscalar("length")
    position = pt.tensor("here", dtype=posterior.dtype, shape=(posterior.dimension,))
    # A position of length one broadcasts only with a static shape.
    center_variable = pytensor.shared(
        np.asarray(center, dtype=posterior.dtype), "center", shape=(posterior.dimension,)
    )
    others_by_name = {
        name: pytensor.shared(
            np.array((center_of_others or {}).get(name, shared.get_value())),
            f"{name}_center",
            shape=shared.type.shape,
        )
        for name, shared in posterior.others.items()
    }
    others = {shared: others_by_name[name] for name, shared in posterior.others.items()}
    gradient_at_center = clone_replace(
        posterior.rows_gradient(center_variable, rows, length), others, rebuild_strict=False
    )
    shift = position - center_variable
    weight = pt.scalar("weight", dtype=posterior.dtype)

    def of_stored_derivatives() -> CenterDifference:
        shapes = [(posterior.dimension,) * number for number in range(1, order + 1)]
        dtype = np.dtype(posterior.dtype)
        columns = [
            pt.tensor(f"derivative_{number}", dtype=dtype, shape=(None, *shape))
            for number, shape in enumerate(shapes)
        ]
        graph = posterior.rows_gradient(position, rows, length) - columns[0].sum(axis=0)
        if order == 2:
            graph -= weight * (columns[1].sum(axis=0) @ shift)
        steps = _steps_at(posterior, center) if order == 2 else None
        columns_of = partial(_derivatives_of_rows, posterior, center, center_of_others, steps)
        return CenterDifference(
            tuple(range(len(rows))),
            tuple((dtype, shape) for shape in shapes),
            _StoredSums(columns_of) if order == 2 else None,
            posterior,
            columns_of,
            graph,
            position,
            (*rows, *columns),
            length,
            center_variable,
            others_by_name,
            given,
            weight if order == 2 else None,
        )

    is_differentiable = not posterior.rows_are_groups
    if order == 2:
        is_differentiable = posterior.has_second_derivatives
    if store_columns and not is_differentiable:
        return of_stored_derivatives()
    own = [row for row, of_all in zip(rows, posterior.shared_by_rows, strict=True) if not of_all]
    pair = posterior.rows_gradient(position, rows, length), gradient_at_center
    left, right = _rewritten(pair, own, length)
    sums_of, is_linear = None, True
    if order == 1:
        graph = _through_linear(left, right, lambda a, b: a - b)
    else:
        along = pt.tensor("shift", dtype=posterior.dtype, shape=(posterior.dimension,))
        expansion = _Expansion(position, center_variable, along, weight)
        graph = _through_linear(left, right, expansion.remainder)
        is_linear = not expansion.bends
        replacements = {
            along: shift,
            **({weight: weight.type.filter_variable(1.0)} if is_linear else {}),
        }
        graph = clone_replace(graph, replacements, rebuild_strict=False)
        tangent = expansion.tangent(left, right)
        if tangent is None:
            tangent = pt.zeros_like(along)
        sums_of = _Sums(posterior, (length, *rows), right, tangent, along)
    (graph,) = _rewritten([graph], own, length)
    if store_columns and order == 2:
        matrices = posterior.n_rows * posterior.dimension**2 * np.dtype(posterior.dtype).itemsize
        is_longer = _operations(graph) > MOST_OPERATIONS * _operations(left)
        if is_longer and matrices <= MOST_COPIED:
            return of_stored_derivatives()

    fixed = {center_variable, *others.values()}
    moving = {position, weight, *posterior.others.values()}
    cut = _last_row_vectors(posterior, graph, rows, length, fixed, moving) if store_columns else []
    column_rows = tuple(
        pt.tensor(f"column_{index}", dtype=vector.dtype, shape=(None, *vector.type.shape[1:]))
        for index, vector in enumerate(cut)
    )
    with_columns = clone_replace(
        graph, dict(zip(cut, column_rows, strict=True)), rebuild_strict=False
    )
    needed = _needed(with_columns, rows)
    row_bytes = [dtype.itemsize * int(np.prod(shape)) for dtype, shape in posterior.row_types]
    extra = sum(
        np.dtype(vector.dtype).itemsize * int(np.prod(vector.type.shape[1:])) for vector in cut
    )
    extra += sum(row_bytes[index] for index in needed) - sum(row_bytes)
    is_large = extra * posterior.n_rows > MOST_COPIED
    if is_large and extra > MOST_EXTRA_MEMORY * sum(row_bytes):
        cut, column_rows, with_columns, needed = [], (), graph, _needed(graph, rows)
    if store_columns:
        with_columns = _with_fixed_quantities(posterior, with_columns, fixed)
    if not needed and not cut:
        needed = [int(np.argmin(row_bytes))]  # Minibatches need at least one array.
    return CenterDifference(
        tuple(needed),
        tuple((np.dtype(vector.dtype), vector.type.shape[1:]) for vector in cut),
        sums_of,
        posterior,
        _Columns(posterior, (length, *rows), cut) if cut else None,
        with_columns,
        position,
        (*(rows[index] for index in needed), *column_rows),
        length,
        center_variable,
        others_by_name,
        given,
        None if is_linear else weight,
    )


def _operations(graph: Variable) -> int:
    """Number of operations of a graph."""
    return sum(1 for _ in toposort([graph]))


def _by_rows(quantities: Sequence[TensorVariable]) -> list[Variable]:
    """The same quantities, with products of rows and a vector as sums within each row.

    BLAS rounds a product otherwise by how many rows are beside it. Rows that are gathered for a run
    have others beside them than in memory, and should have the same quantities to the last bit.
    """
    graph = FunctionGraph(outputs=list(quantities), clone=True, copy_inputs=False)
    dfs_rewriter(_sum_within_rows).rewrite(graph)
    return list(graph.outputs)


@node_rewriter([Dot])
def _sum_within_rows(_: FunctionGraph, node: Apply) -> list[TensorVariable] | None:
    rows, column = node.inputs
    if column.type.shape[1] != 1:
        return None
    sums = (rows * column[:, 0]).sum(axis=1, keepdims=True)
    return [sums.astype(node.outputs[0].type.dtype)]


def _steps_at(posterior: Posterior, center: np.ndarray) -> np.ndarray:
    """Steps of the coordinates for differences, small beside what rows say that deviations are.

    What rows say nothing of has steps of its own size.
    """
    eps, own = np.finfo(posterior.dtype).eps, np.maximum(1, np.abs(center))
    rows = posterior.some_rows
    gradients = posterior.row_gradients(center, rows) if rows else np.zeros((1, len(center)))
    with np.errstate(divide="ignore"):
        deviations = 1 / np.sqrt(posterior.n_rows * np.mean(np.square(gradients), axis=0))
    # A step is at least a few times what rounding makes of the coordinate.
    return np.maximum(np.cbrt(eps) * np.minimum(deviations, own), 8 * eps * np.abs(center))


def _derivatives_of_rows(
    posterior: Posterior,
    center: np.ndarray,
    others: Mapping[str, np.ndarray] | None,
    steps: np.ndarray | None,
    rows: Sequence[np.ndarray],
) -> list[np.ndarray]:
    """Gradients of rows at the centre, (rows, d), and for order 2 their derivatives, (rows, d, d).

    A row that is a group of records takes long to evaluate, and the position is short. The
    derivatives are differences over steps of the coordinates, of which order 1 has none.
    """
    present = {name: shared.get_value() for name, shared in posterior.others.items()}
    posterior.set_others({**present, **(others or {})})
    center = np.asarray(center, dtype=posterior.dtype)

    def gradients(position: np.ndarray) -> np.ndarray:
        pieces = posterior.pieces(rows, posterior.dimension)
        return np.concatenate([posterior.row_gradients(position, piece) for piece in pieces])

    columns = [gradients(center)]
    if steps is not None:
        # Any matrices are right whose sum over all rows is known. Differences are close enough.
        derivatives = [
            (gradients(center + step) - columns[0]) / step.sum() for step in np.diag(steps)
        ]
        matrices = np.stack(derivatives, axis=1)
        columns.append(0.5 * (matrices + matrices.swapaxes(1, 2)))
    posterior.set_others(present)
    return columns


@dataclass(frozen=True)
class _StoredSums:
    """Sums over rows of the stored gradients and derivatives at the centre."""

    _columns_of: Callable[[Sequence[np.ndarray]], list[np.ndarray]]

    def __call__(
        self, posterior: Posterior, rows: Sequence[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        return _sums(self._columns_of(rows))


def _sums(columns: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    gradients, matrices = columns
    return gradients.sum(axis=0, dtype=float), matrices.sum(axis=0, dtype=float)


def _rewritten(
    outputs: Sequence[Variable], rows: Sequence[TensorVariable], length: TensorVariable
) -> list[Variable]:
    # With known shapes no array is computed only for its shape. Otherwise it would count as used.
    graph = FunctionGraph(
        outputs=list(outputs),
        clone=True,
        copy_inputs=False,
        copy_orphans=False,
        features=[ShapeFeature()],
    )
    optdb.query(_REWRITES).rewrite(graph)
    lengths = {
        output: length
        for node in graph.apply_nodes
        if isinstance(node.op, Shape_i) and node.op.i == 0 and node.inputs[0] in set(rows)
        for output in node.outputs
    }
    return clone_replace(list(graph.outputs), lengths, rebuild_strict=False)


def _through_linear(
    left: Variable, right: Variable, leaf: Callable[[Variable, Variable], Variable]
) -> Variable:
    """A function of two variables, zero where they are equal, taken inside of linear operations.

    ``f(a) - f(b)`` becomes ``f(a - b)`` for linear operations f.
    """
    if _same(left, right):
        return pt.zeros_like(left)
    first, second = left.owner, right.owner
    if first is not None and second is not None and first.op == second.op:
        moved = _moved_inputs(first, second)
        if moved is not None:
            inputs = [
                _through_linear(a, b, leaf) if index in moved else a
                for index, (a, b) in enumerate(zip(first.inputs, second.inputs, strict=True))
            ]
            return first.op.make_node(*inputs).outputs[first.outputs.index(left)]
    return leaf(left, right)


class _Expansion:
    r"""First-order expansion at the centre of a graph, given twice: at a position and the centre.

    Linear functions of the position, such as linear predictors, are evaluated at the shift
    :math:`\theta - \hat\theta` alone, and those at the centre added.

    Parameters
    ----------
    here, center, shift : Variable
        The position, the centre, and the first less the second.
    weight : Variable
        The part of the tangent that is subtracted.

    Attributes
    ----------
    bends : bool
        Whether a part of the function was not linear.
    """

    def __init__(self, here: Variable, center: Variable, shift: Variable, weight: Variable):
        self._here, self._center, self._shift, self._weight = here, center, shift, weight
        self.bends = False
        self._tangents: dict[tuple[Variable, Variable], Variable | None] = {}
        self._values: dict[tuple[Variable, Variable], Variable] = {}

    def tangent(self, left: Variable, right: Variable) -> Variable | None:
        """Derivative at the centre along the shift, None where it is zero."""
        if (left, right) not in self._tangents:
            tangent = self._tangent(left, right)
            if tangent is not None:
                # Lengths of one broadcast only where the type has them.
                tangent = pt.specify_shape(tangent, right.type.shape).astype(right.type.dtype)
            self._tangents[left, right] = tangent
        return self._tangents[left, right]

    def _tangent(self, left: Variable, right: Variable) -> Variable | None:
        if left is self._here and right is self._center:
            return self._shift
        if _same(left, right) or left.owner is None:
            return None
        first, second, place = left.owner, right.owner, left.owner.outputs.index(left)
        tangents = [self.tangent(a, b) for a, b in _pairs(first, second)]
        if all(tangent is None for tangent in tangents):
            return None
        if moved := _moved_inputs(first, second):
            inputs = list(second.inputs)
            for number in moved:
                tangent = tangents[number]
                inputs[number] = pt.zeros_like(inputs[number]) if tangent is None else tangent
            return second.op.make_node(*inputs).outputs[place]
        # The derivative is taken of the operation alone, at inputs that stand for the others.
        inputs = [variable.type() for variable in second.inputs]
        output = second.op.make_node(*inputs).outputs[place]
        known = {a: t for a, t in zip(inputs, tangents, strict=True) if t is not None}
        # So do these. A copy of all tangents for each operation would double them at each one.
        stand_ins = {a: t.type() for a, t in known.items()}
        tangent = pushforward(
            output,
            wrt=list(stand_ins),
            tangents=list(stand_ins.values()),
            disconnected_outputs="ignore",
            return_disconnected="none",
        )
        if tangent is None:
            return None
        memo = dict(zip(inputs, second.inputs, strict=True))
        memo |= {stand_in: known[a] for a, stand_in in stand_ins.items()}
        return clone_get_equiv(
            list(memo), [tangent], copy_inputs=False, copy_orphans=False, memo=memo
        )[tangent]

    def _is_linear(self, left: Variable, right: Variable) -> bool:
        """Whether the value is that at the centre and the tangent."""
        if _same(left, right) or (left is self._here and right is self._center):
            return True
        if left.owner is None or right.owner is None:
            return False
        moved = _moved_inputs(left.owner, right.owner)
        return moved is not None and all(
            self._is_linear(a, b)
            for number, (a, b) in enumerate(_pairs(left.owner, right.owner))
            if number in moved
        )

    def value(self, left: Variable, right: Variable) -> Variable:
        """The value at the position."""
        if (left, right) not in self._values:
            self._values[left, right] = self._value(left, right)
        return self._values[left, right]

    def _value(self, left: Variable, right: Variable) -> Variable:
        if _same(left, right) or left.owner is None:
            return left
        tangent = self.tangent(left, right)
        if tangent is not None and self._is_linear(left, right):
            return right + tangent
        inputs = [self.value(a, b) for a, b in _pairs(left.owner, right.owner)]
        return left.owner.op.make_node(*inputs).outputs[left.owner.outputs.index(left)]

    def remainder(self, left: Variable, right: Variable) -> Variable:
        """Graph of the value less that at the centre and the part of the tangent."""
        tangent = self.tangent(left, right)
        if tangent is not None and self._is_linear(left, right):
            return (1 - self._weight) * tangent
        self.bends = True
        value = self.value(left, right)
        return value - right if tangent is None else value - right - self._weight * tangent


def _pairs(first: Apply, second: Apply) -> list[tuple[Variable, Variable]]:
    """Inputs of one operation in two graphs.

    Raises
    ------
    NotImplementedError
        Where the graphs differ.
    """
    if first.op != second.op or len(first.inputs) != len(second.inputs):
        raise NotImplementedError("The graphs of a gradient at two positions differ.")
    return list(zip(first.inputs, second.inputs, strict=True))


def _moved_inputs(first: Apply, second: Apply) -> set[int] | None:
    """Inputs in which two nodes of one linear operation differ, None where it is not linear."""
    if len(first.inputs) != len(second.inputs):
        return None
    # Both graphs are one gradient at two positions, so their parts have the same lengths.
    return linear_inputs(
        first, [_same(*each) for each in zip(first.inputs, second.inputs, strict=True)]
    )


def _same(left: Variable, right: Variable) -> bool:
    return left is right or (isinstance(left, Constant) and left.equals(right))


def _needed(graph: TensorVariable, rows: Sequence[TensorVariable]) -> list[int]:
    """Numbers of the arrays of data that a graph depends on."""
    present = set(ancestors([graph]))
    return [index for index, row in enumerate(rows) if row in present]


def _last_row_vectors(
    posterior: Posterior,
    graph: TensorVariable,
    rows: tuple[TensorVariable, ...],
    length: TensorVariable,
    fixed: set[Variable],
    moving: set[Variable],
) -> list[TensorVariable]:
    """Arrays with entries for each row that depend only on rows and centre, and that others use."""
    nodes = list(toposort([graph]))
    of_rows, of_fixed, of_moving = (_descendants(nodes, roots) for roots in (rows, fixed, moving))
    candidates = [
        output
        for node in nodes
        for output in node.outputs
        if output in of_rows
        and output in of_fixed
        and output not in of_moving
        and _can_be_stored(output)
    ]
    if not candidates or posterior.n_rows < 8:
        return []
    aligned = _aligned(posterior, candidates, rows, length)
    elsewhere = {
        variable
        for node in nodes
        if not any(output in aligned for output in node.outputs)
        for variable in node.inputs
    }
    return [vector for vector in candidates if vector in aligned and vector in elsewhere]


def _with_fixed_quantities(
    posterior: Posterior, graph: TensorVariable, fixed: set[Variable]
) -> TensorVariable:
    """The graph with what depends on the centre alone evaluated once."""
    nodes = list(toposort([graph]))
    changing = {
        variable
        for variable in ancestors([graph])
        if variable.owner is None and variable not in fixed and not isinstance(variable, Constant)
    }
    changing = _descendants(nodes, changing)
    of_fixed = _descendants(nodes, fixed) - fixed
    last = [
        variable
        for node in nodes
        if not changing.isdisjoint(node.outputs)
        for variable in node.inputs
        if variable in of_fixed and variable not in changing
    ]
    last = [each for each in dict.fromkeys(last) if isinstance(each.type, TensorType)]
    if not last:
        return graph
    values = posterior.compile_for_setup([], last, quick=True)()
    replacements = {
        variable: pytensor.shared(np.asarray(value), "of_center", shape=variable.type.shape)
        for variable, value in zip(last, values, strict=True)
    }
    return clone_replace(graph, replacements, rebuild_strict=False)


def _can_be_stored(variable: Variable) -> bool:
    """Whether the type allows so many floating numbers a row: shape (n,), (n, 1), (n, 3), ..."""
    if not isinstance(variable.type, TensorType) or not variable.type.ndim:
        return False
    length, *others = variable.type.shape
    return length != 1 and None not in others and variable.type.dtype.startswith("float")


def _descendants(nodes: Iterable[Apply], roots: Iterable[Variable]) -> set[Variable]:
    reached = set(roots)
    for node in nodes:
        if any(variable in reached for variable in node.inputs):
            reached.update(node.outputs)
    return reached


def _aligned(posterior, candidates, rows, length) -> set[Variable]:
    """Candidates whose value on a part of the rows is that part of their value on all rows.

    They are found by evaluation, so no operation has to be known.
    """
    function = posterior.compile_for_setup([length, *rows], candidates, quick=True)
    chosen = np.random.default_rng(2019).choice(
        posterior.n_rows, size=min(posterior.n_rows, COMPARED_ROWS), replace=False
    )
    parts = [chosen, chosen[:7], chosen[7:]]
    together, first, second = (
        function(np.int64(len(part)), *posterior.take(part)) for part in parts
    )
    return {
        candidate
        for candidate, value, left, right in zip(candidates, together, first, second, strict=True)
        if len(value) == len(chosen)
        and len(left) == 7
        and np.allclose(value, np.concatenate([left, right]), rtol=1e-6, atol=0, equal_nan=False)
    }
