"""Centre, curvature and step size against closed forms."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from importlib import import_module

import numpy as np
import pymc as pm
import pytest

from pymc_sgmcmc import tuning
from pymc_sgmcmc.batching import make_batching
from pymc_sgmcmc.dynamics import AVERAGED, EULER
from pymc_sgmcmc.errors import CenterWarning
from pymc_sgmcmc.matrices import as_matrix, largest_mean_square, matrix_root
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.tuning import (
    center_at,
    choose_step_size,
    dense_curvature,
    find_center,
    mode_search,
    row_noise,
)
from pymc_sgmcmc.tuning.curvature import coordinate_scale, curvature_at, scaled_precision
from pymc_sgmcmc.tuning.subsample import Subsample
from pymc_sgmcmc.tuning.suspicions import no_curvature
from tests.support.linear_gaussian import LinearGaussian, formula_covariance
from tests.support.models import logistic_model

find_center_module = import_module("pymc_sgmcmc.tuning.find_center")


@pytest.fixture(scope="module")
def problem() -> LinearGaussian:
    return LinearGaussian.simulate(500, 4, seed=2)


@pytest.fixture(scope="module")
def posterior(problem) -> Posterior:
    return Posterior(problem.model())


def test_centre_is_the_mode(problem, posterior):
    center = find_center(posterior, np.zeros(4))
    sds = np.sqrt(np.diag(np.linalg.inv(problem.precision)))
    np.testing.assert_allclose(center.position, problem.mean, atol=0.02 * sds.min())
    np.testing.assert_allclose(center.gradient, posterior.gradient(center.position), atol=1e-9)
    np.testing.assert_allclose(
        center.likelihood_gradient,
        center.gradient + center.position / problem.prior_sd**2,
        rtol=1e-9,
    )
    assert center.distance < 0.02


def test_few_passes_where_the_rows_are_many(monkeypatch):
    """The mode on a part of the rows is a guide, and Newton steps lead to that on all."""
    rng = np.random.default_rng(4)
    X = rng.normal(size=(60_000, 3))
    y = rng.random(60_000) < 1 / (1 + np.exp(-X @ [0.5, -1.0, 0.2]))
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 10, shape=3)
        pm.Bernoulli("y", logit_p=X @ beta, observed=y)
    posterior = Posterior(model)
    whole = find_center(posterior, np.zeros(3))
    passes = []
    evaluate = posterior.gradient

    def counted(position):
        passes.append(position)
        return evaluate(position)

    # With more rows the large subsample is a part of them.
    few = partial(Subsample, operations=0)
    monkeypatch.setattr(find_center_module, "Subsample", few)
    monkeypatch.setattr(posterior, "gradient", counted)
    center = find_center(posterior, np.zeros(3))
    assert 1 <= len(passes) <= 3
    away = whole.curvature.root.inverse @ (center.position - whole.position)
    assert np.abs(away).max() < 0.03
    # The pass for the expansion at the centre gives the gradient, up to rounding.
    np.testing.assert_allclose(center.gradient, posterior.gradient(center.position), atol=1e-9)
    far = center.position + 1000 * center.curvature.standard_deviations
    assert mode_search._by_newton(posterior, Subsample(posterior), far, center.curvature) is None


def test_a_flat_direction_is_reported_where_the_rows_are_many():
    """The large subsample is a part of the rows here too."""
    x = np.random.default_rng(4).normal(size=60_000)
    with pm.Model() as model:
        a, b = pm.Flat("a"), pm.Flat("b")
        pm.Normal("y", (a + b) * x, 1.0, observed=2 * x)
    posterior = Posterior(model)
    large = Subsample(posterior, operations=0)
    mode = mode_search.find_mode(posterior, large, large, np.zeros(2), np.full(2, 0.01))
    assert "flat or bends upwards" in no_curvature(posterior, large, mode)


@pytest.fixture(scope="module")
def badly_scaled() -> Posterior:
    """Groups whose intercepts and slopes are correlated, since times are far from zero."""
    rng = np.random.default_rng(15)
    group = np.repeat(np.arange(40), 50)
    time = np.tile(np.arange(10.0), 200)
    effects = rng.normal([250.0, 10.0], [25.0, 6.0], size=(40, 2))
    y = effects[group, 0] + effects[group, 1] * time + rng.normal(0.0, 5.0, size=2000)
    with pm.Model() as model:
        intercept_mean, slope_mean = pm.Normal("intercept_mean", 250, 100), pm.Normal("slope_mean")
        intercept = pm.Normal("intercept", intercept_mean, 25.0, shape=40)
        slope = pm.Normal("slope", slope_mean, 6.0, shape=40)
        sigma = pm.HalfNormal("sigma", 50)
        pm.Normal("y", intercept[group] + slope[group] * time, sigma, observed=y)
    return Posterior(model)


def search(posterior, monkeypatch, scaled_precision=mode_search.scaled_precision):
    """Mode of all rows, and the number of evaluations."""
    rows, evaluations = Subsample(posterior), []
    evaluate = rows.log_density_and_gradient
    monkeypatch.setattr(
        rows,
        "log_density_and_gradient",
        lambda position: evaluations.append(1) or evaluate(position),
    )
    monkeypatch.setattr(mode_search, "scaled_precision", scaled_precision)
    start = posterior.initial_position
    scale = coordinate_scale(posterior, rows, start)
    position, _ = mode_search._mode_of_subsample(posterior, rows, start, scale)
    return position, len(evaluations)


def test_a_long_search_goes_on_in_the_scales_of_the_curvature(badly_scaled, monkeypatch):
    position, evaluations = search(badly_scaled, monkeypatch)
    curvature = curvature_at(badly_scaled, Subsample(badly_scaled), position)
    away = curvature.root.T @ badly_scaled.gradient(position)
    assert np.abs(away).max() < 0.1
    assert evaluations < 100  # 291 in rough scales alone


def test_a_search_whose_curvature_is_not_finite_on_the_way(badly_scaled, monkeypatch):
    calls = []

    def not_finite(*_):
        calls.append(1)
        raise ValueError("not finite")

    expected, _ = search(badly_scaled, monkeypatch)
    position, _ = search(badly_scaled, monkeypatch, not_finite)
    assert len(calls) == 1
    sds = curvature_at(badly_scaled, Subsample(badly_scaled), expected).standard_deviations
    assert np.abs((position - expected) / sds).max() < 0.5


def test_curvature_is_the_precision(problem, posterior):
    curvature = find_center(posterior, np.zeros(4)).curvature
    np.testing.assert_allclose(curvature.precision.values, problem.precision, rtol=1e-6)
    np.testing.assert_allclose(curvature.covariance @ problem.precision, np.eye(4), atol=1e-6)
    np.testing.assert_allclose(
        curvature.root @ curvature.root.T.values, curvature.covariance.values, rtol=1e-10
    )


def test_centre_on_data_larger_than_the_subsample(problem, posterior, monkeypatch):
    monkeypatch.setattr(tuning.subsample, "SUBSAMPLE_ROWS", 80)
    center = find_center(posterior, np.zeros(4))
    assert center.distance < 0.02


def test_centre_of_columns_on_very_different_scales():
    rng = np.random.default_rng(0)
    scales = np.array([1e-4, 1.0, 1e4])
    X = rng.normal(size=(2000, 3)) * scales
    y = rng.random(2000) < 1 / (1 + np.exp(-X @ (np.array([1.0, -0.5, 0.7]) / scales)))
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 1e5, shape=3)
        pm.Bernoulli("y", logit_p=X @ beta, observed=y)
    center = find_center(Posterior(model), np.zeros(3))
    assert center.distance < 0.02
    scaled = center.position * scales
    np.testing.assert_allclose(scaled, [1.0, -0.5, 0.7], atol=0.3)


def test_diagonal_curvature_beyond_the_dense_bound(problem, posterior, monkeypatch):
    monkeypatch.setattr(tuning.curvature, "DENSE_DIMENSION", 3)
    monkeypatch.setattr(tuning.curvature, "DENSE_OPERATIONS", 0)
    monkeypatch.setattr(tuning.curvature, "LOW_RANK_DIMENSION", 3)
    center = find_center(posterior, np.zeros(4))
    assert center.distance < 0.05
    assert not center.curvature.is_dense
    # Information from squared row gradients: right up to the noise of 200 rows.
    curvature, exact = center.curvature, np.diag(problem.precision)
    np.testing.assert_allclose(curvature.precision.values, exact, rtol=0.5)
    # The largest eigenvalue relative to it is known, which keeps the step from being too large.
    values = curvature.precision.values
    scaled = problem.precision / np.sqrt(np.outer(values, values))
    largest = np.linalg.eigvalsh(scaled)[-1]
    assert curvature.relative_to(curvature.root).max() == pytest.approx(largest, rel=0.2)


@pytest.mark.parametrize(("smallest", "is_flat"), [(-0.5, True), (0.0, True), (1e-6, False)])
def test_a_saddle_is_told_apart(smallest, is_flat):
    curvature = dense_curvature(np.diag([1.0, smallest]), np.ones(2))
    assert curvature.is_flat == is_flat
    assert curvature.definite == pytest.approx(smallest)
    assert np.all(np.linalg.eigvalsh(curvature.covariance.values) > 0)


def test_search_from_an_impossible_start(posterior):
    with pytest.raises(ValueError, match="not finite at the start"):
        find_center(posterior, np.full(4, np.nan))


def noise_of_rows(posterior, center, root, order):
    noise = row_noise(posterior, center, order=order)
    return largest_mean_square(noise.deviations @ root)


@pytest.mark.parametrize("scheme", ["shuffle", "replace"])
@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("law", [EULER, AVERAGED], ids=lambda law: law.name)
def test_step_size_keeps_the_stated_inflation(problem, posterior, scheme, order, law):
    """The largest variance inflation of the exact law is the stated 5 %, to leading order."""
    center = find_center(posterior, np.zeros(4))
    batching = make_batching(scheme, posterior.data, 50)
    choice = choose_step_size(
        center,
        center.curvature.root,
        batching,
        row_noise=noise_of_rows(posterior, center, center.curvature.root, order),
        law=law,
    )
    # The law with M = H^-1 is that with M = I in whitened coordinates.
    root = center.curvature.root
    white = LinearGaussian(problem.X @ root, problem.y - problem.X @ problem.mean, prior_sd=1e9)
    covariance = formula_covariance(
        white,
        50,
        batching.variance_factor,
        choice.step_size,
        np.zeros(4) if order else None,
        law.name,
    )
    inflation = np.linalg.eigvalsh(covariance)[-1] - 1
    assert 0.03 < inflation < 0.065
    assert choice.curvature == pytest.approx(1.0, rel=1e-6)


def test_batch_size_needed_balances_noise_and_curvature(problem, posterior):
    center = find_center(posterior, np.zeros(4))
    root = center.curvature.root

    def choice(batch_size):
        batching = make_batching("shuffle", posterior.data, batch_size)
        return choose_step_size(
            center,
            root,
            batching,
            row_noise=noise_of_rows(posterior, center, root, 0),
        )

    needed = choice(20).batch_size_needed
    assert choice(needed).noise <= choice(needed).curvature < choice(needed - 1).noise


@pytest.mark.parametrize("law", [EULER, AVERAGED], ids=lambda law: law.name)
def test_step_is_stable_at_the_steepest_point(problem, posterior, law):
    center = replace(find_center(posterior, np.zeros(4)), steepest=50.0)
    batching = make_batching("shuffle", posterior.data, 50)
    root = center.curvature.root
    choice = choose_step_size(center, root, batching, row_noise=0.0, inflation=0.5, law=law)
    assert choice.step_size == choice.longest == pytest.approx(4 / 50, rel=1e-6)


@pytest.mark.parametrize("preconditioner", ["scalar", "diagonal", "dense"])
def test_curvature_under_any_preconditioner(problem, posterior, preconditioner):
    center = find_center(posterior, np.zeros(4))
    matrix = {
        "scalar": np.asarray(0.01),
        "diagonal": np.array([0.01, 0.02, 0.03, 0.04]),
        "dense": np.linalg.inv(problem.precision) + 0.01 * np.eye(4),
    }[preconditioner]
    batching = make_batching("shuffle", posterior.data, 50)
    root = matrix_root(matrix)
    choice = choose_step_size(
        center,
        root,
        batching,
        row_noise=noise_of_rows(posterior, center, root, 1),
    )
    expected = np.linalg.eigvals(as_matrix(matrix) @ problem.precision).real.max()
    assert choice.curvature == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (-1.0, "positive definite, but its diagonal has the entry -1"),
        (np.array([1.0, 0.0]), "its diagonal has the entry 0"),
        (np.array([[1.0, 2.0], [2.0, 1.0]]), "positive definite, but its smallest eigenvalue"),
        (np.array([[1.0, 0.5], [0.0, 1.0]]), "positive definite, but it is not symmetric"),
        (np.array([np.nan, 1.0]), "its diagonal has the entry nan"),
        (np.array([[1.0, np.nan], [np.nan, 1.0]]), "it has NaN or infinite entries"),
    ],
)
def test_bad_preconditioners(matrix, message):
    with pytest.raises(ValueError, match=message):
        matrix_root(matrix)


def test_a_centre_without_a_finite_gradient_is_refused():
    posterior = Posterior(logistic_model())
    with pytest.raises(ValueError, match="not finite at the cent"):
        center_at(posterior, np.array([np.inf, 0.0, 0.0]))


def test_a_mode_on_the_boundary_is_reported(caplog):
    """The density of a centred hierarchy is unbounded where the group scale goes to zero."""
    rng = np.random.default_rng(3)
    group = rng.integers(0, 6, 60)
    with pm.Model() as model:
        scale = pm.HalfNormal("scale", 1.0)
        effect = pm.Normal("effect", 0.0, scale, shape=6)
        pm.Normal("y", effect[group], 1.0, observed=rng.normal(size=60))
    caplog.set_level(logging.INFO, logger="pymc.sgmcmc")
    with pytest.warns(CenterWarning, match="is a funnel"):
        find_center(Posterior(model), Posterior(model).initial_position)
    assert "standard deviations (scale_log__) from the mean of the nearest Gaussian" in caplog.text


def test_a_support_that_depends_on_a_parameter_is_reported():
    rng = np.random.default_rng(3)
    with pm.Model() as model:
        upper = pm.HalfNormal("upper", 10.0)
        pm.Uniform("y", 0.0, upper, observed=rng.uniform(0, 3, size=1000))
    with pytest.warns(CenterWarning, match="ended .* standard deviations from it"):
        find_center(Posterior(model), Posterior(model).initial_position)


def test_a_good_centre_is_not_reported(recwarn):
    posterior = Posterior(logistic_model())
    find_center(posterior, np.zeros(3))
    assert not [warning for warning in recwarn if warning.category is CenterWarning]


def test_separated_outcomes_without_a_prior_are_reported():
    x = np.random.default_rng(1).normal(size=300)
    with pm.Model() as model:
        beta = pm.Flat("beta", shape=2)
        pm.Bernoulli("y", logit_p=beta[0] + beta[1] * x, observed=x > 0)
    with pytest.warns(CenterWarning, match="outcomes separated"):
        find_center(Posterior(model), np.zeros(2))


def test_a_flat_direction_is_reported():
    rng = np.random.default_rng(1)
    x = rng.normal(size=300)
    with pm.Model() as model:
        beta = pm.Flat("beta", shape=2)
        pm.Normal("y", (beta[0] + beta[1]) * x, 1.0, observed=x + rng.normal(size=300))
    with pytest.warns(CenterWarning, match="flat or bends upwards"):
        find_center(Posterior(model), np.zeros(2))


def test_groups_without_sampled_rows_have_the_scale_of_their_prior(rng):
    """The curvatures of an effect and of the mean of its group do not cancel."""
    groups = 150
    with pm.Model() as model:
        mean = pm.Normal("mean", 0, 2)
        effects = pm.Normal("effects", mean, 0.5, shape=groups)
        group = np.repeat([0, 1], 400)
        pm.Normal("y", effects[group], 1.0, observed=rng.normal(size=800))
    posterior = Posterior(model)
    scale = coordinate_scale(posterior, Subsample(posterior), rng.normal(size=groups + 1))
    assert scale[3:].max() < 2 * 0.5
    assert scale[3:].min() > 0.5 / 2


def test_many_small_groups_of_counts():
    """Most groups have few rows, and none among those that tell the scale of coordinates."""
    rng, groups, rows = np.random.default_rng(3), 150, 60_000
    shares = 1 / np.arange(1, groups + 1) ** 1.2
    group = rng.choice(groups, size=rows, p=shares / shares.sum())
    group[:groups] = np.arange(groups)
    x = rng.normal(size=rows)
    true = rng.normal(-1, 0.8, groups)[group] + 0.4 * x
    with pm.Model() as model:
        mean, scale = pm.Normal("mean", 0, 2), pm.HalfNormal("scale", 1)
        slope = pm.Normal("slope", 0, 1)
        effects = pm.Normal("effects", mean, scale, shape=groups)
        expected = pm.math.exp(effects[group] + slope * x)
        pm.Poisson("y", expected, observed=rng.poisson(np.exp(true)))
    posterior = Posterior(model)
    center = find_center(posterior, posterior.initial_position)
    np.testing.assert_allclose(center.position[:3], [-1, np.log(0.8), 0.4], atol=0.2)


def test_a_search_from_where_the_density_is_zero_begins_on_the_way_there():
    """As at the mode of a subsample, where another row may be impossible."""

    def density(position):
        value = -0.5 * np.sum((position - 0.5) ** 2)
        return (value if position[0] < 1.5 else -np.inf), 0.5 - position

    start, scale = np.zeros(2), as_matrix(np.eye(2))
    for position in (np.array([1.0, 3.0]), np.array([40.0, 0.0]), np.array([1e6, 0.0])):
        found = mode_search._minimize_towards(density, start, position, scale, 1e-6)
        np.testing.assert_allclose(found, 0.5, atol=1e-5)
    with pytest.raises(ValueError, match="not finite at the start"):
        mode_search._minimize_towards(density, np.full(2, 2.0), np.full(2, 3.0), scale, 1e-6)


def test_differences_are_shorter_where_gradients_overflow():
    """The logarithm of a rate that is nearly zero hardly has a curvature, and a large scale."""
    with pm.Model() as model:
        log_rate, other = pm.Normal("log_rate", 0, 1e3), pm.Normal("other", 0, 1)
        pm.Poisson("y", pm.math.exp(log_rate), observed=np.zeros(100, dtype=int))
        pm.Normal("z", other, 1, observed=np.ones(100))
    posterior = Posterior(model, rows=["y", "z"])
    scale = np.array([1e6, 0.1])
    found = scaled_precision(posterior, Subsample(posterior), np.array([-20.0, 1.0]), scale)
    exact = np.diag([1e-6 + 100 * np.exp(-20), 101.0])
    np.testing.assert_allclose(found / np.outer(scale, scale), exact, rtol=0.1, atol=1e-9)
