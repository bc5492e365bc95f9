"""Separation of rows, and models that are refused with a reason."""

from __future__ import annotations

import warnings

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
from pymc.exceptions import ImputationWarning
from pytensor.graph.traversal import toposort
from pytensor.sparse import structured_dot
from scipy import sparse

from pymc_sgmcmc import marginalize
from pymc_sgmcmc.compiling.large_constants import FEWEST_NUMBERS
from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.posterior.separation import separate_rows
from tests.support.row_models import CASES, GROUP, N_ROWS, X, Y
from tests.support.row_reference import agrees, close

x = X[:, 0]


def refused(write, match: str, **settings) -> None:
    """Check that the model is refused with this message when the posterior is made."""
    with pm.Model() as model:
        write()
    with pytest.raises(ModelError, match=match):
        Posterior(model, **settings)


def minibatch(*arrays, batch_size=5):
    return pm.Minibatch(*arrays, batch_size=batch_size)


# --- What is found ----------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["ordinary", "with_data", "minibatch"])
def test_terms_and_arrays(way):
    separated = separate_rows(getattr(CASES["two_observed"], way)())
    assert [term.name for term in separated.full_terms] == ["beta"]
    assert [term.name for term in separated.row_terms] == ["y", "count"]
    assert separated.n_rows == N_ROWS
    assert separated.batch_size == (11 if way == "minibatch" else None)
    assert {leaf.values.shape for leaf in separated.leaves} == {(N_ROWS,), (N_ROWS, 3)}
    assert all(len(leaf.values) == N_ROWS for leaf in separated.leaves)


def test_names_of_arrays():
    names = {
        "ordinary": {"array of shape (37, 3) in y", "y", "count"},
        "with_data": {"X_data", "y_data", "count_data"},
        "minibatch": {"array 0 of pm.Minibatch", "y", "count"},
    }
    for way, expected in names.items():
        separated = separate_rows(getattr(CASES["two_observed"], way)())
        assert {leaf.name for leaf in separated.leaves} == expected


def test_arguments_of_minibatch_that_are_not_used():
    with pm.Model() as model:
        drawn, _, y = minibatch(x, X, Y)
        pm.Normal("y", pm.Normal("b") * drawn, 1.0, observed=y, total_size=N_ROWS)
    assert len(separate_rows(model).leaves) == 2


def test_data_variables_in_minibatch_keep_their_names():
    with pm.Model() as model:
        drawn, y = minibatch(pm.Data("x", x), pm.Data("outcome", Y))
        pm.Normal("y", pm.Normal("b") * drawn, 1.0, observed=y, total_size=N_ROWS)
    assert Posterior(model).data_names == ("x", "outcome")


# --- rows= ------------------------------------------------------------------------------------


def group_table() -> pm.Model:
    """A table by group that has by chance as many entries as there are rows."""
    with pm.Model(coords={"obs": range(N_ROWS)}) as model:
        table = pm.Data("table", np.linspace(-1, 1, N_ROWS))
        group = pm.Data("group", GROUP, dims="obs")
        b = pm.Normal("b")
        mu = b * table[group] + pm.Data("x", x, dims="obs")
        pm.Normal("y", mu, 1.0, observed=Y, dims="obs")
    return model


@pytest.mark.parametrize(
    "rows", [["y", "group", "x"], ["group", "x"], ("x", "group", "y"), "obs", ["obs", "y"]]
)
def test_rows_name_the_data_that_run_over_them(rows):
    with pytest.raises(ModelError, match=r"`y` is not a sum over the 37 rows.*`table`.*rows=\["):
        Posterior(group_table())
    posterior = Posterior(group_table(), rows=rows)
    assert set(posterior.data_names) == {"y", "group", "x"}
    agrees(group_table(), posterior)


def test_rows_of_the_observed_variable_include_its_data():
    with pm.Model() as model:
        predictor = pm.Normal("b") * pm.Data("x", x)
        pm.Normal("y", predictor, 1.0, observed=pm.Data("outcome", Y))
    posterior = Posterior(model, rows=["y", "x"])
    assert set(posterior.data_names) == {"x", "outcome"}
    agrees(model, posterior)


def test_rows_choose_among_observed_variables():
    with pm.Model() as model:
        b = pm.Normal("b")
        pm.Normal("y", b * x, 1.0, observed=Y)
        pm.Normal("short", b, 1.0, observed=Y[:9])
    for rows in ("short", ["short"]):
        posterior = Posterior(model, rows=rows)
        assert posterior.n_rows == 9
        agrees(model, posterior)


def test_rows_of_a_likelihood_written_as_potential():
    def write():
        b, weight, y = pm.Normal("b"), pm.Data("weight", x**2), pm.Data("Y", Y)
        pm.Potential("weighted", (weight * pm.logp(pm.Normal.dist(b, 1.0), y)).sum())

    refused(write, r"No observed variable .* If a potential is the likelihood, .* `rows=\[\"X\"\]`")
    with pm.Model() as model:
        write()
    posterior = Posterior(model, rows=["Y", "weight"])
    assert set(posterior.data_names) == {"Y", "weight"}
    agrees(model, posterior)
    at = np.array([0.3])
    close(posterior.gradient(at), np.sum(x**2 * (Y - at)) - at)


def test_rows_refused():
    model = group_table()
    with pytest.raises(ModelError, match=r"`rows` names `z`.*\['y'\].*\['group', 'table', 'x'\]"):
        Posterior(model, rows="z")
    with pytest.raises(ModelError, match="no observed variable"):
        Posterior(model, rows=["y", "b"])
    with pytest.raises(ModelError, match=r"`rows` should name .* but is \[\]"):
        Posterior(model, rows=[])
    minibatched = CASES["linear"].minibatch()
    with pytest.raises(ModelError, match=r"`rows` is for ordinary models.*Leave `rows` out"):
        Posterior(minibatched, rows="y")
    with pm.Model() as mixed:
        pm.Normal("y", pm.Normal("b") * pm.Data("x", x)[:9], 1.0, observed=Y[:9])
    with pytest.raises(ModelError, match=r"names `x`, which has 37 rows, but no observed"):
        Posterior(mixed, rows=["y", "x"])


# --- Models without rows ----------------------------------------------------------------------


def test_nothing_observed():
    refused(lambda: pm.Normal("b"), "no observed variables.*NUTS")


def test_only_scalars_observed():
    refused(lambda: pm.Normal("y", pm.Normal("b"), 1.0, observed=1.5), "No observed variable has")


def test_labelled_tensors():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an experimental interface
        import pymc.dims as pmd

    with pm.Model(coords={"obs": range(N_ROWS)}) as model:
        y = pmd.Data("Y", Y, dims="obs")
        pmd.Normal("y", pmd.Normal("b"), 1.0, observed=y)
    with pytest.raises(ModelError, match=r"`b` is a XTensor.*`pymc.dims`.* not supported"):
        Posterior(model)


def test_one_row():
    refused(
        lambda: pm.Normal("y", pm.Normal("b"), 1.0, observed=Y[:1]),
        r"`y` should have at least 2 rows .* has 1, since its shape is \(1,\).*NUTS",
    )


def test_no_rows():
    refused(
        lambda: pm.Normal("y", pm.Normal("b"), 1.0, observed=Y[:0]),
        r"`y` should have at least 2 rows .* has 0, since its shape is \(0,\).*NUTS",
    )


def test_rows_on_the_second_axis():
    refused(
        lambda: pm.Normal("y", pm.Normal("b") * x, 1.0, observed=Y[None]),
        r"`y` should have .* has 1, since its shape is \(1, 37\).*Transpose the data",
    )


def test_nothing_free():
    refused(lambda: pm.Normal("y", 0.0, 1.0, observed=Y), "no free random variables")


# --- Rows that do not fit together ------------------------------------------------------------


@pytest.mark.parametrize("container", [lambda name, values: values, pm.Data])
def test_predictors_of_another_length(container):
    def write():
        design = container("X", np.ones((N_ROWS - 1, 2)))
        beta = pm.Normal("beta", shape=2)
        pm.Normal("y", pm.math.dot(design, beta), 1.0, observed=container("outcome", Y))

    named = "`X`" if container is pm.Data else "an array"
    refused(
        write,
        rf"`y` has shape \(37,\), but .* shape \(36,\), from {named} of shape \(36, 2\)\.",
    )


def test_outcomes_that_are_a_column():
    refused(
        lambda: pm.Normal("y", pm.Normal("b") * x, 1.0, observed=Y[:, None]),
        r"`y` has shape \(37, 1\), .* shape \(37,\), which broadcast to 37 × 37 .*`y\[:, 0\]`",
    )


def test_minibatches_of_different_lengths():
    def write():
        b = pm.Normal("b")
        drawn, y = minibatch(x, Y)
        pm.Normal("y", b * drawn, 1.0, observed=y, total_size=N_ROWS)
        pm.Normal("z", b, 1.0, observed=minibatch(Y[:9]), total_size=9)

    refused(write, r"different numbers of rows.*`z` of shape \(9,\).*give the other data in full")


def test_one_minibatch_call_with_different_lengths():
    def write():
        drawn, y = minibatch(x[:9], Y)
        pm.Normal("y", pm.Normal("b") * drawn, 1.0, observed=y, total_size=N_ROWS)

    refused(write, r"different numbers of rows.*\(9,\).*`y` of shape \(37,\)")


def test_separate_minibatch_calls():
    def write():
        drawn, y = minibatch(x), minibatch(Y)
        pm.Normal("y", pm.Normal("b") * drawn, 1.0, observed=y, total_size=N_ROWS)

    refused(write, r"2 separate `pm.Minibatch` calls.*`y`.*single call: `X_batch, y_batch =")


def test_batch_larger_than_the_data():
    def write():
        drawn, y = minibatch(x, Y, batch_size=50)
        pm.Normal("y", pm.Normal("b") * drawn, 1.0, observed=y, total_size=N_ROWS)

    refused(write, "between 1 and 37 rows.* but draws 50")


def test_missing_values_of_the_outcome():
    def write():
        y = Y.copy()
        y[3] = np.nan
        with pytest.warns(ImputationWarning):
            pm.Normal("y", pm.Normal("b") * x, 1.0, observed=y)

    refused(write, r"`y` has missing values.*`y_unobserved`.*Drop these rows")


def test_missing_values_of_a_count():
    """PyMC makes a discrete variable of them, which is not what is wrong."""

    def write():
        y = np.ma.masked_array(np.abs(Y).round().astype(int), np.arange(N_ROWS) == 3)
        with pytest.warns(ImputationWarning):
            pm.Poisson("y", pm.math.exp(pm.Normal("b") * x), observed=y)

    refused(write, r"`y` has missing values.*`y_unobserved`.*Drop these rows")


def test_data_set_for_a_prediction():
    def write():
        drawn = pm.Data("drawn", x)
        rate = pm.math.exp(pm.Normal("b") * drawn)
        pm.ZeroInflatedPoisson("y", 0.7, rate, observed=np.abs(Y).round())
        pm.set_data({"drawn": x[:10]})

    shapes = rf"`y` \({N_ROWS},\), `drawn` \(10,\)"
    refused(write, rf"`y` cannot be evaluated .* shapes {shapes}.*set the data back")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_data_that_are_not_finite(value):
    bad = X.copy()
    bad[7, 1] = value

    def constant():
        pm.Normal("y", bad @ pm.Normal("b", shape=3), 1.0, observed=Y)

    refused(constant, r"`array of shape \(37, 3\) in y` .* NaN or infinite.* row 7")

    def drawn():
        design, y = minibatch(bad, Y)
        pm.Normal("y", design @ pm.Normal("b", shape=3), 1.0, observed=y, total_size=N_ROWS)

    refused(drawn, r"`array 0 of pm.Minibatch` .* NaN or infinite.* row 7")

    def drawn_outcome():
        pm.Normal("y", pm.Normal("b"), 1.0, observed=minibatch(bad[:, 1]), total_size=N_ROWS)

    refused(drawn_outcome, r"`y` .* NaN or infinite.* row 7")


def test_infinite_data_variable():
    bad = x.copy()
    bad[2] = -np.inf

    def write():
        pm.Normal("y", pm.Normal("b") * pm.Data("dose", bad), 1.0, observed=Y)

    refused(write, r"`dose` .* NaN or infinite.* row 2.*drop or impute")


# --- total_size -------------------------------------------------------------------------------


def drawn_model(**total):
    drawn, y = minibatch(x, Y)
    pm.Normal("y", pm.Normal("b") * drawn, 1.0, observed=y, **total)


@pytest.mark.filterwarnings("ignore:total_size not provided")
def test_total_size_is_missing():
    refused(drawn_model, "`y` uses minibatched data but has no `total_size`.*`total_size=37`")
    refused(
        lambda: drawn_model(total_size=[None]), "`y` uses minibatched data but has no `total_size`"
    )


@pytest.mark.parametrize("wrong", [1000, 5, 36, [1000]])
def test_total_size_is_wrong(wrong):
    refused(lambda: drawn_model(total_size=wrong), r"`y` has total_size=.*scaled by.*size=37`\.")


def test_total_size_of_one_of_two():
    def write():
        b = pm.Normal("b")
        drawn, y, z = minibatch(x, Y, X[:, 1])
        pm.Normal("y", b * drawn, 1.0, observed=y, total_size=N_ROWS)
        pm.Normal("z", b, 1.0, observed=z, total_size=100)

    refused(write, r"`z` has total_size=\[100\]")


def test_total_size_of_other_axes():
    def write(total_size):
        drawn, design = minibatch(x, X)
        mu = pm.Normal("b") * drawn[:, None]
        pm.Normal("y", mu, 1.0, observed=design, total_size=total_size)

    refused(lambda: write([N_ROWS, 30]), r"\[37, 30\].*only the leading axis")
    for total_size in ([N_ROWS, 3], [N_ROWS, ...], [N_ROWS, None], N_ROWS):
        with pm.Model():
            write(total_size)
            posterior = Posterior()
        at = np.array([0.2])
        close(posterior.gradient(at), np.sum(x[:, None] * (X - 0.2 * x[:, None])) - at)


def test_total_size_of_an_ordinary_model():
    def write():
        pm.Normal("y", pm.Normal("b") * x, 1.0, observed=Y, total_size=1000)

    refused(write, r"`y` has total_size=\[1000\].*scaled by 27.*`total_size=37`, or leave it out")

    def not_drawn():
        drawn_model(total_size=N_ROWS)
        pm.Normal("z", 0.0, 1.0, observed=Y[:9], total_size=100)

    refused(not_drawn, r"`z` has total_size=\[100\].*scaled by 11.*`total_size=9`, or leave it out")


# --- What may not depend on minibatches -------------------------------------------------------


def test_minibatched_potential():
    def write():
        drawn, y = minibatch(x, Y)
        b = pm.Normal("b")
        pm.Normal("y", b * drawn, 1.0, observed=y, total_size=N_ROWS)
        pm.Potential("penalty", -(b * drawn).sum())

    refused(write, r"potential `penalty` .*not scale potentials.*`total_size`.*`batch_size`")


def test_prior_on_minibatched_data():
    def write():
        drawn, y = minibatch(x, Y)
        pm.Normal("y", pm.Normal("b", drawn.mean()), 1.0, observed=y, total_size=N_ROWS)

    refused(write, r"prior of the free variable `b` depends on minibatched data")


# --- Rows that depend on each other -----------------------------------------------------------


def lag_by_concatenation():
    series = pm.Data("series", Y)
    lagged = pt.concatenate([[0.0], series[:-1]])
    pm.Normal("y", pm.Normal("b") * lagged, 1.0, observed=Y)


def autoregression():
    start = pm.Normal.dist(0.0, 1.0)
    pm.AR("y", pm.Normal("b"), sigma=1.0, init_dist=start, observed=Y)


def random_walk():
    start = pm.Normal.dist(0.0, 1.0)
    pm.GaussianRandomWalk("y", sigma=pm.HalfNormal("s"), init_dist=start, observed=Y)


def gaussian_process():
    kernel = pm.gp.cov.ExpQuad(1, pm.HalfNormal("length"))
    pm.gp.Marginal(cov_func=kernel).marginal_likelihood("y", X=X[:, :1], y=Y, sigma=0.5)


def correlated_errors():
    pm.MvNormal("y", pm.Normal("b") * x, cov=np.eye(N_ROWS) + 0.1, observed=Y)


def test_what_is_computed_of_constants_is_computed_once():
    """The basis of a Gaussian process is a column of data, so that no transition computes it."""
    with pm.Model() as model:
        process = pm.gp.HSGP(m=[3], c=1.5, cov_func=pm.gp.cov.Matern52(1, ls=pm.HalfNormal("s")))
        basis, scales = process.prior_linearized(X[:, :1])
        pm.Normal("y", basis @ (pm.Normal("b", shape=3) * scales), 1.0, observed=Y)
    posterior = Posterior(model)
    position, rows = posterior.position_and_rows()
    nodes = toposort([posterior.single_row_log_densities(position, rows)])
    assert pt.sin not in {node.op for node in nodes}


def cumulative_sum():
    pm.Normal("y", pt.cumsum(pm.Normal("b") * pm.Data("x", x)), 1.0, observed=Y)


def standardised_in_the_model():
    column = pm.Data("x", x)
    pm.Normal("y", pm.Normal("b") * (column - column.mean(axis=0)), 1.0, observed=Y)


def softmax_over_rows():
    weights = pm.math.softmax(pm.Normal("b") * pm.Data("x", x))
    pm.Normal("y", weights, 1.0, observed=Y)


def mean_of_log_densities():
    b = pm.Normal("b")
    pm.Potential("y", -((pm.Data("x", x) - b) ** 2).mean())
    pm.Normal("z", b, 1.0, observed=Y)


def prior_inside_a_potential():
    b = pm.Normal("b")
    pm.Potential("y", -((pm.Data("x", x) - b) ** 2).sum() - b**4)
    pm.Normal("z", b, 1.0, observed=Y)


def table_by_group():
    table = pm.Data("table", np.linspace(-1, 1, N_ROWS))
    pm.Normal("y", pm.Normal("b") * table[GROUP], 1.0, observed=Y)


DEPENDENT = [
    lag_by_concatenation,
    autoregression,
    random_walk,
    gaussian_process,
    correlated_errors,
    cumulative_sum,
    standardised_in_the_model,
    softmax_over_rows,
    mean_of_log_densities,
    prior_inside_a_potential,
    table_by_group,
]


@pytest.mark.parametrize("write", DEPENDENT, ids=lambda write: write.__name__)
def test_dependent_rows(write):
    refused(write, r"likelihood of `y` is not a sum over the \d+ rows of .*time series.*`rows=\[")


def drawn_and_centred():
    drawn, y = minibatch(x, Y)
    pm.Normal("y", pm.Normal("b") * (drawn - drawn.mean()), 1.0, observed=y, total_size=N_ROWS)


def drawn_and_summed_up():
    drawn, y = minibatch(x, Y)
    pm.Normal("y", pt.cumsum(pm.Normal("b") * drawn), 1.0, observed=y, total_size=N_ROWS)


def predictor_not_drawn():
    mu = pm.Normal("b") * pm.Data("x", x)
    pm.Normal("y", mu, 1.0, observed=minibatch(Y), total_size=N_ROWS)


@pytest.mark.parametrize(
    "write", [drawn_and_centred, drawn_and_summed_up], ids=lambda w: w.__name__
)
def test_dependent_minibatch_rows(write):
    refused(write, r"`y` is not a sum over the 37 rows.*one `pm.Minibatch` call")


def test_predictor_that_is_not_drawn():
    refused(
        predictor_not_drawn,
        r"`y` has shape \(5,\), .* \(37,\), from `x` of .*in one `pm.Minibatch` call",
    )


@pytest.mark.parametrize("distribution", [pm.Normal, pm.Gamma])
@pytest.mark.parametrize("axis", [0, 1])
def test_local_latent_variables(distribution, axis):
    """Rows have an entry of z each, and its number is one of the data."""
    with pm.Model() as model:
        z = distribution("z", 2, 1, shape=(N_ROWS, 2) if axis == 0 else (2, N_ROWS))
        pm.Normal("y", z.sum(1 - axis) ** 2, 1.0, observed=Y)
    posterior = Posterior(model)
    agrees(model, posterior)
    position = posterior.initial_position + 0.1
    of_rows = posterior.row_gradients(position, posterior.take(slice(None)))
    assert (np.count_nonzero(of_rows, axis=1) == 2).all()


def test_variables_as_long_as_the_rows_by_chance(rng):
    """An index and a matrix take entries of others than the row, in one term or in another."""
    square, index = rng.normal(size=(N_ROWS, N_ROWS)), rng.permutation(N_ROWS)
    with pm.Model() as model:
        u = pm.Normal("u", shape=N_ROWS)
        b = pm.Normal("b", shape=N_ROWS)
        pm.Normal("y", u[index] + pt.dot(square, b), 1.0, observed=Y)
        pm.Normal("other", 2 * u, 1.0, observed=Y)
    agrees(model, Posterior(model))


def test_stacked_coefficients_that_an_index_selects():
    """PyMC puts the coefficient of each row in place of the index."""
    group = np.random.default_rng(6).integers(3, size=N_ROWS)
    with pm.Model() as model:
        first, second = pm.Normal("first"), pm.Normal("second")
        effects = pt.stack([0.0, first, second, first])
        pm.Normal("y", effects[group], 1.0, observed=Y)
    posterior, position = Posterior(model), np.array([0.4, -0.3])
    expected = model.compile_logp()(posterior.point_at(position))
    np.testing.assert_allclose(posterior.log_density(position), expected)


def test_local_variables_of_one_of_two_lengths():
    """Groups are the rows of one outcome and are selected by those of the other."""
    of_groups = np.arange(GROUP.max() + 1.0)
    with pm.Model() as model:
        u = pm.Normal("u", shape=len(of_groups))
        pm.Normal("y", u[GROUP], 1.0, observed=Y)
        pm.Normal("of_groups", 2 * u, 1.0, observed=of_groups)
    agrees(model, Posterior(model))


def test_entries_of_a_local_variable_that_rows_share():
    def summed():
        pm.Normal("y", pm.math.cumsum(pm.Normal("z", shape=N_ROWS)), 1.0, observed=Y)

    refused(summed, r"`y` is not a sum.*`z` has one element a row")

    def drawn():
        mu = pm.Normal("z", shape=5)
        pm.Normal("y", mu, 1.0, observed=minibatch(Y), total_size=N_ROWS)

    refused(drawn, r"`y` is not a sum.*`z` has one element a row")


# --- Data and graphs that are not supported ---------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("count", [N_ROWS, FEWEST_NUMBERS])
def test_sparse_matrices(shared, count):
    design = sparse.csr_matrix(np.ones((count, 2)))
    groups = np.arange(count) % 5

    def write():
        columns = pytensor.shared(design, "X") if shared else design
        beta, effect = pm.Normal("beta", shape=(2, 1)), pm.Normal("effect", shape=5)
        eta = effect[groups] + structured_dot(columns, beta)[:, 0]
        pm.Normal("y", eta, 1.0, observed=np.resize(Y, count))

    named = "`X`" if shared else rf"An array of shape \({count}, 2\)"
    message = rf"{named}.* is a sparse matrix, .*`effect\[codes\]`.*`X\.toarray\(\)`"
    refused(write, message)
    with pm.Model() as model:
        write()
    with pytest.raises(ModelError, match=message):
        marginalize(model, ["effect"])


def test_complex_numbers():
    refused(
        lambda: pm.Normal("y", pm.Normal("b") * pm.Data("X", x + 1j), 1.0, observed=Y),
        "`X` has complex numbers, .* separate columns",
    )


def test_random_numbers_that_are_no_variables():
    def in_the_likelihood():
        pm.Normal(
            "y",
            pm.Normal("b") * x + pm.Normal.dist(size=N_ROWS),
            1.0,
            observed=Y,
        )

    def in_a_potential():
        b = pm.Normal("b")
        pm.Normal("y", b * x, 1.0, observed=Y)
        pm.Potential("penalty", b * pm.Normal.dist())

    refused(in_the_likelihood, "log density of `y` depends on random numbers that are no variable")
    refused(in_a_potential, "log density of `penalty` depends on random numbers")


@pytest.mark.parametrize("vars", [None, ["mean"]])
def test_a_dimension_that_rows_share_with_a_parameter(vars):
    """Gradients of single rows were N times too large: each was repeated along the dimension."""
    rng = np.random.default_rng(1)
    with pm.Model(coords={"row": np.arange(6)}) as model:
        number = pm.Data("number", np.arange(6))
        scale = pm.Gamma("scale", 2, 2, dims="row")
        mean = pm.Normal("mean")
        pm.Normal("y", mean, scale[number], observed=rng.normal(size=6), dims="row")
    posterior = Posterior(model, vars)
    position = rng.normal(size=posterior.dimension)
    single = posterior.row_gradients(position, posterior.take(slice(None)))
    _, prior = posterior.log_prior_and_gradient(position)
    np.testing.assert_allclose(single.sum(0), posterior.gradient(position) - prior, rtol=1e-9)
    apart = [posterior.row_gradients(position, posterior.take([row]))[0] for row in range(6)]
    np.testing.assert_allclose(single, apart, rtol=1e-9)
