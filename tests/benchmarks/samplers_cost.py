"""Time of a transition of each sampler and gradient estimator, and of its running moments.

Examples
--------
::

    python tests/benchmarks/samplers_cost.py --features 50 --batch 1000 --samplers SGLD OSGFS
    python tests/benchmarks/samplers_cost.py --gradients plain cv svrg saga --samplers SGLD
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from common import DTYPES
from common.clocks import in_turn
from common.runner import Result, Table, Verdict, run, say

SAMPLERS = ("SGLD", "SGHMC", "SGNHT", "PSGLD", "OSGFS", "HAMCMC")
LIMIT = 1.10
"""Of a transition with the running moments of all transitions, over that without, where a draw
takes as many transitions as it does by default: with one, handing out draws is most of the time."""
OPTIONS = {
    "rows": (200_000, "rows of the data, N"),
    "features": ((10,), "coefficients, p"),
    "batch": ((500,), "minibatch sizes, n"),
    "dtype": ("float64", DTYPES),
    "samplers": (SAMPLERS, SAMPLERS),
    "gradients": (("plain", "cv"), ("plain", "cv", "svrg", "saga")),
    "mode": ("NUMBA", "PyTensor mode of the transitions"),
    "transitions": (10_000,),
    "thin": (20, "transitions a draw"),
    "rounds": (5, "times each is timed, in turn"),
    "clock": ("wall", ("wall", "cpu")),
}


def chain_of(step: Any, draws: int, moments: bool, number: int) -> None:
    """Draw without PyMC around the step method, with its moments or without."""
    import numpy as np

    every = step.chain.adaptations
    *others, last = every
    if not moments:
        step.chain.adaptations, step._moments = tuple(others), None
    # No tuning draws: adaptations that act after tuning count, as they do in a long run.
    step.setup_chain(np.random.default_rng(1), 0, draws)
    layout = step.posterior.layout
    point = {name: np.zeros(shape) for name, shape in zip(layout.names, layout.shapes, strict=True)}
    for _ in range(draws):
        point, _ = step.step(point)
    step.chain.adaptations, step._moments = every, last


def results(settings: Any) -> Iterator[Result]:
    """All samplers in turn on each problem."""
    import warnings

    from common.regression import build_model, make_problem

    import pymc_sgmcmc

    draws = max(1, settings.transitions // settings.thin)
    for features, batch in itertools.product(settings.features, settings.batch):
        model = build_model(make_problem(settings.rows, features, settings.dtype), batch)
        calls = {}
        for sampler, gradient in itertools.product(settings.samplers, settings.gradients):
            say(f"p = {features}, n = {batch}: {sampler}, {gradient}")
            given = {"thin": settings.thin, "compile_kwargs": {"mode": settings.mode}}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                step = getattr(pymc_sgmcmc, sampler)(model=model, gradient=gradient, **given)
            for moments in (True, False):
                calls[sampler, gradient, moments] = partial(chain_of, step, draws, moments)
        times = in_turn(calls, settings.rounds, settings.clock)
        best = {key: 1e6 * each[0] / draws / settings.thin for key, each in times.items()}
        for sampler, gradient, moments in calls:
            if moments:
                yield {
                    "features": features,
                    "batch": batch,
                    "sampler": sampler,
                    "gradient": gradient,
                    "microseconds": best[sampler, gradient, True],
                    "without": best[sampler, gradient, False],
                }


def tables(found: list[Result]) -> list[Table]:
    """Ratios to the first sampler and estimator of each problem."""
    reference = {(r["features"], r["batch"]): r["microseconds"] for r in reversed(found)}
    columns = {
        "p": "features",
        "n": "batch",
        "sampler": "sampler",
        "gradient": "gradient",
        "µs": "microseconds",
        "× the first": lambda r: r["microseconds"] / reference[r["features"], r["batch"]],
        "without moments": "without",
    }
    return [Table("µs of {clock} time a transition, N = {rows}, {dtype}", columns)]


def verdicts(found: list[Result]) -> Iterator[Verdict]:
    """What the moments cost."""
    for r in found:
        what = f"p = {r['features']}, n = {r['batch']}, {r['sampler']}, {r['gradient']}: moments"
        yield Verdict(what, r["microseconds"] / r["without"], LIMIT, "×")


if __name__ == "__main__":
    sys.exit(run(__doc__, results, tables, OPTIONS, verdicts))
