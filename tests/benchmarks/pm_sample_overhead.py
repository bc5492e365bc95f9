"""Time of a transition in `pm.sample`, beside the engine alone, on one core.

Examples
--------
::

    python tests/benchmarks/pm_sample_overhead.py --thin 1 5 20 100 --output results.json
    python tests/benchmarks/pm_sample_overhead.py --thin 1 --whole
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from common import DTYPES, METHODS
from common.clocks import in_turn
from common.runner import Result, Table, Verdict, run, say

FEW_DRAWS = 200
LIMIT = 1.5
LIMIT_THIN = 20
OPTIONS = {
    "rows": (200_000, "rows of the data, N"),
    "features": (10, "coefficients, p"),
    "batch": (500, "minibatch size, n"),
    "dtype": ("float64", DTYPES),
    "thin": ((20,), "transitions a draw, with given settings"),
    "draws": (5_000, f"more than {FEW_DRAWS}"),
    "rounds": (5, "times each is timed, in turn"),
    "clock": ("wall", ("wall", "cpu")),
    "progressbar": (False, "with PyMC's progress bar"),
    "whole": (False, "`sample` in place of `pm.sample`"),
}
COLUMNS = {
    "method": "method",
    "settings": "settings",
    "thin": "thin",
    "engine": "engine",
    "sample": "sample",
    "×": lambda r: r["sample"] / r["engine"],
    "draw": lambda r: r["sample"] * r["thin"],
    "whole call": "total",
    "whole call, ×": lambda r: r["total"] / r["engine"],
    "fixed s": "fixed",
    "PyMC/draw": "idle",
    "all/draw": lambda r: (r["sample"] - r["engine"]) * r["thin"],
}


def measure(settings: Any, method: str, thin: int | None, computed: bool) -> Result:
    """Time the engine and `pm.sample` in turn, for one method; a thinning of None is computed."""
    import pymc as pm
    from common.regression import (
        build_model,
        engine_chain,
        given_settings,
        make_problem,
        make_step,
    )  # fmt: skip

    import pymc_sgmcmc

    problem = make_problem(settings.rows, settings.features, settings.dtype)
    batch = None if computed else settings.batch
    given = {} if computed else given_settings(problem, method, batch)
    model = build_model(problem, batch)
    step = make_step(model, method, batch, thin=thin, **given)
    thin = step.thin
    chain = engine_chain(step, problem.mode, step.step_size)
    nothing = make_idle_step(step, model)
    draws = settings.draws

    def sample(step: Any, draws: int, run: Callable = pm.sample) -> None:
        run(
            model=model,
            step=step,
            draws=draws,
            tune=0,
            chains=1,
            cores=1,
            random_seed=1,
            initvals={"coefficients": problem.mode},
            compute_convergence_checks=False,
            progressbar=settings.progressbar,
            quiet=not settings.progressbar,
        )

    run = pymc_sgmcmc.sample if settings.whole else pm.sample
    # The same calls for each: what they all need at first, PyMC's own compiling, is done before.
    calls = {
        "engine": lambda _: chain(1, draws * thin),
        "sample": lambda _: sample(step, draws, run),
        "sample_few": lambda _: sample(step, FEW_DRAWS, run),
        "idle": lambda _: sample(nothing, draws),
        "idle_few": lambda _: sample(nothing, FEW_DRAWS),
    }
    times = in_turn(calls, settings.rounds, settings.clock)
    seconds = {name: several[0] for name, several in times.items()}
    more = draws - FEW_DRAWS
    marginal = (seconds["sample"] - seconds["sample_few"]) / (more * thin) * 1e6
    return {
        "method": method,
        "settings": "computed" if computed else "given",
        "thin": thin,
        "engine": seconds["engine"] / (draws * thin) * 1e6,
        "sample": marginal,
        "total": seconds["sample"] / (draws * thin) * 1e6,
        "fixed": seconds["sample_few"] - FEW_DRAWS * thin * marginal * 1e-6,
        "idle": (seconds["idle"] - seconds["idle_few"]) / more * 1e6,
    }


def make_idle_step(other: Any, model: Any) -> Any:
    """Step method that always returns the same point and the statistics of another one."""
    from pymc.step_methods.compound import BlockedStep

    position, statistics = other.step(model.initial_point())

    class IdleStep(BlockedStep):
        name = "idle"
        stats_dtypes_shapes = other.stats_dtypes_shapes
        _progressbar_config = staticmethod(other._progressbar_config)
        _make_progressbar_update_functions = staticmethod(other._make_progressbar_update_functions)

        def __init__(self, **_: Any) -> None:
            self.vars = other.vars
            self.tune = False

        def step(self, point: dict) -> tuple[dict, list]:
            return {**point, **position}, statistics

        def setup_chain(self, *_: Any) -> None:
            """Nothing to set up."""

    return IdleStep(model=model)


def results(settings: Any) -> Iterator[Result]:
    """Given settings by method and thinning, then computed ones."""
    cases = [(method, thin, False) for method in METHODS for thin in settings.thin]
    for method, thin, computed in [*cases, ("sgld-cv", 1, True), ("sgld-cv", None, True)]:
        say(f"{method}, {thin or 'computed'} transitions a draw, {computed=}")
        yield measure(settings, method, thin, computed)


def verdicts(found: list[Result]) -> Iterator[Verdict]:
    """Ratios with given settings."""
    for r in found:
        if r["thin"] == LIMIT_THIN and r["settings"] == "given":
            yield Verdict(f"{r['method']}, thin {r['thin']}", r["sample"] / r["engine"], LIMIT, "×")


TITLE = "µs of {clock} time a transition, N = {rows}, p = {features}, n = {batch} if given, {dtype}"
TABLES = [Table(TITLE, COLUMNS)]

if __name__ == "__main__":
    sys.exit(run(__doc__, results, TABLES, OPTIONS, verdicts))
