"""The notebooks run from the first cell to the last, and are stored as they should be."""

from __future__ import annotations

import re

import nbformat
import pytest

from tests.support.notebooks import FAST, executed, notebook_paths

MOST_BYTES = 400_000
"""A notebook with its outputs is at most this large."""

NEEDS_DATA = {"control_variates", "glmms", "logistic_normal", "osgfs", "topics"}
"""These notebooks read data sets that are not in a package."""

each_notebook = pytest.mark.parametrize("path", notebook_paths(), ids=lambda path: path.stem)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@each_notebook
def test_notebook_runs(path, request, monkeypatch, tmp_path):
    monkeypatch.setenv(FAST, "1")
    if path.stem in NEEDS_DATA:
        monkeypatch.setenv("PYMC_SGMCMC_DATA", str(request.getfixturevalue("data_folder")))
    assert all(cell.execution_count for cell in code_cells(executed(path, tmp_path)))


@each_notebook
def test_stored_outputs(path):
    assert path.stat().st_size < MOST_BYTES
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [cell.id for cell in notebook.cells if "execution" in cell.metadata]
    draws_figures = any("plt.subplots" in cell.source for cell in cells)
    assert draws_figures <= any("image/png" in output.get("data", {}) for output in outputs)
    streams = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "Warning" not in streams
    assert not re.search(r"/(home|root|tmp|usr|work|Users)/", streams)
