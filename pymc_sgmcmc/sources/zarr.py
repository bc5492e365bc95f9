"""Rows of the arrays of a zarr group."""

from __future__ import annotations

import itertools
import logging
import math
import struct
from base64 import standard_b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pymc_sgmcmc.checks import import_optional
from pymc_sgmcmc.errors import RowsError
from pymc_sgmcmc.sources.base import RowSource
from pymc_sgmcmc.sources.columns import check_names
from pymc_sgmcmc.sources.files import digest_of_files, stamp, unchanged
from pymc_sgmcmc.sources.schema import PARTITION_BYTES, common_length, row_bytes, schema_of

FILL = "_FillValue"
"""The attribute that says which number stands for a missing value."""

CODING = (FILL, "missing_value", "scale_factor", "add_offset")
"""Attributes of the CF conventions for arrays whose numbers stand for others."""

NAN = standard_b64encode(struct.pack("<d", np.nan)).decode()
"""What xarray writes as this attribute of all floating numbers."""

_log = logging.getLogger("pymc.sgmcmc")  # below PyMC's logger, so that its settings hold


class ZarrSource(RowSource):
    """Rows of arrays of a zarr group, with rows along the first axis.

    Partitions begin where chunks (or shards) begin, and have about 64 MB where chunks are smaller.

    Parameters
    ----------
    group : str, pathlib.Path or zarr.Group
        The group, or its folder.
    names : sequence of str, optional
        Arrays to read, all of the group where not given.

    Raises
    ------
    RowsError
        Where there is no such group or array, no rows, arrays have different numbers of rows,
        values are missing, or they are coded by the CF conventions.
    ImportError
        Where zarr is not installed.

    Examples
    --------
    >>> import tempfile
    >>> import zarr
    >>> from pymc_sgmcmc.sources import ZarrSource
    >>> group = zarr.open_group(tempfile.mkdtemp(), mode="w")
    >>> _ = group.create_array("y", data=np.arange(10.0), chunks=4)
    >>> ZarrSource(group).take([7, 2])["y"]
    array([7., 2.])
    """

    def __init__(self, group: Any, names: Sequence[str] | None = None):
        if isinstance(group, str | Path):
            group = _open(group)
        if names is None:
            names = sorted(group.array_keys())
        check_names(names, sorted(group.array_keys()), f"the zarr group {group.store_path}")
        self._arrays = {name: group[name] for name in names}
        for name, array in self._arrays.items():
            _check_coding(name, array)
        count = common_length(self._arrays)
        self.columns = schema_of(self._arrays)
        length = _partition_length(self._arrays, row_bytes(self.columns))
        self.offsets = np.append(np.arange(0, count, length), count)
        self._stamps = {
            path: stamp(path)
            for number in range(self.n_partitions)
            for path in self._files(number, names)
        }

    def partition(self, number: int, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Rows of the chunks of a partition."""
        rows = slice(int(self.offsets[number]), int(self.offsets[number + 1]))
        with unchanged({path: self._stamps[path] for path in self._files(number, names)}):
            return self._plain(number, {name: self._read(name, rows) for name in names})

    def _read(self, name: str, rows: slice) -> Any:
        try:
            return _masked(self._arrays[name], rows)
        except Exception as error:  # Each codec has errors of its own.
            raise RowsError(
                f"Rows {rows.start} to {rows.stop - 1} of the zarr array `{name}` cannot be read: "
                f"{type(error).__name__} {error}. Write the array again."
            ) from error

    def signature(self) -> str:
        """Types, shapes, and sizes and times of files. Without files, a digest of some rows."""
        parts = [f"{name} {dtype} {shape}" for name, (dtype, shape) in self.columns.items()]
        if self._stamps:
            parts.append(digest_of_files(self._stamps))
        else:
            parts.append(self.digest_of_ends())
        return f"{self.n_rows} rows: " + "; ".join(parts)

    def _files(self, number: int, names: Sequence[str]) -> list[str]:
        """Files of a partition, where the store is a folder. A chunk of fill values has no file."""
        start, stop = int(self.offsets[number]), int(self.offsets[number + 1])
        files = []
        for array in (self._arrays[name] for name in names):
            root = getattr(array.store, "root", None)
            if root is not None:
                first, *others = array.shards or array.chunks
                chunks = [range(start // first, -(-stop // first))]
                chunks += [range(-(-array.shape[k] // size)) for k, size in enumerate(others, 1)]
                keys = map(array.metadata.encode_chunk_key, itertools.product(*chunks))
                files += [str(root / array.path / key) for key in keys]
        return files


def _check_coding(name: str, array: Any) -> None:
    """Refuse an array whose numbers stand for others, and tell of one that was not all written.

    Raises
    ------
    RowsError
    """
    coding = {key: array.attrs[key] for key in CODING if key in array.attrs}
    if coding.get(FILL) == NAN:
        del coding[FILL]  # which needs no decoding
    if coding:
        raise RowsError(
            f"The array `{name}` should have plain numbers, but they are coded with {coding}. Give "
            f'a mapping with `xarray.open_zarr(...)["{name}"].data`, which has decoded ones.'
        )
    missing = array.nchunks - array.nchunks_initialized
    if missing:
        _log.info(
            "%d of %d chunks of the array `%s` are not in the zarr group, so their rows are read "
            "as its fill value, %s.",
            missing,
            array.nchunks,
            name,
            array.fill_value,
        )


def _masked(array: Any, rows: slice) -> np.ndarray:
    """Rows of an array, with a mask where they have a fill value other than the default, zero.

    Nothing was written there, or what was written says that there is no value. NaN is none anyway.
    """
    values = array[rows]
    fill = array.fill_value
    if fill is None or fill == np.zeros((), values.dtype)[()] or fill != fill:
        return values
    return np.ma.array(values, mask=values == fill)


def _open(path: str | Path) -> Any:
    """A group of a folder, to read."""
    zarr = import_optional("zarr", "files", "Reading zarr groups")
    try:
        return zarr.open_group(str(path), mode="r")
    except (OSError, ValueError) as error:
        raise RowsError(
            f"The path {path} should be a zarr group, but cannot be read as one: {error}. Give the "
            "folder of a group with one array a column."
        ) from error


def _partition_length(arrays: Mapping[str, Any], bytes_of_row: int) -> int:
    """Rows of a partition, a multiple of the chunks of all arrays where memory allows."""
    lengths = [(array.shards or array.chunks)[0] for array in arrays.values()]
    common = math.lcm(*lengths)
    if common * bytes_of_row > PARTITION_BYTES:
        common = max(lengths)
    return common * max(1, PARTITION_BYTES // (common * bytes_of_row))
