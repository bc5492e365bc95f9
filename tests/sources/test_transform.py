"""Functions of rows: lazily applied, checked, and standardised columns."""

from __future__ import annotations

import numpy as np
import pymc as pm
import pytest

from pymc_sgmcmc.errors import RowsError
from pymc_sgmcmc.sources import ArraySource, RowSource
from pymc_sgmcmc.sources.standardisation import Moments, sums_of
from tests.support.sources import CountedRows

ROWS = 103


@pytest.fixture
def arrays(rng):
    return {
        "X": rng.normal(50, 3, size=(ROWS, 3)).astype("float32"),
        "hour": rng.integers(24, size=ROWS).astype("int16"),
        "y": rng.normal(size=ROWS),
    }


def add_morning(columns):
    return {"morning": columns["hour"] < 12, "angle": columns["hour"] * (np.pi / 12)}


def test_columns_of_a_function(arrays, rng):
    source = CountedRows(arrays, 10)
    rows = source.transform(add_morning, ["hour"])
    assert list(rows.columns) == ["X", "y", "morning", "angle"]
    assert rows.columns["morning"] == (np.dtype(bool), ())
    numbers = rng.integers(ROWS, size=200)
    source.reads = 0
    taken = rows.take(numbers)
    assert source.reads == 11
    made = {"X": arrays["X"], "y": arrays["y"], **add_morning(arrays)}
    for name, values in made.items():
        np.testing.assert_array_equal(taken[name], values[numbers], strict=True)
        np.testing.assert_array_equal(rows.read(7, 60)[name], values[7:60], strict=True)


def test_a_function_is_called_for_what_is_needed(arrays):
    calls = []

    def function(columns):
        calls.append(list(columns))
        return {"Z": columns["X"] * 2}

    rows = ArraySource(arrays).transform(function, ["X"])
    calls.clear()
    rows.read(0, 50, ["y"])
    assert not calls
    rows.read(0, 50, ["y", "Z"])
    assert calls == [["X"]]
    assert list(ArraySource(arrays).transform(function).columns) == ["Z"]


def test_a_column_may_replace_itself(arrays):
    rows = ArraySource(arrays).transform(lambda c: {"y": np.exp(c["y"])}, ["y"])
    assert list(rows.columns) == ["X", "hour", "y"]
    np.testing.assert_array_equal(rows.read(0, ROWS)["y"], np.exp(arrays["y"]))


def test_functions_of_functions_and_head(arrays):
    rows = ArraySource(arrays, partition_rows=10).transform(add_morning, ["hour"]).standardise("X")
    with pm.Model() as model:
        rows.head("morning", "X")
    angle = model["X"].get_value()
    np.testing.assert_allclose(angle.mean(0), 0, atol=1e-6)


def test_signature_follows_source_and_function(arrays):
    def signature(factor=2, changed=arrays):
        return ArraySource(changed).transform(lambda c: {"z": factor * c["y"]}).signature()

    assert signature() == signature()
    assert signature(3) != signature()
    assert signature(changed={**arrays, "hour": arrays["hour"] + 1}) != signature()


def text(columns):
    return {"code": np.unique(columns["hour"], return_inverse=True)[1]}


def centred(columns):
    return {"y": columns["y"] - columns["y"].mean()}


@pytest.mark.parametrize("function", [text, centred])
def test_rows_that_depend_on_other_rows_are_refused(arrays, function):
    with pytest.raises(RowsError, match="of this row alone, but row 0 depends on the rows beside"):
        ArraySource(arrays).transform(function)


def test_a_wrong_number_of_rows_is_refused(arrays):
    for function in (
        lambda c: {"y": c["y"][c["y"] > 0]},
        lambda c: {"y": 1.0},
        lambda c: {"y": c["X"].T},
    ):
        with pytest.raises(RowsError, match=r"as many rows as it got, 103, but `y` has the shape"):
            ArraySource(arrays).transform(function)
    for function in (lambda c: c["y"], lambda c: {}):
        with pytest.raises(TypeError, match="should return a dictionary with at least one column"):
            ArraySource(arrays).transform(function)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda y: y if y.max() < 1009 else y + 0.5, "type int64 .* but has float64"),
        (
            lambda y: y if y.max() < 1009 else np.ones((len(y), 2), int),
            r"type int64 .* and \(10, 2\)",
        ),
    ],
)
def test_partitions_of_other_types_are_refused(function, message):
    rows = ArraySource({"y": np.arange(1019)}, partition_rows=10)
    rows = rows.transform(lambda columns: {"y": function(columns["y"])})
    rows.read(0, 1000)
    with pytest.raises(RowsError, match=rf"`y` of partition 100 should have the {message}"):
        rows.read(1000, 1010)


def test_the_arrays_of_the_user_are_not_changed(arrays):
    def in_place(columns):
        columns["y"] += 1
        return columns

    before = arrays["y"].copy()
    with pytest.raises(ValueError, match="read-only"):
        ArraySource(arrays).transform(in_place)
    np.testing.assert_array_equal(arrays["y"], before)


# --- Standardised columns -----------------------------------------------------------------------


def test_standardised_columns(arrays, rng):
    source = CountedRows(arrays, 10)
    rows = source.standardise("X", "hour")
    assert source.reads == 2 * 11  # one pass, and one of the first rows, which are all rows here
    for name in ("X", "hour"):
        exact = arrays[name].astype("longdouble")
        np.testing.assert_allclose(rows.means[name], exact.mean(0), rtol=1e-14)
        np.testing.assert_allclose(rows.scales[name], exact.std(0), rtol=1e-14)
        found = rows.read(0, ROWS)[name]
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, (exact - exact.mean(0)) / exact.std(0), atol=1e-6)
        numbers = rng.integers(ROWS, size=50)
        np.testing.assert_array_equal(rows.take(numbers)[name], found[numbers])
    np.testing.assert_array_equal(rows.read(0, 9)["y"], arrays["y"][:9])


def test_large_means_cost_no_digits():
    values = 1e9 + np.random.default_rng(1).normal(size=5000)
    moments = Moments(values[0])
    for part in np.array_split(values, [1, 10, 10, 4000]):
        moments.join(sums_of(part, values[0]))
    exact = values.astype("longdouble")
    np.testing.assert_allclose(moments.scale, exact.std(), rtol=1e-13)
    np.testing.assert_allclose(moments.mean, exact.mean(), rtol=1e-15)


def test_constant_columns_are_shifted_only():
    X = np.column_stack([np.full(1000, 0.1), np.arange(1000)])
    rows = ArraySource({"X": X}, partition_rows=7).standardise("X")
    assert rows.scales["X"][0] == 1
    assert not rows.read(0, 1000)["X"][:, 0].any()


def test_standardised_values_are_finite(arrays):
    arrays["X"][50, 1] = np.nan
    with pytest.raises(RowsError, match=r"`X` should have finite values .* partition 5 has others"):
        ArraySource(arrays, partition_rows=10).standardise("X", "y")
    with pytest.raises(RowsError, match=r"Columns should be of .* but got `Z`"):
        ArraySource(arrays).standardise("Z")


# --- Any source ---------------------------------------------------------------------------------


class ManyRows(RowSource):
    """The numbers of 2^33 rows, without memory."""

    def __init__(self):
        self.columns = {"number": (np.dtype(np.int64), ())}
        self.offsets = np.arange(0, 2**33 + 1, 2**20)

    def partition(self, number, names):
        return {"number": np.arange(self.offsets[number], self.offsets[number + 1])}

    def signature(self):
        return "numbers"


def test_numbers_of_rows_beyond_32_bits():
    rows = ManyRows().transform(lambda columns: {"half": columns["number"] // 2})
    numbers = np.array([2**33 - 1, 2**31 + 5, 3])
    np.testing.assert_array_equal(rows.take(numbers)["half"], numbers // 2)
    start = 2**32 - 2
    np.testing.assert_array_equal(
        rows.read(start, start + 4)["half"] * 2, start + np.array([0, 0, 2, 2])
    )
    assert rows.n_rows == 2**33


def test_partitions_without_rows(arrays):
    rows = CountedRows(arrays)
    rows.offsets = np.array([0, 0, 50, 50, 50, ROWS, ROWS])
    of_some_rows = rows.transform(lambda columns: {"X": columns["X"] + 0 * columns["X"].max()})
    for each in (rows, rows.standardise("y"), of_some_rows):
        np.testing.assert_array_equal(each.read(40, ROWS)["X"], arrays["X"][40:])
        np.testing.assert_array_equal(each.take([50, 102, 49])["X"], arrays["X"][[50, 102, 49]])
        assert each.partition(2, ["X"])["X"].shape == (0, 3)
