"""Austerity Metropolis-Hastings: the sequential test, the law, and the contract with PyMC."""

from __future__ import annotations

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from scipy import stats

from pymc_sgmcmc import AusterityMH, ModelError, Posterior
from pymc_sgmcmc.dynamics.austerity import (
    RunningMoments,
    error_probability,
    random_batches,
    sequential_test,
)
from tests.support.models import logistic_data, logistic_model, two_variable_model
from tests.support.sampling import QUIET, check_two_variables, sample

Z_BOUND = 4.5
GIVEN = {"step_size": 0.05, "preconditioner": "identity"}


# --- Rows without replacement -------------------------------------------------------------


@pytest.mark.parametrize(("n_rows", "batch_size"), [(7, 2), (9, 1), (5, 4)])
def test_rows_are_drawn_without_replacement_and_equally_likely(n_rows, batch_size):
    """Each row has each place equally often; the first half is drawn in another way."""
    rng, counts = np.random.default_rng(1), np.zeros((n_rows, n_rows))
    repeats = 2000
    for _ in range(repeats):
        batches = list(random_batches(n_rows, batch_size, rng))
        assert {len(batch) for batch in batches[:-1]} <= {batch_size}
        order = np.concatenate(batches)
        assert sorted(order) == list(range(n_rows))
        counts[np.arange(n_rows), order] += 1
    expected = repeats / n_rows
    z = (counts - expected) / np.sqrt(expected * (1 - 1 / n_rows))
    assert np.abs(z).max() < Z_BOUND


def test_moments_of_batches_are_those_of_all():
    values = 1e6 + np.random.default_rng(2).normal(size=1000)
    moments = RunningMoments()
    for batch in np.split(values, [7, 300, 301]):
        moments.add(batch)
    assert moments.count == 1000
    assert moments.mean == pytest.approx(values.mean(), rel=1e-14)
    assert moments.deviation == pytest.approx(values.std(ddof=1), rel=1e-10)


# --- The sequential test ------------------------------------------------------------------


def decisions(values, threshold, batch_size, error, repeats, seed=3):
    rng = np.random.default_rng(seed)
    return [
        sequential_test(values.__getitem__, threshold, len(values), batch_size, error, rng)
        for _ in range(repeats)
    ]


@pytest.mark.parametrize("batch_size", [5, 100, 180])
def test_a_look_is_wrong_as_often_as_stated(batch_size):
    """Where the mean is at the threshold, a look stops on each side with probability ε.

    Without the correction for a finite population the frequency would be below a third of it for
    half of the rows, and without Student's t it would be 1.3 times as large for 5 rows.
    """
    rng, error, repeats = np.random.default_rng(5), 0.1, 10_000
    wrong = 0
    for _ in range(repeats):
        values = rng.normal(size=200)
        threshold = values.mean() - 1e-9  # All rows would accept.
        moments = RunningMoments()
        moments.add(values[:batch_size])
        estimate = error_probability(moments, threshold, 200)
        wrong += estimate < error and moments.mean < threshold
    z = (wrong - error * repeats) / np.sqrt(repeats * error * (1 - error))
    assert abs(z) < Z_BOUND


@pytest.mark.parametrize("distance", [0.0, 1.0, 3.0])
def test_wrong_decisions_are_no_more_frequent_than_stated(distance):
    """At most ε at each look in all, and less where the mean is far from the threshold.

    The distance is in standard deviations of the mean of all rows.
    """
    values = np.random.default_rng(6).normal(size=2000)
    error, repeats, looks = 0.02, 800, 9
    threshold = values.mean() - max(distance, 1e-6) * values.std() / np.sqrt(len(values))
    found = decisions(values, threshold, 200, error, repeats)
    frequency = np.mean([not decision.accepted for decision in found])
    bound = looks * error
    assert frequency < bound + Z_BOUND * np.sqrt(bound / repeats)
    assert max(decision.error for decision in found) < error
    if distance == 3.0:
        assert frequency < error
        assert np.mean([decision.rows_read for decision in found]) < 1000


def test_where_all_rows_are_read_the_decision_is_exact():
    values = np.random.default_rng(6).normal(size=500)
    for shift in (-1e-9, 1e-9):
        found = decisions(values, values.mean() + shift, 100, 1e-12, 50)
        full = [decision for decision in found if decision.rows_read == 500]
        assert len(full) == 50
        assert {(decision.accepted, decision.error) for decision in full} == {(shift < 0, 0.0)}


@pytest.mark.parametrize("usual", [0.0, 0.1, np.float32(0.1)])
def test_equal_differences_do_not_stop_the_test(usual):
    """A rare row may have all of the difference. Rounding of the mean tells nothing of the rows."""
    values = np.full(1000, usual)
    values[0] = 100.0
    for batch_size in (3, 100):
        found = decisions(values, usual + 0.05, batch_size, 0.05, 40)
        assert all(decision.accepted for decision in found)


@pytest.mark.parametrize(("value", "accepted"), [(-np.inf, False), (np.nan, False), (np.inf, True)])
def test_a_row_of_density_zero_decides(value, accepted):
    values = np.ones(100)
    values[3] = value
    for error in (0.0, 1e-9):
        (decision,) = decisions(values, 0.0, 10, error, 1)
        assert decision.accepted == accepted


# --- Rows of models -----------------------------------------------------------------------


def models():
    x, y = logistic_data(40)
    x = np.ascontiguousarray(x[:, 1])
    y = y.astype("int64")

    def potential():
        data = pm.Data("x", x)
        slope = pm.Normal("slope")
        pm.Potential("likelihood", (slope * data - data**2 * slope**2).sum())
        return {"rows": ["x"]}

    def several():
        slope = pm.Normal("slope")
        pm.Normal("y", slope * x, 1.0, observed=x + y)
        pm.Poisson("z", pm.math.exp(slope * x), observed=y)
        return {}

    def categorical():
        slope = pm.Normal("slope", shape=2)
        pm.Categorical("y", logit_p=x[:, None] * slope, observed=y)
        return {}

    return {"potential": potential, "several": several, "categorical": categorical}


@pytest.mark.parametrize("name", models())
def test_differences_of_rows_are_those_of_single_rows(name):
    with pm.Model() as model:
        settings = models()[name]()
    posterior = Posterior(model, **settings)
    rng = np.random.default_rng(1)
    here, there = rng.normal(size=(2, posterior.dimension))
    rows = rng.permutation(40)[:7]
    found = posterior.row_log_density_differences(here, there, posterior.take(rows))
    single = [posterior.take(rows[[number]]) for number in range(7)]
    expected = [
        posterior.log_likelihood_and_gradient(there, row)[0]
        - posterior.log_likelihood_and_gradient(here, row)[0]
        for row in single
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)


# --- The law ------------------------------------------------------------------------------


def exact_chain(model, step, draws, seed):
    """Metropolis-Hastings on PyMC's own log density, with the same random numbers."""
    log_density = model.compile_logp()
    rng, point = np.random.default_rng(seed), model.initial_point()
    positions = []
    for _ in range(draws):
        noise = step._root @ rng.standard_normal(3)
        log_uniform = -rng.standard_exponential()
        proposal = {"beta": point["beta"] + np.sqrt(step.step_size) * noise}
        if log_uniform < log_density(proposal) - log_density(point):
            point = proposal
        positions.append(point["beta"])
    return np.array(positions)


def test_without_error_the_chain_is_exact_metropolis_hastings():
    """Bitwise, since decisions on the same random numbers are the same."""
    model = logistic_model()
    step = AusterityMH(error=0.0, batch_size=50, model=model, **GIVEN)
    step.setup_chain(np.random.default_rng(7), 0, 300)
    point, positions, accepted = model.initial_point(), [], []
    for _ in range(300):
        point, (found,) = step.step(point)
        positions.append(point["beta"])
        accepted.append(found["accepted"])
        assert (found["rows_read"], found["decision_error"]) == (400, 0.0)
    assert 0.1 < np.mean(accepted) < 0.9
    np.testing.assert_array_equal(positions, exact_chain(model, step, 300, 7))


def test_transition_probabilities_against_enumeration():
    """On two rows every decision is enumerated: the frequency of acceptance at ε = 0."""
    with pm.Model() as model:
        x = pm.Normal("x", 0.0, 1.0)
        pm.Normal("y", x, 1.0, observed=np.array([0.5, -1.5]))
    step = AusterityMH(error=0.0, step_size=1.0, preconditioner="identity", model=model)
    step.setup_chain(np.random.default_rng(4), 0, 4000)
    here, repeats = 0.3, 4000
    moved = []
    for _ in range(repeats):
        step.begun = True
        point, _ = step.step({"x": np.asarray(here)})
        moved.append(float(point["x"]))
    grid = np.linspace(-8, 8, 20_001)
    log_posterior = lambda at: -0.5 * (at**2 + (at - 0.5) ** 2 + (at + 1.5) ** 2)  # noqa: E731
    density = stats.norm.pdf(grid - here) * np.minimum(
        1, np.exp(log_posterior(grid) - log_posterior(here))
    )
    acceptance = np.trapezoid(density, grid)
    mean = np.trapezoid(density * grid, grid) + (1 - acceptance) * here
    moved = np.array(moved)
    rate = np.mean(moved != here)
    assert abs(rate - acceptance) < Z_BOUND * np.sqrt(acceptance * (1 - acceptance) / repeats)
    assert abs(moved.mean() - mean) < Z_BOUND * moved.std() / np.sqrt(repeats)


@pytest.mark.slow
def test_bias_of_the_law_is_small_at_small_errors():
    """Standard deviations against the chain that reads all rows, within Monte-Carlo error."""
    model = logistic_model(n_rows=4000)
    deviations, rows = {}, {}
    for error in (0.0, 0.001):
        step = AusterityMH(error=error, batch_size=400, model=model)
        idata = sample(model, step, draws=6000, tune=200, chains=2)
        deviations[error] = idata.posterior["beta"].values.std((0, 1))
        rows[error] = float(idata.sample_stats["rows_read"].mean())
    assert np.abs(deviations[0.001] / deviations[0.0] - 1).max() < 0.12
    assert rows[0.0] == 4000
    assert rows[0.001] < 3900


# --- Contract with PyMC -------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    return logistic_model()


def test_seeds_processes_and_statistics(model):
    step = AusterityMH(error=0.05, batch_size=50, model=model, **GIVEN)
    expected = sample(model, step)
    for cores in (1, 2):
        again = sample(model, step, cores=cores)
        np.testing.assert_array_equal(again.posterior["beta"], expected.posterior["beta"])
    found = expected.sample_stats
    assert set(found["rows_read"].values.ravel()) <= set(range(0, 401, 50))
    assert set(np.unique(found["accepted"])) <= {0.0, 1.0}
    # `pm.sample` refuses a compound step whose statistics of one name have other types.
    kind, shape = pm.Metropolis.stats_dtypes_shapes["accepted"]
    assert AusterityMH.stats_dtypes_shapes["accepted"] == (kind, shape)
    assert ((found["decision_error"] >= 0) & (found["decision_error"] < 0.05)).all()


def test_state_in_the_middle_of_a_run(model):
    step = AusterityMH(batch_size=50, model=model, **GIVEN)
    step.setup_chain(np.random.default_rng(1), 0, 20)
    point = model.initial_point()
    for _ in range(5):
        point, _ = step.step(point)
    state, again = step.sampling_state, point
    expected = [(point := step.step(point)[0])["beta"] for _ in range(10)]
    step.sampling_state = state
    resumed = [(again := step.step(again)[0])["beta"] for _ in range(10)]
    np.testing.assert_array_equal(resumed, expected)


@pytest.mark.slow
def test_compound_step():
    model = two_variable_model()
    with model:
        steps = [
            AusterityMH(["slope", "intercept"], error=0.01, batch_size=100),
            pm.Metropolis([model["sigma"]]),
        ]
        idata = sample(model, steps, draws=12_000, tune=500, chains=2)
    check_two_variables(idata)


def test_default_settings(model):
    step = AusterityMH(model=model)
    assert step.step_size == pytest.approx(2.38**2 / 3)
    assert step.batch_size == 400
    assert step.center is not None


def test_progress_bar(model, capsys):
    step = AusterityMH(batch_size=50, model=model, **GIVEN)
    with model:
        settings = {**QUIET, "progressbar": True, "quiet": False}
        pm.sample(step=step, draws=5, tune=0, chains=1, cores=1, **settings)
    shown = capsys.readouterr()
    assert "Rows" in shown.out + shown.err


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"error": 0.5}, ValueError, r"`error` should be .* in \[0, 0.5\)"),
        ({"error": -0.1}, ValueError, "`error` should be not negative"),
        ({"batch_size": 401}, ValueError, "401"),
        ({"step_size": 0.1}, ValueError, "`preconditioner`"),
        ({"step_size": lambda t: 1.0, "preconditioner": 1.0}, TypeError, "one number"),
        ({"gradient": "cv"}, TypeError, "takes no argument `gradient`"),
        ({"epsilon": 0.1}, TypeError, "`AusterityMH` takes no argument `epsilon`"),
    ],
)
def test_settings_are_checked(model, settings, error, message):
    with pytest.raises(error, match=message):
        AusterityMH(model=model, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("error", [0.0, 0.01])
def test_invalid_parameters_are_outside_of_the_support(error):
    """log p is finite at p = 1.5, but the density of a success is zero there."""
    with pm.Model() as model:
        chance = pm.Uniform("chance", 0, 2, default_transform=None, initval=0.8)
        pm.Bernoulli("y", chance, observed=np.ones(6, dtype=int))
        step = AusterityMH(error=error, step_size=0.05, preconditioner="identity", batch_size=3)
    draws = sample(model, step, draws=8_000, tune=100).posterior["chance"].values
    assert draws.max() <= 1
    exact = 7 / 8  # of a Beta(7, 1) law
    assert abs(draws.mean() - exact) < 0.01


def test_models_without_rows_are_refused():
    with pm.Model() as model:
        pm.Normal("x")
        pm.Potential("p", pt.zeros(()))
    with pytest.raises(ModelError):
        AusterityMH(model=model)
