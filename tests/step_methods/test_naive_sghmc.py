"""Naive SGHMC: what the noise of the gradient does to Hamiltonian dynamics without friction."""

from __future__ import annotations

import numpy as np
import pymc as pm
import pytest

from pymc_sgmcmc import SGHMC, ResampledMomentum, UncorrectedNoiseWarning
from tests.support.exact_law import affine_transition, all_indices, exact_noise_operator
from tests.support.linear_gaussian import LinearGaussian
from tests.support.models import logistic_model
from tests.support.sampling import QUICK, sample

STEP_SIZE = 0.1
N_ROWS, BATCH_SIZE, DIMENSION = 12, 3, 2

pytestmark = pytest.mark.filterwarnings("ignore::pymc_sgmcmc.UncorrectedNoiseWarning")


@pytest.fixture(scope="module")
def problem():
    """Rows with the same predictors, so that the noise does not depend on the position."""
    rng = np.random.default_rng(4)
    X = np.tile([[1.0, 0.5]], (N_ROWS, 1))
    return LinearGaussian(X, rng.normal(size=N_ROWS), prior_sd=0.5)


@pytest.fixture(scope="module")
def steps(problem):
    """Step methods on minibatches and on all rows, with and without fresh velocities."""
    made = {}

    def get(batch_size=BATCH_SIZE, integrator="naive"):
        key = batch_size, integrator
        if key not in made:
            made[key] = SGHMC(
                model=problem.model(),
                integrator=integrator,
                step_size=STEP_SIZE,
                preconditioner="identity",
                gradient="plain",
                batch_size=batch_size,
                compile_kwargs=QUICK,
            )
        return made[key]

    return get


def one_transition(step, covariance, mean, origin=None):
    """Exact covariance about a fixed mean after one transition, with any minibatch."""
    following = np.zeros_like(covariance)
    indices = all_indices(step.batching)
    size = len(covariance)
    for index in indices:
        transition = affine_transition(step.block, index, STEP_SIZE, origin)
        slope, root = transition.slope[:size, :size], transition.root[:size]
        full_mean = mean if origin is None else np.concatenate([mean, origin[size:]])
        moved = (transition.slope @ full_mean + transition.shift)[:size] - mean
        following += slope @ covariance @ slope.T + root @ root.T + np.outer(moved, moved)
    return following / len(indices)


def invariant(problem):
    """The matrix of the quadratic form that an exact gradient preserves."""
    H, eye = problem.precision, np.eye(DIMENSION)
    return np.block([[H, -STEP_SIZE / 2 * H], [-STEP_SIZE / 2 * H, eye]])


def start(problem):
    """Covariance of position and velocity in the law of the exact diffusion."""
    zero = np.zeros((DIMENSION, DIMENSION))
    return np.block([[np.linalg.inv(problem.precision), zero], [zero, np.eye(DIMENSION)]])


def path(step, problem, transitions):
    """Covariances about a mean that stays; the maps of the minibatches do not depend on them."""
    mean = np.concatenate([problem.mean, np.zeros(DIMENSION)])
    maps = [affine_transition(step.block, index, STEP_SIZE) for index in all_indices(step.batching)]
    slopes, roots = np.array([each.slope for each in maps]), np.array([each.root for each in maps])
    moved = np.array([each.slope @ mean + each.shift - mean for each in maps])
    noise = roots @ roots.mT + moved[:, :, None] * moved[:, None, :]
    covariances = [start(problem)]
    for _ in range(transitions):
        covariances.append((slopes @ covariances[-1] @ slopes.mT + noise).mean(0))
    return np.array(covariances)


def test_an_exact_gradient_preserves_energy_and_entropy(problem, steps):
    covariances = path(steps(N_ROWS), problem, 20)
    energies = np.einsum("ij,tji->t", invariant(problem), covariances)
    np.testing.assert_allclose(energies, energies[0], rtol=1e-10)
    np.testing.assert_allclose(
        np.linalg.slogdet(covariances)[1], np.linalg.slogdet(start(problem))[1]
    )


def test_noise_adds_energy_at_the_exact_rate_and_entropy_grows(problem, steps):
    """By ε² tr V in each transition, with V enumerated over the minibatches."""
    step = steps()
    covariances = path(step, problem, 20)
    V = exact_noise_operator(problem, step.batching)(np.zeros((DIMENSION, DIMENSION)))
    energies = np.einsum("ij,tji->t", invariant(problem), covariances)
    np.testing.assert_allclose(np.diff(energies), STEP_SIZE**2 * np.trace(V), rtol=1e-8)
    assert (np.diff(np.linalg.slogdet(covariances)[1]) > 0).all()


def test_variances_grow_without_bound_or_end_too_large(problem, steps):
    """Variances of the position relative to the posterior after 50, 100, ... transitions."""
    V = exact_noise_operator(problem, steps().batching)(np.zeros((DIMENSION, DIMENSION)))
    H, eye, e = problem.precision, np.eye(DIMENSION), STEP_SIZE
    T = np.block([[eye - e**2 * H, e * eye], [-e * H, eye]])
    B = np.vstack([e**2 * eye, e * eye])
    # This is the law of the compiled transitions.
    mean = np.concatenate([problem.mean, np.zeros(DIMENSION)])
    expected = T @ start(problem) @ T.T + B @ V @ B.T
    np.testing.assert_allclose(one_transition(steps(), start(problem), mean), expected, rtol=1e-8)

    def variances(transitions, resample):
        P, kept = start(problem), []
        for number in range(transitions):
            if resample and number % resample == 0:
                P = P.copy()
                P[:DIMENSION, DIMENSION:] = P[DIMENSION:, :DIMENSION] = 0
                P[DIMENSION:, DIMENSION:] = eye
            P = T @ P @ T.T + B @ V @ B.T
            kept.append(np.trace(H @ P[:DIMENSION, :DIMENSION]) / DIMENSION)
        return np.array(kept)

    free = variances(4000, None)
    assert free[-1000:].mean() > 3 * free[:1000].mean() > 9
    fresh = variances(4000, 10)
    assert fresh[-10:].mean() == pytest.approx(fresh[-1000:].mean(), rel=1e-6)
    assert fresh[-10:].mean() > 1.2


def test_fresh_velocities(problem, steps):
    """In the transition after each second one, from N(0, I), whatever the velocity was."""
    step = steps(integrator=ResampledMomentum("naive", every=2))
    mean = np.concatenate([problem.mean, np.zeros(DIMENSION)])
    covariance = 9.0 * start(problem)
    V = exact_noise_operator(problem, step.batching)(np.zeros((DIMENSION, DIMENSION)))
    H, eye, e = problem.precision, np.eye(DIMENSION), STEP_SIZE
    T = np.block([[eye - e**2 * H, e * eye], [-e * H, eye]])
    B = np.vstack([e**2 * eye, e * eye])
    for clock in (0.0, 1.0):
        before = covariance.copy()
        if clock == 0:
            before[DIMENSION:, DIMENSION:] = eye
        origin = np.concatenate([np.zeros(2 * DIMENSION), [clock]])
        found = one_transition(step, covariance, mean, origin)
        np.testing.assert_allclose(found, T @ before @ T.T + B @ V @ B.T, rtol=1e-8)


@pytest.mark.parametrize(
    ("integrator", "message"),
    [
        ("naive", "grows without bound"),
        (ResampledMomentum("naive", every=5), "ends at a value"),
    ],
)
@pytest.mark.usefixtures("uncompiled")
def test_a_warning_says_that_the_law_is_wrong(integrator, message):
    with pytest.warns(UncorrectedNoiseWarning, match=message) as caught:
        step = SGHMC(
            model=logistic_model(),
            integrator=integrator,
            step_size=0.1,
            preconditioner="identity",
            gradient="plain",
            batch_size=20,
        )
    assert caught[0].filename == __file__
    assert step.friction == 0


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"integrator": "naive"}, "should come with `step_size` and `preconditioner`"),
        ({"integrator": "naive", "friction": 1.0}, "has no friction, but got friction=1.0"),
        ({"integrator": "naive", "noise_estimate": 1.0}, "injects no noise"),
        ({"friction": 0}, "use `integrator='naive'`"),
        ({"friction": 0.0, "integrator": "euler"}, "use `integrator='naive'`"),
    ],
)
def test_settings_that_do_not_go_together(settings, message):
    with pytest.raises(ValueError, match=message):
        SGHMC(model=logistic_model(), **settings)


@pytest.mark.slow
def test_double_well_of_the_lecture():
    """U = -2θ² + θ⁴ with noisy gradients: the chain leaves the wells, with friction it does not."""
    rng = np.random.default_rng(2)
    shifts = 20 * rng.normal(size=400)
    shifts -= shifts.mean()
    with pm.Model() as model:
        data = pm.Data("shifts", shifts)
        theta = pm.Flat("theta")
        pm.Potential("energy", ((2 * theta**2 - theta**4) / 400 + theta * data / 20).sum())
    settings = {
        "rows": ["shifts"],
        "gradient": "plain",
        "batch_size": 20,
        "step_size": 0.05,
        "preconditioner": "identity",
        "thin": 10,
        "model": model,
    }
    naive = SGHMC(integrator="naive", **settings)
    with_friction = SGHMC(integrator="euler", friction=10.0, noise_estimate=None, **settings)
    energies = []
    for step in (naive, with_friction):
        idata = sample(model, step, draws=1000, tune=0, chains=2)
        position = idata.posterior["theta"].values
        energies.append(np.nanmean(position**4 - 2 * position**2))
    assert energies[0] > energies[1] + 1
