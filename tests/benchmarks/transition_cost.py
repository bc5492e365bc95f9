"""Time of a transition of SGLD and SGLD-CV, for this package and its peers, on one core.

Examples
--------
::

    python tests/benchmarks/transition_cost.py --features 10 --batch 500 --dtype float64
    python tests/benchmarks/transition_cost.py --grid --rounds 5 --output results.json

``README.md`` beside this file says how to read the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from statistics import median
from typing import Any

from common.child import BENCHMARKS
from common.machine import restrict_to_one_core
from common.peer_python import STORAGE, python_of, python_path
from common.program import DTYPES, make_parser, print_table, say, write_results
from transition_benchmark import CONTENDERS, METHODS, Settings

REFERENCES = ("ours", "numba")
"""Ratios refer to the first of these that was timed."""
LEAST_TRANSITIONS = 500
GRID: dict[str, list] = {
    "features": [10, 50, 200],
    "batch": [50, 500, 5_000],
    "dtype": list(DTYPES),
}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=200_000, help="rows of the data, N")
    parser.add_argument(
        "--features", type=int, nargs="+", default=[10], help="coefficients with intercept, p"
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[500], help="minibatch sizes, n")
    parser.add_argument("--dtype", nargs="+", default=["float64"], choices=DTYPES)
    parser.add_argument(
        "--grid",
        action="store_true",
        help="all of p in {10, 50, 200}, n in {50, 500, 5000}, both types",
    )
    parser.add_argument("--rounds", type=int, default=5, help="times each contender is timed")
    parser.add_argument(
        "--peers", default=",".join(CONTENDERS), help="contenders, separated by commas"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.1,
        help="rough time of one measurement of the fastest contender",
    )
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="cpu",
        help="clock of the printed table; the file has both",
    )
    parsed = parser.parse_args(arguments)
    parsed.peers = [name.strip() for name in parsed.peers.split(",") if name.strip()]
    unknown = sorted(set(parsed.peers) - set(CONTENDERS))
    if unknown:
        parser.error(f"--peers should name some of {', '.join(CONTENDERS)} but got {unknown}")
    if parsed.rounds < 1:
        parser.error(f"--rounds should be at least 1 but got {parsed.rounds}")
    if parsed.grid:
        vars(parsed).update(GRID)
    if max(parsed.batch) > parsed.rows:
        parser.error(f"--batch should be at most --rows, {parsed.rows}, but got {parsed.batch}")
    return parsed


class Contender:
    """A contender in a process of its own, which `transition_benchmark.worker` serves.

    Attributes
    ----------
    name : str
    guards : dict
        What the guard says of each method.
    versions : dict
        Version of Python and of each package.

    Raises
    ------
    RuntimeError
        The contender cannot take part.
    """

    def __init__(self, name: str, folder: str, settings: Settings, stack: ExitStack) -> None:
        self.name = name
        command = [python_of(name), "-m", "transition_benchmark.worker"]
        self._process = stack.enter_context(
            subprocess.Popen(
                [*command, name, folder, json.dumps(asdict(settings))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=BENCHMARKS,
                env={**os.environ, "PYTHONPATH": python_path(name)},
            )
        )
        answer = self._answer()
        self.guards, self.versions = answer["guards"], answer["versions"]

    def time(self, method: str, seed: int) -> dict[str, float]:
        """Seconds of one chain by both clocks."""
        print(json.dumps([method, seed]), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"Its process ended with status {self._process.wait()}.")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer


def measure(
    folder: str, settings: Settings, peers: Sequence[str], rounds: int, absent: dict[str, str]
) -> list[dict[str, Any]]:
    """Time the contenders in turn; those that cannot take part are added to `absent`."""
    with ExitStack() as stack:
        contenders = []
        for name in peers:
            if name not in absent:
                try:
                    contenders.append(Contender(name, folder, settings, stack))
                except RuntimeError as error:
                    absent[name] = str(error)
        seconds: dict[tuple[str, str], list] = {
            (contender.name, method): []
            for method in METHODS
            for contender in contenders
            if method in contender.guards
        }
        for number in range(rounds):
            for contender in contenders:
                for method in contender.guards:
                    taken = contender.time(method, number + 1)
                    seconds[contender.name, method].append(taken)
    return [
        {
            "contender": contender.name,
            "method": method,
            **asdict(settings),
            **{
                f"{clock}_us": [
                    1e6 * taken[clock] / settings.transitions
                    for taken in seconds[contender.name, method]
                ]
                for clock in ("wall", "cpu")
            },
            "guard": contender.guards[method],
            "versions": contender.versions,
        }
        for method in METHODS
        for contender in contenders
        if method in contender.guards
    ]


def table_rows(results: Sequence[Mapping[str, Any]], clock: str) -> list[list[Any]]:
    """Best and median time of each result, with the ratio of the best to the reference's."""
    key = ("features", "dtype", "batch", "method")
    best = {
        (*(result[name] for name in key), result["contender"]): min(result[f"{clock}_us"])
        for result in results
    }
    rows = []
    for result in results:
        configuration = tuple(result[name] for name in key)
        shortest = best[(*configuration, result["contender"])]
        references = [best.get((*configuration, name)) for name in REFERENCES]
        reference = next((time for time in references if time is not None), float("nan"))
        rows.append(
            [
                *configuration,
                result["contender"] + ("" if result["guard"]["passed"] else " !"),
                shortest,
                median(result[f"{clock}_us"]),
                shortest / reference,
            ]
        )
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; 1 when a contender failed its guard or nothing was timed."""
    options = parse_arguments(arguments)
    core = restrict_to_one_core(options.core)
    # These import NumPy, which reads the thread counts when it loads.
    from common.problem import make_problem, save_problem, step_size
    from transition_benchmark.guard import least_transitions

    STORAGE.mkdir(exist_ok=True)
    results: list[dict[str, Any]] = []
    absent: dict[str, str] = {}
    for features in options.features:
        for dtype in options.dtype:
            problem = make_problem(options.rows, features, dtype)
            with tempfile.TemporaryDirectory(dir=STORAGE, prefix="problem-") as folder:
                save_problem(problem, folder)
                for batch in options.batch:
                    say(f"p = {features}, {dtype}, n = {batch}")
                    h = step_size(problem, batch)
                    # A rough fit to the fastest contender: a fixed cost, and reading the window.
                    predicted = 0.5e-6 + 4e-10 * batch * features
                    transitions = max(LEAST_TRANSITIONS, int(options.seconds / predicted))
                    settings = Settings(batch, h, max(transitions, least_transitions(problem, h)))
                    timed = measure(folder, settings, options.peers, options.rounds, absent)
                    shared = {"features": features, "dtype": dtype}
                    results += [shared | result for result in timed]
                    # Written after every configuration: a long grid may be broken off.
                    absences = [
                        {"contender": name, "absent": reason} for name, reason in absent.items()
                    ]
                    write_results(
                        options.output, "transition_cost", options, core, [*results, *absences]
                    )
    print_table(
        f"µs of {options.clock} time a transition, N = {options.rows}",
        ["p", "dtype", "n", "method", "contender", "best", "median", "×"],
        table_rows(results, options.clock),
    )
    for name, versions in {result["contender"]: result["versions"] for result in results}.items():
        print(f"{name}: {', '.join(' '.join(version) for version in versions.items())}")
    for name, reason in absent.items():
        print(f"{name} did not take part: {reason}")
    failed = [result for result in results if not result["guard"]["passed"]]
    for result in failed:
        settings = {key: result[key] for key in ("features", "dtype", "batch", "method", "guard")}
        print(f"GUARD FAILED: {result['contender']}, {settings}")
    return 0 if results and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
