"""blackjax: SGLD and its control-variate gradient estimator in one compiled ``lax.scan``.

Every transition draws fresh random rows, with replacement, inside the compiled loop: blackjax
leaves the minibatches to the user, and this is the fastest of the usual ways to make them.
"""

from __future__ import annotations

from typing import Any

import blackjax
import jax
import numpy as np
from blackjax.sgmcmc import gradients
from common.jax_regression import Regression
from common.problem import Problem

from transition_benchmark import Run, Settings

PACKAGES = ("blackjax", "jax", "jaxlib", "numpy")


def prepare(problem: Problem, settings: Settings) -> dict[str, Run]:
    """Compile a chain for each method."""
    regression = Regression(problem)
    plain = gradients.grad_estimator(
        regression.log_prior,
        lambda position, row: regression.log_likelihood(position, *row),
        regression.rows,
    )
    centred = gradients.control_variates(plain, regression.mode, regression.data)

    def make_run(estimator: Any) -> Run:
        sampler = blackjax.sgld(estimator)

        # The data are arguments: as constants of the compiled program they would be copied into it.
        @jax.jit
        def chain(key: Any, start: Any, design: Any, response: Any) -> Any:
            def transition(position: Any, key: Any) -> Any:
                key_rows, key_noise = jax.random.split(key)
                rows = jax.random.randint(key_rows, (settings.batch,), 0, regression.rows)
                minibatch = (design[rows], response[rows])
                # blackjax steps by eps * gradient + N(0, 2 eps).
                position = sampler.step(key_noise, position, minibatch, settings.step_size / 2)
                return position, position

            keys = jax.random.split(key, settings.transitions)
            return jax.lax.scan(transition, start, keys)[1]

        return lambda seed: np.asarray(
            chain(jax.random.key(seed), regression.start, *regression.data)
        )

    return {"sgld": make_run(plain), "sgld-cv": make_run(centred)}
