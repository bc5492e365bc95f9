"""Positive variables that are mirrored at zero, against the exact law of the chain on a grid."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from scipy import stats

from pymc_sgmcmc import (
    HAMCMC,
    MALA,
    OSGFS,
    PSGLD,
    SGHMC,
    SGLD,
    SGLDCV,
    ULA,
    ModelError,
    Pairs,
    bias_report,
    gradients,
    sample,
    zero_variance,
)
from tests.support.sampling import NUMBA, QUIET, z_score

SD = 0.5
PLAIN = {"gradient": "plain", "step_size": 0.05, "batch_size": 8, "preconditioner": "identity"}
COMPILED = {"compile_kwargs": NUMBA}
HAMCMC_SETTINGS = {
    "gradient": "plain",
    "step_size": 0.05,
    "batch_size": 8,
    "initial_scale": 1.0,
    "regularization": 0.1,
    "pairs": Pairs(threshold=0.1),
}


def truncated_normal() -> pm.Model:
    """A Gaussian posterior, cut off at zero, where its density is large."""
    y = np.full(8, 0.1)
    with pm.Model() as model:
        scale = pm.HalfNormal("scale", 10, default_transform=None)
        pm.Normal("y", scale, SD * np.sqrt(8), observed=y)
    return model


def exact_law(step_size: float, precision: float, mean: float):
    """Grid and stationary probabilities of |x + h/2 g(x) + N(0, h)| with the exact gradient."""
    grid = np.linspace(0, 3, 401)
    grid = (grid[1:] + grid[:-1]) / 2
    mean_of_move = grid + step_size / 2 * precision * (mean - grid)
    kernel = sum(
        stats.norm.pdf(sign * grid, mean_of_move[:, None], step_size**0.5) for sign in (1, -1)
    )
    kernel /= kernel.sum(axis=1, keepdims=True)
    law = np.full(len(grid), 1 / len(grid))
    for _ in range(16):  # 2^16 transitions
        kernel = kernel @ kernel
        kernel /= kernel.sum(axis=1, keepdims=True)
    return grid, law @ kernel


def posterior_moments() -> tuple[float, float]:
    """Precision and mean of the Gaussian before it is cut off."""
    precision = SD**-2 + 10**-2
    return precision, 0.1 * SD**-2 / precision


def long_run(step, draws=20_000) -> np.ndarray:
    idata = sample(draws=draws, tune=500, chains=2, cores=1, step=step, random_seed=3, **QUIET)
    return idata.posterior["scale"].values


def z_values(draws: np.ndarray, grid: np.ndarray, law: np.ndarray) -> np.ndarray:
    """Errors of the mean, the mean square and P(x < 0.1) in Monte Carlo standard errors."""
    draws = draws.ravel()
    values = np.stack([draws, draws**2, draws < 0.1], axis=1)
    exact = [law @ grid, law @ grid**2, law @ (grid < 0.1)]
    return z_score(values, exact, batches=len(draws) // 1000)


@pytest.mark.parametrize("step_size", [0.05, 0.4])
def test_law_of_the_chain(step_size):
    precision, mean = posterior_moments()
    with truncated_normal():
        step = SGLD(**PLAIN | {"step_size": step_size, "thin": 4}, **COMPILED)
        draws = long_run(step)
    assert draws.min() >= 0
    z = z_values(draws, *exact_law(step_size, precision, mean))
    assert np.abs(z).max() < 4


def test_averaged_noises_are_mirrored_with_the_position():
    """Of half a Gaussian the law is exact, as it is of the whole one."""
    with pm.Model():
        pm.HalfNormal("scale", 1.0, default_transform=None)
        step = ULA(
            step_size=1.0, preconditioner="identity", thin=4, integrator="averaged",
            **COMPILED,
        )  # fmt: skip
        draws = long_run(step)
    z = [z_score(chain**2, 1.0) for chain in draws]
    assert np.abs(z).max() < 4


def test_the_law_tends_to_the_posterior():
    """The error is of first order in the step size, while that of no mirror does not vanish."""
    precision, mean = posterior_moments()
    deviation = precision**-0.5
    posterior = stats.truncnorm(-mean / deviation, np.inf, mean, deviation)
    errors = []
    for step_size in (0.02, 0.01, 0.005):
        grid, law = exact_law(step_size, precision, mean)
        errors.append(law @ grid - posterior.mean())
    assert np.abs(errors[-1]) < 0.01 * posterior.std()
    assert np.allclose(np.divide(errors[:-1], errors[1:]), 2, rtol=0.25)


@pytest.mark.slow
def test_minibatches_and_a_diagonal():
    """With noisy gradients of other rows the law is wider, and PSGLD and ULA are mirrored too."""
    precision, mean = posterior_moments()
    grid, law = exact_law(0.02, precision, mean)
    exact, deviation = law @ grid, (law @ grid**2 - (law @ grid) ** 2) ** 0.5
    of_psgld = {name: value for name, value in PLAIN.items() if name != "preconditioner"}
    with truncated_normal():
        for step in (
            ULA(step_size=0.02, preconditioner=[1.0], thin=5, **COMPILED),
            PSGLD(**of_psgld, thin=5, **COMPILED),
            HAMCMC(**HAMCMC_SETTINGS | {"step_size": 0.02}, thin=6, **COMPILED),
        ):
            draws = long_run(step, draws=4_000)
            assert draws.min() >= 0
            assert abs(draws.mean() - exact) < 0.15 * deviation, step.name


@pytest.mark.slow
def test_hamcmc_with_pairs_is_near_the_posterior():
    """As the step size falls HAMCMC comes to the truncated Gaussian."""
    precision, mean = posterior_moments()
    deviation = precision**-0.5
    posterior = stats.truncnorm(-mean / deviation, np.inf, mean, deviation)
    with truncated_normal():
        settings = HAMCMC_SETTINGS | {"step_size": 0.01, "regularization": 1.0}
        draws = long_run(HAMCMC(**settings, memory=3, thin=30, **COMPILED), draws=6_000)
    batches = draws.reshape(-1, 500).mean(axis=1)
    error = batches.std(ddof=1) / len(batches) ** 0.5
    assert abs(draws.mean() - posterior.mean()) < 4 * error + 0.02 * posterior.std()
    assert draws.std() == pytest.approx(posterior.std(), rel=0.05)


QUASI_NEWTON = partial(HAMCMC, initial_scale=0.1, regularization=0.1, step_size=0.1, memory=3)


@pytest.mark.parametrize(
    ("sampler", "thin"),
    [
        (partial(SGLD, preconditioner="identity", step_size=0.01), 10),
        (partial(QUASI_NEWTON, pairs=Pairs(threshold=0.1)), 30),
        (partial(QUASI_NEWTON, pairs=Pairs("between", threshold=0.1)), 30),
    ],
    ids=["SGLD", "HAMCMC", "HAMCMC between chains"],
)
def test_several_variables_that_depend_on_each_other(sampler, thin):
    """Strong correlation, with a variable without bounds besides: SGLD and HAMCMC on a grid.

    A matrix from pairs of positive variables would be reflected in another direction: means were
    too large by 70 % then.
    """
    correlation = np.array([[1, -0.8, 0.5], [-0.8, 1, -0.5], [0.5, -0.5, 1]])
    precision, mean = np.linalg.inv(correlation), np.array([0.1, 0.1, 0.0])
    grid = (np.arange(500) + 0.5) / 100
    first, second = np.meshgrid(grid, grid, indexing="ij")
    law = stats.multivariate_normal(mean[:2], correlation[:2, :2]).pdf(np.dstack([first, second]))
    law /= law.sum()
    slopes = np.linalg.solve(correlation[:2, :2], correlation[:2, 2])
    third = slopes[0] * (first - 0.1) + slopes[1] * (second - 0.1)
    exact = [(law * values).sum() for values in (first, second, third, first * second)]
    with pm.Model():
        scale = pm.HalfFlat("scale", shape=2, default_transform=None)
        shift = pm.Flat("shift")
        difference = pt.stack([scale[0], scale[1], shift]) - mean
        pm.Potential("density", -0.5 * difference @ precision @ difference)
        pm.Normal("y", scale[0], 1e6, observed=np.zeros(8))
        step = sampler(thin=thin, gradient="plain", batch_size=8, **COMPILED)
        idata = sample(draws=6_000, tune=500, chains=2, cores=1, step=step, random_seed=1, **QUIET)
    draws = np.concatenate(
        [idata.posterior["scale"], idata.posterior["shift"].values[..., None]], axis=-1
    ).reshape(-1, 3)
    values = np.column_stack([draws, draws[:, 0] * draws[:, 1]])
    batches = values.reshape(50, -1, 4).mean(axis=1)
    error = batches.std(axis=0, ddof=1) / 50**0.5
    assert np.all(np.abs(batches.mean(axis=0) - exact) < 4 * error + 0.02)


@pytest.mark.parametrize(
    "prior",
    [
        lambda: pm.Gamma("scale", 2, 1, default_transform=None),
        lambda: pm.Gamma("scale", [1, 1, 0.5], 1, default_transform=None).sum(),
        lambda: pm.InverseGamma("scale", 3, 1, default_transform=None),
        # At the initial point the shape is one.
        lambda: pm.Gamma("scale", pm.HalfNormal("shape"), 1, default_transform=None),
        lambda: pm.Normal("x", 0, pm.HalfNormal("scale", default_transform=None)),
    ],
)
def test_gradients_that_are_unbounded_at_zero(prior):
    """Means of the draws were several times too large, whatever the step size."""
    with pm.Model():
        pm.Normal("y", prior(), 1, observed=np.zeros(8))
        with pytest.raises(ModelError, match="is unbounded where `scale` is zero"):
            SGLD(**PLAIN)
    with pm.Model():
        pm.Normal("y", 0, pm.HalfNormal("scale", default_transform=None), observed=np.ones(8))
        with pytest.raises(ModelError, match="is unbounded where `scale` is zero"):
            SGLD(**PLAIN)


def test_one_row_whose_gradient_is_unbounded_at_zero():
    """Counts of zero have a bounded one."""
    with pm.Model():
        rate = pm.Exponential("rate", 5.0, default_transform=None, initval=0.001)
        pm.Poisson("y", rate, observed=np.eye(1, 3000, 900, dtype=int)[0])
        with pytest.raises(ModelError, match="unbounded where `rate` is zero"):
            SGLD()


def test_other_variables_are_not_mirrored():
    with pm.Model():
        scale = pm.HalfNormal("scale", 1, shape=2, default_transform=None)
        shift = pm.Normal("shift")
        sd = pm.HalfNormal("sd")
        pm.Normal("y", shift + scale.sum(), sd, observed=-np.ones(20))
        step = SGLD(**PLAIN | {"step_size": 0.002, "batch_size": 20})
        idata = sample(draws=400, tune=100, chains=2, cores=1, step=step, random_seed=1, **QUIET)
    assert (idata.posterior["scale"] >= 0).all()
    assert (idata.posterior["shift"] < 0).any()
    assert json.loads(idata.sample_stats.attrs["sgmcmc_mirrored"]) == ["scale"]


@pytest.mark.parametrize(
    "prior",
    [
        lambda: pm.TruncatedNormal("scale", 0, 1, lower=0, default_transform=None),
        lambda: pm.Truncated("scale", pm.Normal.dist(), lower=0.0, default_transform=None),
        lambda: pm.Gamma("scale", 1, 1, default_transform=None),
        lambda: pm.HalfCauchy("scale", 1, default_transform=None),
    ],
)
def test_positive_supports(prior):
    with pm.Model():
        pm.Normal("y", prior(), 1, observed=np.zeros(8))
        assert SGLD(**PLAIN).block.dynamics.mirrored is not None


@pytest.mark.parametrize(
    "prior",
    [
        lambda: pm.Uniform("scale", default_transform=None),
        lambda: pm.TruncatedNormal("scale", lower=1, default_transform=None),
        lambda: pm.TruncatedNormal("scale", upper=0, default_transform=None),
        lambda: pm.Beta("scale", 1, 1, default_transform=None),
    ],
)
def test_supports_that_draws_would_leave(prior):
    with pm.Model():
        pm.Normal("y", prior(), 1, observed=np.zeros(8))
        with pytest.raises(ModelError, match="`scale` has a bounded support but no transform"):
            SGLD(**PLAIN)


def test_every_sampler_without_metropolis_refuses_them():
    with truncated_normal():
        for sampler in (SGLDCV, SGHMC, OSGFS):
            with pytest.raises(ModelError, match="bounded support but no transform"):
                sampler()
        MALA(step_size=0.1, preconditioner="identity")
    with pm.Model():
        pm.Normal("y", pm.VonMises("angle", 0, 1, default_transform=None), 1, observed=np.zeros(8))
        SGLD(**PLAIN)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gradient": "cv"}, "searches no mode"),
        ({"preconditioner": np.eye(1)}, "should be a number or a vector"),
        ({"preconditioner": "curvature"}, "searches no mode"),
        ({"batch_size": None}, "searches no mode"),
        ({"center": {"scale": 1.0}}, "searches no mode"),
        ({"step_size": None, "preconditioner": None}, "searches no mode"),
    ],
)
def test_settings_that_do_not_go_with_it(settings, message):
    with truncated_normal(), pytest.raises(ValueError, match=message):
        SGLD(**PLAIN | settings)


def test_nothing_to_mirror():
    with pm.Model():
        pm.Normal("y", pm.HalfNormal("scale"), 1, observed=np.zeros(8))
        step = SGLD(**PLAIN)
    assert step.block.dynamics.mirrored is None
    assert "mirrored" not in step.run_settings.attributes


def test_tools_for_gradients_refuse_the_trace():
    with truncated_normal() as model:
        step = SGLD(**PLAIN)
        idata = pm.sample(500, tune=0, chains=2, cores=1, step=step, random_seed=1, **QUIET)
    for tool in (bias_report, zero_variance, partial(zero_variance, moments="only")):
        with pytest.raises(ValueError, match=r"should have mean zero, but `scale` was mirrored"):
            tool(idata)
    with pytest.raises(ValueError, match=r"`scale` has a bounded support but no transform"):
        gradients(idata, model)
