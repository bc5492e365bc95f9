"""Design matrices of the models whose posteriors are compared with a reference."""

from __future__ import annotations

import numpy as np


def standardised_design(X: np.ndarray) -> np.ndarray:
    """Columns with mean 0 and sd 1, after an intercept."""
    X = np.asarray(X, dtype=float)
    return np.column_stack([np.ones(len(X)), (X - X.mean(0)) / X.std(0)])


def design_coords(columns: int) -> dict[str, list[str]]:
    """Names for an intercept and numbered columns."""
    return {"feature": ["intercept", *(f"x{number}" for number in range(1, columns + 1))]}


def sigmoid(eta: np.ndarray) -> np.ndarray:
    """Inverse of the logit."""
    return 1 / (1 + np.exp(-eta))


def simulated_design(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Independent standard normal columns, after an intercept."""
    X = rng.standard_normal((rows, 1 + columns))
    X[:, 0] = 1.0
    return X
