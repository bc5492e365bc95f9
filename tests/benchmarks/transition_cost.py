"""Time of a transition of SGLD and SGLD-CV, for this package and its peers, on one core.

Examples
--------
::

    python tests/benchmarks/transition_cost.py --features 10 --batch 500 --dtype float64
    python tests/benchmarks/transition_cost.py --features 10 50 200 --batch 50 500 5000
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from statistics import median
from typing import Any

from common import DTYPES
from common.peers import python_of, python_path
from common.runner import Result, Table, Verdict, attempt, run, scratch

CONTENDERS = ("ours", "numba", "sgmcmcjax", "blackjax")
KEYS = ("features", "dtype", "batch", "method")
OPTIONS = {
    "rows": (200_000, "rows of the data, N"),
    "features": ((10,), "coefficients with intercept, p"),
    "batch": ((500,), "minibatch sizes, n"),
    "dtype": (("float64",), DTYPES),
    "rounds": (5, "times each method is timed"),
    "peers": (CONTENDERS, CONTENDERS),
    "seconds": (0.1, "rough time of one measurement of the fastest contender"),
    "clock": ("cpu", ("wall", "cpu")),
}


def results(settings: Any) -> Iterator[Result]:
    """Each contender of each configuration, in a process of its own."""
    from common.regression import make_problem, save_problem
    from transition_contenders import measure

    for features, dtype in itertools.product(settings.features, settings.dtype):
        with scratch() as folder:
            save_problem(make_problem(settings.rows, features, dtype), folder)
            for batch, name in itertools.product(settings.batch, settings.peers):
                given = {"contender": name, "folder": str(folder), "batch": batch}
                given |= {key: getattr(settings, key) for key in ("seconds", "rounds", "clock")}
                given |= {"environment": python_path(name), "python": python_of(name)}
                for found in attempt(measure, **given) or ():
                    yield {"features": features, "dtype": dtype, "batch": batch, **found}


def tables(found: list[Result]) -> list[Table]:
    """Best and median time of each result, with the ratio of the best to this package's."""
    ours = {
        tuple(r[key] for key in KEYS): r["times"][0]
        for name in ("numba", "ours")
        for r in found
        if r["contender"] == name
    }
    columns = {
        "p": "features",
        "dtype": "dtype",
        "n": "batch",
        "method": "method",
        "contender": lambda r: r["contender"] + ("" if r["guard"]["passed"] else " !"),
        "best": lambda r: r["times"][0],
        "median": lambda r: median(r["times"]),
        "×": lambda r: r["times"][0] / ours.get(tuple(r[key] for key in KEYS), float("nan")),
    }
    return [Table("µs of {clock} time a transition, N = {rows}", columns)]


def verdicts(found: list[Result]) -> Iterator[Verdict]:
    """The guards."""
    for r in found:
        what = ", ".join(str(r[key]) for key in ("contender", *KEYS))
        yield Verdict(f"{what}: {r['guard']}", float(not r["guard"]["passed"]), 0)


if __name__ == "__main__":
    sys.exit(run(__doc__, results, tables, OPTIONS, verdicts))
