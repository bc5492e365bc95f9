"""Rows of zarr groups: chunks, files, and what is refused."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import zarr

from pymc_sgmcmc.errors import RowsError
from pymc_sgmcmc.sources import ZarrSource
from pymc_sgmcmc.sources import zarr as module
from tests.sources.conftest import ROWS


@pytest.fixture
def small_partitions(monkeypatch):
    """Partitions of one chunk, as with many rows."""
    monkeypatch.setattr(module, "PARTITION_BYTES", 1)


def write(folder, arrays, chunks=20, **settings):
    group = zarr.open_group(folder, mode="w", zarr_format=settings.pop("zarr_format", 3))
    for name, values in arrays.items():
        shape = (chunks, *values.shape[1:])
        group.create_array(name, data=values, chunks=shape, **settings)
    return group


@pytest.mark.parametrize("settings", [{}, {"zarr_format": 2}, {"shards": (60,)}])
def test_rows_by_partitions_of_chunks(tmp_path, table, is_table, small_partitions, settings):
    write(tmp_path, table, **settings)
    rows = ZarrSource(tmp_path)
    is_table(rows)
    assert rows.n_partitions == (2 if "shards" in settings else 6)


def test_matrices_and_small_chunks(tmp_path, rng):
    X = rng.normal(size=(ROWS, 3, 2))
    group = write(tmp_path, {"X": X})
    group.create_array("y", data=X[:, 0, 0], chunks=7)
    rows = ZarrSource(group)
    assert rows.n_partitions == 1
    np.testing.assert_array_equal(rows.take([100, 3])["X"], X[[100, 3]])


def test_partitions_begin_where_chunks_of_all_arrays_do(tmp_path, small_partitions, monkeypatch):
    group = write(tmp_path, {"x": np.arange(ROWS)}, chunks=4)
    group.create_array("y", data=np.arange(ROWS), chunks=6)
    monkeypatch.setattr(module, "PARTITION_BYTES", 2 * 8 * 30)
    np.testing.assert_array_equal(np.diff(ZarrSource(group).offsets)[:-1], 24)
    monkeypatch.setattr(module, "PARTITION_BYTES", 1)
    np.testing.assert_array_equal(np.diff(ZarrSource(group).offsets)[:-1], 6)


def test_pickled_rows_carry_no_data(tmp_path):
    write(tmp_path, {"x": np.random.default_rng(1).normal(size=10_000)}, chunks=10_000)
    rows = ZarrSource(tmp_path)
    rows.read(0, 5)
    assert len(pickle.dumps(rows)) < 4000
    copied = pickle.loads(pickle.dumps(rows))
    assert copied.signature() == rows.signature()
    np.testing.assert_array_equal(copied.read(8, 9)["x"], rows.read(8, 9)["x"])


@pytest.mark.parametrize("in_memory", [True, False])
def test_signature_changes_with_the_data(tmp_path, in_memory):
    group = write(None if in_memory else tmp_path, {"x": np.arange(100.0)})
    first = ZarrSource(group).signature()
    assert ZarrSource(group).signature() == first
    group["x"][50] = -1
    assert ZarrSource(group).signature() != first


def test_a_chunk_that_changes_or_vanishes(tmp_path, small_partitions):
    """Zarr itself reads fill values where the file of a chunk is missing."""
    group = write(tmp_path, {"x": np.arange(100.0), "y": np.arange(100.0)})
    rows = ZarrSource(tmp_path)
    chunk = tmp_path / "x" / "c" / "2"
    chunk.rename(tmp_path / "elsewhere")
    rows.read(0, 40)
    rows.read(40, 60, ["y"])
    with pytest.raises(RowsError, match=r"x/c/2 vanished after it was opened"):
        rows.read(40, 60)
    (tmp_path / "elsewhere").rename(chunk)
    rows.read(40, 60)
    group["x"][41] = -5
    with pytest.raises(RowsError, match=r"x/c/2 changed after it was opened"):
        rows.read(0, 60)


def test_a_shard_that_vanishes(tmp_path, small_partitions):
    write(tmp_path, {"x": np.arange(120.0)}, shards=(40,))
    rows = ZarrSource(tmp_path)
    (tmp_path / "x" / "c" / "1").unlink()
    rows.read(0, 40)
    rows.read(80, 120)
    with pytest.raises(RowsError, match=r"x/c/1 vanished"):
        rows.read(70, 71)


def test_chunks_of_fill_values_have_no_files(tmp_path, small_partitions, caplog):
    group = zarr.open_group(tmp_path, mode="w")
    group.create_array("x", shape=100, chunks=10, dtype="f4")[:10] = 2
    with caplog.at_level("INFO", "pymc.sgmcmc"):
        rows = ZarrSource(tmp_path)
    np.testing.assert_array_equal(rows.take([5, 99])["x"], [2, 0])
    assert "9 of 10 chunks of the array `x` are not in the zarr group" in caplog.text


def test_what_is_refused(tmp_path):
    group = write(tmp_path, {"x": np.arange(10), "y": np.arange(9)})
    with pytest.raises(RowsError, match=r"`x` has 10, `y` has 9 was given"):
        ZarrSource(group)
    assert ZarrSource(group, ["y"]).n_rows == 9
    with pytest.raises(RowsError, match=r"columns of the zarr group .* are `x`, `y`, but got `z`"):
        ZarrSource(group, ["x", "z"])
    for path in (tmp_path / "x", Path("no-such-folder")):
        with pytest.raises(RowsError, match=rf"{path.name} should be a zarr group, but cannot"):
            ZarrSource(path)


def test_a_damaged_chunk_is_named(tmp_path):
    write(tmp_path, {"y": np.arange(100.0)})
    rows = ZarrSource(tmp_path)
    chunk = tmp_path / "y" / "c" / "1"
    stamp = chunk.stat()
    chunk.write_bytes(b"\0" * stamp.st_size)
    os.utime(chunk, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    with pytest.raises(RowsError, match=r"of the zarr array `y` cannot be read: .*Write the array"):
        rows.take([0, 50])
