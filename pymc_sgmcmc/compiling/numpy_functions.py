"""Scalar functions of PyTensor that have no counterpart in NumPy, on arrays.

Without them PyTensor's Python code calls a Python function for each element, or SciPy's for the
logistic function, which takes three times as long.
"""

from __future__ import annotations

import numpy as np
from scipy import special


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), where an infinite exponential gives the right 0."""
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def softplus(x: np.ndarray) -> np.ndarray:
    """log(1 + exp(x)) without overflow."""
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def log1mexp(x: np.ndarray) -> np.ndarray:
    """log(1 - exp(x)) for negative x, accurate at both ends (Mächler 2012)."""
    return np.where(x < -np.log(2), np.log1p(-np.exp(x)), np.log(-np.expm1(x)))


def trigamma(x: np.ndarray) -> np.ndarray:
    """Second derivative of the logarithm of the gamma function."""
    return special.polygamma(1, x)


def second(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The second array, in the shape of both together."""
    return np.broadcast_to(y, np.broadcast_shapes(np.shape(x), np.shape(y)))
