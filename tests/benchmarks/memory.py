"""Memory of a step method and of sampling with it, relative to the data. Linux only.

::

    python tests/benchmarks/memory.py --rows 4000000 --features 10 --models minibatch ordinary
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from common import DTYPES, METHODS
from common.runner import Result, Table, Verdict, fresh, run

COUNTS = ("allocated", "resident")
PHASES = {
    "model": "building the model",
    "step": "making the step method",
    "order": "putting the rows into a new random order",
    "draws": "drawing with it alone",
    "sample": "the same with pm.sample, which puts observed data into the trace",
}
LIMIT = 1.0
TOLERANCE = 0.02
"""For what does not grow with the data, in units of them."""
SIZES = {
    "rows": (1_000_000, "rows of the data, N"),
    "features": (50, "coefficients, p"),
    "batch": (500, "minibatch size, n"),
    "dtype": ("float64", DTYPES),
    "draws": (2_000,),
    "thin": (5, "transitions a draw"),
}
OPTIONS = SIZES | {
    "models": (("minibatch",), ("minibatch", "ordinary")),
    "settings": (("computed",), ("given", "computed"), "step size and centre"),
}


def measure(
    count: str,
    method: str,
    kind: str,
    settings: str,
    rows: int,
    features: int,
    batch: int,
    dtype: str,
    draws: int,
    thin: int,
) -> Result:
    """Build a model, make a step and sample, in this process, which does nothing else."""
    import numpy as np
    import pymc as pm
    from common.memory import Phases
    from common.regression import build_model, given_settings, make_problem, make_step

    def run(rows: int, draws: int, phases: Phases) -> tuple[Any, int, Any]:
        problem = make_problem(rows, features, dtype)
        given = given_settings(problem, method, batch) if settings == "given" else {}
        with phases.phase("model"):
            model = build_model(problem, batch if kind == "minibatch" else None)
        with phases.phase("step"):
            step = make_step(model, method, batch, thin=thin, **given)
        with phases.phase("order"):
            step.batching.set_order(1)
        with phases.phase("draws"):
            step.setup_chain(np.random.default_rng(1), 0, draws)
            point = model.initial_point()
            for _ in range(draws):
                point, _ = step.step(point)
        quiet = {"compute_convergence_checks": False, "progressbar": False, "quiet": True}
        with phases.phase("sample"):
            trace = pm.sample(
                draws, model=model, step=step, tune=0, chains=1, cores=1, random_seed=1, **quiet
            )
        return step, problem.design.nbytes + problem.response.nbytes, trace

    # What is imported and compiled stays in memory; a small run first takes it out of the count.
    run(max(2_000, 4 * batch), 10, Phases("resident"))
    phases = Phases(count)
    step, data_bytes, trace = run(rows, draws, phases)
    buffers = [shared.get_value(borrow=True).nbytes for shared in step.batching._shared]
    of_data = len(step.posterior.data)
    return {
        "method": method,
        "model": kind,
        "settings": settings,
        "count": count,
        "data": data_bytes,
        "copy": sum(buffers[:of_data]) / data_bytes,
        "columns": sum(buffers[of_data:]) / data_bytes,
        "trace": trace.nbytes / data_bytes,
        "phases": {
            phase: {key: value / data_bytes for key, value in found.items()}
            for phase, found in phases.found.items()
        },
    }


def held_and_peak(phase: str) -> Callable[[Result], str]:
    """A cell: memory held after a phase and its peak, in units of the data's."""
    return lambda r: f"{r['phases'][phase]['held']:.3f} ({r['phases'][phase]['peak']:.3f})"


COLUMNS = {
    **{name: name for name in ("method", "model", "settings", "count")},
    "data MB": lambda r: r["data"] / 1e6,
    "copy": "copy",
    "columns": "columns",
    **{phase: held_and_peak(phase) for phase in PHASES},
    "trace": lambda r: f"{r['trace']:.3f}",
}


def results(settings: Any) -> Iterator[Result]:
    """All combinations, each in a process of its own."""
    sizes = {name: getattr(settings, name) for name in SIZES}
    for kind, method, how, count in itertools.product(
        settings.models, METHODS, settings.settings, COUNTS
    ):
        yield fresh(measure, count=count, method=method, kind=kind, settings=how, **sizes)


def verdicts(found: list[Result]) -> Iterator[Verdict]:
    """What the step method holds beside data and model, and its peak."""
    for r in found:
        step, name = r["phases"]["step"], f"{r['method']}, {r['model']}, {r['count']}"
        later = max(r["phases"][phase]["peak"] for phase in ("order", "draws"))
        peak = max(step["peak"], step["held"] + later)
        for what, figure in (("held", step["held"]), ("peak", peak)):
            limit = LIMIT + TOLERANCE
            yield Verdict(f"{name}: {what} beside the data", figure, limit, "× the data")


TITLE = (
    "Memory held after (peak while) phases, in units of the data's, N = {rows}, p = {features}, "
    f"n = {{batch}}, {{dtype}}, {{draws}} draws. {'; '.join(': '.join(p) for p in PHASES.items())}"
)
TABLES = [Table(TITLE, COLUMNS)]

if __name__ == "__main__":
    sys.exit(run(__doc__, results, TABLES, OPTIONS, verdicts))
