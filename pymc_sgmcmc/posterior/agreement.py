"""Whether two computations of the same numbers agree, such as those of a whole and of its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from pymc_sgmcmc.errors import ModelError

ROUNDING = 1e4
"""Each number may differ by so many times the rounding error of the largest one."""


def precision_of(dtype: Any) -> float:
    """The relative error that long sums and ill-conditioned functions hardly reach."""
    return 10 * float(np.sqrt(np.finfo(dtype).eps))


def agree(
    found: np.ndarray,
    expected: np.ndarray,
    size: np.ndarray | float,
    precision: float,
    *,
    finite: bool = False,
) -> bool:
    """Whether numbers differ by no more than a part of their size.

    Parameters
    ----------
    found, expected : numpy.ndarray
        They differ where they have not the same shape.
    size : numpy.ndarray or float
        What errors are relative to, for each number or all.
    precision : float
        This part of the size.
    finite : bool
        Whether all numbers should be finite. Those that are not should be the same otherwise.
    """
    found, expected = np.asarray(found), np.asarray(expected)
    if found.shape != expected.shape:
        return False
    are_finite = np.isfinite(found) & np.isfinite(expected)
    difference = np.subtract(found, expected, out=np.zeros_like(found), where=are_finite)
    near = are_finite & (np.abs(difference) <= precision * size)
    same = (found == expected) | (np.isnan(found) & np.isnan(expected))
    return bool(np.all(near if finite else near | same))


def is_sum(
    parts: Iterable[np.ndarray],
    whole: np.ndarray,
    dtype: Any,
    besides: Iterable[np.ndarray] = (),
) -> bool:
    """Whether parts add up to a whole, but for the rounding errors of all of them.

    Parameters
    ----------
    parts : sequence of numpy.ndarray
    whole : numpy.ndarray
        Of the same shape.
    dtype : dtype
        The floating type in which they were computed.
    besides : iterable of numpy.ndarray
        Summands that parts were made of, and that may cancel in them.

    Examples
    --------
    >>> parts, whole = np.array([[2.0, 1.0], [4.0, -np.inf]]), np.array([6.0, -np.inf])
    >>> is_sum(parts, whole, float), is_sum(parts, whole + 1e-5, float)
    (True, False)
    """
    parts, precision = list(parts), precision_of(dtype)
    sizes = [np.abs(each[np.isfinite(each)]) for each in (whole, *parts, *besides)]
    largest = max(each.max(initial=0.0) for each in sizes)
    rounding = ROUNDING * np.finfo(dtype).eps * largest / precision
    return agree(np.sum(parts, axis=0), whole, 1 + np.abs(whole) + rounding, precision)


def first_to_pass[Reading, Result](
    readings: Iterable[Reading], check: Callable[[Reading], Result]
) -> Result:
    """The result of a check for the first of several readings of a model that passes it.

    Raises
    ------
    ModelError
        That of the first reading, which is the most likely one, where none passes.
    """
    errors = []
    for reading in readings:
        try:
            return check(reading)
        except ModelError as error:
            errors.append(error)
    raise errors[0]
