"""The log posterior around a centre, from as few rows as tell it from a Gaussian."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.tuning.center import Center
from pymc_sgmcmc.tuning.curvature import likelihood_curvature
from pymc_sgmcmc.tuning.gaussian import CONVERGED_SHIFT, FEWEST_PAIRS, steepest_curvature
from pymc_sgmcmc.tuning.subsample import SINGLE_ROWS, Subsample, fewest_rows

NOISE_BLOCKS = 20
"""This error is measured on sums of so many blocks of rows, which know it up to a sixth."""


class ControlVariates:
    """The log posterior from a subsample, with control variates at a centre.

    Parameters
    ----------
    subsample : Subsample
    center : Center
        Where the gradient is that of all rows.
    excess : numpy.ndarray, shape (d, d), optional
        By how much the curvature of the subsample exceeds that of more rows at the centre.
    """

    def __init__(self, subsample: Subsample, center: Center, excess: np.ndarray | None = None):
        self.subsample, self.position, self.excess = subsample, center.position, excess
        self.correction = center.gradient - subsample.log_density_and_gradient(center.position)[1]

    def log_densities_and_gradients(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Log densities at positions (positions, d) up to a constant, and their gradients."""
        values, gradients = self.subsample.log_densities_and_gradients(positions)
        shifts = positions - self.position
        changes = np.zeros_like(shifts) if self.excess is None else shifts @ self.excess
        values += (shifts * (self.correction + 0.5 * changes)).sum(axis=1)
        return values, gradients + self.correction + changes

    def gradients(self, positions: np.ndarray) -> np.ndarray:
        """Gradients of the log density at positions, NaN where the density is zero."""
        values, gradients = self.log_densities_and_gradients(positions)
        return np.where(np.isfinite(values)[:, None], gradients, np.nan)

    def gradient(self, position: np.ndarray) -> np.ndarray:
        """Gradient of the log density at one position, NaN where the density is zero."""
        return self.gradients(position[None])[0]


def judge_at(
    posterior: Posterior, center: Center, large: Subsample | None = None
) -> ControlVariates:
    """The log posterior around a centre, with which to compare the Gaussian of this centre.

    Control variates at the centre leave the noise of the differences of the rows' gradients, which
    sets the number of rows. With the curvature of many rows, where it takes few passes, only third
    derivatives are left, and far fewer rows are enough. They leave an error of `CONVERGED_SHIFT` in
    a mean gradient, where these can be afforded.

    Parameters
    ----------
    posterior : Posterior
    center : Center
    large : Subsample, optional
        Rows whose curvature at the centre takes the place of that of few rows, where that of all
        is not known.
    """
    if large is None:
        large = Subsample(posterior, evaluations=2 * posterior.dimension)
    # The noise is measured on all rows that can be afforded: a few may cause most of it.
    affordable = Subsample(posterior, evaluations=8 * max(FEWEST_PAIRS, posterior.dimension))
    first = second = affordable.count
    if first > fewest_rows(posterior):
        needed = _rows_needed(posterior, center, affordable)
        first, second = (min(rows, affordable.count) for rows in needed)
    scale = center.curvature.conditional_deviations
    few = Subsample(posterior, count=second, fewest=SINGLE_ROWS)
    of_all = None if center.difference is None else center.difference.curvature
    if of_all is None and few.count < first and posterior.has_second_derivatives:
        of_all = likelihood_curvature(posterior, large, center.position, scale)
    if few.weight > 1 and of_all is not None:
        excess = likelihood_curvature(posterior, few, center.position, scale) - of_all
        if np.isfinite(excess).all():
            return ControlVariates(few, center, excess)
    return ControlVariates(Subsample(posterior, count=first), center)


def with_steepest(
    center: Center,
    judge: ControlVariates,
    around: Center | None = None,
    index: slice | np.ndarray = slice(None),
) -> Center:
    """Centre with the largest curvature that a long run comes to.

    Parameters
    ----------
    center : Center
    judge : ControlVariates
        The log posterior of all coordinates of `around`.
    around : Center, optional
        Centre of the position and of variables beside it that move too. Default: `center`.
    index : slice or numpy.ndarray
        The coordinates of the position among these.
    """
    around, root = around or center, center.curvature.root
    width = judge.subsample.posterior.difference_width
    with np.errstate(all="ignore"):
        largest = steepest_curvature(
            judge.gradients, around.position, around.curvature.root, width, (index, root)
        )
    # A curvature that is an approximation is not 1 at the centre either.
    return replace(center, steepest=max(1.0, largest / center.curvature.remainder))


def _rows_needed(posterior: Posterior, center: Center, subsample: Subsample) -> tuple[int, int]:
    """Rows with control variates of first and of second order, all where they are not known.

    Of second order is what remains of the mean of two gradients at opposite points.
    """
    rng, root = np.random.default_rng(1736), center.curvature.root
    shift = root @ rng.standard_normal(posterior.dimension)
    positions = center.position + np.outer([0, 1, -1], shift)
    blocks = np.array_split(rng.permutation(subsample.count), NOISE_BLOCKS)
    sums = [
        posterior.likelihood_gradient(positions, posterior.part(subsample.rows, np.sort(block)))
        for block in blocks
    ]
    at_center, ahead, behind = np.moveaxis(np.array(sums) @ root, 1, 0)
    needed = []
    for differences in (
        [ahead - at_center, behind - at_center],
        [(ahead + behind) / 2 - at_center],
    ):
        # Variances of rows, from those of sums over blocks of them.
        variance = np.var(differences, axis=1, ddof=1).max() * NOISE_BLOCKS / subsample.count
        # The error of a sum over all N rows from n of them is N sd / sqrt(n).
        rows = posterior.n_rows**2 * variance / CONVERGED_SHIFT**2
        needed.append(int(rows) if rows < posterior.n_rows else posterior.n_rows)
    return needed[0], needed[1]
