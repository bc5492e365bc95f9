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


def two_variable_data(n_rows: int = LOGISTIC_ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Predictor and outcomes of the linear regression below."""
    rng = np.random.default_rng(8)
    x = rng.normal(size=n_rows)
    return x, 1.0 + 2.0 * x + 0.5 * rng.normal(size=n_rows)


def two_variable_model(n_rows: int = LOGISTIC_ROWS) -> pm.Model:
    """Linear regression with a transformed scale, for compound steps and orders of variables."""
    x, y = two_variable_data(n_rows)
    with pm.Model() as model:
        intercept = pm.Normal("intercept", 0.0, 5.0)
        slope = pm.Normal("slope", 0.0, 5.0)
        sigma = pm.HalfNormal("sigma", 2.0)
        pm.Normal("y", intercept + slope * x, sigma, observed=y)
    return model


def two_variable_moments() -> dict[str, tuple[float, float]]:
    """Exact mean and standard deviation of each variable of the linear regression above.

    Given sigma the coefficients are Gaussian, and sigma is integrated on a grid.
    """
    x, y = two_variable_data()
    X = np.column_stack([np.ones(len(x)), x])
    sigma = np.linspace(0.3, 0.8, 2001)
    precision = X.T @ X / sigma[:, None, None] ** 2 + np.eye(2) / 5.0**2
    projected = X.T @ y / sigma[:, None] ** 2
    means = np.linalg.solve(precision, projected[..., None])[..., 0]
    log_weights = -len(y) * np.log(sigma) - 0.5 * y @ y / sigma**2 - 0.5 * (sigma / 2.0) ** 2
    log_weights += 0.5 * (projected * means).sum(1) - 0.5 * np.linalg.slogdet(precision)[1]
    weights = np.exp(log_weights - log_weights.max())
    weights /= weights.sum()
    variances = np.linalg.inv(precision).diagonal(axis1=1, axis2=2)
    at = np.column_stack([means, sigma])
    mean = weights @ at
    variance = weights @ ((at - mean) ** 2 + np.column_stack([variances, np.zeros(len(sigma))]))
    names = ("intercept", "slope", "sigma")
    return dict(zip(names, zip(mean, np.sqrt(variance), strict=True), strict=True))
