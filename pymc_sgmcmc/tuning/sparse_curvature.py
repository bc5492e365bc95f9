r"""The curvature of long positions of which each row has few coordinates, as a sparse matrix.

Rows with an effect for each of some factors, as of a student, a lecturer and a department, have a
few entries of long variables each. Their log density in terms of these entries is a function of a
few numbers a row, whose second derivatives are differences of its gradient: one for each entry that
a row has and for each coordinate that all rows have, whatever the number of levels. The prior joins
an effect to coordinates that all levels have in common, such as the log of their scale, and to
effects of the same level.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import pytensor.tensor as pt
from scipy import sparse
from scipy.sparse.linalg import ArpackNoConvergence, eigsh

from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.posterior.selected import SelectedGraph, places_of, selected_graph
from pymc_sgmcmc.tuning.curvature import (
    MOST_DIRECTIONS,
    NOT_FINITE,
    SMALLEST,
    Curvature,
    curvature_of_directions,
    difference_width,
)

SAME = 1e-3
"""Two differences of gradients are equal up to this part, which is far above their rounding."""


class SparseCurvature:
    """Minus the Hessian of the log density of a posterior whose rows select entries.

    Parameters
    ----------
    posterior : Posterior
    graph : SelectedGraph

    Attributes
    ----------
    effects : numpy.ndarray of bool, shape (d,)
        Whether a coordinate is an entry that rows select.
    """

    def __init__(self, posterior: Posterior, graph: SelectedGraph):
        self._posterior = posterior
        self._levels, self._whole = places_of(posterior, graph)
        shapes = dict(zip(posterior.layout.variables, posterior.layout.shapes, strict=True))
        self._whole_shapes = [shapes[variable] for variable in graph.whole]
        self._entry_shapes = [each.entries.type.shape[1:] for each in graph.selections]
        self._stops = np.cumsum([0, *(levels.shape[1] for levels in self._levels)])
        self.effects = np.zeros(posterior.dimension, dtype=bool)
        own = [] if posterior.coordinates is None else posterior.coordinates.columns
        self._columns: list[np.ndarray] = []
        # Two indices of one variable are one set of columns.
        for columns in (own, *(list(levels.T) for levels in self._levels)):
            if columns and not self.effects[columns[0]].any():
                self._columns += columns
                self.effects[np.concatenate(columns)] = True
        entries = [selection.entries for selection in graph.selections]
        of_entries = pt.grad(graph.log_likelihood, [*entries, *graph.whole])
        length = graph.rows[0].shape[0]
        table = pt.concatenate(
            [each.reshape((length, -1)) for each in of_entries[: len(entries)]], axis=1
        )
        of_whole = [each.ravel() for each in of_entries[len(entries) :]]
        self._gradients = posterior.compile_for_setup(
            [*entries, *graph.whole, graph.length, *graph.rows],
            [table, pt.concatenate([pt.zeros(0), *of_whole])],
        )
        self._indices = posterior.compile_for_setup(
            graph.rows, [selection.index for selection in graph.selections]
        )

    @property
    def evaluations(self) -> int:
        """Gradients of all rows that a matrix takes."""
        return 2 * (int(self._stops[-1]) + len(self._whole))

    def at(
        self, position: np.ndarray, scale: np.ndarray, *, central: bool = False
    ) -> sparse.csr_array:
        """The matrix at a position.

        Parameters
        ----------
        position : numpy.ndarray, shape (d,)
        scale : numpy.ndarray, shape (d,)
            Rough standard deviations, which the differences are small against.
        central : bool
            As for `of_rows`.

        Raises
        ------
        ModelError
            Where the prior joins effects of different levels.
        """
        seen, jacobian = self._posterior.position_of_rows(position), self._jacobian(position)
        here = table, totals = self._gradients_at(seen, 0.0, 0.0)
        of_rows = self._of_rows(seen, _moved(scale, jacobian), None if central else here)
        gradient = np.bincount(self._places.ravel(), table.ravel(), minlength=len(seen))
        gradient[self._whole] += totals
        of_prior = self._of_prior(position, scale, gradient)
        if of_prior is None:
            raise ModelError("The prior joins effects of different levels.")
        return (jacobian.T @ of_rows @ jacobian + of_prior).tocsr()

    def _jacobian(self, position: np.ndarray) -> sparse.csr_array:
        """Derivatives of the position of the rows."""
        own = self._posterior.coordinates
        return sparse.eye_array(len(position)).tocsr() if own is None else own.jacobian(position)

    def have_scales(self, position: np.ndarray, scale: np.ndarray) -> bool:
        """Whether the prior of effects depends on coordinates that they have in common."""
        # At the initial point effects may be at their mean, where their scale makes no force.
        away = position + scale * np.random.default_rng(1962).standard_normal(len(position))
        of_prior = self._of_prior(away, scale, np.zeros(len(position)))
        return of_prior is not None and of_prior[~self.effects][:, self.effects].nnz > 0

    def around(
        self, mean: np.ndarray, shifts: Sequence[np.ndarray], scale: np.ndarray
    ) -> Curvature:
        """Mean curvature at points on both sides of a mean.

        Raises
        ------
        ValueError
            Where it is not finite.
        """
        return curvature_of_matrices(
            [(self.at(mean + each, scale) + self.at(mean - each, scale)) / 2 for each in shifts]
        )

    def of_rows(self, position: np.ndarray, scale: np.ndarray) -> sparse.csr_array:
        """The part of the matrix that comes from the rows, in terms of the position of the rows.

        Control variates need central differences, whose error is a millionth. A preconditioner does
        not, and the others take half of the gradients.
        """
        seen, scale = (
            self._posterior.position_of_rows(position),
            _moved(scale, self._jacobian(position)),
        )
        return self._of_rows(seen, scale)

    def _of_rows(
        self,
        position: np.ndarray,
        scale: np.ndarray,
        here: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> sparse.csr_array:
        """By forward differences from the gradients at the position, by central ones without."""
        d, width, whole = len(position), difference_width(self._posterior), self._whole
        count = self._places.shape[1]

        def derivative(step: float, of_entries: Any, of_whole: Any) -> list[np.ndarray]:
            ahead = self._gradients_at(position, step * of_entries, step * of_whole)
            behind = here or self._gradients_at(position, -step * of_entries, -step * of_whole)
            length = step if here else 2 * step
            return [(b - a) / length for a, b in zip(ahead, behind, strict=True)]

        # Each element is found once, and those on the diagonal are halved: the rest is symmetric.
        codes, values = [], []
        for first, second, of_pair, places in self._pairs:
            if first == 0:
                step = width * float(np.median(scale[self._places[:, second]]))
                table, _ = derivative(step, np.eye(count)[second], 0.0)
            weights = table[:, first] / (1 if first < second else 2)
            codes.append(of_pair)
            values.append(np.bincount(places, weights, minlength=len(of_pair)))
        for number, (place, step) in enumerate(zip(whole, width * scale[whole], strict=True)):
            table, totals = derivative(step, 0.0, np.eye(len(whole))[number])
            of_effects = np.zeros(d)
            for first in range(count):
                of_effects += np.bincount(self._places[:, first], table[:, first], minlength=d)
            codes += [np.arange(d) * d + place, whole * d + place]
            values += [of_effects, totals / 2]
        rows, columns = np.divmod(np.concatenate(codes), d)
        half = sparse.coo_array((np.concatenate(values), (rows, columns)), shape=(d, d)).tocsr()
        return half + half.T

    @cached_property
    def _places(self) -> np.ndarray:
        """Coordinates that each row selects, shape (rows, entries)."""
        return np.concatenate(
            [
                np.concatenate(
                    [
                        levels[index]
                        for levels, index in zip(self._levels, self._indices(*rows), strict=True)
                    ],
                    axis=1,
                )
                for rows in self._chunks()
            ]
        )

    @cached_property
    def _pairs(self) -> list[tuple[int, int, np.ndarray, np.ndarray]]:
        """Pairs of entries of a row, the elements that all rows have of them, and which a row has.

        They are the same at all positions. An element is numbered along the rows of the matrix.
        """
        d, k, places = self._posterior.dimension, self._places.shape[1], self._places
        numbers = [(f, s, places[:, f] * d + places[:, s]) for s in range(k) for f in range(s + 1)]
        return [(f, s, *np.unique(each, return_inverse=True)) for f, s, each in numbers]

    def _chunks(self) -> Iterator[list[np.ndarray]]:
        return self._posterior.chunks(self.evaluations // 2)

    def _gradients_at(
        self, position: np.ndarray, of_entries: np.ndarray | float, of_whole: np.ndarray | float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Gradient in the entries of each row, and in other coordinates of all rows, at a shift."""
        tables, totals, start = [], np.zeros(len(self._whole)), 0
        for rows in self._chunks():
            stop = start + len(rows[0])
            entries = position[self._places[start:stop]] + of_entries
            pieces = self._pieces(entries, position[self._whole] + of_whole)
            table, total = self._gradients(*pieces, np.asarray(stop - start), *rows)
            self._posterior.count_evaluated(stop - start)
            tables.append(table)
            totals += total
            start = stop
        return np.concatenate(tables), totals

    def _pieces(self, entries: np.ndarray, whole: np.ndarray) -> list[np.ndarray]:
        dtype = self._posterior.dtype
        pieces = [
            entries[:, start:stop].reshape(-1, *shape)
            for shape, (start, stop) in zip(self._entry_shapes, pairwise(self._stops), strict=True)
        ]
        stop = 0
        for shape in self._whole_shapes:
            start, stop = stop, stop + int(np.prod(shape))
            pieces.append(whole[start:stop].reshape(shape))
        return [np.array(piece, dtype=dtype) for piece in pieces]

    def _of_prior(
        self, position: np.ndarray, scale: np.ndarray, of_rows: np.ndarray
    ) -> sparse.csr_array | None:
        """Minus the Hessian of the part without rows, None where it joins different levels.

        With it is what the bend of the position of the rows adds, which have a gradient there.
        """
        d, width = len(position), difference_width(self._posterior)
        common = np.flatnonzero(~self.effects)
        columns = self._columns
        signs = np.random.default_rng(1960).choice([-1.0, 1.0], size=d)
        shifts = np.zeros((len(common) + 2 * len(columns), d))
        shifts[np.arange(len(common)), common] = 1.0
        of_ones, of_signs = np.split(shifts[len(common) :], 2)
        for one, other, column in zip(of_ones, of_signs, columns, strict=True):
            one[column], other[column] = 1.0, signs[column]
        shifts *= width * scale
        ends = np.concatenate([position - shifts, position + shifts])
        prior = self._posterior.prior_gradients(ends)
        bent = self._posterior.gradients_from_rows(ends, np.broadcast_to(of_rows, ends.shape))
        # Their sum would round small differences of the first away.
        halves = (np.split(each, 2) for each in (prior, bent))
        changes = sum(behind - ahead for behind, ahead in halves) / (2 * width)
        of_common, of_ones, of_signs = np.split(changes, [len(common), len(common) + len(columns)])
        found = sparse.coo_array(of_common / scale[common][:, None])
        parts = [(common[found.row], found.col, found.data)]
        joined = self.effects[found.col]
        parts.append((found.col[joined], common[found.row[joined]], found.data[joined]))
        for one, other, column in zip(of_ones, of_signs, columns, strict=True):
            of_level = np.zeros(d)
            for row in columns:
                if len(row) == len(column):
                    of_level[row] = signs[column] * one[row]
                    parts.append((row, column, one[row] / scale[column]))
            apart = np.abs(other - of_level)[self.effects]
            if not np.all(apart <= SAME * np.abs(one[column]).max()):
                return None
        rows, places, values = (np.concatenate(each) for each in zip(*parts, strict=True))
        total = sparse.coo_array((values, (rows, places)), shape=(d, d)).tocsr()
        return (total + total.T) / 2


def _moved(scale: np.ndarray, jacobian: sparse.csr_array) -> np.ndarray:
    """Rough standard deviations of the position of the rows."""
    return np.sqrt((jacobian**2) @ scale**2)


def curvature_of_matrices(matrices: Sequence[sparse.csr_array]) -> Curvature:
    """Mean curvature as a diagonal with the directions of largest and smallest curvature.

    Raises
    ------
    ValueError
        Where a matrix is not finite.
    """
    mean = sum(matrices[1:], matrices[0]) / len(matrices)
    if not np.isfinite(mean.data).all():
        raise ModelError(NOT_FINITE)
    dimension = mean.shape[0]
    diagonal = np.abs(mean.diagonal())
    scale = np.where(diagonal > 0, diagonal, 1.0) ** -0.5
    scaling = sparse.diags_array(scale)
    start = np.random.default_rng(1950).standard_normal(dimension)
    count = min(2 * MOST_DIRECTIONS, dimension // 2)
    try:
        values, vectors = eigsh(scaling @ mean @ scaling, k=count, which="BE", v0=start, tol=1e-2)
    except ArpackNoConvergence as failure:  # Those that did converge suffice.
        values, vectors = failure.eigenvalues, failure.eigenvectors
    ascending = np.argsort(values)
    values, vectors = values[ascending], vectors[:, ascending]
    other_mean = (dimension - values.sum()) / (dimension - len(values))
    # Where the log density bends upwards at some points a small curvature is known only up to its
    # standard error.
    scaled = scale[:, None] * vectors
    each = np.array([np.einsum("ij,ij->j", scaled, matrix @ scaled) for matrix in matrices])
    error = each.std(axis=0, ddof=1) / np.sqrt(len(matrices))
    relative = np.maximum(np.abs(values), np.maximum(error, SMALLEST)) / other_mean
    low = int(np.searchsorted(values, other_mean))
    return curvature_of_directions(scale / np.sqrt(other_mean), relative, vectors, low)


def sparse_curvature(posterior: Posterior) -> SparseCurvature | None:
    """The sparse curvature of a posterior, None where it has none or takes too many gradients."""
    if posterior.rows_are_groups or not posterior.has_rows:
        return None
    graph = selected_graph(posterior)
    if not graph.selections:
        return None
    found = SparseCurvature(posterior, graph)
    # The directions of largest curvature take at least two gradients each.
    few = np.count_nonzero(~found.effects) <= MOST_DIRECTIONS
    return found if few and found.evaluations <= 2 * MOST_DIRECTIONS else None
