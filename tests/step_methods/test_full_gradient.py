"""ULA and MALA: exact laws, acceptance probabilities, and invariance of the posterior."""

from __future__ import annotations

from functools import partial

import numpy as np
import pymc as pm
import pytest
from scipy import stats

from pymc_sgmcmc import SGLD
from pymc_sgmcmc.step_methods.full_gradient import MALA, ULA, optimal_mala_step
from tests.support.exact_law import affine_transition, run_one, stationary_law
from tests.support.linear_gaussian import (
    LinearGaussian,
    covariance_z_scores,
    gaussian_with_precision,
)
from tests.support.models import logistic_model, two_variable_model
from tests.support.sampling import NUMBA, QUICK, QUIET
from tests.support.sampling import sample as sample_by

sample = partial(sample_by, tune=0, chains=1)
Z_BOUND = 4.5


def ula_law(H, noise, h):
    """Covariance with precision H - h/4 H H; the gradient has no noise."""
    return np.linalg.inv(H - h / 4 * H @ H)


# --- ULA ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dimension", [1, 5, 50])
def test_law_of_ula(dimension):
    problem = gaussian_with_precision(dimension)
    h = 0.5 / 100.0
    step = ULA(model=problem.model(), step_size=h, preconditioner="identity", compile_kwargs=NUMBA)
    mean, covariance = stationary_law([affine_transition(step.block, 0, h)])
    exact = ula_law(problem.precision, None, h)
    np.testing.assert_allclose(mean, problem.mean, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(covariance, exact, rtol=1e-8, atol=1e-10 * exact.max())


def test_law_of_ula_with_a_preconditioner():
    problem = LinearGaussian.simulate(30, 3, seed=4)
    H, M = problem.precision, np.array([[2.0, 0.5, 0], [0.5, 1.0, 0.1], [0, 0.1, 0.5]]) / 50
    h = 0.8
    step = ULA(model=problem.model(), step_size=h, preconditioner=M, compile_kwargs=NUMBA)
    _, covariance = stationary_law([affine_transition(step.block, 0, h)])
    np.testing.assert_allclose(covariance, np.linalg.inv(H - h / 4 * H @ M @ H), rtol=1e-8)


def test_ula_is_sgld_with_all_rows():
    problem = LinearGaussian.simulate(30, 3, seed=4)
    model = problem.model()
    settings = {
        "model": model,
        "step_size": 1e-3,
        "preconditioner": "identity",
        "compile_kwargs": {"mode": "FAST_COMPILE"},
    }
    draws = [
        sample(model, step, draws=30).posterior["beta"].to_numpy()
        for step in (ULA(**settings), SGLD(batch_size=30, **settings))
    ]
    np.testing.assert_allclose(draws[0], draws[1], rtol=1e-10)


@pytest.mark.usefixtures("uncompiled")
def test_default_step_of_ula():
    """Five percent of variance in the steepest direction, h / (4 - h) where M is the covariance."""
    problem = LinearGaussian.simulate(30, 3, seed=4)
    step = ULA(model=problem.model(), compile_kwargs=NUMBA)
    assert step.step_size / (4 - step.step_size) == pytest.approx(0.05, rel=1e-3)
    # Averaged noises have no error here, and take the largest step.
    averaged = ULA(model=problem.model(), integrator="averaged", compile_kwargs=NUMBA)
    assert averaged.step_size == pytest.approx(1.0, rel=1e-3)


def test_the_data_are_not_copied():
    step = ULA(
        model=logistic_model(), step_size=1e-3, preconditioner="identity", compile_kwargs=NUMBA
    )
    for shared, values in zip(step.batching._shared, step.posterior.data, strict=True):
        assert np.shares_memory(shared.get_value(borrow=True), values)


def test_a_minibatch_model_is_sampled_on_all_rows():
    step = ULA(
        model=logistic_model(batch_size=20),
        step_size=1e-3,
        preconditioner="identity",
        compile_kwargs=NUMBA,
    )
    assert step.batch_size == step.posterior.n_rows == 400


@pytest.mark.parametrize("step_class", [ULA, MALA])
@pytest.mark.parametrize("setting", ["batch_size", "gradient"])
def test_settings_of_minibatches_are_refused(step_class, setting):
    with pytest.raises(TypeError, match=f"takes no argument `{setting}`"):
        step_class(model=logistic_model(), **{setting: 10})


# --- MALA: one transition --------------------------------------------------------------------


def log_proposal(posterior, there, here, h, M):
    mean = here + h / 2 * M @ posterior.gradient(here)
    return stats.multivariate_normal(mean, h * M).logpdf(there)


@pytest.mark.usefixtures("without_compiler")
@pytest.mark.parametrize("kind", ["scalar", "diagonal", "dense"])
def test_acceptance_probability_and_decision(kind):
    """Against the ratio of densities, written out, for a posterior that is not Gaussian."""
    matrix = {
        "scalar": np.asarray(0.02),
        "diagonal": np.array([0.03, 0.02, 0.01]),
        "dense": np.array([[3.0, 1.0, 0.0], [1.0, 2.0, -0.5], [0.0, -0.5, 1.0]]) / 100,
    }[kind]
    M = matrix if matrix.ndim == 2 else np.diag(np.broadcast_to(matrix, 3))
    h = 1.5
    settings = {"preconditioner": matrix, "compile_kwargs": QUICK}
    step = MALA(model=logistic_model(), step_size=h, **settings)
    posterior = step.posterior
    rng = np.random.default_rng(3)
    mode = np.array([0.4, 0.7, -1.0])
    decisions = []
    for _ in range(20):
        here = mode + 0.2 * rng.normal(size=3)
        noise = rng.normal(size=4)
        density, gradient = posterior.log_density_and_gradient(here)
        root = np.linalg.cholesky(M)
        proposal = here + h / 2 * M @ gradient + np.sqrt(h) * root @ noise[:3]
        log_alpha = (
            posterior.log_density(proposal)
            - density
            + log_proposal(posterior, here, proposal, h, M)
            - log_proposal(posterior, proposal, here, h, M)
        )
        ran = step.block(
            (here, np.asarray(density), gradient), np.zeros(2, np.int64), noise[None], np.array([h])
        )
        accepted, rate = (values[0] for values in ran.stats)
        assert rate == pytest.approx(min(1.0, np.exp(log_alpha)), rel=1e-8)
        assert accepted == (np.log(stats.norm.cdf(noise[3])) < log_alpha)
        expected = proposal if accepted else here
        np.testing.assert_allclose(ran.positions[0], expected, rtol=1e-10)
        np.testing.assert_allclose(ran.auxiliaries[0][0], posterior.log_density(expected))
        np.testing.assert_allclose(
            ran.auxiliaries[1][0], posterior.gradient(expected), rtol=1e-8, atol=1e-9
        )
        np.testing.assert_allclose(ran.gradients[0], ran.auxiliaries[1][0])
        decisions.append(accepted)
    assert 0 < np.mean(decisions) < 1


def test_a_proposal_that_is_not_finite_is_rejected():
    x = np.linspace(1, 2, 20)
    with pm.Model() as model:
        rate = pm.Normal("rate", 0, 1)
        pm.Poisson("y", pm.math.exp(rate * x), observed=np.ones(20, int))
    step = MALA(model=model, step_size=1e8, preconditioner="identity", compile_kwargs=NUMBA)
    idata = sample(model, step, draws=50)
    assert np.isfinite(idata.posterior["rate"]).all()
    assert (idata.sample_stats["accepted"] == 0).all()
    assert (idata.sample_stats["acceptance_rate"] == 0).all()


# --- MALA: the posterior is invariant ---------------------------------------------------------


def final_positions(step, starts, transitions):
    """Last positions of independent chains."""
    rng = np.random.default_rng(20)
    finals, h = [], float(step.step_size)
    for start in starts:
        density, gradient = step.posterior.log_density_and_gradient(start)
        noise = rng.standard_normal((transitions, step.block.noise_size))
        state = (start, np.asarray(density), gradient)
        indices = np.zeros(transitions + 1, np.int64)
        finals.append(step.block(state, indices, noise, np.full(transitions, h)).positions[-1])
    return np.array(finals)


@pytest.mark.parametrize("dimension", [1, 5, 50])
def test_covariance_of_mala(dimension):
    problem = gaussian_with_precision(dimension)
    posterior = np.linalg.inv(problem.precision)
    step = MALA(model=problem.model(), preconditioner="identity", compile_kwargs=NUMBA)
    h = float(step.step_size)
    starts = np.random.default_rng(1).multivariate_normal(problem.mean, posterior, size=2000)
    draws = final_positions(step, starts, 30)
    mean_z, covariance_z = covariance_z_scores(draws, problem.mean, posterior)
    assert np.abs(mean_z).max() < Z_BOUND
    assert np.abs(covariance_z).max() < Z_BOUND
    # Most proposals moved, and without the decision this step would be seen to be too large.
    assert np.mean(np.any(draws != starts, axis=1)) > 0.3
    F = np.eye(dimension) - h / 2 * problem.precision
    unadjusted = posterior
    for _ in range(30):
        unadjusted = F @ unadjusted @ F.T + h * np.eye(dimension)
    ratio = np.linalg.eigvalsh(problem.precision @ unadjusted).max()
    assert (ratio - 1) / np.sqrt(2 / len(draws)) > 2 * Z_BOUND


@pytest.mark.slow
def test_mala_on_a_skewed_posterior():
    """Against the distribution function by quadrature."""
    x = np.array([-1.0, 0.5, 1.0, 2.0])
    with pm.Model() as model:
        rate = pm.Normal("rate", 0, 2)
        pm.Poisson("y", pm.math.exp(1.5 * rate * x), observed=np.array([0, 0, 1, 0]))
    grid = np.linspace(-12, 4, 20_001)
    log_density = -(grid**2) / 8 + 1.5 * grid - np.exp(1.5 * np.outer(grid, x)).sum(1)
    density = np.exp(log_density - log_density.max())
    cdf = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2)])
    cdf /= cdf[-1]
    starts = np.interp(np.random.default_rng(2).random(4000), cdf, grid)[:, None]
    step = MALA(model=model, step_size=1.0, preconditioner="identity", compile_kwargs=NUMBA)
    uniform = np.interp(final_positions(step, starts, 25)[:, 0], grid, cdf)
    for frequency in range(1, 5):
        z = np.cos(np.pi * frequency * uniform).mean() * np.sqrt(2 * len(uniform))
        assert abs(z) < Z_BOUND
    # The chain without the decision is far off.
    ula = ULA(model=model, step_size=1.0, preconditioner="identity", compile_kwargs=NUMBA)
    rng, finals = np.random.default_rng(3), []
    for start in starts:
        noise = rng.standard_normal((25, 1))
        run = ula.block((start,), np.zeros(26, np.int64), noise, np.ones(25))
        finals.append(run.positions[-1, 0])
    uniform = np.interp(np.nan_to_num(finals, nan=-12), grid, cdf)
    assert abs(np.cos(np.pi * uniform).mean()) * np.sqrt(2 * len(uniform)) > 2 * Z_BOUND


@pytest.mark.slow
def test_mala_stays_where_parameters_are_valid():
    """log p is finite at p = 1.5, but the density of a success is zero there."""
    with pm.Model():
        chance = pm.Normal("chance", 0.8, 0.3, initval=0.8)
        pm.Bernoulli("y", chance, observed=np.ones(6, dtype=int))
        step = MALA(step_size=0.03, preconditioner="identity", thin=3, compile_kwargs=NUMBA)
        idata = pm.sample(8_000, tune=100, chains=2, cores=1, step=step, random_seed=1, **QUIET)
    draws = idata.posterior["chance"].values
    assert draws.max() <= 1
    grid = (np.arange(2000) + 0.5) / 2000
    density = stats.norm(0.8, 0.3).pdf(grid) * grid**6
    assert abs(draws.mean() - density @ grid / density.sum()) < 0.01


@pytest.mark.slow
def test_long_chain_of_mala_has_the_variance_of_the_posterior():
    """Through `pm.sample`, with a standard error from batch means."""
    problem = gaussian_with_precision(5)
    model = problem.model()
    idata = sample(model, MALA(model=model, compile_kwargs=NUMBA), draws=6000, chains=2)
    centred = idata.posterior["beta"].to_numpy() - problem.mean
    exact = np.diag(np.linalg.inv(problem.precision))
    batches = (centred**2 / exact).reshape(2 * 60, 100, 5).mean(1)
    z = (batches.mean(0) - 1) / (batches.std(0, ddof=1) / np.sqrt(len(batches)))
    assert np.abs(z).max() < Z_BOUND


@pytest.mark.slow
def test_default_step_of_mala_is_optimal():
    """h = 1.65² d^(-1/3) for M the inverse curvature, and an acceptance rate near 0.574."""
    assert optimal_mala_step(np.ones(8)) == pytest.approx(1.65**2 / 2)
    problem = gaussian_with_precision(50)
    model = problem.model()
    step = MALA(model=model, compile_kwargs=NUMBA)
    assert step.step_size == pytest.approx(1.65**2 * 50 ** (-1 / 3), rel=1e-3)
    rates = sample(model, step, draws=1500).sample_stats["acceptance_rate"]
    assert abs(float(rates.mean()) - 0.574) < 0.06


@pytest.mark.usefixtures("uncompiled")
def test_mala_states_no_bias(caplog):
    """With as many coefficients as this, variances that are 5 % too wide move a mean: not here."""
    rng = np.random.default_rng(11)
    X = rng.normal(size=(600, 150))
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 10, shape=150)
        scale = pm.HalfNormal("scale", 5)
        pm.Normal("y", X @ beta, scale, observed=X[:, 0] + rng.normal(size=600))
    with caplog.at_level("WARNING", logger="pymc.sgmcmc"):
        step = MALA(model=model, compile_kwargs=NUMBA)
    assert "is off by" not in caplog.text
    attributes = step.run_settings.attributes
    assert not {"bias", "mean_error"} & set(attributes)
    assert attributes["why"].startswith("step size computed for the best acceptance rate")


def test_other_variables_that_move_change_the_density():
    model = two_variable_model()
    with model:
        # So large that every proposal is rejected, and the stored density stays.
        step = MALA(
            [model["slope"]], step_size=1e6, preconditioner="identity", compile_kwargs=NUMBA
        )
    step.setup_chain(np.random.default_rng(5), 0, 10)
    point, _ = step.step(model.initial_point())
    moved = {**point, "sigma_log__": point["sigma_log__"] + 1.0}
    after, _ = step.step(moved)
    assert after["slope"] == moved["slope"]
    density, gradient = step.posterior.log_density_and_gradient(np.array([after["slope"]]))
    assert step.chain.snapshot.auxiliaries[0] == pytest.approx(density)
    assert step.chain.snapshot.auxiliaries[1] == pytest.approx(gradient)


@pytest.mark.usefixtures("without_compiler")
def test_one_transition_of_mala_moves_the_whole_state():
    """`run_one`, which the exact laws rest on, sees density and gradient too."""
    settings = {"step_size": 1e-3, "compile_kwargs": QUICK}
    step = MALA(model=logistic_model(), preconditioner="identity", **settings)
    density, gradient = step.posterior.log_density_and_gradient(np.zeros(3))
    state = np.concatenate([np.zeros(3), [density], gradient])
    after = run_one(step.block, state, 0, np.array([0.1, 0, 0, -3.0]), 1e-3)
    np.testing.assert_allclose(after[4:], step.posterior.gradient(after[:3]), rtol=1e-8)
