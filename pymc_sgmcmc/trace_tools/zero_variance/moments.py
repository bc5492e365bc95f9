"""Zero-variance control variates from the moments that a run kept of all its transitions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import linalg
from xarray import DataTree

from pymc_sgmcmc.checks import one_of, whole_number
from pymc_sgmcmc.stein import BATCHES
from pymc_sgmcmc.trace_tools.moments import StoredMoments, read_moments
from pymc_sgmcmc.trace_tools.reader import root_of_draws
from pymc_sgmcmc.trace_tools.zero_variance.advice import short_batches
from pymc_sgmcmc.trace_tools.zero_variance.coefficients import (
    BATCHES_PER_TERM,
    REGRESSIONS,
    fit_coefficients,
)
from pymc_sgmcmc.trace_tools.zero_variance.estimate import control_batches

ORDERS = (1, 2)


def zero_variance_of_moments(
    idata: DataTree,
    order: int = 1,
    *,
    regression: str = "least_squares",
    split: bool = False,
    batches: int | None = None,
) -> pd.DataFrame:
    r"""Means of the position with control variates, over all transitions of a run.

    As `zero_variance`, but from the batch means in ``idata["sgmcmc_moments"]``, to which each
    transition after tuning has added, not only the recorded draws, and also those that were taken
    out of the trace since: thinning loses nothing, and no draw has to be stored. With batches of
    transitions the variance of a mean falls by :math:`1 + 1 / \delta`, where :math:`\delta` is the
    inflation by the gradient noise, whatever the thinning.

    Parameters
    ----------
    idata : xarray.DataTree
        From `pymc.sample` with a step method of this package. Not changed.
    order : {1, 2}
        Of the polynomials. With 2 there are variances too, whose bias it removes on a Gaussian
        posterior.
    regression, split, batches
        As in `zero_variance`. The batches that the trace has are joined to so many.

    Returns
    -------
    pandas.DataFrame
        Rows: coordinates of the unconstrained position, and with `order` 2 their variances,
        ``variance of ...``. Columns ``mean``, ``mcse``, ``mean_before``, ``mcse_before`` and
        ``variance_ratio``. ``attrs["notes"]`` says where batches are too short for the errors.

    Raises
    ------
    ValueError
        Where the trace has no moments, or fewer batches than the terms need.

    Examples
    --------
    >>> import numpy as np, pymc as pm
    >>> from pymc_sgmcmc import SGLDCV
    >>> rng = np.random.default_rng(1)
    >>> x = rng.normal(size=1000)
    >>> with pm.Model():
    ...     slope = pm.Normal("slope", 0, 10)
    ...     _ = pm.Normal("y", slope * x, 1.0, observed=2 * x + rng.normal(size=1000))
    ...     step = SGLDCV(compile_kwargs={"mode": "FAST_COMPILE"})
    ...     idata = pm.sample(
    ...         step=step,
    ...         draws=200,
    ...         tune=100,
    ...         chains=2,
    ...         random_seed=1,
    ...         progressbar=False,
    ...         quiet=True,
    ...     )
    >>> table = zero_variance_of_moments(idata)
    >>> bool(table.loc["slope", "variance_ratio"] > 3)
    True
    """
    if order not in ORDERS:
        raise ValueError(
            f"`order` should be 1 or 2, but got {order!r}. Higher ones need the stored draws, see "
            "`zero_variance`."
        )
    one_of("regression", regression, REGRESSIONS)
    moments = read_moments(idata)
    settings = (regression, split, batches)
    found = _controlled(
        moments.batch_position, moments.batch_gradient, moments.batch_length, 1, *settings
    )
    table = pd.DataFrame(found.columns, index=list(moments.labels))
    # Means by order 1 alone: the terms of order 2, which take the bias of squares, are far from
    # zero by that bias, and would take more from the means than they give.
    if order == 2:
        squares, terms, center = _second_order(moments)
        length = int(moments.group_counts[0, 0])
        second = _controlled(squares, terms, length, 2, *settings)
        # The squares are about the mean of the chains, which is off by what control variates
        # correct it: E[(x - c)²] is the variance and (mean - c)².
        off = found.columns["mean"] - center
        second.columns["mean"] -= off**2
        second.columns["mcse"] = np.hypot(second.columns["mcse"], 2 * off * found.columns["mcse"])
        labels = [f"variance of {one}" for one in moments.labels]
        table = pd.concat([table, pd.DataFrame(second.columns, index=labels)])
    for name in ("mean", "mean_before"):
        table.iloc[: len(moments.labels), table.columns.get_loc(name)] += moments.origin
    table["variance_ratio"] = (table["mcse_before"] / table["mcse"]) ** 2
    table.index.name = "parameter"
    table.attrs["notes"] = _short_batches(moments, found.variance, found.length)
    return table


@dataclass(frozen=True)
class _Controlled:
    """Columns of a table, variances of the batch means, and transitions of a batch."""

    columns: dict[str, np.ndarray]
    variance: np.ndarray
    length: int


def _controlled(
    values: np.ndarray,
    terms: np.ndarray,
    length: int,
    order: int,
    regression: str,
    split: bool,
    batches: int | None,
) -> _Controlled:
    """Means of values with terms, both (chains, batches, ...), of batches of a length."""
    joined = _joined_batches(values.shape, terms.shape[2], order, length, regression, batches)
    values, terms = (
        one[:, one.shape[1] % joined :].reshape(-1, joined, one.shape[2]).mean(1)
        for one in (values, terms)
    )

    def fit(rows: np.ndarray) -> np.ndarray:
        return fit_coefficients(terms[rows], values[rows], regression)

    mean, error, _ = control_batches(
        values, terms, fit, exact=regression == "least_squares", split=split
    )
    variance = values.var(0, ddof=1)
    columns = {
        "mean": mean,
        "mcse": error,
        "mean_before": values.mean(0),
        "mcse_before": np.sqrt(variance / len(values)),
    }
    return _Controlled(columns, variance, joined * length)


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


def _short_batches(moments: StoredMoments, variance: np.ndarray, length: int) -> list[str]:
    """Note where batches of so many transitions, with such variances, are not independent."""
    if not moments.position_position.size:
        return []
    x = moments.group_position.mean((0, 1))
    marginal = np.diag(moments.position_position.mean((0, 1))) - x**2
    note = short_batches(length, float(np.max(length * variance / marginal)), "transitions")
    return [] if note is None else [note]


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
        one[:, equal]
        for one in (
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
    return (
        squares,
        np.concatenate([gradients, products], axis=-1),
        mean,
    )
