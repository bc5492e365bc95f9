"""pymc_sgmcmc: ``SGLDCV()`` without settings, one chain with the usual tuning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pymc as pm
from common.model import build_model
from common.problem import Problem

from draws_benchmark import LONG
from pymc_sgmcmc import SGLDCV

PACKAGES = ("pymc_sgmcmc", "pymc", "pytensor", "numba", "numpy")


def sample(problem: Problem, mark: Callable[..., None]) -> np.ndarray:
    """Sample a model on the full arrays."""

    def watch(trace: Any, draw: Any) -> None:
        mark(not draw.tuning)

    with build_model(problem, 0, "ordinary"):
        idata = pm.sample(
            LONG, step=SGLDCV(), chains=1, cores=1, random_seed=1, progressbar=False,
            callback=watch,
        )  # fmt: skip
    return idata.posterior["coefficients"].values[0]
