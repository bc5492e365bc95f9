"""A table that tests write to files of several kinds."""

from __future__ import annotations

import numpy as np
import pytest

ROWS = 103


@pytest.fixture
def table(rng):
    """Columns of several types."""
    return {
        "distance": rng.normal(size=ROWS).astype("float32"),
        "hour": rng.integers(24, size=ROWS).astype("int16"),
        "late": rng.random(ROWS) < 0.5,
        "delay": rng.normal(size=ROWS),
    }


@pytest.fixture
def numbers(rng):
    """Numbers of rows, some of them more than once."""
    return rng.integers(ROWS, size=300)


@pytest.fixture
def is_table(table, numbers):
    """Whether a source has the columns of the table, read in each way."""

    def check(rows, names=tuple(table)):
        assert rows.n_rows == ROWS
        taken = rows.take(numbers, names)
        read = rows.read(5, 97, names)
        for name in names:
            assert rows.columns[name] == (table[name].dtype, ())
            np.testing.assert_array_equal(taken[name], table[name][numbers], strict=True)
            np.testing.assert_array_equal(read[name], table[name][5:97], strict=True)

    return check
