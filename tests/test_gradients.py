"""Gradient estimators are unbiased and have the covariance that the theory uses."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

from pymc_sgmcmc.batching import make_batching
from pymc_sgmcmc.center_columns import find_center_columns
from pymc_sgmcmc.gradients import ControlVariateGradient, PlainGradient
from pymc_sgmcmc.posterior import Posterior
from tests.linear_gaussian import LinearGaussian, all_subsets
from tests.models import logistic_model

N_ROWS, BATCH_SIZE = 6, 3


@pytest.fixture(scope="module")
def posterior() -> Posterior:
    return Posterior(logistic_model(n_rows=N_ROWS))


def estimate_function(posterior, scheme, estimator_name):
    """Gradient estimate as a function of position and of an index (or of row numbers)."""
    center = np.array([0.3, -0.2, 0.5])
    if estimator_name == "cv":
        full = posterior.gradient(center) - posterior.log_prior_and_gradient(center)[1]
        columns = find_center_columns(posterior, center)
        batching = make_batching(scheme, [*posterior.data, *columns.columns], BATCH_SIZE)
        estimator = ControlVariateGradient(posterior, batching, center, full, columns)
    else:
        batching = make_batching(scheme, posterior.data, BATCH_SIZE)
        estimator = PlainGradient(posterior, batching)
    position = pt.dvector("position")
    index = batching.index_variable("indices").type.clone(
        shape=batching.index_variable("indices").type.shape[1:]
    )("index")
    function = pytensor.function([position, index], estimator(position, index), mode="FAST_COMPILE")
    return batching, function


@pytest.mark.parametrize("estimator", ["plain", "cv"])
def test_mean_over_all_windows_is_the_full_gradient(posterior, estimator):
    batching, estimate = estimate_function(posterior, "shuffle", estimator)
    position = np.array([0.1, 0.7, -0.4])
    for order in range(3):
        batching.set_order(order)
        mean = np.mean([estimate(position, np.int64(s)) for s in range(N_ROWS)], axis=0)
        np.testing.assert_allclose(mean, posterior.gradient(position), rtol=0, atol=1e-13)


@pytest.mark.parametrize("estimator", ["plain", "cv"])
def test_mean_over_all_draws_with_replacement_is_the_full_gradient(posterior, estimator):
    _, estimate = estimate_function(posterior, "replace", estimator)
    position = np.array([0.1, 0.7, -0.4])
    draws = [np.array(rows) for rows in product(range(N_ROWS), repeat=BATCH_SIZE)]
    mean = np.mean([estimate(position, rows) for rows in draws], axis=0)
    np.testing.assert_allclose(mean, posterior.gradient(position), rtol=0, atol=1e-13)


@pytest.mark.parametrize("estimator", ["plain", "cv"])
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
    if estimator == "cv":
        rows = rows - posterior.row_gradients(center, posterior.data)
    formula = N_ROWS**2 / BATCH_SIZE * factor * np.cov(rows.T, bias=True)
    np.testing.assert_allclose(np.cov(estimates.T, bias=True), formula, rtol=1e-10, atol=1e-13)


def test_windows_of_random_orders_are_subsets_without_replacement():
    """Over orders, all subsets are equally likely: the scheme is sampling without replacement."""
    problem = LinearGaussian.simulate(5, 2, seed=0)
    batching = make_batching("shuffle", [problem.X], 2)
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
    batching = make_batching(scheme, [np.zeros((1000, 2))], 7)
    at_once = batching.draw(np.random.default_rng(1), 50)
    rng = np.random.default_rng(1)
    in_parts = np.concatenate([batching.draw(rng, count) for count in (1, 13, 36)])
    np.testing.assert_array_equal(at_once, in_parts)


def test_window_selects_the_rows_it_says(rng):
    data = [rng.normal(size=(11, 2)), np.arange(11)]
    batching = make_batching("shuffle", data, 4)
    index = pt.lscalar()
    rows = pytensor.function([index], batching.rows(index), mode="FAST_COMPILE")
    for order in (0, 3):
        batching.set_order(order)
        for start in range(11):
            matrix, numbers = rows(np.int64(start))
            np.testing.assert_array_equal(numbers, batching.selected(np.int64(start)))
            np.testing.assert_array_equal(matrix, data[0][numbers])


def test_data_are_never_written_to(rng):
    values = rng.normal(size=(30, 2))
    values.flags.writeable = False
    batching = make_batching("shuffle", [values], 5)
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
    with pytest.raises(ValueError, match="one of \\['replace', 'shuffle'\\], but got 'epoch'"):
        make_batching("epoch", [np.zeros(30)], 5)
