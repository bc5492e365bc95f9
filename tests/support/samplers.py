"""The samplers, with their settings, exact laws and orders of bias.

A new sampler is one `Sampler` in `SAMPLERS`. Its exact law is given as a formula in NumPy, and
compared with the law that follows from its compiled transitions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from pymc_sgmcmc import HAMCMC, OSGFS, PSGLD, SGHMC, SGLD, SGNHT, SGRLD, Pairs, Recipe
from tests.support.laws import (
    RECIPE_SETTINGS,
    baoab_law,
    hamcmc_law,
    langevin_law,
    osgfs_law_of_step,
    recipe_law,
    sghmc_euler_law,
)
from tests.support.sampling import NUMBA

NO_PAIRS = {"pairs": Pairs(threshold=1e30)}
"""With these settings no pair is accepted, so HAMCMC is M interleaved chains of SGLD with γI."""


@dataclass(frozen=True)
class Sampler:
    """A sampler with its settings, exact law and order of bias.

    Attributes
    ----------
    name : str
    step_class : callable
    step_size : callable
        Function of the largest curvature that gives a step well inside the stable range, for M = I.
    settings : mapping
        Other settings, which make M = I.
    law : callable, optional
        Function of (H, noise operator, step size, step method) that gives the exact stationary
        covariance of the position. None where the transition is not affine.
    bias_order : float, optional
        Power of the step size in the bias of the covariance with an exact gradient.
    has_step_size : bool
        Whether a step size can be given.
    careful : mapping, optional
        Settings with which the bias on smooth posteriors is some per cent. With None the sampler is
        left out of tests that need them.
    """

    name: str
    step_class: Callable[..., Any]
    step_size: Callable[[float], float] = lambda curvature: 1.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    law: Callable[..., np.ndarray] | None = None
    bias_order: float | None = None
    careful: Mapping[str, Any] | None = None
    has_step_size: bool = True

    def make(self, model, **settings):
        """Make the step method."""
        if not self.has_step_size:
            settings.pop("step_size", None)
        return self.step_class(model=model, compile_kwargs=NUMBA, **{**self.settings, **settings})


SGHMC_SETTINGS = {"preconditioner": "identity", "friction": 2.0, "noise_estimate": None}
SAMPLERS = [
    Sampler(
        "SGLD",
        SGLD,
        lambda curvature: 0.5 / curvature,
        {"preconditioner": "identity"},
        langevin_law,
        bias_order=1,
        careful={"step_size": 0.02, "preconditioner": "identity"},
    ),
    Sampler(
        "PSGLD",
        PSGLD,
        lambda curvature: 0.5 / curvature,
        {"regularization": 1.0},  # M at most 1
        langevin_law,
        bias_order=1,
        careful={"step_size": 0.02, "regularization": 1.0},
    ),
    Sampler(
        "SGHMC",
        SGHMC,
        lambda curvature: 0.5 / curvature**0.5,
        SGHMC_SETTINGS,
        lambda H, noise, h, step: baoab_law(H, noise, h, step.friction),
        careful={"step_size": 0.1, **SGHMC_SETTINGS},
    ),
    Sampler(
        "SGHMC (Euler)",
        partial(SGHMC, integrator="euler"),
        lambda curvature: 0.5 / curvature**0.5,
        SGHMC_SETTINGS,
        lambda H, noise, h, step: sghmc_euler_law(H, noise, h, step.friction),
        bias_order=2,
        careful={"step_size": 0.1, **SGHMC_SETTINGS},
    ),
    Sampler("SGNHT", SGNHT, careful={"step_size": 0.1, "preconditioner": "identity"}),
    Sampler(
        "OSGFS",
        OSGFS,
        law=osgfs_law_of_step,
        settings={"k": 0.2},
        careful={"k": 0.05},
        has_step_size=False,
    ),
    Sampler(
        "HAMCMC",
        HAMCMC,
        careful={
            "step_size": 0.02,
            "initial_scale": 1.0,
            "regularization": 1.0,
            "pairs": Pairs(threshold=1.0),
        },
    ),
    Sampler(
        "HAMCMC (between)",
        partial(HAMCMC, pairs="between"),
        careful={
            "step_size": 0.02,
            "thin": 40,
            "memory": 4,
            "initial_scale": 1.0,
            "regularization": 1.0,
            "pairs": Pairs("between", threshold=1.0),
        },
    ),
    Sampler(
        "HAMCMC (no pairs)",
        HAMCMC,
        lambda curvature: 0.5 / curvature,
        {"memory": 2, "initial_scale": 1.0, "regularization": 0.0, **NO_PAIRS},
        hamcmc_law,
        bias_order=1,
    ),
    Sampler(
        "Recipe",
        partial(Recipe, **RECIPE_SETTINGS),
        lambda curvature: 0.02 / curvature**0.5,
        law=lambda H, noise, h, step: recipe_law(H, noise, h),
        bias_order=1,
        careful={"D": lambda theta, r: [[0, 0], [0, 2.0]], "step_size": 0.02},
    ),
    Sampler("SGRLD", SGRLD, careful={"step_size": 0.02}),
]
ESTIMATORS = ["plain", "cv", "svrg", "saga"]
