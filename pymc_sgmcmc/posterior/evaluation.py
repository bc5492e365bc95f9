"""Log densities, gradients and curvature of a posterior at positions, by passes over its rows.

They are compiled where they are first needed, for the set-up of a run and for reference. The
transitions have the symbolic gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.op import HasInnerGraph
from pytensor.graph.traversal import toposort

from pymc_sgmcmc.compiling.compiled import (
    NUMPY_MODE,
    PYTHON_MODE,
    compile_on_arrays,
    compile_quietly,
)
from pymc_sgmcmc.posterior.row_access import RowAccess
from pymc_sgmcmc.posterior.several_positions import at_several_positions, in_parts
from pymc_sgmcmc.posterior.symbolic import SymbolicPosterior
from pymc_sgmcmc.posterior.threads import (
    OfRows,
    SharedFunction,
    in_order,
    on_one_thread,
    threads_of_blas,
)
from pymc_sgmcmc.sources import RowSource
from pymc_sgmcmc.stages import count_passes

CHUNK_ELEMENTS = 500_000
"""Passes over rows handle about this many array elements of data at a time, 4 MB. Their memory does
not grow with the number of rows then, and results of one operation are in the cache for the next.
Smaller pieces would take longer, since each call has a fixed cost of about 0.1 milliseconds."""

FEWEST_COORDINATES_TOGETHER = 50
"""Prior part and rows of positions of this length and more are compiled for several of them. That
takes 0.3 seconds, as long as hundreds of evaluations for single ones, which shorter positions never
need."""

ARRAYS_OF_PRODUCTS = 5
"""Second derivatives have about so many arrays of rows and directions at the same time. All of them
should be in the cache."""

POSSIBLE_ROWS = 1000
"""Whether a position is possible is looked at in so many rows, evenly spaced. Their densities take
some hundredth of a millisecond."""

POSSIBLE_GROUPS = 20
"""The integrals of so many groups take a few milliseconds."""


class EvaluatedPosterior(SymbolicPosterior):
    """A log density whose rows can be read, as functions of arrays.

    Attributes
    ----------
    source : RowSource or None
        Where the rows are, None where they are in memory.
    others : dict of str to SharedVariable
        Values of the free variables outside the position, by the names of their value variables.
    initial_values : numpy.ndarray, shape (d,)
        Value variables at the initial point.
    """

    source: RowSource | None
    others: dict[str, SharedVariable]
    initial_values: np.ndarray
    _rows: RowAccess
    _evaluated: deque[int]

    # --- Positions and value variables ----------------------------------------------------

    @property
    def initial_position(self) -> np.ndarray:
        """Position of the initial point, shape (d,)."""
        return self.positions_at(self.initial_values)

    def positions_at(self, values: np.ndarray) -> np.ndarray:
        """Positions at ravelled value variables, both of shape (..., d)."""
        return values if self.coordinates is None else self.coordinates.to_coordinates(values)

    def values_at(self, positions: np.ndarray) -> np.ndarray:
        """Value variables, ravelled, at positions, both of shape (..., d)."""
        return positions if self.coordinates is None else self.coordinates.to_values(positions)

    def point_at(self, position: np.ndarray) -> dict[str, np.ndarray]:
        """Values of the value variables at a position."""
        return self.layout.unravel(self.values_at(position))

    def position_of_rows(self, positions: np.ndarray) -> np.ndarray:
        """The position of the rows at positions, both of shape (..., d)."""
        return positions if self.coordinates is None else self.coordinates.to_rows(positions)

    def gradients_from_rows(self, positions: np.ndarray, gradients: np.ndarray) -> np.ndarray:
        """Gradients in terms of positions from those in terms of positions of the rows."""
        if self.coordinates is None:
            return gradients
        return self.coordinates.pulled_back(positions, gradients)

    def curvature_from_rows(
        self, position: np.ndarray, curvature: np.ndarray, gradient: np.ndarray
    ) -> np.ndarray:
        """Minus a Hessian in terms of a position from that of the position of the rows.

        The gradient is in terms of the position of the rows too.
        """
        if self.coordinates is None:
            return curvature
        return self.coordinates.curvature(position, curvature, gradient)

    def _as_position(self, position: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(position, dtype=self.dtype)

    # --- Rows ------------------------------------------------------------------------------

    @property
    def n_rows(self) -> int:
        """N, the number of rows of the full data."""
        return self._rows.n_rows

    @property
    def rows_evaluated(self) -> int:
        """How many log densities or gradients of single rows this process has computed."""
        return sum(self._evaluated)

    def count_evaluated(self, rows: int) -> None:
        """Add to `rows_evaluated`, as where others have computed gradients of rows."""
        self._evaluated.append(rows)
        count_passes(rows / self.n_rows)

    def set_others(self, point: Mapping[str, np.ndarray]) -> None:
        """Set the free variables outside the position to their values in a point."""
        for name, shared in self.others.items():
            # A copy, since worker processes give views of memory that others write to.
            shared.set_value(np.array(point[name], dtype=shared.dtype), borrow=True)

    @cached_property
    def some_rows(self) -> list[np.ndarray]:
        """At most 1000 rows in memory: of a source those that the model is written on.

        Of a source of groups there are none.
        """
        if self.source is None:
            count = min(self.n_rows, POSSIBLE_GROUPS if self.rows_are_groups else POSSIBLE_ROWS)
            return self.take(np.linspace(0, self.n_rows - 1, count).astype(int))
        if self.rows_are_groups:
            return []
        return [leaf.values[:POSSIBLE_ROWS] for leaf in self._separated.leaves]

    def take(self, selection: slice | np.ndarray) -> list[np.ndarray]:
        """The given rows of all data arrays."""
        return self._rows.take(selection)

    def part(self, rows: Sequence[np.ndarray], selection: slice | np.ndarray) -> list[np.ndarray]:
        """Some of the rows that were taken, by their places among these."""
        return self._rows.part(rows, selection)

    def joined(
        self, first: Sequence[np.ndarray], start: int, second: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Rows that were taken, those of the first ones from a place on, and the second ones."""
        return self._rows.joined(first, start, second)

    def chunks(self, width: int = 1) -> Iterator[list[np.ndarray]]:
        """All rows in order, in pieces of bounded memory where a row has `width` results."""
        length = self._chunk_length(width)
        for start in range(0, self.n_rows, length):
            yield self.take(slice(start, start + length))

    def each_chunk(self, function: OfRows, width: int = 1) -> Iterator[Any]:
        """Results of a function of this posterior and of a piece of the rows, in order.

        The pieces are those of `chunks`. The function runs where the rows are, so it should not
        depend on anything that was changed here, other than the values of `set_others`.
        """
        if self.source is not None and self.source.workers is not None:
            self._log_likelihood_template  # noqa: B018  # It takes a pass, once.
        if self.others:
            values = {name: shared.get_value() for name, shared in self.others.items()}
            function = partial(_with_others, function=function, others=values)
        return self._rows.each(function, self, self._chunk_length(width), self._threads)

    def pieces(self, rows: Sequence[np.ndarray], width: int = 1) -> Iterator[list[np.ndarray]]:
        """Given rows in order, in pieces of bounded memory as those of `chunks`."""
        length = self._chunk_length(width)
        for start in range(0, len(rows[0]), length):
            yield self.part(rows, slice(start, start + length))

    def in_chunks(self, arrays: Sequence[np.ndarray], width: int) -> Iterator[list[np.ndarray]]:
        """Arrays with an entry for each row, in the pieces of `chunks`."""
        length = self._chunk_length(width)
        for start in range(0, self.n_rows, length):
            yield [array[start : start + length] for array in arrays]

    def _each_range(self, function: OfRows, value: Any) -> Iterator[Any]:
        return self._rows.each(function, value, self._chunk_length(1), threads_of_blas())

    def _pieces_of(self, function: OfRows, rows: Sequence[np.ndarray] | None) -> Iterator[Any]:
        """Results of a function of this posterior and of each piece of given rows or all."""
        return self.each_chunk(function) if rows is None else self._of_pieces(function, rows)

    def _of_pieces(self, function: OfRows, rows: Sequence[np.ndarray]) -> Iterator[Any]:
        """Results of a function of this posterior and of each piece of given rows, in order."""
        if 0 < len(rows[0]) <= self._chunk_length(1):
            return iter([function(self, list(rows))])
        return in_order(function, self, self.pieces(rows), self._threads)

    @property
    def _threads(self) -> int:
        """Threads of a pass: one where functions of rows may set the other variables."""
        return 1 if self.others else threads_of_blas()

    def _chunk_length(self, width: int) -> int:
        return max(1, CHUNK_ELEMENTS // max(width, self._widest_row))

    @cached_property
    def _widest_row(self) -> int:
        return self._separated.widest_row(self.layout)

    # --- Log densities and gradients -------------------------------------------------------

    def log_density(self, position: np.ndarray) -> float:
        """Log posterior density up to a constant, in chunks of bounded memory."""
        return self.log_density_and_gradient(position)[0]

    def gradient(self, position: np.ndarray) -> np.ndarray:
        """Full-data gradient of the log posterior, shape (d,), in chunks of bounded memory.

        Without the value it takes half of the time.
        """
        return self.log_prior_and_gradient(position)[1] + self.likelihood_gradient(position)

    def log_density_and_gradient(self, position: np.ndarray) -> tuple[float, np.ndarray]:
        """Log posterior and its gradient over all rows, accumulated in double precision."""
        value, gradient = self.log_prior_and_gradient(position)
        value, of_rows = self._with_likelihood(value, position)
        return value, gradient + of_rows

    def log_likelihood_and_gradient(
        self, position: np.ndarray, rows: Sequence[np.ndarray]
    ) -> tuple[float, np.ndarray]:
        """Log likelihood of the given rows and its gradient, unscaled.

        Parameters
        ----------
        position : numpy.ndarray, shape (d,)
        rows : sequence of numpy.ndarray
            One array for each array of `data`, as `take` gives them.
        """
        return self._with_likelihood(0.0, position, rows)

    def _with_likelihood(
        self, value: float, position: np.ndarray, rows: Sequence[np.ndarray] | None = None
    ) -> tuple[float, np.ndarray]:
        """A value with the log likelihood of given rows or all added, and the gradient of this."""
        seen, gradient = (
            self._as_position(self.position_of_rows(position)),
            np.zeros(self.dimension),
        )
        of_rows = partial(_log_likelihood_and_gradient, position=seen)
        for of_piece, slope in self._pieces_of(of_rows, rows):
            value += of_piece
            gradient += slope
        return value, self.gradients_from_rows(position, gradient)

    def log_likelihoods_and_gradients(
        self, positions: np.ndarray, rows: Sequence[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Log likelihoods of given rows at several positions, (positions,), and (positions, d).

        Products of matrices for all positions take less time than those for one after the other.
        """
        total = np.zeros((len(positions), 1 + self.dimension))
        if self._several_likelihoods_function is not None:
            seen = self._as_position(self.position_of_rows(positions))
            of_rows = partial(_log_likelihoods_and_gradients, positions=seen)
            pieces = self.pieces(rows, ARRAYS_OF_PRODUCTS * len(positions))
            for of_piece in in_order(of_rows, self, pieces, self._threads):
                total += of_piece
            total[:, 1:] = self.gradients_from_rows(positions, total[:, 1:])
        else:
            for of_one, position in zip(total, positions, strict=True):
                of_one[0], of_one[1:] = self.log_likelihood_and_gradient(position, rows)
        return total[:, 0], total[:, 1:]

    def likelihood_gradient(
        self, position: np.ndarray, rows: Sequence[np.ndarray] | None = None
    ) -> np.ndarray:
        """Gradient of the log likelihood of given rows or all, without its value.

        The position may be several, of shape (positions, d), and so is the gradient then. The rows
        are read from memory once for all of them.
        """
        return self.gradients_from_rows(
            position, self.gradient_of_rows(self.position_of_rows(position), rows)
        )

    def gradient_of_rows(
        self, seen: np.ndarray, rows: Sequence[np.ndarray] | None = None
    ) -> np.ndarray:
        """That gradient in terms of positions of the rows, at these."""
        positions = np.atleast_2d(self._as_position(seen))
        totals = np.zeros(positions.shape)
        of_rows = partial(_likelihood_gradients, positions=positions)
        for gradients in self._pieces_of(of_rows, rows):
            for total, gradient in zip(totals, gradients, strict=True):
                total += gradient
        return totals.reshape(np.shape(seen))

    @property
    def has_second_derivatives(self) -> bool:
        """Whether PyTensor takes those of the rows, on arrays. It does not of groups and loops."""
        return self._curvature_function is not None

    def likelihood_curvature(
        self, position: np.ndarray, rows: Sequence[np.ndarray] | None = None
    ) -> np.ndarray:
        r"""The matrix :math:`A = -\sum_j \nabla^2 \log p(x_j \mid \theta)`, shape (d, d).

        It is a sum over given rows or all, by one pass, where `has_second_derivatives`.
        """
        seen = self._as_position(self.position_of_rows(position))
        of_rows, total = partial(_curvature, position=seen), np.zeros((self.dimension,) * 2)
        for products in self._pieces_of(of_rows, rows):
            total += products
        none = self.coordinates is None
        gradient = np.zeros(self.dimension) if none else self.gradient_of_rows(seen, rows)
        return self.curvature_from_rows(position, 0.5 * (total + total.T), gradient)

    def log_prior_and_gradient(self, position: np.ndarray) -> tuple[float, np.ndarray]:
        """Value and gradient of the part of the log density without rows."""
        # For small matrices, as in normal vectors, starting threads would take most of the time.
        value, gradient = on_one_thread(self._log_prior_function, self._as_position(position))
        return float(value), np.array(gradient, dtype=np.float64)

    def prior_gradients(self, positions: np.ndarray) -> np.ndarray:
        """Gradients of the part without rows at several positions, both of shape (positions, d)."""
        return self.log_priors_and_gradients(positions)[1]

    def log_priors_and_gradients(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Values, shape (positions,), and gradients, (positions, d), of the part without rows.

        Long positions are evaluated together where that is right and saves time.
        """
        positions, together = self._as_position(positions), self._several_priors_function
        if together is not None:
            with suppress(Exception):  # Shapes may depend on values.
                return in_parts(together, positions)
        pairs = [self.log_prior_and_gradient(position) for position in positions]
        values, gradients = zip(*pairs, strict=True)
        return np.array(values), np.array(gradients)

    def row_gradients(self, position: np.ndarray, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Gradient of the log likelihood of each row apart, shape (rows, d).

        Both are in terms of the position of the rows.
        """
        self.count_evaluated(len(rows[0]))
        (gradients,) = self._row_gradients_function(self._as_position(position), *rows)
        return np.asarray(gradients)

    def row_log_density_differences(
        self, here: np.ndarray, there: np.ndarray, rows: Sequence[np.ndarray]
    ) -> np.ndarray:
        """Log likelihood of each row at a position less that at another, shape (rows,)."""
        (differences,) = self._row_differences_function(
            self._as_position(here), self._as_position(there), *rows
        )
        return np.asarray(differences, dtype=np.float64)

    # --- Compiled functions ----------------------------------------------------------------

    @cached_property
    def _log_prior_function(self):
        position = pt.tensor("position", shape=(None,), dtype=self.dtype)
        value = self.prior_log_density(position)
        return self.compile_for_setup([position], [value, self.prior_gradient(position)])

    @cached_property
    def _several_priors_function(self) -> SharedFunction | None:
        """Prior part and gradient at several positions, None where one by one is as good."""
        if self.dimension < FEWEST_COORDINATES_TOGETHER:
            return None
        one = pt.tensor("position", shape=(None,), dtype=self.dtype)
        return at_several_positions(
            [self.prior_log_density(one), self.prior_gradient(one)],
            one,
            [],
            self.log_prior_and_gradient,
            self.compile_for_setup,
            self.initial_position.astype(self.dtype),
        )

    def _function_of_rows(self, *graphs: Callable, quick: bool = False) -> SharedFunction:
        """Function of a position and of rows, whose number graphs take as well."""
        position, rows = self.position_and_rows()
        outputs = [graph(position, rows, rows[0].shape[0]) for graph in graphs]
        return self.compile_for_setup([position, *rows], outputs, quick=quick)

    @cached_property
    def _log_likelihood_function(self) -> SharedFunction:
        return self._function_of_rows(self.rows_log_density, self.rows_gradient)

    @cached_property
    def _several_likelihoods_function(self) -> SharedFunction | None:
        """Log likelihoods and gradients at several positions, None where one by one is as good."""
        if self.rows_are_groups or self.dimension < FEWEST_COORDINATES_TOGETHER:
            return None
        position, rows = self.position_and_rows()
        graphs = self.rows_log_density, self.rows_gradient
        return at_several_positions(
            [graph(position, rows, rows[0].shape[0]) for graph in graphs],
            position,
            rows,
            self._log_likelihood_function,
            self.compile_for_setup,
            self.position_of_rows(self.initial_position).astype(self.dtype),
            *self.some_rows,
        )

    @cached_property
    def _likelihood_gradient_function(self) -> SharedFunction:
        return self._function_of_rows(self.rows_gradient)

    @cached_property
    def _densities_function(self) -> SharedFunction:
        """Log densities of prior part and rows. It has no gradients, which take time to compile."""
        return self._function_of_rows(
            lambda position, *_: self.prior_log_density(position),
            self.rows_log_density,
            quick=True,
        )

    @cached_property
    def _curvature_function(self) -> SharedFunction | None:
        """Curvature of rows times directions, None where it is no function of arrays."""
        if self.rows_are_groups:
            return None
        position, rows = self.position_and_rows()
        directions = pt.tensor("directions", shape=(None, self.dimension), dtype=self.dtype)
        try:
            products = self.rows_curvature(position, rows, rows[0].shape[0], directions)
            if any(isinstance(node.op, HasInnerGraph) for node in toposort([products])):
                return None
            return self.compile_for_setup([position, directions, *rows], [products])
        except Exception:  # Operations may fail in any way where they have no second derivative.
            return None

    @cached_property
    def _row_gradients_function(self) -> SharedFunction:
        return self._function_of_rows(
            lambda position, rows, _: self.single_row_gradients(position, rows)
        )

    @cached_property
    def _row_differences_function(self):
        here, rows = self.position_and_rows()
        there, _ = self.position_and_rows()
        densities = [self.single_row_log_densities(at, rows) for at in (here, there)]
        return self.compile_for_setup([here, there, *rows], [densities[1] - densities[0]])

    def compile_for_setup(self, inputs: list, outputs: list, *, quick: bool = False):
        """Compile a function that is called a few times, on large arrays unless `quick`.

        The mode does not depend on the backend of the transitions, so everything that is computed
        before sampling is the same on all backends.
        """
        if quick:
            with pytensor.config.change_flags(cxx=""):
                function = compile_quietly(inputs, outputs, PYTHON_MODE)
        else:
            function = compile_on_arrays(inputs, outputs, NUMPY_MODE)
        function.trust_input = True
        return SharedFunction(function)

    def __getstate__(self) -> dict:
        """Everything but the functions for set-up, which are compiled again when needed."""
        compiled = {name for name in vars(self) if name.endswith("_function")} | {"reading"}
        return {name: value for name, value in vars(self).items() if name not in compiled}


def _with_others(
    posterior: EvaluatedPosterior,
    rows: list[np.ndarray],
    *,
    function: OfRows,
    others: Mapping[str, np.ndarray],
) -> Any:
    posterior.set_others(others)
    return function(posterior, rows)


def _log_likelihood_and_gradient(
    posterior: EvaluatedPosterior, rows: list[np.ndarray], *, position: np.ndarray
) -> tuple[float, np.ndarray]:
    posterior.count_evaluated(len(rows[0]))
    value, gradient = posterior._log_likelihood_function(position, *rows)
    return float(value), np.array(gradient)


def _log_likelihoods_and_gradients(
    posterior: EvaluatedPosterior, rows: list[np.ndarray], *, positions: np.ndarray
) -> np.ndarray:
    """Log likelihoods of rows at several positions, beside their gradients."""
    posterior.count_evaluated(len(positions) * len(rows[0]))
    function = posterior._several_likelihoods_function
    assert function is not None
    found = np.empty((len(positions), 1 + posterior.dimension))
    found[:, 0], found[:, 1:] = function(positions, *rows)
    return found


def _curvature(
    posterior: EvaluatedPosterior, rows: Sequence[np.ndarray], *, position: np.ndarray
) -> np.ndarray:
    """Sums over rows of the products of their curvature with each direction.

    Many rows have one matrix, which takes no more memory than they do.
    """
    posterior.count_evaluated(len(rows[0]))
    directions = np.eye(posterior.dimension, dtype=posterior.dtype)
    function, total = posterior._curvature_function, np.zeros(directions.shape)
    assert function is not None
    for piece in posterior.pieces(rows, ARRAYS_OF_PRODUCTS * len(directions)):
        total += function(position, directions, *piece)[0]
    return total


def _likelihood_gradients(
    posterior: EvaluatedPosterior, rows: Sequence[np.ndarray], *, positions: np.ndarray
) -> list[np.ndarray]:
    """Gradient of the log likelihood of rows at each of some positions."""
    posterior.count_evaluated(len(positions) * len(rows[0]))
    # Compiling another function of groups takes longer than their log densities.
    function = (
        posterior._log_likelihood_function
        if posterior.rows_are_groups
        else posterior._likelihood_gradient_function
    )
    return [np.array(function(at, *rows)[-1]) for at in positions]
