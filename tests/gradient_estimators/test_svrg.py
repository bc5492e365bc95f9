"""SVRG: the reference follows the chain, and the law over a cycle of refreshes is exact."""

from __future__ import annotations

import numpy as np
import pytensor
import pytest

from pymc_sgmcmc import SGLD, SVRG, Posterior, chain
from pymc_sgmcmc.batching import make_batching
from pymc_sgmcmc.gradient_estimators import PlainGradient, SAGAGradient, SVRGGradient
from pymc_sgmcmc.gradient_estimators.center_difference import find_center_difference
from tests.support.exact_law import all_indices, run_one
from tests.support.linear_gaussian import LinearGaussian
from tests.support.models import logistic_model, two_variable_model
from tests.support.sampling import NUMBA, estimator, sample

N_ROWS, BATCH_SIZE, DIMENSION = 6, 3, 2
EPOCH = 4


@pytest.fixture(scope="module")
def problem() -> LinearGaussian:
    return LinearGaussian.simulate(N_ROWS, DIMENSION, seed=1)


@pytest.fixture(scope="module")
def model():
    return logistic_model()


def svrg_step(model, **settings):
    settings = {
        "batch_size": 20,
        "step_size": 1e-3,
        "preconditioner": "identity",
        "gradient": "svrg",
        **settings,
    }
    return SGLD(model=model, compile_kwargs=NUMBA, **settings)


# --- Exact law over a cycle -----------------------------------------------------------------


def joint_transition(problem, rows, step_size):
    """Slope of one transition of (position, reference), both about the posterior mean, by hand."""
    A, d = problem.row_precisions, problem.dimension
    sloped = problem.n_rows / len(rows) * A[rows].sum(0)
    # -P t - sum A r + N/n sum_S A (r - t), with t and r the deviations from the posterior mean.
    on_position = -problem.prior_precision - sloped
    on_reference = sloped - A.sum(0)
    slope = np.eye(2 * d)
    slope[:d, :d] += step_size / 2 * on_position
    slope[:d, d:] = step_size / 2 * on_reference
    return slope


def compiled_transition(step, problem, index, step_size):
    """The same transition, read off the compiled block with the reference loaded."""
    d = problem.dimension
    reference = step.chain.adaptations[0]

    def run(deviation, noise):
        reference.load(reference.begin(problem.mean + deviation[d:]))
        moved = run_one(step.block, problem.mean + deviation[:d], index, noise, step_size)
        return np.concatenate([moved - problem.mean, deviation[d:]])

    quiet = np.zeros(d)
    shift = run(np.zeros(2 * d), quiet)
    slope = np.column_stack([run(unit, quiet) - shift for unit in np.eye(2 * d)])
    root = np.column_stack([run(np.zeros(2 * d), unit) - shift for unit in np.eye(d)])
    return slope, shift, root


def cycle_covariances(slopes, step_size, dimension, epoch):
    """Covariance of the position 0, 1, ... transitions after a refresh, exact and periodic.

    The mean is exact. One transition takes P to mean_S[T P T'] + h I on the position; at the
    refresh the position is copied to the reference.
    """
    d = dimension
    copy = np.vstack([np.eye(d), np.eye(d)])
    noise = np.zeros((2 * d, 2 * d))
    noise[:d, :d] = step_size * np.eye(d)

    def cycle(covariance):
        joint, seen = copy @ covariance @ copy.T, []
        for _ in range(epoch):
            joint = np.mean([T @ joint @ T.T for T in slopes], axis=0) + noise
            seen.append(joint[:d, :d])
        return seen

    # The map over a cycle is affine: solve for its fixed point.
    size = d * d
    constant = cycle(np.zeros((d, d)))[-1].ravel()
    linear = np.column_stack(
        [cycle(unit.reshape(d, d))[-1].ravel() - constant for unit in np.eye(size)]
    )
    assert np.abs(np.linalg.eigvals(linear)).max() < 1
    start = np.linalg.solve(np.eye(size) - linear, constant).reshape(d, d)
    return [start, *cycle(start)]


@pytest.mark.parametrize("batching", ["shuffle", "replace"])
def test_exact_covariance_over_a_cycle(problem, batching):
    step_size = 0.5 / np.linalg.eigvalsh(problem.precision)[-1]
    step = SGLD(
        model=problem.model(),
        batch_size=BATCH_SIZE,
        step_size=step_size,
        preconditioner="identity",
        gradient=SVRG(refresh=EPOCH, batching=batching),
        compile_kwargs=NUMBA,
    )
    indices = all_indices(step.batching)
    read = [compiled_transition(step, problem, index, step_size) for index in indices]
    for slope, shift, root in read:
        del slope
        # At the mode with the reference there, the estimate has no noise.
        np.testing.assert_allclose(shift, 0, atol=1e-12)
        np.testing.assert_allclose(
            root, np.vstack([np.sqrt(step_size) * np.eye(DIMENSION), np.zeros((2, 2))]), atol=1e-12
        )
    by_hand = [
        joint_transition(problem, step.batching.selected(index), step_size) for index in indices
    ]
    actual = cycle_covariances([slope for slope, _, _ in read], step_size, DIMENSION, EPOCH)
    exact = cycle_covariances(by_hand, step_size, DIMENSION, EPOCH)
    np.testing.assert_allclose(actual, exact, rtol=1e-8)
    np.testing.assert_allclose(actual[0], actual[-1], rtol=1e-8)
    # The position within a cycle matters: the test sees where the refresh is.
    assert np.abs(actual[0] / actual[2] - 1).max() > 1e-3


def second_moment_law(problem, variance_factor, batch_size, step_size, epoch):
    """Covariance, averaged over a cycle, from the noise operator in closed form."""
    A, N = problem.row_precisions, problem.n_rows
    mean_A, H, d = A.mean(0), problem.precision, problem.dimension
    scale = N**2 * variance_factor / batch_size
    F = np.eye(d) - step_size / 2 * H

    def noise(distance):
        return scale * (
            np.einsum("nij,jk,nkl->il", A, distance, A) / N - mean_A @ distance @ mean_A
        )

    covariance = np.linalg.inv(H)
    for _ in range(20_000 // epoch):
        reference, cross, seen = covariance, covariance, []
        for _ in range(epoch):
            distance = covariance + reference - cross - cross.T
            seen.append(covariance)
            covariance = F @ covariance @ F.T + step_size * np.eye(d)
            covariance = covariance + step_size**2 / 4 * noise(distance)
            cross = F @ cross
        if np.allclose(covariance, reference, rtol=1e-12, atol=0):
            break
    return np.mean(seen, axis=0)


def test_closed_form_law_is_the_enumerated_one(problem):
    step_size = 0.4 / np.linalg.eigvalsh(problem.precision)[-1]
    rows = [np.array(index) for index in np.ndindex((N_ROWS,) * 2)]
    slopes = [joint_transition(problem, minibatch, step_size) for minibatch in rows]
    enumerated = np.mean(cycle_covariances(slopes, step_size, DIMENSION, EPOCH)[:-1], axis=0)
    formula = second_moment_law(problem, 1.0, 2, step_size, EPOCH)
    np.testing.assert_allclose(formula, enumerated, rtol=1e-9)


@pytest.mark.parametrize("batching", ["shuffle", "replace"])
@pytest.mark.parametrize("batch_size", [25, 50])
@pytest.mark.usefixtures("uncompiled")
def test_computed_step_size_keeps_the_stated_inflation(batching, batch_size):
    problem = LinearGaussian.simulate(500, 4, seed=2)
    step = svrg_step(
        problem.model(),
        batch_size=batch_size,
        step_size=None,
        preconditioner=None,
        gradient=SVRG(batching=batching),
    )
    root = step.center.curvature.root
    white = LinearGaussian(problem.X @ root, problem.y - problem.X @ problem.mean, prior_sd=1e9)
    law = second_moment_law(
        white, step.batching.variance_factor, batch_size, step.step_size, 500 // batch_size
    )
    inflation = np.linalg.eigvalsh(law)[-1] - 1
    assert 0.025 < inflation < 0.056  # 5 % is of first order in the step


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [10, 50])
def test_the_assumed_noise_is_reached_with_a_distant_reference(batch_size):
    """Where an epoch is many relaxation times, the noise is twice that of the mode's variates."""
    problem = LinearGaussian.simulate(500, 4, seed=2)
    root = np.linalg.cholesky(np.linalg.inv(problem.precision))
    white = LinearGaussian(problem.X @ root, problem.y - problem.X @ problem.mean, prior_sd=1e9)
    A = white.row_precisions
    at_mode = 500**2 / batch_size * (np.mean(A @ A, axis=0) - A.mean(0) @ A.mean(0))
    estimator = SVRGGradient(Posterior(white.model()), batch_size, batching="replace")
    of_noise, of_curvature = estimator.noise_factors
    noise = of_noise * np.linalg.eigvalsh(at_mode)[-1] + of_curvature
    law = second_moment_law(white, 1.0, batch_size, 4 * 0.05 / (noise + 1), 2000)
    assert 0.046 < np.linalg.eigvalsh(law)[-1] - 1 < 0.054


# --- The reference ----------------------------------------------------------------------------


def walk(step, point, draws):
    points, states = [], []
    for _ in range(draws):
        point, _ = step.step(point)
        points.append(point)
        states.append(step.chain.snapshot.adapted[0]["position"])
    return points, states


def test_the_reference_is_the_position_at_the_last_refresh(model, monkeypatch):
    monkeypatch.setattr(chain, "BLOCK_TRANSITIONS", 2)
    step = svrg_step(model, thin=2, gradient=SVRG(refresh=6))
    step.setup_chain(np.random.default_rng(1), 0, 20)
    start = model.initial_point()
    points, references = walk(step, start, 12)
    for draw, reference in enumerate(references):
        at = (draw + 1) // 3 * 3
        expected = start["beta"] if at == 0 else points[at - 1]["beta"]
        np.testing.assert_array_equal(reference, expected)
    state = step.chain.snapshot.adapted[0]
    posterior = Posterior(model)
    full = posterior.gradient(state["position"])
    prior = posterior.log_prior_and_gradient(state["position"])[1]
    np.testing.assert_allclose(state["likelihood_gradient"], full - prior, rtol=1e-10)


@pytest.mark.usefixtures("uncompiled")
def test_one_epoch_is_the_default(model):
    assert svrg_step(model).chain.adaptations[0].transitions == 20
    assert svrg_step(model, gradient=SVRG(refresh=7)).chain.adaptations[0].transitions == 7


# --- Contract of a step -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["JAX"])
def test_backends_give_the_same_draws(model, mode):
    expected = sample(model, svrg_step(model, thin=3), draws=20, tune=0)
    draws = sample(
        model,
        SGLD(
            model=model,
            batch_size=20,
            step_size=1e-3,
            preconditioner="identity",
            thin=3,
            gradient="svrg",
            compile_kwargs={"mode": mode},
        ),
        draws=20,
        tune=0,
    )
    np.testing.assert_allclose(draws.posterior["beta"], expected.posterior["beta"], rtol=1e-9)


def test_the_reference_keeps_the_values_of_other_variables():
    """Unbiased also where the other variables have moved since the refresh."""
    model = two_variable_model(12)
    posterior = Posterior(model, [model["slope"], model["intercept"]])
    estimator = SVRGGradient(posterior, 3, noise_share=1.0)
    point = model.initial_point()
    reference = estimator.reference
    posterior.set_others({**point, "sigma_log__": np.array(0.7)})
    state = reference.at(np.array([0.5, 1.5]))
    posterior.set_others({**point, "sigma_log__": np.array(-0.4)})
    reference.load(state)
    position, index = pytensor.tensor.dvector(), pytensor.tensor.lscalar()
    estimate = pytensor.function([position, index], estimator(position, index), mode="FAST_COMPILE")
    at = np.array([0.2, 1.8])
    mean = np.mean([estimate(at, start) for start in range(12)], axis=0)
    np.testing.assert_allclose(mean, posterior.gradient(at), rtol=1e-11)


# --- Estimators as objects, and bad settings ------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "svrg", "saga"])
def test_an_estimator_of_the_user_gives_the_same_draws_as_its_name(model, kind):
    posterior = Posterior(model)
    if kind == "plain":
        made = PlainGradient(posterior, make_batching("replace", posterior.data, 20))
    else:
        made = {"svrg": SVRGGradient, "saga": SAGAGradient}[kind](posterior, 20, batching="replace")
    step = SGLD(
        model=model,
        gradient=made,
        step_size=1e-3,
        preconditioner="identity",
        thin=2,
        compile_kwargs=NUMBA,
    )
    assert step.batch_size == 20
    assert step.batching_name == "replace"
    draws = sample(model, step, draws=10)
    named = svrg_step(model, gradient=estimator(kind, "replace"), thin=2)
    expected = sample(model, named, draws=10)
    np.testing.assert_array_equal(draws.posterior["beta"], expected.posterior["beta"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 20}, "SVRGGradient, which has its own .* but `batch_size` is given"),
        ({"rows": "y"}, "but `rows` is given as well"),
        ({"batch_size": 20, "rows": "y"}, "`batch_size` and `rows` are given as well"),
        ({"compile_kwargs": {"mode": "JAX"}}, "Make it with `static=True`"),
    ],
)
def test_settings_beside_an_estimator(model, settings, message):
    estimator = SVRGGradient(Posterior(model), 20)
    with pytest.raises(ValueError, match=message):
        SGLD(model=model, gradient=estimator, step_size=1e-3, preconditioner="identity", **settings)


def test_an_estimator_of_another_model():
    estimator = SVRGGradient(Posterior(logistic_model()), 20)
    with pytest.raises(ValueError, match=r"posterior of another model, which has \['beta'\]"):
        SGLD(model=logistic_model(), gradient=estimator, step_size=1e-3, preconditioner="identity")


def test_an_estimator_of_other_variables():
    model = two_variable_model()
    estimator = SVRGGradient(Posterior(model, [model["slope"]]), 20)
    settings = {
        "model": model,
        "gradient": estimator,
        "step_size": 1e-3,
        "preconditioner": "identity",
        "compile_kwargs": NUMBA,
    }
    with pytest.raises(ValueError, match=r"variables \['slope'\], but .* 'sigma_log__', 'slope'"):
        SGLD(**settings)
    assert SGLD(vars=[model["slope"]], **settings).batch_size == 20
    assert SGLD(vars=model["slope"], **settings).batch_size == 20


@pytest.mark.parametrize("refresh", [0, -3, 2.5, True, "epoch"])
def test_bad_refresh(refresh):
    with pytest.raises(ValueError, match=r"`refresh` should be a whole number .* but got"):
        SVRG(refresh=refresh)


def test_stored_columns_are_refused(model):
    posterior = Posterior(model)
    difference = find_center_difference(posterior, np.zeros(3))
    with pytest.raises(ValueError, match="store_columns=False"):
        difference.move_center(np.ones(3))
