"""Curvature of rows that depend on few coordinates, against differences along each coordinate."""

from __future__ import annotations

import numpy as np
import pymc as pm
import pytest

from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.tuning.curvature import curvature_by_differences, scaled_precision
from pymc_sgmcmc.tuning.subsample import Subsample


def nested(rng, kind):
    """Rows of 40 pupils in 20 classes, and a product of their effects."""
    pupil = rng.integers(40, size=800)
    of_class = pupil // 2
    x = rng.normal(size=800)
    with pm.Model() as model:
        beta = pm.Normal("beta", shape=2)
        scale = pm.HalfNormal("scale")
        if kind == "centred":
            u = pm.Normal("u", 0, scale, shape=40)
        elif kind == "not centred":
            u = scale * pm.Normal("z", shape=40)
        else:
            u = pm.ZeroSumNormal("u", scale, shape=40)
        v = pm.Normal("v", shape=20)
        expected = beta[0] + beta[1] * x + u[pupil] * (1 + v[of_class])
        pm.Bernoulli("y", logit_p=expected, observed=rng.random(800) < 0.4)
    return model


@pytest.mark.parametrize("kind", ["centred", "not centred", "sum of zero"])
def test_models_have_the_curvature_of_differences_along_each_coordinate(
    kind, rng, without_compiler
):
    posterior = Posterior(nested(rng, kind))
    subsample = Subsample(posterior)
    position = posterior.initial_position
    scale = np.full(posterior.dimension, 0.1)
    found = scaled_precision(posterior, subsample, position, scale)
    width = scale * posterior.difference_width
    wanted = curvature_by_differences(subsample.gradients_alone, position, width)
    np.testing.assert_allclose(found, wanted * np.outer(scale, scale), atol=1e-6)
