"""The search for the mode goes on where a step leaves the support."""

from __future__ import annotations

import numpy as np
import pymc as pm
import pytest

from pymc_sgmcmc.matrices import Diagonal
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.tuning.curvature import coordinate_scale, low_rank_curvature
from pymc_sgmcmc.tuning.mode_search import find_mode, minimize
from pymc_sgmcmc.tuning.subsample import Subsample


@pytest.mark.parametrize("scale", [10.0, 300.0, 5000.0])
@pytest.mark.parametrize("start", [(3000.0, 1.0), (3000.0, 3000.0), (1e-3, 5.0)])
def test_steps_beyond_the_support_are_made_shorter(start, scale):
    """Two Gamma variables, from whose tail a step goes below zero, have their mode at 99."""

    def density(x):
        return np.log(x) @ [99.0, 99.0] - x.sum(), 99 / x - 1

    end = minimize(density, np.array(start), Diagonal(np.full(2, scale)), tolerance=1e-2)
    np.testing.assert_allclose(end, 99, atol=0.1)


def test_a_mode_at_the_edge_of_the_support():
    """The search ends near the edge, and inside, where differences of gradients are finite."""

    def density(x):
        return (x[0] if x[0] < 2 else -np.inf), np.ones(1)

    end = minimize(density, np.zeros(1), Diagonal(np.ones(1)), tolerance=1e-2)
    assert 1.7 < end[0] < 2


def test_probabilities_that_are_rounded_to_one():
    """Effects of so few records are driven to where the density of some rows is zero."""
    rng, rows, groups = np.random.default_rng(2), 600, 20
    group = np.where(rng.random(rows) < 0.9, 0, rng.integers(groups, size=rows))
    x = rng.normal(size=rows)
    level, slope = rng.normal(0, 0.6, groups)[group], rng.normal(0.3, 0.2, groups)[group]
    mean = 1 / (1 + np.exp(-level - slope * x))
    outcome = np.clip(rng.beta(20 * mean, 20 * (1 - mean)), 1e-6, 1 - 1e-6)
    with pm.Model() as model:
        effects = [
            pm.Exponential(f"scale_{name}", 1) * pm.Normal(name, shape=groups)
            for name in ("level", "slope")
        ]
        predictor = effects[0][group] + effects[1][group] * x
        precision = pm.HalfNormal("precision", 30)
        pm.Beta("y", mu=pm.math.sigmoid(predictor), nu=precision, observed=outcome)
    posterior = Posterior(model)
    start, rows = posterior.initial_position, Subsample(posterior)
    scale = coordinate_scale(posterior, rows, start)
    mode = find_mode(posterior, rows, rows, start, scale)
    assert mode.distance < 0.1
    assert posterior.log_density_and_gradient(mode.position)[0] > 500
    np.testing.assert_allclose(
        np.exp(posterior.layout.unravel(mode.position)["precision_log__"]), 20, rtol=0.2
    )


def test_curvature_beside_an_edge_of_the_support():
    """Differences of gradients that reach beyond it are taken over shorter distances."""

    def gradients(positions):
        return np.where(positions[:, :1] < 1e-6, -3.0 * positions, np.nan)

    found = low_rank_curvature(gradients, np.zeros(600), np.ones(600), 1e-3)
    np.testing.assert_allclose(found.precision.diagonal(), 3, rtol=0.01)
    with pytest.raises(ValueError, match="curvature of the log posterior is not finite"):
        low_rank_curvature(lambda positions: np.nan * positions, np.zeros(600), np.ones(600), 1e-3)
