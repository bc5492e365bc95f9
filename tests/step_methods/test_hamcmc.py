"""HAMCMC: the BFGS recursions, the compiled chain against a NumPy one, its law and contract."""

from __future__ import annotations

import logging
import tracemalloc
from dataclasses import dataclass

import numpy as np
import pymc as pm
import pytest

from pymc_sgmcmc import SGLDCV, BatchSizeWarning, NonFinitePositionError, Posterior, chain
from pymc_sgmcmc.dynamics.hamcmc import preconditioned_move
from pymc_sgmcmc.step_methods.hamcmc import HAMCMC, Pairs
from pymc_sgmcmc.tuning import curvature as of_curvature
from tests.support.exact_law import (
    affine_transition,
    all_indices,
    compiled_law,
    exact_noise_operator,
)
from tests.support.laws import hamcmc_law
from tests.support.linear_gaussian import LinearGaussian, affine_estimate, sgld_covariance
from tests.support.models import logistic_data, logistic_model, two_variable_model
from tests.support.samplers import NO_PAIRS
from tests.support.sampling import sample

NUMPY = None
"""Transitions by NumPy. Those by Numba are compared with them in `test_numba_loop`."""
QUIET = {"progressbar": False, "quiet": True, "compute_convergence_checks": False}
Z_BOUND = 4.5


# --- Independent implementations ------------------------------------------------------------


def dense_bfgs(initial_scale, pairs, dimension):
    """Inverse BFGS matrix from unscaled pairs, oldest first, by its textbook formula."""
    matrix, identity = initial_scale * np.eye(dimension), np.eye(dimension)
    for s, y in pairs:
        rho = 1 / (s @ y)
        left = identity - rho * np.outer(s, y)
        matrix = left @ matrix @ left.T + rho * np.outer(s, s)
    return matrix


@dataclass
class NumpyHAMCMC:
    """Algorithm 1 with the corrections, for many chains at once: arrays are (chains, d)."""

    memory: int
    initial_scale: float
    regularization: float
    threshold: float
    step_size: float
    between: bool = False

    def run(self, gradient, start, noise, indices=None):
        """Positions (T, chains, d), drifts that made them, accepted pairs.

        `gradient(position, index)`; `noise` has shape (T, chains, d + pairs).
        """
        M, d, h = self.memory, start.shape[1], self.step_size
        positions = [start] * M
        pairs, drifts, accepted = [], [], []
        for t, row in enumerate(noise):
            index = None if indices is None else indices[t]
            origin = positions[-M]
            here = gradient(origin, index)
            used = pairs[self.between - M + 1 :] if t >= M else []
            drift = self.times_vector(used, here)
            move = self.root_times(used, row[:, :d], row[:, d:])
            following = origin + h / 2 * drift + np.sqrt(h) * move
            other = positions[-1] if self.between else origin
            s = following - other
            y = gradient(other, index) - gradient(following, index) + self.regularization * s
            good = dot(s, y) > self.threshold * dot(s, s)
            if self.between:
                good &= self.initial_scale * dot(y, y) <= 4 * dot(s, y)
            pairs = [*pairs, (s, y, np.where(good, 1 / np.where(good, dot(s, y), 1.0), 0.0))][-M:]
            positions.append(following)
            drifts.append(drift)
            accepted.append(good)
        return np.array(positions[M:]), np.array(drifts), np.array(accepted)

    def times_vector(self, pairs, vector):
        """Two-loop recursion, the textbook's."""
        alphas = []
        for s, y, rho in reversed(pairs):
            alphas.append(rho * dot(s, vector))
            vector = vector - alphas[-1][:, None] * y
        vector = self.initial_scale * vector
        for (s, y, rho), alpha in zip(pairs, reversed(alphas), strict=True):
            vector = vector + s * (alpha - rho * dot(y, vector))[:, None]
        return vector

    def root_times(self, pairs, z, xi):
        """The noise recursion: eta - rho s (y'eta) + sqrt(rho) s xi."""
        eta = np.sqrt(self.initial_scale) * z
        for (s, y, rho), number in zip(pairs, xi.T[-len(pairs) :] if pairs else [], strict=True):
            eta = eta + s * (np.sqrt(rho) * number - rho * dot(y, eta))[:, None]
        return eta


def dot(left, right):
    return np.einsum("cd,cd->c", left, right)


def spectrum(dimension, condition=100.0):
    """Precisions from 1 to `condition`; one dimension has the largest."""
    return np.geomspace(condition, 1.0, dimension)


def gaussian_chains(precisions, chains, transitions, memory, h, seed, skip=0):
    """Chains with exact gradients on N(0, diag(1/precisions)), started there."""
    d, largest = len(precisions), precisions.max()
    rng = np.random.default_rng(seed)
    regularization = 0.01 * largest
    chain = NumpyHAMCMC(memory, 1 / (largest + regularization), regularization, regularization, h)
    start = rng.standard_normal((chains, d)) / np.sqrt(precisions)
    noise = (rng.standard_normal((chains, d + memory - 1)) for _ in range(transitions))
    return chain, chain.run(lambda position, _: -position * precisions, start, noise)


# --- The recursions -------------------------------------------------------------------------


def random_pairs(rng, count, dimension):
    """Pairs with positive s'y that do not come from one quadratic."""
    pairs = []
    for _ in range(count):
        root = rng.normal(size=(dimension, dimension))
        s = rng.normal(size=dimension)
        pairs.append((s, (root @ root.T + 0.1 * np.eye(dimension)) @ s))
    return pairs


def scaled(pairs):
    """The pairs as the dynamics store them."""
    factors = [(s @ y) ** -0.5 for s, y in pairs]
    return (
        np.array([f * s for f, (s, _) in zip(factors, pairs, strict=True)]),
        np.array([f * y for f, (_, y) in zip(factors, pairs, strict=True)]),
    )


@pytest.mark.parametrize("count", [1, 2, 5])
def test_two_loops_and_noise_equal_dense_bfgs(rng, count):
    d, scale = 6, 0.3
    pairs = random_pairs(rng, count, d)
    H = dense_bfgs(scale, pairs, d)
    s, y = scaled(pairs)
    nothing, no_xi = np.zeros(d), np.zeros(count)
    product = np.array([preconditioned_move(v, nothing, no_xi, s, y, scale) for v in np.eye(d)])
    root = np.column_stack(
        [preconditioned_move(nothing, z, no_xi, s, y, scale) for z in np.sqrt(scale) * np.eye(d)]
        + [preconditioned_move(nothing, nothing, xi, s, y, scale) for xi in np.eye(count)]
    )
    size = np.abs(H).max()
    np.testing.assert_allclose(product, H, rtol=0, atol=1e-12 * size)
    np.testing.assert_allclose(root @ root.T, H, rtol=0, atol=1e-12 * size)
    # The secant equation of the newest pair.
    np.testing.assert_allclose(H @ pairs[-1][1], pairs[-1][0], rtol=1e-9)


def test_pairs_of_zeros_change_nothing(rng):
    d = 4
    s, y = scaled(random_pairs(rng, 3, d))
    v, z, xi = rng.normal(size=d), rng.normal(size=d), rng.normal(size=3)
    s[1] = y[1] = 0.0
    kept = [0, 2]
    np.testing.assert_allclose(
        preconditioned_move(v, z, xi, s, y, 0.3),
        preconditioned_move(v, z, xi[kept], s[kept], y[kept], 0.3),
        rtol=1e-13,
    )
    np.testing.assert_allclose(preconditioned_move(v, z, xi, 0 * s, y, 0.3), 0.3 * v + z)


def test_bfgs_of_a_quadratic_never_exceeds_its_inverse(rng):
    """H_t <= (H + lambda I)^-1 where gamma <= 1/(lambda_max + lambda): the step is bounded."""
    precision = spectrum(8)
    regularized = precision + 1.0
    pairs = [(s, regularized * s) for s in rng.normal(size=(5, 8))]
    H = dense_bfgs(1 / regularized.max(), pairs, 8)
    excess = np.linalg.eigvalsh(np.diag(1 / regularized) - H)
    assert excess[0] > -1e-12


# --- The compiled chain ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def problem() -> LinearGaussian:
    return LinearGaussian.simulate(12, 3, seed=3)


def settings_for(problem, regularization=0.02):
    largest = np.linalg.eigvalsh(problem.precision)[-1]
    return {
        "initial_scale": 1 / largest,
        "regularization": regularization * largest,
        "pairs": Pairs(threshold=0.01 * largest),
        "compile_kwargs": NUMPY,
    }


def state_with(earlier, position, pairs):
    s, y = scaled(pairs)
    return np.concatenate([position, earlier.ravel(), s.ravel(), y.ravel(), [0.0]])


@pytest.mark.parametrize("memory", [2, *(pytest.param(m, marks=pytest.mark.slow) for m in (3, 5))])
def test_compiled_transition_is_that_of_dense_bfgs(problem, rng, memory):
    """Slope I - h/2 H_t B_S from the position M ago, and noise of covariance h H_t."""
    d, h = problem.dimension, 0.4
    settings = settings_for(problem) | {"gradient": "plain"}
    step = HAMCMC(model=problem.model(), memory=memory, batch_size=4, step_size=h, **settings)
    pairs = random_pairs(rng, memory - 1, d)
    state = state_with(rng.normal(size=(memory - 1, d)), rng.normal(size=d), pairs)
    H = dense_bfgs(settings["initial_scale"], pairs, d)
    slopes = []
    for index in all_indices(step.batching):
        read = affine_transition(step.block, index, h, origin=state)
        _, rows_precision = affine_estimate(problem, step.batching.selected(index), None)
        slope = read.slope[:d, d : 2 * d]
        np.testing.assert_allclose(slope, np.eye(d) - h / 2 * H @ rows_precision, atol=1e-10)
        covariance = read.root[:d] @ read.root[:d].T
        np.testing.assert_allclose(covariance, h * H, rtol=0, atol=1e-12 * np.abs(H).max())
        # The last position, and the ones between, have no part in the new one.
        others = [*range(d), *range(2 * d, memory * d)]
        np.testing.assert_allclose(read.slope[:d, others], 0, atol=1e-12)
        slopes.append(slope)
    # The mean over minibatches is the move with the full gradient.
    np.testing.assert_allclose(
        np.mean(slopes, axis=0), np.eye(d) - h / 2 * H @ problem.precision, atol=1e-10
    )


@pytest.mark.parametrize("gradient", ["plain", "cv"])
@pytest.mark.parametrize(
    ("memory", "pairs"),
    [
        (2, "own"),
        pytest.param(3, "own", marks=pytest.mark.slow),
        (3, "between"),
        pytest.param(5, "own", marks=pytest.mark.slow),
        pytest.param(5, "between", marks=pytest.mark.slow),
    ],
)
def test_compiled_chain_is_the_numpy_chain(problem, rng, memory, pairs, gradient):
    """Positions, gradients recorded M passes later on their own rows, and accepted pairs."""
    d, h, length = problem.dimension, 0.5, 40
    settings = settings_for(problem, regularization=0.1)
    scale, regularization = settings["initial_scale"], settings["regularization"]
    threshold = 0.4 / scale
    settings["pairs"] = Pairs(pairs, threshold)
    center = problem.mean + 0.3
    step = HAMCMC(
        model=problem.model(),
        memory=memory,
        batch_size=2,
        step_size=h,
        gradient=gradient,
        center=center,
        **settings,
    )
    start = problem.mean + rng.normal(size=d)
    indices = step.batching.draw(rng, length + memory)
    noise = rng.standard_normal((length, d + memory - (2 if pairs == "between" else 1)))
    auxiliaries = step.block.dynamics.initial_auxiliaries(start, rng)
    ran = step.block((start, *auxiliaries), indices, noise, np.full(length, h))

    def estimate(position, index):
        shift, slope = affine_estimate(
            problem, step.batching.selected(index), center if gradient == "cv" else None
        )
        return shift - position @ slope

    chain = NumpyHAMCMC(memory, scale, regularization, threshold, h, pairs == "between")
    positions, _, accepted = chain.run(estimate, start[None], noise[:, None], indices)
    positions = positions[:, 0]
    np.testing.assert_allclose(ran.positions, positions, rtol=1e-8, atol=1e-10)
    recorded = [
        estimate(position[None], index)[0]
        for position, index in zip(positions, indices[memory:], strict=True)
    ]
    np.testing.assert_allclose(ran.gradients, recorded, rtol=1e-7, atol=1e-8)
    np.testing.assert_array_equal(ran.stats[0], accepted[:, 0])
    # Some pairs are refused and some are not, else the test would see only half.
    assert 0 < accepted.mean() < 1


def test_two_chains_use_one_pair(problem, rng):
    """M = 2 is not SGLD: from the third transition on H_t has the last pair's curvature."""
    d, h = problem.dimension, 0.5
    step = HAMCMC(
        model=problem.model(),
        memory=2,
        batch_size=12,
        step_size=h,
        gradient="plain",
        **settings_for(problem, 0.0),
    )
    state = (problem.mean, *step.block.dynamics.initial_auxiliaries(problem.mean, rng))
    indices = np.zeros(4, dtype=np.int64)
    start = np.concatenate([part.ravel() for part in state])
    before = affine_transition(step.block, indices[0], h, origin=start)
    scale = settings_for(problem)["initial_scale"]
    np.testing.assert_allclose(
        before.root[:d] @ before.root[:d].T, h * scale * np.eye(d), rtol=1e-9
    )
    ran = step.block(state, indices, rng.standard_normal((2, d + 1)), np.full(2, h))
    after = np.concatenate([ran.positions[-1], *(part[-1].ravel() for part in ran.auxiliaries)])
    root = affine_transition(step.block, indices[0], h, origin=after).root[:d]
    s = ran.positions[1] - problem.mean
    np.testing.assert_allclose(root @ root.T / h @ problem.precision @ s, s, rtol=1e-8)


# --- Laws -----------------------------------------------------------------------------------


@pytest.mark.parametrize("gradient", ["plain", "cv"])
@pytest.mark.parametrize("memory", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_law_without_pairs_is_that_of_sgld(gradient, memory):
    problem = LinearGaussian.simulate(9, 2, seed=8)
    scale = 1 / np.linalg.eigvalsh(problem.precision)[-1]
    center = problem.mean + np.array([0.5, -0.3])
    step = HAMCMC(
        model=problem.model(),
        memory=memory,
        batch_size=3,
        step_size=0.3,
        initial_scale=scale,
        gradient=gradient,
        center={"beta": center},
        compile_kwargs=NUMPY,
        **NO_PAIRS,
    )
    at = center if gradient == "cv" else None
    noise = exact_noise_operator(problem, step.batching, at)
    exact = hamcmc_law(problem.precision, noise, 0.3, step)
    mean, covariance = compiled_law(step)
    np.testing.assert_allclose(mean[:2], problem.mean, rtol=1e-8)
    np.testing.assert_allclose(covariance[:2, :2], exact, rtol=1e-8)
    minibatches = [step.batching.selected(index) for index in all_indices(step.batching)]
    enumerated = sgld_covariance(problem, minibatches, 0.3 * scale, at)
    np.testing.assert_allclose(covariance[:2, :2], enumerated, rtol=1e-8)
    # The chains that take turns are independent.
    np.testing.assert_allclose(covariance[:2, 2:4], 0, atol=1e-10)


def stationary_variances(dimension, h, chains, transitions, seed, memory=3):
    """Variances in units of the posterior's, each with its standard error over chains."""
    precisions = spectrum(dimension)
    _, (positions, *_) = gaussian_chains(precisions, chains, transitions, memory, h, seed)
    ratios = (positions[transitions // 5 :] ** 2).mean(0) * precisions
    return ratios.mean(0), ratios.std(0) / np.sqrt(chains)


def test_variance_in_one_dimension_is_exact():
    """With one pair variances are 1/(1 - h/4 mu/(mu + lambda)) times the posterior's."""
    h = 0.5
    ratio, error = stationary_variances(1, h, 2000, 300, seed=1)
    exact = 1 / (1 - h / 4 / 1.01)
    assert abs(ratio - exact) < Z_BOUND * error
    assert abs(1 - exact) > 2 * Z_BOUND * error


@pytest.mark.parametrize(
    ("dimension", "chains", "transitions"), [(1, 1000, 300), (5, 1000, 3000), (50, 300, 3000)]
)
def test_variance_tends_to_the_posteriors(dimension, chains, transitions):
    """The excess is at most h/4 (H_t H <= 1) to first order; extrapolated to h = 0 it is none."""
    large, large_error = stationary_variances(dimension, 0.8, chains, transitions // 2, seed=1)
    small, small_error = stationary_variances(dimension, 0.4, chains, transitions, seed=2)
    # Of the geometric kind 1/(1 - a h), as for SGLD: linear in the inverse.
    extrapolated = 1 / (2 / small - 1 / large)
    error = np.hypot(2 * small_error, large_error)
    assert np.abs((extrapolated - 1) / error).max() < Z_BOUND
    assert (small - 1 / (1 - 0.4 / 4)).max() < Z_BOUND * small_error.max()
    assert small[0] - 1 > Z_BOUND * small_error[0]


@pytest.mark.parametrize(
    ("dimension", "memory", "gain"), [(100, 3, 1.0), (100, 20, 1.1), (5, 5, 3)]
)
def test_slowest_direction_is_faster_than_with_sgld(dimension, memory, gain):
    """Its lag-one autocorrelation is 1 - h/2 r/k at equal h and gamma; r = 1 for SGLD."""
    h, precisions = 0.4, spectrum(dimension)
    chains, transitions = 100, 60 * memory
    chain, (positions, drifts, _) = gaussian_chains(
        precisions, chains, transitions, memory, h, seed=3
    )
    # E[x_t x_{t-M}] = E[x_{t-M}^2] + h/2 E[x_{t-M} drift]: the noise has mean zero.
    past, drift = positions[memory:-memory, :, -1], drifts[2 * memory :, :, -1]
    numerator, denominator = -(past * drift).mean(0), (past**2).mean(0)
    rate = numerator.mean() / denominator.mean()
    deviations = numerator - rate * denominator
    error = deviations.std() / np.sqrt(chains) / denominator.mean()
    sgld = chain.initial_scale * precisions[-1]
    assert rate / sgld - Z_BOUND * error / sgld > gain


# --- The contract with PyMC -----------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    return logistic_model()


def make_step(model, **settings):
    settings = {
        "batch_size": 20,
        "step_size": 0.05,
        "initial_scale": 0.01,
        "regularization": 1.0,
        "pairs": Pairs(threshold=1.0),
        "gradient": "plain",
        "compile_kwargs": NUMPY,
        **settings,
    }
    return HAMCMC(model=model, **settings)


@pytest.fixture(scope="module")
def step(model):
    """Draws are from all chains in turn, and a run of draws can end within a turn."""
    return make_step(model, thin=2)


@pytest.fixture(scope="module")
def reference(model, step):
    return sample(model, step)


def assert_same_draws(actual, expected, **tolerances):
    for name in ("position", "gradient", "pair_accepted"):
        np.testing.assert_allclose(
            actual.sample_stats[name], expected.sample_stats[name], **{"rtol": 0, **tolerances}
        )


@pytest.mark.parametrize("length", [2, 4, 12])
def test_draws_do_not_depend_on_the_length_of_runs(model, step, reference, monkeypatch, length):
    """Draws do not change even where a run is shorter than the lag of M passes."""
    monkeypatch.setattr(chain, "BLOCK_TRANSITIONS", length)
    assert_same_draws(sample(model, step), reference)


@pytest.mark.slow
def test_state_resumes_beside_other_step_methods():
    """The variables of other step methods move between draws, so draws cannot be repeated."""
    model = two_variable_model()
    ours = [model["slope"], model["intercept"]]

    def walk(stepper, point, count):
        for _ in range(count):
            point, _ = stepper.step(point)
            point = {**point, "sigma_log__": point["sigma_log__"] + 0.01}
        return point

    step = make_step(model, vars=ours, thin=3)
    step.setup_chain(np.random.default_rng(5), 0, 30)
    point = walk(step, model.initial_point(), 4)
    state = step.sampling_state
    expected = walk(step, point, 3)
    fresh = make_step(model, vars=ours, thin=3)
    fresh.setup_chain(np.random.default_rng(6), 0, 30)
    fresh.sampling_state = state
    resumed = walk(fresh, point, 3)
    for name, value in expected.items():
        np.testing.assert_array_equal(resumed[name], value)


@pytest.mark.slow
def test_jax_gives_the_same_draws(model, reference):
    """On JAX runs are padded, and shapes are static."""
    draws = sample(model, make_step(model, thin=2, compile_kwargs={"mode": "JAX"}))
    assert_same_draws(draws, reference, rtol=1e-8, atol=1e-8)


def test_gradient_is_that_of_the_recorded_position(model):
    step = make_step(model, batch_size=400, thin=2)
    stats = sample(model, step, draws=8, tune=0, chains=1).sample_stats
    posterior = Posterior(model)
    for position, gradient in zip(stats["position"][0], stats["gradient"][0], strict=True):
        np.testing.assert_allclose(
            gradient, posterior.gradient(position.values), rtol=1e-9, atol=1e-9
        )
    assert set(np.unique(stats["pair_accepted"])) <= {0.0, 1.0}


@pytest.mark.usefixtures("uncompiled")
def test_defaults(model):
    with pytest.warns(BatchSizeWarning):
        step = HAMCMC(model=model, batch_size=40, gradient="plain", compile_kwargs=NUMPY)
    assert step.thin % 3 == 0
    quiet = HAMCMC(model=model, batch_size=40, compile_kwargs=NUMPY)
    assert step.step_size < quiet.step_size < 0.21
    # All rows: only curvature limits the step, at 5 % inflation.
    full = HAMCMC(model=model, batch_size=400, compile_kwargs=NUMPY, memory=2)
    assert full.step_size == pytest.approx(0.2, rel=0.05)
    H = full.center.curvature.precision.dense()
    first = full.block.dynamics.initial_scale.get_value()
    np.testing.assert_allclose(first * np.diag(H), first[0] * H[0, 0])
    rates = np.linalg.eigvals(first[:, None] * H).real
    assert rates.max() == pytest.approx(1 / 1.01)
    assert full.thin == 2 * np.ceil(2 / (full.step_size * rates.min()))
    least, *_, largest = np.linalg.eigvalsh(H / np.sqrt(np.outer(np.diag(H), np.diag(H))))
    threshold = full.block.dynamics.curvature_threshold.get_value()
    np.testing.assert_allclose(threshold / np.diag(H), max(0.01 * largest, 0.25 * least))
    scale = 10 / (1.01 * np.linalg.eigvalsh(H).max())
    large = HAMCMC(model=model, batch_size=400, compile_kwargs=NUMPY, initial_scale=scale)
    assert large.step_size == pytest.approx(full.step_size / 10, rel=0.01)


def test_given_settings_need_no_centre(model):
    given = {"initial_scale": 0.1, "regularization": 0.1, "pairs": Pairs(threshold=0.1)}
    plain = {"gradient": "plain", "step_size": 0.1, "batch_size": 10, "compile_kwargs": NUMPY}
    assert HAMCMC(model=model, **given, **plain).center is None


@pytest.mark.slow
def test_units_of_coordinates_do_not_matter(rng):
    """The default D is the inverse root of the diagonal of H, for chains and their pairs."""
    units, (X, y) = np.array([1.0, 1e3, 0.02]), logistic_data()
    draws, center = [], None
    for scale in (np.ones(3), units):
        with pm.Model() as model:
            beta = pm.Normal("beta", 0, 2 / scale, shape=3)
            pm.Bernoulli("y", logit_p=X @ (beta * scale), observed=y)
        step = HAMCMC(
            model=model,
            batch_size=20,
            step_size=0.5,
            center=None if center is None else {"beta": center / scale},
            pairs="between",
            compile_kwargs=NUMPY,
        )
        center = step.center.position * scale
        indices = step.batching.draw(np.random.default_rng(2), 43)
        noise = np.random.default_rng(3).standard_normal((40, 4))
        start = (center + 0.1) / scale
        state = (start, *step.block.dynamics.initial_auxiliaries(start, rng))
        ran = step.block(state, indices, noise, np.full(40, 0.5))
        assert ran.stats[0].mean() > 0
        draws.append(ran.positions * scale)
    np.testing.assert_allclose(*draws, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("gradient", ["plain", "cv"])
def test_defaults_sample_the_posterior(gradient):
    """Means, and variances between the posterior's and 5 % more, with errors over chains."""
    chains = 40
    problem = LinearGaussian.simulate(300, 4, seed=2)
    model = problem.model()
    step = HAMCMC(model=model, batch_size=200, gradient=gradient, compile_kwargs=NUMPY)
    beta = sample(model, step, draws=80, tune=20, chains=chains).posterior["beta"].values
    centred = (beta - problem.mean) / np.sqrt(np.diag(np.linalg.inv(problem.precision)))
    means, squares = centred.mean(1), (centred**2).mean(1)
    mean_error = means.std(0, ddof=1) / np.sqrt(chains)
    error = squares.std(0, ddof=1) / np.sqrt(chains)
    # As improbable for Student's t with 39 degrees of freedom as 4.5 for a normal.
    bound = 5.2
    assert np.abs(means.mean(0) / mean_error).max() < bound
    assert (squares.mean(0) - 1.05 < bound * error).all()
    assert (squares.mean(0) - 1.0 > -bound * error).all()
    assert error.max() < 0.06


@pytest.mark.slow
def test_pairs_with_less_curvature_than_the_posterior_are_not_used():
    """Minibatches of counts tell little of their dispersion, and some say that it is flat."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(20_000, 3))
    counts = rng.poisson(np.exp(0.5 + X @ [0.3, -0.2, 0.1]))
    with pm.Model() as model:
        intercept, slopes = pm.Normal("intercept", 0, 2), pm.Normal("slopes", 0, 1, shape=3)
        mean = pm.math.exp(intercept + X @ slopes)
        pm.NegativeBinomial("y", mu=mean, alpha=pm.HalfNormal("alpha", 5), observed=counts)
    sds = []
    numba = {"model": model, "compile_kwargs": {"mode": "NUMBA"}}
    for sampler in (HAMCMC(**numba), SGLDCV(**numba)):
        posterior = sample(model, sampler, draws=1000, tune=0, chains=2).posterior
        sds.append([posterior[name].values.std() for name in ("intercept", "alpha")])
    np.testing.assert_allclose(*sds, rtol=0.15)


def test_a_point_moved_by_others_is_followed(model, step):
    """All chains go on from the new position, and no pair spans the jump."""
    step.setup_chain(np.random.default_rng(5), 0, 30)
    point, _ = step.step(model.initial_point())
    for _ in range(3):
        point, _ = step.step(point)
    point = {"beta": point["beta"] + 100.0}
    step.chain.move(point["beta"])
    earlier, displacements, _, start = step.chain.snapshot.auxiliaries
    np.testing.assert_array_equal(earlier, np.repeat(point["beta"][None], 2, axis=0))
    assert not displacements.any()
    assert start == 3


def test_a_chain_that_leaves_the_finite_numbers_keeps_its_draws(model, caplog):
    """At transition t the position is bad; so the gradient at t, evaluated M passes later."""
    step = make_step(model, thin=2, step_size=lambda t: 0.05 if t < 41 else 1e300)
    with caplog.at_level(logging.ERROR, logger="pymc"):
        beta = sample(model, step, draws=30, quiet=False).posterior["beta"].values
    assert np.isfinite(beta[:, :10]).all()
    assert np.isnan(beta[:, 11:]).all()
    assert "became NaN or infinite at transition 4" in caplog.text
    early = make_step(model, thin=2, step_size=lambda t: 0.05 if t < 11 else 1e300)
    with pytest.raises(
        NonFinitePositionError, match=r"at transition 11 .* Try a smaller"
    ) as raised:
        sample(model, early, draws=30)
    assert '. `pairs="between"` may help where' in str(raised.value)


# --- Settings -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"memory": 1}, ValueError, "`memory` should be at least 2, but got 1.* Use `SGLD`"),
        ({"memory": 0}, ValueError, "but got 0"),
        (
            {"memory": 2, "pairs": "between"},
            ValueError,
            "`memory` should be at least 3 with .* got 2",
        ),
        ({"pairs": "all"}, ValueError, "should be one of 'own', 'between' .* but got 'all'"),
        ({"memory": 2.0}, TypeError, "whole number, at least 2, but got 2.0"),
        ({"memory": True}, TypeError, "but got True"),
        ({"initial_scale": 0.0}, ValueError, "`initial_scale` should be positive.* got 0.0"),
        ({"initial_scale": np.nan}, ValueError, "but got nan"),
        ({"initial_scale": "large"}, TypeError, "but got 'large'"),
        ({"regularization": -1.0}, ValueError, "`regularization` should be not negative"),
        ({"regularization": np.inf}, ValueError, "finite, but got inf"),
        ({"step_size": -1.0}, ValueError, "positive and finite, but got -1.0"),
        ({"preconditioner": "curvature"}, TypeError, "preconditioner"),
    ],
)
def test_bad_settings(model, settings, error, message):
    with pytest.raises(error, match=message):
        make_step(model, **settings)


@pytest.mark.usefixtures("uncompiled")
def test_thinning_beside_other_step_methods():
    model = two_variable_model()
    with pytest.raises(ValueError, match=r"multiple of `memory` = 3 .* but got 4"):
        make_step(model, vars=[model["slope"]], thin=4)
    assert make_step(model, vars=[model["slope"]]).thin == 3
    assert make_step(model, thin=4).thin == 4


# --- High dimension -------------------------------------------------------------------------


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("shared", [0.0, 3.0])
def test_scale_without_a_matrix_is_that_of_a_bound_on_the_curvature(shared, monkeypatch):
    """A bound on the largest curvature makes steps shorter, and never too long."""
    monkeypatch.setattr(of_curvature, "DENSE_DIMENSION", 10)
    monkeypatch.setattr(of_curvature, "DENSE_OPERATIONS", 0)
    rng = np.random.default_rng(3)
    X = rng.normal(size=(800, 30)) + shared * rng.normal(size=(800, 1))
    problem = LinearGaussian(X * np.geomspace(1, 10, 30), rng.normal(size=800))
    step = HAMCMC(model=problem.model(), batch_size=400, compile_kwargs=NUMPY)
    assert not step.center.curvature.is_dense
    H, squares = problem.precision, 1 / step.center.curvature.precision.diagonal()
    exact = np.linalg.eigvalsh(np.sqrt(np.outer(squares, squares)) * H)[-1]
    scale = step.block.dynamics.initial_scale.get_value() / squares
    assert scale == pytest.approx(scale[0])
    assert 0.5 < 1.01 * exact * scale[0] < 1.02


@pytest.mark.slow
def test_ten_thousand_dimensions_without_a_matrix():
    """No array has the size D x D, 800 MB, not even while the step method is made."""
    D, n_rows = 10_000, 500
    rng = np.random.default_rng(4)
    X = rng.normal(size=(n_rows, D)) / 100
    y = X @ rng.normal(size=D) + rng.normal(size=n_rows)
    tracemalloc.start()
    with pm.Model() as model:
        beta = pm.Normal("beta", shape=D)
        pm.Normal("y", pm.math.dot(X, beta), 1.0, observed=y)
        with pytest.warns(BatchSizeWarning):
            step = HAMCMC(batch_size=100, gradient="cv", thin=3, compile_kwargs=NUMPY)
        idata = sample(model, step, draws=20, tune=0, chains=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.5 * D * D * 8
    assert np.isfinite(idata.posterior["beta"]).all()
    assert idata.sample_stats["pair_accepted"].mean() > 0.9
