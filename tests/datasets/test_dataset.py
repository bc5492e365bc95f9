"""The data sets that loaders return."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import pytest

from pymc_sgmcmc.datasets import Dataset


def dataset_of(frame, features):
    return Dataset(name="own", frame=frame, target="y", feature_names=features, origin="memory")


def test_arrays_are_the_callers_own():
    dataset = dataset_of(pd.DataFrame({"a": [1, 2], "b": [3, 4], "y": [0, 1]}), ("b", "a"))
    X, y = dataset.X, dataset.y
    assert X.flags.c_contiguous
    X[0, 0] = 99
    y[0] = 99
    assert dataset.X.tolist() == [[3, 1], [4, 2]]
    assert dataset.y.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("columns", "dtype"),
    [
        ({"a": np.array([1], np.uint8), "b": np.array([2], np.uint8)}, np.uint8),
        ({"a": np.array([1], np.int64), "b": np.array([0.5], np.float32)}, np.float64),
        ({"a": np.array([True]), "b": np.array([0.5])}, np.float64),
        ({"a": pd.array([1], dtype="Int64"), "b": np.array([2])}, np.float64),
    ],
)
def test_type_of_the_features(columns, dtype):
    frame = pd.DataFrame({**columns, "y": [0]})
    X = dataset_of(frame, ("a", "b")).X
    assert X.dtype == dtype
    np.testing.assert_array_equal(X, [[float(frame["a"][0]), float(frame["b"][0])]])


def test_missing_value_of_a_nullable_column_is_nan():
    frame = pd.DataFrame({"a": pd.array([1, None], dtype="Int64"), "y": [0, 1]})
    np.testing.assert_array_equal(dataset_of(frame, ("a",)).X, [[1.0], [np.nan]])


def test_dataset_is_frozen_and_shown_on_one_line():
    dataset = dataset_of(pd.DataFrame({"a": [1], "y": [0]}), ("a",))
    with pytest.raises(dataclasses.FrozenInstanceError):
        dataset.name = "other"
    assert repr(dataset) == "Dataset(name='own', 1 rows, target 'y', 1 features, origin='memory')"
