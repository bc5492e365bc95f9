"""Models of groups against numerical integration of the joint log density that PyMC makes."""

from __future__ import annotations

import logging

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from pytensor.graph.replace import vectorize_graph
from scipy import special, stats

from pymc_sgmcmc import ModelError
from pymc_sgmcmc.compiling.compiled import NUMPY_MODE, PYTHON_MODE, compile_quietly
from pymc_sgmcmc.marginal import marginalize
from pymc_sgmcmc.marginal.accuracy import quadrature_of

pytestmark = pytest.mark.usefixtures("without_compiler")

N_GROUPS = 6
GROUP = np.random.default_rng(1).permutation(np.repeat(np.arange(N_GROUPS), 4))
X, Y = np.random.default_rng(2).normal(size=(2, len(GROUP)))
SUCCESS = (Y > 0).astype("int32")


def position(model):
    """Values at which densities are compared, not those at which the package looks."""
    rng = np.random.default_rng(3)
    point = model.initial_point()
    return {name: value + 0.5 * rng.normal(size=np.shape(value)) for name, value in point.items()}


def integral(model, name, reach=8.0, n_points=4001):
    """Log density with one local quantity a group integrated out numerically.

    The joint log density is a sum over groups, so each is integrated with the others held.
    """
    local = model.rvs_to_values[model[name]]
    others = [value for value in model.value_vars if value is not local]
    several = pt.tensor("several", shape=(None, *local.type.shape), dtype=local.dtype)
    total = sum(term.sum() for term in model.logp(sum=False))
    log_density = compile_quietly(
        [several, *others], vectorize_graph(total, {local: several}), NUMPY_MODE
    )
    point = position(model)
    held = [point[value.name] for value in others]
    (result,) = at_point = log_density(point[local.name][None], *held)
    t = np.linspace(-reach, reach, n_points)
    for group in range(N_GROUPS):
        blocks = np.repeat(point[local.name][None], n_points, axis=0)
        blocks[:, group] = np.sinh(t)
        heights = log_density(blocks, *held) - at_point + np.log(np.cosh(t) * (t[1] - t[0]))
        result += np.logaddexp.reduce(heights)
    return result


def marginal(model, name):
    """Log density of the model of groups at the same values."""
    groups = marginalize(model, name)
    point = position(model)
    return groups.compile_logp(mode=PYTHON_MODE)({v.name: point[v.name] for v in groups.value_vars})


def predictor_of_groups():
    """The predictor of the counties of the radon data, indexed by the same codes."""
    codes, u = pm.Data("codes", GROUP), pm.Data("u", X[:N_GROUPS])
    mean = pm.Normal("z", shape=N_GROUPS)[codes] + pm.Normal("gamma") * u[codes]
    pm.Bernoulli("y", logit_p=mean, observed=SUCCESS)


def another_effect_of_groups():
    """A second effect with the same groups, which stays in the model."""
    codes = pm.Data("codes", GROUP)
    w = pm.Normal("w", shape=N_GROUPS)
    z = pm.Normal("z", w**2, shape=N_GROUPS)
    pm.Bernoulli("y", logit_p=z[codes] + w[codes] * X, observed=SUCCESS)


def as_many_predictors_as_groups():
    gamma = pm.Normal("gamma", shape=N_GROUPS)
    predictors = np.random.default_rng(4).normal(size=(N_GROUPS, N_GROUPS))
    z = pm.Normal("z", predictors @ gamma, shape=N_GROUPS)
    pm.Bernoulli("y", logit_p=z[GROUP], observed=SUCCESS)


@pytest.mark.parametrize(
    "make", [predictor_of_groups, another_effect_of_groups, as_many_predictors_as_groups]
)
def test_quantities_of_groups_that_are_not_local(make):
    with pm.Model() as model:
        make()
    np.testing.assert_allclose(marginal(model, "z"), integral(model, "z"), rtol=0, atol=1e-4)


def test_correlated_effects_of_the_radon_example():
    """Effects along the first axis and groups along the second, multiplied by a factor."""
    coords = {"effect": ["a", "b"], "county": list("abcdef")}
    with pm.Model(coords=coords) as model:
        chol, _, _ = pm.LKJCholeskyCov("chol", n=2, eta=2, sd_dist=pm.HalfNormal.dist(shape=2))
        z = pm.Normal("z", dims=("effect", "county"))
        effects = pt.dot(chol, z).T
        pm.Normal("y", effects[GROUP, 0] + effects[GROUP, 1] * X, 0.8, observed=Y)
    groups = marginalize(model, "z", method="exact")
    assert groups.named_vars_to_dims["y"] == ("county",)
    point = position(model)
    (value,) = groups.value_vars
    of_records = groups.compile_logp(vars=groups.observed_RVs, mode=PYTHON_MODE)
    log_density = of_records({value.name: point[value.name]})
    packed = point["chol_cholesky-cov-packed__"].copy()
    packed[[0, 2]] = np.exp(packed[[0, 2]])
    factor = np.array([[packed[0], 0], packed[1:]])
    expected = 0.0
    for group in range(N_GROUPS):
        records = group == GROUP
        design = np.column_stack([np.ones(records.sum()), X[records]]) @ factor
        covariance = design @ design.T + 0.64 * np.eye(records.sum())
        expected += stats.multivariate_normal(cov=covariance).logpdf(Y[records])
    np.testing.assert_allclose(log_density, expected, rtol=1e-9)


def last_group_is_not_linear():
    z = pm.Normal("z", shape=N_GROUPS)
    return pt.switch(GROUP == N_GROUPS - 1, pt.exp(z[GROUP]), z[GROUP])


def kink_in_units_of_the_prior():
    """It is five standard deviations of the prior from its centre, which is 5000."""
    return pt.maximum(5000.0 + pm.Normal("z", 0, 1000.0, shape=N_GROUPS)[GROUP], 0.0)


def edges_without_a_transform():
    return pm.Uniform("z", -1, 1, shape=N_GROUPS, default_transform=None)[GROUP]


@pytest.mark.parametrize(
    "mean", [last_group_is_not_linear, kink_in_units_of_the_prior, edges_without_a_transform]
)
def test_what_is_not_quadratic(mean):
    with pm.Model() as model:
        pm.Normal("y", mean(), 1.0, observed=Y)
    with pytest.raises(ModelError, match="is not quadratic in the local variables"):
        marginalize(model, "z", method="exact")


def two_modes():
    components = [pm.Normal.dist(-2, 0.5), pm.Normal.dist(2, 0.5)]
    return pm.Mixture("z", [0.6, 0.4], components, shape=N_GROUPS)


@pytest.mark.parametrize(
    ("prior", "warns"),
    [
        (two_modes, True),
        (lambda: pm.Laplace("z", 0, 0.5, shape=N_GROUPS), True),
        (lambda: pm.Normal("z", shape=N_GROUPS), False),
        (lambda: pm.StudentT("z", 4, shape=N_GROUPS), False),
        (lambda: pm.Normal("z", shape=(N_GROUPS, 2)).sum(axis=1), False),
    ],
    ids=["two modes", "kink", "normal", "Student", "two quantities"],
)
def test_inexact_quadrature_is_told(prior, warns, caplog):
    with pm.Model() as model:
        pm.Bernoulli("y", logit_p=prior()[GROUP], observed=SUCCESS)
    with caplog.at_level(logging.WARNING, logger="pymc.sgmcmc"):
        marginalize(model, "z")
    assert ("has errors up to" in caplog.text) == warns


def test_error_of_the_quadrature_at_any_position():
    """Compared with a sum over a fine grid, for binary records on a large scale."""
    successes, records = np.arange(12) % 6, 5
    group = np.repeat(np.arange(12), records)
    with pm.Model() as model:
        sd, mean = pm.HalfCauchy("sd", 2.5), pm.Normal("mean", 0, 3)
        z = pm.Normal("z", shape=12)
        outcome = np.tile(np.arange(records), 12) < np.repeat(successes, records)
        pm.Bernoulli("y", logit_p=mean + sd * z[group], observed=outcome)
    groups = marginalize(model, "z")
    error = quadrature_of(groups)
    density = groups.compile_logp(groups.observed_RVs)
    grid = np.linspace(-12, 12, 20_001)
    points = [{"sd_log__": np.array(log_sd), "mean": np.array(0.5)} for log_sd in (0.0, 1.0, 2.0)]
    differences = []
    for point in points:
        log_odds = 0.5 + np.exp(point["sd_log__"]) * grid[:, None]
        terms = stats.norm.logpdf(grid)[:, None] + stats.binom(
            records, special.expit(log_odds)
        ).logpmf(successes)
        exact = special.logsumexp(terms, axis=0) + np.log(grid[1] - grid[0])
        exact -= np.log(special.comb(records, successes))
        differences.append(density(point) - exact.sum())
        np.testing.assert_allclose(error.at(point).sum(), differences[-1], atol=1e-5)
    assert np.abs(differences).max() > 0.05
    assert error.shift(points) == pytest.approx(np.std(differences, ddof=1), abs=2e-5)
    assert error.shift(points[:1]) == 0


def test_improper_local_variables():
    """A flat prior with a named dimension, which cannot be drawn."""
    with pm.Model(coords={"group": range(N_GROUPS)}) as model:
        z = pm.Flat("z", dims="group")
        pm.Normal("y", z[GROUP] + pm.Flat("slope", dims="group")[GROUP] * X, 1.0, observed=Y)
    groups = marginalize(model, "z")
    assert [variable.name for variable in groups.free_RVs] == ["slope"]


def test_entries_of_data_that_are_as_long_as_there_are_groups():
    """A single entry is one number for all groups and records, whatever groups are chosen."""
    weights = np.linspace(-1, 1, N_GROUPS)
    with pm.Model() as model:
        w, b = pm.Data("w", weights), pm.Normal("b")
        z = pm.Normal("z", w[1] * b, 1.0, shape=N_GROUPS)
        pm.Normal("y", z[GROUP] + w[2] * b, 1.0, observed=Y)
    log_density = marginalize(model, "z").compile_logp(mode=PYTHON_MODE)
    mean, same = 0.3 * (weights[1] + weights[2]), GROUP[:, None] == GROUP
    law = stats.multivariate_normal(np.full(len(Y), mean), np.eye(len(Y)) + same)
    expected = law.logpdf(Y) + stats.norm.logpdf(0.3)
    assert log_density({"b": np.array(0.3)}) == pytest.approx(expected, abs=1e-9)


# --- Groups without records, cells, and initial values ----------------------------------------


def centred(n_groups, codes):
    z = pm.Normal("z", pm.Normal("mean"), pm.HalfNormal("sd"), shape=n_groups)
    pm.Bernoulli("y", logit_p=z[codes], observed=SUCCESS)


def non_centred(n_groups, codes):
    z = pm.Normal("z", shape=n_groups)
    pm.Bernoulli("y", logit_p=pm.HalfNormal("sd") * z[codes], observed=SUCCESS)


def linear(n_groups, codes):
    z = pm.Normal("z", pm.Normal("mean"), pm.HalfNormal("sd"), shape=n_groups)
    pm.Normal("y", z[codes], 1.0, observed=Y)


def frailty(n_groups, codes):
    """A prior of which nine nodes would not give the integral."""
    shape = pm.Exponential("shape", 1)
    z = pm.Gamma("z", 0.2 + shape, 1 + shape, shape=n_groups)
    pm.Exponential("y", z[codes], observed=np.exp(Y))


@pytest.mark.parametrize("make", [centred, non_centred, linear, frailty])
def test_groups_without_records_integrate_to_one(make):
    log_densities = []
    for n_groups, codes in ((N_GROUPS, GROUP), (N_GROUPS + 3, GROUP + (GROUP > 2) + (GROUP > 4))):
        with pm.Model() as model:
            make(n_groups, codes)
        groups = marginalize(model, "z")
        assert len(groups.rvs_to_values[groups["y"]].eval()) == n_groups
        log_densities.append(groups.compile_logp(mode=PYTHON_MODE)(position(groups)))
    assert log_densities[1] == pytest.approx(log_densities[0], abs=1e-10)


ROW, COLUMN = GROUP % 3, np.random.default_rng(5).integers(0, 4, size=len(GROUP))


def cells(form, indexed, lengths):
    """Effects of cells, of which some have no records, as pairs of codes or by single codes."""
    row, column = (np.arange(3)[:, None], np.arange(4)) if indexed else np.divmod(np.arange(12), 4)
    at = (ROW, COLUMN) if indexed else 4 * ROW + COLUMN
    of_rows, of_columns = pm.Normal("of_rows", shape=3), pm.Normal("of_columns", shape=4)
    mean = of_rows[row] + of_columns[column] + 0.3 * (row + 0 * column)
    if form == "centred":
        logit = pm.Normal("z", mean, pm.HalfNormal("sd"), shape=lengths)[at]
    elif form == "gamma":
        logit = pt.log(pm.Gamma("z", 1 + pt.exp(of_columns[column]), 2.0, shape=lengths)[at])
    else:
        effect = mean + pm.HalfNormal("sd") * pm.Normal("z", shape=lengths)
        logit = pm.Deterministic("effect", effect)[at]
    pm.Bernoulli("y", logit_p=logit + of_rows[ROW] * X, observed=SUCCESS)


@pytest.mark.parametrize("form", ["centred", "non-centred", "gamma"])
def test_cells_of_two_codes_are_groups(form):
    log_densities = []
    for indexed, lengths in ((True, (3, 4)), (False, (12,))):
        with pm.Model() as model:
            cells(form, indexed, lengths)
        groups = marginalize(model, "z")
        assert len(groups.rvs_to_values[groups["y"]].eval()) == 12
        log_densities.append(groups.compile_logp(mode=PYTHON_MODE)(position(groups)))
    assert log_densities[0] == pytest.approx(log_densities[1], abs=1e-10)


@pytest.mark.parametrize("kind", ["a random walk", "records of two cells"])
def test_cells_that_depend_on_each_other_are_no_groups(kind):
    """They belong to the rows then, along whose columns they depend."""
    column = COLUMN % 3
    with pm.Model() as model:
        z = pm.Normal("z", shape=(3, 3))
        walk = z.cumsum(axis=1) if kind == "a random walk" else z
        log_rate = walk[ROW, column]
        if kind == "records of two cells":
            log_rate = log_rate + 0.5 * z[ROW, np.maximum(column - 1, 0)]
        pm.Poisson("y", pm.math.exp(log_rate), observed=SUCCESS)
    groups = marginalize(model, "z")
    assert len(groups.rvs_to_values[groups["y"]].eval()) == 3


def test_initial_values_are_those_of_the_model():
    """Without one of ordered cut points the density is zero at the initial point."""
    ordered = pm.distributions.transforms.ordered
    with pm.Model() as model:
        cut = pm.Normal("cut", 0, 2, shape=2, transform=ordered, initval=np.array([-1.0, 1.0]))
        pm.Normal("start", initval=pt.sqrt(pm.Data("square", 0.25)))
        pm.Exponential("scale", 1, initval="prior")
        z = pm.Normal("z", shape=N_GROUPS, initval=np.ones(N_GROUPS))
        pm.OrderedLogistic("y", z[GROUP], cut, observed=GROUP % 3, compute_p=False)
    groups = marginalize(model, "z")
    expected, found = model.initial_point(7), groups.initial_point(7)
    for name in ("cut_ordered__", "start"):
        np.testing.assert_array_equal(found[name], expected[name])
    assert groups.rvs_to_initial_values[groups["scale"]] == "prior"
    assert np.isfinite(groups.compile_logp(mode=PYTHON_MODE)(found))


def test_a_nested_model():
    with pm.Model(), pm.Model("inner") as model:
        z = pm.Normal("z", shape=N_GROUPS)
        pm.Bernoulli("y", logit_p=z[GROUP], observed=SUCCESS)
    with pytest.raises(ModelError, match="nested in another"):
        marginalize(model, "inner::z")
