"""A search for other modes that may hold mass."""

from __future__ import annotations

import warnings
from contextlib import suppress

import numpy as np

from pymc_sgmcmc.errors import CenterWarning, warn
from pymc_sgmcmc.matrices import Diagonal, Matrix
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.tuning.center import Center
from pymc_sgmcmc.tuning.curvature import curvature_at
from pymc_sgmcmc.tuning.mode_search import LEAST_DIFFERENCE, minimize
from pymc_sgmcmc.tuning.subsample import Subsample
from pymc_sgmcmc.tuning.symmetries import Image, symmetries

DISPERSED_PAIRS = 3
"""Other modes are searched from this many pairs of starts, within 2 of the first start in each
coordinate. The starts of a pair are on opposite sides of the first start, so that searches end at
different modes where modes are exchangeable."""

FARTHEST_MODE = 5.0
"""Two searches ended at different modes where their ends are more than this many standard
deviations apart. Searches that end early at the same mode are nearer to each other."""

NEGLIGIBLE_MODE = 20.0
"""A mode whose log density is lower by more than this counts as one with a negligible part of the
mass: the densities differ by a factor of 5e8."""

STEPS_IN_FIRST_SCALE = 100
"""A search takes at most this many steps in the scales of the first start, which lead it to a mode,
and the others in the root of the centre's covariance. With effects of many groups a search in
the first scales may not come to a mode at all, and one in the others takes few steps."""


def warn_of_other_modes(
    posterior: Posterior,
    subsample: Subsample,
    center: Center,
    start: np.ndarray,
    scale: np.ndarray,
    *,
    at_mode: bool = True,
) -> None:
    """Warn where there is another mode that may hold mass.

    It is one by symmetry, or searches from dispersed starts end at it. With `at_mode` false the
    centre is that of a Gaussian that is near the posterior. Where no mode is near this centre, ends
    of searches tell nothing about the mass.

    Warns
    -----
    CenterWarning
    """
    density = subsample.log_density_and_gradient
    rng = np.random.default_rng(1963)
    sds = center.curvature.standard_deviations
    with np.errstate(all="ignore"):
        by_symmetry = _mode_by_symmetry(posterior, subsample, center)
        if by_symmetry is not None:
            _warn(by_symmetry)
            return
        # All searches use the same rows, since a subsample moves the mode by several standard
        # deviations.
        first = minimize(density, center.position, center.curvature.root, 0.1)
        top, _ = density(first)
        moved = float(np.max(np.abs(first - center.position) / sds))
        # A subsample moves a mode by about this many standard deviations.
        by_subsample = np.sqrt(max(1.0, subsample.weight - 1))
        if not at_mode and moved > FARTHEST_MODE * by_subsample:
            return
        far = max(FARTHEST_MODE, 2 * moved)

        def is_another_mode(end: np.ndarray, root: Matrix) -> bool:
            value, gradient = density(end)
            ended = np.max(np.abs(root.T @ gradient)) < 1
            distant = np.max(np.abs(end - first) / sds) > far
            if not (ended and distant and value > top - NEGLIGIBLE_MODE):
                return False
            # Without a valley half-way both belong to one mode that a search did not reach.
            between, _ = density((first + end) / 2)
            return between < min(value, top) - LEAST_DIFFERENCE

        shifts = rng.uniform(-2, 2, size=(DISPERSED_PAIRS, len(start)))
        for begin in (start + sign * shift for shift in shifts for sign in (1, -1)):
            try:
                near = minimize(density, begin, Diagonal(scale), 0.1, steps=STEPS_IN_FIRST_SCALE)
                end = minimize(density, near, center.curvature.root, 0.1)
                if not is_another_mode(end, center.curvature.root):
                    continue
                # Where the scales there are wider than at the centre, this is on a slope.
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", CenterWarning)
                    root = curvature_at(posterior, subsample, end).root
                end = minimize(density, end, root, 0.1)
            except ValueError:
                continue  # The log density is not finite there.
            if not is_another_mode(end, root):
                continue
            value, _ = density(end)
            higher = "higher" if value > top else "lower"
            _warn(
                "a search from another start ended "
                f"{np.max(np.abs(end - first) / sds):.3g} standard deviations from the centre, "
                f"where the log density is {abs(value - top):.3g} {higher}"
            )
            return


def _mode_by_symmetry(posterior: Posterior, subsample: Subsample, center: Center) -> str | None:
    """What leads from the centre to another mode of the same density."""
    density, root = subsample.log_density_and_gradient, center.curvature.root
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
        if not (distance > FARTHEST_MODE and abs(value(other) - top) < LEAST_DIFFERENCE):
            continue

        def own_image(position: np.ndarray, image: Image = image) -> np.ndarray:
            return (position + image(position)) / 2

        # The ends of a bent ridge belong to one mode: the density is as high at a position between
        # them that is its own image.
        between = own_image(center.position)
        with suppress(Exception):
            between = own_image(
                minimize(lambda x: density(own_image(x)), between, root, 0.1, STEPS_IN_FIRST_SCALE)
            )
        if value(between) < top - LEAST_DIFFERENCE:
            return f"with {change}, {distance:.3g} standard deviations away, it is the same"
    return None


def _warn(found: str) -> None:
    warn(
        f"The posterior has more than one mode: {found}. Chains hardly ever change modes: order "
        "or fix exchangeable parameters, give `center`, or sample with NUTS.",
        CenterWarning,
    )
