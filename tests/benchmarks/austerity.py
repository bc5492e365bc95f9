"""Bias and rows read of austerity Metropolis-Hastings, by its error.

A logistic regression of 10 000 rows and three coefficients. The reference is the same chain with
all rows in each decision.

Run ``python tests/benchmarks/austerity.py``.
"""

from __future__ import annotations

import time

import numpy as np
import pymc as pm

from pymc_sgmcmc import AusterityMH
from tests.support.models import logistic_model

ERRORS = (0.0, 0.001, 0.01, 0.05, 0.1, 0.2)
CHAINS, DRAWS = 4, 3000


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


def main() -> None:
    model = logistic_model(n_rows=10_000)
    print("| error | rows read of 10 000 | standard deviations | standard error | ms a draw |")
    print("| --- | --- | --- | --- | --- |")
    for error in ERRORS:
        step = AusterityMH(error=error, model=model)
        start = time.process_time()
        draws, rows = moments_of(step, model)
        seconds = time.process_time() - start
        batches = draws.reshape(CHAINS * 10, -1, draws.shape[-1])
        variances = ((batches - draws.mean((0, 1))) ** 2).mean(1)
        ratio = np.sqrt(variances.mean(0))
        standard_error = (variances.std(0, ddof=1) / np.sqrt(len(batches)) / 2 / ratio).max()
        shown = ", ".join(f"{value:.2f}" for value in ratio)
        milliseconds = 1e3 * seconds / (CHAINS * DRAWS)
        print(f"| {error} | {rows:.0f} | {shown} | {standard_error:.3f} | {milliseconds:.2f} |")


if __name__ == "__main__":
    main()
