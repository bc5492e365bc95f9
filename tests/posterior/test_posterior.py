"""The posterior against PyMC's own log density, for models written in both ways."""

from __future__ import annotations

import functools
import time

import cloudpickle
import numpy as np
import pandas as pd
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
import xarray as xr
from pymc.logprob.utils import CheckParameterValue
from pytensor.graph.basic import Constant, equal_computations
from pytensor.graph.traversal import ancestors

from pymc_sgmcmc.compiling.compiled import PYTHON_MODE
from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.posterior import Posterior, evaluation
from tests.support.row_models import CASES, GROUP, N_ROWS, Case, X, Y
from tests.support.row_reference import Reference, agrees, close

# PyMC compiles the initial point of some models in C.
pytestmark = pytest.mark.filterwarnings("ignore:PyTensor could not link to a BLAS")

NAMED_BY_THE_ISSUE = [
    "linear",
    "logistic",
    "poisson_with_exposure",
    "negative_binomial",
    "categorical",
    "multinomial",
    "hierarchical_centred",
    "hierarchical_non_centred",
    "two_observed",
    "student_t",
    "weighted",
]


@functools.cache
def reference(name: str) -> Reference:
    return Reference(CASES[name].ordinary())


@functools.cache
def posterior_of(name: str, way: str) -> Posterior:
    return Posterior(getattr(CASES[name], way)())


def positions(name: str, number: int = 3) -> np.ndarray:
    rng = np.random.default_rng(len(name))
    return rng.normal(0.0, 0.6, size=(number, posterior_of(name, "ordinary").dimension))


# --- Both ways in are the same posterior, and that of the model -----------------------------


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("way", ["ordinary", "minibatch"])
def test_agrees_with_the_model(name, way):
    posterior, expected = posterior_of(name, way), reference(name)
    assert posterior.n_rows == N_ROWS
    everything = posterior.take(slice(None))
    for position in positions(name):
        value, gradient = expected.log_density_and_gradient(position)
        prior, by_row = expected.prior_and_rows(position)

        found_value, found_gradient = posterior.log_density_and_gradient(position)
        close(found_value, value)
        close(found_gradient, gradient)
        found_prior, prior_gradient = posterior.log_prior_and_gradient(position)
        close(found_prior, prior)
        likelihood, likelihood_gradient = posterior.log_likelihood_and_gradient(
            position, everything
        )
        close(likelihood, by_row.sum())
        close(likelihood_gradient, gradient - prior_gradient)
        several = posterior.likelihood_gradient(np.array([position, position + 0.1]), everything)
        assert np.array_equal(several[0], posterior.likelihood_gradient(position))
        assert np.array_equal(several[1], posterior.likelihood_gradient(position + 0.1))

        numbers = np.array([30, 2, 2, 17])
        close(
            posterior.log_likelihood_and_gradient(position, posterior.take(numbers))[0],
            by_row[numbers].sum(),
        )
        row_gradients = posterior.row_gradients(position, everything)
        assert row_gradients.shape == (N_ROWS, posterior.dimension)
        close(row_gradients.sum(axis=0), likelihood_gradient)
        for row in (0, 20):
            single_row = posterior.take(np.array([row]))
            close(posterior.log_likelihood_and_gradient(position, single_row)[0], by_row[row])
            close(
                posterior.log_likelihood_and_gradient(position, single_row)[1], row_gradients[row]
            )


@pytest.mark.parametrize("name", CASES)
def test_both_ways_are_the_same(name):
    ordinary, minibatch = posterior_of(name, "ordinary"), posterior_of(name, "minibatch")
    assert ordinary.model_batch_size is None
    assert minibatch.model_batch_size == 11
    assert ordinary.labels == minibatch.labels
    assert ordinary.layout.names == minibatch.layout.names
    assert ordinary.dtype == minibatch.dtype == "float64"
    np.testing.assert_array_equal(ordinary.initial_position, minibatch.initial_position)
    numbers = np.array([5, 0, 36, 11, 11])
    for position in positions(name, 2):
        close(
            minibatch.row_gradients(position, minibatch.take(numbers)),
            ordinary.row_gradients(position, ordinary.take(numbers)),
        )
        close(
            minibatch.log_prior_and_gradient(position)[1],
            ordinary.log_prior_and_gradient(position)[1],
        )


@pytest.mark.parametrize("name", [*NAMED_BY_THE_ISSUE, "stacked_columns", "narrow_types"])
def test_data_variables_are_the_same_as_constants(name):
    with_data = posterior_of(name, "with_data")
    assert set(with_data.data_names) == {f"{key}_data" for key in CASES[name].data}
    for position in positions(name, 2):
        value, gradient = reference(name).log_density_and_gradient(position)
        close(with_data.log_density(position), value)
        close(with_data.gradient(position), gradient)


@pytest.mark.parametrize("name", ["linear", "categorical", "two_observed"])
@pytest.mark.parametrize("length", [1, 5, 7, 36])
def test_chunks_add_up(name, length, monkeypatch):
    posterior = posterior_of(name, "ordinary")
    position = positions(name, 1)[0]
    value, gradient = posterior.log_density_and_gradient(position)
    monkeypatch.setattr(evaluation, "CHUNK_ELEMENTS", length * posterior._widest_row)
    sizes = [len(chunk[0]) for chunk in posterior.chunks()]
    assert sum(sizes) == N_ROWS
    assert max(sizes) == length
    close(posterior.log_density_and_gradient(position)[0], value)
    close(posterior.log_density_and_gradient(position)[1], gradient)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in NAMED_BY_THE_ISSUE else pytest.mark.slow)
        for name in CASES
    ],
)
def test_curvature_is_the_derivative_of_the_gradient(name, monkeypatch):
    posterior, position = posterior_of(name, "ordinary"), positions(name, 1)[0]
    d, width = posterior.dimension, 1e-5
    sides = [position + sign * width * np.eye(d) for sign in (-1, 1)]
    behind, ahead = (posterior.likelihood_gradient(side) for side in sides)
    expected = (behind - ahead) / (2 * width)
    found = posterior.likelihood_curvature(position)
    size = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7 * size)
    monkeypatch.setattr(evaluation, "CHUNK_ELEMENTS", 7 * posterior._widest_row)
    close(posterior.likelihood_curvature(position), found)
    numbers = np.array([3, 3, 20])
    of_rows = [
        posterior.likelihood_curvature(position, posterior.take(rows))
        for rows in (numbers, *numbers[:, None])
    ]
    close(of_rows[0], sum(of_rows[1:]))


def test_no_curvature_where_an_operation_has_no_second_derivative():
    with pm.Model() as model:
        slopes = pm.Normal("slopes", shape=3)
        pm.VonMises("y", X @ slopes, slopes[0] ** 2 + 1, observed=np.tanh(Y))
    posterior = Posterior(model)
    assert np.isfinite(posterior.gradient(np.ones(3))).all()
    assert not posterior.has_second_derivatives


def test_conditions_are_settled_by_all_chunks(monkeypatch):
    """A condition may hold for all rows of one chunk and not for all rows."""
    monkeypatch.setattr(evaluation, "CHUNK_ELEMENTS", 1)
    with pm.Model() as model:
        known, b = pm.Data("known", np.sort(X[:, 0])), pm.Normal("b", shape=3)
        mu = pt.switch(known > 0, b[0], pt.switch(known > 100, b[1], b[2]))
        pm.Normal("y", mu, 1.0, observed=Y)
    posterior = Posterior(model)
    assert len(list(posterior.chunks())) == N_ROWS
    agrees(model, posterior)


@pytest.mark.parametrize("container", [np.asarray, pm.Data])
def test_chunks_count_what_the_model_makes_of_a_row(container):
    x, kind = X[:, :2], np.arange(N_ROWS) * 4
    with pm.Model():
        W = pm.Normal("W", shape=(2, 150))
        data = container(x) if container is np.asarray else container("X", x)
        pm.Categorical("y", logit_p=data @ W, observed=kind)
        posterior = Posterior()
    # Three numbers a row in the data, but 150 in the linear predictor.
    assert posterior.row_elements == 3
    assert posterior._widest_row == 150


@pytest.mark.parametrize("name", ["categorical", "hierarchical_non_centred", "ordered_cutpoints"])
@pytest.mark.parametrize("way", ["ordinary", "minibatch"])
def test_symbolic_rows_of_fixed_number(name, way):
    """JAX needs static shapes, with the length as a constant."""
    posterior = posterior_of(name, way)
    fixed_rows = posterior.take(np.array([3, 1, 4, 1, 5]))
    rows = [pt.constant(values) for values in fixed_rows]
    position = pt.tensor("position", shape=(posterior.dimension,))
    gradient = posterior.rows_gradient(position, rows, pt.constant(5, dtype="int64"))
    at = positions(name, 1)[0]
    evaluated = gradient.eval({position: at}, mode=PYTHON_MODE)
    close(evaluated, posterior.log_likelihood_and_gradient(at, fixed_rows)[1])
    close(
        posterior.prior_gradient(position).eval({position: at}, mode=PYTHON_MODE),
        posterior.log_prior_and_gradient(at)[1],
    )


@pytest.mark.usefixtures("with_compiler")
@pytest.mark.parametrize("way", ["ordinary", "minibatch"])
def test_as_users_compile_it(way):
    posterior = Posterior(getattr(CASES["logistic"], way)())
    for position in positions("logistic"):
        value, gradient = reference("logistic").log_density_and_gradient(position)
        close(posterior.log_density(position), value)
        close(posterior.gradient(position), gradient)
        by_row = posterior_of("logistic", way).row_gradients(position, posterior.take(slice(None)))
        close(posterior.row_gradients(position, posterior.take(slice(None))), by_row)


# --- Ways of writing a model ------------------------------------------------------------------


def zeros_of_length_n(data):
    pm.Normal("y", pt.zeros(N_ROWS) + pm.Normal("b") * data["x"], 1.0, observed=data["y"])


def shape_n(data):
    pm.Normal("y", pm.Normal("b"), 1.0, shape=N_ROWS, observed=data["y"])


def dimension_of_rows(data):
    mu = pm.Deterministic("mu", pm.Normal("b") * data["x"], dims="obs")
    pm.Normal("y", mu, 1.0, dims="obs", observed=data["y"])


def length_of_dimension(data):
    length = pm.modelcontext(None).dim_lengths["obs"]
    pm.Normal("y", pt.zeros(length) + pm.Normal("b") * data["x"], 1.0, observed=data["y"])


def length_of_dimension_of_data(data):
    length = pm.modelcontext(None).dim_lengths["obs"]
    mu = pt.zeros(length) + pm.Normal("b") * pm.Data("x", X[:, 0], dims="obs")
    pm.Normal("y", mu, 1.0, dims="obs", observed=data["y"])


def mixture_with_dimension(data):
    pm.NormalMixture("y", [0.3, 0.7], pm.Normal("b", shape=2), 1.0, dims="obs", observed=data["y"])


def custom_distribution_of_shape_n(data):
    def dist(mu, size):
        return pm.math.exp(pm.Normal.dist(mu, 1.0, size=size))

    b = pm.Normal("b")
    pm.CustomDist("y", b, dist=dist, shape=(N_ROWS,), observed=np.exp(Y))


def reshaped_to_n(data):
    design = pm.Data("design", X).reshape((N_ROWS, -1))
    pm.Normal("y", design @ pm.Normal("b", shape=3), 1.0, observed=Y)


def indexed_by_row_numbers(data):
    log_p = pt.log(pm.math.softmax(X @ pm.Normal("W", shape=(3, 4)), axis=1))
    chosen = log_p[pt.arange(N_ROWS), GROUP]
    pm.CustomDist("y", chosen, logp=lambda value, chosen: chosen + 0 * value, observed=Y)


def einsum(data):
    pm.Normal("y", pt.einsum("ij,j->i", data["X"], pm.Normal("b", shape=3)), 1.0, observed=Y)


def tiled(data):
    pm.Normal("y", pt.tile(pm.Normal("b"), (N_ROWS,)) * data["x"], 1.0, observed=data["y"])


def rows_along_the_last_axis(data):
    columns = pm.Data("columns", X.T.copy())
    pm.Normal("y", (pm.Normal("b", shape=(3, 1)) * columns).sum(axis=0), 1.0, observed=Y)


def basis_functions(data):
    gp = pm.gp.HSGP(m=[5], c=1.5, cov_func=pm.gp.cov.Matern52(1, ls=pm.HalfNormal("ls")))
    pm.Normal("y", gp.prior("f", X=X[:, :1]), 1.0, observed=data["y"])


def multivariate_rows(data):
    mu = pt.as_tensor(X[:, :1]) * pm.Normal("b", shape=2)
    pm.MvNormal("y", mu, cov=np.array([[1.0, 0.2], [0.2, 1.0]]), observed=X[:, 1:])


def switch_between_wide_and_narrow(data):
    narrow, wide = pm.Normal("narrow"), pm.Normal("wide", shape=4)
    known = pm.Data("known", X[:, 0])[:, None] > -100
    log_p = pt.switch(known, -(narrow**2), wide[None, :])
    pm.CustomDist("y", log_p.sum(axis=1), logp=lambda value, each: each + 0 * value, observed=Y)


def data_frame(data):
    frame = pd.DataFrame(X, columns=["a", "b", "c"])
    series = pd.Series(Y, name="outcome", index=np.arange(N_ROWS) * 10)
    pm.Normal("y", pm.math.dot(frame, pm.Normal("b", shape=3)), 1.0, observed=series)


def frame_in_data_variable(data):
    frame = pd.DataFrame({"a": X[:, 0], "count": GROUP})
    b = pm.Normal("b", shape=2)
    mu = pm.math.dot(pm.Data("frame", frame), b)
    pm.Normal("y", mu, 1.0, observed=pm.Data("outcome", pd.Series(Y)))


def lags_as_constants(data):
    # PyTensor makes a slice of a constant a constant: a lagged regression given its lags.
    pm.Normal("y", pm.Normal("b") * pt.as_tensor(Y)[:-1], 1.0, observed=Y[1:])


def observed_feeds_observed(data):
    b = pm.Normal("b", shape=2)
    first = pm.Normal("y", b[0] * data["x"], 1.0, observed=data["y"])
    pm.Normal("z", b[1] * first, 1.0, observed=X[:, 1])


def penalty(data):
    b = pm.Normal("b", shape=3)
    pm.Potential("penalty", -0.1 * pt.abs(b).sum())
    pm.Normal("y", data["X"] @ b, 1.0, observed=data["y"])


def step_by_condition(data):
    b, flag = pm.Normal("b", shape=2), pt.as_tensor(GROUP > 1)
    pm.Normal("y", pt.switch(flag, b[0] * data["x"], b[1]), 1.0, observed=data["y"])


def fortran_order(data):
    pm.Normal("y", np.asfortranarray(X) @ pm.Normal("b", shape=3), 1.0, observed=Y)


def flat_prior(data):
    pm.Normal("y", pm.Flat("b") * data["x"], pm.HalfFlat("s"), observed=data["y"])


def scalar_observed_too(data):
    b = pm.Normal("b")
    pm.Normal("y", b * data["x"], 1.0, observed=data["y"])
    pm.Normal("total", b * data["x"].sum(), 1.0, observed=1.5)


def total_size_of_the_data(data):
    pm.Normal("y", pm.Normal("b") * data["x"], 1.0, observed=data["y"], total_size=N_ROWS)


WRITINGS = [
    zeros_of_length_n,
    shape_n,
    dimension_of_rows,
    length_of_dimension,
    length_of_dimension_of_data,
    mixture_with_dimension,
    custom_distribution_of_shape_n,
    reshaped_to_n,
    indexed_by_row_numbers,
    einsum,
    tiled,
    rows_along_the_last_axis,
    basis_functions,
    multivariate_rows,
    switch_between_wide_and_narrow,
    data_frame,
    frame_in_data_variable,
    lags_as_constants,
    observed_feeds_observed,
    penalty,
    step_by_condition,
    fortran_order,
    flat_prior,
    scalar_observed_too,
    total_size_of_the_data,
]


@pytest.mark.parametrize("write", WRITINGS, ids=lambda write: write.__name__)
def test_ways_of_writing(write):
    with pm.Model(coords={"obs": range(N_ROWS)}) as model:
        write({"x": pt.as_tensor(X[:, 0]), "X": pt.as_tensor(X), "y": Y})
    agrees(model, Posterior(model))


def test_equal_arrays_are_one():
    with pm.Model() as model:
        b = pm.Normal("b", shape=2)
        pm.Normal("y", X @ pt.concatenate([b, b[:1]]) + X[:, 0] * b[1], 1.0, observed=X[:, 0])
        pm.Normal("z", X.copy() @ pt.concatenate([b[:1], b]), 1.0, observed=Y)
    posterior = Posterior(model)
    assert sorted(values.shape for values in posterior.data) == [(37,), (37,), (37, 3)]
    agrees(model, posterior)


def test_equal_arrays_in_a_minibatch_are_one():
    with pm.Model() as model:
        x, also_x, y = pm.Minibatch(X[:, 0], X[:, 0].copy(), Y, batch_size=5)
        b = pm.Normal("b", shape=2)
        pm.Normal("y", b[0] * x + b[1] * also_x**2, 1.0, observed=y, total_size=N_ROWS)
    posterior = Posterior(model)
    assert len(posterior.data) == 2
    position = np.array([0.4, -0.2])
    expected = -0.5 * np.sum((Y - 0.4 * X[:, 0] + 0.2 * X[:, 0] ** 2) ** 2 + np.log(2 * np.pi))
    close(posterior.log_likelihood_and_gradient(position, posterior.take(slice(None)))[0], expected)


def test_data_variable_both_drawn_and_whole():
    with pm.Model():
        table = pm.Data("table", X[:, 0])
        drawn, y = pm.Minibatch(table, Y, batch_size=5)
        b = pm.Normal("b")
        pm.Normal("y", b * drawn + table.mean() + table[3], 1.0, observed=y, total_size=N_ROWS)
        posterior = Posterior()
    center = 0.3 * X[:, 0] + X[:, 0].mean() + X[3, 0]
    expected = -0.5 * np.sum((Y - center) ** 2 + np.log(2 * np.pi))
    at = np.array([0.3])
    close(posterior.log_likelihood_and_gradient(at, posterior.take(slice(None)))[0], expected)


def test_length_of_parameters_equal_to_the_batch():
    with pm.Model():
        drawn, y = pm.Minibatch(X, Y, batch_size=3)
        b = pt.zeros(3) + pt.concatenate([pt.zeros(1), pm.Normal("b", shape=2)])
        pm.Normal("y", drawn @ b, 1.0, observed=y, total_size=N_ROWS)
        posterior = Posterior()
    at = np.array([0.3, -0.7])
    expected = X[:, 1:].T @ (Y - X[:, 1:] @ at) - at
    close(posterior.gradient(at), expected)
    close(posterior.row_gradients(at, posterior.take([4]))[0], X[4, 1:] * (Y[4] - X[4, 1:] @ at))


def test_weights_as_potential_and_as_distribution():
    """The weighted likelihood as a potential of an ordinary model is that of the minibatches."""
    data = CASES["weighted"].data
    with pm.Model() as model:
        x, weight, y = (pm.Data(name, data[name]) for name in ("x", "weight", "y"))
        slope, sigma = pm.Normal("slope"), pm.HalfNormal("sigma")
        pm.Potential("y_weighted", weight * pm.logp(pm.Normal.dist(slope * x, sigma), y))
    posterior = Posterior(model, rows=["x", "weight", "y"])
    drawn = posterior_of("weighted", "minibatch")
    for position in positions("weighted", 2):
        close(posterior.log_density(position), drawn.log_density(position))
        close(posterior.gradient(position), drawn.gradient(position))
        numbers = np.array([3, 30, 3])
        close(
            posterior.row_gradients(position, posterior.take(numbers)),
            drawn.row_gradients(position, drawn.take(numbers)),
        )


def test_batch_of_one_and_of_all():
    for batch_size in (1, N_ROWS):
        posterior = Posterior(CASES["linear"].minibatch(batch_size))
        position = positions("linear", 1)[0]
        close(
            posterior.gradient(position), reference("linear").log_density_and_gradient(position)[1]
        )


def test_second_observed_variable_in_full():
    with pm.Model() as model:
        b = pm.Normal("b")
        pm.Normal("y", b * X[:, 0], 1.0, observed=Y)
        pm.Normal("z", b, 1.0, observed=Y[:20])
    posterior = Posterior(model, rows="y")
    assert posterior.n_rows == N_ROWS
    agrees(model, posterior)
    assert Posterior(model, rows=["z"]).n_rows == 20

    with pm.Model():
        x, y = pm.Minibatch(X[:, 0], Y, batch_size=5)
        b = pm.Normal("b")
        pm.Normal("y", b * x, 1.0, observed=y, total_size=N_ROWS)
        pm.Normal("z", b, 1.0, observed=Y[:20])
        drawn = Posterior()
    at = np.array([0.4])
    close(drawn.gradient(at), posterior.gradient(at))


def test_model_with_a_name():
    for way in ("ordinary", "minibatch"):
        posterior = Posterior(getattr(CASES["linear"], way)(name="m"))
        assert posterior.labels[0] == "m::beta[feature=age]"
        position = positions("linear", 1)[0]
        close(
            posterior.gradient(position), reference("linear").log_density_and_gradient(position)[1]
        )
    assert Posterior(CASES["linear"].ordinary(name="m"), rows="y").n_rows == N_ROWS
    assert Posterior(CASES["linear"].ordinary(name="m"), rows="m::y").n_rows == N_ROWS


def test_nested_models():
    with pm.Model() as outer:
        b = pm.Normal("b")
        with pm.Model(name="inner"):
            pm.Normal("y", b * X[:, 0] + pm.Normal("a"), 1.0, observed=Y)
    posterior = Posterior(outer)
    assert posterior.labels == ("b", "inner::a")
    agrees(outer, posterior)


def test_inside_and_outside_a_context():
    model = CASES["linear"].ordinary()
    with model:
        inside = Posterior()
    with pm.Model(), model:
        nested = Posterior()
    position = positions("linear", 1)[0]
    for posterior in (inside, nested, Posterior(model)):
        close(
            posterior.log_density(position),
            posterior_of("linear", "ordinary").log_density(position),
        )
    with pytest.raises(TypeError, match="inside `with model:`"):
        Posterior()


def test_single_precision():
    narrow = {
        key: value.astype("float32") if value.dtype == float else value
        for key, value in CASES["hierarchical_non_centred"].data.items()
    }
    case = Case("", narrow, CASES["hierarchical_non_centred"].write, {"group": list("abcd")})
    double = posterior_of("hierarchical_non_centred", "ordinary")
    position = positions("hierarchical_non_centred", 1)[0]
    expected = double.gradient(position)
    with pytensor.config.change_flags(floatX="float32", warn_float64="raise"):
        for way in ("ordinary", "with_data", "minibatch"):
            posterior = Posterior(getattr(case, way)())
            assert posterior.dtype == "float32"
            assert {values.dtype.name for values in posterior.data} <= {"float32", "int16", "int64"}
            everything = posterior.take(slice(None))
            assert posterior.row_gradients(position, everything).dtype == "float32"
            gradient = posterior.gradient(position)
            assert gradient.dtype == "float64"
            np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-4)


# --- Some of the variables --------------------------------------------------------------------


@pytest.mark.parametrize("order", [["slope", "mu"], ["mu", "slope"]])
def test_some_variables_in_model_order(order):
    model = CASES["hierarchical_non_centred"].ordinary()
    posterior = Posterior(model, [model[name] for name in order])
    assert posterior.labels == ("mu", "slope")
    assert set(posterior.others) == {"tau_log__", "offset"}

    whole = Posterior(model)
    rng = np.random.default_rng(6)
    for _ in range(2):
        position = rng.normal(0, 0.5, size=whole.dimension)
        point = whole.layout.unravel(position)
        posterior.set_others(point)
        moved_position = posterior.layout.ravel(point)
        keep = [whole.labels.index(label) for label in posterior.labels]
        value, gradient = whole.log_density_and_gradient(position)
        close(posterior.log_density(moved_position), value)
        close(posterior.gradient(moved_position), gradient[keep])
        rows = posterior.row_gradients(moved_position, posterior.take(slice(None)))
        close(rows, whole.row_gradients(position, whole.take(slice(None)))[:, keep])


def test_others_are_copies():
    model = CASES["hierarchical_non_centred"].ordinary()
    posterior = Posterior(model, [model["mu"]])
    point = {name: np.array(value) for name, value in model.initial_point().items()}
    posterior.set_others(point)
    point["offset"][:] = 7.0
    assert posterior.others["offset"].get_value().max() == 0.0


def test_value_variables_and_a_single_variable():
    model = CASES["linear"].ordinary()
    sigma = model.rvs_to_values[model["sigma"]]
    assert Posterior(model, [sigma, model["intercept"]]).labels == ("intercept", "sigma_log__")
    assert Posterior(model, model["beta"]).labels[0] == "beta[feature=age]"


def test_discrete_variable_left_to_others():
    with pm.Model() as model:
        shift = pm.Normal("shift")
        switch = pm.Bernoulli("switch", 0.5)
        pm.Normal("y", shift * switch, 1.0, observed=Y)
    posterior = Posterior(model, [shift])
    assert posterior.others["switch"].dtype == "int64"
    for value in (0, 1):
        posterior.set_others({"switch": np.array(value)})
        close(posterior.gradient(np.array([0.5])), [-0.5 + value * np.sum(Y - 0.5 * value)])


def test_minibatch_with_others():
    model = CASES["linear"].minibatch()
    posterior = Posterior(model, [model["beta"]])
    whole = posterior_of("linear", "ordinary")
    position = positions("linear", 1)[0]
    point = whole.layout.unravel(position)
    posterior.set_others(point)
    close(posterior.gradient(point["beta"]), whole.gradient(position)[:3])


def test_invalid_parameters_are_not_hidden():
    """PyMC's checks of parameters give -inf with a gradient of zero, so a chain would go on."""
    with pm.Model() as model:
        pm.Normal("y", 0.0, pm.Normal("scale", initval=1.0), observed=Y)
    posterior = Posterior(model)
    assert np.isfinite(posterior.log_density(np.array([0.5])))
    assert np.isnan(posterior.log_density(np.array([-0.5])))
    checks = [
        node
        for term in (*posterior._separated.full_terms, *posterior._separated.row_terms)
        for node in ancestors([term.log_density])
        if node.owner is not None and isinstance(node.owner.op, CheckParameterValue)
    ]
    assert not checks


# --- The initial point ------------------------------------------------------------------------


def test_initial_point():
    model = CASES["linear"].ordinary()
    posterior = Posterior(model, initial_point={"beta": [1, 2, 3]})
    np.testing.assert_array_equal(posterior.initial_position, [1, 2, 3, 0, 0])
    assert posterior.initial_position.dtype == "float64"
    others = Posterior(model, [model["beta"]], initial_point={"intercept": 2}).others
    assert others["intercept"].dtype == "float64"
    assert others["intercept"].get_value() == 2.0
    with pytest.raises(ModelError, match=r"value for `sigma`, but .*`sigma_log__`"):
        Posterior(model, initial_point={"sigma": 1.0})
    with pytest.raises(ModelError, match=r"`beta` should have shape \(3,\), but has shape \(2,\)"):
        Posterior(model, initial_point={"beta": np.zeros(2)})
    for wrong in (np.nan, np.inf):
        with pytest.raises(ModelError, match="`initial_point` for `beta` should be finite"):
            Posterior(model, initial_point={"beta": np.array([0.0, wrong, 0.0])})


# --- The user's model -------------------------------------------------------------------------


def describe(model: pm.Model) -> dict:
    return {
        "named": dict(model.named_vars.items()),
        "values": list(model.value_vars),
        "rvs_to_values": dict(model.rvs_to_values),
        "observed": list(model.observed_RVs),
        "free": list(model.free_RVs),
        "deterministics": list(model.deterministics),
        "data": {variable.name: variable.get_value() for variable in model.data_vars},
        "owners": {name: variable.owner for name, variable in model.named_vars.items()},
        "graph": pytensor.dprint(list(model.named_vars.values()), file="str"),
    }


@pytest.mark.parametrize("way", ["ordinary", "with_data", "minibatch"])
def test_model_is_untouched(way):
    model = getattr(CASES["two_observed"], way)()
    before = describe(model)
    density = model.compile_logp(mode=PYTHON_MODE) if way != "minibatch" else None
    posterior = Posterior(model, [model["beta"]])
    posterior.gradient(np.full(3, 0.1))
    posterior.row_gradients(np.full(3, 0.1), posterior.take(slice(None)))
    after = describe(model)
    np.testing.assert_equal(after.pop("data"), before.pop("data"))
    assert after == before
    if density is not None:
        at = {"beta": np.full(3, 0.2)}
        assert model.compile_logp(mode=PYTHON_MODE)(at) == density(at)


@pytest.mark.parametrize("way", ["ordinary", "with_data"])
def test_prediction_and_log_likelihood_go_on_with_all_rows(way):
    model = getattr(CASES["linear"], way)()
    posterior = Posterior(model)
    rng = np.random.default_rng(4)
    draws = {
        "beta": (("chain", "draw", "feature"), rng.normal(size=(1, 3, 3))),
        "intercept": (("chain", "draw"), rng.normal(size=(1, 3))),
        "sigma": (("chain", "draw"), np.ones((1, 3))),
    }
    draws = xr.Dataset(draws, coords={"feature": list(model.coords["feature"])})
    trace = xr.DataTree.from_dict({"posterior": draws})
    settings = {"model": model, "progressbar": False, "compile_kwargs": {"mode": PYTHON_MODE}}
    predicted = pm.sample_posterior_predictive(trace, random_seed=1, **settings)
    assert predicted.posterior_predictive["y"].shape == (1, 3, N_ROWS)
    pm.compute_log_likelihood(trace, **settings)
    pointwise = trace.log_likelihood["y"].to_numpy()[0]
    assert pointwise.shape == (3, N_ROWS)
    position = np.concatenate([draws["beta"][0, 1], draws["intercept"][0, 1:2], np.log([1.0])])
    likelihood = posterior.log_likelihood_and_gradient(position, posterior.take(slice(None)))[0]
    close(likelihood, pointwise[1].sum())


def test_is_a_snapshot_of_the_data():
    """New data in the model change neither the rows nor the other data of the posterior."""
    with pm.Model() as model:
        x, prior_mean = pm.Data("x", X[:, 0]), pm.Data("prior_mean", 0.5)
        table = pm.Data("table", np.arange(4.0))
        b = pm.Normal("b", prior_mean + x.mean())
        pm.Normal("y", b * x + table[pm.Data("group", GROUP)], 1.0, observed=pm.Data("out", Y))
    posterior, fresh = Posterior(model), Posterior(model)
    at = np.array([0.4])
    before = (
        posterior.log_density_and_gradient(at),
        posterior.row_gradients(at, posterior.take([1])),
    )
    pm.set_data(
        {"x": X[:5, 1], "prior_mean": 9.0, "table": np.ones(4), "group": GROUP[:5], "out": Y[:5]},
        model=model,
    )
    for copy in (posterior, fresh):
        assert copy.log_density(at) == before[0][0]
        np.testing.assert_array_equal(copy.gradient(at), before[0][1])
        np.testing.assert_array_equal(copy.row_gradients(at, copy.take([1])), before[1])
    changed = Posterior(model)
    assert changed.n_rows == 5
    agrees(model, changed)


@pytest.mark.parametrize("drawn", [False, True])
def test_changed_data_are_named(drawn):
    with pm.Model() as model:
        x, y = pm.Data("x", X[:, 0]), pm.Data("outcome", Y)
        columns = pm.Data("columns", X.T.copy())
        total = {}
        if drawn:
            x, y = pm.Minibatch(x, y, batch_size=5)
            total = {"total_size": N_ROWS}
        b = pm.Normal("b")
        pm.Normal("y", b * x, 1.0, observed=y, **total)
        if not drawn:
            pm.Normal("z", (b * columns).sum(axis=0), 1.0, observed=Y)
    posterior = Posterior(model)
    assert posterior.changed_data() is None
    pm.set_data({"x": X[:, 0].copy()}, model=model)
    assert posterior.changed_data() is None
    pm.set_data({"x": X[:, 1]}, model=model)
    assert posterior.changed_data() == "x"
    pm.set_data({"x": X[:, 0], "outcome": Y[::-1].copy()}, model=model)
    assert posterior.changed_data() == "outcome"
    if not drawn:
        pm.set_data({"outcome": Y, "columns": X[:, ::-1].T.copy()}, model=model)
        assert posterior.changed_data() == "columns"


# --- Compiled functions -----------------------------------------------------------------------


@pytest.mark.parametrize("way", ["ordinary", "with_data", "minibatch"])
@pytest.mark.parametrize("name", ["linear", "categorical", "stacked_columns"])
def test_no_data_inside_compiled_functions(name, way):
    posterior = posterior_of(name, way)
    for function in (
        posterior._log_likelihood_function,
        posterior._row_gradients_function,
        posterior._log_prior_function,
    ):
        sizes = [
            variable.data.size
            for variable in ancestors(function.function.maker.fgraph.outputs)
            if isinstance(variable, Constant) and isinstance(variable.data, np.ndarray)
        ]
        assert max(sizes, default=0) < N_ROWS


@pytest.mark.parametrize("name", ["logistic", "hierarchical_centred", "multinomial"])
def test_graphs_do_not_depend_on_those_made_before(name):
    """Rewrites of PyMC change the graph that they get, which must not be that of another use."""
    first, second = (Posterior(CASES[name].ordinary()) for _ in range(2))
    position, rows = first.position_and_rows()
    second.rows_gradient(position, rows, rows[0].shape[0])
    second.rows_log_density(position, rows, rows[0].shape[0])
    made = [
        [
            posterior.single_row_gradients(position, rows),
            posterior.single_row_log_densities(position, rows),
            posterior.weighted_rows_gradient(position, rows, pt.ones(rows[0].shape[0])),
        ]
        for posterior in (first, second)
    ]
    assert equal_computations(*made)


def test_pickled_posterior_works_elsewhere():
    for way in ("with_data", "minibatch"):
        model = getattr(CASES["hierarchical_centred"], way)()
        posterior = Posterior(model, [model["slope"], model["mu"]])
        at = np.array([0.1, -0.3])
        expected = posterior.log_density_and_gradient(at)
        loaded = cloudpickle.loads(cloudpickle.dumps(posterior))
        assert loaded.labels == posterior.labels
        close(loaded.log_density(at), expected[0])
        close(loaded.gradient(at), expected[1])
        loaded.set_others({name: value + 1 for name, value in model.initial_point().items()})
        assert loaded.log_density(at) != expected[0]
        close(posterior.log_density(at), expected[0])


@pytest.mark.parametrize("way", ["ordinary", "with_data", "minibatch"])
def test_large_data_are_no_slower(way):
    rng = np.random.default_rng(1)
    n = 200_000
    data = {
        "X": rng.normal(size=(n, 9)),
        "group": rng.integers(0, 500, size=n),
        "y": rng.integers(0, 2, size=n),
    }

    def write(data, **total):
        level = pm.Normal("level", shape=500)
        predictor = data["X"] @ pm.Normal("beta", shape=9) + level[data["group"]]
        pm.Bernoulli("y", logit_p=predictor, observed=data["y"], **total)

    model = getattr(Case("", data, write, {}), way)()
    start = time.process_time()
    posterior = Posterior(model)
    assert time.process_time() - start < 2.0
    assert posterior.n_rows == n


@pytest.mark.parametrize("name", CASES)
def test_prior_and_rows_of_several_positions_at_once(name, rng, monkeypatch):
    monkeypatch.setattr(evaluation, "FEWEST_COORDINATES_TOGETHER", 1)
    posterior = Posterior(CASES[name].ordinary())
    positions = posterior.initial_position + 0.1 * rng.normal(size=(120, posterior.dimension))
    values, gradients = posterior.log_priors_and_gradients(positions)
    # Priors of simplices have an operation with a graph inside, and are evaluated one by one.
    assert (posterior._several_priors_function is None) == (name in ("simplex", "mixture"))
    for position, value, gradient in zip(positions, values, gradients, strict=True):
        wanted, of_gradient = posterior.log_prior_and_gradient(position)
        assert value == pytest.approx(wanted, rel=1e-12)
        np.testing.assert_allclose(gradient, of_gradient, rtol=1e-10, atol=1e-12)
    monkeypatch.setattr(evaluation, "CHUNK_ELEMENTS", 70 * len(positions))  # pieces of rows
    values, gradients = posterior.log_likelihoods_and_gradients(positions, posterior.data)
    for position, value, gradient in zip(positions[:9], values, gradients, strict=False):
        wanted, of_gradient = posterior.log_likelihood_and_gradient(position, posterior.data)
        assert value == pytest.approx(wanted, rel=1e-10)
        largest = np.abs(of_gradient).max()
        np.testing.assert_allclose(gradient, of_gradient, rtol=1e-10, atol=1e-10 * largest)


def test_a_prior_without_position_has_values_for_each(monkeypatch):
    monkeypatch.setattr(evaluation, "FEWEST_COORDINATES_TOGETHER", 1)
    with pm.Model() as model:
        slope = pm.Flat("slope")
        pm.Normal("y", slope, 1, observed=np.zeros(10))
    values, gradients = Posterior(model).log_priors_and_gradients(np.ones((100, 1)))
    assert values.shape == (100,)
    np.testing.assert_array_equal(gradients, np.zeros((100, 1)))


def shapes_by_values(z):
    pm.Potential("p", -(z[z > 0] ** 2).sum())


def test_priors_that_are_evaluated_one_by_one(rng):
    """Shapes that depend on values have no form for several positions."""
    with pm.Model() as model:
        z = pm.Normal("z", shape=60)
        shapes_by_values(z)
        pm.Normal("y", z[np.repeat(np.arange(60), 3)], 1, observed=np.zeros(180))
    posterior = Posterior(model, rows="y")
    positions = rng.normal(size=(4, 60))
    values, gradients = posterior.log_priors_and_gradients(positions)
    assert posterior._several_priors_function is None
    for position, value, gradient in zip(positions, values, gradients, strict=True):
        wanted, of_gradient = posterior.log_prior_and_gradient(position)
        assert value == wanted
        np.testing.assert_array_equal(gradient, of_gradient)


def test_normal_vectors_at_several_positions(rng, caplog):
    """Linear algebra of many matrices is evaluated one by one, and no rewrite fails."""
    with pm.Model() as model:
        precision = pm.Wishart("precision", 4, V=2 * np.eye(2))
        mean = pm.MvNormal("mean", np.zeros(2), tau=0.01 * precision)
        theta = pm.MvNormal("theta", mean, tau=precision, shape=(30, 2))
        pm.Normal("y", theta[np.repeat(np.arange(30), 4), 0], 1, observed=rng.normal(size=120))
    posterior = Posterior(model)
    shifts = 0.1 * rng.normal(size=(5, posterior.dimension))
    positions = posterior.initial_position + shifts
    values, gradients = posterior.log_priors_and_gradients(positions)
    assert posterior._several_priors_function is None
    assert "Rewrite failure" not in caplog.text
    for position, value, gradient in zip(positions, values, gradients, strict=True):
        wanted, of_gradient = posterior.log_prior_and_gradient(position)
        assert value == pytest.approx(wanted, rel=1e-12)
        np.testing.assert_allclose(gradient, of_gradient, rtol=1e-10, atol=1e-10)
