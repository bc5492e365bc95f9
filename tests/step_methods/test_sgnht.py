"""SGNHT: its transition in detail, exact laws with a frozen thermostat, and moments by sampling."""

from __future__ import annotations

import numpy as np
import pymc as pm
import pytest

from pymc_sgmcmc.errors import BatchSizeWarning
from pymc_sgmcmc.step_methods.sgnht import SGNHT
from tests.support.exact_law import (
    AffineTransition,
    affine_transition,
    all_indices,
    exact_noise_operator,
    stationary_law,
)
from tests.support.laws import baoab_law, no_noise
from tests.support.linear_gaussian import LinearGaussian, conditioned
from tests.support.models import logistic_model
from tests.support.sampling import (
    NUMBA,
    check_estimators,
    estimator,
    z_score,
)

Z_BOUND = 4.5
THERMOSTATS = ["scalar", "diagonal"]


def make(problem, *, batch_size=None, **settings):
    settings = {
        "batch_size": batch_size or problem.n_rows,
        "gradient": "plain",
        "compile_kwargs": NUMBA,
        **settings,
    }
    if "step_size" in settings:
        settings = {"preconditioner": "identity", **settings}
    gradient = estimator(settings.pop("gradient"), settings.pop("batching", None))
    return SGNHT(model=problem.model(), gradient=gradient, **settings)


def standard_normal(dimension: int) -> LinearGaussian:
    """A posterior N(0, I)."""
    n_rows = dimension + 5
    Q = np.linalg.qr(np.random.default_rng(3).normal(size=(n_rows, dimension)))[0]
    return LinearGaussian(np.sqrt(1 - 1 / 9) * Q, np.zeros(n_rows))


def run(step, transitions, seed, start=None):
    """A chain of transitions without PyMC: positions, thermostats."""
    rng = np.random.default_rng(seed)
    d = step.posterior.dimension
    position = np.zeros(d) if start is None else start
    state = (position, *step.block.dynamics.initial_auxiliaries(position, rng))
    ran = step.block(
        state,
        step.batching.draw(rng, transitions + 1),
        rng.normal(size=(transitions, step.block.noise_size)),
        np.full(transitions, float(step.step_size)),
    )
    return ran.positions, ran.auxiliaries[1]


# --- Exact --------------------------------------------------------------------------------


def frozen_law(step, friction):
    """Law of position and momentum where the thermostat is too heavy to move."""
    d = step.posterior.dimension
    origin = np.zeros(step.block.state_elements)
    origin[2 * d :] = friction
    transitions = []
    for index in all_indices(step.batching):
        transition = affine_transition(step.block, index, float(step.step_size), origin)
        at_origin = transition.shift + transition.slope @ origin
        transitions.append(
            AffineTransition(
                transition.slope[: 2 * d, : 2 * d], at_origin[: 2 * d], transition.root[: 2 * d]
            )
        )
    mean, covariance = stationary_law(transitions)
    return mean[:d], covariance[:d, :d]


@pytest.mark.parametrize("thermostat", THERMOSTATS)
@pytest.mark.parametrize("dimension", [1, 5, 50])
def test_frozen_thermostat_with_exact_gradient_leaves_the_posterior_invariant(
    thermostat, dimension
):
    problem = conditioned(dimension)
    step = make(problem, step_size=0.12, friction=2.5, thermostat=thermostat, thermostat_mass=1e30)
    mean, covariance = frozen_law(step, 2.5)
    expected = baoab_law(problem.precision, no_noise, 0.12, 2.5)
    np.testing.assert_allclose(covariance, expected, rtol=0, atol=1e-8)
    np.testing.assert_allclose(covariance, np.linalg.inv(problem.precision), rtol=0, atol=1e-8)
    np.testing.assert_allclose(mean, problem.mean, rtol=1e-8)


@pytest.mark.parametrize("thermostat", THERMOSTATS)
@pytest.mark.parametrize("kind", ["scalar", "diagonal", "dense"])
def test_frozen_thermostat_with_minibatches_is_baoab(thermostat, kind):
    problem = LinearGaussian.simulate(6, 2, seed=1)
    posterior = np.linalg.inv(problem.precision)
    M = {"scalar": 0.3, "diagonal": np.diag(posterior) * [1.0, 0.5], "dense": posterior}[kind]
    L = np.linalg.cholesky(np.diag(np.broadcast_to(M, 2)) if np.ndim(M) < 2 else M)
    H = L.T @ problem.precision @ L
    step_size = 0.4 / np.sqrt(np.linalg.eigvalsh(H)[-1])
    step = make(
        problem,
        batch_size=3,
        step_size=step_size,
        friction=2.0,
        preconditioner=M,
        thermostat=thermostat,
        thermostat_mass=1e30,
        batching="replace",
    )
    noise = exact_noise_operator(problem, step.batching)
    expected = baoab_law(H, lambda P: L.T @ noise(L @ P @ L.T) @ L, step_size, 2.0)
    mean, covariance = frozen_law(step, 2.0)
    np.testing.assert_allclose(covariance, L @ expected @ L.T, rtol=1e-7)
    np.testing.assert_allclose(mean, problem.mean, rtol=1e-8)


@pytest.mark.parametrize("thermostat", THERMOSTATS)
def test_transitions_are_those_of_the_formulas(thermostat):
    """BADODAB in a NumPy loop, M = I, with friction that becomes negative."""
    problem = LinearGaussian.simulate(40, 3, seed=3)
    A, mu, h = 20.0, 1e-4, 0.02
    step = make(
        problem, batch_size=5, step_size=h, friction=A, thermostat=thermostat, thermostat_mass=mu
    )
    rng = np.random.default_rng(2)
    indices, noise = step.batching.draw(rng, 13), rng.normal(size=(12, 3))
    theta = problem.mean + 0.1
    r, xi = step.block.dynamics.initial_auxiliaries(theta, rng)
    ran = step.block((theta, r, xi), indices, noise, np.full(12, h))
    assert xi.shape == ((1,) if thermostat == "scalar" else (3,))
    for t in range(12):
        rows = step.batching.selected(indices[t])
        g = -theta / 9 + 8 * (
            problem.row_shifts[rows].sum(0) - problem.row_precisions[rows].sum(0) @ theta
        )
        kicked = r + h * g
        energy = kicked @ kicked / 3 if thermostat == "scalar" else kicked**2
        xi = xi + h / (2 * mu) * (energy - 1)
        r = np.exp(-h * xi) * kicked + np.sqrt(A * (1 - np.exp(-2 * h * xi)) / xi) * noise[t]
        energy = r @ r / 3 if thermostat == "scalar" else r**2
        theta = theta + h / 2 * (kicked + r)
        xi = xi + h / (2 * mu) * (energy - 1)
        np.testing.assert_allclose(ran.positions[t], theta, rtol=1e-9)
        np.testing.assert_allclose(ran.auxiliaries[1][t], xi, rtol=1e-8)
        np.testing.assert_allclose(ran.stats[0][t], xi.mean(), rtol=1e-8)
    assert (ran.auxiliaries[1] < 0).any()


def test_friction_through_zero():
    """At ξ = 0 the noise has its limit 2 A ε."""
    step = make(standard_normal(2), step_size=0.1, friction=3.0, thermostat_mass=1e30)
    ran = step.block(
        (np.zeros(2), np.zeros(2), np.zeros(1)),
        step.batching.draw(np.random.default_rng(0), 2),
        np.ones((1, 2)),
        np.array([0.1]),
    )
    np.testing.assert_allclose(ran.auxiliaries[0][0], np.sqrt(2 * 3.0 * 0.1), rtol=1e-12)


# --- By sampling --------------------------------------------------------------------------


@pytest.mark.parametrize("thermostat", THERMOSTATS)
def test_variance_of_a_standard_normal_in_fifty_dimensions(thermostat):
    """With |v| in place of |v|² in the thermostat the variance would be 50.

    The coordinates with a diagonal thermostat are fifty independent one-dimensional chains. Its
    bias is of second order in the step, and at this one below the error of the test.
    """
    step_size = {"scalar": 0.5, "diagonal": 0.2}[thermostat]
    step = make(standard_normal(50), step_size=step_size, friction=2.0, thermostat=thermostat)
    positions, thermostats = run(step, 40_000, seed=4)
    assert abs(z_score((positions**2).mean(1), 1.0)) < Z_BOUND
    assert np.abs(z_score(positions, 0.0)).max() < Z_BOUND
    assert np.abs(thermostats.mean() - 2.0) < 0.1
    mixed = (positions[:, :-1] * positions[:, 1:]).mean(1)
    assert abs(z_score(mixed, 0.0)) < Z_BOUND


@pytest.mark.parametrize("thermostat", THERMOSTATS)
def test_law_of_the_thermostat(thermostat):
    """N(A, 1 / (μ d)), or N(A, 1 / μ) each, for small steps."""
    step = make(
        standard_normal(50),
        step_size=0.05,
        friction=2.0,
        thermostat=thermostat,
        thermostat_mass=2.0,
    )
    _, thermostats = run(step, 60_000, seed=5)
    variance = 1 / (2.0 * 50) if thermostat == "scalar" else 1 / 2.0
    assert abs(z_score(thermostats.mean(1), 2.0)) < Z_BOUND
    assert abs(z_score(((thermostats - 2.0) ** 2).mean(1), variance)) < Z_BOUND


def euler_chain(start, step_size, diffusion, transitions, seed):
    """Algorithm 1 of Ding et al. on N(0, 1)."""
    rng = np.random.default_rng(seed)
    theta, v, xi = start, rng.normal(), diffusion
    with np.errstate(all="ignore"):
        for _ in range(transitions):
            noise = np.sqrt(2 * diffusion * step_size) * rng.normal()
            v = v - step_size * theta - step_size * xi * v + noise
            theta = theta + step_size * v
            xi = xi + step_size * (v * v - 1)
    return theta


def test_stays_finite_where_explicit_euler_overflows():
    """Far from the mode, at a twentieth of the stable step."""
    assert np.isnan(euler_chain(30.0, 0.1, 1.0, 1000, seed=6))
    step = make(standard_normal(1), step_size=0.1, friction=1.0, thermostat_mass=1.0)
    positions, thermostats = run(step, 20_000, seed=6, start=np.array([30.0]))
    assert np.isfinite(positions).all()
    assert np.isfinite(thermostats).all()
    settled = positions[10_000:]
    assert abs(z_score(settled[:, 0] ** 2, 1.0, batches=40)) < Z_BOUND


def noisy_problem(scales):
    """A regression with orthogonal predictors, whose gradient noise is in proportion to H."""
    rng = np.random.default_rng(7)
    X = np.linalg.qr(rng.normal(size=(1000, len(scales))))[0] * np.sqrt(1000) * scales
    y = X @ rng.normal(size=len(scales)) + rng.normal(size=1000)
    return LinearGaussian(X, y)


@pytest.mark.slow
def test_isotropic_noise_moves_the_thermostat_and_not_the_posterior():
    problem = noisy_problem(np.ones(4))
    with pytest.warns(BatchSizeWarning):
        chosen = make(problem, batch_size=50, batching="replace")
    step_size = 0.05
    step = make(
        problem,
        batch_size=50,
        step_size=step_size,
        friction=2.0,
        preconditioner=np.linalg.inv(problem.precision),
        batching="replace",
    )
    L = np.linalg.cholesky(np.linalg.inv(problem.precision))
    noise = exact_covariance(problem, 50)
    w = np.trace(L.T @ noise @ L) / 4
    assert w == pytest.approx(20, rel=0.1)
    positions, thermostats = run(step, 150_000, seed=8)
    positions, thermostats = positions[5000:], thermostats[5000:]
    assert thermostats.mean() == pytest.approx(2.0 + step_size * w / 2, rel=0.02)
    ratios = np.linalg.solve(L, (positions - problem.mean).T).var(1)
    uncorrected = baoab_law(np.eye(4), lambda P: L.T @ noise @ L, step_size, 2.0)
    assert np.diag(uncorrected).min() > 1.2
    assert np.abs(ratios - 1).max() < 0.1
    assert abs(ratios.mean() - 1) < 0.05
    # The default step allows for the noise that the thermostat does not see.
    assert chosen.friction == pytest.approx(2.0, rel=1e-6)
    assert 0.02 < chosen.step_size < 0.2


def exact_covariance(problem, batch_size):
    """V at the posterior mean, with replacement."""
    r = problem.row_precisions @ problem.mean - problem.row_shifts
    return problem.n_rows**2 / batch_size * np.cov(r.T, bias=True)


@pytest.mark.slow
@pytest.mark.parametrize("thermostat", THERMOSTATS)
def test_noise_that_differs_between_directions(thermostat):
    """A scalar thermostat leaves each direction at its own temperature, a diagonal one at 1."""
    problem = noisy_problem(np.array([1.0, 0.4]))
    fastest = np.sqrt(np.linalg.eigvalsh(problem.precision)[-1])
    step_size, friction = 0.1 / fastest, fastest
    step = make(
        problem,
        batch_size=100,
        step_size=step_size,
        friction=friction,
        thermostat=thermostat,
        batching="replace",
        center={"beta": problem.mean},
    )
    w = np.diag(exact_covariance(problem, 100))
    positions, _ = run(step, 200_000, seed=9)
    ratios = (positions[5000:] - problem.mean).var(0) * np.diag(problem.precision)
    expected = np.ones(2)
    if thermostat == "scalar":
        expected = (friction + step_size * w / 2) / (friction + step_size * w.mean() / 2)
        assert expected[0] / expected[1] > 1.2
    np.testing.assert_allclose(ratios, expected, atol=0.07)


# --- Settings, and what PyMC needs --------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("thermostat", THERMOSTATS)
@pytest.mark.parametrize("gradient", ["plain", "cv", "svrg", "saga"])
def test_gradient_estimators(thermostat, gradient):
    check_estimators(SGNHT, gradient, thermostat=thermostat)


@pytest.mark.slow
def test_diagonal_thermostats_stand_in_the_directions_of_the_noise():
    problem = LinearGaussian.simulate(40, 3, seed=3)
    M = np.linalg.inv(problem.precision)
    step = make(
        problem,
        batch_size=5,
        step_size=0.01,
        preconditioner=M,
        thermostat="diagonal",
        batching="replace",
        center={"beta": problem.mean},
    )
    W = step.block.dynamics.root.values.get_value()
    np.testing.assert_allclose(W @ W.T, M, rtol=1e-9)
    noise = W.T @ exact_covariance(problem, 5) @ W
    np.testing.assert_allclose(noise, np.diag(np.diag(noise)), atol=1e-8 * noise.max())


@pytest.mark.parametrize(("dimension", "thermostat", "degrees"), [(1, "scalar", 1),
                         (10, "scalar", 10), (10, "diagonal", 1)])  # fmt: skip
@pytest.mark.usefixtures("uncompiled")
def test_default_mass(dimension, thermostat, degrees):
    step = make(standard_normal(dimension), step_size=0.1, friction=3.0, thermostat=thermostat)
    assert step.thermostat_mass == pytest.approx(4 / 9 * max(1, 4 / degrees))


@pytest.mark.slow
def test_thermostat_is_recorded():
    problem = standard_normal(2)
    with problem.model() as model:
        step = SGNHT(
            model=model,
            batch_size=7,
            step_size=0.1,
            preconditioner="identity",
            friction=2.0,
            compile_kwargs=NUMBA,
        )
        idata = pm.sample(
            step=step, draws=20, tune=0, chains=1, random_seed=1, progressbar=False, quiet=True,
            compute_convergence_checks=False,
        )  # fmt: skip
    assert np.isfinite(idata.sample_stats["thermostat"]).all()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"thermostat": "vector"}, ValueError, "'scalar' or 'diagonal', but got 'vector'"),
        ({"friction": -1.0}, ValueError, "`friction` should be positive .* but got -1.0"),
        ({"thermostat_mass": 0.0}, ValueError, "`thermostat_mass` should be positive .* got 0.0"),
        ({"thermostat_mass": True}, TypeError, "positive number .* but got True"),
    ],
)
def test_bad_settings(settings, error, message):
    with pytest.raises(error, match=message):
        make(standard_normal(2), **{"step_size": 0.1, "friction": 1.0, **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"step_size": 2.5, "batch_size": 400}, "`step_size` should be below 2 .* but is 2.5"),
        ({"step_size": 0.5, "batch_size": 4}, r"adds \d.* times the kinetic energy.* below 0"),
    ],
)
def test_noise_that_no_thermostat_takes_up(settings, message):
    with pytest.raises(ValueError, match=message):
        SGNHT(
            model=logistic_model(),
            friction=1.0,
            gradient="plain",
            preconditioner="curvature",
            compile_kwargs=NUMBA,
            **settings,
        )


@pytest.mark.slow
def test_chain_frozen_by_a_far_start_says_so():
    """Large gradients make the thermostat so large that the chain hardly moves."""
    model = logistic_model()
    step = SGNHT(model=model, batch_size=100, gradient="cv", compile_kwargs=NUMBA)
    messages = []
    for start in (0.0, 30.0):
        step.setup_chain(np.random.default_rng(1), 50, 50)
        point = {
            name: np.full(np.shape(value), start) for name, value in model.initial_point().items()
        }
        for _ in range(100):
            point, (stats,) = step.step(point)
            # The last draw carries the moments of the chain in a silent one.
            if stats["warning"] is not None and stats["warning"].level != "debug":
                messages.append((start, stats["warning"].message))
    assert [start for start, _ in messages] == [30.0, 30.0]
    assert all("thermostat is at" in message for _, message in messages)
