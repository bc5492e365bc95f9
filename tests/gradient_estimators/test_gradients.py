"""Gradient estimators are unbiased and have the covariance that the theory uses."""

from __future__ import annotations

from itertools import product

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.graph.basic import Apply
from pytensor.graph.op import Op
from scipy.special import expit

from pymc_sgmcmc.batching import (
    ShuffledWindows,
    StridedRows,
    make_batching,
    smallest_prime_from,
)
from pymc_sgmcmc.gradient_estimators import (
    ControlVariateGradient,
    PlainGradient,
    SAGAGradient,
    SVRGGradient,
    center_difference,
)
from pymc_sgmcmc.gradient_estimators.center_difference import find_center_difference
from pymc_sgmcmc.posterior import Posterior
from tests.support.exact_law import all_indices
from tests.support.linear_gaussian import LinearGaussian, all_subsets
from tests.support.models import logistic_model

N_ROWS, BATCH_SIZE = 6, 3


def model_of_blocks(two_forms: bool) -> pm.Model:
    """Observed variables of two and of four records, which are six rows."""
    rng = np.random.default_rng(4)
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 1, shape=3)
        pm.Normal("a", rng.normal(size=(2, 3)) @ beta + beta[0], 1.0, observed=rng.normal(size=2))
        eta = rng.normal(size=(4, 3)) @ beta + beta[1]
        if two_forms:
            pm.Poisson("b", pm.math.exp(eta), observed=rng.poisson(2, size=4))
        else:
            pm.Normal("b", eta, 1.0, observed=rng.normal(size=4))
    return model


@pytest.fixture(scope="module", params=["one variable", "two forms", "one form"])
def posterior(request) -> Posterior:
    if request.param == "one variable":
        return Posterior(logistic_model(n_rows=N_ROWS))
    found = Posterior(model_of_blocks(request.param == "two forms"))
    assert (found.n_rows, len(found.row_terms)) == (N_ROWS, 1 + (request.param == "two forms"))
    return found


def random_table() -> np.ndarray:
    """The estimate is unbiased for any stored gradients."""
    return np.random.default_rng(17).normal(size=(N_ROWS, 3))


KEPT = np.array([1, 4])
"""The estimator "kept" evaluates these rows in every estimate."""

SECOND_ORDER = ("second_order", "second_order kept")


WINDOWS = {"noise_share": 1.0}
"""With so little noise the default scheme takes windows, and otherwise strided rows."""


def estimate_function(posterior, scheme, estimator_name, noise_share=20.0):
    """Gradient estimate as a function of position and of an index (or of row numbers)."""
    center = np.array([0.3, -0.2, 0.5])
    share = {"noise_share": noise_share}
    if estimator_name == "svrg":
        estimator = SVRGGradient(posterior, BATCH_SIZE, batching=scheme, **share)
        reference = estimator.reference
        reference.load(reference.at(center))
        batching = estimator.batching
    elif estimator_name == "saga":
        estimator = SAGAGradient(posterior, BATCH_SIZE, batching=scheme, **share)
        estimator.memory.write((random_table(),))
        batching = estimator.batching
    elif estimator_name in ("cv", "kept", *SECOND_ORDER):
        full = posterior.gradient(center) - posterior.log_prior_and_gradient(center)[1]
        order = 2 if estimator_name in SECOND_ORDER else 1
        difference = find_center_difference(posterior, center, order=order)
        kept = KEPT if "kept" in estimator_name else None
        batching = make_batching(
            scheme, difference.data, BATCH_SIZE, derived=difference.columns, excluded=kept, **share
        )
        estimator = ControlVariateGradient(posterior, batching, difference, full, kept)
    else:
        batching = make_batching(scheme, posterior.data, BATCH_SIZE, **share)
        estimator = PlainGradient(posterior, batching)
    position = pt.dvector("position")
    index = batching.index_variable("indices").type.clone(
        shape=batching.index_variable("indices").type.shape[1:]
    )("index")
    function = pytensor.function([position, index], estimator(position, index), mode="FAST_COMPILE")
    return batching, function


@pytest.mark.parametrize("estimator", ["plain", "cv", "second_order", "svrg", "saga"])
def test_mean_over_all_windows_is_the_full_gradient(posterior, estimator):
    batching, estimate = estimate_function(posterior, "shuffle", estimator, **WINDOWS)
    position = np.array([0.1, 0.7, -0.4])
    for order in range(3):
        batching.set_order(order)
        mean = np.mean([estimate(position, np.int64(s)) for s in range(N_ROWS)], axis=0)
        np.testing.assert_allclose(mean, posterior.gradient(position), rtol=0, atol=1e-13)


@pytest.mark.parametrize("estimator", ["plain", "cv", "svrg", "saga", "kept", *SECOND_ORDER])
def test_mean_over_all_strided_rows_is_the_full_gradient(posterior, estimator):
    """The number of rows, or of those drawn from, is no prime here."""
    batching, estimate = estimate_function(posterior, "shuffle", estimator)
    position = np.array([0.1, 0.7, -0.4])
    minibatches = all_indices(batching)
    assert {len(set(rows)) for rows in minibatches} == {BATCH_SIZE}
    mean = np.mean([estimate(position, rows) for rows in minibatches], axis=0)
    np.testing.assert_allclose(mean, posterior.gradient(position), rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("n_rows", "batch_size"), [(11, 4), (41, 4), (41, 10), (40, 4), (40, 10), (96, 24)]
)
def test_covariance_over_strided_rows_is_the_formula(n_rows, batch_size):
    """In each direction, of one order: exact for a prime number of rows. Windows are far off."""
    values = np.random.default_rng(n_rows).normal(size=(n_rows, 3))
    white = (values - values.mean(0)) @ np.linalg.inv(np.linalg.cholesky(np.cov(values.T))).T
    ratios = {}
    for name, share in (("strided", {}), ("windows", WINDOWS)):
        batching = make_batching("shuffle", [white], batch_size, **share)
        means = [white[batching.selected(index)].mean(0) for index in all_indices(batching)]
        formula = batching.variance_factor / batch_size * np.cov(white.T, bias=True)
        ratios[name] = np.linalg.eigvals(
            np.linalg.solve(formula, np.cov(np.transpose(means), bias=True))
        )
    is_prime = smallest_prime_from(n_rows) == n_rows
    np.testing.assert_allclose(ratios["strided"], 1, atol=1e-12 if is_prime else 5 / n_rows)
    assert np.abs(ratios["windows"] - 1).max() > 0.2


def test_windows_only_where_their_order_has_no_effect():
    data = [np.zeros((10_000, 2))]
    assert isinstance(make_batching("shuffle", data, 50), ShuffledWindows)
    assert isinstance(make_batching("shuffle", data, 51), StridedRows)
    assert isinstance(make_batching("shuffle", data, 10_000), ShuffledWindows)
    assert isinstance(make_batching("shuffle", data, 2500, **WINDOWS), ShuffledWindows)
    # The copy would take longer than it saves.
    for rows, scheme in [(20_000, ShuffledWindows), (20_001, StridedRows)]:
        assert isinstance(make_batching("shuffle", [np.zeros(rows)], 2), scheme)
    assert isinstance(make_batching("shuffle", data, 50, row_bytes=30_000), StridedRows)


@pytest.mark.parametrize("estimator", ["plain", "cv", "second_order", "svrg", "saga"])
def test_mean_over_all_draws_with_replacement_is_the_full_gradient(posterior, estimator):
    _, estimate = estimate_function(posterior, "replace", estimator)
    position = np.array([0.1, 0.7, -0.4])
    draws = [np.array(rows) for rows in product(range(N_ROWS), repeat=BATCH_SIZE)]
    mean = np.mean([estimate(position, rows) for rows in draws], axis=0)
    np.testing.assert_allclose(mean, posterior.gradient(position), rtol=0, atol=1e-13)


@pytest.mark.parametrize("scheme", ["shuffle", "replace"])
def test_rows_in_every_estimate(posterior, scheme):
    """Unbiased, with the covariance of the other rows alone, by enumeration."""
    batching, estimate = estimate_function(posterior, scheme, "kept", **WINDOWS)
    position, center = np.array([0.1, 0.7, -0.4]), np.array([0.3, -0.2, 0.5])
    others = np.setdiff1d(np.arange(N_ROWS), KEPT)
    assert batching.n_rows == len(others) == 4
    if scheme == "replace":
        minibatches = [np.array(rows) for rows in product(others, repeat=BATCH_SIZE)]
        drawn = batching.draw(np.random.default_rng(1), 200)
        assert set(np.unique(drawn)) == set(others)
    else:
        for order in (1, 2):
            batching.set_order(order)
            minibatches = all_indices(batching)
            assert len(minibatches) == len(others)
            windows = [batching.selected(start) for start in minibatches]
            assert set(np.concatenate(windows)) == set(others)
    estimates = np.array([estimate(position, minibatch) for minibatch in minibatches])
    np.testing.assert_allclose(estimates.mean(0), posterior.gradient(position), atol=1e-13)
    if scheme == "replace":  # one order has other windows than all subsets
        rows = posterior.row_gradients(position, posterior.take(others))
        rows = rows - posterior.row_gradients(center, posterior.take(others))
        formula = len(others) ** 2 / BATCH_SIZE * np.cov(rows.T, bias=True)
        np.testing.assert_allclose(np.cov(estimates.T, bias=True), formula, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("estimator", ["plain", "cv", "second_order", "svrg", "saga"])
@pytest.mark.parametrize("scheme", ["shuffle", "replace"])
def test_covariance_over_all_minibatches_is_the_formula(posterior, estimator, scheme):
    # Rows by number serve for subsets without replacement as well.
    _, estimate = estimate_function(posterior, "replace", estimator)
    position, center = np.array([0.1, 0.7, -0.4]), np.array([0.3, -0.2, 0.5])
    if scheme == "replace":
        minibatches = [np.array(rows) for rows in product(range(N_ROWS), repeat=BATCH_SIZE)]
        factor = 1.0
    else:
        minibatches = all_subsets(N_ROWS, BATCH_SIZE)
        factor = (N_ROWS - BATCH_SIZE) / (N_ROWS - 1)
    assert make_batching(scheme, posterior.data, BATCH_SIZE).variance_factor == factor
    estimates = np.array([estimate(position, rows) for rows in minibatches])
    rows = posterior.row_gradients(position, posterior.data)
    if estimator in ("cv", "second_order", "svrg"):
        rows = rows - posterior.row_gradients(center, posterior.data)
    if estimator == "second_order":
        rows = rows - derivatives_of_rows(posterior, center) @ (position - center)
    elif estimator == "saga":
        rows = rows - random_table()
    formula = N_ROWS**2 / BATCH_SIZE * factor * np.cov(rows.T, bias=True)
    np.testing.assert_allclose(np.cov(estimates.T, bias=True), formula, rtol=1e-10, atol=1e-13)


def derivatives_of_rows(posterior: Posterior, center: np.ndarray) -> np.ndarray:
    """Second derivatives of the log likelihood of each row at the centre, shape (rows, d, d)."""
    of_rows = find_center_difference(posterior, center, order=2).sums_of
    assert of_rows is not None
    pieces = [posterior.take(np.array([number])) for number in range(N_ROWS)]
    derivatives = np.array([of_rows(posterior, piece)[1] for piece in pieces])
    step = 1e-4
    for place, along in enumerate(np.eye(posterior.dimension)):
        ahead, back = (
            posterior.row_gradients(center + sign * step * along, posterior.data)
            for sign in (1, -1)
        )
        np.testing.assert_allclose(
            derivatives[:, place], (ahead - back) / (2 * step), rtol=1e-6, atol=1e-7
        )
    return derivatives


@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e6])
def test_stored_derivatives_have_no_unit(unit, monkeypatch):
    """A predictor of a million has a coefficient and deviations of a millionth."""
    monkeypatch.setattr(center_difference, "MOST_OPERATIONS", 0)
    rng = np.random.default_rng(13)
    x, center = rng.normal(5, 1, size=N_ROWS) / unit, np.array([0.2, 0.1 * unit])
    with pm.Model() as model:
        intercept, slope = pm.Normal("intercept"), pm.Normal("slope", 0, unit)
        eta = intercept + slope * x
        pm.Bernoulli("y", logit_p=eta, observed=rng.integers(0, 2, size=N_ROWS))
    difference = find_center_difference(Posterior(model), center, order=2)
    gradients, derivatives = difference.columns
    X, mean = np.column_stack([np.ones(N_ROWS), x]), expit(center[0] + center[1] * x)
    exact = -(mean * (1 - mean))[:, None, None] * X[:, :, None] * X[:, None, :]
    np.testing.assert_allclose(derivatives, exact, rtol=1e-4)
    assert gradients.shape == X.shape


def test_second_order_beside_other_step_methods():
    """The centre of the other variables is fixed, and their moves cause noise but no bias."""
    rng = np.random.default_rng(12)
    X = rng.normal(size=(N_ROWS, 2))
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 1, shape=2)
        log_scale = pm.Normal("log_scale", 0, 1)
        eta = X @ beta * pm.math.exp(log_scale)
        pm.Bernoulli("y", logit_p=eta, observed=rng.integers(0, 2, size=N_ROWS))
    posterior, center = Posterior(model, [beta]), np.array([0.3, -0.2])
    difference = find_center_difference(posterior, center, order=2)
    full = posterior.gradient(center) - posterior.log_prior_and_gradient(center)[1]
    batching = make_batching("replace", difference.data, BATCH_SIZE, derived=difference.columns)
    estimator = ControlVariateGradient(posterior, batching, difference, full)
    at, index = pt.tensor("at", shape=(2,), dtype="float64"), pt.lvector("index")
    estimate = pytensor.function([at, index], estimator(at, index), mode="FAST_COMPILE")
    position = np.array([0.1, 0.7])
    for moved in (0.0, 0.4):
        posterior.set_others({"log_scale": np.array(moved)})
        estimates = [estimate(position, rows) for rows in all_subsets(N_ROWS, BATCH_SIZE)]
        exact = posterior.gradient(position)
        np.testing.assert_allclose(np.mean(estimates, axis=0), exact, rtol=0, atol=1e-13)


@pytest.mark.parametrize("stored", [True, False])
def test_second_order_where_an_index_moves(monkeypatch, stored):
    """The derivative at the centre need not be symmetric there, and its sum is of what it is."""
    if not stored:
        monkeypatch.setattr(center_difference, "MOST_OPERATIONS", np.inf)
    rng = np.random.default_rng(13)
    X, counts = rng.normal(size=(N_ROWS, 3)), rng.poisson(2, size=N_ROWS)
    with pm.Model() as model:
        place = pm.Categorical("place", p=np.ones(3) / 3)
        beta = pm.Normal("beta", shape=3)
        pm.Poisson("y", pm.math.exp(X @ beta + beta[place]), observed=counts)
    posterior, center = Posterior(model, [beta]), np.array([0.3, -0.2, 0.1])
    difference = find_center_difference(posterior, center, order=2)
    full = posterior.gradient(center) - posterior.log_prior_and_gradient(center)[1]
    batching = make_batching("replace", difference.data, BATCH_SIZE, derived=difference.columns)
    estimator = ControlVariateGradient(posterior, batching, difference, full)
    at, index = pt.tensor("at", shape=(3,), dtype="float64"), pt.lvector("index")
    estimate = pytensor.function([at, index], estimator(at, index), mode="FAST_COMPILE")
    position = np.array([0.1, 0.7, -0.4])
    for moved in (0, 2):
        posterior.set_others({"place": np.array(moved)})
        estimates = [estimate(position, rows) for rows in all_subsets(N_ROWS, BATCH_SIZE)]
        exact = posterior.gradient(position)
        np.testing.assert_allclose(np.mean(estimates, axis=0), exact, rtol=0, atol=1e-12)


def normal_mixture() -> pm.Model:
    counts = np.random.default_rng(14).normal([-3.0, 0.0, 3.0], size=(N_ROWS // 3, 3)).ravel()
    with pm.Model() as model:
        weights = pm.Dirichlet("weights", np.ones(3))
        means, scales = pm.Normal("means", 0, 3, shape=3), pm.HalfNormal("scales", 1, shape=3)
        pm.NormalMixture("y", weights, mu=means, sigma=scales, observed=counts)
    return model


class Wave(Op):
    """A sine, or a cosine that has no derivative."""

    __props__ = ("of_cosine",)

    def __init__(self, of_cosine: bool):
        self.of_cosine = of_cosine

    def make_node(self, x):
        return Apply(self, [x], [x.type()])

    def perform(self, node, inputs, outputs):
        outputs[0][0] = (np.cos if self.of_cosine else np.sin)(inputs[0])

    def pullback(self, inputs, outputs, cotangents):
        if self.of_cosine:
            raise NotImplementedError
        return [cotangents[0] * Wave(True)(inputs[0])]


def model_of_wave() -> pm.Model:
    rng = np.random.default_rng(15)
    X = rng.normal(size=(N_ROWS, 2))
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 1, shape=2)
        pm.Normal("y", Wave(False)(X @ beta), 1.0, observed=rng.normal(size=N_ROWS))
    return model


@pytest.mark.parametrize("model", [normal_mixture, model_of_wave])
def test_second_order_of_long_graphs_and_of_operations_without_derivative(monkeypatch, model):
    """Derivatives of rows are stored only where PyTensor has none; the estimate has no bias."""
    monkeypatch.setattr(center_difference, "MOST_OPERATIONS", np.inf)
    posterior = Posterior(model())
    center = np.random.default_rng(16).normal(size=posterior.dimension)
    difference = find_center_difference(posterior, center, order=2)
    assert posterior.has_second_derivatives == (model is normal_mixture)
    at = center + 0.3
    types = [(row.dtype, row.shape[1:]) for row in difference.rows_of(np.arange(2))]
    rows = [pt.tensor(dtype=dtype, shape=(None, *shape)) for dtype, shape in types]
    position, length = pt.tensor("position", shape=center.shape, dtype="float64"), pt.lscalar()
    function = pytensor.function(
        [position, length, *rows],
        difference(position, rows, length, pt.constant(1.0)),
        mode="FAST_COMPILE",
        on_unused_input="ignore",
    )
    parts = np.split(np.arange(N_ROWS), 3)
    sums = [function(at, len(part), *difference.rows_of(part)) for part in parts]
    gradients = [posterior.likelihood_gradient(x, posterior.data) for x in (at, center)]
    exact = gradients[0] - gradients[1] - difference.sums[1] @ (at - center)
    np.testing.assert_allclose(np.sum(sums, axis=0), exact, rtol=1e-9, atol=1e-9)


def test_second_order_far_from_the_centre():
    """Differences of gradients are bounded here, so the noise is bounded too; there is no bias.

    The first distance is near the one from which the shift is taken shorter.
    """
    posterior = Posterior(logistic_model(n_rows=N_ROWS))
    center = np.array([0.3, -0.2, 0.5])
    difference = find_center_difference(posterior, center, order=2)
    full = posterior.gradient(center) - posterior.log_prior_and_gradient(center)[1]
    batching = make_batching("replace", difference.data, BATCH_SIZE, derived=difference.columns)
    estimator = ControlVariateGradient(posterior, batching, difference, full)
    at, index = pt.tensor("at", shape=(3,), dtype="float64"), pt.lvector("index")
    outputs = [estimator(at, index), difference.along_shift(at)[1]]
    estimate = pytensor.function([at, index], outputs, mode="FAST_COMPILE")
    spreads = []
    for distance in (5, 5000):
        position = center + distance * np.array([1.0, -1.0, 1.0])
        found = [estimate(position, rows) for rows in all_subsets(N_ROWS, BATCH_SIZE)]
        exact = posterior.gradient(position)
        estimates = np.array([values for values, _ in found])
        np.testing.assert_allclose(
            estimates.mean(0), exact, rtol=1e-12, atol=1e-12 * np.abs(estimates).max()
        )
        spreads.append(np.ptp(estimates, axis=0).max())
    assert found[0][1] < 0.01
    assert spreads[1] < 3 * spreads[0]


def test_derivatives_of_a_part_of_the_rows_are_biased(posterior):
    """The planted error: the sum at the centre has to be that of all rows."""
    center, position = np.array([0.3, -0.2, 0.5]), np.array([0.1, 0.7, -0.4])
    difference = find_center_difference(posterior, center, order=2)
    gradient, part = difference.sums_of(posterior, posterior.take(np.arange(BATCH_SIZE)))
    vars(difference)["sums"] = gradient, N_ROWS / BATCH_SIZE * part
    batching = make_batching("replace", difference.data, BATCH_SIZE, derived=difference.columns)
    full = posterior.gradient(center) - posterior.log_prior_and_gradient(center)[1]
    estimator = ControlVariateGradient(posterior, batching, difference, full)
    at, index = pt.dvector("at"), pt.lvector("index")
    estimate = pytensor.function([at, index], estimator(at, index), mode="FAST_COMPILE")
    minibatches = all_subsets(N_ROWS, BATCH_SIZE)
    mean = np.mean([estimate(position, rows) for rows in minibatches], axis=0)
    assert np.abs(mean - posterior.gradient(position)).max() > 0.01


def test_windows_of_random_orders_are_subsets_without_replacement():
    """Over orders, all subsets are equally likely: the scheme is sampling without replacement."""
    problem = LinearGaussian.simulate(5, 2, seed=0)
    batching = make_batching("shuffle", [problem.X], 2, **WINDOWS)
    counts: dict[tuple[int, ...], int] = {}
    orders = 3000
    for order in range(1, orders + 1):
        batching.set_order(order)
        for start in range(5):
            window = tuple(sorted(batching.selected(np.int64(start))))
            assert len(set(window)) == 2
            counts[window] = counts.get(window, 0) + 1
    assert len(counts) == 10
    expected = orders * 5 / 10
    # Windows of one order are dependent, which only makes the counts less variable.
    z = (np.array(list(counts.values())) - expected) / np.sqrt(expected)
    assert np.abs(z).max() < 4.5


@pytest.mark.parametrize("scheme", ["shuffle", "replace"])
def test_drawing_in_parts_is_drawing_at_once(scheme):
    for share in ({}, WINDOWS):
        batching = make_batching(scheme, [np.zeros((1000, 2))], 7, **share)
        at_once = batching.draw(np.random.default_rng(1), 50)
        rng = np.random.default_rng(1)
        in_parts = np.concatenate([batching.draw(rng, count) for count in (1, 13, 36)])
        np.testing.assert_array_equal(at_once, in_parts)


def test_rows_are_on_the_device_of_jax():
    """JAX would copy NumPy's arrays in each call. A new order of the rows stays on the device."""
    jax = pytest.importorskip("jax")
    data = [np.arange(11.0), np.arange(22).reshape(11, 2)]
    moved, kept = (
        make_batching("shuffle", data, 4, static=static, **WINDOWS) for static in (True, False)
    )
    for order in (0, 5):
        moved.set_order(order)
        kept.set_order(order)
        for on_device, expected in zip(moved._shared, kept._shared, strict=True):
            values = on_device.get_value(borrow=True)
            assert isinstance(values, jax.Array)
            assert values.dtype == expected.dtype
            np.testing.assert_array_equal(values, expected.get_value())


def test_window_selects_the_rows_it_says(rng):
    data = [rng.normal(size=(11, 2)), np.arange(11)]
    batching = make_batching("shuffle", data, 4, derived=[np.arange(11) + 0.5], **WINDOWS)
    index = pt.lscalar()
    rows = pytensor.function([index], batching.rows(index), mode="FAST_COMPILE")
    for order in (0, 3, 5):
        batching.set_order(order)
        for start in range(11):
            matrix, numbers, halves = rows(np.int64(start))
            np.testing.assert_array_equal(numbers, batching.selected(np.int64(start)))
            np.testing.assert_array_equal(halves, numbers + 0.5)
            np.testing.assert_array_equal(matrix, data[0][numbers])


def test_difference_to_the_center_of_a_regression_takes_no_more_memory_than_its_data():
    """The outcomes cancel, and the mean at the centre replaces them."""
    X = np.random.default_rng(2).normal(size=(200, 4))
    y = (X.sum(1) > 0).astype(float)
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 2.0, shape=4)
        pm.Bernoulli("y", logit_p=X @ beta, observed=y)
    difference = find_center_difference(Posterior(model), np.full(4, 0.3))
    assert [values.shape for values in difference.data] == [(200, 4)]
    assert [values.size for values in difference.columns] == [200]
    assert sum(values.nbytes for values in (*difference.data, *difference.columns)) <= (
        X.nbytes + y.nbytes
    )


@pytest.mark.parametrize("name", ["two parts", "nothing to cut", "outcomes only"])
def test_difference_to_the_center_is_the_difference_of_gradients(rng, name):
    x, y = rng.normal(size=(50, 9)), rng.normal(size=50)
    with pm.Model() as model:
        location = pm.Normal("location")
        if name == "outcomes only":
            pm.Normal("y", location, 2.0, observed=y)
        else:
            slope = pm.Normal("slope", shape=9)
            scale = pm.HalfNormal("scale")
            mean = pm.math.dot(x, slope) + location
            if name == "two parts":
                pm.StudentT("y", nu=4, mu=mean, sigma=scale, observed=y)
                pm.Poisson("z", pm.math.exp(x[:, 0] * location), observed=rng.poisson(1, size=50))
            else:
                pm.Normal("y", mean * x[:, 1], pm.math.exp(scale * x[:, 2]), observed=y)
    posterior = Posterior(model)
    here, center = 0.3 * rng.normal(size=(2, posterior.dimension))
    difference = find_center_difference(posterior, center)
    batching = make_batching("shuffle", difference.data, 50, derived=difference.columns)
    position = pt.tensor("position", shape=(posterior.dimension,), dtype="float64")
    graph = difference(position, batching.rows(pt.constant(0)), batching.length)
    value = pytensor.function([position], graph, mode="FAST_COMPILE")(here)

    def likelihood_gradient(at):
        return posterior.gradient(at) - posterior.log_prior_and_gradient(at)[1]

    expected = likelihood_gradient(here) - likelihood_gradient(center)
    np.testing.assert_allclose(value, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.usefixtures("with_compiler")
def test_quantities_at_the_center_do_not_depend_on_the_rows_beside(rng):
    """To the last bit, so that gathered rows have the same ones as rows in memory."""
    n_rows, features = 2011, 21
    with pm.Model() as model:
        X = pm.Data("X", rng.normal(size=(n_rows, features)).astype("float32"))
        slopes = pm.Normal("slopes", shape=features)
        pm.Bernoulli("y", logit_p=X @ slopes, observed=rng.integers(2, size=n_rows))
    posterior = Posterior(model)
    difference = find_center_difference(posterior, rng.normal(size=posterior.dimension))
    (everywhere,) = difference.columns
    for count in range(1, 40):
        numbers = rng.choice(n_rows, count, replace=False)
        *_, gathered = difference.rows_of(numbers)
        np.testing.assert_array_equal(gathered, everywhere[numbers], strict=True)


def test_data_are_never_written_to(rng):
    values = rng.normal(size=(30, 2))
    values.flags.writeable = False
    batching = make_batching("shuffle", [values], 5, **WINDOWS)
    batching.set_order(4)
    make_batching("replace", [values], 5)


@pytest.mark.parametrize(
    ("batch_size", "error", "message"),
    [
        (0, ValueError, "between 1 and the number of rows, 30, but got 0"),
        (-2, ValueError, "between 1 and the number of rows, 30, but got -2"),
        (31, ValueError, "between 1 and the number of rows, 30, but got 31"),
        (2.5, TypeError, "whole number of rows, but got 2.5"),
        (True, TypeError, "whole number of rows, but got True"),
    ],
)
def test_bad_batch_sizes(batch_size, error, message):
    with pytest.raises(error, match=message):
        make_batching("shuffle", [np.zeros(30)], batch_size)


def test_unknown_scheme():
    with pytest.raises(ValueError, match="one of 'shuffle', 'replace', but got 'epoch'"):
        make_batching("epoch", [np.zeros(30)], 5)
