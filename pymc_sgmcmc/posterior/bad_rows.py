"""Find the row at which a log density cannot be evaluated, and describe its defect."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import numpy as np

from pymc_sgmcmc.errors import ModelError


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
        f"{remedy}"
    )


def support_error(values: Mapping[str, np.ndarray], row: int, value: float) -> ModelError:
    """Error for a row whose log density is not finite where that of other rows is."""
    defect = "is zero" if value == -np.inf else "or its gradient is not finite"
    return ModelError(
        f"The density of row {row} {defect} at the initial point, unlike that of other rows: "
        f"{shown_row(values)}. Correct or drop such rows, or choose another distribution or "
        "`initval`."
    )


def group_error(group: int, value: float, record: str | None) -> ModelError:
    """Error for a group of records whose log density is not finite where that of others is.

    Parameters
    ----------
    group : int
        Its number.
    value : float
        Its log density.
    record : str or None
        A number in its records that is not finite, in words.
    """
    defect = "is zero" if value == -np.inf else "or its gradient is not finite"
    found = "" if record is None else f": {record}"
    return ModelError(
        f"The density of the records of group {group} {defect} at the initial point, unlike that "
        f"of other groups{found}. Correct or drop such records, or choose another distribution or "
        "`initval`."
    )


def shown_row(values: Mapping[str, np.ndarray]) -> str:
    """Values of a row by the names of the data, for a message."""
    return ", ".join(f"`{name}` = {_shown(value)}" for name, value in values.items())


def _shown(value: np.ndarray) -> str:
    return np.array2string(np.asarray(value), precision=6, threshold=6, edgeitems=3)
