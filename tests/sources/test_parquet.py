"""Rows of parquet files: values, categories, and what is refused."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pymc_sgmcmc.errors import RowsError
from pymc_sgmcmc.sources import ParquetSource
from tests.sources.conftest import ROWS


@pytest.fixture
def write(tmp_path):
    """Write a table to a file, and return its path."""

    def written(name, columns, **settings):
        table = columns if isinstance(columns, pa.Table) else pa.table(columns)
        pq.write_table(table, tmp_path / name, **{"row_group_size": 10, **settings})
        return str(tmp_path / name)

    return written


@pytest.fixture
def paths(write, table):
    """The table in three files, the second without rows, listed in the wrong order."""
    parts = [slice(0, 40), slice(40, 40), slice(40, ROWS)]
    pieces = [{name: values[part] for name, values in table.items()} for part in parts]
    return [write(f"{k}.parquet", pieces[k]) for k in (2, 0, 1)]


def test_rows_of_several_files(paths, is_table):
    rows = ParquetSource(paths)
    is_table(rows)
    assert rows.n_partitions == 4 + 1 + 7
    assert rows.offsets.dtype == np.int64


def test_each_row_group_is_read_once_and_only_needed_columns(paths, monkeypatch, numbers):
    read = []
    original = pq.ParquetFile.read_row_group

    def counted(file, group, columns):
        read.append(tuple(columns))
        return original(file, group, columns=columns)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counted)
    rows = ParquetSource(paths, ["late", "hour"])
    assert list(rows.columns) == ["late", "hour"]
    rows.take(numbers, ["hour"])
    assert read == [("hour",)] * 11


def test_numbers_are_views_of_arrow_memory(write):
    rows = ParquetSource([write("x.parquet", {"x": np.arange(20.0)})])
    values = rows.partition(1, ["x"])["x"]
    assert not values.flags.owndata
    np.testing.assert_array_equal(values, np.arange(10.0, 20))


def test_pickled_rows_carry_no_data(write):
    rows = ParquetSource([write("x.parquet", {"x": np.zeros(50_000)}, row_group_size=50_000)])
    rows.read(0, 5)
    copied = pickle.loads(pickle.dumps(rows))
    assert len(pickle.dumps(rows)) < 2000
    assert copied.signature() == rows.signature()
    np.testing.assert_array_equal(copied.take([7])["x"], [0.0])


@pytest.mark.parametrize("dictionary", [True, False])
def test_categories_have_the_same_codes_in_all_files(write, dictionary):
    """Also where a file has no dictionary pages, and where codes of files have other sizes."""
    many = [f"label {k}" for k in range(300)]
    parts = [
        pd.Categorical(["b", "a", "b", *many], categories=["b", "a", *many]),
        pd.Categorical(["c", "a"], categories=["c", "a", "unused"]),
    ]
    paths = [
        write(f"{k}.parquet", pa.table({"g": pa.array(part)}), use_dictionary=dictionary)
        for k, part in enumerate(parts)
    ]
    rows = ParquetSource(paths)
    labels = rows.categories("g")
    codes = rows.read(0, rows.n_rows)["g"]
    assert codes.dtype == rows.columns["g"][0] == np.int32
    assert rows.categorical == {"g"}
    np.testing.assert_array_equal(labels[codes], np.concatenate([np.asarray(x) for x in parts]))
    assert list(labels[:2]) == ["b", "a"]
    assert len(set(labels)) == len(labels)


def test_codes_are_those_of_pandas(tmp_path):
    table = pd.DataFrame({"g": pd.Categorical(["x", "z", "x"], categories=["z", "y", "x"])})
    table.to_parquet(tmp_path / "g.parquet")
    rows = ParquetSource([tmp_path / "g.parquet"])
    np.testing.assert_array_equal(rows.read(0, 3)["g"], table["g"].cat.codes)
    assert list(rows.categories("g")) == ["z", "y", "x"]
    with pytest.raises(RowsError, match="should be of `g`, but got `h`"):
        rows.categories("h")


def test_an_index_without_a_name_is_no_column(tmp_path):
    pd.DataFrame({"x": [1.0, 2.0]}, index=[5, 3]).to_parquet(tmp_path / "x.parquet")
    assert list(ParquetSource([tmp_path / "x.parquet"]).columns) == ["x"]


def test_signature_changes_with_a_file(write):
    path = write("x.parquet", {"x": np.zeros(3)})
    first = ParquetSource([path]).signature()
    assert ParquetSource([path]).signature() == first
    os.utime(path, (1, 1))
    assert ParquetSource([path]).signature() != first


def test_text_is_read_but_not_put_into_models(write):
    rows = ParquetSource([write("x.parquet", {"x": ["a", "b", "c"], "y": [1, 2, 3]})])
    assert list(rows.take([2, 0], ["x"])["x"]) == ["c", "a"]
    with pytest.raises(
        RowsError, match=r"`x` should have numbers to be in a model, .*object.* `transform`"
    ):
        rows.head("x")


def test_nulls_are_refused(write):
    """At once where statistics of the file tell of them, and otherwise as they are read."""
    clean = write("0.parquet", {"x": [1, 2], "y": [1.0, 2.0]})
    holes = pa.table({"x": pa.array([1, None, None]), "y": [0.0, 0.0, 1.0]})
    message = r"`x` should .* no missing .* row 3 in the file .*1.parquet .* first of 2"
    path = write("1.parquet", holes)
    assert ParquetSource([clean, path], ["y"]).n_rows == 5
    with pytest.raises(RowsError, match=message):
        ParquetSource([clean, path])
    rows = ParquetSource([clean, write("1.parquet", holes, write_statistics=False)])
    with pytest.raises(RowsError, match=message):
        rows.read(0, 5)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"x": [1.0]}, "`x` is double and not int64, `y` is missing and not int64"),
        ({"x": [1], "y": [2], "z": [3]}, "`z` is int64 and not missing"),
        ({"x": [1], "y": pa.array(["a"]).dictionary_encode()}, "`y` is dictionary.* not int64"),
    ],
)
def test_files_of_different_schemas(write, columns, message):
    first = write("0.parquet", {"x": [1], "y": [2]})
    other = write("1.parquet", columns)
    with pytest.raises(
        RowsError, match=rf"1.parquet should have the columns of .*0.parquet, but {message}"
    ):
        ParquetSource([first, other])


def test_other_files_that_are_refused(write, tmp_path):
    path = write("0.parquet", {"x": [1], "y": [2]})
    with pytest.raises(RowsError, match=r"columns of .*0.parquet are `x`, `y`, but got `z`"):
        ParquetSource([path], ["x", "z"])
    (tmp_path / "1.parquet").write_text("text")
    with pytest.raises(RowsError, match=r"1.parquet cannot be read as parquet: .* Write it again"):
        ParquetSource([path, tmp_path / "1.parquet"])
    os.mkfifo(tmp_path / "pipe.parquet")
    with pytest.raises(RowsError, match=r"pipe.parquet should be a parquet file, but is no file"):
        ParquetSource([tmp_path / "pipe.parquet"])
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    with pytest.raises(RowsError, match=r"3.parquet should have columns of different names.*`x`"):
        ParquetSource([write("3.parquet", twice)])
    empty = write("2.parquet", pa.table({"x": pa.array([], pa.int64())}))
    with pytest.raises(RowsError, match=r"2.parquet should have rows, but have none"):
        ParquetSource([empty])


def test_a_file_that_changes_or_vanishes(write):
    path = write("x.parquet", {"x": np.zeros(30)})
    rows = ParquetSource([path])
    rows.read(0, 5)
    write("x.parquet", {"x": np.ones(30)})
    with pytest.raises(RowsError, match=r"x.parquet changed after it was opened.* cannot go on"):
        rows.read(15, 20)
    os.remove(path)
    with pytest.raises(RowsError, match=r"x.parquet vanished after it was opened"):
        rows.read(15, 20)
