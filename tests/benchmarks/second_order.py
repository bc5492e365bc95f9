"""Effective draws of each sampler with control variates of first and of second order, and errors.

::

    python tests/benchmarks/second_order.py --markdown docs/tables/second_order.txt

``README.md`` beside this file says how to read the figures.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from common.child import run_in_fresh_process
from common.machine import restrict_to_one_core
from common.markdown import write_tables
from common.program import make_parser, print_table, say, write_results

GRADIENTS = {
    "SGLDCV": ("cv", "second_order"),
    "SGHMC": ("cv", "second_order"),
    "SGNHT": ("cv", "second_order"),
    "OSGFS": ("plain", "cv", "second_order"),
    "PSGLD": ("cv", "second_order"),
    "HAMCMC": ("cv", "second_order"),
}
SKEWED = "logistic, 40 events"
POSTERIORS = {"logistic, 10⁵ rows, 20 coefficients": None, "40 events in 10⁴ rows": SKEWED}
"""Posteriors by their names in the table; the second is a model of ``why_not_laplace.py``."""
COLUMNS = [
    "posterior", "sampler", "`gradient=`", "rows a minibatch", "transitions a draw", "set-up, s",
    "ESS/s", "sd ratio", "mean error",
]  # fmt: skip


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--samplers", nargs="+", default=list(GRADIENTS), choices=GRADIENTS, metavar="NAME"
    )
    parser.add_argument("--draws", type=int, default=20_000)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of one process")
    parser.add_argument("--markdown", type=Path, help="file for the table of the documentation")
    return parser.parse_args(arguments)


def make(posterior: str) -> Any:
    """The model."""
    if POSTERIORS[posterior] is not None:
        from laplace_benchmark.models import build

        return build(SKEWED, 10_000)
    from common.model import build_model
    from common.problem import make_problem

    return build_model(make_problem(100_000, 20, "float64"), 0, "ordinary")


def truth_of(posterior: str) -> dict[str, Any]:
    """Means and standard deviations: exact where it is skewed, and Laplace's where it is not."""
    if POSTERIORS[posterior] is not None:
        from laplace_benchmark.contenders import reference

        found = reference(SKEWED, 10_000, 32_768)
        return {key: found[key].tolist() for key in ("mean", "sd")}
    from common.problem import make_problem

    problem = make_problem(100_000, 20, "float64")
    sd = np.sqrt(np.diag(np.linalg.inv(problem.curvature)))
    return {"mean": problem.mode.tolist(), "sd": sd.tolist()}


def measure(
    posterior: str, sampler: str, gradient: str, draws: int, truth: dict[str, Any]
) -> dict[str, Any]:
    """Set up, run once to compile, and time the draws of one chain."""
    import logging
    import warnings

    from common.errors import errors_of_draws

    import pymc_sgmcmc

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with make(posterior):
        began = time.process_time()
        step = getattr(pymc_sgmcmc, sampler)(gradient=gradient)
        set_up = time.process_time() - began
        shared = {"step": step, "chains": 1, "progressbar": False, "random_seed": 1}
        pymc_sgmcmc.sample(100, compute_convergence_checks=False, **shared)
        began = time.process_time()
        idata = pymc_sgmcmc.sample(draws, compute_convergence_checks=False, **shared)
        seconds = time.process_time() - began
    positions = idata["sample_stats"]["position"].values
    errors = errors_of_draws(positions, np.array(truth["mean"]), np.array(truth["sd"]))
    return {
        "batch": int(step.batch_size),
        "thin": int(idata["sample_stats"].attrs["sgmcmc_thin"]),
        "set_up": set_up,
        "rate": errors["ess"] / seconds,
        "sd_ratio": f"{errors['sd_ratio']:.3f}",
        "mean_error": errors["mean_error"],
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark."""
    settings = parse_arguments(arguments)
    core = restrict_to_one_core(settings.core)
    results: list[dict[str, Any]] = []
    for posterior in POSTERIORS:
        truth = run_in_fresh_process("second_order:truth_of", posterior=posterior)
        for sampler in settings.samplers:
            for gradient in GRADIENTS[sampler]:
                key = {"posterior": posterior, "sampler": sampler, "gradient": gradient}
                try:
                    found = run_in_fresh_process(
                        "second_order:measure",
                        limit=settings.limit,
                        draws=settings.draws,
                        truth=truth,
                        **key,
                    )
                except Exception as error:
                    say(f"{key}: {type(error).__name__}: {str(error)[-300:]}")
                    continue
                results.append(key | found)
                say(str(results[-1]))
                write_results(settings.output, "second_order", settings, core, results)
    lines = [
        [line[0], f"`{line[1]}`", f'`"{line[2]}"`', *line[3:]]
        for line in (list(result.values()) for result in results)
    ]
    print_table("One chain on one core, processor time", COLUMNS, lines)
    if settings.markdown is not None:
        write_tables(settings.markdown, [(COLUMNS, lines)], "tests/benchmarks/second_order.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
