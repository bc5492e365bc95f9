"""Means of functions of a chain with control variates, on arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from scipy import linalg, special

from pymc_sgmcmc.checks import one_of, whole_number
from pymc_sgmcmc.stein import BATCHES, batch_means, split_into_batches
from pymc_sgmcmc.trace_tools.diagnostics import ess
from pymc_sgmcmc.trace_tools.reader import chunks
from pymc_sgmcmc.trace_tools.whitening import Whitening
from pymc_sgmcmc.trace_tools.zero_variance.coefficients import (
    BATCHES_PER_TERM,
    REGRESSIONS,
    fit_coefficients,
    folds,
    out_of_fold,
)
from pymc_sgmcmc.trace_tools.zero_variance.terms import count_terms, stein_terms

ROUNDING = 8 * np.finfo(float).eps
"""A function counts as constant where the standard error of its mean, relative to the mean, is at
most this number. Rounding alone makes it a few units in the last place."""

SHORT_BATCH = 5.0
"""Batches are noted as short where they last fewer autocorrelation times than this number. At this
length, standard errors are about 5 % too small."""

FEWEST_OF_A_CHAIN = 8
"""Whether batches depend on each other is judged where a chain has at least this number of them."""

CHANCE = 0.01
"""Means of chains that have met differ by more than their errors allow in this part of all reports,
by Bonferroni's bound over the means. Stated errors are then several times as large, so that a
larger part would cost accuracy."""

COEFFICIENTS = ("batch_means", "marginal")
"""These are the names of the covariances that give the coefficients: those of batch means, or those
of single draws."""


@dataclass(frozen=True)
class Means:
    """Means of q functions with and without control variates, and their Monte-Carlo errors.

    Attributes
    ----------
    mean, standard_error : numpy.ndarray, shape (q,)
        Estimates with control variates. The standard error includes that of the coefficients.
    mean_before, standard_error_before : numpy.ndarray, shape (q,)
        Estimates without control variates.
    batches : int
        Number of batches of all chains together.
    batch_length : int
        Number of draws, or of transitions, in a batch.
    """

    mean: np.ndarray
    standard_error: np.ndarray
    mean_before: np.ndarray
    standard_error_before: np.ndarray
    batches: int
    batch_length: int

    @property
    def moving(self) -> np.ndarray:
        """Which functions are not constant over the draws, shape (q,)."""
        return self.standard_error_before > ROUNDING * np.abs(self.mean_before)

    @property
    def variance_ratio(self) -> np.ndarray:
        """Variance of the mean without control variates over that with them, shape (q,)."""
        moving = self.moving
        after = np.where(moving, self.standard_error, 1.0)
        tiny = np.where(moving, self.standard_error_before, 1.0) * np.finfo(float).eps
        ratio = (self.standard_error_before / np.maximum(after, tiny)) ** 2
        return np.where(moving, ratio, np.nan)

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """The estimates by the names of the columns of a table."""
        return {
            "mean": self.mean,
            "mcse": self.standard_error,
            "mean_before": self.mean_before,
            "mcse_before": self.standard_error_before,
            "variance_ratio": self.variance_ratio,
        }

    def short_batches(self, variances: np.ndarray, unit: str) -> list[str]:
        """Note where batches are not independent, given the variances of single draws.

        For an autoregression with autocorrelation time τ, the estimated variance of means of L
        draws is too small by the share (τ - 1/τ) / 2L.
        """
        known = self.moving & (variances > 0)
        long_run = self.standard_error_before**2 * self.batches * self.batch_length
        times = float(np.max(long_run[known] / variances[known], initial=0))
        if self.batch_length >= SHORT_BATCH * (times - 1 / max(times, 1)):
            return []
        return [
            f"Batches of {self.batch_length} {unit} are short beside an autocorrelation time of "
            f"about {times:.0f}, so that errors are larger than stated. Sample more draws, or use "
            "fewer `batches`."
        ]


@dataclass(frozen=True)
class ControlledMeans(Means):
    """Means over draws, with what is needed to compute the control variates of single draws.

    Attributes
    ----------
    coefficients : numpy.ndarray, shape (p, q)
        Coefficients from all batches, of the terms of `stein_terms` in the coordinates of
        `whitening`.
    whitening : Whitening
        Coordinates in which the chain has unit covariance. Terms of order 2 and above depend on the
        coordinates. With these they do not depend on the units of the user.
    order : int
        Largest degree of the polynomials.
    long_run_gradient : numpy.ndarray, shape (d,)
        Variance of the batch means of the gradients times the length of a batch, in the coordinates
        of `whitening`.
    """

    coefficients: np.ndarray
    whitening: Whitening
    order: int
    long_run_gradient: np.ndarray

    def control(self, positions: np.ndarray, gradients: np.ndarray) -> np.ndarray:
        """Control variates, shape (n, q), at draws with positions of shape (n, d)."""
        return _terms(self.whitening, positions, gradients, self.order) @ self.coefficients


def controlled_means(
    values: Sequence[np.ndarray],
    positions: np.ndarray,
    gradients: np.ndarray,
    order: int = 1,
    *,
    coefficients: str = "batch_means",
    regression: str = "least_squares",
    batches: int | None = None,
    labels: tuple[str, ...] = (),
) -> ControlledMeans:
    r"""Means of functions over chains, with polynomial control variates.

    Parameters
    ----------
    values : sequence of numpy.ndarray, each of shape (chains, draws, ...)
        Functions at the draws.
    positions, gradients : numpy.ndarray, shape (chains, draws, d)
        Unconstrained positions, and unbiased gradients of plus the log posterior there. They are
        read in pieces and never copied.
    order, coefficients, regression, batches
        Settings of `zero_variance`.
    labels : tuple of str
        Labels of the coordinates, for messages.

    Raises
    ------
    ValueError
        Where there are too few batches for the terms, or a setting is unknown.

    Notes
    -----
    With least squares over batch means, the mean is the constant of a linear regression and its
    standard error is that of the constant: :math:`s^2 (1 / B + \bar h^\top (H_c^\top H_c)^{-1}
    \bar h)` with the residual variance :math:`s^2` and the centred batch means :math:`H_c` of the B
    batches. The second part counts where the bias of the chain gives h a mean, as with order 2.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.random.default_rng(1).normal(size=(4, 1000, 2))
    >>> means = controlled_means([3 * x[..., 0], x[..., 1] ** 2], x, -x, order=2)
    >>> bool(np.abs(means.mean - [0, 1]).max() < 1e-12)
    True
    """
    whole_number("order", order, 1, " of the polynomials")
    one_of("coefficients", coefficients, COEFFICIENTS)
    one_of("regression", regression, tuple(REGRESSIONS))
    marginal = coefficients == "marginal"
    if marginal and regression != "least_squares":
        raise ValueError(
            "`regression` should be 'least_squares' with coefficients='marginal', but got "
            f"{regression!r}. Leave one of them out."
        )
    chains, draws, d = positions.shape
    p = count_terms(d, order)
    exact = regression == "least_squares" and not marginal
    source = f"{chains} x {draws} draws give"
    count = number_of_batches(chains, draws // 2, p, order, exact, batches, source)
    whitening = Whitening.of(positions, labels)
    f = np.concatenate(
        [batch_means(array, count).reshape(chains * count, -1) for array in values], axis=1
    )
    g = whitening.gradients(batch_means(gradients, count))
    if order == 1:
        h = stein_terms(g, g, 1)
    else:
        h = _batch_means_of_terms(positions, gradients, order, whitening, count)
    fit = _marginal_fit(values, positions, gradients, order, whitening, count) if marginal else None
    means, a = control_batches(f, h, chains, draws // count, regression=regression, fit=fit)
    return ControlledMeans(
        **vars(means),
        coefficients=a,
        whitening=whitening,
        order=order,
        long_run_gradient=g.var(0, ddof=1) * (draws // count),
    )


def control_batches(
    values: np.ndarray,
    terms: np.ndarray,
    chains: int,
    length: int,
    *,
    regression: str,
    fit: Callable[[np.ndarray], np.ndarray] | None = None,
) -> tuple[Means, np.ndarray]:
    """Means and coefficients, shape (p, q), from means over batches.

    Values have shape (batches, q), terms (batches, p), with the batches of each chain together. A
    batch is `length` draws or transitions. `fit` gives coefficients from the batches with given
    numbers. The default is the regression over the batch means.
    """
    exact = fit is None and regression == "least_squares"
    coefficients = fit or (lambda rows: fit_coefficients(terms[rows], values[rows], regression))
    rows = len(values)
    a = coefficients(np.arange(rows))
    controlled = values + terms @ a
    if exact:
        spread = controlled.std(0) * np.sqrt(rows / (rows - terms.shape[1] - 1))
        error = spread * np.sqrt(1 / rows + _leverage(terms))
    else:
        held_out, a_of_folds = out_of_fold(coefficients, terms, values)
        spread, moved = held_out.std(0, ddof=1), terms.mean(0) @ a_of_folds
        error = np.sqrt(spread**2 / rows + (len(moved) - 1) * moved.var(0))
    error_before = values.std(0, ddof=1) / np.sqrt(rows)
    if chains > 1:
        apart = controlled
        if (rows - rows // chains) > 2 * terms.shape[1]:
            by_chain = np.split(np.arange(rows), chains)
            apart, _ = out_of_fold(coefficients, terms, values, by_chain)
        error = _of_dependent(error, apart, chains)
        error_before = _of_dependent(error_before, values, chains)
    return Means(controlled.mean(0), error, values.mean(0), error_before, rows, length), a


def _of_dependent(error: np.ndarray, controlled: np.ndarray, chains: int) -> np.ndarray:
    """Standard errors of means of batches that depend on each other, shape (q,).

    `error` is that of independent batches. It is larger where batches are shorter than the
    autocorrelation, by the effective number of batches of Vehtari et al. (2021). Where the means of
    chains differ by more than independent batches do, so that the chains have not met, their spread
    gives the error. `controlled` has the values of each chain with coefficients from the other
    chains, since coefficients from all chains would fit their means.
    """
    series = controlled.reshape(chains, -1, controlled.shape[1])
    if series.shape[1] < FEWEST_OF_A_CHAIN:
        return error
    with np.errstate(all="ignore"):
        effective = ess(series, "mean")
    error = error * np.sqrt(len(controlled) / np.fmin(effective, len(controlled)))
    within = np.sqrt(series.var(1, ddof=1).mean(0) / len(controlled))
    between = series.mean(1).std(0, ddof=1) / np.sqrt(chains)
    freedom = chains - 1
    largest = special.fdtri(freedom, len(controlled) - chains, 1 - CHANCE / controlled.shape[1])
    # Two errors of a few chains have the same probability as two of a normal law.
    wider = special.stdtrit(freedom, special.ndtr(2.0)) / 2
    met = between <= np.sqrt(largest) * within
    return np.where(met, error, np.maximum(error, wider * between))


def number_of_batches(
    chains: int,
    available: int,
    terms: int,
    order: int,
    exact: bool,
    given: int | None,
    source: str,
) -> int:
    """Number of batches of each chain, out of the number `available`.

    The number of terms matters where the coefficients are exactly those of least squares over the
    batches. `source` says what the batches are of, for the message.

    Raises
    ------
    ValueError
        Where there are too few batches for the terms, or fewer than the given number.
    """
    needed = -(-BATCHES_PER_TERM * (terms + 1) // chains) if exact else 2
    if given is None:
        chosen = min(max(BATCHES, needed), available)
    else:
        chosen = whole_number("batches", given, 2, " a chain")
    remedies = ["more draws"] + ["order=1"] * (order > 1) + ['regression="ridge"'] * exact
    if needed > available:
        raise ValueError(
            f"{terms} terms of order {order} should have at least {needed * chains} batches, but "
            f"{source} at most {available * chains}. Use {' or '.join(remedies)}."
        )
    if not needed <= chosen <= available:
        raise ValueError(
            f"`batches` should be from {needed} to {available} a chain for {terms} terms of order "
            f"{order}, but got {given}. Use such a number, or {' or '.join(remedies)}."
        )
    return chosen


def _leverage(h: np.ndarray) -> float:
    """What the slopes add to the variance of the constant of a regression on h.

    It is more than p over the squared number of batches where a bias of the chain gives h a mean.
    """
    centred = h - h.mean(0)
    return float(h.mean(0) @ linalg.lstsq(centred.T @ centred, h.mean(0))[0])


def _terms(
    whitening: Whitening, positions: np.ndarray, gradients: np.ndarray, order: int
) -> np.ndarray:
    """Terms of `stein_terms` in whitened coordinates, of positions and gradients (n, d)."""
    return stein_terms(whitening.positions(positions), whitening.gradients(gradients), order)


def _batches_of(*arrays: np.ndarray, batches: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Batches of several arrays, one chain after the other, each of shape (length, ...)."""
    split = (chain.from_iterable(split_into_batches(array, batches)) for array in arrays)
    return zip(*split, strict=True)


def _batch_means_of_terms(
    positions: np.ndarray, gradients: np.ndarray, order: int, whitening: Whitening, batches: int
) -> np.ndarray:
    """Means of the terms over each batch, shape (batches of all chains, p)."""
    p = count_terms(positions.shape[-1], order)
    means = []
    for x, g in _batches_of(positions, gradients, batches=batches):
        total = np.zeros(p)
        for _, piece in chunks(1, len(x), p):
            total += _terms(whitening, x[piece], g[piece], order).sum(0)
        means.append(total / len(x))
    return np.array(means)


def _marginal_fit(
    values: Sequence[np.ndarray],
    positions: np.ndarray,
    gradients: np.ndarray,
    order: int,
    whitening: Whitening,
    batches: int,
) -> Callable[[np.ndarray], np.ndarray]:
    """Function that gives coefficients from covariances over draws, for whole folds of batches."""
    p = count_terms(positions.shape[-1], order)
    origin = np.concatenate(
        [np.zeros(p), *(np.ravel(array[0, 0]).astype(float) for array in values)]
    )
    parts = list(_batches_of(positions, gradients, *values, batches=batches))
    groups = folds(len(parts))
    sums = np.zeros((len(groups), len(origin)))
    products, counts = np.zeros((*sums.shape, len(origin))), np.zeros(len(groups))
    for number, group in enumerate(groups):
        for x, g, *f in (parts[row] for row in group):
            for _, piece in chunks(1, len(x), len(origin)):
                h = _terms(whitening, x[piece], g[piece], order)
                flat = [array[piece].reshape(len(h), -1) for array in f]
                both = np.hstack([h, *flat]) - origin
                sums[number] += both.sum(0)
                products[number] += both.T @ both
            counts[number] += len(x)

    def fit(rows: np.ndarray) -> np.ndarray:
        used = [number for number, group in enumerate(groups) if np.isin(group[0], rows)]
        count = counts[used].sum()
        mean = sums[used].sum(0) / count
        covariance = products[used].sum(0) / count - np.outer(mean, mean)
        return -linalg.lstsq(covariance[:p, :p], covariance[:p, p:])[0]

    return fit
