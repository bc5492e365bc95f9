"""Curvature of rows that depend on few coordinates, against differences along each coordinate."""

from __future__ import annotations

import numpy as np
import pymc as pm
import pytest
from scipy import sparse

from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.tuning import curvature as of_curvature
from pymc_sgmcmc.tuning.coloured_curvature import coloured, coloured_curvature, pattern_of
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


def test_colours_of_crossed_effects_tell_every_element(rng):
    """Two matrices of factors: no coordinate meets all others, so there are several colours."""
    pattern = np.eye(40, dtype=bool)
    for _ in range(60):
        first, second = rng.integers(20), 20 + rng.integers(20)
        pattern[first, second] = pattern[second, first] = True
    pattern[0] = pattern[:, 0] = True
    values = np.where(pattern, rng.normal(size=(40, 40)), 0)
    values += values.T
    colouring = coloured(sparse.csr_array(pattern))
    assert colouring.count < 30
    scale = rng.uniform(0.5, 2, size=40)
    found = coloured_curvature(lambda directions: directions @ values, scale, colouring)
    np.testing.assert_allclose(found, values, atol=1e-12)


def test_an_element_that_the_pattern_lacks_is_noticed(rng):
    """Wherever it is, and where the curvatures of coordinates are far apart."""
    diagonal = np.geomspace(1, 1e4, 40)
    colouring = coloured(sparse.csr_array(np.eye(40, dtype=bool)))
    assert colouring.count == 1
    for _ in range(200):
        first, second = rng.choice(40, size=2, replace=False)
        values = np.diag(diagonal)
        values[first, second] = values[second, first] = 0.1 * np.sqrt(
            diagonal[first] * diagonal[second]
        )

        def products(directions, values=values):
            return directions @ values

        assert coloured_curvature(products, diagonal**-0.5, colouring) is None


def test_colours_are_made_anew_where_those_of_another_position_lack_elements(rng, without_compiler):
    """At the first position the products of two groups of effects are zero, as after a clip."""
    first, second = rng.integers(30, size=900), rng.integers(30, size=900)
    with pm.Model() as model:
        x, y = pm.Normal("x", shape=30), pm.Normal("y", shape=30)
        both = pm.math.maximum(x[first] + y[second // 5], 0.0)
        pm.Normal("z", x[first] + both**2, 1, observed=rng.normal(size=900))
    posterior = Posterior(model)
    subsample, scale = Subsample(posterior), np.full(60, 0.1)
    below, above = np.full(60, -3.0), np.full(60, 3.0)
    few = subsample.colouring(below, scale)
    found = scaled_precision(posterior, subsample, above, scale)
    assert subsample.colouring(above, scale).count > few.count
    width = scale * of_curvature.difference_width(posterior)
    expected = curvature_by_differences(subsample.gradients_alone, above, width)
    np.testing.assert_allclose(found / 0.01, expected, rtol=1e-6, atol=1e-6 * abs(expected).max())


def test_pattern_is_that_of_all_rows():
    pieces = [np.array([[1.0, 0, 0, 2], [0, 3, 0, 0]]), np.array([[0, 1.0, 1, 0]])]
    wanted = [[1, 0, 0, 1], [0, 1, 1, 0], [0, 1, 1, 0], [1, 0, 0, 1]]
    np.testing.assert_array_equal(
        pattern_of(pieces, most=2).toarray(), np.array(wanted, dtype=bool)
    )
    assert pattern_of(pieces, most=1) is None


@pytest.mark.parametrize(
    ("kind", "saves"), [("centred", True), ("not centred", True), ("sum of zero", False)]
)
def test_models_have_the_curvature_of_differences_along_each_coordinate(
    kind, saves, rng, monkeypatch, without_compiler
):
    posterior = Posterior(nested(rng, kind))
    subsample = Subsample(posterior)
    position = posterior.initial_position
    scale = np.full(posterior.dimension, 0.1)
    found = scaled_precision(posterior, subsample, position, scale)
    assert (subsample.colouring(position, scale) is not None) == saves
    width = scale * of_curvature.difference_width(posterior)
    wanted = curvature_by_differences(subsample.gradients_alone, position, width)
    np.testing.assert_allclose(found, wanted * np.outer(scale, scale), atol=1e-6)
    if saves:
        # Few gradients were taken: the pattern is of use.
        assert subsample.colouring(position, scale).count <= posterior.dimension / 4


def test_short_positions_and_dense_rows_have_no_colours(rng, without_compiler):
    X = rng.normal(size=(200, 60))
    for columns in (10, 60):
        with pm.Model() as model:
            beta = pm.Normal("beta", shape=columns)
            pm.Normal("y", X[:, :columns] @ beta, 1, observed=X[:, 0])
        posterior = Posterior(model)
        position = posterior.initial_position
        assert Subsample(posterior).colouring(position, np.ones(columns)) is None
