"""The notebooks run from the first cell to the last, and are stored as they should be."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))

FEW_DRAWS = {"QUICKSTART_DRAWS": "60"}
"""The notebooks read these variables of the environment. With fewer draws NUTS has not found its
step size by the end of its tuning, and takes longer."""

MOST_BYTES = 300_000
"""A notebook with its outputs is at most this large."""

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


class KernelOfThisInterpreter(AsyncKernelManager):
    """Starts "python3" as ipykernel in this environment, whatever kernels the user has."""

    def _kernel_spec_manager_default(self) -> KernelSpecManager:
        return KernelSpecManager(kernel_dirs=[])


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@each_notebook
def test_notebook_runs(path, monkeypatch, tmp_path, compiling_processes):
    for name, value in FEW_DRAWS.items():
        monkeypatch.setenv(name, value)
    notebook = read(path)
    client = NotebookClient(
        notebook,
        kernel_manager_class=KernelOfThisInterpreter,
        timeout=300,
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()  # raises CellExecutionError, which shows the cell and its traceback
    assert all(cell.execution_count for cell in code_cells(notebook))


@each_notebook
def test_stored_outputs(path):
    assert path.stat().st_size < MOST_BYTES
    notebook = read(path)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [cell.id for cell in notebook.cells if "execution" in cell.metadata]
    streams = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "Warning" not in streams
    assert not re.search(r"/(home|root|tmp|usr|work|Users)/", streams)
