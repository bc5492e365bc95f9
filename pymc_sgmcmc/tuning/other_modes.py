"""A search for other modes that may hold mass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import numpy as np

from pymc_sgmcmc.matrices import Diagonal, Matrix
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.tuning.center import Center
from pymc_sgmcmc.tuning.curvature import coordinate_scale, curvature_at
from pymc_sgmcmc.tuning.gaussian import BEYOND_DOUBT
from pymc_sgmcmc.tuning.mode_search import FEWEST_STEPS, LEAST_DIFFERENCE, minimize
from pymc_sgmcmc.tuning.subsample import Subsample
from pymc_sgmcmc.tuning.symmetries import Image, symmetries

DISPERSED_PAIRS = 3
"""Other modes are searched from this many pairs of starts, within 2 of the first start in each
coordinate. The starts of a pair are on opposite sides of the first start, so that searches end at
different modes where modes are exchangeable."""

PLACES_BETWEEN = 8
"""A ridge between two places is followed in this many steps and one more. Along the scale of group
effects, whose conditional standard deviations are in proportion to it, a step of ten standard
deviations of its log is a factor that L-BFGS makes up for in a few iterations."""

NEGLIGIBLE = 20.0
"""Places whose log density is lower by more than this have a negligible part of the mass: the
densities differ by a factor of 5e8."""

LEAST_SHARE = 1e-3
"""A mode with less of the mass moves no mean by more than the error of a thousand draws."""

Density = Callable[[np.ndarray], tuple[float, np.ndarray]]
"""A log density with its gradient."""


def another_mode(posterior: Posterior, rows: Subsample, center: Center) -> str | None:
    """A message where there is another mode that may hold mass.

    It is one by symmetry, or searches from dispersed starts end at it. Where no mode is near the
    centre, which may be that of a Gaussian near the posterior, ends of searches tell nothing.
    """
    found = _another_mode(posterior, rows, center)
    if found is None:
        return None
    return (
        f"The posterior has more than one mode: {found}. Chains hardly ever change modes: order "
        "or fix exchangeable parameters, give `center`, or sample with NUTS."
    )


def _another_mode(posterior: Posterior, rows: Subsample, center: Center) -> str | None:
    density, start = rows.log_density_and_gradient, posterior.initial_position
    rng = np.random.default_rng(1963)
    sds = center.curvature.standard_deviations
    with np.errstate(all="ignore"):
        by_symmetry = _mode_by_symmetry(posterior, rows, center)
        if by_symmetry is not None:
            return by_symmetry
        # All searches use the same rows, since a subsample moves the mode by several standard
        # deviations.
        first = minimize(density, center.position, center.curvature.root, 0.1)
        top, _ = density(first)
        moved = float(np.max(np.abs(first - center.position) / sds))
        # A subsample moves a mode by about this many standard deviations.
        by_subsample = np.sqrt(max(1.0, rows.weight - 1))
        if moved > BEYOND_DOUBT * by_subsample:
            return None
        far, scale = max(BEYOND_DOUBT, 2 * moved), coordinate_scale(posterior, rows, start)

        def is_another_mode(end: np.ndarray, root: Matrix) -> bool:
            value, gradient = density(end)
            ended = np.max(np.abs(root.T @ gradient)) < 1
            distant = np.max(np.abs(end - first) / sds) > far
            if not (ended and distant and value > top - NEGLIGIBLE):
                return False
            # Without a valley half-way both belong to one mode that a search did not reach.
            lowest = min(value, top) - LEAST_DIFFERENCE
            between, _ = density((first + end) / 2)
            return between < lowest and not _are_joined(density, end, first, sds, lowest)

        shifts = rng.uniform(-2, 2, size=(DISPERSED_PAIRS, len(start)))
        for begin in (start + sign * shift for shift in shifts for sign in (1, -1)):
            try:
                # With effects of many groups a search in the first scales may not come to a mode at
                # all, and one in those of the centre takes few steps.
                near = minimize(density, begin, Diagonal(scale), 0.1, steps=FEWEST_STEPS)
                end = minimize(density, near, center.curvature.root, 0.1)
                if not is_another_mode(end, center.curvature.root):
                    continue
                # Where the scales there are wider than at the centre, this is on a slope.
                root = curvature_at(posterior, rows, end).root
                end = minimize(density, end, root, 0.1)
            except ValueError:
                continue  # The log density is not finite there.
            if not is_another_mode(end, root):
                continue
            value, _ = density(end)
            if rows.weight == 1 and center.curvature.is_dense:
                larger = _log_volume(root) - _log_volume(center.curvature.root)
                if np.exp(value - top + larger) < LEAST_SHARE:
                    continue
            higher = "higher" if value > top else "lower"
            return (
                "a search from another start ended "
                f"{np.max(np.abs(end - first) / sds):.3g} standard deviations from the centre, "
                f"where the log density is {abs(value - top):.3g} {higher}"
            )
    return None


def _log_volume(root: Matrix) -> float:
    """Logarithm of the volume that a Gaussian takes, but for a constant."""
    return float(np.linalg.slogdet(root.dense())[1])


def _are_joined(
    density: Density, begin: np.ndarray, end: np.ndarray, sds: np.ndarray, lowest: float
) -> bool:
    """Whether a ridge above a log density leads from one place to another.

    The neck of a funnel, which is narrow and as high as its mouth, is no mode. The coordinate in
    which the places are farthest apart goes from one to the other, and the others follow.
    """
    farthest = int(np.argmax(np.abs(end - begin) / sds))

    def held(position: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = density(position)
        gradient = gradient.copy()
        gradient[farthest] = 0.0
        return value, gradient

    place = begin
    for value in np.linspace(begin[farthest], end[farthest], PLACES_BETWEEN + 2)[1:]:
        place = place.copy()
        place[farthest] = value
        place = minimize(held, place, Diagonal(sds), 0.1, steps=FEWEST_STEPS)
        if density(place)[0] < lowest:
            return False
    return bool(np.max(np.abs(place - end) / sds) < BEYOND_DOUBT)


def _mode_by_symmetry(posterior: Posterior, rows: Subsample, center: Center) -> str | None:
    """What leads from the centre to another mode of the same density."""
    density, root = rows.log_density_and_gradient, center.curvature.root
    sds = center.curvature.standard_deviations

    def value(position: np.ndarray) -> float:
        try:
            return density(position)[0]
        except (ArithmeticError, AssertionError, ValueError):  # such as an inverse of zero
            return -np.inf

    top = value(center.position)
    for change, image in symmetries(posterior.layout, center.position):
        other = image(center.position)
        distance = float(np.max(np.abs(other - center.position) / sds))
        if not (distance > BEYOND_DOUBT and abs(value(other) - top) < LEAST_DIFFERENCE):
            continue

        def own_image(position: np.ndarray, image: Image = image) -> np.ndarray:
            return (position + image(position)) / 2

        # The ends of a bent ridge belong to one mode: the density is as high at a position between
        # them that is its own image.
        between = own_image(center.position)
        with suppress(Exception):
            between = own_image(
                minimize(lambda x: density(own_image(x)), between, root, 0.1, FEWEST_STEPS)
            )
        if value(between) < top - LEAST_DIFFERENCE:
            return f"with {change}, {distance:.3g} standard deviations away, it is the same"
    return None
