"""Time to the first draw in a new process, with an empty and with a filled compile cache.

Examples
--------
::

    python tests/benchmarks/start_up.py
    python tests/benchmarks/start_up.py --rows 10000 1000000 --rounds 5

``README.md`` beside this file says how to read the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from typing import Any

from common.child import cache_variables, run_in_fresh_process
from common.machine import restrict_to_one_core
from common.program import (
    DTYPES,
    make_parser,
    print_table,
    print_verdict,
    say,
    write_results,
)

CONFIGURATIONS = (
    ("sgld", "given", "NUMBA"),
    ("sgld-cv", "given", "NUMBA"),
    ("sgld", "computed", "NUMBA"),
    ("sgld-cv", "computed", "NUMBA"),
    ("sgld-cv", "computed", "CVM"),
    ("sgld-cv", "computed", "JAX"),
)
"""Method, settings and PyTensor mode. Nothing is given with computed settings but the mode."""
STAGES = ("interpreter", "imports", "model", "step", "first draw")
KEYS = ("method", "settings", "mode", "cache")
LIMIT = 3.0
"""Seconds from the imports, and from the step method, to the first draw with a filled cache."""
LIMIT_OF_EMPTY_CACHE = 8.0
"""Seconds from the start of the process with an empty cache, in PyTensor's default mode."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[200_000], help="rows, N")
    parser.add_argument("--features", type=int, default=10, help="coefficients, p")
    parser.add_argument("--batch", type=int, default=500, help="minibatch size, n")
    parser.add_argument("--dtype", default="float64", choices=DTYPES)
    parser.add_argument("--rounds", type=int, default=3, help="processes with a filled cache")
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="clock of the table"
    )
    return parser.parse_args(arguments)


def measure(
    method: str, settings: str, mode: str, folder: str, batch: int, launched: float
) -> dict[str, dict[str, float]]:
    """Times of this process, which has imported nothing yet, by both clocks."""
    from common.timing import process_clocks as now

    times = [(launched, 0.0), now()]
    import pymc as pm
    from common.model import build_model, make_step
    from common.problem import load_problem, step_size

    import pymc_sgmcmc  # noqa: F401

    times.append(now())
    before = now()
    problem = load_problem(folder)
    given: dict[str, Any] = {}
    if settings == "given":
        given["step_size"] = step_size(problem, batch)
        given["preconditioner"] = "identity"
        if method == "sgld-cv":
            given["center"] = problem.mode
    loading = [after - earlier for after, earlier in zip(now(), before, strict=True)]

    def mark() -> None:
        times.append(tuple(at - load for at, load in zip(now(), loading, strict=True)))

    model = build_model(problem, batch, "minibatch" if given else "ordinary")
    mark()
    size = batch if given else None
    step = make_step(model, method, size, compile_kwargs={"mode": mode}, **given)
    mark()

    class FirstDrawError(Exception):
        pass

    def stop(**_: Any) -> None:
        mark()
        raise FirstDrawError

    with contextlib.suppress(FirstDrawError):
        pm.sample(
            model=model,
            step=step,
            draws=1000,
            tune=0,
            chains=1,
            cores=1,
            progressbar=False,
            quiet=True,
            callback=stop,
        )
    return {
        clock: {name: times[i + 1][place] - times[i][place] for i, name in enumerate(STAGES)}
        for place, clock in enumerate(("wall", "cpu"))
    }


def from_stage(seconds: dict[str, float], stage: str) -> float:
    """Seconds from the beginning of a stage to the first draw."""
    return sum(seconds[name] for name in STAGES[STAGES.index(stage) :])


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; 1 where a figure is over its limit."""
    settings = parse_arguments(arguments)
    core = restrict_to_one_core(settings.core)
    from common.problem import make_problem, save_problem

    results = []
    for rows in settings.rows:
        problem = make_problem(rows, settings.features, settings.dtype)
        with tempfile.TemporaryDirectory(prefix="start-up-") as folder:
            save_problem(problem, folder)
            for configuration in CONFIGURATIONS:
                key = dict(zip(("method", "settings", "mode"), configuration, strict=True))
                # A cache of its own, empty at first: what is measured is what this program finds
                # there, not what was compiled earlier on this machine.
                with tempfile.TemporaryDirectory(prefix="start-up-cache-") as cache:
                    for number in range(settings.rounds + 1):
                        say(f"N = {rows}, {', '.join(configuration)}, process {number}")
                        seconds = run_in_fresh_process(
                            "start_up:measure",
                            cache_variables(cache),
                            folder=folder,
                            batch=settings.batch,
                            **key,
                        )
                        results.append(
                            {
                                "rows": rows,
                                **key,
                                "cache": "filled" if number else "empty",
                                "seconds": seconds[settings.clock],
                                "both_clocks": seconds,
                            }
                        )
                        write_results(settings.output, "start_up", settings, core, results)
    chosen = _fastest(results)
    print_table(
        f"Seconds of {settings.clock} time, p = {settings.features}, n = {settings.batch}, "
        f"{settings.dtype}",
        ["N", *KEYS, *STAGES, "from process", "from import", "from step"],
        [
            [
                result["rows"],
                *(result[name] for name in KEYS),
                *result["seconds"].values(),
                *(from_stage(result["seconds"], s) for s in ("interpreter", "imports", "step")),
            ]
            for result in chosen
        ],
    )
    reached = [
        print_verdict(
            f"N = {result['rows']}, {', '.join(result[name] for name in KEYS[:3])}, from {stage}:",
            from_stage(result["seconds"], stage),
            LIMIT,
            "s",
        )
        for result in chosen
        if result["cache"] == "filled"
        for stage in ("step", "imports")
    ] + [
        print_verdict(
            f"N = {result['rows']}, {', '.join(result[name] for name in KEYS[:3])}, empty cache:",
            from_stage(result["seconds"], STAGES[0]),
            LIMIT_OF_EMPTY_CACHE,
            "s",
        )
        for result in chosen
        if result["cache"] == "empty" and result["mode"] == "NUMBA"
    ]
    return 0 if all(reached) else 1


def _fastest(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fastest process of each configuration."""
    fastest: dict[tuple, dict[str, Any]] = {}
    for result in results:
        key = (result["rows"], *(result[name] for name in KEYS))
        other = fastest.get(key)
        if other is None or from_stage(result["seconds"], "imports") < from_stage(
            other["seconds"], "imports"
        ):
            fastest[key] = result
    return list(fastest.values())


if __name__ == "__main__":
    sys.exit(main())
