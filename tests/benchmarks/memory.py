"""Memory of a step method and of sampling with it, relative to the data. Linux only.

Examples
--------
::

    python tests/benchmarks/memory.py
    python tests/benchmarks/memory.py --rows 4000000 --features 10 --models minibatch ordinary

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
    print_verdict,
    say,
    write_results,
)

COUNTS = ("allocated", "resident")
PHASES = {
    "model": "building the model",
    "step": "making the step method",
    "order": "putting the rows into a new random order",
    "draws": "drawing with it alone",
    "sample": "the same with pm.sample, which puts observed data into the trace",
}
LIMIT = 1.0
TOLERANCE = 0.02
"""For what does not grow with the data, in units of them."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the data, N")
    parser.add_argument("--features", type=int, default=50, help="coefficients, p")
    parser.add_argument("--batch", type=int, default=500, help="minibatch size, n")
    parser.add_argument("--dtype", default="float64", choices=DTYPES)
    parser.add_argument("--draws", type=int, default=2_000)
    parser.add_argument("--thin", type=int, default=5, help="transitions a draw")
    parser.add_argument(
        "--models", nargs="+", default=["minibatch"], choices=("minibatch", "ordinary")
    )
    parser.add_argument(
        "--settings",
        nargs="+",
        default=["computed"],
        choices=("given", "computed"),
        help="step size and centre given, or computed by the step method",
    )
    return parser.parse_args(arguments)


def measure(
    count: str,
    method: str,
    kind: str,
    computed: bool,
    rows: int,
    features: int,
    batch: int,
    dtype: str,
    draws: int,
    thin: int,
) -> dict[str, Any]:
    """Build a model, make a step and sample, in this process, which does nothing else."""
    import numpy as np
    import pymc as pm
    from common.memory import Phases
    from common.model import build_model, make_step
    from common.problem import make_problem, step_size

    def run(rows: int, draws: int, phases: Phases) -> tuple[Any, Any]:
        problem = make_problem(rows, features, dtype)
        given: dict[str, Any] = {}
        if not computed:
            given["step_size"] = step_size(problem, batch)
            given["preconditioner"] = "identity"
            if method == "sgld-cv":
                given["center"] = problem.mode
        with phases.phase("model"):
            model = build_model(problem, batch, kind)
        with phases.phase("step"):
            step = make_step(model, method, batch, thin=thin, **given)
        with phases.phase("order"):
            step.batching.set_order(1)
        with phases.phase("draws"):
            step.setup_chain(np.random.default_rng(1), 0, draws)
            point = model.initial_point()
            for _ in range(draws):
                point, _ = step.step(point)
        with phases.phase("sample"):
            trace = pm.sample(
                model=model,
                step=step,
                draws=draws,
                tune=0,
                chains=1,
                cores=1,
                random_seed=1,
                compute_convergence_checks=False,
                progressbar=False,
                quiet=True,
            )
        return step, (problem.design.nbytes + problem.response.nbytes, trace)

    # What is imported and compiled stays in memory; a small run first takes it out of the count.
    run(max(2_000, 4 * batch), 10, Phases("resident"))
    phases = Phases(count)
    step, (data_bytes, trace) = run(rows, draws, phases)
    buffers = [shared.get_value(borrow=True) for shared in step.batching._shared]
    of_data = len(step.posterior.data)
    return {
        "method": method,
        "model": kind,
        "computed": computed,
        "count": count,
        "data_bytes": data_bytes,
        "copy_bytes": sum(values.nbytes for values in buffers[:of_data]),
        "column_bytes": sum(values.nbytes for values in buffers[of_data:]),
        "trace_bytes": int(trace.nbytes),
        "phases": phases.found,
    }


def table_row(result: dict[str, Any]) -> list[Any]:
    """Cells of one result: memory in units of the data's, traces in megabytes."""
    data = result["data_bytes"]
    cells = [
        result["method"],
        result["model"],
        "computed" if result["computed"] else "given",
        result["count"],
        data / 1e6,
        result["copy_bytes"] / data,
        result["column_bytes"] / data,
    ]
    for phase in PHASES:
        found = result["phases"][phase]
        cells.append(f"{found['held'] / data:.3f} ({found['peak'] / data:.3f})")
    cells.append(f"{result['trace_bytes'] / data:.3f}")
    return cells


def extra_memory(result: dict[str, Any]) -> tuple[float, float]:
    """What the step method holds beside data and model, and its peak, in units of the data's."""
    step = result["phases"]["step"]
    later = max(result["phases"][name]["peak"] for name in ("order", "draws"))
    data = result["data_bytes"]
    return step["held"] / data, max(step["peak"], step["held"] + later) / data


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; 1 where a figure is over its limit."""
    settings = parse_arguments(arguments)
    core = restrict_to_one_core(settings.core)
    results = []
    for kind in settings.models:
        for method in METHODS:
            for computed in (choice == "computed" for choice in settings.settings):
                for count in COUNTS:
                    say(f"{method}, {kind}, {'computed' if computed else 'given'}, {count}")
                    results.append(
                        run_in_fresh_process(
                            "memory:measure",
                            count=count,
                            method=method,
                            kind=kind,
                            computed=computed,
                            **{
                                name: getattr(settings, name)
                                for name in ("rows", "features", "batch", "dtype", "draws", "thin")
                            },
                        )
                    )
                    write_results(settings.output, "memory", settings, core, results)
    print_table(
        f"Memory in units of the data's, N = {settings.rows}, p = {settings.features}, "
        f"n = {settings.batch}, {settings.dtype}, {settings.draws} draws",
        ["method", "model", "settings", "count", "data MB", "copy", "columns", *PHASES, "trace"],
        [table_row(result) for result in results],
    )
    for phase, meaning in PHASES.items():
        print(f"{phase}: held after (peak while) {meaning}")
    reached = []
    for result in results:
        name = f"{result['method']}, {result['model']}, {result['count']}"
        held, peak = extra_memory(result)
        for what, figure in (("held", held), ("peak", peak)):
            what = f"{name}: {what} beside the data"
            reached.append(print_verdict(what, figure, LIMIT + TOLERANCE, "× the data"))
    return 0 if all(reached) else 1


if __name__ == "__main__":
    sys.exit(main())
