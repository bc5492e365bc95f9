"""Seconds of the set-up of ``SGLDCV()``, of regressions and of a mixed model.

Examples
--------
::

    python tests/benchmarks/set_up.py
    python tests/benchmarks/set_up.py --rows 100000 --rounds 5

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

LIMITS = {10**5: 1.0, 10**6: 2.5, 10**7: 15.0}
"""Seconds of a regression, by its number of rows."""
LIMIT_OF_MIXED = 5.0
"""Seconds of a mixed model with 205 coordinates and 10⁵ rows."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=list(LIMITS), help="of regressions")
    parser.add_argument("--features", type=int, default=20, help="coefficients of a regression")
    parser.add_argument("--rounds", type=int, default=3, help="set-ups after the first one")
    return parser.parse_args(arguments)


def measure(rows: int | None, features: int, rounds: int) -> dict[str, Any]:
    """Processor seconds of the first set-up of this process, and of the best one after it.

    Without rows the model is the mixed one.
    """
    import time

    import numpy as np
    import pymc as pm

    from pymc_sgmcmc import SGLDCV
    from tests.accuracy.posteriors import linear_mixed

    def regression() -> pm.Model:
        rng = np.random.default_rng(1)
        X = rng.normal(size=(rows, features))
        y = rng.random(rows) < 1 / (1 + np.exp(-X @ rng.normal(scale=0.3, size=features)))
        with pm.Model() as model:
            beta = pm.Normal("beta", 0, 10, shape=features)
            pm.Bernoulli("y", logit_p=X @ beta, observed=y)
        return model

    taken = []
    for _ in range(1 + rounds):
        model = linear_mixed(Path()) if rows is None else regression()
        began = time.process_time()
        SGLDCV(model=model)
        taken.append(time.process_time() - began)
    return {"rows": rows or 10**5, "first": taken[0], "best": min(taken[1:])}


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; 1 where a figure is over its limit."""
    settings = parse_arguments(arguments)
    core = restrict_to_one_core(settings.core)
    results = []
    for rows in (*settings.rows, None):
        name = "mixed model, d = 205" if rows is None else f"regression, p = {settings.features}"
        say(f"{name}, N = {rows or 10**5}")
        # The first process fills the compile caches.
        for _ in range(2):
            result = run_in_fresh_process(
                "set_up:measure", rows=rows, features=settings.features, rounds=settings.rounds
            )
        results.append({"model": name, **result})
        write_results(settings.output, "set_up", settings, core, results)
    print_table(
        "Processor seconds of a set-up",
        ["model", "rows", "first of a process", "after it"],
        [list(result.values()) for result in results],
    )
    reached = [
        print_verdict(f"{r['model']}, N = {r['rows']}", r["best"], limit, "s")
        for r in results
        for limit in [LIMIT_OF_MIXED if "mixed" in r["model"] else LIMITS.get(r["rows"])]
        if limit is not None
    ]
    return 0 if all(reached) else 1


if __name__ == "__main__":
    sys.exit(main())
