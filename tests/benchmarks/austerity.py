"""Bias and rows read of austerity Metropolis-Hastings, by its error.

A logistic regression of 10 000 rows and three coefficients. The reference is the same chain with
all rows in each decision.

::

    python tests/benchmarks/austerity.py --markdown docs/tables/austerity.txt
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

from common.runner import Result, Table, run

CHAINS = 4
OPTIONS = {
    "errors": ((0.0, 0.001, 0.01, 0.05, 0.1, 0.2),),
    "draws": (3000, f"of each of {CHAINS} chains"),
}
COLUMNS = {
    "`error`": "error",
    "rows read": lambda r: f"{r['rows']:.0f}",
    "relative standard deviations": lambda r: ", ".join(f"{each:.2f}" for each in r["ratios"]),
    "standard error": lambda r: f"{r['standard_error']:.3f}",
    "ms a draw": lambda r: f"{r['milliseconds']:.2f}",
}


def results(settings: Any) -> Iterator[Result]:
    """Draws in units of the standard deviations at the centre, and rows read, by error."""
    import numpy as np

    from pymc_sgmcmc import AusterityMH
    from tests.support.models import logistic_model

    model, draws = logistic_model(n_rows=10_000), settings.draws
    for error in settings.errors:
        step, positions, rows = AusterityMH(error=error, model=model), [], []
        start = time.process_time()
        for seed in range(CHAINS):
            step.setup_chain(np.random.default_rng(seed), 0, draws)
            point = model.initial_point()
            for _ in range(draws):
                point, (stats,) = step.step(point)
                positions.append(point["beta"])
                rows.append(stats["rows_read"])
        seconds = time.process_time() - start
        scaled = np.array(positions) - step.center.position
        scaled /= step.center.curvature.standard_deviations
        # Of each chain ten batches, whose spread shows the standard error.
        batches = scaled.reshape(CHAINS * 10, -1, scaled.shape[-1])
        variances = ((batches - scaled.mean(0)) ** 2).mean(1)
        ratio = np.sqrt(variances.mean(0))
        spread = variances.std(0, ddof=1) / np.sqrt(len(batches)) / 2 / ratio
        yield {
            "error": str(error),
            "rows": float(np.mean(rows)),
            "ratios": ratio.tolist(),
            "standard_error": float(spread.max()),
            "milliseconds": 1e3 * seconds / (CHAINS * draws),
        }


TABLES = [Table("Austerity Metropolis-Hastings, 10 000 rows", COLUMNS)]

if __name__ == "__main__":
    sys.exit(run(__doc__, results, TABLES, OPTIONS))
