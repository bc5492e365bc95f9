"""Funnels of centred effects are found, by what a chain would make of them."""

from __future__ import annotations

import functools

import numpy as np
import pymc as pm
import pytensor
import pytest

from pymc_sgmcmc import CenterWarning, Posterior
from pymc_sgmcmc.tuning import VARIANCE_INFLATION, find_center
from pymc_sgmcmc.tuning.funnel import _bending, _bends, find_funnel
from tests.support.effects import PRIOR_SD, Effects, examined, moments

pytestmark = pytest.mark.usefixtures("without_compiler")


@functools.cache
def examined_effects(case: Effects):
    return examined(case.model())


def random_walk() -> pm.Model:
    rng = np.random.default_rng(9)
    time = np.repeat(np.arange(30), 100)
    y = np.cumsum(0.03 * rng.normal(size=30))[time] + rng.normal(size=3000)
    with pm.Model() as model:
        scale = pm.HalfNormal("scale", 1)
        walk = pm.GaussianRandomWalk(
            "walk", mu=0, sigma=scale, init_dist=pm.Normal.dist(0, 1), shape=30
        )
        pm.Normal("y", walk[time], 1, observed=y)
    return model


def two_scales() -> pm.Model:
    """Crossed effects: rows tell one scale well, the other one hardly."""
    rng = np.random.default_rng(5)
    first, second = np.repeat(np.arange(15), 200), np.tile(np.arange(10), 300)
    y = 0.3 * rng.normal(size=15)[first] + 0.02 * rng.normal(size=10)[second]
    with pm.Model() as model:
        mean = pm.Normal("mean", 0, 5)
        wide, narrow = pm.HalfNormal("wide", 1), pm.HalfNormal("narrow", 1)
        a, b = pm.Normal("a", 0, wide, shape=15), pm.Normal("b", 0, narrow, shape=10)
        mu = mean + a[first] + b[second]
        pm.Normal("y", mu, pm.HalfNormal("sd", 1), observed=y + rng.normal(size=3000))
    return model


def nested() -> pm.Model:
    """Effects of schools around those of their districts, which no row has."""
    rng = np.random.default_rng(3)
    district, school = np.repeat(np.arange(8), 10), np.repeat(np.arange(80), 100)
    y = (0.02 * rng.normal(size=8)[district] + 0.5 * rng.normal(size=80))[school]
    with pm.Model() as model:
        mean = pm.Normal("mean", 0, 5)
        wide, narrow = pm.HalfNormal("wide", 1), pm.HalfNormal("narrow", 1)
        districts = pm.Normal("districts", mean, wide, shape=8)
        schools = pm.Normal("schools", districts[district], narrow, shape=80)
        pm.Normal("y", schools[school], 1, observed=y + rng.normal(size=8000))
    return model


def exact_ratio(case: Effects, covariance: np.ndarray) -> float:
    """Standard deviation of the log scale as a chain has it, relative to that of the posterior.

    The covariance is that of the Gaussian around the centre, of mean and effects, which are normal
    given the scale.
    """
    log_tau, mass = (values[::20] for values in case.law_of_log_scale())
    of_prior = np.eye(1 + case.groups)
    of_prior[0, 1:] = of_prior[1:, 0] = -1
    of_prior[0, 0] = case.groups
    of_rows = np.diag([1 / PRIOR_SD**2, *np.full(case.groups, case.records)])
    root = np.linalg.cholesky(covariance)
    of_prior, of_rows = (root.T @ each @ root for each in (of_prior, of_rows))
    steepness = np.linalg.eigvalsh(np.exp(-2 * log_tau)[:, None, None] * of_prior + of_rows)
    of_chain = mass * np.sqrt(np.maximum(1 - VARIANCE_INFLATION * steepness, 0.0)).prod(1)
    sds = [moments(log_tau, law / law.sum())[1] for law in (mass, of_chain)]
    return sds[1] / sds[0]


@pytest.mark.parametrize(
    "case",
    [Effects(8, 300, 0.02), Effects(8, 300, 0.1), Effects(30, 300, 0.05), Effects(30, 20, 0.3)],
    ids=str,
)
def test_ratio_is_that_of_the_exact_law(case):
    posterior, subsample, center = examined_effects(case)
    funnel = find_funnel(posterior, subsample, center)
    assert posterior.labels[funnel.coordinate] == "tau_log__"
    assert posterior.labels[funnel.narrow].startswith("effects[")
    others = [label != "tau_log__" for label in posterior.labels]
    assert posterior.labels[0] == "mean"
    exact = exact_ratio(case, center.curvature.covariance.dense()[np.ix_(others, others)])
    assert funnel.sd_ratio == pytest.approx(exact, abs=0.01)


@pytest.mark.parametrize(
    ("model", "name", "scale", "is_local"),
    [
        (lambda: Effects(8, 300, 0.1).model(), "effects", "tau_log__", True),
        (lambda: Effects(20, 200, 0.05).model(nu=30), "effects", "tau_log__", True),
        (random_walk, "walk", "scale_log__", False),
        (two_scales, "b", "narrow_log__", True),
        (nested, "districts", "wide_log__", False),
    ],
    ids=["groups", "student", "walk", "two scales", "nested"],
)
def test_funnels_are_warned_of(model, name, scale, is_local):
    """With `marginalize` as advice where it takes the variable."""
    posterior = Posterior(model())
    call = rf'use `marginalize\(model, \["{name}"\]\)`, ' if is_local else ""
    message = (
        rf"is a funnel: {name}\[\d+\] is much narrower in a tail of {scale} .* may be only 0\.\d+ "
        rf"times.*Write `{name}` non-centred, {call}or sample with NUTS"
    )
    with pytest.warns(CenterWarning, match=message):
        find_center(posterior, posterior.initial_position)


@pytest.mark.parametrize(
    "model",
    [
        lambda: Effects(8, 300, 0.3).model(),
        lambda: Effects(8, 300, 0.02).model(centred=False),
        lambda: Effects(5, 2000, 0.05).model(),
    ],
    ids=["scale is known", "non-centred", "scale is known just so"],
)
def test_no_funnel(model):
    posterior, subsample, center = examined(model())
    assert find_funnel(posterior, subsample, center) is None


def test_coordinates_that_follow_the_scale_are_no_funnel():
    """The same model is one in the coordinates of the user."""
    case = Effects(8, 300, 0.1)
    posterior = Posterior(case.model(), standardizes=True)
    assert posterior.coordinates is not None
    center = find_center(posterior, posterior.initial_position)
    assert not _bending(_bends(posterior, center))
    assert find_funnel(*examined_effects(case)) is not None


def test_ratio_in_single_precision():
    posterior, subsample, center = examined(Effects(8, 300, 0.1).model())
    ratio = find_funnel(posterior, subsample, center).sd_ratio
    with pytensor.config.change_flags(floatX="float32"):
        posterior, subsample, center = examined(Effects(8, 300, 0.1).model())
        assert posterior.dtype == "float32"
        assert find_funnel(posterior, subsample, center).sd_ratio == pytest.approx(ratio, abs=0.1)


def test_small_steps_come_farther():
    arguments = examined_effects(Effects(30, 20, 0.3))
    ratios = [find_funnel(*arguments, inflation=each).sd_ratio for each in (0.1, 0.05, 0.02)]
    assert ratios[0] < ratios[1] - 0.05 < ratios[2] - 0.1
    assert find_funnel(*arguments, inflation=1e-4) is None
