"""Paths and objects become sources, and chains on these have the draws of rows in memory."""

from __future__ import annotations

import pickle
import re
import sys
from pathlib import Path

import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pymc as pm
import pytensor
import pytest
import zarr

from pymc_sgmcmc import SGLDCV, sample, sources
from pymc_sgmcmc.errors import RowsError
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.sources import (
    ArraySource,
    DaskArraySource,
    DaskFrameSource,
    ParquetSource,
    ZarrSource,
    open_rows,
)
from pymc_sgmcmc.tuning import find_center

COLUMNS = {"X": ["distance", "hour"], "y": "delay"}


@pytest.fixture
def forms(table, tmp_path):
    """The table in each form that can be opened, and what it becomes."""
    frame = pd.DataFrame(table)
    for k, part in enumerate(np.array_split(np.arange(len(frame)), 3)):
        frame.iloc[part].to_parquet(tmp_path / f"{k}.parquet", row_group_size=20)
    group = zarr.open_group(tmp_path / "group", mode="w")
    mapped = {}
    for name, values in table.items():
        group.create_array(name, data=values, chunks=30)
        np.save(tmp_path / f"{name}.npy", values)
        mapped[name] = np.load(tmp_path / f"{name}.npy", mmap_mode="r")
    return [
        (str(tmp_path / "*.parquet"), ParquetSource),
        (tmp_path, ParquetSource),
        ([tmp_path / "2.parquet", str(tmp_path / "*.parquet")], ParquetSource),
        (str(tmp_path / "group"), ZarrSource),
        (group, ZarrSource),
        (table, ArraySource),
        (mapped, ArraySource),
        (dd.from_pandas(frame, npartitions=3), DaskFrameSource),
        ({name: da.from_array(values, 40) for name, values in table.items()}, DaskArraySource),
    ]


def test_what_is_opened(forms, table, is_table, numbers):
    X = np.column_stack([table["distance"], table["hour"]])
    assert X.dtype == np.float32
    for data, source in forms:
        rows = open_rows(data)
        assert type(rows) is source
        is_table(rows)
        rows = open_rows(data, COLUMNS)
        assert rows.columns == {"X": (X.dtype, (2,)), "y": (table["delay"].dtype, ())}
        assert rows.partition(1 % rows.n_partitions, ["X"])["X"].dtype == X.dtype
        found = pickle.loads(pickle.dumps(rows)).take(numbers)
        np.testing.assert_array_equal(found["X"], X[numbers], strict=True)
        np.testing.assert_array_equal(rows.read(0, 50)["y"], table["delay"][:50], strict=True)


def test_a_file_alone_and_paths_with_brackets(forms, tmp_path):
    assert open_rows(tmp_path / "1.parquet").n_rows < open_rows(tmp_path).n_rows
    folder = tmp_path / "flights [2020]"
    folder.mkdir()
    (tmp_path / "1.parquet").rename(folder / "[1].parquet")
    assert open_rows(folder).n_rows == open_rows(folder / "[1].parquet").n_rows


def test_mapped_arrays_pickle_without_their_data(tmp_path, rng):
    values = rng.normal(size=(5000, 4))
    np.save(tmp_path / "X.npy", values)
    X = np.load(tmp_path / "X.npy", mmap_mode="r")
    views = {"all": X, "last": X[::-1, 3], "some": X[:, 1:3]}
    pickled = pickle.dumps(open_rows(views))
    assert len(pickled) < 2000
    for name, found in pickle.loads(pickled).read(100, 120).items():
        np.testing.assert_array_equal(found, views[name][100:120], strict=True)


def test_mapped_files_must_not_change(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(50))
    rows = open_rows({"x": np.load(tmp_path / "x.npy", mmap_mode="r")})
    first = rows.signature()
    values = np.load(tmp_path / "x.npy", mmap_mode="r+")
    values[25], values[26] = values[26], values[25]
    values.flush()
    with pytest.raises(RowsError, match=r"x.npy changed after it was opened"):
        rows.read(0, 5)
    assert open_rows({"x": values}).signature() != first


def test_categories_keep_their_labels(tmp_path):
    table = {"g": pd.Categorical(["b", "a", "b"]), "h": pd.Categorical(["u", "v", "u"])}
    pd.DataFrame({**table, "x": [1.0, 2.0, 3.0]}).to_parquet(tmp_path / "g.parquet")
    rows = open_rows(tmp_path, {"group": "g", "x": "x", "both": ["g", "h"]})
    rows = rows.standardise("x").transform(lambda columns: {"z": columns["x"] + 1}, ["x"])
    assert rows.categorical == {"group"}
    assert list(rows.categories("group")[rows.read(0, 3)["group"]]) == ["b", "a", "b"]
    np.testing.assert_array_equal(rows.read(0, 3)["both"], [[1, 0], [0, 1], [1, 0]])
    with pytest.raises(RowsError, match=r"`z` was not stored as categories"):
        rows.categories("z")
    with pytest.raises(RowsError, match=r"`M` should have codes .* but `g` are codes and `x` are"):
        open_rows(tmp_path, {"M": ["g", "x"]})


def test_text_becomes_numbers_by_a_function(tmp_path):
    frame = pd.DataFrame({"carrier": ["AA", "UA", "AA"], "x": [1.0, 2.0, 3.0]})
    frame.to_parquet(tmp_path / "x.parquet")
    with pytest.raises(RowsError, match=r"`X` should have columns of numbers, but `carrier` has"):
        open_rows(tmp_path, {"X": ["x", "carrier"]})
    labels = np.array(["AA", "UA"], dtype=object)
    rows = open_rows(tmp_path).transform(
        lambda columns: {"code": np.searchsorted(labels, columns["carrier"])}, ["carrier"]
    )
    with pm.Model() as model:
        rows.head("code")
    np.testing.assert_array_equal(model["code"].get_value(), [0, 1, 0])


def test_what_is_refused(table, tmp_path):
    with pytest.raises(RowsError, match=r"No file matches .*\*.parquet\. Check the path"):
        open_rows(tmp_path)
    with pytest.raises(RowsError, match=r"No file matches flights/\*\.csv"):
        open_rows("flights/*.csv")
    with pytest.raises(RowsError, match=r"columns of the mapping are .* but got `speed`"):
        open_rows(table, {"X": ["hour", "speed"]})
    with pytest.raises(
        RowsError, match=r"`M` should have columns of numbers, but `X` has the shape"
    ):
        open_rows({"X": np.ones((3, 2))}, {"M": ["X"]})
    for data in (3, [], {}, {"x": [1, 2]}, pd.DataFrame(table), {"x": da.ones(3), "y": np.ones(3)}):
        with pytest.raises(TypeError, match="Rows should be paths of parquet files, a zarr group"):
            open_rows(data)
    for columns in ("X", ["hour"], {}, {"X": []}, {"X": 3}, {"X": ["hour", 3]}, {1: "hour"}):
        with pytest.raises(TypeError, match=r"`columns` should be a mapping such as"):
            open_rows(table, columns)


def test_a_missing_package_is_named_with_its_extra(forms, monkeypatch):
    for package in ("pyarrow.parquet", "zarr"):
        monkeypatch.setitem(sys.modules, package, None)
    for path in (forms[0][0], forms[3][0]):
        with pytest.raises(ImportError, match=r'pip install "pymc_sgmcmc\[files\]"'):
            open_rows(path)


def test_no_optional_package_is_imported_with_the_modules():
    for path in Path(sources.__file__).parent.glob("*.py"):
        assert not re.search(
            r"^ *(import|from) (pyarrow|zarr|dask)", path.read_text(), re.MULTILINE
        )


# --- Chains -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def regression():
    """Rows of a regression of `y` on two columns."""
    rng = np.random.default_rng(11)
    a, b = rng.normal(size=(2, 1500)).astype("float32")
    return {"a": a, "b": b, "y": a - b / 2 + rng.normal(size=1500)}


def draws(data, rows=None):
    """Draws of the slopes, on first rows of a source or on rows in memory."""
    with pm.Model():
        X, y = data()
        slopes = pm.Normal("slopes", 0, 1, shape=2)
        pm.Normal("outcome", X @ slopes, 1.0, observed=y)
        idata = sample(
            30,
            tune=20,
            chains=1,
            step=SGLDCV(rows=rows, batch_size=30, compile_kwargs={"mode": "NUMBA"}),
            random_seed=4,
            progressbar=False,
            quiet=True,
            compute_convergence_checks=False,
        )
    return idata["posterior"]["slopes"].values


@pytest.fixture(scope="module")
def expected(regression):
    """Draws on rows in memory."""
    X = np.column_stack([regression["a"], regression["b"]])
    with pytensor.config.change_flags(cxx=""):
        return draws(lambda: (pm.Data("X", X), pm.Data("y", regression["y"])))


def stacked(columns):
    return {"X": np.column_stack([columns["a"] * 2, columns["b"]]), "y": columns["y"]}


@pytest.mark.parametrize("name", ["parquet", "transformed zarr", "dask"])
def test_draws_are_those_of_rows_in_memory(name, regression, expected, tmp_path, without_compiler):
    columns = {"X": ["a", "b"], "y": "y"}
    if name == "parquet":
        pd.DataFrame(regression).to_parquet(tmp_path / "0.parquet", row_group_size=400)
        rows = open_rows(tmp_path, columns)
    elif name == "dask":
        rows = open_rows(dd.from_pandas(pd.DataFrame(regression), npartitions=4), columns)
    else:
        group = zarr.open_group(tmp_path, mode="w")
        for column, values in {**regression, "a": regression["a"] / 2}.items():
            group.create_array(column, data=values, chunks=400)
        rows = open_rows(group).transform(stacked)
    np.testing.assert_array_equal(draws(lambda: rows.head("X", "y"), rows), expected)


def test_centre_is_that_of_rows_in_memory(rng):
    """To the last bit, also where the mode of a few rows is far from that of all."""
    X = rng.normal(size=(20_000, 3))
    arrays = {"X": X, "y": (rng.logistic(size=20_000) < X @ [0.5, -0.3, 1.0] - 1).astype("int8")}
    rows = open_rows(arrays)
    centers = []
    for source in (None, rows):
        with pm.Model() as model:
            if source is None:
                X, y = (pm.Data(name, values) for name, values in arrays.items())
            else:
                X, y = rows.head(*arrays)
            slopes = pm.Normal("slopes", 0, 1, shape=3)
            pm.Bernoulli("outcome", logit_p=X @ slopes, observed=y)
        posterior = Posterior(model, rows=source)
        centers.append(find_center(posterior, posterior.initial_position))
    of_memory, of_source = centers
    assert np.abs(of_memory.gradient).max() < 1
    np.testing.assert_array_equal(of_source.position, of_memory.position)
    np.testing.assert_array_equal(
        of_source.curvature.root.dense(), of_memory.curvature.root.dense()
    )
    np.testing.assert_array_equal(of_source.difference.curvature, of_memory.difference.curvature)


@pytest.mark.parametrize(
    ("memory", "expected"), [(1000, 1000), ("2 GiB", 2**31), ("1.5kB", 1500), ("3 mib", 3 * 2**20)]
)
def test_memory_of_a_run(memory, expected):
    rows = open_rows({"x": np.arange(9.0)}, columns={"X": ["x"]}, memory=memory)
    assert rows.memory == rows.standardise("X").memory == expected


@pytest.mark.parametrize(
    ("memory", "error"),
    [
        ("much", ValueError),
        ("2 TB", ValueError),
        (0, ValueError),
        (-1, ValueError),
        (None, TypeError),
        (True, TypeError),
    ],
)
def test_bad_memory(memory, error):
    with pytest.raises(error, match=r"`memory` should be bytes, or a text such as"):
        open_rows({"x": np.arange(9.0)}, memory=memory)
