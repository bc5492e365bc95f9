"""The code in the documentation runs, and its pages build."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pymc as pm
import pytensor
import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"

pytestmark = pytest.mark.skipif(not DOCS.is_dir(), reason="needs the folder docs")

SMALL = {"100_000": "5_000", "draws=1000, tune=500": "draws=20, tune=10"} | {
    "draws=1000": "draws=20",
    "tune=200": "tune=10",
}
"""What to write for less data and fewer draws."""


def python_blocks(path: Path) -> list[tuple[int, str]]:
    """Blocks of Python in a Markdown file, each with the line that it begins in."""
    text = path.read_text(encoding="utf-8")
    return [
        (text.count("\n", 0, match.start(1)) + 1, match[1])
        for match in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]


@pytest.fixture
def few_draws(monkeypatch):
    """Sample in this process, and in the mode that compiles soonest: there is little to run."""
    sample = pm.sample

    def quiet_sample(*args, **kwargs):
        settings = {"cores": 1, "progressbar": False, "compute_convergence_checks": False}
        return sample(*args, **{**kwargs, **settings})

    monkeypatch.setattr(pm, "sample", quiet_sample)
    with pytensor.config.change_flags(mode="FAST_COMPILE", cxx=""):
        yield


@pytest.mark.parametrize(
    "name", ["README.md", "docs/getting_started.md", "docs/how_a_sampler_is_put_together.md"]
)
def test_code_runs(name, few_draws, capsys):
    path = ROOT / name
    blocks = python_blocks(path)
    assert blocks
    names = {"__name__": "__main__"}
    for line, block in blocks:
        for given, small in SMALL.items():
            block = block.replace(given, small)
        # Empty lines first, so that a traceback shows the line of the page.
        code = compile("\n" * (line - 1) + block, str(path), "exec", dont_inherit=True)
        exec(code, names)
