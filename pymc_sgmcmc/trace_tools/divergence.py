"""Chains that left the posterior for good and are still finite: what gives them away, on arrays.

A step that is too large for the curvature makes the position grow by a factor in each transition.
It takes hundreds of transitions until the numbers overflow, and a run may end before: nothing that
is computed from such draws means anything.
"""

from __future__ import annotations

import numpy as np

from pymc_sgmcmc.stein import stein_variance_error

LARGEST_POSITION = 1e100
"""Size of a coordinate from which on squares and their sums overflow."""

LARGEST_EXCESS = 1e4
"""Variance error by Stein's identity, relative, of a chain that is a hundred times too wide. A
chain at stationarity whose step is just stable has some hundreds."""

LARGEST_DISTANCE = 1e4
"""Median distance from the centre, in its standard deviations, of a chain that is too wide as well.
Where the centre is no guide, chains of the right width may rightly be far away."""

FEWEST_DRAWS = 80
"""Draws below which the spread of a quarter says nothing: by chance it may be a hundredth."""

LARGEST_GROWTH = 100.0
"""Spread of a coordinate in the last quarter of a chain over that in the first."""


def find_divergence(
    positions: np.ndarray,
    gradients: np.ndarray,
    center: np.ndarray | None = None,
    standard_deviations: np.ndarray | None = None,
) -> str | None:
    r"""What shows that a chain diverged, None where nothing does.

    Its size; its distance from the centre in posterior standard deviations; how its spread grows
    along the chain, by median absolute deviations, which heavy tails do not move; and Stein's
    identity: at stationarity :math:`-\mathrm{Cov}(\theta_i, \hat\nabla_i) = 1 + \delta_i` with the
    variance error :math:`\delta_i`, whatever the posterior.

    Parameters
    ----------
    positions, gradients : numpy.ndarray, shape (draws, d)
    center, standard_deviations : numpy.ndarray, shape (d,), optional
        Of the posterior, as far as they are known.

    Returns
    -------
    str or None
        Ends a sentence that begins with the chain.

    Examples
    --------
    >>> x = np.random.default_rng(1).normal(size=(400, 2))
    >>> find_divergence(x, -x)
    >>> find_divergence(x * 1.05 ** np.arange(400)[:, None], -x)
    'grows: its spread in the last quarter is 4e+06 times that in the first'
    """
    x, g = np.asarray(positions, dtype=float), np.asarray(gradients, dtype=float)
    size = float(max(np.abs(x).max(), np.abs(g).max()))
    if not size < LARGEST_POSITION:
        return f"reaches {size:.2g}, where squares overflow"
    growth = find_growth(x)
    if growth is not None:
        return growth
    excess = float(stein_variance_error(x[None], g[None]).value.max())
    if excess > LARGEST_EXCESS:
        return (
            f"is too wide for its gradients: by these its variance is {excess:.2g} times too large"
        )
    if center is not None and standard_deviations is not None and excess > 1:
        away = float((np.median(np.abs(x - center), axis=0) / standard_deviations).max())
        if away > LARGEST_DISTANCE:
            return f"is {away:.2g} posterior standard deviations away from the centre"
    return None


def find_growth(positions: np.ndarray) -> str | None:
    """Evidence that a chain grows, from its draws or their batch means, shape (draws, d).

    Returns
    -------
    str or None
        Ends a sentence that begins with the chain.
    """
    x = np.asarray(positions, dtype=float)
    size = float(np.abs(x).max())
    if not size < LARGEST_POSITION:
        return f"reaches {size:.2g}, where squares overflow"
    if len(x) < FEWEST_DRAWS:
        return None
    first, last = (_spread(x[part]) for part in _end_quarters(len(x)))
    growth = float((last / np.where(first > 0, first, np.inf)).max())
    if growth > LARGEST_GROWTH:
        return f"grows: its spread in the last quarter is {growth:.1g} times that in the first"
    return None


def _end_quarters(draws: int) -> tuple[slice, slice]:
    quarter = max(1, draws // 4)
    return slice(quarter), slice(draws - quarter, draws)


def _spread(values: np.ndarray) -> np.ndarray:
    """Median absolute deviation of each coordinate."""
    return np.median(np.abs(values - np.median(values, axis=0)), axis=0)
