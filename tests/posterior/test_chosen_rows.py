"""Rows that a model chooses from longer arrays have data of their own."""

from __future__ import annotations

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from pymc_sgmcmc import SGLDCV
from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.posterior import Posterior, ordinary_rows
from pymc_sgmcmc.posterior.chosen_rows import choices_of_rows, on_chosen_rows
from pymc_sgmcmc.posterior.terms import model_terms
from tests.support.row_models import CASES, GROUP, N_ROWS, X, Y
from tests.support.row_reference import agrees, close
from tests.support.sampling import QUICK, sample

x, TIMES = X[:, 0], np.exp(Y)
CENSORED = np.arange(N_ROWS) % 3 == 1
OBSERVED = np.flatnonzero(~CENSORED)


def log_rate(own=lambda name, values: values, rows=slice(None)):
    """The predictor of some rows, of arrays or `pm.Data`."""
    slope, effect = pm.Normal("slope"), pm.Normal("effect", shape=(2, 4))
    group = own("group", GROUP)
    return slope * own("x", x)[rows] ** 2 + effect[pt.as_tensor([0])[0], group[rows]]


def survival(own=lambda name, values: values):
    """The way of the PyMC example gallery."""
    shape, rate, times = pm.HalfNormal("shape"), pt.exp(log_rate(own)), own("times", TIMES)
    censored = own("censored", CENSORED)
    pm.Weibull("observed", shape, rate[~censored], observed=TIMES[~CENSORED])
    pm.Potential("late", -((times[censored] / rate[censored]) ** shape))


def with_data_variables():
    survival(pm.Data)


def all_observed():
    mean = log_rate()
    pm.Normal("observed", mean, 1.0, observed=Y)
    pm.Potential("late", -pt.exp(mean[CENSORED]))


def by_slices():
    mean = log_rate()
    pm.Normal("observed", mean[:20], pt.exp(mean[1:21]), observed=Y[:20])


def by_numbers():
    pm.Normal("observed", log_rate()[OBSERVED], 1.0, observed=Y[OBSERVED])


def products_and_effects_of_rows():
    own = pm.Normal("own", shape=N_ROWS)
    mean = X @ pm.Normal("beta", shape=X.shape[1]) + own + pm.Normal("v", shape=4)[GROUP]
    pm.Normal("observed", mean[~CENSORED], 1.0, observed=Y[~CENSORED])


def columns():
    mean = (pm.Normal("beta", shape=X.shape[1]) * X)[~CENSORED]
    pm.Normal("observed", mean, 1.0, observed=X[~CENSORED] + 0.1)


def numbers_of_numbers():
    """An array that is indexed by itself has its rows in the index alone."""
    numbers = pt.constant(np.random.default_rng(3).permutation(N_ROWS))
    mean = pm.Normal("slope") * pt.constant(x)[numbers[numbers]]
    pm.Normal("observed", mean[~CENSORED], 1.0, observed=Y[~CENSORED])


def in_another_order():
    """An index that mixes rows before some are chosen stays, with the number of the row."""
    mean = log_rate()
    mixed = mean[np.random.default_rng(3).permutation(N_ROWS)]
    pm.Normal("observed", (mixed * x)[~CENSORED], 1.0, observed=Y[~CENSORED])


def lag():
    series = pm.Data("series", Y)
    pm.Normal("observed", pm.Normal("b") * series[:-1], 1.0, observed=Y[1:])


MODELS = {
    survival: N_ROWS,
    with_data_variables: N_ROWS,
    all_observed: N_ROWS + CENSORED.sum(),
    by_slices: 20,
    by_numbers: len(OBSERVED),
    products_and_effects_of_rows: len(OBSERVED),
    columns: len(OBSERVED),
    numbers_of_numbers: len(OBSERVED),
    in_another_order: len(OBSERVED),
    lag: N_ROWS - 1,
}
"""Ways to choose rows, and how many rows each model should have."""


def model_of(write) -> pm.Model:
    with pm.Model() as model:
        write()
    return model


@pytest.mark.parametrize("write", MODELS)
def test_log_density_of_each_row_is_that_of_the_model(write):
    model = model_of(write)
    posterior = Posterior(model)
    assert posterior.n_rows == MODELS[write]
    assert not {"observed", "late"} & {term.name for term in posterior._separated.full_terms}
    agrees(model, posterior)
    position, rows = posterior.position_and_rows()
    at = np.random.default_rng(8).normal(0.0, 0.4, size=posterior.dimension)
    of_rows = posterior.single_row_log_densities(position, rows)
    arrays = dict(zip(rows, posterior.take(slice(None)), strict=True))
    found = of_rows.eval({position: at, **arrays})
    terms = model.logp(vars=[*model.observed_RVs, *model.potentials], sum=False)
    expected = model.compile_fn(terms, on_unused_input="ignore")(posterior.layout.unravel(at))
    sums = [term.reshape((len(term), -1)).sum(1) for term in expected]
    close(found, np.concatenate(sums))


def mean_over_chosen_rows():
    mean = log_rate()
    pm.Normal("observed", mean[~CENSORED], 1.0, observed=Y[~CENSORED])
    pm.Potential("late", -pt.exp(mean[CENSORED]).mean())


def lag_in_a_sum():
    b, series = pm.Normal("b"), pm.Data("series", Y)
    pm.Normal("observed", b, 1.0, observed=x)
    pm.Potential("late", pm.logp(pm.Normal.dist(b * series[:-1], 1.0), series[1:]).sum())


@pytest.mark.parametrize("write", [mean_over_chosen_rows, lag_in_a_sum])
def test_a_statistic_of_chosen_rows_is_evaluated_in_full(write):
    posterior = Posterior(model := model_of(write))
    assert "late" in {term.name for term in posterior._separated.full_terms}
    agrees(model, posterior)


def test_a_row_reads_its_own_data_alone():
    """No array of the graph is as long as what the rows are chosen from."""
    posterior = Posterior(model_of(survival))
    for term in posterior._separated.row_terms:
        assert not any(choices_of_rows(term.log_density))
    assert posterior._separated.widest_row(posterior.layout) < N_ROWS


def test_draws_are_those_of_the_model_on_chosen_data():
    def chosen():
        pm.Normal("observed", log_rate()[~CENSORED], 1.0, observed=Y[~CENSORED])

    def written_out():
        pm.Normal("observed", log_rate(rows=~CENSORED), 1.0, observed=Y[~CENSORED])

    first, second = (
        sample(model := model_of(write), SGLDCV(model=model, batch_size=8, compile_kwargs=QUICK))
        for write in (chosen, written_out)
    )
    np.testing.assert_array_equal(first["posterior"]["effect"], second["posterior"]["effect"])


@pytest.mark.parametrize("name", ["x", "group", "times", "censored"])
def test_changes_of_data_that_rows_were_chosen_from_are_seen(name):
    model = model_of(with_data_variables)
    posterior = Posterior(model)
    assert posterior.changed_data() is None
    value = model[name].get_value()
    pm.set_data({name: np.roll(value, 1)}, model=model)
    assert posterior.changed_data() == name


# --- What is refused, and what stays as it is -------------------------------------------------


def mixed_rows():
    mean = log_rate()
    mixed = mean[np.random.default_rng(3).permutation(N_ROWS)]
    pm.Normal("observed", mixed * x, 1.0, observed=Y)


def sum_of_earlier_rows():
    pm.Normal("observed", pt.cumsum(log_rate())[~CENSORED], 1.0, observed=Y[~CENSORED])


def share_of_the_chosen_rows():
    rate = pt.exp(log_rate())[~CENSORED]
    pm.Normal("observed", rate / rate.sum(), 1.0, observed=Y[~CENSORED])


def mean_of_the_others():
    mean = log_rate()
    pm.Normal("observed", mean[~CENSORED], 1.0, observed=Y[~CENSORED])
    pm.Potential("late", -pt.exp(mean[CENSORED] - mean[CENSORED].mean()))


@pytest.mark.parametrize(
    "write", [mixed_rows, sum_of_earlier_rows, share_of_the_chosen_rows, mean_of_the_others]
)
def test_rows_that_depend_on_others_are_refused(write):
    with pytest.raises(ModelError, match="is not a sum over the"):
        Posterior(model_of(write))


@pytest.mark.parametrize("write", MODELS)
def test_data_of_other_rows_are_found(write, monkeypatch):
    def shifted(graph):
        choices = choices_of_rows(graph).items()
        return {
            each: choice._replace(numbers=(choice.numbers + 1) % choice.length)
            for each, choice in choices
        }

    monkeypatch.setattr(ordinary_rows, "choices_of_rows", shifted)
    with pytest.raises(ModelError, match="is not a sum over the"):
        Posterior(model_of(write))


@pytest.mark.parametrize("name", CASES)
def test_no_rows_are_chosen_where_an_index_has_repetitions_or_parameters_alone(name):
    for term in model_terms(CASES[name].with_data()).values():
        graph = term.log_density
        assert on_chosen_rows(graph, choices_of_rows(graph), N_ROWS) is graph


def test_prior_of_some_groups_is_no_set_of_rows():
    """Groups have data, too, but rows are not chosen from these."""

    def write():
        size = np.linspace(-1.0, 1.0, 4)
        effect = pm.Normal("effect", shape=4) + pm.Normal("slope") * size
        pm.Normal("observed", effect[GROUP], 1.0, observed=Y)
        pm.Potential("known", -((effect[size > 0] - 1.0) ** 2))

    posterior = Posterior(model := model_of(write))
    assert posterior.n_rows == N_ROWS
    agrees(model, posterior)
