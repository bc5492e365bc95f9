r"""The EM algorithm for linear mixed models, with acceleration by SQUAREM.

Given the global variables :math:`\theta` of the last iteration, the local variables of a group are
Normal with mean :math:`\hat u` and covariance :math:`C C^\top`, and their joint log density m is
quadratic for every :math:`\theta'`. So its mean is that over 2 q points,

.. math:: Q(\theta') = \sum_g \frac1{2q} \sum_k m_g(\hat u_g \pm \sqrt q\, C_g e_k; \theta').
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytensor.tensor as pt

from pymc_sgmcmc.errors import ConvergenceError
from pymc_sgmcmc.marginal.likelihood import Groups, Objective, RestrictedLikelihood
from pymc_sgmcmc.marginal.maximum import climb
from pymc_sgmcmc.marginal.newton import quadratic_mode, solve_upper
from pymc_sgmcmc.posterior.compiled import quick_graphs

CONVERGED = 1e-9
"""The iterations end where none of the coordinates, relative to its size where that is above one,
moves by more than this. At a rate of 0.9 the distance to the maximum is ten times as large."""

MOST_STEPS = 100
"""Newton's method takes at most this many steps in one maximisation. It starts at the last maximum,
and needs two to five."""


class ExpectationMaximization:
    """One iteration of EM, as a function of the position of the global variables.

    Parameters
    ----------
    groups : Groups
    restricted : RestrictedLikelihood or None
        Where the fixed effects are integrated out too, they are latent variables: the means are
        also over the points of their law, and positions have the other coordinates only.
    """

    @quick_graphs()
    def __init__(self, groups: Groups, restricted: RestrictedLikelihood | None):
        density = groups.density
        size = density.block_size
        mean, root = quadratic_mode(density)
        ones, zeros = pt.ones_like(mean[:, 0]), pt.zeros_like(mean[:, 0])
        spread = [
            pt.stack(solve_upper(root, [ones if k == row else zeros for k in range(size)]), axis=1)
            for row in range(size)
        ]
        offsets = np.sqrt(size) * pt.stack(spread)
        points = mean[None] + pt.concatenate([offsets, -offsets])
        self._expect = groups.compile([density.numbers], [groups.at_position(points)])
        given = pt.tensor("points", shape=(2 * size, None, size), dtype=density.block.dtype)
        total = density.at_points(given).mean(axis=0).sum()
        self._complete = groups.with_gradient([given, density.numbers], groups.at_position(total))
        self._groups = groups
        self._chunks = groups.chunks(2 * size)
        self._restricted = restricted
        self._information: np.ndarray | None = None

    def __call__(self, position: np.ndarray) -> np.ndarray:
        """The position that maximises the expected log density."""
        restricted = self._restricted
        before = np.array([position]) if restricted is None else restricted.points(position)
        objective = self._expected(before)
        labels = self._groups.layout.labels
        maximum = climb(objective, position, MOST_STEPS, labels, information=self._information)
        self._information = maximum.information
        return maximum.position

    def _expected(self, before: np.ndarray) -> Objective:
        """The expected log density, with the local variables given these positions."""
        points = [
            [self._expect(numbers, position)[0] for numbers in self._chunks] for position in before
        ]

        def objective(rest: np.ndarray) -> tuple[float, np.ndarray]:
            values, slopes = zip(
                *(
                    self._groups.total(
                        self._complete,
                        zip(of_chunks, self._chunks, strict=True),
                        self._at(position, rest),
                    )
                    for position, of_chunks in zip(before, points, strict=True)
                ),
                strict=True,
            )
            slope = np.mean(slopes, axis=0)
            if self._restricted is not None:
                slope = slope[~self._restricted.fixed]
            return float(np.mean(values)), slope

        return objective

    def _at(self, position: np.ndarray, rest: np.ndarray) -> np.ndarray:
        if self._restricted is None:
            return rest
        return self._restricted.complete(position[self._restricted.fixed], rest)


def iterate(
    update: Callable[[np.ndarray], np.ndarray],
    position: np.ndarray,
    most_iterations: int,
    likelihood: Objective | None = None,
) -> tuple[np.ndarray, int]:
    """Apply EM until it stands still, with SQUAREM where the likelihood is given.

    SQUAREM (Varadhan and Roland 2008, step length S3) takes a long step along two iterations, from
    which the next ones start. Where the likelihood is lower there, the step is not taken.

    Returns
    -------
    position : numpy.ndarray
    iterations : int
        Number of applications of EM.

    Raises
    ------
    ConvergenceError
    """
    iterations = 0
    while iterations < most_iterations:
        first = update(position)
        iterations += 1
        if _stands_still(first, position):
            return first, iterations
        if likelihood is None:
            position = first
            continue
        second = update(first)
        iterations += 1
        change, curvature = first - position, (second - first) - (first - position)
        length = np.linalg.norm(change) / max(np.linalg.norm(curvature), 1e-300)
        proposal = position + 2 * length * change + length**2 * curvature
        position = second
        # A step of length one is what the two iterations did.
        if 1 < length < np.inf and likelihood(proposal)[0] >= likelihood(second)[0]:
            position = proposal
    raise ConvergenceError(
        f"EM did not converge within {most_iterations} iterations: it is slow where a variance is "
        'close to zero. Use method="quasi-newton", or raise `max_iterations`.'
    )


def _stands_still(new: np.ndarray, old: np.ndarray) -> bool:
    return bool((np.abs(new - old) <= CONVERGED * np.maximum(1, np.abs(new))).all())
