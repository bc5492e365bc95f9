"""Refuse rows whose log density cannot be evaluated, before transitions that check nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from pymc_sgmcmc.posterior.bad_rows import (
    code_error,
    first_bad_row,
    first_row_out_of_range,
    shown_row,
    support_error,
)
from pymc_sgmcmc.posterior.posterior import Posterior

OTHER_ROWS = 50
"""A bad row is told as such where one of so many other rows is good."""


def check_rows(posterior: Posterior) -> None:
    """Evaluate all rows once at the initial point, with indices checked.

    The transitions check nothing: Numba reads arbitrary memory beyond the end of an array, and a
    row outside of the support of its distribution has no gradient.

    Raises
    ------
    ModelError
        Where an index is out of range, or the density of some rows, but not of all, is not finite.
    """
    start, good_at = 0, partial(_is_finite_at, posterior, posterior.initial_position)
    for good, length in posterior.each_chunk(_is_good):
        stop = start + length
        if isinstance(good, IndexError):
            row = first_row_out_of_range(good_at, start, stop)
            number, values = posterior.row(row)
            raise code_error(values, number, good) from None
        if not good:
            _check_support(posterior, start, stop)
        start = stop


def defect_at(posterior: Posterior, position: np.ndarray) -> str:
    """Which log density or gradient is not finite at a position, and what to do, in words."""
    with np.errstate(all="ignore"):
        value, gradient = posterior.log_prior_and_gradient(position)
    if not (np.isfinite(value) and np.isfinite(gradient).all()) or not posterior.has_rows:
        return posterior.invalid_parameters(position) or (
            "that of the prior is not. Give `initval` or `center` where it is"
        )
    if found := posterior.invalid_parameters(position):
        return found
    good_at = partial(_is_finite_at, posterior, position)
    row = first_bad_row(lambda rows: not good_at(rows), 0, posterior.n_rows)
    if good_at(slice(row, row + 1)):
        return "that of all rows together is not. Standardise the data, or give `initval`"
    number, values = posterior.row(row)
    found = f"group {row}" if posterior.rows_are_groups else f"row {number}"
    shown = "" if posterior.rows_are_groups else f", which has {shown_row(values)}"
    return (
        f"that of {found} is not{shown}. Correct the data, or choose another distribution or "
        "`initval`"
    )


def _check_support(posterior: Posterior, start: int, stop: int) -> None:
    """Refuse a row whose density is not finite, unless that holds for the other rows too.

    Raises
    ------
    ModelError
    """
    n_rows, position = posterior.n_rows, posterior.initial_position
    good_at = partial(_is_finite_at, posterior, position)
    row = first_bad_row(lambda rows: not good_at(rows), start, stop)
    others = {*np.linspace(0, n_rows - 1, min(n_rows, OTHER_ROWS)).astype(int)}
    # Bad rows may come at the distance of these.
    others |= {row - 1, row + 1} - {-1, n_rows}
    if any(good_at(slice(neighbour, neighbour + 1)) for neighbour in others):
        rows = posterior.take(slice(row, row + 1))
        value, _ = posterior.log_likelihood_and_gradient(position, rows)
        if posterior.rows_are_groups:
            found = posterior.not_finite_in(row)
            raise support_error(f"the records of group {row}", "groups", value, found)
        number, values = posterior.row(row)
        raise support_error(f"row {number}", "rows", value, shown_row(values), values)


def _is_good(posterior: Posterior, rows: list[np.ndarray]) -> tuple[bool | IndexError, int]:
    """Whether density and gradient of rows are finite at the initial point, and their number.

    The first may be the error of an index out of range.
    """
    try:
        return _is_finite(posterior, posterior.initial_position, rows), len(rows[0])
    except IndexError as error:
        return error, len(rows[0])


def _is_finite_at(posterior: Posterior, position: np.ndarray, selection: slice) -> bool:
    return _is_finite(posterior, position, posterior.take(selection))


def _is_finite(posterior: Posterior, position: np.ndarray, rows: Sequence[np.ndarray]) -> bool:
    for number, size in posterior.indexed_sizes.items():
        if (lowest := rows[number].min(initial=0)) < 0:
            raise IndexError(f"index {lowest} is out of bounds for axis 0 with size {size}")
    with np.errstate(all="ignore"):
        value, gradient = posterior.log_likelihood_and_gradient(position, rows)
        return bool(np.isfinite(value) and np.isfinite(gradient @ gradient))
