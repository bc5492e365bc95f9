"""Time of `polish` on logistic regression with many rows, by threads.

Examples
--------
::

    python tests/benchmarks/polish.py
    python tests/benchmarks/polish.py --rows 100000 --threads 1

``README.md`` beside this file says how to read the figures.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from common.child import run_in_fresh_process
from common.program import make_parser, print_table, print_verdict, say, write_results

SECONDS = 60.0
"""Limit of the wall time with two threads or more."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--coefficients", type=int, default=20)
    parser.add_argument("--draws", type=int, default=200, help="exact chains")
    parser.add_argument("--threads", type=int, nargs="+", default=[2])
    return parser.parse_args(arguments)


def measure(rows: int, coefficients: int, draws: int, threads: int) -> dict[str, Any]:
    """Polish a run that is right, in this process, which does nothing else."""
    import numpy as np
    import pymc as pm
    import xarray as xr
    from common.timing import timed

    from pymc_sgmcmc import polish

    rng = np.random.default_rng(1)
    X = rng.normal(size=(rows, coefficients))
    y = rng.random(rows) < 1 / (1 + np.exp(-X @ rng.normal(size=coefficients) / 3))
    mode, spread = nearest_gaussian(X, y)
    simulated = mode + rng.normal(size=(4, 1000, coefficients)) @ spread.T
    arrays = {"beta": (("chain", "draw", "beta_dim_0"), simulated)}
    idata = xr.DataTree.from_dict({"posterior": xr.Dataset(arrays)})
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 2, shape=coefficients)
        pm.Bernoulli("y", logit_p=X @ beta, observed=y.astype("int8"))
    polished, seconds = timed(
        polish, idata, model, draws, random_seed=1, cores=threads, progressbar=False
    )
    return {
        "threads": threads,
        "wall_seconds": seconds.wall,
        "cpu_seconds": seconds.cpu,
        "passes": polished.passes,
        "verdict": polished.verdict,
    }


def nearest_gaussian(X: Any, y: Any) -> tuple[Any, Any]:
    """Mode of the logistic regression, and a root of the inverse curvature, by Newton's method."""
    import numpy as np

    mode, prior = np.zeros(X.shape[1]), np.eye(X.shape[1]) / 4
    for _ in range(20):
        mean = 1 / (1 + np.exp(-X @ mode))
        curvature = (X * (mean * (1 - mean))[:, None]).T @ X + prior
        mode = mode + np.linalg.solve(curvature, X.T @ (y - mean) - prior @ mode)
    return mode, np.linalg.cholesky(np.linalg.inv(curvature))


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; 1 where a figure is over its limit."""
    settings = parse_arguments(arguments)
    results = []
    for threads in settings.threads:
        say(f"{threads} threads")
        results.append(
            run_in_fresh_process(
                "polish:measure",
                rows=settings.rows,
                coefficients=settings.coefficients,
                draws=settings.draws,
                threads=threads,
            )
        )
        write_results(settings.output, "polish", settings, settings.core, results)
    columns = ["threads", "wall_seconds", "cpu_seconds", "passes", "verdict"]
    print_table(
        f"N = {settings.rows}, p = {settings.coefficients}, {settings.draws} exact chains",
        ["threads", "wall s", "cpu s", "passes", "verdict"],
        [[result[column] for column in columns] for result in results],
    )
    reached = [
        print_verdict(f"{result['threads']} threads", result["wall_seconds"], SECONDS, "s")
        for result in results
        if result["threads"] > 1
    ]
    return 0 if all(reached) else 1


if __name__ == "__main__":
    sys.exit(main())
