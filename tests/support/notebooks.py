"""Execute the notebooks, for their test or to store their outputs.

Examples
--------
::

    python -m tests.support.notebooks                # all, in full, and store what they show
    python -m tests.support.notebooks quickstart     # one of them
    python -m tests.support.notebooks --fast         # with few draws, nothing is stored
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import nbformat
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "notebooks"

FAST = "PYMC_SGMCMC_FAST"
"""Where this variable of the environment is set, notebooks take few draws and small data."""

LONGEST_CELL = 3600
"""Seconds that a cell may take."""


class KernelOfThisInterpreter(AsyncKernelManager):
    """Starts "python3" as ipykernel in this environment, whatever kernels the user has."""

    def _kernel_spec_manager_default(self) -> KernelSpecManager:
        return KernelSpecManager(kernel_dirs=[])


def notebook_paths() -> list[Path]:
    """All notebooks."""
    return sorted(FOLDER.glob("*.ipynb"))


def executed(path: Path, folder: Path) -> nbformat.NotebookNode:
    """A notebook after its execution in a folder.

    Raises
    ------
    nbclient.exceptions.CellExecutionError
        With the cell and its traceback.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        kernel_manager_class=KernelOfThisInterpreter,
        timeout=LONGEST_CELL,
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
    )
    return client.execute()


def store(notebook: nbformat.NotebookNode, path: Path) -> None:
    """Write a notebook without what differs from machine to machine."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    notebook.metadata["kernelspec"] = {
        "display_name": "Python 3",
        "language": "python",
        "name": "python3",
    }
    nbformat.write(notebook, path)


def main() -> None:
    """Execute the notebooks that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="such as quickstart; default: all")
    parser.add_argument("--fast", action="store_true", help="few draws, and nothing is stored")
    arguments = parser.parse_args()
    paths = [FOLDER / f"{name}.ipynb" for name in arguments.names] or notebook_paths()
    if arguments.fast:
        os.environ[FAST] = "1"
    os.environ.pop("MPLBACKEND", None)  # Another backend would store no figures.
    for path in paths:
        began = time.monotonic()
        notebook = executed(path, FOLDER)
        if not arguments.fast:
            store(notebook, path)
        print(f"{path.stem}: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
