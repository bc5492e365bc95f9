"""A posterior whose likelihood is estimated from a fixed random set of rows."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from pymc_sgmcmc.posterior import Posterior

SUBSAMPLE_ROWS = 10_000
"""The curvature is computed, and the search for the mode begins, on this many rows or more. An
element of the curvature from so many rows has a relative error of some per cent."""


SUBSAMPLE_GROUPS = (500, 2_000)
"""Where rows are groups of records, this many are enough, the fewer the more records they have: a
group says more than a record. An element of the curvature from 500 groups, such as that of the log
of their scale, has a relative error of up to 6 %, and from 2000 one of 3 %."""

ELEMENTS_OF_GROUPS = 240_000
"""Elements of the groups of a subsample, between these numbers: 2000 groups of ten records."""

SUBSAMPLE_OPERATIONS = 1_000_000_000
"""More rows are taken as long as rows times elements of a row times evaluations stay below this
number. This is a second of work where a row has twenty elements, and several where it has few."""

SINGLE_ROWS = 200
"""The information of rows is estimated from the gradients of so many, up to a tenth. Third
derivatives are judged by no fewer."""


def fewest_rows(posterior: Posterior) -> int:
    """Rows of a subsample, or more."""
    if not posterior.rows_are_groups:
        return SUBSAMPLE_ROWS
    return int(np.clip(ELEMENTS_OF_GROUPS // max(1, posterior.row_elements), *SUBSAMPLE_GROUPS))


class Subsample:
    """The posterior with its likelihood estimated from a fixed random set of rows.

    Parameters
    ----------
    posterior : Posterior
    evaluations : int
        Expected number of gradients. With few evaluations or small rows more rows are taken, up to
        all of them, since a rare predictor has a curvature in few rows only.
    operations : int
        Rows times elements of a row times evaluations up to which more rows are taken.
    count : int, optional
        Number of rows, or more, in place of that from `operations`.
    fewest : int, optional
        Least number of rows. Default: `fewest_rows`, and 20 a coordinate.
    """

    def __init__(
        self,
        posterior: Posterior,
        evaluations: int = 0,
        operations: int = SUBSAMPLE_OPERATIONS,
        count: int = 0,
        fewest: int | None = None,
    ):
        if fewest is None:
            fewest = max(fewest_rows(posterior), 20 * posterior.dimension)
        count = max(count, fewest)
        if evaluations:
            count = max(count, operations // (evaluations * max(1, posterior.row_operations)))
        self.count = count = min(posterior.n_rows, count)
        self.posterior = posterior
        self.weight = posterior.n_rows / count

    @cached_property
    def rows(self) -> list[np.ndarray]:
        """The rows, which are read at their first use."""
        posterior = self.posterior
        if self.count == posterior.n_rows:
            return posterior.take(slice(None))
        rng = np.random.default_rng(2011)
        chosen = rng.choice(posterior.n_rows, size=self.count, replace=False)
        return posterior.take(np.sort(chosen))

    def log_density_and_gradient(self, position: np.ndarray) -> tuple[float, np.ndarray]:
        """Log density of prior and weighted rows, and its gradient."""
        value, gradient = self.posterior.log_prior_and_gradient(position)
        row_value, row_gradient = self.posterior.log_likelihood_and_gradient(position, self.rows)
        return value + self.weight * row_value, gradient + self.weight * row_gradient

    def log_densities_and_gradients(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Log densities at positions (positions, d), and their gradients of the same shape."""
        values, gradients = self.posterior.log_priors_and_gradients(positions)
        of_rows, slopes = self.posterior.log_likelihoods_and_gradients(positions, self.rows)
        return values + self.weight * of_rows, gradients + self.weight * slopes

    def gradient(self, position: np.ndarray) -> np.ndarray:
        """Gradient of the log density, NaN where the density is zero."""
        value, gradient = self.log_density_and_gradient(position)
        return gradient if np.isfinite(value) else np.full(len(position), np.nan)

    def gradients_alone(self, positions: np.ndarray) -> np.ndarray:
        """Gradients of the log density at several positions, without the values.

        Without the values a gradient takes half of the time. Both shapes are (positions, d).
        """
        prior = self.posterior.prior_gradients(positions)
        return prior + self.weight * self.posterior.likelihood_gradient(positions, self.rows)

    @cached_property
    def _some(self) -> np.ndarray:
        return np.unique(np.linspace(0, self.count - 1, SINGLE_ROWS).astype(int))

    @property
    def some_rows(self) -> list[np.ndarray]:
        """At most `SINGLE_ROWS` of the rows."""
        return self.posterior.part(self.rows, self._some)

    def gradients_of_some_rows(self, position: np.ndarray) -> np.ndarray:
        """Gradients of at most `SINGLE_ROWS` rows, shape (rows, d)."""
        return self.single_row_gradients(position, self._some)

    def single_row_gradients(self, position: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Gradients of single rows, shape (rows, d)."""
        posterior, rows = self.posterior, self.posterior.part(self.rows, numbers)
        gradients = posterior.row_gradients(posterior.position_of_rows(position), rows)
        positions = np.broadcast_to(position, gradients.shape)
        return posterior.gradients_from_rows(positions, gradients)
