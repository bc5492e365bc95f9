"""Find the row at which a log density cannot be evaluated, and describe its defect."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from pymc_sgmcmc.errors import ModelError

WITHOUT_NAME = "array of shape"
"""Data without a name are named by these words and their shape."""


def naming_advice(names: Iterable[str]) -> str:
    """What to add to a message where data that it names have no name of their own."""
    unnamed = any(name.startswith(WITHOUT_NAME) for name in names)
    return " Pass the array as `pm.Data` to see its name here." if unnamed else ""


def first_line(error: Exception) -> str:
    """The type of an error, and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def first_bad_row(is_bad: Callable[[slice], bool], start: int, stop: int) -> int:
    """Number of the first bad row of a range, which must have one, by bisection.

    Examples
    --------
    >>> first_bad_row(lambda rows: rows.start <= 6 < rows.stop, 0, 100)
    6
    """
    while stop - start > 1:
        middle = (start + stop) // 2
        if is_bad(slice(start, middle)):
            stop = middle
        else:
            start = middle
    return start


def first_row_out_of_range(evaluate: Callable[[slice], object], start: int, stop: int) -> int:
    """Number of the first row at which an index is out of range; there must be such a row."""

    def fails(rows: slice) -> bool:
        try:
            evaluate(rows)
        except IndexError:
            return True
        return False

    return first_bad_row(fails, start, stop)


def code_error(values: Mapping[str, np.ndarray], row: int, error: IndexError) -> ModelError:
    """Error for a row with an index beyond the end of the indexed array."""
    message = str(error).splitlines()[0] if str(error) else "index out of bounds"
    bounds = re.search(r"index (-?\d+) is out of bounds for axis \d+ with size (\d+)", message)
    codes = {name: code for name, code in values.items() if np.asarray(code).dtype.kind in "iu"}
    if bounds is None:
        return ModelError(
            f"Row {row} of the data has an index out of range: {shown_row(codes)} ({message}). "
            "Correct the codes, or give the indexed variable more elements."
        )
    code, size = int(bounds[1]), int(bounds[2])
    names = [name for name, value in codes.items() if code in np.atleast_1d(value)]
    name = names[0] if names else next(iter(codes), "the index")
    remedy = (
        "It would select from the end: correct the codes, or leave out rows with missing ones."
        if code < 0
        else "Correct the codes, or give the indexed variable more elements."
    )
    return ModelError(
        f"`{name}` should have codes from 0 to {size - 1}, but row {row} has the code {code}. "
        f"{remedy}{naming_advice([name])}"
    )


def support_error(
    place: str, others: str, value: float, found: str | None, names: Iterable[str] = ()
) -> ModelError:
    """Error for a row, or group of records, whose density is not finite where that of others is.

    Parameters
    ----------
    place, others : str
        The row or group, and the others, in words.
    value : float
        Its log density.
    found : str or None
        What is in it, in words.
    names : iterable of str
        Names of data in these words.
    """
    defect = "is zero" if value == -np.inf else "or the square of its gradient is not finite"
    shown = "" if found is None else f": {found}"
    return ModelError(
        f"The density of {place} {defect} at the initial point, unlike that of other {others}"
        f"{shown}. Correct or drop such {others}, or choose another distribution or `initval`."
        f"{naming_advice(names)}"
    )


def parameters_error(name: str, condition: str, parameters: Sequence[np.ndarray]) -> str:
    """Defect of a variable whose parameters are invalid, in words."""
    shown = ", ".join(_shown(value) for value in parameters)
    return (
        f"the distribution of `{name}` should have {condition}, but has the parameters {shown}. "
        "Correct them, or give `initval` where they are valid"
    )


def shown_row(values: Mapping[str, np.ndarray]) -> str:
    """Values of a row by the names of the data, for a message."""
    return ", ".join(f"`{name}` = {_shown(value)}" for name, value in values.items())


def _shown(value: np.ndarray) -> str:
    return np.array2string(np.asarray(value), precision=6, threshold=6, edgeitems=3)
