"""What a step method says where another way serves better."""

from __future__ import annotations

import re

import numpy as np
import pymc as pm
import pytest

from pymc_sgmcmc import SGLDCV, LocalSampling, Posterior, marginalize
from pymc_sgmcmc.errors import CenterWarning
from pymc_sgmcmc.marginal.search import advice_on_groups, remedy
from pymc_sgmcmc.step_methods.advice import advice_on_nuts
from pymc_sgmcmc.tuning import find_center

pytestmark = pytest.mark.usefixtures("without_compiler")


def grouped(n_groups: int) -> pm.Model:
    """Counts of three records a group."""
    group = np.repeat(np.arange(n_groups), 3)
    with pm.Model() as model:
        z = pm.Normal("z", 0, pm.HalfNormal("sd"), shape=n_groups)
        pm.Poisson("y", pm.math.exp(z[group]), observed=group % 3)
    return model


def test_local_variables():
    assert '`marginalize(model, ["z"])`' in advice_on_groups(grouped(25))
    assert advice_on_groups(grouped(10)) is None


CODES = np.repeat(np.arange(25), 8)
PREDICTORS = np.random.default_rng(1).normal(size=(len(CODES), 7))


def several(size: int):
    """So many effects of a group, whose joint density is not quadratic."""

    def model():
        z = pm.Normal("z", 0, pm.HalfNormal("sd"), shape=(25, size))
        rate = pm.math.exp((z[CODES] * PREDICTORS[:, :size]).sum(axis=1))
        pm.Poisson("y", rate, observed=CODES % 3)

    return model


def crossed():
    a, b = pm.Normal("a", shape=25), pm.Normal("b", 0, pm.HalfNormal("sd"), shape=30)
    pm.Poisson("y", pm.math.exp(a[CODES] + b[np.arange(200) % 30]), observed=CODES % 3)


def sums_to_zero():
    """Effects that are centred, so that no group is independent of the others."""
    z = pm.Normal("z", 0, pm.HalfNormal("sd"), shape=25)
    pm.Poisson("y", pm.math.exp((z - z.mean())[CODES]), observed=CODES % 3)


def all_are_local():
    pm.Poisson("y", pm.math.exp(pm.Normal("z", shape=25)[CODES]), observed=CODES % 3)


@pytest.mark.parametrize(
    ("make", "calls"),
    [
        (several(1), ['marginalize(model, ["z"])']),
        pytest.param(
            several(4),
            [
                'SGLDCV(gradient=LocalSampling(["z"]))',
                'marginalize(model, ["z"], method="laplace")',
            ],
            marks=pytest.mark.slow,
        ),
        (several(7), []),
        (crossed, ['marginalize(model, ["b"])']),
        (sums_to_zero, []),
        (all_are_local, []),
    ],
    ids=["one", "four", "seven", "crossed", "sum to zero", "all local"],
)
def test_advice_is_what_the_same_code_accepts(make, calls, uncompiled):
    with pm.Model() as model:
        make()
    told = [advice_on_groups(model), remedy(model)]
    for text in told:
        assert re.findall(r"`(\w+\([^`]*\))`", text or "") == calls
    with model:
        for call in calls:
            names = {"model": model, "marginalize": marginalize, "SGLDCV": SGLDCV}
            eval(call, names | {"LocalSampling": LocalSampling})


@pytest.mark.slow
@pytest.mark.parametrize(("make", "named"), [(several(1), True), (sums_to_zero, False)])
def test_warnings_name_what_can_be_integrated_out(make, named):
    with pm.Model() as model:
        make()
        pm.Flat("nothing")
    posterior = Posterior(model)
    with pytest.warns(CenterWarning, match="No Gaussian was found") as record:
        find_center(posterior, posterior.initial_position)
    assert ('use `marginalize(model, ["z"])`, give' in str(record[0].message)) == named


def test_more_rows_than_nuts_reads():
    """An effective draw of one coordinate takes NUTS two gradients of all rows."""
    with pm.Model() as model:
        mean = pm.Normal("mean")
        pm.Normal("y", mean, 1, observed=np.arange(100.0))
    posterior = Posterior(model)
    center = find_center(posterior, posterior.initial_position)
    assert advice_on_nuts(posterior, center, 2.0, 10.0) is None
    told = advice_on_nuts(posterior, center, 2.5, 10.0)
    assert re.match("An effective draw takes gradients of 3 times all 100 rows.* about 2, in", told)
    # A draw of a short time is worth less.
    assert "of 20 times all 100" in advice_on_nuts(posterior, center, 2.0, 0.2)
