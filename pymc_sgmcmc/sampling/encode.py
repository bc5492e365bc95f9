"""Values of Python as arrays and JSON, and back again.

A store is data: opening that of somebody else must not run code, so nothing is pickled.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from pymc.util import (
    RandomGeneratorState,
    get_state_from_generator,
    random_generator_from_state,
)

BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
"""Generators of NumPy whose states are plain numbers."""


def encode(value: Any, name: str, arrays: dict[str, np.ndarray]) -> Any:
    """A value as JSON, with its arrays added to others under names that begin with a name.

    Values are numbers, words, None, arrays, generators, and tuples, lists and mappings of these.

    Parameters
    ----------
    value
    name : str
    arrays : dict of str to numpy.ndarray
        The arrays of the value are added here.

    Raises
    ------
    TypeError
        Where the value is of another kind.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.ndarray | np.generic):
        # Products of matrices may be rounded otherwise where these lie otherwise in memory.
        transposed = value.ndim > 1 and value.flags.f_contiguous and not value.flags.c_contiguous
        array = np.ascontiguousarray(value.T if transposed else value).reshape(
            value.shape[::-1] if transposed else value.shape
        )
        if array.dtype.kind not in "biuf":
            raise TypeError(f"A store holds numbers, but `{name}` has the type {array.dtype}.")
        name = _free_name(name, arrays)
        arrays[name] = array
        kind = "number" if isinstance(value, np.generic) else "array"
        return {kind: name, "transposed": True} if transposed else {kind: name}
    if isinstance(value, np.random.Generator):
        state = get_state_from_generator(value)
        if state.bit_generator_state["bit_generator"] not in BIT_GENERATORS:
            raise TypeError(f"A store holds generators of NumPy, but `{name}` is {value!r}.")
        parts = (dict(state.bit_generator_state), dict(state.seed_seq_state))
        return {"generator": [encode(part, f"{name}.generator", arrays) for part in parts]}
    if isinstance(value, tuple | list):
        items = [encode(item, f"{name}.{number}", arrays) for number, item in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": items}
    if isinstance(value, Mapping):
        return {
            "mapping": {
                str(key): encode(item, f"{name}.{key}", arrays) for key, item in value.items()
            }
        }
    raise TypeError(f"A store cannot hold `{name}`, which is {value!r}.")


def _free_name(name: str, arrays: Mapping[str, np.ndarray]) -> str:
    """A name that a zarr array may have, and that no array has yet."""
    name = re.sub(r"[^\w.\[\]-]", "_", name)
    while name in arrays:
        name += "_"
    return name


def decode(document: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """The value of which `encode` made this JSON and these arrays.

    Raises
    ------
    KeyError, TypeError, ValueError
        Where they are not from `encode`.
    """
    if not isinstance(document, dict):
        return document
    match document:
        case {"array": name}:
            array = arrays[name]
            return array.T if document.get("transposed") else array
        case {"number": name}:
            return arrays[name][()]
        case {"tuple": items}:
            return tuple(decode(item, arrays) for item in items)
        case {"list": items}:
            return [decode(item, arrays) for item in items]
        case {"mapping": items}:
            return {key: decode(item, arrays) for key, item in items.items()}
        case {"generator": parts}:
            numbers, seeds = (decode(part, arrays) for part in parts)
            if numbers["bit_generator"] not in BIT_GENERATORS:
                raise ValueError(f"{numbers['bit_generator']!r} is no generator of NumPy.")
            return random_generator_from_state(RandomGeneratorState(numbers, seeds))
    raise ValueError(f"A store has no values such as {document!r}.")
