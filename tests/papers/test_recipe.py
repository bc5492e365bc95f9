"""The complete recipe: known samplers rebuilt from D and Q, and invalid ones refused."""

from __future__ import annotations

from itertools import product

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest

from pymc_sgmcmc import SGLD, Plain
from pymc_sgmcmc.dynamics import blocks, recipe
from pymc_sgmcmc.dynamics.recipe import GaussianAuxiliary
from pymc_sgmcmc.papers.recipe import Recipe
from tests.support.exact_law import (
    affine_transition,
    all_indices,
    compiled_law,
    exact_noise_operator,
    fixed_point,
    run_one,
)
from tests.support.generator import diffusion, drift, gauss_hermite, grid, largest_residual
from tests.support.laws import RECIPE_FRICTION, RECIPE_SETTINGS, recipe_law
from tests.support.linear_gaussian import LinearGaussian
from tests.support.models import logistic_model
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


# --- Known samplers from D and Q -------------------------------------------------------------


@pytest.mark.usefixtures("without_compiler")
@pytest.mark.parametrize("kind", ["scalar", "diagonal", "dense"])
def test_sgld(kind):
    """D = M, Q = 0 is the transition of SGLD, to rounding."""
    matrix = {
        "scalar": np.asarray(0.02),
        "diagonal": np.array([0.03, 0.02, 0.01]),
        "dense": np.array([[3.0, 1.0, 0.0], [1.0, 2.0, -0.5], [0.0, -0.5, 1.0]]) / 100,
    }[kind]
    settings = {"model": logistic_model(), "batch_size": 7, "step_size": 0.3}
    direct = SGLD(preconditioner=matrix, compile_kwargs=QUICK, **settings)
    rebuilt = Recipe(D=lambda theta: matrix, compile_kwargs=QUICK, **settings)
    rng = np.random.default_rng(1)
    for start in direct.batching.draw(rng, 3):
        position, noise = rng.normal(size=3), rng.normal(size=3)
        np.testing.assert_allclose(
            run_one(rebuilt.block, position, start, noise, 0.3),
            run_one(direct.block, position, start, noise, 0.3),
            rtol=1e-12,
        )


@pytest.mark.usefixtures("without_compiler")
def test_sghmc_transition():
    step = Recipe(model=logistic_model(), batch_size=400, step_size=0.1, compile_kwargs=QUICK,
                  **RECIPE_SETTINGS)  # fmt: skip
    rng = np.random.default_rng(1)
    theta, r, noise, h = *rng.normal(size=(2, 3)), rng.normal(size=6), 0.1
    expected = np.concatenate(
        [
            theta + h / 2 * r,
            r
            + h / 2 * (step.posterior.gradient(theta) - RECIPE_FRICTION * r)
            + np.sqrt(h * RECIPE_FRICTION) * noise[3:],
        ]
    )
    actual = run_one(step.block, np.concatenate([theta, r]), 0, noise, h)
    np.testing.assert_allclose(actual, expected, rtol=1e-12)


@pytest.mark.usefixtures("without_compiler")
@pytest.mark.parametrize("gradient", ["plain", "cv"])
def test_sghmc_law(gradient):
    problem = LinearGaussian.simulate(12, 2, seed=8)
    center = problem.mean + np.array([0.5, -0.3])
    h = 0.08
    step = Recipe(
        model=problem.model(), batch_size=4, step_size=h, gradient=gradient,
        center={"beta": center}, compile_kwargs=QUICK, **RECIPE_SETTINGS,
    )  # fmt: skip
    noise = exact_noise_operator(problem, step.batching, None if gradient == "plain" else center)
    mean, covariance = compiled_law(step)
    np.testing.assert_allclose(mean[:2], problem.mean, rtol=1e-8)
    exact = recipe_law(problem.precision, noise, h)
    np.testing.assert_allclose(covariance[:2, :2], exact, rtol=1e-8)
    assert np.trace(exact) > 1.02 * np.trace(np.linalg.inv(problem.precision))


@pytest.mark.usefixtures("without_compiler")
def test_mass_of_a_momentum():
    """The law of the momentum has the variance asked for, as the step goes to zero."""
    problem = LinearGaussian.simulate(12, 2, seed=8)
    step = Recipe(
        model=problem.model(), batch_size=12, step_size=1e-5, compile_kwargs=QUICK,
        **{**RECIPE_SETTINGS, "auxiliaries": [GaussianAuxiliary("momentum", None, 0.3, 2.5)]},
    )  # fmt: skip
    mean, covariance = compiled_law(step)
    np.testing.assert_allclose(mean, [*problem.mean, 0.3, 0.3], rtol=1e-6)
    np.testing.assert_allclose(covariance[:2, :2], np.linalg.inv(problem.precision), rtol=1e-3)
    np.testing.assert_allclose(covariance[2:, 2:], 2.5 * np.eye(2), rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("without_compiler")
@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("sampler", ["sgld", "sghmc"])
def test_noise_that_is_subtracted(sampler, diagonal):
    """h D - h²/4 (D + Q) V (D + Q)ᵀ, of rows against NumPy."""
    d, h = 2, 0.2
    V = np.array([3.0, 1.0]) if diagonal else np.array([[3.0, 1.0], [1.0, 2.0]])
    dense = np.diag(V) if diagonal else V
    eye, zero = np.eye(d), np.zeros((d, d))
    if sampler == "sgld":
        settings = {"D": lambda theta: np.array([0.5, 1.0])}
        D, A, column = np.diag([0.5, 1.0]), np.diag([0.5, 1.0]), slice(0, d)
    else:
        settings, column = RECIPE_SETTINGS, slice(0, d)
        D = np.block([[zero, zero], [zero, RECIPE_FRICTION * eye]])
        A = D + np.block([[zero, -eye], [eye, zero]])
    problem = LinearGaussian.simulate(12, d, seed=8)
    step = Recipe(
        model=problem.model(), batch_size=12, step_size=h, gradient_noise=V,
        compile_kwargs=QUICK, **settings,
    )  # fmt: skip
    root = affine_transition(step.block, 0, h).root
    expected = h * D - h**2 / 4 * A[:, column] @ dense @ A[:, column].T
    np.testing.assert_allclose(root @ root.T, expected, rtol=1e-10, atol=1e-12)


def test_noise_of_the_gradient_at_the_centre():
    """V = N²/n Cov_i(gradient of row i) at the centre, with replacement."""
    problem = LinearGaussian.simulate(6, 2, seed=8, prior_sd=0.7)
    h = 0.02
    step = Recipe(
        D=lambda theta: 1.0, model=problem.model(), batch_size=2,
        gradient=Plain(batching="replace"),
        step_size=h, center={"beta": problem.mean}, gradient_noise="center",
    )  # fmt: skip
    rows = problem.row_shifts - problem.row_precisions @ problem.mean
    V = 6**2 / 2 * np.cov(rows.T, bias=True)
    root = affine_transition(step.block, np.array([0, 1]), h).root
    np.testing.assert_allclose(root @ root.T, h * np.eye(2) - h**2 / 4 * V, rtol=1e-8)


# --- Γ ---------------------------------------------------------------------------------------


def test_divergence_of_every_kind_of_block():
    theta = pt.tensor("theta", shape=(3,), dtype="float64")
    x = pt.tensor("x", shape=(1,), dtype="float64")
    A = np.array([[1.0, 2.0, 0.5], [0.0, -1.0, 3.0], [2.0, 0.3, 1.0]])
    matrices = {
        (0, 0): (pt.outer(A @ theta, theta), lambda t, x: A @ t * 3 + A @ t),
        (1, 0): ((theta**2)[None, :], lambda t, x: [2 * t.sum()]),
        (0, 1): (pt.outer(theta, x**3), lambda t, x: 3 * x[0] ** 2 * t),
    }
    state = [np.array([0.3, -0.5, 0.8]), np.array([1.7])]
    for place, (block, formula) in matrices.items():
        gamma = blocks.divergence({place: block}, [theta, x])
        function = pytensor.function([theta, x], gamma[place[0]], mode="FAST_COMPILE",
                                on_unused_input="ignore")  # fmt: skip
        np.testing.assert_allclose(function(*state), formula(*state), rtol=1e-12)
    for block, formula in [
        (theta**3 + theta.sum(), lambda t: 3 * t**2 + 1),
        ((theta**2).sum(), lambda t: 2 * t),
        (pt.linalg.inv(pt.eye(3) + pt.outer(theta, theta)), inverse_divergence),
    ]:
        gamma = blocks.divergence({(0, 0): block}, [theta])
        function = pytensor.function([theta], gamma[0], mode="FAST_COMPILE")
        np.testing.assert_allclose(function(state[0]), formula(state[0]), rtol=1e-12)
    assert blocks.divergence({(0, 0): pt.constant(2.0), (1, 1): theta.sum()}, [theta, x]) == [0, 0]


def inverse_divergence(t):
    """Of I - t t' / (1 + t't), by hand."""
    s = 1 + t @ t
    return -4 * t / s + 2 * (t @ t) * t / s**2


def poisson_problem(dimension):
    """A skewed posterior from six counts: the model and its log density."""
    rng = np.random.default_rng(dimension)
    X = 0.6 * rng.normal(size=(6, dimension))
    y = rng.poisson(1.0, size=6)
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 1.0, shape=dimension)
        pm.Poisson("y", pm.math.exp(X @ beta), observed=y)

    def log_density(theta):
        return -0.5 * (theta**2).sum(-1) + theta @ X.T @ y - np.exp(theta @ X.T).sum(-1)

    return model, log_density


def metric_root(theta):
    """G^(-1/2): a diagonal that depends on the position."""
    return 1 / (1 + 0.5 * pt.sin(theta) + 0.3 * theta**2)


SGRHMC_SETTINGS = {
    "D": lambda theta, r: [[0, 0], [0, metric_root(theta) ** 2]],
    "Q": lambda theta, r: [[0, -metric_root(theta)], [metric_root(theta), 0]],
    "auxiliaries": ["momentum"],
}


def full_matrix_root(theta):
    """A dense G^(-1/2) that depends on the position."""
    return pt.eye(2) * 0.8 + 0.3 * pt.outer(pt.sin(theta), pt.sin(theta)) / (1 + (theta**2).sum())


DENSE_SGRHMC_SETTINGS = {
    "D": lambda theta, r: [[0, 0], [0, full_matrix_root(theta) @ full_matrix_root(theta)]],
    "Q": lambda theta, r: [[0, -full_matrix_root(theta)], [full_matrix_root(theta), 0]],
    "auxiliaries": ["momentum"],
}


def thermostat_settings(d, friction=2.0):
    """Nosé-Hoover: a thermostat of mean `friction`, fed by the kinetic energy through Γ = -1."""
    return {
        "D": lambda theta, r, xi: [[0, 0, 0], [0, friction, 0], [0, 0, 0]],
        "Q": lambda theta, r, xi: [[0, -1, 0], [1, 0, r[:, None] / d], [0, -r[None, :] / d, 0]],
        "auxiliaries": ["momentum", GaussianAuxiliary("xi", 1, friction, 1 / d)],
    }


def rule(log_density, theta_nodes, *gaussian_rules):
    """Product of a trapezoidal rule for the position and Gauss-Hermite rules."""
    log_weights = log_density(theta_nodes)
    theta_weights = np.exp(log_weights - log_weights.max())
    nodes, weights = [], []
    for theta, weight in zip(theta_nodes, theta_weights, strict=True):
        for points in product(
            *(zip(*gaussian_rule, strict=True) for gaussian_rule in gaussian_rules)
        ):
            nodes.append([*theta, *(at for at, _ in points)])
            weights.append(weight * np.prod([w for _, w in points]))
    return np.array(nodes), np.array(weights)


def invariance(name):
    """Residual of the generator for a sampler on a skewed posterior, by quadrature."""
    if name == "sgld":
        model, log_density = poisson_problem(2)
        settings = {"D": lambda theta: full_matrix_root(theta)}
        nodes, weights = rule(log_density, grid([-6, -6], [5, 5], 56))
    elif name == "sgrhmc":
        model, log_density = poisson_problem(1)
        settings = SGRHMC_SETTINGS
        nodes, weights = rule(log_density, grid([-7], [5], 60), gauss_hermite(6))
    elif name == "dense sgrhmc":
        model, log_density = poisson_problem(2)
        settings = DENSE_SGRHMC_SETTINGS
        nodes, weights = rule(
            log_density, grid([-6, -6], [5, 5], 48), gauss_hermite(4), gauss_hermite(4)
        )
    else:
        model, log_density = poisson_problem(1)
        settings = thermostat_settings(1)
        nodes, weights = rule(
            log_density, grid([-7], [5], 50), gauss_hermite(6), gauss_hermite(6, 2.0, 1.0)
        )
    step = Recipe(model=model, batch_size=6, step_size=0.1, compile_kwargs=NUMBA, **settings)
    known = {}

    def generator_of(z):
        # The diffusion does not depend on the auxiliaries.
        key = tuple(z[: step.posterior.dimension])
        if key not in known:
            known[key] = diffusion(step.block, z)
        return drift(step.block, z), known[key]

    return largest_residual(step.block, nodes, weights, degree=3, generator_of=generator_of)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("sgld", marks=pytest.mark.slow),
        "sgrhmc",
        pytest.param("dense sgrhmc", marks=pytest.mark.slow),
        "thermostat",
    ],
)
def test_small_steps_leave_the_posterior_invariant(name):
    assert invariance(name) < 1e-8


@pytest.mark.parametrize("name", ["sgld", "sgrhmc", "thermostat"])
def test_without_gamma_they_do_not(name, monkeypatch):
    monkeypatch.setattr(recipe, "divergence", lambda both, parts: [0.0] * len(parts))
    assert invariance(name) > 1e-2


@pytest.mark.slow
def test_sgrhmc_chain_against_quadrature():
    """Mean and variance of a chain, with standard errors from batch means."""
    model, log_density = poisson_problem(1)
    nodes, weights = rule(log_density, grid([-8], [5], 400))
    weights /= weights.sum()
    mean = weights @ nodes[:, 0]
    variance = weights @ (nodes[:, 0] - mean) ** 2
    step = Recipe(
        model=model, batch_size=6, step_size=0.02, thin=100, compile_kwargs=NUMBA, **SGRHMC_SETTINGS
    )
    idata = sample(model, step, draws=2500, chains=2)
    draws = idata.posterior["beta"].to_numpy()[..., 0]
    for values, exact in ((draws, mean), ((draws - mean) ** 2, variance)):
        batches = values.reshape(-1, 100).mean(1)
        z = (batches.mean() - exact) / (batches.std(ddof=1) / np.sqrt(len(batches)))
        assert abs(z) < 4.5


# --- Step size -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [{"D": lambda theta: 0.1}, RECIPE_SETTINGS, thermostat_settings(2)],
    ids=["sgld", "sghmc", "thermostat"],
)
@pytest.mark.usefixtures("without_compiler")
def test_default_step_size(settings):
    """Five percent of variance, in the direction where the linearised law has most."""
    problem = LinearGaussian.simulate(40, 2, seed=8)
    step = Recipe(model=problem.model(), batch_size=40, compile_kwargs=QUICK, **settings)
    h = float(step.step_size)
    d = step.block.state_elements
    if len(step.block.auxiliaries) > 1:
        d -= 1  # the thermostat is at its mean
    z = np.zeros(step.block.state_elements)
    z[:2] = problem.mean
    if len(step.block.auxiliaries) > 1:
        z[-1] = 2.0
    width = 1e-5
    columns = [
        run_one(step.block, z + width * unit, 0, np.zeros(len(z)), h)
        - run_one(step.block, z - width * unit, 0, np.zeros(len(z)), h)
        for unit in np.eye(len(z))[:d]
    ]
    F = np.array(columns).T[:d] / (2 * width)
    root = affine_transition(step.block, 0, h, origin=z).root[:d]
    covariance = fixed_point(lambda P: F @ P @ F.T + root @ root.T, np.eye(d))[:2, :2]
    L = np.linalg.cholesky(problem.precision)
    assert np.linalg.eigvalsh(L.T @ covariance @ L)[-1] - 1 == pytest.approx(0.05, rel=0.02)


def test_no_step_size_where_no_noise_reaches_the_position():
    """The momentum of a separate coordinate has no friction."""
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 1, shape=2)
        pm.Normal("y", beta[np.arange(40) % 2], 1.0, observed=np.arange(40.0))
    settings = {**RECIPE_SETTINGS, "D": lambda theta, r: [[0, 0], [0, np.array([1.0, 0.0])]]}
    refuse(
        ValueError,
        "No step size keeps the variances",
        model=model,
        step_size=None,
        **settings,
    )


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"D": lambda theta: np.array([1e-3, 1.0, 0.0])}, r"not move `beta\[feature=height\]`, so"),
        (
            {"D": lambda theta: pt.outer(theta, theta) * np.diag([1.0, 1, 0])},
            r"move `beta\[feature=height\]`, so",
        ),
        ({"D": lambda theta: np.ones((3, 3))}, "do not move a combination of `beta"),
        ({**RECIPE_SETTINGS, "Q": lambda theta, r: 0}, r"move `beta\[feature=intercept\]`, `beta"),
    ],
)
def test_a_position_that_nothing_moves(settings, names):
    refuse(ValueError, names, **settings)


def test_no_step_size_for_a_long_state():
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 1, shape=250)
        pm.Normal("y", beta[0] * np.ones(4), 1.0, observed=np.arange(4.0))
    refuse(ValueError, r"the state has 500. Give `step_size`", model=model, step_size=None,
           **RECIPE_SETTINGS)  # fmt: skip


# --- What is refused --------------------------------------------------------------------------


def refuse(error, message, **settings):
    settings = {"model": logistic_model(), "batch_size": 4, "step_size": 0.1, **settings}
    with pytest.raises(error, match=message):
        Recipe(compile_kwargs=NUMBA, **settings)


def asymmetric(theta):
    return pt.eye(3) + pt.outer(theta, pt.ones(3)) / 10


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"D": lambda theta: asymmetric(theta)}, "`D` should be symmetric, .* size 0"),
        ({"D": lambda theta: -0.5}, "semi-definite, but its smallest eigenvalue is -0.5 at"),
        (
            {"D": lambda theta: np.array([[1.0, 2, 0], [2, 1.0, 0], [0, 0, 1]])},
            "semi-definite, but its smallest eigenvalue is -1 at the random state",
        ),
        ({"D": lambda theta: theta}, "smallest eigenvalue is -"),
        (
            {"D": lambda theta: pt.log(theta - 50)},
            "`D` should be finite, but is not at the random",
        ),
        ({"D": lambda theta: 0}, "`D` is zero"),
        (
            {**RECIPE_SETTINGS, "Q": lambda theta, r: [[0, 1], [1, 0]]},
            r"skew-symmetric, Q = -Qᵀ, but Q \+ Qᵀ has an entry of size 2",
        ),
        (
            {**RECIPE_SETTINGS, "Q": lambda theta, r: [[0, -1], [1 + theta**2, 0]]},
            "`Q` should be skew-symmetric",
        ),
        (
            {**RECIPE_SETTINGS, "D": lambda theta, r: [[1.0]]},
            r"`D` should have 2 rows of 2 blocks, .* \(lengths \(3, 3\)\), but got 1 rows of \[1\]",
        ),
        (
            {**RECIPE_SETTINGS, "D": lambda theta, r: [[0, 0], [0, np.ones(2)]]},
            r"`D` block \(1, 1\) should have shape \(3, 3\) .* but has shape \(2,\)",
        ),
        ({"D": lambda theta: np.ones((2, 2))}, r"`D` should have shape \(3, 3\)"),
        (
            {"D": lambda theta, r: 1.0, "auxiliaries": [GaussianAuxiliary("r", variance=-1.0)]},
            "variance of the auxiliary `r` should be positive and finite, but got -1",
        ),
        (
            {"D": lambda theta, r: 1.0, "auxiliaries": [GaussianAuxiliary("r", size=0)]},
            "size of the auxiliary `r` should be at least 1, but got 0",
        ),
        ({"D": lambda theta, r: 1.0, "auxiliaries": ["position"]}, "different names, none of them"),
        ({"D": lambda theta: 1.0, "gradient_noise": "centre"}, "'center' or an array, but got"),
        (
            {"D": lambda theta: 1.0, "gradient_noise": -np.ones(3)},
            "`gradient_noise` should be .*as a covariance is",
        ),
        (
            {"D": lambda theta: 1.0, "gradient_noise": np.triu(np.ones((3, 3)))},
            "`gradient_noise` should be symmetric",
        ),
        ({"D": lambda theta: 1.0, "gradient_noise": np.ones(2)}, r"but has shape \(2,\)"),
        (
            {"D": lambda theta: 1.0, "gradient_noise": np.full(3, 100.0)},
            r"more than the noise of a step: .* eigenvalue -1.5 at step size 0.1",
        ),
    ],
)
def test_invalid_settings(settings, message):
    refuse(ValueError, message, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"D": 1.0}, "`D` should be a function .* but got 1.0"),
        ({"D": lambda theta: 1.0, "Q": 1.0}, "`Q` should be a function"),
        ({"D": lambda theta, r: 1.0, "auxiliaries": [3]}, "names or `GaussianAuxiliary` objects"),
        ({"D": lambda theta, r: 1.0, "auxiliaries": 3}, "`auxiliaries` should be a list .* got 3"),
        ({"D": lambda theta, r: 1.0}, r"`D` should take one argument .* \(the position\)"),
        (
            {**RECIPE_SETTINGS, "Q": lambda theta: 0},
            r"`Q` should take one .* \(the position, \w+\), but got <function",
        ),
        ({"D": lambda theta: "one"}, r"`D` block \(0, 0\) should be a number, .* but got 'one'"),
    ],
)
def test_settings_of_the_wrong_type(settings, message):
    refuse(TypeError, message, **settings)


def test_a_singular_dense_diffusion_is_allowed():
    """A matrix of rank one has no Cholesky root, but one from eigenvalues."""
    D = np.outer([1.0, 2.0, -1.0], [1.0, 2.0, -1.0]) / 10
    Q = np.cross(np.eye(3), [1.0, 2.0, -1.0])  # what has no noise is moved all the same
    step = Recipe(
        model=logistic_model(), D=lambda theta: D, Q=lambda theta: Q, batch_size=400,
        step_size=0.1, compile_kwargs=NUMBA,
    )  # fmt: skip
    np.testing.assert_allclose(diffusion(step.block, np.zeros(3)), D, atol=1e-8)


@pytest.mark.slow
def test_a_whole_matrix_is_the_same_as_its_blocks():
    """The same where D is zero for a part of the state, so that it has no Cholesky root."""
    model, _ = poisson_problem(2)
    friction = np.array([[2.0, 0.5], [0.5, 1.0]])
    curl = np.kron([[0.0, -1.0], [1.0, 0.0]], np.eye(2))
    whole = np.kron([[0.0, 0.0], [0.0, 1.0]], friction)
    settings = {"model": model, "batch_size": 6, "step_size": 0.1, "compile_kwargs": None}
    in_blocks = Recipe(
        D=lambda theta, r: [[0, 0], [0, friction]], auxiliaries=["r"],
        Q=lambda theta, r: [[0, -1], [1, 0]], **settings,
    )  # fmt: skip
    at_once = Recipe(
        D=lambda theta, r: whole, Q=lambda theta, r: pt.as_tensor(curl), auxiliaries="r", **settings
    )
    for step in (in_blocks, at_once):
        z = np.array([0.3, -0.2, 1.0, 0.4])
        gradient = np.array([*step.posterior.gradient(z[:2]), *(-z[2:])])
        np.testing.assert_allclose(drift(step.block, z), (whole + curl) @ gradient, rtol=1e-10)
        np.testing.assert_allclose(diffusion(step.block, z), whole, rtol=1e-8, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [SGRHMC_SETTINGS, DENSE_SGRHMC_SETTINGS], ids=["", "dense"])
def test_single_precision(settings):
    with pm.pytensorf.pytensor.config.change_flags(floatX="float32", warn_float64="ignore"):
        model, _ = poisson_problem(2)
        step = Recipe(model=model, batch_size=6, step_size=0.1, compile_kwargs=NUMBA, **settings)
        assert step.block.dtype == "float32"
        single = run_one(step.block, np.full(4, 0.3), 0, np.full(4, 0.5), 0.1)
    model, _ = poisson_problem(2)
    step = Recipe(model=model, batch_size=6, step_size=0.1, compile_kwargs=NUMBA, **settings)
    double = run_one(step.block, np.full(4, 0.3), 0, np.full(4, 0.5), 0.1)
    np.testing.assert_allclose(single, double, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("without_compiler")
def test_indices_of_minibatches_reach_the_gradient():
    problem = LinearGaussian.simulate(8, 2, seed=8)
    step = Recipe(
        model=problem.model(), batch_size=2, step_size=0.1, compile_kwargs=QUICK, **RECIPE_SETTINGS
    )
    indices = all_indices(step.batching)
    slopes = [affine_transition(step.block, index, 0.1).slope for index in indices]
    subsets = {tuple(sorted(index)) for index in indices}
    assert len(np.unique(np.round(slopes, 8), axis=0)) == len(subsets) == 28
