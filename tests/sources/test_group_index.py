"""Which rows belong to which group, by a column of codes in partitions."""

from __future__ import annotations

import numpy as np
import pytest

from pymc_sgmcmc.errors import RowsError
from pymc_sgmcmc.sources import open_rows
from pymc_sgmcmc.sources.group_index import index_of_groups
from tests.support.sources import CountedRows


@pytest.fixture
def codes(rng):
    """Codes of 11 groups in no order, of which groups 3 and 10 have no rows."""
    return rng.choice(np.setdiff1d(np.arange(11), [3, 10]), size=83).astype("int16")


def test_rows_of_groups(codes):
    rows = CountedRows({"group": codes, "x": codes}, rows=9)
    index = index_of_groups(rows, "group", 11)
    np.testing.assert_array_equal(index.counts, np.bincount(codes, minlength=11))
    np.testing.assert_array_equal(index.order, np.argsort(codes, kind="stable"))
    assert index.order.dtype == np.int32
    groups = np.array([7, 3, 0])
    expected = np.concatenate([np.flatnonzero(codes == group) for group in groups])
    np.testing.assert_array_equal(index.rows_of(groups), expected)


def test_rows_in_the_order_of_groups_take_one_pass(codes):
    rows = CountedRows({"group": np.sort(codes)}, rows=9)
    index = index_of_groups(rows, "group", 11)
    assert index.order is None
    assert rows.reads == rows.n_partitions
    np.testing.assert_array_equal(
        index.rows_of(np.array([4, 5])), np.flatnonzero(np.isin(np.sort(codes), [4, 5]))
    )


def test_partitions_that_are_in_order_each_by_itself():
    rows = CountedRows({"group": np.tile([0, 1, 2], 3)}, rows=3)
    index = index_of_groups(rows, "group", 3)
    np.testing.assert_array_equal(index.order, [0, 3, 6, 1, 4, 7, 2, 5, 8])


def test_the_index_is_made_once(codes):
    rows = CountedRows({"group": codes}, rows=9)
    index = index_of_groups(rows, "group", 11)
    reads = rows.reads
    assert index_of_groups(rows, "group", 11) is index
    assert rows.reads == reads
    assert index_of_groups(rows, "group", 12) is not index


def test_groups_without_rows_are_told(codes, caplog):
    with caplog.at_level("INFO", "pymc"):
        index_of_groups(CountedRows({"group": codes}, rows=9), "group", 11)
    assert "2 of 11 groups have no rows by the column `group`" in caplog.text


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (-1, r"codes of groups from 0 to 10, but row 80, in partition 8, has the code -1\. Leave"),
        (11, r"row 80, in partition 8, has the code 11\. Give the local variables an entry for"),
        (0.5, r"whole numbers, which number the groups, but row 80, in partition 8, has 0\.5\."),
        (np.nan, r"whole numbers, which number the groups, but row 80, in partition 8, has nan\."),
    ],
)
def test_wrong_codes(codes, code, message):
    codes = codes.astype(float if isinstance(code, float) else int)
    codes[80] = code
    with pytest.raises(RowsError, match=message):
        index_of_groups(CountedRows({"group": codes}, rows=9), "group", 11)


def test_messages_name_the_file(codes, tmp_path):
    pd = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow", reason="needs pyarrow")
    for name, part in (("a", codes), ("b", np.array([1, 12]))):
        pd.DataFrame({"site": part.astype("int64")}).to_parquet(tmp_path / f"{name}.parquet")
    rows = open_rows(tmp_path, columns={"group": "site"})
    with pytest.raises(RowsError, match=r"row 84, in the file .*b\.parquet, has the code 12"):
        index_of_groups(rows, "group", 11)


def test_dask_without_a_client(codes):
    da = pytest.importorskip("dask.array", reason="needs Dask")
    rows = open_rows({"group": da.from_array(codes, chunks=10)})
    index = index_of_groups(rows, "group", 11)
    np.testing.assert_array_equal(index.order, np.argsort(codes, kind="stable"))
    np.testing.assert_allclose(rows.standardise("group").means["group"], codes.mean())
