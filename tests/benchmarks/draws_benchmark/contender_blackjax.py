"""blackjax: SGLD with its control-variate gradient estimator, centred where BFGS finds the mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import blackjax
import jax
import numpy as np
from blackjax.sgmcmc import gradients
from common.jax_regression import Regression
from common.problem import Problem

from draws_benchmark.jax_chain import BATCH, draw_chain, tuned_step_size

PACKAGES = ("blackjax", "jax", "jaxlib", "numpy")


def sample(problem: Problem, mark: Callable[[], None]) -> np.ndarray:
    """Find the mode and run a chain from it."""
    regression = Regression(problem)
    mode = regression.find_mode()
    plain = gradients.grad_estimator(
        regression.log_prior,
        lambda position, row: regression.log_likelihood(position, *row),
        regression.rows,
    )
    sampler = blackjax.sgld(gradients.control_variates(plain, mode, regression.data))
    # blackjax steps by eps * gradient + N(0, 2 eps).
    step_size = tuned_step_size(problem) / 2

    def transition(position: Any, key: Any, data: Any) -> Any:
        key_rows, key_noise = jax.random.split(key)
        rows = jax.random.randint(key_rows, (BATCH,), 0, regression.rows)
        minibatch = tuple(values[rows] for values in data)
        return sampler.step(key_noise, position, minibatch, step_size)

    start = jax.numpy.asarray(mode)
    return draw_chain(transition, lambda position: position, start, regression.data, mark)
