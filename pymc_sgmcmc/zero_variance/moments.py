"""Zero-variance control variates from the moments that a run kept of all its transitions."""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy import linalg
from xarray import DataTree

from pymc_sgmcmc.checks import one_of
from pymc_sgmcmc.moments import StoredMoments, read_moments
from pymc_sgmcmc.zero_variance.coefficients import (
    BATCHES_PER_TERM,
    REGRESSIONS,
    fit_coefficients,
)
from pymc_sgmcmc.zero_variance.estimate import control_batches

ORDERS = (1, 2)


def zero_variance_of_moments(
    idata: DataTree,
    order: int = 1,
    *,
    regression: str = "least_squares",
    split: bool = False,
) -> pd.DataFrame:
    r"""Means of the position with control variates, over all transitions of a run.

    As `zero_variance`, but from the batch means in ``idata["sgmcmc_moments"]``, to which each
    transition has added, not only the recorded draws: thinning loses nothing, and no draw has to
    be stored. With batches of transitions the variance of a mean falls by :math:`1 + 1 / \delta`,
    where :math:`\delta` is the inflation by the gradient noise, whatever the thinning.

    Parameters
    ----------
    idata : xarray.DataTree
        From `pymc.sample` with a step method of this package. Not changed.
    order : {1, 2}
        Of the polynomials. With 2 there are variances too, whose bias it removes on a Gaussian
        posterior.
    regression, split
        As in `zero_variance`.

    Returns
    -------
    pandas.DataFrame
        Rows: coordinates of the unconstrained position, and with `order` 2 their variances,
        ``variance of ...``. Columns ``mean``, ``mcse``, ``mean_before``, ``mcse_before`` and
        ``variance_ratio``.

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
    if order == 1:
        values, terms = moments.batch_position, moments.batch_gradient
        labels = list(moments.labels)
    else:
        values, terms = _second_order(moments)
        labels = [*moments.labels, *(f"variance of {one}" for one in moments.labels)]
    needed = BATCHES_PER_TERM * (terms.shape[1] + 1)
    if len(values) < (needed if regression == "least_squares" else 2 * BATCHES_PER_TERM):
        raise ValueError(
            f"{terms.shape[1]} terms of order {order} should have at least {needed} batches, but "
            f"the moments have {len(values)}, of {moments.batch_length} transitions. Sample more "
            'chains, use order=1 or regression="cv", or `zero_variance` on the stored draws.'
        )

    def fit(rows: np.ndarray) -> np.ndarray:
        return fit_coefficients(terms[rows], values[rows], regression)

    mean, error, _ = control_batches(
        values, terms, fit, exact=regression == "least_squares", split=split
    )
    before = values.std(0, ddof=1) / np.sqrt(len(values))
    shift = np.zeros(values.shape[1])
    shift[: len(moments.labels)] = moments.origin
    return pd.DataFrame(
        {
            "mean": mean + shift,
            "mcse": error,
            "mean_before": values.mean(0) + shift,
            "mcse_before": before,
            "variance_ratio": (before / error) ** 2,
        },
        index=pd.Index(labels, name="parameter"),
    )


def _second_order(moments: StoredMoments) -> tuple[np.ndarray, np.ndarray]:
    """Positions and their squared deviations, and terms of order 1 and 2, by group.

    Shapes (groups, 2 d) and (groups, d + d (d + 1) / 2), in coordinates whitened by the chains.
    """
    if not len(moments.position_position):
        raise ValueError(
            "Order 2 needs products of positions and gradients, which are not kept of "
            f"{len(moments.labels)} coordinates. Use order=1, or `zero_variance` on stored draws."
        )
    mean = moments.group_position.mean(0)
    covariance = moments.position_position.mean(0) - np.outer(mean, mean)
    root = linalg.cholesky(covariance, lower=True)
    # Squares about the mean of all groups, a constant.
    squares = np.einsum("kii->ki", moments.position_position)
    squares = squares - 2 * mean * moments.group_position + mean**2
    gradients = moments.group_gradient @ root
    stein = moments.position_gradient - mean[:, None] * moments.group_gradient[:, None, :]
    stein = np.array([linalg.solve_triangular(root, one, lower=True) for one in stein]) @ root
    rows, columns = np.tril_indices(len(mean))
    # Q = x_i x_j: the Laplacian is 2 on the diagonal, and the gradient's product x_j g_i + x_i g_j.
    products = stein[:, rows, columns] + stein[:, columns, rows] + 2.0 * (rows == columns)
    return (
        np.concatenate([moments.group_position, squares], axis=1),
        np.concatenate([gradients, products], axis=1),
    )
