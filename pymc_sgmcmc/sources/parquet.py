"""Rows of parquet files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from pymc_sgmcmc.checks import import_optional, quoted
from pymc_sgmcmc.errors import RowsError
from pymc_sgmcmc.sources.base import RowSource
from pymc_sgmcmc.sources.columns import check_names
from pymc_sgmcmc.sources.files import Stamp, digest_of_files, stamp, unchanged
from pymc_sgmcmc.sources.schema import CODES, offsets_of

INDEX = re.compile(r"__index_level_\d+__")
"""Names that pandas gives to an index without a name, which are no data."""


class ParquetSource(RowSource):
    """Rows of parquet files of one schema. A partition is a row group.

    Files are read in the order of their paths. A column of categories, such as one of pandas, is
    read as codes, and `categories` has its labels. These are those of all files, in the order in
    which the dictionaries of row groups have them, so where all files have the same categories the
    codes are those of pandas. Finding them takes a pass over the column, when it is first used.

    Parameters
    ----------
    paths : sequence of str or pathlib.Path
        Files.
    names : sequence of str, optional
        Columns to read, all where not given.

    Raises
    ------
    RowsError
        Where a file cannot be read, its columns are not those of the first file, there are no such
        columns, no rows, or nulls.
    ImportError
        Where pyarrow is not installed.

    Examples
    --------
    >>> import tempfile
    >>> import pandas as pd
    >>> from pymc_sgmcmc.sources import ParquetSource
    >>> path = tempfile.mkdtemp() + "/flights.parquet"
    >>> table = pd.DataFrame({"late": [1, 0, 1], "carrier": pd.Categorical(["AA", "UA", "AA"])})
    >>> table.to_parquet(path, row_group_size=2)
    >>> rows = ParquetSource([path])
    >>> rows.n_partitions, rows.take([2, 1])
    (2, {'late': array([1, 0]), 'carrier': array([0, 1], dtype=int32)})
    >>> rows.categories("carrier")
    array(['AA', 'UA'], dtype=object)
    """

    def __init__(self, paths: Sequence[str | Path], names: Sequence[str] | None = None):
        self._stamps: dict[str, Stamp] = {}
        self._groups: list[tuple[str, int]] = []
        self._labels: dict[str, Any] = {}
        lengths: list[int] = []
        types: dict[str, Any] = {}
        with_nulls: list[tuple[int, str]] = []
        for path in sorted(os.path.abspath(path) for path in paths):
            self._stamps[path] = stamp(path)
            metadata, found = _metadata_and_types(path)
            if names is not None:
                check_names(names, list(found), path)
                found = {name: found[name] for name in names}
            types = types or found
            _check_types(found, types, path, next(iter(self._stamps)))
            with_nulls += [
                (len(lengths) + group, name) for group, name in _nulls(metadata, list(types))
            ]
            groups = range(metadata.num_row_groups)
            self._groups += [(path, group) for group in groups]
            lengths += [metadata.row_group(group).num_rows for group in groups]
        self.offsets = offsets_of(lengths, "The files " + ", ".join(self._stamps))
        self.columns = {name: (_numpy_type(each), ()) for name, each in types.items()}
        self._categorical = frozenset(name for name, each in types.items() if _has_codes(each))
        for number, name in with_nulls:
            self.partition(number, [name])  # which refuses them

    @property
    def categorical(self) -> frozenset[str]:
        """Names of the columns that are stored as categories."""
        return self._categorical

    def _labels_of(self, name: str) -> np.ndarray:
        return self._dictionary(name).to_numpy(zero_copy_only=False)

    def origin(self, number: int) -> str:
        """The file of a row group."""
        return f"the file {self._groups[number][0]}"

    def partition(self, number: int, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Columns of a row group, without a copy where memory and file have the same layout."""
        table = self._table(number, names)
        columns = {}
        for name in names:
            column = table.column(name)
            if column.null_count:
                missing = np.ma.array(np.empty(len(column), bool), mask=column.is_null().to_numpy())
                self._plain(number, {name: missing})
            pieces = [
                self._codes(name, chunk)
                if name in self._categorical
                else chunk.to_numpy(zero_copy_only=False)
                for chunk in column.chunks
            ]
            empty = np.empty(0, self.columns[name][0])
            columns[name] = pieces[0] if len(pieces) == 1 else np.concatenate([empty, *pieces])
        return columns

    def signature(self) -> str:
        """Number of rows, columns, and names, sizes and times of the files."""
        columns = ", ".join(f"{name} {dtype}" for name, (dtype, _) in self.columns.items())
        return f"{self.n_rows} rows: {columns}; files {digest_of_files(self._stamps)}"

    def _table(self, number: int, names: Sequence[str]) -> Any:
        """A row group as an Arrow table."""
        path, group = self._groups[number]
        expected = self._stamps[path]
        with unchanged({path: expected}):
            metadata = _metadata(path, expected)
            try:
                with _arrow("parquet").ParquetFile(path, metadata=metadata) as file:
                    return file.read_row_group(group, columns=list(names))
            except (OSError, _arrow().ArrowException) as error:
                raise RowsError(
                    f"Row group {group} of the file {path} cannot be read: {error}. Write the file "
                    "again."
                ) from error

    def _dictionary(self, name: str) -> Any:
        """Labels of all files as an Arrow array, in the order of their first appearance."""
        if name not in self._labels:
            dictionaries = [
                chunk.dictionary
                for number in range(self.n_partitions)
                for chunk in self._table(number, [name]).column(name).chunks
            ]
            self._labels[name] = _arrow().chunked_array(dictionaries).unique()
        return self._labels[name]

    def _codes(self, name: str, chunk: Any) -> np.ndarray:
        """Codes of an Arrow array. Each row group may have a dictionary of its own."""
        codes = _arrow("compute").index_in(chunk.dictionary, value_set=self._dictionary(name))
        return codes.to_numpy()[chunk.indices.to_numpy()]


def _arrow(module: str = "") -> Any:
    """The package pyarrow, or a module of it."""
    return import_optional(f"pyarrow.{module}".strip("."), "files", "Reading parquet files")


@lru_cache(maxsize=8)
def _metadata(path: str, expected: Stamp) -> Any:
    """Metadata of a file with this stamp, which are long where a file has many row groups."""
    return _arrow("parquet").read_metadata(path)


def _metadata_and_types(path: str) -> tuple[Any, dict[str, Any]]:
    """Metadata of a file, and Arrow types of its columns."""
    parquet = _arrow("parquet")
    if os.path.exists(path) and not os.path.isfile(path):  # A named pipe would be waited for.
        raise RowsError(f"The path {path} should be a parquet file, but is no file.")
    try:
        with parquet.ParquetFile(path) as file:
            metadata, schema = file.metadata, file.schema_arrow
    except (OSError, _arrow().ArrowException) as error:
        raise RowsError(
            f"The file {path} cannot be read as parquet: {error}. Write it again, or leave it out."
        ) from error
    names = [name for name in schema.names if not INDEX.fullmatch(name)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise RowsError(
            f"The file {path} should have columns of different names, but has {quoted(twice)} more "
            "than once. Write it again with other names."
        )
    return metadata, {name: _comparable(schema.field(name).type) for name in names}


def _has_codes(arrow_type: Any) -> bool:
    return _arrow().types.is_dictionary(arrow_type)


def _comparable(arrow_type: Any) -> Any:
    """A type without the size of codes, which follows the number of categories."""
    if not _has_codes(arrow_type):
        return arrow_type
    return _arrow().dictionary(_arrow().int32(), arrow_type.value_type)


def _numpy_type(arrow_type: Any) -> np.dtype:
    if _has_codes(arrow_type):
        return CODES
    return _arrow().array([], arrow_type).to_numpy(zero_copy_only=False).dtype


def _check_types(
    found: Mapping[str, Any], expected: Mapping[str, Any], path: str, first: str
) -> None:
    """Refuse a file whose columns are not those of the first file.

    Raises
    ------
    RowsError
    """
    differences = [
        f"`{name}` is {found.get(name, 'missing')} and not {expected.get(name, 'missing')}"
        for name in dict.fromkeys([*expected, *found])
        if found.get(name) != expected.get(name)
    ]
    if differences:
        raise RowsError(
            f"The file {path} should have the columns of {first}, but {', '.join(differences)}. "
            "Write the files with one schema, or choose other columns or files."
        )


def _nulls(metadata: Any, names: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Row groups and columns with nulls that the statistics of a file tell of."""
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for column in map(group.column, range(group.num_columns)):
            statistics = column.statistics
            if column.path_in_schema in names and statistics is not None and statistics.null_count:
                yield number, column.path_in_schema
