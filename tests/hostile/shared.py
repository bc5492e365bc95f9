"""Small models and their exact posteriors, with which most cases begin."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pymc as pm

from pymc_sgmcmc import SGLDCV
from tests.hostile.case import case
from tests.hostile.law import Law, Run

QUICK = {"mode": "FAST_COMPILE"}
"""Most cases run on this backend, since their results do not depend on it."""

ROWS, PRIOR_SD = 400, 2.0


@functools.cache
def line_data(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Predictors with an intercept, and outcomes with a residual standard deviation of 1."""
    rng = np.random.default_rng(7)
    X = np.column_stack([np.ones(rows), rng.normal(size=rows)])
    return X, X @ [0.5, -1.0] + rng.normal(size=rows)


def line(X: Any = None, y: Any = None) -> pm.Model:
    """Linear regression with a known residual standard deviation of 1."""
    X = line_data()[0] if X is None else X
    y = line_data()[1] if y is None else y
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, PRIOR_SD, shape=np.shape(X)[-1])
        pm.Normal("y", pm.math.dot(X, beta), 1.0, observed=y)
    return model


@functools.cache
def shared_line() -> pm.Model:
    """A `line` model that is shared by all cases that do not change it."""
    return line()


def gaussian(
    X: Any = None, y: Any = None, sigma: Any = 1.0, prior_mean: Any = 0.0, prior_sd: Any = PRIOR_SD
) -> Law:
    """Exact posterior of a linear regression with known residual standard deviation."""
    X = np.asarray(line_data()[0] if X is None else X, dtype=float)
    y = np.asarray(line_data()[1] if y is None else y, dtype=float)
    weights = np.broadcast_to(1 / np.square(sigma, dtype=float), len(y))
    prior = np.broadcast_to(1 / np.square(prior_sd, dtype=float), X.shape[1])
    covariance = np.linalg.inv(X.T @ (weights[:, None] * X) + np.diag(prior))
    mean = covariance @ (X.T @ (weights * y) + prior * prior_mean)
    return Law(mean, np.sqrt(np.diag(covariance)))


def run_of(
    model: pm.Model, expected: Any = None, step_method: Any = SGLDCV, /, **settings: Any
) -> Run:
    """A default run on a model."""
    settings = {"compile_kwargs": QUICK} | settings
    with model:
        step = step_method(**settings)
    return Run(model, step, expected)


def nuts_run_of(model: pm.Model, /, *, step_method: Any = SGLDCV, **settings: Any) -> Run:
    """A default run on a model, to be compared with NUTS."""
    names = tuple(variable.name for variable in model.free_RVs)
    return run_of(model, lambda: Law.by_nuts(model, names), step_method, **settings)


def model_case(
    says: str = "", *, expected: Any = None, run: Callable[..., Run] = run_of, **flags: Any
) -> Callable[[Callable[[], Any]], Callable[[], Run]]:
    """Add a function that writes a model, in its context, to the catalogue: a default run on it."""

    def register(write: Callable[[], Any]) -> Callable[[], Run]:
        @functools.wraps(write)
        def of_model() -> Run:
            with pm.Model() as model:
                write()
            return run(model) if expected is None else run(model, expected)

        return case(says, **flags)(of_model)

    return register
