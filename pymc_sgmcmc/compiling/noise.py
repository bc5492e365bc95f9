"""Standard normal numbers, the same as NumPy's to the last bit, in a third of the time.

Numba has the algorithm of `numpy.random.Generator.standard_normal` and changes the state of the
generator as NumPy does, but its loop is not interrupted by a call for each number.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

SOURCE = """
def fill(generator, out):
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            out[i, j] = generator.standard_normal()
"""

CACHE_KEY = f"{__name__}_standard_normal_2".replace(".", "_")
"""This is the key in the compile cache. It changes with the source."""


@cache
def compiled_fill() -> Callable[[np.random.Generator, np.ndarray], None]:
    """The function of a generator and a matrix of float64 that fills the matrix."""
    from pytensor.link.numba.cache import compile_numba_function_src
    from pytensor.link.numba.dispatch.basic import numba_njit

    function = compile_numba_function_src(SOURCE, "fill", globals(), cache_key=CACHE_KEY)
    return numba_njit(function, final_function=True, cache=True)


def fill_standard_normal(
    rng: np.random.Generator, out: np.ndarray, *, compiled: bool = False
) -> None:
    """Fill a matrix by standard normal numbers of its type, row by row.

    Parameters
    ----------
    rng : numpy.random.Generator
        Its state afterwards is that after `rng.standard_normal`.
    out : numpy.ndarray, shape (rows, columns)
        In C order.
    compiled : bool
        Whether Numba draws those of float64.
    """
    if compiled and out.dtype == np.float64:
        compiled_fill()(rng, out)
    else:
        rng.standard_normal(out=out, dtype=out.dtype)
