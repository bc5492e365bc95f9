"""Time of a transition of each sampler and gradient estimator, relative to SGLD, on one core.

Examples
--------
::

    python tests/benchmarks/samplers_cost.py
    python tests/benchmarks/samplers_cost.py --features 50 --batch 1000 --samplers SGLD OSGFS
    python tests/benchmarks/samplers_cost.py --gradients plain cv svrg saga --samplers SGLD

``README.md`` beside this file says how to read the figures.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from common.machine import restrict_to_one_core
from common.program import DTYPES, make_parser, print_table, say, write_results

SAMPLERS = ("SGLD", "SGHMC", "SGNHT", "PSGLD", "OSGFS", "HAMCMC")
GRADIENTS = ("plain", "cv", "svrg", "saga")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=200_000, help="rows of the data, N")
    parser.add_argument("--features", type=int, nargs="+", default=[10], help="coefficients, p")
    parser.add_argument("--batch", type=int, nargs="+", default=[500], help="minibatch sizes, n")
    parser.add_argument("--dtype", nargs="+", default=["float64"], choices=DTYPES)
    parser.add_argument("--samplers", nargs="+", default=list(SAMPLERS), metavar="NAME")
    parser.add_argument("--gradients", nargs="+", default=["plain", "cv"], choices=GRADIENTS)
    parser.add_argument("--mode", default="NUMBA", help="PyTensor mode of the transitions")
    parser.add_argument("--transitions", type=int, default=10_000)
    parser.add_argument("--thin", type=int, default=20, help="transitions a draw")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    return parser.parse_args(arguments)


def chain_of(step: Any, draws: int) -> None:
    """Draw as `pm.sample` does, without PyMC around the step method."""
    import numpy as np

    # No tuning draws: adaptations that act after tuning count, as they do in a long run.
    step.setup_chain(np.random.default_rng(1), 0, draws)
    point = {name: np.zeros(shape) for name, shape in _shapes(step)}
    for _ in range(draws):
        point, _ = step.step(point)


def _shapes(step: Any) -> Any:
    return zip(step.posterior.layout.names, step.posterior.layout.shapes, strict=True)


def measure(settings: argparse.Namespace, features: int, batch: int, dtype: str) -> list[dict]:
    """Time all samplers in turn on one problem."""
    import warnings

    from common.model import build_model
    from common.problem import make_problem
    from common.timing import best, timed

    import pymc_sgmcmc

    problem = make_problem(settings.rows, features, dtype)
    model = build_model(problem, batch)
    draws = max(1, settings.transitions // settings.thin)
    steps = {}
    for sampler in settings.samplers:
        for gradient in settings.gradients:
            say(f"p = {features}, n = {batch}, {dtype}: {sampler}, {gradient}")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                steps[sampler, gradient] = getattr(pymc_sgmcmc, sampler)(
                    model=model,
                    gradient=gradient,
                    thin=settings.thin,
                    compile_kwargs={"mode": settings.mode},
                )
            chain_of(steps[sampler, gradient], max(1, draws // 20))
    times: dict[tuple[str, str], list] = {key: [] for key in steps}
    for _ in range(settings.rounds):
        for key, step in steps.items():
            times[key].append(timed(chain_of, step, draws)[1])
    transitions = draws * settings.thin
    return [
        {
            "features": features,
            "batch": batch,
            "dtype": dtype,
            "sampler": sampler,
            "gradient": gradient,
            "microseconds": best(times[sampler, gradient], settings.clock) / transitions * 1e6,
        }
        for sampler, gradient in steps
    ]


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark."""
    settings = parse_arguments(arguments)
    core = restrict_to_one_core(settings.core)
    results: list[dict[str, Any]] = []
    for dtype in settings.dtype:
        for features in settings.features:
            for batch in settings.batch:
                results += measure(settings, features, batch, dtype)
                write_results(settings.output, "samplers_cost", settings, core, results)
    reference = {
        (one["features"], one["batch"], one["dtype"]): one["microseconds"]
        for one in results
        if one["sampler"] == "SGLD" and one["gradient"] == settings.gradients[0]
    }
    print_table(
        f"µs of {settings.clock} time a transition, × that of SGLD, {settings.gradients[0]}",
        ["p", "n", "dtype", "sampler", "gradient", "µs", "×"],
        [
            [
                one["features"],
                one["batch"],
                one["dtype"],
                one["sampler"],
                one["gradient"],
                one["microseconds"],
                one["microseconds"]
                / reference.get((one["features"], one["batch"], one["dtype"]), float("nan")),
            ]
            for one in results
        ],
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
