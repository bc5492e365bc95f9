"""Time of `polish` on logistic regression with many rows, by threads.

::

    python tests/benchmarks/polish.py --rows 100000 --threads 1
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from common.clocks import timed
from common.runner import Result, Table, Verdict, fresh, run

SECONDS = 60.0
"""Limit of the wall time with two threads or more."""
OPTIONS = {
    "rows": (1_000_000,),
    "coefficients": (20,),
    "draws": (200, "exact chains"),
    "threads": ((2,),),
}
COLUMNS = {
    "threads": "threads",
    "wall s": "wall_seconds",
    "cpu s": "cpu_seconds",
    "passes": "passes",
    "verdict": "verdict",
}


def measure(rows: int, coefficients: int, draws: int, threads: int) -> Result:
    """Polish a run that is right, in this process, which does nothing else."""
    import numpy as np
    import xarray as xr
    from common.regression import build_model, make_problem

    from pymc_sgmcmc import polish

    problem, rng = make_problem(rows, coefficients), np.random.default_rng(1)
    root = np.linalg.cholesky(np.linalg.inv(problem.curvature))
    simulated = problem.mode + rng.normal(size=(4, 1000, coefficients)) @ root.T
    arrays = {"coefficients": (("chain", "draw", "coefficients_dim_0"), simulated)}
    idata = xr.DataTree.from_dict({"posterior": xr.Dataset(arrays)})
    given = {"random_seed": 1, "cores": threads, "progressbar": False}
    polished, seconds = timed(polish, idata, build_model(problem), draws, **given)
    return {
        "threads": threads,
        "wall_seconds": seconds.wall,
        "cpu_seconds": seconds.cpu,
        "passes": polished.passes,
        "verdict": polished.verdict,
    }


def results(settings: Any) -> Iterator[Result]:
    """By number of threads."""
    for threads in settings.threads:
        given = {name: getattr(settings, name) for name in ("rows", "coefficients", "draws")}
        yield fresh(measure, threads=threads, **given)


def verdicts(found: list[Result]) -> Iterator[Verdict]:
    """Wall time."""
    for result in found:
        if result["threads"] > 1:
            yield Verdict(f"{result['threads']} threads", result["wall_seconds"], SECONDS, "s")


TABLES = [Table("N = {rows}, p = {coefficients}, {draws} exact chains", COLUMNS)]

if __name__ == "__main__":
    sys.exit(run(__doc__, results, TABLES, OPTIONS, verdicts, one_core=False))
