"""Default settings on posteriors of real use, against stored full-data NUTS."""

from __future__ import annotations

import numpy as np
import pytest

from tests.accuracy.suite import available, compare, good

QUICK = ("correlated_design",)
"""Posteriors of the default run, beside the Skin data; all others take minutes together."""

DRAWS = 2000
"""Draws of each of 4 chains, so that Monte-Carlo errors of standard deviations are about 1 %."""


@pytest.mark.parametrize("name", QUICK)
def test_default_settings(name, data_folder):
    """Means near the reference; variances off by what the report says, within the stated error."""
    table = compare(name, data_folder, draws=DRAWS)
    assert (table["mean_off"].abs() <= 0.1).all(), table["mean_off"]
    z = (table["true_error"] - table["variance_error"]) / table["monte_carlo"]
    assert (z.abs() < 4.5).all(), z
    assert (table["variance_error"] <= 0.05).all()
    assert "within the stated" in table.attrs["verdict"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pymc_sgmcmc.BatchSizeWarning")
def test_all_posteriors(data_folder):
    """At least 95 % of all coordinates, no posterior with fewer than 85 % of its own.

    The horseshoe prior is left to the report, which says of each coordinate that it did not
    converge.
    """
    tables = {name: compare(name, data_folder, draws=DRAWS) for name in available()}
    assert set(tables.pop("horseshoe")["verdict"]) == {"not converged"}
    shares = {name: float(good(table).mean()) for name, table in tables.items()}
    pooled = np.concatenate([good(table) for table in tables.values()])
    assert len(tables) >= 14
    assert pooled.mean() >= 0.95, shares
    assert min(shares.values()) >= 0.85, shares
