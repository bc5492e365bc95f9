r"""Draws of one local quantity a group, by inversion of the distribution function.

The coordinate is x with :math:`u = c + s \sinh x`, in which tails of a power law fall
exponentially. The logarithm of the density of x is interpolated between Chebyshev nodes where its
Chebyshev series ends early, and tabulated otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.polynomial.chebyshev import chebvander

type LogDensity = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Log densities, shape (points, n), of points, shape (points, n), for the groups at n places."""

LEAST_DROP = 12.0
"""The grid ends where the density is lower than its maximum by at least this factor, in natural
logarithms. What is cut off has a probability of about e^-12, 6e-6, also in tails of a power law."""

MOST_DROP = 45.0
"""A grid whose end is lower than this has many nodes where there is no probability."""

AIMED_DROP = 20.0
"""An end is moved to where a parabola has this drop."""

FIRST_END = 2.4
"""The first grid ends at x of plus and minus this, which is at 5.5 standard deviations of a
Gaussian. The drop is 13 there."""

SMALLEST_MOVE, LARGEST_MOVE = 1.5, 4.0
"""An end is moved away from the centre at least and at most by these factors. The smaller one lets
heavy tails end, and the larger one bounds the step where the density is flat."""

MOST_MOVES = 60
"""The ends are moved at most this many times: a factor of 1e10 and more."""

FARTHEST = 40.0
"""No end has a larger x, which is at 1e17 times the scale."""

TOLERANCE = 2e-4
"""The last coefficients of a Chebyshev series, which bound the error of the log density, are at
most this. The error of the distribution function is at most half the largest error, and in practice
a hundredth of that."""

LAST_COEFFICIENTS = 3
"""So many last coefficients are small where a series has ended. A single one may be small by
chance."""

TABLE = 769
"""Number of points of a table without interpolation. Kinks and narrow peaks of a width of a tenth
of the scale are then right to 1e-4."""

SCAN = np.linspace(-7.6, 7.6, 401)
"""Second modes are searched at these x, up to 1000 times the scale from the centre."""

LEAST_SLOPE = 1e-6
"""A smaller change of the log density from point to point is taken for rounding."""


@dataclass(frozen=True)
class Rule:
    """Interpolation of a function on [-1, 1], from its values at nodes to equidistant points."""

    nodes: np.ndarray
    coefficients: np.ndarray
    to_points: np.ndarray


def _rule(n_nodes: int, n_points: int) -> Rule:
    nodes = -np.cos(np.pi * np.arange(n_nodes) / (n_nodes - 1))
    coefficients = np.linalg.inv(chebvander(nodes, n_nodes - 1))
    points = chebvander(np.linspace(-1, 1, n_points), n_nodes - 1)
    return Rule(nodes, coefficients, points @ coefficients)


RULES = (_rule(21, 65), _rule(33, 129), _rule(65, 257))
"""Numbers of nodes that are tried in turn, with the number of points of the distribution function.
Twenty-one serve for ten binary records a group."""


@dataclass(frozen=True)
class Scale:
    """Coordinate x of each group, with u = centre + width * sinh(x).

    Attributes
    ----------
    centre, width : numpy.ndarray, shape (groups,)
        Or of shape (draws, groups), for all draws of parameters.
    """

    centre: np.ndarray
    width: np.ndarray

    def at(self, draw: int) -> Scale:
        """That of one of several draws."""
        return Scale(self.centre[draw], self.width[draw])

    def of(self, places: np.ndarray) -> Scale:
        """That of the groups at some places."""
        return Scale(self.centre[..., places], self.width[..., places])

    def points(self, x: np.ndarray, places: np.ndarray) -> np.ndarray:
        """The quantities at x, shape (..., n), of the groups at n places."""
        return self.centre[places] + self.width[places] * np.sinh(x)

    def x(self, points: np.ndarray) -> np.ndarray:
        """Coordinates of points, shape (..., groups)."""
        return np.arcsinh((points - self.centre) / self.width)

    def log_density(self, log_density: LogDensity, x: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Log density of x, shape (points, n)."""
        values = log_density(self.points(x, places), places) + np.log(np.cosh(x))
        return np.where(np.isnan(values), -np.inf, values)


def invert(
    log_density: LogDensity,
    scale: Scale,
    uniforms: np.ndarray,
    ends: np.ndarray,
    hull: np.ndarray | None = None,
) -> np.ndarray:
    """Quantiles of the law of each group, shape (groups,), at the probabilities `uniforms`.

    The distribution function at them is right to 1e-4.

    Parameters
    ----------
    log_density : callable
        Up to a constant.
    scale : Scale
    uniforms : numpy.ndarray, shape (groups,)
    ends : numpy.ndarray, shape (2, groups)
        Lowest and highest x of the grids, from `first_ends`. They are moved in place to where they
        should be, so that they serve as a start for a law that is little different.
    hull : numpy.ndarray, shape (2, groups), optional
        Lowest and highest quantity that the grid should hold, from `second_modes`; NaN for groups
        with a single mode.
    """
    n_groups = len(uniforms)
    draws = np.empty(n_groups)
    everywhere = np.arange(n_groups)
    several = np.zeros(n_groups, dtype=bool) if hull is None else ~np.isnan(hull[0])
    if hull is not None:
        inside = scale.x(np.where(several, hull, scale.centre))
        np.minimum(ends[0], inside[0], out=ends[0])
        np.maximum(ends[1], inside[1], out=ends[1])

    first = RULES[0]
    values = np.empty((len(first.nodes), n_groups))
    # Distances from the centre, in the width, that are too small and too large for an end.
    near, far = np.zeros((2, n_groups)), np.full((2, n_groups), np.inf)
    moved = everywhere
    for _ in range(MOST_MOVES):
        grid = grid_of(ends[:, moved], first.nodes)
        values[:, moved] = scale.log_density(log_density, grid, moved)
        factors = _moves(values[:, moved], several[moved])
        further = (factors != 1).any(axis=0)
        moved, factors = moved[further], factors[:, further]
        if not len(moved):
            break
        distance = np.abs(np.sinh(ends[:, moved]))
        near[:, moved] = np.where(factors > 1, distance, near[:, moved])
        far[:, moved] = np.where(factors < 1, distance, far[:, moved])
        between = np.sqrt(near[:, moved] * far[:, moved])
        bracketed = (factors != 1) & (near[:, moved] > 0) & np.isfinite(far[:, moved])
        distance = np.arcsinh(np.where(bracketed, between, distance * factors))
        ends[:, moved] = np.copysign(np.minimum(distance, FARTHEST), ends[:, moved])

    remaining = everywhere
    for rule in RULES:
        if rule is not first:
            if not len(remaining):
                return draws
            grid = grid_of(ends[:, remaining], rule.nodes)
            values = scale.log_density(log_density, grid, remaining)
        with np.errstate(invalid="ignore"):  # Values may be minus infinity.
            last = np.abs(rule.coefficients[-LAST_COEFFICIENTS:] @ values).sum(axis=0)
        ended = (last < TOLERANCE) & ~several[remaining]
        places = remaining[ended]
        at_points = rule.to_points @ (values if ended.all() else values[:, ended])
        x = quantiles(at_points, ends[:, places], uniforms[places])
        draws[places] = scale.points(x, places)
        remaining = remaining[~ended]
    if len(remaining):
        grid = grid_of(ends[:, remaining], np.linspace(-1, 1, TABLE))
        values = scale.log_density(log_density, grid, remaining)
        x = quantiles(values, ends[:, remaining], uniforms[remaining])
        draws[remaining] = scale.points(x, remaining)
    return draws


def first_ends(n_groups: int) -> np.ndarray:
    """Ends of grids for laws near a Gaussian, shape (2, groups)."""
    return np.multiply.outer([-FIRST_END, FIRST_END], np.ones(n_groups))


def second_modes(log_density: LogDensity, scale: Scale) -> np.ndarray:
    """Lowest and highest quantity with a density that counts, shape (2, groups).

    It is NaN for groups whose density falls to both sides of a single mode.
    """
    n_groups = len(scale.centre)
    everywhere = np.arange(n_groups)
    x = np.repeat(SCAN[:, None], n_groups, axis=1)
    values = scale.log_density(log_density, x, everywhere)
    counts = values > values.max(axis=0) - LEAST_DROP
    with np.errstate(invalid="ignore"):  # Values may be minus infinity.
        slopes = np.diff(values - np.log(np.cosh(x)), axis=0)
    slopes[~(counts[1:] | counts[:-1])] = 0
    fallen = np.maximum.accumulate(slopes < -LEAST_SLOPE, axis=0)
    several = (fallen & (slopes > LEAST_SLOPE)).any(axis=0)
    lowest = np.argmax(counts, axis=0)
    highest = len(SCAN) - 1 - np.argmax(counts[::-1], axis=0)
    beyond = np.clip([lowest - 1, highest + 1], 0, len(SCAN) - 1)
    return np.where(several, scale.points(SCAN[beyond], everywhere), np.nan)


def grid_of(ends: np.ndarray, nodes: np.ndarray) -> np.ndarray:
    """Nodes on [-1, 1] moved between the ends of each group, shape (nodes, groups)."""
    left, right = ends
    return 0.5 * (left + right) + 0.5 * (right - left) * nodes[:, None]


def _moves(values: np.ndarray, several: np.ndarray) -> np.ndarray:
    """Factors by which the ends go away from the centre, shape (2, groups); one where they stay."""
    with np.errstate(invalid="ignore", divide="ignore"):
        drops = values.max(axis=0) - values[[0, -1]]
        to_aim = np.sqrt(AIMED_DROP / drops)
    out = np.clip(np.nan_to_num(to_aim, nan=LARGEST_MOVE), SMALLEST_MOVE, LARGEST_MOVE)
    # Infinite drops, for example by overflow, say nothing of how far to go back.
    back = np.where(np.isfinite(drops), to_aim, 0.5)
    # Where there are several modes, a low end may lie between them.
    too_low = (drops > MOST_DROP) & ~several
    return np.where(drops < LEAST_DROP, out, np.where(too_low, back, 1.0))


def quantiles(values: np.ndarray, ends: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Quantiles from log densities at equidistant points between the ends of each group."""
    if not len(uniforms):
        return np.empty(0)
    density, cells, sums = cumulated(values)
    wanted = uniforms * sums[-1]
    cell = np.minimum((sums < wanted).sum(axis=0), len(cells) - 1)
    places = np.arange(len(uniforms))
    mass = cells[cell, places]
    fraction = (wanted - (sums[cell, places] - mass)) / np.where(mass > 0, mass, 1.0)
    # Within a cell the density is linear.
    low, high = density[cell, places], density[cell + 1, places]
    part = np.clip(fraction, 0, 1) * (low + high)
    root = low + np.sqrt(low**2 + (high - low) * part)
    within = part / np.where(root > 0, root, 1.0)
    left, right = ends
    return left + (right - left) * (cell + within) / len(cells)


def cumulated(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Densities at equidistant points, shape (points, n), their integrals over cells, and sums.

    The points are those of log densities. All are up to a factor for each of the n laws.
    """
    density = np.exp(values - values.max(axis=0))
    # The integral over a cell is that of a cubic through its four neighbours.
    cells = 0.5 * (density[1:] + density[:-1])
    cells[1:-1] += (density[1:-2] + density[2:-1] - density[:-3] - density[3:]) / 24
    np.maximum(cells, 0, out=cells)
    return density, cells, np.cumsum(cells, axis=0)
