"""The logistic regression of `common.problem` in JAX, for the contenders that need it."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import scipy.optimize

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

    def log_density(self, position: Any, covariates: Any, response: Any) -> Any:
        """Log density of the posterior. All rows are arguments, since constants of a compiled
        program are copied into it.
        """
        rows = jax.vmap(self.log_likelihood, (None, 0, 0))(position, covariates, response)
        return self.log_prior(position) + rows.sum()

    def find_mode(self) -> np.ndarray:
        """Search for the mode as a user without one does: BFGS on all rows, from the prior mean."""

        @jax.jit
        def value_and_slope(position: Any, covariates: Any, response: Any) -> Any:
            return jax.value_and_grad(
                lambda value: -self.log_density(value, covariates, response) / self.rows
            )(position)

        def values(position: np.ndarray) -> tuple[float, np.ndarray]:
            loss, slope = value_and_slope(position, *self.data)
            return float(loss), np.asarray(slope, float)

        origin = np.zeros(len(self.start))
        # A posterior sd from the mode this loss has a slope of some N^-1/2.
        options = {"gtol": 1e-3 / self.rows**0.5}
        return scipy.optimize.minimize(values, origin, jac=True, method="BFGS", options=options).x
