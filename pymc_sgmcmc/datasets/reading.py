"""Readers of tables and arrays, and checks of the values against the published ones.

Error messages say what was found and what was expected; `fetch.load` adds the name of the file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from pymc_sgmcmc.datasets.registry import Entry


def read_table(path: Path, entry: Entry) -> pd.DataFrame:
    """Read the columns of a CSV file, in order, with categorical ones as categories or codes."""
    columns = list(entry.columns)
    frame = pd.read_csv(path, usecols=columns)[columns]
    if len(frame) != entry.n_rows:
        raise ValueError(f"found {len(frame)} rows, expected {entry.n_rows}")
    if frame.isna().any(axis=None):
        raise ValueError(f"found missing values in {frame.columns[frame.isna().any()].tolist()}")
    for name, values in entry.categories.items():
        if unknown := set(frame[name]) - set(values):
            raise ValueError(f"found {unknown} in the column {name!r}, expected {list(values)}")
        column = frame[name].astype(pd.CategoricalDtype(values, ordered=name in entry.ordered))
        frame[name] = column.cat.codes if name in entry.coded else column
    return frame


def read_arrays(path: Path, *names: str) -> list[np.ndarray]:
    """Read arrays of integers or text from an ``.npz`` file."""
    # Opened here, because np.load leaves a file open that is no archive.
    with path.open("rb") as file:
        archive = np.load(file, allow_pickle=False)
        arrays = [archive[name] for name in names]
    if kinds := [array.dtype.name for array in arrays if array.dtype.kind not in "iuU"]:
        raise ValueError(f"found arrays of {kinds}, expected integers")
    return arrays


def read_integers(
    path: Path, separator: str, shape: tuple[int, int], fields: Sequence[int] | None = None
) -> np.ndarray:
    """Read a table from text without a header, or from arrays X and y; int64.

    `fields` are the numbers of the fields to read from each line. All are read where not given.
    """
    if path.suffix == ".npz":
        table = np.column_stack(read_arrays(path, "X", "y"))
    else:
        frame = pd.read_csv(path, sep=separator, header=None, usecols=fields, dtype=np.int64)
        table = frame.to_numpy()
    check_shape(table, shape)
    return table.astype(np.int64)


def check_shape(values: np.ndarray, shape: tuple[int, ...]) -> None:
    """Refuse an array of another shape."""
    if values.shape != shape:
        raise ValueError(f"found an array of shape {values.shape}, expected {shape}")


def check_range(values: np.ndarray, low: float, high: float, what: str) -> None:
    """Refuse values out of range, which a smaller integer type would silently change."""
    if not (values.min() >= low and values.max() <= high):
        raise ValueError(
            f"found {what} from {values.min()} to {values.max()}, expected {low} to {high}"
        )


def check_sha256(values: np.ndarray, sha256: str) -> None:
    """Refuse values with another SHA-256, which does not depend on the format of the file."""
    computed = hashlib.sha256(np.ascontiguousarray(values)).hexdigest()
    if computed != sha256:
        raise ValueError(f"found values with SHA-256 {computed}, expected {sha256}")
