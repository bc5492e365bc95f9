"""The search for a maximum, on functions of known maxima."""

from __future__ import annotations

import numpy as np
import pytest

from pymc_sgmcmc.errors import ConvergenceError
from pymc_sgmcmc.maximum_likelihood.maximum import maximize


def scale(x: np.ndarray) -> tuple[float, np.ndarray]:
    """Log of the scale of 14 effects that are small, which Newton's step takes to -80."""
    squares = 0.085 * np.exp(-2 * x[0])
    value = -14 * x[0] - 0.5 * squares - 0.5 * 1e5 * (x[1] - 0.16) ** 2
    return value, np.array([-14 + squares, -1e5 * (x[1] - 0.16)])


def valley(x: np.ndarray) -> tuple[float, np.ndarray]:
    """Rosenbrock's function."""
    bend = x[1] - x[0] ** 2
    slope = [400 * x[0] * bend + 2 * (1 - x[0]), -200 * bend]
    return -(100 * bend**2 + (1 - x[0]) ** 2), np.array(slope)


def far(x: np.ndarray) -> tuple[float, np.ndarray]:
    """A quadratic function in coordinates of very different lengths."""
    precision, mean = np.array([1e-8, 1e8]), np.array([1e6, 1e-3])
    return -0.5 * float(precision @ (x - mean) ** 2), -precision * (x - mean)


@pytest.mark.parametrize(
    ("objective", "start", "maximum", "most"),
    [
        (scale, [0.0, 0.0], [0.5 * np.log(0.085 / 14), 0.16], 30),
        (valley, [-1.2, 1.0], [1.0, 1.0], 100),
        (far, [0.0, 0.0], [1e6, 1e-3], 40),
    ],
)
def test_the_maximum_is_found_in_few_evaluations(objective, start, maximum, most):
    evaluations = []

    def counted(x: np.ndarray) -> tuple[float, np.ndarray]:
        evaluations.append(x)
        return objective(x)

    found = maximize(counted, np.array(start), 100, ["a", "b"])
    np.testing.assert_allclose(found.position, maximum, rtol=1e-8)
    assert len(evaluations) <= most
    curvature = np.diag(found.information)
    assert np.all(curvature * (found.position - maximum) ** 2 < 1e-10)


def test_steps_to_where_the_value_is_not_finite_are_shortened():
    def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
        with np.errstate(invalid="ignore", divide="ignore"):
            return float(np.log(x[0]) - 50 * x[0]), 1 / x - 50 + 0 * np.log(x)

    found = maximize(objective, np.array([0.5]), 100, ["a"])
    np.testing.assert_allclose(found.position, 0.02, rtol=1e-8)
    with pytest.raises(ConvergenceError, match=r"did not converge within 2 iterations.*`a`"):
        maximize(objective, np.array([0.5]), 2, ["a"])
