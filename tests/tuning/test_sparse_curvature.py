"""The sparse curvature of long positions with effects of groups, and their centre."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
from scipy import integrate, sparse, stats

from pymc_sgmcmc import SGLDCV, bias_report
from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.gradient_estimators.center_difference import find_center_difference
from pymc_sgmcmc.matrices import Diagonal, Factored, LowRank
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.record import stored_matrix
from pymc_sgmcmc.step_methods import momentum, psgld
from pymc_sgmcmc.tuning import find_center
from pymc_sgmcmc.tuning.curvature import (
    curvature_of_matrices,
    diagonal_curvature,
    sparse_curvature,
)
from tests.posterior.test_effects import nested_model

QUIET = {"progressbar": False, "quiet": True, "compute_convergence_checks": False}


def matches():
    """Two indices into one variable, some rows with the same level twice."""
    rng = np.random.default_rng(3)
    first, second = rng.integers(7, size=(2, 60))
    with pm.Model() as model:
        skill = pm.Normal("skill", 0, pm.HalfNormal("scale"), shape=7)
        pm.Bernoulli("wins", logit_p=skill[first] - 2 * skill[second], observed=np.ones(60, int))
    return model


def cells():
    rng = np.random.default_rng(4)
    county, year = rng.integers(6, size=50), rng.integers(3, size=50)
    with pm.Model() as model:
        effects = pm.Normal("effects", 0, pm.HalfNormal("scale"), shape=(6, 3))
        pm.Poisson("y", pm.math.exp(effects[county, year]), observed=rng.poisson(2, size=50))
    return model


def other_effects():
    """Those of one factor have no coordinates of their own."""
    rng = np.random.default_rng(5)
    first, second = rng.integers(7, size=60), rng.integers(5, size=60)
    with pm.Model() as model:
        effects = pm.Normal("effects", 0, pm.HalfNormal("scale"), shape=7)
        others = pm.Laplace("others", 0, pm.HalfNormal("other_scale"), shape=5)
        mean = effects[first] + others[second]
        pm.Normal("y", mean, 1, observed=rng.normal(size=60))
    return model


def hessian(posterior, position, width=1e-5):
    """Minus the dense Hessian of the log density, by differences of gradients."""
    differences = [
        posterior.gradient(position - shift) - posterior.gradient(position + shift)
        for shift in width * np.eye(posterior.dimension)
    ]
    return np.array(differences) / (2 * width)


@pytest.mark.parametrize(
    "model",
    [nested_model("centred"), nested_model("non-centred"), matches(), cells(), other_effects()],
    ids=["centred", "non-centred", "matches", "cells", "others"],
)
@pytest.mark.parametrize("standardizes", [False, True], ids=["model", "own coordinates"])
def test_matrix_is_the_hessian(model, standardizes, rng, no_joint_block):
    posterior = Posterior(model, standardizes=standardizes)
    d = posterior.dimension
    if standardizes:
        posterior.coordinates.adapted(0.3 * rng.normal(size=d), Diagonal(rng.uniform(1, 5, size=d)))
    position = 0.3 * rng.normal(size=d)
    curvature = sparse_curvature(posterior)
    found = curvature.at(position, np.ones(d), central=True)
    assert sparse.issparse(found)
    expected = hessian(posterior, position)
    np.testing.assert_allclose(found.toarray(), expected, atol=1e-4 * np.abs(expected).max())
    rough = curvature.at(position, np.ones(d)).toarray()
    np.testing.assert_allclose(rough, expected, atol=5e-3 * np.abs(expected).max())


@pytest.mark.parametrize("form", ["centred", "non-centred"])
def test_scales_that_rows_select(form, rng, no_joint_block):
    """Groups of several types, each type with a scale of its own."""
    type_of_group, group = rng.integers(3, size=8), rng.integers(8, size=60)
    with pm.Model() as model:
        sizes = pm.Normal("sizes", shape=3) * pm.HalfNormal("spread")
        scales = pm.math.exp(sizes)[type_of_group]
        if form == "centred":
            effects = pm.Normal("effects", 0, scales, shape=8)
        else:
            effects = pm.Normal("effects", shape=8) * scales
        pm.Poisson("y", pm.math.exp(effects[group]), observed=rng.poisson(2, size=60))
    posterior = Posterior(model, standardizes=True)
    d = posterior.dimension
    posterior.coordinates.adapted(0.3 * rng.normal(size=d), Diagonal(rng.uniform(1, 5, size=d)))
    position = 0.3 * rng.normal(size=d)
    found = sparse_curvature(posterior).at(position, np.ones(d), central=True)
    expected = hessian(posterior, position)
    np.testing.assert_allclose(found.toarray(), expected, atol=1e-4 * np.abs(expected).max())


def test_effects_without_coordinates_of_their_own(no_joint_block):
    posterior = Posterior(other_effects(), standardizes=True)
    assert posterior.coordinates.apart.sum() == 7
    assert sparse_curvature(posterior).effects.sum() == 12


def test_noise_of_rows_of_few_entries(rng, monkeypatch):
    """Its variances are those of the same rows with their zeros."""
    monkeypatch.setattr(momentum, "DENSE_DIMENSION", 3)
    deviations = rng.normal(size=(5, 4)) * (rng.random((5, 4)) < 0.5)
    setup = SimpleNamespace(gradient_deviations=lambda: sparse.csr_array(deviations))
    np.testing.assert_allclose(momentum.rows_noise(setup).values, (deviations**2).sum(axis=0))
    curvature = diagonal_curvature(np.ones(4))
    setup.center, setup.posterior = SimpleNamespace(curvature=curvature), SimpleNamespace(n_rows=5)
    dense = SimpleNamespace(**{**vars(setup), "gradient_deviations": lambda: deviations})
    found, expected = (psgld._stationary_diagonal(each, 0.1) for each in (setup, dense))
    np.testing.assert_allclose(found, expected)
    sizes = [psgld._diagonal_size(each)(np.arange(1.0, 5.0)) for each in (setup, dense)]
    np.testing.assert_allclose(*sizes, rtol=1e-3)


def test_no_gradient_a_level():
    """Gradients by the numbers that a row has, not by those of the position."""
    posterior = Posterior(nested_model("centred"))
    # Of a row: a group and two coefficients of an item, and the slope.
    assert sparse_curvature(posterior).evaluations == 2 * (1 + 2 + 1)


def test_border_of_few_points(rng):
    """With more predictors than entries of a row the border is that of the first points alone."""
    group, X = rng.integers(8, size=60), rng.normal(size=(60, 5))
    with pm.Model() as model:
        b = pm.Normal("b", 0, 1, shape=5)
        u = pm.Normal("u", 0, 1, shape=8)
        pm.Normal("y", X @ b + u[group], 0.5, observed=rng.normal(size=60))
    posterior = Posterior(model)
    curvature = sparse_curvature(posterior)
    shifts = rng.normal(size=(3, 13))
    found = curvature.around(np.zeros(13), list(shifts), np.ones(13))
    design = np.hstack([X, np.eye(8)[group]])
    exact = np.eye(13) + design.T @ design / 0.25
    assert curvature.entries == 1
    assert len(found) == 3
    for matrix in found:
        np.testing.assert_allclose(matrix.toarray(), exact, rtol=1e-5, atol=1e-5)


def test_levels_that_the_prior_joins():
    rng = np.random.default_rng(5)
    with pm.Model() as model:
        scale = pm.HalfNormal("scale")
        walk = pm.GaussianRandomWalk("walk", 0, scale, init_dist=pm.Normal.dist(), shape=12)
        pm.Normal("y", walk[rng.integers(12, size=40)], 1, observed=rng.normal(size=40))
    posterior = Posterior(model)
    curvature, d = sparse_curvature(posterior), posterior.dimension
    assert not curvature.have_scales(np.zeros(d), np.ones(d))
    with pytest.raises(ModelError, match="joins effects"):
        curvature.at(np.zeros(d), np.ones(d))


def test_directions_of_both_ends(rng):
    """Large and small eigenvalues are mended, and the bounds are those of all others."""
    d = 300
    values = np.concatenate([[1e-3, 0.02, 0.1], np.linspace(0.8, 1.2, d - 5), [6.0, 40.0]])
    rotation = np.linalg.qr(rng.normal(size=(d, d)))[0]
    scale = rng.uniform(0.1, 10, size=d)
    matrix = (rotation * values) @ rotation.T / np.outer(scale, scale)
    found = curvature_of_matrices([sparse.csr_array(matrix)] * 2)
    assert isinstance(found.precision, LowRank)
    assert not isinstance(found.precision, Diagonal)
    root = found.root.dense()
    left = np.linalg.eigvalsh(root.T @ matrix @ root)
    assert 0.4 < left[0] <= left[-1] < 2.5
    assert found.least <= 1.05 * left[0]
    assert found.remainder >= 0.95 * left[-1]


def test_sparse_factors_where_levels_are_nested(rng):
    """They leave no condition number; levels that cross fill them, so that directions remain."""
    classes, d = np.arange(600), 630

    def precision(schools):
        places = np.column_stack([np.tile(classes, len(schools) // 600), 600 + schools])
        rows = np.repeat(np.arange(len(places)), 2)
        design = sparse.csr_array((np.ones(places.size), (rows, places.ravel())))
        return (0.1 * sparse.eye_array(d) + design.T @ design).tocsr()

    nested = precision(np.repeat(np.arange(30), 20))
    found = curvature_of_matrices([nested] * 2)
    assert isinstance(found.precision, Factored)
    np.testing.assert_allclose(found.relative_to(found.root), 1.0)
    crossed = precision(rng.integers(30, size=6000))
    assert not isinstance(curvature_of_matrices([crossed] * 2).precision, Factored)


# --- Centre and draws ----------------------------------------------------------------------------

GROUPS, RECORDS, SIGMA = 520, 3, 1.5


def means_of_groups():
    rng = np.random.default_rng(6)
    effects = 1 + 0.8 * rng.normal(size=GROUPS)
    return effects[:, None] + SIGMA * rng.normal(size=(GROUPS, RECORDS))


def one_factor(form):
    """Effects with unknown mean and scale, of which a few records say little."""
    y = means_of_groups()
    group = np.repeat(np.arange(GROUPS), RECORDS)
    with pm.Model() as model:
        mean, scale = pm.Normal("mean", 0, 2), pm.HalfNormal("scale", 2)
        if form == "centred":
            effects = pm.Normal("effects", mean, scale, shape=GROUPS)
        else:
            z = pm.Normal("z", shape=GROUPS)
            effects = pm.Deterministic("effects", mean + scale * z)
        pm.Normal("y", effects[group], SIGMA, observed=y.ravel())
    return model


def exact_moments():
    """Means and standard deviations of mean and scale, by quadrature of their density.

    The mean of the records of a group is N(mean, scale² + σ² / records).
    """
    y = means_of_groups().mean(1)
    grid = np.meshgrid(np.linspace(0.7, 1.3, 200), np.linspace(0.3, 1.4, 200), indexing="ij")
    deviation = np.sqrt(grid[1] ** 2 + SIGMA**2 / RECORDS)
    log_density = stats.norm.logpdf(y[:, None, None], grid[0], deviation).sum(0)
    log_density += stats.norm.logpdf(grid[0], 0, 2) + stats.norm.logpdf(grid[1], 0, 2)
    weights = np.exp(log_density - log_density.max())

    def mean(values):
        inner = integrate.simpson(integrate.simpson(values * weights))
        return inner / integrate.simpson(integrate.simpson(weights))

    moments = [(mean(each), mean(each**2)) for each in grid]
    return [(first, np.sqrt(second - first**2)) for first, second in moments]


def run_of(form):
    with one_factor(form):
        return pm.sample(800, tune=200, chains=2, cores=1, step=SGLDCV(), random_seed=7, **QUIET)


@pytest.fixture(scope="module")
def trace():
    return run_of("non-centred")


def test_law_of_mean_and_scale(trace):
    for name, (mean, deviation) in zip(("mean", "scale"), exact_moments(), strict=True):
        draws = trace["posterior"][name].values
        blocks = draws.reshape(2 * 16, 50)
        for values, expected in ((blocks, mean), ((blocks - mean) ** 2, deviation**2)):
            of_blocks = values.mean(1)
            error = of_blocks.std(ddof=1) / np.sqrt(len(of_blocks))
            assert abs(of_blocks.mean() - expected) < 4 * error


SCHOOLS, CLASSES, PUPILS = 40, 480, 2


def nested_levels():
    """Schools with an unknown scale and classes in them, with a known one; and the records."""
    rng = np.random.default_rng(8)
    school = np.arange(CLASSES) % SCHOOLS
    level = np.repeat(np.arange(CLASSES), PUPILS)
    truth = 0.7 * rng.normal(size=SCHOOLS)[school] + rng.normal(size=CLASSES)
    y = truth[level] + 0.8 * rng.normal(size=len(level))
    with pm.Model() as model:
        scale = pm.HalfNormal("scale", 1.0)
        of_school = pm.Normal("school", 0, 1, shape=SCHOOLS)
        of_class = pm.Normal("class", 0, 1, shape=CLASSES)
        mean = scale * of_school[school[level]] + of_class[level]
        pm.Normal("y", mean, 0.8, observed=y)
    return model, np.array([y[school[level] == each].mean() for each in range(SCHOOLS)])


def test_law_of_nested_levels():
    """Classes in schools, by sparse factors: means and variances of effects are those by algebra.

    Given the scale of schools the posterior is Gaussian; the scale is integrated over a grid.
    """
    model, by_school = nested_levels()
    with model:
        step = SGLDCV()
        idata = pm.sample(1000, tune=200, chains=2, cores=1, step=step, random_seed=3, **QUIET)
    assert isinstance(step.center.curvature.precision, Factored)
    stored = stored_matrix(idata["sgmcmc_settings"], "chain_preconditioner")
    np.testing.assert_allclose(stored.diagonal(), step.center.curvature.covariance.diagonal())
    # Means of classes given their school are N(scale u, 1 + 0.8² / 2), and independent.
    variance = (1 + 0.8**2 / PUPILS) / (CLASSES / SCHOOLS)
    grid = np.linspace(1e-3, 2, 800)[:, None]
    total = grid**2 + variance
    log_weight = -0.5 * (np.log(total) + by_school**2 / total).sum(1) - 0.5 * grid[:, 0] ** 2
    weight = np.exp(log_weight - log_weight.max())
    weight /= weight.sum()
    u, spread = grid * by_school / total, variance / total
    expected = weight @ u, weight @ (spread + u**2)
    draws = idata["posterior"]["school"].values.reshape(2 * 20, 50, SCHOOLS)
    for values, exact in zip((draws, draws**2), expected, strict=True):
        of_blocks = values.mean(1)
        error = of_blocks.std(0, ddof=1) / np.sqrt(len(of_blocks))
        assert np.abs((of_blocks.mean(0) - exact) / error).max() < 4.5
    of_scale = idata["posterior"]["scale"].values.reshape(40, 50).mean(1)
    error = of_scale.std(ddof=1) / np.sqrt(40)
    assert abs(of_scale.mean() - weight @ grid[:, 0]) < 4 * error


def test_scales_do_not_collapse_without_a_sparse_matrix(monkeypatch):
    """What rows say of effects is known from random signs, however small their scale becomes."""
    module = sys.modules[find_center.__module__]  # The function has its name.
    monkeypatch.setattr(module, "sparse_curvature", lambda posterior: None)
    posterior = Posterior(nested_levels()[0], standardizes=True)
    found = find_center(posterior, posterior.initial_position)
    values = dict(zip(posterior.labels, posterior.values_at(found.position), strict=True))
    assert 0.5 < np.exp(values["scale_log__"]) < 1.0


@pytest.mark.slow
def test_both_forms_have_the_same_draws(trace):
    """The coordinates of the chain are the same, and so are its draws up to rounding."""
    first, second = (each["posterior"]["effects"].values for each in (trace, run_of("centred")))
    np.testing.assert_allclose(first[:, :50], second[:, :50], atol=1e-5)


def test_trace_has_the_variables_of_the_model(trace):
    """Positions and gradients in the trace are those of the model, not of the chain."""
    positions = trace["sample_stats"]["position"].values
    np.testing.assert_allclose(positions[..., 2:], trace["posterior"]["z"].values)
    np.testing.assert_allclose(np.exp(positions[..., 1]), trace["posterior"]["scale"].values)
    posterior = Posterior(one_factor("non-centred"))
    expected = posterior.gradient(positions[0, 3])
    found = trace["sample_stats"]["gradient"].values[0, 3]
    # The log likelihood is quadratic, so that control variates of second order leave no noise.
    assert trace["sample_stats"].attrs["sgmcmc_batch_size"] < posterior.n_rows
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_pairs_of_chains_are_refused(trace):
    """They would move in other coordinates."""
    with pytest.raises(ValueError, match="up to 500 coordinates where effects"):
        bias_report(trace, one_factor("non-centred"), rerun=True)


# --- Control variates of second order -----------------------------------------------------------


def mean_of_estimates(posterior, curvature, center, position):
    """The mean over minibatches, that is with all rows, and with a given sum of their matrices."""
    difference = find_center_difference(posterior, center, order=2).with_curvature(curvature)
    here, (_, rows) = pt.vector("here"), posterior.position_and_rows()
    along, weight = difference.along_shift(here)
    needed = [rows[number] for number in difference.needed]
    stored = [
        pt.tensor(f"column_{number}", dtype=dtype, shape=(None, *shape))
        for number, (dtype, shape) in enumerate(difference.column_types)
    ]
    total = difference(here, [*needed, *stored], pt.constant(posterior.n_rows), weight) + along
    function = pytensor.function([here, *needed, *stored], total, on_unused_input="ignore")
    return function(position, *difference.rows_of(slice(None)))


def test_estimates_are_unbiased(rng, no_joint_block):
    """All rows with the control variate give the gradient of all rows, from a wrong centre too."""
    posterior = Posterior(nested_model("non-centred"), standardizes=True)
    d = posterior.dimension
    posterior.coordinates.adapted(0.3 * rng.normal(size=d), Diagonal(rng.uniform(1, 5, size=d)))
    center, position = 0.3 * rng.normal(size=(2, d))
    curvature = sparse_curvature(posterior).of_rows(center, np.ones(d))
    # The estimate is in terms of the position of the rows.
    seen = posterior.position_of_rows(position), posterior.position_of_rows(center)
    expected = posterior.gradient_of_rows(seen[0]) - posterior.gradient_of_rows(seen[1])
    found = mean_of_estimates(posterior, curvature, center, seen[0])
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
    # A sum over a part of the rows would be biased.
    wrong = mean_of_estimates(posterior, 0.9 * curvature, center, seen[0])
    assert np.abs(wrong - expected).max() > 1e-2 * np.abs(expected).max()
