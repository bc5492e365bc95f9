"""Small models that the tests of the samplers share."""

from __future__ import annotations

import numpy as np
import pymc as pm

LOGISTIC_ROWS = 400


def logistic_data(n_rows: int = LOGISTIC_ROWS, seed: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Predictors with an intercept, and boolean outcomes."""
    rng = np.random.default_rng(seed)
    X = np.column_stack([np.ones(n_rows), rng.normal(size=(n_rows, 2))])
    y = rng.random(n_rows) < 1 / (1 + np.exp(-X @ [0.5, 1.0, -1.0]))
    return X, y


def logistic_model(batch_size: int | None = None, n_rows: int = LOGISTIC_ROWS) -> pm.Model:
    """Logistic regression, on minibatches where a batch size is given."""
    X, y = logistic_data(n_rows)
    with pm.Model(coords={"feature": ["intercept", "age", "height"]}) as model:
        beta = pm.Normal("beta", 0.0, 2.0, dims="feature")
        if batch_size is None:
            pm.Bernoulli("y", logit_p=X @ beta, observed=y)
        else:
            X_batch, y_batch = pm.Minibatch(X, y, batch_size=batch_size)
            pm.Bernoulli("y", logit_p=X_batch @ beta, observed=y_batch, total_size=n_rows)
    return model


def two_variable_model(n_rows: int = LOGISTIC_ROWS) -> pm.Model:
    """Linear regression with a transformed scale, for compound steps and orders of variables."""
    rng = np.random.default_rng(8)
    x = rng.normal(size=n_rows)
    y = 1.0 + 2.0 * x + 0.5 * rng.normal(size=n_rows)
    with pm.Model() as model:
        intercept = pm.Normal("intercept", 0.0, 5.0)
        slope = pm.Normal("slope", 0.0, 5.0)
        sigma = pm.HalfNormal("sigma", 2.0)
        pm.Normal("y", intercept + slope * x, sigma, observed=y)
    return model
