"""Seconds from a fresh process to 1000 effective draws, of this package and peers, on one core.

Examples
--------
::

    python tests/benchmarks/effective_draws.py --limit 60 --output draws.json
    python tests/benchmarks/effective_draws.py --rows 1000000 --contenders ours --output draws.json
    python tests/benchmarks/effective_draws.py --contenders --output draws.json --markdown draws.md
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from common.clocks import errors_of_draws, slope
from common.peers import python_of, python_path
from common.runner import Result, Table, Verdict, cold_and_warm, run, scratch

CONTENDERS = (
    "ours", "sample", "corrected", "euler", "euler_fine", "blackjax", "blackjax_fine", "sgmcmcjax",
    "hmcecs", "nutpie", "advi", "pathfinder", "laplace", "psis",
)  # fmt: skip
"""Contenders in the order of the table's lines."""
EFFECTIVE = 1000
LARGEST_SLOPE = 0.05
"""Of the logarithm of the cost of a draw of ours over that of the number of rows."""
LARGEST_SD_ERROR = 0.05
OPTIONS = {
    "rows": ((10_000, 100_000, 1_000_000, 10_000_000), "rows of the data, N"),
    "features": (20, "coefficients, p"),
    "contenders": (CONTENDERS, CONTENDERS, "none: show what the file has"),
    "rounds": (1, "pairs of processes for each cache"),
    "limit": (600.0, "seconds of one process"),
}


def measure(contender: str, folder: str, rounds: int, limit: float) -> Result:
    """Run a contender with an empty and with a filled cache; the fastest round counts."""
    import numpy as np
    from common.regression import load_problem
    from draws_contenders import measure as contend

    runs: list[dict[str, Result]] = []
    given = {"contender": contender, "folder": folder, "limit": limit}
    problem = load_problem(folder)
    try:
        given |= {"environment": python_path(contender), "python": python_of(contender)}
        for _ in range(rounds):
            both = dict(zip(("cold", "warm"), cold_and_warm(contend, **given), strict=True))
            draws = np.load(f"{folder}/draws.npy")
            errors = errors_of_draws(draws[None], problem.mode, problem.sd)
            for each in both.values():
                each |= {"draws": len(draws), **errors}
                for number, clock in enumerate(("wall", "cpu")):
                    drawing = each["drawing"][number] * EFFECTIVE / each["ess"]
                    each[clock] = each["set_up"][number] + drawing
            runs.append(both)
    except subprocess.TimeoutExpired:
        return {"absent": f"> {limit:g} s"}
    except RuntimeError as error:
        return {"absent": "absent", "reason": str(error).strip().splitlines()[-1]}
    return {
        kind: min((run[kind] for run in runs), key=lambda each: each["cpu"])
        for kind in ("cold", "warm")
    }


def results(settings: Any) -> Iterator[Result]:
    """Each contender on each number of rows."""
    from common.regression import make_problem, save_problem

    for rows in settings.rows if settings.contenders else ():
        with scratch() as folder:
            save_problem(make_problem(rows, settings.features), folder)
            for contender in settings.contenders:
                key = {"rows": rows, "features": settings.features, "contender": contender}
                given = {"rounds": settings.rounds, "limit": settings.limit}
                yield key | measure(contender, str(folder), **given)


def warm(get: Any) -> Any:
    """A cell of a run that ended; that of one that did not is empty."""
    return lambda r: get(r["warm"]) if "warm" in r else ""


COLUMNS = {
    "N": "rows",
    "contender": "contender",
    "cold s": lambda r: r["cold"]["cpu"] if "cold" in r else r["absent"],
    "warm s": warm(lambda one: one["cpu"]),
    "cold wall s": lambda r: r["cold"]["wall"] if "cold" in r else "",
    "warm wall s": warm(lambda one: one["wall"]),
    "set-up s": warm(lambda one: one["set_up"][1]),
    "ESS/s": warm(lambda one: one["ess"] / one["drawing"][1]),
    "with set-up": warm(lambda one: EFFECTIVE / one["cpu"]),
    "sd ratio": warm(lambda one: f"{one['sd_ratio']:.3f}"),
    "mean error": warm(lambda one: one["mean_error"]),
}


def tables(found: list[Result]) -> list[Table]:
    """In the order of rows and contenders."""
    found.sort(key=lambda r: (r["rows"], CONTENDERS.index(r["contender"])))
    title = f"Fresh process to {EFFECTIVE} effective draws, p = {{features}}, processor time"
    return [Table(title, COLUMNS)]


def verdicts(found: list[Result]) -> Iterator[Verdict]:
    """Errors of this package, and how the cost of a draw grows."""
    ours = [(r["rows"], r["warm"]) for r in found if r["contender"] == "ours" and "warm" in r]
    for rows, one in ours:
        error = abs(one["sd_ratio"] - 1)
        yield Verdict(f"N = {rows}: error of the standard deviations", error, LARGEST_SD_ERROR)
    if len(ours) > 1:
        costs = [one["drawing"][1] / one["ess"] for _, one in ours]
        growth = slope([rows for rows, _ in ours], costs)
        yield Verdict("log-log slope of the cost of a draw over N", growth, LARGEST_SLOPE)


if __name__ == "__main__":
    merged = ("rows", "features", "contender")
    sys.exit(run(__doc__, results, tables, OPTIONS, verdicts, merged=merged))
