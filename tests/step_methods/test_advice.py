"""What a step method says where another way serves better."""

from __future__ import annotations

import numpy as np
import pymc as pm

from pymc_sgmcmc.step_methods.advice import advice


def grouped(n_groups: int) -> pm.Model:
    """Counts of three records a group."""
    group = np.repeat(np.arange(n_groups), 3)
    with pm.Model() as model:
        z = pm.Normal("z", shape=n_groups)
        pm.Poisson("y", pm.math.exp(z[group]), observed=group % 3)
    return model


def test_local_variables():
    assert '`marginalize(model, ["z"])`' in advice(grouped(25), 75, 10)
    assert advice(grouped(10), 30, 10) is None


def test_more_rows_than_nuts_reads():
    with pm.Model() as model:
        mean = pm.Normal("mean")
        pm.Normal("y", mean, 1, observed=np.arange(100.0))
    assert advice(model, 100, 999) is None
    assert "A draw reads 1500 rows, 15 times all 100" in advice(model, 100, 1500)
