"""SGLD and SGLD-CV against their own exact stationary laws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.graph.replace import vectorize_graph
from scipy import sparse, special

from pymc_sgmcmc import SGLD, Plain
from pymc_sgmcmc.batching import ShuffledWindows
from pymc_sgmcmc.dynamics import AveragedLangevin
from pymc_sgmcmc.matrices import Dense, Diagonal
from tests.support.exact_law import all_indices
from tests.support.linear_gaussian import (
    LinearGaussian,
    all_subsets,
    covariance_z_scores,
    formula_covariance,
    sgld_covariance,
)
from tests.support.sampling import estimator

Z_BOUND = 4.5
CHAINS = 3000
N_ROWS, BATCH_SIZE, DIMENSION = 40, 5, 3


@pytest.fixture(scope="module")
def problem() -> LinearGaussian:
    return LinearGaussian.simulate(N_ROWS, DIMENSION, seed=3)


def step_size_for(problem: LinearGaussian, relative: float) -> float:
    """A step size that is a fraction of the stability limit of the full gradient."""
    return relative / np.linalg.eigvalsh(problem.precision)[-1]


def final_positions(step: SGLD, problem: LinearGaussian) -> np.ndarray:
    """Last positions of independent chains that start at exact posterior draws."""
    rng = np.random.default_rng(99)
    root = np.linalg.cholesky(np.linalg.inv(problem.precision))
    positions = []
    for seed in range(CHAINS):
        step.setup_chain(np.random.default_rng([7, seed]), 0, 1)
        start = problem.mean + root @ rng.normal(size=problem.dimension)
        point, _ = step.step({"beta": start})
        positions.append(point["beta"])
    return np.array(positions)


@pytest.mark.filterwarnings("ignore:`center` is:pymc_sgmcmc.CenterWarning")
@pytest.mark.parametrize(
    ("batching", "gradient", "integrator"),
    [
        ("shuffle", "cv", "euler"),
        ("replace", "plain", "euler"),
        ("shuffle", "plain", "euler"),
        ("replace", "cv", "euler"),
        ("shuffle", "plain", "averaged"),
        ("replace", "plain", "averaged"),
    ],
)
def test_mean_and_covariance_equal_the_exact_biased_law(problem, gradient, batching, integrator):
    # A centre away from the mode, so that the control variate has noise of its own.
    center = problem.mean + 1.0
    step_size = step_size_for(problem, 0.6)
    step = SGLD(
        model=problem.model(),
        batch_size=BATCH_SIZE,
        step_size=step_size,
        preconditioner="identity",
        gradient=estimator(gradient, batching),
        center={"beta": center} if gradient == "cv" else None,
        thin=120,
        integrator=integrator,
        compile_kwargs={"mode": "NUMBA"},
    )
    at = center if gradient == "cv" else None
    law: dict[str, Any] = {"center": at, "integrator": integrator}
    if batching == "replace":
        exact = formula_covariance(problem, BATCH_SIZE, 1.0, step_size, **law)
    else:
        exact = sgld_covariance(problem, all_indices(step.batching), step_size, **law)
        factor = step.batching.variance_factor
        formula = formula_covariance(problem, BATCH_SIZE, factor, step_size, **law)
        np.testing.assert_allclose(exact, formula, rtol=0.02, atol=0.02 * np.diag(formula).max())
    draws = final_positions(step, problem)
    mean_z, covariance_z = covariance_z_scores(draws, problem.mean, exact)
    assert np.abs(mean_z).max() < Z_BOUND
    assert np.abs(covariance_z).max() < Z_BOUND
    # The bias is large enough for the test to see: the posterior itself would not pass.
    _, posterior_z = covariance_z_scores(draws, problem.mean, np.linalg.inv(problem.precision))
    assert np.abs(posterior_z).max() > 2 * Z_BOUND


def test_averaged_noises_of_exact_gradients_have_the_law_of_the_posterior(problem):
    """For half of the largest stable step, by iteration of the transition itself."""
    root = np.linalg.cholesky(np.linalg.inv(problem.precision))
    dynamics = AveragedLangevin(Dense(root @ root.T), Dense(root))
    rng, step_size = np.random.default_rng(8), 2.0
    state = (np.zeros((DIMENSION, CHAINS)), root @ rng.normal(size=(DIMENSION, CHAINS)))
    state = (state[0], 0.5 * np.sqrt(step_size) * state[1])
    for _ in range(40):
        before = state[0]
        noise = rng.normal(size=(CHAINS, DIMENSION))
        scaled = dynamics.scaled_noise(noise, np.full(CHAINS, step_size)).T
        state, *_ = dynamics.transition(
            state, lambda at: -problem.precision @ at, scaled, step_size
        )
    exact = np.linalg.inv(problem.precision)
    mean_z, covariance_z = covariance_z_scores(state[0].T, np.zeros(DIMENSION), exact)
    assert max(np.abs(mean_z).max(), np.abs(covariance_z).max()) < Z_BOUND
    correlation = state[0] @ before.T / CHAINS @ problem.precision
    np.testing.assert_allclose(
        correlation, (1 - step_size / 4) * np.eye(DIMENSION), atol=2 * Z_BOUND / np.sqrt(CHAINS)
    )


def drift_of(gradient, step_size, force):
    """Where one transition without noise takes each of several positions of one coordinate."""
    one = Diagonal(np.ones(1))
    dynamics = AveragedLangevin(one, one, largest_force=force)
    position, none = pt.vector("position"), pt.zeros(1)
    state = dynamics.transition((position, none), gradient, none, step_size).state[0]
    positions = pt.matrix("positions")
    function = pytensor.function(
        [positions], vectorize_graph(state, {position: positions}), mode="FAST_COMPILE"
    )
    return lambda values: function(values.reshape(-1, 1)).reshape(values.shape)


@pytest.mark.parametrize(("force", "returns"), [(None, False), (4.0, True)])
def test_a_tamed_chain_returns(force, returns):
    """From where the curvature is far larger than the step is stable for."""
    moved, position = drift_of(lambda at: -(at**3), 0.5, force), np.array([8.0, -20.0])
    with np.errstate(all="ignore"):
        for _ in range(40):
            position = moved(position)
    assert np.all(np.abs(position) < 2) == returns


def moments_of_scheme(moved, step_size, ends):
    """Mean and variance of the positions of averaged noises, by quadrature.

    The position is that of a Markov chain, which has the drift and a whole noise, and half a noise.
    """
    grid, (nodes, weights) = np.linspace(*ends, 1601), np.polynomial.hermite_e.hermegauss(161)
    nodes, weights = nodes[weights > 1e-14], weights[weights > 1e-14] / weights.sum()
    positions = grid[:, None] + 0.5 * np.sqrt(step_size) * nodes
    following = moved(positions) + 0.5 * np.sqrt(step_size) * nodes
    spacing = grid[1] - grid[0]
    places = np.clip((following - grid[0]) / spacing, 0, len(grid) - 1.001)
    first, part = places.astype(int), places % 1
    rows = np.repeat(np.arange(len(grid)), len(nodes))
    matrix = sum(
        sparse.csr_array(
            ((weights * share).ravel(), ((first + number).ravel(), rows)), shape=(len(grid),) * 2
        )
        for number, share in enumerate((1 - part, part))
    )
    masses = np.exp(-0.5 * grid**2)
    for _ in range(int(60 / step_size)):
        masses = matrix @ masses
    masses = masses[:, None] * weights / masses.sum()
    mean = (masses * positions).sum()
    return mean, (masses * positions**2).sum() - mean**2


@pytest.mark.parametrize("step_size", [0.4, 1.0])
def test_taming_hardly_changes_the_law(step_size):
    """Of the logarithm of a gamma variable of shape 3, whose skewness is -.6."""
    shape, scale = 3.0, 1 / np.sqrt(3.0)

    def gradient(at):
        return scale * shape * (1 - pt.exp(scale * at))

    expected = special.digamma(shape) - np.log(shape), special.polygamma(1, shape)
    for force, most in ((None, 0.004), (4.0, 0.004), (step_size, np.inf)):
        moved = drift_of(gradient, step_size, force)
        mean, variance = moments_of_scheme(moved, step_size, (-18.0, 11.0))
        errors = (
            abs(scale * mean - expected[0]) / np.sqrt(expected[1]),
            abs(variance * scale**2 / expected[1] - 1),
        )
        assert max(errors) < most
    assert max(errors) > 0.05  # A force that acts on many draws would show.


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["identity", "diagonal", "dense"])
def test_preconditioned_law(problem, kind):
    covariance = np.linalg.inv(problem.precision)
    matrix = {
        "identity": np.asarray(0.7 * np.trace(covariance)),
        "diagonal": np.diag(covariance) * np.array([1.0, 0.5, 2.0]),
        "dense": covariance,
    }[kind]
    dense = np.diag(np.broadcast_to(matrix, DIMENSION)) if matrix.ndim < 2 else matrix
    step_size = 0.4 / np.linalg.eigvals(dense @ problem.precision).real.max()
    step = SGLD(
        model=problem.model(),
        batch_size=20,
        step_size=step_size,
        preconditioner=matrix,
        thin=100,
        gradient=Plain(batching="replace"),
        compile_kwargs={"mode": "NUMBA"},
    )
    exact = with_replacement_covariance(problem, 20, step_size, dense)
    draws = final_positions(step, problem)
    mean_z, covariance_z = covariance_z_scores(draws, problem.mean, exact)
    assert np.abs(mean_z).max() < Z_BOUND
    assert np.abs(covariance_z).max() < Z_BOUND


def with_replacement_covariance(problem, batch_size, step_size, M):
    """Fixed point iteration of the law's own recursion, with replacement."""
    d, N = problem.dimension, problem.n_rows
    A, mean_A = problem.row_precisions, problem.row_precisions.mean(0)
    r = A @ problem.mean - problem.row_shifts
    F = np.eye(d) - step_size / 2 * M @ problem.precision
    covariance = np.linalg.inv(problem.precision)
    for _ in range(2000):
        noise = np.einsum("nij,jk,nlk->il", A, covariance, A) / N - mean_A @ covariance @ mean_A
        V = N**2 / batch_size * (noise + np.cov(r.T, bias=True))
        covariance = F @ covariance @ F.T + step_size * M + step_size**2 / 4 * M @ V @ M
    return covariance


@pytest.mark.filterwarnings("ignore::pymc_sgmcmc.BatchSizeWarning")
@pytest.mark.parametrize("batch_size", [20, 50])
def test_computed_step_has_the_stated_inflation_in_windows(batch_size):
    """By enumeration of the windows of four orders, as many as there are chains."""
    problem, bias = LinearGaussian.simulate(200, 2, seed=5), 0.1
    step = SGLD(model=problem.model(), batch_size=batch_size, bias=bias, gradient="plain", thin=1)
    assert isinstance(step.batching, ShuffledWindows)
    M, inflations = np.linalg.inv(problem.precision), []
    for order in range(4):
        step.batching.set_order(order)
        windows = [step.batching.selected(np.int64(start)) for start in range(200)]
        law = sgld_covariance(problem, windows, step.step_size, preconditioner=M)
        inflations.append(np.linalg.eigvals(law @ problem.precision).real.max() - 1)
    assert bias / 2 < np.mean(inflations) < 2 * bias


@pytest.mark.parametrize("at_center", [False, True])
def test_formula_equals_enumeration_of_all_subsets(at_center):
    problem = LinearGaussian.simulate(6, 2, seed=1)
    center = problem.mean + 0.5 if at_center else None
    step_size = step_size_for(problem, 0.4)
    enumerated = sgld_covariance(problem, all_subsets(6, 3), step_size, center)
    formula = formula_covariance(problem, 3, (6 - 3) / (6 - 1), step_size, center)
    np.testing.assert_allclose(formula, enumerated, rtol=1e-11)


@pytest.mark.parametrize("at_center", [False, True])
def test_bias_is_of_first_order_in_the_step(problem, at_center):
    posterior = np.linalg.inv(problem.precision)
    center = problem.mean if at_center else None

    def bias(relative):
        law = formula_covariance(problem, BATCH_SIZE, 1.0, step_size_for(problem, relative), center)
        return np.linalg.norm(law - posterior)

    assert bias(0.002) / bias(0.001) == pytest.approx(2.0, rel=0.02)


@pytest.mark.slow
def test_all_rows_without_replacement_have_no_gradient_noise(problem):
    step_size = step_size_for(problem, 0.5)
    step = SGLD(
        model=problem.model(),
        batch_size=N_ROWS,
        step_size=step_size,
        preconditioner="identity",
        thin=100,
        compile_kwargs={"mode": "NUMBA"},
    )
    exact = sgld_covariance(problem, [np.arange(N_ROWS)], step_size)
    draws = final_positions(step, problem)
    mean_z, covariance_z = covariance_z_scores(draws, problem.mean, exact)
    assert np.abs(mean_z).max() < Z_BOUND
    assert np.abs(covariance_z).max() < Z_BOUND
