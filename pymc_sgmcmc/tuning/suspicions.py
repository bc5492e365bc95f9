"""Suspicions about a centre: functions of one signature, whose messages a set-up gives.

Each takes a posterior, a sample of its rows and the centre, and gives a message or None. Those
about a funnel, other modes and jumps have files of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pymc_sgmcmc.errors import CenterWarning, warn
from pymc_sgmcmc.guests import remedy
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.tuning.center import Center
from pymc_sgmcmc.tuning.funnel import funnel
from pymc_sgmcmc.tuning.gaussian import FLAT
from pymc_sgmcmc.tuning.jumps import jump
from pymc_sgmcmc.tuning.mode_search import informed_effects
from pymc_sgmcmc.tuning.other_modes import another_mode
from pymc_sgmcmc.tuning.subsample import Subsample

FARTHEST_CENTER = 3.0
"""A centre farther from the mode than this many posterior standard deviations counts as no mode.
A larger bound would accept centres whose curvature is not that at the mode, and a smaller one would
refuse centres that control variates can still use."""

Suspicion = Callable[[Posterior, Subsample, Center], str | None]


def no_guide(posterior: Posterior, rows: Subsample, center: Center) -> str | None:
    """A message where the posterior is far from the Gaussian around a centre that was searched."""
    if center.is_guide:
        return None
    misfit, labels = center.misfit, posterior.labels
    scales = misfit.scales
    worst = labels[int(np.argmax(np.nan_to_num(np.abs(misfit.gradient), nan=np.inf)))]
    if center.collapsed:
        cause = "The search for the mode ended at a scale of zero"
        if posterior.coordinates is None:
            effect = labels[center.collapsed[0]]
            cause += f": write group effects such as {effect} non-centred"
        cause += "."
    elif center.is_mode and not center.curvature.is_flat and center.distance > FARTHEST_CENTER:
        cause = (
            f"The search for the mode ended {center.distance:.3g} standard deviations from it: "
            "the log density may jump, be badly scaled or have no mode."
        )
    elif scales[0] < FLAT or center.curvature.is_flat:
        cause = (
            "The log posterior is flat or bends upwards there: priors may be improper, outcomes "
            "separated, or modes exchangeable."
        )
    elif len(informed := informed_effects(posterior, rows, center)):
        cause = (
            f"Rows say far more of {labels[informed[0]]} than its prior: write effects "
            "of groups with many records as centred ones, `pm.Normal(name, mean, scale)`."
        )
    else:
        cause = (
            "The mode may lie on a boundary or far from the mass (many group effects), or "
            "outcomes may be separated."
        )
    call = remedy(posterior.model)
    return (
        "No Gaussian was found near the posterior, so draws may be wrong (mean gradient "
        f"{misfit.shift:.3g} standard deviations in {worst}, curvature ratio {scales[0]:.3g} "
        f"to {scales[-1]:.3g}). {cause} Change priors or parametrisation, "
        f"{'' if call is None else f'use {call}, '}give `center`, or sample with NUTS."
    )


def no_curvature(posterior: Posterior, rows: Subsample, center: Center) -> str | None:
    """A message where the log density is flat or bends upwards at a centre."""
    if not center.curvature.is_flat:
        return None
    return (
        "The log posterior is flat or bends upwards at the centre (smallest eigenvalue of the "
        f"curvature {center.curvature.definite:.2g} times the largest). It may have no mode there, "
        "or be improper: check the priors."
    )


def no_mode(posterior: Posterior, rows: Subsample, center: Center) -> str | None:
    """A message where a centre of the user is far from a mode."""
    if not center.distance > FARTHEST_CENTER:
        return None
    return (
        f"`center` is {center.distance:.3g} posterior standard deviations from the mode, "
        "too far for control variates and the computed step size. Leave `center` out to have "
        "the mode searched."
    )


OF_A_SEARCH: tuple[Suspicion, ...] = (no_guide, another_mode, funnel)
OF_A_GIVEN_CENTER: tuple[Suspicion, ...] = (no_mode, no_curvature)
OF_ANY_CENTER: tuple[Suspicion, ...] = (jump,)


def warn_of(
    suspicions: Sequence[Suspicion], posterior: Posterior, rows: Subsample, center: Center
) -> None:
    """Warn of the first suspicion that has a message: later ones ask for what it denies.

    Warns
    -----
    CenterWarning
    """
    messages = (suspicion(posterior, rows, center) for suspicion in suspicions)
    if (message := next(filter(None, messages), None)) is not None:
        warn(message, CenterWarning)
