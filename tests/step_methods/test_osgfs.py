"""OSGFS: its matrices, exact laws, learned covariance of the gradient and convergence flag."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import combinations, product

import numpy as np
import pymc as pm
import pytest
from scipy import stats

from pymc_sgmcmc import chain
from pymc_sgmcmc.adaptation import Seen
from pymc_sgmcmc.adaptation.convergence import (
    chi_square_bound,
    chi_square_statistic,
    elementwise_statistic,
    window_mean_variance,
)
from pymc_sgmcmc.adaptation.gradient_noise import ResidualNoise, row_covariance, sample_rows
from pymc_sgmcmc.dynamics.osgfs import (
    ScoringMatrices,
    joint_basis,
    scalar_bound,
    scoring_matrices,
    strong_prior_bound,
    weak_prior_bound,
)
from pymc_sgmcmc.errors import BatchSizeWarning
from pymc_sgmcmc.gradient_estimators import PlainGradient
from pymc_sgmcmc.step_methods.osgfs import OSGFS, ConvergenceTest, RunningCovariance
from tests.support.exact_law import compiled_law, exact_noise_operator, fixed_point, noise_operator
from tests.support.laws import osgfs_law, osgfs_law_of_step
from tests.support.linear_gaussian import LinearGaussian
from tests.support.sampling import estimator

NUMBA = {"mode": "NUMBA"}
QUIET = {"progressbar": False, "quiet": True, "compute_convergence_checks": False}
Z_BOUND = 4.5


def make_step(problem, **settings):
    settings = {"batch_size": 5, "model": problem.model(), "compile_kwargs": NUMBA, **settings}
    gradient = estimator(settings.pop("gradient", "plain"), settings.pop("batching", None))
    step = OSGFS(gradient=gradient, **settings)
    step.its_model = settings["model"]
    return step


def sample(step, draws, tune=0, chains=1, cores=1, seed=3, model=None, **kwargs):
    with model or step.its_model:
        return pm.sample(
            step=step,
            draws=draws,
            tune=tune,
            chains=chains,
            cores=cores,
            random_seed=seed,
            **{**QUIET, **kwargs},
        )


def state_of(matrices: ScoringMatrices) -> dict[str, np.ndarray]:
    """Shared matrices for an adaptation to set, without compiled transitions."""
    return {
        "basis": matrices.basis,
        "noise": matrices.noise,
        "fractions": matrices.fractions,
    }


def matrices_of(state) -> ScoringMatrices:
    return ScoringMatrices(state["basis"], state["noise"], state["fractions"])


class Scheme:
    """The numbers of a minibatch scheme that its noise depends on."""

    def __init__(self, n_rows, batch_size, without_replacement):
        self.n_rows, self.batch_size = n_rows, batch_size
        self.variance_factor = (n_rows - batch_size) / (n_rows - 1) if without_replacement else 1.0


@pytest.fixture(scope="module")
def problem():
    return LinearGaussian.simulate(40, 3, seed=3)


# --- Matrices -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_matrices():
    rng = np.random.default_rng(5)
    A, B = rng.normal(size=(2, 4, 4))
    scale = np.diag([1e-3, 1.0, 10.0, 1e4])
    return scale @ (A @ A.T + np.eye(4)) @ scale, scale @ B[:, :2] @ B[:, :2].T @ scale * 9


def test_joint_basis_diagonalizes_both(two_matrices):
    H, V = two_matrices
    W, v = joint_basis(H, V)
    np.testing.assert_allclose(W.T @ H @ W, np.eye(4), atol=1e-9)
    np.testing.assert_allclose(W.T @ V @ W, np.diag(v), atol=1e-9)


@pytest.mark.parametrize("k", ["matrix", "scalar", "strong_prior", 0.05])
def test_sigma_is_the_paper_s_equation_8(two_matrices, k):
    H, V = two_matrices
    matrices = scoring_matrices(H, V, k, 1.5)
    D = matrices.drift
    expected = 2 * D - D @ (H + V) @ D
    scale = np.sqrt(np.outer(np.diag(D), np.diag(D)))
    np.testing.assert_allclose(matrices.injected_covariance / scale, expected / scale, atol=1e-8)
    np.testing.assert_allclose(
        (matrices.root @ matrices.root.T) / scale, expected / scale, atol=1e-8
    )
    np.testing.assert_allclose(matrices.gradient_variances, np.diag(H + V), rtol=1e-8)


def test_the_matrix_choice_is_the_largest(two_matrices):
    """A little more in any direction and Σ is not positive semidefinite, or k above its bound."""
    H, V = two_matrices
    matrices = scoring_matrices(H, V, "matrix", 1.5)
    at_bound = matrices.fractions == 0.75
    assert at_bound.any()
    assert not at_bound.all()
    more = 1.001 * matrices.fractions
    injected = more * (2 - more * (1 + matrices.noise))
    assert (injected[~at_bound] < 0).all()


def test_scalar_choice_is_bound_by_the_noisiest_direction(two_matrices):
    H, V = two_matrices
    largest = np.linalg.eigvals(np.linalg.solve(H, V)).real.max()
    matrices = scoring_matrices(H, V, "scalar", 2.0)
    np.testing.assert_allclose(2 * matrices.fractions, 4 / (1 + largest), rtol=1e-8)
    np.testing.assert_allclose(
        matrices.drift * 2 / (2 * matrices.fractions[0]), np.linalg.inv(H), rtol=1e-6
    )


def test_bounds_of_the_paper():
    """(13), (15) and (16), by eigenvalues of the printed matrices."""
    rng = np.random.default_rng(8)
    A = rng.normal(size=(3, 3))
    NC, G, ratio, c = A @ A.T, np.diag([1.0, 50.0, 80.0]), 1000 / 20, 1.9
    inverse = np.linalg.inv(NC + G)
    assert weak_prior_bound(ratio) == pytest.approx(4 * 20 / (1000 + 20))
    r = np.linalg.eigvalsh(inverse)[0] / np.linalg.eigvalsh(inverse @ NC @ inverse)[-1]
    strong = 4 * r / (r + ratio)
    assert strong_prior_bound(NC + G, ratio * NC) == pytest.approx(strong)
    for k, expected in [
        ("weak_prior", weak_prior_bound(ratio)),
        ("strong_prior", strong),
        ("paper", max(strong, weak_prior_bound(ratio))),
    ]:
        matrices = scoring_matrices(NC + G, ratio * NC, k, c, ratio)
        np.testing.assert_allclose(2 * matrices.fractions, expected)
        assert expected <= scalar_bound(matrices.noise) * (1 + 1e-9)  # sufficient
    matrices = scoring_matrices(NC + G, ratio * NC, "paper", 0.01, ratio)
    np.testing.assert_allclose(2 * matrices.fractions, 0.01)


def test_curvature_that_is_not_positive_definite_is_repaired():
    W, _ = joint_basis(np.diag([1.0, 0.0, -2.0]), np.eye(3))
    assert np.isfinite(W).all()
    assert W[2, 2] ** 2 + W[2, 1] ** 2 + W[2, 0] ** 2 == pytest.approx(0.5)


# --- Exact laws ---------------------------------------------------------------------------


def prior_of(problem, kind):
    """Standard deviation of the prior relative to what the rows say."""
    information = np.trace(problem.row_precisions.sum(0)) / problem.dimension
    return {"weak": 100.0, "mixed": 1.0, "strong": 0.05}[kind] / np.sqrt(information)


@pytest.mark.parametrize("prior", ["weak", "mixed", "strong"])
@pytest.mark.parametrize("fraction", [0.05, 0.25, 0.5])
@pytest.mark.parametrize("without_replacement", [True, False])
@pytest.mark.parametrize("k", ["matrix", "scalar"])
def test_the_law_is_the_posterior(problem, prior, fraction, without_replacement, k):
    problem = replace(problem, prior_sd=prior_of(problem, prior))
    scheme = Scheme(40, int(40 * fraction), without_replacement)
    noise = noise_operator(problem, scheme)
    posterior = np.linalg.inv(problem.precision)
    for max_k in (0.5, 2.0):
        matrices = scoring_matrices(problem.precision, noise(posterior), k, max_k)
        law = osgfs_law(problem.precision, noise, matrices.drift, matrices.injected_covariance)
        np.testing.assert_allclose(law, posterior, rtol=1e-8, atol=1e-10 * posterior.max())


@pytest.mark.parametrize("fraction", [0.05, 0.25, 0.5])
def test_the_law_without_the_factor_of_the_scheme(fraction):
    """The error of the paper's V where rows are drawn without replacement.

    Under a weak prior the variance is (N - n) / (N - 1) of the posterior's: half of it at n = N/2.
    """
    N = 4000
    H, C = np.array([[1.0 * N]]), np.array([[1.0]])
    scheme = Scheme(N, int(fraction * N), True)
    V = N**2 / scheme.batch_size * C
    matrices = scoring_matrices(H, V, "scalar", 2.0)
    law = osgfs_law(
        H, lambda _: scheme.variance_factor * V, matrices.drift, matrices.injected_covariance
    )
    assert (law * H).item() == pytest.approx(scheme.variance_factor)


@pytest.mark.parametrize("batch_size", [10, 25])
def test_default_matrices_give_the_posterior(batch_size):
    """The law by enumeration of the default minibatches, of which V is a large part."""
    problem = LinearGaussian.simulate(101, 2, seed=5)
    step = OSGFS(
        model=problem.model(), batch_size=batch_size, bias=0.35, compile_kwargs={"mode": "NUMBA"}
    )
    step.scoring.load(step.scoring.begin(problem.mean))
    _, covariance = compiled_law(step)
    ratios = np.linalg.eigvals(covariance @ problem.precision).real
    np.testing.assert_allclose(ratios, 1, atol=0.05)


@pytest.mark.parametrize("gradient", ["plain", "cv"])
@pytest.mark.parametrize("batching", ["shuffle", "replace"])
def test_compiled_transitions_have_their_law(batching, gradient):
    if batching == "replace":
        problem, batch_size = LinearGaussian.simulate(6, 2, seed=1), 3
    else:
        problem, batch_size = LinearGaussian.simulate(40, 3, seed=3), 8
    center = problem.mean + 0.3
    step = make_step(
        problem, batch_size=batch_size, gradient=gradient, batching=batching, center=center
    )
    at = center if gradient == "cv" else None
    noise = exact_noise_operator(problem, step.batching, at)
    posterior = np.linalg.inv(problem.precision)
    if batching == "replace":
        np.testing.assert_allclose(
            noise(posterior), noise_operator(problem, step.batching, at)(posterior), rtol=1e-9
        )
    for k in ("matrix", 0.3):
        exact = scoring_matrices(problem.precision, noise(posterior), k, 0.7)
        wrong = scoring_matrices(1.3 * problem.precision, noise(posterior) / 2, k, 0.7)
        for matrices in (exact, wrong):
            step.scoring.load(state_of(matrices))
            mean, covariance = compiled_law(step)
            law = osgfs_law(problem.precision, noise, matrices.drift, matrices.injected_covariance)
            np.testing.assert_allclose(osgfs_law_of_step(problem.precision, noise, 1.0, step), law)
            np.testing.assert_allclose(mean, problem.mean, rtol=1e-9)
            np.testing.assert_allclose(covariance, law, rtol=1e-8, atol=1e-10)
            if matrices is exact and (matrices.injected > 0).all():
                np.testing.assert_allclose(covariance, posterior, rtol=1e-8, atol=1e-10)


def well_specified(n_rows, dimension, prior, seed=2):
    """Residuals of equal size, so that Fisher's identity holds for these rows."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n_rows, dimension)) @ np.tril(rng.normal(size=(dimension,) * 2))
    X = np.concatenate([X, X])
    signs = np.repeat([1.0, -1.0], n_rows)
    problem = LinearGaussian(X, X @ rng.normal(size=dimension) * 1e-3 + signs)
    return replace(problem, prior_sd=prior_of(problem, prior))


@pytest.mark.parametrize("prior", ["weak", "mixed", "strong"])
@pytest.mark.parametrize("fraction", [0.05, 0.25, 0.5])
@pytest.mark.parametrize("batching", ["shuffle", "replace"])
@pytest.mark.usefixtures("uncompiled")
def test_what_the_step_learns_from_all_rows_gives_the_posterior(prior, fraction, batching):
    """Within 1 %: N = 2000, and C at the centre lacks what the posterior's width adds to it."""
    problem = well_specified(1000, 3, prior)
    step = make_step(
        problem,
        batch_size=int(2000 * fraction),
        batching=batching,
        bias=0.35,
        center=problem.mean,
        curvature="fisher",
    )
    state = step.scoring.begin(problem.mean)
    matrices = matrices_of(state)
    root = np.linalg.cholesky(problem.precision)
    learned = np.linalg.inv(matrices.basis @ matrices.basis.T)
    whitened = np.linalg.solve(root, np.linalg.solve(root, learned).T)
    np.testing.assert_allclose(whitened, np.eye(3), atol=0.01)
    noise = noise_operator(problem, step.batching)
    law = osgfs_law(problem.precision, noise, matrices.drift, matrices.injected_covariance)
    np.testing.assert_allclose(root.T @ law @ root, np.eye(3), atol=0.01)


def test_matrix_k_mixes_where_scalar_k_does_not():
    """With a strong prior on one of two coordinates, only "matrix" gives it a larger k."""
    H, V = np.diag([1.0, 1000.0]), np.diag([20.0, 20.0])
    fractions = scoring_matrices(H, V, "matrix", 2.0).fractions
    np.testing.assert_allclose(np.sort(1 - fractions), [1 - 1.0, 1 - 2 / 21])
    np.testing.assert_allclose(scoring_matrices(H, V, "scalar", 2.0).fractions, 2 / 21)


# --- What is learned of the gradient ----------------------------------------------------------


def test_row_covariance_is_unbiased():
    gradients = np.random.default_rng(4).normal(size=(6, 2))
    C = np.cov(gradients.T, bias=True)
    subsets = [
        row_covariance(gradients[list(s)], 6, distinct=True) for s in combinations(range(6), 3)
    ]
    np.testing.assert_allclose(np.mean(subsets, axis=0), C, rtol=1e-12)
    tuples = [
        row_covariance(gradients[list(s)], 6, distinct=False) for s in product(range(6), repeat=3)
    ]
    np.testing.assert_allclose(np.mean(tuples, axis=0), C, rtol=1e-12)
    np.testing.assert_allclose(row_covariance(gradients, 6, distinct=True), C, rtol=1e-12)


def row_gradients(problem, position):
    return problem.row_shifts - problem.row_precisions @ position


def seen_at(position, step, transitions=4, next_rows=None):
    rng = np.random.default_rng(6)
    positions = rng.normal(size=(transitions, len(position)))
    positions[-1] = position
    return Seen(
        positions,
        rng.normal(size=(transitions, len(position))),
        partial(np.arange, step.batch_size) if next_rows is None else next_rows,
        tuning=False,
        at_boundary=True,
        thin=1,
        step_sizes=np.ones(transitions),
    )


def test_running_mean_and_reset(problem):
    """C is the mean over the last updates, and begins anew once the chain has converged."""
    step = make_step(problem, start="model", convergence=ConvergenceTest(window=1000))
    first = problem.mean + 2.0
    state = step.scoring.begin(first)
    expected = np.cov(row_gradients(problem, first).T, bias=True)
    np.testing.assert_allclose(state["row_covariance"], expected, rtol=1e-9)
    np.testing.assert_allclose(state["prior_precision"], problem.prior_precision, rtol=1e-6)
    for number in range(2, 15):
        position = problem.mean + 1.0 / number
        state, _ = step.scoring.update(state, seen_at(position, step))
        now = np.cov(row_gradients(problem, position).T, bias=True)
        weight = max(1 / number, 0.1)
        expected = (1 - weight) * expected + weight * now
        np.testing.assert_allclose(state["row_covariance"], expected, rtol=1e-9)
    W, v = state["basis"], state["noise"]
    H = 40 * expected + problem.prior_precision
    V = 40**2 / 5 * 35 / 39 * expected
    np.testing.assert_allclose(W.T @ H @ W, np.eye(3), atol=1e-6)
    np.testing.assert_allclose(W.T @ V @ W, np.diag(v), atol=1e-6 * v.max())

    state = {**state, "converged": np.asarray(True)}
    means = []
    for number in range(1, 14):
        position = problem.mean + 0.1 * number
        state, _ = step.scoring.update(state, seen_at(position, step))
        means.append(np.cov(row_gradients(problem, position).T, bias=True))
        np.testing.assert_allclose(state["row_covariance"], np.mean(means, axis=0), rtol=1e-9)


def test_rows_of_the_minibatch_where_they_are_enough():
    problem = LinearGaussian.simulate(2000, 2, seed=9)
    step = make_step(
        problem,
        batch_size=600,
        start="model",
        convergence=ConvergenceTest(window=1000),
        covariance=RunningCovariance(rows=600),
    )
    state = step.scoring.begin(problem.mean)
    rows = np.random.default_rng(1).permutation(2000)[:600]
    weights = float(state["rows"])
    position = problem.mean + 0.1
    after, _ = step.scoring.update(state, seen_at(position, step, next_rows=lambda: rows))
    now = np.cov(row_gradients(problem, position)[rows].T) * 1999 / 2000
    weight = max(600 / (weights + 600), 0.1)
    expected = (1 - weight) * state["row_covariance"] + weight * now
    np.testing.assert_allclose(after["row_covariance"], expected, rtol=1e-9)


def test_control_variates_have_two_covariances(problem):
    """V is that of the differences to the centre, H that of the raw gradients."""
    center = problem.mean + 0.2
    step = make_step(
        problem,
        gradient="cv",
        center=center,
        convergence=ConvergenceTest(window=1000),
        curvature="fisher",
    )
    position = problem.mean - 0.3
    sample = sample_rows(step.posterior, position, 40, seed=1)
    noise = step.scoring._noise.learn({}, sample)
    assert len(sample) == 40
    raw = row_gradients(problem, position)
    differences = raw - row_gradients(problem, center)
    factor = 40**2 / 5 * 35 / 39
    np.testing.assert_allclose(sample.covariance, np.cov(raw.T, bias=True), rtol=1e-9)
    np.testing.assert_allclose(noise, factor * np.cov(differences.T, bias=True), rtol=1e-9)
    state = step.scoring.begin(center)
    after, _ = step.scoring.update(state, seen_at(position, step))
    # The first is the mean over many points; before convergence ten updates count.
    expected = 0.9 * state["noise_covariance"] + 0.1 * noise
    np.testing.assert_allclose(after["noise_covariance"], expected, rtol=1e-9)
    W = after["basis"]
    precision = 40 * after["row_covariance"] + problem.prior_precision
    np.testing.assert_allclose(W.T @ precision @ W, np.eye(3), atol=1e-6)


class Anonymous(PlainGradient):
    """An estimator for whose noise OSGFS has no formula."""

    name = "anonymous"


@pytest.mark.usefixtures("uncompiled")
def test_first_noise_of_control_variates(problem):
    """V averaged over the Laplace approximation: exact, since all rows are quadratic."""
    step = make_step(problem, gradient="cv", center=problem.mean)
    state = step.scoring.begin(problem.mean)
    posterior = np.linalg.inv(problem.precision)
    exact = noise_operator(problem, step.batching, problem.mean)(posterior)
    scale = np.sqrt(np.outer(np.diag(exact), np.diag(exact)))
    np.testing.assert_allclose(state["noise_covariance"] / scale, exact / scale, atol=1e-5)


def test_noise_of_other_estimators_is_learned_from_the_transitions():
    problem = LinearGaussian.simulate(400, 2, seed=4)
    plain = make_step(problem, batch_size=40, batching="replace")
    other = make_step(
        problem,
        gradient=Anonymous(plain.posterior, plain.batching),
        model=plain.its_model,
        batch_size=None,
    )
    assert np.array_equal(  # that of the plain gradient to begin with
        other.scoring.begin(problem.mean)["noise"], plain.scoring.begin(problem.mean)["noise"]
    )
    sample(other, 8000)
    state = other.chain.snapshot.adapted[0]
    exact = noise_operator(problem, other.batching)(np.linalg.inv(problem.precision))
    root = np.linalg.cholesky(exact)
    ratio = np.linalg.solve(root, np.linalg.solve(root, state["noise_covariance"]).T)
    # The noise of some ten thousand transitions: relative standard errors of about 1.5 %.
    np.testing.assert_allclose(ratio, np.eye(2), atol=0.08)


def test_few_rows_are_shrunk_towards_the_diagonal():
    problem = LinearGaussian.simulate(400, 12, seed=4)
    step = make_step(problem, start="model", covariance=RunningCovariance(rows=6), batch_size=6)
    scoring = step.scoring
    scoring._start_rows = 6
    state = scoring.begin(problem.mean)
    C = state["row_covariance"]
    assert np.linalg.matrix_rank(C) < 12
    shrunk = 12 / 18 * np.diag(np.diag(C)) + 6 / 18 * C
    H = 400 * shrunk + problem.prior_precision
    np.testing.assert_allclose(state["basis"].T @ H @ state["basis"], np.eye(12), atol=1e-5)


def test_curvature_of_the_centre(problem):
    """By default H is fixed, and V is still learned."""
    step = make_step(problem)
    state = step.scoring.begin(problem.mean)
    position = problem.mean + 0.5
    for _ in range(2):
        W, v = state["basis"], state["noise"]
        np.testing.assert_allclose(W.T @ problem.precision @ W, np.eye(3), atol=1e-5)
        V = 40**2 / 5 * 35 / 39 * state["row_covariance"]
        np.testing.assert_allclose(W.T @ V @ W, np.diag(v), atol=1e-5 * v.max())
        before = state
        state, _ = step.scoring.update(state, seen_at(position, step))
    assert not np.allclose(before["noise"], state["noise"])


@pytest.mark.usefixtures("uncompiled")
def test_misspecified_rows_need_the_curvature_of_the_centre():
    """With noise twice as large as the model says NC is four times the curvature."""
    rng = np.random.default_rng(3)
    X = rng.normal(size=(2000, 2))
    problem = LinearGaussian(X, 2 * rng.normal(size=2000), prior_sd=10.0)
    posterior = np.linalg.inv(problem.precision)
    errors = {}
    for curvature in ("center", "fisher"):
        step = make_step(problem, batch_size=1000, bias=0.35, curvature=curvature)
        matrices = matrices_of(step.scoring.begin(problem.mean))
        noise = noise_operator(problem, step.batching)
        law = osgfs_law(problem.precision, noise, matrices.drift, matrices.injected_covariance)
        errors[curvature] = np.abs(np.diag(law) / np.diag(posterior) - 1).max()
    assert errors["center"] < 0.01
    assert errors["fisher"] > 0.1


# --- Convergence --------------------------------------------------------------------------


def simulate_windows(dimension, k, length, windows, start=0.0, seed=0):
    """Means of windows of gradients of chains in coordinates in which H = I, V = vI."""
    rng = np.random.default_rng(seed)
    v, d = 4 / k - 1, k / 2
    injected = np.sqrt(max(0.0, 2 * d - d**2 * (1 + v)))
    u = (
        rng.normal(size=(windows, dimension))
        if np.all(start == 0)
        else np.full((windows, dimension), start)
    )
    total = np.zeros_like(u)
    for _ in range(length):
        gradient = -u + np.sqrt(v) * rng.normal(size=u.shape)
        total += gradient
        u = u + d * gradient + injected * rng.normal(size=u.shape)
    return total / length, np.full(dimension, v), np.full(dimension, d)


@pytest.mark.parametrize("length", [1, 2, 7, 40])
def test_variance_of_the_mean_of_a_window(length):
    """Against the sum of all autocovariances of the chain's own recursion."""
    noise, fractions = np.array([0.0, 3.0, 39.0, 0.5]), np.array([1.0, 0.2, 0.05, 1.4])
    expected = []
    for v, d in zip(noise, fractions, strict=True):
        # State (u, e): u' = (1 - d) u + d e + s xi, e' fresh; the gradient is e - u.
        T = np.array([[1 - d, d], [0.0, 0.0]])
        gradient, covariance = np.array([-1.0, 1.0]), np.diag([1.0, v])
        auto = [
            gradient @ np.linalg.matrix_power(T, lag) @ covariance @ gradient
            for lag in range(length)
        ]
        lags = np.abs(np.subtract.outer(range(length), range(length)))
        expected.append(np.array(auto)[lags].mean())
    variance = window_mean_variance(noise, fractions, length)
    np.testing.assert_allclose(variance, expected, rtol=1e-10)


@pytest.mark.parametrize("dimension", [1, 8, 50])
def test_the_rule_passes_95_percent_at_stationarity_and_nothing_far_away(dimension):
    k, length, windows = 0.1, 20, 4000
    means, v, d = simulate_windows(dimension, k, length, windows)
    bound = chi_square_bound(dimension)
    basis = np.eye(dimension)
    variance = window_mean_variance(v, d, length)
    passes = [chi_square_statistic(mean, basis, variance) <= bound for mean in means]
    assert np.mean(passes) == pytest.approx(0.95, abs=0.02)
    assert abs(np.mean(passes) - 0.95) < Z_BOUND * np.sqrt(0.95 * 0.05 / windows)

    means, v, d = simulate_windows(dimension, k, length, 500, start=10.0)
    variance = window_mean_variance(v, d, length)
    assert not any(chi_square_statistic(mean, basis, variance) <= bound for mean in means)


@pytest.mark.parametrize(("dimension", "probability"), [(1, 0.74), (8, 0.085), (50, 0.0)])
def test_the_rule_of_the_paper_hardly_passes_in_many_dimensions(dimension, probability):
    k, length, windows = 0.01, 100, 4000
    means, v, _ = simulate_windows(dimension, k, length, windows, seed=1)
    passes = np.mean([elementwise_statistic(mean, 1 + v, length) <= 1 for mean in means])
    error = np.sqrt(probability * (1 - probability) / windows)
    assert passes == pytest.approx(probability, abs=Z_BOUND * error + 0.005)


@pytest.fixture(scope="module")
def window_step():
    """One window a draw."""
    problem = LinearGaussian.simulate(300, 4, seed=12)
    step = make_step(
        problem,
        batch_size=30,
        batching="replace",
        curvature="center",
        convergence=ConvergenceTest(window=25),
        thin=25,
        covariance=RunningCovariance(update_every=500),
    )
    return problem, step


def test_the_flag_of_the_compiled_chain_at_stationarity(window_step):
    _, step = window_step
    idata = sample(step, 2000, tune=10)
    statistic = idata.sample_stats["convergence_statistic"].values[0]
    assert abs(np.mean(statistic <= 1) - 0.95) < Z_BOUND * np.sqrt(0.95 * 0.05 / 2000)
    # The whole distribution, not only the quantile of the rule.
    values = statistic * chi_square_bound(4)
    assert stats.kstest(values, stats.chi2(4).cdf).pvalue > 1e-4
    assert idata.sample_stats["converged"].values.all()


def test_the_flag_is_raised_on_the_way():
    problem = LinearGaussian.simulate(300, 4, seed=12)
    step = make_step(
        problem, batch_size=30, batching="replace", convergence=ConvergenceTest(window=25), thin=1
    )
    sds = np.sqrt(np.diag(np.linalg.inv(problem.precision)))
    signs = np.array([1.0, -1.0, 1.0, 1.0])
    for seed in range(5):
        start = {"beta": problem.mean + 100 * sds * signs}
        idata = sample(step, 700, seed=seed, initvals=start)
        flag = idata.sample_stats["converged"].values[0]
        statistic = idata.sample_stats["convergence_statistic"].values[0]
        assert not flag[0]
        assert flag[-1]
        assert (np.diff(flag.astype(int)) >= 0).all()  # once up it stays
        assert statistic[np.argmax(flag)] <= 1
        assert (statistic[: np.argmax(flag)] > 1).all()
        # Draws before the flag are far away: after it they are where the posterior is.
        distance = (idata.posterior["beta"].values[0] - problem.mean) @ np.linalg.cholesky(
            problem.precision
        )
        lengths = np.sqrt((distance**2).sum(1))
        assert lengths[flag].max() < 7
        assert lengths[0] > 50


@pytest.mark.usefixtures("uncompiled")
def test_elementwise_rule_of_the_step(problem):
    lenient = make_step(problem, convergence=ConvergenceTest("elementwise", b=2.0))
    strict = make_step(problem, convergence="elementwise")
    state = lenient.scoring.begin(problem.mean)
    mean = np.array([0.1, -3.0, 0.2])
    expected = elementwise_statistic(mean, state["gradient_variances"], 30)
    assert lenient.scoring._statistic(state, mean, 30) == pytest.approx(expected / 2)
    assert strict.scoring._statistic(state, mean, 30) == pytest.approx(expected)


# --- Chains -------------------------------------------------------------------------------


@pytest.mark.parametrize("gradient", ["plain", "cv"])
@pytest.mark.parametrize(("start", "curvature"), [("center", "center"), ("model", "fisher")])
def test_adaptive_chains_have_the_posterior(gradient, start, curvature):
    problem = well_specified(300, 3, "mixed")
    step = make_step(
        problem,
        batch_size=60,
        gradient=gradient,
        start=start,
        curvature=curvature,
        batching="replace",
    )
    idata = sample(step, 6000, tune=500, chains=2)
    assert idata.sample_stats["converged"].values.all()
    draws = idata.posterior["beta"].values.reshape(-1, 3)
    whitened = (draws - problem.mean) @ np.linalg.cholesky(problem.precision)
    # Batch means of 60 draws, independent for all that these chains remember.
    batches = whitened.reshape(-1, 60, 3)
    outer = np.einsum("bti,btj->btij", batches, batches).mean(1)
    for values, expected in [(batches.mean(1), np.zeros(3)), (outer, np.eye(3))]:
        error = values.std(0) / np.sqrt(len(values))
        # What is learned from N = 600 rows is itself known to 1 % only.
        assert (np.abs(values.mean(0) - expected) < Z_BOUND * error + 0.01).all()


@pytest.mark.slow
@pytest.mark.parametrize("gradient", ["svrg", pytest.param("saga", marks=pytest.mark.slow)])
def test_gradients_with_references_that_follow_the_chain(gradient):
    """V is learned from the transitions, and falls from its first value or stays small."""
    problem = LinearGaussian.simulate(300, 2, seed=6)
    step = make_step(problem, batch_size=60, gradient=gradient)
    assert isinstance(step.scoring._noise, ResidualNoise)
    idata = sample(step, 5000, tune=500)
    draws = idata.posterior["beta"].values[0]
    whitened = (draws - problem.mean) @ np.linalg.cholesky(problem.precision)
    batches = whitened.reshape(-1, 50, 2)
    outer = np.einsum("bti,btj->btij", batches, batches).mean(1)
    for values, expected in [(batches.mean(1), np.zeros(2)), (outer, np.eye(2))]:
        error = values.std(0) / np.sqrt(len(values))
        assert (np.abs(values.mean(0) - expected) < Z_BOUND * error + 0.01).all()


def walk(step, point, count):
    draws, recorded = [], []
    for _ in range(count):
        point, (stats,) = step.step(point)
        draws.append(point["beta"])
        recorded.append((stats["converged"], stats["convergence_statistic"], stats["k"]))
    return point, np.array(draws), np.array(recorded, dtype=float)


@pytest.mark.parametrize("kind", ["plain", "cv", "anonymous"])
def test_draws_do_not_depend_on_the_length_of_runs(problem, monkeypatch, kind):
    settings = {"gradient": kind}
    if kind == "anonymous":
        plain = make_step(problem)
        gradient = Anonymous(plain.posterior, plain.batching)
        settings = {"gradient": gradient, "model": plain.its_model, "batch_size": None}
    step = make_step(
        problem,
        thin=3,
        covariance=RunningCovariance(update_every=30),
        convergence=ConvergenceTest(window=7),
        **settings,
    )
    start = {"beta": problem.mean + 3.0}
    results = []
    for length in (10_000, 12, 3):
        monkeypatch.setattr(chain, "BLOCK_TRANSITIONS", length)
        step.setup_chain(np.random.default_rng(5), 20, 60)
        results.append(walk(step, start, 80))
    for _, draws, recorded in results[1:]:
        np.testing.assert_array_equal(draws, results[0][1])
        np.testing.assert_array_equal(recorded, results[0][2])
    assert set(results[0][2][:, 0]) == {0.0, 1.0}


@pytest.mark.parametrize("used", [0, 7, 10, 33])
def test_state_read_in_the_middle_resumes_there(problem, used):
    step = make_step(
        problem,
        thin=3,
        covariance=RunningCovariance(update_every=30),
        convergence=ConvergenceTest(window=7),
    )
    step.setup_chain(np.random.default_rng(5), 0, 60)
    point, _, _ = walk(step, {"beta": problem.mean + 3.0}, used)
    state = step.sampling_state
    _, expected, recorded = walk(step, point, 25)
    step.setup_chain(np.random.default_rng(99), 0, 60)
    walk(step, {"beta": problem.mean - 5.0}, 11)
    step.sampling_state = state
    _, resumed, again = walk(step, point, 25)
    np.testing.assert_array_equal(resumed, expected)
    np.testing.assert_array_equal(again, recorded)


@pytest.mark.slow
@pytest.mark.parametrize("gradient", ["plain", "cv"])
def test_beside_other_step_methods(gradient):
    """The paper's Gibbs: y ~ N(x'b, s) with s known to be moved by Metropolis, mean by OSGFS."""
    rng = np.random.default_rng(2)
    X = rng.normal(size=(400, 2))
    y = X @ [1.0, -0.5] + 0.3 + 2 * rng.normal(size=400)
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 10, shape=2)
        shift = pm.Normal("shift", 0, 1)
        pm.Normal("y", X @ beta + shift, 2.0, observed=y)
        step = OSGFS([beta], batch_size=100, gradient=gradient, thin=10, compile_kwargs=NUMBA)
        other = pm.Metropolis([shift], compile_kwargs=NUMBA)
    idata = sample([step, other], 3000, tune=500, model=model)
    design = np.column_stack([X, np.ones(400)])
    precision = design.T @ design / 4 + np.diag([0.01, 0.01, 1.0])
    mean = np.linalg.solve(precision, design.T @ y / 4)
    draws = np.column_stack([idata.posterior["beta"].values[0], idata.posterior["shift"].values[0]])
    sds = np.sqrt(np.diag(np.linalg.inv(precision)))
    assert np.abs((draws.mean(0) - mean) / sds).max() < 0.2
    np.testing.assert_allclose(draws.std(0) / sds, 1, atol=0.12)
    assert idata.sample_stats["converged"].values[0, -1]


def test_centre_for_gradients_only(problem, monkeypatch):
    """With `start="model"` chains of control variates begin at the model's initial point."""
    step = make_step(problem, gradient="cv", start="model", thin=1)
    step.setup_chain(np.random.default_rng(1), 0, 1)
    begin, positions = step.chain.begin, []

    def recorded(rng, position, **settings):
        positions.append(position)
        assert settings["root"] is None
        begin(rng, position, **settings)

    monkeypatch.setattr(step.chain, "begin", recorded)
    step.step({"beta": np.zeros(3)})
    np.testing.assert_array_equal(positions, [np.zeros(3)])


# --- Settings -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k": 0}, r"number in \(0, 4\), .* but got 0"),
        ({"k": 4.0}, r"number in \(0, 4\), .* but got 4.0"),
        ({"k": -0.1}, "where the chain has a stationary law"),
        ({"k": np.nan}, "but got nan"),
        ({"k": True}, "but got True"),
        ({"k": "optimal"}, "'matrix', 'scalar', .* or a number .* but got 'optimal'"),
        ({"k": "paper", "gradient": "cv"}, "noise of the plain gradient"),
        ({"k": "weak_prior", "gradient": "cv"}, "noise of the plain gradient"),
        ({"curvature": "hessian"}, "'fisher', 'center', but got 'hessian'"),
        ({"start": "prior"}, "'center', 'model', but got 'prior'"),
        ({"convergence": "rhat"}, "'chi2', 'elementwise' or a .*, but got 'rhat'"),
        ({"covariance": 500}, "`covariance` should be a RunningCovariance, but got 500"),
        ({"step_size": 0.1}, "takes no argument `step_size`"),
    ],
)
def test_bad_settings(problem, settings, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make_step(problem, **settings)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (ConvergenceTest, {"rule": "rhat"}, "'chi2', 'elementwise', but got 'rhat'"),
        (ConvergenceTest, {"b": 1.0}, '`b` belongs to the rule "elementwise"'),
        (ConvergenceTest, {"b": 3.0, "rule": "elementwise"}, r"in \(0, 2\], but got 3.0"),
        (ConvergenceTest, {"window": 0}, "whole number, at least 1, but got 0"),
        (RunningCovariance, {"rows": 1}, "`rows` should be a whole number, at least 2"),
        (RunningCovariance, {"update_every": 2.5}, "`update_every` should be a whole number"),
    ],
)
def test_bad_objects(kind, settings, message):
    with pytest.raises((TypeError, ValueError), match=message):
        kind(**settings)


def test_too_many_dimensions():
    problem = LinearGaussian(np.ones((5, 501)), np.zeros(5))
    with pytest.raises(ValueError, match="the position has 501"):
        make_step(problem, batch_size=2, start="model")


def test_k_above_its_bound_is_warned_of(problem):
    with pytest.warns(BatchSizeWarning, match=r"k = 3 is above .* too wide"):
        make_step(problem, k=3.0)


@pytest.mark.parametrize("k", ["weak_prior", "paper"])
@pytest.mark.usefixtures("uncompiled")
def test_a_bound_that_supposes_a_well_specified_model_is_checked(k):
    """Residuals with a standard deviation of 1.3 where the model says 1."""
    rng = np.random.default_rng(4)
    X = rng.normal(size=(2000, 3))
    misspecified = LinearGaussian(X, 1.3 * rng.normal(size=2000), prior_sd=10.0)
    with pytest.warns(BatchSizeWarning, match=rf"k = 0\.\d+ by `k='{k}'` is above .* too wide"):
        make_step(misspecified, k=k, batch_size=100)
    make_step(well_specified(1000, 3, "weak"), k=k, batch_size=100)  # a warning is an error


@pytest.mark.parametrize("n_rows", [100, 2000])
@pytest.mark.usefixtures("uncompiled")
def test_law_of_the_first_matrices_with_control_variates(n_rows):
    """V from eight points around the centre left 0.7 to 0.9 of the posterior variance."""
    problem = LinearGaussian.simulate(n_rows, 3, seed=2)
    step = make_step(problem, gradient="cv", bias=0.35, batch_size=6)
    state = step.scoring.begin(problem.mean)
    W, d, v = state["basis"], state["fractions"], state["noise"]
    assert v.max() > 0.3  # noise that counts
    D, Sigma = (W * d) @ W.T, (W * (2 * d - d**2 * (1 + v))) @ W.T
    F = np.eye(3) - D @ problem.precision
    noise = noise_operator(problem, step.batching, step.center.position)
    law = fixed_point(lambda L: F @ L @ F.T + D @ noise(L) @ D.T + Sigma, Sigma)
    root = np.linalg.cholesky(problem.precision)
    np.testing.assert_allclose(np.linalg.eigvalsh(root.T @ law @ root), 1, atol=0.02)


def test_small_k_is_warned_of():
    problem = LinearGaussian.simulate(1000, 2, seed=1)
    with pytest.warns(BatchSizeWarning, match="from 2 of 1000 rows allows only k = "):
        make_step(problem, batch_size=2)


# Of 40 rows N C is not the curvature, even where the model is right.
@pytest.mark.filterwarnings("ignore:k = .* is above .* too wide")
def test_the_paper_s_choices_sample(problem):
    for k in ("scalar", "weak_prior", "strong_prior", "paper", 0.2):
        idata = sample(make_step(problem, k=k, thin=1), 20)
        assert np.isfinite(idata.posterior["beta"].values).all()
