"""Time of an SGLD transition of a position of thousands of coordinates, beside one by hand.

Examples
--------
::

    python tests/benchmarks/many_coordinates.py
    python tests/benchmarks/many_coordinates.py --groups 1000 --batch 100 --rounds 9

``README.md`` beside this file says how to read the figures.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from common.machine import restrict_to_one_core
from common.program import make_parser, print_table, print_verdict, say, write_results

LIMIT = 2.0
BLOCK_ELEMENTS = 200_000
"""Transitions x coordinates of one call, as in the package."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=200_000, help="rows of the data, N")
    parser.add_argument("--groups", type=int, nargs="+", default=[1000, 5000], help="d")
    parser.add_argument("--batch", type=int, nargs="+", default=[100], help="minibatch size, n")
    parser.add_argument("--transitions", type=int, default=4_000)
    parser.add_argument("--rounds", type=int, default=7, help="times each is timed, in turn")
    return parser.parse_args(arguments)


@cache
def by_hand() -> Callable[..., None]:
    """Compile the transitions of this one model, with the noise drawn inside of the loop."""
    import numba
    import numpy as np

    @numba.njit(fastmath=True)
    def run(group, outcome, step_size, batch, generator, position, positions, gradients):
        half_step, scale, weight = step_size / 2, math.sqrt(step_size), len(group) / batch
        gradient = np.empty_like(position)
        for k in range(len(positions)):
            first = generator.integers(0, len(group) - batch)
            for j in range(len(position)):
                gradient[j] = -position[j]
            for i in range(first, first + batch):
                fitted = 1 / (1 + math.exp(-position[group[i]]))
                gradient[group[i]] += weight * (outcome[i] - fitted)
            for j in range(len(position)):
                noise = generator.standard_normal()
                position[j] += half_step * gradient[j] + scale * noise
                positions[k, j] = position[j]
                gradients[k, j] = gradient[j]

    return run


def measure(settings: argparse.Namespace, groups: int, batch: int) -> dict[str, Any]:
    """Time both in turn."""
    # NumPy reads the number of threads when it loads.
    import numpy as np
    import pymc as pm
    from common.model import engine_chain
    from common.timing import best, timed

    from pymc_sgmcmc import SGLD

    rng = np.random.default_rng(1)
    group = rng.integers(0, groups, settings.rows)
    outcome = (rng.random(settings.rows) < 1 / (1 + np.exp(-rng.normal(size=groups)[group]))) + 0.0
    step_size = 0.1 * groups / settings.rows
    with pm.Model() as model:
        effect = pm.Normal("effect", shape=groups)
        pm.Bernoulli("y", logit_p=effect[group], observed=outcome)
    step = SGLD(model=model, batch_size=batch, step_size=step_size, preconditioner="identity")
    length = min(settings.transitions, BLOCK_ELEMENTS // groups)
    chain = engine_chain(step, np.zeros(groups), step_size, length, keep=False)

    def hand(seed: int, transitions: int) -> None:
        generator, position = np.random.default_rng(seed), np.zeros(groups)
        for _ in range(0, transitions, length):
            positions, gradients = np.empty((2, length, groups))
            by_hand()(group, outcome, step_size, batch, generator, position, positions, gradients)

    def noise(seed: int, transitions: int) -> None:
        generator = np.random.default_rng(seed)
        for _ in range(0, transitions, length):
            generator.standard_normal((length, groups))

    contenders = {"ours": chain, "by hand": hand, "noise alone": noise}
    times: dict[str, list] = {name: [] for name in contenders}
    for contender in contenders.values():
        contender(0, settings.transitions)
    for number in range(settings.rounds):
        for name, contender in contenders.items():
            times[name].append(timed(contender, number, settings.transitions)[1])
    taken = {name: 1e6 * best(times[name], "cpu") / settings.transitions for name in contenders}
    return {
        "groups": groups,
        "batch": batch,
        **taken,
        "ratio": taken["ours"] / taken["by hand"],
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; 1 where a figure is over its limit."""
    settings = parse_arguments(arguments)
    core = restrict_to_one_core(settings.core)
    results = []
    for groups, batch in itertools.product(settings.groups, settings.batch):
        say(f"d = {groups}, n = {batch}")
        results.append(measure(settings, groups, batch))
        write_results(settings.output, "many_coordinates", settings, core, results)
    print_table(
        f"µs of processor time a transition, N = {settings.rows}",
        ["d", "n", "ours", "by hand", "noise alone", "×"],
        [list(result.values()) for result in results],
    )
    reached = [print_verdict(f"d = {r['groups']}", r["ratio"], LIMIT, "×") for r in results]
    return 0 if all(reached) else 1


if __name__ == "__main__":
    sys.exit(main())
