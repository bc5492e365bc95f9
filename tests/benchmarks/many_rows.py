"""Logistic regression on parquet files larger than the memory that the process may use.

Examples
--------
::

    python tests/benchmarks/many_rows.py --output rows.json
    python tests/benchmarks/many_rows.py --rows 1000000 --repeated --contenders "in memory"

``README.md`` beside this file says how to read the figures.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.child import run_in_fresh_process
from common.markdown import write_tables
from common.peer_python import STORAGE, python_of, python_path
from common.program import (
    make_parser,
    print_table,
    print_verdict,
    say,
    write_results,
)

CONTENDERS = ("in memory", "nutpie", "pymc_extras")
"""What this package's run on files is compared with."""
REPEATED = "repeated"
"""Rows of one file, again and again, so that their number has no bound."""
IN_MEMORY = 10_000_000
"""The most rows that are also sampled in memory, by default."""
PARTS = [10_000 * 10**power for power in (0, 0.5, 1, 1.5)]
"""NUTS takes so many rows, until it takes longer than this package takes for all."""
EFFECTIVE = 1000
LARGEST_RATIO = 1.05
"""Of a transition's time with rows in files, gathering left out, over that in memory."""
LARGEST_ERROR = 0.1
"""Of means, in posterior standard deviations, and of standard deviations, relative to them."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[10**6, 10**7, 10**8])
    parser.add_argument("--features", type=int, default=10, help="covariates, of 32-bit numbers")
    parser.add_argument("--limit", type=float, default=3.0, help="GiB that the process may use")
    parser.add_argument("--memory", default="1 GiB", help="for the rows of a run")
    parser.add_argument("--draws", type=int, default=1000, help="of each of two chains")
    parser.add_argument("--repeated", type=int, nargs="*", default=[10**9], help="rows of copies")
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--most-in-memory", type=int, default=IN_MEMORY)
    parser.add_argument("--folder", type=Path, help="where the files stay, for another run")
    parser.add_argument("--markdown", type=Path, help="file for the tables of the documentation")
    return parser.parse_args(arguments)


def run(
    name: str, function: str, folder: Path, rows: int, gaussian: Any, **arguments: Any
) -> dict[str, Any]:
    """Run a contender in a process of its own, and judge its draws."""
    import numpy as np
    from common.errors import errors_of_draws

    say(f"N = {rows}: {name}")
    peer = name in ("nutpie", "pymc_extras")
    result = run_in_fresh_process(
        f"rows_benchmark.{function}",
        {"PYTHONPATH": python_path(name)} if peer else {},
        python_of(name) if peer else sys.executable,
        folder=str(folder),
        **arguments,
    )
    errors = errors_of_draws(np.load(folder / "draws.npy"), *gaussian)
    return {"rows": rows, "contender": name, **result, **errors}


def measure(folder: Path, rows: int, settings: argparse.Namespace) -> list[dict[str, Any]]:
    """All contenders on the files of a folder."""
    import numpy as np
    from rows_benchmark.files import nearest_gaussian, read_files

    features, names = settings.features, settings.contenders
    of_files = (folder, rows, nearest_gaussian(folder, features))
    ours = run("ours", "ours:measure", *of_files, **of_ours(settings))
    results, seconds = [ours], whole_seconds(ours)
    if "in memory" in names and rows <= settings.most_in_memory:
        in_memory = {**of_ours(settings), "in_memory": True, "most_bytes": 0}
        results.append(run("in memory", "ours:measure", *of_files, **in_memory))
    if "nutpie" in names:
        X, y = next(read_files(folder, features))
        np.savez(folder / "part.npz", X=X, y=y)
        for part in map(int, PARTS):
            given = {"features": features, "part": part, "draws": settings.draws}
            results.append(run("nutpie", "nuts:measure", *of_files, **given))
            if results[-1]["seconds"] > seconds:
                break
    if "pymc_extras" in names:
        given = {"features": features, "seconds": seconds}
        results.append(run("pymc_extras", "advi:measure", *of_files, **given))
    return results


def measure_repeated(folder: Path, rows: int, settings: argparse.Namespace) -> dict[str, Any]:
    """This package on copies of the rows of a file."""
    from rows_benchmark.files import FILE_ROWS, nearest_gaussian

    copies = rows // FILE_ROWS
    gaussian = nearest_gaussian(folder, settings.features, copies)
    given = {**of_ours(settings), "copies": copies}
    return run(REPEATED, "ours:measure", folder, copies * FILE_ROWS, gaussian, **given)


def of_ours(settings: argparse.Namespace) -> dict[str, Any]:
    """Arguments of this package's process on files."""
    return {
        "features": settings.features,
        "in_memory": False,
        "copies": 1,
        "memory": settings.memory,
        "most_bytes": int(settings.limit * 2**30),
        "draws": settings.draws,
    }


def files_of(scratch: str, rows: int, settings: argparse.Namespace) -> Path:
    """Folder of the files, which are written where they are not there."""
    from rows_benchmark.files import write_files

    folder = Path(settings.folder or scratch) / f"{rows}x{settings.features}"
    if not folder.exists():
        say(f"N = {rows}: writing the files")
        write_files(folder, rows, settings.features)
    return folder


def whole_seconds(result: Mapping[str, Any]) -> float:
    """Seconds from the start of the process to 1000 effective draws of the worst coordinate."""
    sampling = result["sampling"] * EFFECTIVE / result["ess"]
    return result["start"] + result["open"] + result["set_up"] + sampling


PLACES = {"ours": "files", "in memory": "memory", REPEATED: "copies"}
OURS = (
    "N", "rows in", "a pass of reading, s", "set-up, s", "passes", "gathering, s", "sampling, s",
    "µs a transition", "kB an effective draw", "to 1000 effective, s", "most memory, GiB",
    "sd ratio", "mean error",
)  # fmt: skip
OTHERS = ("N", "what", "rows read", "seconds", "sd ratio", "mean error")


def tables(results: Sequence[Mapping[str, Any]]) -> list[tuple[str, Sequence[str], list[list]]]:
    """Title, columns and cells of the two tables."""
    ours, others = [], []
    for result in results:
        errors = [f"{result['sd_ratio']:.3f}", result["mean_error"]]
        name = result["contender"]
        if name in PLACES:
            gathered = name != "in memory"
            ours.append(
                [
                    result["rows"],
                    PLACES[name],
                    result["reading"] if name == "ours" else "",
                    result["set_up"],
                    result["passes"] if gathered else "",
                    result["gathering"] if gathered else "",
                    result["sampling"],
                    result["microseconds"],
                    result["gathered_bytes"] / 1e3 / result["ess"] if gathered else "",
                    whole_seconds(result),
                    result["resident"] / 2**30,
                    *errors,
                ]
            )
        if name == "ours":
            cells = ["SGLDCV", result["rows"], whole_seconds(result)]
        elif name == "nutpie":
            cells = ["NUTS on a part", result["part"], result["seconds"]]
        elif name == "pymc_extras":
            cells = ["ADVI, DataLoader", 512 * result["steps"], result["seconds"]]
        else:
            continue
        others.append([result["rows"], *cells, *errors])
    return [("Rows in files and in memory", OURS, ours), ("Instead", OTHERS, others)]


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; 1 where a figure is over its limit."""
    settings = parse_arguments(arguments)
    from rows_benchmark.files import FILE_ROWS

    results: list[dict[str, Any]] = []
    STORAGE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=STORAGE, prefix="rows-") as scratch:
        for rows in settings.rows:
            results += measure(files_of(scratch, rows, settings), rows, settings)
            write_results(settings.output, "many_rows", settings, None, results)
        for rows in settings.repeated:
            folder = files_of(scratch, FILE_ROWS, settings)
            results.append(measure_repeated(folder, rows, settings))
            write_results(settings.output, "many_rows", settings, None, results)
    shown = tables(results)
    for title, columns, cells in shown:
        print_table(title, columns, cells)
    if settings.markdown is not None:
        tables_shown = [(columns, cells) for _, columns, cells in shown]
        write_tables(settings.markdown, tables_shown, "tests/benchmarks/many_rows.py")
    return 0 if verdicts(results, settings.limit) else 1


def verdicts(results: Sequence[Mapping[str, Any]], limit: float) -> bool:
    """Print whether the figures are within their limits."""
    by_name = {(result["rows"], result["contender"]): result for result in results}
    reached = []
    for (rows, name), ours in by_name.items():
        if name not in ("ours", REPEATED):
            continue
        start, gib = f"N = {rows}:", ours["resident"] / 2**30
        errors = abs(ours["sd_ratio"] - 1), ours["mean_error"]
        reached += [
            print_verdict(f"{start} resident", gib, limit, "GiB"),
            print_verdict(f"{start} error of sds", errors[0], LARGEST_ERROR, ""),
            print_verdict(f"{start} error of means", errors[1], LARGEST_ERROR, "sd"),
        ]
        memory = by_name.get((rows, "in memory"))
        if name == "ours" and memory is not None:
            ratio = ours["microseconds"] / memory["microseconds"]
            what = f"{start} transition, over that in memory"
            reached.append(print_verdict(what, ratio, LARGEST_RATIO, "x"))
            same = ours["digest"] == memory["digest"]
            print(f"{start} the draws are {'the same' if same else 'OTHER'} as in memory")
            reached.append(same)
    return all(reached)


if __name__ == "__main__":
    sys.exit(main())
