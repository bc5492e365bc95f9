"""Fixtures of the tests of the posterior."""

from __future__ import annotations

import pytensor
import pytest

from pymc_sgmcmc.posterior import posterior as posterior_module
from pymc_sgmcmc.posterior.compiled import PYTHON_MODE


@pytest.fixture
def real_mode():
    """The mode that users get."""


@pytest.fixture(autouse=True)
def python_mode(request, monkeypatch):
    """Evaluate by NumPy: C code takes seconds to compile for each graph."""
    # PyTensor notes where each node was made, which takes an eighth of the time.
    flags = {"traceback__limit": 0}
    if "real_mode" not in request.fixturenames:
        monkeypatch.setattr(posterior_module, "_setup_mode", lambda: PYTHON_MODE)
        # PyMC compiles initial points, and PyTensor constants that it folds.
        flags["cxx"] = ""
    with pytensor.config.change_flags(**flags):
        yield
