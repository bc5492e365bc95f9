"""The check of the split finds errors that would otherwise be silent."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from pytensor.graph.traversal import ancestors

from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.posterior import Posterior, check, parts
from pymc_sgmcmc.posterior.check import check_separation, infinite_entries
from pymc_sgmcmc.posterior.position import layout_from_model
from pymc_sgmcmc.posterior.rows import SeparatedModel, Term
from pymc_sgmcmc.posterior.separation import separate_rows
from tests.support.row_models import CASES, N_ROWS, X, Y


def checked(model: pm.Model, separated: SeparatedModel) -> SeparatedModel:
    point = model.initial_point()
    layout = layout_from_model(model, None, point)
    return check_separation(model, separated, layout, {}, layout.ravel(point))


def scaled(term: Term, factor: float) -> Term:
    return Term(term.name, term.log_density * factor)


@pytest.mark.parametrize("way", ["ordinary", "with_data", "minibatch"])
def test_passes_and_returns_the_split(way):
    model = getattr(CASES["two_observed"], way)()
    separated = separate_rows(model)
    assert checked(model, separated) is separated


@pytest.mark.parametrize("way", ["ordinary", "with_data", "minibatch"])
def test_finds_an_array_that_was_missed(way):
    model = getattr(CASES["two_observed"], way)()
    separated = separate_rows(model)
    for leaf in separated.leaves:
        others = tuple(other for other in separated.leaves if other is not leaf)
        # An array that stands in the second likelihood alone breaks that one.
        name = "count" if leaf.name.startswith("count") else "y"
        with pytest.raises(ModelError, match=f"`{name}` is not a sum"):
            checked(model, replace(separated, leaves=others))


@pytest.mark.parametrize("name", ["predicts_itself", "two_observed"])
def test_finds_a_twin_that_was_missed(name):
    """One `pm.Minibatch` call is several nodes of the graph, and one of them is not replaced."""
    model = CASES[name].minibatch()
    separated = separate_rows(model)
    in_use = set(ancestors([term.log_density for term in separated.row_terms]))
    missed = 0
    for leaf in separated.leaves:
        twins = [variable for variable in leaf.variables if variable in in_use]
        for twin in twins:
            others = tuple(variable for variable in leaf.variables if variable is not twin)
            without = replace(leaf, variables=others)
            leaves = tuple(without if other is leaf else other for other in separated.leaves)
            with pytest.raises(ModelError, match="is not a sum"):
                checked(model, replace(separated, leaves=leaves))
            missed += len(twins) > 1
    assert missed >= 2


def test_finds_arrays_with_rows_in_another_order():
    """Where two arrays have different orders, sums over parts agree and all rows do not."""
    model = CASES["linear"].ordinary()
    separated = separate_rows(model)
    first, *others = separated.leaves
    shifted = replace(first, values=np.roll(first.values, 1, axis=0))
    with pytest.raises(ModelError, match=r"`y` is not a sum.*do not add up to the log density"):
        checked(model, replace(separated, leaves=(shifted, *others)))


@pytest.mark.parametrize("way", ["ordinary", "minibatch"])
@pytest.mark.parametrize("factor", [1.001, 37 / 11])
def test_finds_a_wrong_weight(way, factor):
    model = getattr(CASES["linear"], way)()
    separated = separate_rows(model)
    likelihood = tuple(scaled(term, factor) for term in separated.row_terms)
    with pytest.raises(ModelError, match=r"`y` is not a sum.*do not add up"):
        checked(model, replace(separated, row_terms=likelihood))
    prior = tuple(scaled(term, factor) for term in separated.full_terms)
    with pytest.raises(ModelError, match="`beta`, `intercept`, `sigma` change when the model is"):
        checked(model, replace(separated, full_terms=prior))


def test_finds_an_error_that_only_the_gradient_shows():
    model = CASES["linear"].ordinary()
    separated = separate_rows(model)
    (term,) = separated.row_terms
    value = model.rvs_to_values[model["intercept"]]
    # No change at the position of the check, only next to it.
    point = model.initial_point()
    layout = layout_from_model(model, None, point)
    noise = np.random.default_rng(check.SEED).normal(size=layout.dimension)
    at = (layout.ravel(point) + 0.3 * noise)[3]
    wrong = Term("y", term.log_density + 0.01 * (value - at))
    with pytest.raises(ModelError, match="`y` is not a sum"):
        checked(model, replace(separated, row_terms=(wrong,)))


@pytest.mark.parametrize("way", ["ordinary", "minibatch"])
def test_finds_a_term_that_was_left_out(way):
    model = getattr(CASES["hierarchical_non_centred"], way)()
    separated = separate_rows(model)
    with pytest.raises(ModelError, match="change when the model is split"):
        checked(model, replace(separated, full_terms=separated.full_terms[1:]))
    both = (*separated.row_terms, *separated.full_terms[:1])
    with pytest.raises(ModelError, match="`mu` is not a sum"):
        checked(model, replace(separated, full_terms=separated.full_terms[1:], row_terms=both))


DOSES = np.repeat([0.0, 1.0, 2.0, 4.0], [4000, 3000, 2997, 3])
"""A column whose largest value is that of three rows."""
OF_ALL_ROWS = {
    "max": lambda x: x / x.max(),
    "min": lambda x: -x - (-x).min(),
    "mean": lambda x: x - (x > 2).mean(),
    "sd": lambda x: x / (1 + (x > 2).std()),
    "any": lambda x: pt.any(x > 3) + 0 * x,
    "none": lambda x: x,
}
"""Predictors whose values in one row depend on others, the last one excepted."""


@pytest.mark.parametrize("name", OF_ALL_ROWS)
def test_statistics_of_columns_that_few_rows_decide(name, rng):
    """In nearly all minibatches these rows are missing."""
    order = rng.permutation(len(DOSES))
    with pm.Model() as model:
        predictor = OF_ALL_ROWS[name](pm.Data("x", DOSES[order]))
        pm.Normal("y", pm.Normal("b") * predictor, 1.0, observed=rng.normal(size=len(DOSES)))
    if name == "none":
        Posterior(model)
        return
    with pytest.raises(ModelError, match="`y` is not a sum over the 10000 rows of `x`"):
        Posterior(model)


def test_means_of_many_groups(rng):
    """Few random rows hardly have two of a group."""
    codes = rng.integers(1000, size=10_000)
    with pm.Model() as model:
        x, groups = pm.Data("x", rng.normal(size=10_000)), pm.Data("groups", codes)
        sums, counts = (pt.zeros(1000)[groups].inc(value) for value in (x, pt.ones_like(x)))
        mean = (sums / pt.maximum(counts, 1))[groups]
        pm.Normal("y", pm.Normal("b") * (x - mean), 1.0, observed=rng.normal(size=10_000))
    with pytest.raises(ModelError, match="two parts of the rows do not add up to all of them"):
        Posterior(model)


def test_a_rare_column_that_dominates(rng):
    """Its derivative hides the others by its rounding error, but near the initial point."""
    flags, x = np.zeros(10_000), rng.normal(size=10_000)
    flags[[100, 5000, 9000]] = -100
    with pm.Model() as model:
        a, b, c, e = (pm.Normal(name) for name in "abce")
        column, predictor = pm.Data("flags", flags), pm.Data("x", x)
        of_all = predictor * (-column).max() / 100
        rate = pt.exp(a + b * predictor + c * column + e * of_all)
        pm.Poisson("y", rate, observed=rng.poisson(2, 10_000))
    with pytest.raises(ModelError, match="`y` is not a sum"):
        Posterior(model)


def logit_normal():
    rng = np.random.default_rng(1)
    values = rng.uniform(0.1, 0.9, 200)
    values[rng.random(200) < 0.3] = 1 - 1e-15
    pm.LogitNormal("y", pm.Normal("a"), pm.HalfNormal("b"), observed=values)


def opposite_outliers():
    y = np.random.default_rng(0).normal(size=3000)
    y[[7, 9]] = 1e10, -1e10
    pm.Normal("y", pm.Normal("a"), 1.0, observed=y)


def no_columns():
    X = pm.Data("X", np.zeros((300, 0)))
    y = np.zeros(300)
    pm.Normal("y", pm.Normal("a") + X @ pm.Normal("b", shape=0), 1.0, observed=y)


@pytest.mark.parametrize("write", [logit_normal, opposite_outliers, no_columns])
def test_rounding_and_shapes_are_no_reason(write):
    with pm.Model() as model:
        write()
    Posterior(model)


def test_rows_that_decide_are_looked_for(monkeypatch):
    """With random rows alone the models above would pass."""
    flags = np.zeros((5000, 3))
    flags[4321, 1] = flags[17, 2] = 1
    for elements in (parts.BLOCK_ELEMENTS, 1000, 2):
        monkeypatch.setattr(parts, "BLOCK_ELEMENTS", elements)
        assert parts.rows_that_differ([flags], [3, 5]).tolist() == [3, 5, 17, 4321]
        assert {17, 4321} <= {*parts.extreme_rows([flags])}


def test_looks_inside_the_support():
    """Far from the initial point the density is zero for any split."""
    with pm.Model() as model:
        b = pm.Normal("b", initval=1e-4)
        y = pm.Data("Y", np.linspace(-1e-3, 1e-3, N_ROWS))
        inside = -((y - b).mean() ** 2)
        pm.Potential("p", pt.switch(pt.abs(b) < 1e-2, inside, -np.inf))
    with pytest.raises(ModelError, match="`p` is not a sum"):
        Posterior(model, rows="Y")


def test_values_outside_the_support_alone_are_no_reason():
    with pm.Model() as model:
        pm.Uniform("y", 0, pm.Normal("top", initval=3.0), observed=np.linspace(0.1, 2.9, N_ROWS))
    posterior = Posterior(model)
    assert np.isneginf(posterior.log_density(np.array([1.0])))
    assert np.isfinite(posterior.log_density(np.array([4.0])))


def test_large_data_are_compared_in_part(monkeypatch):
    """Above the limit nothing is evaluated on all rows. Dependent rows are still found."""
    monkeypatch.setattr(check, "FULL_CHECK_ELEMENTS", 100)
    model = CASES["linear"].ordinary()
    lengths = []
    original = check._Setting.take
    monkeypatch.setattr(
        check._Setting,
        "take",
        lambda setting, chosen: (
            lengths.append(len(setting.separated.leaves[0].values[chosen]))
            or original(setting, chosen)
        ),
    )
    Posterior(model)
    assert max(lengths) == parts.FEW_ROWS
    with pm.Model() as dependent:
        pm.Normal("y", pt.cumsum(pm.Normal("b") * pm.Data("x", X[:, 0])), 1.0, observed=Y)
    with pytest.raises(ModelError, match="`y` is not a sum"):
        Posterior(dependent)


def test_width_counts_for_the_limit(monkeypatch):
    with pm.Model() as model:
        W = pm.Normal("W", shape=(3, 90))
        pm.Categorical("y", logit_p=X @ W, observed=np.arange(N_ROWS))
    rows = N_ROWS * 90
    for limit, compared in ((rows, True), (rows - 1, False)):
        monkeypatch.setattr(check, "FULL_CHECK_ELEMENTS", limit)
        separated = separate_rows(model)
        layout = layout_from_model(model, None, model.initial_point())
        assert check._Setting(separated, layout, {}, None, None).compare_rows is compared


def test_can_be_left_out():
    with pm.Model() as dependent:
        pm.Normal("y", pt.cumsum(pm.Normal("b") * pm.Data("x", X[:, 0])), 1.0, observed=Y)
    assert Posterior(dependent, check=False).n_rows == N_ROWS


@pytest.mark.parametrize("row", [0, 5, 36])
def test_first_row_that_is_not_finite(row):
    separated = separate_rows(CASES["linear"].ordinary())
    leaf = separated.leaves[0]
    values = leaf.values.copy()
    values[row:, -1] = np.nan
    with pytest.raises(ModelError, match=f"row {row}"):
        infinite_entries(replace(separated, leaves=(replace(leaf, values=values),)))
    values = np.where(np.isnan(values), np.inf, values)
    infinite = replace(leaf, values=values)
    assert infinite_entries(replace(separated, leaves=(infinite,))) == {leaf.name: (row, row)}
    integers = replace(leaf, values=np.zeros((N_ROWS, 2), dtype=int))
    assert not infinite_entries(replace(separated, leaves=(integers,)))


def beside_a_raw_column(statistic, outcomes):
    """A statistic of a whole column in the model, beside a predictor of large numbers."""
    rng = np.random.default_rng(71)
    n = 5000
    inhabitants = rng.lognormal(15, 1, size=n)
    with pm.Model() as model:
        x = pm.Data("x", rng.lognormal(0, 1.5, size=n))
        a, b, c = (pm.Normal(name) for name in "abc")
        predictor = a + b * inhabitants + c * statistic(x)
        if outcomes == "normal":
            pm.Normal("y", predictor, 1, observed=rng.normal(size=n))
        elif outcomes == "counts":
            pm.Poisson("y", pm.math.exp(predictor), observed=rng.poisson(1, size=n))
        else:
            pm.Bernoulli("y", logit_p=predictor, observed=rng.integers(2, size=n))
    return model


@pytest.mark.parametrize("outcomes", ["normal", "binary"])
@pytest.mark.parametrize(
    "statistic",
    [lambda x: 10 * x / x.max(), lambda x: (x - x.mean()) / x.std(), lambda x: x.cumsum()],
    ids=["maximum", "mean and sd", "sums"],
)
def test_statistics_of_a_column_are_found_beside_a_raw_one(statistic, outcomes):
    with pytest.raises(ModelError, match="not a sum over the 5000 rows"):
        Posterior(beside_a_raw_column(statistic, outcomes))


def test_a_density_that_is_infinite_at_first_is_looked_at_nearer_to_the_initial_point():
    with pytest.raises(ModelError, match="not a sum over the 5000 rows"):
        Posterior(beside_a_raw_column(lambda x: (x - x.mean()) / x.std(), "counts"))


@pytest.mark.parametrize("outcomes", ["normal", "counts", "binary"])
def test_a_raw_column_alone_passes(outcomes):
    assert Posterior(beside_a_raw_column(lambda x: x, outcomes)).n_rows == 5000
