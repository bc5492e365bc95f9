"""Seconds and effective draws of models with effects of several factors, beside nutpie.

Examples
--------
::

    python tests/benchmarks/effects.py --markdown docs/tables/effects.txt
    python tests/benchmarks/effects.py --shapes matches claims --sizes small --slope
    python tests/benchmarks/effects.py --shapes ratings --forms centred --sizes small --peers

``README.md`` beside this file says how to read the figures.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from common.clocks import nutpie_chain, peak_memory, slope, timed_draws
from common.peers import python_of
from common.runner import Result, Table, Verdict, attempt, cold_and_warm, run, say

SHAPES = (
    "ratings", "matches", "nested", "claims", "slopes", "unequal", "predictors", "polls", "spreads",
    "inst_eval", "players", "frailties", "shops", "items", "media",
)  # fmt: skip
"""Functions of `common.hierarchical`."""
BY_SAMPLE = SHAPES[-5:]
"""Models of one form and size for `sample`, which chooses what to integrate out."""
FORMS = ("centred", "not centred")
SIZES = {"small": 1, "large": 8}
"""Rows and levels in units of the small model."""
REAL = "inst_eval"
"""A model of real data, which has one size."""
LARGEST_R_HAT = 1.05
"""A run with a larger R-hat has no figure."""
REFERENCE = {"draws": 2000, "seed": 11}
"""Of each of two chains of NUTS, with which small models are compared."""
OPTIONS = {
    "shapes": (SHAPES, SHAPES),
    "forms": (FORMS, FORMS),
    "sizes": (tuple(SIZES), tuple(SIZES)),
    "peers": (("nutpie",), ("nutpie",)),
    "draws": (1500, "draws of each of two chains of this package"),
    "peer_draws": (500, "those of a peer"),
    "slope": ((10**4, 10**5, 10**6), "rows of crossed ratings for the table of slopes"),
    "seconds": (600.0, "a peer is stopped after so many"),
    "longest": (3600.0, "this package is, and the run of NUTS that small models are compared with"),
}


def make(shape: str, size: float, form: str) -> tuple[Any, dict[str, Any]]:
    """A model and the values that made its data."""
    import numpy as np
    from common.hierarchical import SHAPES

    return SHAPES[shape](np.random.default_rng(1), size, form)


def moments(posterior: Any, names: list[str]) -> dict[str, list[Any]]:
    """Mean and standard deviation of each variable."""
    values = {name: posterior[name] for name in names}
    sampled = ("chain", "draw")
    return {
        name: [value.mean(sampled).values.tolist(), value.std(sampled).values.tolist()]
        for name, value in values.items()
    }


def summary(
    posterior: Any, truth: dict[str, Any], reference: dict[str, Any] | None, sampling: float
) -> dict[str, Any]:
    """Effective draws a second, and distances from the reference and from the truth.

    Distances are in posterior standard deviations, and those of standard deviations ratios.
    """
    import arviz as az
    import numpy as np
    from common.hierarchical import is_scale

    names = list(truth)
    effective, r_hat = az.ess(posterior, var_names=names), az.rhat(posterior, var_names=names)
    of_draws = {name: np.array(both) for name, both in moments(posterior, names).items()}
    are_effects = {name for name in names if of_draws[name][0].size > 10}
    kinds = {
        "scale": [name for name in names if is_scale(name)],
        "coefficient": [name for name in names if name not in are_effects and not is_scale(name)],
        "effect": list(are_effects),
    }
    found: dict[str, Any] = {
        f"ess_{kind}": min(float(effective[name].values.min()) for name in some) / sampling
        for kind, some in kinds.items()
        if some
    }
    found["r_hat"] = max(float(r_hat[name].values.max()) for name in names)

    def distances(true: dict[str, Any], effects: bool) -> Any:
        """Of means from given ones, over the standard deviations of the draws or the given ones."""
        return np.concatenate(
            [
                np.ravel((of_draws[name][0] - mean) / (of_draws[name][1] if sd is None else sd))
                for name, (mean, sd) in true.items()
                if (name in are_effects) == effects
            ]
        )

    if reference is not None:
        true = {name: tuple(map(np.array, reference[name])) for name in names}
        ratios = np.concatenate(
            [np.ravel(of_draws[name][1] / true[name][1]) for name in set(names) - are_effects]
        )
        found |= {
            "mean_error": float(np.abs(distances(true, False)).max()),
            "sd_ratio": float(ratios[np.abs(np.log(ratios)).argmax()]),
            "effect_error": float(np.sqrt((distances(true, True) ** 2).mean())),
        }
    if truth[names[0]] is not None:
        true = {name: (np.array(value), None) for name, value in truth.items()}
        found |= {
            "z": float(np.abs(distances(true, False)).max()),
            "z_effects": float(distances(true, True).std()),
        }
    return found


def run_ours(
    shape: str, size: float, form: str, draws: int, reference: dict[str, Any] | None = None
) -> Result:
    """`pm.sample(step=SGLDCV())`; all before the first draw that is kept counts as set-up."""
    from pymc_sgmcmc import SGLDCV

    model, truth = make(shape, size, form)
    before = time.process_time()
    with model:
        step = SGLDCV()
        idata, sampling = timed_draws(step, draws, 200, chains=2, compute_convergence_checks=False)
    set_up = time.process_time() - before - sampling
    memory = peak_memory()
    return {
        "rows": step.posterior.n_rows,
        "coordinates": step.posterior.dimension,
        "set_up": set_up,
        "sampling": sampling,
        "memory": memory,
        **summary(idata.posterior.to_dataset(), truth, reference, sampling),
    }


def run_sample(shape: str, draws: int, reference: dict[str, Any] | None = None) -> Result:
    """`sample`, all that a user waits for."""
    from pymc_sgmcmc import sample

    model, truth = make(shape, 1, "")
    before = time.process_time()
    idata = sample(
        draws, tune=200, chains=2, cores=1, random_seed=1, progressbar=False, model=model
    )
    seconds = time.process_time() - before
    return {"seconds": seconds, **summary(idata.posterior.to_dataset(), truth, reference, seconds)}


def nuts(model: Any, draws: int, seeds: tuple[int, ...]) -> tuple[Any, float, float]:
    """Chains of nutpie, seconds of compilation and warm-up, and those of the draws."""
    import nutpie
    import xarray as xr

    before = time.process_time()
    compiled = nutpie.compile_pymc_model(model)
    set_up, sampling, chains = time.process_time() - before, 0.0, []
    for seed in seeds:
        idata, warm_up, of_draws = nutpie_chain(compiled, draws, 400, seed)
        set_up, sampling = set_up + warm_up, sampling + of_draws
        chains.append(idata.posterior.to_dataset())
    return xr.concat(chains, dim="chain"), set_up, sampling


def run_nutpie(
    shape: str, size: float, form: str, draws: int, reference: dict[str, Any] | None = None
) -> Result:
    """Two chains of nutpie with as many draws; compilation and warm-up count as set-up."""
    model, truth = make(shape, size, form)
    posterior, set_up, sampling = nuts(model, draws, (1, 2))
    times = {"set_up": set_up, "sampling": sampling, "memory": peak_memory()}
    return {**times, **summary(posterior, truth, reference, sampling)}


def run_reference(shape: str, size: float, draws: int, seed: int) -> dict[str, Any]:
    """Moments of the posterior by a long run of NUTS on the model that is not centred."""
    model, truth = make(shape, size, "not centred")
    return moments(nuts(model, draws, (seed, seed + 1))[0], list(truth))


def measured(settings: Any, table: str, **model: Any) -> Iterator[Result]:
    """This package with empty and with filled caches, and its peers, on one model."""
    about = {"table": table, "shape": model["shape"], "form": model["form"]}
    given = {**model, "draws": settings.draws}
    try:
        cold, warm = cold_and_warm(run_ours, **given, limit=settings.longest)
        yield {**about, "method": "SGLDCV", **warm, "cold": cold["set_up"]}
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        say(str(error))
        yield {**about, "method": "SGLDCV", "set_up": "no result"}
    for peer in settings.peers:
        given |= {"python": python_of(peer), "limit": settings.seconds}
        given["draws"] = settings.peer_draws
        found = attempt(run_nutpie, **given) or {"set_up": f"no result in {settings.seconds:g} s"}
        yield {**about, "method": peer, **found}


def by_sample(settings: Any, shape: str) -> Iterator[Result]:
    """A model for `sample`, and nutpie with as many draws."""
    about, given = {"table": "sample", "shape": shape}, {"draws": settings.draws}
    if settings.peers:
        say(f"NUTS of {shape}")
        options = {"python": python_of("nutpie"), "limit": settings.longest}
        given["reference"] = attempt(run_reference, shape=shape, size=1, **REFERENCE, **options)
    cold, warm = cold_and_warm(run_sample, shape=shape, limit=settings.longest, **given)
    yield {**about, "method": "sample", **warm, "cold": cold["seconds"]}
    for peer in settings.peers:
        options = {"python": python_of(peer), "limit": settings.seconds, "size": 1, "form": ""}
        given["draws"] = settings.peer_draws
        if (found := attempt(run_nutpie, shape=shape, **given, **options)) is not None:
            found["seconds"] = found["set_up"] + found["sampling"]
            yield {**about, "method": peer, **found}


def results(settings: Any) -> Iterator[Result]:
    """All models, then the table of slopes."""
    from common.hierarchical import INST_EVAL, RATED_ROWS

    for shape in (each for each in BY_SAMPLE if each in settings.shapes):
        yield from by_sample(settings, shape)
    for name in settings.sizes:
        for shape in (each for each in settings.shapes if each not in BY_SAMPLE):
            if shape == REAL and (name != settings.sizes[0] or not INST_EVAL().exists()):
                continue
            size, reference = SIZES[name], None
            if settings.peers and (name == "small" or shape == REAL):
                say(f"NUTS of {shape}, {name}")
                given = {"python": python_of("nutpie"), "limit": settings.longest}
                reference = attempt(run_reference, shape=shape, size=size, **REFERENCE, **given)
            for form in settings.forms:
                for result in measured(
                    settings, "models", shape=shape, size=size, form=form, reference=reference
                ):
                    yield {**result, "size": "" if shape == REAL else name}
    for rows in settings.slope:
        size = rows / RATED_ROWS
        for result in measured(settings, "slope", shape="ratings", size=size, form="centred"):
            yield {**result, "size": f"{rows}"}


def shown(result: Result, table: str) -> bool:
    """Whether a result belongs to a table."""
    return result["table"] == table


MODEL = {
    "model": lambda r: ", ".join(filter(None, [r["shape"], r.get("size"), r["form"]])),
    "rows": "rows",
    "coordinates": "coordinates",
    "method": "method",
    "set-up, cold": "cold",
    "set-up, warm": "set_up",
    "sampling": "sampling",
}
FIGURES = {
    "ESS/s, worst scale": "ess_scale",
    "worst coefficient": "ess_coefficient",
    "worst effect": "ess_effect",
    "R-hat": "r_hat",
}
ERRORS = {
    "mean error": "mean_error",
    "sd ratio": "sd_ratio",
    "mean error of effects": "effect_error",
    "z, largest": "z",
    "z of effects, sd": "z_effects",
}


def tables(found: list[Result]) -> list[Table]:
    """Models, crossed ratings by rows, the slopes of the latter, and models for `sample`."""
    title = "Effects of several factors, processor seconds of one core"
    models = Table(title, MODEL | FIGURES | ERRORS, lambda r: shown(r, "models"))
    columns = MODEL | FIGURES | {"memory, MB": "memory"}
    ratings = Table("Crossed ratings, by rows", columns, lambda r: shown(r, "slope"))
    columns = {"model": "shape", "method": "method", "cold": "cold", "warm": "seconds"}
    title = "Models for `sample`, processor seconds in all, compilation included"
    others = Table(title, columns | FIGURES | ERRORS, lambda r: shown(r, "sample"))
    done = [r for r in found if shown(r, "slope") and "rows" in r]
    if len(done) < 2:
        return [models, ratings, others]
    figures = {
        "set-up": lambda r: r["set_up"],
        "seconds an effective draw of the worst scale": lambda r: 1 / r["ess_scale"],
        "of the worst coefficient": lambda r: 1 / r["ess_coefficient"],
        "memory": lambda r: r["memory"],
    }
    slopes = {
        name: slope([r["rows"] for r in done], [*map(get, done)]) for name, get in figures.items()
    }
    first = done[0]
    slope_table = Table(
        "Slopes of the logarithms over that of the rows",
        {name: (lambda _, value=value: value) for name, value in slopes.items()},
        lambda r: r is first,
    )
    return [models, ratings, slope_table, others]


def verdicts(found: list[Result]) -> Iterator[Verdict]:
    """R-hat of this package."""
    for r in found:
        if r["method"] == "SGLDCV":
            r_hat = r.get("r_hat", float("nan"))
            yield Verdict(f"{MODEL['model'](r)}: R-hat", r_hat, LARGEST_R_HAT)


if __name__ == "__main__":
    merged = ("table", "shape", "size", "form", "method")
    sys.exit(run(__doc__, results, tables, OPTIONS, verdicts, merged=merged))
