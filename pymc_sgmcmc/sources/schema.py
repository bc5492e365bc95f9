"""Names, types and shapes of columns, and what is checked of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from pymc_sgmcmc.errors import RowsError

Schema = Mapping[str, tuple[np.dtype, tuple[int, ...]]]
"""Type, and shape of one row, of columns by name."""

NUMBERS = "biuf"
"""Kinds of NumPy types that a model can use: truth values, integers and floating numbers."""

CODES = np.dtype(np.int32)
"""Type of the codes of categories."""

MEMORY = 2 * 2**30
"""The rows of a run take at most so many bytes at a time, 2 GiB."""

UNITS = {"": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
"""Bytes of a unit of memory, by its name in small letters."""

PARTITION_BYTES = 2**26
"""A partition has about so many bytes, 64 MB."""


def schema_of(arrays: Mapping[str, np.ndarray]) -> Schema:
    """Types, and shapes of one row, of arrays."""
    return {name: (np.dtype(values.dtype), values.shape[1:]) for name, values in arrays.items()}


def check_numbers(columns: Schema, purpose: str = "", remedy: str = "Convert it first.") -> None:
    """Refuse columns that a model cannot use.

    Raises
    ------
    RowsError
        Where one has other than numbers.
    """
    for name, (dtype, _) in columns.items():
        if dtype.kind not in NUMBERS:
            raise RowsError(
                f"The column `{name}` should have numbers{purpose}, but has the type {dtype}. "
                f"{remedy}"
            )


def bytes_of(memory: int | str) -> int:
    """Bytes of an amount of memory, such as ``"2 GiB"``.

    Raises
    ------
    TypeError, ValueError
        Where it is none.
    """
    if not isinstance(memory, int | str) or isinstance(memory, bool):
        raise TypeError(f'`memory` should be bytes, or a text such as "2 GiB", but got {memory!r}.')
    found = re.fullmatch(r"\s*(\d+\.?\d*)\s*([a-z]*)\s*", str(memory).lower())
    if found is None or found[2] not in UNITS or not float(found[1]):
        raise ValueError(
            f'`memory` should be bytes, or a text such as "2 GiB", but got {memory!r}. Units are '
            "kB, MB, GB, KiB, MiB and GiB."
        )
    return int(float(found[1]) * UNITS[found[2]])


def without_missing(
    columns: Mapping[str, Any], first: int = 0, origin: str = ""
) -> dict[str, np.ndarray]:
    """Columns as plain arrays, of which no entry is missing.

    NumPy drops the mask of a masked array in most operations, and takes what is behind it for data.

    Parameters
    ----------
    columns : mapping of str to array
        Rows along the first axis. Entries are missing where they are masked, or none of the objects
        of an array of objects (`pandas.NA`, None or NaN).
    first : int
        The number of their first row.
    origin : str
        Where the rows are, for the message.

    Raises
    ------
    RowsError
        Where an entry is missing.
    """
    for name, values in columns.items():
        missing = None
        if np.ma.isMaskedArray(values):
            missing = np.ma.getmaskarray(values)
        elif values.dtype == object:
            missing = pd.isna(values)
        if missing is not None and missing.any():
            rows = np.flatnonzero(missing.reshape(len(missing), -1).any(axis=1))
            place = f" in {origin}" if origin else ""
            raise RowsError(
                f"The column `{name}` should have no missing values, but row {first + rows[0]}"
                f"{place} has one, the first of {len(rows)} such rows there. Leave these rows out "
                "of all columns, fill them, or choose other columns."
            )
    return {name: np.asarray(values) for name, values in columns.items()}


def row_bytes(columns: Schema) -> int:
    """Bytes of a row."""
    return sum(dtype.itemsize * int(np.prod(shape)) for dtype, shape in columns.values())


def common_length(arrays: Mapping[str, np.ndarray]) -> int:
    """Number of rows of arrays.

    Raises
    ------
    RowsError
        Where arrays have different numbers of rows, or none.
    """
    lengths = {name: values.shape[0] if values.ndim else 0 for name, values in arrays.items()}
    if len(set(lengths.values())) != 1 or not all(lengths.values()):
        listed = ", ".join(f"`{name}` has {length}" for name, length in lengths.items())
        raise RowsError(
            f"Arrays should have the same number of rows, at least 1, but {listed or 'none'} "
            "was given. Put rows along the first axis."
        )
    return next(iter(lengths.values()))


def offsets_of(lengths: Iterable[int], origin: str) -> np.ndarray:
    """Numbers of the first rows of partitions, and the number of all rows.

    Raises
    ------
    RowsError
        Where no partition has rows.
    """
    offsets = np.append(0, np.cumsum(list(lengths), dtype=np.int64))
    if not offsets[-1]:
        raise RowsError(f"{origin} should have rows, but have none. Give other data.")
    return offsets


def check_partition(
    found: Mapping[str, np.ndarray], expected: Schema, count: int, number: int, remedy: str
) -> None:
    """Refuse a partition that is not as the first rows, or as its description, said.

    Parameters
    ----------
    found : mapping of str to numpy.ndarray
        Columns of the partition.
    expected : mapping of str to (numpy.dtype, tuple of int)
        The columns that it should have.
    count : int
        The rows that it should have.
    number : int
        That of the partition.
    remedy : str
        What to do, for the message.

    Raises
    ------
    RowsError
    """
    for name, (dtype, shape) in expected.items():
        if name not in found:
            raise RowsError(f"Partition {number} should have the column `{name}`. {remedy}")
        values = found[name]
        if values.dtype != dtype or values.shape != (count, *shape):
            raise RowsError(
                f"The column `{name}` of partition {number} should have the type {dtype} and the "
                f"shape {(count, *shape)}, but has {values.dtype} and {values.shape}. {remedy}"
            )
