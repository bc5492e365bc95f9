r"""Laws of groups at all draws of a trace, from their log densities at a few of the draws.

The law :math:`p(u_g \mid y_g, \theta)` of a group with many records changes little and smoothly
over the posterior of the parameters θ. With :math:`u = c(\theta) + s(\theta) \sinh x`, where c and
:math:`\log s` are polynomials near the mode and the scale, its logarithm at each x of a grid is a
polynomial in θ up to a small error. The coefficients are fitted to the log densities at some draws,
and the distribution functions that follow are compared with those of the log density itself at
other draws. Where they differ, the degree is raised, and at last the group is left out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.polynomial.chebyshev import chebvander

from pymc_sgmcmc.marginal.inversion import (
    LAST_COEFFICIENTS,
    LEAST_DROP,
    MOST_DROP,
    RULES,
    TOLERANCE,
    LogDensity,
    Rule,
    Scale,
    cumulated,
    grid_of,
    quantiles,
)

DEGREES = (1, 2, 3, 4)
"""Degrees of the polynomials that are tried in turn."""

DRAWS_A_COEFFICIENT = 2
"""A polynomial is fitted to this many draws for each of its coefficients."""

CHECKED_DRAWS = 40
"""The distribution functions are compared at this many draws. Half of them are among the farthest
from the mean, where the error of a polynomial is largest."""

LARGEST_PART = 0.25
"""At most this part of the draws is fitted and compared, since otherwise little time is saved."""

LARGEST_ERROR = 2e-5
"""Distribution functions may differ by this much where they are compared: a fifth of the error that
a draw may have."""

SCALE_DEGREE = 2
"""Mode and scale are polynomials of at most this degree. They need not be right, since the log
densities are computed where they say."""

WIDER = 1.05
"""The grids of all draws reach so many times as far as that of the central draw, since modes and
scales are not right."""

FINER = 4
"""The distribution functions to compare with are sums over so many times as many cells."""

AT_ONCE = 500
"""So many groups are fitted together, which bounds the memory to some 50 MB."""

NO_VARIATION = 1e-9
"""Parameters do not vary in directions in which their standard deviation is less than this part of
the largest, relative to their size."""


@dataclass(frozen=True, eq=False)
class Polynomials:
    """Monomials of the parameters at all draws of a trace.

    Attributes
    ----------
    monomials : numpy.ndarray, shape (draws, coefficients)
        Those of a lower degree come first.
    counts : tuple of int
        Number of coefficients up to each of the degrees.
    fitted, checked : numpy.ndarray
        Numbers of the draws to fit to and to compare at. The first ones of `fitted` serve for a low
        degree.
    central : int
        The draw nearest to the mean.
    """

    monomials: np.ndarray
    counts: tuple[int, ...]
    fitted: np.ndarray
    checked: np.ndarray
    central: int

    @cached_property
    def inverses(self) -> list[np.ndarray]:
        """Coefficients, of each degree, from values at the draws to fit to."""
        return [
            np.linalg.pinv(self.monomials[self.fitted[: DRAWS_A_COEFFICIENT * count], :count])
            for count in self.counts
        ]


def polynomials_of(parameters: Sequence[np.ndarray]) -> Polynomials | None:
    """Polynomials for draws of parameters, None where there are too few draws.

    Parameters
    ----------
    parameters : sequence of numpy.ndarray, shape (draws, ...)
    """
    n_draws = len(parameters[0]) if parameters else 0
    most = int(LARGEST_PART * n_draws) - CHECKED_DRAWS
    if most <= 0:
        return None
    n_parameters = sum(values[0].size for values in parameters)
    if DRAWS_A_COEFFICIENT * (1 + n_parameters) > most:
        return None
    coordinates = _standardised(np.column_stack([v.reshape(n_draws, -1) for v in parameters]))
    size = coordinates.shape[1]
    degrees = [
        degree
        for degree in (DEGREES if size else (0,))
        if DRAWS_A_COEFFICIENT * math.comb(size + degree, degree) <= most
    ]
    if not degrees:
        return None
    columns = [
        coordinates[:, list(which)].prod(axis=1)
        for degree in range(degrees[-1] + 1)
        for which in itertools.combinations_with_replacement(range(size), degree)
    ]
    order = np.argsort(-(coordinates**2).sum(axis=1), kind="stable")
    # The farthest draws are fitted and compared in turn, each with another one from the rest.
    n_fitted = DRAWS_A_COEFFICIENT * math.comb(size + degrees[-1], degrees[-1])
    n_far = n_fitted // 2 + CHECKED_DRAWS // 2
    others = np.random.default_rng(1971).permutation(order[2 * n_far :])
    far = order[: 2 * n_far].reshape(-1, 2)
    fitted = np.column_stack([far[:, 0], others[:n_far]]).ravel()[:n_fitted]
    checked = np.concatenate(
        [far[: CHECKED_DRAWS // 2, 1], others[n_far:][: CHECKED_DRAWS - CHECKED_DRAWS // 2]]
    )
    counts = tuple(math.comb(size + degree, degree) for degree in degrees)
    return Polynomials(np.column_stack(columns), counts, fitted, checked, int(order[-1]))


def _standardised(values: np.ndarray) -> np.ndarray:
    """Uncorrelated coordinates of draws, shape (draws, d), in the directions that vary."""
    scale = np.maximum(np.abs(values).max(axis=0), np.finfo(float).tiny)
    scaled = (values - values.mean(axis=0)) / scale
    _, sizes, directions = np.linalg.svd(scaled, full_matrices=False)
    varies = sizes > NO_VARIATION * np.sqrt(len(values))
    coordinates = scaled @ directions[varies].T
    return coordinates / np.abs(coordinates).max(axis=0, initial=np.finfo(float).tiny)


def wider(ends: np.ndarray) -> np.ndarray:
    """Ends of grids for all draws, from those for the central one."""
    return np.arcsinh(WIDER * np.sinh(ends))


def scales_of(polynomials: Polynomials, scale_at: Callable[[int], Scale]) -> Scale:
    """Scales at all draws, from those at some of them."""
    which = min(SCALE_DEGREE, len(polynomials.counts)) - 1
    inverse, count = polynomials.inverses[which], polynomials.counts[which]
    scales = [scale_at(draw) for draw in polynomials.fitted[: inverse.shape[1]]]
    monomials = polynomials.monomials[:, :count]
    centre = monomials @ (inverse @ np.array([scale.centre for scale in scales]))
    width = monomials @ (inverse @ np.log([scale.width for scale in scales]))
    return Scale(centre, np.exp(width))


def interpolate(
    polynomials: Polynomials,
    log_density_at: Callable[[int], LogDensity],
    scales: Scale,
    ends: np.ndarray,
    uniforms: np.ndarray,
) -> np.ndarray:
    """Draw from the laws of groups at all draws of the parameters.

    Parameters
    ----------
    polynomials : Polynomials
    log_density_at : callable
        The log density at the parameters of a draw with this number, of n groups.
    scales : Scale
        Those of the n groups.
    ends : numpy.ndarray, shape (2, n)
        Ends of grids for the central draw.
    uniforms : numpy.ndarray, shape (draws, n)
        Probabilities, which the quantiles replace.

    Returns
    -------
    numpy.ndarray
        Places of the groups that are left out, for which the probabilities are still there.
    """
    places = np.arange(uniforms.shape[1])
    for rule in RULES[:2]:
        if not len(places):
            break
        grid = grid_of(ends[:, places], rule.nodes)
        checked = _values(log_density_at, polynomials.checked, scales, grid, places)
        smooth = _are_smooth(checked, rule)
        failed = _fit_and_draw(
            polynomials,
            log_density_at,
            scales,
            ends,
            places[smooth],
            uniforms,
            rule,
            checked[..., smooth],
        )
        places = np.concatenate([places[~smooth], failed])
    return places


def _fit_and_draw(
    polynomials: Polynomials,
    log_density_at: Callable[[int], LogDensity],
    scales: Scale,
    ends: np.ndarray,
    places: np.ndarray,
    uniforms: np.ndarray,
    rule: Rule,
    checked: np.ndarray,
) -> np.ndarray:
    """Draw where a polynomial of some degree is right; the other places."""
    wanted = _distribution(checked, rule, FINER)
    fitted = np.empty((0, len(rule.nodes), len(places)))
    for count, inverse in zip(polynomials.counts, polynomials.inverses, strict=True):
        if not len(places):
            break
        further = polynomials.fitted[len(fitted) : inverse.shape[1]]
        grid = grid_of(ends[:, places], rule.nodes)
        values = _values(log_density_at, further, scales, grid, places)
        fitted = np.concatenate([fitted, values])
        with np.errstate(invalid="ignore"):
            coefficients = np.tensordot(inverse, fitted, axes=1)
            at_checked = polynomials.monomials[polynomials.checked, :count]
            predicted = np.tensordot(at_checked, coefficients, axes=1)
            errors = np.abs(_distribution(predicted, rule, 1) - wanted).max(axis=(0, 1))
        right = (errors < LARGEST_ERROR) & _are_smooth(fitted, rule)
        monomials = polynomials.monomials[:, :count].T
        for number in np.flatnonzero(right):
            place = places[number]
            at_points = rule.to_points @ (coefficients[..., number].T @ monomials)
            its_ends = np.broadcast_to(ends[:, place, None], (2, len(uniforms)))
            x = quantiles(at_points, its_ends, uniforms[:, place])
            uniforms[:, place] = scales.centre[:, place] + scales.width[:, place] * np.sinh(x)
        places, fitted, wanted = places[~right], fitted[..., ~right], wanted[..., ~right]
    return places


def _values(
    log_density_at: Callable[[int], LogDensity],
    draws: np.ndarray,
    scales: Scale,
    grid: np.ndarray,
    places: np.ndarray,
) -> np.ndarray:
    """Log densities of x less those in the middle of the grid, shape (draws, nodes, n)."""
    values = np.empty((len(draws), *grid.shape))
    for row, draw in zip(values, draws, strict=True):
        row[:] = scales.at(draw).log_density(log_density_at(draw), grid, places)
    with np.errstate(invalid="ignore"):
        return values - values[:, len(grid) // 2, None]


def _are_smooth(values: np.ndarray, rule: Rule) -> np.ndarray:
    """Whether grid and nodes serve for the laws of a group at all of some draws, shape (n,)."""
    with np.errstate(invalid="ignore"):
        last = np.abs(np.tensordot(rule.coefficients[-LAST_COEFFICIENTS:], values, (1, 1)))
        drops = values.max(axis=1, keepdims=True) - values[:, [0, -1]]
        inside = (drops > LEAST_DROP) & (drops < MOST_DROP)
        return (last.sum(axis=0) < TOLERANCE).all(axis=0) & inside.all(axis=(0, 1))


def _distribution(values: np.ndarray, rule: Rule, finer: int) -> np.ndarray:
    """Distribution functions at the points of a rule, shape (draws, points - 1, n)."""
    n_draws, n_nodes, n_groups = values.shape
    n_cells = finer * (len(rule.to_points) - 1)
    to_points = chebvander(np.linspace(-1, 1, n_cells + 1), n_nodes - 1) @ rule.coefficients
    functions = np.empty((n_draws, n_cells // finer, n_groups))
    for function, of_draw in zip(functions, values, strict=True):
        _, _, sums = cumulated(to_points @ of_draw)
        function[:] = (sums / sums[-1])[finer - 1 :: finer]
    return functions
