r"""Coefficients of control variates, from the regression of functions on terms of mean zero.

The controlled mean is :math:`\bar f + \hat a^\top \bar h` with

.. math:: \hat a = -\mathrm{Var}(h)^{-1} \mathrm{Cov}(h, f)

Baker et al. (2019), §4 and algorithm 2, leave out the minus. The caller chooses the rows over which
the covariances are taken. Over means of batches of successive draws they are long-run covariances,
which set the variance of a mean over a chain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from scipy import linalg

from pymc_sgmcmc.checks import import_optional

type _Method = Callable[[np.ndarray, np.ndarray], np.ndarray]

FOLDS = 5
"""The errors of coefficients are from this number of successive folds of the batches. Five folds
leave four fifths of the batches for the coefficients."""

BATCHES_PER_TERM = 5
"""Least squares needs at least this number of batches for each coefficient, the constant included.
Four fifths of the degrees of freedom are then left for the error."""

PENALTIES = np.logspace(-6, 4, 21)
"""Ridge regression tries these penalties, relative to the mean variance of a term times the number
of batches. They reach from almost least squares to almost no control variates."""


def fit_coefficients(terms: np.ndarray, values: np.ndarray, regression: str) -> np.ndarray:
    """Coefficients a, shape (p, q), of the terms for each value.

    Parameters
    ----------
    terms : numpy.ndarray, shape (rows, p)
    values : numpy.ndarray, shape (rows, q)
    regression : {"least_squares", "ridge"}
        "ridge", that of scikit-learn, chooses a penalty for each value by leave-one-out
        cross-validation.

    Examples
    --------
    >>> import numpy as np
    >>> h = np.random.default_rng(1).normal(size=(50, 2))
    >>> fit_coefficients(h, h @ [[2.0], [-1.0]] + 3, "least_squares").ravel()
    array([-2.,  1.])
    """
    scale = values.std(0)
    scale = np.where(scale > 0, scale, 1.0)
    scaled = (values - values.mean(0)) / scale
    centred = terms - terms.mean(0)
    return -REGRESSIONS[regression](centred, scaled) * scale


def out_of_fold(
    fit: Callable[[np.ndarray], np.ndarray],
    terms: np.ndarray,
    values: np.ndarray,
    parts: Sequence[np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Values controlled with coefficients from the other folds, and these coefficients.

    Parameters
    ----------
    fit : callable
        Function that gives coefficients from the rows with the given numbers.
    terms, values : numpy.ndarray, shapes (rows, p) and (rows, q)
    parts : sequence of numpy.ndarray, optional
        Numbers of the rows of each fold. The default is those of `folds`.

    Returns
    -------
    numpy.ndarray, shape (rows, q)
    numpy.ndarray, shape (folds, p, q)
    """
    controlled, coefficients = np.empty_like(values), []
    for fold in folds(len(values)) if parts is None else parts:
        coefficients.append(fit(np.setdiff1d(np.arange(len(values)), fold)))
        controlled[fold] = values[fold] + terms[fold] @ coefficients[-1]
    return controlled, np.array(coefficients)


def folds(rows: int) -> list[np.ndarray]:
    """Numbers of the rows of each fold, as `sklearn.model_selection.KFold` gives them.

    They are successive, so that few batches have a neighbour in another fold. Written here, since
    scikit-learn is optional.
    """
    return np.array_split(np.arange(rows), min(FOLDS, rows))


def _least_squares(terms: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Slopes of the values in the terms, both centred, by least squares."""
    return linalg.lstsq(terms, values, lapack_driver="gelsy")[0]


def _ridge(terms: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Slopes with a penalty for each value, by leave-one-out cross-validation."""
    RidgeCV = import_optional("sklearn.linear_model", "regression", "`regression`").RidgeCV
    penalties = PENALTIES * terms.shape[0] * terms.var(0).mean()
    ridge = RidgeCV(alphas=penalties, alpha_per_target=True, fit_intercept=False)
    return np.reshape(ridge.fit(terms, values).coef_, (values.shape[1], -1)).T


REGRESSIONS: dict[str, _Method] = {
    "least_squares": _least_squares,
    "ridge": _ridge,
}
"""These regressions give the coefficients, by their names in `zero_variance`."""
