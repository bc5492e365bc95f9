"""Means of functions of a chain with control variates, on arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import linalg

from pymc_sgmcmc.checks import one_of, whole_number
from pymc_sgmcmc.stein import BATCHES
from pymc_sgmcmc.trace_tools.reader import chunks, every_nth, root_of_draws
from pymc_sgmcmc.trace_tools.zero_variance.coefficients import (
    BATCHES_PER_TERM,
    REGRESSIONS,
    fit_coefficients,
    folds,
    out_of_fold,
)
from pymc_sgmcmc.trace_tools.zero_variance.terms import count_terms, stein_terms

ROUNDING = 8 * np.finfo(float).eps
"""Largest standard error of a mean, relative to the mean, of a function that is constant except for
rounding: a few units in the last place."""

SHORT_BATCH = 5.0
"""Autocorrelation times that a batch should last. Errors are 5 % too small then."""

COEFFICIENTS = ("batch_means", "marginal")
"""Names of the covariances that give the coefficients: those of batch means or of single draws."""


@dataclass(frozen=True)
class Whitening:
    r"""Coordinates x with :math:`\theta = c + L x`, in which draws have unit covariance.

    The gradient in x is :math:`L^\top` times that in the position. Terms of order 2 and above
    depend on the coordinates; with the covariance of the chain for :math:`L L^\top` they do not
    depend on those of the user.

    Attributes
    ----------
    center : numpy.ndarray, shape (d,)
    root : numpy.ndarray, shape (d, d)
        L, lower triangular.
    """

    center: np.ndarray
    root: np.ndarray

    @classmethod
    def of(cls, positions: np.ndarray, labels: tuple[str, ...] = ()) -> Whitening:
        """From the mean and covariance of draws of shape (chains, draws, d)."""
        draws = every_nth(positions).reshape(-1, positions.shape[-1])
        center, scale = draws.mean(0), draws.std(0)
        scaled = (draws - center) / scale
        labels = labels or tuple(f"coordinate {number}" for number in range(len(scale)))
        root = root_of_draws(scaled.T @ scaled / len(scaled), labels, len(draws))
        return cls(center, scale[:, None] * root)

    def positions(self, values: np.ndarray) -> np.ndarray:
        """Coordinates x of positions, shape (n, d)."""
        centred = (values - self.center).T
        return linalg.solve_triangular(self.root, centred, lower=True, check_finite=False).T

    def gradients(self, values: np.ndarray) -> np.ndarray:
        """Gradients in x of gradients in the position, shape (n, d)."""
        return values @ self.root

    def terms(self, positions: np.ndarray, gradients: np.ndarray, order: int) -> np.ndarray:
        """`stein_terms` in x of positions and gradients, shape (n, d)."""
        return stein_terms(self.positions(positions), self.gradients(gradients), order)


@dataclass(frozen=True)
class Means:
    """Means of q functions with and without control variates, and their Monte-Carlo errors.

    Attributes
    ----------
    mean, standard_error : numpy.ndarray, shape (q,)
        With control variates. The error of the estimated coefficients is included.
    mean_before, standard_error_before : numpy.ndarray, shape (q,)
        Without control variates.
    batches : int
        Batches of all chains together.
    batch_length : int
        Draws of a batch, or transitions.
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
        """Variance of the mean without control variates over that with, shape (q,)."""
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

        The variance of means of L draws of an autoregression with time τ is too small by
        (τ - 1/τ) / 2L of itself.
        """
        known = self.moving & (variances > 0)
        long_run = self.standard_error_before**2 * self.batches * self.batch_length
        times = float(np.max(long_run[known] / variances[known], initial=0))
        if self.batch_length >= SHORT_BATCH * (times - 1 / max(times, 1)):
            return []
        return [
            f"Batches of {self.batch_length} {unit} are short beside an autocorrelation time of "
            f"about {times:.0f}: errors are larger than stated. Sample more draws, or use fewer "
            "`batches`."
        ]


@dataclass(frozen=True)
class ControlledMeans(Means):
    """Means over draws, with what the control variates of single draws are computed from.

    Attributes
    ----------
    coefficients : numpy.ndarray, shape (p, q)
        From all batches, for the terms of `stein_terms` in the coordinates of `whitening`.
    whitening : Whitening
    order : int
    long_run_gradient : numpy.ndarray, shape (d,)
        Variance of the batch means of the gradients times the length, in coordinates of
        `whitening`.
    """

    coefficients: np.ndarray
    whitening: Whitening
    order: int
    long_run_gradient: np.ndarray

    def control(self, positions: np.ndarray, gradients: np.ndarray) -> np.ndarray:
        """Control variates at draws, shape (n, q), of positions of shape (n, d)."""
        return self.whitening.terms(positions, gradients, self.order) @ self.coefficients


def controlled_means(
    values: Sequence[np.ndarray],
    positions: np.ndarray,
    gradients: np.ndarray,
    order: int = 1,
    *,
    coefficients: str = "batch_means",
    regression: str = "least_squares",
    split: bool = False,
    batches: int | None = None,
    labels: tuple[str, ...] = (),
) -> ControlledMeans:
    r"""Means of functions over chains, with polynomial control variates.

    Parameters
    ----------
    values : sequence of numpy.ndarray, each of shape (chains, draws, ...)
        Functions at the draws.
    positions, gradients : numpy.ndarray, shape (chains, draws, d)
        Unconstrained positions and unbiased gradients of plus the log posterior there. Read in
        pieces, never copied.
    order, coefficients, regression, split, batches
        As in `zero_variance`.
    labels : tuple of str
        Of the coordinates, for messages.

    Raises
    ------
    ValueError
        Where there are too few batches for the terms, or settings are unknown.

    Notes
    -----
    With least squares over batch means the mean is the constant of a linear regression, and the
    error is that of the constant: :math:`s^2 (1 / B + \bar h^\top (H_c^\top H_c)^{-1} \bar h)` with
    B - p - 1 degrees of freedom. With `split`, and with other regressions, :math:`s^2` comes from
    batches whose coefficients are those of other batches; and for other coefficients than these
    the second term is the jackknife variance of :math:`\hat a^\top \bar h` over fifths of the
    batches. It counts where the bias of the chain gives h a mean, as with order 2.

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
    one_of("regression", regression, REGRESSIONS)
    if coefficients == "marginal" and regression != "least_squares":
        raise ValueError(
            f"`regression` should be 'least_squares' with coefficients='marginal', but got "
            f"{regression!r}: single draws are enough for all terms. Use "
            'coefficients="batch_means" to have it.'
        )
    chains, draws, d = positions.shape
    p = count_terms(d, order)
    count = _batches(chains, draws, p, order, coefficients, regression, batches)
    whitening = Whitening.of(positions, labels)
    f = np.concatenate(
        [batch_means(array, count).reshape(chains * count, -1) for array in values], axis=1
    )
    g = whitening.gradients(batch_means(gradients, count))
    if order == 1:
        h = stein_terms(g, g, 1)
    else:
        h = _batch_means_of_terms(positions, gradients, order, whitening, count)

    fit: Callable[[np.ndarray], np.ndarray]
    if coefficients == "marginal":
        fit = _marginal_fit(values, positions, gradients, order, whitening, count)
    else:

        def fit(rows: np.ndarray) -> np.ndarray:
            return fit_coefficients(h[rows], f[rows], regression)

    exact = coefficients == "batch_means" and regression == "least_squares"
    means, a = control_batches(f, h, fit, draws // count, exact=exact, split=split)
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
    fit: Callable[[np.ndarray], np.ndarray],
    length: int,
    *,
    exact: bool,
    split: bool,
) -> tuple[Means, np.ndarray]:
    """Means and coefficients, shape (p, q), from means over batches.

    Parameters
    ----------
    values, terms : numpy.ndarray, shapes (batches, q) and (batches, p)
    fit : callable
        Coefficients from the batches of the given numbers.
    length : int
        Draws or transitions of a batch.
    exact : bool
        Whether these are least squares over the batches.
    split : bool
        Whether coefficients are to come from other batches.
    """
    rows = len(values)
    a = fit(np.arange(rows))
    controlled = values + terms @ a
    if split or not exact:
        apart, a_apart = out_of_fold(fit, terms, values)
        mean = (apart if split else controlled).mean(0)
        spread = apart.std(0, ddof=1)
    else:
        mean = controlled.mean(0)
        spread = controlled.std(0) * np.sqrt(rows / (rows - terms.shape[1] - 1))
    if exact:
        error = spread * np.sqrt(1 / rows + _leverage(terms))
    else:
        moved = terms.mean(0) @ a_apart
        error = np.sqrt(spread**2 / rows + (len(moved) - 1) * moved.var(0))
    error_before = values.std(0, ddof=1) / np.sqrt(rows)
    return Means(mean, error, values.mean(0), error_before, rows, length), a


def batch_means(values: np.ndarray, batches: int) -> np.ndarray:
    """Means of successive batches of each chain, shape (chains * batches, ...).

    The first draws are left out where their number is no multiple. Not those of
    `pymc_sgmcmc.stein`, whose number of batches is fixed.
    """
    chains, draws = values.shape[:2]
    length = draws // batches
    kept = values[:, draws - batches * length :]
    parts = kept.reshape(chains, batches, length, *values.shape[2:])
    return parts.mean(2, dtype=float).reshape(chains * batches, *values.shape[2:])


def _batches(
    chains: int,
    draws: int,
    terms: int,
    order: int,
    coefficients: str,
    regression: str,
    given: int | None,
) -> int:
    """Batches a chain."""
    exact = coefficients == "batch_means" and regression == "least_squares"
    needed = -(-BATCHES_PER_TERM * (terms + 1) // chains)
    if given is not None:
        whole_number("batches", given, 2, " a chain")
    chosen = given if given is not None else max(BATCHES, needed) if exact else BATCHES
    if given is None and not exact:
        chosen = min(chosen, draws // 2)
    if draws < 2 * chosen or (exact and chosen < needed):
        options = ["sample more draws, with batches longer than the autocorrelation time"]
        if order > 1:
            options.append("use order=1")
        if exact:
            options.append('use regression="cv"')
        raise ValueError(
            f"{terms} terms of order {order} should have at least {needed * chains} batches of 2 "
            f"draws or more, but the trace has {chains} x {draws} draws"
            + (f" and batches={given}" if given is not None else "")
            + f". To go on, {', or '.join(options)}."
        )
    return chosen


def _leverage(h: np.ndarray) -> float:
    """Addition of the slopes to the variance of the constant of a regression on h.

    More than p over the square of the batches where a bias of the chain gives h a mean.
    """
    centred = h - h.mean(0)
    return float(h.mean(0) @ linalg.lstsq(centred.T @ centred, h.mean(0))[0])


def _batch_slices(chains: int, draws: int, batches: int) -> list[tuple[int, slice]]:
    length = draws // batches
    starts = range(draws - batches * length, draws, length)
    return [(chain, slice(start, start + length)) for chain in range(chains) for start in starts]


def _batch_means_of_terms(
    positions: np.ndarray, gradients: np.ndarray, order: int, whitening: Whitening, batches: int
) -> np.ndarray:
    chains, draws, d = positions.shape
    p = count_terms(d, order)
    means = []
    for chain, part in _batch_slices(chains, draws, batches):
        x, g, total = positions[chain, part], gradients[chain, part], np.zeros(p)
        for _, piece in chunks(1, len(x), p):
            total += whitening.terms(x[piece], g[piece], order).sum(0)
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
    """Coefficients from covariances over the draws of given batches, whole folds of them."""
    chains, draws, d = positions.shape
    p = count_terms(d, order)
    q = sum(int(np.prod(array.shape[2:])) for array in values)
    parts = _batch_slices(chains, draws, batches)
    groups = folds(len(parts))
    origin = np.concatenate([np.ravel(array[0, 0]).astype(float) for array in values])
    sums, products = np.zeros((len(groups), p + q)), np.zeros((len(groups), p + q, p + q))
    counts = np.zeros(len(groups))
    for number, group in enumerate(groups):
        for chain, part in (parts[row] for row in group):
            x, g = positions[chain, part], gradients[chain, part]
            f = [array[chain, part].reshape(len(x), -1) for array in values]
            for _, piece in chunks(1, len(x), p + q):
                h = whitening.terms(x[piece], g[piece], order)
                both = np.concatenate(
                    [h, np.hstack([array[piece] for array in f]) - origin], axis=1
                )
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
