"""Signs on arrays that a chain left the posterior for good, while its numbers are still finite.

A step that is too large for the curvature makes the position grow by a factor in each transition.
It takes hundreds of transitions until the numbers overflow, and a run may end before that. Nothing
that is computed from such draws means anything.
"""

from __future__ import annotations

import numpy as np

from pymc_sgmcmc.stein import stein_variance_error

LARGEST_POSITION = 1e100
"""A chain whose coordinates or gradients reach this number has diverged. The largest number in
double precision is about 1e308, so that a product of two squares of such numbers overflows."""

LARGEST_EXCESS = 1e4
"""A chain whose relative variance error by Stein's identity is larger has diverged: it is a hundred
times too wide. For a chain at stationarity whose step is just stable the error is some hundreds."""

LARGEST_DISTANCE = 1e4
"""A chain that is too wide, and whose median distance from the centre is larger than this number of
posterior standard deviations, has diverged. The distance alone does not count, since a chain of the
right width may rightly be far from a centre that is not near the mode."""

FEWEST_DRAWS = 80
"""The growth of a chain with fewer draws, or batch means, is not looked at. The spread of so short
a quarter may be a hundredth of the right one by chance, since draws depend on each other."""

LARGEST_GROWTH = 100.0
"""A chain has diverged where the spread of a coordinate in its last quarter is more than this
multiple of that in its first quarter. The number is a compromise: a chain that begins at one point
also grows, and a chain that diverges slowly should still be seen."""


def find_divergence(
    positions: np.ndarray,
    gradients: np.ndarray,
    center: np.ndarray | None = None,
    standard_deviations: np.ndarray | None = None,
) -> str | None:
    r"""Evidence that a chain diverged, None where there is none.

    Four things are looked at: the size of the numbers; the growth of the spread along the chain;
    Stein's identity, by which :math:`-\mathrm{Cov}(\theta_i, \hat\nabla_i) = 1 + \delta_i` at
    stationarity, with the variance error :math:`\delta_i`, for any posterior; and the distance from
    the centre.

    Parameters
    ----------
    positions, gradients : numpy.ndarray, shape (draws, d)
    center, standard_deviations : numpy.ndarray, shape (d,), optional
        The centre of the run, and the posterior standard deviations there, where they are known.

    Returns
    -------
    str or None
        The end of a sentence that begins with the name of the chain.

    Examples
    --------
    >>> x = np.random.default_rng(1).normal(size=(400, 2))
    >>> find_divergence(x, -x)
    >>> find_divergence(x * 1.05 ** np.arange(400)[:, None], -x)
    'grows: its spread in the last quarter is 4e+06 times that in the first'
    """
    x, g = np.asarray(positions, dtype=float), np.asarray(gradients, dtype=float)
    growth = find_overflow(x, g) or find_growth(x)
    if growth is not None:
        return growth
    excess = float(stein_variance_error(x[None], g[None]).value.max())
    if excess > LARGEST_EXCESS:
        return f"is too wide: its variance is {excess:.2g} times too large for its gradients"
    if center is not None and standard_deviations is not None and excess > 1:
        away = float((np.median(np.abs(x - center), axis=0) / standard_deviations).max())
        if away > LARGEST_DISTANCE:
            return f"is {away:.2g} posterior standard deviations away from the centre"
    return None


def find_overflow(*arrays: np.ndarray) -> str | None:
    """Evidence that squares of the numbers of a chain overflow, as the end of a sentence."""
    size = float(max(np.abs(values).max() for values in arrays))
    return None if size < LARGEST_POSITION else f"reaches {size:.2g}, where squares overflow"


def find_growth(positions: np.ndarray) -> str | None:
    """Evidence that a chain grows, as the end of a sentence.

    The spread is the median absolute deviation, which heavy tails do not move.

    Parameters
    ----------
    positions : numpy.ndarray, shape (draws, d)
        Draws, or means of batches of them.
    """
    if len(positions) < FEWEST_DRAWS:
        return None
    quarter = len(positions) // 4
    first, last = (
        np.median(np.abs(part - np.median(part, axis=0)), axis=0)
        for part in (positions[:quarter], positions[-quarter:])
    )
    growth = float((last / np.where(first > 0, first, np.inf)).max())
    if growth > LARGEST_GROWTH:
        return f"grows: its spread in the last quarter is {growth:.1g} times that in the first"
    return None
