"""Logistic random intercepts with more and more groups: set-up, transitions, and effective draws.

Examples
--------
::

    python tests/benchmarks/groups.py --markdown docs/tables/groups.txt
    python tests/benchmarks/groups.py --groups 1000 --large 3000 --nuts --nutpie --local
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

from common.clocks import nutpie_chain, slope, timed_draws
from common.peers import python_of
from common.runner import Result, Table, Verdict, attempt, run

NAMES = ["intercept", "slopes", "sd"]
SLOPE_LIMIT = 0.05
RECOVERED = 2000
"""Draws for which effects are drawn."""
MOST_RECOVERED = 10_000
"""Draws for more groups than this would take gigabytes, and minutes in proportion."""
SHOWN = {
    "ours": "`marginalize`, `SGLDCV()`",
    "euler": '`marginalize`, `SGLDCV(gradient="cv", integrator="euler")`',
    "local": '`SGLDCV(gradient=LocalSampling("z"))`',
    "nuts": "NUTS of PyMC",
    "nutpie": "nutpie",
}
OPTIONS = {
    "groups": ((1000, 10_000, 100_000, 1_000_000),),
    "records": ((10, 67), "of a group, and of a large one"),
    "large": ((300, 3000), "numbers of large groups"),
    "euler": ((1000,), "for Euler's scheme and first order"),
    "nuts": ((1000, 10_000), "for NUTS"),
    "nutpie": ((1000, 10_000), "for nutpie"),
    "local": ((1000,), "for `LocalSampling`"),
    "draws": (20_000, "draws of a chain"),
    "seconds": (600.0, "NUTS is stopped after so many"),
}
COLUMNS = {
    "groups": "groups",
    "records of each": "records",
    "sampler": lambda r: SHOWN[r["method"]],
    "set-up, s": "set_up",
    "`recover`, s": "recover",
    "transition, µs": "transition",
    "groups a minibatch": "batch_size",
    "ESS/s": "ess_per_second",
}


def rate(idata: Any, seconds: float) -> float:
    """Effective draws a second of the worst global variable."""
    import arviz as az
    import numpy as np

    effective = az.ess(idata, var_names=NAMES)
    return float(min(np.min(effective[name].values) for name in NAMES)) / seconds


def measure(method: str, groups: int, records: int, draws: int) -> Result:
    """Processor seconds; all before the first draw that is kept, warm-up too, counts as set-up."""
    from common.hierarchical import intercepts

    model = intercepts(groups, records)
    before = time.process_time()
    found = globals()[f"run_{method}"](model, draws)
    idata, sampling = found.pop("idata"), found.pop("sampling")
    found.setdefault("set_up", found.pop("until", 0.0) - before - sampling)
    about = {"method": method, "groups": groups, "records": records, "batch_size": groups}
    return {**about, **found, "ess_per_second": rate(idata, sampling)}


def of_step(step: Any, idata: Any, sampling: float) -> Result:
    """What both ways of this package have."""
    return {
        "until": time.process_time(),
        "idata": idata,
        "sampling": sampling,
        "transition": sampling / int(idata.sample_stats["n_steps"].sum()) * 1e6,
        "batch_size": step.batch_size,
    }


def run_ours(model: Any, draws: int) -> Result:
    """`marginalize` and `SGLDCV()`; `recover` is timed beside it."""
    from pymc_sgmcmc import SGLDCV
    from pymc_sgmcmc.marginal import marginalize, recover

    with marginalize(model, "z"):
        step = SGLDCV()
        found = of_step(step, *timed_draws(step, draws, 500, chains=1))
    if model.initial_point()["z"].size <= MOST_RECOVERED:
        before = time.process_time()
        few = found["idata"].isel(draw=slice(RECOVERED), missing_dims="ignore")
        recover(few, model, "z", random_seed=1, progressbar=False)
        found["recover"] = time.process_time() - before
    return found


def run_euler(model: Any, draws: int) -> Result:
    """`marginalize` and the algorithm of Baker et al. as they print it."""
    from pymc_sgmcmc import SGLDCV
    from pymc_sgmcmc.marginal import marginalize

    with marginalize(model, "z"):
        step = SGLDCV(gradient="cv", integrator="euler")
        return of_step(step, *timed_draws(step, draws, 500, chains=1))


def run_local(model: Any, draws: int) -> Result:
    """`SGLDCV(gradient=LocalSampling(...))`, which samples the intercepts by Fisher's identity."""
    from pymc_sgmcmc import SGLDCV, LocalSampling

    with model:
        step = SGLDCV(gradient=LocalSampling("z"))
        return of_step(step, *timed_draws(step, draws // 10, 500, chains=1, var_names=NAMES))


def run_nutpie(model: Any, draws: int) -> Result:
    """nutpie on the joint model."""
    import nutpie

    before = time.process_time()
    compiled = nutpie.compile_pymc_model(model)
    compilation = time.process_time() - before
    idata, warm_up, sampling = nutpie_chain(compiled, 500, 500, seed=1)
    return {"idata": idata, "sampling": sampling, "set_up": compilation + warm_up}


def run_nuts(model: Any, draws: int) -> Result:
    """PyMC's NUTS on the joint model."""
    import pymc as pm

    with model:
        idata = pm.sample(draws=500, tune=500, chains=1, progressbar=False, random_seed=1)
    sampling = float(idata.sample_stats["perf_counter_diff"].values.sum())
    return {"idata": idata, "sampling": sampling, "until": time.process_time()}


def results(settings: Any) -> Iterator[Result]:
    """By method and number of groups."""
    few, many = settings.records
    contenders = [
        ("ours", few, settings.groups),
        ("ours", many, settings.large),
        ("euler", few, settings.euler),
        ("euler", many, settings.large[:1]),
        ("local", few, settings.local),
        ("nuts", few, settings.nuts),
        ("nutpie", few, settings.nutpie),
    ]
    for method, records, sizes in contenders:
        for groups in sizes:
            given = {"method": method, "groups": groups, "records": records}
            given["draws"] = settings.draws
            if method == "nutpie":
                given["python"] = python_of(method)
            if method.startswith("nut"):
                given["limit"] = settings.seconds
            elif groups == sizes[0]:  # It fills the compile caches.
                attempt(measure, **given)
            found = attempt(measure, **given)
            if found is not None:
                yield found


def verdicts(found: list[Result]) -> Iterator[Verdict]:
    """How the cost of a draw grows."""
    ours = [r for r in found if r["method"] == "ours" and r["records"] == found[0]["records"]]
    if len(ours) > 1:
        costs = [1 / r["ess_per_second"] for r in ours]
        growth = slope([r["groups"] for r in ours], costs)
        yield Verdict("log-log slope of seconds a draw over groups", growth, SLOPE_LIMIT)


TABLES = [Table("Logistic random intercepts, processor time of one core", COLUMNS)]

if __name__ == "__main__":
    sys.exit(run(__doc__, results, TABLES, OPTIONS, verdicts))
