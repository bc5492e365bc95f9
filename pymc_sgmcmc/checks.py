"""Checks of single settings: what was given, and what should have been."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def positive_number(
    name: str,
    value: Any,
    *,
    zero: bool = False,
    most: float | None = None,
    unit: str = "",
) -> float:
    """Return a positive number that a user gave as a setting.

    Parameters
    ----------
    name : str
        Of the setting.
    value
    zero : bool
        Whether zero will do.
    most : float, optional
        Largest value allowed.
    unit : str
        For the message.

    Raises
    ------
    TypeError
        Where the value is no number.
    ValueError
        Where it is out of range.
    """
    wanted = "not negative" if zero else "positive"
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        kind = "a number that is not negative" if zero else "a positive number"
        raise TypeError(f"`{name}` should be {kind}{unit}, but got {value!r}.")
    if not (np.isfinite(value) and (value > 0 or (zero and value == 0))):
        raise ValueError(f"`{name}` should be {wanted} and finite{unit}, but got {value!r}.")
    if most is not None and value > most:
        raise ValueError(f"`{name}` should be in (0, {most:g}]{unit}, but got {value!r}.")
    return float(value)


def as_array(name: str, value: Any, wanted: str = "a number or an array of numbers") -> np.ndarray:
    """Return an array of numbers that a user gave as a setting.

    Truth values, text and complex numbers are none, though NumPy would make some of them.

    Raises
    ------
    TypeError
        Where the value is none.
    """
    try:
        array = np.asarray(value)
    except ValueError:  # of rows of several lengths
        array = None
    if array is None or array.dtype.kind not in "iuf":
        raise TypeError(f"`{name}` should be {wanted}, but got {value!r}.")
    return array.astype(float)


def whole_number(name: str, value: Any, least: int, of: str = "") -> int:
    """Return a whole number that a user gave as a setting.

    Raises
    ------
    ValueError
        Where it is none, or below the least.
    """
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or value < least:
        raise ValueError(
            f"`{name}` should be a whole number{of}, at least {least}, but got {value!r}."
        )
    return int(value)


def accepts(function: Callable[..., Any], count: int) -> bool:
    """Whether a function can be called with so many arguments, as far as it says so."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # one of C code, without a signature
        return True
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def or_none[T](
    check: Callable[..., T], name: str, value: Any, *args: Any, **kwargs: Any
) -> T | None:
    """Return None, or what a check returns of a value."""
    return None if value is None else check(name, value, *args, **kwargs)


def one_of(name: str, value: Any, names: Sequence[str], or_else: str = "") -> str:
    """Return a name that a user gave as a setting.

    Raises
    ------
    ValueError
        Where it is not in the list.
    """
    if not isinstance(value, str) or value not in names:
        listed = ", ".join(map(repr, names))
        raise ValueError(f"`{name}` should be one of {listed}{or_else}, but got {value!r}.")
    return value
