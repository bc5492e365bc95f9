"""Compare the quadrature with the sum over a wide and fine grid, for a few groups.

Quadrature is right where the law of a group is near a normal law times a polynomial. Two modes,
kinks, edges and much skewness are what it misses.
"""

from __future__ import annotations

import itertools
import logging

import numpy as np
import pytensor
import pytensor.tensor as pt
from pymc.model import Model
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.checks import quoted
from pymc_sgmcmc.marginal.check import SEED, Evaluated
from pymc_sgmcmc.marginal.density import GroupDensity
from pymc_sgmcmc.marginal.newton import find_mode, solve_upper

_log = logging.getLogger("pymc.sgmcmc")  # below PyMC's logger, so that its settings hold

GRIDS = {1: (7.6, 401), 2: (4.6, 61), 3: (3.9, 27)}
"""Ends and numbers of points of the grids in each direction, by the number of local quantities. The
coordinate is x with u = sinh(x) standard deviations from the mode, so the ends are 1000, 50 and 25
of these away. The sum is right to 1e-6 for a law near a Gaussian."""

MOST_GROUPS = 20
"""At most this many random groups are compared, which bounds the time."""

ELEMENTS = 4_000_000
"""At most this many records times points of the grid are evaluated, which bounds the memory."""

MOST_DROP = 700.0
"""The log density of the prior is at most this far below its maximum. At points that are further
away, 37 standard deviations of a normal law, records often have no density but rounding."""

LARGEST_ERROR = 5e-3
"""A warning is given where the log density of a group has a larger error. Twenty such groups change
a log likelihood by a tenth, which is small beside the half that a standard error is."""


def warn_of_quadrature(
    model: Model, density: GroupDensity, values: TensorVariable, points: int
) -> None:
    """Warn where the log densities of groups are wrong at a position near the initial point.

    Parameters
    ----------
    model : pymc.Model
    density : GroupDensity
    values : TensorVariable, shape (groups,)
        The quadrature.
    points : int
        Its nodes in each direction.
    """
    error = largest_error(model, density, values)
    if not error <= LARGEST_ERROR:
        _log.warning(
            f"The quadrature of {quoted(density.structure.names)} with {points} nodes has errors "
            f"up to {error:.2g} in the log density of a group. More `points` help where its law is "
            "skewed; with two modes, kinks or edges, sample the original model with NUTS."
        )


def largest_error(model: Model, density: GroupDensity, values: TensorVariable) -> float:
    """Largest error of the log densities of a few groups at a random position."""
    size, n_groups = density.block_size, density.structure.n_groups
    end, n_points = GRIDS[size]
    n_compared = int(ELEMENTS // (n_points**size * density.records_a_group))
    rng = np.random.default_rng(SEED)
    numbers = rng.choice(n_groups, min(MOST_GROUPS, n_groups, max(1, n_compared)), replace=False)

    evaluated = Evaluated(model, density)
    mode = find_mode(density)
    entries = [entry for row in mode.root for entry in row]
    with pytensor.config.change_flags(cxx=""):  # The inner function of a scan is NumPy's too.
        function = evaluated.function([values, mode.block, *entries])
        quadrature, centre, *rest = function(evaluated.block[numbers], numbers)
    factor = iter(rest)
    root = [[next(factor) for _ in range(row + 1)] for row in range(size)]

    axis = np.linspace(-end, end, n_points)
    grid = np.array(list(itertools.product(axis, repeat=size)))
    log_weights = np.log(np.cosh(grid)).sum(axis=1) + size * np.log(axis[1] - axis[0])
    standard = list(np.sinh(grid).T[:, :, None])
    placeholder = pt.tensor("points", shape=(None, None, size), dtype=density.block.dtype)
    graphs = [density.at_points(placeholder), density.prior_at_points(placeholder)]
    log_densities = evaluated.function(graphs, placeholder)
    with np.errstate(all="ignore"):
        at = centre + np.stack(np.broadcast_arrays(*solve_upper(root, standard)), axis=-1)
        heights, prior = log_densities(at, numbers)
        possible = (prior > np.nanmax(prior, axis=0) - MOST_DROP) & (heights < np.inf)
        heights = np.where(possible, heights + log_weights[:, None], -np.inf)
        expected = np.logaddexp.reduce(heights, axis=0)
        expected -= sum(np.log(entries[-1]) for entries in root)
        errors = np.abs(quadrature - expected)
    # Where neither is finite, the position is one that the model excludes.
    return float(np.max(errors[np.isfinite(quadrature) | np.isfinite(expected)], initial=0.0))
