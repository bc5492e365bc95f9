"""The Gaussian nearest to a posterior, against quadrature and closed forms."""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pymc as pm
import pytest
from scipy import stats

from pymc_sgmcmc import CenterWarning, Posterior
from pymc_sgmcmc.marginal import marginalize
from pymc_sgmcmc.matrices import triangular_root
from pymc_sgmcmc.tuning import find_center
from pymc_sgmcmc.tuning.gaussian import (
    FARTHEST,
    Mismatch,
    _is_hopeless,
    fit_gaussian,
    mismatch,
    next_radius,
    steepest_curvature,
)
from pymc_sgmcmc.tuning.judge import ControlVariates
from pymc_sgmcmc.tuning.mean_field import mean_field
from pymc_sgmcmc.tuning.nearest_gaussian import _curvature_of, response, spread
from pymc_sgmcmc.tuning.subsample import Subsample, fewest_rows
from tests.accuracy.gallery import counts_of_subjects
from tests.accuracy.suite import REFERENCES
from tests.support.references import read_arrays


def random_root(rng, dimension):
    return rng.normal(size=(dimension, dimension)) + 2 * np.eye(dimension)


def test_mismatch_of_a_quadratic_is_exact(rng):
    """Precision H and mean m against N(a, R R'): gradient R'H(m - a), curvature R'HR."""
    d = 4
    A = rng.normal(size=(d, d))
    H, m, a, R = A @ A.T + np.eye(d), rng.normal(size=d), rng.normal(size=d), random_root(rng, d)
    misfit = mismatch(lambda x: (m - x) @ H, a, R, rng)
    np.testing.assert_allclose(misfit.gradient, R.T @ H @ (m - a), rtol=1e-10)
    np.testing.assert_allclose(misfit.precision, R.T @ H @ R, rtol=1e-8, atol=1e-10)


def test_mismatch_without_points_of_no_density(rng):
    """Gradients there are not finite, and take part in no product."""
    root = random_root(rng, 4)

    def gradients(positions):
        farthest = positions[:, :1] == positions[:, :1].max()
        return np.where(farthest, np.inf, -positions)

    np.testing.assert_allclose(mismatch(gradients, np.zeros(4), root, rng).gradient, 0, atol=1e-12)


def test_mean_curvature_of_a_kink():
    """-|t| over N(0, I): the density of a standard normal at zero, twice."""
    misfit = mismatch(lambda x: -np.sign(x), np.zeros(2), np.eye(2), np.random.default_rng(1))
    np.testing.assert_allclose(np.diag(misfit.precision), np.sqrt(2 / np.pi), rtol=0.1)


def test_fit_of_a_gaussian_is_exact(rng):
    d = 3
    A = rng.normal(size=(d, d))
    H, m = A @ A.T + np.eye(d), rng.normal(size=d)
    fitted = fit_gaussian(lambda x: (m - x) @ H, np.zeros(d), 0.1 * np.eye(d))
    assert fitted.converged
    np.testing.assert_allclose(fitted.mean, m, atol=0.05)
    np.testing.assert_allclose(fitted.root @ fitted.root.T @ H, np.eye(d), atol=0.1)


def test_fit_of_a_log_rate():
    """Counts with mean exp(t): exp(m + v/2) n = s - m / 100 and 1 / v = n exp(m + v/2) + 1/100."""
    total, n = 7.0, 5.0

    def gradients(t):
        return total - n * np.exp(t) - t / 100

    fitted = fit_gaussian(gradients, np.zeros(1), np.eye(1))
    assert fitted.converged
    m, v = fitted.mean[0], fitted.root[0, 0] ** 2
    for _ in range(200):  # the two equations, from where the search ended
        v = 1 / (n * np.exp(m + v / 2) + 0.01)
        m = np.log((total - m / 100) / n) - v / 2
    assert abs(fitted.mean[0] - m) < 0.05 * np.sqrt(v)
    assert fitted.root[0, 0] ** 2 == pytest.approx(v, rel=0.1)


def test_a_density_without_bound_has_no_fit():
    assert not fit_gaussian(lambda x: 0.0 * x, np.zeros(2), np.eye(2)).converged


def test_triangular_root_is_of_the_same_covariance(rng):
    R = random_root(rng, 4)
    L = triangular_root(R)
    np.testing.assert_allclose(L @ L.T, R @ R.T, rtol=1e-10)
    np.testing.assert_array_equal(L, np.tril(L))


GROUPS = np.repeat(np.arange(12), 8)


def grouped_outcomes():
    rng = np.random.default_rng(4)
    return rng.normal(0, 0.8, size=12)[GROUPS] + rng.normal(size=len(GROUPS))


def hierarchy(*, centred: bool) -> pm.Model:
    with pm.Model() as model:
        scale = pm.HalfNormal("scale", 1.0)
        if centred:
            effect = pm.Normal("effect", 0.0, scale, shape=12)
        else:
            effect = scale * pm.Normal("z", 0.0, 1.0, shape=12)
        pm.Normal("y", effect[GROUPS], 1.0, observed=grouped_outcomes())
    return model


def log_scale_moments():
    """Mean and sd of the log scale by quadrature, effects integrated out."""
    t = np.linspace(-5, 3, 4001)
    variance = np.exp(2 * t)[:, None] + 1 / 8
    means = grouped_outcomes().reshape(12, 8).mean(1)
    log_density = (-0.5 * np.log(variance) - 0.5 * means**2 / variance).sum(1)
    log_density += -0.5 * np.exp(2 * t) + t
    weights = np.exp(log_density - log_density.max())
    weights /= weights.sum()
    mean = weights @ t
    return mean, np.sqrt(weights @ (t - mean) ** 2)


@pytest.mark.parametrize("centred", [True, False])
def test_center_of_a_hierarchy_is_where_its_mass_is(centred):
    """The joint mode is at a scale of zero or many sds away, and the centre is not."""
    posterior = Posterior(hierarchy(centred=centred))
    with warnings.catch_warnings():
        warnings.simplefilter("error", CenterWarning)
        center = find_center(posterior, posterior.initial_position)
    which = next(i for i, label in enumerate(posterior.labels) if "scale" in label)
    mean, sd = log_scale_moments()
    assert abs(center.position[which] - mean) < 0.5 * sd
    assert 0.6 * sd < center.curvature.standard_deviations[which] < 1.5 * sd


def test_search_from_too_wide_a_gaussian():
    """The log density bends upwards in products of scale and effects. The search must converge."""
    posterior = Posterior(hierarchy(centred=False))

    def gradients(positions):
        return np.array([posterior.gradient(position) for position in positions])

    fitted = fit_gaussian(gradients, posterior.initial_position, np.eye(posterior.dimension))
    assert fitted.converged
    misfit = mismatch(gradients, fitted.mean, fitted.root, np.random.default_rng(1))
    assert misfit.shift < 0.3
    np.testing.assert_allclose(misfit.scales, 1, atol=0.3)


SHRINKAGE = 0.02
ROWS, COEFFICIENTS = 304, 8


def orthogonal_regression():
    """Orthogonal predictors, of which two matter, so that coefficients are independent."""
    rng = np.random.default_rng(30)
    X = np.linalg.qr(rng.normal(size=(ROWS, COEFFICIENTS)))[0] * np.sqrt(ROWS)
    y = X[:, 0] * 0.3 - X[:, 1] * 0.2 + 2 * rng.normal(size=ROWS)
    return X, y


def laplace_moments():
    """Means and sds of the coefficients by quadrature."""
    X, y = orthogonal_regression()
    t = np.linspace(-1, 1, 20_001)
    moments = []
    for estimate in X.T @ y / ROWS:
        log_density = -0.5 * ROWS / 4 * (t - estimate) ** 2 - np.abs(t) / SHRINKAGE
        weights = np.exp(log_density - log_density.max())
        weights /= weights.sum()
        mean = weights @ t
        moments.append((mean, np.sqrt(weights @ (t - mean) ** 2)))
    return np.array(moments).T


@pytest.mark.slow
def test_center_of_a_posterior_with_kinks():
    """The mode has coefficients at exactly zero, where differences show only the kink."""
    X, y = orthogonal_regression()
    with pm.Model() as model:
        slopes = pm.Laplace("slopes", 0, SHRINKAGE, shape=COEFFICIENTS)
        pm.Normal("y", X @ slopes, 2.0, observed=y)
    posterior = Posterior(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CenterWarning)
        center = find_center(posterior, posterior.initial_position)
    means, sds = laplace_moments()
    assert np.abs((center.position - means) / sds).max() < 0.3
    ratios = center.curvature.standard_deviations / sds
    # The Gaussian nearest to a Laplace law has sqrt(pi / 4) times its standard deviation.
    assert ratios.min() > 0.75
    assert ratios.max() < 1.1


def test_search_with_kinks():
    """Steps at fixed points end where these are, and steps at new points average over them."""
    rng = np.random.default_rng(30)
    X = rng.normal(size=(300, 12))
    y = 0.6 * X[:, 0] - 0.3 * X[:, 1] + 2 * rng.normal(size=300)

    def gradients(positions):
        return (y - positions @ X.T) @ X / 4 - np.sign(positions) / SHRINKAGE

    fixed = fit_gaussian(gradients, np.zeros(12), SHRINKAGE * np.eye(12))
    assert fixed.converged
    averaged = fit_gaussian(gradients, fixed.mean, fixed.root, settles=False)
    assert not averaged.converged
    # The curvature of a kink at 60 pairs of points has an error of a third.
    for fitted, largest, error in ((fixed, 0.2, 0.35), (averaged, 0.1, 0.2)):
        misfits = [
            mismatch(gradients, fitted.mean, fitted.root, np.random.default_rng(seed))
            for seed in range(20)
        ]
        assert np.abs(np.mean([each.gradient for each in misfits], axis=0)).max() < largest
        scales = np.linalg.eigvalsh(np.mean([each.precision for each in misfits], axis=0))
        np.testing.assert_allclose(scales, 1, atol=error)


def test_a_search_that_turns_back_does_not_cycle():
    """Behind a steep wall is a long tail, between which full steps go back and forth for ever."""
    fitted = fit_gaussian(lambda x: 1 - np.exp(3 * x), np.array([0.3]), np.eye(1))
    assert fitted.converged
    # E exp(3 x) = 1 and E 3 exp(3 x) = 1 / variance.
    assert fitted.mean[0] == pytest.approx(-0.5, rel=0.1)
    assert fitted.root[0, 0] == pytest.approx(3**-0.5, rel=0.1)


def test_steepest_curvature_of_a_quadratic(rng):
    A = rng.normal(size=(3, 3))
    H, R = A @ A.T + np.eye(3), random_root(rng, 3)
    largest = np.linalg.eigvalsh(R.T @ H @ R)[-1]
    found = steepest_curvature(lambda x: -x @ H, np.zeros(3), R, 1e-3)
    assert found == pytest.approx(largest, rel=0.05)


@pytest.mark.parametrize("moved", [False, True])
def test_steepest_curvature_of_a_curved_ridge(moved):
    """The largest eigenvalue of the Hessian `FARTHEST` from the centre, in all directions.

    Where only the first coordinate is moved it is the largest curvature along that one.
    """
    width, R = 0.2, np.diag([1.0, 0.2])

    def hessian(x):  # of (x_2 - x_1²)² / (2 width²) + x_1² / 2
        across = np.array([-2 * x[0], 1.0])
        bent = np.diag([1 - 2 * (x[1] - x[0] ** 2) / width**2, 0.0])
        return np.outer(across, across) / width**2 + bent

    def gradients(positions):
        x, y = positions.T
        across = (y - x**2) / width**2
        return np.stack([2 * x * across - x, -across], axis=1)

    angles = np.linspace(0, 2 * np.pi, 2000)
    points = FARTHEST * np.column_stack([np.cos(angles), np.sin(angles)]) @ R
    part = slice(0, 1) if moved else slice(None)
    hessians = [(R @ hessian(x) @ R)[part, part] for x in points]
    largest = max(np.abs(np.linalg.eigvalsh(each)).max() for each in hessians)
    of = (part, R[part, part]) if moved else None
    found = steepest_curvature(gradients, np.zeros(2), R, 1e-4, of)
    assert found == pytest.approx(largest, rel=0.03)
    assert found > 500


@pytest.mark.slow
def test_center_where_no_gaussian_is_near():
    """The centre is narrow enough for a stable step, and a warning follows."""
    rng = np.random.default_rng(6)
    X = rng.normal(size=(200, 5))
    y = X[:, 0] - 0.5 * X[:, 1] + rng.normal(size=200)
    with pm.Model() as model:
        overall = pm.HalfCauchy("overall", 0.1)
        local = pm.HalfCauchy("local", 1.0, shape=5)
        z = pm.Normal("z", 0, 1, shape=5)
        pm.Normal("y", X @ (z * local * overall), 1.0, observed=y)
    posterior = Posterior(model)
    with pytest.warns(CenterWarning, match="No Gaussian was found near the posterior"):
        center = find_center(posterior, posterior.initial_position)

    def gradients(positions):
        return np.array([posterior.gradient(position) for position in positions])

    root = center.curvature.root.dense()
    steepest = steepest_curvature(gradients, center.position, root, 1e-3)
    assert steepest < 2


def test_spread_of_log_weights_is_that_over_all_rows():
    """The mode of a subsample is far away, which does not make the posterior less Gaussian."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal(200_000)
    with pm.Model() as model:
        intercept, slope = pm.Normal("intercept", 0, 10), pm.Normal("slope", 0, 10)
        pm.Normal("y", intercept + slope * x, 1.0, observed=2 * x + rng.standard_normal(len(x)))
    posterior = Posterior(model)
    center = find_center(posterior, posterior.initial_position)
    few = Subsample(posterior)
    assert few.weight == 20
    away = center.curvature.root.T @ few.gradient(center.position)
    assert np.abs(away).max() > 3
    assert spread(ControlVariates(few, center), center) < 0.5


def test_mean_field_of_a_correlated_posterior_is_at_its_mean():
    """Rows are divided among the points, and the means of independent coordinates are exact."""
    rng = np.random.default_rng(8)
    X = rng.standard_normal((40_000, 3)) @ (np.eye(3) + 0.7)
    y = X @ [0.3, -0.2, 0.1] + rng.standard_normal(len(X))
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 10, shape=3)
        pm.Normal("y", X @ beta, 1.0, observed=y)
    posterior = Posterior(model)
    precision = X.T @ X + np.eye(3) / 100
    root = np.linalg.cholesky(np.linalg.inv(precision))
    scale = np.diag(precision) ** -0.5
    mean, deviations = mean_field(posterior, np.zeros(3), scale)
    # The mean of each block is more than a standard deviation from that of all rows.
    assert np.abs(np.linalg.solve(root, mean - np.linalg.solve(precision, X.T @ y))).max() < 0.05
    assert deviations == pytest.approx(scale, rel=0.5)  # from ten pairs of points


def test_response_of_a_correlated_gaussian_is_one():
    """Its variance is that of the posterior, in a direction across coordinates."""
    rng = np.random.default_rng(8)
    X = rng.standard_normal((200, 3)) @ (np.eye(3) + 0.7)
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 10, shape=3)
        pm.Normal("y", X @ beta, 1.0, observed=rng.standard_normal(200))
    posterior = Posterior(model)
    center = find_center(posterior, posterior.initial_position)
    center = replace(center, misfit=Mismatch(np.array([0.5, -0.3, 0.2]), np.eye(3)))
    assert response(posterior, center) == pytest.approx(1.0, abs=0.02)
    wide = np.sqrt(2) * center.curvature.root.dense()
    wider = replace(center, curvature=_curvature_of(wide))
    assert response(posterior, wider) == pytest.approx(0.5, abs=0.02)


def test_a_funnel_has_no_gaussian_near_it():
    """Effects that rows hardly inform: the log scale is 4 times as wide as its best Gaussian."""
    group = np.arange(90) % 9
    y = np.random.default_rng(0).standard_normal(90)
    with pm.Model() as model:
        log_scale = pm.Normal("log_scale", 0, 3)
        effect = pm.Normal("effect", 0, pm.math.exp(log_scale / 2), shape=9)
        pm.Normal("y", effect[group], 10.0, observed=y)
    posterior = Posterior(model)
    with pytest.warns(CenterWarning, match="No Gaussian was found near the posterior"):
        find_center(posterior, posterior.initial_position)


@pytest.mark.slow
def test_cost_of_the_center_of_many_groups(monkeypatch):
    """In passes over the rows. A search from the mode on most of the rows takes about 7400."""
    rng, groups, rows = np.random.default_rng(0), 60, 40_000
    group = rng.integers(0, groups, rows)
    eta = 0.5 * rng.normal(size=groups)[group] - 0.3
    with pm.Model() as model:
        intercept, scale = pm.Normal("intercept", 0, 2), pm.HalfNormal("scale", 1)
        logit = intercept + scale * pm.Normal("z", shape=groups)[group]
        pm.Bernoulli("y", logit_p=logit, observed=rng.random(rows) < 1 / (1 + np.exp(-eta)))
    posterior = Posterior(model)
    evaluated = []

    def counted(method):
        def call(self, position, given=None):
            positions = len(np.atleast_2d(position))
            evaluated.append(positions * (len(given[0]) if given is not None else self.n_rows))
            return method(self, position, given)

        return call

    for name in ("log_likelihood_and_gradient", "likelihood_gradient", "row_gradients"):
        monkeypatch.setattr(Posterior, name, counted(getattr(Posterior, name)))
    center = find_center(posterior, posterior.initial_position)
    passes = sum(evaluated) / rows
    monkeypatch.undo()

    def gradients(positions):
        return np.array([posterior.gradient(position) for position in positions])

    misfit = mismatch(gradients, center.position, center.curvature.root.dense(), rng)
    assert misfit.shift < 0.2
    np.testing.assert_allclose(misfit.scales, 1, atol=0.9)
    assert passes < 1500


def test_a_search_goes_on_while_the_mean_gradient_falls():
    """Many standard deviations away a step moves by about one of them."""
    falling = [float(shift) for shift in range(60, 6, -1)]
    assert not any(_is_hopeless(falling[:number]) for number in range(1, len(falling)))
    assert _is_hopeless([*falling, 20.0, 40.0, 30.0, 20.0, 10.0])
    assert not _is_hopeless([*falling, 20.0, 40.0, 4.0, 20.0, 10.0])


@pytest.mark.slow
def test_effects_of_few_counts_have_a_near_gaussian(data_folder):
    """The mode is at a scale of zero, and the search begins ten standard deviations away."""
    posterior = Posterior(counts_of_subjects(data_folder))
    with warnings.catch_warnings():
        warnings.simplefilter("error", CenterWarning)
        center = find_center(posterior, posterior.initial_position)
    reference = read_arrays(REFERENCES / "counts_of_subjects.npz")
    off = (center.position - reference["position_mean"]) / reference["position_sd"]
    assert np.abs(off).max() < 0.15
    ratio = center.curvature.standard_deviations / reference["position_sd"]
    assert ((ratio > 0.8) & (ratio < 1.1)).all()


def test_mean_field_begins_narrower_where_the_density_is_zero(rng):
    """At 1000 or so standard deviations rates overflow, or are rounded to zero."""
    with pm.Model() as model:
        level = pm.Normal("level", 0, 10)
        pm.Poisson("y", pm.math.exp(level), observed=rng.poisson(3.0, size=100))
    posterior = Posterior(model)
    exact = mean_field(posterior, np.ones(1), np.array([0.1]))
    found = mean_field(posterior, np.ones(1), np.array([500.0]))
    np.testing.assert_allclose(found, exact, rtol=0.02)
    with pytest.raises(ValueError, match="not finite at points around the start"):
        mean_field(posterior, np.array([1000.0]), np.array([0.1]))


@pytest.mark.parametrize(("n_groups", "parts"), [(90, 1), (300, 2), (1100, 10)])
def test_mean_field_divides_groups_among_its_points(n_groups, parts, monkeypatch):
    """Twenty points of ten pairs, and all groups together for an evaluation of few of them."""
    monkeypatch.setattr("pymc_sgmcmc.tuning.mean_field.minimize", lambda f, x, *_: (f(x), x)[1])
    codes = np.repeat(np.arange(n_groups), 3)
    with pm.Model() as model:
        z, mean = pm.Normal("z", shape=n_groups), pm.Normal("mean")
        pm.Bernoulli("y", logit_p=mean + z[codes], observed=codes % 2)
    posterior = Posterior(marginalize(model, "z"))
    before = posterior.rows_evaluated
    mean_field(posterior, np.zeros(1), np.ones(1))
    assert posterior.rows_evaluated - before == 20 * n_groups / parts


@pytest.mark.parametrize(
    ("elements", "groups", "expected"),
    [(5, False, 10_000), (5, True, 2000), (120, True, 2000), (240, True, 1000), (800, True, 500)],
)
def test_fewer_groups_of_more_records_are_enough(elements, groups, expected):
    posterior = SimpleNamespace(row_elements=elements, rows_are_groups=groups)
    assert fewest_rows(posterior) == expected


def test_a_search_along_a_ridge_that_becomes_narrower():
    """As many predictors as rows: near an exact fit the scale falls by steps that stay as short."""
    rng = np.random.default_rng(2)
    X = rng.normal(size=(6, 6))
    y = 2 * X[:, 0] + rng.normal(size=6)
    with pm.Model() as model:
        b, s = pm.Normal("b", 0, 2, shape=6), pm.HalfNormal("s", 2)
        pm.Normal("y", X @ b, s, observed=y)
    posterior = Posterior(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CenterWarning)
        found = find_center(posterior, posterior.initial_position)
    grid = np.linspace(-12, 4, 400)
    weight = []
    for log_scale in grid:
        covariance = 4 * X @ X.T + np.exp(2 * log_scale) * np.eye(6)
        fit = stats.multivariate_normal.logpdf(y, np.zeros(6), covariance)
        weight.append(fit + stats.halfnorm.logpdf(np.exp(log_scale), scale=2) + log_scale)
    weight = np.exp(np.array(weight) - max(weight))
    mean = np.average(grid, weights=weight)
    deviation = np.sqrt(np.average((grid - mean) ** 2, weights=weight))
    assert abs(found.position[-1] - mean) < deviation


def test_steps_become_longer_far_away():
    """A mean of 500 standard deviations is reached, though the first step goes one of them."""

    def gradients(positions):  # of log s for N = 10^4 records with variance one
        return 1e4 * (np.exp(-2 * positions) - 1)

    start, root = np.array([-3.5]), np.array([[0.007]])
    found = fit_gaussian(gradients, start, root)
    assert found.converged
    # E exp(-2x) = 1 at the mean of the nearest Gaussian.
    np.testing.assert_allclose(found.mean, found.root[0] ** 2, atol=3e-4)


@pytest.mark.parametrize(
    ("radius", "before", "after", "expected"),
    [
        (1.0, np.inf, 80.0, 2.0),  # the first step, of one standard deviation
        (8.0, 60.0, 53.0, 16.0),
        (8.0, 60.0, 59.0, 8.0),
        (8.0, 60.0, 70.0, 4.0),
        (16.0, 0.3, 0.1, 1.0),  # a short step ended near
        (16.0, 0.3, 40.0, 0.15),  # the curvature became wrong
    ],
)
def test_radius_of_the_next_step(radius, before, after, expected):
    assert next_radius(radius, before, after) == pytest.approx(expected)
