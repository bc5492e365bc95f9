"""Time of an SGLD transition of a position of thousands of coordinates, beside one by hand.

Examples
--------
::

    python tests/benchmarks/many_coordinates.py
    python tests/benchmarks/many_coordinates.py --models groups --coordinates 1000 --batch 100

``README.md`` beside this file says how to read the figures.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from common.machine import restrict_to_one_core
from common.markdown import write_tables
from common.program import make_parser, print_table, print_verdict, say, write_results

LIMIT = 2.0
BLOCK_ELEMENTS = 200_000
"""Transitions x coordinates of one call, as in the package."""

RANK = 10
PRIOR_SD = 0.3
"""Of the factors: an expected rating is then of the size of its noise."""

COLUMNS = ["model", "d", "n", "touched", "`SGLD`, µs", "by hand, µs", "×", "noise alone, µs"]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=200_000, help="rows of the data, N")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--coordinates", type=int, nargs="+", default=[1000, 5000, 50_000])
    parser.add_argument("--batch", type=int, nargs="+", default=[100, 1000], help="n")
    parser.add_argument("--transitions", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=9, help="times each is timed, in turn")
    parser.add_argument("--markdown", type=Path, default=None, help="table of the documentation")
    return parser.parse_args(arguments)


# --- Models --------------------------------------------------------------------------------------


def groups(rows: int, coordinates: int) -> tuple[Any, tuple[Any, ...]]:
    """Logistic random intercepts: a row touches one coordinate."""
    import numpy as np
    import pymc as pm

    rng = np.random.default_rng(1)
    group = rng.integers(0, coordinates, rows)
    truth = rng.normal(size=coordinates)
    outcome = (rng.random(rows) < 1 / (1 + np.exp(-truth[group]))).astype(float)
    with pm.Model() as model:
        effect = pm.Normal("effect", shape=coordinates)
        pm.Bernoulli("y", logit_p=effect[group], observed=outcome)
    return model, (group, outcome)


def factors(rows: int, coordinates: int) -> tuple[Any, tuple[Any, ...]]:
    """Matrix factorisation: a row touches the factors of a user and those of an item."""
    import numpy as np
    import pymc as pm

    rng = np.random.default_rng(1)
    users = 3 * coordinates // (5 * RANK)
    items = coordinates // RANK - users
    user, item = rng.integers(0, users, rows), rng.integers(0, items, rows)
    rating = rng.normal(size=rows)
    with pm.Model() as model:
        U = pm.Normal("U", 0, PRIOR_SD, shape=(users, RANK))
        V = pm.Normal("V", 0, PRIOR_SD, shape=(items, RANK))
        pm.Normal("rating", (U[user] * V[item]).sum(-1), 1.0, observed=rating)
    # By hand the position is one matrix, the factors of the items below those of the users.
    return model, (user, users + item, rating)


MODELS = {"groups": groups, "factors": factors}
TOUCHED_BY_A_ROW = {"groups": 1, "factors": 2 * RANK}


@cache
def by_hand(model: str) -> Callable[..., None]:
    """Compile the transitions of one model, with the noise drawn inside of the loop."""
    import numba
    import numpy as np

    @numba.njit(fastmath=True, inline="always")
    def finish(position, gradient, step_size, generator, positions, gradients):
        half_step, scale = step_size / 2, math.sqrt(step_size)
        for j in range(len(position)):
            noise = generator.standard_normal()
            position[j] += half_step * gradient[j] + scale * noise
            positions[j] = position[j]
            gradients[j] = gradient[j]

    @numba.njit(fastmath=True)
    def of_groups(data, step_size, batch, generator, position, positions, gradients):
        group, outcome = data
        weight = len(group) / batch
        gradient = np.empty_like(position)
        for k in range(len(positions)):
            first = generator.integers(0, len(group) - batch)
            for j in range(len(position)):
                gradient[j] = -position[j]
            for i in range(first, first + batch):
                fitted = 1 / (1 + math.exp(-position[group[i]]))
                gradient[group[i]] += weight * (outcome[i] - fitted)
            finish(position, gradient, step_size, generator, positions[k], gradients[k])

    @numba.njit(fastmath=True)
    def of_factors(data, step_size, batch, generator, position, positions, gradients):
        user, item, rating = data
        weight, precision = len(user) / batch, PRIOR_SD**-2
        gradient = np.empty_like(position)
        for k in range(len(positions)):
            first = generator.integers(0, len(user) - batch)
            for j in range(len(position)):
                gradient[j] = -precision * position[j]
            for i in range(first, first + batch):
                of_user, of_item, error = RANK * user[i], RANK * item[i], rating[i]
                for j in range(RANK):
                    error -= position[of_user + j] * position[of_item + j]
                for j in range(RANK):
                    gradient[of_user + j] += weight * error * position[of_item + j]
                    gradient[of_item + j] += weight * error * position[of_user + j]
            finish(position, gradient, step_size, generator, positions[k], gradients[k])

    return {"groups": of_groups, "factors": of_factors}[model]


# --- Times ---------------------------------------------------------------------------------------


def measure(settings: argparse.Namespace, name: str, coordinates: int, batch: int) -> list[Any]:
    """Time both in turn, for a row of the table."""
    # NumPy reads the number of threads when it loads.
    import numpy as np
    from common.model import engine_chain
    from common.timing import best, timed

    from pymc_sgmcmc import SGLD

    model, data = MODELS[name](settings.rows, coordinates)
    # A single row, which counts N / n times, then moves what it touches by less than its distance.
    step_size = 0.5 * batch / settings.rows
    step = SGLD(model=model, batch_size=batch, step_size=step_size, preconditioner="identity")
    length = min(settings.transitions, BLOCK_ELEMENTS // coordinates)
    start = PRIOR_SD * np.random.default_rng(2).standard_normal(coordinates)
    chain = engine_chain(step, start, step_size, length, keep=False)
    run = by_hand(name)

    def hand(seed: int, transitions: int) -> None:
        generator, position = np.random.default_rng(seed), start.copy()
        for _ in range(0, transitions, length):
            positions, gradients = np.empty((2, length, coordinates))
            run(data, step_size, batch, generator, position, positions, gradients)

    def noise(seed: int, transitions: int) -> None:
        generator = np.random.default_rng(seed)
        for _ in range(0, transitions, length):
            generator.standard_normal((length, coordinates))

    contenders = {"ours": chain, "by hand": hand, "noise alone": noise}
    times: dict[str, list] = {contender: [] for contender in contenders}
    for contender in contenders.values():
        contender(0, settings.transitions)
    for number in range(settings.rounds):
        for contender, chain_of in contenders.items():
            times[contender].append(timed(chain_of, number, settings.transitions)[1])
    ours, hand_written, noise_alone = (
        1e6 * best(times[contender], "cpu") / settings.transitions for contender in contenders
    )
    touched = min(coordinates, batch * TOUCHED_BY_A_ROW[name])
    ratio = ours / hand_written
    return [name, coordinates, batch, touched, ours, hand_written, ratio, noise_alone]


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; 1 where a figure is over its limit."""
    settings = parse_arguments(arguments)
    core = restrict_to_one_core(settings.core)
    rows = []
    for case in itertools.product(settings.models, settings.coordinates, settings.batch):
        say("{}, d = {}, n = {}".format(*case))
        rows.append(measure(settings, *case))
        results = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
        write_results(settings.output, "many_coordinates", settings, core, results)
    print_table(f"Processor time of a transition, N = {settings.rows}", COLUMNS, rows)
    if settings.markdown is not None:
        write_tables(settings.markdown, [(COLUMNS, rows)], "tests/benchmarks/many_coordinates.py")
    reached = [
        print_verdict(f"{name}, d = {d}, n = {n}", ratio, LIMIT, "×")
        for name, d, n, _, _, _, ratio, _ in rows
    ]
    return 0 if all(reached) else 1


if __name__ == "__main__":
    sys.exit(main())
