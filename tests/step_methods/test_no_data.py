"""ULA and MALA on models without data: the target is the prior with the potentials."""

from __future__ import annotations

import numpy as np
import pymc as pm
import pytest

from pymc_sgmcmc import MALA, SGLD, SGLDCV, ULA, AusterityMH, ModelError, Posterior
from tests.step_methods.test_full_gradient import final_positions, ula_law
from tests.support.exact_law import affine_transition, stationary_law
from tests.support.linear_gaussian import covariance_z_scores
from tests.support.sampling import QUICK, sample

Z_BOUND = 4.5
COVARIANCE = np.array([[1.0, 0.6], [0.6, 0.5]])
MEAN = np.array([1.0, -2.0])


def gaussian_model() -> pm.Model:
    with pm.Model() as model:
        pm.MvNormal("x", MEAN, cov=COVARIANCE)
    return model


def potential_model() -> pm.Model:
    """The same law as the product of a prior and of a potential."""
    precision = np.linalg.inv(COVARIANCE)
    with pm.Model() as model:
        x = pm.Normal("x", 0.0, 3.0, shape=2)
        offset = x - MEAN
        pm.Potential("density", -0.5 * offset @ precision @ offset + 0.5 * (x**2).sum() / 9)
    return model


@pytest.mark.parametrize("model", [gaussian_model, potential_model])
def test_law_of_ula(model):
    h = 0.3
    step = ULA(model=model(), step_size=h, preconditioner="identity", compile_kwargs=QUICK)
    mean, covariance = stationary_law([affine_transition(step.block, 0, h)])
    np.testing.assert_allclose(mean, MEAN, rtol=1e-8)
    exact = ula_law(np.linalg.inv(COVARIANCE), None, h)
    np.testing.assert_allclose(covariance, exact, rtol=1e-8)


def test_covariance_of_mala():
    step = MALA(
        model=potential_model(), step_size=1.5, preconditioner=COVARIANCE, compile_kwargs=QUICK
    )
    starts = np.random.default_rng(1).multivariate_normal(MEAN, COVARIANCE, size=400)
    draws = final_positions(step, starts, 5)
    mean_z, covariance_z = covariance_z_scores(draws, MEAN, COVARIANCE)
    assert max(np.abs(mean_z).max(), np.abs(covariance_z).max()) < Z_BOUND
    assert np.mean(np.any(draws != starts, axis=1)) > 0.8


def test_default_settings_are_those_of_the_curvature():
    """The centre is the mode, the noise is zero, and the trace says that there are no rows."""
    model = gaussian_model()
    step = ULA(model=model, compile_kwargs=QUICK)
    np.testing.assert_allclose(step.center.position, MEAN, atol=1e-6)
    np.testing.assert_allclose(step.center.curvature.covariance.dense(), COVARIANCE, rtol=1e-5)
    assert step.step_size == pytest.approx(0.2 / 1.05, rel=1e-3)
    idata = sample(model, step, draws=5, tune=2, chains=1)
    assert idata.sample_stats.attrs["sgmcmc_n_rows"] == 0
    assert idata.sample_stats.attrs["sgmcmc_noise"] == 0


def test_posterior_without_data():
    model = gaussian_model()
    with pytest.raises(ModelError, match="has no observed variables"):
        Posterior(model)
    posterior = Posterior(model, needs_rows=False)
    assert not posterior.has_rows
    position = np.array([0.3, 0.1])
    density, gradient = posterior.log_density_and_gradient(position)
    assert density == pytest.approx(model.compile_logp()({"x": position}))
    np.testing.assert_allclose(gradient, np.linalg.solve(COVARIANCE, MEAN - position))


def test_observations_without_rows_count_in_full():
    """A single observation, which has no rows for minibatches, is part of the target."""
    with pm.Model() as model:
        x = pm.Normal("x", 0.0, 1.0)
        pm.Normal("y", x, 1.0, observed=2.0)
    step = ULA(model=model, step_size=0.1, preconditioner="identity", compile_kwargs=QUICK)
    _, gradient = step.posterior.log_density_and_gradient(np.zeros(1))
    assert gradient[0] == pytest.approx(2.0)


def test_models_with_data_have_their_rows():
    with pm.Model() as model:
        x = pm.Normal("x")
        pm.Normal("y", x, 1.0, observed=np.ones(5))
    posterior = Posterior(model, needs_rows=False)
    assert (posterior.has_rows, posterior.n_rows) == (True, 5)


@pytest.mark.parametrize("step_class", [SGLD, SGLDCV, AusterityMH])
def test_step_methods_that_need_rows_refuse(step_class):
    with pytest.raises(ModelError, match="no observed variable"):
        step_class(model=gaussian_model())
