"""Checks of single settings. Messages say what was given and what was expected."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter, Signature
from types import ModuleType
from typing import Any

import numpy as np

FEW_NAMES = 5
"""A message names at most this many coordinates, so that it stays readable."""


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
        Name of the setting.
    value
    zero : bool
        Whether zero is allowed.
    most : float, optional
        Largest value allowed.
    unit : str
        Unit, for the message.

    Raises
    ------
    TypeError
        Where the value is no number.
    ValueError
        Where it is out of range.
    """
    expected = "not negative" if zero else "positive"
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        described = "a number that is not negative" if zero else "a positive number"
        raise TypeError(f"`{name}` should be {described}{unit}, but got {value!r}.")
    if not (np.isfinite(value) and (value > 0 or (zero and value == 0))):
        raise ValueError(f"`{name}` should be {expected} and finite{unit}, but got {value!r}.")
    if most is not None and value > most:
        raise ValueError(f"`{name}` should be in (0, {most:g}]{unit}, but got {value!r}.")
    return float(value)


def as_array(
    name: str, value: Any, expected: str = "a number or an array of numbers"
) -> np.ndarray:
    """Return an array of numbers that a user gave as a setting.

    Truth values, text and complex numbers are refused, though NumPy converts some of them.

    Raises
    ------
    TypeError
        Where the value is no array of numbers.
    """
    try:
        array = np.asarray(value)
    except ValueError:  # The rows have different lengths.
        array = None
    if array is None or array.dtype.kind not in "iuf":
        raise TypeError(f"`{name}` should be {expected}, but got {value!r}.")
    return array.astype(float)


def whole_number(
    name: str, value: Any, least: int, of: str = "", *, most: int | None = None
) -> int:
    """Return a whole number that a user gave as a setting.

    Raises
    ------
    ValueError
        Where the value is no whole number, below the least, or above the most.
    """
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_whole or value < least or (most is not None and value > most):
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"`{name}` should be a whole number{of}, {bounds}, but got {value!r}.")
    return int(value)


def truth_value(name: str, value: Any) -> bool:
    """Return a truth value that a user gave as a setting.

    Raises
    ------
    TypeError
        Where the value is another one.
    """
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"`{name}` should be True or False, but got {value!r}.")
    return bool(value)


def unknown_argument(of: str, name: str, known: Iterable[str], instead: str = "") -> TypeError:
    """The error of an argument that a function has not, with one of a similar name."""
    known = list(known)
    similar = difflib.get_close_matches(name, known, 1)
    meant = "See its docstring for its arguments."
    if similar or len(known) <= FEW_NAMES:
        meant = f"Did you mean `{similar[0]}`?" if similar else f"It takes {quoted(known)}."
    return TypeError(f"`{of}` takes no argument `{name}`. {instead or meant}")


def check_call(
    of: str,
    signature: Signature,
    args: Sequence[Any],
    named: Mapping[str, Any],
    instead: Callable[[str], str] = lambda name: "",
) -> None:
    """Check the arguments of a call, whose messages Python's are not.

    Parameters
    ----------
    of : str
        Name of the class or function.
    signature : inspect.Signature
    args, named
        Arguments without and with names.
    instead : callable, optional
        Advice on an argument that it has not, empty where there is none.

    Raises
    ------
    TypeError
    """
    parameters = signature.parameters.values()
    kinds = [parameter.kind for parameter in parameters]
    known = signature.parameters
    for name in () if Parameter.VAR_KEYWORD in kinds else named:
        if name not in known:
            raise unknown_argument(of, name, known, instead(name))
    most = kinds.count(Parameter.POSITIONAL_OR_KEYWORD)
    if len(args) > most and Parameter.VAR_POSITIONAL not in kinds:
        by_name = [name for name, each in known.items() if each.kind is Parameter.KEYWORD_ONLY]
        raise TypeError(
            f"`{of}` takes its arguments by name, but got {described(args[most])} without one. "
            f"Write its name, as in `{of}({[*by_name, *known][0]}=...)`."
        )
    optional = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    for each in list(parameters)[len(args) :]:
        if each.default is each.empty and each.kind not in optional and each.name not in named:
            raise TypeError(
                f"`{of}` should have `{each.name}`, but it is not given. Write "
                f"`{of}({each.name}=...)`."
            )


def described(value: Any) -> str:
    """A value in a message, and of a class how to write an object of it."""
    if not isinstance(value, type):
        return repr(value)
    return f"the class {value.__name__} (write `{value.__name__}(...)`)"


def accepts(function: Callable[..., Any], *arguments: Any, **named: Any) -> bool:
    """Whether a function takes these arguments, where its signature is known."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # Functions of C code may have no signature.
        return True
    try:
        signature.bind(*arguments, **named)
    except TypeError:
        return False
    return True


def or_none[T](
    check: Callable[..., T], name: str, value: Any, *args: Any, **kwargs: Any
) -> T | None:
    """Return None for None, otherwise the result of a check of the value."""
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
        raise ValueError(
            f"`{name}` should be one of {listed}{or_else}, but got {described(value)}."
        )
    return value


def names_among(name: str, value: Any, known: Sequence[str]) -> list[str]:
    """Return names that a user gave as a setting, one or several, of those that there are.

    Raises
    ------
    TypeError
        Where the value is no name or sequence of names.
    ValueError
        Where it is empty, or has others.
    """
    several = isinstance(value, Iterable) and not isinstance(value, str | Mapping)
    names = list(value) if several else [value]
    if not all(isinstance(each, str) for each in names):
        raise TypeError(f"`{name}` should name some of {quoted(known)}, but got {value!r}.")
    unknown = [each for each in names if each not in known]
    if unknown or not names:
        shown = quoted(unknown) or "an empty list"
        raise ValueError(f"`{name}` should name some of {quoted(known)}, but got {shown}.")
    return names


def quoted(names: Iterable[object]) -> str:
    """Names in a message, each in backticks."""
    return ", ".join(f"`{name}`" for name in names)


def import_optional(module: str, extra: str, purpose: str) -> ModuleType:
    """Import a module that not all users have installed.

    Raises
    ------
    ImportError
        With the extra that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(
            f"{purpose} needs the package {package}, which is not installed. "
            f'Install it: pip install "pymc_sgmcmc[{extra}]"'
        ) from error
