"""SAGA where rows select entries of variables: a table of these entries alone."""

from __future__ import annotations

import logging
import pickle

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest

from pymc_sgmcmc import SAGA, SGLD, Posterior, chain
from pymc_sgmcmc.dynamics import Langevin
from pymc_sgmcmc.engine import TransitionBlock
from pymc_sgmcmc.gradient_estimators import SAGAGradient, saga
from pymc_sgmcmc.matrices import Diagonal
from pymc_sgmcmc.posterior.selected import (
    RowGradients,
    SelectedRowGradients,
    selected_graph,
    stored_gradients,
)
from tests.support.exact_law import all_indices
from tests.support.models import logistic_model

N_ROWS, USERS, ITEMS, GROUPS = 40, 7, 9, 8
RNG = np.random.default_rng(20261125)
USER, ITEM = RNG.integers(USERS, size=N_ROWS), RNG.integers(ITEMS, size=N_ROWS)
GROUP, OTHER = RNG.integers(GROUPS, size=(2, N_ROWS))
X, Y = RNG.normal(size=(N_ROWS, 2)), RNG.normal(size=N_ROWS)
COUNTS = RNG.poisson(2, size=N_ROWS)
FAST_COMPILE = {"mode": "FAST_COMPILE"}
IDENTITY = Langevin(Diagonal(1.0), Diagonal(1.0))


# --- Models: each has a width, and names of variables with all of their entries -----------------


def factorisation():
    """Hyperpriors have no columns, since no row depends on them."""
    scale = pm.HalfNormal("scale")
    mean = pm.Normal("mean", shape=2)
    U = pm.Normal("U", mean, scale, shape=(USERS, 2))
    V = pm.Normal("V", 0, scale, shape=(ITEMS, 2))
    bias = pm.Normal("bias", shape=ITEMS)
    noise = pm.HalfNormal("noise")
    pm.Normal("y", (U[USER] * V[ITEM]).sum(-1) + bias[ITEM], noise, observed=Y)
    return 2 + 2 + 1 + 1, ["noise_log__"]


def minibatches():
    user, item, y = pm.Minibatch(USER, ITEM, Y, batch_size=10)
    U, V = pm.Normal("U", shape=(USERS, 2)), pm.Normal("V", shape=(ITEMS, 2))
    pm.Normal("y", (U[user] * V[item]).sum(-1), 1.0, observed=y, total_size=N_ROWS)
    return 2 + 2, []


def centred_intercepts_and_slopes():
    mean, scale = pm.Normal("mean"), pm.HalfNormal("scale")
    intercept = pm.Normal("intercept", mean, scale, shape=GROUPS)
    slope = pm.Normal("slope", shape=2)
    pm.Poisson("y", pt.exp(0.3 * intercept[GROUP] + 0.1 * X @ slope), observed=COUNTS)
    return 1 + 2, ["slope"]


def noncentred_intercepts():
    mean, scale = pm.Normal("mean"), pm.HalfNormal("scale")
    z = pm.Normal("z", shape=GROUPS)
    intercept = pm.Deterministic("intercept", mean + scale * z)
    pm.Normal("y", intercept[pm.Data("group", GROUP)], 1.0, observed=Y)
    return 1 + 2, ["mean", "scale_log__"]


def correlated_slopes():
    """Selected behind a product of matrices and a transposition."""
    z = pm.Normal("z", shape=(2, GROUPS))
    root = pm.Normal("root", shape=(2, 2))
    effects = pt.dot(root, z).T
    pm.Normal("y", effects[GROUP, 0] + effects[GROUP, 1] * X[:, 0], 1.0, observed=Y)
    return 2 + 4, ["root"]


def selected_along_the_second_axis():
    z = pm.Normal("z", shape=(2, GROUPS))
    root = pm.Normal("root", shape=(2, 2))
    effects = pt.dot(root, z)
    pm.Normal("y", effects[:, GROUP][0] + effects[1, GROUP] * X[:, 0], 1.0, observed=Y)
    return 2 + 4, ["root"]


def two_index_arrays():
    skill = pm.Normal("skill", shape=GROUPS)
    pm.Bernoulli("won", logit_p=skill[GROUP] - skill[OTHER], observed=(Y > 0).astype(int))
    return 1 + 1, []


def two_observed():
    intercept, scale = pm.Normal("intercept", shape=GROUPS), pm.HalfNormal("scale", shape=USERS)
    pm.Normal("y", intercept[GROUP], scale[USER], observed=Y)
    pm.Poisson("counts", pt.exp(0.1 * intercept[GROUP]) + scale[USER], observed=COUNTS)
    return 1 + 1, []


def nested_groups():
    """Groups of groups, and predictors of groups."""
    region = np.arange(GROUPS) % 4
    of_groups = np.random.default_rng(1).normal(size=(GROUPS, 2))
    of_region, z = pm.Normal("of_region", shape=4), pm.Normal("z", shape=GROUPS)
    coefficient = pm.Normal("coefficient", shape=2)
    of_group = of_region[region] + 0.5 * z + of_groups @ coefficient
    pm.Normal("y", of_group[GROUP] + of_region[region[GROUP]], 1.0, observed=Y)
    return 1 + 1 + 1 + 2, ["coefficient"]


def simplices():
    share = pm.Dirichlet("share", np.ones(3), shape=(GROUPS, 3))
    pm.Normal("y", share[GROUP, 0] - share[GROUP][:, 1], 1.0, observed=Y)
    return 2, []


def pairs_of_indices():
    effect = pm.Normal("effect", shape=(GROUPS, 3))
    pm.Normal("y", effect[GROUP, ITEM % 3], 1.0, observed=Y)
    return 3, []


def columns_of_a_matrix_from_one():
    """Indices that count from one, in one array, along the second axis."""
    effect = pm.Normal("effect", shape=(2, GROUPS))
    codes = pm.Data("codes", np.column_stack([GROUP, OTHER]) + 1)
    pm.Normal("y", effect[0][codes[:, 0] - 1] + effect[1][codes[:, 1] - 1], 1.0, observed=Y)
    return 2 + 2, []


def one_of_two():
    """A random walk is a sum of all steps before."""
    walk, intercept = pm.Normal("walk", shape=GROUPS), pm.Normal("intercept", shape=USERS)
    pm.Normal("y", walk.cumsum()[GROUP] + intercept[USER], 1.0, observed=Y)
    return 1 + GROUPS, ["walk"]


def used_whole_too():
    centred, other = pm.Normal("centred", shape=GROUPS), pm.Normal("other", shape=USERS)
    pm.Normal("y", centred[GROUP] - centred.mean() + other[USER], 1.0, observed=Y)
    return 1 + GROUPS, ["centred"]


def hyperpriors_alone():
    """Nothing is selected, but no row depends on the scale."""
    scale = pm.HalfNormal("scale")
    slope = pm.Normal("slope", 0, scale, shape=2)
    pm.Normal("y", X @ slope, 1.0, observed=Y)
    return 2, ["slope"]


def few_levels():
    """Two numbers a row of a variable that has two would save nothing."""
    level, effect = pm.Normal("level", shape=2), pm.Normal("effect", shape=GROUPS)
    pm.Normal("y", level[USER % 2] * level[ITEM % 2] + effect[GROUP], 1.0, observed=Y)
    return 1 + 2, ["level"]


def dimensions_by_name():
    """Lengths of dimensions are shared variables, which are in no type."""
    model = pm.modelcontext(None)
    for name, length in {"group": GROUPS, "user": USERS, "side": 2, "part": 3}.items():
        model.add_coord(name, np.arange(length))
    effect = pm.Normal("effect", dims=("group", "side"))
    share = pm.Dirichlet("share", np.ones(3), dims=("side", "user", "part"))
    level = pm.Normal("level", dims="group")
    expected = effect[GROUP, 0] + effect[GROUP, 1] * X[:, 0] + level[OTHER]
    pm.Normal("y", expected + share[1, :, 2][USER], 1.0, observed=Y)
    return 2 + 1 + 4, []


MODELS = [
    dimensions_by_name,
    factorisation, minibatches, centred_intercepts_and_slopes, noncentred_intercepts,
    correlated_slopes, two_index_arrays, two_observed, nested_groups, simplices, pairs_of_indices,
    columns_of_a_matrix_from_one, one_of_two, used_whole_too, selected_along_the_second_axis,
    few_levels, hyperpriors_alone,
]  # fmt: skip


def posterior_of(make):
    with pm.Model() as model:
        expected = make()
    return Posterior(model), expected


def random_position(posterior, seed=1):
    return 0.5 * np.random.default_rng(seed).normal(size=posterior.dimension)


# --- Entries of rows --------------------------------------------------------------------------


@pytest.mark.parametrize("make", MODELS)
def test_entries_are_those_of_whole_gradients(make):
    posterior, (width, whole) = posterior_of(make)
    gradients = stored_gradients(posterior)
    assert isinstance(gradients, SelectedRowGradients)
    assert gradients.width == width < posterior.dimension
    assert [variable.name for variable in selected_graph(posterior).whole] == whole

    position = random_position(posterior)
    rows = posterior.take(slice(None))
    expected = posterior.row_gradients(position, rows)
    table = gradients.at(position, rows)
    assert table.shape == (N_ROWS, width)
    for row in range(0, N_ROWS, 7):
        # All other rows are zero, so the sum is that of one row.
        alone = np.zeros_like(table)
        alone[row] = table[row]
        np.testing.assert_allclose(
            gradients.total_of_all(alone), expected[row], rtol=1e-10, atol=1e-12
        )
    np.testing.assert_allclose(
        gradients.total_of_all(table), expected.sum(0), rtol=1e-10, atol=1e-12
    )


def sum_of_rows():
    effect = pm.Normal("effect", shape=GROUPS)
    pm.Normal("y", effect[GROUP] - effect.sum(), 1.0, observed=Y)


def entries_in_reverse():
    effect = pm.Normal("effect", shape=GROUPS)
    pm.Normal("y", effect[::-1][GROUP], 1.0, observed=Y)


def first_entry_set():
    effect = pm.Normal("effect", shape=GROUPS)
    pm.Normal("y", pt.set_subtensor(effect[0], 0.0)[GROUP], 1.0, observed=Y)


def reference_level():
    effect = pm.Normal("effect", shape=GROUPS - 1)
    pm.Normal("y", pt.concatenate([[0.0], effect])[GROUP], 1.0, observed=Y)


def zero_sum():
    effect = pm.ZeroSumNormal("effect", shape=GROUPS)
    pm.Normal("y", effect[GROUP], 1.0, observed=Y)


def as_many_selected_as_there_are():
    effect = pm.Normal("effect", shape=2)
    pm.Normal("y", effect[GROUP % 2] * effect[OTHER % 2], 1.0, observed=Y)


@pytest.mark.parametrize(
    "make",
    [
        sum_of_rows,
        entries_in_reverse,
        first_entry_set,
        reference_level,
        zero_sum,
        as_many_selected_as_there_are,
    ],
)
def test_other_models_store_whole_gradients(make):
    posterior, _ = posterior_of(make)
    assert type(stored_gradients(posterior)) is RowGradients


def test_models_without_indices_store_whole_gradients():
    posterior = Posterior(logistic_model())
    assert type(stored_gradients(posterior)) is RowGradients


@pytest.mark.slow
def test_variables_of_other_step_methods_have_no_columns():
    with pm.Model() as model:
        factorisation()
    posterior = Posterior(model, [model["U"], model["scale"]])
    gradients = stored_gradients(posterior)
    assert gradients.width == 2
    posterior.set_others({**model.initial_point(), "V": RNG.normal(size=(ITEMS, 2))})
    rows = posterior.take(slice(None))
    position = random_position(posterior)
    expected = posterior.row_gradients(position, rows).sum(0)
    table = gradients.at(position, rows)
    np.testing.assert_allclose(gradients.total_of_all(table), expected, rtol=1e-10, atol=1e-12)


# --- Chains -----------------------------------------------------------------------------------


def scales_and_factors():
    """All kinds of columns: two arrays for one variable, non-centred factors, a dense scale."""
    scale, noise = pm.HalfNormal("scale"), pm.HalfNormal("noise")
    U, V = pm.Normal("U", shape=(USERS, 2)), pm.Normal("V", shape=(ITEMS, 2))
    bias = pm.Normal("bias", shape=GROUPS)
    product = ((scale * U)[USER] * V[ITEM]).sum(-1)
    pm.Normal("y", product + bias[GROUP] - 2 * bias[OTHER], noise, observed=Y)
    return 2 + 2 + 1 + 1 + 2


def differences():
    """Few operations, which Numba compiles in seconds."""
    skill = pm.Normal("skill", shape=GROUPS)
    pm.Normal("y", skill[GROUP] - skill[OTHER], 1.0, observed=Y)
    return 1 + 1


def scaled_products():
    scale, factor = pm.HalfNormal("scale"), pm.Normal("factor", shape=(GROUPS, 2))
    pm.Normal("y", scale * (factor[GROUP] * factor[OTHER]).sum(-1), 1.0, observed=Y)
    return 2 + 2 + 1


def estimator_of(posterior, batch_size, batching, whole=False):
    if not whole:
        return SAGAGradient(posterior, batch_size, batching=batching)
    gradients = RowGradients(posterior)
    return SAGAGradient(posterior, batch_size, batching=batching, gradients=gradients)


def run(estimator, mode, transitions=30, step_size=1e-3):
    posterior = estimator.posterior
    block = TransitionBlock(IDENTITY, estimator, {"mode": mode})
    position = random_position(posterior)
    estimator.memory.begin(position)
    rng = np.random.default_rng(2)
    indices = estimator.batching.draw(rng, transitions + 1)
    noise = rng.normal(size=(transitions, posterior.dimension))
    before = estimator.memory.variables[0].get_value(borrow=True)
    ran = block((position,), indices, noise, np.full(transitions, step_size))
    assert np.shares_memory(before, estimator.memory.variables[0].get_value(borrow=True))
    return ran.positions, ran.gradients


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "mode", "batching"),
    [
        (scales_and_factors, "FAST_COMPILE", "shuffle"),
        (scales_and_factors, "FAST_COMPILE", "replace"),
        (differences, "NUMBA", "replace"),
        (scaled_products, "NUMBA", "replace"),
        (scaled_products, "NUMBA", "shuffle"),
    ],
)
@pytest.mark.usefixtures("without_compiler")
def test_draws_are_those_with_whole_gradients(make, mode, batching):
    """In batches where users, items and rows come several times."""
    posterior, width = posterior_of(make)
    expected = run(estimator_of(posterior, 15, batching, whole=True), "FAST_COMPILE")
    estimator = estimator_of(posterior, 15, batching)
    actual = run(estimator, mode)
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(actual[1], expected[1], rtol=1e-8, atol=1e-8)
    table, total = estimator.memory.read()
    assert table.shape == (N_ROWS, width)
    fresh = stored_gradients(posterior).total_of_all(table)
    np.testing.assert_allclose(total, fresh, rtol=0, atol=1e-10)
    estimator.memory.settle()
    np.testing.assert_array_equal(estimator.memory.read()[1], fresh)


def test_repeated_rows_are_in_the_batches_of_this_test():
    posterior, _ = posterior_of(scales_and_factors)
    index = estimator_of(posterior, 15, "replace").batching.draw(np.random.default_rng(2), 31)
    assert all(len(set(rows)) < 15 for rows in index)


@pytest.mark.parametrize("batching", ["shuffle", "replace"])
@pytest.mark.usefixtures("without_compiler")
def test_unbiased_whatever_is_stored(batching):
    """The mean over all minibatches is the gradient, with a table of random numbers."""
    codes, y = np.array([0, 2, 1, 2]), Y[:4]
    with pm.Model() as model:
        scale, z = pm.HalfNormal("scale"), pm.Normal("z", shape=(3, 2))
        effect = (scale * z)[codes]
        pm.Normal("y", effect[:, 0] * effect[:, 1], 1.0, observed=y)
    posterior = Posterior(model)
    estimator = SAGAGradient(posterior, 2, batching=batching)
    (table, _) = estimator.memory.variables
    assert table.type.shape[1] == 3 < posterior.dimension
    estimator.memory.write((np.random.default_rng(4).normal(size=(4, 3)),))
    position, index = pt.vector("position"), estimator.batching.index_variable("index")[0].type()
    function = pytensor.function([position, index], estimator(position, index), **FAST_COMPILE)
    at = random_position(posterior)
    estimates = [function(at, each) for each in all_indices(estimator.batching)]
    assert np.std(estimates, axis=0).min() > 0
    np.testing.assert_allclose(np.mean(estimates, axis=0), posterior.gradient(at), rtol=1e-10)


@pytest.mark.usefixtures("without_compiler")
def test_a_state_resumes_where_it_was_read(monkeypatch):
    monkeypatch.setattr(chain, "EPOCHS_BETWEEN_SHUFFLES", 1)
    with pm.Model() as model:
        scales_and_factors()

    def fresh():
        step = SGLD(
            model=model, gradient=SAGA(batching="shuffle"), batch_size=15, step_size=1e-3, thin=3,
            preconditioner="identity", compile_kwargs=FAST_COMPILE,
        )  # fmt: skip
        step.setup_chain(np.random.default_rng(5), 10, 30)
        return step

    def walk(step, point, count):
        draws = []
        for _ in range(count):
            point, stats = step.step(point)
            draws.append(stats[0]["gradient"])
        return point, draws

    step = fresh()
    point, _ = walk(step, model.initial_point(), 5)
    state = pickle.loads(pickle.dumps(step.sampling_state))
    _, expected = walk(step, point, 12)
    other = fresh()
    walk(other, model.initial_point(), 2)
    other.sampling_state = state
    np.testing.assert_array_equal(walk(other, point, 12)[1], expected)


def test_float32_keeps_the_sum_in_double_precision():
    with pytensor.config.change_flags(floatX="float32"):
        posterior, width = posterior_of(scales_and_factors)
        estimator = SAGAGradient(posterior, 15)
        estimator.memory.begin(random_position(posterior))
        table, total = estimator.memory.read()
    assert table.dtype == np.float32
    assert table.shape == (N_ROWS, width)
    assert total.dtype == np.float64
    expected = stored_gradients(posterior).total_of_all(table)
    np.testing.assert_array_equal(total, expected)
    assert np.any(total != total.astype(np.float32))


# --- Limits -----------------------------------------------------------------------------------


def test_memory_is_that_of_the_table(monkeypatch, caplog):
    posterior, (width, _) = posterior_of(factorisation)
    size = N_ROWS * width * 8
    monkeypatch.setattr(saga, "free_memory", lambda: 2 * size - 1)
    with pytest.raises(MemoryError, match=rf"stores {width} numbers for each of {N_ROWS} rows"):
        SAGAGradient(posterior, 10)
    monkeypatch.setattr(saga, "free_memory", lambda: 2 * size)
    with caplog.at_level(logging.INFO, logger="pymc.sgmcmc"):
        SAGAGradient(posterior, 10)
    assert f"SAGA: {size / 1e6:.3g} MB" in caplog.text
