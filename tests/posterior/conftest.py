"""Fixtures of the tests of the posterior."""

from __future__ import annotations

import pytensor
import pytest


@pytest.fixture(autouse=True)
def without_compiler(request):
    """PyMC evaluates initial points, and PyTensor constants that it folds, without C code."""
    without = {} if "with_compiler" in request.fixturenames else {"cxx": ""}
    with pytensor.config.change_flags(**without):
        yield
