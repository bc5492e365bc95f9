"""Controlled means from the moments that a run kept of all its transitions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from scipy import linalg

from pymc_sgmcmc.checks import one_of, whole_number
from pymc_sgmcmc.stein import BATCHES
from pymc_sgmcmc.trace_tools.moments import StoredMoments
from pymc_sgmcmc.trace_tools.reader import root_of_draws
from pymc_sgmcmc.trace_tools.zero_variance.coefficients import (
    BATCHES_PER_TERM,
    REGRESSIONS,
    fit_coefficients,
)
from pymc_sgmcmc.trace_tools.zero_variance.estimate import Means, control_batches


def means_of_moments(
    moments: StoredMoments, order: int, regression: str, split: bool, batches: int | None
) -> tuple[Means, Means | None, list[str]]:
    """Means of the position, with order 2 its variances, and notes on the errors.

    Means are by order 1 alone. The terms of order 2 take the bias of squares and are far from zero
    by that bias, so they would take more from the means than they give.

    Raises
    ------
    ValueError
        Where there are fewer batches than the terms need, or no products for order 2.
    """
    one_of("regression", regression, REGRESSIONS)
    settings = (regression, split, batches)
    means = _of_batches(
        moments.batch_position, moments.batch_gradient, moments.batch_length, 1, *settings
    )
    notes = []
    if moments.position_position.size:
        center = moments.group_position.mean((0, 1))
        marginal = np.diag(moments.position_position.mean((0, 1))) - center**2
        notes = means.short_batches(marginal, "transitions")
    variances = None
    if order == 2:
        squares, terms, center = _second_order(moments)
        length = int(moments.group_counts[0, 0])
        variances = _of_batches(squares, terms, length, 2, *settings)
        # The squares are about the mean of the chains, which is off by what control variates
        # correct it: E[(x - c)²] is the variance and (mean - c)².
        off = means.mean - center
        error = np.hypot(variances.standard_error, 2 * off * means.standard_error)
        variances = replace(variances, mean=variances.mean - off**2, standard_error=error)
    origin = moments.origin
    means = replace(means, mean=means.mean + origin, mean_before=means.mean_before + origin)
    return means, variances, notes


def _of_batches(
    values: np.ndarray,
    terms: np.ndarray,
    length: int,
    order: int,
    regression: str,
    split: bool,
    batches: int | None,
) -> Means:
    """Means of values with terms, both (chains, batches, ...), of batches of a length."""
    joined = _joined_batches(values.shape, terms.shape[2], order, length, regression, batches)
    values, terms = (
        stored[:, stored.shape[1] % joined :].reshape(-1, joined, stored.shape[2]).mean(1)
        for stored in (values, terms)
    )

    def fit(rows: np.ndarray) -> np.ndarray:
        return fit_coefficients(terms[rows], values[rows], regression)

    exact = regression == "least_squares"
    return control_batches(values, terms, fit, joined * length, exact=exact, split=split)[0]


def _joined_batches(
    shape: tuple[int, ...], terms: int, order: int, length: int, regression: str, given: int | None
) -> int:
    """How many neighbours of the stored batches, (chains, batches, ...), make one that is used."""
    chains, available = shape[:2]
    least_squares = regression == "least_squares"
    needed = -(-BATCHES_PER_TERM * (terms + 1) // chains) if least_squares else 2
    if given is None:
        wanted = min(max(BATCHES, needed), available)
    else:
        wanted = whole_number("batches", given, 2, " a chain")
    if not needed <= wanted <= available:
        raise ValueError(
            f"{terms} terms of order {order} should have at least {needed * chains} batches, but "
            f"the moments have {available * chains}, of {length} transitions"
            + (f", and batches={given} a chain" if given is not None else "")
            + f". Sample more chains or draws, {'use order=1, ' if order > 1 else ''}use "
            'regression="cv", or `zero_variance` on the stored draws.'
        )
    return available // wanted


def _second_order(moments: StoredMoments) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Squares of positions about a centre, terms of order 1 and 2, and the centre.

    Shapes (chains, groups, d), (chains, groups, d + d (d + 1) / 2) and (d,), the terms in
    coordinates whitened by the chains. The centre is the mean of all.
    """
    if not moments.position_position.size:
        raise ValueError(
            "Order 2 needs products of positions and gradients, which are not kept of "
            f"{len(moments.labels)} coordinates. Use order=1, or `zero_variance` on stored draws."
        )
    # The last group may be shorter, and a regression wants equal ones.
    equal = slice((moments.group_counts == moments.group_counts.max()).all(0).sum())
    position, gradient, position_position, position_gradient = (
        stored[:, equal]
        for stored in (
            moments.group_position,
            moments.group_gradient,
            moments.position_position,
            moments.position_gradient,
        )
    )
    mean = position.mean((0, 1))
    covariance = position_position.mean((0, 1)) - np.outer(mean, mean)
    root = root_of_draws(covariance, moments.labels, int(moments.group_counts.sum()))
    # Squares about the mean of all groups, a constant.
    squares = np.einsum("ckii->cki", position_position)
    squares = squares - 2 * mean * position + mean**2
    gradients = gradient @ root
    stein = position_gradient - mean[:, None] * gradient[..., None, :]
    inverse = linalg.solve_triangular(root, np.eye(len(mean)), lower=True)
    stein = inverse @ stein @ root
    rows, columns = np.tril_indices(len(mean))
    # Q = x_i x_j: the Laplacian is 2 on the diagonal, and the gradient's product x_j g_i + x_i g_j.
    products = stein[..., rows, columns] + stein[..., columns, rows] + 2.0 * (rows == columns)
    return squares, np.concatenate([gradients, products], axis=-1), mean
