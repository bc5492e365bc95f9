"""Streams of minibatches are written to files whose rows are those of the stream."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pymc as pm
import pytest

from pymc_sgmcmc import SGLD, sample
from pymc_sgmcmc.errors import RowsError
from pymc_sgmcmc.sources import open_rows, store_rows
from tests.support.sampling import QUIET

ROWS = 103


class Stream:
    """Batches with a given number of rows in all, as of a `DataLoader` of pymc_extras."""

    def __init__(self, batches, total_size):
        self.batches, self.total_size = batches, total_size

    def __iter__(self):
        return iter(self.batches)


def pieces(values, size=10):
    return [values[start : start + size] for start in range(0, len(values), size)]


@pytest.fixture
def table(rng):
    return rng.normal(size=(ROWS, 3)).astype("float32")


def test_rows_are_those_of_the_stream(table, rng, tmp_path):
    arrays = {"X": table, "code": rng.integers(9, size=(ROWS, 2, 2)), "flag": table[:, 0] > 0}
    batches = [
        {name: values[i : i + 9] for name, values in arrays.items()} for i in range(0, ROWS, 9)
    ]
    stored = store_rows(iter(batches), tmp_path / "new" / "folder")
    for name, values in arrays.items():
        assert isinstance(stored[name], np.memmap)
        assert stored[name].dtype == values.dtype
        np.testing.assert_array_equal(stored[name], values)
        again = np.load(tmp_path / "new" / "folder" / f"{name}.npy", mmap_mode="r")
        np.testing.assert_array_equal(again, values)


def test_arrays_without_names_and_data_frames(table, tmp_path):
    names = ["a", "b", "late"]
    stream = Stream(pieces(table), ROWS)
    rows = open_rows(
        store_rows(stream, tmp_path / "arrays", names), columns={"X": ["b", "a"], "y": "late"}
    )
    np.testing.assert_array_equal(rows.read(0, ROWS)["X"], table[:, [1, 0]])
    frames = (pd.DataFrame(piece, columns=names) for piece in pieces(table))
    stored = store_rows(frames, tmp_path / "frames", ["late", "b"])
    assert list(stored) == ["late", "b"]
    np.testing.assert_array_equal(stored["late"], table[:, 2])


def test_draws_are_those_of_rows_in_memory(table, tmp_path):
    settings = {"step_size": 0.01, "preconditioner": "identity", "batch_size": 10, "thin": 2}
    rows = open_rows(store_rows(pieces(table), tmp_path, ["a", "b", "y"]))
    draws = []
    for source in ({"rows": rows}, {}):
        with pm.Model():
            x, y = rows.head("a", "y") if source else (table[:, 0], table[:, 2])
            slope = pm.Normal("slope")
            pm.Normal("outcome", slope * x, 1, observed=y)
            step = SGLD(**settings, **source)
            idata = sample(50, tune=0, chains=1, step=step, random_seed=1, **QUIET)
        draws.append(idata.posterior["slope"].values)
    np.testing.assert_array_equal(*draws)


@pytest.mark.parametrize(
    ("stream", "names", "message"),
    [
        ([], None, "should have rows, but has none"),
        (Stream([np.ones((5, 2))], 7), ["a", "b"], "should have 7 rows, but has 5"),
        ([np.ones((5, 2))], None, "a column for each of `names`"),
        ([np.ones((5, 2))], ["a"], r"shape \(5, 2\), and `names` are \['a'\]"),
        ([{"a": np.ones(5)}, {"a": np.ones(5, int)}], None, "but after 5 rows there are `a` int64"),
        ([{"a": np.ones(5)}, {"b": np.ones(5)}], None, "there are `b` float64"),
        ([{"a": np.ones(5), "b": np.ones(4)}], None, "the same number of rows"),
        ([{"a": np.array(["x"])}], None, "`a` should have numbers"),
        ([{"a": np.ones(5)}], ["b"], "`b`"),
    ],
)
def test_bad_streams(stream, names, message, tmp_path):
    with pytest.raises(RowsError, match=message):
        store_rows(stream, tmp_path, names)
    assert not list(tmp_path.iterdir())


def test_files_are_not_written_over(tmp_path):
    store_rows([{"a": np.ones(5)}], tmp_path)
    with pytest.raises(RowsError, match=r"a\.npy exists already. Give another folder"):
        store_rows([{"a": np.zeros(5)}], tmp_path)
    assert np.load(tmp_path / "a.npy").sum() == 5
