"""blackjax: SGLD and its control-variate gradient estimator in one compiled ``lax.scan``.

Every transition draws fresh random rows, with replacement, inside the compiled loop: blackjax
leaves the minibatches to the user, and this is the fastest of the usual ways to make them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from common.problem import Problem

from transition_benchmark.interface import Prepared, Run, Settings, UnavailableError


def prepare(problem: Problem, settings: Settings) -> Prepared:
    """Compile a chain for each method."""
    try:
        import blackjax
        import jax
    except ImportError as error:
        raise UnavailableError(f"blackjax cannot be imported: {error}") from error
    jax.config.update("jax_enable_x64", problem.dtype == np.float64)
    import jax.numpy as jnp
    from blackjax.sgmcmc import gradients

    data = (jnp.asarray(problem.design), jnp.asarray(problem.response))
    start = jnp.asarray(problem.start, problem.dtype)
    mode = jnp.asarray(problem.mode, problem.dtype)

    def log_prior(position: Any) -> Any:
        return -0.5 * jnp.sum(position**2) / problem.prior_sd**2

    def log_likelihood(position: Any, row: Any) -> Any:
        covariates, response = row
        predictor = covariates @ position
        # Faster here than `jax.nn.softplus`, whose derivative guards against infinite arguments;
        # no predictor of this problem comes near the overflow of `exp`.
        return response * predictor - jnp.log1p(jnp.exp(predictor))

    plain = gradients.grad_estimator(log_prior, log_likelihood, problem.rows)
    centred = gradients.control_variates(plain, mode, data)

    def make_run(estimator: Any) -> Run:
        sampler = blackjax.sgld(estimator)

        # The data are arguments: as constants of the compiled program they would be copied into it.
        @jax.jit
        def chain(key: Any, start: Any, design: Any, response: Any) -> Any:
            def transition(position: Any, key: Any) -> Any:
                key_rows, key_noise = jax.random.split(key)
                rows = jax.random.randint(key_rows, (settings.batch,), 0, problem.rows)
                minibatch = (design[rows], response[rows])
                # blackjax steps by eps * gradient + N(0, 2 eps).
                position = sampler.step(key_noise, position, minibatch, settings.step_size / 2)
                return position, position

            keys = jax.random.split(key, settings.transitions)
            return jax.lax.scan(transition, start, keys)[1]

        return lambda seed: np.asarray(chain(jax.random.key(seed), start, *data))

    return Prepared(
        runs={"sgld": make_run(plain), "sgld-cv": make_run(centred)},
        packages=("blackjax", "jax", "jaxlib", "numpy"),
    )
