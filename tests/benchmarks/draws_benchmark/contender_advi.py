"""PyMC's mean-field ADVI on minibatches, with the default number of iterations and optimiser."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pymc as pm
from common.model import build_model
from common.problem import Problem

PACKAGES = ("pymc", "pytensor", "numpy")
BATCH = 500


def sample(problem: Problem, mark: Callable[[], None]) -> np.ndarray:
    """Fit, and draw from the fitted normal distribution."""
    with build_model(problem, BATCH, "minibatch"):
        approximation = pm.fit(method="advi", random_seed=1, progressbar=False)
        mark()
        idata = approximation.sample(1000, random_seed=2)
    return idata.posterior["coefficients"].values[0]
