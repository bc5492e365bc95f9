r"""The Gaussian with independent coordinates that is nearest to a posterior.

Its mean is near that of the posterior also where the mode is far from it, as with the scale of
many group effects. With fixed :math:`z_k` the objective

.. math:: \frac{1}{2K} \sum_{k=1}^K \sum_{\pm} \log \pi(m \pm s \odot z_k) + \sum_i \log s_i

is a smooth function of the mean m and the standard deviations s, and L-BFGS maximizes it
(Giordano, Ingram and Broderick 2024).

References
----------
R. Giordano, M. Ingram and T. Broderick (2024). Black box variational inference with a
deterministic objective: faster, more accurate, and even more black box. *Journal of Machine
Learning Research* 25 (18), 1-39.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.matrices import Diagonal, Matrix
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.tuning.mode_search import CENTER_TOLERANCE, MOST_STEPS, minimize
from pymc_sgmcmc.tuning.subsample import SUBSAMPLE_ROWS, Subsample

MEAN_FIELD_PAIRS = 10
"""The objective is a mean over this many antithetic pairs of points. It is a compromise between
their noise, since the result is only where a search begins, and their time."""

FEWEST_GROUPS = 100
"""Where rows are groups of records, each pair of points has at least this many of them. The groups
of all pairs together decide where the objective is largest, since the first-order error cancels."""


def mean_field(
    posterior: Posterior,
    start: np.ndarray,
    scale: np.ndarray | Matrix,
    tilt: np.ndarray | None = None,
    root: Matrix | None = None,
    steps: int = MOST_STEPS,
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviations of the Gaussian with independent coordinates that is nearest.

    The rows are divided among the pairs of points where that leaves `SUBSAMPLE_ROWS` to each, or
    `FEWEST_GROUPS`, so that one evaluation costs two passes over the rows. Both points of a pair
    have the same rows, whose first-order error cancels.

    Parameters
    ----------
    posterior : Posterior
    start : numpy.ndarray, shape (d,)
        Mean with which the search begins.
    scale : numpy.ndarray, shape (d,), or Matrix
        Standard deviations with which it begins. With the root of a covariance in their place,
        coordinates are independent in terms of that, and so are the deviations that are found.
    tilt : numpy.ndarray, shape (d,), optional
        A linear function of the position with this gradient is added to the log density.
    root : Matrix, optional
        The mean is searched in units of this root of a covariance, which correlated coordinates
        need. Default: of `scale`.
    steps : int
        Most steps of L-BFGS.

    Raises
    ------
    ValueError
        Where the log density is not finite at the points around the start.
    """
    rng, d = np.random.default_rng(1757), len(start)
    along: Matrix = Diagonal(scale) if isinstance(scale, np.ndarray) else scale
    root = root or along
    slant = np.zeros(d) if tilt is None else root.T @ tilt
    directions = rng.standard_normal((MEAN_FIELD_PAIRS, d))
    rows = Subsample(posterior, evaluations=2 * MOST_STEPS).rows
    count = len(rows[0])
    fewest = FEWEST_GROUPS if posterior.rows_are_groups else SUBSAMPLE_ROWS
    # Each block is for the same number of pairs, so that all rows have equal weights.
    number = max(
        divisor
        for divisor in range(1, MEAN_FIELD_PAIRS + 1)
        if MEAN_FIELD_PAIRS % divisor == 0 and divisor <= max(1, count // fewest)
    )
    shares = np.array_split(rng.permutation(count), number)
    blocks = [posterior.part(rows, np.sort(share)) for share in shares]

    def objective(coordinates: np.ndarray) -> tuple[float, np.ndarray]:
        mean = start + root @ coordinates[:d]
        own = np.exp(coordinates[d:]) * np.repeat(directions, 2, axis=0)
        own[1::2] *= -1
        shifts = along.each(own)
        points, of_pairs = len(shifts), np.arange(len(shifts)) // 2
        values, slopes = posterior.log_priors_and_gradients(mean + shifts)
        for number, block in enumerate(blocks):
            some, weight = of_pairs % len(blocks) == number, posterior.n_rows / len(block[0])
            of_rows = posterior.log_likelihoods_and_gradients(mean + shifts[some], block)
            values[some] += weight * of_rows[0]
            slopes[some] += weight * of_rows[1]
        total = values.sum()
        of_mean, of_deviations = slopes.sum(axis=0), ((slopes @ along) * own).sum(axis=0)
        gradient = np.concatenate([root.T @ of_mean, of_deviations])
        gradient = gradient / points + np.repeat([0.0, 1.0], d)
        gradient[:d] += slant
        return total / points + slant @ coordinates[:d] + coordinates[d:].sum(), gradient

    width = 1.0
    while width > np.sqrt(np.finfo(float).eps):
        begin = np.concatenate([np.zeros(d), np.full(d, np.log(width))])
        with suppress(ValueError):  # The log density is zero at some of the points.
            end = minimize(objective, begin, Diagonal(np.ones(2 * d)), CENTER_TOLERANCE, steps)
            deviations = np.exp(end[d:])
            return start + root @ end[:d], deviations * (scale if along is not scale else 1.0)
        width /= 4
    raise ModelError("The log density is not finite at points around the start.")
