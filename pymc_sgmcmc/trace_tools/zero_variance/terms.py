r"""Functions of expectation zero under the posterior, from positions and gradients.

For a polynomial Q, and a density :math:`\pi` with light tails,

.. math:: h = -\tfrac12 \Delta Q + \nabla Q \cdot z, \qquad z = -\tfrac12 \nabla \log \pi

has :math:`\mathrm{E}_\pi[h] = 0` (Mira, Solgi and Imparato 2013), also with an unbiased estimate
of the gradient that is drawn after the position (Friel, Mira and Oates 2016). Baker et al. (2019),
§4, print :math:`\Delta Q + \nabla Q \cdot z` with :math:`z = f / 2`, f being minus the log
posterior: the gradient is missing in z, and the factor of the Laplacian is wrong. As printed, the
term of :math:`Q = \theta^2` has mean 3 in place of 0 on a standard normal law.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import combinations_with_replacement
from math import comb, factorial, prod, sqrt

import numpy as np


def count_terms(dimension: int, order: int) -> int:
    """Number of monomials of d coordinates with degrees 1 to `order`.

    Examples
    --------
    >>> count_terms(3, 1), count_terms(3, 2)
    (3, 9)
    """
    return comb(dimension + order, order) - 1


def monomials(dimension: int, order: int) -> list[np.ndarray]:
    """Monomials by degree: row t of entry q - 1 has the q coordinates that are multiplied.

    Examples
    --------
    >>> monomials(2, 2)[1].tolist()
    [[0, 0], [0, 1], [1, 1]]
    """
    return [
        np.array(list(combinations_with_replacement(range(dimension), degree)), dtype=np.intp)
        for degree in range(1, order + 1)
    ]


def stein_terms(positions: np.ndarray, gradients: np.ndarray, order: int) -> np.ndarray:
    r"""The function h of each monomial Q.

    .. math:: h = -\tfrac12 (\Delta Q + \nabla Q \cdot \nabla \log \pi)

    A monomial :math:`\theta^\alpha` of degree q is divided by :math:`q \sqrt{\alpha!}`. A
    rotation of the coordinates then rotates the terms of a degree among themselves, and on a
    standard normal law all degrees have leading terms of one variance: ridge and principal
    components do not depend on the choice of the root of a covariance, nor on the degree.

    Parameters
    ----------
    positions, gradients : numpy.ndarray, shape (n, d)
        Gradients of *plus* the log posterior.
    order : int
        Largest degree.

    Returns
    -------
    numpy.ndarray, shape (n, p)
        p is `count_terms`, in the order of `monomials`.

    Examples
    --------
    Standard normal, where the gradient is minus the position: half the position, and for the
    square, divided by :math:`2 \sqrt{2}`, its distance from the mean of the square.

    >>> import numpy as np
    >>> stein_terms(np.array([[2.0]]), np.array([[-2.0]]), 2)
    array([[1.        , 1.06066017]])
    """
    parts = []
    for table, weights in _weighted_monomials(positions.shape[1], order):
        degree = table.shape[1]
        total = np.zeros((len(positions), len(table)))
        for place in range(degree):
            # The derivative by one factor of a product: with equal factors each gives its own.
            others = np.delete(table, place, axis=1)
            total += gradients[:, table[:, place]] * _products(positions, others)
            for second in range(degree):
                if second != place:
                    same = table[:, place] == table[:, second]
                    others = np.delete(table[same], [place, second], axis=1)
                    total[:, same] += _products(positions, others)
        parts.append(-0.5 * weights * total)
    return np.concatenate(parts, axis=1)


def _products(positions: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Products of the coordinates in each row of a table, shape (n, rows); 1 for empty rows."""
    product = np.ones((len(positions), len(table)))
    for place in range(table.shape[1]):
        product *= positions[:, table[:, place]]
    return product


@cache
def _weighted_monomials(dimension: int, order: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Monomials of each degree, and by what they are multiplied."""
    return [
        (table, np.array([1 / (len(row) * _root_of_factorials(row)) for row in table.tolist()]))
        for table in monomials(dimension, order)
    ]


def _root_of_factorials(row: list[int]) -> float:
    return sqrt(prod(factorial(number) for number in Counter(row).values()))
