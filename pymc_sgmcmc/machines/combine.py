r"""Draws of a whole posterior from those of its shards, by consensus Monte Carlo.

The whole posterior is the product of the posteriors of S shards. Each function takes positions of
shape (shards, chains, draws, d), as many of each shard, and returns (chains, draws, d).
"""

from __future__ import annotations

import numpy as np
from scipy import linalg

MOST_COORDINATES = 50
"""The semiparametric combination takes positions of at most so many coordinates. Its kernels have
to overlap in all of them at once."""

BATCHES = 4
"""The draws of the shards are divided into so many for the errors of the semiparametric means."""


def moments(positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean, (shards, d), and covariance, (shards, d, d), of the draws of each shard."""
    draws = positions.reshape(len(positions), -1, positions.shape[-1])
    means = draws.mean(1)
    residuals = draws - means[:, None]
    return means, residuals.swapaxes(1, 2) @ residuals / (draws.shape[1] - 1)


def gaussian_product(means: np.ndarray, covariances: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    r"""Mean and covariance of the product of Gaussian densities.

    .. math:: \Sigma = \Big(\sum_s \Sigma_s^{-1}\Big)^{-1}, \quad
        \mu = \Sigma \sum_s \Sigma_s^{-1} \mu_s
    """
    precisions = [_inverse(covariance) for covariance in covariances]
    covariance = _inverse(np.sum(precisions, axis=0))
    pairs = zip(precisions, means, strict=True)
    return covariance @ np.sum([precision @ mean for precision, mean in pairs], 0), covariance


def gaussian(positions: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Independent draws of the product of Gaussians with the moments of the shards."""
    mean, covariance = gaussian_product(*moments(positions))
    noise = rng.standard_normal(positions.shape[1:])
    return mean + noise @ linalg.cholesky(covariance, lower=True).T


def average(positions: np.ndarray) -> np.ndarray:
    r"""Averages of one draw of each shard, weighted by the precisions of the shards.

    .. math:: \theta_g = \Big(\sum_s W_s\Big)^{-1} \sum_s W_s\, \theta_{sg}, \quad
        W_s = \Sigma_s^{-1}

    This is the algorithm of Scott et al. (2016), with estimated covariances.
    """
    _, covariances = moments(positions)
    precisions = [_inverse(covariance) for covariance in covariances]
    total = _inverse(np.sum(precisions, axis=0))
    weighted = [draws @ W for draws, W in zip(positions, precisions, strict=True)]
    return np.sum(weighted, axis=0) @ total


def semiparametric(
    positions: np.ndarray, rng: np.random.Generator, bandwidth: float | None = None
) -> np.ndarray:
    r"""Draws of the product of semiparametric density estimates of the shards.

    The density of a shard is estimated by a Gaussian times a kernel estimate of the ratio,

    .. math:: \hat p_s(\theta) = N(\theta \mid \mu_s, \Sigma_s)\, \frac{1}{T} \sum_{t=1}^T
        \frac{N(\theta \mid \theta_{st}, h^2 C)}{N(\theta_{st} \mid \mu_s, \Sigma_s)},

    section 3.3 of Neiswanger, Wang and Xing (2014). The product is a mixture of Gaussians, one for
    each choice of one draw :math:`t_s` of every shard, with the weight (letters of the paper)

    .. math:: W_{t\cdot} \propto \frac{w_{t\cdot}\,
        N(\bar\theta_{t\cdot} \mid \mu, \Sigma + \tfrac{h^2}{S} C)}
        {\prod_s N(\theta_{s t_s} \mid \mu_s, \Sigma_s)}, \quad
        w_{t\cdot} = \prod_s N(\theta_{s t_s} \mid \bar\theta_{t\cdot}, h^2 C).

    Parameters
    ----------
    positions : numpy.ndarray, shape (shards, chains, draws, d)
    rng : numpy.random.Generator
    bandwidth : float, optional
        h of all sweeps. By default it decreases over the sweeps i as in the paper,
        :math:`h = i^{-1/(4 + d)}`, and the first sweeps, half as many as draws, are left out.

    Notes
    -----
    The paper moves one :math:`t_s` at a time by independent Metropolis steps. Here it is drawn from
    its law given the others, over all draws of the shard, so that no proposal is refused. C is S
    times the covariance of the product of Gaussians (in the paper the identity): a shard has about
    this covariance, and the result does not depend on the units of the coordinates.
    """
    shards, chains, draws, d = positions.shape
    means, covariances = moments(positions)
    mean, covariance = gaussian_product(means, covariances)
    # In these coordinates C is the identity and the product of Gaussians is N(0, I / S).
    factor = linalg.cholesky(shards * covariance, lower=True)

    def white(values: np.ndarray) -> np.ndarray:
        return linalg.solve_triangular(factor, values.T, lower=True).T

    all_draws = positions.reshape(shards, -1, d)
    z = np.stack([white(values - mean) for values in all_draws])
    squares = (z**2).sum(-1)
    log_gaussian = np.stack(
        [
            -0.5 * _mahalanobis(values, *of_shard)
            for values, *of_shard in zip(all_draws, means, covariances, strict=True)
        ]
    )
    warm_up = draws // 2
    chosen = rng.integers(z.shape[1], size=(shards, chains))
    total = np.sum([values[numbers] for values, numbers in zip(z, chosen, strict=True)], axis=0)
    result = np.empty((chains, draws, d))
    for sweep in range(warm_up + draws):
        h = (sweep + 1) ** (-1 / (4 + d)) if bandwidth is None else bandwidth
        for shard in range(shards):
            total -= z[shard, chosen[shard]]
            # The log weight depends on |total + z|² = |total|² + 2 total · z + |z|².
            factor_of_sum = (1 / h**2 - 1 / (1 + h**2)) / (2 * shards)
            own = (factor_of_sum - 1 / (2 * h**2)) * squares[shard] - log_gaussian[shard]
            log_weights = (2 * factor_of_sum * total) @ z[shard].T  # (chains, draws of the shard)
            log_weights += own
            chosen[shard] = _drawn(log_weights, rng)
            total += z[shard, chosen[shard]]
        if sweep >= warm_up:
            scale = h / np.sqrt(shards * (1 + h**2))
            noise = scale * rng.standard_normal((chains, d))
            result[:, sweep - warm_up] = total / shards / (1 + h**2) + noise
    return mean + result @ factor.T


def semiparametric_errors(positions: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Standard errors of the means of `semiparametric`, in combined standard deviations.

    They come from the means of `BATCHES` of the draws, each combined without the others. Where few
    draws of a shard are where the other shards are, its kernel estimate there is rough, and no
    R-hat of the combined draws shows that. The error falls with the number of draws T as that of
    kernel estimates does, as T^(-2 / (4 + d)).
    """
    batches = [semiparametric(part, rng) for part in np.array_split(positions, BATCHES, axis=2)]
    sd = np.concatenate(batches, axis=1).std((0, 1))
    of_batch = np.std([batch.mean((0, 1)) for batch in batches], axis=0, ddof=1) / sd
    return of_batch * BATCHES ** (-2 / (4 + positions.shape[-1]))


def mean_errors(
    positions: np.ndarray, effective_draws: float
) -> tuple[np.ndarray, np.ndarray, float]:
    r"""Errors of the means of `gaussian` and `average`, from the skewness of the shards.

    Let T be the third derivatives of the log density of a shard. To first order in them, the mean
    is :math:`\tfrac12 \Sigma\, T\!:\!\Sigma` from the mode, for a shard and for all rows, and the
    mode of all rows is :math:`\tfrac12 \Sigma \sum_s T_s\!:\!v_s v_s'` from the average of those of
    the shards, with the combined mean less the shard's, :math:`v_s = \mu - \mu_s`. So the combined
    mean is off by

    .. math:: \tfrac12 \Sigma \sum_s T_s\!:\!\big(\Sigma_s - \Sigma - v_s v_s'\big).

    T are the third moments of the whitened draws, :math:`z = L_s^{-1} (\theta - \mu_s)`, in their
    coordinates. Where the model is right, :math:`v_s v_s'` has about the expectation
    :math:`\Sigma_s - \Sigma`, so that the two parts of the error cancel in part.

    Parameters
    ----------
    positions : numpy.ndarray, shape (shards, chains, draws, d)
    effective_draws : float
        Of a shard.

    Returns
    -------
    errors, noise : numpy.ndarray, shape (d,)
        In combined standard deviations, and their Monte Carlo standard errors.
    second_order : float
        The largest square of the error without its part of :math:`v_s`, 0 where it is noise. What
        first order leaves out is of this size, also where the parts cancel.
    """
    shards, d = len(positions), positions.shape[-1]
    means, covariances = moments(positions)
    mean, covariance = gaussian_product(means, covariances)
    # Without and with the part of v, for both results
    total, variance = np.zeros((2, d)), np.zeros((2, d, d))
    for draws, shard_mean, shard_covariance in zip(
        positions.reshape(shards, -1, d), means, covariances, strict=True
    ):
        L = linalg.cholesky(shard_covariance, lower=True)
        z = linalg.solve_triangular(L, (draws - shard_mean).T, lower=True)
        inverse = linalg.solve_triangular(L, np.eye(d), lower=True)
        w = inverse @ (mean - shard_mean)
        of_spread = np.eye(d) - inverse @ covariance @ inverse.T
        for number, A in enumerate((of_spread, of_spread - np.outer(w, w))):
            total[number] += inverse.T @ (z * (z * (A @ z)).sum(0)).mean(1)
            # Of Gaussian draws whose sample moments of first and second order are exact.
            of_shard = 2 * np.trace(A @ A) * np.eye(d) + 4 * A @ A
            variance[number] += inverse.T @ of_shard @ inverse / effective_draws
    sd = np.sqrt(np.diag(covariance))
    errors = 0.5 * total @ covariance / sd
    noise = 0.5 * np.sqrt(np.diagonal(covariance @ variance @ covariance, 0, 1, 2)) / sd
    clear = np.abs(errors[0]) > 3 * noise[0]
    return errors[1], noise[1], float(np.max(errors[0] ** 2, initial=0.0, where=clear))


def _inverse(matrix: np.ndarray) -> np.ndarray:
    return linalg.cho_solve(linalg.cho_factor(matrix), np.eye(len(matrix)))


def _mahalanobis(values: np.ndarray, mean: np.ndarray, covariance: np.ndarray) -> np.ndarray:
    factor = linalg.cholesky(covariance, lower=True)
    return (linalg.solve_triangular(factor, (values - mean).T, lower=True) ** 2).sum(0)


def _drawn(log_weights: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A column number for each row, with probabilities proportional to the weights."""
    log_weights -= log_weights.max(1, keepdims=True)
    sums = np.exp(log_weights, out=log_weights).cumsum(axis=1)
    levels = rng.random(len(sums)) * sums[:, -1]
    return np.array([row.searchsorted(u) for row, u in zip(sums, levels, strict=True)])
