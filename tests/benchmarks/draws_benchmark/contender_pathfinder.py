"""Pathfinder of blackjax from the prior mean, on all rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from blackjax.vi import pathfinder
from common.jax_regression import Regression
from common.problem import Problem

PACKAGES = ("blackjax", "jax", "jaxlib", "numpy")
ELBO_DRAWS = 10
"""Of each approximation on the path. The default, 200, needs 200 N numbers in memory."""


def sample(problem: Problem, mark: Callable[[], None]) -> np.ndarray:
    """Fit, and draw from the best approximation."""
    regression = Regression(problem)

    @jax.jit
    def fit(key: Any, start: Any, covariates: Any, response: Any) -> Any:
        return pathfinder.approximate(
            key,
            lambda position: regression.log_density(position, covariates, response),
            start,
            num_samples=ELBO_DRAWS,
        )[0]

    start = jax.numpy.zeros_like(regression.start)
    state = jax.block_until_ready(fit(jax.random.key(1), start, *regression.data))
    mark()
    return np.asarray(pathfinder.sample(jax.random.key(2), state, 1000)[0])
