r"""Terms: functions of positions and gradients whose expectation under the posterior is zero.

For a polynomial Q, and a density :math:`\pi` with light tails,

.. math:: h = -\tfrac12 \Delta Q + \nabla Q \cdot z, \qquad z = -\tfrac12 \nabla \log \pi

has :math:`\mathrm{E}_\pi[h] = 0` (Mira, Solgi and Imparato 2013). This holds also for an unbiased
estimate of the gradient that is drawn after the position (Friel, Mira and Oates 2016). Baker et al.
(2019), §4, print :math:`\Delta Q + \nabla Q \cdot z` with :math:`z = f / 2`, where f is minus the
log posterior. The gradient is missing in this z, and the factor of the Laplacian is wrong. Even
with the gradient of f in z, the term of :math:`Q = \theta^2` would have mean 3 and not 0 on a
standard normal law.
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
    """Monomials by degree, as the numbers of the coordinates that are multiplied.

    Entry q - 1 of the list has a row of q numbers for each monomial of degree q.

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
    r"""The term h of each monomial Q.

    .. math:: h = -\tfrac12 (\Delta Q + \nabla Q \cdot \nabla \log \pi)

    A monomial :math:`\theta^\alpha` of degree q is divided by :math:`q \sqrt{\alpha!}`. A
    rotation of the coordinates then rotates the terms of each degree among themselves, and on a
    standard normal law the leading parts of all terms have the same variance. Hence ridge
    regression and principal components do not depend on the choice of the root of a covariance,
    and prefer no degree.

    Parameters
    ----------
    positions, gradients : numpy.ndarray, shape (n, d)
        Positions, and gradients of *plus* the log posterior there.
    order : int
        Largest degree.

    Returns
    -------
    numpy.ndarray, shape (n, p)
        p is `count_terms`, in the order of `monomials`.

    Examples
    --------
    On a standard normal law the gradient is minus the position. The terms are half the position,
    and the square less its mean, divided by :math:`2 \sqrt{2}`.

    >>> import numpy as np
    >>> stein_terms(np.array([[2.0]]), np.array([[-2.0]]), 2)
    array([[1.        , 1.06066017]])
    """
    parts = []
    for table, weights in _weighted_monomials(positions.shape[1], order):
        degree = table.shape[1]
        total = np.zeros((len(positions), len(table)))
        for place in range(degree):
            # By the product rule: one summand for each factor, also where factors are equal.
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
    """Products of the coordinates in each row of a table, shape (n, rows). It is 1 without any."""
    product = np.ones((len(positions), len(table)))
    for place in range(table.shape[1]):
        product *= positions[:, table[:, place]]
    return product


@cache
def _weighted_monomials(dimension: int, order: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Monomials of each degree, and the factors by which their terms are multiplied."""

    def factor(row: list[int]) -> float:
        return 1 / (len(row) * sqrt(prod(factorial(power) for power in Counter(row).values())))

    return [
        (table, np.array([factor(row) for row in table.tolist()]))
        for table in monomials(dimension, order)
    ]
