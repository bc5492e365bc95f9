"""Seconds and effective draws of models with effects of several factors, beside nutpie.

Examples
--------
::

    python tests/benchmarks/effects.py
    python tests/benchmarks/effects.py --shapes matches claims --sizes small --peers
    python tests/benchmarks/effects.py --markdown docs/tables/effects.txt

``README.md`` beside this file says how to read the figures.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.chains import nutpie_chain, timed_draws
from common.child import cache_variables, run_in_fresh_process
from common.machine import restrict_to_one_core
from common.markdown import write_tables
from common.peer_python import python_of
from common.program import make_parser, print_table, print_verdict, say, write_results

COLUMNS = [
    "model",
    "rows",
    "coordinates",
    "method",
    "set-up, cold",
    "set-up, warm",
    "ESS/s, worst scale or coefficient",
    "worst effect",
    "R-hat",
    "z, largest",
    "z of effects, sd",
]
PEER_SECONDS = 600
"""A peer is stopped after so many seconds."""
LARGEST_R_HAT = 1.05
"""A run with a larger R-hat has no figure."""
SIZES = {"small": 1, "large": 8}
"""Rows and levels in units of the small model."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=SIZES)
    parser.add_argument("--peers", nargs="*", default=["nutpie"], choices=["nutpie"])
    parser.add_argument("--draws", type=int, default=500, help="draws of each of two chains")
    parser.add_argument("--markdown", type=Path, help="file for the table of the documentation")
    return parser.parse_args(arguments)


def _levels(rng: Any, count: int, rows: int) -> Any:
    """A level for each row, with every level once."""
    import numpy as np

    return np.concatenate([np.arange(count), rng.integers(count, size=rows - count)])


def ratings(rng: Any, size: int) -> tuple[Any, dict[str, Any]]:
    """Users by items, centred."""
    import pymc as pm

    users, items, rows = 600 * size, 150 * size, 15_000 * size
    user, item = _levels(rng, users, rows), rng.integers(items, size=rows)
    a, b = 0.4 * rng.normal(size=users), 0.6 * rng.normal(size=items)
    y = 3.3 + a[user] + b[item] + 0.9 * rng.normal(size=rows)
    with pm.Model() as model:
        mean, sigma = pm.Normal("mean", 3, 2), pm.HalfNormal("sigma", 1)
        of_users, of_items = pm.HalfNormal("of_users", 1), pm.HalfNormal("of_items", 1)
        u = pm.Normal("u", 0, of_users, shape=users)
        v = pm.Normal("v", 0, of_items, shape=items)
        pm.Normal("y", mean + u[user] + v[item], sigma, observed=y)
    known = {"mean": 3.3, "sigma": 0.9, "of_users": 0.4, "of_items": 0.6, "u": a, "v": b}
    return model, known


def matches(rng: Any, size: int) -> tuple[Any, dict[str, Any]]:
    """Players against players, not centred."""
    import numpy as np
    import pymc as pm

    players, rows = 600 * size, 20_000 * size
    first = _levels(rng, players, rows)
    second = (first + rng.integers(1, players, size=rows)) % players
    skill = 0.8 * rng.normal(size=players)
    wins = rng.random(rows) < 1 / (1 + np.exp(skill[second] - skill[first]))
    winner, loser = np.where(wins, [first, second], [second, first])
    with pm.Model() as model:
        of_players = pm.HalfNormal("of_players", 1)
        z = pm.Normal("z", shape=players)
        s = pm.Deterministic("s", z * of_players)
        pm.Bernoulli("y", logit_p=s[winner] - s[loser], observed=np.ones(rows, "int8"))
    return model, {"of_players": 0.8, "s": skill}


def nested(rng: Any, size: int) -> tuple[Any, dict[str, Any]]:
    """Pupils in classes in schools, not centred."""
    import pymc as pm

    schools, classes, rows = 60 * size, 600 * size, 12_000 * size
    of_class, group = _levels(rng, schools, classes), _levels(rng, classes, rows)
    a, b = 0.5 * rng.normal(size=schools), 0.3 * rng.normal(size=classes)
    x = rng.normal(size=rows)
    y = 1 + 0.5 * x + a[of_class[group]] + b[group] + rng.normal(size=rows)
    with pm.Model() as model:
        mean, slope = pm.Normal("mean", 0, 2), pm.Normal("slope")
        of_schools, of_classes = pm.HalfNormal("of_schools", 1), pm.HalfNormal("of_classes", 1)
        u = pm.Deterministic("u", of_schools * pm.Normal("z_u", shape=schools))
        v = pm.Deterministic("v", of_classes * pm.Normal("z_v", shape=classes))
        predictor = mean + slope * x + u[of_class[group]] + v[group]
        pm.Normal("y", predictor, pm.HalfNormal("sigma", 1), observed=y)
    known = {"mean": 1, "slope": 0.5, "of_schools": 0.5, "of_classes": 0.3, "sigma": 1}
    return model, {**known, "u": a, "v": b}


def claims(rng: Any, size: int) -> tuple[Any, dict[str, Any]]:
    """Counts with exposure, districts by vehicles, centred."""
    import numpy as np
    import pymc as pm

    districts, vehicles, rows = 500 * size, 60, 50_000 * size
    district, vehicle = _levels(rng, districts, rows), rng.integers(vehicles, size=rows)
    a, b = 0.3 * rng.normal(size=districts), 0.4 * rng.normal(size=vehicles)
    age, exposure = rng.normal(size=rows), rng.uniform(0.1, 1, size=rows)
    y = rng.poisson(exposure * np.exp(-2 + 0.2 * age + a[district] + b[vehicle]))
    with pm.Model() as model:
        mean, slope = pm.Normal("mean", -2, 1), pm.Normal("slope")
        of_districts = pm.HalfNormal("of_districts", 0.5)
        of_vehicles = pm.HalfNormal("of_vehicles", 0.5)
        u = pm.Normal("u", 0, of_districts, shape=districts)
        v = pm.Normal("v", 0, of_vehicles, shape=vehicles)
        rate = exposure * pm.math.exp(mean + slope * age + u[district] + v[vehicle])
        pm.Poisson("y", rate, observed=y)
    known = {"mean": -2, "slope": 0.2, "of_districts": 0.3, "of_vehicles": 0.4}
    return model, {**known, "u": a, "v": b}


def slopes(rng: Any, size: int) -> tuple[Any, dict[str, Any]]:
    """Three correlated coefficients of each group, `LKJCholeskyCov`, not centred."""
    import numpy as np
    import pymc as pm

    groups, rows, scales = 300 * size, 9000 * size, np.array([0.8, 0.5, 0.3])
    group = _levels(rng, groups, rows)
    X = np.column_stack([np.ones(rows), rng.normal(size=(rows, 2))])
    correlations = np.full((3, 3), 0.3) + 0.7 * np.eye(3)
    effects = rng.multivariate_normal(np.zeros(3), correlations * np.outer(scales, scales), groups)
    coefficients = np.array([0.5, -0.3, 0.2])
    y = (X * (coefficients + effects[group])).sum(1) + rng.normal(size=rows)
    with pm.Model() as model:
        beta = pm.Normal("beta", shape=3)
        deviations = pm.Exponential.dist(1.0, shape=3)
        root, _, _ = pm.LKJCholeskyCov("root", n=3, eta=2, sd_dist=deviations)
        u = pm.Deterministic("u", pm.math.dot(pm.Normal("z", shape=(groups, 3)), root.T))
        predictor = (X * (beta + u)[group]).sum(1)
        pm.Normal("y", predictor, pm.HalfNormal("sigma", 1), observed=y)
    return model, {"beta": coefficients, "root_stds": scales, "sigma": 1, "u": effects}


def unequal(rng: Any, size: int) -> tuple[Any, dict[str, Any]]:
    """Groups with sizes as Zipf's law, not centred."""
    import numpy as np
    import pymc as pm

    groups, rows = 1000 * size, 40_000 * size
    shares = 1 / np.arange(1, groups + 1) ** 1.1
    more = rng.choice(groups, size=rows - groups, p=shares / shares.sum())
    group, x = np.concatenate([np.arange(groups), more]), rng.normal(size=rows)
    effects = 0.7 * rng.normal(size=groups)
    y = rng.random(rows) < 1 / (1 + np.exp(1 - 0.5 * x - effects[group]))
    with pm.Model() as model:
        mean, slope = pm.Normal("mean", 0, 2), pm.Normal("slope")
        of_groups = pm.HalfNormal("of_groups", 1)
        u = pm.Deterministic("u", of_groups * pm.Normal("z", shape=groups))
        predictor = mean + slope * x + u[group]
        pm.Bernoulli("y", logit_p=predictor, observed=y.astype("int8"))
    return model, {"mean": -1, "slope": 0.5, "of_groups": 0.7, "u": effects}


def predictors(rng: Any, size: int) -> tuple[Any, dict[str, Any]]:
    """Groups beside many predictors, not centred."""
    import numpy as np
    import pymc as pm

    groups, rows, count = 600 * size, 20_000 * size, 40
    group, X = _levels(rng, groups, rows), rng.normal(size=(rows, count))
    slopes, effects = 0.2 * rng.normal(size=count), 0.4 * rng.normal(size=groups)
    y = rng.random(rows) < 1 / (1 + np.exp(-0.3 - X @ slopes - effects[group]))
    with pm.Model() as model:
        mean, of_groups = pm.Normal("mean", 0, 1), pm.HalfNormal("of_groups", 1)
        b = pm.Normal("b", shape=count)
        u = pm.Deterministic("u", of_groups * pm.Normal("z", shape=groups))
        predictor = mean + X @ b + u[group]
        pm.Bernoulli("y", logit_p=predictor, observed=y.astype("int8"))
    return model, {"mean": 0.3, "of_groups": 0.4, "b": slopes, "u": effects}


def polls(rng: Any, size: int) -> tuple[Any, dict[str, Any]]:
    """States, ages, educations and cells of the last two, as for poststratification; centred."""
    import numpy as np
    import pymc as pm

    rows, lengths = 20_000 * size, {"state": 50, "age": 6, "education": 5, "cell": 30}
    index = {name: rng.integers(length, size=rows) for name, length in lengths.items()}
    index["cell"] = index["age"] * 5 + index["education"]
    share, truth = rng.normal(size=50), {"state": 0.3, "age": 0.3, "education": 0.2, "cell": 0.2}
    effects = {name: truth[name] * rng.normal(size=length) for name, length in lengths.items()}
    predictor = -0.2 - 0.5 * share[index["state"]]
    predictor += sum(effects[name][index[name]] for name in lengths)
    y = rng.random(rows) < 1 / (1 + np.exp(-predictor))
    with pm.Model() as model:
        predictor = pm.Normal("mean", 0, 1.5) + pm.Normal("slope") * share[index["state"]]
        for name, length in lengths.items():
            scale = pm.HalfNormal(f"of_{name}", 1)
            predictor = predictor + pm.Normal(name, 0, scale, shape=length)[index[name]]
        pm.Bernoulli("y", logit_p=predictor, observed=y.astype("int8"))
    scales = {f"of_{name}": scale for name, scale in truth.items() if lengths[name] > 10}
    return model, {"slope": -0.5, **scales, "state": effects["state"], "cell": effects["cell"]}


def spreads(rng: Any, size: int) -> tuple[Any, dict[str, Any]]:
    """A mean and a residual scale of each group, not centred."""
    import numpy as np
    import pymc as pm

    groups, records = 300 * size, 20
    group, x = np.repeat(np.arange(groups), records), rng.normal(size=groups * records)
    a, b = 0.5 * rng.normal(size=groups), 0.3 * rng.normal(size=groups)
    y = 1 + 0.4 * x + a[group] + np.exp(-0.2 + b[group]) * rng.normal(size=len(group))
    with pm.Model() as model:
        mean, slope, level = pm.Normal("mean", 0, 2), pm.Normal("slope"), pm.Normal("level")
        of_means, of_spreads = pm.HalfNormal("of_means", 1), pm.HalfNormal("of_spreads", 1)
        u = pm.Deterministic("u", of_means * pm.Normal("z_u", shape=groups))
        v = pm.Deterministic("v", of_spreads * pm.Normal("z_v", shape=groups))
        pm.Normal("y", mean + slope * x + u[group], pm.math.exp(level + v[group]), observed=y)
    known = {"mean": 1, "slope": 0.4, "level": -0.2, "of_means": 0.5, "of_spreads": 0.3}
    return model, {**known, "u": a, "v": b}


SHAPES: dict[str, Callable[[Any, int], tuple[Any, dict[str, Any]]]] = {
    "ratings": ratings,
    "matches": matches,
    "nested": nested,
    "claims": claims,
    "slopes": slopes,
    "unequal": unequal,
    "predictors": predictors,
    "polls": polls,
    "spreads": spreads,
}
"""Functions of a random generator and a size, to a model and its true values."""


def summary(
    posterior: Any, known: dict[str, Any], set_up: float, sampling: float
) -> dict[str, Any]:
    """Effective draws a second, and distances from the truth in posterior standard deviations."""
    import arviz as az
    import numpy as np

    names = list(known)
    effective, r_hat = az.ess(posterior, var_names=names), az.rhat(posterior, var_names=names)
    sampled = ("chain", "draw")
    z = {
        name: (posterior[name].mean(sampled).values - value) / posterior[name].std(sampled).values
        for name, value in known.items()
    }
    are_effects = [name for name in names if np.size(known[name]) > 10]
    others = [name for name in names if name not in are_effects]
    worst = [
        min(float(np.min(effective[name].values)) for name in some)
        for some in (others, are_effects)
    ]
    return {
        "set_up": set_up,
        "ess": worst[0] / sampling,
        "ess_of_effects": worst[1] / sampling,
        "r_hat": max(float(np.max(r_hat[name].values)) for name in names),
        "z": max(float(np.max(np.abs(z[name]))) for name in others),
        "z_of_effects": float(np.concatenate([np.ravel(z[name]) for name in are_effects]).std()),
    }


def run_ours(shape: str, size: int, draws: int, launched: float) -> dict[str, Any]:
    """`pm.sample(step=SGLDCV())`; all before the first draw that is kept counts as set-up."""
    import numpy as np

    from pymc_sgmcmc import SGLDCV

    model, known = SHAPES[shape](np.random.default_rng(1), size)
    before = time.process_time()
    with model:
        step = SGLDCV()
        idata, sampling = timed_draws(step, draws, 200, chains=2, compute_convergence_checks=False)
    set_up = time.process_time() - before - sampling
    return {
        "rows": step.posterior.n_rows,
        "coordinates": step.posterior.dimension,
        **summary(idata.posterior.to_dataset(), known, set_up, sampling),
    }


def run_nutpie(shape: str, size: int, draws: int, launched: float) -> dict[str, Any]:
    """Two chains of nutpie with as many draws; compilation and warm-up count as set-up."""
    import numpy as np
    import nutpie
    import xarray as xr

    model, known = SHAPES[shape](np.random.default_rng(1), size)
    before = time.process_time()
    compiled = nutpie.compile_pymc_model(model)
    set_up, sampling, chains = time.process_time() - before, 0.0, []
    for seed in (1, 2):
        idata, warm_up, of_draws = nutpie_chain(compiled, draws, 400, seed)
        set_up += warm_up
        sampling += of_draws
        chains.append(idata.posterior.to_dataset())
    return summary(xr.concat(chains, dim="chain"), known, set_up, sampling)


def run(method: str, python: str, **given: Any) -> dict[str, Any] | None:
    """Figures of a method in a fresh process, None where it does not end in time."""
    limit = PEER_SECONDS if method == "nutpie" else None
    target = f"effects:run_{method}"
    try:
        return run_in_fresh_process(target, python=python, limit=limit, **given)
    except subprocess.TimeoutExpired:
        say(f"{method} did not end within {PEER_SECONDS} seconds")
        return None


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; 1 where a run did not converge."""
    settings = parse_arguments(arguments)
    core = restrict_to_one_core(settings.core)
    results: list[dict[str, Any]] = []
    for size in settings.sizes:
        for shape in settings.shapes:
            given = {"shape": shape, "size": SIZES[size], "draws": settings.draws}
            say(f"{shape}, {size}")
            with tempfile.TemporaryDirectory() as caches:
                given["environment"] = cache_variables(caches)
                cold = run("ours", sys.executable, **given)
                warm = run("ours", sys.executable, **given)
                del given["environment"]
            assert cold is not None
            assert warm is not None
            about = {"model": f"{shape}, {size}", "method": "SGLDCV"}
            results.append({**about, **warm, "cold": cold["set_up"]})
            say(str(results[-1]))
            for peer in settings.peers:
                found = run(peer, python_of(peer), **given)
                if found is not None:
                    results.append({**about, "method": peer, **found})
                    say(str(results[-1]))
            write_results(settings.output, "effects", settings, core, results)
    rows = [
        [
            r["model"],
            r.get("rows", ""),
            r.get("coordinates", ""),
            r["method"],
            r.get("cold", ""),
            r["set_up"],
            *(r[name] for name in ("ess", "ess_of_effects", "r_hat", "z", "z_of_effects")),
        ]
        for r in results
    ]
    print_table("Effects of several factors, processor seconds of one core", COLUMNS, rows)
    if settings.markdown is not None:
        command = f"tests/benchmarks/effects.py --sizes {' '.join(settings.sizes)}"
        write_tables(settings.markdown, [(COLUMNS, rows)], command)
    reached = [
        print_verdict(r["model"], r["r_hat"], LARGEST_R_HAT, "R-hat")
        for r in results
        if r["method"] == "SGLDCV"
    ]
    return 0 if all(reached) else 1


if __name__ == "__main__":
    sys.exit(main())
