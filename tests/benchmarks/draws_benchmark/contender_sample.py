"""pymc_sgmcmc: its own ``sample``, without settings, one chain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from common.model import build_model
from common.problem import Problem

from draws_benchmark import LONG
from pymc_sgmcmc import SGLDCV
from pymc_sgmcmc import sample as sample_whole

PACKAGES = ("pymc_sgmcmc", "pymc", "pytensor", "numba", "numpy")


def sample(problem: Problem, mark: Callable[..., None], **settings: Any) -> np.ndarray:
    """Sample a model on the full arrays. Tuning counts as drawing, and checks at the end do not."""
    shared = {"chains": 1, "cores": 1, "random_seed": 1, "progressbar": False}
    with build_model(problem, 0, "ordinary"):
        step = SGLDCV(**settings)
        # A run with its checks, after which another one has only its draws to make.
        sample_whole(1000, step=step, **shared)
        mark()
        idata = sample_whole(LONG, step=step, compute_convergence_checks=False, **shared)
    return idata["posterior"]["coefficients"].values[0]
