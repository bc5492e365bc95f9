"""Time that the running moments of all transitions add to a transition, on one core.

Examples
--------
::

    python tests/benchmarks/moments_cost.py
    python tests/benchmarks/moments_cost.py --batch 27 --thin 1 15 --rounds 7

``README.md`` beside this file says how to read the figures.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from typing import Any

from common.machine import restrict_to_one_core
from common.program import DTYPES, make_parser, print_table, print_verdict, say, write_results

GRADIENTS = ("plain", "cv", "saga")
LIMIT = 1.10


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=200_000, help="rows of the data, N")
    parser.add_argument("--features", type=int, nargs="+", default=[10, 50, 200], help="p")
    parser.add_argument("--batch", type=int, default=500, help="minibatch size, n")
    parser.add_argument("--dtype", default="float64", choices=DTYPES)
    parser.add_argument("--thin", type=int, nargs="+", default=[1, 20], help="transitions a draw")
    parser.add_argument("--gradients", nargs="+", default=list(GRADIENTS), choices=GRADIENTS)
    parser.add_argument("--transitions", type=int, default=40_000)
    parser.add_argument("--rounds", type=int, default=5, help="times each is timed, in turn")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    return parser.parse_args(arguments)


def measure(
    settings: argparse.Namespace, features: int, gradient: str, thin: int
) -> dict[str, Any]:
    """Time the steps of a chain with the moments and without, in turn."""
    import numpy as np
    from common.model import build_model
    from common.problem import make_problem, step_size
    from common.timing import best, timed

    from pymc_sgmcmc import SGLD

    problem = make_problem(settings.rows, features, settings.dtype)
    step = SGLD(
        model=build_model(problem, settings.batch, "ordinary"),
        gradient=gradient,
        batch_size=settings.batch,
        step_size=step_size(problem, settings.batch),
        preconditioner="identity",
        thin=thin,
    )
    *others, moments = step.chain.adaptations
    draws = settings.transitions // thin

    def chain(with_moments: bool) -> None:
        step.chain.adaptations = (*others, moments) if with_moments else tuple(others)
        step._moments = moments if with_moments else None
        step.setup_chain(np.random.default_rng(1), 0, draws)
        point = {"coefficients": problem.mode.astype(settings.dtype)}
        for _ in range(draws):
            point, _ = step.step(point)

    chain(True)
    times: dict[bool, list] = {True: [], False: []}
    for _ in range(settings.rounds):
        for kind, several in times.items():
            several.append(timed(chain, kind)[1])
    on, off = (best(times[kind], settings.clock) / settings.transitions for kind in (True, False))
    return {
        "features": features,
        "gradient": gradient,
        "thin": thin,
        "with_us": on * 1e6,
        "without_us": off * 1e6,
        "ratio": on / off,
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; 1 where a figure is over its limit."""
    settings = parse_arguments(arguments)
    core = restrict_to_one_core(settings.core)
    results = []
    for case in itertools.product(settings.features, settings.gradients, settings.thin):
        say("p = {}, {}, {} transitions a draw".format(*case))
        results.append(measure(settings, *case))
        write_results(settings.output, "moments_cost", settings, core, results)
    print_table(
        f"µs of {settings.clock} time a transition, N = {settings.rows}, "
        f"n = {settings.batch}, {settings.dtype}",
        ["p", "gradient", "thin", "with moments", "without", "×"],
        [list(result.values()) for result in results],
    )
    reached = [
        print_verdict(
            f"p = {r['features']}, {r['gradient']}, thin {r['thin']}", r["ratio"], LIMIT, "×"
        )
        for r in results
    ]
    return 0 if all(reached) else 1


if __name__ == "__main__":
    sys.exit(main())
