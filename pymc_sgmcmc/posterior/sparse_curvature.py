r"""The curvature of long positions of which each row has few coordinates, as a sparse matrix.

Rows with an effect for each of some factors, as of a student, a lecturer and a department, have a
few entries of long variables each. Their log density in terms of these entries is a function of a
few numbers a row, whose second derivatives are differences of its gradient: one for each entry that
a row has and for each coordinate that all rows have, whatever the number of levels. The prior joins
an effect to coordinates that all levels have in common, such as the log of their scale, and to
effects of the same level.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytensor.tensor as pt
from scipy import sparse

from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.posterior.agreement import agree
from pymc_sgmcmc.posterior.posterior import Posterior
from pymc_sgmcmc.posterior.selected import SelectedGraph, places_of

SAME = 1e-3
"""Two differences of gradients are equal up to this part, which is far above their rounding."""


NONE = np.empty(0, dtype=int)
"""No coordinates."""


type Derivative = Callable[[float, Any, Any], list[np.ndarray]]


class SparseCurvature:
    """Minus the Hessian of the log density of a posterior whose rows select entries.

    Parameters
    ----------
    posterior : Posterior
    graph : SelectedGraph
    within : numpy.ndarray of bool, shape (d,), optional
        The coordinates of which the matrix is wanted, all by default. Elements of others take no
        gradients where these are not selected, and are not found.

    Attributes
    ----------
    within : numpy.ndarray of bool, shape (d,)
        As above. It may be narrowed before `elements` are used.
    effects : numpy.ndarray of bool, shape (d,)
        Whether a coordinate is an entry that rows select.
    seen : numpy.ndarray of bool, shape (d,)
        Whether it is such an entry, or rows see it otherwise. They see no scales where effects have
        coordinates of their own.
    """

    def __init__(
        self, posterior: Posterior, graph: SelectedGraph, within: np.ndarray | None = None
    ):
        self._posterior = posterior
        self.within = np.ones(posterior.dimension, dtype=bool) if within is None else within
        self._levels, self._whole = places_of(posterior, graph)
        shapes = dict(zip(posterior.layout.variables, posterior.layout.shapes, strict=True))
        self._whole_shapes = [shapes[variable] for variable in graph.whole]
        self._entry_shapes = [each.entries.type.shape[1:] for each in graph.selections]
        self._stops = np.cumsum([0, *(levels.shape[1] for levels in self._levels)])
        # Two indices of one variable are one set of columns.
        of_variables = {
            selection.variable: levels
            for selection, levels in zip(graph.selections, self._levels, strict=True)
        }
        own = posterior.coordinates
        moved = [] if own is None else [each.variable for each in own.effects]
        self._columns = [
            column
            for variable, levels in of_variables.items()
            if variable not in moved
            for column in levels.T
        ] + ([] if own is None else [each for each in own.columns if own.apart[each].all()])
        self.effects = np.zeros(posterior.dimension, dtype=bool)
        for column in self._columns:
            self.effects[column] = True
        self.seen = self.effects.copy()
        for places in (*self._levels, self._whole):
            self.seen[places] = True
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
        self.indices = posterior.compile_for_setup(
            graph.rows, [selection.index for selection in graph.selections]
        )

    @property
    def entries(self) -> int:
        """Numbers that a row selects."""
        return int(self._stops[-1])

    @property
    def evaluations(self) -> int:
        """Gradients of all rows that a matrix takes."""
        return 2 * (self.entries + len(self._whole))

    def at(
        self,
        position: np.ndarray,
        scale: np.ndarray,
        *,
        central: bool = False,
        border: sparse.csr_array | None = None,
    ) -> sparse.csr_array:
        """The matrix at a position.

        Parameters
        ----------
        position : numpy.ndarray, shape (d,)
        scale : numpy.ndarray, shape (d,)
            Rough standard deviations, which the differences are small against.
        central : bool
            As for `of_rows`.
        border : sparse array, optional
            What rows say of coordinates that all have, where it is not computed here.

        Raises
        ------
        ModelError
            Where the prior joins effects of different levels.
        """
        seen, jacobian = self._posterior.position_of_rows(position), self._jacobian(position)
        gradient, here = np.zeros(len(seen)), None
        if jacobian is not None or not central:
            here = table, totals = self._gradients_at(seen, 0.0, 0.0)
            gradient = np.bincount(self._places.ravel(), table.ravel(), minlength=len(seen))
            gradient[self._whole] += totals
        derivative = self._derivatives(seen, None if central else here)
        of_rows = self._of_rows(derivative, _moved(scale, jacobian), border)
        of_prior = self._of_prior(position, scale, gradient)
        if of_prior is None:
            raise ModelError("The prior joins effects of different levels.")
        if jacobian is not None:
            of_rows = jacobian.T @ of_rows @ jacobian
        return (of_rows + of_prior).tocsr()

    def _jacobian(self, position: np.ndarray) -> sparse.csr_array | None:
        """Derivatives of the position of the rows, None where it is the position."""
        own = self._posterior.coordinates
        return None if own is None else own.jacobian(position)

    def have_scales(self, position: np.ndarray, scale: np.ndarray) -> bool:
        """Whether the prior of effects depends on coordinates that they have in common."""
        # At the initial point effects may be at their mean, where their scale makes no force.
        away = position + scale * np.random.default_rng(1962).standard_normal(len(position))
        of_prior = self._of_prior(away, scale, np.zeros(len(position)))
        return of_prior is not None and of_prior[~self.effects][:, self.effects].nnz > 0

    def around(
        self, mean: np.ndarray, shifts: Sequence[np.ndarray], scale: np.ndarray
    ) -> list[sparse.csr_array]:
        """Mean of the matrices on both sides of a mean, for each shift.

        The border, with two passes for each of its coordinates, is that of the first points alone
        where it would take more passes than the entries that rows select.
        """
        entries, whole = self.entries, len(self._whole)
        border, found = None, []
        if entries < whole:
            few = shifts[: max(1, len(shifts) * entries // whole)]
            ends = [mean + side * each for each in few for side in (1, -1)]
            first, *others = (self._border_at(end, scale) for end in ends)
            border = sum(others, first) / len(ends)
        for each in shifts:
            pair = [self.at(mean + side * each, scale, border=border) for side in (1, -1)]
            found.append((pair[0] + pair[1]) / 2)
        return found

    def of_rows(self, position: np.ndarray, scale: np.ndarray) -> sparse.csr_array:
        """The part of the matrix that comes from the rows, in terms of the position of the rows.

        Control variates need central differences, whose error is a millionth. A preconditioner does
        not, and the others take half of the gradients.
        """
        derivative = self._derivatives(self._posterior.position_of_rows(position))
        return self._of_rows(derivative, _moved(scale, self._jacobian(position)))

    def _of_rows(
        self, derivative: Derivative, scale: np.ndarray, border: sparse.csr_array | None = None
    ) -> sparse.csr_array:
        width, d = self._posterior.difference_width, len(scale)
        count = self._places.shape[1]
        # Each element is found once, and those on the diagonal are halved: the rest is symmetric.
        codes, values = [], []
        for first, second, of_pair, places in self._pairs:
            if first == 0:
                step = width * float(np.median(scale[self._places[:, second]]))
                table, _ = derivative(step, np.eye(count)[second], 0.0)
            weights = table[:, first] / (1 if first < second else 2)
            codes.append(of_pair)
            values.append(np.bincount(places, weights, minlength=len(of_pair)))
        half = _of_codes(codes, values, d)
        if border is None:
            border = self._border(derivative, scale)
        return half + half.T + border

    def _border(self, derivative: Derivative, scale: np.ndarray) -> sparse.csr_array:
        """What rows say of the coordinates that all of them have, and of these and entries."""
        d, whole = len(scale), self._whole
        codes, values = [NONE], [np.empty(0)]
        steps = self._posterior.difference_width * scale[whole]
        for number, (place, step) in enumerate(zip(whole, steps, strict=True)):
            if not self.within[place]:
                continue
            table, totals = derivative(step, 0.0, np.eye(len(whole))[number])
            of_effects = np.zeros(d)
            for first in range(self._places.shape[1]):
                of_effects += np.bincount(self._places[:, first], table[:, first], minlength=d)
            codes += [np.arange(d) * d + place, whole * d + place]
            values += [of_effects, totals / 2]
        half = _of_codes(codes, values, d)
        return half + half.T

    def _border_at(self, position: np.ndarray, scale: np.ndarray) -> sparse.csr_array:
        seen = self._posterior.position_of_rows(position)
        derivative = self._derivatives(seen, self._gradients_at(seen, 0.0, 0.0))
        return self._border(derivative, _moved(scale, self._jacobian(position)))

    def _derivatives(
        self, seen: np.ndarray, here: tuple[np.ndarray, np.ndarray] | None = None
    ) -> Derivative:
        """Function of a step, of the entries of a row that move and of the other coordinates.

        By forward differences from the gradients at the position, by central ones without.
        """

        def derivative(step: float, of_entries: Any, of_whole: Any) -> list[np.ndarray]:
            ahead = self._gradients_at(seen, step * of_entries, step * of_whole)
            behind = here or self._gradients_at(seen, -step * of_entries, -step * of_whole)
            length = step if here else 2 * step
            return [(b - a) / length for a, b in zip(ahead, behind, strict=True)]

        return derivative

    @property
    def _common(self) -> np.ndarray:
        """Wanted coordinates that rows do not select."""
        return np.flatnonzero(~self.effects & self.within)

    @property
    def columns(self) -> np.ndarray:
        """Number of the column of effects that each coordinate is in, and -1 for others."""
        numbers = np.full(len(self.effects), -1)
        for number, column in enumerate(self._columns):
            numbers[column] = number
        return numbers

    @cached_property
    def elements(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows and columns of the wanted elements, each for a pair of entries of rows or priors."""
        rows, columns = zip(*self._elements_of_rows, *self._elements_of_prior, strict=True)
        return np.concatenate(rows), np.concatenate(columns)

    @cached_property
    def _elements_of_rows(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Rows and columns of the elements of each of `_pairs`, none of these of other ones."""
        both = [np.divmod(codes, self._posterior.dimension) for _, _, codes, _ in self._pairs]
        return [each if self.within[np.array(each)].all() else (NONE, NONE) for each in both]

    @cached_property
    def _elements_of_prior(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Rows and columns of the elements along a column and beside a common coordinate."""
        wanted = [column for column in self._columns if self.within[column].all()]
        everywhere = np.flatnonzero(self.within)
        return [(everywhere, np.full(len(everywhere), each)) for each in self._common] + [
            (row, column) for column in wanted for row in wanted if len(row) == len(column)
        ]

    def slope_of_trace(
        self, position: np.ndarray, scale: np.ndarray, weights: np.ndarray
    ) -> np.ndarray:
        r"""Gradient of :math:`\mathrm{tr}(W H)`, shape (d,), by the position of H alone.

        The trace is a sum of second derivatives along pairs of vectors, so its gradient is a sum of
        differences of gradients of all rows: four for each entry that a row has, and for each
        wanted coordinate that all rows have.

        Parameters
        ----------
        position, scale
            As of `at`.
        weights : numpy.ndarray
            The `elements` of the symmetric matrix W.
        """
        d, width, places = len(position), self._posterior.difference_width, self._places
        signs = list(product((1, -1), repeat=2))
        rest, tables = weights, np.zeros((places.shape[1], *places.shape))
        for (first, second, _, element), (rows, _) in zip(
            self._pairs, self._elements_of_rows, strict=True
        ):
            values, rest = np.split(rest, [len(rows)])
            if len(rows):
                tables[first, :, second] = tables[second, :, first] = values[element]
        table, total = np.zeros(places.shape), np.zeros(d)
        for number, of_number in enumerate(tables):
            step = float(np.median(scale[places[:, number]]))
            one, other = width * step * np.eye(len(tables))[number], width / step * of_number
            for first, second in signs if of_number.any() else ():
                shifted = self._gradients_at(position, first * one + second * other, 0.0)
                table += first * second * shifted[0]
                total[self._whole] += first * second * shifted[1]
        of_rows = set(self._common) & set(self._whole)
        for row, column in self._elements_of_prior:
            values, rest = np.split(rest, [len(row)])
            one, other = np.zeros((2, d))
            one[column] = width * scale[column]
            # An element of a level and of what levels have in common is there on both sides.
            other[row] = values * np.where(self.effects[row] > self.effects[column], 2, 1)
            other[row] *= width / scale[column]
            shifts = np.array([first * one + second * other for first, second in signs])
            total += np.prod(signs, axis=1) @ self._posterior.prior_gradients(position + shifts)
            if values.any() and column[0] in of_rows:
                for (first, second), shift in zip(signs, shifts, strict=True):
                    shifted = self._gradients_at(position, shift[places], shift[self._whole])
                    table += first * second * shifted[0]
                    total[self._whole] += first * second * shifted[1]
        for place, slopes in zip(places.T, table.T, strict=True):
            total += np.bincount(place, slopes, minlength=d)
        return -total / (2 * width) ** 2

    @cached_property
    def _places(self) -> np.ndarray:
        """Coordinates that each row selects, shape (rows, entries)."""
        return np.concatenate(
            [
                np.concatenate(
                    [
                        levels[index]
                        for levels, index in zip(self._levels, self.indices(*rows), strict=True)
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
            shift = of_entries[start:stop] if np.ndim(of_entries) == 2 else of_entries  # type: ignore[index]
            entries = position[self._places[start:stop]] + shift
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
        d, width = len(position), self._posterior.difference_width
        common, columns = self._common, self._columns
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
            size, of_effects = np.abs(one[column]).max(), self.effects
            if not agree(other[of_effects], of_level[of_effects], size, SAME, finite=True):
                return None
        rows, places, values = (np.concatenate(each) for each in zip(*parts, strict=True))
        total = sparse.coo_array((values, (rows, places)), shape=(d, d)).tocsr()
        return (total + total.T) / 2


def _of_codes(
    codes: Sequence[np.ndarray], values: Sequence[np.ndarray], d: int
) -> sparse.csr_array:
    """Matrix of elements that are numbered along its rows."""
    rows, columns = np.divmod(np.concatenate(codes), d)
    return sparse.coo_array((np.concatenate(values), (rows, columns)), shape=(d, d)).tocsr()


def _moved(scale: np.ndarray, jacobian: sparse.csr_array | None) -> np.ndarray:
    """Rough standard deviations of the position of the rows."""
    return scale if jacobian is None else np.sqrt((jacobian**2) @ scale**2)
