"""The log density of all rows, and its gradient, at many positions together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.replace import vectorize_graph
from pytensor.graph.rewriting.utils import rewrite_graph
from pytensor.graph.traversal import toposort
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.posterior.compiled import inline_inner_graphs, quick_graphs
from pymc_sgmcmc.posterior.threads import SharedFunction, in_order

TOGETHER_ELEMENTS = 250_000
"""A piece of the rows is so long that its results at all positions together have about this many
elements, 2 MB, which stay in the cache of a core."""

SHORTEST_PIECE = 50
"""A piece has at least this many rows, since each call has a fixed cost."""

COMPARED = 3
"""The evaluation at several positions together is compared with that one by one at this many."""

TOLERANCE = 1e-6
"""Both ways agree where they differ by at most this part. In double precision they do so to 1e-12,
and a wrong axis makes differences of the size of the result."""

SINGLE_TOLERANCE = 1e-3
"""The same in single precision, which has seven digits."""

COMPARED_ROWS = 2_000
"""Both ways are compared on about this many rows."""


class FullDensity:
    """Log posterior of all rows and its gradient at many positions together.

    The rows are read once for all positions: rows that enter by a matrix of predictors are
    multiplied with all positions in one product of matrices. Where an operation of the model has no
    such form, or would be called for each position and row, the positions are evaluated one by one.

    Parameters
    ----------
    posterior : Posterior
    positions : numpy.ndarray, shape (n, d)
        Positions at which both ways are compared.
    threads : int
        So many pieces of the rows are evaluated at the same time.

    Attributes
    ----------
    passes : int
        How many times all rows have been read.
    together : bool
        Whether positions are evaluated together.
    """

    def __init__(self, posterior: Posterior, positions: np.ndarray, threads: int = 1):
        self.posterior, self.passes, self._threads = posterior, 0, threads
        self._prior: SharedFunction | None = None
        self._likelihood: SharedFunction | None = None
        self._width = 1
        self.together = self._compile(np.asarray(positions, dtype=posterior.dtype))

    def __call__(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Log densities, shape (n,), and gradients, (n, d), at positions, (n, d).

        Where the log density or its gradient is not finite, or not a number, the log density is
        minus infinity and the gradient zero.
        """
        positions = np.ascontiguousarray(positions, dtype=self.posterior.dtype)
        self.passes += 1
        with np.errstate(all="ignore"):
            values, gradients = (
                self._all_together(positions) if self.together else self._one_by_one(positions)
            )
        bad = ~(np.isfinite(values) & np.isfinite(gradients).all(1))
        values[bad], gradients[bad] = -np.inf, 0.0
        return values, gradients

    def single(self, position: np.ndarray) -> tuple[float, np.ndarray]:
        """Log density and gradient at one position, which read all rows as well."""
        self.passes += 1
        return self.posterior.log_density_and_gradient(position)

    # --- Evaluation ----------------------------------------------------------------------

    def _all_together(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        assert self._prior is not None
        values, gradients = self._of(self._prior, positions)
        length = self._length(len(positions))
        pieces = (
            self.posterior.take(slice(start, start + length))
            for start in range(0, self.posterior.n_rows, length)
        )
        for value, gradient in in_order(self._of_rows, positions, pieces, self._threads):
            values += value
            gradients += gradient
        return values, gradients

    def _of_rows(
        self, positions: np.ndarray, rows: list[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        assert self._likelihood is not None
        return self._of(self._likelihood, positions, *rows)

    def _of(
        self, function: SharedFunction, positions: np.ndarray, *rows: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        value, gradient = function(positions, *rows)
        return (
            np.array(np.broadcast_to(value, len(positions)), dtype=float),
            np.array(np.broadcast_to(gradient, positions.shape), dtype=float),
        )

    def _one_by_one(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = [self.posterior.log_density_and_gradient(position) for position in positions]
        return np.array([value for value, _ in found]), np.array([slope for _, slope in found])

    def _length(self, count: int) -> int:
        return max(SHORTEST_PIECE, TOGETHER_ELEMENTS // (count * self._width))

    # --- Compilation ---------------------------------------------------------------------

    def _compile(self, positions: np.ndarray) -> bool:
        """Compile the function of several positions; whether it is right and has a use."""
        posterior = self.posterior
        rows = posterior.take(
            np.unique(np.linspace(0, posterior.n_rows - 1, COMPARED_ROWS).astype(int))
        )
        try:
            with quick_graphs():
                self._prior, of_rows = self._compiled()
            together = self._sum(of_rows, positions[:COMPARED], rows)
        except Exception:  # Operations may fail in any way where they do not allow another axis.
            return False
        if _calls_for_each_row(of_rows.function.maker.fgraph):
            return False
        apart = self._apart(positions[:COMPARED], rows)
        tolerance = TOLERANCE if posterior.dtype == "float64" else SINGLE_TOLERANCE
        for found, expected in zip(together, apart, strict=True):
            largest = np.abs(expected[np.isfinite(expected)]).max(initial=0)
            if not np.allclose(
                found, expected, rtol=tolerance, atol=tolerance * largest, equal_nan=True
            ):
                return False
        self._likelihood = of_rows
        return True

    def _compiled(self) -> tuple[SharedFunction, SharedFunction]:
        posterior = self.posterior
        single, rows = posterior.position_and_rows()
        several = pt.tensor("positions", shape=(None, None), dtype=posterior.dtype)

        def batched(outputs: Sequence[TensorVariable]) -> list[TensorVariable]:
            # An operation with a graph inside would be called once for each position.
            inlined = rewrite_graph(outputs, include=(), custom_rewrite=inline_inner_graphs)
            return vectorize_graph(inlined, {single: several})

        prior = posterior.compile_for_setup(
            [several],
            batched([posterior.prior_log_density(single), posterior.prior_gradient(single)]),
        )
        length = rows[0].shape[0]
        outputs = [
            posterior.rows_log_density(single, rows, length),
            posterior.rows_gradient(single, rows, length),
        ]
        self._width = _widest(outputs, single)
        return prior, posterior.compile_for_setup([several, *rows], batched(outputs))

    def _sum(
        self, of_rows: SharedFunction, positions: np.ndarray, rows: Sequence[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Log prior plus log likelihood of some rows, and the gradient, by the new functions."""
        assert self._prior is not None
        with np.errstate(all="ignore"):
            first, second = self._of(self._prior, positions), self._of(of_rows, positions, *rows)
        return first[0] + second[0], first[1] + second[1]

    def _apart(
        self, positions: np.ndarray, rows: Sequence[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The same by the functions of one position."""
        values, gradients = np.zeros(len(positions)), np.zeros(positions.shape)
        with np.errstate(all="ignore"):
            for number, position in enumerate(positions):
                first = self.posterior.log_prior_and_gradient(position)
                second = self.posterior.log_likelihood_and_gradient(position, rows)
                values[number], gradients[number] = first[0] + second[0], first[1] + second[1]
        return values, gradients


def _calls_for_each_row(graph: FunctionGraph) -> bool:
    """Whether Python calls an operation for each position and row, which takes longer by far.

    One call for each position takes no more than the evaluation one by one.
    """
    return any(
        isinstance(node.op, Blockwise) and node.op.batch_ndim(node) > 1
        for node in graph.apply_nodes
    )


def _widest(outputs: Sequence[TensorVariable], position: TensorVariable) -> int:
    """Elements a row of the widest result that depends on the position, and has rows."""
    widest, depends = 1, {position}
    for node in toposort(outputs):
        if not depends.intersection(node.inputs):
            continue
        depends.update(node.outputs)
        for variable in node.outputs:
            shape = getattr(variable.type, "shape", ())
            if None in shape:
                widest = max(widest, int(np.prod([size for size in shape if size is not None])))
    return widest
