"""Seconds of the set-up of ``SGLDCV()``, of regressions and of models with effects of groups.

Examples
--------
::

    python tests/benchmarks/set_up.py
    python tests/benchmarks/set_up.py --rows 100000 --models --rounds 5
    python tests/benchmarks/set_up.py --markdown docs/tables/set_up.txt

``README.md`` beside this file says how to read the figures.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pymc as pm
from common.child import run_in_fresh_process
from common.machine import restrict_to_one_core
from common.markdown import write_tables
from common.program import make_parser, print_table, print_verdict, say, write_results

from pymc_sgmcmc import SGLDCV
from tests.accuracy.posteriors import linear_mixed

LIMITS = {10**5: 1.0, 10**6: 2.5, 10**7: 11.0}
"""Seconds of a regression, by its number of rows."""
GROUPED = {
    "linear, intercepts and slopes": ("linear", 100),
    "logistic, intercepts": ("logistic", 200),
    "logistic, intercepts and slopes": ("logistic", 100),
    "Poisson, intercepts and slopes": ("poisson", 100),
    "negative binomial, intercepts and slopes": ("negative_binomial", 100),
}
"""Kind of the outcomes and number of groups of models with about 205 coordinates and 10⁵ rows."""
LIMIT_OF_GROUPED = 5.0
"""Seconds of a model with effects of groups."""
COLUMNS = ["model", "rows", "coordinates", "passes", "s, first of a process", "s, after it"]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=list(LIMITS), help="of regressions")
    parser.add_argument("--features", type=int, default=20, help="coefficients of a regression")
    parser.add_argument(
        "--models", nargs="*", default=list(GROUPED), choices=GROUPED, help="with effects of groups"
    )
    parser.add_argument("--markdown", type=Path, help="file for the table of the documentation")
    parser.add_argument("--rounds", type=int, default=3, help="set-ups after the first one")
    return parser.parse_args(arguments)


def regression(rows: int, features: int) -> pm.Model:
    """A logistic regression."""
    rng = np.random.default_rng(1)
    X = rng.normal(size=(rows, features))
    y = rng.random(rows) < 1 / (1 + np.exp(-X @ rng.normal(scale=0.3, size=features)))
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 10, shape=features)
        pm.Bernoulli("y", logit_p=X @ beta, observed=y)
    return model


def grouped(name: str) -> pm.Model:
    """A model with centred effects of groups."""
    kind, groups = GROUPED[name]
    if kind == "linear":
        return linear_mixed(Path())
    rng = np.random.default_rng(4)
    group = np.repeat(np.arange(groups), 10**5 // groups)
    x = rng.normal(size=len(group))
    true = rng.normal(0.5, 0.6, groups)[group]
    with pm.Model() as model:
        mean, sd = pm.Normal("mean", 0, 2), pm.HalfNormal("sd", 1)
        predictor = pm.Normal("intercept", mean, sd, shape=groups)[group]
        if "slopes" in name:
            true += rng.normal(0.3, 0.3, groups)[group] * x
            slope, slope_sd = pm.Normal("slope", 0, 2), pm.HalfNormal("slope_sd", 1)
            predictor += pm.Normal("slopes", slope, slope_sd, shape=groups)[group] * x
        if kind == "logistic":
            y = rng.random(len(x)) < 1 / (1 + np.exp(-true))
            pm.Bernoulli("y", logit_p=predictor, observed=y)
        elif kind == "poisson":
            pm.Poisson("y", pm.math.exp(predictor), observed=rng.poisson(np.exp(true)))
        else:
            alpha, rate = pm.HalfNormal("alpha", 5), rng.gamma(3, np.exp(true) / 3)
            pm.NegativeBinomial(
                "y", mu=pm.math.exp(predictor), alpha=alpha, observed=rng.poisson(rate)
            )
    return model


def measure(name: str, rows: int, features: int, rounds: int) -> dict[str, Any]:
    """Passes of a set-up, and processor seconds of the first one and of the best one after it."""
    taken = []
    for _ in range(1 + rounds):
        model = grouped(name) if name in GROUPED else regression(rows, features)
        began = time.process_time()
        step = SGLDCV(model=model)
        taken.append(time.process_time() - began)
    return {
        "rows": rows,
        "coordinates": step.posterior.dimension,
        "passes": round(step.posterior.rows_evaluated / rows, 1),
        "first": taken[0],
        "best": min(taken[1:]),
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; 1 where a figure is over its limit."""
    settings = parse_arguments(arguments)
    core = restrict_to_one_core(settings.core)
    results = []
    models = [(f"logistic regression, p = {settings.features}", rows) for rows in settings.rows]
    for name, rows in models + [(name, 10**5) for name in settings.models]:
        say(f"{name}, N = {rows}")
        # The first process fills the compile caches.
        for _ in range(2):
            result = run_in_fresh_process(
                "set_up:measure",
                name=name,
                rows=rows,
                features=settings.features,
                rounds=settings.rounds,
            )
        results.append({"model": name, **result})
        write_results(settings.output, "set_up", settings, core, results)
    lines = [list(result.values()) for result in results]
    print_table("Processor seconds of a set-up", COLUMNS, lines)
    if settings.markdown:
        command = f"tests/benchmarks/set_up.py --rounds {settings.rounds}"
        write_tables(settings.markdown, [(COLUMNS, lines)], command)
    reached = [
        print_verdict(f"{one['model']}, N = {one['rows']}", one["best"], limit, "s")
        for one in results
        for limit in [LIMIT_OF_GROUPED if one["model"] in GROUPED else LIMITS.get(one["rows"])]
        if limit is not None
    ]
    return 0 if all(reached) else 1


if __name__ == "__main__":
    sys.exit(main())
