"""Normal numbers that Numba draws are NumPy's."""

from __future__ import annotations

import numpy as np
import pytest

from pymc_sgmcmc.compiling.noise import fill_standard_normal


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    "kind", [np.random.PCG64, np.random.Philox, np.random.MT19937], ids=lambda kind: kind.__name__
)
def test_numbers_and_state_are_those_of_numpy(kind, dtype):
    """A hundred thousand numbers reach the wedges and the tail of the algorithm."""
    ours, numpys = (np.random.Generator(kind(3)) for _ in range(2))
    numbers = np.empty((1000, 100), dtype)
    fill_standard_normal(ours, numbers, compiled=True)
    np.testing.assert_array_equal(numbers, numpys.standard_normal((1000, 100), dtype=dtype))
    assert (numbers > 4).any()
    assert ours.integers(2**60) == numpys.integers(2**60)
