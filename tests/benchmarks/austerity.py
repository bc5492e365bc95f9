"""Bias and rows read of austerity Metropolis-Hastings, by its error.

A logistic regression of 10 000 rows and three coefficients. The reference is the same chain with
all rows in each decision.

Examples
--------
::

    python tests/benchmarks/austerity.py --markdown docs/tables/austerity.txt
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import pymc as pm
from common.machine import restrict_to_one_core
from common.markdown import write_tables
from common.program import make_parser, print_table, write_results

from pymc_sgmcmc import AusterityMH
from tests.support.models import logistic_model

ERRORS = (0.0, 0.001, 0.01, 0.05, 0.1, 0.2)
CHAINS, DRAWS = 4, 3000
COLUMNS = ["`error`", "rows read", "relative standard deviations", "standard error", "ms a draw"]


def moments_of(step: AusterityMH, model: pm.Model):
    """Draws in units of the standard deviations at the centre, and rows read, by chain."""
    positions, rows = [], []
    for seed in range(CHAINS):
        step.setup_chain(np.random.default_rng(seed), 0, DRAWS)
        point = model.initial_point()
        for _ in range(DRAWS):
            point, (stats,) = step.step(point)
            positions.append(point["beta"])
            rows.append(stats["rows_read"])
    center = step.center
    scaled = (np.array(positions) - center.position) / center.curvature.standard_deviations
    return scaled.reshape(CHAINS, DRAWS, -1), float(np.mean(rows))


def measured(error: float, model: pm.Model) -> list[object]:
    """A row of the table."""
    step = AusterityMH(error=error, model=model)
    start = time.process_time()
    draws, rows = moments_of(step, model)
    seconds = time.process_time() - start
    batches = draws.reshape(CHAINS * 10, -1, draws.shape[-1])
    variances = ((batches - draws.mean((0, 1))) ** 2).mean(1)
    ratio = np.sqrt(variances.mean(0))
    standard_error = float((variances.std(0, ddof=1) / np.sqrt(len(batches)) / 2 / ratio).max())
    shown = ", ".join(f"{value:.2f}" for value in ratio)
    milliseconds = 1e3 * seconds / (CHAINS * DRAWS)
    return [str(error), f"{rows:.0f}", shown, f"{standard_error:.3f}", f"{milliseconds:.2f}"]


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = make_parser(__doc__)
    parser.add_argument("--markdown", type=Path, help="file for the table of the documentation")
    settings = parser.parse_args(arguments)
    core = restrict_to_one_core(settings.core)
    model = logistic_model(n_rows=10_000)
    rows = [measured(error, model) for error in ERRORS]
    print_table("Austerity Metropolis-Hastings, 10 000 rows", COLUMNS, rows)
    results = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
    write_results(settings.output, "austerity", settings, core, results)
    if settings.markdown is not None:
        write_tables(settings.markdown, [(COLUMNS, rows)], "tests/benchmarks/austerity.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
