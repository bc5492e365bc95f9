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


def mean_errors(positions: np.ndarray, effective_draws: float) -> tuple[np.ndarray, float]:
    r"""Errors of the means of `gaussian` and `average`, from the skewness of the shards.

    To first order the mean of a density is :math:`\tfrac12 L\, E[z |z|^2]` from its mode, with the
    whitened draws :math:`z = L^{-1} (\theta - \mu)`. Gaussians have no such shift. That of a shard
    is S times that of the posterior where shards are alike, so that the combined mean is off by

    .. math:: \Big(1 - \frac1S\Big)\, \Sigma \sum_s \Sigma_s^{-1} L_s\,
        \tfrac12 E_s\big[z |z|^2\big].

    Parameters
    ----------
    positions : numpy.ndarray, shape (shards, chains, draws, d)
    effective_draws : float
        Of a shard.

    Returns
    -------
    errors : numpy.ndarray, shape (d,)
        In combined standard deviations.
    noise : float
        Monte Carlo standard error of each.
    """
    shards, d = len(positions), positions.shape[-1]
    means, covariances = moments(positions)
    _, covariance = gaussian_product(means, covariances)
    weighted = np.zeros(d)
    for draws, mean, of_shard in zip(
        positions.reshape(shards, -1, d), means, covariances, strict=True
    ):
        factor = linalg.cholesky(of_shard, lower=True)
        z = linalg.solve_triangular(factor, (draws - mean).T, lower=True)
        shift = 0.5 * (z * (z**2).sum(0)).mean(1)
        weighted += linalg.solve_triangular(factor, shift, lower=True, trans="T")
    share = 1 - 1 / shards
    # Of Gaussian draws, whose sample mean is subtracted, z |z|² has the variance 2 (d + 2).
    noise = share * np.sqrt((d + 2) / (2 * effective_draws))
    return share * covariance @ weighted / np.sqrt(np.diag(covariance)), float(noise)


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
