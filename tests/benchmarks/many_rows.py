"""Logistic regression on parquet files larger than the memory that the process may use.

Examples
--------
::

    python tests/benchmarks/many_rows.py --output rows.json
    python tests/benchmarks/many_rows.py --rows 1000000 --contenders ours "in memory"

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
from common.peer_python import STORAGE, python_of, python_path
from common.program import (
    make_parser,
    markdown_table,
    print_table,
    print_verdict,
    say,
    write_results,
)

CONTENDERS = ("ours", "in memory", "nutpie", "pymc_extras")
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
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--most-in-memory", type=int, default=IN_MEMORY)
    parser.add_argument("--folder", type=Path, help="where the files stay, for another run")
    parser.add_argument("--markdown", type=Path, help="file for the tables of the documentation")
    return parser.parse_args(arguments)


def judge(folder: Path, mode: Any, sd: Any) -> dict[str, float]:
    """Compare the draws of the last run with the Laplace approximation of all rows."""
    import numpy as np
    from arviz_stats.base import array_stats

    draws = np.load(folder / "draws.npy")
    ratios = draws.std(axis=(0, 1), ddof=1) / sd
    return {
        "ess": float(array_stats.ess(draws, chain_axis=0, draw_axis=1).min()),
        "sd_ratio": float(ratios[np.abs(np.log(ratios)).argmax()]),
        "mean_error": float(np.abs((draws.mean(axis=(0, 1)) - mode) / sd).max()),
    }


def measure(folder: Path, rows: int, settings: argparse.Namespace) -> list[dict[str, Any]]:
    """All contenders on the files of a folder."""
    import numpy as np
    from rows_benchmark.files import nearest_gaussian, read_files, write_files

    if not folder.exists():
        say(f"N = {rows}: writing the files")
        write_files(folder, rows, settings.features)
    mode, sd = nearest_gaussian(folder, settings.features)
    given = {"folder": str(folder), "features": settings.features}
    results = []

    def run(name: str, function: str, **arguments: Any) -> dict[str, Any]:
        say(f"N = {rows}: {name}")
        peer = name not in ("ours", "in memory")
        python = python_of(name) if peer else sys.executable
        environment = {"PYTHONPATH": python_path(name)} if peer else {}
        result = run_in_fresh_process(
            f"rows_benchmark.{function}", environment, python, **given, **arguments
        )
        results.append({"rows": rows, "contender": name, **result, **judge(folder, mode, sd)})
        return results[-1]

    for name, in_memory, limit in (("ours", False, settings.limit), ("in memory", True, 0)):
        if name in settings.contenders and not (in_memory and rows > settings.most_in_memory):
            run(
                name, "ours:measure", in_memory=in_memory, memory=settings.memory,
                most_bytes=int(limit * 2**30), draws=settings.draws,
            )  # fmt: skip
    ours = next((result for result in results if result["contender"] == "ours"), None)
    if ours is None:
        return results
    seconds = whole_seconds(ours)
    if "nutpie" in settings.contenders:
        X, y = next(read_files(folder, settings.features))
        np.savez(folder / "part.npz", X=X, y=y)
        for part in map(int, PARTS):
            result = run("nutpie", "nuts:measure", rows=part, draws=settings.draws)
            result["part"] = part
            if result["seconds"] > seconds:
                break
    if "pymc_extras" in settings.contenders:
        run("pymc_extras", "advi:measure", seconds=seconds)
    return results


def whole_seconds(result: Mapping[str, Any]) -> float:
    """Seconds from the start of the process to 1000 effective draws of the worst coordinate."""
    sampling = result["sampling"] * EFFECTIVE / result["ess"]
    return result["start"] + result["open"] + result["set_up"] + sampling


OURS = (
    "N", "rows in", "a pass of reading s", "set-up s", "passes", "gathering s", "sampling s",
    "us a transition", "1000 effective s", "GiB", "sd ratio", "mean error",
)  # fmt: skip
OTHERS = ("N", "what", "rows read", "seconds", "sd ratio", "mean error")


def tables(results: Sequence[Mapping[str, Any]]) -> list[tuple[str, Sequence[str], list[list]]]:
    """Title, columns and cells of the two tables."""
    ours, others = [], []
    for result in results:
        errors = [f"{result['sd_ratio']:.3f}", result["mean_error"]]
        if result["contender"] in ("ours", "in memory"):
            ours.append(
                [
                    result["rows"],
                    "files" if result["contender"] == "ours" else "memory",
                    result["reading"],
                    result["set_up"],
                    result["passes"] if result["contender"] == "ours" else "",
                    result["gathering"] if result["contender"] == "ours" else "",
                    result["sampling"],
                    result["microseconds"],
                    whole_seconds(result),
                    result["resident"] / 2**30,
                    *errors,
                ]
            )
            if result["contender"] == "ours":
                whole = whole_seconds(result)
                others.append([result["rows"], "SGLDCV", result["rows"], whole, *errors])
        else:
            read = result.get("part", result.get("steps", 0) * 512)
            what = {"nutpie": "NUTS on a part", "pymc_extras": "ADVI, DataLoader"}
            cells = [what[result["contender"]], read, result["seconds"], *errors]
            others.append([result["rows"], *cells])
    return [("Rows in files and in memory", OURS, ours), ("Instead", OTHERS, others)]


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; 1 where a figure is over its limit."""
    settings = parse_arguments(arguments)
    results: list[dict[str, Any]] = []
    STORAGE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=STORAGE, prefix="rows-") as scratch:
        for rows in settings.rows:
            folder = Path(settings.folder or scratch) / f"{rows}x{settings.features}"
            results += measure(folder, rows, settings)
            write_results(settings.output, "many_rows", settings, None, results)
    shown = tables(results)
    for title, columns, cells in shown:
        print_table(title, columns, cells)
    if settings.markdown is not None:
        settings.markdown.write_text("\n".join(markdown_table(*each[1:]) for each in shown))
    return 0 if verdicts(results, settings.limit) else 1


def verdicts(results: Sequence[Mapping[str, Any]], limit: float) -> bool:
    """Print whether the figures are within their limits."""
    by_name = {(result["rows"], result["contender"]): result for result in results}
    reached = []
    for (rows, name), ours in by_name.items():
        if name != "ours":
            continue
        start, gib = f"N = {rows}:", ours["resident"] / 2**30
        errors = abs(ours["sd_ratio"] - 1), ours["mean_error"]
        reached += [
            print_verdict(f"{start} resident", gib, limit, "GiB"),
            print_verdict(f"{start} error of sds", errors[0], LARGEST_ERROR, ""),
            print_verdict(f"{start} error of means", errors[1], LARGEST_ERROR, "sd"),
        ]
        memory = by_name.get((rows, "in memory"))
        if memory is not None:
            ratio = ours["microseconds"] / memory["microseconds"]
            what = f"{start} transition, over that in memory"
            reached.append(print_verdict(what, ratio, LARGEST_RATIO, "x"))
            same = ours["digest"] == memory["digest"]
            print(f"{start} the draws are {'the same' if same else 'OTHER'} as in memory")
            reached.append(same)
    return all(reached)


if __name__ == "__main__":
    sys.exit(main())
