"""The posterior of a logistic regression by other means: Laplace, from all rows.

Independent of the rest of the package, so that it can be a check on it: NumPy and SciPy alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import linalg, special

CHUNK_ELEMENTS = 2_000_000
"""Elements of the design matrix handled at a time."""

MOST_ITERATIONS = 100


@dataclass(frozen=True)
class Laplace:
    """Gaussian approximation of the posterior at its mode.

    Attributes
    ----------
    mode : numpy.ndarray, shape (d,)
    sd : numpy.ndarray, shape (d,)
        Roots of the diagonal of the inverse Hessian of the negative log posterior.
    separated : bool
        Whether the linear predictor tells all outcomes apart. The posterior is then skewed,
        shaped by the prior, and this approximation a rough one.
    """

    mode: np.ndarray
    sd: np.ndarray
    separated: bool


def laplace(X: np.ndarray, y: np.ndarray, prior_sd: float) -> Laplace:
    r"""Mode and curvature of a logistic regression by Newton's method.

    .. math:: \log \pi(\beta) = \sum_{i=1}^N [y_i \eta_i - \log(1 + e^{\eta_i})]
              - \frac{|\beta|^2}{2 \sigma^2}, \qquad \eta = X \beta

    Parameters
    ----------
    X : numpy.ndarray, shape (N, d)
    y : numpy.ndarray, shape (N,), bool
    prior_sd : float
        :math:`\sigma`.

    Returns
    -------
    Laplace

    Raises
    ------
    ValueError
        When Newton's method does not arrive, which a finite design does not cause.

    Examples
    --------
    >>> X = np.column_stack([np.ones(200), np.linspace(-1, 1, 200)])
    >>> y = np.arange(200) % 3 == 0
    >>> fit = laplace(X, y, prior_sd=10.0)
    >>> fit.mode.round(3), fit.sd.round(3)
    (array([-0.686, -0.022]), array([0.15 , 0.258]))
    """
    beta = np.zeros(X.shape[1])
    value, gradient, hessian = _log_posterior(X, y, prior_sd, beta)
    for _ in range(MOST_ITERATIONS):
        step = linalg.solve(hessian, gradient, assume_a="pos")
        decrement = gradient @ step  # squared distance to the mode in posterior sds
        if decrement < 1e-12:
            covariance = linalg.inv(hessian)
            return Laplace(beta, np.sqrt(np.diag(covariance)), _separates(X, y, beta))
        size = 1.0
        while True:
            proposal = beta + size * step
            new = _log_posterior(X, y, prior_sd, proposal)
            # Far from the mode a full Newton step can overshoot; near it rounding can make
            # the value fall by less than can be told.
            if new[0] >= value - 1e-10 * abs(value) or size < 1e-10:
                break
            size /= 2
        beta, (value, gradient, hessian) = proposal, new
    raise ValueError(
        f"Newton's method found no mode in {MOST_ITERATIONS} iterations; check the columns for "
        "values of very different size."
    )


def _log_posterior(
    X: np.ndarray, y: np.ndarray, prior_sd: float, beta: np.ndarray
) -> tuple[float, np.ndarray, np.ndarray]:
    """Value, gradient and negative Hessian; in chunks, because X can be most of the memory."""
    value = -0.5 * float(beta @ beta) / prior_sd**2
    gradient = -beta / prior_sd**2
    hessian = np.eye(len(beta)) / prior_sd**2
    length = max(1, CHUNK_ELEMENTS // X.shape[1])
    for start in range(0, len(X), length):
        rows, outcomes = X[start : start + length], y[start : start + length]
        eta = rows @ beta
        p = special.expit(eta)
        value += float(special.log_expit(np.where(outcomes, eta, -eta)).sum())
        gradient = gradient + rows.T @ (outcomes - p)
        hessian = hessian + rows.T @ (rows * (p * (1 - p))[:, None])
    return value, gradient, hessian


def _separates(X: np.ndarray, y: np.ndarray, beta: np.ndarray) -> bool:
    return bool(np.all((X @ beta > 0) == y))
