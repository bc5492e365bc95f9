r"""Curvature of rows that each depend on few coordinates, from products with a few directions.

A row of a hierarchical model depends on the effects of its own groups and on the parameters of all
groups. The effects of two groups are then in no row together, so one direction may have both: each
element of the product is due to one of them. Coordinates that are in a direction together
have a colour (Curtis, Powell and Reid 1974). Those that meet most others have one each, since by
symmetry their columns tell their rows (Coleman and Moré 1984).

References
----------
A. R. Curtis, M. J. D. Powell and J. K. Reid (1974). On the estimation of sparse Jacobian matrices.
*IMA Journal of Applied Mathematics* 13, 117-119.

T. F. Coleman and J. J. Moré (1984). Estimation of sparse Hessian matrices and graph coloring
problems. *Mathematical Programming* 28, 243-270.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from scipy import sparse

FEWEST_COORDINATES = 50
"""Shorter positions have so few columns that colours save no time."""

LARGEST_PART = 0.25
"""Colours are used where they are at most this part of the number of coordinates."""

LARGEST_ERROR = 1e-3
"""The product of the matrix with a random vector may differ from that of the curvature by this part
of the elements of the row. Differences over finite widths leave 1e-6, and a pattern that
lacks elements leaves errors of about their size."""

PROBES = 3
"""Curvatures are compared along so many random directions."""

ROUNDING = 1e-6
"""It may also differ by this part of the largest row, as rounding makes it."""


@dataclass(frozen=True, eq=False)
class Colouring:
    """Coordinates that are in a direction together, and the elements that they tell.

    Attributes
    ----------
    pattern : scipy.sparse.csr_array of bool, shape (d, d)
        Elements of the curvature that may differ from zero.
    alone : numpy.ndarray of bool, shape (d,)
        Coordinates that have a colour of their own.
    colours : numpy.ndarray of int, shape (d,)
        Number of the colour of each coordinate.
    """

    pattern: sparse.csr_array
    alone: np.ndarray
    colours: np.ndarray

    @property
    def count(self) -> int:
        """Number of colours."""
        return int(self.colours.max()) + 1


def pattern_of(gradients: Iterable[np.ndarray], most: float) -> sparse.csr_array | None:
    """Pairs of coordinates that are in a row together, from gradients of single rows.

    Parameters
    ----------
    gradients : iterable of numpy.ndarray, shape (rows, d)
        At a position that is no special one. A coordinate is in a row where its gradient there is
        not zero.
    most : float
        Largest number of colours that is of use. The coordinates of a row have as many.

    Returns
    -------
    scipy.sparse.csr_array or None
        None where a row has more coordinates.
    """
    pattern = None
    for of_rows in gradients:
        if np.count_nonzero(of_rows, axis=1).max() > most:
            return None
        touched = sparse.csr_array((of_rows != 0).astype(np.float32))
        together = touched.T @ touched
        pattern = together if pattern is None else pattern + together
    return sparse.csr_array(pattern != 0)


def coloured(pattern: sparse.csr_array) -> Colouring:
    """Colours of coordinates, those with most neighbours alone, so that they are few.

    Examples
    --------
    >>> arrow = np.eye(6, dtype=bool)
    >>> arrow[0] = arrow[:, 0] = True
    >>> coloured(sparse.csr_array(arrow)).colours
    array([0, 1, 1, 1, 1, 1])
    """
    neighbours = pattern.sum(axis=1)
    bounds = np.unique(neighbours)
    # Few bounds are tried, since a model has few kinds of coordinates.
    chosen = bounds[np.unique(np.linspace(0, len(bounds) - 1, 8).astype(int))]
    colourings = [_with_alone(pattern, neighbours > bound) for bound in chosen]
    return min(colourings, key=lambda colouring: colouring.count)


def _with_alone(pattern: sparse.csr_array, alone: np.ndarray) -> Colouring:
    """Colours where given coordinates have one each, and others greedily."""
    colours = np.full(len(alone), -1)
    colours[alone] = np.arange(alone.sum())
    others = np.flatnonzero(~alone)
    among = sparse.csr_array(pattern[others][:, others].astype(np.float32))
    meet = sparse.csr_array(among @ among)  # Two columns with an element in the same row.
    greedy = np.full(len(others), -1)
    for place in range(len(others)):
        near = greedy[meet.indices[meet.indptr[place] : meet.indptr[place + 1]]]
        free = np.setdiff1d(np.arange(len(near) + 1), near)
        greedy[place] = free[0]
    colours[others] = alone.sum() + greedy
    return Colouring(pattern, alone, colours)


def coloured_curvature(
    products: Callable[[np.ndarray], np.ndarray], scale: np.ndarray, colouring: Colouring
) -> np.ndarray | None:
    """A curvature matrix from its products with a direction for each colour.

    Parameters
    ----------
    products : callable
        Products of the matrix with several directions, both of shape (directions, d).
    scale : numpy.ndarray, shape (d,)
        Rough standard deviations, in which directions have elements of size one.
    colouring : Colouring

    Returns
    -------
    numpy.ndarray, shape (d, d), or None
        None where the curvature has elements that the pattern lacks.
    """
    d, count = len(scale), colouring.count
    directions = np.zeros((count + PROBES, d))
    directions[colouring.colours, np.arange(d)] = scale
    # Factors that differ, since equal ones may hide an element that two others have taken up.
    rng = np.random.default_rng(1974)
    signs = rng.choice([-1.0, 1.0], size=(PROBES, d))
    directions[count:] = scale * signs * rng.uniform(0.5, 1.5, size=(PROBES, d))
    found = products(directions)
    rows, columns = colouring.pattern.nonzero()
    told = colouring.alone[columns] | ~colouring.alone[rows]
    rows, columns = rows[told], columns[told]
    curvature = np.zeros((d, d))
    curvature[rows, columns] = found[colouring.colours[columns], rows] / scale[columns]
    # Elements that are told once, from the columns that are alone.
    once = np.ix_(~colouring.alone, colouring.alone)
    curvature[np.ix_(colouring.alone, ~colouring.alone)] = curvature[once].T
    curvature = 0.5 * (curvature + curvature.T)
    # In units of the scales, and each coordinate beside the elements of its own row.
    error = np.abs(directions[count:] @ curvature - found[count:])
    size = np.abs(curvature) @ scale
    if not (error <= LARGEST_ERROR * size + ROUNDING * (scale * size).max() / scale).all():
        return None
    return curvature
