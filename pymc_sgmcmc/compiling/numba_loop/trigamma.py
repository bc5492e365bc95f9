"""The second derivative of the logarithm of the gamma function in Numba.

PyTensor 3.3 has none, and calls SciPy's through Python for each number, which takes 2 microseconds.
Derivatives of densities with gamma functions have it: negative binomial, beta and Student's t.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha256

import numpy as np

LARGE = 10.0
"""From here on the asymptotic series below has a relative error of less than 1e-15."""

BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6)
"""Bernoulli numbers of order 2, 4, ..., the coefficients of the series."""


def trigamma(x):
    r"""Sum of 1 / (x + k)² over k = 0, 1, ...

    The first terms are added up to a large argument, where it is :math:`1/x + 1/(2 x^2) + \sum_k
    B_{2k} / x^{2k+1}`. For negative arguments it is :math:`\pi^2 / \sin^2(\pi x)` less its value at
    1 - x.
    """
    if x <= 0:
        sine = np.sin(np.pi * x)
        return (np.pi / sine) ** 2 - trigamma(1 - x)
    total = 0.0
    while x < LARGE:
        total += 1 / (x * x)
        x += 1.0
    inverse = 1 / x
    square = inverse * inverse
    power = inverse
    total += inverse + 0.5 * square
    for coefficient in BERNOULLI:
        power *= square
        total += coefficient * power
    return total


@cache
def register_trigamma() -> None:
    """Tell PyTensor how Numba computes it; the dispatch of PyTensor imports Numba, in a second."""
    from pytensor.link.numba.dispatch.basic import numba_njit, register_funcify_and_cache_key
    from pytensor.scalar.math import TriGamma

    @register_funcify_and_cache_key(TriGamma)
    def numba_funcify_trigamma(op, node, **kwargs):
        key = sha256(f"{__name__}, version 1".encode()).hexdigest()
        return numba_njit(trigamma), key
