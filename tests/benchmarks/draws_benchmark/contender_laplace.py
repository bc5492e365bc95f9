"""Laplace's approximation where BFGS finds the mode; its draws are independent."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from common.jax_regression import Regression
from common.problem import Problem

from draws_benchmark import DRAWS

PACKAGES = ("jax", "jaxlib", "numpy")


def sample(problem: Problem, mark: Callable[[], None], *, corrected: bool = False) -> np.ndarray:
    """Draw from the normal distribution, with Pareto smoothed importance weights if wanted.

    Of weighted draws as many are drawn anew as their effective number.
    """
    regression = Regression(problem)
    mode = jax.numpy.asarray(regression.find_mode())
    density = jax.jit(regression.log_density)
    curvature = -jax.jit(jax.hessian(regression.log_density))(mode, *regression.data)
    root = np.linalg.cholesky(np.linalg.inv(np.asarray(curvature)))
    density(mode, *regression.data).block_until_ready()
    mark()
    rng = np.random.default_rng(1)
    normal = rng.normal(size=(DRAWS, problem.features))
    draws = np.asarray(mode) + normal @ root.T
    if not corrected:
        return draws
    from arviz_stats.base import array_stats

    values = [density(jax.numpy.asarray(draw), *regression.data) for draw in draws]
    log_weights = np.array(values, float) + (normal**2).sum(1) / 2
    weights = np.exp(array_stats.psislw(-log_weights)[0])
    weights /= weights.sum()
    return draws[rng.choice(DRAWS, int(1 / (weights**2).sum()), p=weights)]
