"""Seconds from a fresh process to 1000 effective draws, of this package and peers, on one core.

Examples
--------
::

    python tests/benchmarks/effective_draws.py --output draws.json
    python tests/benchmarks/effective_draws.py --rows 1000000 --contenders ours --output draws.json
    python tests/benchmarks/effective_draws.py --contenders --output draws.json --markdown draws.md

``README.md`` beside this file says how to read the figures.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.child import cache_variables, run_in_fresh_process
from common.machine import restrict_to_one_core
from common.markdown import write_tables
from common.peer_python import STORAGE, python_of, python_path
from common.program import (
    make_parser,
    print_table,
    print_verdict,
    say,
    write_results,
)
from draws_benchmark import CONTENDERS

ROWS = [10_000, 100_000, 1_000_000, 10_000_000]
EFFECTIVE = 1000
LARGEST_SLOPE = 0.05
"""Of the logarithm of the cost of a draw of ours over that of the number of rows."""
LARGEST_SD_ERROR = 0.05


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="rows of the data, N")
    parser.add_argument("--features", type=int, default=20, help="coefficients, p")
    parser.add_argument(
        "--contenders", nargs="*", default=list(CONTENDERS), choices=CONTENDERS,
        help="none: show what the file has",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=1, help="pairs of processes for each cache")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds of one process")
    parser.add_argument("--markdown", type=Path, help="file for the table of the documentation")
    return parser.parse_args(arguments)


def measure(contender: str, folder: str, rounds: int, limit: float) -> dict[str, Any]:
    """Run a contender with an empty and with a filled cache; the fastest round counts."""
    runs: dict[str, dict[str, Any]] = {}
    try:
        python, path = python_of(contender), python_path(contender)
        for _ in range(rounds):
            with tempfile.TemporaryDirectory(prefix="effective-draws-cache-") as cache:
                for kind in ("cold", "warm"):
                    environment = cache_variables(cache) | {"PYTHONPATH": path}
                    run = run_in_fresh_process(
                        "draws_benchmark.worker:measure", environment, python, limit,
                        contender=contender, folder=folder,
                    )  # fmt: skip
                    run |= judge(folder)
                    wall, cpu = (
                        first + more * EFFECTIVE / run["ess"]
                        for first, more in zip(run["set_up"], run["drawing"], strict=True)
                    )
                    run |= {"wall": wall, "cpu": cpu}
                    if kind not in runs or cpu < runs[kind]["cpu"]:
                        runs[kind] = run
    except subprocess.TimeoutExpired:
        return {**runs, "absent": f"> {limit:g} s"}
    except RuntimeError as error:
        return {**runs, "absent": str(error).strip().splitlines()[-1]}
    return runs


def judge(folder: str) -> dict[str, float]:
    """Compare the draws of the last run with the Laplace approximation."""
    import numpy as np
    from common.errors import errors_of_draws
    from common.problem import load_problem

    problem, draws = load_problem(folder), np.load(f"{folder}/draws.npy")
    sd = np.sqrt(np.diag(np.linalg.inv(problem.curvature)))
    return {"draws": len(draws), **errors_of_draws(draws[None], problem.mode, sd)}


def read_results(output: Path | None) -> list[dict[str, Any]]:
    """Results of earlier runs with this file."""
    if output is None or not output.exists():
        return []
    return json.loads(output.read_text())["results"]


COLUMNS = (
    "N", "contender", "cold s", "warm s", "cold wall s", "warm wall s", "set-up s", "ESS/s",
    "with set-up", "sd ratio", "mean error",
)  # fmt: skip


def table_rows(results: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Cells of the table; a run that did not end has its limit in place of the times."""
    rows = []
    for result in results:
        cells = [result["rows"], result["contender"]]
        if "warm" not in result:
            reason = result["absent"] if result["absent"].startswith(">") else "absent"
            rows.append([*cells, reason, *[""] * (len(COLUMNS) - 3)])
            continue
        cold, warm = result["cold"], result["warm"]
        rows.append(
            [
                *cells,
                cold["cpu"],
                warm["cpu"],
                cold["wall"],
                warm["wall"],
                warm["set_up"][1],
                warm["ess"] / warm["drawing"][1],
                EFFECTIVE / warm["cpu"],
                f"{warm['sd_ratio']:.3f}",
                warm["mean_error"],
            ]
        )
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark."""
    settings = parse_arguments(arguments)
    core = restrict_to_one_core(settings.core)
    from common.problem import make_problem, save_problem

    results = read_results(settings.output)
    STORAGE.mkdir(exist_ok=True)
    for rows in settings.rows if settings.contenders else ():
        with tempfile.TemporaryDirectory(dir=STORAGE, prefix="problem-") as folder:
            save_problem(make_problem(rows, settings.features, "float64"), folder)
            for contender in settings.contenders:
                say(f"N = {rows}, {contender}")
                key = {"rows": rows, "features": settings.features, "contender": contender}
                results = [result for result in results if not key.items() <= result.items()]
                results.append(key | measure(contender, folder, settings.rounds, settings.limit))
                results.sort(key=lambda r: (r["rows"], CONTENDERS.index(r["contender"])))
                write_results(settings.output, "effective_draws", settings, core, results)
    shown = [result for result in results if result["features"] == settings.features]
    title = f"Fresh process to {EFFECTIVE} effective draws, p = {settings.features}, processor time"
    print_table(title, COLUMNS, table_rows(shown))
    for result in shown:
        if "absent" in result:
            print(f"N = {result['rows']}: {result['contender']}: {result['absent']}")
    if settings.markdown is not None:
        command = "tests/benchmarks/effective_draws.py"
        write_tables(settings.markdown, [(COLUMNS, table_rows(shown))], command)
    return 0 if verdicts(shown) else 1


def verdicts(results: Sequence[Mapping[str, Any]]) -> bool:
    """Print whether this package's figures are within their limits."""
    import numpy as np

    ours = [
        (result["rows"], result["warm"])
        for result in results
        if result["contender"] == "ours" and "warm" in result
    ]
    reached = [
        print_verdict(
            f"N = {rows}: error of the standard deviations",
            abs(run["sd_ratio"] - 1),
            LARGEST_SD_ERROR,
            "",
        )
        for rows, run in ours
    ]
    if len(ours) > 1:
        costs = [run["drawing"][1] / run["ess"] for _, run in ours]
        slope = np.polyfit(np.log([rows for rows, _ in ours]), np.log(costs), 1)[0]
        what = "log-log slope of the cost of a draw over N"
        reached.append(print_verdict(what, float(slope), LARGEST_SLOPE, ""))
    return all(reached)


if __name__ == "__main__":
    sys.exit(main())
