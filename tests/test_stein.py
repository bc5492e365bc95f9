"""The kernel Stein discrepancy."""

from __future__ import annotations

import numpy as np
import pytest

from pymc_sgmcmc.stein import kernel_stein_discrepancy


def stein_kernel(x, y, score_x, score_y, width=1e-4):
    """The Stein kernel of two points by differences of k(x, y) = (1 + |x - y|²)^(-1/2)."""

    def k(x, y):
        return (1 + (x - y) @ (x - y)) ** -0.5

    units = width * np.eye(len(x))
    in_x = np.array([k(x + e, y) - k(x - e, y) for e in units]) / (2 * width)
    in_y = np.array([k(x, y + e) - k(x, y - e) for e in units]) / (2 * width)
    both = sum(k(x + e, y + e) - k(x + e, y - e) - k(x - e, y + e) + k(x - e, y - e) for e in units)
    return score_x @ score_y * k(x, y) + score_x @ in_y + score_y @ in_x + both / (4 * width**2)


def test_discrepancy_is_the_mean_of_the_stein_kernel(rng):
    positions, gradients = rng.normal(size=(2, 6, 3))
    pairs = [
        stein_kernel(positions[k], positions[m], gradients[k], gradients[m])
        for k in range(6)
        for m in range(6)
        if k != m
    ]
    discrepancy = kernel_stein_discrepancy(positions, gradients).value
    assert discrepancy == pytest.approx(np.mean(pairs), abs=1e-6)


@pytest.mark.parametrize("noise", [0.0, 2.0])
def test_discrepancy_is_zero_for_draws_of_the_target(rng, noise):
    """It is zero with and without noise in the gradients, and positive for draws too wide."""
    values = {1.0: [], 1.3: []}
    for scale, discrepancies in values.items():
        for _ in range(150):
            x = scale * rng.normal(size=(100, 2))
            estimate = kernel_stein_discrepancy(x, -x + noise * rng.normal(size=x.shape))
            discrepancies.append(estimate.value)
    z = {
        scale: np.mean(discrepancies) / np.std(discrepancies) * np.sqrt(150)
        for scale, discrepancies in values.items()
    }
    assert abs(z[1.0]) < 4.5
    assert z[1.3] > 4.5
