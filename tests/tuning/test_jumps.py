"""Jumps of the log density near the centre are warned of, edges and bends are not."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from pymc_sgmcmc import SGLDCV, CenterWarning, Posterior
from pymc_sgmcmc.tuning import Subsample, find_center
from pymc_sgmcmc.tuning.jumps import jump

N = 3000
X = np.random.default_rng(1).normal(size=N)
NOISE = np.random.default_rng(2).normal(size=N)
SD = N**-0.5


def slope():
    return pm.Normal("slope", 0, 5)


def likelihood(mean):
    pm.Normal("y", mean, 1, observed=0.4 * X + NOISE)


def constraint():
    """A third of a standard deviation below the mode."""
    b = slope()
    pm.Potential("constraint", pt.switch(b > 0.4 - 0.3 * SD, 0.0, -1e10))
    likelihood(b * X)


def odds():
    b = slope()
    pm.Potential("odds", pt.switch(b > 0.4 - 0.3 * SD, 0.0, -3.0))
    likelihood(b * X)


def order():
    b = pm.Normal("b", 0, 5, shape=2)
    pm.Potential("order", pt.switch(b[0] < b[1] + 0.4, 0.0, -1e6))
    likelihood(b[0] * X + b[1] * np.roll(X, 1))


def threshold():
    tau = pm.Uniform("tau", -2, 2)
    pm.Normal("y", pm.math.switch(tau > X, 1.0, 2.0), 1, observed=np.where(X < 0.3, 1, 2) + NOISE)


def rounded():
    likelihood(0.001 * pt.floor(slope() * 1000) * X)


JUMPS = {
    constraint: r"jumps by 1e\+10 at `slope` = 0\.3[89]",
    odds: r"jumps by 3 at `slope` = 0\.3[89]",
    order: r"jumps by 1e\+06 at `b\[0\]` = .*, `b\[1\]` = ",
    threshold: r"jumps by .* at `tau_interval__` = ",
    rounded: r"jumps by .* at `slope` = ",
}


def hinge():
    knot = pm.Normal("knot", 0, 1)
    likelihood(slope() * pt.maximum(X - knot, 0.0))


def laplace():
    pm.Laplace("y", slope() * X, 1.0, observed=0.4 * X + NOISE)


def absolute_value():
    b = slope()
    pm.Potential("penalty", -50 * pt.abs(b - 0.4))
    likelihood(b * X)


def skewed():
    scale = pm.HalfCauchy("scale", 1)
    pm.Gamma("y", 2, 2 * pt.exp(-slope() * X) / scale, observed=np.exp(0.4 * X + 0.5 * NOISE))


def large_numbers():
    pm.Normal("y", 1e7 + slope() * X, 1, observed=1e7 + 0.4 * X + NOISE)


def rounding_errors():
    pm.Normal("y", 3e6 + pm.Normal("slope", 0, 1e5) * X, 1, observed=0.4 * X + NOISE)


def nothing_observed():
    pm.LogNormal("scale", 0, 2)


SMOOTH = (hinge, laplace, absolute_value, skewed, large_numbers, rounding_errors, nothing_observed)


def message(write):
    with pm.Model() as model:
        write()
    posterior = Posterior(model, needs_rows=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CenterWarning)
        center = find_center(posterior, posterior.initial_position)
    return jump(posterior, Subsample(posterior), center)


@pytest.mark.parametrize("write", JUMPS, ids=lambda write: write.__name__)
def test_a_jump_is_said_with_its_place(write):
    found = message(write)
    assert re.search(JUMPS[write], found), found
    assert "Gradients do not show a jump" in found


@pytest.mark.parametrize("write", SMOOTH, ids=lambda write: write.__name__)
def test_bends_and_tails_are_no_jumps(write):
    assert message(write) is None


def test_making_a_step_warns():
    with pm.Model() as model:
        odds()
    with pytest.warns(CenterWarning, match="jumps by 3"):
        SGLDCV(model=model)
