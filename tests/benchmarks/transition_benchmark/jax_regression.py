"""The logistic regression of `common.problem` in JAX, for the contenders that need it."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from common.problem import Problem


class Regression:
    """Data, start and mode as JAX arrays, and the log density that both libraries ask for."""

    def __init__(self, problem: Problem) -> None:
        jax.config.update("jax_enable_x64", problem.dtype == np.float64)
        self.rows = problem.rows
        self.prior_sd = problem.prior_sd
        self.data = (jax.numpy.asarray(problem.design), jax.numpy.asarray(problem.response))
        self.start = jax.numpy.asarray(problem.start, problem.dtype)
        self.mode = jax.numpy.asarray(problem.mode, problem.dtype)

    def log_prior(self, position: Any) -> Any:
        """Log density of the prior, without its constant."""
        return -0.5 * jax.numpy.sum(position**2) / self.prior_sd**2

    def log_likelihood(self, position: Any, covariates: Any, response: Any) -> Any:
        """Log probability of the response of one row."""
        predictor = covariates @ position
        # Faster here than `jax.nn.softplus`, whose derivative guards against infinite arguments;
        # no predictor of this problem comes near the overflow of `exp`.
        return response * predictor - jax.numpy.log1p(jax.numpy.exp(predictor))
