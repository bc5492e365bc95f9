"""Rows of Dask arrays and dataframes, of which one partition is computed at a time."""

from __future__ import annotations

import pickle

import dask
import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest

from pymc_sgmcmc.errors import RowsError
from pymc_sgmcmc.sources import DaskArraySource, DaskFrameSource
from tests.sources.conftest import ROWS


def test_rows_of_arrays(table, is_table):
    chunks = iter([20, 7, 50, 103])
    is_table(DaskArraySource({name: da.from_array(x, next(chunks)) for name, x in table.items()}))


def test_rows_of_a_dataframe(table, is_table):
    frame = dd.from_pandas(pd.DataFrame(table), npartitions=4)
    is_table(DaskFrameSource(frame))
    assert list(DaskFrameSource(frame, ["hour", "late"]).columns) == ["hour", "late"]


def test_partitions_are_computed_one_at_a_time():
    computed = []

    def recorded(block, block_info=None):
        computed.append(block_info[0]["chunk-location"][0])
        return block

    x = da.from_array(np.arange(50.0), 10).map_blocks(recorded, meta=np.zeros(0))
    rows = DaskArraySource({"x": x})
    computed.clear()
    np.testing.assert_array_equal(rows.take([31, 12, 39])["x"], [31, 12, 39])
    assert computed == [1, 3]


def test_unknown_lengths_are_computed_once():
    counts = []

    def counted(block):
        counts.append(len(block))
        return block

    x = da.from_array(np.arange(50), 10).map_blocks(counted, meta=np.zeros(0, int))
    selected = x[x % 3 == 0]
    rows = DaskArraySource({"x": selected})
    assert np.isnan(selected.shape[0])
    np.testing.assert_array_equal(rows.read(0, 20)["x"], np.arange(0, 50, 3))
    assert len(counts) == 2 * 5


def test_partitions_without_rows(table):
    frame = dd.from_pandas(pd.DataFrame(table), npartitions=4)
    first = table["hour"][:3]
    rows = DaskFrameSource(frame[frame.hour.isin(first)])
    expected = table["delay"][np.isin(table["hour"], first)]
    np.testing.assert_array_equal(rows.read(0, ROWS, ["delay"])["delay"], expected)
    with pytest.raises(RowsError, match=r"Dask dataframe should have rows, but have none"):
        DaskFrameSource(frame[frame.hour > 99])


@pytest.mark.parametrize("known", [True, False])
def test_categories(known):
    labels = np.array(["b", "a", "b", "c", "a", "c"])
    frame = dd.from_pandas(pd.DataFrame({"g": labels}), npartitions=3)
    frame = frame.astype({"g": pd.CategoricalDtype(["c", "b", "a"]) if known else "category"})
    rows = DaskFrameSource(frame)
    codes = rows.read(0, 6)["g"]
    assert codes.dtype == np.int32
    assert rows.categorical == {"g"}
    np.testing.assert_array_equal(rows.categories("g")[codes], labels)
    assert not known or list(rows.categories("g")) == ["c", "b", "a"]


def test_categories_in_another_order_in_some_partition():
    parts = [pd.DataFrame({"g": pd.Categorical(["a", "b"], list(order))}) for order in ("ab", "ba")]
    rows = DaskFrameSource(dd.from_map(parts.__getitem__, [0, 1], meta=parts[0]))
    np.testing.assert_array_equal(rows.read(0, 4)["g"], [0, 1, 0, 1])


def test_categories_that_dask_does_not_know_are_refused():
    parts = [pd.DataFrame({"g": pd.Categorical(labels)}) for labels in (["a", "b"], ["b", "c"])]
    frame = dd.from_map(parts.__getitem__, [0, 1])
    rows = DaskFrameSource(frame)
    with pytest.raises(RowsError, match=r"Partition 1 .* categories in its column `g` that Dask"):
        rows.read(0, 4)
    found = DaskFrameSource(frame.assign(g=frame["g"].cat.as_unknown()))
    np.testing.assert_array_equal(found.read(0, 4)["g"], [0, 1, 1, 2])


def test_types_of_pandas_without_nulls():
    frame = pd.DataFrame({"x": pd.array([1, 2], "Int32"), "y": pd.array([True, False], "boolean")})
    rows = DaskFrameSource(dd.from_pandas(frame, npartitions=1))
    found = rows.read(0, 2)
    np.testing.assert_array_equal(found["x"], np.array([1, 2], "int32"), strict=True)
    np.testing.assert_array_equal(found["y"], np.array([True, False]), strict=True)


def test_partitions_that_are_not_as_dask_says():
    x = da.from_array(np.arange(20), 10).map_blocks(lambda b: b / 2, meta=np.zeros(0, int))
    with pytest.raises(RowsError, match=r"`x` of partition 1 should have the type int64 "):
        DaskArraySource({"x": x}).read(15, 20)


def test_pickles_and_signatures(table):
    frame = dd.from_pandas(pd.DataFrame(table), npartitions=4)
    arrays = {"x": da.arange(100_000, chunks=20_000)}
    for rows in (DaskFrameSource(frame), DaskArraySource(arrays)):
        copied = pickle.loads(pickle.dumps(rows))
        assert copied.signature() == rows.signature()
        np.testing.assert_array_equal(
            *[next(iter(each.take([7, 99]).values())) for each in (rows, copied)]
        )
    rows.read(0, 10)
    assert len(pickle.dumps(rows)) < 10_000
    assert DaskArraySource({"x": arrays["x"] + 1}).signature() != rows.signature()
    changed = frame.assign(hour=frame.hour + 1)
    assert DaskFrameSource(changed).signature() != DaskFrameSource(frame).signature()


def test_schedulers(table, numbers):
    """That of the user is taken, and otherwise no threads, which do not survive a fork."""
    rows = DaskArraySource({"x": da.from_array(table["delay"], 20)})
    used = []

    def scheduler(graph, keys, **_):
        used.append("chosen")
        return dask.get(graph, keys)

    with dask.config.set(scheduler=scheduler):
        rows.read(0, 5)
    assert used == ["chosen"]
    rows._process += 1
    with dask.config.set(scheduler=scheduler):
        rows.read(30, 35)
    assert used == ["chosen"]


def test_what_is_refused(table):
    frame = dd.from_pandas(pd.DataFrame(table), npartitions=2)
    with pytest.raises(RowsError, match=r"columns of the Dask dataframe are .* but got `speed`"):
        DaskFrameSource(frame, ["speed"])
    with pytest.raises(RowsError, match=r"`x` has 4, `y` has 5 was given"):
        DaskArraySource({"x": da.zeros(4), "y": da.zeros(5)})
