"""The source of rows that a path or an object stands for."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pymc_sgmcmc.errors import RowsError
from pymc_sgmcmc.sources.arrays import ArraySource
from pymc_sgmcmc.sources.base import RowSource
from pymc_sgmcmc.sources.cluster import check_client
from pymc_sgmcmc.sources.columns import ChosenColumns, check_choice, check_names, names_of_choice
from pymc_sgmcmc.sources.dask import DaskArraySource, DaskFrameSource
from pymc_sgmcmc.sources.parquet import ParquetSource
from pymc_sgmcmc.sources.schema import MEMORY, bytes_of
from pymc_sgmcmc.sources.zarr import ZarrSource

ZARR_FILES = ("zarr.json", ".zgroup", ".zarray")
"""A folder with one of these files is a zarr group or array, in the formats 3 and 2."""


def open_rows(
    data: Any,
    columns: Mapping[str, str | Sequence[str]] | None = None,
    *,
    memory: int | str = MEMORY,
    client: Any = None,
) -> RowSource:
    """Open rows of data that do not fit in memory.

    Parameters
    ----------
    data : str, pathlib.Path, list of these, mapping of arrays, or dask.dataframe.DataFrame
        Parquet files: a path, a pattern such as ``"flights/*.parquet"``, a folder with files
        ``*.parquet``, or a list of these. A file that is named twice counts once. A zarr group, or
        its folder. A mapping from names to NumPy arrays (also mapped ones, see `numpy.memmap`) or
        Dask arrays, or a Dask dataframe.
    columns : mapping of str to str or list of str, optional
        By its name in the model, a column of the data, or a list of columns that are joined to a
        matrix of one type. By default each column has its own name.
    memory : int or str
        Bytes, or a text such as ``"500 MB"``. The rows of a run take at most so much at a time,
        beside a partition. A run that needs more is cut into stretches, and the rows of the next
        one are read while the present one runs. The draws are the same.
    client : dask.distributed.Client, optional
        Passes over the rows, as of `standardise` and of a step method that is made with them, run
        on the workers of its cluster, which must have the files at the same paths. `sample` takes
        a client for the chains.

    Returns
    -------
    RowSource
        Pass it as ``rows`` to a step method, for a model on what its method `head` returns.

    Raises
    ------
    RowsError
        Where no file matches, the files have different columns, there are no such columns or no
        rows, columns have nulls, or cannot be joined.
    TypeError, ValueError
        For other data, columns or memory.
    ImportError
        Where a package is not installed; the message names the extra that installs it.

    Examples
    --------
    >>> import numpy as np
    >>> from pymc_sgmcmc.sources import open_rows
    >>> flights = {
    ...     "distance": np.array([300.0, 800.0]),
    ...     "hour": np.array([9, 17]),
    ...     "late": np.ones(2),
    ... }
    >>> rows = open_rows(flights, columns={"X": ["distance", "hour"], "y": "late"})
    >>> rows.read(0, 2)["X"]
    array([[300.,   9.],
           [800.,  17.]])
    """
    most = bytes_of(memory)
    choice = None if columns is None else check_choice(columns)
    names = None if choice is None else names_of_choice(choice)
    if client is None:
        source = _open(data, names)
    else:
        with check_client(client).as_current():
            source = _open(data, names)
    source.memory, source.client = most, client
    return source if choice is None else ChosenColumns(source, choice)


def _open(data: Any, names: list[str] | None) -> RowSource:
    """Rows with some or all columns, under their own names."""
    if isinstance(data, str | Path):
        if any((Path(data) / file).exists() for file in ZARR_FILES):
            return ZarrSource(data, names)
        return ParquetSource(_files(data), names)
    if (
        isinstance(data, list | tuple)
        and all(isinstance(path, str | Path) for path in data)
        and data
    ):
        return ParquetSource(sorted({file for path in data for file in _files(path)}), names)
    package = type(data).__module__.partition(".")[0]
    if package == "zarr" and hasattr(data, "array_keys"):
        return ZarrSource(data, names)
    if package.startswith("dask") and hasattr(data, "columns"):
        return DaskFrameSource(data, names)
    if isinstance(data, Mapping) and data:
        check_names(names or [], list(data), "the mapping")
        arrays = {name: data[name] for name in names or data}
        if all(isinstance(array, np.ndarray) for array in arrays.values()):
            return ArraySource(arrays)
        if all(type(array).__module__.startswith("dask.array") for array in arrays.values()):
            return DaskArraySource(arrays)
    raise TypeError(
        "Rows should be paths of parquet files, a zarr group, a Dask dataframe, or a mapping of "
        f"NumPy or of Dask arrays, but got {_described(data)}. Convert them to one of these."
    )


def _files(path: str | Path) -> list[str]:
    """Files that a path, a folder or a pattern stands for.

    Raises
    ------
    RowsError
        Where there are none.
    """
    pattern = str(path)
    if Path(path).is_dir():
        pattern = str(Path(glob.escape(pattern)) / "*.parquet")
    files = [pattern] if Path(path).is_file() else glob.glob(pattern, recursive=True)
    if not files:
        raise RowsError(
            f"No file matches {pattern}. Check the path; relative ones begin at {Path.cwd()}."
        )
    return files


def _described(data: Any) -> str:
    """Types of some data, for a message."""
    if isinstance(data, Mapping):
        types = {name: type(array).__name__ for name, array in data.items()}
        return f"a mapping of {types}"
    return type(data).__name__
