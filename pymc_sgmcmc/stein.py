r"""Stein's identity on arrays of positions and gradients.

For a density :math:`\pi` with mean :math:`\mu`, :math:`\mathrm{E}_\pi[(\theta - \mu)
\nabla \log \pi(\theta)^\top] = -I`. On a chain with unbiased gradients the matrix
:math:`S = \mathrm{mean}[(\theta - \bar\theta) \hat\nabla^\top]` shows how far the law of the chain
is from :math:`\pi`. No pass over the data is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import special

BATCHES = 20
"""Monte-Carlo errors are computed from the means of at most this many batches of each chain. The
number is a compromise: with more batches the error is known better, and with fewer the batches are
longer, so that their means are closer to independent."""


STANDARD_ERRORS = 2.0
"""An error counts as larger than the stated one where it is larger by this number of Monte-Carlo
standard errors, and stated errors have this number of them. By chance an estimate is that far off,
to one side, once in 40 cases."""


def beyond_doubt(dimension: int) -> float:
    """Number of standard errors by which one of many estimates is beyond doubt.

    It is Bonferroni's, so that more coordinates do not make it more likely that one is beyond.
    """
    return float(-special.ndtri(special.ndtr(-STANDARD_ERRORS) / dimension))


@dataclass(frozen=True)
class Estimate:
    """Estimates and their Monte-Carlo standard errors, shape (d,)."""

    value: np.ndarray
    standard_error: np.ndarray


def split_into_batches(values: np.ndarray, batches: int | None = None) -> np.ndarray:
    """Successive batches of each chain, shape (chains, batches, length, ...).

    The result is a view. The first draws are left out where the number of draws is not a multiple
    of the number of batches.

    Parameters
    ----------
    values : numpy.ndarray, shape (chains, draws, ...)
    batches : int, optional
        Number of batches of a chain. The default is `BATCHES`, or fewer where a batch would have
        fewer than two draws.
    """
    chains, draws = values.shape[:2]
    if batches is None:
        batches = max(1, min(BATCHES, draws // 2))
    length = draws // batches
    trimmed = values[:, draws - batches * length :]
    return trimmed.reshape(chains, batches, length, *values.shape[2:])


def batch_means(values: np.ndarray, batches: int | None = None) -> np.ndarray:
    """Means over the batches of `split_into_batches`, shape (chains * batches, ...)."""
    return np.concatenate(split_into_batches(values, batches).mean(2, dtype=float))


def mean_with_error(values: np.ndarray) -> Estimate:
    """Mean over chains and draws, with the standard error that the batch means show."""
    return Estimate(values.mean((0, 1)), standard_error(batch_means(values)))


def standard_error(estimates: np.ndarray) -> np.ndarray:
    """Standard error of the mean of independent estimates, NaN where there is only one."""
    if len(estimates) < 2:
        return np.full(estimates.shape[1:], np.nan)
    return estimates.std(0, ddof=1) / np.sqrt(len(estimates))


def stein_variance_error(positions: np.ndarray, gradients: np.ndarray) -> Estimate:
    r"""Relative error of each variance of a chain of any sampler: the diagonal of :math:`-S - I`.

    Parameters
    ----------
    positions, gradients : numpy.ndarray, shape (chains, draws, d)

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(1)
    >>> positions = rng.normal(size=(4, 5000, 2)) * np.sqrt([1.0, 1.5])
    >>> stein_variance_error(positions, -positions).value.round(1)
    array([0. , 0.5])
    """
    centred = positions - positions.mean((0, 1))
    ratio = mean_with_error(-centred * (gradients - gradients.mean((0, 1))))
    return Estimate(ratio.value - 1, ratio.standard_error)


def mean_gradient_test(*gradients: np.ndarray) -> float:
    r"""Probability that chains at stationarity have a mean gradient as large as this one.

    The expectation of the gradient is zero at stationarity. The probability is the smallest of the
    t tests of single coordinates, with Bonferroni's correction. Their standard errors are those
    that about `BATCHES` batches of all chains show within the chains. So few batches are long
    beside the autocorrelation time, and their means are close to normal where gradients have heavy
    tails. It is NaN with fewer than four batches.

    Parameters
    ----------
    *gradients : numpy.ndarray, shape (chains, draws, d)
        The gradients, and linear functions of them, whose coordinates are tested too. In
        :math:`M \hat\nabla`, M being the covariance of the posterior, a chain that is off along a
        direction in which the posterior is wide shows, which single gradients hardly do.
    """
    chains, draws, _ = gradients[0].shape
    number = min(max(2, BATCHES // chains), draws // 2)
    if chains * number < 4 or number < 2:
        return np.nan
    batches = [split_into_batches(each, number).mean(2, dtype=float) for each in gradients]
    means = np.concatenate(batches, axis=-1)
    free = chains * (number - 1)
    error = np.sqrt((means.var(1) * number).sum(0) / free / (chains * number))
    if not error.any():
        return np.nan
    t = np.abs(means.mean((0, 1)))[error > 0] / error[error > 0]
    return float(min(1.0, len(error) * 2 * special.stdtr(free, -t.max())))


def kernel_stein_discrepancy(positions: np.ndarray, gradients: np.ndarray) -> Estimate:
    r"""Squared kernel Stein discrepancy with the inverse multiquadric kernel, a U-statistic.

    .. math:: \frac{1}{K (K - 1)} \sum_{k \ne l} k_\pi(\theta_k, \theta_l), \qquad
              k(x, y) = (1 + \|x - y\|^2)^{-1/2}

    with :math:`k_\pi` of Gorham and Mackey (2017). Its expectation is zero for draws of the
    posterior and positive for other draws. It is also unbiased with unbiased gradient estimates
    whose noise is independent between draws, since no draw is paired with itself. The standard
    error is that for independent draws of the posterior: the U-statistic is degenerate then, so
    that its pairs are uncorrelated.

    Parameters
    ----------
    positions, gradients : numpy.ndarray, shape (K, d)
        The posterior standard deviations should be about 1 in these coordinates. The memory
        needed is that of several matrices of shape (K, K).

    References
    ----------
    J. Gorham and L. Mackey (2017). Measuring sample quality with kernels. *ICML*.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.random.default_rng(1).normal(size=(400, 2))
    >>> right, too_wide = (kernel_stein_discrepancy(s * x, -s * x) for s in (1, 1.5))
    >>> bool(right.value < 3 * right.standard_error < too_wide.value)
    True
    """
    values = stein_kernel(positions, gradients)
    pairs = len(values) * (len(values) - 1)
    value = (values.sum() - np.trace(values)) / pairs
    np.fill_diagonal(values, 0)
    return Estimate(value, np.sqrt(2 * (values**2).sum()) / pairs)


def stein_kernel(positions: np.ndarray, gradients: np.ndarray) -> np.ndarray:
    r"""Matrix of :math:`k_\pi(\theta_k, \theta_l)` of `kernel_stein_discrepancy`.

    Parameters
    ----------
    positions, gradients : numpy.ndarray, shape (K, d)

    Returns
    -------
    numpy.ndarray, shape (K, K)

    Examples
    --------
    On the diagonal it is the squared length of the gradient plus the dimension.

    >>> stein_kernel(np.zeros((1, 3)), np.ones((1, 3)))
    array([[6.]])
    """
    dimension = positions.shape[1]
    # Centred, since products of large numbers would differ by little more than rounding.
    x = positions - positions.mean(0)
    products = x @ x.T
    lengths = np.diag(products)
    squares = np.maximum(lengths[:, None] + lengths - 2 * products, 0)
    base = 1 + squares
    # With k = base^-1/2: the gradient in x is -base^-3/2 (x - y), that in y its opposite.
    slope = base**-1.5
    crossed = x @ gradients.T
    diagonal_products = np.diag(crossed)
    along = diagonal_products[:, None] + diagonal_products - crossed - crossed.T
    values = gradients @ gradients.T * base**-0.5 + slope * along
    return values + dimension * slope - 3 * squares * base**-2.5
