"""pymc_sgmcmc: ``sample(accuracy=0.02)``, long steps whose draws are corrected, one chain."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from common.model import build_model
from common.problem import Problem

from draws_benchmark import DRAWS
from pymc_sgmcmc import SGLDCV
from pymc_sgmcmc import sample as sample_whole

PACKAGES = ("pymc_sgmcmc", "pymc", "pytensor", "numba", "numpy")


def sample(problem: Problem, mark: Callable[..., None]) -> np.ndarray:
    """Sample a model on the full arrays. Tuning and correction count as drawing."""
    import arviz  # noqa: F401, the tools behind every summary, which the first call imports

    with build_model(problem, 0, "ordinary"):
        step = SGLDCV()
        mark()
        idata = sample_whole(
            DRAWS, step=step, chains=1, cores=1, random_seed=1, progressbar=False, accuracy=0.02
        )
    return idata["posterior"]["coefficients"].values[0]
