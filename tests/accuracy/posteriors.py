"""Models on real data whose posteriors are compared with a reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pymc as pm

from pymc_sgmcmc.datasets import load_skin


def standardised_design(X: np.ndarray) -> np.ndarray:
    """Columns with mean 0 and sd 1, after an intercept."""
    X = np.asarray(X, dtype=float)
    return np.column_stack([np.ones(len(X)), (X - X.mean(0)) / X.std(0)])


def skin_logistic(data_folder: Path) -> pm.Model:
    """Logistic regression of skin against the three colours: N = 245 057, d = 4."""
    data = load_skin(data_folder)
    X = standardised_design(data.X)
    y = np.asarray(data.y, dtype=bool)
    with pm.Model(coords={"feature": ["intercept", *data.feature_names]}) as model:
        beta = pm.Normal("beta", 0.0, 10.0, dims="feature")
        pm.Bernoulli("y", logit_p=X @ beta, observed=y)
    return model


MODELS = {"skin_logistic": skin_logistic}
