"""Logistic regression on parquet files larger than the memory that the process may use.

Examples
--------
::

    python tests/benchmarks/many_rows.py --markdown docs/tables/many_rows.txt
    python tests/benchmarks/many_rows.py --rows 1000000 --repeated --contenders "in memory"
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common.clocks import errors_of_draws
from common.peers import python_of, python_path
from common.runner import Result, Table, Verdict, fresh, run, say, scratch

CONTENDERS = ("in memory", "nutpie", "pymc_extras")
"""What this package's run on files is compared with."""
REPEATED = "repeated"
"""Rows of one file, again and again, so that their number has no bound."""
PARTS = [10_000 * 10**power for power in (0, 0.5, 1, 1.5)]
"""NUTS takes so many rows, until it takes longer than this package takes for all."""
EFFECTIVE = 1000
LARGEST_RATIO = 1.05
"""Of a transition's time with rows in files, gathering left out, over that in memory."""
LARGEST_ERROR = 0.1
"""Of means, in posterior standard deviations, and of standard deviations, relative to them."""
OPTIONS = {
    "rows": ((10**6, 10**7, 10**8),),
    "features": (10, "covariates, of 32-bit numbers"),
    "limit": (3.0, "GiB that the process may use"),
    "memory": ("1 GiB", "for the rows of a run"),
    "draws": (1000, "of each of two chains"),
    "repeated": ((10**9,), "rows of copies"),
    "contenders": (CONTENDERS, CONTENDERS),
    "most_in_memory": (10_000_000, "the most rows that are also sampled in memory"),
    "folder": (Path, "where the files stay, for another run"),
}


def contend(
    name: str, function: Callable[..., Any], folder: Path, rows: int, truth: Any, **given: Any
) -> Result:
    """Run a contender in a process of its own, and compare its draws with the Gaussian."""
    import numpy as np

    say(f"N = {rows}: {name}")
    if name in ("nutpie", "pymc_extras"):
        given |= {"environment": python_path(name), "python": python_of(name)}
    result = fresh(function, folder=str(folder), **given)
    errors = errors_of_draws(np.load(folder / "draws.npy"), *truth)
    return {"rows": rows, "contender": name, **result, **errors}


def results(settings: Any) -> Iterator[Result]:
    """All contenders on files of more and more rows, then copies of the rows of one file."""
    import numpy as np
    import rows_contenders as contenders

    features, names = settings.features, settings.contenders
    given = {"features": features, "memory": settings.memory, "draws": settings.draws}
    given |= {"in_memory": False, "copies": 1, "most_bytes": int(settings.limit * 2**30)}
    with scratch() as at:

        def files_of(rows: int) -> Path:
            folder = (settings.folder or at) / f"{rows}x{features}"
            if not folder.exists():
                say(f"N = {rows}: writing the files")
                contenders.write_files(folder, rows, features)
            return folder

        for rows in settings.rows:
            folder = files_of(rows)
            this = (folder, rows, contenders.nearest_gaussian(folder, features))
            ours = contend("ours", contenders.ours, *this, **given)
            seconds = whole_seconds(ours)
            yield ours
            if "in memory" in names and rows <= settings.most_in_memory:
                in_memory = given | {"in_memory": True, "most_bytes": 0}
                yield contend("in memory", contenders.ours, *this, **in_memory)
            if "nutpie" in names:
                X, y = next(contenders.read_files(folder, features))
                np.savez(folder / "part.npz", X=X, y=y)
                for part in map(int, PARTS):
                    of_part = {"features": features, "part": part, "draws": settings.draws}
                    result = contend("nutpie", contenders.nuts, *this, **of_part)
                    yield result
                    if result["seconds"] > seconds:
                        break
            if "pymc_extras" in names:
                limited = {"features": features, "seconds": seconds}
                yield contend("pymc_extras", contenders.advi, *this, **limited)
        for rows in settings.repeated:
            folder, copies = files_of(contenders.FILE_ROWS), rows // contenders.FILE_ROWS
            truth = contenders.nearest_gaussian(folder, features, copies)
            this = (folder, copies * contenders.FILE_ROWS, truth)
            yield contend(REPEATED, contenders.ours, *this, **given | {"copies": copies})


def whole_seconds(result: Result) -> float:
    """Seconds from the start of the process to 1000 effective draws of the worst coordinate."""
    sampling = result["sampling"] * EFFECTIVE / result["ess"]
    return result["start"] + result["open"] + result["set_up"] + sampling


def gathered(get: Callable[[Result], Any]) -> Callable[[Result], Any]:
    """A cell of rows that are gathered."""
    return lambda r: "" if r["contender"] == "in memory" else get(r)


PLACES = {"ours": "files", "in memory": "memory", REPEATED: "copies"}
INSTEAD = {"ours": "SGLDCV", "nutpie": "NUTS on a part", "pymc_extras": "ADVI, DataLoader"}
ERRORS = {"sd ratio": lambda r: f"{r['sd_ratio']:.3f}", "mean error": "mean_error"}
OURS = {
    "N": "rows",
    "rows in": lambda r: PLACES[r["contender"]],
    "a pass of reading, s": lambda r: r["reading"] if r["contender"] == "ours" else "",
    "set-up, s": "set_up",
    "passes": gathered(lambda r: r["passes"]),
    "gathering, s": gathered(lambda r: r["gathering"]),
    "sampling, s": "sampling",
    "µs a transition": "microseconds",
    "kB an effective draw": gathered(lambda r: r["gathered_bytes"] / 1e3 / r["ess"]),
    "to 1000 effective, s": whole_seconds,
    "most memory, GiB": lambda r: r["resident"] / 2**30,
    **ERRORS,
}
OTHERS = {
    "N": "rows",
    "what": lambda r: INSTEAD[r["contender"]],
    "rows read": lambda r: r.get("part", r["rows"]),
    "seconds": lambda r: r["seconds"] if "seconds" in r else whole_seconds(r),
    **ERRORS,
}
TABLES = [
    Table("Rows in files and in memory", OURS, lambda r: r["contender"] in PLACES),
    Table("Instead", OTHERS, lambda r: r["contender"] in INSTEAD),
]


def verdicts(found: list[Result]) -> Iterator[Verdict]:
    """Memory, errors, and the same draws as in memory."""
    by_name = {(r["rows"], r["contender"]): r for r in found}
    for (rows, name), ours in by_name.items():
        if name not in ("ours", REPEATED):
            continue
        start = f"N = {rows}:"
        gibibytes = ours["resident"] / 2**30
        yield Verdict(f"{start} resident", gibibytes, ours["most_bytes"] / 2**30, "GiB")
        yield Verdict(f"{start} error of sds", abs(ours["sd_ratio"] - 1), LARGEST_ERROR)
        yield Verdict(f"{start} error of means", ours["mean_error"], LARGEST_ERROR, "sd")
        memory = by_name.get((rows, "in memory"))
        if name == "ours" and memory is not None:
            ratio = ours["microseconds"] / memory["microseconds"]
            yield Verdict(f"{start} transition, over that in memory", ratio, LARGEST_RATIO, "x")
            other = float(ours["digest"] != memory["digest"])
            yield Verdict(f"{start} draws other than in memory", other, 0)


if __name__ == "__main__":
    sys.exit(run(__doc__, results, TABLES, OPTIONS, verdicts, one_core=False))
