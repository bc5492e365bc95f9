"""SGRLD: its metric and transition against NumPy, and the law of its small steps."""

from __future__ import annotations

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from pymc_sgmcmc import LocalSampling
from pymc_sgmcmc.dynamics import riemannian
from pymc_sgmcmc.papers.recipe import Recipe
from pymc_sgmcmc.papers.sgrld import SGRLD
from tests.support.exact_law import run_one
from tests.support.generator import diffusion, drift, grid, largest_residual
from tests.support.models import logistic_data, logistic_model
from tests.support.sampling import QUICK

NUMBA = {"mode": "NUMBA"}
"""C code takes less time to compile for NUTS."""
QUIET = {"progressbar": False, "quiet": True, "compute_convergence_checks": False}


def sample(model, step, draws=30, tune=0, chains=1, cores=1, **kwargs):
    with model:
        return pm.sample(
            step=step, draws=draws, tune=tune, chains=chains, cores=cores, random_seed=3,
            **{**QUIET, **kwargs},
        )  # fmt: skip


def poisson_problem(dimension):
    """A skewed posterior from twelve counts: model, data, log density."""
    rng = np.random.default_rng(dimension)
    X = 0.5 * rng.normal(size=(12, dimension)) + 0.2
    y = rng.poisson(1.0, size=12)
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 1.0, shape=dimension)
        pm.Poisson("y", pm.math.exp(X @ beta), observed=y)

    def log_density(theta):
        return -0.5 * (theta**2).sum(-1) + theta @ X.T @ y - np.exp(theta @ X.T).sum(-1)

    return model, X, y, log_density


def metric(X, y, theta, weight=1.0):
    """G and its derivatives along each coordinate, leading axis."""
    rate = np.exp(X @ theta)
    S = (y - rate)[:, None] * X
    G = weight * S.T @ S + np.eye(X.shape[1])
    slope = -2 * (y - rate) * rate
    derivatives = weight * np.einsum("r,rj,rk,rl->jkl", slope, X, X, X)
    return G, derivatives


def location_scale_problem():
    """A normal sample with unknown mean and log scale: model, data, log density."""
    y = np.array([-1.1, -0.2, 0.4, 1.5])
    with pm.Model() as model:
        theta = pm.Normal("theta", 0.0, 1.0, shape=2)
        pm.Normal("y", theta[0], pm.math.exp(theta[1]), observed=y)

    def log_density(theta):
        residuals = (y - theta[..., :1]) * np.exp(-theta[..., 1:])
        return -0.5 * (theta**2).sum(-1) - 0.5 * (residuals**2).sum(-1) - len(y) * theta[..., 1]

    return model, y, log_density


def location_scale_metric(y, theta):
    """G and its derivatives, which are not symmetric in all three indices."""
    r, scale = (y - theta[0]) * np.exp(-theta[1]), np.exp(-theta[1])
    S = np.column_stack([r * scale, r**2 - 1])
    H = np.empty((len(y), 2, 2))
    H[:, 0, 0], H[:, 1, 1] = -(scale**2), -2 * r**2
    H[:, 0, 1] = H[:, 1, 0] = -2 * r * scale
    half = np.einsum("rjk,rl->jkl", H, S)
    return S.T @ S + np.eye(2), half + half.transpose(0, 2, 1)


def gamma(G, derivatives):
    """-Σ_j [G⁻¹ (∂_j G) G⁻¹]_ij."""
    M = np.linalg.inv(G)
    return -np.einsum("ik,jkl,lj->i", M, derivatives, M)


# --- One transition --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("metric_rows", [12, 5])
def test_transition(metric_rows):
    """Drift, Γ and noise against NumPy, with all rows and with a fixed part of them."""
    model, X, y, _ = poisson_problem(3)
    step = SGRLD(
        model=model, batch_size=12, step_size=0.3, metric_rows=metric_rows, compile_kwargs=NUMBA
    )
    rows = np.sort(np.random.default_rng(2013).choice(12, size=metric_rows, replace=False))
    rng = np.random.default_rng(1)
    for _ in range(5):
        theta = 0.7 * rng.normal(size=3)
        G, derivatives = metric(X[rows], y[rows], theta, 12 / metric_rows)
        expected = np.linalg.solve(G, step.posterior.gradient(theta)) + gamma(G, derivatives)
        # P by differences of the prior's gradient.
        np.testing.assert_allclose(drift(step.block, theta), expected, rtol=1e-7, atol=1e-9)
        np.testing.assert_allclose(diffusion(step.block, theta), np.linalg.inv(G), rtol=1e-7)


@pytest.mark.slow
def test_transition_where_scores_are_not_those_of_a_linear_predictor():
    model, y, _ = location_scale_problem()
    step = SGRLD(model=model, batch_size=4, step_size=0.3, compile_kwargs=NUMBA)
    for theta in 0.5 * np.random.default_rng(1).normal(size=(5, 2)):
        G, derivatives = location_scale_metric(y, theta)
        expected = np.linalg.solve(G, step.posterior.gradient(theta)) + gamma(G, derivatives)
        np.testing.assert_allclose(drift(step.block, theta), expected, rtol=1e-7, atol=1e-9)


@pytest.mark.usefixtures("without_compiler")
def test_transition_with_a_diagonal_metric():
    """It is the transition of the general recipe with the same D."""
    model, *_ = poisson_problem(3)

    def diagonal(position):
        return 1 / (1 + pt.exp(position))

    settings = {"model": model, "batch_size": 12, "step_size": 0.3, "compile_kwargs": QUICK}
    step = SGRLD(metric=diagonal, **settings)
    recipe = Recipe(D=diagonal, **settings)
    rng = np.random.default_rng(1)
    for _ in range(3):
        theta = rng.normal(size=3)
        np.testing.assert_allclose(drift(step.block, theta), drift(recipe.block, theta), rtol=1e-9)
        np.testing.assert_allclose(
            diffusion(step.block, theta), np.diag(1 / (1 + np.exp(theta))), atol=1e-9
        )


@pytest.mark.parametrize(
    ("metric", "settings", "message"),
    [
        (lambda x: pt.exp(-x.sum()) + 0 * x, {}, "depend on its own coordinate alone"),
        (lambda x: -pt.exp(x), {}, "should return 3 positive numbers"),
        (lambda x: pt.eye(3), {}, "should return a vector"),
        (lambda x: pt.exp(x), {"metric_rows": 3}, "without `metric_rows`"),
        (lambda x: pt.exp(x), {"step_size": None}, "together with `step_size`"),
        (None, {"gradient": LocalSampling("beta")}, "samples no local variables"),
    ],
)
def test_invalid_metrics(metric, settings, message):
    model, *_ = poisson_problem(3)
    settings = {"step_size": 0.1, "batch_size": 4, "compile_kwargs": NUMBA, **settings}
    with pytest.raises(ValueError, match=message):
        SGRLD(model=model, metric=metric, **settings)


@pytest.mark.usefixtures("without_compiler")
def test_metric_is_a_function_of_the_position_alone():
    """Whatever the minibatch: the noise of a transition has the same covariance."""
    model, *_ = poisson_problem(2)
    settings = {"step_size": 0.3, "metric_rows": 6, "compile_kwargs": QUICK}
    step = SGRLD(model=model, batch_size=3, **settings)
    theta, unit = np.array([0.3, -0.2]), np.array([1.0, 0.0])
    indices = step.batching.draw(np.random.default_rng(1), 12)
    moves = [
        run_one(step.block, theta, i, unit, 0.3) - run_one(step.block, theta, i, 0 * unit, 0.3)
        for i in indices
    ]
    np.testing.assert_allclose(moves, np.broadcast_to(moves[0], (12, 2)), rtol=1e-9)
    drifts = [run_one(step.block, theta, i, 0 * unit, 0.3) for i in indices]
    assert np.std(drifts, axis=0).min() > 1e-3


# --- Small steps -----------------------------------------------------------------------------


def invariance(dimension):
    if dimension == 1:
        model, _, _, log_density = poisson_problem(1)
        nodes = grid([-6], [5], 200)
    else:
        model, _, log_density = location_scale_problem()
        nodes = grid([-6, -3], [6, 5], 72)
    step = SGRLD(
        model=model, batch_size=12 if dimension == 1 else 4, step_size=0.1, compile_kwargs=NUMBA
    )
    weights = np.exp(log_density(nodes) - log_density(nodes).max())
    return largest_residual(step.block, nodes, weights)


@pytest.mark.parametrize("dimension", [1, 2])
def test_small_steps_leave_the_posterior_invariant(dimension):
    assert invariance(dimension) < 1e-7


@pytest.mark.parametrize("dimension", [1, 2])
def test_without_gamma_they_do_not(dimension, monkeypatch):
    monkeypatch.setattr(riemannian, "metric_divergence", lambda S, M, at: pt.zeros_like(at))
    assert invariance(dimension) > 1e-2


@pytest.mark.slow
def test_the_printed_drift_does_not_in_two_dimensions(monkeypatch):
    """As Patterson and Teh print it: -2 M (∂_j G) M + M tr(M ∂_j G) in place of -M (∂_j G) M."""
    correct = riemannian.metric_divergence

    def printed(S, M, position):
        derivatives = riemannian.tangents(S, position)
        of_metric = derivatives.transpose(0, 2, 1) @ S
        of_metric = of_metric + of_metric.transpose(0, 2, 1)
        traces = (of_metric * M[None]).sum((1, 2))
        return 2 * correct(S, M, position) - traces

    monkeypatch.setattr(riemannian, "metric_divergence", printed)
    assert invariance(1) < 1e-7
    assert invariance(2) > 1e-2


def stationary_moments(step, nodes, h):
    """Mean and variance of the exact stationary law of the chain in one dimension, on a grid."""
    width = nodes[1] - nodes[0]
    means = np.array([run_one(step.block, x, 0, [0.0], h)[0] for x in nodes[:, None]])
    sds = np.array([run_one(step.block, x, 0, [1.0], h)[0] for x in nodes[:, None]]) - means
    kernel = np.exp(-0.5 * ((nodes[None] - means[:, None]) / sds[:, None]) ** 2)
    kernel *= width / sds[:, None] / np.sqrt(2 * np.pi)
    kernel /= kernel.sum(1, keepdims=True)
    law = np.ones(len(nodes)) / len(nodes)
    kernel = np.linalg.matrix_power(kernel, 2**14)
    law = law @ kernel
    mean = law @ nodes
    return np.array([mean, law @ (nodes - mean) ** 2])


@pytest.mark.parametrize("with_gamma", [True, False])
def test_moments_converge_to_those_of_the_posterior(with_gamma, monkeypatch):
    """The exact law for h > 0, extrapolated to h = 0, against quadrature."""
    if not with_gamma:
        monkeypatch.setattr(riemannian, "metric_divergence", lambda S, M, at: pt.zeros_like(at))
    model, _, _, log_density = poisson_problem(1)
    step = SGRLD(model=model, batch_size=12, step_size=0.1, compile_kwargs=NUMBA)
    nodes = np.linspace(-5, 4, 700)
    density = np.exp(log_density(nodes[:, None]) - log_density(nodes[:, None]).max())
    density /= density.sum()
    mean = density @ nodes
    exact = np.array([mean, density @ (nodes - mean) ** 2])
    coarse, middle, fine = (stationary_moments(step, nodes, h) for h in (0.2, 0.1, 0.05))
    extrapolated = (8 * fine - 6 * middle + coarse) / 3
    error = np.abs(extrapolated - exact) / np.array([np.sqrt(exact[1]), exact[1]])
    if with_gamma:
        assert error.max() < 1e-3
        # Of first order in h.
        ratios = (middle - exact) / (fine - exact)
        np.testing.assert_allclose(ratios, 2.0, rtol=0.15)
    else:
        assert error.max() > 2e-2


# --- Settings --------------------------------------------------------------------------------


@pytest.mark.usefixtures("uncompiled")
def test_default_step_size_is_that_of_sgld_with_the_metric_at_the_centre():
    """4 x 5 % over 1.05 λ_max(MH), without noise of the gradient."""
    step = SGRLD(model=logistic_model(), batch_size=400, metric_rows=400, compile_kwargs=NUMBA)
    X, y = logistic_data()
    p = 1 / (1 + np.exp(-X @ step.center.position))
    S = (y - p)[:, None] * X
    G = S.T @ S + np.eye(3) / 4
    H = step.center.curvature.precision.dense()
    curvatures = np.linalg.eigvals(np.linalg.solve(G, H)).real
    assert step.step_size == pytest.approx(0.2 / 1.05 / curvatures.max(), rel=1e-6)
    # One relaxation time of the slowest direction.
    assert step.thin == np.ceil(10.5 * curvatures.max() / curvatures.min())


@pytest.mark.slow
def test_a_prior_that_bends_upwards():
    """The metric is positive definite even then."""
    with pm.Model() as model:
        slope = pm.StudentT("slope", nu=1.0, mu=0.0, sigma=0.05, initval=1.0)
        pm.Normal("y", slope * np.ones(5), 2.0, observed=np.full(5, 2.0))
    step = SGRLD(model=model, batch_size=5, step_size=0.1, compile_kwargs=NUMBA)
    assert diffusion(step.block, np.array([1.0]))[0, 0] > 0


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"metric_rows": 401}, ValueError, "at most the number of rows, 400, but got 401"),
        ({"metric_rows": 0}, ValueError, "but got 0"),
        ({"metric_rows": 2.5}, ValueError, "whole number of rows, at least 1, but got 2.5"),
        ({"metric_rows": True}, ValueError, "whole number of rows, at least 1, but got True"),
    ],
)
def test_invalid_settings(settings, error, message):
    with pytest.raises(error, match=message):
        SGRLD(
            model=logistic_model(), batch_size=10, step_size=0.1, compile_kwargs=NUMBA, **settings
        )


def test_too_many_dimensions():
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 1, shape=51)
        pm.Normal("y", beta[0] * np.ones(4), 1.0, observed=np.arange(4.0))
    with pytest.raises(ValueError, match=r"at most 50 dimensions, .* has 51. Use `PSGLD`"):
        SGRLD(model=model, batch_size=2, step_size=0.1, compile_kwargs=NUMBA)


# --- Contract --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    return logistic_model()


@pytest.fixture(scope="module")
def step(model):
    return SGRLD(model=model, batch_size=100, gradient="cv", thin=3, compile_kwargs=NUMBA)


@pytest.mark.slow
def test_mean_and_variance_of_a_chain(model, step):
    """With default settings, within the inflation of 5 % that they allow and twice the noise."""
    X, y = logistic_data()
    idata = sample(model, step, draws=4000, chains=2)
    draws = idata.posterior["beta"].to_numpy().reshape(-1, 3)
    axes = [np.linspace(m - 0.6, m + 0.6, 36) for m in draws.mean(0)]
    nodes = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 3)
    eta = nodes @ X.T
    log_density = -(nodes**2).sum(1) / 8 + (eta * y - np.logaddexp(0, eta)).sum(1)
    weights = np.exp(log_density - log_density.max())
    weights /= weights.sum()
    mean = weights @ nodes
    variance = weights @ (nodes - mean) ** 2
    batches = draws.reshape(80, -1, 3).mean(1)
    z = (draws.mean(0) - mean) / (batches.std(0, ddof=1) / np.sqrt(80))
    assert np.abs(z).max() < 4.5
    squares = ((draws - mean) ** 2 / variance).reshape(80, -1, 3).mean(1)
    ratio, error = squares.mean(0), squares.std(0, ddof=1) / np.sqrt(80)
    assert np.all(ratio - 4.5 * error < 1.08)
    assert np.all(ratio + 4.5 * error > 1.0)


@pytest.mark.slow
def test_single_precision():
    results = []
    for floatX in ("float32", "float64"):
        with pm.pytensorf.pytensor.config.change_flags(floatX=floatX, warn_float64="ignore"):
            model, *_ = poisson_problem(2)
            step = SGRLD(model=model, batch_size=12, step_size=0.1, compile_kwargs=NUMBA)
            assert step.block.dtype == floatX
            results.append(run_one(step.block, np.full(2, 0.3), 0, np.full(2, 0.5), 0.1))
    np.testing.assert_allclose(*results, rtol=1e-4)
