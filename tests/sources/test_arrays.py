"""Rows of a source are those of its arrays, and each partition is read once."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pymc as pm
import pytest

from pymc_sgmcmc.errors import RowsError
from pymc_sgmcmc.sources import ArraySource
from tests.support.sources import CountedRows

ROWS = 103


@pytest.fixture
def arrays(rng):
    return {
        "X": rng.normal(size=(ROWS, 3)).astype("float32"),
        "flag": rng.random(ROWS) < 0.5,
        "code": rng.integers(9, size=(ROWS, 2, 2)),
    }


@pytest.mark.parametrize("partition_rows", [1, 7, 103, 1000])
def test_rows_by_bounds_and_by_numbers(arrays, rng, partition_rows):
    rows = ArraySource(arrays, partition_rows=partition_rows)
    assert rows.n_rows == ROWS
    assert rows.n_partitions == -(-ROWS // partition_rows)
    for start, stop in [(0, 103), (0, 1), (5, 29), (97, 200), (30, 30)]:
        found = rows.read(start, stop)
        for name, values in arrays.items():
            np.testing.assert_array_equal(found[name], values[start:stop])
            assert found[name].dtype == values.dtype
    numbers = rng.integers(ROWS, size=500)
    found = rows.take(numbers, ["code", "X"])
    assert list(found) == ["code", "X"]
    for name, values in found.items():
        np.testing.assert_array_equal(values, arrays[name][numbers])
    assert rows.take(np.array([], dtype=int))["X"].shape == (0, 3)


def test_each_partition_is_read_once(arrays, rng):
    rows = CountedRows(arrays, 10)
    for start in range(0, ROWS, 3):
        rows.read(start, start + 3)
    assert rows.reads == rows.n_partitions
    rows.take(rng.permutation(20), ["X"])
    assert rows.reads == rows.n_partitions + 2


def test_files_processes_and_threads(arrays, rng, tmp_path):
    for name, values in arrays.items():
        np.save(tmp_path / f"{name}.npy", values)
    mapped = {name: np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in arrays}
    rows = ArraySource(mapped, partition_rows=10)
    rows.read(0, 3)
    copied = pickle.loads(pickle.dumps(rows))
    assert copied.signature() == rows.signature()
    numbers = [rng.integers(ROWS, size=50) for _ in range(40)]
    with ThreadPoolExecutor(4) as pool:
        for each, found in zip(numbers, pool.map(copied.take, numbers), strict=True):
            np.testing.assert_array_equal(found["X"], arrays["X"][each])


def test_signature_changes_with_the_data(arrays):
    first = ArraySource(arrays).signature()
    arrays["X"][0, 0] += 1
    assert ArraySource(arrays).signature() != first


def test_head_makes_data_variables(arrays):
    rows = ArraySource(arrays)
    with pm.Model() as model:
        X, code = rows.head("X", "code", rows=20)
        flag = rows.head("flag", rows=1000)
    assert {variable.name for variable in model.data_vars} == {"X", "code", "flag"}
    np.testing.assert_array_equal(X.get_value(), arrays["X"][:20])
    assert code.get_value().shape == (20, 2, 2)
    assert flag.get_value().shape == (ROWS,)


def test_what_is_refused(arrays):
    with pytest.raises(RowsError, match=r"`a` has 3, `b` has 2 was given"):
        ArraySource({"a": np.zeros(3), "b": np.zeros(2)})
    with pytest.raises(RowsError, match="but none was given"):
        ArraySource({})
    with pytest.raises(RowsError, match="at least 1"):
        ArraySource({"a": np.zeros((0, 2))})
    with pytest.raises(RowsError, match=r"`names` should have numbers, but has the type"):
        ArraySource({"names": np.array(["a", "b"])})
    rows = ArraySource(arrays)
    with pytest.raises(RowsError, match=r"Columns should be of `X`, `flag`, `code`, but got `Y`"):
        rows.read(0, 2, ["Y"])
    for numbers in ([-1], [ROWS]):
        with pytest.raises(RowsError, match="should be from 0 to 102"):
            rows.take(np.array(numbers))
