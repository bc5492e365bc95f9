"""Set-up time and time of a transition as functions of the number of rows, on one core.

Examples
--------
::

    python tests/benchmarks/scaling.py
    python tests/benchmarks/scaling.py --rows 10000 100000 1000000 4000000 --output results.json

``README.md`` beside this file says how to read the figures.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from common import METHODS
from common.child import run_in_fresh_process
from common.machine import restrict_to_one_core
from common.program import (
    DTYPES,
    make_parser,
    print_table,
    say,
    write_results,
)

ROWS = [10_000, 40_000, 200_000, 1_000_000, 4_000_000]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="rows of the data, N")
    parser.add_argument("--features", type=int, default=10, help="coefficients, p")
    parser.add_argument("--batch", type=int, default=500, help="minibatch size, n")
    parser.add_argument("--dtype", default="float64", choices=DTYPES)
    parser.add_argument("--transitions", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3, help="processes for each N, in turn")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    return parser.parse_args(arguments)


def measure(
    rows: int, features: int, batch: int, dtype: str, transitions: int, clock: str
) -> dict[str, float]:
    """Set up and run both methods in this process."""
    from common.model import build_model, engine_chain, make_step
    from common.problem import make_problem, step_size
    from common.timing import best, timed

    def seconds(function: Any, *arguments: Any, **settings: Any) -> tuple[Any, float]:
        value, found = timed(function, *arguments, **settings)
        return value, best([found], clock)

    # Loading compiled code takes the same time for all N; a small run first takes it out.
    small = make_problem(4 * batch, features, dtype)
    for method in METHODS:
        make_step(build_model(small, batch), method, batch)

    problem = make_problem(rows, features, dtype)
    h = step_size(problem, batch)
    model, found = seconds(build_model, problem, batch)
    result = {"model_seconds": found}
    for method in METHODS:
        given = {"step_size": h} | ({} if method == "sgld" else {"center": problem.mode})
        _, result[f"{method}_given_seconds"] = seconds(make_step, model, method, batch, **given)
        step, result[f"{method}_computed_seconds"] = seconds(make_step, model, method, batch)
        chain = engine_chain(step, problem.mode, h)
        chain(0, transitions // 10)
        times = [seconds(chain, seed, transitions)[1] for seed in range(1, 6)]
        result[f"{method}_transition_us"] = min(times) / transitions * 1e6
        _, result[f"{method}_order_seconds"] = seconds(step.batching.set_order, 1)
        del step, chain
    return result


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark."""
    settings = parse_arguments(arguments)
    core = restrict_to_one_core(settings.core)
    results: list[dict[str, Any]] = []
    for number in range(settings.rounds):
        for rows in settings.rows:
            say(f"round {number + 1}, N = {rows}")
            result = run_in_fresh_process(
                "scaling:measure",
                rows=rows,
                features=settings.features,
                batch=settings.batch,
                dtype=settings.dtype,
                transitions=settings.transitions,
                clock=settings.clock,
            )
            results.append({"rows": rows, **result})
            write_results(settings.output, "scaling", settings, core, results)
    fastest = {
        rows: {
            name: min(result[name] for result in results if result["rows"] == rows)
            for name in results[0]
        }
        for rows in settings.rows
    }
    for method in METHODS:
        first = fastest[settings.rows[0]][f"{method}_transition_us"]
        print_table(
            f"{method}, p = {settings.features}, n = {settings.batch}, {settings.dtype}, "
            f"{settings.clock} time",
            ["N", "model s", "step s: given", "computed", "new order s", "transition µs", "×"],
            [
                [
                    rows,
                    best_of["model_seconds"],
                    best_of[f"{method}_given_seconds"],
                    best_of[f"{method}_computed_seconds"],
                    best_of[f"{method}_order_seconds"],
                    best_of[f"{method}_transition_us"],
                    best_of[f"{method}_transition_us"] / first,
                ]
                for rows, best_of in fastest.items()
            ],
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
