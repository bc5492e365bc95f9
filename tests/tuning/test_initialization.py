"""Centres from approximations of the user, and warnings of other modes."""

from __future__ import annotations

import numpy as np
import pymc as pm
import pytest
import xarray as xr

from pymc_sgmcmc import OSGFS, SGLDCV, CenterWarning, Posterior, Recipe
from pymc_sgmcmc.matrices import Diagonal
from pymc_sgmcmc.tuning import find_center, initial_gaussian
from tests.support.linear_gaussian import LinearGaussian
from tests.support.models import logistic_model, two_variable_model

NUMBA = {"mode": "NUMBA"}


@pytest.fixture(scope="module")
def problem() -> LinearGaussian:
    return LinearGaussian.simulate(60, 3, seed=2)


def gaussian_model() -> pm.Model:
    """A scale with a transform, and a vector."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=200)
    with pm.Model() as model:
        slope = pm.Normal("slope", 0, 5, shape=2)
        sigma = pm.HalfNormal("sigma", 2.0)
        pm.Normal("y", slope[0] + slope[1] * x, sigma, observed=1 + 2 * x + rng.normal(size=200))
    return model


def test_mean_and_covariance_are_taken_as_they_are(problem):
    covariance = np.linalg.inv(problem.precision)
    step = SGLDCV(
        model=problem.model(), init={"mean": problem.mean, "covariance": covariance},
        compile_kwargs=NUMBA,
    )  # fmt: skip
    np.testing.assert_allclose(step.center.position, problem.mean)
    np.testing.assert_allclose(
        step.center.curvature.precision.dense(), problem.precision, rtol=1e-8
    )
    center = find_center(step.posterior, np.zeros(3))
    np.testing.assert_allclose(step.center.likelihood_gradient.shape, (3,))
    assert (
        np.abs(step.center.gradient).max() < 1e-6 * np.abs(center.curvature.precision.values).max()
    )


def test_draws_with_transforms():
    """Draws of the constrained variables give moments of the unconstrained position."""
    model = gaussian_model()
    posterior = Posterior(model)
    rng = np.random.default_rng(1)
    slope, log_sigma = rng.normal(size=(2, 50, 2)), 0.1 * rng.normal(size=(2, 50))
    draws = xr.DataTree.from_dict(
        {
            "posterior": xr.Dataset(
                {
                    "sigma": (("chain", "draw"), np.exp(log_sigma)),
                    "slope": (("chain", "draw", "one"), slope),
                }
            )
        }
    )
    mean, curvature = initial_gaussian(draws, model, posterior)
    flat = np.column_stack([slope.reshape(-1, 2), log_sigma.ravel()])
    np.testing.assert_allclose(mean, flat.mean(0), rtol=1e-6)
    np.testing.assert_allclose(curvature.covariance.values, np.cov(flat.T), rtol=1e-5, atol=1e-8)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_variational_fit():
    with gaussian_model() as model:
        fit = pm.fit(
            5000, method="fullrank_advi", random_seed=1, progressbar=False,
            obj_optimizer=pm.adagrad_window(learning_rate=0.02),
        )  # fmt: skip
        posterior = Posterior(model)
        mean, _ = initial_gaussian(fit, model, posterior)
        center = find_center(posterior, posterior.initial_position)
    distance = (mean - center.position) / center.curvature.standard_deviations
    assert np.abs(distance).max() < 2


@pytest.mark.parametrize(
    ("method", "settings"), [(Recipe, {"D": lambda theta: 0.01}), (OSGFS, {"curvature": "center"})]
)
@pytest.mark.filterwarnings("ignore:`init` is far")  # a matrix without the correlations
def test_a_diagonal_is_taken_where_matrices_are_needed(problem, method, settings):
    variances = 1 / np.diag(problem.precision)
    sizes = []
    for covariance in (variances, np.diag(variances)):
        step = method(
            model=problem.model(), batch_size=60, compile_kwargs=NUMBA,
            init={"mean": problem.mean, "covariance": covariance}, **settings,
        )  # fmt: skip
        sizes.append(step.step_size)
    assert sizes[0] == pytest.approx(sizes[1])


def test_far_approximation_is_reported(problem):
    with pytest.warns(CenterWarning, match="`init` is far from the posterior"):
        SGLDCV(
            model=problem.model(), batch_size=60, compile_kwargs=NUMBA,
            init={"mean": problem.mean + 3.0, "covariance": np.linalg.inv(problem.precision)},
        )  # fmt: skip


@pytest.mark.slow
def test_far_diagonal_is_reported(problem):
    variances = np.diag(np.linalg.inv(problem.precision))
    with pytest.warns(CenterWarning, match="`init` is far from the posterior"):
        SGLDCV(
            model=problem.model(), batch_size=60, compile_kwargs=NUMBA,
            init={"mean": problem.mean + 3.0, "covariance": variances},
        )  # fmt: skip
    with pytest.warns(CenterWarning, match="Its variances are wrong, or strong correlations are"):
        SGLDCV(
            model=problem.model(), batch_size=60, compile_kwargs=NUMBA,
            init={"mean": problem.mean, "covariance": 100 * variances},
        )  # fmt: skip


def test_curvature_that_a_diagonal_leaves_out_bounds_the_step(problem):
    variances = 1 / np.diag(problem.precision)
    step = SGLDCV(
        model=problem.model(), init={"mean": problem.mean, "covariance": variances},
        compile_kwargs=NUMBA,
    )  # fmt: skip
    largest = np.linalg.eigvalsh(problem.precision * np.sqrt(np.outer(variances, variances)))[-1]
    assert largest > 1.01
    curvature = step.center.curvature.relative_to(Diagonal(np.sqrt(variances))).max()
    assert curvature == pytest.approx(largest, rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"init": "advi"}, TypeError, "approximation of `pymc.fit`, but got str"),
        ({"init": {"mean": np.zeros(3)}}, ValueError, "keys 'mean' and 'covariance', but has"),
        (
            {"init": {"mean": np.zeros(2), "covariance": np.eye(2)}},
            ValueError,
            r"mean of shape \(3,\) .* but they have shapes \(2,\)",
        ),
        (
            {"init": {"mean": np.zeros(3), "covariance": -np.eye(3)}},
            ValueError,
            "The covariance of `init` should be positive definite",
        ),
        (
            {"init": {"mean": np.zeros(3), "covariance": np.eye(3)}, "center": np.zeros(3)},
            ValueError,
            "both say where the centre is",
        ),
        ({"init": xr.DataTree()}, ValueError, "draws of all free variables .* lacks"),
        (
            {"init": {"mean": ["a", "b", "c"], "covariance": np.eye(3)}},
            TypeError,
            r"`init\['mean'\]` should be .* numbers",
        ),
        (
            {
                "init": xr.DataTree.from_dict(
                    {
                        "posterior": xr.Dataset(
                            {"beta": (("chain", "draw", "k"), np.ones((1, 9, 4)))}
                        )
                    }
                )
            },
            ValueError,
            r"draw of `beta` in `init` should have shape \(3,\), but has shape \(4,\)",
        ),
    ],
)
def test_bad_approximations(settings, error, message):
    with pytest.raises(error, match=message):
        SGLDCV(model=logistic_model(), compile_kwargs=NUMBA, **settings)


def test_approximation_of_some_variables_is_refused():
    model = two_variable_model()
    init = {"mean": np.zeros(1), "covariance": np.eye(1)}
    with pytest.raises(ValueError, match="step method that has all variables"):
        SGLDCV([model.free_RVs[0]], model=model, init=init, compile_kwargs=NUMBA)


def test_two_modes_are_reported():
    """The sign of a factor that enters squared gives two equal modes that are far apart."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=500)
    with pm.Model() as model:
        root = pm.Normal("root", 0.5, 3.0)
        pm.Normal("y", root**2 * x, 1.0, observed=4 * x + rng.normal(size=500))
    posterior = Posterior(model)
    with pytest.warns(CenterWarning, match="more than one mode"):
        find_center(posterior, posterior.initial_position)


def test_one_mode_is_not_reported(recwarn):
    posterior = Posterior(gaussian_model())
    find_center(posterior, posterior.initial_position)
    assert not [warning for warning in recwarn if warning.category is CenterWarning]
