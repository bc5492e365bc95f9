"""The version, the conda recipe and the citation agree with the package."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import pymc_sgmcmc

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "docs/release/recipe/recipe.yaml"

pytestmark = pytest.mark.skipif(not RECIPE.exists(), reason="needs the folder docs of a clone")

OTHER_NAMES = {"matplotlib": "matplotlib-base"}
"""Packages that conda-forge has under another name."""


def test_versions_agree():
    recipe = re.search(r'^  version: "(.+?)"$', RECIPE.read_text(encoding="utf-8"), re.MULTILINE)
    citation = re.search(
        r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert recipe is not None
    assert citation is not None
    assert recipe[1] == citation[1] == pymc_sgmcmc.__version__


def test_recipe_has_the_dependencies_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = {f"python {project['requires-python']}"}
    for dependency in project["dependencies"]:
        name, bounds = re.fullmatch(r"([\w-]+)(.*)", dependency).groups()
        wanted.add(f"{OTHER_NAMES.get(name, name)} {bounds}".strip())
    recipe = RECIPE.read_text(encoding="utf-8")
    listed = recipe.partition("\n  run:\n")[2].partition("\n\n")[0]
    assert {line.strip().removeprefix("- ") for line in listed.splitlines()} == wanted
