"""SGMCMCJax: its SGLD and SGLD-CV kernels in one compiled ``lax.scan``.

The kernels draw their own random rows, with replacement. Runs in an environment of its own, see
``peer_python.py``.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from common.jax_regression import Regression
from common.problem import Problem
from sgmcmcjax import kernels

from transition_benchmark import Run, Settings

PACKAGES = ("sgmcmcjax", "jax", "jaxlib", "numpy", "scipy")


def prepare(problem: Problem, settings: Settings) -> dict[str, Run]:
    """Compile a chain for each method."""
    regression = Regression(problem)
    shared = (
        settings.step_size / 2,  # SGMCMCJax steps by dt * gradient + N(0, 2 dt).
        regression.log_likelihood,
        regression.log_prior,
        regression.data,
        settings.batch,
    )

    def make_run(triple: Any) -> Run:
        initialise, kernel, get_position = triple

        @jax.jit
        def chain(key: Any, start: Any) -> Any:
            def transition(state: Any, step: Any) -> Any:
                index, key = step
                state = kernel(index, key, state)
                return state, get_position(state)

            key_start, key_chain = jax.random.split(key)
            keys = jax.random.split(key_chain, settings.transitions)
            steps = (jax.numpy.arange(settings.transitions), keys)
            return jax.lax.scan(transition, initialise(key_start, start), steps)[1]

        return lambda seed: np.asarray(chain(jax.random.PRNGKey(seed), regression.start))

    return {
        "sgld": make_run(kernels.build_sgld_kernel(*shared)),
        "sgld-cv": make_run(kernels.build_sgldCV_kernel(*shared, regression.mode)),
    }
