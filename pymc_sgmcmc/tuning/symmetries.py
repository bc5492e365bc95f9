"""Positions where a posterior may have the same density: with other signs or exchanged elements.

A search from another start may miss such a mode, while these positions are found at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, combinations, islice
from typing import NamedTuple

import numpy as np
from pymc.util import is_transformed_name

from pymc_sgmcmc.posterior.position import PositionLayout, untransformed

MOST_SYMMETRIES = 200
"""There are at most so many of each kind, which bounds the time. The first ones change few
variables."""

SIMPLEX = "_simplex__"
"""The value variable of a simplex lacks its last element, which is minus the sum of the others."""

OF_PROBABILITIES = ("_logodds__", "_interval__")
"""A value variable with another sign is that of the opposite probability."""


Image = Callable[[np.ndarray], np.ndarray]
"""Function of a position that gives another one. It is linear, and its own inverse."""


class Part(NamedTuple):
    """What is exchanged together with others: elements of a variable along an axis.

    Without an axis it is a probability and its opposite, or two variables.
    """

    numbers: tuple[int, ...]
    axis: int | None = None


def symmetries(layout: PositionLayout, position: np.ndarray) -> Iterator[tuple[str, Image]]:
    """Changes of signs and exchanges of elements, each with what it changes, for messages.

    The exchanged elements are those that differ most at the position.

    Examples
    --------
    >>> import pymc as pm
    >>> from pymc_sgmcmc.posterior.position import layout_from_model
    >>> with pm.Model() as model:
    ...     b, c = pm.Normal("b"), pm.Normal("c", shape=2)
    >>> layout = layout_from_model(model, None, model.initial_point())
    >>> position = np.array([1.0, 2.0, 3.0])
    >>> for change, image in symmetries(layout, position):
    ...     print(change, image(position))
    another sign of b [-1.  2.  3.]
    another sign of c [ 1. -2. -3.]
    another sign of b and c [-1. -2. -3.]
    elements 0 and 1 of c exchanged [1. 3. 2.]
    """
    kinds = _signs, _exchanged_elements, _exchanged_variables
    return chain.from_iterable(islice(kind(layout, position), MOST_SYMMETRIES) for kind in kinds)


def _signs(layout: PositionLayout, position: np.ndarray) -> Iterator[tuple[str, Image]]:
    """Some variables without a transform have other signs."""
    names = layout.names
    for some in _sets([i for i in range(len(names)) if not is_transformed_name(names[i])]):
        signs = np.ones_like(position)
        for number in some:
            signs[layout.slices[number]] = -1
        yield f"another sign of {_named(layout, some)}", partial(np.multiply, signs)


def _exchanged_elements(
    layout: PositionLayout, position: np.ndarray
) -> Iterator[tuple[str, Image]]:
    """Two elements along some axes of the same length are exchanged."""
    by_length: dict[int, dict[Part, tuple[int, int] | None]] = {}
    for number in range(len(layout.names)):
        array = _elements(layout, number, position)
        for axis, length in enumerate(array.shape if array.size else ()):
            along = np.moveaxis(array, axis, 0).reshape(length, -1)
            # To exchange elements that are all alike would change nothing.
            if np.ptp(along, axis=0).any():
                by_length.setdefault(length, {})[Part((number,), axis)] = _unlike(along)
    for length, pairs in sorted(by_length.items()):
        if length == 2:  # Two weights may be those of a single probability.
            pairs.update(dict.fromkeys(_probabilities(layout)))
        for some in _sets([*pairs]):
            pair = pairs[some[0]]
            if pair is not None:
                numbers = tuple(number for part in some for number in part.numbers)
                change = "elements {} and {} of {} exchanged".format(*pair, _named(layout, numbers))
                yield change, partial(_exchanged, layout, some, pair)


def _exchanged_variables(
    layout: PositionLayout, position: np.ndarray
) -> Iterator[tuple[str, Image]]:
    """Two variables of a kind are exchanged, perhaps with others or with two weights."""
    kinds = [
        (shape, name.removeprefix(untransformed(name)))
        for shape, name in zip(layout.shapes, layout.names, strict=True)
    ]
    numbers = range(len(kinds))
    twos = [Part(two) for two in combinations(numbers, 2) if kinds[two[0]] == kinds[two[1]]]
    weights = [Part((number,), 0) for number in numbers if layout.names[number].endswith(SIMPLEX)]
    weights = [part for part in weights if layout.shapes[part.numbers[0]] == (1,)]
    for some in _sets([*weights, *_probabilities(layout), *twos]):
        if any(len(part.numbers) == 2 for part in some):
            called = (_named(layout, part.numbers) for part in some)
            yield f"{', '.join(called)} exchanged", partial(_exchanged, layout, some, (0, 1))


def _probabilities(layout: PositionLayout) -> list[Part]:
    return [
        Part((number,))
        for number, name in enumerate(layout.names)
        if name.endswith(OF_PROBABILITIES) and layout.sizes[number] == 1
    ]


def _exchanged(
    layout: PositionLayout, parts: Sequence[Part], pair: tuple[int, int], position: np.ndarray
) -> np.ndarray:
    image = position.copy()
    for numbers, axis in parts:
        slices = [layout.slices[number] for number in numbers]
        if len(slices) == 2:
            image[slices[0]], image[slices[1]] = image[slices[1]].copy(), image[slices[0]].copy()
        elif axis is None:
            image[slices[0]] *= -1
        else:
            array = _elements(layout, numbers[0], image)
            along = np.moveaxis(array, axis, 0)
            along[[*pair]] = along[[*pair[::-1]]]
            whole = array.shape == layout.shapes[numbers[0]]
            image[slices[0]] = (array if whole else array[..., :-1]).ravel()
    return image


def _unlike(along: np.ndarray) -> tuple[int, int]:
    """Numbers of the two rows that differ most in a column."""
    column = along[:, np.ptp(along, axis=0).argmax()]
    first, last = sorted((int(column.argmin()), int(column.argmax())))
    return first, last


def _elements(layout: PositionLayout, number: int, position: np.ndarray) -> np.ndarray:
    """Copy of the value of a variable, whole where it is a simplex."""
    array = position[layout.slices[number]].reshape(layout.shapes[number])
    if layout.names[number].endswith(SIMPLEX):
        return np.concatenate([array, -array.sum(-1, keepdims=True)], axis=-1)
    return array.copy()


def _sets[T](items: Sequence[T]) -> Iterator[tuple[T, ...]]:
    """Sets of items, the smallest first."""
    return chain.from_iterable(combinations(items, size + 1) for size in range(len(items)))


def _named(layout: PositionLayout, some: Sequence[int]) -> str:
    return " and ".join(untransformed(layout.names[number]) for number in some)
