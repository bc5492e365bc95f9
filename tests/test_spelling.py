"""No common misspellings in pages, notebooks and code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

NAMES = "teh,carin,nin"
"""These are names of authors, and of an attribute of NumPy."""

pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="needs a clone")


def test_spelling(tmp_path):
    """The outputs of notebooks are numbers and figures, so that only their cells are read."""
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells)
        (tmp_path / f"{path.stem}.txt").write_text(text, encoding="utf-8")
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "theory").glob("*.md")]
    texts = [ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING")]
    sources = [*texts, *pages, ROOT / "pymc_sgmcmc", tmp_path]
    found = subprocess.run(
        # "shufle" is a wrong argument in a table of messages.
        [sys.executable, "-m", "codespell_lib", f"--ignore-words-list={NAMES},shufle", *sources],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout
