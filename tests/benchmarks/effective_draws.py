"""Cost of 1000 effective draws with default settings as a function of the number of rows.

Examples
--------
::

    python tests/benchmarks/effective_draws.py
    python tests/benchmarks/effective_draws.py --rows 10000 100000 --plot cost.svg

``README.md`` beside this file says how to read the figures.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from common.child import run_in_fresh_process
from common.machine import restrict_to_one_core
from common.program import make_parser, print_table, print_verdict, say, write_results

ROWS = [10_000, 100_000, 1_000_000, 10_000_000]
LARGEST_SLOPE = 0.05
"""Of the logarithm of the cost over that of the number of rows."""

LARGEST_SD_ERROR = 0.05


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="rows of the data, N")
    parser.add_argument("--features", type=int, default=10, help="coefficients, p")
    parser.add_argument("--draws", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3, help="processes for each N, in turn")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="cpu")
    parser.add_argument("--mode", default="NUMBA", help="mode of PyTensor")
    parser.add_argument("--plot", type=Path, help="file of a figure")
    return parser.parse_args(arguments)


def measure(rows: int, features: int, draws: int, clock: str, mode: str) -> dict[str, float]:
    """Set up and sample in this process."""
    import numpy as np
    import pymc as pm
    from common.model import build_model
    from common.problem import make_problem
    from common.timing import best, timed

    from pymc_sgmcmc import SGLDCV, bias_report

    def seconds(function: Any, *arguments: Any, **settings: Any) -> tuple[Any, float]:
        value, found = timed(function, *arguments, **settings)
        return value, best([found], clock)

    def sample(step: Any, draws: int, tune: int) -> Any:
        return pm.sample(
            step=step, draws=draws, tune=tune, chains=1, cores=1, random_seed=1, quiet=True,
            progressbar=False, compute_convergence_checks=False,
        )  # fmt: skip

    # Loading compiled code takes the same time for all N; a small run first takes it out.
    small = build_model(make_problem(2000, features, "float64"), 100, "ordinary")
    with small:
        sample(SGLDCV(compile_kwargs={"mode": mode}), 10, 10)

    problem = make_problem(rows, features, "float64")
    model, model_seconds = seconds(build_model, problem, 100, "ordinary")
    with model:
        step, setup_seconds = seconds(SGLDCV, compile_kwargs={"mode": mode})
        sample(step, 10, 10)
        idata, sampling_seconds = seconds(sample, step, draws, 500)
    report = bias_report(idata)
    laplace_sd = np.sqrt(np.diag(np.linalg.inv(problem.curvature)))
    effective = float(report["ess_bulk"].median())
    return {
        "model_seconds": model_seconds,
        "setup_seconds": setup_seconds,
        "sampling_seconds": sampling_seconds,
        "effective": effective,
        # Tuning is part of the run, and set apart here: its length is the user's choice.
        "cost_seconds": sampling_seconds * draws / (draws + 500) * 1000 / effective,
        "batch_size": step.batch_size,
        "thin": step.thin,
        "variance_error": float(report["variance_error"].max()),
        "sd_ratio": float((report["sd"] / laplace_sd).median()),
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark."""
    settings = parse_arguments(arguments)
    core = restrict_to_one_core(settings.core)
    results: list[dict[str, Any]] = []
    for number in range(settings.rounds):
        for rows in settings.rows:
            say(f"round {number + 1}, N = {rows}")
            result = run_in_fresh_process(
                "effective_draws:measure",
                rows=rows,
                features=settings.features,
                draws=settings.draws,
                clock=settings.clock,
                mode=settings.mode,
            )
            results.append({"rows": rows, **result})
            write_results(settings.output, "effective_draws", settings, core, results)
    fastest = [
        min((one for one in results if one["rows"] == rows), key=lambda one: one["cost_seconds"])
        for rows in settings.rows
    ]
    columns = [
        "rows", "cost_seconds", "setup_seconds", "model_seconds", "batch_size", "thin", "effective",
        "sd_ratio", "variance_error",
    ]  # fmt: skip
    print_table(
        f"1000 effective draws, p = {settings.features}, {settings.clock} time",
        columns,
        [[one[name] for name in columns] for one in fastest],
    )
    if settings.plot is not None:
        draw(fastest, settings)
    import numpy as np

    slope = float(
        np.polyfit(
            np.log([one["rows"] for one in fastest]),
            np.log([one["cost_seconds"] for one in fastest]),
            1,
        )[0]
    )
    reached = print_verdict("log-log slope of the cost over N", slope, LARGEST_SLOPE, "")
    error = max(abs(one["sd_ratio"] - 1) for one in fastest)
    reached &= print_verdict("error of the standard deviations", error, LARGEST_SD_ERROR, "")
    return 0 if reached else 1


def draw(fastest: list[dict[str, Any]], settings: argparse.Namespace) -> None:
    """Figure of cost and set-up over the number of rows."""
    import matplotlib.pyplot as plt

    rows = [one["rows"] for one in fastest]
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    axes.loglog(rows, [one["cost_seconds"] for one in fastest], "o-", label="1000 effective draws")
    axes.loglog(
        rows, [one["setup_seconds"] for one in fastest], "s--", label="set-up: centre, curvature"
    )
    axes.set_xlabel("rows of the data, $N$")
    axes.set_ylabel(f"seconds of {settings.clock} time, one core")
    axes.set_title(f"SGLDCV(), logistic regression with {settings.features} coefficients")
    axes.legend()
    figure.savefig(settings.plot, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
