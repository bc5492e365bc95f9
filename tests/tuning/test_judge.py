"""Rows that compare a posterior with a Gaussian, against all rows and against noise row by row."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pymc as pm
import pytest

from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.tuning import find_center, judge, nearest_gaussian, subsample
from pymc_sgmcmc.tuning.center import center_at
from pymc_sgmcmc.tuning.curvature import diagonal_curvature
from pymc_sgmcmc.tuning.gaussian import CONVERGED_SHIFT
from pymc_sgmcmc.tuning.judge import ControlVariates, _rows_needed, judge_at
from pymc_sgmcmc.tuning.nearest_gaussian import mismatch_at
from pymc_sgmcmc.tuning.subsample import Subsample

ROWS = 40_000


def counts_of_groups(rng, groups=60):
    group = rng.permutation(np.repeat(np.arange(groups), -(-ROWS // groups))[:ROWS])
    x = rng.normal(size=ROWS)
    rate = np.exp(rng.normal(0.5, 0.4, groups)[group] + 0.3 * x)
    with pm.Model() as model:
        mean, sd, slope = pm.Normal("mean", 0, 2), pm.HalfNormal("sd", 1), pm.Normal("slope", 0, 2)
        effects = pm.Normal("effects", mean, sd, shape=groups)
        pm.Poisson("y", pm.math.exp(effects[group] + slope * x), observed=rng.poisson(rate))
    return model


def heavy_tails(rng):
    x = rng.normal(size=ROWS)
    with pm.Model() as model:
        slope = pm.Normal("slope", 0, 10)
        pm.StudentT("y", 5, slope * x, observed=rng.standard_t(5, size=ROWS))
    return model


def wider(center, factor):
    """The centre of a Gaussian with standard deviations that are larger by a factor."""
    root = center.curvature.root.map(lambda part: part * factor)
    return replace(center, curvature=replace(center.curvature, root=root))


@pytest.fixture
def few_are_enough(monkeypatch):
    """No more rows are taken than the noise asks for, other than 20 for each coordinate."""
    for module in (judge, subsample):
        monkeypatch.setattr(module, "fewest_rows", lambda posterior: 100)


def test_few_rows_tell_the_mismatch_of_all_where_rows_have_few_coordinates(rng, few_are_enough):
    """The Gaussian is moved and widened, so that there is something to tell."""
    posterior, away = Posterior(counts_of_groups(rng)), rng.normal(size=63)
    center = find_center(posterior, posterior.initial_position)
    center = center_at(posterior, center.position + center.curvature.root @ away, center.curvature)
    center, large = wider(center, 1.3), Subsample(posterior, evaluations=1)
    found = judge_at(posterior, center, large)
    assert found.subsample.count < ROWS / 10
    of_few, of_all = mismatch_at(found, center), mismatch_at(ControlVariates(large, center), center)
    assert np.abs(of_few.gradient - of_all.gradient).max() < CONVERGED_SHIFT
    assert np.abs(of_few.scales - of_all.scales).max() < CONVERGED_SHIFT
    assert of_all.shift > 10 * CONVERGED_SHIFT
    assert np.abs(of_all.scales - 1).max() > 10 * CONVERGED_SHIFT


@pytest.mark.parametrize("factor", [1.0, 10.0])
def test_rows_needed_follow_from_the_noise_of_single_rows(factor, rng):
    """Twenty blocks know a variance up to a third."""
    posterior = Posterior(heavy_tails(rng))
    center = wider(find_center(posterior, np.zeros(1)), factor)
    large = Subsample(posterior, evaluations=1)
    root = center.curvature.root.dense()
    shift = root @ np.random.default_rng(1736).standard_normal(1)
    at, ahead, behind = (
        posterior.row_gradients(center.position + side * shift, large.rows) @ root
        for side in (0, 1, -1)
    )
    first = np.array([ahead - at, behind - at])
    second = first.mean(axis=0, keepdims=True)
    found = _rows_needed(posterior, center, large)
    for rows, differences in zip(found, (first, second), strict=True):
        exact = (ROWS * differences.std(axis=1).max() / CONVERGED_SHIFT) ** 2
        assert 0.5 < (1 + rows) / (1 + min(exact, ROWS)) < 2


def test_rows_without_second_derivatives_have_control_variates_of_first_order(
    rng, few_are_enough, monkeypatch
):
    monkeypatch.setattr(Posterior, "has_second_derivatives", False)
    posterior = Posterior(heavy_tails(rng))
    center, large = find_center(posterior, np.zeros(1)), Subsample(posterior, evaluations=1)
    narrow, wide = (judge_at(posterior, wider(center, factor), large) for factor in (0.02, 30.0))
    assert narrow.excess is None
    assert narrow.subsample.count < ROWS / 10
    assert wide.subsample.count == ROWS


def test_all_rows_are_taken_where_a_gradient_is_not_finite(rng, few_are_enough):
    x = rng.gamma(5.0, size=ROWS)
    with pm.Model() as model:
        shape = pm.Flat("shape")
        pm.Potential("y", pm.math.log(shape) * x.mean() * ROWS)
        pm.Gamma("z", 5, pm.math.sqrt(shape), observed=x)
    posterior = Posterior(model)
    center = center_at(posterior, np.ones(1), diagonal_curvature(np.array([3.0])))
    found = judge_at(posterior, center, Subsample(posterior, evaluations=1))
    assert found.subsample.count == ROWS


def test_the_mean_of_many_coefficients_is_found_from_their_mode(rng, monkeypatch):
    """Rare events move the mean of the intercept by a standard deviation."""
    X, rows, columns = rng.normal(size=(20_000, 60)), 20_000, 60
    y = rng.random(rows) < 1 / (1 + np.exp(3 - 0.1 * X @ rng.normal(size=columns)))
    with pm.Model() as model:
        intercept, slopes = pm.Normal("intercept", 0, 5), pm.Normal("slopes", shape=columns)
        pm.Bernoulli("y", logit_p=intercept + X @ slopes, observed=y)
    posterior = Posterior(model)
    monkeypatch.setattr(nearest_gaussian, "_fitted", None)  # the search from few rows
    center = find_center(posterior, posterior.initial_position)
    assert center.distance > nearest_gaussian.LARGEST_SHIFT
    whole = Subsample(posterior, count=rows)
    found = mismatch_at(ControlVariates(whole, center), center)
    assert found.shift < nearest_gaussian.LARGEST_SHIFT / 3
    np.testing.assert_allclose(found.scales, 1, atol=0.15)
