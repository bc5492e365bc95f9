"""Fixtures of the tests of the posterior."""

from __future__ import annotations

import pytensor
import pytest


@pytest.fixture
def with_compiler():
    """PyMC and PyTensor compile in C, as for users."""


@pytest.fixture(autouse=True)
def without_compiler(request):
    """PyMC evaluates initial points, and PyTensor constants that it folds, without C code."""
    # PyTensor notes where each node was made, which takes an eighth of the time.
    flags = {"traceback__limit": 0}
    if "with_compiler" not in request.fixturenames:
        flags["cxx"] = ""
    with pytensor.config.change_flags(**flags):
        yield
