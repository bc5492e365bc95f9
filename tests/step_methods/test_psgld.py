"""The RMSprop preconditioner: its limit, when it is frozen, and the law after that."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from pymc_sgmcmc import PSGLD
from pymc_sgmcmc.adaptation import Seen
from tests.support.exact_law import compiled_law, exact_noise_operator, fixed_point
from tests.support.linear_gaussian import LinearGaussian
from tests.support.models import logistic_model

NUMBA = {"mode": "NUMBA"}


@pytest.fixture(scope="module")
def problem() -> LinearGaussian:
    return LinearGaussian.simulate(60, 3, seed=4)


def make(problem, **settings):
    settings = {"gradient": "cv", **settings}
    return PSGLD(model=problem.model(), batch_size=12, compile_kwargs=NUMBA, **settings)


def run(step, tune, draws, seed=3):
    """Advance a chain; the diagonal of M in use after each draw."""
    step.setup_chain(np.random.default_rng(seed), tune, draws)
    point = {"beta": np.zeros(step.posterior.dimension)}
    diagonals = []
    for _ in range(tune + draws):
        point, _ = step.step(point)
        diagonals.append(step.block.dynamics.preconditioner.values.get_value())
    return point, np.array(diagonals)


def test_second_moment_is_that_of_the_recursion(problem):
    step = make(problem, step_size=1e-3, decay=0.9)
    rmsprop = step.chain.adaptations[0]
    state = rmsprop.begin(np.zeros(3))
    gradients = np.random.default_rng(0).normal(size=(7, 3)) * 50
    expected = state["second_moment"]
    for gradient in gradients:
        expected = 0.9 * expected + 0.1 * (gradient / problem.n_rows) ** 2

    def seen(part, at_boundary):
        return Seen(
            part,
            part,
            partial(np.arange, 3),
            tuning=True,
            at_boundary=at_boundary,
            thin=1,
            step_sizes=np.ones(len(part)),
        )

    whole, _ = rmsprop.update(state, seen(gradients, True))
    half, _ = rmsprop.update(state, seen(gradients[:3], False))
    parts, _ = rmsprop.update(half, seen(gradients[3:], True))
    np.testing.assert_allclose(whole["second_moment"], expected, rtol=1e-13)
    np.testing.assert_allclose(parts["second_moment"], expected, rtol=1e-13)
    np.testing.assert_allclose(whole["preconditioner"], 1 / (1e-5 + np.sqrt(expected)), rtol=1e-13)
    np.testing.assert_array_equal(half["preconditioner"], state["preconditioner"])


def test_preconditioner_moves_while_tuning_and_is_frozen_after(problem):
    step = make(problem, thin=10)
    _, diagonals = run(step, tune=60, draws=60)
    changes = np.flatnonzero(np.abs(np.diff(diagonals[:, 0])) > 0)
    assert len(changes) >= 4
    assert changes.max() < 61
    assert (np.diff(changes) == 10).all()  # every hundred transitions


def test_law_after_tuning_is_that_of_the_frozen_preconditioner(problem):
    step = make(problem, thin=20)
    _, diagonals = run(step, tune=100, draws=10)
    M, h = np.diag(diagonals[-1]), step.step_size
    mean, covariance = compiled_law(step)
    noise = exact_noise_operator(problem, step.batching, step.center.position)
    F = np.eye(3) - h / 2 * M @ problem.precision
    exact = fixed_point(
        lambda L: F @ L @ F.T + h * M + h**2 / 4 * M @ noise(L) @ M,
        np.linalg.inv(problem.precision),
    )
    np.testing.assert_allclose(mean, problem.mean, rtol=1e-9)
    np.testing.assert_allclose(covariance, exact, rtol=1e-9)


@pytest.mark.filterwarnings("ignore::pymc_sgmcmc.BatchSizeWarning")
@pytest.mark.parametrize("gradient", ["plain", "cv"])
def test_computed_step_size_inflates_variances_by_five_percent(gradient):
    problem = LinearGaussian.simulate(100, 3, seed=4)
    step = PSGLD(
        model=problem.model(),
        batch_size=20,
        gradient=gradient,
        thin=20,
        compile_kwargs=NUMBA,
    )
    run(step, tune=100, draws=5)
    covariances = []
    for order in range(1, 31):  # each order of the rows has a law of its own
        step.batching.set_order(order)
        covariances.append(compiled_law(step)[1])
    covariance = np.mean(covariances, axis=0)
    root = np.linalg.cholesky(problem.precision)
    inflation = np.linalg.eigvalsh(root.T @ covariance @ root) - 1
    assert 0.01 < inflation.max() < 0.065


def test_condition_number_falls_to_its_root(rng):
    """Gradients have the scale H^(1/2) at stationarity, so M is about H^(-1/2)."""
    X = rng.normal(size=(2000, 2)) * [1.0, 10.0]
    problem = LinearGaussian(X, X @ [1.0, 0.1] + rng.normal(size=2000))
    step = PSGLD(
        model=problem.model(), batch_size=200, gradient="cv", decay=0.999, compile_kwargs=NUMBA
    )
    _, diagonals = run(step, tune=400, draws=1)
    ratio = np.diag(problem.precision) * diagonals[-1]
    before = problem.precision[1, 1] / problem.precision[0, 0]
    assert ratio[1] / ratio[0] == pytest.approx(np.sqrt(before), rel=0.15)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"decay": 1.0}, "between 0 and 1, but got 1.0"),
        ({"regularization": 0.0}, "positive and finite, but got 0.0"),
        ({"regularization": np.nan}, "positive and finite, but got nan"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        PSGLD(model=logistic_model(), batch_size=20, compile_kwargs=NUMBA, **settings)
