"""SGMCMCJax: its SGLD and SGLD-CV kernels in one compiled ``lax.scan``.

The kernels draw their own random rows, with replacement. Runs in an environment of its own, see
``peer_python.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from common.problem import Problem

from transition_benchmark.interface import Prepared, Run, Settings, UnavailableError


def prepare(problem: Problem, settings: Settings) -> Prepared:
    """Compile a chain for each method."""
    try:
        import jax
        from sgmcmcjax import kernels
    except ImportError as error:
        raise UnavailableError(f"SGMCMCJax cannot be imported: {error}") from error
    jax.config.update("jax_enable_x64", problem.dtype == np.float64)
    import jax.numpy as jnp

    data = (jnp.asarray(problem.design), jnp.asarray(problem.response))
    start = jnp.asarray(problem.start, problem.dtype)
    mode = jnp.asarray(problem.mode, problem.dtype)

    def log_prior(position: Any) -> Any:
        return -0.5 * jnp.sum(position**2) / problem.prior_sd**2

    def log_likelihood(position: Any, covariates: Any, response: Any) -> Any:
        predictor = covariates @ position
        # Faster here than `jax.nn.softplus`, whose derivative guards against infinite arguments;
        # no predictor of this problem comes near the overflow of `exp`.
        return response * predictor - jnp.log1p(jnp.exp(predictor))

    # SGMCMCJax steps by dt * gradient + N(0, 2 dt).
    common = (settings.step_size / 2, log_likelihood, log_prior, data, settings.batch)

    def make_run(triple: Any) -> Run:
        initialise, kernel, get_position = triple

        @jax.jit
        def chain(key: Any, start: Any) -> Any:
            def transition(state: Any, step: Any) -> Any:
                index, key = step
                state = kernel(index, key, state)
                return state, get_position(state)

            key_start, key_chain = jax.random.split(key)
            steps = (
                jnp.arange(settings.transitions),
                jax.random.split(key_chain, settings.transitions),
            )
            return jax.lax.scan(transition, initialise(key_start, start), steps)[1]

        return lambda seed: np.asarray(chain(jax.random.PRNGKey(seed), start))

    return Prepared(
        runs={
            "sgld": make_run(kernels.build_sgld_kernel(*common)),
            "sgld-cv": make_run(kernels.build_sgldCV_kernel(*common, mode)),
        },
        packages=("sgmcmcjax", "jax", "jaxlib", "numpy", "scipy"),
    )
