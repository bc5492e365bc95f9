r"""The sequential test of austerity Metropolis-Hastings (Korattikara, Chen and Welling 2014)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from scipy import special

MOSTLY_READ = 0.5
"""Rows are drawn by rejection of those that were read before, until this part of all was read.
Fewer than two attempts a row are needed until then."""

ROUNDING = 16 * np.finfo(float).eps
"""Equal differences have a standard deviation of a few units in the last place of their mean."""


@dataclass(frozen=True)
class Decision:
    """Result of a test.

    Attributes
    ----------
    accepted : bool
    rows_read : int
    error : float
        Estimated probability that all rows would have led to the other decision, 0 where all were
        read.
    """

    accepted: bool
    rows_read: int
    error: float


class RunningMoments:
    """Mean and sum of squared deviations of numbers that come in batches."""

    def __init__(self) -> None:
        self.count, self.mean, self._squares = 0, 0.0, 0.0

    def add(self, values: np.ndarray) -> None:
        """Add a batch. Sums of squares are about means, so that no digits are lost."""
        values = values.astype(float)
        count, mean = len(values), float(values.mean())
        total, shift = self.count + count, mean - self.mean
        self._squares += float(((values - mean) ** 2).sum())
        self._squares += shift**2 * self.count * count / total
        self.mean += shift * count / total
        self.count = total

    @property
    def deviation(self) -> float:
        """Standard deviation with divisor n - 1."""
        return np.sqrt(self._squares / (self.count - 1))


def error_probability(moments: RunningMoments, threshold: float, n_rows: int) -> float:
    r"""Probability that the mean of all rows is on the other side of a threshold.

    .. math:: \delta = 1 - F_{n-1}\left(\frac{|\bar l - \mu_0|}{s}\right), \qquad
              s = \frac{s_l}{\sqrt n} \sqrt{1 - \frac{n - 1}{N - 1}}

    with F the distribution function of Student's t, and the second root the correction for rows
    that are drawn without replacement from N.

    Where all rows that were read are alike, they do not tell how much the others differ, and δ is
    1/2.
    """
    n = moments.count
    error = moments.deviation / np.sqrt(n) * np.sqrt(1 - (n - 1) / (n_rows - 1))
    if not moments.deviation > ROUNDING * abs(moments.mean):
        return 0.5
    return float(special.stdtr(n - 1, -abs(moments.mean - threshold) / error))


def sequential_test(
    differences: Callable[[np.ndarray], np.ndarray],
    threshold: float,
    n_rows: int,
    batch_size: int,
    error: float,
    rng: np.random.Generator,
) -> Decision:
    r"""Decide whether the mean of all N differences is larger than a threshold.

    After each batch of rows, drawn without replacement, the test stops where the estimated error
    :math:`\delta` is below :math:`\epsilon`, or where all rows were read (algorithm 1 of the
    paper). A difference that is minus infinity or NaN decides alone, against the proposal: a row
    of probability zero makes that of all rows zero.

    Parameters
    ----------
    differences : callable
        Function of row numbers that gives :math:`l_i = \log p(x_i \mid \theta^*) - \log p(x_i \mid
        \theta)` of these rows.
    threshold : float
        :math:`\mu_0`.
    n_rows, batch_size : int
    error : float
        :math:`\epsilon`. At 0 all rows are read, in their order.
    rng : numpy.random.Generator
    """
    if error == 0:
        values = differences(np.arange(n_rows))
        return Decision(bool(values.mean() > threshold), n_rows, 0.0)
    moments, estimate = RunningMoments(), 1.0
    for rows in random_batches(n_rows, batch_size, rng):
        values = differences(rows)
        if not np.isfinite(values).all():
            return Decision(bool(values.min() > -np.inf), moments.count + len(rows), 0.0)
        moments.add(values)
        if moments.count < n_rows:
            estimate = error_probability(moments, threshold, n_rows)
            if estimate < error:
                return Decision(moments.mean > threshold, moments.count, estimate)
    return Decision(moments.mean > threshold, n_rows, 0.0)


def random_batches(n_rows: int, batch_size: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Numbers of all rows in random order, in batches, each in a time that N hardly changes.

    A permutation of all rows would take longer than the test, so it is made of the rows that are
    left, where `MOSTLY_READ` of them are read.
    """
    is_read, count = np.zeros(n_rows, dtype=bool), 0
    while count + batch_size <= MOSTLY_READ * n_rows:
        rows = np.empty(0, dtype=np.int64)
        while len(rows) < batch_size:
            # Rejection of rows that were drawn before leaves the others equally likely.
            drawn = rng.integers(n_rows, size=2 * (batch_size - len(rows)))
            drawn = np.concatenate([rows, drawn[~is_read[drawn]]])
            _, first = np.unique(drawn, return_index=True)
            rows = drawn[np.sort(first)][:batch_size]
        is_read[rows] = True
        count += batch_size
        yield rows
    remaining = rng.permutation(np.flatnonzero(~is_read))
    for start in range(0, len(remaining), batch_size):
        yield remaining[start : start + batch_size]
