"""SGHMC, by BAOAB and by Euler steps, against its own exact stationary laws."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from scipy.linalg import expm, solve_discrete_lyapunov
from scipy.special import digamma, polygamma

from pymc_sgmcmc.dynamics.baoab import BAOAB
from pymc_sgmcmc.dynamics.sghmc import SGHMCEuler
from pymc_sgmcmc.errors import BatchSizeWarning
from pymc_sgmcmc.matrices import Diagonal, as_matrix
from pymc_sgmcmc.schedules import MOST_THINNING
from pymc_sgmcmc.step_methods.momentum import (
    MOST_TIME_STEP,
    NOISE_ESTIMATE_ERROR,
    noise_directions,
    relaxation_transitions,
    solve_step_size,
)
from pymc_sgmcmc.step_methods.sghmc import SGHMC, ResampledMomentum
from tests.support.exact_law import compiled_law, exact_noise_operator, noise_operator
from tests.support.laws import baoab_law, no_noise, sghmc_euler_law
from tests.support.linear_gaussian import LinearGaussian, conditioned
from tests.support.models import logistic_model
from tests.support.sampling import (
    NUMBA,
    check_estimators,
    estimator,
)

# --- The exact laws, from the formulas ----------------------------------------------------


LAWS = {"baoab": baoab_law, "euler": sghmc_euler_law}
CLASSES = {"baoab": BAOAB, "euler": SGHMCEuler}
INTEGRATORS = sorted(LAWS)


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
    return SGHMC(model=problem.model(), gradient=gradient, **settings)


def assert_law(step, problem, expected, rtol=1e-8):
    """The compiled chain has the posterior's mean and an expected covariance of the position."""
    d = problem.dimension
    mean, covariance = compiled_law(step)
    scale = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
    assert np.abs((covariance[:d, :d] - expected) / scale).max() < rtol
    np.testing.assert_allclose(mean[:d], problem.mean, rtol=0, atol=1e-8 * np.abs(mean).max())


@pytest.mark.parametrize("integrator", INTEGRATORS)
@pytest.mark.parametrize("dimension", [pytest.param(1, marks=pytest.mark.slow), 5, 50])
def test_exact_gradient(integrator, dimension):
    problem = conditioned(dimension)
    step_size, friction = 0.12, 2.5
    step = make(
        problem,
        integrator=integrator,
        step_size=step_size,
        friction=friction,
        noise_estimate=None,
    )
    expected = LAWS[integrator](problem.precision, no_noise, step_size, friction)
    assert_law(step, problem, expected)
    posterior = np.linalg.inv(problem.precision)
    if integrator == "baoab":  # exact, at 0.6 of the largest stable step
        np.testing.assert_allclose(expected, posterior, rtol=0, atol=1e-9)
    else:
        ratios = np.linalg.eigvals(expected @ problem.precision).real
        kinetic = step_size**2 * np.linalg.eigvalsh(problem.precision)[-1]
        damped = 4 - 2 * friction * step_size
        assert ratios.max() == pytest.approx(damped / (damped - kinetic), rel=1e-8)


@pytest.fixture(scope="module")
def problem():
    return LinearGaussian.simulate(6, 2, seed=1)


def stable_step(problem, relative=0.4):
    return relative / np.sqrt(np.linalg.eigvalsh(problem.precision)[-1])


@pytest.mark.parametrize("integrator", INTEGRATORS)
@pytest.mark.parametrize("batching", ["shuffle", "replace"])
@pytest.mark.parametrize("gradient", ["plain", "cv"])
def test_minibatches(problem, integrator, batching, gradient):
    center = problem.mean + 0.5
    step_size, friction = stable_step(problem), 2.0
    step = make(
        problem,
        batch_size=3,
        integrator=integrator,
        step_size=step_size,
        friction=friction,
        noise_estimate=None,
        batching=batching,
        gradient=gradient,
        center={"beta": center} if gradient == "cv" else None,
    )
    at = center if gradient == "cv" else None
    noise = exact_noise_operator(problem, step.batching, at)
    expected = LAWS[integrator](problem.precision, noise, step_size, friction)
    assert_law(step, problem, expected)
    if batching == "replace":
        formula = LAWS[integrator](
            problem.precision, noise_operator(problem, step.batching, at), step_size, friction
        )
        np.testing.assert_allclose(formula, expected, rtol=1e-10)


@pytest.mark.parametrize("integrator", INTEGRATORS)
@pytest.mark.parametrize(
    ("kind", "estimate"),
    [
        pytest.param(kind, estimate, marks=() if kind == estimate else pytest.mark.slow)
        for kind in ("scalar", "diagonal", "dense")
        for estimate in ("scalar", "diagonal", "dense")
    ],
)
def test_preconditioner_and_noise_estimate(problem, integrator, kind, estimate):
    """With mass M⁻¹ the law is that for M = I of the problem in coordinates L⁻¹θ."""
    posterior = np.linalg.inv(problem.precision)
    M = {"scalar": 0.3, "diagonal": np.diag(posterior) * [1.0, 0.5], "dense": posterior}[kind]
    dense = np.diag(np.broadcast_to(M, 2)) if np.ndim(M) < 2 else M
    L = np.linalg.cholesky(dense)
    H = L.T @ problem.precision @ L
    step_size, friction = 0.4 / np.sqrt(np.linalg.eigvalsh(H)[-1]), 2.0

    probe = make(problem, batch_size=3, step_size=1e-3, friction=1.0, noise_estimate=None,
                 batching="replace")  # fmt: skip
    operator = exact_noise_operator(problem, probe.batching)
    V = operator(posterior)
    V = {"scalar": np.trace(V) / 2, "diagonal": np.diag(V), "dense": V}[estimate] * 0.4
    step = make(
        problem,
        batch_size=3,
        integrator=integrator,
        step_size=step_size,
        friction=friction,
        preconditioner=M,
        noise_estimate=V,
        center={"beta": problem.mean},
        batching="replace",
    )
    V = np.diag(np.broadcast_to(V, 2)) if np.ndim(V) < 2 else V
    whitened = LAWS[integrator](
        H, lambda P: L.T @ operator(L @ P @ L.T) @ L, step_size, friction, L.T @ V @ L
    )
    if kind != "dense" and estimate != "dense":
        # The coordinates themselves are the directions, with the curvature of each.
        uncorrected = LAWS[integrator](
            H, lambda P: L.T @ operator(L @ P @ L.T) @ L, step_size, friction
        )
        assert np.all(np.diag(whitened) < np.diag(uncorrected))
    assert_law(step, problem, L @ whitened @ L.T)


@pytest.mark.parametrize("integrator", INTEGRATORS)
@pytest.mark.parametrize("friction", [0.5, 2.0, 6.0])
@pytest.mark.parametrize("V", [0.0, 0.8])
def test_closed_forms_in_one_dimension(integrator, friction, V):
    """What step sizes are computed from is the solution of the two-by-two Lyapunov equation."""
    H, step_size = 3.0, 0.15
    cls = CLASSES[integrator]
    exact = LAWS[integrator](np.array([[H]]), lambda P: np.array([[V]]), step_size, friction)
    share = cls.noise_share(step_size, friction, V, H)
    ratio = (1 + share) * (1 + cls.discretization_inflation(step_size, friction, H))
    assert exact[0, 0] * H == pytest.approx(ratio, rel=1e-10)
    if integrator == "euler":
        eta, alpha = step_size**2, step_size * friction
        printed = (1 + eta * V / (2 * alpha)) * (4 - 2 * alpha) / (4 - 2 * alpha - eta * H)
        assert ratio == pytest.approx(printed, rel=1e-12)
    corrected = LAWS[integrator](
        np.array([[H]]), lambda P: np.array([[V]]), step_size, friction, np.array([[V]])
    )
    without_noise = 1 + cls.discretization_inflation(step_size, friction, H)
    assert corrected[0, 0] * H == pytest.approx(without_noise, rel=1e-10)
    # Stability and rate of the mean, from the transition matrix itself.
    a, b = cls.recurrence(step_size, friction, H)
    c, alpha = np.exp(-friction * step_size), friction * step_size
    T = {
        "baoab": [
            [1 - step_size**2 / 2 * (1 + c) * H, step_size / 2 * (1 + c)],
            [-c * step_size * H, c],
        ],
        "euler": [[1 - step_size**2 * H, 1 - alpha], [-(step_size**2) * H, 1 - alpha]],
    }[integrator]
    assert (a, -b) == pytest.approx((np.trace(T), np.linalg.det(T)), rel=1e-12)


# --- The noise estimate -------------------------------------------------------------------


@pytest.fixture(scope="module")
def larger():
    return LinearGaussian.simulate(40, 3, seed=3)


@pytest.mark.parametrize("batching", ["shuffle", "replace"])
@pytest.mark.usefixtures("uncompiled")
def test_the_estimate_is_the_covariance_of_the_gradient_at_the_centre(larger, batching):
    step = make(
        larger,
        batch_size=10,
        step_size=1e-4,
        friction=1.0,
        center={"beta": larger.mean},
        batching=batching,
    )
    W = step.block.dynamics.noise_root.values.get_value()
    w = step.block.dynamics.noise.get_value()
    expected = noise_operator(larger, step.batching)(np.zeros((3, 3)))
    np.testing.assert_allclose((W * w) @ W.T, expected, rtol=1e-10, atol=1e-9)  # M = I, W = Q


@pytest.mark.parametrize("integrator", INTEGRATORS)
def test_the_estimate_removes_the_inflation(larger, integrator):
    """The figures of the docstring, with V̂ at the posterior's covariance and c = 1."""
    fastest = np.sqrt(np.linalg.eigvalsh(larger.precision)[-1])
    probe = make(larger, batch_size=5, step_size=1e-4, friction=1.0, noise_estimate=None,
                 batching="replace")  # fmt: skip
    noise = noise_operator(larger, probe.batching)
    V = noise(np.linalg.inv(larger.precision))
    settings = (larger.precision, noise, 0.1 / fastest, fastest)
    ratios = [
        np.linalg.eigvals(LAWS[integrator](*settings, estimate) @ larger.precision).real.max()
        for estimate in (None, V)
    ]
    expected = {"baoab": [1.367, 1.0001], "euler": [1.370, 1.003]}[integrator]
    assert ratios == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("integrator", INTEGRATORS)
def test_law_with_the_estimate_of_the_rows(larger, integrator):
    fastest = np.sqrt(np.linalg.eigvalsh(larger.precision)[-1])
    step_size, friction = 0.05 / fastest, 2 * fastest
    step = make(
        larger,
        batch_size=5,
        integrator=integrator,
        step_size=step_size,
        friction=friction,
        center={"beta": larger.mean},
    )
    V = noise_operator(larger, step.batching)(np.zeros((3, 3)))
    noise = exact_noise_operator(larger, step.batching)
    assert_law(step, larger, LAWS[integrator](larger.precision, noise, step_size, friction, V))


def test_directions_and_whitening(rng):
    root = np.linalg.cholesky(np.cov(rng.normal(size=(3, 10))))
    square = np.cov(rng.normal(size=(3, 10)))
    for L in (0.7, np.array([0.5, 1.0, 2.0]), root):
        dense_L = as_matrix(L).dense(3)
        for V in (0.3, np.array([1.0, 0.0, 2.0]), square):
            dense_V = as_matrix(V).dense(3)
            noise = noise_directions(as_matrix(V), as_matrix(L))
            W = noise.root.dense(3)
            np.testing.assert_allclose(W @ W.T, dense_L @ dense_L.T, atol=1e-14)
            np.testing.assert_allclose(
                W.T @ dense_V @ W, np.diag(np.broadcast_to(noise.variances, 3)), atol=1e-13
            )


# --- Defaults -----------------------------------------------------------------------------


def average_inflation(step, problem, integrator, estimate=None):
    """Relative excess of the variance in each direction, with V averaged over orders of rows."""
    L = np.linalg.cholesky(np.linalg.inv(problem.precision))
    noise = noise_operator(problem, step.batching)
    whitened = LAWS[integrator](
        np.eye(problem.dimension),
        lambda P: L.T @ noise(L @ P @ L.T) @ L,
        step.step_size,
        step.friction,
        estimate if estimate is None else L.T @ estimate @ L,
    )
    return np.linalg.eigvalsh(whitened) - 1


@pytest.mark.parametrize("integrator", INTEGRATORS)
@pytest.mark.parametrize("batching", ["shuffle", "replace"])
@pytest.mark.usefixtures("uncompiled")
def test_default_step_without_an_estimate_has_the_requested_inflation(integrator, batching):
    problem = LinearGaussian.simulate(1000, 2, seed=5)
    with pytest.warns(BatchSizeWarning):
        step = make(
            problem, batch_size=100, integrator=integrator, noise_estimate=None, batching=batching
        )
    assert step.friction == pytest.approx(2.0, rel=1e-6)
    # The noise is a little more than that at the centre.
    assert average_inflation(step, problem, integrator)[-1] == pytest.approx(0.05, rel=0.02)


@pytest.mark.parametrize("integrator", INTEGRATORS)
@pytest.mark.parametrize("batching", ["shuffle", "replace"])
@pytest.mark.usefixtures("uncompiled")
def test_default_step_with_the_estimate(integrator, batching):
    """Only the bias of the step remains, and at most 5 % if V is wrong as allowed."""
    problem = LinearGaussian.simulate(1000, 2, seed=5)
    settings = {"batch_size": 100, "integrator": integrator, "batching": batching}
    with pytest.warns(BatchSizeWarning):
        step = make(problem, **settings)
    with pytest.warns(BatchSizeWarning):
        without = make(problem, noise_estimate=None, **settings)
    error = NOISE_ESTIMATE_ERROR
    assert 0.6 / error < step.step_size / without.step_size < 1 / error
    V = noise_operator(problem, step.batching)(np.zeros((2, 2)))
    by_step = CLASSES[integrator].discretization_inflation(step.step_size, step.friction, 1.0)
    excess = average_inflation(step, problem, integrator, V)
    np.testing.assert_allclose(excess, by_step, atol=0.003)
    wrong = average_inflation(step, problem, integrator, (1 - error) * V)
    assert wrong.max() == pytest.approx(0.05, abs=0.004)


@pytest.mark.parametrize("batch_size", [pytest.param(6, marks=pytest.mark.slow), 15])
def test_default_step_of_strided_rows(batch_size):
    """The law of the compiled chain by enumeration, with V from the formula of the scheme."""
    problem = LinearGaussian.simulate(61, 2, seed=5)
    with pytest.warns(BatchSizeWarning):
        step = make(problem, batch_size=batch_size)
    _, covariance = compiled_law(step)
    ratios = np.linalg.eigvals(covariance[:2, :2] @ problem.precision).real
    assert np.all(np.abs(ratios - 1) < 0.03)


@pytest.mark.slow
def test_default_of_control_variates(caplog):
    problem = LinearGaussian.simulate(300, 2, seed=5)
    with caplog.at_level(logging.INFO, logger="pymc"):
        step = make(problem, batch_size=60, gradient="cv")
    assert step.step_size == pytest.approx(MOST_TIME_STEP, rel=1e-3)
    assert step.thin == 1
    assert "step size" in caplog.text
    _, covariance = compiled_law(step)
    ratios = np.linalg.eigvals(covariance[:2, :2] @ problem.precision).real
    assert np.all(np.abs(ratios - 1) < 0.03)


@pytest.mark.parametrize("integrator", INTEGRATORS)
@pytest.mark.parametrize("noise", [1e-9, 0.3, 1e4])
def test_solved_step(integrator, noise):
    cls, friction, curvature = CLASSES[integrator], 2.0, 4.0
    step = solve_step_size(cls, friction, noise, curvature, lambda _: 1.0)
    exact = LAWS[integrator](np.array([[curvature]]), lambda P: np.array([[noise]]), step, friction)
    if integrator == "baoab" and noise == 1e-9:
        assert step == pytest.approx(MOST_TIME_STEP / 2)
    else:
        assert exact[0, 0] * curvature == pytest.approx(1.05, rel=1e-8)


def test_largest_default_step_on_a_skewed_posterior():
    """Log rate given five counts, M = 1 / H: many chains as the coordinates of one."""
    counts, chains = 5.0, 100_000
    rng = np.random.default_rng(10)
    dynamics = BAOAB(
        preconditioner=Diagonal(1 / counts),
        root=Diagonal(counts**-0.5),
        friction=2.0,
        noise_root=Diagonal(counts**-0.5),
    )
    state = (np.log(rng.gamma(counts, size=chains)),)
    state += dynamics.initial_auxiliaries(state[0], rng)
    for _ in range(30):
        noise = dynamics.scaled_noise(rng.normal(size=(1, chains)), np.array([MOST_TIME_STEP]))
        state, _, _ = dynamics.transition(
            state, lambda at: counts - np.exp(at), noise[0], MOST_TIME_STEP
        )
    mean, variance = digamma(counts), polygamma(1, counts)
    assert abs(state[0].mean() - mean) < 0.01 * np.sqrt(variance) + 4.5 * np.sqrt(variance / chains)
    # The kurtosis of a log gamma is moderate: 4 bounds it.
    assert abs(state[0].var() / variance - 1) < 0.01 + 4.5 * np.sqrt(3 / chains)


def test_relaxation_time():
    """From the transition matrix of the mean; e^(-t) at critical damping for small steps."""
    assert relaxation_transitions(BAOAB, 0.05, 2.0, 1.0) in (20, 21, 22, 23, 24)
    T = expm(0.05 * np.array([[0.0, 1.0], [-1.0, -0.5]]))
    rate = -np.log(np.abs(np.linalg.eigvals(T)).max())
    assert relaxation_transitions(BAOAB, 0.05, 0.5, 1.0) == np.ceil(1 / rate - 1e-3)
    assert relaxation_transitions(SGHMCEuler, 1e-9, 2.0, 1.0) == MOST_THINNING


# --- Transitions in detail ----------------------------------------------------------------


def reference_chain(step, problem, state, indices, noise, step_sizes, integrator, gamma, every, V):
    """NumPy loop over the formulas, M = I."""
    theta, v, clock = state[0].copy(), state[1].copy(), 0
    d, (values, vectors) = len(theta), np.linalg.eigh(V)
    bends = np.einsum("ji,jk,ki->i", vectors, problem.precision, vectors)
    A, b = problem.row_precisions, problem.row_shifts
    positions = []
    for t, h in enumerate(step_sizes):
        xi = noise[t]
        if every is not None:
            if clock == 0:
                v = xi[1::2]
            clock, xi = (clock + 1) % every, xi[0::2]
        rows = step.batching.selected(indices[t])
        g = -theta / 9 + problem.n_rows / len(rows) * (b[rows].sum(0) - A[rows].sum(0) @ theta)
        if integrator == "euler":
            sd = np.sqrt(2 * (gamma * h - h**2 * values / 2))
            v = (1 - gamma * h) * v + h * g + vectors @ (sd * xi)
            theta = theta + h * v
        else:
            c = np.exp(-gamma * h)
            share = h**2 * values / (4 - h**2 * bends) * (1 + c) / (1 - c)
            sd = np.sqrt((1 - c**2) * (1 - share))
            kicked = v + h * g
            v = c * kicked + vectors @ (sd * xi)
            theta = theta + h / 2 * (kicked + v)
        assert theta.shape == (d,)
        positions.append(theta)
    return np.array(positions)


@pytest.mark.parametrize("integrator", INTEGRATORS)
@pytest.mark.parametrize("every", [None, 1, 3, "draw"])
def test_steps_that_change_and_fresh_momenta(larger, integrator, every):
    """Twelve transitions of the block, in two runs, against a loop over the formulas."""
    step = make(
        larger,
        batch_size=5,
        integrator=integrator if every is None else ResampledMomentum(integrator, every),
        step_size=lambda t: 0.004 / (1 + t),
        friction=9.0,
        center={"beta": larger.mean},
        thin=4,
    )
    rng = np.random.default_rng(0)
    size = 3 if every is None else 6
    assert step.block.noise_size == size
    indices, noise = step.batching.draw(rng, 13), rng.normal(size=(12, size))
    step_sizes = 0.004 / (1 + np.arange(12))
    auxiliaries = step.block.dynamics.initial_auxiliaries(larger.mean, rng)
    state = (larger.mean + 0.1, *auxiliaries)
    first = step.block(state, indices[:6], noise[:5], step_sizes[:5])
    middle = (first.positions[-1], *(part[-1] for part in first.auxiliaries))
    second = step.block(middle, indices[5:], noise[5:], step_sizes[5:])
    V = noise_operator(larger, step.batching)(np.zeros((3, 3)))
    expected = reference_chain(
        step, larger, state, indices, noise, step_sizes, integrator, 9.0,
        4 if every == "draw" else every, V,
    )  # fmt: skip
    positions = np.concatenate([first.positions, second.positions])
    # The sign of eigenvectors is arbitrary: so is that of the noise along them.
    if not np.allclose(positions, expected, rtol=1e-9):
        W = step.block.dynamics.noise_root.values.get_value()
        signs = np.sign(np.einsum("ij,ij->j", W, np.linalg.eigh(V)[1]))
        columns = slice(None) if every is None else slice(0, None, 2)
        flipped = noise.copy()
        flipped[:, columns] *= signs
        expected = reference_chain(
            step, larger, state, indices, flipped, step_sizes, integrator, 9.0,
            4 if every == "draw" else every, V,
        )  # fmt: skip
    np.testing.assert_allclose(positions, expected, rtol=1e-9)


@pytest.mark.parametrize("integrator", INTEGRATORS)
def test_law_with_fresh_momenta_in_every_transition(problem, integrator):
    """Overdamped: θ' = θ + drift, with the velocity's own variance as noise."""
    step_size, gamma, M = stable_step(problem), 2.0, 0.25
    step = make(
        problem,
        integrator=ResampledMomentum(integrator, every=1),
        step_size=step_size,
        friction=gamma,
        noise_estimate=None,
        preconditioner=M,
    )
    H, eye, h = M * problem.precision, np.eye(2), step_size
    if integrator == "euler":
        F, variance = eye - h**2 * H, h**2 * ((1 - gamma * h) ** 2 + 2 * gamma * h)
    else:
        c = np.exp(-gamma * h)
        F = eye - h**2 / 2 * (1 + c) * H
        variance = h**2 / 4 * ((1 + c) ** 2 + 1 - c**2)
    assert_law(step, problem, solve_discrete_lyapunov(F, variance * M * eye))


def test_velocities_begin_in_their_law(larger):
    M = np.linalg.inv(larger.precision)
    step = make(larger, step_size=0.1, friction=1.0, noise_estimate=None, preconditioner=M)
    rng = np.random.default_rng(1)
    draws = np.array(
        [step.block.dynamics.initial_auxiliaries(larger.mean, rng)[0] for _ in range(4000)]
    )
    variances = np.diag(M)
    error = np.sqrt((np.outer(variances, variances) + M**2) / 4000)
    assert np.abs((draws.T @ draws / 4000 - M) / error).max() < 4.5


# --- What PyMC needs ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("integrator", INTEGRATORS)
@pytest.mark.parametrize("gradient", ["plain", "cv", "svrg", "saga"])
def test_gradient_estimators(integrator, gradient):
    check_estimators(SGHMC, gradient, integrator=integrator)


@pytest.mark.usefixtures("uncompiled")
def test_bounds_of_the_noise_are_no_estimate():
    step = SGHMC(model=logistic_model(), batch_size=50, gradient="svrg", compile_kwargs=NUMBA)
    assert step.block.dynamics.noise == 0.0


@pytest.mark.usefixtures("uncompiled")
def test_given_settings_need_no_centre(larger):
    step = make(larger, step_size=1e-3, friction=1.0, noise_estimate=None)
    assert step.center is None
    assert step.thin == 1


# --- Bad input ----------------------------------------------------------------------------


@pytest.mark.parametrize("integrator", INTEGRATORS)
@pytest.mark.usefixtures("uncompiled")
def test_friction_too_small_for_the_noise(larger, integrator):
    fastest = np.sqrt(np.linalg.eigvalsh(larger.precision)[-1])
    settings = {
        "batch_size": 5,
        "integrator": integrator,
        "step_size": 0.05 / fastest,
        "center": {"beta": larger.mean},
    }
    with pytest.raises(ValueError, match=r"has .* times the noise .* `friction` above") as error:
        make(larger, friction=0.1, **settings)
    words = str(error.value).split()
    needed = float(words[words.index("above") + 1].strip(","))
    assert make(larger, friction=1.01 * needed, **settings).friction > needed
    with pytest.raises(ValueError, match="too small for the noise"):
        make(larger, friction=0.99 * needed, **settings)
    largest = float(words[words.index("below") + 1].strip(","))
    make(larger, friction=0.1, **{**settings, "step_size": 0.99 * largest})
    with pytest.raises(ValueError, match="too small for the noise"):
        make(larger, friction=0.1, **{**settings, "step_size": 1.01 * largest})


def test_step_that_is_not_stable(larger):
    fastest = np.sqrt(np.linalg.eigvalsh(larger.precision)[-1])
    with pytest.raises(ValueError, match=r"should be below .* to be stable with friction"):
        make(larger, step_size=2.05 / fastest, friction=1.0, center={"beta": larger.mean})


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (
            {"integrator": "leapfrog"},
            ValueError,
            r"one of 'baoab', 'euler', 'naive' or a .*, but got 'leapfrog'",
        ),
        ({"friction": 0.0}, ValueError, "`friction` should be positive .* but got 0.0"),
        ({"friction": "large"}, TypeError, "positive number .* but got 'large'"),
        ({"noise_estimate": "fisher"}, ValueError, "'rows', None, .* but got 'fisher'"),
        ({"noise_estimate": np.ones(2)}, ValueError, r"\(3,\) or \(3, 3\), but has shape \(2,\)"),
        ({"noise_estimate": np.nan}, ValueError, "finite"),
        ({"noise_estimate": -1.0}, ValueError, "smallest eigenvalue is -1"),
        ({"noise_estimate": np.triu(np.ones((3, 3)))}, ValueError, "symmetric"),
        ({"integrator": "euler", "friction": 2e3}, ValueError, "at most 1, but is 2e"),
    ],
)
def test_bad_settings(larger, settings, error, message):
    settings = {"step_size": 1e-3, "friction": 1.0, "noise_estimate": None, **settings}
    with pytest.raises(error, match=message):
        make(larger, **settings)


def test_bad_momenta():
    with pytest.raises(ValueError, match="at least 1, but got 0"):
        ResampledMomentum("baoab", every=0)
    with pytest.raises(ValueError, match="'draw' or a whole number, but got 'often'"):
        ResampledMomentum("baoab", every="often")
