"""SAGA: the table of gradients, its running sum, and the law of position and table together."""

from __future__ import annotations

import logging
from copy import deepcopy

import numpy as np
import pymc as pm
import pytest

from pymc_sgmcmc import SGLD, Posterior, chain
from pymc_sgmcmc.dynamics import Langevin
from pymc_sgmcmc.engine import TransitionBlock
from pymc_sgmcmc.gradient_estimators import SAGAGradient, saga
from pymc_sgmcmc.matrices import Diagonal
from tests.support.exact_law import AffineTransition, all_indices, stationary_law
from tests.support.linear_gaussian import LinearGaussian
from tests.support.models import logistic_model
from tests.support.sampling import NUMBA, sample

N_ROWS, BATCH_SIZE, DIMENSION = 6, 3, 2
IDENTITY = Langevin(Diagonal(1.0), Diagonal(1.0))


@pytest.fixture(scope="module")
def problem() -> LinearGaussian:
    return LinearGaussian.simulate(N_ROWS, DIMENSION, seed=1)


@pytest.fixture(scope="module")
def model():
    return logistic_model()


def saga_step(model, **settings):
    settings = {
        "batch_size": 20,
        "step_size": 1e-3,
        "preconditioner": "identity",
        "gradient": "saga",
        **settings,
    }
    return SGLD(model=model, compile_kwargs=NUMBA, **settings)


# --- Exact law of the augmented chain ---------------------------------------------------------


def augmented_transition(problem, rows, step_size, batch_size):
    """Affine transition of (position, table) by hand. A row may be in `rows` twice."""
    A, b = problem.row_precisions, problem.row_shifts
    N, d = b.shape
    size = d + N * d
    # Selectors of the position and of the gradient stored for row i.
    position = np.eye(d, size)
    stored = [np.eye(size)[d * (1 + i) : d * (2 + i)] for i in range(N)]
    slope_of_gradient = -problem.prior_precision @ position + sum(stored)
    shift_of_gradient = np.zeros(d)
    for row in rows:
        slope_of_gradient = slope_of_gradient + N / batch_size * (-A[row] @ position - stored[row])
        shift_of_gradient = shift_of_gradient + N / batch_size * b[row]
    slope, shift = np.eye(size), np.zeros(size)
    slope[:d] += step_size / 2 * slope_of_gradient
    shift[:d] = step_size / 2 * shift_of_gradient
    for row in set(rows):
        part = slice(d * (1 + row), d * (2 + row))
        slope[part] = -A[row] @ position
        shift[part] = b[row]
    root = np.zeros((size, d))
    root[:d] = np.sqrt(step_size) * np.eye(d)
    return AffineTransition(slope, shift, root)


def compiled_transition(block, problem, index, step_size):
    """The same transition, read off the compiled block."""
    N, d = problem.n_rows, problem.dimension

    def run(state, noise):
        block.memory.write((state[d:].reshape(N, d),))
        ran = block(
            (state[:d],), np.repeat(index[None], 2, axis=0), noise[None], np.array([step_size])
        )
        table, total = block.memory.read()
        np.testing.assert_allclose(total, table.sum(0), rtol=0, atol=1e-12)
        return np.concatenate([ran.positions[0], table.ravel()])

    quiet, size = np.zeros(d), d + N * d
    shift = run(np.zeros(size), quiet)
    slope = np.column_stack([run(unit, quiet) - shift for unit in np.eye(size)])
    root = np.column_stack([run(np.zeros(size), unit) - shift for unit in np.eye(d)])
    return AffineTransition(slope, shift, root)


@pytest.mark.parametrize("batching", ["shuffle", "replace"])
def test_exact_law_of_position_and_table(problem, batching):
    step_size = 0.4 / np.linalg.eigvalsh(problem.precision)[-1]
    estimator = SAGAGradient(
        Posterior(problem.model()), BATCH_SIZE, batching=batching, noise_share=1.0
    )
    block = TransitionBlock(IDENTITY, estimator)
    indices = all_indices(estimator.batching)
    if batching == "replace":
        # The order inside a minibatch changes nothing: a quarter of the tuples, with weights.
        counted: dict[tuple, int] = {}
        for index in indices:
            key = tuple(sorted(index))
            counted[key] = counted.get(key, 0) + 1
    else:
        counted = {int(index): 1 for index in indices}
    read, by_hand = [], []
    for key, count in counted.items():
        index = np.asarray(key, dtype=np.int64)
        actual = compiled_transition(block, problem, index, step_size)
        expected = augmented_transition(
            problem, estimator.batching.selected(index).tolist(), step_size, BATCH_SIZE
        )
        for name in ("slope", "shift", "root"):
            np.testing.assert_allclose(getattr(actual, name), getattr(expected, name), atol=1e-12)
        read += [actual] * count
        by_hand += [expected] * count
    mean, covariance = stationary_law(read)
    exact_mean, exact = stationary_law(by_hand)
    np.testing.assert_allclose(mean, exact_mean, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(covariance, exact, rtol=1e-8, atol=1e-10 * np.abs(exact).max())
    np.testing.assert_allclose(mean[:DIMENSION], problem.mean, rtol=1e-8)
    position = covariance[:DIMENSION, :DIMENSION]
    assert np.linalg.eigvalsh(position - np.linalg.inv(problem.precision)).min() > 0


def large_law(problem, batch_size, step_size):
    """Exact stationary covariance of the position, for windows of the rows in their order.

    With stored *positions* t_i in place of the gradients -A_i t_i, so that all moments are of
    the size of the posterior covariance.
    """
    N, d = problem.n_rows, problem.dimension
    A, size = problem.row_precisions, d * (1 + problem.n_rows)
    moments = np.tile(np.linalg.inv(problem.precision), (1 + N, 1 + N))
    windows = [np.arange(start, start + batch_size) % N for start in range(N)]
    on_stored = np.concatenate([-row for row in A], axis=1)
    for _ in range(100_000):
        following = np.zeros_like(moments)
        for rows in windows:
            step = np.zeros((d, size))
            step[:, :d] = -problem.prior_precision - N / batch_size * A[rows].sum(0)
            step[:, d:] = on_stored
            for row in rows:
                part = slice(d * (1 + row), d * (2 + row))
                step[:, part] += N / batch_size * A[row]
            keep = np.repeat(np.arange(1 + N), d)
            for row in rows:
                keep[d * (1 + row) : d * (2 + row)] = 0
            source = keep * d + np.tile(np.arange(d), 1 + N)
            change = step_size / 2 * step
            moved = moments[np.ix_(source, source)]
            cross = (change @ moments)[:, source]
            moved[:d] += cross
            moved[:, :d] += cross.T
            moved[:d, :d] += change @ moments @ change.T
            following += moved / len(windows)
        following[:d, :d] += step_size * np.eye(d)
        if np.allclose(following, moments, rtol=1e-7, atol=1e-9 * np.abs(moments).max()):
            return following[:d, :d]
        moments = following
    raise AssertionError("no convergence")


def test_recursion_on_stored_positions_is_the_augmented_law(problem):
    step_size = 0.4 / np.linalg.eigvalsh(problem.precision)[-1]
    windows = [np.arange(start, start + BATCH_SIZE) % N_ROWS for start in range(N_ROWS)]
    exact = stationary_law(
        augmented_transition(problem, rows.tolist(), step_size, BATCH_SIZE) for rows in windows
    )[1]
    actual = large_law(problem, BATCH_SIZE, step_size)
    np.testing.assert_allclose(actual, exact[:DIMENSION, :DIMENSION], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [10, 20])
@pytest.mark.usefixtures("uncompiled")
def test_computed_step_size_keeps_the_stated_inflation(batch_size):
    problem = LinearGaussian.simulate(60, 2, seed=2)
    step = saga_step(problem.model(), batch_size=batch_size, step_size=None, preconditioner=None)
    root = step.center.curvature.root
    white = LinearGaussian(problem.X @ root, problem.y - problem.X @ problem.mean, prior_sd=1e9)
    # Three orders of the rows: the law of windows differs a little between them.
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(60)
        shuffled = LinearGaussian(white.X[order], white.y[order], prior_sd=1e9)
        law = large_law(shuffled, batch_size, float(step.step_size))
        inflation = np.linalg.eigvalsh(law)[-1] - 1
        # 5 % is of first order in the step, and assumes references independent of the position.
        assert 0.015 < inflation < 0.053


# --- The table --------------------------------------------------------------------------------


def test_the_table_starts_with_the_gradients_at_the_first_position(model):
    step = saga_step(model, step_size=1e-300)
    step.setup_chain(np.random.default_rng(4), 0, 100)
    step.step({"beta": np.array([0.1, 0.2, 0.3])})
    table, total = step.chain.state.memory
    posterior = Posterior(model)
    expected = posterior.row_gradients(np.array([0.1, 0.2, 0.3]), posterior.data)
    np.testing.assert_allclose(table, expected, rtol=1e-12)
    np.testing.assert_allclose(total, expected.sum(0), rtol=1e-10)


@pytest.mark.parametrize(
    ("batching", "noise_share"), [("shuffle", 1.0), ("shuffle", 20.0), ("replace", 20.0)]
)
def test_rows_seen_are_updated_and_no_others(model, batching, noise_share):
    """Against a plain NumPy chain, new orders of the rows and the last passes included."""
    estimator = SAGAGradient(Posterior(model), 150, batching=batching, noise_share=noise_share)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chain, "EPOCHS_BETWEEN_SHUFFLES", 0.5)
        step = saga_step(model, thin=3, gradient=estimator, batch_size=None)
    posterior, h = step.posterior, 1e-3
    position = np.array([0.1, 0.2, 0.3])
    step.chain.begin(np.random.default_rng(4), position)
    table, orders = posterior.row_gradients(position, posterior.data), set()
    for draw in range(8):
        state = step.chain.state
        orders.add(step.chain._order(state))
        rng, noise_rng = deepcopy(state.rng), deepcopy(state.noise_rng)
        pending = step.batching.draw(rng, 1) if draw == 0 else state.pending
        indices = np.concatenate([pending, step.batching.draw(rng, 3)])
        noise = noise_rng.standard_normal((3, 3))
        drawn = step.chain.advance(1)
        for transition in range(4):
            rows = step.batching.selected(indices[transition])
            new = posterior.row_gradients(position, posterior.take(rows))
            gradient = posterior.log_prior_and_gradient(position)[1] + table.sum(0)
            gradient = gradient + 400 / 150 * (new - table[rows]).sum(0)
            if transition == 3:
                np.testing.assert_allclose(drawn.gradients[0], gradient, rtol=1e-9)
                break
            table[rows] = new
            position = position + h / 2 * gradient + np.sqrt(h) * noise[transition]
        np.testing.assert_allclose(drawn.positions[0], position, rtol=1e-10, err_msg=str(draw))
        stored, total = step.chain.state.memory
        np.testing.assert_allclose(stored, table, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(total, stored.sum(0), rtol=0, atol=1e-11)
    if noise_share == 1.0:
        assert len(orders) > 1


def test_all_rows_leave_the_gradients_of_the_present_position(model):
    step = saga_step(model, batch_size=400, thin=1)
    step.setup_chain(np.random.default_rng(4), 0, 100)
    posterior = Posterior(model)
    point = model.initial_point()
    for _ in range(3):
        at = point["beta"]
        point, _ = step.step(point)
        expected = posterior.row_gradients(at, posterior.data)
        np.testing.assert_allclose(step.chain.state.memory[0], expected, rtol=1e-12)


@pytest.mark.parametrize("mode", ["CVM", "FAST_COMPILE", "NUMBA"])
@pytest.mark.parametrize("batching", ["shuffle", "replace"])
def test_the_table_is_changed_in_place(model, mode, batching, request):
    if mode == "FAST_COMPILE":  # The Python code of this mode, beside the C code of the other.
        request.getfixturevalue("without_compiler")
    posterior = Posterior(model)
    estimator = SAGAGradient(posterior, 20, batching=batching)
    block = TransitionBlock(IDENTITY, estimator, {"mode": mode})
    (table, _) = estimator.memory.variables
    estimator.memory.begin(np.full(3, 0.1))
    before = table.get_value(borrow=True)
    indices = estimator.batching.draw(np.random.default_rng(1), 31)
    ran = block((np.zeros(3),), indices, np.zeros((30, 3)), np.full(30, 1e-3))
    after = table.get_value(borrow=True)
    assert np.shares_memory(before, after)

    # Only the gradients of rows seen have changed, to those at the last position that saw them.
    expected = posterior.row_gradients(np.full(3, 0.1), posterior.data)
    for position, index in zip([np.zeros(3), *ran.positions[:-1]], indices[:-1], strict=True):
        rows = estimator.batching.selected(index)
        expected[rows] = posterior.row_gradients(position, posterior.take(rows))
    np.testing.assert_allclose(estimator.memory.read()[0], expected, rtol=1e-10, atol=1e-13)


# --- Contract of a step -------------------------------------------------------------------------


def test_a_point_moved_by_others_is_followed(model):
    step = saga_step(model, thin=3)
    step.setup_chain(np.random.default_rng(5), 0, 30)
    point, _ = step.step(model.initial_point())
    after, _ = step.step({"beta": point["beta"] + 100.0})
    assert np.all(after["beta"] > 50)


@pytest.mark.slow
def test_one_scalar_variable():
    """Of conjugate Gaussian draws, within 4.5 standard errors and the stated bias."""
    y = np.random.default_rng(1).normal(1, 1, size=500)
    with pm.Model() as model:
        mean = pm.Normal("mean")
        pm.Normal("y", mean, 1.0, observed=y)
    step = SGLD(model=model, gradient="saga", batch_size=50, compile_kwargs=NUMBA)
    assert step.block.dimension == 1
    step.setup_chain(np.random.default_rng(2), 200, 1000)
    step.chain.begin(np.random.default_rng(2), np.array([y.sum() / 501]))
    positions = step.chain.advance(1200).positions[200:]
    error = (positions.mean() - y.sum() / 501) * np.sqrt(501)
    assert abs(error) < 4.5 * np.sqrt(3 / 1000)  # with an autocorrelation time of 3
    assert 0.9 < positions.std() * np.sqrt(501) < 1.15


@pytest.mark.slow
def test_computed_settings_need_no_constants(model):
    with model:
        step = SGLD(batch_size=50, gradient="saga", compile_kwargs=NUMBA)
        idata = sample(model, step, draws=300, tune=100)
    deviations = (idata.posterior["beta"].mean(("chain", "draw")) - step.center.position).values
    assert np.abs(deviations / step.center.curvature.standard_deviations).max() < 0.5


# --- Limits -----------------------------------------------------------------------------------


def test_a_table_that_does_not_fit(model, monkeypatch):
    # 400 rows of 3 numbers of 8 bytes, twice, are 19 200 bytes.
    monkeypatch.setattr(saga, "free_memory", lambda: 19_199)
    with pytest.raises(MemoryError, match=r"3 numbers for each of 400 rows, .* Use `gradient=\"sv"):
        saga_step(model)
    monkeypatch.setattr(saga, "free_memory", lambda: 19_200)
    saga_step(model)


def test_the_size_of_the_table_is_logged(model, caplog):
    with caplog.at_level(logging.INFO, logger="pymc.sgmcmc"):
        SAGAGradient(Posterior(model), 20)
    assert "0.0096 MB" in caplog.text


def test_jax_is_refused(model):
    with pytest.raises(ValueError, match='`gradient="saga"` does not run on JAX'):
        SGLD(
            model=model,
            batch_size=20,
            step_size=1e-3,
            preconditioner="identity",
            gradient="saga",
            compile_kwargs={"mode": "JAX"},
        )


@pytest.mark.parametrize("batching", ["replace", "shuffle"])
def test_bound_of_the_noise_where_autocorrelations_are_small(batching):
    """Positions independent of the references, the worst case, for the mean of a Gaussian.

    With curvature A = N / 4 the estimate's scatter from references that are draws of the posterior
    is at most the bound, and in windows close to it: their rows share one reference.
    """
    rng = np.random.default_rng(5)
    N, n, transitions = 600, 60, 4_000
    y = rng.normal(1, 2, size=N)
    with pm.Model() as model:
        mean = pm.Normal("mean", 0, 5)
        pm.Normal("y", mean, 2.0, observed=y)
    estimator = SAGAGradient(Posterior(model), n, batching=batching, noise_share=1.0)
    curvature = N / 4 + 1 / 25
    center = y.sum() / 4 / curvature
    stored = np.full(N, center)
    errors = []
    for index in estimator.batching.draw(rng, transitions):
        rows = estimator.batching.selected(index)
        errors.append(N / n * stored[rows].sum() / 4 - stored.sum() / 4)
        stored[rows] = center + rng.standard_normal() / np.sqrt(curvature)
    _, of_curvature = estimator.noise_factors
    ratio = np.var(errors[200:]) / (of_curvature * curvature)
    assert 0.3 < ratio < 1.0
