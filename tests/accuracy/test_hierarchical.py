"""Default settings on models of groups, against NUTS on the joint models."""

from __future__ import annotations

import numpy as np
import pytest

from tests.accuracy.hierarchical_suite import available, compare
from tests.accuracy.suite import good

QUICK = "radon_counties"
"""The model of the default run, a linear mixed model; all others take minutes together."""

DRAWS = 2000
"""Draws of each of 4 chains, so that Monte-Carlo errors of standard deviations are about 1 %."""


def test_default_settings(data_folder):
    """Means near the reference; variances off by what the report says, within the stated error."""
    of_globals, of_locals = compare(QUICK, data_folder, draws=DRAWS)
    assert (of_globals["mean_off"].abs() <= 0.1).all(), of_globals["mean_off"]
    z = (of_globals["true_error"] - of_globals["variance_error"]) / of_globals["monte_carlo"]
    assert (z.abs() < 4.5).all(), z
    assert good(of_locals).mean() >= 0.9
    assert "within the stated" in of_globals.attrs["verdict"]


@pytest.mark.slow
def test_all_models(data_folder):
    """At least 95 % of all coordinates, no model with fewer than 90 % of its own."""
    tables = {name: compare(name, data_folder, draws=DRAWS) for name in available()}
    parts = {name: np.concatenate([good(part) for part in both]) for name, both in tables.items()}
    shares = {name: float(part.mean()) for name, part in parts.items()}
    r_hats = {name: float(both[0]["r_hat"].max()) for name, both in tables.items()}
    assert len(tables) >= 12
    assert np.concatenate(list(parts.values())).mean() >= 0.95, shares
    assert min(shares.values()) >= 0.90, shares
    assert max(r_hats.values()) <= 1.01, r_hats
