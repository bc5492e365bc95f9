"""Fixtures shared by the test suite, and settings of pytest's worker processes."""

from __future__ import annotations

import os
from pathlib import Path

# Before anything imports PyTensor. Numba's disk cache has no lock, so each worker has a cache of
# its own; one thread each, since there is a worker a core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    flags = os.environ.get("PYTENSOR_FLAGS", "")
    given = dict(flag.split("=", 1) for flag in flags.split(",") if "=" in flag)
    base = Path(given.get("base_compiledir", Path.home() / ".pytensor"))
    os.environ["PYTENSOR_FLAGS"] = ",".join(
        filter(None, [flags, f"base_compiledir={base / worker}"])
    )

import numpy as np
import pytest


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator with a fixed seed."""
    return np.random.default_rng(20261121)


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Folder with the real data sets; the test is skipped where there is none."""
    named = os.environ.get("PYMC_SGMCMC_DATA")
    candidates = [Path(named)] if named else []
    candidates.append(Path(__file__).parents[2] / "shared" / "data")
    for folder in candidates:
        if folder.is_dir():
            return folder
    pytest.skip("needs the folder of data sets named by PYMC_SGMCMC_DATA")
