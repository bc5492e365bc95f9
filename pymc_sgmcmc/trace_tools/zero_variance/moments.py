"""Controlled means from the moments that a run kept of all its transitions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from scipy import linalg

from pymc_sgmcmc.checks import one_of
from pymc_sgmcmc.stein import batch_means
from pymc_sgmcmc.trace_tools.moments import StoredMoments
from pymc_sgmcmc.trace_tools.reader import root_of_draws
from pymc_sgmcmc.trace_tools.zero_variance.coefficients import REGRESSIONS
from pymc_sgmcmc.trace_tools.zero_variance.estimate import (
    Means,
    control_batches,
    number_of_batches,
)


def means_of_moments(
    moments: StoredMoments, order: int, regression: str, batches: int | None
) -> tuple[Means, Means | None, list[str]]:
    """Means of the position, its variances for order 2, and notes on the errors.

    The means always have control variates of order 1. The terms of order 2 correct the bias of
    squares, so that their means differ from zero by that bias, and they would add more error to the
    means than they remove.

    Raises
    ------
    ValueError
        Where there are fewer batches than the terms need, or no products for order 2.
    """
    one_of("regression", regression, tuple(REGRESSIONS))
    settings = (regression, batches)
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
        # E[(x - c)²] is the variance plus (mean - c)², where c is the mean of the chains without
        # control variates.
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
    batches: int | None,
) -> Means:
    """Means of values with terms, both of shape (chains, batches, ...), of stored batches.

    Neighbouring batches are joined where there are more of them than are used.
    """
    chains, available, p = terms.shape
    exact = regression == "least_squares"
    used = number_of_batches(chains, available, p, order, exact, batches, "the moments have")
    joined = available // used
    values, terms = (batch_means(stored, available // joined) for stored in (values, terms))
    length *= joined
    return control_batches(values, terms, chains, length, regression=regression)[0]


def _second_order(moments: StoredMoments) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Squares of positions from a centre, terms of order 1 and 2, and the centre.

    The shapes are (chains, groups, d), (chains, groups, d + d (d + 1) / 2) and (d,). The terms are
    in coordinates in which the chains have unit covariance. The centre is the mean of all chains.
    """
    if not moments.position_position.size:
        raise ValueError(
            "Order 2 needs products of positions and gradients, which are not kept of "
            f"{len(moments.labels)} coordinates. Use order=1, or `zero_variance` on stored draws."
        )
    # The last group may be shorter, but a regression needs groups of the same length.
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
    # The squares are from the mean of all groups, which is a constant.
    squares = np.einsum("ckii->cki", position_position)
    squares = squares - 2 * mean * position + mean**2
    gradients = gradient @ root
    stein = position_gradient - mean[:, None] * gradient[..., None, :]
    inverse = linalg.solve_triangular(root, np.eye(len(mean)), lower=True)
    stein = inverse @ stein @ root
    rows, columns = np.tril_indices(len(mean))
    # For Q = x_i x_j the Laplacian is 2 where i = j, and ∇Q·g = x_j g_i + x_i g_j.
    products = stein[..., rows, columns] + stein[..., columns, rows] + 2.0 * (rows == columns)
    return squares, np.concatenate([gradients, products], axis=-1), mean
