"""Positions where a posterior may have the same density: with other signs or exchanged elements.

A search from another start may miss such a mode, while these positions are found at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, combinations, islice

import numpy as np
from pymc.util import is_transformed_name

from pymc_sgmcmc.posterior.position import PositionLayout, untransformed

MOST_IMAGES = 60
"""At most so many positions are made, which bounds the time."""

FEW_VARIABLES = 4
"""Of so many variables any set is exchanged together, of more single ones, pairs and all."""

SIMPLEX = "_simplex__"
"""The value variable of a simplex lacks its last element, which is minus the sum of the others."""

OF_PROBABILITIES = ("_logodds__", "_interval__")
"""A value variable with another sign is that of the opposite probability."""


def images(layout: PositionLayout, position: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Positions with other signs or exchanged elements, and what makes them, for messages.

    Examples
    --------
    >>> import pymc as pm
    >>> from pymc_sgmcmc.posterior.position import layout_from_model
    >>> with pm.Model() as model:
    ...     b, c = pm.Normal("b"), pm.Normal("c", shape=2)
    >>> layout = layout_from_model(model, None, model.initial_point())
    >>> for change, image in images(layout, np.array([1.0, 2.0, 3.0])):
    ...     print(change, image)
    another sign of b [-1.  2.  3.]
    another sign of c [ 1. -2. -3.]
    another sign of b and c [-1. -2. -3.]
    elements 0 and 1 of c exchanged [1. 3. 2.]
    """
    return islice(chain(_signs(layout, position), _exchanges(layout, position)), MOST_IMAGES)


def _signs(layout: PositionLayout, position: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """One or two variables without a transform have other signs."""
    numbers = [number for number, name in enumerate(layout.names) if not is_transformed_name(name)]
    for some in chain(combinations(numbers, 1), combinations(numbers, 2)):
        image = position.copy()
        for number in some:
            image[layout.slices[number]] *= -1
        yield f"another sign of {_named(layout, some)}", image


def _exchanges(layout: PositionLayout, position: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Two elements along axes of the same length are exchanged, in some variables or in all."""
    arrays = [_elements(layout, number, position) for number in range(len(layout.names))]
    for length in sorted({size for array in arrays for size in array.shape if size > 1}):
        numbers = [number for number, array in enumerate(arrays) if length in array.shape]
        first = _along(arrays[numbers[0]], length).reshape(length, -1)[:, 0]
        pair = [int(first.argmin()), int(first.argmax())]
        if length == 2:  # Two weights may be those of a single probability.
            numbers += [
                number
                for number, name in enumerate(layout.names)
                if name.endswith(OF_PROBABILITIES) and layout.sizes[number] == 1
            ]
        for some in _sets(numbers):
            image = position.copy()
            for number in some:
                array = arrays[number].copy()
                if length in array.shape:
                    along = _along(array, length)
                    along[pair] = along[pair[::-1]]
                else:
                    array *= -1
                kept = array[..., :-1] if layout.names[number].endswith(SIMPLEX) else array
                image[layout.slices[number]] = kept.ravel()
            exchanged = "elements {} and {} of".format(*sorted(pair))
            yield f"{exchanged} {_named(layout, some)} exchanged", image


def _elements(layout: PositionLayout, number: int, position: np.ndarray) -> np.ndarray:
    """Value of a variable, whole where it is a simplex."""
    array = position[layout.slices[number]].reshape(layout.shapes[number])
    if layout.names[number].endswith(SIMPLEX):
        array = np.concatenate([array, -array.sum(-1, keepdims=True)], axis=-1)
    return array


def _along(array: np.ndarray, length: int) -> np.ndarray:
    """View with the first axis of a length in front."""
    return np.moveaxis(array, array.shape.index(length), 0)


def _sets(numbers: Sequence[int]) -> Iterator[tuple[int, ...]]:
    sizes = range(len(numbers), 0, -1)
    few = len(numbers) <= FEW_VARIABLES
    return chain.from_iterable(
        combinations(numbers, size) for size in sizes if few or size in (len(numbers), 2, 1)
    )


def _named(layout: PositionLayout, some: Sequence[int]) -> str:
    return " and ".join(untransformed(layout.names[number]) for number in some)
