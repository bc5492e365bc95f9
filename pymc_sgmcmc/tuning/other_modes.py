"""Other modes that may hold mass."""

from __future__ import annotations

import warnings

import numpy as np

from pymc_sgmcmc.errors import CenterWarning
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.tuning.center import Center
from pymc_sgmcmc.tuning.mode_search import minimize
from pymc_sgmcmc.tuning.subsample import Subsample

DISPERSED_PAIRS = 3
"""Pairs of searches for other modes, from starts within 2 of the first in each coordinate. Those of
a pair are on opposite sides of it: where modes are exchangeable, they end at different ones."""

FARTHEST_MODE = 5.0
"""Distance, in standard deviations, at which two searches ended at different modes."""

NEGLIGIBLE_MODE = 20.0
"""Difference of log densities beyond which the lower mode holds nearly no mass."""

LEAST_VALLEY = 1.0
"""Log density half-way below that at both ends, from which these are two modes."""


def warn_of_other_modes(
    posterior: Posterior,
    subsample: Subsample,
    center: Center,
    start: np.ndarray,
    scale: np.ndarray,
    *,
    at_mode: bool = True,
) -> None:
    """Warn where searches from dispersed starts end at another mode that may hold mass.

    With `at_mode` false the centre is that of a Gaussian that is near the posterior. Where it has
    no mode nearby, modes say nothing of the mass, and nothing is said.

    Warns
    -----
    CenterWarning
    """
    rng = np.random.default_rng(1963)
    sds = center.curvature.standard_deviations
    with np.errstate(all="ignore"):
        # On the same rows as the others, which move the mode by some standard deviations.
        first = minimize(subsample.log_density_and_gradient, center.position, scale, 0.1)
        top, _ = subsample.log_density_and_gradient(first)
        moved = float(np.max(np.abs(first - center.position) / sds))
        if not at_mode and moved > FARTHEST_MODE:
            return
        far = max(FARTHEST_MODE, 2 * moved)
        shifts = rng.uniform(-2, 2, size=(DISPERSED_PAIRS, len(start)))
        for begin in (start + sign * shift for shift in shifts for sign in (1, -1)):
            try:
                end = minimize(subsample.log_density_and_gradient, begin, scale, 0.1)
            except ValueError:
                continue  # not finite there
            value, gradient = subsample.log_density_and_gradient(end)
            distance = float(np.max(np.abs(end - first) / sds))
            ended = np.max(np.abs(scale * gradient)) < 1
            if not (ended and distance > far and value > top - NEGLIGIBLE_MODE):
                continue
            between, _ = subsample.log_density_and_gradient((first + end) / 2)
            if not between < min(value, top) - LEAST_VALLEY:
                continue  # of one mode, from which a search ended early
            warnings.warn(
                "The posterior has more than one mode: a search from another start ended "
                f"{distance:.3g} standard deviations from the centre, where the log density is "
                f"{abs(value - top):.3g} {'higher' if value > top else 'lower'}. Chains begin at "
                "one of them, hardly ever leave it, and agree there. Order or fix what makes modes "
                "exchangeable, give `center`, or sample with NUTS.",
                CenterWarning,
                stacklevel=3,
            )
            return
