r"""Comparison of the law of a run with that of exact chains that began at its draws. Arrays only.

Each statistic is the mean of a function f: of the position, of the square of its
distance from the mean of the posterior, and of
whether it is below a quantile of the run. For chain i let :math:`X_i` be f at its start and
:math:`Y_i` the mean of f along its later part. The regression :math:`Y = a + b X` over the chains
says how much of its start a chain remembers, and the mean under the posterior is estimated by its
fixed point :math:`a / (1 - b)`. Where chains have forgotten their starts, b = 0, this is the mean
of :math:`Y`. Where they have not, it is the mean of the run moved by :math:`1 / (1 - b)` times the
paired difference, whose error does not contain the spread of the starts. The chains are independent
given their starts, so that the residuals give the error, together with that of the mean of f over
all draws of the run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import special

from pymc_sgmcmc.trace_tools.diagnostics import ess

PROBABILITIES = (0.1, 0.25, 0.5, 0.75, 0.9)
"""These quantiles are compared."""

FEWEST_BEYOND = 10
"""A quantile is tested only where at least about so many chains are expected beyond it. The spread
of fewer says little about the error."""

LARGEST_MEMORY = 0.98
"""No more than this is taken for the part of the start that a chain remembers. Beyond it a fixed
point is unknown."""

WRONG_BY_CHANCE = 0.01
"""At most about this part of right runs has a shift beyond doubt in any statistic."""

LEAST_WIDTH = 0.02
"""The density at a quantile is measured between probabilities that are at least this far apart."""


@dataclass(frozen=True)
class Shifts:
    """How far statistics of the posterior are from those of a run, with standard errors.

    Attributes
    ----------
    mean, mean_error : numpy.ndarray, shape (d,)
        In posterior standard deviations.
    log_sd, log_sd_error : numpy.ndarray, shape (d,)
        Of the logarithm of the standard deviation.
    quantiles, quantile_errors : numpy.ndarray, shape (quantiles, d)
        In posterior standard deviations.
    probability_scores : numpy.ndarray, shape (quantiles, d)
        The shift of the probability below a quantile of the run, in its standard errors; zero where
        the chains are too few to test it.
    memory : numpy.ndarray, shape (d,)
        b of the mean.
    posterior_mean, posterior_sd : numpy.ndarray, shape (d,)
    """

    mean: np.ndarray
    mean_error: np.ndarray
    log_sd: np.ndarray
    log_sd_error: np.ndarray
    quantiles: np.ndarray
    quantile_errors: np.ndarray
    probability_scores: np.ndarray
    memory: np.ndarray
    posterior_mean: np.ndarray
    posterior_sd: np.ndarray


def compare(run: np.ndarray, starts: np.ndarray, later: np.ndarray) -> Shifts:
    """Compare a run with the later part of exact chains.

    Parameters
    ----------
    run : numpy.ndarray, shape (chains, draws, d)
        All draws of the run.
    starts : numpy.ndarray, shape (n, d)
        Those at which the exact chains began.
    later : numpy.ndarray, shape (transitions, n, d)
        States of the exact chains.
    """
    center, scale = run.mean((0, 1)), run.std((0, 1))
    run, starts, later = ((values - center) / scale for values in (run, starts, later))
    mean, mean_error, memory = _shift(run, starts, later)
    squares = [(values - mean) ** 2 for values in (run, starts, later)]
    shift, variance_error, _ = _shift(*squares)
    before = run.var((0, 1))
    variance = np.maximum(squares[0].mean((0, 1)) + shift, 0.1 * later.var((0, 1)))
    sd = np.sqrt(variance)
    # As many errors as the variance is off by, whose law is closer to Gaussian.
    apart = np.abs(variance - before) > 1e-9 * before
    slope = np.log(variance / before) / np.where(apart, variance - before, 1.0)
    slope = np.where(apart, slope, 1 / before)
    log_sd_error = 0.5 * slope * variance_error
    quantiles, quantile_errors, scores = [], [], []
    for probability in PROBABILITIES:
        shift, error, score = _quantile_shift(run, starts, later, probability)
        quantiles.append(shift / sd)
        quantile_errors.append(error / sd)
        scores.append(score)
    return Shifts(
        mean=mean / sd,
        mean_error=mean_error / sd,
        log_sd=0.5 * np.log(variance / before),
        log_sd_error=log_sd_error,
        quantiles=np.array(quantiles),
        quantile_errors=np.array(quantile_errors),
        probability_scores=np.array(scores),
        memory=memory,
        posterior_mean=center + scale * mean,
        posterior_sd=scale * sd,
    )


def doubt(dimension: int, chains: int) -> float:
    """Number of standard errors by which a shift of any statistic is beyond doubt.

    Bonferroni's bound over the coordinates, their statistics, and both signs.
    """
    tests = 2 * dimension * (2 + len(PROBABILITIES))
    return float(-special.stdtrit(chains - 2, WRONG_BY_CHANCE / tests))


def movement(earlier: np.ndarray, later: np.ndarray) -> np.ndarray:
    """How far the law of chains has moved between two parts, in standard errors.

    The shape is (statistics, d). The same chains are compared, so that what they have in common
    drops out.

    Parameters
    ----------
    earlier, later : numpy.ndarray, shape (transitions, n, d)
    """
    center, scale = later.mean((0, 1)), later.std((0, 1))
    scale = np.where(scale > 0, scale, 1.0)
    earlier, later = (earlier - center) / scale, (later - center) / scale
    scores = [_paired(later.mean(0) - earlier.mean(0))]
    scores.append(_paired((later**2).mean(0) - (earlier**2).mean(0)))
    for quantile in np.quantile(later, PROBABILITIES, axis=(0, 1)):
        scores.append(_paired((later <= quantile).mean(0) - (earlier <= quantile).mean(0)))
    return np.array(scores)


def imbalance(positions: np.ndarray, gradients: np.ndarray) -> np.ndarray:
    r"""How far chains are from Stein's identities, in standard errors, shape (2, d).

    At the posterior :math:`E[\nabla_i] = 0` and :math:`E[(\theta_i - c_i) \nabla_i] = -1`. A law
    that is the posterior in a part of the space alone, since chains hardly ever enter the rest,
    does not move, but the gradients at the border of this part have a mean.

    Parameters
    ----------
    positions, gradients : numpy.ndarray, shape (transitions, n, d)
    """
    center, scale = positions.mean((0, 1)), positions.std((0, 1))
    products = ((positions - center) * gradients).mean(0) + 1
    return np.array([_paired(gradients.mean(0) * scale), _paired(products)])


def _paired(differences: np.ndarray) -> np.ndarray:
    error = differences.std(0, ddof=1) / np.sqrt(len(differences))
    return differences.mean(0) / np.where(error > 0, error, np.inf)


def _shift(
    run: np.ndarray, starts: np.ndarray, later: np.ndarray, probability: float | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Shift of a mean from the run to the posterior, its error, and b; the last axis is kept.

    Of an indicator the probability in the run is given: where few chains have it, their spread is
    too small by chance, and so is made as large as that probability would make it.
    """
    mean, error = run.mean((0, 1)), _error(run)
    ends = later.mean(0)
    n = len(starts)
    spread = ((starts - starts.mean(0)) ** 2).mean(0)
    product = ((starts - starts.mean(0)) * (ends - ends.mean(0))).mean(0)
    memory = product / np.where(spread > 0, spread, 1.0)
    memory = np.clip(memory, 0.0, LARGEST_MEMORY)
    residuals = ends - memory * starts
    # The mean residual is a of the regression.
    difference = residuals.mean(0) - (1 - memory) * mean
    spread = residuals.var(0, ddof=1)
    if probability is not None:
        seen = np.clip(ends.mean(0), 0.5 / n, 1 - 0.5 / n)
        spread = spread * np.maximum(1.0, probability * (1 - probability) / (seen * (1 - seen)))
    variance = spread / n + ((1 - memory) * error) ** 2
    return difference / (1 - memory), np.sqrt(variance) / (1 - memory), memory


def _quantile_shift(
    run: np.ndarray, starts: np.ndarray, later: np.ndarray, probability: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Shift of a quantile, its error, and the shift of the probability in standard errors."""
    quantile = np.quantile(run, probability, axis=(0, 1))
    of_run, of_starts, of_later = (
        (values <= quantile).astype(float) for values in (run, starts, later)
    )
    shift, error, memory = _shift(of_run, of_starts, of_later, probability)
    width = np.maximum(error, LEAST_WIDTH)
    low, high = (np.clip(probability + sign * width, 0.0, 1.0) for sign in (-1, 1))
    at = np.array([low, np.full_like(low, probability), high])
    ordered = np.sort(later.reshape(-1, later.shape[-1]), axis=0)
    below, now, above = _quantiles_of_ordered(ordered, at)
    slope = (above - below) / (high - low)
    score = -shift / np.maximum(error, 1e-300)
    if round(len(starts) * min(probability, 1 - probability)) < FEWEST_BEYOND:
        score = np.zeros_like(score)
    return (now - quantile) / (1 - memory), slope * error, score


def _quantiles_of_ordered(ordered: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Quantiles of columns in order, at probabilities of shape (m, d)."""
    places = at * (len(ordered) - 1)
    lower = np.floor(places).astype(int)
    upper = np.minimum(lower + 1, len(ordered) - 1)
    columns = np.arange(ordered.shape[1])
    return ordered[lower, columns] + (places - lower) * (
        ordered[upper, columns] - ordered[lower, columns]
    )


def _error(run: np.ndarray) -> np.ndarray:
    """Monte-Carlo standard errors of the means over chains and draws, shape (d,)."""
    count = ess(run, "mean")
    return run.std((0, 1)) / np.sqrt(np.where(count > 0, count, 1.0))
