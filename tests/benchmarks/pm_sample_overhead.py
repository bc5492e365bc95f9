"""Time of a transition in `pm.sample`, beside the engine alone, on one core.

Examples
--------
::

    python tests/benchmarks/pm_sample_overhead.py --thin 20 --rounds 7
    python tests/benchmarks/pm_sample_overhead.py --thin 1 5 20 100 --output results.json
    python tests/benchmarks/pm_sample_overhead.py --thin 1 --whole

``README.md`` beside this file says how to read the figures.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from common import METHODS
from common.machine import restrict_to_one_core
from common.program import (
    DTYPES,
    make_parser,
    print_table,
    print_verdict,
    say,
    write_results,
)

COLUMNS = (
    "method", "settings", "thin", "engine", "sample", "×", "draw", "whole call", "×", "fixed s",
    "PyMC/draw", "all/draw",
)  # fmt: skip
FEW_DRAWS = 200
LIMIT = 1.5
LIMIT_THIN = 20


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=200_000, help="rows of the data, N")
    parser.add_argument("--features", type=int, default=10, help="coefficients, p")
    parser.add_argument("--batch", type=int, default=500, help="minibatch size, n")
    parser.add_argument("--dtype", default="float64", choices=DTYPES)
    parser.add_argument(
        "--thin", type=int, nargs="+", default=[20], help="transitions a draw, with given settings"
    )
    parser.add_argument("--draws", type=int, default=5_000, help=f"more than {FEW_DRAWS}")
    parser.add_argument("--rounds", type=int, default=5, help="times each is timed, in turn")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--progressbar", action="store_true", help="with PyMC's progress bar")
    parser.add_argument("--whole", action="store_true", help="`sample` in place of `pm.sample`")
    parsed = parser.parse_args(arguments)
    if parsed.draws <= FEW_DRAWS:
        parser.error(f"--draws should be more than {FEW_DRAWS} but got {parsed.draws}")
    return parsed


def measure(
    settings: argparse.Namespace, method: str, thin: int | None, computed: bool
) -> dict[str, Any]:
    """Time the engine and `pm.sample` in turn, for one method; a thinning of None is computed."""
    import pymc as pm
    from common.model import build_model, engine_chain, make_step
    from common.problem import make_problem, step_size
    from common.timing import best, timed

    import pymc_sgmcmc

    problem = make_problem(settings.rows, settings.features, settings.dtype)
    model = build_model(problem, settings.batch, "ordinary" if computed else "minibatch")
    if computed:
        step = make_step(model, method, None, thin=thin)
    else:
        h = step_size(problem, settings.batch)
        given = {} if method == "sgld" else {"center": problem.mode}
        given |= {"step_size": h, "preconditioner": "identity"}
        step = make_step(model, method, settings.batch, thin=thin, **given)
    thin = step.thin
    chain = engine_chain(step, problem.mode, step.step_size)
    nothing = make_idle_step(step, model)

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

    draws = settings.draws
    run = pymc_sgmcmc.sample if settings.whole else pm.sample
    # The same calls for each: what they all need at first, PyMC's own compiling, is done before.
    calls = {
        "engine": lambda: chain(1, draws * thin),
        "sample": lambda: sample(step, draws, run),
        "sample_few": lambda: sample(step, FEW_DRAWS, run),
        "idle": lambda: sample(nothing, draws),
        "idle_few": lambda: sample(nothing, FEW_DRAWS),
    }
    for name in ("engine", "sample_few", "idle_few"):
        calls[name]()
    times: dict[str, list] = {name: [] for name in calls}
    for _ in range(settings.rounds):
        for name, call in calls.items():
            times[name].append(timed(call)[1])
    seconds = {name: best(several, settings.clock) for name, several in times.items()}
    more = draws - FEW_DRAWS
    engine = seconds["engine"] / (draws * thin) * 1e6
    marginal = (seconds["sample"] - seconds["sample_few"]) / (more * thin) * 1e6
    total = seconds["sample"] / (draws * thin) * 1e6
    return {
        "method": method,
        "settings": "computed" if computed else "given",
        "thin": thin,
        "engine_us": engine,
        "sample_us": marginal,
        "sample_ratio": marginal / engine,
        "sample_us_a_draw": marginal * thin,
        "whole_call_us": total,
        "whole_call_ratio": total / engine,
        "fixed_seconds": seconds["sample_few"] - FEW_DRAWS * thin * marginal * 1e-6,
        "idle_us_a_draw": (seconds["idle"] - seconds["idle_few"]) / more * 1e6,
        "ours_us_a_draw": (marginal - engine) * thin,
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


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; 1 where a figure is over its limit."""
    settings = parse_arguments(arguments)
    core = restrict_to_one_core(settings.core)
    results = []
    cases: list[tuple[str, int | None, bool]] = [
        *((method, thin, False) for method in METHODS for thin in settings.thin),
        ("sgld-cv", 1, True),
        ("sgld-cv", None, True),
    ]
    for method, thin, computed in cases:
        say(f"{method}, {thin or 'computed'} transitions a draw, {computed=}")
        results.append(measure(settings, method, thin, computed))
        write_results(settings.output, "pm_sample_overhead", settings, core, results)
    print_table(
        f"µs of {settings.clock} time a transition, N = {settings.rows}, p = {settings.features}, "
        f"n = {settings.batch} if given, {settings.dtype}, {settings.draws} draws",
        COLUMNS,
        [list(result.values()) for result in results],
    )
    reached = [
        print_verdict(f"{r['method']}, thin {r['thin']}:", r["sample_ratio"], LIMIT, "×")
        for r in results
        if r["thin"] == LIMIT_THIN and r["settings"] == "given"
    ]
    return 0 if all(reached) else 1


if __name__ == "__main__":
    sys.exit(main())
