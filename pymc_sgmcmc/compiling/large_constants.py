"""Large constants, which PyTensor need not read to see that they differ."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from pymc.model import Model
from pytensor.graph.traversal import ancestors
from pytensor.tensor.variable import TensorConstant

FEWEST_NUMBERS = 10_000
"""Smaller constants are read in less than 0.1 ms."""

SAMPLE = 100
"""Constants that differ hardly ever have so many numbers in common, evenly spaced."""


@contextmanager
def large_constants_by_sample(model: Model) -> Iterator[None]:
    """While a graph of the model's log density is made, compare few numbers of large constants.

    PyTensor merges equal constants of a graph. It reads each of them several times for that, which
    takes a second a graph for 10⁷ rows of 20 predictors. Here all numbers of two constants are
    compared only where those of a sample are equal.
    """
    outputs = [*model.basic_RVs, *model.potentials, *model.rvs_to_values.values()]
    large = [
        constant
        for constant in ancestors(outputs)
        if isinstance(constant, TensorConstant)
        and isinstance(constant.data, np.ndarray)  # and no sparse matrix
        and constant.data.size >= FEWEST_NUMBERS
    ]
    for constant in large:
        signature = _Signature(constant)
        constant.merge_signature = lambda signature=signature: signature
    try:
        yield
    finally:
        for constant in large:
            vars(constant).pop("merge_signature", None)


class _Signature:
    """Equal for constants of equal type and numbers."""

    def __init__(self, constant: TensorConstant):
        self._type, self._numbers = constant.type, constant.data
        places = np.linspace(0, constant.data.size - 1, SAMPLE).astype(int)
        self._hash = hash((self._type, constant.data.flat[places].tobytes()))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Signature) or self._hash != other._hash:
            return False
        return self._type == other._type and _equal(self._numbers, other._numbers)


def _equal(first: np.ndarray, second: np.ndarray) -> bool:
    same_place = first.__array_interface__ == second.__array_interface__
    return same_place or np.array_equal(first, second, equal_nan=first.dtype.kind in "fc")
