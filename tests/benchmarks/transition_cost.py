"""Time of an SGLD and an SGLD-CV transition, for this package and its peers, on one core.

Examples
--------
::

    python tests/benchmarks/transition_cost.py --features 10 --batch 500 --dtype float64
    python tests/benchmarks/transition_cost.py --grid --rounds 5 --output results.json

``README.md`` beside this file says how to read the figures.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict
from pathlib import Path

from common.machine import machine_facts, restrict_to_one_core
from transition_benchmark import CONTENDERS

STORAGE = Path(__file__).resolve().parents[2] / ".benchmarks"
GRID: dict[str, list] = {
    "features": [10, 50, 200],
    "batch": [50, 500, 5_000],
    "dtype": ["float64", "float32"],
}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--rows", type=int, default=200_000, help="rows of the data, N")
    parser.add_argument(
        "--features", type=int, nargs="+", default=[10], help="coefficients with intercept, p"
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[500], help="minibatch sizes, n")
    parser.add_argument(
        "--dtype", nargs="+", default=["float64"], choices=GRID["dtype"], help="floating point type"
    )
    parser.add_argument(
        "--grid",
        action="store_true",
        help="all of p in {10, 50, 200}, n in {50, 500, 5000}, both types",
    )
    parser.add_argument("--rounds", type=int, default=5, help="times each contender is timed")
    parser.add_argument(
        "--peers",
        default=",".join(CONTENDERS),
        help="contenders, separated by commas",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.1,
        help="rough time of one measurement of the fastest contender",
    )
    parser.add_argument(
        "--transitions", type=int, default=None, help="transitions of a measurement, not --seconds"
    )
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="clock of the printed table; the file has both",
    )
    parser.add_argument("--core", type=int, default=None, help="core to run on")
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="seconds within which a contender must answer"
    )
    parser.add_argument("--output", type=Path, default=None, help="JSON file for the results")
    parsed = parser.parse_args(arguments)
    parsed.peers = [name.strip() for name in parsed.peers.split(",") if name.strip()]
    unknown = sorted(set(parsed.peers) - set(CONTENDERS))
    if unknown:
        parser.error(f"--peers should name some of {', '.join(CONTENDERS)} but got {unknown}")
    if parsed.rounds < 1:
        parser.error(f"--rounds should be at least 1 but got {parsed.rounds}")
    if parsed.grid:
        parsed.features, parsed.batch, parsed.dtype = GRID["features"], GRID["batch"], GRID["dtype"]
    if max(parsed.batch) > parsed.rows:
        parser.error(f"--batch should be at most --rows, {parsed.rows}, but got {parsed.batch}")
    return parsed


def prepare_storage(folder: Path) -> Path:
    """Make the folder for environments and temporary files, which git then ignores."""
    folder.mkdir(exist_ok=True)
    (folder / ".gitignore").write_text("*\n")
    return folder


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; 1 when a contender failed its guard or nothing was timed."""
    parsed = parse_arguments(arguments)
    core = restrict_to_one_core(parsed.core)
    # These import NumPy, which reads the thread counts when it loads.
    from transition_benchmark.report import print_report, write_json
    from transition_benchmark.runner import Outcome, Plan, run

    plan = Plan(
        rows=parsed.rows,
        features=parsed.features,
        batches=parsed.batch,
        dtypes=parsed.dtype,
        contenders=parsed.peers,
        rounds=parsed.rounds,
        seconds=parsed.seconds,
        transitions=parsed.transitions,
        timeout=parsed.timeout,
        storage=prepare_storage(STORAGE),
    )
    machine = machine_facts(core)
    settings = {k: v for k, v in asdict(plan).items() if k != "storage"}
    outcome = Outcome()
    for _ in run(plan, outcome):
        # Written after every configuration: a long grid may be broken off.
        if parsed.output is not None:
            write_json(
                parsed.output,
                outcome.results,
                outcome.versions,
                outcome.absent,
                settings,
                machine,
            )
    print_report(outcome.results, plan.contenders, outcome.absent, parsed.clock)
    passed = bool(outcome.results) and all(r.guard["passed"] for r in outcome.results)
    return 0 if passed else 1


if __name__ == "__main__":
    # A table wider than a pipe's default of 80 columns would be wrapped in the middle of figures.
    os.environ.setdefault("COLUMNS", "140")
    sys.exit(main())
