"""Fixtures shared by the test suite, and settings of pytest's worker processes."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

# Before anything imports PyTensor. Numba's disk cache has no lock, so each worker has a cache of
# its own; one thread each, since there is a worker a core. What PyMC compiles for itself, and the
# transitions where a test names no backend, are evaluated by NumPy: for functions that are called
# a few times, compiling them takes longer than calling them. `with_compiler` compiles them in C.
# Slow tests call them often, some for an hour without Numba.
os.environ.setdefault("OMP_NUM_THREADS", "1")
flags = [flag for flag in os.environ.get("PYTENSOR_FLAGS", "").split(",") if "=" in flag]
given = dict(flag.split("=", 1) for flag in flags)
# Fused operations, which only a compiler makes faster, are loops over elements in Python. To find
# operations that may overwrite their inputs takes a tenth of the time of a compilation.
WITHOUT_COMPILER = ["mode=Mode", "linker=cvm", "cxx=", "optimizer_excluding=fusion:inplace"]
chosen = [value for option, value in pairwise(sys.argv) if option == "-m"]
if "mode" not in given and chosen == ["slow"]:
    flags.append("mode=NUMBA")
elif "mode" not in given and shutil.which("g++"):
    flags += WITHOUT_COMPILER
# Notes of the lines that made each node take an eighth of the time of a compilation, and symbols
# for a debugger take a tenth of that of g++.
for name, value in {"traceback__limit": "0", "gcc__cxxflags": "-g0"}.items():
    if name not in given:
        flags.append(f"{name}={value}")
# With all optimisations Numba compiles a transition a tenth longer, and those of XLA take a quarter
# of the time of the tests of chains at once. Slow tests have them.
if chosen != ["slow"]:
    os.environ.setdefault("NUMBA_OPT", "1")
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    base = Path(given.get("base_compiledir", Path.home() / ".pytensor"))
    if base.name != worker:  # the flags of the workers' parent
        flags.append(f"base_compiledir={base / worker}")
    # Before other functions are registered, so after them: to free all that a worker has made takes
    # eight seconds, for which its parent waits. What a worker reports has been sent by then.
    atexit.register(os._exit, 0)
os.environ["PYTENSOR_FLAGS"] = ",".join(flags)

# Graphs and compilers make many objects that live long. Python's default of some thousand new ones
# between two collections takes an eighth of the time of a compilation.
gc.set_threshold(2_000_000, 20, 20)

import numpy as np  # noqa: E402
import pytensor  # noqa: E402
import pytest  # noqa: E402
from pytensor.compile.mode import predefined_linkers  # noqa: E402
from pytensor.link.vm import VMLinker  # noqa: E402

from tests.support.default_cases import leave_out_the_others, mark_fast  # noqa: E402


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before pytest deselects those that are not asked for."""
    leave_out_the_others(items)
    mark_fast(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    """Skip a test that forks where the system cannot, as Windows."""
    try:
        return (yield)
    except ValueError as error:
        if str(error).startswith("cannot find context for "):  # of multiprocessing
            pytest.skip("needs a way to start processes that this system has not")
        raise


def pytest_collection_finish() -> None:
    """Collections of garbage pass over what was imported."""
    gc.freeze()


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


@pytest.fixture
def no_joint_block(monkeypatch):
    """Effects of few levels are treated as those of many."""
    monkeypatch.setattr("pymc_sgmcmc.posterior.posterior.MOST_JOINT", 0)


@pytest.fixture
def without_compiler():
    """What is not compiled by Numba or JAX is evaluated by NumPy, whatever the flags are."""
    with pytensor.config.change_flags(cxx=""):
        yield


@pytest.fixture
def with_compiler(monkeypatch):
    """What is not compiled by Numba or JAX is compiled in C."""
    cvm = predefined_linkers["cvm"]
    with pytensor.config.change_flags(cxx=pytensor.config.cxx or shutil.which("g++") or ""):
        # PyTensor's linker looks for a compiler when PyTensor is imported.
        for name, value in vars(VMLinker(use_cloop=True)).items():
            monkeypatch.setattr(cvm, name, value)
        yield


UNCHECKED = {
    "adaptation",
    "gradient_estimators",
    "local_sampling",
    "machines",
    "marginal",
    "maximum_likelihood",
    "papers",
    "polishing",
    "sampling",
    "step_methods",
    "trace_tools",
    "tuning",
    "test_chain.py",
    "compiling/test_numba_loop.py",
    "test_record.py",
}
"""Tests whose models are not compared with PyMC's log density first, which takes a fifth of their
time. The comparison is made in the other tests, and in those that are slow."""


@pytest.fixture(autouse=True)
def compared_elsewhere(request, monkeypatch):
    """Models of tests of samplers and tools are taken apart, and not compared with PyMC."""
    place = request.path.relative_to(Path(__file__).parent, walk_up=True)
    is_listed = not UNCHECKED.isdisjoint((place.parts[0], place.as_posix()))
    if is_listed and not request.node.get_closest_marker("slow"):
        from pymc_sgmcmc.posterior import posterior

        def first_reading(model, separated, *_, **__):
            return next(iter(separated.readings()))

        monkeypatch.setattr(posterior, "check_separation", first_reading)


@pytest.fixture
def uncompiled(monkeypatch) -> None:
    """Step methods without compiled transitions, for tests of their settings alone."""
    from pymc_sgmcmc.step_methods import base

    def block(dynamics, estimator, *arguments, **settings):
        parts = {"dynamics": dynamics, "batching": estimator.batching, "memory": None}
        return SimpleNamespace(gradients=1, **parts)

    monkeypatch.setattr(base, "TransitionBlock", block)
