"""Seconds of the set-up of ``SGLDCV()``, of regressions and of models with effects of groups.

Examples
--------
::

    python tests/benchmarks/set_up.py --rows 100000 --models --rounds 5
    python tests/benchmarks/set_up.py --rounds 2 --markdown docs/tables/set_up.txt
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.runner import Result, Table, Verdict, fresh, run

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
OPTIONS = {
    "rows": (tuple(LIMITS), "of regressions"),
    "features": (20, "coefficients of a regression"),
    "models": (tuple(GROUPED), tuple(GROUPED), "with effects of groups"),
    "rounds": (3, "set-ups after the first one"),
}
COLUMNS = {
    "model": "model",
    "rows": "rows",
    "coordinates": "coordinates",
    "passes": "passes",
    "s, first of a process": "first",
    "s, after it": "best",
}


def regression(rows: int, features: int) -> Any:
    """A logistic regression."""
    import numpy as np
    import pymc as pm

    rng = np.random.default_rng(1)
    X = rng.normal(size=(rows, features))
    y = rng.random(rows) < 1 / (1 + np.exp(-X @ rng.normal(scale=0.3, size=features)))
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 10, shape=features)
        pm.Bernoulli("y", logit_p=X @ beta, observed=y)
    return model


def grouped(name: str) -> Any:
    """A model with centred effects of groups."""
    import numpy as np
    import pymc as pm

    from tests.accuracy.posteriors import linear_mixed

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
            mu = pm.math.exp(predictor)
            pm.NegativeBinomial("y", mu=mu, alpha=alpha, observed=rng.poisson(rate))
    return model


def measure(name: str, rows: int, features: int, rounds: int) -> Result:
    """Passes of a set-up, and processor seconds of the first one and of the best one after it."""
    from pymc_sgmcmc import SGLDCV

    taken = []
    for _ in range(1 + rounds):
        model = grouped(name) if name in GROUPED else regression(rows, features)
        began = time.process_time()
        step = SGLDCV(model=model)
        taken.append(time.process_time() - began)
    return {
        "model": name,
        "rows": rows,
        "coordinates": step.posterior.dimension,
        "passes": round(step.posterior.rows_evaluated / rows, 1),
        "first": taken[0],
        "best": min(taken[1:]),
    }


def results(settings: Any) -> Iterator[Result]:
    """One after the other; the first of two processes fills the compile caches."""
    regressions = f"logistic regression, p = {settings.features}"
    cases = [(regressions, rows) for rows in settings.rows]
    for name, rows in cases + [(name, 10**5) for name in settings.models]:
        given = {"features": settings.features, "rounds": settings.rounds}
        fresh(measure, name=name, rows=rows, **given)
        yield fresh(measure, name=name, rows=rows, **given)


def verdicts(found: list[Result]) -> Iterator[Verdict]:
    """Seconds of the best set-up."""
    for one in found:
        limit = LIMIT_OF_GROUPED if one["model"] in GROUPED else LIMITS.get(one["rows"])
        if limit is not None:
            yield Verdict(f"{one['model']}, N = {one['rows']}", one["best"], limit, "s")


TABLES = [Table("Processor seconds of a set-up", COLUMNS)]

if __name__ == "__main__":
    sys.exit(run(__doc__, results, TABLES, OPTIONS, verdicts))
