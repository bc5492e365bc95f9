"""Logistic random intercepts with more and more groups: set-up, transitions, and effective draws.

Examples
--------
::

    python tests/benchmarks/groups.py
    python tests/benchmarks/groups.py --groups 1000 10000 --nuts 1000
    python tests/benchmarks/groups.py --groups 1000 --large 3000 --nuts --nutpie --local

``README.md`` beside this file says how to read the figures.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common.chains import nutpie_chain, timed_draws
from common.child import run_in_fresh_process
from common.machine import restrict_to_one_core
from common.markdown import write_tables
from common.peer_python import python_of
from common.program import make_parser, print_table, print_verdict, say, write_results

RECORDS = (10, 67)
LARGE_GROUPS = (300, 3000)
TRUTH = {"intercept": -0.5, "slopes": (1.0, 0.5), "sd": 1.2}
SLOPE_LIMIT = 0.05
NUTS_SECONDS = 600
RECOVERED = 2000
"""Draws for which effects are drawn."""
MOST_RECOVERED = 10_000
"""Draws for more groups than this would take gigabytes, and minutes in proportion."""
SHOWN = {
    "SGLDCV": "`marginalize`, `SGLDCV()`",
    "local": '`SGLDCV(gradient=LocalSampling("z"))`',
    "NUTS": "NUTS of PyMC",
    "nutpie": "nutpie",
}
COLUMNS = (
    "groups",
    "records of each",
    "sampler",
    "set-up, s",
    "`recover`, s",
    "transition, µs",
    "groups a minibatch",
    "ESS/s",
)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--groups", type=int, nargs="*", default=[1000, 10_000, 100_000, 1_000_000])
    parser.add_argument(
        "--records", type=int, nargs=2, default=RECORDS, help="of a group, and of a large one"
    )
    parser.add_argument(
        "--large", type=int, nargs="*", default=LARGE_GROUPS, help="numbers of large groups"
    )
    parser.add_argument("--nuts", type=int, nargs="*", default=[1000, 10_000], help="for NUTS")
    parser.add_argument("--nutpie", type=int, nargs="*", default=[1000, 10_000], help="for nutpie")
    parser.add_argument("--local", type=int, nargs="*", default=[1000], help="for `LocalSampling`")
    parser.add_argument("--draws", type=int, default=20_000, help="draws of a chain")
    parser.add_argument("--markdown", type=Path, help="file for the table of the documentation")
    return parser.parse_args(arguments)


def build_model(groups: int, records: int) -> Any:
    """The joint model, not centred."""
    import numpy as np
    import pymc as pm

    rng = np.random.default_rng(groups)
    group = np.repeat(np.arange(groups), records)
    X = rng.normal(size=(len(group), len(TRUTH["slopes"])))
    effects = TRUTH["sd"] * rng.normal(size=groups)
    predictor = TRUTH["intercept"] + X @ np.array(TRUTH["slopes"]) + effects[group]
    y = (rng.random(len(group)) < 1 / (1 + np.exp(-predictor))).astype("int8")
    with pm.Model() as model:
        intercept = pm.Normal("intercept", 0, 2)
        slopes = pm.Normal("slopes", 0, 2, shape=X.shape[1])
        sd = pm.HalfNormal("sd", 2)
        z = pm.Normal("z", shape=groups)
        pm.Bernoulli("y", logit_p=intercept + X @ slopes + sd * z[group], observed=y)
    return model


def summary(idata: Any, seconds: float) -> dict[str, Any]:
    """The worst effective sample size of the global variables, and their means and sds."""
    import arviz as az
    import numpy as np

    names = ["intercept", "slopes", "sd"]
    effective = az.ess(idata, var_names=names)
    posterior = idata.posterior.dataset[names]
    return {
        "ess_per_second": float(min(np.min(effective[name].values) for name in names)) / seconds,
        "mean": {name: np.mean(posterior[name].values, axis=(0, 1)).tolist() for name in names},
        "sd": {name: np.std(posterior[name].values, axis=(0, 1)).tolist() for name in names},
    }


def run_ours(groups: int, records: int, draws: int, launched: float) -> dict[str, Any]:
    """`marginalize` and `SGLDCV()`; all before the first draw that is kept counts as set-up.

    `recover` is timed beside it, where groups are no more than `MOST_RECOVERED`.
    """
    from pymc_sgmcmc import SGLDCV
    from pymc_sgmcmc.marginal import marginalize, recover

    model = build_model(groups, records)
    before = time.process_time()
    with marginalize(model, "z"):
        step = SGLDCV()
        idata, sampling = timed_draws(step, draws, 500, chains=1)
    set_up = time.process_time() - before - sampling
    recovery = {}
    if groups <= MOST_RECOVERED:
        before = time.process_time()
        few = idata.isel(draw=slice(RECOVERED), missing_dims="ignore")
        recover(few, model, "z", random_seed=1, progressbar=False)
        recovery["recover"] = time.process_time() - before
    return {
        "groups": groups,
        "records": records,
        "method": "SGLDCV",
        "set_up": set_up,
        **recovery,
        "transition_us": sampling / int(idata.sample_stats["n_steps"].sum()) * 1e6,
        "batch_size": step.batch_size,
        **summary(idata, sampling),
    }


def run_local(groups: int, records: int, draws: int, launched: float) -> dict[str, Any]:
    """`SGLDCV(gradient=LocalSampling(...))`, which samples the intercepts by Fisher's identity."""
    from pymc_sgmcmc import SGLDCV, LocalSampling

    names = ["intercept", "slopes", "sd"]
    with build_model(groups, records):
        before = time.process_time()
        step = SGLDCV(gradient=LocalSampling("z"))
        idata, sampling = timed_draws(step, draws, 500, chains=1, var_names=names)
        set_up = time.process_time() - before - sampling
    return {
        "groups": groups,
        "records": records,
        "method": "local",
        "set_up": set_up,
        "transition_us": sampling / int(idata.sample_stats["n_steps"].sum()) * 1e6,
        "batch_size": step.batch_size,
        **summary(idata, sampling),
    }


def run_nutpie(groups: int, records: int, draws: int, launched: float) -> dict[str, Any]:
    """nutpie on the joint model; compilation and warm-up count as set-up."""
    import nutpie

    model = build_model(groups, records)
    before = time.process_time()
    compiled = nutpie.compile_pymc_model(model)
    compilation = time.process_time() - before
    idata, warm_up, sampling = nutpie_chain(compiled, 500, 500, seed=1)
    return {
        "groups": groups,
        "records": records,
        "method": "nutpie",
        "set_up": compilation + warm_up,
        "transition_us": float("nan"),
        "batch_size": groups,
        **summary(idata, sampling),
    }


def run_nuts(groups: int, records: int, draws: int, launched: float) -> dict[str, Any]:
    """PyMC's NUTS on the joint model; its warm-up counts as set-up."""
    import pymc as pm

    model = build_model(groups, records)
    before = time.process_time()
    with model:
        idata = pm.sample(draws=500, tune=500, chains=1, progressbar=False, random_seed=1)
    seconds = time.process_time() - before
    sampling = float(idata.sample_stats["perf_counter_diff"].values.sum())
    return {
        "groups": groups,
        "records": records,
        "method": "NUTS",
        "set_up": seconds - sampling,
        "transition_us": float("nan"),
        "batch_size": groups,
        **summary(idata, sampling),
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; 1 where a figure is over its limit."""
    import numpy as np

    settings = parse_arguments(arguments)
    core = restrict_to_one_core(settings.core)
    results = []
    few, many = settings.records
    contenders = [
        ("run_ours", few, settings.groups),
        ("run_ours", many, settings.large),
        ("run_local", few, settings.local),
        ("run_nuts", few, settings.nuts),
        ("run_nutpie", few, settings.nutpie),
    ]
    for method, records, sizes in contenders:
        python = python_of("nutpie") if method == "run_nutpie" and sizes else sys.executable
        for groups in sizes:
            say(f"{method}, {groups} groups of {records} records")
            limit = NUTS_SECONDS if method in ("run_nuts", "run_nutpie") else None
            result = None
            fills_caches = groups == sizes[0] and method in ("run_ours", "run_local")
            for _ in range(2 if fills_caches else 1):
                try:
                    result = run_in_fresh_process(
                        f"groups:{method}",
                        python=python,
                        limit=limit,
                        groups=groups,
                        records=records,
                        draws=settings.draws // (10 if method == "run_local" else 1),
                    )
                except subprocess.TimeoutExpired:
                    say(f"{method} did not end within {NUTS_SECONDS} seconds")
            if result is None:
                continue
            results.append(result)
            say(str(result))
            write_results(settings.output, "groups", settings, core, results)
    rows = [
        [
            r["groups"],
            r["records"],
            SHOWN[r["method"]],
            r["set_up"],
            r.get("recover", ""),
            "" if np.isnan(r["transition_us"]) else r["transition_us"],
            r["batch_size"],
            r["ess_per_second"],
        ]
        for r in results
    ]
    print_table("Logistic random intercepts, processor time of one core", COLUMNS, rows)
    if settings.markdown is not None:
        write_tables(settings.markdown, [(COLUMNS, rows)], "tests/benchmarks/groups.py")
    ours = [r for r in results if r["method"] == "SGLDCV" and r["records"] == few]
    if len(ours) < 2:
        return 0
    sizes = np.log([r["groups"] for r in ours])
    slope = float(np.polyfit(sizes, -np.log([r["ess_per_second"] for r in ours]), 1)[0])
    reached = print_verdict("log-log slope of seconds a draw over groups", slope, SLOPE_LIMIT, "")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
