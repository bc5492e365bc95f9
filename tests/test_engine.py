"""What a block of transitions raises."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from pymc_sgmcmc.engine import TransitionBlock


@pytest.mark.parametrize("cause", [KeyboardInterrupt, None])
def test_an_interrupt_inside_of_numba(cause):
    """Numba reports Ctrl-C as a cause of a `SystemError`. Other errors stay as they are."""

    def function(*arguments):
        inner = SystemError("inside of Numba")
        inner.__cause__ = None if cause is None else cause()
        raise SystemError("returned a result with an exception set") from inner

    block = SimpleNamespace(
        _function=function, memory=None, lag=1, _passes=lambda length: length + 1, dtype="float64"
    )
    with pytest.raises(SystemError if cause is None else cause):
        TransitionBlock.__call__(block, (np.zeros(2),), np.zeros(4), np.zeros((3, 2)), np.ones(3))
