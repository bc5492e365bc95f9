"""Coordinates in which NUTS gets around the posterior of a logistic regression with empty cells.

An indicator with outcomes of one class only has a posterior with a wall on one side and the prior's
tail on the other, ten to a hundred times as wide. In the transformed space its linear predictor is
stretched along the tail. The draws of the coefficients themselves have the same distribution with
and without.
"""

from __future__ import annotations

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from pymc.logprob.transforms import Transform
from pymc.model.transform.conditioning import change_value_transforms


class Straighten(Transform):
    """Value: coefficients are B T(value), T elementwise with slope 1 turning into `slope`.

    Where `sign` is 1 T stretches the side below `knee`, where it is -1 that above; elsewhere it is
    0 and T the identity.
    """

    name = "straight"

    def __init__(self, B: np.ndarray, knee: np.ndarray, slope: np.ndarray, sign: np.ndarray):
        self.B, self.B_inverse, self.knee, self.slope = B, np.linalg.inv(B), knee, slope
        # A hyperbola with these asymptotes, whose inverse is known.
        self.middle, self.half = (slope + 1) / 2, -sign * (slope - 1) / 2

    def backward(self, value, *inputs):
        z = value - self.knee
        return self.B @ (self.knee + self.middle * z + self.half * pt.sqrt(z**2 + 1))

    def forward(self, value, *inputs):
        g = self.B_inverse @ value - self.knee
        root = pt.sqrt(g**2 + self.slope)
        return self.knee + (self.middle * g - self.half * root) / self.slope

    def log_jac_det(self, value, *inputs):
        # Without that of B, a constant.
        z = value - self.knee
        return pt.log(self.middle + self.half * z / pt.sqrt(z**2 + 1))


def straightened(model: pm.Model, X: np.ndarray, y: np.ndarray, prior_sd: float) -> pm.Model:
    """The model with other coordinates for the indicators of cells with one outcome.

    Parameters
    ----------
    model : pymc.Model
        A logistic regression with coefficients `beta`, the first an intercept.
    X : numpy.ndarray, shape (N, d)
        Columns with two values, of which the rarer marks a cell, and others.
    y : numpy.ndarray of bool, shape (N,)
    prior_sd : float
        Of the coefficients.
    """
    columns = X.shape[1]
    cells = {}
    for column in range(1, columns):
        values, counts = np.unique(X[:, column], return_counts=True)
        if len(values) == 2:
            inside = X[:, column] == values[np.argmin(counts)]
            if y[inside].all() or not y[inside].any():
                cells[column] = inside, values[np.argmin(counts)], values[np.argmax(counts)]
    # From coefficients to: the intercept outside all cells, the others, and the mean linear
    # predictor inside each cell.
    forward = np.eye(columns)
    knee, slope, sign = np.zeros(columns), np.ones(columns), np.zeros(columns)
    for column, (inside, value, elsewhere) in cells.items():
        forward[0, column] = elsewhere
        forward[column] = X[inside].mean(0)
        sign[column] = -1.0 if y[inside].any() else 1.0
        knee[column] = -sign[column] * np.log(2 * inside.sum())
        slope[column] = prior_sd * abs(value - elsewhere)
    transform = Straighten(np.linalg.inv(forward), knee, slope, sign)
    return change_value_transforms(model, {model["beta"]: transform})
