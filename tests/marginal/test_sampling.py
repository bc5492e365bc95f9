"""Step methods on models of groups: the exact posterior of a linear mixed model."""

from __future__ import annotations

import logging
from functools import partial

import arviz as az
import numpy as np
import pymc as pm
import pytest

from pymc_sgmcmc import OSGFS, SGHMC, SGLD, SGLDCV, Posterior
from pymc_sgmcmc.marginal import marginalize

N_GROUPS = 400
NUMBA = {"mode": "NUMBA"}


@pytest.fixture(scope="module")
def mixed_model():
    """Groups of 1 to 12 records, and the exact posterior mean and sd of their common mean."""
    rng = np.random.default_rng(0)
    group = np.r_[np.arange(N_GROUPS), rng.integers(0, N_GROUPS, size=1200)]
    y = 1 + 0.7 * rng.normal(size=N_GROUPS)[group] + rng.normal(size=len(group))
    with pm.Model() as model:
        mean = pm.Normal("mean", 0, 10)
        z = pm.Normal("z", 0, 0.7, shape=N_GROUPS)
        pm.Normal("y", mean + z[group], 1, observed=y)
    sizes = np.bincount(group)
    precisions = 1 / (1 / sizes + 0.7**2)
    precision = 1 / 10**2 + precisions.sum()
    center = (precisions * np.bincount(group, y) / sizes).sum() / precision
    return marginalize(model, "z"), center, precision**-0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    "step_method",
    [
        partial(SGLDCV, compile_kwargs=NUMBA),
        partial(SGLD, compile_kwargs=NUMBA),
        partial(SGHMC, gradient="cv"),  # Few transitions take less time without a compiler.
        partial(OSGFS, compile_kwargs=NUMBA),
    ],
    ids=["cv", "plain", "sghmc", "osgfs"],
)
def test_posterior_of_a_linear_mixed_model(mixed_model, step_method):
    model, center, sd = mixed_model
    with model:
        idata = pm.sample(
            step=step_method(),
            chains=2,
            cores=1,
            tune=300,
            draws=1500,
            random_seed=3,
            progressbar=False,
        )
    draws = (idata.posterior["mean"].values - center) / sd
    count = float(az.ess(idata)["mean"])
    assert abs(draws.mean()) < 4.5 * draws.std() / np.sqrt(count)
    # The stated bias of a variance is 5 %.
    variance_error = np.sqrt(2 / count)
    assert -4.5 * variance_error < draws.var() - 1 < 0.06 + 4.5 * variance_error


def test_a_transition_reads_few_groups(mixed_model, caplog):
    model, _, _ = mixed_model
    with model, caplog.at_level(logging.INFO, "pymc"):
        step = SGLDCV()
    assert step.batch_size <= 10
    posterior = Posterior(model)
    assert posterior.n_rows == N_GROUPS
    assert posterior.row_elements >= 4  # a number of a group, and four records of one element


@pytest.mark.slow
def test_fork_and_spawn(mixed_model):
    """The graph of groups travels to other processes."""
    model, _, _ = mixed_model
    draws = []
    for cores in (1, 2):
        with model:
            idata = pm.sample(
                step=SGLDCV(compile_kwargs=NUMBA),
                chains=2,
                cores=cores,
                mp_ctx="forkserver" if cores == 2 else None,
                tune=20,
                draws=20,
                random_seed=3,
                progressbar=False,
                compute_convergence_checks=False,
            )
        draws.append(idata.posterior["mean"].values)
    np.testing.assert_array_equal(*draws)
