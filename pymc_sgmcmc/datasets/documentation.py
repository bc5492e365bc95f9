"""Docstrings of the loaders, completed from their common parts and the registry."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable

from pymc_sgmcmc.datasets.registry import REGISTRY

_PARAMETERS = "Parameters\n----------\n"

_DATA_HOME = """data_home : path, optional
    Folder with {files}.
    Where not given, the places that `pymc_sgmcmc.datasets` lists are searched in order.
"""

_IMPORT_ERROR = """Raises
------
ImportError
    When a package is needed that is not installed.
"""

_FILE_ERRORS = """DatasetUnavailableError
    When no folder has the file and it could not be downloaded.
NotADirectoryError
    When ``data_home`` or ``PYMC_SGMCMC_DATA`` is not a folder.
ValueError
    When an argument has an unknown value, or the file does not hold what it should.
"""


def documented[Loader: Callable](*names: str) -> Callable[[Loader], Loader]:
    """Complete the docstring of a loader from the entries of the registry that it reads."""
    entries = [REGISTRY[name] for name in names]
    files = " or ".join(f"``{file}``" for entry in entries for file in entry.files)
    sources = " and ".join(dict.fromkeys(entry.source for entry in entries))
    notes = _filled(f"Source: {sources}. Licence: {entries[0].licence}. {entries[0].citation}")
    description = _filled(entries[0].description)
    data_home = _DATA_HOME.format(files=files)
    raises = _IMPORT_ERROR + (_FILE_ERRORS if files else "")

    def complete(loader: Loader) -> Loader:
        if loader.__doc__ is None:  # left out by `python -OO`
            return loader
        doc = inspect.cleandoc(loader.__doc__) + "\n"
        # After the summary, before the loader's own parameters, and before the examples.
        doc = doc.replace("\n\n", f"\n\n{description}\n\n", 1)
        if _PARAMETERS in doc:
            doc = doc.replace(_PARAMETERS, _PARAMETERS + data_home, 1)
        elif files:
            doc = doc.replace("Returns\n", f"{_PARAMETERS}{data_home}\nReturns\n", 1)
        doc = doc.replace("Examples\n", f"{raises}\nNotes\n-----\n{notes}\n\nExamples\n", 1)
        loader.__doc__ = doc
        return loader

    return complete


def _filled(text: str) -> str:
    # Addresses and hyphenated names stay whole.
    return textwrap.fill(text, 96, break_long_words=False, break_on_hyphens=False)
