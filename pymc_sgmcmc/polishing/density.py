"""The log density of all rows, and its gradient, at many positions together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from pytensor.graph.rewriting.utils import rewrite_graph
from pytensor.graph.traversal import toposort
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.compiling.compiled import inline_inner_graphs, quick_graphs
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.posterior.several_positions import at_several_positions
from pymc_sgmcmc.posterior.threads import SharedFunction, in_order

TOGETHER_ELEMENTS = 250_000
"""A piece of the rows is so long that its results at all positions together have about this many
elements, 2 MB, which stay in the cache of a core."""

SHORTEST_PIECE = 50
"""A piece has at least this many rows, since each call has a fixed cost."""

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
        Both ways are compared near the first of these.
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
        start = np.asarray(positions[0], dtype=posterior.dtype)
        one, rows = posterior.position_and_rows()
        count = rows[0].shape[0]
        prior = [posterior.prior_log_density(one), posterior.prior_gradient(one)]
        of_rows = [
            posterior.rows_log_density(one, rows, count),
            posterior.rows_gradient(one, rows, count),
        ]
        self._width = _widest(of_rows, one)
        some = np.unique(np.linspace(0, posterior.n_rows - 1, COMPARED_ROWS).astype(int))

        def together(
            outputs: list[TensorVariable],
            single: Callable[..., tuple[float, np.ndarray]],
            others: list[TensorVariable],
            *arrays: np.ndarray,
        ) -> SharedFunction | None:
            # An operation with a graph inside would be called once for each position.
            inlined = rewrite_graph(outputs, include=(), custom_rewrite=inline_inner_graphs)
            compiled = posterior.compile_for_setup
            return at_several_positions(inlined, one, others, single, compiled, start, *arrays)

        def of_some(position: np.ndarray, *arrays: np.ndarray) -> tuple[float, np.ndarray]:
            return posterior.log_likelihood_and_gradient(position, arrays)

        with quick_graphs():
            self._prior = together(prior, posterior.log_prior_and_gradient, [])
            self._likelihood = together(of_rows, of_some, rows, *posterior.take(some))
        self.together = self._prior is not None and self._likelihood is not None

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
