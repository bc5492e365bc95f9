r"""Factors of sparse positive definite matrices, by elimination of many coordinates at a time.

Coordinates of which no two have an element, such as the levels of a factor, are eliminated
together. With their diagonal D, the elements B that join them to the others, and the matrix C of
these,

.. math:: \begin{pmatrix} D & B \\ B^\top & C \end{pmatrix} =
    \begin{pmatrix} I & \\ R^\top & I \end{pmatrix} \begin{pmatrix} D & \\ & S \end{pmatrix}
    \begin{pmatrix} I & R \\ & I \end{pmatrix}, \quad R = D^{-1} B, \quad S = C - B^\top R,

and so on with S, until it is full or no such coordinates are left (Bates et al., 2015). For classes
in schools in districts nothing is filled; of crossed factors the largest is eliminated. Elements of
the inverse follow backwards, those where the factors have some (Takahashi et al., 1973).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy import linalg, sparse

SCATTERED = 6
"""An element of a sparse matrix costs as much as this many of a dense one: 2 nanoseconds."""

ELEMENTS = 1_000_000
"""Elements of the inverse are looked up so many at a time, a compromise between memory, some arrays
of 8 MB, and the time of many short calls."""


@dataclass(frozen=True, eq=False)
class Order:
    """An order of elimination of the matrices with the same places of elements.

    Attributes
    ----------
    places : numpy.ndarray of int, shape (d,)
        Coordinates in this order.
    stops : tuple of int
        Each stage eliminates the coordinates between two of these, from 0 on. Those after the last
        are left, as a dense matrix.
    across : tuple of scipy.sparse.csr_array
        Zeros at the places, in this order, where the coordinates of each stage may have elements
        beside those that are left then.
    """

    places: np.ndarray
    stops: tuple[int, ...]
    across: tuple[sparse.csr_array, ...]

    @property
    def left(self) -> int:
        """Length of the dense matrix that is left."""
        return len(self.places) - self.stops[-1]


def elimination_order(
    matrix: sparse.csr_array, columns: np.ndarray | None = None, last: np.ndarray | None = None
) -> Order:
    """An order of elimination in which few elements are filled.

    Parameters
    ----------
    matrix : scipy.sparse.csr_array, shape (d, d)
        Its values do not matter.
    columns : numpy.ndarray of int, shape (d,), optional
        Numbers of sets of coordinates that may be eliminated together, as the levels of a factor,
        and -1 for other coordinates.
    last : numpy.ndarray of bool, shape (d,), optional
        Coordinates that are left to the end, in their order.
    """
    d = matrix.shape[0]
    columns = np.full(d, -1) if columns is None else columns
    stays = np.zeros(d, dtype=bool) if last is None else last
    left, pattern = np.arange(d), _ones(matrix + sparse.eye_array(d))
    order, beside = [], []
    while (eliminated := _stage(pattern, columns[left], stays[left])).any():
        across = pattern[eliminated][:, ~eliminated].tocsr()
        order.append(left[eliminated])
        pattern = _ones(pattern[~eliminated][:, ~eliminated] + across.T @ across)
        left = left[~eliminated]
        beside.append((across.indptr, left[across.indices]))
    # Its factor has the fewest elements where those with few neighbours come first.
    neighbours = np.where(stays[left], pattern.shape[0], np.diff(pattern.indptr))
    left = left[np.lexsort([neighbours, stays[left]])]
    stops = tuple(int(stop) for stop in np.cumsum([0, *map(len, order)]))
    places = np.concatenate([*order, left])
    number = np.argsort(places)
    across = tuple(
        sparse.csr_array(
            (np.zeros(len(columns)), number[columns] - stop, starts),
            shape=(len(starts) - 1, d - stop),
        )
        for stop, (starts, columns) in zip(stops[1:], beside, strict=True)
    )
    return Order(places, stops, across)


def elements_of_factor(matrix: sparse.csr_array) -> int:
    """Elements of the inverse factor where coordinates with few neighbours are eliminated first.

    Column j of it has elements where the elimination of j, of the first coordinate that depends on
    it, and so on leads. The tree is that of Liu (1990), which takes no elimination.
    """
    order = np.argsort(np.diff(matrix.indptr), kind="stable")
    lower = sparse.tril(matrix[order][:, order], -1).tocsr()
    starts, places = lower.indptr.tolist(), lower.indices.tolist()
    parents, ancestors = [-1] * len(order), [-1] * len(order)
    for later in range(len(order)):
        for place in places[starts[later] : starts[later + 1]]:
            while ancestors[place] not in (-1, later):
                ancestors[place], place = later, ancestors[place]
            if ancestors[place] == -1:
                ancestors[place] = parents[place] = later
    depths = [1] * (len(order) + 1)
    for place in range(len(order) - 1, -1, -1):
        if parents[place] >= 0:
            depths[place] = depths[parents[place]] + 1
    return sum(depths[: len(order)])


def _stage(pattern: sparse.csr_array, columns: np.ndarray, stays: np.ndarray) -> np.ndarray:
    """Coordinates without elements between them that are eliminated next.

    There are none where the rest is so full that products of dense matrices are faster.
    """
    degrees, d = np.diff(pattern.indptr), pattern.shape[0]
    chosen = np.zeros(d, dtype=bool)
    mean = degrees.mean() if d else 0.0
    labels, numbers = np.unique(columns, return_inverse=True)
    means = np.bincount(numbers, degrees) / np.bincount(numbers)
    for label in np.argsort(means, kind="stable"):
        column = numbers == label
        if labels[label] < 0 or means[label] > mean or (column & stays).any():
            continue
        if pattern[column][:, column].nnz == column.sum():
            is_dense = 3 * SCATTERED * np.square(degrees[column], dtype=float).sum() > (
                float(d) ** 3 - float(d - column.sum()) ** 3
            )
            return column & ~is_dense
    if SCATTERED * pattern.nnz >= d**2:
        return chosen
    # Otherwise those with the fewest neighbours, none of which are taken.
    key = np.empty(d)
    key[np.argsort(degrees, kind="stable")] = np.arange(d)
    may = (degrees <= mean) & ~stays
    rows = np.repeat(np.arange(d), degrees)
    off = rows != pattern.indices
    while may.any():
        keys = np.where(off & may[pattern.indices], key[pattern.indices], d)
        least = may & (key < np.minimum.reduceat(keys, pattern.indptr[:-1]))
        chosen |= least
        may &= ~(least | (pattern @ least > 0))
    return chosen


def _ones(matrix: sparse.csr_array) -> sparse.csr_array:
    pattern = matrix.tocsr()
    pattern.data = np.ones(pattern.nnz)
    return pattern


def _with_places(matrix: sparse.csr_array, places: sparse.csr_array) -> sparse.csr_array:
    """A matrix with the zeros of another one beside its own elements."""
    parts = matrix.tocoo(), places.tocoo()
    values, rows, columns = (
        np.concatenate(each)
        for each in zip(*((part.data, *part.coords) for part in parts), strict=True)
    )
    return sparse.coo_array((values, (rows, columns)), shape=matrix.shape).tocsr()


class Elimination:
    """Factors of a symmetric positive definite matrix.

    Parameters
    ----------
    matrix : scipy.sparse.csr_array, shape (d, d)
    order : Order, optional
        That of a matrix with the same places of elements, or more of them.

    Raises
    ------
    scipy.linalg.LinAlgError
        Where the matrix is not positive definite.

    Examples
    --------
    >>> matrix = sparse.csr_array([[2.0, 0.0, 1.0], [0.0, 3.0, 1.0], [1.0, 1.0, 4.0]])
    >>> factors = Elimination(matrix)
    >>> factors.solve(np.array([3.0, 4.0, 6.0])).round(12)
    array([1., 1., 1.])
    >>> round(float(np.exp(factors.log_determinant())), 12)
    19.0
    """

    def __init__(self, matrix: sparse.csr_array, order: Order | None = None):
        self.order = order = order or elimination_order(matrix)
        left = matrix[order.places][:, order.places].tocsr()
        self._pivots, self._ratios = [], []
        for (start, stop), places in zip(pairwise(order.stops), order.across, strict=True):
            length = stop - start
            pivots = left.diagonal()[:length]
            if not np.all(pivots > 0):
                raise linalg.LinAlgError("it has a pivot that is not positive")
            across = left[:length, length:]
            ratio = sparse.diags_array(1 / pivots) @ across
            left = left[length:, length:] - across.T.tocsr() @ ratio
            self._pivots.append(pivots)
            # An element may be zero where its derivative, which the inverse there gives, is not.
            has_all = ratio.nnz == places.nnz
            self._ratios.append(ratio.tocsr() if has_all else _with_places(ratio, places))
        try:
            self._root = linalg.cholesky(left.toarray(), lower=True)
        except ValueError as error:
            raise linalg.LinAlgError("it is not finite") from error

    def log_determinant(self, without: int = 0) -> float:
        """Log determinant, or that of the matrix without so many coordinates at the end."""
        root = np.diag(self._root)[: len(self._root) - without]
        return float(sum(np.log(each).sum() for each in self._pivots) + 2 * np.log(root).sum())

    def solve(self, vector: np.ndarray) -> np.ndarray:
        """Product of the inverse with a vector."""
        order, result, found = self.order, np.empty(len(vector)), vector[self.order.places]
        stages = list(zip(pairwise(order.stops), self._pivots, self._ratios, strict=True))
        for (start, stop), _, ratio in stages:
            found[stop:] -= ratio.T @ found[start:stop]
        end = order.stops[-1]
        found[end:] = linalg.cho_solve((self._root, True), found[end:])
        for (start, stop), pivots, ratio in reversed(stages):
            found[start:stop] = found[start:stop] / pivots - ratio @ found[stop:]
        result[order.places] = found
        return result

    def root_at_end(self, count: int) -> np.ndarray:
        r"""Upper C with C C⊤ the part of the inverse of so many coordinates at the end."""
        start = len(self._root) - count
        return linalg.solve_triangular(self._root[start:, start:], np.eye(count), lower=True).T

    def inverse_at(self, rows: np.ndarray, columns: np.ndarray, without: int = 0) -> np.ndarray:
        """Elements of the inverse where the matrix has some.

        `without` is as for `log_determinant`; elements of these coordinates are zero.
        """
        kept = len(self._root) - without
        of_left = np.zeros_like(self._root)
        if kept:
            lower, _ = linalg.lapack.dpotri(self._root[:kept, :kept], lower=1)
            of_left[:kept, :kept] = lower + np.tril(lower, -1).T
        end, number = self.order.stops[-1], np.argsort(self.order.places)
        known: list[tuple[int, int, np.ndarray, sparse.csr_array]] = []

        def elements(first: np.ndarray, second: np.ndarray) -> np.ndarray:
            values = np.empty(len(first))
            done = first >= end
            values[done] = of_left[first[done] - end, second[done] - end]
            for start, stop, diagonal, across in known:
                here = (first >= start) & (first < stop)
                same = here & (first == second)
                values[same] = diagonal[first[same] - start]
                apart = here & (second >= stop)
                if apart.any():
                    values[apart] = across[first[apart] - start, second[apart] - stop]
            return values

        stages = zip(pairwise(self.order.stops), self._pivots, self._ratios, strict=True)
        for (start, stop), pivots, ratio in reversed(list(stages)):
            products = np.zeros(ratio.nnz)
            lengths = np.diff(ratio.indptr)
            for length in np.unique(lengths[lengths > 0]):
                same = np.flatnonzero(lengths == length)
                for part in np.array_split(same, 1 + len(same) * length**2 // ELEMENTS):
                    places = ratio.indptr[part][:, None] + np.arange(length)
                    near = ratio.indices[places].astype(int)
                    first, second = near[:, :, None], near[:, None, :]
                    if stop == end:
                        square = of_left.take(len(of_left) * first + second)
                    else:
                        low, high = (
                            stop + np.minimum(first, second),
                            stop + np.maximum(first, second),
                        )
                        square = elements(low.ravel(), high.ravel()).reshape(low.shape)
                    products[places] = (square @ ratio.data[places][:, :, None])[:, :, 0]
            across = sparse.csr_array((-products, ratio.indices, ratio.indptr), ratio.shape)
            own = np.repeat(np.arange(len(pivots)), lengths)
            diagonal = 1 / pivots + np.bincount(own, products * ratio.data, minlength=len(pivots))
            known.append((start, stop, diagonal, across))
        rows, columns = number[rows], number[columns]
        return elements(np.minimum(rows, columns), np.maximum(rows, columns))

    @property
    def root(self) -> sparse.csr_array:
        """F with A = F F⊤."""
        found = sparse.csr_array(self._root.T)
        for pivots, ratio in zip(reversed(self._pivots), reversed(self._ratios), strict=True):
            scaling = sparse.diags_array(np.sqrt(pivots))
            found = sparse.block_array([[scaling, scaling @ ratio], [None, found]]).tocsr()
        return found.T.tocsr()[np.argsort(self.order.places)]

    @property
    def inverse_root(self) -> sparse.csr_array:
        """Inverse of `root`."""
        identity = np.eye(len(self._root))
        found = sparse.csr_array(linalg.solve_triangular(self._root, identity, lower=True).T)
        for pivots, ratio in zip(reversed(self._pivots), reversed(self._ratios), strict=True):
            scaling = sparse.diags_array(1 / np.sqrt(pivots))
            found = sparse.block_array([[scaling, -(ratio @ found)], [None, found]]).tocsr()
        return found.T.tocsc()[:, np.argsort(self.order.places)].tocsr()
