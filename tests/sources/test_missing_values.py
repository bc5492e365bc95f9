"""No way into a source takes a missing value for data."""

from __future__ import annotations

import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import xarray as xr
import zarr

from pymc_sgmcmc.errors import RowsError
from pymc_sgmcmc.sources import ArraySource, RowSource, open_rows, store_rows
from tests.support.sources import CountedRows

ROWS = 20
MASK = np.isin(np.arange(ROWS), [13, 17])
Y = np.ma.array(np.where(MASK, -99.0, 1.0), mask=MASK)
"""Behind the mask is a code for missing values, as in the file of a survey."""


def source_of_user(folder) -> RowSource:
    rows = CountedRows({"y": np.ones(ROWS)}, 5)
    rows.partition = lambda number, names: {"y": Y[5 * number : 5 * number + 5]}
    return rows


def zarr_rows(folder, **settings) -> RowSource:
    group = zarr.open_group(folder, mode="w", **settings)
    group.create_array("y", data=Y.data, chunks=5, fill_value=-99.0)
    return open_rows(group)


def nullable(type_: str) -> pd.Series:
    return pd.Series([None if missing else 1 for missing in MASK], dtype=type_)


def transformed(y, batches: int = 1) -> RowSource:
    plain = ArraySource({"n": np.arange(ROWS)}, partition_rows=ROWS // batches)
    return plain.transform(lambda columns: {"y": y[columns["n"]]})


ENTRIES = {
    "array": lambda folder: open_rows({"y": Y}),
    "matrix": lambda folder: open_rows({"y": np.ma.column_stack([np.ones(ROWS), Y])}),
    "objects": lambda folder: open_rows({"y": np.array(nullable("object"))}),
    "pandas.NA": lambda folder: open_rows({"y": nullable("boolean").to_numpy()}),
    "choice": lambda folder: open_rows({"y": Y}, {"X": ["y"]}),
    "Dask array": lambda folder: open_rows({"y": da.from_array(Y, 5)}),
    "Dask array, joined": lambda folder: open_rows({"y": da.from_array(Y, 5)}, {"X": ["y"]}),
    "Dask frame": lambda folder: open_rows(
        dd.from_pandas(pd.DataFrame({"y": nullable("Int64")}), npartitions=4)
    ),
    "Dask frame of NaN": lambda folder: open_rows(
        dd.from_pandas(pd.DataFrame({"y": Y.filled(np.nan)}), npartitions=4)
    ),
    "zarr": zarr_rows,
    "zarr 2": lambda folder: zarr_rows(folder, zarr_format=2),
    "function": lambda folder: transformed(Y),
    "function of partitions": lambda folder: transformed(Y, 4),
    "function of objects": lambda folder: transformed(np.array(nullable("Int64"), dtype=object)),
    "stream": lambda folder: store_rows(({"y": Y[k : k + 5]} for k in range(0, ROWS, 5)), folder),
    "stream of a matrix": lambda folder: store_rows([Y[:, None]], folder, ["y"]),
    "stream of frames": lambda folder: store_rows(
        [pd.DataFrame({"y": nullable("object")})], folder
    ),
    "source of a user": source_of_user,
    "function on a source of a user": lambda folder: source_of_user(folder).transform(
        lambda columns: {"z": np.asarray(columns["y"]) + 1}
    ),
}

WAYS = {
    "read": lambda rows: rows.read(0, ROWS),
    "take": lambda rows: rows.take(np.array([14, 15])),
    "standardise": lambda rows: rows.standardise(next(iter(rows.columns))),
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("way", WAYS)
def test_the_column_and_the_first_row_are_named(entry, way, tmp_path):
    with pytest.raises(RowsError, match=r"`y` should have no missing values, but row 13.*Leave"):
        WAYS[way](ENTRIES[entry](tmp_path))


@pytest.mark.parametrize("y", [np.ma.array(np.ones(ROWS)), np.ma.array(np.ones(ROWS), mask=False)])
def test_a_mask_of_nothing(y):
    for rows in (open_rows({"y": y}), transformed(y)):
        (values,) = rows.read(0, 3).values()
        assert type(values) is np.ndarray
        np.testing.assert_array_equal(values, 1.0)


@pytest.mark.parametrize(
    "coding",
    [
        {"dtype": "int16", "scale_factor": 0.5, "add_offset": 7.0, "_FillValue": -99},
        {"dtype": "int16", "_FillValue": -99},
        {"_FillValue": -99.0},
    ],
)
def test_coded_arrays_of_zarr_are_read_by_xarray(coding, tmp_path):
    table = xr.Dataset({"y": ("row", np.arange(4.0))})
    table.to_zarr(tmp_path / "coded", encoding={"y": coding}, zarr_format=3)
    with pytest.raises(RowsError, match=r"`y` should have plain numbers, but .* coded .*xarray"):
        open_rows(tmp_path / "coded", {"y": "y"})
    decoded = open_rows({"y": xr.open_zarr(tmp_path / "coded")["y"].data})
    np.testing.assert_array_equal(decoded.read(0, 4)["y"], np.arange(4.0))
    table.to_zarr(tmp_path / "plain", zarr_format=3)
    np.testing.assert_array_equal(open_rows(tmp_path / "plain").read(0, 4)["y"], np.arange(4.0))
