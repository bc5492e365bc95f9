"""Default settings on models of groups, against NUTS on the joint models."""

from __future__ import annotations

import numpy as np
import pytest

from tests.accuracy.hierarchical_suite import available, compare
from tests.accuracy.suite import good

QUICK = "radon_counties"
"""A linear mixed model, to be run alone; all together take half an hour."""

DRAWS = 2000
"""Draws of each of 4 chains, so that Monte-Carlo errors of standard deviations are about 1 %."""

QUICK_DRAWS = 1000
"""Draws of that run, with Monte-Carlo errors below 2 %."""


@pytest.mark.slow
def test_default_settings(data_folder):
    """Means near the reference; variances off by what the report says, within the stated error."""
    of_globals, of_locals = compare(QUICK, data_folder, draws=QUICK_DRAWS)
    assert (of_globals["mean_off"].abs() <= 0.1).all(), of_globals["mean_off"]
    z = (of_globals["true_error"] - of_globals["variance_error"]) / of_globals["monte_carlo"]
    assert (z.abs() < 4.5).all(), z
    assert good(of_locals).mean() >= 0.95
    assert "within the stated" in of_globals.attrs["verdict"]


@pytest.fixture(scope="module")
def tables(data_folder):
    """Errors of the global and of the local coordinates of each model."""
    return {name: compare(name, data_folder, draws=DRAWS) for name in available()}


@pytest.mark.slow
def test_all_models(tables):
    """At least 95 % of all coordinates, no model with fewer than 90 % of its own."""
    parts = {name: np.concatenate([good(part) for part in both]) for name, both in tables.items()}
    shares = {name: float(part.mean()) for name, part in parts.items()}
    assert len(tables) >= 12
    assert np.concatenate(list(parts.values())).mean() >= 0.95, shares
    assert min(shares.values()) >= 0.90, shares


@pytest.mark.slow
@pytest.mark.parametrize("name", available())
def test_chains_agree(tables, name):
    """R-hat of each global coordinate is at most 1.01."""
    of_globals, _ = tables[name]
    assert of_globals["r_hat"].max() <= 1.01, of_globals["r_hat"]
