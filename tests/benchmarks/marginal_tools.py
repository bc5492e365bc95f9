"""Time of `recover` and of `fit_marginal` by method, beside statsmodels.

Examples
--------
::

    python tests/benchmarks/marginal_tools.py
    python tests/benchmarks/marginal_tools.py --methods laplace --groups 1000 --peers
    python tests/benchmarks/marginal_tools.py --peers --markdown docs/tables/marginal_fits.txt

``README.md`` beside this file says how to read the figures.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.child import run_in_fresh_process
from common.machine import restrict_to_one_core
from common.markdown import write_tables
from common.program import make_parser, print_table, say, write_results

LINEAR = ("quasi-newton", "MixedLM")
METHODS = ("laplace", "aghq", "mcem", "quasi-newton")
PEERS = ("BinomialBayesMixedGLM", "MixedLM")
MOST_GROUPS = {"mcem": 10_000, "BinomialBayesMixedGLM": 1000, "MixedLM": 10_000}
"""More groups take many minutes, or more memory than there is."""
TITLES = {
    "laplace": 'logistic, "laplace"',
    "aghq": 'logistic, "aghq" with 25 nodes',
    "mcem": 'logistic, "mcem"',
    "quasi-newton": 'linear, "quasi-newton"',
}
"""Names of the fits in the table of the documentation."""
FACTORS = ("s", "d", "dept")
"""Columns of InstEval with the factors: students, lecturers and departments."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--groups", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=METHODS)
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS)
    parser.add_argument("--draws", type=int, default=4000, help="for `recover`, 0 to leave it out")
    parser.add_argument("--recovered", type=int, default=2000, help="groups for `recover`")
    parser.add_argument("--limit", type=float, default=1200, help="seconds for a fit")
    parser.add_argument("--markdown", type=Path, help="file for the table of the documentation")
    return parser.parse_args(arguments)


def simulate(groups: int, linear: bool) -> tuple[Any, Any, Any]:
    """Groups of the records, predictors and outcomes, as in `groups.py`."""
    import numpy as np
    from groups import RECORDS, TRUTH

    rng = np.random.default_rng(groups)
    group = np.repeat(np.arange(groups), RECORDS[0])
    X = rng.normal(size=(len(group), len(TRUTH["slopes"])))
    effects = TRUTH["sd"] * rng.normal(size=groups)
    predictor = TRUTH["intercept"] + X @ np.array(TRUTH["slopes"]) + effects[group]
    if linear:
        return group, X, predictor + rng.normal(size=len(group))
    return group, X, (rng.random(len(group)) < 1 / (1 + np.exp(-predictor))).astype("int8")


def build_model(groups: int, linear: bool) -> Any:
    """The joint model of logistic or linear random intercepts, not centred."""
    import pymc as pm

    group, X, y = simulate(groups, linear)
    with pm.Model() as model:
        intercept = pm.Normal("intercept", 0, 2)
        slopes = pm.Normal("slopes", 0, 2, shape=X.shape[1])
        sd = pm.HalfNormal("sd", 2)
        z = pm.Normal("z", shape=groups)
        predictor = intercept + X @ slopes + sd * z[group]
        if linear:
            pm.Normal("y", predictor, pm.HalfNormal("sigma", 2), observed=y)
        else:
            pm.Bernoulli("y", logit_p=predictor, observed=y)
    return model


def run_recover(draws: int, groups: int) -> dict[str, Any]:
    """`recover` on draws near the truth."""
    import numpy as np
    import xarray as xr
    from common.timing import timed
    from groups import TRUTH

    from pymc_sgmcmc import recover

    rng = np.random.default_rng(1)
    dims = ("chain", "draw")

    def near(value: Any) -> Any:
        values = np.asarray(value)
        return values + 0.03 * rng.normal(size=(1, draws, *values.shape))

    posterior = {
        "intercept": (dims, near(TRUTH["intercept"])),
        "slopes": ((*dims, "slopes_dim_0"), near(TRUTH["slopes"])),
        "sd": (dims, near(TRUTH["sd"])),
    }
    coords = {"chain": [0], "draw": np.arange(draws)}
    idata = xr.DataTree.from_dict({"posterior": xr.Dataset(posterior, coords)})
    model = build_model(groups, linear=False)
    _, seconds = timed(recover, idata, model, "z", random_seed=1, progressbar=False)
    return {"what": "recover", "groups": groups, "seconds": seconds.cpu, "sd": float("nan")}


def run_fit(method: str, groups: int) -> dict[str, Any]:
    """`fit_marginal` by a method."""
    from common.timing import timed

    from pymc_sgmcmc import fit_marginal

    model = build_model(groups, method in LINEAR)
    settings = {"random_seed": 1} if method == "mcem" else {}
    fit, seconds = timed(fit_marginal, model, "z", method=method, **settings)
    return {
        "what": method,
        "groups": groups,
        "seconds": seconds.cpu,
        "sd": float(fit.estimates["sd"]),
    }


def run_ratings(folder: str) -> dict[str, Any]:
    """`fit_marginal` of InstEval, linear with crossed intercepts of three factors."""
    import pandas as pd
    import pymc as pm
    from common.timing import timed

    from pymc_sgmcmc import fit_marginal

    frame = pd.read_csv(Path(folder) / "InstEval.csv.gz")
    with pm.Model() as model:
        predictor = pm.Normal("intercept", 0, 5)
        predictor += pm.Normal("service") * frame["service"].to_numpy(float)
        for name in FACTORS:
            number, levels = pd.factorize(frame[name])
            sd = pm.HalfNormal(f"sd_{name}")
            predictor += pm.Normal(name, 0, sd, shape=len(levels))[number]
        pm.Normal("y", predictor, pm.HalfNormal("sigma"), observed=frame["y"].to_numpy(float))
    fit, seconds = timed(fit_marginal, model, FACTORS)
    return {
        "what": "InstEval",
        "groups": fit.n_groups,
        "seconds": seconds.cpu,
        "sd": float(fit.estimates["sd_s"]),
        "deviance": fit.minus_two_log_likelihood,
    }


def run_peer(peer: str, groups: int) -> dict[str, Any]:
    """A fit by statsmodels; that of the logistic model is a posterior mode with its own priors."""
    import numpy as np
    import scipy.sparse
    from common.timing import timed

    group, X, y = simulate(groups, peer in LINEAR)
    X = np.column_stack([np.ones(len(y)), X])
    if peer == "MixedLM":
        from statsmodels.regression.mixed_linear_model import MixedLM

        fit, seconds = timed(lambda: MixedLM(y, X, groups=group).fit(reml=False))
        sd = float(np.sqrt(fit.cov_re[0, 0]))
    else:
        from statsmodels.genmod.bayes_mixed_glm import BinomialBayesMixedGLM

        Z = scipy.sparse.csr_matrix((np.ones(len(y)), (np.arange(len(y)), group)))
        model = BinomialBayesMixedGLM(y, X, Z, ident=np.zeros(groups, dtype=int))
        fit, seconds = timed(model.fit_map)
        sd = float(np.exp(fit.vcp_mean[0]))
    return {"what": peer, "groups": groups, "seconds": seconds.cpu, "sd": sd}


def write_table(path: Path, results: Sequence[Mapping[str, Any]], groups: Sequence[int]) -> None:
    """Write the table of the documentation: seconds of the fits, by number of groups."""
    seconds = {(result["what"], result["groups"]): result["seconds"] for result in results}
    rows = [
        [title, *(seconds.get((method, count), "not run") for count in groups)]
        for method, title in TITLES.items()
        if any(what == method for what, _ in seconds)
    ]
    tables = [(["groups", *map(str, groups)], rows)]
    for result in results:
        if result["what"] == "InstEval":
            columns = ["crossed factors", "levels", "seconds", "-2 log likelihood"]
            row = ["InstEval", result["groups"], result["seconds"], f"{result['deviance']:.2f}"]
            tables.append((columns, [row]))
    write_tables(path, tables, "tests/benchmarks/marginal_tools.py")


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark."""
    settings = parse_arguments(arguments)
    core = restrict_to_one_core(settings.core)
    if settings.peers and importlib.util.find_spec("statsmodels") is None:
        say("statsmodels is not installed, so its fits are left out")
        settings.peers = []
    calls: list[tuple[str, dict[str, Any]]] = []
    if settings.draws:
        calls.append(("run_recover", {"draws": settings.draws, "groups": settings.recovered}))
    folder = os.environ.get("PYMC_SGMCMC_DATA", "")
    if (Path(folder) / "InstEval.csv.gz").exists():
        calls.append(("run_ratings", {"folder": folder}))
    for groups in settings.groups:
        calls += [("run_fit", {"method": name, "groups": groups}) for name in settings.methods]
        calls += [("run_peer", {"peer": name, "groups": groups}) for name in settings.peers]
    results = []
    for function, options in calls:
        name = options.get("method", options.get("peer"))
        if options.get("groups", 0) > MOST_GROUPS.get(name, float("inf")):
            continue
        say(f"{function} {options}")
        try:
            result = run_in_fresh_process(
                f"marginal_tools:{function}", limit=settings.limit, **options
            )
        except subprocess.TimeoutExpired:
            say(f"{name} did not end within {settings.limit:.0f} seconds")
            continue
        results.append(result)
        write_results(settings.output, "marginal_tools", settings, core, results)
    print_table(
        "Random intercepts, processor time of one core",
        ["what", "groups", "seconds", "sd of the intercepts"],
        [[r["what"], r["groups"], r["seconds"], r["sd"]] for r in results],
    )
    if settings.markdown is not None:
        write_table(settings.markdown, results, settings.groups)
    return 0


if __name__ == "__main__":
    sys.exit(main())
