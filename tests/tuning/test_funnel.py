"""Funnels of centred effects are found, by the part of the posterior that is too narrow."""

from __future__ import annotations

import warnings

import numpy as np
import pymc as pm
import pytensor
import pytest

from pymc_sgmcmc import CenterWarning, Posterior
from pymc_sgmcmc.tuning import center_of, find_center
from pymc_sgmcmc.tuning.funnel import LARGEST_SHARE, NARROWER, find_funnel
from pymc_sgmcmc.tuning.subsample import Subsample
from tests.support.effects import Effects

pytestmark = pytest.mark.usefixtures("without_compiler")


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


def exact_share(case: Effects, variance: float) -> float:
    """Part of the posterior where an effect has less than a quarter of a variance, given the scale.

    The effects are independent given their mean and scale.
    """
    log_tau, mass = case.law_of_log_scale()
    precision = np.exp(-2 * log_tau) + case.records
    return float(mass[variance * precision > NARROWER].sum())


def centre(model: pm.Model):
    posterior = Posterior(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        center = find_center(posterior, posterior.initial_position)
    return posterior, Subsample(posterior, 2 * posterior.dimension), center


@pytest.mark.parametrize(
    "case",
    [Effects(8, 300, 0.02), Effects(8, 300, 0.1), Effects(30, 300, 0.05), Effects(30, 20, 0.3)],
    ids=str,
)
def test_share_is_that_of_the_exact_law(case):
    posterior, subsample, center = centre(case.model())
    funnel = find_funnel(posterior, subsample, center)
    assert posterior.labels[funnel.coordinate] == "tau_log__"
    assert posterior.labels[funnel.narrow].startswith("effects[")
    effects = [label.startswith("effects") for label in posterior.labels]
    covariance = center.curvature.covariance.dense()[np.ix_(effects, effects)]
    exact = exact_share(case, np.linalg.eigvalsh(covariance)[-1])
    assert funnel.share == pytest.approx(exact, abs=0.005)


@pytest.mark.parametrize(
    ("model", "name", "scale"),
    [
        (lambda: Effects(8, 300, 0.1).model(), "effects", "tau_log__"),
        (lambda: Effects(20, 200, 0.05).model(nu=30), "effects", "tau_log__"),
        (random_walk, "walk", "scale_log__"),
        (two_scales, "b", "narrow_log__"),
    ],
    ids=["groups", "student", "walk", "two scales"],
)
def test_funnels_are_warned_of(model, name, scale):
    posterior = Posterior(model())
    message = (
        rf"is a funnel: about \d+% of it lies where {name}\[\d+\] .* tail of {scale}.*"
        rf'Write `{name}` non-centred.*marginalize=\["{name}"\]'
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
    posterior, subsample, center = centre(model())
    assert find_funnel(posterior, subsample, center) is None


def test_a_given_centre_is_examined_too():
    posterior, _, center = centre(Effects(8, 300, 0.1).model())
    with pytest.warns(CenterWarning, match="is a funnel"):
        center_of(posterior, center.position, center.curvature)


def test_share_in_single_precision():
    posterior, subsample, center = centre(Effects(8, 300, 0.1).model())
    share = find_funnel(posterior, subsample, center).share
    with pytensor.config.change_flags(floatX="float32"):
        posterior, subsample, center = centre(Effects(8, 300, 0.1).model())
        assert posterior.dtype == "float32"
        assert find_funnel(posterior, subsample, center).share == pytest.approx(share, abs=0.1)
    assert share > 5 * LARGEST_SHARE
