"""Time to the first draw in a new process, with an empty and with a filled compile cache.

::

    python tests/benchmarks/start_up.py --rows 10000 1000000 --rounds 5
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from common import DTYPES
from common.runner import Result, Table, Verdict, cache_variables, fresh, run, scratch

CONFIGURATIONS = (
    ("sgld", "given", "NUMBA"),
    ("sgld-cv", "given", "NUMBA"),
    ("sgld", "computed", "NUMBA"),
    ("sgld-cv", "computed", "NUMBA"),
    ("sgld-cv", "computed", "CVM"),
    ("sgld-cv", "computed", "JAX"),
)
"""Method, settings and PyTensor mode. Nothing is given with computed settings but the mode."""
STAGES = ("interpreter", "imports", "model", "step", "first draw")
KEYS = ("rows", "method", "settings", "mode", "cache")
LIMIT = 3.0
"""Seconds from the imports, and from the step method, to the first draw with a filled cache."""
LIMIT_OF_EMPTY_CACHE = 8.0
"""Seconds from the start of the process with an empty cache, in PyTensor's default mode."""
OPTIONS = {
    "rows": ((200_000,), "rows, N"),
    "features": (10, "coefficients, p"),
    "batch": (500, "minibatch size, n"),
    "dtype": ("float64", DTYPES),
    "rounds": (3, "processes with a filled cache"),
    "clock": ("wall", ("wall", "cpu"), "clock of the table"),
    "configurations": (tuple(range(len(CONFIGURATIONS))), "numbers of those to run"),
}


def measure(
    method: str, settings: str, mode: str, folder: str, batch: int, launched: float
) -> dict[str, dict[str, float]]:
    """Times of this process, which has imported nothing yet, by both clocks."""
    from common.clocks import process_clocks as now

    times = [(launched, 0.0), now()]
    import pymc as pm
    from common.regression import build_model, given_settings, load_problem, make_step

    import pymc_sgmcmc  # noqa: F401

    times.append(now())
    before = now()
    problem = load_problem(folder)
    given = given_settings(problem, method, batch) if settings == "given" else {}
    loading = [after - earlier for after, earlier in zip(now(), before, strict=True)]

    def mark() -> None:
        times.append(tuple(at - load for at, load in zip(now(), loading, strict=True)))

    size = batch if given else None
    model = build_model(problem, size)
    mark()
    step = make_step(model, method, size, compile_kwargs={"mode": mode}, **given)
    mark()

    class FirstDrawError(Exception):
        pass

    def stop(**_: Any) -> None:
        mark()
        raise FirstDrawError

    with contextlib.suppress(FirstDrawError):
        pm.sample(
            1000, model=model, step=step, tune=0, chains=1, cores=1, progressbar=False, quiet=True,
            callback=stop,
        )  # fmt: skip
    return {
        clock: {name: times[i + 1][place] - times[i][place] for i, name in enumerate(STAGES)}
        for place, clock in enumerate(("wall", "cpu"))
    }


def since(result: Result, stage: str) -> float:
    """Seconds from the beginning of a stage to the first draw."""
    return sum(result["seconds"][name] for name in STAGES[STAGES.index(stage) :])


def results(settings: Any) -> Iterator[Result]:
    """Processes that share a cache of their own, empty at first."""
    from common.regression import make_problem, save_problem

    for rows, number in itertools.product(settings.rows, settings.configurations):
        key = dict(zip(("method", "settings", "mode"), CONFIGURATIONS[number], strict=True))
        with scratch() as folder, tempfile.TemporaryDirectory() as cache:
            save_problem(make_problem(rows, settings.features, settings.dtype), folder)
            given = {"folder": str(folder), "batch": settings.batch, **key}
            for number in range(settings.rounds + 1):
                seconds = fresh(measure, environment=cache_variables(cache), **given)
                about = {"rows": rows, **key, "cache": "filled" if number else "empty"}
                yield about | {"seconds": seconds[settings.clock], "both_clocks": seconds}


def fastest(found: list[Result]) -> list[Result]:
    """The fastest process of each configuration."""
    best: dict[tuple, Result] = {}
    for result in found:
        key = tuple(result[name] for name in KEYS)
        best[key] = min(best.get(key, result), result, key=lambda r: since(r, "imports"))
    return list(best.values())


def stage_of(name: str) -> Any:
    """A cell with the seconds of a stage."""
    return lambda r: r["seconds"][name]


def tables(found: list[Result]) -> list[Table]:
    """Seconds of the stages, and from some of them to the first draw."""
    columns = {
        **{name: name for name in KEYS},
        **{name: stage_of(name) for name in STAGES},
        "from process": lambda r: since(r, "interpreter"),
        "from import": lambda r: since(r, "imports"),
        "from step": lambda r: since(r, "step"),
    }
    best = fastest(found)
    title = "Seconds of {clock} time, p = {features}, n = {batch}, {dtype}"
    return [Table(title, columns, lambda r: any(r is one for one in best))]


def verdicts(found: list[Result]) -> Iterator[Verdict]:
    """Seconds to the first draw."""
    for r in fastest(found):
        name = ", ".join(str(r[key]) for key in KEYS)
        if r["cache"] == "filled":
            for stage in ("step", "imports"):
                yield Verdict(f"{name}, from {stage}", since(r, stage), LIMIT, "s")
        elif r["mode"] == "NUMBA":
            yield Verdict(name, since(r, "interpreter"), LIMIT_OF_EMPTY_CACHE, "s")


if __name__ == "__main__":
    sys.exit(run(__doc__, results, tables, OPTIONS, verdicts))
