"""SGMCMCJax: its SGLD-CV kernel, centred where BFGS finds the mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from common.jax_regression import Regression
from common.problem import Problem
from sgmcmcjax import kernels

from draws_benchmark.jax_chain import BATCH, draw_chain, tuned_step_size

PACKAGES = ("sgmcmcjax", "jax", "jaxlib", "numpy", "scipy")


def sample(problem: Problem, mark: Callable[[], None]) -> np.ndarray:
    """Find the mode and run a chain from it."""
    regression = Regression(problem)
    mode = jax.numpy.asarray(regression.find_mode())
    initialise, kernel, get_position = kernels.build_sgldCV_kernel(
        tuned_step_size(problem) / 2,  # SGMCMCJax steps by dt * gradient + N(0, 2 dt).
        regression.log_likelihood,
        regression.log_prior,
        regression.data,
        BATCH,
        mode,
    )

    def transition(state: Any, key: Any, data: Any) -> Any:
        return kernel(0, key, state)

    state = initialise(jax.random.PRNGKey(0), mode)
    return draw_chain(transition, get_position, state, (), mark)
