"""Imports between modules go one way, from the model up to the tools for traces."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import pymc_sgmcmc

PACKAGE = Path(pymc_sgmcmc.__file__).parent

FLOORS = (
    (
        "checks",
        "elimination",
        "errors",
        "guests",
        "limits",
        "matrices",
        "pymc_private",
        "seeds",
        "stages",
    ),
    ("compiling", "record", "schedules", "stein"),
    ("sources",),
    ("posterior",),
    ("marginal",),
    ("batching",),
    ("gathering",),
    ("gradient_estimators",),
    ("dynamics",),
    ("engine",),
    ("vectorized",),
    ("tuning",),
    ("adaptation",),
    ("chain",),
    ("step_methods",),
    ("trace_tools",),
    ("sampling",),
    ("polishing",),
    ("local_sampling", "machines", "maximum_likelihood", "papers"),
    ("datasets",),
    ("regression",),
    ("main",),
    ("api",),
    ("__init__", "__main__"),
)
"""The folders are listed from the lowest up. A folder may import from those below it."""

WITHOUT_PYMC = (
    "compiling.graph_notes",
    "compiling.noise",
    "compiling.numba_loop",
    "batching",
    "gathering",
    "gradient_estimators",
    "dynamics",
    "engine",
    "vectorized",
    "adaptation",
    "chain",
)
"""These folders import nothing of PyMC."""


def imports(path: Path) -> list[str]:
    """Modules that a file imports anywhere: indented and for type checking too."""
    modules = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            modules.append(node.module)
            if node.module == "pymc_sgmcmc":
                modules += [f"pymc_sgmcmc.{alias.name}" for alias in node.names]
    return modules


def name_of(path: Path) -> str:
    """Dotted name of a module within the package."""
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    if len(parts) > 1 and parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


MODULES = {name_of(path): imports(path) for path in sorted(PACKAGE.rglob("*.py"))}
ARROWS = {
    name: {
        one.removeprefix("pymc_sgmcmc.")
        for one in imported
        if one.startswith("pymc_sgmcmc.") and one.removeprefix("pymc_sgmcmc.") in MODULES
    }
    for name, imported in MODULES.items()
}


def origins(path: Path) -> set[str]:
    """Files of the names that a file imports from packages."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("pymc_sgmcmc."):
            package = PACKAGE.joinpath(*node.module.split(".")[1:], "__init__.py")
            if package.exists():
                wanted = {alias.name for alias in node.names}
                for one in ast.parse(package.read_text(encoding="utf-8")).body:
                    if isinstance(one, ast.ImportFrom) and wanted & {a.name for a in one.names}:
                        found.add(one.module.removeprefix("pymc_sgmcmc."))
    return found


ORIGINS = {name_of(path): origins(path) for path in sorted(PACKAGE.rglob("*.py"))}


def floor_of(module: str) -> int:
    room = module.split(".")[0]
    return next(number for number, rooms in enumerate(FLOORS) if room in rooms)


@pytest.mark.parametrize("module", MODULES)
def test_no_import_goes_up(module):
    above = sorted(target for target in ARROWS[module] if floor_of(target) > floor_of(module))
    assert not above


def test_there_is_no_circle():
    remaining = {name: set(imported) for name, imported in ARROWS.items()}
    while leaves := [name for name, imported in remaining.items() if not imported]:
        for name in leaves:
            del remaining[name]
        for imported in remaining.values():
            imported.difference_update(leaves)
    assert not remaining


@pytest.mark.parametrize("room", WITHOUT_PYMC)
def test_rooms_that_do_not_know_pymc(room):
    modules = [name for name in MODULES if f"{name}.".startswith(f"{room}.")]
    assert modules
    for name in modules:
        assert not [target for target in MODULES[name] if target.split(".")[0] == "pymc"], name


def reached(module: str) -> set[str]:
    """Modules that a module imports, and those that these import, and so on.

    A name of a package leads to the file that has it.
    """
    found, left = set(), {module}
    while left:
        found.add(one := left.pop())
        faces = {name for name in ARROWS[one] if (PACKAGE / name.replace(".", "/")).is_dir()}
        through = {target for face in faces for target in ARROWS[face] if target in ORIGINS[one]}
        left |= (ARROWS[one] - faces | through) - found
    return found


@pytest.mark.parametrize("module", ["chain", "engine", "dynamics"])
def test_transitions_reach_no_pymc(module):
    """But for its class of errors, which `pymc.sample` knows."""
    rooms = [name for name in MODULES if f"{name}.".startswith(f"{module}.")]
    for name in set().union(*map(reached, rooms)):
        of_pymc = {target for target in MODULES[name] if target.split(".")[0] == "pymc"}
        assert of_pymc <= {"pymc.exceptions"}, name


def test_guests_are_imported_by_themselves():
    """No other room imports them, and the names that bring them are all of their public ones."""
    for room, names in pymc_sgmcmc.GUESTS.items():
        assert importlib.import_module(f"pymc_sgmcmc.{room}").__all__ == sorted(
            names, key=lambda name: (not name.isupper(), name)
        )
        outside = [name for name in MODULES if name.split(".")[0] not in {room, "__init__"}]
        assert not [name for name in outside for one in ARROWS[name] if one.split(".")[0] == room]


FIRST = """
import os, pymc, arviz, scipy.optimize, numba
for module in {modules}:
    if (child := os.fork()) == 0:
        __import__(module)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, module
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_every_room_may_be_imported_first():
    """As workers of other processes do, who import what a pickled object names."""
    rooms = sorted({name.split(".")[0] for name in MODULES} - {"__init__", "__main__"})
    modules = [f"pymc_sgmcmc.{room}" for room in (*rooms, "step_methods.base")]
    command = [sys.executable, "-W", "ignore", "-c", FIRST.format(modules=modules)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
